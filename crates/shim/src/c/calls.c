/* The calls with which a server receives datagrams, or waits for them. Each first finds out which queue this thread
 * reads, and then does what it always did. */
#define _GNU_SOURCE
#undef _FORTIFY_SOURCE
#include "split.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

/* The C library's own functions, found before main. Earlier calls go to the kernel directly: looking a name up may
 * allocate, and the allocator may be our caller. */
static struct {
	int (*bind)(int, const struct sockaddr *, socklen_t);
	int (*epoll_ctl)(int, int, int, struct epoll_event *);
	int (*poll)(struct pollfd *, nfds_t, int);
	int (*ppoll)(struct pollfd *, nfds_t, const struct timespec *, const sigset_t *);
	int (*poll_chk)(struct pollfd *, nfds_t, int, size_t);
	int (*ppoll_chk)(struct pollfd *, nfds_t, const struct timespec *, const sigset_t *, size_t);
	int (*select)(int, fd_set *, fd_set *, fd_set *, struct timeval *);
	int (*pselect)(int, fd_set *, fd_set *, fd_set *, const struct timespec *, const sigset_t *);
	int (*close)(int);
	int (*dup2)(int, int);
	int (*dup3)(int, int, int);
	int (*close_range)(unsigned, unsigned, int);
	void (*closefrom)(int);
	ssize_t (*recv)(int, void *, size_t, int);
	ssize_t (*recvfrom)(int, void *, size_t, int, struct sockaddr *, socklen_t *);
	ssize_t (*recvmsg)(int, struct msghdr *, int);
	int (*recvmmsg)(int, struct mmsghdr *, unsigned, int, struct timespec *);
	ssize_t (*read)(int, void *, size_t);
	ssize_t (*recv_chk)(int, void *, size_t, size_t, int);
	ssize_t (*recvfrom_chk)(int, void *, size_t, size_t, int, struct sockaddr *, socklen_t *);
	ssize_t (*read_chk)(int, void *, size_t, size_t);
} real;

__attribute__((constructor(101))) static void find_real(void)
{
#define FIND(field, symbol) *(void **)&real.field = dlsym(RTLD_NEXT, symbol)
	FIND(bind, "bind");
	FIND(epoll_ctl, "epoll_ctl");
	FIND(poll, "poll");
	FIND(ppoll, "ppoll");
	FIND(poll_chk, "__poll_chk");
	FIND(ppoll_chk, "__ppoll_chk");
	FIND(select, "select");
	FIND(pselect, "pselect");
	FIND(close, "close");
	FIND(dup2, "dup2");
	FIND(dup3, "dup3");
	FIND(close_range, "close_range");
	FIND(closefrom, "closefrom");
	FIND(recv, "recv");
	FIND(recvfrom, "recvfrom");
	FIND(recvmsg, "recvmsg");
	FIND(recvmmsg, "recvmmsg");
	FIND(read, "read");
	FIND(recv_chk, "__recv_chk");
	FIND(recvfrom_chk, "__recvfrom_chk");
	FIND(read_chk, "__read_chk");
#undef FIND
}

static int option(int fd, int name)
{
	int value = 0;
	socklen_t size = sizeof(value);
	return syscall(SYS_getsockopt, fd, SOL_SOCKET, name, &value, &size) == 0 ? value : -1;
}

static bool is_udp(int fd)
{
	int domain = option(fd, SO_DOMAIN);
	return (domain == AF_INET || domain == AF_INET6) && option(fd, SO_TYPE) == SOCK_DGRAM &&
	       option(fd, SO_PROTOCOL) == IPPROTO_UDP;
}

static bool is_bound(int fd)
{
	struct sockaddr_in6 own = { 0 }; /* its port stands where that of IPv4 does */
	socklen_t size = sizeof(own);
	return syscall(SYS_getsockname, fd, &own, &size) == 0 && own.sin6_port != 0;
}

/* Notes the sockets that this program was started with: a worker that is a program of its own has its sockets from
 * the one that started it. */
void split_see_inherited(void)
{
	for (int fd = STDERR_FILENO + 1; fd < SPLIT_INHERITED_FDS; fd++)
		if (is_udp(fd) && is_bound(fd))
			split_set(fd, STATE_INHERITED);
}

EXPORT int bind(int fd, const struct sockaddr *address, socklen_t length)
{
	if (!real.bind)
		return syscall(SYS_bind, fd, address, length);
	int before = errno;
	int result = real.bind(fd, address, length);
	if (result == 0 && split_active() && is_udp(fd))
		split_set(fd, STATE_DATAGRAM);
	errno = result == 0 ? before : errno;
	return result;
}

