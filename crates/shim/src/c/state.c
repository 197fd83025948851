/* What is known of descriptors, and of this process. */
#define _GNU_SOURCE
#include "split.h"

#include <errno.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static _Atomic unsigned char table[SPLIT_MOST_FDS];
/* No descriptor above this one has ever had a state. */
static _Atomic int highest = -1;

/* In a page that the kernel wipes in a child of fork or clone, but not in one that shares our memory (vfork,
 * posix_spawn): 0 in a process that has not yet looked at the table that it inherited. */
enum { MARK_WIPED = 0, MARK_HERE = 1, MARK_CLEANING = 2 };
static _Atomic int *mark;
/* Where the kernel cannot wipe pages (before 4.14): whose the table is. */
static _Atomic int owner;

static bool ready;
static _Atomic int asking; /* the thread that holds the lock */

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

/* A new process: queues of its parent's own are not its own. */
static void look_anew(void)
{
	atomic_store(&asking, 0);
	split_forget_readers();
	int last = atomic_load(&highest);
	for (int fd = 0; fd <= last; fd++)
		if (atomic_load_explicit(&table[fd], memory_order_relaxed) == STATE_SETTLED)
			atomic_store_explicit(&table[fd], STATE_UNKNOWN, memory_order_relaxed);
}

bool split_active(void)
{
	if (!ready)
		return false;
	if (!mark) {
		int self = getpid();
		if (atomic_load(&owner) != self) {
			look_anew();
			atomic_store(&owner, self);
		}
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
	/* Another thread is at it; a handler that interrupted it must not wait for it. */
	return atomic_load(mark) == MARK_HERE;
}

enum state split_state(int fd)
{
	if (fd < 0 || fd >= SPLIT_MOST_FDS)
		return STATE_FOREIGN;
	return atomic_load_explicit(&table[fd], memory_order_relaxed);
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

bool split_lock(void)
{
	int self = syscall(SYS_gettid);
	int64_t until = now_ms() + 10000;
	for (;;) {
		int free = 0;
		if (atomic_compare_exchange_strong(&asking, &free, self))
			return true;
		if (free == self || now_ms() > until)
			return false;
		nap();
	}
}

void split_unlock(void)
{
	atomic_store(&asking, 0);
}

__attribute__((constructor)) static void start(void)
{
	int before = errno;
	if (split_find_broker()) {
		long page = sysconf(_SC_PAGESIZE);
		void *memory = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (memory != MAP_FAILED && madvise(memory, page, MADV_WIPEONFORK) == 0) {
			mark = memory;
			atomic_store(mark, MARK_HERE);
		}
		atomic_store(&owner, getpid());
		split_remember_stderr();
		ready = true;
	}
	errno = before;
}
