/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Choosing a slot: pure functions, no maps, no helpers. The same text is
 * compiled for the kernel, for the tests and for the simulator.
 *
 * Chance and time come in from outside (struct wakeone_draw), so the same
 * table and the same draw always give the same slot.
 *
 * Weights, draining and stuck marks are the same for every policy: slots are
 * ranked in tiers, and a policy only ever chooses within the best tier that
 * is not empty.
 */
#ifndef WAKEONE_POLICY_H
#define WAKEONE_POLICY_H

#include "contract.h"

#define WAKEONE_NONE (-1)

#ifndef WAKEONE_INLINE
#define WAKEONE_INLINE static inline __attribute__((always_inline))
#endif

/*
 * The loops over slots. In the kernel each is a global function: the verifier
 * checks it once, alone, instead of once for every path that leads to it. For
 * the same reason no loop compares the index of the slot it holds: a constant
 * that decides a branch must be tracked exactly, and 256 of them at 256 places
 * are more states than it is willing to walk.
 */
#ifndef WAKEONE_SCAN
#ifdef __bpf__
#define WAKEONE_SCAN __attribute__((noinline))
#else
#define WAKEONE_SCAN static inline
#endif
#endif

/* One value that another CPU may change: read once, use many times. */
#define WAKEONE_READ(x) (*(const volatile __typeof__(x) *)&(x))

struct wakeone_draw {
	__u32 random;  /* uniform */
	__u32 random2; /* uniform, independent of the first */
	__u32 hash;    /* of the connection's, or the datagram's, 4-tuple */
	__u32 cpu;     /* that got the packet */
	__u64 tick;    /* grows by one for each choice */
	/* 1: nobody refreshes the stuck marks and queue lengths, ignore them. */
	__u32 agent_gone;
	/* The caller has just read the queue lengths itself. */
	__u32 queues_fresh;
};

/* Tiers. A stuck worker will come back and then serve what waits; a draining
 * one was told to go: so draining is the worse of the two. */
enum {
	WAKEONE_TIER_DOWN = 0,
	WAKEONE_TIER_DRAINING = 1,
	WAKEONE_TIER_STUCK = 2,
	WAKEONE_TIER_GOOD = 3,
};

/*
 * 1 where a and b differ, else 0. Arithmetic instead of branches, here and in
 * the loops' bodies: a branch on a value pins that value for the verifier, and
 * a few of them in a loop of 256 are more paths than it is willing to walk.
 * The empty asm keeps the compiler from finding the branch again.
 */
WAKEONE_INLINE __u32 wakeone_differ(__u32 a, __u32 b)
{
	__u32 x = a ^ b;

	x |= -x;
	asm volatile("" : "+r"(x));
	return x >> 31;
}

WAKEONE_INLINE __u32 wakeone_tier(const struct wakeone_slot *s, __u32 agent_gone)
{
	__u32 flags = WAKEONE_READ(s->flags), weight = WAKEONE_READ(s->weight) & WAKEONE_MAX_WEIGHT;
	__u32 up = (flags / WAKEONE_SLOT_UP) & wakeone_differ(weight, 0);
	__u32 draining = (flags / WAKEONE_SLOT_DRAINING) & 1;
	__u32 stuck = (flags / WAKEONE_SLOT_STUCK) & ~agent_gone & 1;

	return up * (WAKEONE_TIER_GOOD - 2 * draining - stuck * (1 - draining));
}

/*
 * A slot by an index that was computed. What the compiler can prove about it,
 * the verifier may not: hide the proof, so that the mask stays in.
 */
WAKEONE_INLINE const struct wakeone_slot *wakeone_slot_at(const struct wakeone_table *t, __u32 i)
{
	asm volatile("" : "+r"(i));
	return &t->slot[i & (WAKEONE_MAX_SLOTS - 1)];
}

WAKEONE_INLINE __u32 wakeone_weight(const struct wakeone_slot *s)
{
	return WAKEONE_READ(s->weight) & WAKEONE_MAX_WEIGHT;
}

