/* fuzz SEED CALLS: random calls on random descriptors, against a model of what each descriptor is. It prints how
 * many calls it made. It ends with 1 at the first descriptor that differs from the model, or if one more is open
 * at the end than at the beginning. The process that makes them bound none of the UDP sockets that it has at first. */
#define _GNU_SOURCE
#undef _FORTIFY_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SOCKETS = 6, LOW = 20, HIGH = 84 };

struct model {
	int port;    /* of a UDP socket; 0: none */
	ino_t inode; /* of anything else; 0: closed */
};

static struct model model[HIGH];
static int ports[SOCKETS], kept[SOCKETS];
static uint64_t state;
static long number, claims;
static const char *call = "";
static bool is_child;

static uint32_t draw(uint32_t below)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return (state >> 16) % below;
}

static void wrong(int fd, const char *what)
{
	printf("call %ld (%s), descriptor %d: %s: %s\n", number, call, fd, what, strerror(errno));
	fflush(stdout);
	_exit(1);
}

static int port_of(int fd)
{
	struct sockaddr_in6 address;
	socklen_t length = sizeof(address);
	if (getsockname(fd, (struct sockaddr *)&address, &length))
		return -1;
	return ntohs(address.sin6_port);
}

static ino_t inode_of(int fd)
{
	struct stat about;
	return fstat(fd, &about) ? 0 : about.st_ino;
}

static void check(int fd)
{
	if (model[fd].port) {
		if (port_of(fd) != model[fd].port)
			wrong(fd, "another port");
		if (!(fcntl(fd, F_GETFL) & O_NONBLOCK))
			wrong(fd, "it blocks");
	} else if (inode_of(fd) != model[fd].inode) {
		wrong(fd, model[fd].inode ? "another file" : "it is open");
	}
}

static void became(int fd, int from)
{
	model[fd] = model[from];
	if (!model[from].port && model[from].inode == 0)
		wrong(fd, "of nothing came something");
}

static void touch(int fd)
{
	ino_t before = inode_of(fd);
	int flags = fcntl(fd, F_GETFD);
	switch (draw(5)) {
	case 0: {
		call = "recv";
		char byte;
		recv(fd, &byte, 1, MSG_DONTWAIT);
		break;
	}
	case 1: {
		call = "recvmsg";
		char byte;
		struct iovec whole = { &byte, 1 };
		struct msghdr one = { .msg_iov = &whole, .msg_iovlen = 1 };
		recvmsg(fd, &one, MSG_DONTWAIT);
		break;
	}
	case 2: {
		call = "poll";
		struct pollfd some[3] = { { fd, POLLIN, 0 }, { LOW + draw(HIGH - LOW), POLLIN, 0 }, { LOW + draw(HIGH - LOW), POLLOUT, 0 } };
		poll(some, 3, 0);
		break;
	}
	case 3: {
		call = "select";
		fd_set set;
		FD_ZERO(&set);
		FD_SET(fd, &set);
		struct timeval zero = { 0 };
		select(fd + 1, &set, NULL, NULL, &zero);
		break;
	}
	default: {
		call = "epoll_ctl";
		int epoll = epoll_create1(EPOLL_CLOEXEC);
		struct epoll_event event = { .events = EPOLLIN };
		epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event);
		close(epoll);
	}
	}
	claims += inode_of(fd) != before;
	if (fcntl(fd, F_GETFD) != flags)
		wrong(fd, "its descriptor flags changed");
}

static void open_something(int fd)
{
	int pair[2], got;
	switch (draw(4)) {
	case 0:
		call = "pipe";
		if (pipe(pair))
			wrong(fd, "pipe");
		got = pair[0];
		close(pair[1]);
		break;
	case 1:
		call = "socketpair";
		if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair))
			wrong(fd, "socketpair");
		got = pair[0];
		close(pair[1]);
		break;
	case 2:
		call = "socket";
		got = socket(AF_INET, SOCK_STREAM, 0);
		break;
	default:
		call = "open";
		got = open("/dev/null", O_RDONLY);
	}
	if (got < 0)
		wrong(fd, "nothing was opened");
	ino_t inode = inode_of(got);
	if (draw(2) ? dup2(got, fd) != fd : dup3(got, fd, O_CLOEXEC) != fd)
		wrong(fd, "dup");
	/* Now and then the library does not see the close. */
	if (draw(8) == 0)
		syscall(SYS_close, got);
	else
		close(got);
	model[fd] = (struct model){ .inode = inode };
}

