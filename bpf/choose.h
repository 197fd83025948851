/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What every selector does, whatever the protocol: the array of sockets it
 * selects from, the ways out, and the queues' lengths read where they are.
 */
#ifndef WAKEONE_CHOOSE_H
#define WAKEONE_CHOOSE_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <stdbool.h>
#include "policy.h"
#include "maps.h"

/* The sockets of one reuseport group, by slot. */
struct {
	__uint(type, BPF_MAP_TYPE_REUSEPORT_SOCKARRAY);
	__uint(max_entries, WAKEONE_MAX_SLOTS);
	__type(key, __u32);
	__type(value, __u64);
} sockets SEC(".maps");

#define ADD(counter, n) ((void)__sync_fetch_and_add(&(counter), (n)))

static __always_inline struct wakeone_slot *slot_at(__u32 i)
{
	return i < WAKEONE_MAX_SLOTS ? (struct wakeone_slot *)wakeone_slot_at(&table, i) : NULL;
}

/* The usual way out, SELECTED, has no counter of its own: it is what the slots'
 * `selected` hold beyond the others, and a word that every connection writes
 * would travel between the CPUs with each. */
static __always_inline int leave(enum wakeone_exit why, int verdict)
{
	if (why != WAKEONE_EXIT_SELECTED)
		ADD(table.exits[why], 1);
	return verdict;
}

/* Asked only where the answer matters: a clock costs more than a slot. */
static __always_inline bool agent_gone(void)
{
	__u64 beat = WAKEONE_READ(table.heartbeat_ns);

	if (!(WAKEONE_READ(table.flags) & WAKEONE_TABLE_MARKED) &&
	    WAKEONE_READ(table.policy) != WAKEONE_SHORTEST_QUEUE)
		return false;

	/* Coarse: a jiffy is fine, and it costs a load instead of a clock read. */
	return !beat || bpf_ktime_get_coarse_ns() - beat > table.heartbeat_limit_ns;
}

static __always_inline bool try_slot(struct sk_reuseport_md *md, __u32 i)
{
	return bpf_sk_select_reuseport(md, &sockets, &i, 0) == 0;
}

/*
 * The policy's slot was empty: its listener closed and nobody has said so yet.
 * Ask the others, from a random one on, so that no neighbour of a dead slot
 * inherits all of its load.
 */
__noinline int try_others(struct sk_reuseport_md *md, __u32 start)
{
	__u32 n = wakeone_slots(&table);

	for (__u32 k = 0; k < WAKEONE_MAX_SLOTS; k++) {
		__u32 i;

		if (k >= n)
			break;
		i = start + k;
		if (i >= n)
			i -= n;
		if (i >= WAKEONE_MAX_SLOTS)
			break;
		if (wakeone_tier(&table.slot[i], 1) != WAKEONE_TIER_DOWN && try_slot(md, i))
			return i;
	}
	return WAKEONE_NONE;
}

/* ---- reading the queues where they are --------------------------------- */

struct sock_reuseport {
	__u16 num_socks;
	void *socks[];
} __attribute__((preserve_access_index));

typedef struct {
	__s64 counter;
} atomic64_t;

typedef struct {
	int counter;
} atomic_t;

struct sock_common {
	atomic64_t skc_cookie;
} __attribute__((preserve_access_index));

struct sock {
	struct sock_common __sk_common;
	struct sock_reuseport *sk_reuseport_cb;
	__u32 sk_ack_backlog;
	struct {
		atomic_t rmem_alloc;
	} sk_backlog;
} __attribute__((preserve_access_index));

extern void *bpf_rdonly_cast(const void *obj, __u32 btf_id) __ksym __weak;

/* Position in the kernel's group -> slot. A hint: the group is reordered when
 * a socket leaves, so the cookie decides. */
struct position {
	__u64 cookie;
	__u32 slot;
	__u32 pad;
};
struct position positions[WAKEONE_MAX_SLOTS];

/* What waits in a socket's queue, in the unit of its protocol. */
static __always_inline __u32 waiting_in(const struct sock *sk);

static __always_inline void read_queue(__u32 at, const struct sock *sk)
{
	__u64 cookie = sk->__sk_common.skc_cookie.counter;
	struct wakeone_slot *s;

	if (at >= WAKEONE_MAX_SLOTS)
		return;
	if (positions[at].cookie != cookie) {
		__u32 *slot = bpf_map_lookup_elem(&listeners, &cookie);

		if (!slot)
			return;
		positions[at].slot = *slot;
		positions[at].cookie = cookie;
	}
	s = slot_at(positions[at].slot);
	if (s)
		s->queued = waiting_in(sk);
}

/*
 * Join the shortest queue needs no bookkeeping: the group's sockets and
 * what waits in them are one pointer walk away (net/core/sock_reuseport.c).
 * Needs CAP_PERFMON; where that is missing the agent publishes the lengths.
 */
static __noinline int read_queues(struct sk_reuseport_md *md)
{
	const struct sock *sk = bpf_rdonly_cast(md->sk, bpf_core_type_id_kernel(struct sock));
	const struct sock_reuseport *group = sk->sk_reuseport_cb;
	__u32 n;
	__u64 base;

	if (!group)
		return 0;
	n = group->num_socks;
	base = (__u64)(long)group + bpf_core_field_offset(struct sock_reuseport, socks);
	for (__u32 i = 0; i < WAKEONE_MAX_SLOTS; i++) {
		const __u64 *entry;

		if (i >= n)
			break;
		/* The array is flexible: BTF gives it no length to check. */
		entry = bpf_rdonly_cast((void *)(long)(base + i * sizeof(*entry)), 0);
		read_queue(i, bpf_rdonly_cast((void *)(long)*entry,
					      bpf_core_type_id_kernel(struct sock)));
	}
	return 1;
}

#endif
