/* trouble SCENE: failures around a question to the broker must not show. Each call ends as it would without the
 * library. No descriptor stays open, and the listener is the shared one or a queue of this process's own.
 * trouble.rs chooses the broker for each scene. The program ends with 1, and a line, at the first thing that is
 * wrong. */
#define _GNU_SOURCE
#undef _FORTIFY_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define EXPECT(fact)                                                                        \
	do {                                                                                \
		if (!(fact)) {                                                              \
			printf("line %d: not so: %s (%s)\n", __LINE__, #fact, strerror(errno)); \
			fflush(stdout);                                                     \
			_exit(1);                                                           \
		}                                                                           \
	} while (0)

static int listener, port;
static ino_t shared;

static ino_t inode_of(int fd)
{
	struct stat about;
	return fstat(fd, &about) ? 0 : about.st_ino;
}

static bool has_own(void)
{
	return inode_of(listener) != shared;
}

static int open_fds(void)
{
	int count = 0;
	DIR *folder = opendir("/proc/self/fd");
	EXPECT(folder);
	while (readdir(folder))
		count++;
	closedir(folder);
	return count - 3; /* two names for folders, and its own */
}

/* Lets as many more descriptors be opened. The numbers in use have no gaps. */
static void leave_room_for(int more)
{
	int fd = dup(listener);
	struct rlimit limit;
	getrlimit(RLIMIT_NOFILE, &limit);
	limit.rlim_cur = more < 0 ? limit.rlim_max : (rlim_t)(fd + more);
	EXPECT(setrlimit(RLIMIT_NOFILE, &limit) == 0);
	if (fd >= 0)
		close(fd);
}

static int reuseport(int fd)
{
	int value = -1;
	socklen_t size = sizeof(value);
	getsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &value, &size);
	return value;
}

static int bound(int type)
{
	struct sockaddr_in any = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t length = sizeof(any);
	int fd = socket(AF_INET, type, 0);
	EXPECT(bind(fd, (struct sockaddr *)&any, sizeof(any)) == 0);
	EXPECT(getsockname(fd, (struct sockaddr *)&any, &length) == 0);
	port = ntohs(any.sin_port);
	return fd;
}

static void open_listener(void)
{
	listener = bound(SOCK_STREAM | SOCK_NONBLOCK);
	EXPECT(listen(listener, 64) == 0);
	shared = inode_of(listener);
}

static int client(int type)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	int fd = socket(AF_INET, type, 0);
	if (connect(fd, (struct sockaddr *)&address, sizeof(address)))
		_exit(3);
	return fd;
}

static void blocking(bool on)
{
	int flags = fcntl(listener, F_GETFL);
	fcntl(listener, F_SETFL, on ? flags & ~O_NONBLOCK : flags | O_NONBLOCK);
}

static bool nothing_to_accept(void)
{
	errno = 0;
	return accept(listener, NULL, NULL) == -1 && errno == EAGAIN;
}

/* Runs in a process that did not open the listener, and waits for it. */
static void in_worker(void (*work)(void))
{
	pid_t child = fork();
	if (child == 0) {
		work();
		_exit(0);
	}
	int status;
	EXPECT(waitpid(child, &status, 0) == child);
	if (status != 0)
		_exit(1);
}

/* -- no descriptor is free: for the connection to the broker, for the queue, for the listener meanwhile -- */

static int room;

static void full_accept(void)
{
	int before = open_fds();
	leave_room_for(room);
	/* The kernel takes the connection's descriptor before it looks for a connection. */
	EXPECT(accept(listener, NULL, NULL) == -1 && errno == (room == 0 ? EMFILE : EAGAIN));
	EXPECT(has_own() == (room == 3));
	leave_room_for(-1);
	EXPECT(open_fds() == before);
	EXPECT(nothing_to_accept() && has_own());
	EXPECT(open_fds() == before);
}

static void full_poll(void)
{
	struct pollfd one = { .fd = listener, .events = POLLIN };
	int before = open_fds();
	leave_room_for(room);
	EXPECT(poll(&one, 1, 0) == 0);
	EXPECT(has_own() == (room == 3));
	leave_room_for(-1);
	/* accept uses the socket that was polled. */
	EXPECT(nothing_to_accept() && has_own() == (room == 3));
	EXPECT(poll(&one, 1, 0) == 0 && has_own());
	EXPECT(open_fds() == before);
}

static void *wait_for_one(void *unused)
{
	(void)unused;
	int got = accept(listener, NULL, NULL);
	EXPECT(got >= 0);
	close(got);
	return NULL;
}

