// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Divides a burst among workers that share one listener.
 *
 * Of many connections at once the first worker woken takes nearly all, as event
 * loops accept until there is nothing left. Here a worker that has its share of
 * what waits gets EAGAIN before a connection is taken, as if another had been
 * faster. The share is the level that all would have if those that wait were
 * handed out now. So a worker takes its whole share in one go.
 *
 * It is done only for a worker that waits and has less, and for a limited time.
 * A program that changes what a function returns (fmod_ret) may stand at those
 * of the security module, whether there is any.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>
#include <stdbool.h>
#include "bursts.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define AGAIN 11
/* O_NONBLOCK of most architectures. */
#define NONBLOCK 04000
/* So often at most the programs look which workers wait. */
#define LOOK_EVERY_NS 1000000

/* The few fields that are read. The kernel's BTF tells where they are. */
typedef struct {
	long long counter;
} atomic64_t;
struct sock;
struct sock_common {
	atomic64_t skc_cookie;
	unsigned short skc_num;
	struct sock *skc_listener;
} __attribute__((preserve_access_index));
struct sock {
	struct sock_common __sk_common;
	unsigned int sk_ack_backlog;
} __attribute__((preserve_access_index));
struct request_sock {
	struct sock_common __req_common;
} __attribute__((preserve_access_index));
struct file {
	unsigned int f_flags;
	void *private_data;
} __attribute__((preserve_access_index));
struct socket {
	struct file *file;
	struct sock *sk;
} __attribute__((preserve_access_index));
struct fdtable {
	unsigned int max_fds;
	struct file **fd;
} __attribute__((preserve_access_index));
struct files_struct {
	struct fdtable *fdt;
} __attribute__((preserve_access_index));
struct io_uring_task;
struct task_struct {
	struct files_struct *files;
	struct io_uring_task *io_uring;
} __attribute__((preserve_access_index));
struct list_head {
	struct list_head *next;
} __attribute__((preserve_access_index));
struct wait_queue_head {
	struct list_head head;
} __attribute__((preserve_access_index));
typedef struct wait_queue_head wait_queue_head_t;
struct eventpoll {
	wait_queue_head_t wq;
} __attribute__((preserve_access_index));

struct wakeone_bursts bursts SEC(".data.bursts") = {};

/* Wakes the steerer when a worker is refused. `refusals` tells which one. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096);
} refused SEC(".maps");

/* The verifier walks a loop once for each way through it. So nothing that a loop sums up
 * may depend on a branch, and each loop over workers is a function of its own that is
 * verified once. */
#define GLOBAL __attribute__((noinline))
#define ADD(counter, n) ((void)__sync_fetch_and_add(&(counter), (n)))

/* 1 or 0. */
#define IS_NOT_0(word) (((__u64)(word) | -(__u64)(word)) >> 63)
#define IS_LESS(one, other) (((__u64)(one) - (__u64)(other)) >> 63)

/* 1 if a thread waits in an epoll set now (waitqueue_active in fs/eventpoll.c). The set
 * may be gone: its memory then has anything. */
static __always_inline __u64 has_waiter(__u64 set)
{
	struct eventpoll *ep = (void *)set;
	struct list_head *head = __builtin_preserve_access_index(&ep->wq.head);
	__u64 next = 0;

	bpf_probe_read_kernel(&next, sizeof(next), &head->next);
	return IS_NOT_0(next) & IS_NOT_0(next ^ (__u64)head);
}

/* This notes who waits, just before the first connection of many is queued and wakes
 * them (inet_csk_clone_lock, net/ipv4/inet_connection_sock.c). Later nobody can
 * tell a worker that was woken from one that has something else to do. */
SEC("fentry/security_inet_csk_clone")
int BPF_PROG(wakeone_arrival, struct sock *child, struct request_sock *request)
{
	struct sock *listener = BPF_CORE_READ(request, __req_common.skc_listener);
	__u64 now;
	__u32 i;

	if (!listener || BPF_CORE_READ(listener, __sk_common.skc_cookie.counter) != bursts.cookie ||
	    BPF_CORE_READ(listener, sk_ack_backlog))
		return 0;
	now = bpf_ktime_get_ns();
	bursts.begun_ns = now;
	if (now - bursts.looked_ns < LOOK_EVERY_NS)
		return 0;
	bursts.looked_ns = now;
	for (i = 0; i < WAKEONE_SHARERS; i++)
		bursts.sharer[i].seen_ns = has_waiter(bursts.sharer[i].set) * now;
	return 0;
}

/* Never below 0. */
static __always_inline __u64 load_of(const struct wakeone_sharer *one)
{
	__u64 load = one->base + one->accepted - one->closed;

	return load & ((load >> 63) - 1);
}

/* The workers that may have a connection of those that wait, a bit for each. */
GLOBAL __u64 wakeone_present(__u64 now)
{
	__u64 all = 0;
	__u32 i;

	for (i = 0; i < WAKEONE_SHARERS; i++) {
		struct wakeone_sharer *one = &bursts.sharer[i];
		__u64 here = IS_LESS(now - one->seen_ns, bursts.limit_ns) | has_waiter(one->set);

		all |= (here & IS_NOT_0(one->weight) & ~(__u64)one->absent) << i;
	}
	return all;
}

