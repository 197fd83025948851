// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Measures waits for the locks of a UDP socket with the kernel's contention
 * tracepoints (include/trace/events/lock.h). They tell locks apart by address,
 * and a walk over the sockets notes those addresses first.
 *
 * An uncontended lock passes no tracepoint and costs nothing here. So
 * acquisitions and hold times are not measured: only a kernel with
 * CONFIG_LOCK_STAT knows them.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>
#include <stdbool.h>
#include "iter.h"
#include "locks.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* The few fields that are read. The kernel's BTF tells where they are. */
struct spinlock {
	/* Only its address is of interest. */
	int dummy;
};
typedef struct spinlock spinlock_t;
struct sk_buff_head {
	spinlock_t lock;
} __attribute__((preserve_access_index));
typedef struct {
	spinlock_t slock;
} __attribute__((preserve_access_index)) socket_lock_t;
struct wait_queue_head {
	spinlock_t lock;
} __attribute__((preserve_access_index));
typedef struct wait_queue_head wait_queue_head_t;
struct socket_wq {
	wait_queue_head_t wait;
} __attribute__((preserve_access_index));
struct sock {
	struct sock_common __sk_common;
	struct sk_buff_head sk_receive_queue;
	socket_lock_t sk_lock;
	struct socket_wq *sk_wq;
} __attribute__((preserve_access_index));
struct udp_sock {
	struct sk_buff_head reader_queue;
} __attribute__((preserve_access_index));
/* Of kernel/0003-udp-several-receive-queues.patch; no other kernel has them. */
struct udp_queue___papers {
	struct sk_buff_head list;
	wait_queue_head_t wait;
} __attribute__((preserve_access_index));
struct udp_queues___papers {
	unsigned int count;
	struct udp_queue___papers queue[];
} __attribute__((preserve_access_index));
struct udp_sock___papers {
	struct udp_queues___papers *queues;
} __attribute__((preserve_access_index));

/* The third argument of contention_begin. */
enum { BY_SPINNING = 1 << 0, OF_MUTEX = 1 << 5 };

struct wakeone_locks locks SEC(".data.locks") = {};

/* Address of a lock -> its kind. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u64);
	__type(value, __u32);
} kinds SEC(".maps");

/* A wait that has begun. */
struct wait {
	__u64 lock;
	__u64 since_ns;
};

/* A thread that spins stays on its CPU. Meanwhile an interrupt may wait for a
 * lock of another kind, hence one entry for each kind. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, WAKEONE_LOCK_KINDS);
	__type(key, __u32);
	__type(value, struct wait);
} spinning SEC(".maps");

/* A thread that sleeps may wake up on another CPU, so the key is the thread. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, struct wait);
} sleeping SEC(".maps");

#define ADD(counter, n) ((void)__sync_fetch_and_add(&(counter), (n)))

static __always_inline void note(__u64 lock, __u32 kind)
{
	if (!bpf_map_update_elem(&kinds, &lock, &kind, BPF_ANY))
		ADD(locks.locks, 1);
}

/* As many as any experiment makes. */
#define QUEUES 64

#define IN_QUEUE(field) bpf_core_field_offset(((struct udp_queue___papers *)0)->field)

static __always_inline void note_queues(const struct udp_sock___papers *udp)
{
	struct udp_queues___papers *queues = BPF_CORE_READ(udp, queues);
	__u64 queue = (__u64)queues + bpf_core_field_offset(queues->queue);
	__u32 count, i;

	if (!queues)
		return;
	count = BPF_CORE_READ(queues, count);
	for (i = 0; i < QUEUES && i < count; i++) {
		note(queue + IN_QUEUE(list) + bpf_core_field_offset(((struct sk_buff_head *)0)->lock),
		     WAKEONE_LOCK_RECEIVE_QUEUE);
		note(queue + IN_QUEUE(wait) + bpf_core_field_offset(((struct wait_queue_head *)0)->lock),
		     WAKEONE_LOCK_WAIT_QUEUE);
		queue += bpf_core_type_size(struct udp_queue___papers);
	}
}

