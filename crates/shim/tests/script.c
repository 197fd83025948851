/* Makes the same calls in the same order and prints their results: the output must be the same with and without
 * the library. Ports are not printed, because the kernel chooses them. */
#define _GNU_SOURCE
#undef _FORTIFY_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/uio.h>
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
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
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
	int a = TELL(socket(AF_INET, SOCK_DGRAM, 0));
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
	int b = TELL(socket(AF_INET, SOCK_DGRAM, 0));
	struct sockaddr_in same = at("127.0.0.1", port_of(a));
	TELL(bind(b, (struct sockaddr *)&same, sizeof(same)));
	int on = 1;
	setsockopt(b, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	TELL(bind(b, (struct sockaddr *)&same, sizeof(same)));
	int c = TELL(socket(AF_INET6, SOCK_DGRAM, 0));
	TELL(bind(c, (struct sockaddr *)&any6, sizeof(any6)));
	TELL(bind(c, (struct sockaddr *)&any6, sizeof(any6)));
	int d = TELL(socket(AF_INET, SOCK_STREAM, 0));
	TELL(bind(d, (struct sockaddr *)&any, sizeof(any)));
	TELL(close(a));
	TELL(close(b));
	TELL(close(c));
	TELL(close(d));
	TELL(close(d));
	TELL(close(-1));
	TELL(close(100000));
}

/* One datagram, by each call that receives. */
static void receiving(int server, int from)
{
	char bytes[8] = { 0 };
	struct sockaddr_in6 peer;
	socklen_t length = sizeof(peer);
	TELL(write(from, "recvfrom", 8));
	TELL(recvfrom(server, bytes, sizeof(bytes), MSG_PEEK, NULL, NULL));
	TELL(recvfrom(server, bytes, sizeof(bytes), 0, (struct sockaddr *)&peer, &length));
	TELL(length);
	TELL(ntohs(peer.sin6_port) == port_of(from));
	TELL(memcmp(bytes, "recvfrom", 8));
	TELL(write(from, "", 0));
	TELL(recv(server, bytes, sizeof(bytes), 0));
	TELL(write(from, "longer than that", 16));
	TELL(recv(server, bytes, sizeof(bytes), MSG_TRUNC));
	TELL(write(from, "read", 4));
	TELL(read(server, bytes, sizeof(bytes)));
	struct iovec whole = { bytes, sizeof(bytes) };
	struct msghdr one = { .msg_name = &peer, .msg_namelen = sizeof(peer), .msg_iov = &whole, .msg_iovlen = 1 };
	TELL(write(from, "recvmsg", 7));
	TELL(recvmsg(server, &one, 0));
	TELL(one.msg_namelen);
	TELL(one.msg_flags);
	struct mmsghdr two[2] = { { .msg_hdr = one }, { .msg_hdr = one } };
	TELL(write(from, "1", 1));
	TELL(write(from, "22", 2));
	TELL(recvmmsg(server, two, 2, 0, NULL));
	TELL(two[0].msg_len);
	TELL(two[1].msg_len);
	TELL(recvmmsg(server, two, 2, MSG_DONTWAIT, NULL));
	TELL(recv(server, bytes, sizeof(bytes), MSG_DONTWAIT));
	TELL(recvfrom(server, bytes, sizeof(bytes), MSG_DONTWAIT, (struct sockaddr *)&peer, &length));
	TELL(recvmsg(server, &one, MSG_DONTWAIT));
	TELL(write(from, "x", 1));
	TELL(recv(server, (void *)8, 1, 0));
	TELL(recv(server, bytes, 1, MSG_DONTWAIT));
}

