/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
  * The types that locks.bpf.c and user space share: number and duration of the
  * waits for the locks of the UDP sockets of one port.
 */
#ifndef WAKEONE_LOCKS_H
#define WAKEONE_LOCKS_H

#include <linux/types.h>

enum wakeone_lock_kind {
	WAKEONE_LOCK_RECEIVE_QUEUE, /* sk_receive_queue.lock */
	WAKEONE_LOCK_READER_QUEUE,  /* udp_sock.reader_queue.lock */
	WAKEONE_LOCK_SOCKET,        /* sk_lock.slock */
	WAKEONE_LOCK_WAIT_QUEUE,    /* sk_wq->wait.lock, where readers sleep */
	WAKEONE_LOCK_OTHER,         /* any other, waited for by the readers */
	WAKEONE_LOCK_KINDS
};

struct wakeone_lock_counts {
	__u64 contentions; /* begun */
	__u64 waits;       /* ended, with both ends seen */
	__u64 wait_ns;     /* sum of those */
};

struct wakeone_locks {
	/* Set before the probes are attached. */
	__u32 port;        /* the sockets', in host order */
	__u32 tgid;        /* the readers' process */
	/* Found by the walk over the sockets. */
	__u32 sockets;
	__u32 locks;
	/* Counted. */
	struct wakeone_lock_counts kind[WAKEONE_LOCK_KINDS];
};

#endif