/* A thread that waits on the shared listener is not left behind there. */
static void full_with_threads(void)
{
	pthread_t thread;
	struct pollfd one = { .fd = listener, .events = POLLIN };
	blocking(true);
	leave_room_for(1);
	EXPECT(pthread_create(&thread, NULL, wait_for_one, NULL) == 0);
	usleep(200000);
	leave_room_for(-1);
	EXPECT(poll(&one, 1, 0) == 0 && !has_own());
	close(client(SOCK_STREAM));
	pthread_join(thread, NULL);
	EXPECT(poll(&one, 1, 0) == 0 && has_own());
}

static void full(void)
{
	open_listener();
	for (room = 0; room <= 3; room++) {
		in_worker(full_accept);
		in_worker(full_poll);
	}
	in_worker(full_with_threads);
}

static void full_listen(void)
{
	listener = bound(SOCK_STREAM | SOCK_NONBLOCK);
	shared = inode_of(listener);
	leave_room_for(0);
	errno = ENOANO;
	EXPECT(listen(listener, 8) == 0 && errno == ENOANO);
	EXPECT(reuseport(listener) == 0);
	leave_room_for(-1);
	EXPECT(nothing_to_accept() && !has_own());
}

/* -- signals that arrive while the broker lets us wait -- */

static volatile sig_atomic_t handled;
static int in_handler;

static void on_signal(int number)
{
	(void)number;
	int before = errno;
	handled++;
	if (in_handler == 'c')
		client(SOCK_STREAM | SOCK_CLOEXEC);
	if (in_handler == 'f') {
		pid_t child = fork();
		if (child == 0) {
			struct pollfd one = { .fd = listener, .events = POLLIN };
			EXPECT(poll(&one, 1, 0) == 0 && has_own());
			_exit(0);
		}
		int status = 1;
		EXPECT(waitpid(child, &status, 0) == child && status == 0);
	}
	errno = before;
}

/* Sends one signal, soon. */
static void soon(int flags)
{
	struct sigaction action = { .sa_handler = on_signal, .sa_flags = flags };
	sigaction(SIGALRM, &action, NULL);
	handled = 0;
	ualarm(100000, 0);
}

static void accept_is_interrupted(void)
{
	int before = open_fds();
	blocking(true);
	soon(0);
	EXPECT(accept(listener, NULL, NULL) == -1 && errno == EINTR && handled == 1);
	blocking(false);
	EXPECT(nothing_to_accept() && has_own());
	EXPECT(open_fds() == before);
}

static void accept_goes_on(void)
{
	blocking(true);
	in_handler = 'c';
	soon(SA_RESTART);
	EXPECT(accept(listener, NULL, NULL) >= 0 && handled == 1);
}

