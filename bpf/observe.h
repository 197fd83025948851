/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
  * The types that observe.bpf.c and user space share: counts of one listener and
  * of the processes that serve it, filled by read-only probes.
 */
#ifndef WAKEONE_OBSERVE_H
#define WAKEONE_OBSERVE_H

#include <linux/types.h>

#define WAKEONE_WATCHED_WORKERS 256
#define WAKEONE_WATCHED_SOCKETS 256
/* Waits in us, log-linear: below 16 exact, then 16 steps an octave (6 %), up to
 * 2^35 us. Both are powers of two: a mask is a bound that the verifier sees. */
#define WAKEONE_WAIT_STEPS 16
#define WAKEONE_WAIT_BUCKETS (WAKEONE_WAIT_STEPS * 32)

struct wakeone_watched_worker {
	__u64 accepted;       /* connections that accept() returned */
	__u64 accepted_empty; /* accept() calls that found nothing (EAGAIN) */
	__u64 woken;          /* threads woken for a connection */
	__u64 wait_us_max;
	__u64 wait_us_sum;
	__u64 waits;          /* connections whose wait was measured */
	__u32 wait[WAKEONE_WAIT_BUCKETS];
};

struct wakeone_watched {
	/* Set before the probes are attached. */
	__u32 port;           /* the listener's, in host order */
	__u32 netns;          /* inode of its network namespace */
	/* Counted. */
	__u64 connections;    /* put into a queue: the listener was told */
	__u64 wakeups;        /* threads of known workers woken by that */
	struct wakeone_watched_worker worker[WAKEONE_WATCHED_WORKERS];
};

#endif