static void send_to(int port)
{
	call = "sendto";
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(port), .sin_addr = { htonl(INADDR_LOOPBACK) } };
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	sendto(fd, "x", draw(2), 0, (struct sockaddr *)&address, sizeof(address));
	close(fd);
}

/* A child finds it bound by another process. */
static void bind_one(int fd)
{
	call = "bind";
	struct sockaddr_in any = { .sin_family = AF_INET, .sin_addr = { htonl(INADDR_LOOPBACK) } };
	int got = socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK, 0);
	if (dup2(got, fd) != fd || close(got) || bind(fd, (struct sockaddr *)&any, sizeof(any)))
		wrong(fd, "no socket was bound");
	model[fd] = (struct model){ .port = port_of(fd) };
}

static void step(void);

/* A child continues for a while with the descriptors that it inherited, and must be right as well. */
static void fork_some(void)
{
	call = "fork";
	fflush(stdout);
	pid_t child = draw(3) ? fork() : syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
	if (child == 0) {
		is_child = true;
		for (int i = 0; i < 60; i++)
			step();
		_exit(0);
	}
	int status = 0;
	if (waitpid(child, &status, 0) != child || status != 0)
		wrong(-1, "a child found something wrong");
}

static void step(void)
{
	int fd = LOW + draw(HIGH - LOW), other = LOW + draw(HIGH - LOW), which = draw(SOCKETS);
	number++;
	switch (draw(16)) {
	case 0:
	case 1:
		call = "close";
		close(fd);
		model[fd] = (struct model){ 0 };
		break;
	case 2:
		call = "dup2 of a socket";
		dup2(kept[which], fd);
		model[fd] = (struct model){ .port = ports[which] };
		break;
	case 3:
		call = "dup3 of a socket";
		dup3(kept[which], fd, O_CLOEXEC);
		model[fd] = (struct model){ .port = ports[which] };
		break;
	case 4:
		call = "dup2";
		if (dup2(fd, other) == other)
			became(other, fd);
		break;
	case 5:
		call = "close_range";
		if (draw(4) == 0) {
			int last = fd + draw(3) < HIGH - 1 ? fd + (int)draw(3) : fd;
			close_range(fd, last, 0);
			for (int i = fd; i <= last; i++)
				model[i] = (struct model){ 0 };
		}
		break;
	case 6:
	case 7:
		open_something(fd);
		break;
	case 8:
		send_to(ports[which]);
		break;
	case 9:
		bind_one(fd);
		if (draw(20) == 0 && number > 0 && !is_child)
			fork_some();
		break;
	case 10:
		call = "close behind the library's back";
		if (draw(4) == 0) {
			syscall(SYS_close, fd);
			model[fd] = (struct model){ 0 };
		}
		break;
	default:
		touch(fd);
	}
	check(fd);
	check(other);
}

static int open_now(void)
{
	int count = 0;
	DIR *folder = opendir("/proc/self/fd");
	while (folder && readdir(folder))
		count++;
	closedir(folder);
	return count;
}

int main(int count, char **arguments)
{
	state = count > 1 ? strtoull(arguments[1], NULL, 10) * 0x9e3779b97f4a7c15u + 1 : 1;
	long calls = count > 2 ? atol(arguments[2]) : 1000;
	for (int i = 0; i < SOCKETS; i++) {
		kept[i] = socket(i % 2 ? AF_INET6 : AF_INET, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
		struct sockaddr_in6 any = { .sin6_family = i % 2 ? AF_INET6 : AF_INET };
		if (bind(kept[i], (struct sockaddr *)&any, sizeof(any)))
			wrong(kept[i], "bind");
		ports[i] = port_of(kept[i]);
	}
	pid_t child = fork();
	if (child == 0) {
		int before = open_now();
		while (number < calls)
			step();
		for (int fd = LOW; fd < HIGH; fd++)
			close(fd);
		if (open_now() != before)
			wrong(open_now() - before, "more descriptors than at the beginning");
		printf("%ld calls, %ld sockets replaced\n", number, claims);
		fflush(stdout);
		_exit(0);
	}
	int status = 0;
	waitpid(child, &status, 0);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 2;
}
