/* Asks the broker: one connection for each question, over an abstract UNIX socket, so that chroot, mount
 * namespaces and another user do not matter. The other side of the protocol is src/protocol.rs. */
#define _GNU_SOURCE
#include "split.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/un.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define MAGIC 0x6b61572eu
#define VERSION 2
#define TOKEN_BYTES 16
#define NAME_BYTES 64
/* An answer that takes longer counts as none: the process goes on as without us. */
/* The first question waits until the kernel has checked a program: seconds where CPUs are slow or shared. */
#define PATIENCE_MS 20000
/* Signals are blocked while we wait for an answer, but a pending one ends the wait after this time. */
#define SIGNAL_PATIENCE_MS 50

enum { ASK_CLAIM = 1, ASK_TAKEN = 2, ASK_READER = 3, ASK_GIVEN_BACK = 4, ASK_LEFT = 5 };
enum { SAY_LEAVE = 0, SAY_QUEUE = 1, SAY_DONE = 2 };

struct request {
	uint32_t magic;
	uint16_t version;
	uint16_t what;
	uint8_t token[TOKEN_BYTES];
	int32_t fd;
	uint32_t how;
};

struct reply {
	uint32_t magic;
	uint16_t version;
	uint16_t what;
};

static char name[NAME_BYTES];
static size_t name_length;
static uint8_t token[TOKEN_BYTES];

static int digit(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	if (c >= 'a' && c <= 'f')
		return c - 'a' + 10;
	return -1;
}

/* WAKEONE_SPLIT=NAME:TOKEN, kept in memory: many servers clear their workers' environment. */
bool split_find_broker(void)
{
	const char *told = secure_getenv("WAKEONE_SPLIT");
	const char *colon = told ? strchr(told, ':') : NULL;
	if (!colon || colon == told || (size_t)(colon - told) >= sizeof(name))
		return false;
	for (int i = 0; i < TOKEN_BYTES; i++) {
		int high = digit(colon[1 + 2 * i]);
		int low = high < 0 ? -1 : digit(colon[2 + 2 * i]);
		if (low < 0)
			return false;
		token[i] = high << 4 | low;
	}
	if (colon[1 + 2 * TOKEN_BYTES] != '\0')
		return false;
	name_length = colon - told;
	memcpy(name, told, name_length);
	return true;
}

static struct stat first_stderr;
static bool has_stderr;

void split_remember_stderr(void)
{
	has_stderr = fstat(STDERR_FILENO, &first_stderr) == 0;
}

void split_say_once(const char *sentence)
{
	static atomic_flag said = ATOMIC_FLAG_INIT;
	struct stat now;
	/* A daemon may have put anything in its place, even a client's connection. */
	if (!has_stderr || fstat(STDERR_FILENO, &now) != 0 || now.st_dev != first_stderr.st_dev || now.st_ino != first_stderr.st_ino)
		return;
	if (!atomic_flag_test_and_set(&said)) {
		long written = syscall(SYS_write, STDERR_FILENO, sentence, strlen(sentence));
		(void)written;
	}
}

