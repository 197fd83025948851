/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The workers that share one listener, as the programs of bursts.bpf.c and the
 * steerer know them. Both have it mapped. All of it is 0 at first.
 */
#ifndef WAKEONE_BURSTS_H
#define WAKEONE_BURSTS_H

#include <linux/types.h>

/* As many as a word has bits. */
#define WAKEONE_SHARERS 64

/* It is woken again after a refusal: it waits level-triggered. */
#define WAKEONE_SHARER_REFUSABLE 1

struct wakeone_sharer {
	/* Written by the steerer. */
	__u64 base;       /* its connections without those of `accepted` and `closed` */
	__u32 pid;        /* of the first PID namespace; 0: nobody is here */
	__u32 weight;     /* 0: it gets none */
	__u32 flags;
	/* Written by both: it did not come when it was its turn, and has not come since. */
	__u32 absent;
	/* Written by the programs. */
	__u64 set;        /* the address of its struct eventpoll */
	__u64 accepted;   /* calls of accept() that were let pass while something waited */
	__u64 closed;     /* connections that it closed */
	__u64 seen_ns;    /* when it waited or accepted; 0: it was seen doing something else */
	__u64 called_ns;  /* when it called accept() */
	__u64 refused_ns; /* since when it has had its share of a burst; 0: it has not */
	__u64 refusals;
};

struct wakeone_bursts {
	/* Written by the steerer. */
	__u64 cookie;     /* the listener's */
	__u64 until_ns;   /* nobody is refused after that */
	__u64 limit_ns;   /* how long a worker may be refused */
	__u64 port;       /* the listener's */
	/* Written by the programs. */
	__u64 begun_ns;   /* when a connection last came to an empty queue */
	__u64 looked_ns;  /* when they last looked who waits */
	struct wakeone_sharer sharer[WAKEONE_SHARERS];
};

#endif
