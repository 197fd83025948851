/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * User space's part of a choice: it lists the slots that may be chosen. Call it
 * after each change of a slot's flags or weight, or of the number of slots.
 */
#ifndef WAKEONE_ELIGIBLE_H
#define WAKEONE_ELIGIBLE_H

#include <string.h>
#include "policy.h"

/* Tiers. Draining is worse than stuck: a stuck worker will come back and then
 * serve its queue, a draining one was told to go. */
enum {
	WAKEONE_TIER_DOWN = 0,
	WAKEONE_TIER_DRAINING = 1,
	WAKEONE_TIER_STUCK = 2,
	WAKEONE_TIER_GOOD = 3,
};

WAKEONE_INLINE __u32 wakeone_tier(const struct wakeone_slot *s, __u32 ignore_stuck)
{
	__u32 flags = WAKEONE_READ(s->flags);

	if (!(flags & WAKEONE_SLOT_UP) || !wakeone_weight(s))
		return WAKEONE_TIER_DOWN;
	if (flags & WAKEONE_SLOT_DRAINING)
		return WAKEONE_TIER_DRAINING;
	if (flags & WAKEONE_SLOT_STUCK && !ignore_stuck)
		return WAKEONE_TIER_STUCK;
	return WAKEONE_TIER_GOOD;
}

static inline void wakeone_list_slot(struct wakeone_eligible *e, __u32 slot, __u32 weight)
{
	e->slot[e->count] = slot;
	e->total += weight;
	e->upto[e->count] = e->total;
	e->mask[slot / 64] |= 1ull << (slot % 64);
	e->count++;
}

/* Fills the rest of the arrays, which a window or a search may reach into. */
static inline void wakeone_list_end(struct wakeone_eligible *e)
{
	for (__u32 i = e->count; i < sizeof(e->slot) / sizeof(e->slot[0]); i++)
		e->slot[i] = e->slot[i % e->count];
	for (__u32 i = e->count; i < WAKEONE_MAX_SLOTS; i++)
		e->upto[i] = ~0u;
	if (!e->weighted)
		e->total = e->count;
}

/* Lists the slots of the best tier that has any. */
static inline void wakeone_list_best(const struct wakeone_table *t, struct wakeone_eligible *e,
				     __u32 ignore_stuck)
{
	__u32 n = wakeone_slots(t), best = WAKEONE_TIER_DOWN, last = 0;

	memset(e, 0, sizeof(*e));
	for (__u32 i = 0; i < n; i++) {
		__u32 tier = wakeone_tier(&t->slot[i], ignore_stuck);

		best = tier > best ? tier : best;
	}
	if (best == WAKEONE_TIER_DOWN)
		return;
	for (__u32 i = 0; i < n; i++) {
		__u32 weight = wakeone_weight(&t->slot[i]);

		/* Read again: another thread may have changed it since. */
		if (!weight || wakeone_tier(&t->slot[i], ignore_stuck) != best)
			continue;
		e->weighted |= last && weight != last;
		last = weight;
		wakeone_list_slot(e, i, weight);
	}
	if (e->count)
		wakeone_list_end(e);
}

/* Corrects a slot's active count. It may get a wrong idle bit, as in a race. */
static inline void wakeone_correct(struct wakeone_table *t, __u32 slot, __s64 by)
{
	struct wakeone_slot *s = &t->slot[slot & (WAKEONE_MAX_SLOTS - 1)];
	__u64 *word = &t->idle[(slot / 64) & (WAKEONE_MAX_SLOTS / 64 - 1)];
	__u64 bit = 1ull << (slot % 64);

	__sync_fetch_and_add(&s->active, by);
	if (wakeone_load(s, WAKEONE_BY_ACTIVE))
		__sync_fetch_and_and(word, ~bit);
	else
		__sync_fetch_and_or(word, bit);
}

/* Has the programs track idle slots if a window does not show all slots. */
static inline void wakeone_watch_idle(struct wakeone_table *t)
{
	if (wakeone_slots(t) <= WAKEONE_WINDOW) {
		__sync_fetch_and_and(&t->flags, ~(__u32)WAKEONE_TABLE_WIDE);
		return;
	}
	if (__sync_fetch_and_or(&t->flags, WAKEONE_TABLE_WIDE) & WAKEONE_TABLE_WIDE)
		return;
	for (__u32 i = 0; i < WAKEONE_MAX_SLOTS; i++) {
		__u64 bit = 1ull << (i % 64);

		if (wakeone_load(&t->slot[i], WAKEONE_BY_ACTIVE))
			__sync_fetch_and_and(&t->idle[i / 64], ~bit);
		else
			__sync_fetch_and_or(&t->idle[i / 64], bit);
	}
}

/*
 * Makes the lists anew and has the programs use them. Several threads and
 * processes may do so at once. One that was overtaken makes its lists again, so
 * the last lists hold all changes that were made before.
 */
static inline void wakeone_publish(struct wakeone_table *t)
{
	struct wakeone_eligible lists[WAKEONE_LISTS];
	__u32 generation;

	wakeone_watch_idle(t);
	do {
		generation = __atomic_load_n(&t->generation, __ATOMIC_SEQ_CST);
		wakeone_list_best(t, &lists[WAKEONE_LIST_MARKED], 0);
		wakeone_list_best(t, &lists[WAKEONE_LIST_UNMARKED], 1);
		memcpy(&t->eligible[((generation + 1) & 1) * WAKEONE_LISTS], lists, sizeof(lists));
	} while (!__atomic_compare_exchange_n(&t->generation, &generation, generation + 1, 0,
					      __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
}

#endif
