/* trouble SCENE: failures around a question to the broker must not show. Each call ends as it would without the
 * library. No descriptor stays open, and the UDP socket is the shared one or a queue of this process's own.
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

static int server, port;
static ino_t shared;

static ino_t inode_of(int fd)
{
	struct stat about;
	return fstat(fd, &about) ? 0 : about.st_ino;
}

static bool has_own(void)
{
	return inode_of(server) != shared;
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
	int fd = dup(server);
	struct rlimit limit;
	getrlimit(RLIMIT_NOFILE, &limit);
	limit.rlim_cur = more < 0 ? limit.rlim_max : (rlim_t)(fd + more);
	EXPECT(setrlimit(RLIMIT_NOFILE, &limit) == 0);
	if (fd >= 0)
		close(fd);
}

static int bound(void)
{
	struct sockaddr_in any = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t length = sizeof(any);
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK, 0);
	EXPECT(bind(fd, (struct sockaddr *)&any, sizeof(any)) == 0);
	EXPECT(getsockname(fd, (struct sockaddr *)&any, &length) == 0);
	port = ntohs(any.sin_port);
	return fd;
}

static void open_server(void)
{
	server = bound();
	shared = inode_of(server);
}

static int client(void)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	int fd = socket(AF_INET, SOCK_DGRAM, 0);
	if (connect(fd, (struct sockaddr *)&address, sizeof(address)))
		_exit(3);
	return fd;
}

static void blocking(bool on)
{
	int flags = fcntl(server, F_GETFL);
	fcntl(server, F_SETFL, on ? flags & ~O_NONBLOCK : flags | O_NONBLOCK);
}

static bool nothing_came(void)
{
	char byte;
	errno = 0;
	return recv(server, &byte, 1, 0) == -1 && errno == EAGAIN;
}

/* Runs in a process that did not open the server, and waits for it. */
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

/* -- no descriptor is free: for the connection to the broker, for the queue, for the server meanwhile -- */

static int room;

static void full_receive(void)
{
	int before = open_fds();
	leave_room_for(room);
	EXPECT(nothing_came() && has_own() == (room == 3));
	leave_room_for(-1);
	EXPECT(open_fds() == before);
	EXPECT(nothing_came() && has_own());
	EXPECT(open_fds() == before);
}

static void full_poll(void)
{
	struct pollfd one = { .fd = server, .events = POLLIN };
	int before = open_fds();
	leave_room_for(room);
	EXPECT(poll(&one, 1, 0) == 0);
	EXPECT(has_own() == (room == 3));
	leave_room_for(-1);
	EXPECT(poll(&one, 1, 0) == 0 && has_own());
	EXPECT(nothing_came() && open_fds() == before);
}

static void full(void)
{
	open_server();
	for (room = 0; room <= 3; room++) {
		in_worker(full_receive);
		in_worker(full_poll);
	}
}

/* -- signals that arrive while the broker lets us wait -- */

static volatile sig_atomic_t handled;
static bool forks_in_handler;

