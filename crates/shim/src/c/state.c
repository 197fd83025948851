/* The states of descriptors, and of this process. */
#define _GNU_SOURCE
#include "split.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static _Atomic unsigned char table[SPLIT_MOST_FDS];
/* No descriptor above this one has ever had a state. */
static _Atomic int highest = -1;

/* A mark in a page that the kernel wipes in a child of fork or clone (MADV_WIPEONFORK). It does not wipe the page
 * of a child that shares our memory (vfork, posix_spawn). The mark is 0 in a process that has not yet looked at
 * the table that it inherited. */
enum { MARK_WIPED = 0, MARK_HERE = 1, MARK_CLEANING = 2 };
static _Atomic int *mark;
/* The process that the table describes. */
static _Atomic int owner;

static bool ready;
static void (*forget_parent)(void);
static _Atomic int asking; /* the thread that holds the lock */
static uint64_t mask;      /* its signal mask, as the kernel has it; under the lock */

static int64_t now_ms(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

static void nap(void)
{
	struct timespec time = { .tv_nsec = 200000 };
	syscall(SYS_nanosleep, &time, NULL);
}

/* Resets the table in a new process: the queues of its parent are not its own. */
static void look_anew(void)
{
	atomic_store(&asking, 0);
	forget_parent();
	int last = atomic_load(&highest);
	for (int fd = 0; fd <= last; fd++)
		if (atomic_load_explicit(&table[fd], memory_order_relaxed) != STATE_UNKNOWN)
			atomic_store_explicit(&table[fd], STATE_INHERITED, memory_order_relaxed);
	atomic_store(&owner, syscall(SYS_getpid));
}

void split_begin(void (*forget)(void))
{
	long page = sysconf(_SC_PAGESIZE);
	void *memory = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory != MAP_FAILED && madvise(memory, page, MADV_WIPEONFORK) == 0) {
		mark = memory;
		atomic_store(mark, MARK_HERE);
	}
	atomic_store(&owner, syscall(SYS_getpid));
	forget_parent = forget;
	ready = true;
}

bool split_in_vfork_child(void)
{
	return atomic_load_explicit(&owner, memory_order_relaxed) != syscall(SYS_getpid);
}

bool split_active(void)
{
	if (!ready)
		return false;
	if (!mark) {
		if (split_in_vfork_child())
			look_anew();
		return true;
	}
	int is = atomic_load_explicit(mark, memory_order_acquire);
	if (is == MARK_HERE)
		return true;
	int wiped = MARK_WIPED;
	if (atomic_compare_exchange_strong(mark, &wiped, MARK_CLEANING)) {
		look_anew();
		atomic_store(mark, MARK_HERE);
		return true;
	}
	/* Another thread is resetting the table. A handler that interrupted that thread must not wait for it. */
	return atomic_load(mark) == MARK_HERE;
}

enum state split_state(int fd)
{
	if (fd < 0 || fd >= SPLIT_MOST_FDS)
		return STATE_UNKNOWN;
	return atomic_load_explicit(&table[fd], memory_order_relaxed);
}

bool split_is_datagram(int fd)
{
	enum state state = split_state(fd);
	return state == STATE_DATAGRAM || state == STATE_POLLED;
}

void split_set(int fd, enum state state)
{
	if (fd < 0 || fd >= SPLIT_MOST_FDS)
		return;
	if (state != STATE_UNKNOWN) {
		int before = atomic_load(&highest);
		while (before < fd && !atomic_compare_exchange_weak(&highest, &before, fd))
			;
	}
	atomic_store_explicit(&table[fd], state, memory_order_relaxed);
}

void split_forget(unsigned first, unsigned last)
{
	int high = atomic_load(&highest);
	if (high < 0)
		return;
	if (last > (unsigned)high)
		last = high;
	for (unsigned fd = first; fd <= last; fd++)
		atomic_store_explicit(&table[fd], STATE_UNKNOWN, memory_order_relaxed);
}

#define SIGNAL(number) (1ull << ((number) - 1))
/* Signals that a fault of the thread itself raises are not blocked, nor is the one of seccomp. */
#define FAULTS (SIGNAL(SIGSEGV) | SIGNAL(SIGBUS) | SIGNAL(SIGFPE) | SIGNAL(SIGILL) | SIGNAL(SIGTRAP) | SIGNAL(SIGSYS))
#define IGNORED_BY_DEFAULT (SIGNAL(SIGCHLD) | SIGNAL(SIGCONT) | SIGNAL(SIGURG) | SIGNAL(SIGWINCH))

/* Uses the system call, which covers the C library's own signals too. */
static void set_mask(uint64_t set, uint64_t *before)
{
	syscall(SYS_rt_sigprocmask, SIG_SETMASK, &set, before, sizeof(set));
}

bool split_lock_within(int64_t patience_ms)
{
	int self = syscall(SYS_gettid);
	int64_t until = now_ms() + patience_ms;
	for (;;) {
		uint64_t before = 0;
		set_mask(~FAULTS, &before);
		int free = 0;
		if (atomic_compare_exchange_strong(&asking, &free, self)) {
			mask = before;
			return true;
		}
		set_mask(before, NULL);
		if (free == self || now_ms() > until)
			return false;
		nap();
	}
}

bool split_lock(void)
{
	return split_lock_within(30000);
}

void split_unlock(void)
{
	uint64_t before = mask;
	atomic_store(&asking, 0);
	set_mask(before, NULL);
}

/* The layout of the system call. */
struct action {
	void (*handler)(int);
	unsigned long flags;
	void *restorer;
	uint64_t mask;
};

/* Whether a signal has an effect: it has a handler, or its default is to end the process. */
static bool matters(int number)
{
	struct action action = { 0 };
	if (syscall(SYS_rt_sigaction, number, NULL, &action, sizeof(action.mask)) != 0 || action.handler == SIG_IGN)
		return false;
	return action.handler != SIG_DFL || !(IGNORED_BY_DEFAULT & SIGNAL(number));
}

bool split_signal_waits(void)
{
	uint64_t set = 0;
	syscall(SYS_rt_sigpending, &set, sizeof(set));
	set &= ~mask;
	for (int number = 1; number <= 64; number++)
		if (set & SIGNAL(number) && matters(number))
			return true;
	return false;
}