static int64_t now_ms(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

/* Waits until a connection can be read. Everything here uses syscall(): the library does not intercept its own
 * calls, and none of them is a cancellation point. Under the lock. False, and errno EINTR: a signal is pending
 * that must not wait. */
static bool readable(int connection, int64_t until)
{
	for (;;) {
		int64_t left = until - now_ms();
		if (left <= 0) {
			errno = ETIMEDOUT;
			return false;
		}
		if (left > SIGNAL_PATIENCE_MS)
			left = SIGNAL_PATIENCE_MS;
		struct pollfd wanted = { .fd = connection, .events = POLLIN };
		struct timespec limit = { .tv_sec = left / 1000, .tv_nsec = left % 1000 * 1000000 };
		long ready = syscall(SYS_ppoll, &wanted, 1, &limit, NULL, 0);
		if (ready > 0)
			return true;
		if (ready < 0 && errno != EINTR)
			return false;
		if (split_signal_waits()) {
			errno = EINTR;
			return false;
		}
	}
}

/* Whether the error may go away later: a resource may be free again, or the signal handled. */
static bool passes(int error)
{
	return error == EMFILE || error == ENFILE || error == ENOMEM || error == ENOBUFS || error == EINTR;
}

/* If the broker has ended, another process may take its name. Such a process gets no socket that it could not
 * have anyway. */
static bool is_trusted(int connection)
{
	struct ucred peer = { .uid = -1 };
	socklen_t size = sizeof(peer);
	return syscall(SYS_getsockopt, connection, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 &&
	       (peer.uid == 0 || peer.uid == (uid_t)syscall(SYS_geteuid));
}

static int broker_connect(void)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	memcpy(address.sun_path + 1, name, name_length);
	socklen_t length = offsetof(struct sockaddr_un, sun_path) + 1 + name_length;
	int connection = syscall(SYS_socket, AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (connection < 0)
		return -1;
	struct timeval limit = { .tv_sec = PATIENCE_MS / 1000 };
	syscall(SYS_setsockopt, connection, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
	long done;
	do {
		done = syscall(SYS_connect, connection, &address, length);
	} while (done < 0 && errno == EINTR);
	if (done == 0 && !is_trusted(connection)) {
		done = -1;
		errno = ECONNREFUSED;
	}
	if (done < 0) {
		int error = errno;
		syscall(SYS_close, connection);
		errno = error;
		return -1;
	}
	return connection;
}

/* Sends a message, with a descriptor if there is one. */
static bool send_request(int connection, int what, int fd, unsigned how, bool with_fd)
{
	struct request request = { .magic = MAGIC, .version = VERSION, .what = what, .fd = fd, .how = how };
	memcpy(request.token, token, TOKEN_BYTES);
	struct iovec part = { .iov_base = &request, .iov_len = sizeof(request) };
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control = { 0 };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1 };
	if (with_fd) {
		message.msg_control = &control;
		message.msg_controllen = sizeof(control.bytes);
		struct cmsghdr *head = CMSG_FIRSTHDR(&message);
		head->cmsg_level = SOL_SOCKET;
		head->cmsg_type = SCM_RIGHTS;
		head->cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(head), &fd, sizeof(int));
	}
	long sent;
	do {
		sent = syscall(SYS_sendmsg, connection, &message, MSG_NOSIGNAL);
	} while (sent < 0 && errno == EINTR);
	return sent == (long)sizeof(request);
}

/* Returns the broker's answer, or -1 if there is none or it is malformed. The caller owns a descriptor that came
 * with it. */
static int receive_reply(int connection, int64_t until, int *given)
{
	struct reply reply;
	struct iovec part = { .iov_base = &reply, .iov_len = sizeof(reply) };
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control;
	/* Room for one descriptor: the kernel closes any other. */
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = CMSG_LEN(sizeof(int)) };
	*given = -1;
	if (!readable(connection, until))
		return -1;
	long got;
	do {
		got = syscall(SYS_recvmsg, connection, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
	} while (got < 0 && errno == EINTR);
	if (got >= 0) {
		struct cmsghdr *head = CMSG_FIRSTHDR(&message);
		if (head && head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS && head->cmsg_len == CMSG_LEN(sizeof(int)))
			memcpy(given, CMSG_DATA(head), sizeof(int));
	}
	/* A broker that hangs up without an answer has ended. */
	if (got >= 0)
		errno = EPIPE;
	if (got != (long)sizeof(reply) || reply.magic != MAGIC || reply.version != VERSION) {
		if (*given >= 0)
			syscall(SYS_close, *given);
		*given = -1;
		return -1;
	}
	return reply.what;
}

static const char no_answer[] =
	"wakeone: the process that splits this server's UDP socket does not answer; this worker shares the socket as without it\n";

/* Moves a descriptor that came with an answer to this number or above, where programs seldom look. Returns -1, and
 * closes it, if the answer grants none. */
static int move_up(int answer, int given, int from)
{
	if (given < 0)
		return -1;
	int high = answer == SAY_QUEUE ? fcntl(given, F_DUPFD_CLOEXEC, from) : -1;
	if (answer == SAY_QUEUE && high < 0)
		return given;
	syscall(SYS_close, given);
	return high;
}

int split_ask_queue(int fd, int from)
{
	int connection = broker_connect();
	if (connection < 0)
		return -1;
	int64_t until = now_ms() + PATIENCE_MS;
	int queue = -1, nothing = -1;
	int answer = send_request(connection, ASK_READER, fd, 0, true) ? receive_reply(connection, until, &queue) : -1;
	bool again = answer < 0 && errno == EINTR;
	queue = move_up(answer, queue, from);
	/* The queue is chosen once the broker knows its number. */
	if (queue >= 0 && send_request(connection, ASK_TAKEN, queue, 0, false))
		receive_reply(connection, until, &nothing);
	if (nothing >= 0)
		syscall(SYS_close, nothing);
	syscall(SYS_close, connection);
	return again ? -2 : queue;
}

/* Under the lock, like the others here. */
bool split_tell_given_back(int queue)
{
	int connection = broker_connect();
	if (connection < 0)
		return false;
	int nothing = -1;
	bool told = send_request(connection, ASK_GIVEN_BACK, queue, 0, true) &&
		    receive_reply(connection, now_ms() + PATIENCE_MS, &nothing) == SAY_DONE;
	if (nothing >= 0)
		syscall(SYS_close, nothing);
	syscall(SYS_close, connection);
	return told;
}

bool split_ask_left(int fd, int from, int *queue)
{
	*queue = -1;
	int connection = broker_connect();
	if (connection < 0)
		return false;
	int answer = send_request(connection, ASK_LEFT, fd, 0, true) ? receive_reply(connection, now_ms() + PATIENCE_MS, queue) : -1;
	*queue = move_up(answer, *queue, from);
	syscall(SYS_close, connection);
	return answer == SAY_QUEUE || answer == SAY_DONE;
}

static bool same_file(int a, const struct stat *b)
{
	struct stat now;
	return fstat(a, &now) == 0 && now.st_dev == b->st_dev && now.st_ino == b->st_ino;
}

/* Puts one socket in another's place: under its number. */
static bool put(int socket, int fd, int flags)
{
	long done;
	do {
		done = syscall(SYS_dup3, socket, fd, flags & FD_CLOEXEC ? O_CLOEXEC : 0);
	} while (done < 0 && (errno == EINTR || errno == EBUSY));
	return done == fd;
}

/* Puts our own queue in the shared socket's place, with its flags, and tells the broker. Only then does the broker
 * have it chosen, and closes its copy. If the broker does not answer, the queue would never be chosen, so the shared
 * socket is put back. False: no descriptor is free to hold it meanwhile. */
static bool take(int connection, int64_t until, int fd, int queue, const struct stat *was)
{
	int status = fcntl(fd, F_GETFL);
	int flags = fcntl(fd, F_GETFD);
	/* With O_ASYNC, the process gets signals for this socket only, so it keeps it. */
	if (status < 0 || flags < 0 || !same_file(fd, was) || status & O_ASYNC || fcntl(queue, F_SETFL, status) < 0)
		return true;
	int shared = syscall(SYS_fcntl, fd, F_DUPFD_CLOEXEC, 0);
	if (shared < 0)
		return !passes(errno);
	if (put(queue, fd, flags)) {
		int nothing = -1;
		if (!send_request(connection, ASK_TAKEN, fd, 0, false) || receive_reply(connection, until, &nothing) != SAY_DONE)
			put(shared, fd, flags);
		if (nothing >= 0)
			syscall(SYS_close, nothing);
	}
	syscall(SYS_close, shared);
	return true;
}

bool split_claim(int fd, enum how how)
{
	struct stat was;
	if (fstat(fd, &was) != 0)
		return true;
	int connection = broker_connect();
	if (connection < 0) {
		bool now = !passes(errno);
		if (now)
			split_say_once(no_answer);
		return now;
	}
	int64_t until = now_ms() + PATIENCE_MS;
	int queue = -1;
	int answer = send_request(connection, ASK_CLAIM, fd, how, true) ? receive_reply(connection, until, &queue) : -1;
	bool asked = answer >= 0 || !passes(errno);
	if (answer < 0 && asked)
		split_say_once(no_answer);
	/* The queue came without its descriptor: no number was free for it. */
	if (answer == SAY_QUEUE)
		asked = queue >= 0 && take(connection, until, fd, queue, &was);
	if (queue >= 0)
		syscall(SYS_close, queue);
	syscall(SYS_close, connection);
	return asked;
}
