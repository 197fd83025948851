/* Makes the same calls in the same order and prints their results: the output must be the same with and without
 * the library. Ports are not printed, because the kernel chooses them. */
#define _GNU_SOURCE
#undef _FORTIFY_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *part = "";

static long told(const char *what, long result)
{
	int error = errno;
	printf("%s %s = %ld %s\n", part, what, result, result < 0 ? strerrorname_np(error) : "");
	errno = 0;
	return result;
}

#define TELL(call) told(#call, (errno = 0, (call)))
/* errno is not touched by what succeeds. */
#define TELL_KEEPS(call)                                               \
	do {                                                           \
		errno = ENOANO;                                        \
		long result_ = (call);                                 \
		int kept_ = errno == ENOANO;                           \
		printf("%s %s = %ld kept %d\n", part, #call, result_, kept_); \
	} while (0)

static struct sockaddr_in at(const char *host, int port)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(port) };
	inet_pton(AF_INET, host, &address.sin_addr);
	return address;
}

static int port_of(int fd)
{
	struct sockaddr_in6 address;
	socklen_t length = sizeof(address);
	if (getsockname(fd, (struct sockaddr *)&address, &length))
		return -1;
	return ntohs(address.sin6_port); /* at the same place in both families */
}

static int client(int port)
{
	struct sockaddr_in address = at("127.0.0.1", port);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (connect(fd, (struct sockaddr *)&address, sizeof(address)))
		perror("connect");
	return fd;
}

static void on_alarm(int number)
{
	(void)number;
}