WAKEONE_INLINE __u32 wakeone_slots(const struct wakeone_table *t)
{
	__u32 n = WAKEONE_READ(t->slots);

	return n > WAKEONE_MAX_SLOTS ? WAKEONE_MAX_SLOTS : n;
}

/* [0, 2^32) to [0, n) without a division, as the kernel's reciprocal_scale. */
WAKEONE_INLINE __u32 wakeone_scale(__u32 value, __u32 n)
{
	return (__u32)(((__u64)value * n) >> 32);
}

/* The weight of slot i where it is in the tier and not the slot `except`; else 0. */
WAKEONE_INLINE __u32 wakeone_part(const struct wakeone_table *t, __u32 i, __u32 tier,
				  __u32 agent_gone, int except)
{
	const struct wakeone_slot *s = &t->slot[i];
	__u32 other = wakeone_differ(wakeone_tier(s, agent_gone), tier);

	return wakeone_weight(s) * (1 - other) * wakeone_differ(i, except);
}

/* Sum of the weights of a tier, without the slot `except`. */
WAKEONE_SCAN __u32 wakeone_total(const struct wakeone_table *t, __u32 tier,
				 __u32 agent_gone, int except)
{
	__u32 n, total = 0;

	if (!t)
		return total;
	n = wakeone_slots(t);
	for (__u32 i = 0; i < WAKEONE_MAX_SLOTS; i++) {
		if (i >= n)
			break;
		total += wakeone_part(t, i, tier, agent_gone, except);
	}
	return total;
}

/* The slot that position `at` of [0, total) falls into, weights laid end to end. */
WAKEONE_SCAN int wakeone_at(const struct wakeone_table *t, __u32 tier,
			    __u32 agent_gone, int except, __u32 at)
{
	__u32 n, seen = 0;
	int last = WAKEONE_NONE;

	if (!t)
		return last;
	n = wakeone_slots(t);
	for (__u32 i = 0; i < WAKEONE_MAX_SLOTS; i++) {
		__u32 part;

		if (i >= n)
			break;
		part = wakeone_part(t, i, tier, agent_gone, except);
		if (part)
			last = i;
		seen += part;
		if (at < seen)
			break;
	}
	/* A slot may have left the tier since the total was taken: the last
	 * one seen is as good as any. */
	return last;
}

WAKEONE_INLINE __u64 wakeone_active(const struct wakeone_slot *s)
{
	__s64 active = WAKEONE_READ(s->active);

	return active > 0 ? (__u64)active : 0;
}

/*
 * What a slot would carry with one connection more, so that of two empty
 * slots the heavier one is preferred. `queue`: count what waits, not what is
 * open.
 */
WAKEONE_INLINE __u64 wakeone_load(const struct wakeone_slot *s, __u32 queue)
{
	return (queue ? (__u64)WAKEONE_READ(s->queued) : wakeone_active(s)) + 1;
}

/*
 * The least loaded slot of a tier: load/weight is compared by cross-multiplying.
 * Of k equals each is chosen with probability 1/k, wherever they stand: the
 * k-th one replaces the one held with that chance (reservoir sampling).
 */
WAKEONE_SCAN int wakeone_least(const struct wakeone_table *t, __u32 tier,
				 __u32 agent_gone, __u32 queue, __u32 random)
{
	/* More than any slot can hold: the first one looked at is less. */
	__u64 best_load = 1ull << 47;
	__u32 n, best_weight = 1, equals = 0;
	int best = WAKEONE_NONE;

	if (!t)
		return best;
	n = wakeone_slots(t);
	for (__u32 i = 0; i < WAKEONE_MAX_SLOTS; i++) {
		const struct wakeone_slot *s;
		__u64 load, mine, held;
		__u32 weight;

		if (i >= n)
			break;
		s = &t->slot[i];
		if (wakeone_tier(s, agent_gone) != tier)
			continue;
		weight = wakeone_weight(s);
		load = wakeone_load(s, queue);
		mine = load * best_weight;
		held = best_load * weight;
		if (mine > held)
			continue;
		if (mine < held) {
			equals = 1;
		} else {
			equals++;
			/* xorshift: a fresh number for each tie from one draw */
			random ^= random << 13;
			random ^= random >> 17;
			random ^= random << 5;
			if (wakeone_scale(random, equals))
				continue;
		}
		best = i;
		best_load = load;
		best_weight = weight;
	}
	return best;
}