/* Whether this is a UDP socket that may have queues beside it. A process that inherited it asks for one first. */
static bool datagrams(int fd, enum how how)
{
	/* split_active() detects a fork, which changes the state. */
	if ((!split_is_datagram(fd) && split_state(fd) != STATE_INHERITED) || !split_active())
		return false;
	if (split_state(fd) == STATE_INHERITED)
		split_inherit(fd, how);
	return split_is_datagram(fd);
}

/* The threads of this process share a socket that is polled. */
static void before_wait(int fd, enum how how)
{
	if (datagrams(fd, how))
		split_polls(fd);
}

EXPORT int epoll_ctl(int epoll, int operation, int fd, struct epoll_event *event)
{
	if (operation == EPOLL_CTL_ADD)
		before_wait(fd, HOW_EPOLL);
	return real.epoll_ctl ? real.epoll_ctl(epoll, operation, fd, event) : syscall(SYS_epoll_ctl, epoll, operation, fd, event);
}

static void before_poll(struct pollfd *wanted, nfds_t count)
{
	/* More than a process can have open is an error that the kernel reports. */
	if (!wanted || count > SPLIT_MOST_FDS || !split_active())
		return;
	for (nfds_t i = 0; i < count; i++)
		if (wanted[i].fd >= 0 && wanted[i].events & (POLLIN | POLLRDNORM))
			before_wait(wanted[i].fd, HOW_POLL);
}

static int kernel_ppoll(struct pollfd *wanted, nfds_t count, const struct timespec *limit, const sigset_t *mask)
{
	struct timespec left; /* the kernel writes into it */
	if (limit)
		left = *limit;
	return syscall(SYS_ppoll, wanted, count, limit ? &left : NULL, mask, _NSIG / 8);
}

static int kernel_poll(struct pollfd *wanted, nfds_t count, int limit_ms)
{
	struct timespec limit = { .tv_sec = limit_ms / 1000, .tv_nsec = limit_ms % 1000 * 1000000L };
	return kernel_ppoll(wanted, count, limit_ms < 0 ? NULL : &limit, NULL);
}

EXPORT int poll(struct pollfd *wanted, nfds_t count, int limit_ms)
{
	before_poll(wanted, count);
	return real.poll ? real.poll(wanted, count, limit_ms) : kernel_poll(wanted, count, limit_ms);
}

EXPORT int __poll_chk(struct pollfd *wanted, nfds_t count, int limit_ms, size_t size)
{
	before_poll(wanted, count);
	return real.poll_chk ? real.poll_chk(wanted, count, limit_ms, size) : kernel_poll(wanted, count, limit_ms);
}

EXPORT int ppoll(struct pollfd *wanted, nfds_t count, const struct timespec *limit, const sigset_t *mask)
{
	before_poll(wanted, count);
	return real.ppoll ? real.ppoll(wanted, count, limit, mask) : kernel_ppoll(wanted, count, limit, mask);
}

EXPORT int __ppoll_chk(struct pollfd *wanted, nfds_t count, const struct timespec *limit, const sigset_t *mask, size_t size)
{
	before_poll(wanted, count);
	return real.ppoll_chk ? real.ppoll_chk(wanted, count, limit, mask, size) : kernel_ppoll(wanted, count, limit, mask);
}

static void before_select(int count, const fd_set *readers)
{
	if (!readers || !split_active())
		return;
	/* Programs ask for as many descriptors as there may be, with a set that holds fewer. The kernel stops at
	 * those that are open, and we stop where a set ends. */
	const unsigned long *words = (const unsigned long *)readers;
	const int bits = 8 * sizeof(unsigned long);
	for (int fd = 0; fd < count && fd < FD_SETSIZE; fd++) {
		unsigned long word = words[fd / bits] >> (fd % bits);
		if (word == 0)
			fd |= bits - 1; /* nothing more in this word */
		else if (word & 1)
			before_wait(fd, HOW_POLL);
	}
}

EXPORT int select(int count, fd_set *readers, fd_set *writers, fd_set *others, struct timeval *limit)
{
	struct timespec left = { 0 };
	if (limit)
		left = (struct timespec){ .tv_sec = limit->tv_sec, .tv_nsec = limit->tv_usec * 1000 };
	before_select(count, readers);
	return real.select ? real.select(count, readers, writers, others, limit) :
	       syscall(SYS_pselect6, count, readers, writers, others, limit ? &left : NULL, NULL);
}