static void binding(void)
{
	part = "bind";
	struct sockaddr_in any = at("127.0.0.1", 0), far = at("203.0.113.1", 0);
	struct sockaddr_in6 any6 = { .sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT };
	int a = TELL(socket(AF_INET, SOCK_STREAM, 0));
	TELL(bind(-1, (struct sockaddr *)&any, sizeof(any)));
	TELL(bind(0, (struct sockaddr *)&any, sizeof(any)));
	TELL(bind(a, (struct sockaddr *)&any, 3));
	TELL(bind(a, (struct sockaddr *)8, sizeof(any)));
	TELL(bind(a, NULL, sizeof(any)));
	TELL(bind(a, (struct sockaddr *)&far, sizeof(far)));
	TELL(bind(a, (struct sockaddr *)&any6, sizeof(any6)));
	TELL_KEEPS(bind(a, (struct sockaddr *)&any, sizeof(any)));
	TELL(bind(a, (struct sockaddr *)&any, sizeof(any)));
	TELL(port_of(a) > 0);
	int b = TELL(socket(AF_INET, SOCK_STREAM, 0));
	struct sockaddr_in same = at("127.0.0.1", port_of(a));
	TELL(bind(b, (struct sockaddr *)&same, sizeof(same)));
	TELL(listen(a, 5));
	TELL(bind(b, (struct sockaddr *)&same, sizeof(same)));
	int on = 1;
	setsockopt(b, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	TELL(bind(b, (struct sockaddr *)&same, sizeof(same)));
	int c = TELL(socket(AF_INET6, SOCK_STREAM, 0));
	TELL(bind(c, (struct sockaddr *)&any6, sizeof(any6)));
	TELL(bind(c, (struct sockaddr *)&any6, sizeof(any6)));
	TELL(listen(c, 5));
	int d = TELL(socket(AF_INET, SOCK_DGRAM, 0));
	TELL(bind(d, (struct sockaddr *)&any, sizeof(any)));
	TELL(listen(d, 5));
	TELL(close(a));
	TELL(close(b));
	TELL(close(c));
	TELL(close(d));
	TELL(close(d));
	TELL(close(-1));
	TELL(close(100000));
}

static void listening(void)
{
	part = "listen";
	TELL(listen(-1, 5));
	TELL(listen(0, 5));
	TELL(listen(100000, 5));
	int pipes[2];
	TELL(pipe(pipes));
	TELL(listen(pipes[0], 5));
	int unbound = TELL(socket(AF_INET, SOCK_STREAM, 0));
	TELL_KEEPS(listen(unbound, 5));
	TELL(port_of(unbound) > 0);
	TELL_KEEPS(listen(unbound, 6));
	TELL(shutdown(unbound, SHUT_RD));
	TELL(listen(unbound, 5));
	int local = TELL(socket(AF_UNIX, SOCK_STREAM, 0));
	struct sockaddr_un name = { .sun_family = AF_UNIX };
	TELL(bind(local, (struct sockaddr *)&name, sizeof(sa_family_t)));
	TELL(listen(local, 5));
	fcntl(local, F_SETFL, O_NONBLOCK);
	TELL(accept(local, NULL, NULL));
	struct pollfd both[] = { { .fd = local, .events = POLLIN }, { .fd = pipes[0], .events = POLLIN } };
	TELL(poll(both, 2, 0));
	TELL(accept(local, NULL, NULL));
	int own_group = TELL(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
	int on = 1;
	setsockopt(own_group, SOL_SOCKET, SO_REUSEPORT, &on, sizeof(on));
	TELL(listen(own_group, 5));
	TELL(accept(own_group, NULL, NULL));
	int connected = client(port_of(own_group));
	TELL(listen(connected, 5));
	int accepted = TELL(accept4(own_group, NULL, NULL, SOCK_CLOEXEC));
	TELL(listen(accepted, 5));
	TELL(accept(accepted, NULL, NULL));
	TELL(close(accepted));
	TELL(close(connected));
	TELL(close(own_group));
	TELL(close(local));
	TELL(close(unbound));
	TELL(close(pipes[0]));
	TELL(close(pipes[1]));
}

/* The calls that wait for connections, on a listener that another process opened, or this one. */
static void waiting(const char *name, int listener)
{
	part = name;
	int port = port_of(listener);
	int flags = fcntl(listener, F_GETFL);
	TELL(flags);
	TELL(fcntl(listener, F_GETFD));
	TELL(accept(-1, NULL, NULL));
	TELL(accept(0, NULL, NULL));
	TELL(accept(100000, NULL, NULL));
	TELL(accept4(listener, NULL, NULL, 0x40));
	TELL(accept(listener, NULL, NULL));
	TELL(fcntl(listener, F_GETFL) == flags);
	TELL(fcntl(listener, F_GETFD));

	int c = client(port);
	struct pollfd one = { .fd = listener, .events = POLLIN };
	TELL(poll(&one, 1, 1000));
	TELL(one.revents);
	struct sockaddr_in peer;
	socklen_t length = sizeof(peer);
	int s = TELL(accept(listener, (struct sockaddr *)&peer, &length));
	TELL(length);
	TELL(ntohs(peer.sin_port) == port_of(c));
	TELL(port_of(s) == port);
	TELL(fcntl(s, F_GETFD));
	TELL(fcntl(s, F_GETFL));
	TELL(write(c, "x", 1));
	char byte;
	TELL(read(s, &byte, 1));
	TELL(poll(&(struct pollfd){ .fd = s, .events = POLLIN }, 1, 0));
	TELL(close(s));
	TELL(close(c));

	c = client(port);
	length = sizeof(peer);
	TELL(poll(&one, 1, 1000));
	s = TELL(accept4(listener, (struct sockaddr *)&peer, &length, SOCK_NONBLOCK | SOCK_CLOEXEC));
	TELL(fcntl(s, F_GETFD));
	TELL(fcntl(s, F_GETFL));
	TELL(close(s));
	TELL(close(c));

	c = client(port);
	TELL(poll(&one, 1, 1000));
	TELL(accept(listener, (struct sockaddr *)8, &length));
	length = -1;
	TELL(close(c));
	TELL(accept(listener, (struct sockaddr *)&peer, &length));

	int set = TELL(epoll_create1(EPOLL_CLOEXEC));
	struct epoll_event event = { .events = EPOLLIN };
	TELL(epoll_ctl(-1, EPOLL_CTL_ADD, listener, &event));
	TELL(epoll_ctl(listener, EPOLL_CTL_ADD, listener, &event));
	TELL(epoll_ctl(set, EPOLL_CTL_ADD, -1, &event));
	TELL(epoll_ctl(set, EPOLL_CTL_ADD, 100000, &event));
	TELL(epoll_ctl(set, EPOLL_CTL_ADD, listener, NULL));
	TELL(epoll_ctl(set, EPOLL_CTL_MOD, listener, &event));
	TELL(epoll_ctl(set, EPOLL_CTL_DEL, listener, &event));
	TELL(epoll_ctl(set, 77, listener, &event));
	TELL_KEEPS(epoll_ctl(set, EPOLL_CTL_ADD, listener, &event));
	TELL(epoll_ctl(set, EPOLL_CTL_ADD, listener, &event));
	TELL(epoll_ctl(set, EPOLL_CTL_ADD, set, &event));
	TELL(epoll_wait(set, &event, 1, 0));
	c = client(port);
	TELL(epoll_wait(set, &event, 1, 1000));
	s = TELL(accept(listener, NULL, NULL));
	TELL(close(s));
	TELL(close(c));
	TELL(epoll_ctl(set, EPOLL_CTL_DEL, listener, NULL));
	TELL(close(set));
	int file = TELL(open("/proc/self/stat", O_RDONLY));
	set = TELL(epoll_create1(0));
	TELL(epoll_ctl(set, EPOLL_CTL_ADD, file, &event));
	TELL(close(file));
	TELL(close(set));

	TELL(poll(NULL, 0, 0));
	TELL(poll(&(struct pollfd){ .fd = -1, .events = POLLIN }, 1, 0));
	struct pollfd closed = { .fd = 99, .events = POLLIN };
	TELL(poll(&closed, 1, 0));
	TELL(closed.revents);
	volatile nfds_t too_many = 1u << 30;
	TELL(poll(&one, too_many, 0));
	TELL(select(FD_SETSIZE * 16, &(fd_set){ 0 }, NULL, NULL, &(struct timeval){ 0 }));
	struct timespec none = { 0 }, bad = { .tv_nsec = -1 };
	sigset_t mask;
	sigemptyset(&mask);
	TELL(ppoll(&one, 1, &none, &mask));
	TELL(ppoll(&one, 1, &bad, NULL));

	fd_set readers;
	FD_ZERO(&readers);
	FD_SET(listener, &readers);
	struct timeval zero = { 0 };
	TELL(select(listener + 1, &readers, NULL, NULL, &zero));
	TELL(FD_ISSET(listener, &readers));
	TELL(select(-1, NULL, NULL, NULL, &zero));
	TELL(select(0, NULL, NULL, NULL, &zero));
	FD_ZERO(&readers);
	FD_SET(200, &readers);
	TELL(select(201, &readers, NULL, NULL, &zero));
	c = client(port);
	FD_ZERO(&readers);
	FD_SET(listener, &readers);
	struct timespec second = { .tv_sec = 1 };
	TELL(pselect(listener + 1, &readers, NULL, NULL, &second, &mask));
	TELL(pselect(listener + 1, NULL, NULL, NULL, &bad, NULL));
	s = TELL(accept(listener, NULL, NULL));
	TELL(close(s));
	TELL(close(c));

	struct sigaction action = { .sa_handler = on_alarm };
	sigaction(SIGALRM, &action, NULL);
	ualarm(20000, 0);
	TELL(poll(&one, 1, 5000));
	fcntl(listener, F_SETFL, flags & ~O_NONBLOCK);
	ualarm(20000, 0);
	TELL(accept(listener, NULL, NULL));
	fcntl(listener, F_SETFL, flags);
}

static void duplicating(int listener)
{
	part = "dup";
	TELL(dup2(listener, listener));
	TELL(dup2(-1, 50));
	TELL(dup2(99, 99));
	TELL(dup2(listener, -1));
	TELL(dup2(listener, 1 << 30));
	TELL(dup3(listener, listener, 0));
	TELL(dup3(listener, 51, 77));
	TELL(dup3(-1, 51, O_CLOEXEC));
	TELL(dup2(listener, 52));
	TELL(dup3(listener, 53, O_CLOEXEC));
	TELL(fcntl(52, F_GETFD));
	TELL(fcntl(53, F_GETFD));
	TELL(accept(52, NULL, NULL));
	TELL(accept(53, NULL, NULL));
	TELL(fcntl(listener, F_DUPFD, 60));
	TELL(accept(60, NULL, NULL));
	TELL(close_range(54, 52, 0));
	TELL(close_range(52, 53, 77));
	TELL(close_range(52, 53, 4));
	TELL(fcntl(52, F_GETFD));
	TELL(accept(52, NULL, NULL));
	TELL(close_range(52, 53, 0));
	TELL(accept(52, NULL, NULL));
	int pipes[2];
	TELL(pipe2(pipes, O_CLOEXEC));
	TELL(dup2(pipes[0], 60));
	TELL(accept(60, NULL, NULL));
	TELL(close(60));
	TELL(close(pipes[0]));
	TELL(close(pipes[1]));
}

/* A child of vfork shares our memory, but has descriptors of its own. */
static void other_processes(int listener)
{
	part = "vfork";
	pid_t child = vfork();
	if (child == 0) {
		close(listener);
		dup2(1, listener);
		execl("/bin/true", "true", (char *)NULL);
		_exit(127);
	}
	int status;
	TELL(waitpid(child, &status, 0) == child);
	TELL(status);
	TELL(accept(listener, NULL, NULL));
	char *arguments[] = { "true", NULL }, *nothing[] = { NULL };
	TELL(posix_spawn(&child, "/bin/true", NULL, NULL, arguments, nothing));
	TELL(waitpid(child, &status, 0) == child);
	TELL(accept(listener, NULL, NULL));
}

static void *accept_once(void *fd)
{
	return (void *)(long)accept(*(int *)fd, NULL, NULL);
}

static void threads(int listener)
{
	part = "threads";
	pthread_t all[8];
	for (int i = 0; i < 8; i++)
		pthread_create(&all[i], NULL, accept_once, &listener);
	int clients[8];
	for (int i = 0; i < 8; i++)
		clients[i] = client(port_of(listener));
	for (int i = 0; i < 8; i++) {
		void *got;
		pthread_join(all[i], &got);
		TELL((long)got > 0);
		close((long)got);
		close(clients[i]);
	}
}

int main(void)
{
	setvbuf(stdout, NULL, _IOLBF, 1 << 16);
	binding();
	listening();
	for (int v6 = 0; v6 < 2; v6++) {
		int listener = socket(v6 ? AF_INET6 : AF_INET, SOCK_STREAM | (v6 ? SOCK_CLOEXEC : 0), 0);
		struct sockaddr_in any = at("127.0.0.1", 0);
		struct sockaddr_in6 any6 = { .sin6_family = AF_INET6 };
		TELL(bind(listener, v6 ? (struct sockaddr *)&any6 : (struct sockaddr *)&any, v6 ? sizeof(any6) : sizeof(any)));
		TELL(listen(listener, 16));
		fcntl(listener, F_SETFL, O_NONBLOCK);
		/* A child gets a queue of its own; the process that opened the listener keeps it. */
		fflush(stdout);
		pid_t child = fork();
		if (child == 0) {
			alarm(20);
			waiting(v6 ? "child-v6" : "child", listener);
			duplicating(listener);
			other_processes(listener);
			fcntl(listener, F_SETFL, 0);
			threads(listener);
			/* Without the library, the two share them. */
			fcntl(listener, F_SETFL, O_NONBLOCK);
			exit(0);
		}
		int status;
		TELL(waitpid(child, &status, 0) == child);
		TELL(status);
		TELL(listen(listener, 16));
		waiting(v6 ? "owner-v6" : "owner", listener);
		duplicating(listener);
		TELL(close(listener));
	}
	return 0;
}