/* Two different slots drawn by weight; the second is NONE where there is one. */
WAKEONE_INLINE int wakeone_two(const struct wakeone_table *t, __u32 tier,
			       const struct wakeone_draw *d, int *second)
{
	__u32 total = wakeone_total(t, tier, d->agent_gone, WAKEONE_NONE);
	int first = wakeone_at(t, tier, d->agent_gone, WAKEONE_NONE,
			       wakeone_scale(d->random, total));

	*second = WAKEONE_NONE;
	if (first < 0)
		return first;
	total = wakeone_total(t, tier, d->agent_gone, first);
	if (total)
		*second = wakeone_at(t, tier, d->agent_gone, first,
				     wakeone_scale(d->random2, total));
	return first;
}

/* Of two slots the one with the lower load; the first on a tie. */
WAKEONE_INLINE int wakeone_lower(const struct wakeone_table *t, int a, int b)
{
	const struct wakeone_slot *sa, *sb;

	if (b < 0 || a < 0)
		return a;
	sa = wakeone_slot_at(t, a);
	sb = wakeone_slot_at(t, b);
	return wakeone_load(sb, 0) * wakeone_weight(sa) <
	       wakeone_load(sa, 0) * wakeone_weight(sb) ? b : a;
}

/*
 * The slot of this CPU, or NONE where that one is not in the tier. Two CPUs of
 * one slot are `slots` apart, so neighbouring queues of a network card spread.
 */
WAKEONE_INLINE int wakeone_cpu(const struct wakeone_table *t, __u32 tier,
			       const struct wakeone_draw *d)
{
	__u32 n = wakeone_slots(t), i;

	if (!n)
		return WAKEONE_NONE;
	i = d->cpu % n;
	return wakeone_tier(wakeone_slot_at(t, i), d->agent_gone) == tier ? (int)i : WAKEONE_NONE;
}

/* Where along the weights laid end to end this draw points, for the policies
 * that do not look at load. */
WAKEONE_INLINE __u32 wakeone_position(__u32 policy, const struct wakeone_draw *d, __u32 total)
{
	if (policy == WAKEONE_ROUND_ROBIN)
		return (__u32)(d->tick % total);
	return wakeone_scale(policy == WAKEONE_HASH ? d->hash : d->random, total);
}

/* Thomas Mueller's and Chris Wellons' 32-bit mixer (lowbias32). */
WAKEONE_INLINE __u32 wakeone_mix(__u32 x)
{
	x ^= x >> 16;
	x *= 0x7feb352du;
	x ^= x >> 15;
	x *= 0x846ca68bu;
	return x ^ (x >> 16);
}

/* The highest bit that is set. (clang 14 cannot count zeros for BPF.) */
WAKEONE_INLINE __u32 wakeone_log2(__u32 x)
{
	__u32 e = 0;

	for (__u32 step = 16; step; step /= 2)
		e += step * wakeone_differ(x >> (e + step), 0);
	return e;
}

/*
 * -log2 of x taken as a fraction of 2^32, in 2^-26ths. The mantissa's logarithm
 * is a cubic that is 0 at 0 and 1 at 1 and off by 0.001 at most between: what
 * weights make of it is right to two hundredths.
 */
