/* UDP: threads, and processes, that receive from one socket.
 *
 * The first thread to receive is the socket's primary reader. Each other thread gets a queue of its own from the
 * broker, and receives from that whenever it receives by the socket's number. Sending, and everything else, goes
 * by the socket itself. If any thread polls the socket, no thread has a queue of its own: they give them back. A
 * socket that is reported as ready must be the one that is then read, by any thread.
 *
 * A thread that ends gives its queue back. The queue is bound to a network device that does not exist, so it
 * leaves the group and takes no datagram any more. The other threads read what is left in it before anything else.
 * (Connecting the queue to an unused address would do the same, but puts the whole group on the kernel's slow path
 * for good.) If the thread was the primary reader, another one takes over. It is woken by shutting its queue down,
 * and that queue is given back as well.
 *
 * A process that was forked since the socket was bound asks for a queue when it first receives or waits. It puts
 * the queue in the socket's place, and from then on its threads share that one in the same way. If a process ends,
 * the broker hands its unread queue to another process, which it wakes by an empty datagram.
 */
#define _GNU_SOURCE
#undef _FORTIFY_SOURCE
#include "split.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MOST_READERS 256
#define MOST_SOCKETS_A_THREAD 4
/* Numbers of queues begin here, where programs seldom look. */
#define QUEUES_FROM 512
/* No network device has this number. */
#define NOWHERE 0x7fffffff
#ifndef SO_BINDTOIFINDEX
#define SO_BINDTOIFINDEX 62
#endif
/* Clients may send empty datagrams too: after this many in a tenth of a second, the broker is not asked. */
#define MOST_ASKED 20
#define ASKED_NS 100000000
/* A thread that ends waits so long for others that ask: nobody would read what it leaves. */
#define TO_LEAVE_MS 600000
/* By then, datagrams that the kernel was about to put into a queue when it was given back have arrived. */
#define SETTLED_NS 50000000

enum role { FREE = 0, PRIMARY, OWN, KICKED, ADOPTED, ORPHAN };

struct reader {
	_Atomic int role;
	int fd;    /* the socket's number */
	int queue; /* the descriptor to receive from; the primary reader's is the socket itself */
	int thread;
	int64_t since_ns; /* an orphan's beginning */
	bool adopted;     /* it was another process's */
};

static struct reader readers[MOST_READERS];
static _Atomic int orphans;
static _Atomic unsigned generation = 1; /* of this process: a fork begins another */
/* Empty datagrams that we sent and nobody has received yet. */
static _Atomic int wakes;
static pthread_key_t key;
static bool has_key;

static __thread __attribute__((tls_model("initial-exec"))) struct {
	unsigned generation;
	int fd;
	bool shares; /* it has no place of its own: it polls, or none was free */
	struct reader *place;
} mine[MOST_SOCKETS_A_THREAD];

