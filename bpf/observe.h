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

struct wakeone_times {
	__u64 count;
	__u64 us_sum;
	__u64 us_max;
	__u32 bucket[WAKEONE_WAIT_BUCKETS];
};

struct wakeone_watched_worker {
	__u64 accepted;       /* connections that accept() returned */
	__u64 accepted_empty; /* accept() calls that found nothing (EAGAIN) */
	__u64 woken;          /* threads woken for a connection */
	/* When it accepted the connection that is open, in us of CLOCK_MONOTONIC;
	 * 0: none is. */
	__u64 accepted_us;
	__u64 overlapping;    /* connections accepted while another was open */
	struct wakeone_times wait; /* in the accept queue */
	struct wakeone_times held; /* from accept() to close(), of one at a time */
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
