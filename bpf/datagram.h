/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What the programs for flows and for QUIC have in common: the homes of flows,
 * and how a datagram of none is placed.
 */
#ifndef WAKEONE_DATAGRAM_H
#define WAKEONE_DATAGRAM_H

#include "choose.h"

/*
 * The homes of flows, by the last bits of the kernel's own hash of addresses and
 * ports (udp_ehashfn: keyed with a secret, the same for each datagram of a flow).
 * An array forgets no flow, however many there are: an LRU map of as much memory
 * lost those that it had no room for.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, WAKEONE_HOMES);
	__type(key, __u32);
	__type(value, struct wakeone_home);
} homes SEC(".maps");

static __always_inline __u32 flow_clock(void)
{
	return bpf_ktime_get_coarse_ns() >> WAKEONE_FLOW_SHIFT;
}

/*
 * Without flows, a datagram's hash cannot serve as chance: the ties of one
 * client's datagrams would all fall to one slot.
 */
static __always_inline void draw_chance(struct wakeone_draw *d)
{
	__u32 policy = WAKEONE_READ(table.policy);

	if (policy == WAKEONE_ROUND_ROBIN)
		d->tick = __sync_fetch_and_add(&table.tick, 1);
	if (policy == WAKEONE_CPU)
		d->cpu = bpf_get_smp_processor_id();
	d->random = bpf_get_prandom_u32();
}

static __always_inline int send_to(__u32 slot, enum wakeone_exit why)
{
	count_selected(slot);
	return leave(why, SK_PASS);
}

/* Places a datagram of no known flow. Returns its slot, or NONE. */
static __always_inline int place(struct sk_reuseport_md *md, struct wakeone_draw *d,
				 enum wakeone_exit *why)
{
	int slot;

	draw_chance(d);
	slot = wakeone_pick(&table, d);
	if (slot < 0) {
		*why = WAKEONE_EXIT_NO_SLOT;
		return slot;
	}
	if (try_slot(md, slot)) {
		*why = WAKEONE_EXIT_SELECTED;
		return slot;
	}
	slot = other_slot(md, wakeone_mix(d->random));
	*why = slot < 0 ? WAKEONE_EXIT_SELECT_FAILED : WAKEONE_EXIT_RETRIED;
	return slot;
}

/* Where a flow's datagrams go: the `at` of its home, unless that is long unused.
 * At first a flow without a home may be one of before, which the kernel's hash
 * placed. */
static __always_inline __u32 known(const struct wakeone_home *home, __u32 now)
{
	__u32 at = WAKEONE_READ(home->at);

	if (!at)
		return now < WAKEONE_READ(table.flows_until) ? WAKEONE_HOME_KERNEL : at;
	if (now - WAKEONE_READ(home->used) > WAKEONE_READ(table.flow_silence))
		return WAKEONE_HOME_NONE;
	return at;
}

/* Notes when a home was used. Written once a second: it is read far more often. */
static __always_inline void note_use(struct wakeone_home *home, __u32 at, __u32 now)
{
	if (WAKEONE_READ(home->used) == now)
		return;
	home->at = at;
	home->used = now;
}

/* ---- with what waits in the receive queues read where it is ------------- */

/* The memory of the datagrams that wait in a socket. */
static __always_inline __u32 bytes_in(__u64 sk)
{
	int bytes = peek(sk + bpf_core_field_offset(struct sock, sk_backlog.rmem_alloc));

	return bytes > 0 ? bytes : 0;
}

static __always_inline bool queues_fresh(struct sk_reuseport_md *md, bool walk)
{
	return walk && WAKEONE_READ(table.policy) == WAKEONE_SHORTEST_QUEUE && read_queues(md);
}

#endif
