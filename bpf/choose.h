/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The part of a selector that all protocols share: the array of sockets it
 * selects from, the ways out, and reading the queue lengths in place.
 */
#ifndef WAKEONE_CHOOSE_H
#define WAKEONE_CHOOSE_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <stdbool.h>
#include "policy.h"
#include "maps.h"

/* Places for sockets. A group whose slots have two of them defines it first. */
#ifndef WAKEONE_PLACES
#define WAKEONE_PLACES WAKEONE_MAX_SLOTS
#endif

/* The sockets of one reuseport group, by place. */
struct {
	__uint(type, BPF_MAP_TYPE_REUSEPORT_SOCKARRAY);
	__uint(max_entries, WAKEONE_PLACES);
	__type(key, __u32);
	__type(value, __u64);
} sockets SEC(".maps");

/*
 * Wakes the agent: the group's sockets changed. One that was woken looks at all
 * of them, so a notice says nothing more, and one that finds no room is not
 * missed.
 */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096);
} notices SEC(".maps");

static __always_inline void notify_agent(void)
{
	__u64 notice = 0;

	bpf_ringbuf_output(&notices, &notice, sizeof(notice), 0);
}

/* The fields of the kernel's sockets that are read here. */
typedef struct {
	__s64 counter;
} atomic64_t;

typedef struct {
	int counter;
} atomic_t;

