/* The library's start, before the program's own, and forks. */
#include "split.h"

#include <errno.h>
#include <pthread.h>

/* A fork waits for another thread's conversation with the broker. Otherwise the child would inherit a connection
 * to the broker, or its parent's queue, under a number that nobody would ever close. */
static __thread __attribute__((tls_model("initial-exec"))) bool forking;

static void before_fork(void)
{
	int before = errno;
	forking = split_lock();
	errno = before;
}

static void after_fork(void)
{
	if (!forking)
		return;
	forking = false;
	split_unlock();
}

__attribute__((constructor)) static void start(void)
{
	int before = errno;
	if (split_find_broker()) {
		split_remember_stderr();
		split_begin(split_forget_readers);
		split_see_inherited();
		pthread_atfork(before_fork, after_fork, after_fork);
	}
	errno = before;
}
