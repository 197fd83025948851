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
#include "datagram.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

static __always_inline __u32 waiting_in(__u64 sk)
{
	return bytes_in(sk);
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