static int64_t now_ns(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static int thread_id(void)
{
	return syscall(SYS_gettid);
}

union address {
	struct sockaddr any;
	struct sockaddr_in v4;
	struct sockaddr_in6 v6;
};

/* Finds an address of this host by which a socket is reached. Returns its length, 0 if there is none. */
static socklen_t reach(int socket, union address *address)
{
	socklen_t length = sizeof(*address);
	if (syscall(SYS_getsockname, socket, address, &length) != 0)
		return 0;
	if (address->any.sa_family == AF_INET && address->v4.sin_addr.s_addr == INADDR_ANY)
		address->v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	if (address->any.sa_family == AF_INET6 && IN6_IS_ADDR_UNSPECIFIED(&address->v6.sin6_addr))
		address->v6.sin6_addr = in6addr_loopback;
	return length;
}

/* Takes a queue out of the group, however a member is chosen. Its unread datagrams stay. */
static void stop_choosing(int queue)
{
	int nowhere = NOWHERE;
	if (syscall(SYS_setsockopt, queue, SOL_SOCKET, SO_BINDTOIFINDEX, &nowhere, sizeof(nowhere)) == 0)
		return;
	/* Before Linux 5.7 that took a privilege. Connecting to a port that nobody sends from has the same effect. */
	union address address;
	socklen_t length = reach(queue, &address);
	if (length == 0)
		return;
	if (address.any.sa_family == AF_INET)
		address.v4.sin_port = htons(9);
	else
		address.v6.sin6_port = htons(9);
	syscall(SYS_connect, queue, &address, length);
}

/* Sends an empty datagram to the socket: the thread that receives it then looks for orphaned queues. */
static void wake_one(int socket)
{
	union address address;
	socklen_t length = reach(socket, &address);
	int sender = length ? syscall(SYS_socket, address.any.sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0) : -1;
	if (sender < 0)
		return;
	atomic_fetch_add(&wakes, 1);
	if (syscall(SYS_sendto, sender, NULL, 0, MSG_DONTWAIT, &address, length) < 0)
		atomic_fetch_sub(&wakes, 1);
	syscall(SYS_close, sender);
}

/* Marks a queue that has no reader as orphaned. True: the process's other threads are to read it. If other
 * processes have the socket too, the broker sees to that: an empty datagram of ours might wake one of theirs. */
static bool orphan(struct reader *reader)
{
	if (split_tell_given_back(reader->queue)) {
		syscall(SYS_close, reader->queue);
		atomic_store(&reader->role, FREE);
		return false;
	}
	stop_choosing(reader->queue);
	reader->since_ns = now_ns();
	atomic_store(&reader->role, ORPHAN);
	atomic_fetch_add(&orphans, 1);
	return true;
}

static struct reader *find(int fd, int role)
{
	for (int i = 0; i < MOST_READERS; i++)
		if (readers[i].fd == fd && atomic_load(&readers[i].role) == role)
			return &readers[i];
	return NULL;
}

static struct reader *place_for(int fd, int queue, int role)
{
	for (int i = 0; i < MOST_READERS; i++) {
		if (atomic_load(&readers[i].role) != FREE)
			continue;
		readers[i].fd = fd;
		readers[i].queue = queue;
		readers[i].thread = thread_id();
		readers[i].adopted = role == ADOPTED;
		atomic_store(&readers[i].role, role);
		return &readers[i];
	}
	return NULL;
}

/* Places are taken under the lock: a free one stays free while the lock is held. */
static bool has_place(void)
{
	for (int i = 0; i < MOST_READERS; i++)
		if (atomic_load(&readers[i].role) == FREE)
			return true;
	return false;
}

/* Under the lock: if a socket has no primary reader, wakes one of its threads, which becomes it. */
static void fill_vacancy(int fd)
{
	struct reader *next = find(fd, PRIMARY) || find(fd, KICKED) ? NULL : find(fd, OWN);
	if (!next)
		return;
	atomic_store(&next->role, KICKED);
	/* The queue then reports ENOTCONN, and wakes the thread that receives from it. */
	syscall(SYS_shutdown, next->queue, SHUT_RD);
}

/* Whether queues of the process's own threads are left to read. The broker knows about those of other processes. */
static bool own_orphans(int fd)
{
	for (int i = 0; i < MOST_READERS; i++)
		if (readers[i].fd == fd && atomic_load(&readers[i].role) == ORPHAN && !readers[i].adopted)
			return true;
	return false;
}

static void ended(void *unused)
{
	(void)unused;
	int before = errno, self = thread_id();
	if (split_active() && split_lock_within(TO_LEAVE_MS)) {
		for (int i = 0; i < MOST_READERS; i++) {
			struct reader *reader = &readers[i];
			int role = atomic_load(&reader->role);
			if (reader->thread != self || role == FREE || role == ORPHAN)
				continue;
			int fd = reader->fd;
			bool leaves = false;
			if (role == PRIMARY)
				atomic_store(&reader->role, FREE);
			else
				leaves = orphan(reader);
			fill_vacancy(fd);
			/* It may not have finished reading another thread's queue. */
			if (leaves || own_orphans(fd))
				wake_one(fd);
		}
		split_unlock();
	}
	errno = before;
}

/* In a child of fork: the queues are those of the parent's threads. */
void split_forget_readers(void)
{
	atomic_fetch_add(&generation, 1);
	atomic_store(&orphans, 0);
	atomic_store(&wakes, 0);
	for (int i = 0; i < MOST_READERS; i++) {
		int role = atomic_load(&readers[i].role);
		if (role != FREE && role != PRIMARY)
			syscall(SYS_close, readers[i].queue);
		atomic_store(&readers[i].role, FREE);
	}
}

/* A descriptor is closed, or replaced: a socket with its queues, or a queue whose number the program thinks free. */
void split_closed(unsigned first, unsigned last)
{
	int before = errno;
	bool any = false;
	for (int i = 0; i < MOST_READERS && !any; i++) {
		unsigned fd = readers[i].fd, queue = readers[i].queue;
		any = atomic_load(&readers[i].role) != FREE && ((fd >= first && fd <= last) || (queue >= first && queue <= last));
	}
	if (!any || split_in_vfork_child() || !split_lock()) {
		errno = before;
		return;
	}
	for (int i = 0; i < MOST_READERS; i++) {
		struct reader *reader = &readers[i];
		int role = atomic_load(&reader->role);
		unsigned fd = reader->fd, queue = reader->queue;
		if (role == FREE)
			continue;
		bool socket = fd >= first && fd <= last;
		bool itself = queue >= first && queue <= last;
		if (!socket && !itself)
			continue;
		if (role == ORPHAN)
			atomic_fetch_sub(&orphans, 1);
		atomic_store(&reader->role, FREE);
		if (!itself && role != PRIMARY)
			syscall(SYS_close, queue);
	}
	split_unlock();
	errno = before;
}

static int slot_of(int fd)
{
	int free = -1;
	unsigned now = atomic_load(&generation);
	for (int i = 0; i < MOST_SOCKETS_A_THREAD; i++) {
		bool current = mine[i].generation == now && (mine[i].shares || (mine[i].place && mine[i].place->thread == thread_id() &&
					   mine[i].place->fd == mine[i].fd && atomic_load(&mine[i].place->role) != FREE &&
					   atomic_load(&mine[i].place->role) != ORPHAN));
		if (current && mine[i].fd == fd)
			return i;
		if (!current)
			free = i;
	}
	if (free >= 0) {
		mine[free].generation = 0;
		mine[free].fd = fd;
		mine[free].shares = false;
		mine[free].place = NULL;
	}
	return free;
}

/* The first receive of this thread from this descriptor. */
static void take_place(int slot, int fd, bool polls)
{
	struct reader *place = NULL;
	bool again = false;
	if (!polls && has_key && split_lock()) {
		/* A thread that was asked to become the primary reader will: two of them would share one queue. */
		if (!find(fd, PRIMARY) && !find(fd, KICKED)) {
			place = place_for(fd, fd, PRIMARY);
		} else if (has_place()) {
			int queue = split_ask_queue(fd, QUEUES_FROM);
			again = queue == -2;
			if (queue >= 0) {
				fcntl(queue, F_SETFL, fcntl(fd, F_GETFL));
				place = place_for(fd, queue, OWN);
			}
		}
		split_unlock();
		if (place)
			pthread_setspecific(key, mine);
	}
	mine[slot].place = place;
	mine[slot].shares = !place;
	mine[slot].generation = again ? 0 : atomic_load(&generation);
}

/* Not under the lock: this thread was asked to be the primary reader from now on. */
static bool keep(struct reader *place)
{
	if (!split_lock())
		return false;
	struct reader *before = place_for(place->fd, place->queue, KICKED);
	if (before) {
		/* Its place becomes the primary reader's, and its queue is orphaned. */
		place->queue = place->fd;
		atomic_store(&place->role, PRIMARY);
		before->thread = 0;
		orphan(before);
	}
	split_unlock();
	return before;
}

/* Gives a thread's queue to the others to read: from now on the thread shares the socket. */
static void give_back(int slot, int fd)
{
	struct reader *place = mine[slot].place;
	if (!place || atomic_load(&place->role) == PRIMARY || !split_lock())
		return;
	if (orphan(place))
		wake_one(fd);
	split_unlock();
	mine[slot].place = NULL;
	mine[slot].shares = true;
}

int split_source(int fd, void **place)
{
	*place = NULL;
	if (!split_is_datagram(fd) || !split_active())
		return fd;
	int before = errno;
	int slot = slot_of(fd);
	if (slot >= 0 && mine[slot].generation == 0)
		take_place(slot, fd, split_state(fd) == STATE_POLLED);
	else if (slot >= 0 && split_state(fd) == STATE_POLLED)
		give_back(slot, fd);
	errno = before;
	if (slot < 0 || mine[slot].shares)
		return fd;
	struct reader *reader = mine[slot].place;
	bool kept = atomic_load(&reader->role) == KICKED && keep(reader);
	errno = before;
	if (kept)
		return -1;
	*place = reader;
	return reader->queue;
}

void split_inherit(int fd, enum how how)
{
	int before = errno;
	if (split_lock()) {
		if (split_state(fd) == STATE_INHERITED) {
			/* If the broker could not be asked, it is asked the next time. The socket is shared until
			 * then. */
			if (split_claim(fd, how))
				split_set(fd, STATE_DATAGRAM);
		}
		split_unlock();
	}
	errno = before;
}

static _Atomic int64_t foreign_since;
static _Atomic int foreign; /* empty datagrams since then that were somebody else's */

static bool may_ask(void)
{
	int64_t now = now_ns();
	if (now - atomic_load(&foreign_since) > ASKED_NS) {
		atomic_store(&foreign_since, now);
		atomic_store(&foreign, 0);
	}
	return atomic_load(&foreign) < MOST_ASKED;
}

/* Whether the broker sent an empty datagram. Then it may hand over an orphaned queue. */
static bool broker_woke(int fd)
{
	int before = errno, queue = -1;
	bool woke = false;
	if (may_ask() && split_active() && split_lock()) {
		woke = has_place() && split_ask_left(fd, QUEUES_FROM, &queue);
		if (queue >= 0) {
			struct reader *left = place_for(fd, queue, ADOPTED);
			left->thread = 0;
			left->since_ns = now_ns();
			atomic_store(&left->role, ORPHAN);
			atomic_fetch_add(&orphans, 1);
		}
		split_unlock();
	}
	if (!woke)
		atomic_fetch_add(&foreign, 1);
	errno = before;
	return woke;
}

bool split_woken(int fd)
{
	if (!split_is_datagram(fd))
		return false;
	int left = atomic_load(&wakes);
	while (left > 0 && !atomic_compare_exchange_weak(&wakes, &left, left - 1))
		;
	return left > 0 || broker_woke(fd);
}

bool split_is_shut(void *place)
{
	struct reader *reader = place;
	return reader && atomic_load(&reader->role) == KICKED;
}

bool split_kicked(int fd, void *place)
{
	return split_is_shut(place) || split_woken(fd);
}

void split_polls(int fd)
{
	if (!split_is_datagram(fd))
		return;
	int before = errno;
	split_set(fd, STATE_POLLED);
	int slot = slot_of(fd);
	if (slot >= 0 && mine[slot].generation == 0)
		take_place(slot, fd, true);
	else if (slot >= 0)
		give_back(slot, fd);
	errno = before;
}

int split_next_orphan(int fd, int after)
{
	if (atomic_load_explicit(&orphans, memory_order_relaxed) == 0 || !split_is_datagram(fd))
		return -1;
	for (int i = after + 1; i < MOST_READERS; i++)
		if (readers[i].fd == fd && atomic_load(&readers[i].role) == ORPHAN)
			return i;
	return -1;
}

int split_orphan(int number)
{
	return readers[number].queue;
}

void split_orphan_is_empty(int number)
{
	int before = errno;
	struct reader *reader = &readers[number];
	if (split_lock()) {
		if (atomic_load(&reader->role) == ORPHAN && now_ns() - reader->since_ns > SETTLED_NS) {
			syscall(SYS_close, reader->queue);
			atomic_fetch_sub(&orphans, 1);
			atomic_store(&reader->role, FREE);
		}
		split_unlock();
	}
	errno = before;
}

__attribute__((constructor)) static void start(void)
{
	has_key = pthread_key_create(&key, ended) == 0;
}
