/* Asking the broker: a connection for each question, over an abstract UNIX socket, so that chroot, mount namespaces
 * and another user do not matter. The messages' other side is src/protocol.rs. */
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
#define VERSION 1
#define TOKEN_BYTES 16
#define NAME_BYTES 64
/* An answer that takes longer is none: the process goes on as without us. */
#define PATIENCE_MS 5000

enum { ASK_LISTEN = 1, ASK_CLAIM = 2, ASK_TAKEN = 3, ASK_READER = 4, ASK_OPENS = 5 };
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
	/* A daemon may have put anything in its place, a client's connection too. */
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

/* Waits until a connection can be read. Everything here goes by syscall(): no call of ours is seen by ourselves, and
 * none is a point where a thread can be cancelled. */
static bool readable(int connection, int64_t until)
{
	for (;;) {
		int64_t left = until - now_ms();
		if (left <= 0)
			return false;
		struct pollfd wanted = { .fd = connection, .events = POLLIN };
		struct timespec limit = { .tv_sec = left / 1000, .tv_nsec = left % 1000 * 1000000 };
		long ready = syscall(SYS_ppoll, &wanted, 1, &limit, NULL, 0);
		if (ready > 0)
			return true;
		if (ready < 0 && errno != EINTR)
			return false;
	}
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
	if (done < 0) {
		syscall(SYS_close, connection);
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

/* What the broker says, -1 if nothing or nonsense; a descriptor that came with it is the caller's. */
static int receive_reply(int connection, int64_t until, int *given)
{
	struct reply reply;
	struct iovec part = { .iov_base = &reply, .iov_len = sizeof(reply) };
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control;
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control.bytes) };
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
	if (got != (long)sizeof(reply) || reply.magic != MAGIC || reply.version != VERSION) {
		if (*given >= 0)
			syscall(SYS_close, *given);
		*given = -1;
		return -1;
	}
	return reply.what;
}

static const char no_answer[] =
	"wakeone: the process that splits this server's listener does not answer; this worker shares the listener as without it\n";

static bool tell(int what, int fd, unsigned how)
{
	int connection = broker_connect();
	if (connection < 0) {
		split_say_once(no_answer);
		return false;
	}
	int given;
	bool told = send_request(connection, what, fd, how, true) &&
		    receive_reply(connection, now_ms() + PATIENCE_MS, &given) == SAY_DONE;
	if (told && given >= 0)
		syscall(SYS_close, given);
	syscall(SYS_close, connection);
	return told;
}

bool split_tell_opens(int fd)
{
	return tell(ASK_OPENS, fd, 0);
}

bool split_tell_listen(int fd, bool own)
{
	return tell(ASK_LISTEN, fd, own);
}

int split_ask_queue(int fd)
{
	int connection = broker_connect();
	if (connection < 0)
		return -1;
	int queue = -1;
	int answer = send_request(connection, ASK_READER, fd, 0, true) ? receive_reply(connection, now_ms() + PATIENCE_MS, &queue) : -1;
	if (answer != SAY_QUEUE && queue >= 0) {
		syscall(SYS_close, queue);
		queue = -1;
	}
	syscall(SYS_close, connection);
	return queue;
}

static bool same_file(int a, const struct stat *b)
{
	struct stat now;
	return fstat(a, &now) == 0 && now.st_dev == b->st_dev && now.st_ino == b->st_ino;
}

/* Puts a queue of our own in the listener's place: under its number, with its flags. */
static bool replace(int fd, int queue, const struct stat *was)
{
	int status = fcntl(fd, F_GETFL);
	int flags = fcntl(fd, F_GETFD);
	if (status < 0 || flags < 0 || !same_file(fd, was))
		return false;
	/* Whoever is told by a signal is told about one socket. */
	if (status & O_ASYNC)
		return false;
	if (fcntl(queue, F_SETFL, status) < 0)
		return false;
	long done;
	do {
		done = syscall(SYS_dup3, queue, fd, flags & FD_CLOEXEC ? O_CLOEXEC : 0);
	} while (done < 0 && (errno == EINTR || errno == EBUSY));
	return done == fd;
}

void split_claim(int fd, enum how how)
{
	struct stat was;
	if (fstat(fd, &was) != 0)
		return;
	int connection = broker_connect();
	if (connection < 0) {
		split_say_once(no_answer);
		return;
	}
	int64_t until = now_ms() + PATIENCE_MS;
	int queue = -1;
	int answer = send_request(connection, ASK_CLAIM, fd, how, true) ? receive_reply(connection, until, &queue) : -1;
	if (answer < 0)
		split_say_once(no_answer);
	if (answer == SAY_QUEUE && queue >= 0 && replace(fd, queue, &was)) {
		int nothing = -1;
		/* Only then may it be chosen: the broker closes its copy and has it steered. */
		if (send_request(connection, ASK_TAKEN, fd, how, false))
			receive_reply(connection, until, &nothing);
		if (nothing >= 0)
			syscall(SYS_close, nothing);
	}
	if (queue >= 0)
		syscall(SYS_close, queue);
	syscall(SYS_close, connection);
}