static void accept_with_a_limit_does_not(void)
{
	struct timeval limit = { .tv_sec = 50 };
	setsockopt(listener, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
	blocking(true);
	soon(SA_RESTART);
	EXPECT(accept(listener, NULL, NULL) == -1 && errno == EINTR && handled == 1);
	limit.tv_sec = 0;
	setsockopt(listener, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
	blocking(false);
}

static void poll_is_interrupted(void)
{
	struct pollfd one = { .fd = listener, .events = POLLIN };
	soon(SA_RESTART);
	EXPECT(poll(&one, 1, 50000) == -1 && errno == EINTR && handled == 1);
	fd_set set;
	FD_ZERO(&set);
	FD_SET(listener, &set);
	soon(SA_RESTART);
	EXPECT(select(listener + 1, &set, NULL, NULL, NULL) == -1 && errno == EINTR && handled == 1);
	EXPECT(FD_ISSET(listener, &set));
}

static void what_is_ready_is_told(void)
{
	struct pollfd one = { .fd = listener, .events = POLLIN };
	client(SOCK_STREAM);
	soon(0);
	EXPECT(poll(&one, 1, 50000) == 1 && handled == 1);
	EXPECT(accept(listener, NULL, NULL) >= 0);
}

static void a_set_of_its_own(void)
{
	struct pollfd one = { .fd = listener, .events = POLLIN };
	sigset_t alarm_only, none;
	sigemptyset(&none);
	sigemptyset(&alarm_only);
	sigaddset(&alarm_only, SIGALRM);
	sigprocmask(SIG_BLOCK, &alarm_only, NULL);
	soon(0);
	/* The signal is pending until ppoll, and arrives in it. */
	EXPECT(ppoll(&one, 1, NULL, &none) == -1 && errno == EINTR && handled == 1);
	sigset_t now;
	sigprocmask(SIG_SETMASK, NULL, &now);
	EXPECT(sigismember(&now, SIGALRM) && !sigismember(&now, SIGTERM));
}

static void what_is_ignored_does_nothing(void)
{
	pid_t child = fork();
	if (child == 0) {
		usleep(100000);
		_exit(0);
	}
	EXPECT(nothing_to_accept() && has_own());
	EXPECT(waitpid(child, NULL, 0) == child);
}

static void a_handler_forks(void)
{
	in_handler = 'f';
	blocking(true);
	soon(0);
	EXPECT(accept(listener, NULL, NULL) == -1 && errno == EINTR && handled == 1);
	blocking(false);
	EXPECT(nothing_to_accept() && has_own());
}

static void accept_for_ever(void)
{
	blocking(true);
	accept(listener, NULL, NULL);
}

/* A fatal signal ends the process, whatever the broker does. */
static void it_can_be_ended(void)
{
	struct timespec from, to;
	clock_gettime(CLOCK_MONOTONIC, &from);
	pid_t child = fork();
	if (child == 0) {
		accept_for_ever();
		_exit(0);
	}
	usleep(50000);
	kill(child, SIGTERM);
	int status;
	EXPECT(waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);
	clock_gettime(CLOCK_MONOTONIC, &to);
	/* The broker would have answered after 400 ms. */
	EXPECT((to.tv_sec - from.tv_sec) * 1000 + (to.tv_nsec - from.tv_nsec) / 1000000 < 400);
}

static void signals(void)
{
	void (*const all[])(void) = { accept_is_interrupted, accept_goes_on, accept_with_a_limit_does_not, poll_is_interrupted,
				      what_is_ready_is_told, a_set_of_its_own, what_is_ignored_does_nothing, a_handler_forks, it_can_be_ended };
	for (unsigned i = 0; i < sizeof(all) / sizeof(*all); i++) {
		/* A new listener for each, or connections of another scene would be found. */
		open_listener();
		in_worker(all[i]);
		close(listener);
	}
}

/* -- a fork in the middle of another thread's question -- */

static void *ask(void *unused)
{
	(void)unused;
	EXPECT(nothing_to_accept() && has_own());
	return NULL;
}

static void fork_meanwhile(void)
{
	int before = open_fds();
	pthread_t thread;
	EXPECT(pthread_create(&thread, NULL, ask, NULL) == 0);
	usleep(150000);
	pid_t child = fork();
	if (child == 0) {
		EXPECT(open_fds() == before);
		ino_t inherited = inode_of(listener);
		EXPECT(nothing_to_accept() && inode_of(listener) != inherited);
		EXPECT(open_fds() == before);
		_exit(0);
	}
	int status = 1;
	EXPECT(waitpid(child, &status, 0) == child && status == 0);
	pthread_join(thread, NULL);
	EXPECT(open_fds() == before);
}

static void threads_fork(void)
{
	open_listener();
	in_worker(fork_meanwhile);
}

/* -- a broker that hangs up -- */

static void shares(void)
{
	int before = open_fds();
	EXPECT(nothing_to_accept() && !has_own());
	struct pollfd one = { .fd = listener, .events = POLLIN };
	close(client(SOCK_STREAM));
	EXPECT(poll(&one, 1, 5000) == 1);
	int got = accept(listener, NULL, NULL);
	EXPECT(got >= 0);
	close(got);
	EXPECT(open_fds() == before && fcntl(listener, F_GETFL) & O_NONBLOCK);
}

static void hangs_up(void)
{
	open_listener();
	in_worker(shares);
	in_worker(shares);
}

static void hangs_up_at_listen(void)
{
	hangs_up();
	EXPECT(reuseport(listener) == 0);
}

/* -- servers that close every descriptor that they do not know -- */

static void keeps_one(void)
{
	EXPECT(dup2(listener, 3) == 3);
	listener = 3;
	closefrom(4);
	EXPECT(nothing_to_accept() && has_own());
	EXPECT(close_range(4, ~0u, 0) == 0);
	EXPECT(open_fds() == 4 && has_own() && nothing_to_accept());
	/* Again with a child of its own. */
	shared = inode_of(listener);
	pid_t child = fork();
	if (child == 0) {
		close_range(4, ~0u, 0);
		EXPECT(nothing_to_accept() && has_own());
		_exit(0);
	}
	int status = 1;
	EXPECT(waitpid(child, &status, 0) == child && status == 0);
}

static void closes_all(void)
{
	closefrom(3);
	EXPECT(open_fds() == 3);
	EXPECT(accept(listener, NULL, NULL) == -1 && errno == EBADF);
	open_listener();
	EXPECT(listener == 3);
	in_worker(keeps_one);
}

static void daemons(void)
{
	open_listener();
	in_worker(closes_all);
	EXPECT(close_range(3, ~0u, 0) == 0);
	open_listener();
	in_worker(keeps_one);
}

/* -- a child of vfork closes its own descriptors, not its parent's queues -- */

static int datagrams;
static _Atomic int received;

static void *receive(void *unused)
{
	char byte;
	(void)unused;
	while (recv(datagrams, &byte, 1, 0) == 1)
		received++;
	return NULL;
}

static void vfork_child(void)
{
	enum { CLIENTS = 64 };
	datagrams = bound(SOCK_DGRAM);
	int clients[CLIENTS];
	for (int i = 0; i < CLIENTS; i++)
		clients[i] = client(SOCK_DGRAM);
	pthread_t threads[3];
	for (int i = 0; i < 3; i++)
		EXPECT(pthread_create(&threads[i], NULL, receive, NULL) == 0);
	usleep(200000);
	int before = open_fds();
	pid_t child = vfork();
	if (child == 0) {
		close(datagrams);
		closefrom(3);
		close_range(3, ~0u, 0);
		_exit(0);
	}
	EXPECT(waitpid(child, NULL, 0) == child);
	for (int i = 0; i < CLIENTS; i++)
		EXPECT(send(clients[i], "x", 1, 0) == 1);
	for (int i = 0; i < 500 && received < CLIENTS; i++)
		usleep(10000);
	EXPECT(received == CLIENTS);
	EXPECT(open_fds() == before);
}

/* -- workers that begin to listen at the same time on a socket that their parent bound -- */

static void listens_and_accepts(void)
{
	EXPECT(listen(listener, 64) == 0);
	EXPECT(reuseport(listener) == 1);
	EXPECT(nothing_to_accept());
	/* The process that listened first is the owner for this broker, and keeps the listener. */
	printf("%s\n", has_own() ? "own" : "shared");
	fflush(stdout);
}

static void listen_race(void)
{
	listener = bound(SOCK_STREAM | SOCK_NONBLOCK);
	shared = inode_of(listener);
	pid_t children[3];
	for (int i = 0; i < 3; i++) {
		children[i] = fork();
		if (children[i] == 0) {
			usleep(i * 60000);
			listens_and_accepts();
			_exit(0);
		}
	}
	for (int i = 0; i < 3; i++) {
		int status = 1;
		EXPECT(waitpid(children[i], &status, 0) == children[i] && status == 0);
	}
}

/* -- another user that has taken the broker's name -- */

static void takes_the_name(int ready)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	const char *told = getenv("WAKEONE_SPLIT");
	size_t length = strcspn(told, ":");
	memcpy(address.sun_path + 1, told, length);
	int own = socket(AF_UNIX, SOCK_SEQPACKET, 0);
	EXPECT(setgid(65534) == 0 && setuid(65534) == 0);
	EXPECT(bind(own, (struct sockaddr *)&address, offsetof(struct sockaddr_un, sun_path) + 1 + length) == 0);
	EXPECT(listen(own, 8) == 0 && write(ready, "x", 1) == 1);
	for (;;) {
		char bytes[64];
		int caller = accept(own, NULL, NULL);
		EXPECT(recv(caller, bytes, sizeof(bytes), 0) <= 0);
		close(caller);
	}
}

static void squatted(void)
{
	int ready[2];
	char byte;
	EXPECT(pipe(ready) == 0);
	pid_t other = fork();
	if (other == 0)
		takes_the_name(ready[1]);
	EXPECT(read(ready[0], &byte, 1) == 1);
	open_listener();
	EXPECT(reuseport(listener) == 0);
	in_worker(shares);
	int status;
	EXPECT(waitpid(other, &status, WNOHANG) == 0);
	kill(other, SIGKILL);
	EXPECT(waitpid(other, &status, 0) == other);
}

int main(int count, char **arguments)
{
	static const struct {
		const char *name;
		void (*play)(void);
	} scenes[] = {
		{ "full", full }, { "full-listen", full_listen }, { "signals", signals }, { "threads-fork", threads_fork },
		{ "hangs-up", hangs_up }, { "hangs-up-at-listen", hangs_up_at_listen }, { "daemons", daemons },
		{ "vfork", vfork_child }, { "listen-race", listen_race }, { "squatted", squatted },
	};
	for (unsigned i = 0; count > 1 && i < sizeof(scenes) / sizeof(*scenes); i++)
		if (!strcmp(scenes[i].name, arguments[1])) {
			scenes[i].play();
			return 0;
		}
	return 2;
}