/* Leaves those out that have as many as they would have if all had the same. */
GLOBAL __u64 wakeone_below(__u64 some, __u64 queued)
{
	__u64 total = queued, weights = 0, left = 0;
	__u32 i;

	for (i = 0; i < WAKEONE_SHARERS; i++) {
		__u64 in = -(some >> i & 1);

		total += load_of(&bursts.sharer[i]) & in;
		weights += bursts.sharer[i].weight & in;
	}
	for (i = 0; i < WAKEONE_SHARERS; i++) {
		const struct wakeone_sharer *one = &bursts.sharer[i];

		left |= IS_LESS(load_of(one) * weights, one->weight * total) << i;
	}
	return some & left;
}

/* Those were waited for in vain that did not come since then. */
GLOBAL int wakeone_pass_over(__u64 some, __u64 since)
{
	__u32 i;

	for (i = 0; i < WAKEONE_SHARERS; i++) {
		struct wakeone_sharer *one = &bursts.sharer[i];

		one->absent |= some >> i & IS_LESS(one->called_ns, since);
	}
	return 0;
}

/* The others that have less than their share of what waits, if a worker has its own. */
static __always_inline __u64 wanting(__u32 place, __u32 queued, __u64 now)
{
	__u64 bit = 1ULL << place, others = wakeone_present(now) | bit;

	others = wakeone_below(others, queued);
	/* Those that have more than all would have take no part. */
	if (others & bit)
		others = wakeone_below(others, queued);
	if (others & bit)
		others = wakeone_below(others, queued);
	return others & bit ? 0 : others;
}

/* The place of a process, counted from 1. */
GLOBAL __u32 wakeone_place(__u64 pid)
{
	__u64 place = 0;
	__u32 i;

	for (i = 0; i < WAKEONE_SHARERS; i++)
		place |= (1 - IS_NOT_0(bursts.sharer[i].pid ^ pid)) * (i + 1);
	return place;
}

/* Whether EAGAIN has the running worker ask again. One that accepts by io_uring may take
 * it for an error. */
static __always_inline bool may_refuse(const struct wakeone_sharer *me, const struct socket *sock)
{
	struct task_struct *task = (void *)bpf_get_current_task();

	return me->flags & WAKEONE_SHARER_REFUSABLE && sock->file->f_flags & NONBLOCK &&
	       !(bpf_core_field_exists(task->io_uring) && BPF_CORE_READ(task, io_uring));
}

SEC("fmod_ret/security_socket_accept")
int BPF_PROG(wakeone_refuse, struct socket *sock, struct socket *child, int ret)
{
	struct wakeone_sharer *me;
	__u64 now, others;
	__u32 queued, place;

	if (ret || sock->sk->__sk_common.skc_cookie.counter != bursts.cookie)
		return ret;
	place = wakeone_place(bpf_get_current_pid_tgid() >> 32) - 1;
	if (place >= WAKEONE_SHARERS)
		return 0;
	me = &bursts.sharer[place];
	now = bpf_ktime_get_ns();
	me->seen_ns = me->called_ns = now;
	me->absent = 0;
	queued = sock->sk->sk_ack_backlog;
	/* That was in an earlier burst. */
	if (me->refused_ns < bursts.begun_ns)
		me->refused_ns = 0;
	if (!queued)
		return 0;
	others = may_refuse(me, sock) && now < bursts.until_ns ? wanting(place, queued, now) : 0;
	if (!others) {
		me->refused_ns = 0;
	} else if (!me->refused_ns || now - me->refused_ns < bursts.limit_ns) {
		me->refusals++;
		if (!me->refused_ns) {
			me->refused_ns = now;
			bpf_ringbuf_output(&refused, &place, sizeof(place), 0);
		}
		return -AGAIN;
	} else {
		/* From here on it takes what there is, until another burst comes. */
		wakeone_pass_over(others, me->refused_ns);
	}
	ADD(me->accepted, 1);
	return 0;
}

/* A worker closes a connection of its own. */
SEC("fentry/inet_release")
int BPF_PROG(wakeone_closed, struct socket *sock)
{
	struct sock *sk = sock->sk;
	__u32 place;

	if (!sk || sk->__sk_common.skc_num != bursts.port ||
	    sk->__sk_common.skc_cookie.counter == bursts.cookie)
		return 0;
	place = wakeone_place(bpf_get_current_pid_tgid() >> 32) - 1;
	if (place < WAKEONE_SHARERS)
		ADD(bursts.sharer[place].closed, 1);
	return 0;
}

/* Attached nowhere: the steerer runs it, with the set of a worker among its own
 * descriptors (bpf_prog_test_run_raw_tp, net/bpf/test_run.c). */
SEC("raw_tp")
int wakeone_set(struct bpf_raw_tracepoint_args *ctx)
{
	__u32 place = ctx->args[0], number = ctx->args[1];
	struct task_struct *task = (void *)bpf_get_current_task();
	struct fdtable *table = BPF_CORE_READ(task, files, fdt);
	struct file **files = BPF_CORE_READ(table, fd), *file = NULL;

	if (place >= WAKEONE_SHARERS || number >= BPF_CORE_READ(table, max_fds) ||
	    bpf_probe_read_kernel(&file, sizeof(file), &files[number]))
		return 0;
	bursts.sharer[place].set = (__u64)BPF_CORE_READ(file, private_data);
	return 0;
}