EXPORT int pselect(int count, fd_set *readers, fd_set *writers, fd_set *others, const struct timespec *limit, const sigset_t *mask)
{
	struct timespec left = limit ? *limit : (struct timespec){ 0 };
	struct {
		const sigset_t *set;
		size_t size;
	} with = { mask, _NSIG / 8 };
	before_select(count, readers);
	return real.pselect ? real.pselect(count, readers, writers, others, limit, mask) :
	       syscall(SYS_pselect6, count, readers, writers, others, limit ? &left : NULL, &with);
}

/* Forgets a descriptor that is closed: its number may be given to anything. This happens before the call, because
 * afterwards another thread may have the number already. */
static void forget(int fd)
{
	/* A child of vfork closes its own descriptors; a UDP socket's queues belong to its parent. */
	if ((split_is_datagram(fd) || split_state(fd) == STATE_INHERITED) && split_in_vfork_child())
		return;
	if (fd >= 0)
		split_closed(fd, fd);
	split_set(fd, STATE_UNKNOWN);
}

EXPORT int close(int fd)
{
	forget(fd);
	return real.close ? real.close(fd) : syscall(SYS_close, fd);
}

EXPORT int dup2(int from, int to)
{
	if (from != to)
		forget(to);
	if (real.dup2)
		return real.dup2(from, to);
	if (from != to)
		return syscall(SYS_dup3, from, to, 0);
	/* dup3 refuses what dup2 allows. */
	return syscall(SYS_fcntl, from, 1 /* F_GETFD */) < 0 ? -1 : to;
}

EXPORT int dup3(int from, int to, int flags)
{
	if (from != to)
		forget(to);
	return real.dup3 ? real.dup3(from, to, flags) : syscall(SYS_dup3, from, to, flags);
}

EXPORT int close_range(unsigned first, unsigned last, int flags)
{
	/* With CLOSE_RANGE_CLOEXEC they are only marked for exec, and stay open. */
	if (!(flags & 4 /* CLOSE_RANGE_CLOEXEC */) && first <= last && !split_in_vfork_child()) {
		split_closed(first, last);
		split_forget(first, last);
	}
	return real.close_range ? real.close_range(first, last, flags) : syscall(SYS_close_range, first, last, flags);
}

EXPORT void closefrom(int first)
{
	if (!split_in_vfork_child()) {
		split_closed(first < 0 ? 0 : first, ~0u);
		split_forget(first < 0 ? 0 : first, ~0u);
	}
	if (real.closefrom)
		real.closefrom(first);
	else
		syscall(SYS_close_range, first < 0 ? 0 : first, ~0u, 0);
}

/* Receives from orphaned queues first, then from this thread's own queue. `call` receives from `from`, and
 * `at_once` does the same without waiting. A thread that was only woken, to become the primary reader or to read
 * an orphaned queue, got `nothing`. Then `again` undoes what the kernel wrote. */
#define RECEIVE(type, call, at_once, nothing, again)                              \
	for (;;) {                                                                \
		int before = errno;                                               \
		for (int next = -1; (next = split_next_orphan(fd, next)) >= 0;) { \
			int from = split_orphan(next);                            \
			while (!is_empty(from)) {                                 \
				type got = (at_once);                             \
				if (got < 0)                                      \
					break;                                    \
				if (!(nothing) || !split_woken(fd)) {             \
					errno = before;                           \
					return got;                               \
				}                                                 \
				again;                                            \
			}                                                         \
			split_orphan_is_empty(next);                              \
		}                                                                 \
		errno = before;                                                   \
		void *place;                                                      \
		int from = split_source(fd, &place);                              \
		if (from < 0 && fd >= 0)                                          \
			continue;                                                 \
		type got = (call);                                                \
		if (!(nothing) || !split_kicked(fd, place))                           \
			return got;                                               \
		again;                                                            \
	}

/* A datagram, even an empty one, has an address. A read from a socket that was shut down returns none. */
static bool is_empty(int fd)
{
	struct sockaddr_in6 from;
	socklen_t length = sizeof(from);
	char byte;
	long got = syscall(SYS_recvfrom, fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT, &from, &length);
	return got < 0 || (got == 0 && length == 0);
}

