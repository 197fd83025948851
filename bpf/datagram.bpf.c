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
  * Flow -> slot of its last datagram. A flow is the kernel's own hash of its
  * addresses and ports (udp_ehashfn: keyed with a secret, the same for each
  * datagram of a flow). Two flows with one hash share a slot, and nothing else
  * happens to them. That is one pair in four thousand million.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, __u32);
	__type(value, __u32);
} flows SEC(".maps");

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

static __always_inline int dispatch(struct sk_reuseport_md *md, bool affinity,
				    bool queues_fresh)
{
	struct wakeone_draw draw = {
		.hash = md->hash,
		.agent_gone = agent_gone(WAKEONE_READ(table.policy)),
		.queues_fresh = queues_fresh,
	};
	enum wakeone_exit why = WAKEONE_EXIT_SELECTED;
	__u32 key = draw.hash, at;
	int slot;

	if (table.policy >= WAKEONE_POLICIES)
		return leave(WAKEONE_EXIT_BAD_POLICY, SK_PASS);
	slot = place(md, &draw, &why);
	if (slot < 0)
		return leave(why, SK_PASS);
	at = slot;
	if (affinity)
		bpf_map_update_elem(&flows, &key, &at, BPF_ANY);
	return send_to(at, why);
}

/*
 * The slot of a known flow, while it may be chosen. A slot that drains or is
 * stuck loses its flows at once: their next datagrams would wait for it. If all
 * slots do so they are all listed, and their flows stay.
 */
static __always_inline bool follow(struct sk_reuseport_md *md, __u32 slot)
{
	const struct wakeone_eligible *e =
		wakeone_eligible(&table, wakeone_list(&table, agent_gone(WAKEONE_READ(table.policy))));

	return wakeone_is_listed(e, slot) && try_slot(md, slot);
}

/* ---- with what waits in the receive queues read where it is ------------- */

static __always_inline __u32 waiting_in(__u64 sk)
{
	int bytes = peek(sk + bpf_core_field_offset(struct sock, sk_backlog.rmem_alloc));

	return bytes > 0 ? bytes : 0;
}

static __always_inline int choose(struct sk_reuseport_md *md, bool walk)
{
	__u32 flags = WAKEONE_READ(table.flags), key = md->hash, *known;
	bool affinity = flags & WAKEONE_TABLE_AFFINITY, fresh;

	if (flags & WAKEONE_TABLE_CLOSING)
		return leave(WAKEONE_EXIT_CLOSING, SK_DROP);
	/* Consistent hashing needs no memory of flows. */
	if (WAKEONE_READ(table.policy) == WAKEONE_CONSISTENT)
		affinity = false;
	if (affinity) {
		known = bpf_map_lookup_elem(&flows, &key);
		if (known && follow(md, *known))
			return send_to(*known, WAKEONE_EXIT_SELECTED);
	}
	fresh = walk && WAKEONE_READ(table.policy) == WAKEONE_SHORTEST_QUEUE && read_queues(md);
	return dispatch(md, affinity, fresh);
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