/* The calls that receive, or wait for that, on a socket that another process bound, or this one. */
static void waiting(const char *name, int server)
{
	part = name;
	char bytes[8];
	int flags = fcntl(server, F_GETFL);
	TELL(flags);
	TELL(fcntl(server, F_GETFD));
	TELL(recv(-1, bytes, 1, 0));
	TELL(recv(0, bytes, 1, 0));
	TELL(recv(100000, bytes, 1, 0));
	TELL(read(-1, bytes, 1));
	TELL(recv(server, bytes, 1, 0));
	TELL(fcntl(server, F_GETFL) == flags);
	TELL(fcntl(server, F_GETFD));
	int c = client(port_of(server));
	receiving(server, c);

	int set = TELL(epoll_create1(EPOLL_CLOEXEC));
	struct epoll_event event = { .events = EPOLLIN };
	TELL(epoll_ctl(-1, EPOLL_CTL_ADD, server, &event));
	TELL(epoll_ctl(server, EPOLL_CTL_ADD, server, &event));
	TELL(epoll_ctl(set, EPOLL_CTL_ADD, -1, &event));
	TELL(epoll_ctl(set, EPOLL_CTL_ADD, 100000, &event));
	TELL(epoll_ctl(set, EPOLL_CTL_ADD, server, NULL));
	TELL(epoll_ctl(set, EPOLL_CTL_MOD, server, &event));
	TELL(epoll_ctl(set, EPOLL_CTL_DEL, server, &event));
	TELL(epoll_ctl(set, 77, server, &event));
	TELL_KEEPS(epoll_ctl(set, EPOLL_CTL_ADD, server, &event));
	TELL(epoll_ctl(set, EPOLL_CTL_ADD, server, &event));
	TELL(epoll_ctl(set, EPOLL_CTL_ADD, set, &event));
	TELL(epoll_wait(set, &event, 1, 0));
	TELL(write(c, "x", 1));
	TELL(epoll_wait(set, &event, 1, 1000));
	TELL(recv(server, bytes, sizeof(bytes), 0));
	receiving(server, c);
	TELL(epoll_ctl(set, EPOLL_CTL_DEL, server, NULL));
	TELL(close(set));

	struct pollfd one = { .fd = server, .events = POLLIN };
	TELL(poll(NULL, 0, 0));
	TELL(poll(&(struct pollfd){ .fd = -1, .events = POLLIN }, 1, 0));
	struct pollfd closed = { .fd = 99, .events = POLLIN };
	TELL(poll(&closed, 1, 0));
	TELL(closed.revents);
	volatile nfds_t too_many = 1u << 30;
	TELL(poll(&one, too_many, 0));
	TELL(write(c, "x", 1));
	TELL(poll(&one, 1, 1000));
	TELL(one.revents);
	TELL(recv(server, bytes, sizeof(bytes), 0));
	TELL(poll(&one, 1, 0));
	TELL(select(FD_SETSIZE * 16, &(fd_set){ 0 }, NULL, NULL, &(struct timeval){ 0 }));
	struct timespec none = { 0 }, bad = { .tv_nsec = -1 };
	sigset_t mask;
	sigemptyset(&mask);
	TELL(ppoll(&one, 1, &none, &mask));
	TELL(ppoll(&one, 1, &bad, NULL));

	fd_set readers;
	FD_ZERO(&readers);
	FD_SET(server, &readers);
	struct timeval zero = { 0 };
	TELL(select(server + 1, &readers, NULL, NULL, &zero));
	TELL(FD_ISSET(server, &readers));
	TELL(select(-1, NULL, NULL, NULL, &zero));
	TELL(select(0, NULL, NULL, NULL, &zero));
	FD_ZERO(&readers);
	FD_SET(200, &readers);
	TELL(select(201, &readers, NULL, NULL, &zero));
	TELL(write(c, "x", 1));
	FD_ZERO(&readers);
	FD_SET(server, &readers);
	struct timespec second = { .tv_sec = 1 };
	TELL(pselect(server + 1, &readers, NULL, NULL, &second, &mask));
	TELL(pselect(server + 1, NULL, NULL, NULL, &bad, NULL));
	TELL(recv(server, bytes, sizeof(bytes), 0));

	struct sigaction action = { .sa_handler = on_alarm };
	sigaction(SIGALRM, &action, NULL);
	ualarm(20000, 0);
	TELL(poll(&one, 1, 5000));
	fcntl(server, F_SETFL, flags & ~O_NONBLOCK);
	ualarm(20000, 0);
	TELL(recv(server, bytes, sizeof(bytes), 0));
	fcntl(server, F_SETFL, flags);
	TELL(close(c));
}

