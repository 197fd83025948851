// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Puts each UDP datagram into the receive queue of the worker that policy.h
 * chooses.
 *
 * A datagram is not counted out, as no event says that it was read. So the
 * length of a worker's queue is all that is known of its load, and policies
 * that go by open connections are not offered.
  *
 * Like the dispatch program it fails open, with one exception: a group that
 * closes refuses datagrams, as its closed port soon will.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <stdbool.h>
#include "policy.h"
#include "maps.h"
#include "choose.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

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

/*
 * Finds the flow that has most of a slot's datagrams, if one has: a majority
 * vote (Boyer and Moore). Two CPUs that race cost it a vote.
 */
static __always_inline void vote(__u32 slot, __u32 home)
{
	struct wakeone_slot *s = wakeone_slot_at(&table, slot);
	__u32 lead = WAKEONE_READ(s->heavy_lead);

	if (WAKEONE_READ(s->heavy_home) == home) {
		s->heavy_lead = lead + 1;
	} else if (lead) {
		s->heavy_lead = lead - 1;
	} else {
		s->heavy_home = home;
		s->heavy_lead = 1;
	}
}

/* Places a datagram by the policy, and its flow with it if that has a home. */
static __always_inline int dispatch(struct sk_reuseport_md *md, struct wakeone_home *home,
				    bool queues_fresh)
{
	struct wakeone_draw draw = {
		.hash = md->hash,
		.agent_gone = agent_gone(WAKEONE_READ(table.policy)),
		.queues_fresh = queues_fresh,
	};
	enum wakeone_exit why = WAKEONE_EXIT_SELECTED;
	int slot;

	if (table.policy >= WAKEONE_POLICIES)
		return leave(WAKEONE_EXIT_BAD_POLICY, SK_PASS);
	slot = place(md, &draw, &why);
	if (slot < 0)
		return leave(why, SK_PASS);
	if (home) {
		home->at = slot + 1;
		home->used = flow_clock();
		vote(slot, md->hash % WAKEONE_HOMES);
	}
	return send_to(slot, why);
}

/*
 * Whether a known flow's slot took its datagram. A stuck worker keeps its flows:
 * it will come back, and no other worker knows their sessions. A draining one
 * loses them, as its queue has to become empty. If all drain they are all
 * listed, and their flows stay.
 */
static __always_inline bool follow(struct sk_reuseport_md *md, __u32 slot)
{
	/* The list that ignores marks, as if no agent refreshed them. */
	const struct wakeone_eligible *e = wakeone_eligible(&table, wakeone_list(&table, true));

	return wakeone_is_listed(e, slot) && try_slot(md, slot);
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

static __always_inline __u32 waiting_in(__u64 sk)
{
	int bytes = peek(sk + bpf_core_field_offset(struct sock, sk_backlog.rmem_alloc));

	return bytes > 0 ? bytes : 0;
}

static __always_inline bool queues_fresh(struct sk_reuseport_md *md, bool walk)
{
	return walk && WAKEONE_READ(table.policy) == WAKEONE_SHORTEST_QUEUE && read_queues(md);
}

static __always_inline int choose(struct sk_reuseport_md *md, bool walk)
{
	__u32 flags = WAKEONE_READ(table.flags), key = md->hash % WAKEONE_HOMES, now, at;
	struct wakeone_home *home = NULL;

	if (flags & WAKEONE_TABLE_CLOSING)
		return leave(WAKEONE_EXIT_CLOSING, SK_DROP);
	if (flags & WAKEONE_TABLE_AFFINITY)
		home = bpf_map_lookup_elem(&homes, &key);
	if (home) {
		now = flow_clock();
		at = known(home, now);
		if (at == WAKEONE_HOME_KERNEL) {
			note_use(home, at, now);
			return leave(WAKEONE_EXIT_BY_HASH, SK_PASS);
		}
		if (at == WAKEONE_HOME_EACH) {
			note_use(home, at, now);
			home = NULL;
		} else if (at && follow(md, at - 1)) {
			note_use(home, at, now);
			vote(at - 1, key);
			return send_to(at - 1, WAKEONE_EXIT_SELECTED);
		}
	}
	return dispatch(md, home, queues_fresh(md, walk));
}

SEC("sk_reuseport")
int wakeone_datagram(struct sk_reuseport_md *md)
{
	return choose(md, false);
}

SEC("sk_reuseport")
int wakeone_datagram_walk(struct sk_reuseport_md *md)
{
	return choose(md, true);
}