static void on_signal(int number)
{
	(void)number;
	int before = errno;
	handled++;
	if (forks_in_handler) {
		pid_t child = fork();
		if (child == 0) {
			struct pollfd one = { .fd = server, .events = POLLIN };
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

static void a_set_of_its_own(void)
{
	struct pollfd one = { .fd = server, .events = POLLIN };
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
	EXPECT(nothing_came() && has_own());
	EXPECT(waitpid(child, NULL, 0) == child);
}

static void a_handler_forks(void)
{
	forks_in_handler = true;
	soon(0);
	EXPECT(nothing_came() && handled == 1);
	forks_in_handler = false;
	EXPECT(nothing_came() && has_own());
}

static void receive_for_ever(void)
{
	char byte;
	blocking(true);
	EXPECT(recv(server, &byte, 1, 0) == 1);
}

/* A fatal signal ends the process, whatever the broker does. */
static void it_can_be_ended(void)
{
	struct timespec from, to;
	clock_gettime(CLOCK_MONOTONIC, &from);
	pid_t child = fork();
	if (child == 0) {
		receive_for_ever();
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
	void (*const all[])(void) = { a_set_of_its_own, what_is_ignored_does_nothing, a_handler_forks, it_can_be_ended };
	for (unsigned i = 0; i < sizeof(all) / sizeof(*all); i++) {
		open_server();
		in_worker(all[i]);
		close(server);
	}
}

/* -- a fork in the middle of another thread's question -- */

static void *ask(void *unused)
{
	(void)unused;
	EXPECT(nothing_came() && has_own());
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
		ino_t inherited = inode_of(server);
		EXPECT(nothing_came() && inode_of(server) != inherited);
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
	open_server();
	in_worker(fork_meanwhile);
}

/* -- a broker that hangs up -- */

static void shares(void)
{
	int before = open_fds();
	char byte;
	EXPECT(nothing_came() && !has_own());
	struct pollfd one = { .fd = server, .events = POLLIN };
	int other = client();
	EXPECT(send(other, "x", 1, 0) == 1);
	EXPECT(poll(&one, 1, 5000) == 1);
	EXPECT(recv(server, &byte, 1, 0) == 1);
	close(other);
	EXPECT(open_fds() == before && fcntl(server, F_GETFL) & O_NONBLOCK);
}

static void hangs_up(void)
{
	open_server();
	in_worker(shares);
	in_worker(shares);
}

/* -- servers that close every descriptor that they do not know -- */

static void keeps_one(void)
{
	closefrom(4);
	EXPECT(nothing_came() && has_own());
	EXPECT(close_range(4, ~0u, 0) == 0);
	EXPECT(open_fds() == 4 && has_own() && nothing_came());
	/* Again with a child of its own. */
	shared = inode_of(server);
	pid_t child = fork();
	if (child == 0) {
		close_range(4, ~0u, 0);
		EXPECT(nothing_came() && has_own());
		_exit(0);
	}
	int status = 1;
	EXPECT(waitpid(child, &status, 0) == child && status == 0);
}

static void closes_all(void)
{
	closefrom(3);
	EXPECT(open_fds() == 3);
	EXPECT(recv(server, NULL, 0, 0) == -1 && errno == EBADF);
	open_server();
	EXPECT(server == 3);
	in_worker(keeps_one);
}

static void daemons(void)
{
	open_server();
	in_worker(closes_all);
	EXPECT(close_range(3, ~0u, 0) == 0);
	open_server();
	EXPECT(server == 3);
	in_worker(keeps_one);
}

/* -- a child of vfork closes its own descriptors, not its parent's queues -- */

static _Atomic int received;

static void *receive(void *unused)
{
	char byte;
	(void)unused;
	while (recv(server, &byte, 1, 0) == 1)
		received++;
	return NULL;
}

static void vfork_child(void)
{
	enum { CLIENTS = 64 };
	open_server();
	blocking(true);
	int clients[CLIENTS];
	for (int i = 0; i < CLIENTS; i++)
		clients[i] = client();
	pthread_t threads[3];
	for (int i = 0; i < 3; i++)
		EXPECT(pthread_create(&threads[i], NULL, receive, NULL) == 0);
	usleep(200000);
	int before = open_fds();
	pid_t child = vfork();
	if (child == 0) {
		close(server);
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
	open_server();
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
		{ "full", full },	  { "signals", signals }, { "threads-fork", threads_fork }, { "hangs-up", hangs_up },
		{ "daemons", daemons }, { "vfork", vfork_child }, { "squatted", squatted },
	};
	for (unsigned i = 0; count > 1 && i < sizeof(scenes) / sizeof(*scenes); i++)
		if (!strcmp(scenes[i].name, arguments[1])) {
			scenes[i].play();
			return 0;
		}
	return 2;
}