struct sock_common {
	volatile unsigned char skc_state;
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

/* Prefetches a slot's counters while the kernel looks for its socket. In a
 * group of many slots they are in no cache. */
static __always_inline void fetch_counters(__u32 slot)
{
	(void)WAKEONE_READ(wakeone_slot_at(&table, slot)->selected);
}

/* Counts a selection of this slot, as the policy's choice or in place of it. */
static __always_inline void count_selected(__u32 slot)
{
	struct wakeone_slot *s = wakeone_slot_at(&table, slot);

	ADD(s->selected, 1);
	if (WAKEONE_READ(s->gone))
		WAKEONE_WRITE(s->gone, 0);
}

/* Counts a way out. The usual one, SELECTED, and for QUIC BY_ID, has no counter of
 * its own: it is the sum of the slots' `selected` less the other ways out that
 * chose a slot. A word that every connection writes would travel between the CPUs
 * with each. */
static __always_inline int leave(enum wakeone_exit why, int verdict)
{
	if (why != WAKEONE_EXIT_SELECTED && why != WAKEONE_EXIT_BY_ID)
		ADD(table.exits[why], 1);
	return verdict;
}

static __always_inline bool heartbeat_is_old(void)
{
	__u64 beat = WAKEONE_READ(table.heartbeat_ns);

	/* Coarse: a jiffy is fine, and it costs a load instead of a clock read. */
	return !beat || bpf_ktime_get_coarse_ns() - beat > table.heartbeat_limit_ns;
}

/* Called only where the answer matters: reading a clock costs more than reading
 * a slot. */
static __always_inline bool agent_gone(__u32 policy)
{
	if (!(WAKEONE_READ(table.flags) & WAKEONE_TABLE_MARKED) && policy != WAKEONE_SHORTEST_QUEUE)
		return false;
	return heartbeat_is_old();
}

/* A listener that was shut down leaves an array of reuseport sockets. It does
 * not leave the map of a group that looks up. Set before loading, where the
 * group has that map and the program may read the kernel's memory. */
const volatile __u32 sees_closed = 0;

struct sk_reuseport_kern {
	struct sock *selected_sk;
} __attribute__((preserve_access_index));

/* Since Linux 6.2. */
extern void *bpf_cast_to_kern_ctx(void *obj) __ksym __weak;

#define STATE_LISTEN 10

/* Whether the socket just chosen does not listen: it would drop the SYN. The
 * next choice replaces it. */
static __always_inline bool chose_closed(struct sk_reuseport_md *md)
{
	struct sk_reuseport_kern *kern;

	if (!sees_closed || !bpf_cast_to_kern_ctx)
		return false;
	kern = bpf_cast_to_kern_ctx(md);
	return kern->selected_sk->__sk_common.skc_state != STATE_LISTEN;
}

/* The place of a slot's socket for what is new. */
#if WAKEONE_PLACES > WAKEONE_MAX_SLOTS
static __always_inline __u32 place_of(__u32 slot)
{
	__u32 flags = WAKEONE_READ(wakeone_slot_at(&table, slot)->flags);

	return slot + (flags / WAKEONE_SLOT_SECOND & 1) * WAKEONE_SECOND_AT;
}
#else
static __always_inline __u32 place_of(__u32 slot)
{
	return slot;
}
#endif

static __always_inline bool try_slot(struct sk_reuseport_md *md, __u32 i)
{
	__u32 place = place_of(i);

	if (bpf_sk_select_reuseport(md, &sockets, &place, 0) == 0 && !chose_closed(md))
		return true;
	if (!WAKEONE_READ(wakeone_slot_at(&table, i)->gone)) {
		WAKEONE_WRITE(wakeone_slot_at(&table, i)->gone, 1);
		notify_agent();
	}
	return false;
}

/* As many slots are tried where the policy's was empty. Each one that is empty
 * too is marked, so the next connections do not try it. */
#define OTHERS 8

/*
 * The policy's slot was empty: its listener has closed and user space does not
 * know yet. Chooses by the policy again, among the slots not known to be empty.
 */
__noinline int other_slot(struct sk_reuseport_md *md, __u32 random)
{
	struct wakeone_draw draw = {
		.random = random,
		.hash = md->hash,
		.agent_gone = agent_gone(WAKEONE_READ(table.policy)),
	};

	for (__u32 k = 0; k < OTHERS; k++) {
		int slot = wakeone_pick_living(&table, &draw);

		if (slot < 0)
			break;
		if (try_slot(md, slot))
			return slot;
		draw.random = wakeone_mix(draw.random);
	}
	return WAKEONE_NONE;
}

/* ---- reading the queues where they are --------------------------------- */

struct sock_reuseport {
	__u16 num_socks;
	void *socks[];
} __attribute__((preserve_access_index));

/* Any structure of the kernel that begins with 64 bits. A cast to a plain
 * number is refused before Linux 6.16. */
struct timespec64 {
	__s64 tv_sec;
} __attribute__((preserve_access_index));

extern void *bpf_rdonly_cast(const void *obj, __u32 btf_id) __ksym __weak;

/* Reads 64 bits of the kernel's memory: by a load where that is allowed (Linux
 * 6.2), else by a call. An address that is not mapped reads as 0. */
static __always_inline __u64 peek(__u64 address)
{
	__u64 value = 0;

	if (bpf_rdonly_cast)
		return ((struct timespec64 *)bpf_rdonly_cast((void *)(long)address,
			bpf_core_type_id_kernel(struct timespec64)))->tv_sec;
	bpf_probe_read_kernel(&value, sizeof(value), (void *)(long)address);
	return value;
}

/* Returns a pointer that the verifier knows as a number. */
static __always_inline __u64 address_of(void *pointer)
{
	__u64 address = 0;

	bpf_probe_read_kernel(&address, sizeof(address), &pointer);
	return address;
}

/* Position in the kernel's group -> place. A hint: the group is reordered when
 * a socket leaves, so the cookie decides. */
struct position {
	__u64 cookie;
	__u32 place;
	__u32 pad;
};
struct position positions[WAKEONE_MAX_SLOTS];

/* The length of a socket's queue, in the unit of its protocol. */
static __always_inline __u32 waiting_in(__u64 sk);

/* Which of the group's addresses this program is for, and how many there are.
 * Set before loading. */
const volatile __u32 address_number = 0;
const volatile __u32 address_count = 1;

/* A worker with several addresses serves all its queues: their lengths are
 * added up. */
static __always_inline void publish_queue(__u32 slot, __u32 now)
{
	__u32 *own, before;

	if (address_count == 1) {
		wakeone_slot_at(&table, slot)->queued = now;
		return;
	}
	own = &table.waiting[address_number & (WAKEONE_MAX_ADDRESSES - 1)]
			    [slot & (WAKEONE_MAX_SLOTS - 1)];
	if (WAKEONE_READ(*own) == now)
		return;
	before = __sync_lock_test_and_set(own, now);
	ADD(wakeone_slot_at(&table, slot)->queued, now - before);
}

/* A global function: the verifier checks it once instead of for each socket. */
__noinline int read_queue(__u32 at, __u64 sockets)
{
	__u64 sk = peek(sockets + (__u64)at * sizeof(void *));
	__u64 cookie = peek(sk + bpf_core_field_offset(struct sock, __sk_common.skc_cookie));
	struct position *position;
	__u32 slot;

	WAKEONE_HIDE(at);
	position = &positions[at & (WAKEONE_MAX_SLOTS - 1)];
	if (position->cookie != cookie) {
		__u32 *place = bpf_map_lookup_elem(&listeners, &cookie);

		if (!place || (*place & ~WAKEONE_UNSETTLED) >= WAKEONE_PLACES)
			return 0;
		position->place = *place & ~WAKEONE_UNSETTLED;
		position->cookie = cookie;
	}
	slot = position->place & (WAKEONE_MAX_SLOTS - 1);
	/* An old worker's queue tells nothing of its successor. */
	if (WAKEONE_PLACES == WAKEONE_MAX_SLOTS || place_of(slot) == position->place)
		publish_queue(slot, waiting_in(sk));
	return 0;
}

/*
 * Join the shortest queue needs no bookkeeping: the group's sockets and
 * what waits in them are one pointer walk away (net/core/sock_reuseport.c).
 * Needs CAP_PERFMON; where that is missing the agent publishes the lengths.
 */
__noinline int read_queues(struct sk_reuseport_md *md)
{
	__u64 sk = address_of(md->sk), group, sockets;
	__u32 n;

	group = peek(sk + bpf_core_field_offset(struct sock, sk_reuseport_cb));
	if (!group)
		return 0;
	n = peek(group + bpf_core_field_offset(struct sock_reuseport, num_socks)) & 0xffff;
	sockets = group + bpf_core_field_offset(struct sock_reuseport, socks);
	for (__u32 i = 0; i < WAKEONE_MAX_SLOTS; i++) {
		if (i >= n)
			break;
		read_queue(i, sockets);
	}
	return 1;
}

#endif