static void duplicating(int server)
{
	part = "dup";
	TELL(dup2(server, server));
	TELL(dup2(-1, 50));
	TELL(dup2(99, 99));
	TELL(dup2(server, -1));
	TELL(dup2(server, 1 << 30));
	TELL(dup3(server, server, 0));
	TELL(dup3(server, 51, 77));
	TELL(dup3(-1, 51, O_CLOEXEC));
	TELL(dup2(server, 52));
	TELL(dup3(server, 53, O_CLOEXEC));
	TELL(fcntl(52, F_GETFD));
	TELL(fcntl(53, F_GETFD));
	TELL(recv(52, NULL, 0, 0));
	TELL(recv(53, NULL, 0, 0));
	TELL(fcntl(server, F_DUPFD, 60));
	TELL(recv(60, NULL, 0, 0));
	TELL(close_range(54, 52, 0));
	TELL(close_range(52, 53, 77));
	TELL(close_range(52, 53, 4));
	TELL(fcntl(52, F_GETFD));
	TELL(recv(52, NULL, 0, 0));
	TELL(close_range(52, 53, 0));
	TELL(recv(52, NULL, 0, 0));
	int pipes[2];
	TELL(pipe2(pipes, O_CLOEXEC));
	TELL(dup2(pipes[0], 60));
	TELL(recv(60, NULL, 0, 0));
	TELL(close(60));
	TELL(close(pipes[0]));
	TELL(close(pipes[1]));
}

/* A child of vfork shares our memory, but has descriptors of its own. */
static void other_processes(int server)
{
	part = "vfork";
	pid_t child = vfork();
	if (child == 0) {
		close(server);
		dup2(1, server);
		execl("/bin/true", "true", (char *)NULL);
		_exit(127);
	}
	int status;
	TELL(waitpid(child, &status, 0) == child);
	TELL(status);
	TELL(recv(server, NULL, 0, 0));
	char *arguments[] = { "true", NULL }, *nothing[] = { NULL };
	TELL(posix_spawn(&child, "/bin/true", NULL, NULL, arguments, nothing));
	TELL(waitpid(child, &status, 0) == child);
	TELL(recv(server, NULL, 0, 0));
}

int main(void)
{
	setvbuf(stdout, NULL, _IOLBF, 1 << 16);
	binding();
	for (int v6 = 0; v6 < 2; v6++) {
		int server = socket(v6 ? AF_INET6 : AF_INET, SOCK_DGRAM | SOCK_NONBLOCK | (v6 ? SOCK_CLOEXEC : 0), 0);
		struct sockaddr_in any = at("127.0.0.1", 0);
		struct sockaddr_in6 any6 = { .sin6_family = AF_INET6 };
		TELL(bind(server, v6 ? (struct sockaddr *)&any6 : (struct sockaddr *)&any, v6 ? sizeof(any6) : sizeof(any)));
		waiting(v6 ? "owner-v6" : "owner", server);
		duplicating(server);
		/* A child gets a queue of its own. */
		fflush(stdout);
		pid_t child = fork();
		if (child == 0) {
			alarm(20);
			waiting(v6 ? "child-v6" : "child", server);
			duplicating(server);
			other_processes(server);
			exit(0);
		}
		int status;
		TELL(waitpid(child, &status, 0) == child);
		TELL(status);
		TELL(close(server));
	}
	return 0;
}