WAKEONE_INLINE __u64 wakeone_cost(__u32 x)
{
	__u32 e = wakeone_log2(x | 1);
	__u64 f = ((__u64)(x | 1) << (32 - e)) & 0xffffffff, c;

	/* coefficients in 2^-30ths */
	c = 625008923ull - ((f * 170961238ull) >> 32);
	c = 1527790140ull - ((f * c) >> 32);
	return ((__u64)(32 - e) << 26) + 64 - (((f * c) >> 32) >> 4);
}

/*
 * Rendezvous hashing (Thaler and Ravishankar, 1998), weighted as Schindelhauer
 * and Schomaker do: each slot bids for the flow with a number that depends on
 * both alone, and the lowest bid for its weight has it. A slot that comes takes
 * flows from all others and moves none between them; one that goes leaves its
 * own flows to them and moves no other.
 */
WAKEONE_SCAN int wakeone_rendezvous(const struct wakeone_table *t, __u32 tier,
				    __u32 agent_gone, __u32 hash)
{
	__u64 best_cost = 1ull << 47;
	__u32 n, best_weight = 1;
	int best = WAKEONE_NONE;

	if (!t)
		return best;
	n = wakeone_slots(t);
	for (__u32 i = 0; i < WAKEONE_MAX_SLOTS; i++) {
		const struct wakeone_slot *s;
		__u64 cost;
		__u32 weight;

		if (i >= n)
			break;
		s = &t->slot[i];
		if (wakeone_tier(s, agent_gone) != tier)
			continue;
		weight = wakeone_weight(s);
		cost = wakeone_cost(wakeone_mix(wakeone_mix(i + 1) ^ hash));
		if (cost * best_weight >= best_cost * weight)
			continue;
		best = i;
		best_cost = cost;
		best_weight = weight;
	}
	return best;
}

/* The policy within one tier; NONE where the tier is empty. */
WAKEONE_INLINE int wakeone_pick_in(const struct wakeone_table *t, const struct wakeone_draw *d,
				   __u32 policy, __u32 tier)
{
	int first, second;
	__u32 total;

	/* Lengths of queues that nobody publishes any more say nothing. */
	if (policy == WAKEONE_LEAST_CONNECTIONS || policy == WAKEONE_SHORTEST_QUEUE)
		return wakeone_least(t, tier, d->agent_gone,
				     policy == WAKEONE_SHORTEST_QUEUE &&
				     (d->queues_fresh || !d->agent_gone),
				     d->random);
	if (policy == WAKEONE_TWO_CHOICES) {
		first = wakeone_two(t, tier, d, &second);
		return wakeone_lower(t, first, second);
	}
	if (policy == WAKEONE_CONSISTENT)
		return wakeone_rendezvous(t, tier, d->agent_gone, d->hash);
	if (policy == WAKEONE_CPU) {
		first = wakeone_cpu(t, tier, d);
		if (first != WAKEONE_NONE)
			return first;
	}
	total = wakeone_total(t, tier, d->agent_gone, WAKEONE_NONE);
	if (!total)
		return WAKEONE_NONE;
	return wakeone_at(t, tier, d->agent_gone, WAKEONE_NONE,
			  wakeone_position(policy, d, total));
}

/*
 * The slot for a new connection, or WAKEONE_NONE where no slot is up or the
 * policy is unknown: the caller then leaves the choice to the kernel.
 */
WAKEONE_INLINE int wakeone_pick(const struct wakeone_table *t, const struct wakeone_draw *d)
{
	__u32 policy;
	int slot;

	if (!t || !d)
		return WAKEONE_NONE;
	policy = WAKEONE_READ(t->policy);
	if (policy >= WAKEONE_POLICIES)
		return WAKEONE_NONE;
	slot = wakeone_pick_in(t, d, policy, WAKEONE_TIER_GOOD);
	if (slot == WAKEONE_NONE)
		slot = wakeone_pick_in(t, d, policy, WAKEONE_TIER_STUCK);
	if (slot == WAKEONE_NONE)
		slot = wakeone_pick_in(t, d, policy, WAKEONE_TIER_DRAINING);
	return slot;
}

#endif