/* Removes an empty datagram that was only sent to wake, so that MSG_PEEK does not see it again. */
static void take_out(int from, int flags)
{
	if (flags & MSG_PEEK)
		syscall(SYS_recvfrom, from, NULL, 0, MSG_DONTWAIT, NULL, NULL);
}

EXPORT ssize_t recv(int fd, void *buffer, size_t size, int flags)
{
	datagrams(fd, HOW_RECEIVE);
	RECEIVE(ssize_t, real.recv ? real.recv(from, buffer, size, flags) : syscall(SYS_recvfrom, from, buffer, size, flags, NULL, NULL),
		real.recv(from, buffer, size, flags | MSG_DONTWAIT), got == 0 && size > 0, take_out(from, flags))
}

EXPORT ssize_t recvfrom(int fd, void *buffer, size_t size, int flags, struct sockaddr *address, socklen_t *length)
{
	socklen_t room = datagrams(fd, HOW_RECEIVE) && address && length ? *length : 0;
	RECEIVE(ssize_t, real.recvfrom ? real.recvfrom(from, buffer, size, flags, address, length) : syscall(SYS_recvfrom, from, buffer, size, flags, address, length),
		real.recvfrom(from, buffer, size, flags | MSG_DONTWAIT, address, length), got == 0 && size > 0, take_out(from, flags); if (address && length) *length = room)
}

EXPORT ssize_t recvmsg(int fd, struct msghdr *message, int flags)
{
	struct msghdr asked = { 0 };
	if (datagrams(fd, HOW_RECEIVE))
		asked = *message;
	RECEIVE(ssize_t, real.recvmsg ? real.recvmsg(from, message, flags) : syscall(SYS_recvmsg, from, message, flags),
		real.recvmsg(from, message, flags | MSG_DONTWAIT), got == 0, take_out(from, flags); *message = asked)
}

/* A queue that was shut down, to wake its thread, returns as many empty messages as are asked for. Only the
 * messages before them were received. */
static int received(void *place, struct mmsghdr *messages, int count)
{
	int last = count;
	while (last > 0 && messages[last - 1].msg_len == 0)
		last--;
	return last > 0 && last < count && split_is_shut(place) ? last : count;
}

static bool are_empty(const struct mmsghdr *messages, int count)
{
	for (int i = 0; i < count; i++)
		if (messages[i].msg_len > 0)
			return false;
	return count > 0;
}

/* The kernel set the length of every message's address to 0: restores it. */
static void undo(struct mmsghdr *messages, int count, socklen_t room)
{
	for (int i = 0; i < count; i++)
		messages[i].msg_hdr.msg_namelen = room;
}

EXPORT int recvmmsg(int fd, struct mmsghdr *messages, unsigned count, int flags, struct timespec *limit)
{
	socklen_t room = datagrams(fd, HOW_RECEIVE) && count > 0 ? messages[0].msg_hdr.msg_namelen : 0;
	RECEIVE(int,
		received(place, messages, real.recvmmsg ? real.recvmmsg(from, messages, count, flags, limit) : syscall(SYS_recvmmsg, from, messages, count, flags, limit)),
		real.recvmmsg(from, messages, 1, flags | MSG_DONTWAIT, NULL), are_empty(messages, got), take_out(from, flags); undo(messages, got, room))
}

EXPORT ssize_t read(int fd, void *buffer, size_t size)
{
	if (!datagrams(fd, HOW_RECEIVE))
		return real.read ? real.read(fd, buffer, size) : syscall(SYS_read, fd, buffer, size);
	RECEIVE(ssize_t, real.read(from, buffer, size), real.recv(from, buffer, size, MSG_DONTWAIT), got == 0 && size > 0, (void)0)
}

EXPORT ssize_t __recv_chk(int fd, void *buffer, size_t size, size_t room, int flags)
{
	if (size > room)
		return real.recv_chk(fd, buffer, size, room, flags); /* which ends the program */
	return recv(fd, buffer, size, flags);
}

EXPORT ssize_t __recvfrom_chk(int fd, void *buffer, size_t size, size_t room, int flags, struct sockaddr *address, socklen_t *length)
{
	if (size > room)
		return real.recvfrom_chk(fd, buffer, size, room, flags, address, length);
	return recvfrom(fd, buffer, size, flags, address, length);
}

EXPORT ssize_t __read_chk(int fd, void *buffer, size_t size, size_t room)
{
	if (size > room)
		return real.read_chk(fd, buffer, size, room);
	return read(fd, buffer, size);
}