/* Walks the sockets of the reader's network namespace. */
SEC("iter/udp")
int wakeone_udp_locks(struct bpf_iter__udp *ctx)
{
	struct udp_sock *udp = ctx->udp_sk;
	struct sock *sk = (struct sock *)udp;
	struct socket_wq *wq;

	if (!sk || BPF_CORE_READ(sk, __sk_common.skc_num) != locks.port)
		return 0;
	ADD(locks.sockets, 1);
	note((__u64)__builtin_preserve_access_index(&sk->sk_receive_queue.lock),
	     WAKEONE_LOCK_RECEIVE_QUEUE);
	/* Linux 4.13. */
	if (bpf_core_field_exists(udp->reader_queue))
		note((__u64)__builtin_preserve_access_index(&udp->reader_queue.lock),
		     WAKEONE_LOCK_READER_QUEUE);
	if (bpf_core_field_exists(((struct udp_sock___papers *)udp)->queues))
		note_queues((struct udp_sock___papers *)udp);
	note((__u64)__builtin_preserve_access_index(&sk->sk_lock.slock), WAKEONE_LOCK_SOCKET);
	wq = BPF_CORE_READ(sk, sk_wq);
	if (wq)
		note((__u64)__builtin_preserve_access_index(&wq->wait.lock),
		     WAKEONE_LOCK_WAIT_QUEUE);
	return 0;
}

/* Returns WAKEONE_LOCK_KINDS for a lock of no interest. */
static __always_inline __u32 kind_of(__u64 lock)
{
	__u32 *kind = bpf_map_lookup_elem(&kinds, &lock);

	if (kind)
		return *kind;
	return bpf_get_current_pid_tgid() >> 32 == locks.tgid ? WAKEONE_LOCK_OTHER
							      : WAKEONE_LOCK_KINDS;
}

static __always_inline void begun(__u32 kind)
{
	if (kind < WAKEONE_LOCK_KINDS)
		ADD(locks.kind[kind].contentions, 1);
}

static __always_inline void ended(__u32 kind, __u64 since_ns)
{
	if (kind >= WAKEONE_LOCK_KINDS)
		return;
	ADD(locks.kind[kind].waits, 1);
	ADD(locks.kind[kind].wait_ns, bpf_ktime_get_ns() - since_ns);
}

SEC("tp_btf/contention_begin")
int BPF_PROG(wakeone_contention_begin, void *address, unsigned int flags)
{
	struct wait wait = { .lock = (__u64)address }, *spin;
	__u32 kind = kind_of(wait.lock), thread;

	if (kind >= WAKEONE_LOCK_KINDS)
		return 0;
	wait.since_ns = bpf_ktime_get_ns();
	if ((flags & (BY_SPINNING | OF_MUTEX)) == BY_SPINNING) {
		spin = bpf_map_lookup_elem(&spinning, &kind);
		if (spin)
			*spin = wait;
		begun(kind);
		return 0;
	}
	/* A mutex reports twice: when it begins to spin, and when it sleeps. */
	thread = (__u32)bpf_get_current_pid_tgid();
	if (!bpf_map_update_elem(&sleeping, &thread, &wait, BPF_NOEXIST))
		begun(kind);
	return 0;
}

/* The tracepoint does not tell whether the wait spun or slept. */
SEC("tp_btf/contention_end")
int BPF_PROG(wakeone_contention_end, void *address)
{
	__u64 lock = (__u64)address;
	__u32 kind = kind_of(lock), thread;
	struct wait *wait;

	if (kind >= WAKEONE_LOCK_KINDS)
		return 0;
	wait = bpf_map_lookup_elem(&spinning, &kind);
	if (wait && wait->lock == lock) {
		ended(kind, wait->since_ns);
		wait->lock = 0;
		return 0;
	}
	thread = (__u32)bpf_get_current_pid_tgid();
	wait = bpf_map_lookup_elem(&sleeping, &thread);
	if (wait && wait->lock == lock) {
		ended(kind, wait->since_ns);
		bpf_map_delete_elem(&sleeping, &thread);
	}
	return 0;
}
