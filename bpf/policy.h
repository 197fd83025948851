/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Choosing a slot: pure functions, no maps, no helpers. The same text is
 * compiled for the kernel, for the tests and for the simulator.
 *
 * Chance and time come in from outside (struct wakeone_draw), so the same
 * table and the same draw always give the same slot.
 *
 * Weights, draining and stuck marks are the same for every policy: user space
 * lists the slots of the best tier that is not empty (eligible.h), and a
 * policy only ever chooses from that list.
 *
 * No loop branches on what it reads. A branch in a loop doubles the states
 * that the verifier follows with each turn, and kernels before 6.3 merge none
 * of them; without one it walks each loop once.
 */
#ifndef WAKEONE_POLICY_H
#define WAKEONE_POLICY_H

#include "contract.h"

#define WAKEONE_NONE (-1)

/* A number in use is never changed: a running group keeps its own through a
 * takeover. */
enum wakeone_policy {
	WAKEONE_HASH = 0,
	WAKEONE_ROUND_ROBIN = 1,
	WAKEONE_RANDOM = 2,
	WAKEONE_LEAST_CONNECTIONS = 3,
	WAKEONE_TWO_CHOICES = 4,
	WAKEONE_SHORTEST_QUEUE = 5,
	WAKEONE_CPU = 6,
	WAKEONE_CONSISTENT = 7,
	WAKEONE_SOURCE = 8,
	WAKEONE_SOURCE_NET = 9,
	WAKEONE_POLICIES = 10,
};

#ifndef WAKEONE_INLINE
#define WAKEONE_INLINE static inline __attribute__((always_inline))
#endif

/*
 * Marks a global function of a BPF program. The verifier checks it once, alone,
 * instead of once for each path that leads to it.
 */
#ifndef WAKEONE_GLOBAL
#ifdef __bpf__
#define WAKEONE_GLOBAL __attribute__((noinline))
#else
#define WAKEONE_GLOBAL static inline
#endif
#endif

/* Reads or writes, exactly once, a value that another CPU may change. */
#define WAKEONE_READ(x) (*(const volatile __typeof__(x) *)&(x))
#define WAKEONE_WRITE(x, value) (*(volatile __typeof__(x) *)&(x) = (value))

/* Hides a value's range from the compiler. It would otherwise leave out a mask
 * that the verifier needs, or turn arithmetic into a branch. */
#define WAKEONE_HIDE(x) asm volatile("" : "+r"(x))

struct wakeone_draw {
	__u32 random;  /* uniform */
	/* Of the connection's, or the datagram's, 4-tuple; for SOURCE and SOURCE_NET of
	 * the client's address, or its network. */
	__u32 hash;
	__u32 cpu;     /* that got the packet */
	__u64 tick;    /* grows by one for each choice */
	/* 1: nobody refreshes the stuck marks and queue lengths, ignore them. */
	__u32 agent_gone;
	/* The caller has just read the queue lengths itself. */
	__u32 queues_fresh;
	/* If the group DEFERS: CLOCK_MONOTONIC >> WAKEONE_PROGRESS_SHIFT. */
	__u32 now;
};

#ifdef __clang__
#define WAKEONE_UNROLL _Pragma("unroll")
#else
#define WAKEONE_UNROLL
#endif

/* ---- arithmetic --------------------------------------------------------- */

/* All bits set where a is below b, else none. Their difference must fit. */
WAKEONE_INLINE __u64 wakeone_below(__s64 a, __s64 b)
{
	__s64 difference = a - b;

	WAKEONE_HIDE(difference);
	return (__u64)(difference >> 63);
}

/* a where the mask is set, else b. */
WAKEONE_INLINE __u64 wakeone_either(__u64 mask, __u64 a, __u64 b)
{
	return b ^ ((a ^ b) & mask);
}

/* Maps [0, 2^32) to [0, n) without a division, as the kernel's reciprocal_scale. */
WAKEONE_INLINE __u32 wakeone_scale(__u32 value, __u32 n)
{
	return (__u32)(((__u64)value * n) >> 32);
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

/* A number drawn for a slot. Among a few slots each is equally likely to have
 * the lowest one. Half of the mixer is enough for that. */
WAKEONE_INLINE __u32 wakeone_tie(__u32 random, __u32 slot)
{
	__u32 x = (random ^ slot) * 0x9e3779b1u;

	return (x ^ (x >> 15)) * 0x846ca68bu;
}

/* Bits of a number that breaks ties between slots of one load. */
#define WAKEONE_TIE_BITS (31 - WAKEONE_SLOT_BITS)

/* ---- the table ---------------------------------------------------------- */

/* As memchr(3), it takes what may not be changed and what may. */
WAKEONE_INLINE struct wakeone_slot *wakeone_slot_at(const struct wakeone_table *t, __u32 i)
{
	WAKEONE_HIDE(i);
	return (struct wakeone_slot *)&t->slot[i & (WAKEONE_MAX_SLOTS - 1)];
}

WAKEONE_INLINE __u32 wakeone_weight(const struct wakeone_slot *s)
{
	return WAKEONE_READ(s->weight) & WAKEONE_MAX_WEIGHT;
}

/* Added to a list's number: of its slots, only those not known to be gone. */
#define WAKEONE_LIVING (2 * WAKEONE_LISTS)

/* A slot's weight in a list: 0, which loses to all others, if it is left out. */
WAKEONE_INLINE __u32 wakeone_weight_in(const struct wakeone_slot *s, __u32 list)
{
	__u64 gone = wakeone_below(0, WAKEONE_READ(s->gone));

	return wakeone_weight(s) & ~(gone & wakeone_below(0, list & WAKEONE_LIVING));
}

WAKEONE_INLINE __u32 wakeone_slots(const struct wakeone_table *t)
{
	__u32 n = WAKEONE_READ(t->slots);

	return n > WAKEONE_MAX_SLOTS ? WAKEONE_MAX_SLOTS : n;
}

/* Whether connections are held back before they are counted. */
WAKEONE_INLINE __u32 wakeone_defers(const struct wakeone_table *t)
{
	return WAKEONE_READ(t->flags) & WAKEONE_TABLE_DEFERS;
}

/* What breaks ties: the time if they go in turn, else chance. */
WAKEONE_INLINE __u32 wakeone_chance(const struct wakeone_table *t, const struct wakeone_draw *d)
{
	return wakeone_defers(t) ? d->now : d->random;
}

/* Returns which list is valid now. */
WAKEONE_INLINE __u32 wakeone_list(const struct wakeone_table *t, __u32 agent_gone)
{
	__u32 generation = WAKEONE_READ(t->generation) & 1;

	return generation * WAKEONE_LISTS + (agent_gone ? WAKEONE_LIST_UNMARKED : WAKEONE_LIST_MARKED);
}

WAKEONE_INLINE const struct wakeone_eligible *wakeone_eligible(const struct wakeone_table *t,
							       __u32 list)
{
	WAKEONE_HIDE(list);
	return &t->eligible[list & (2 * WAKEONE_LISTS - 1)];
}

/* Returns the slot of an entry. It is a byte, so it is always in the table. */
WAKEONE_INLINE __u32 wakeone_entry(const struct wakeone_eligible *e, __u32 i)
{
	WAKEONE_HIDE(i);
	return WAKEONE_READ(e->slot[i & (WAKEONE_MAX_SLOTS - 1)]);
}

/* Whether a slot is listed. */
WAKEONE_INLINE __u32 wakeone_is_listed(const struct wakeone_eligible *e, __u32 slot)
{
	WAKEONE_HIDE(slot);
	slot &= WAKEONE_MAX_SLOTS - 1;
	return (WAKEONE_READ(e->mask[slot / 64]) >> (slot % 64)) & 1;
}

/*
 * Breaks ties, the lowest number wins. Of busy slots that is the one whose
 * worker made progress last: a worker that has had its request for long will
 * probably have it for longer. Idle slots are all equal, and so are those of
 * which no progress is known.
 *
 * No clock is read here. So each time that the number of progress overflows (34 s
 * with 23 bits), a slot without progress since then is preferred once.
 */
WAKEONE_INLINE __u64 wakeone_tie_of(const struct wakeone_slot *s, __u32 slot, __u64 load,
				    __u32 random)
{
	__u32 progress = WAKEONE_READ(s->progress);
	__u64 known = wakeone_below(0, load) & wakeone_below(0, progress);

#ifdef WAKEONE_TIES_BY_CHANCE
	known = 0; /* for the simulator's comparison */
#endif
	return wakeone_either(known, ~progress, wakeone_tie(random, slot)) &
	       ((1u << WAKEONE_TIE_BITS) - 1);
}

/*
 * Breaks ties where the kernel holds connections back until their first data
 * comes. They are in no count meanwhile, so that the slots stay equal, and
 * chance would give some of them twice as many as others. So the slot that was
 * chosen least recently comes first. A busy one that has made progress since
 * then is before all of those.
 *
 * Times are compared modulo 2^22 (17 s): a slot that was not chosen for that
 * long may wait for one turn more.
 */
WAKEONE_INLINE __u64 wakeone_turn_of(const struct wakeone_slot *s, __u64 load, __u32 now)
{
	__u32 progress = WAKEONE_READ(s->progress), chosen = WAKEONE_READ(s->chosen);
	__u32 behind = 1u << (WAKEONE_TIE_BITS - 1), since = now - chosen;
	__u64 known = wakeone_below(0, load) & wakeone_below(0, progress) &
		      wakeone_below(0, (__s32)(progress - chosen));

	return wakeone_either(known, ~progress & (behind - 1), behind | (~since & (behind - 1)));
}

/* Groups of up to this many slots take turns: more would take too many
 * instructions to verify. */
#define WAKEONE_TURNS (WAKEONE_WINDOW < 16 ? WAKEONE_WINDOW : 16)

/* ---- choosing by weight -------------------------------------------------- */

/*
 * Returns the entry that a position of [0, total) falls into, with the weights
 * laid end to end. This binary search takes as many steps for two slots as for
 * all. (An alias table would take one. But it has no positions for the turns of
 * round-robin, nor for a second choice that must not be the first.)
 */
WAKEONE_INLINE __u32 wakeone_entry_of(const struct wakeone_eligible *e, __u32 position)
{
	__u32 i = 0;

	if (!WAKEONE_READ(e->weighted))
		return position;
	for (__u32 step = WAKEONE_MAX_SLOTS / 2; step; step /= 2) {
		__u32 at = i + step - 1;

		WAKEONE_HIDE(at);
		at &= WAKEONE_MAX_SLOTS - 1;
		i += step & ~wakeone_below(position, WAKEONE_READ(e->upto[at]));
	}
	return i;
}

WAKEONE_INLINE int wakeone_at(const struct wakeone_eligible *e, __u32 position)
{
	return wakeone_entry(e, wakeone_entry_of(e, position));
}

/*
 * Draws a second slot by weight from all entries but the first. Returns NONE if
 * there is no other.
 */
WAKEONE_INLINE int wakeone_second(const struct wakeone_eligible *e, __u32 first, __u32 random)
{
	__u32 own = 1, before = first, total = WAKEONE_READ(e->total), position;

	if (WAKEONE_READ(e->weighted)) {
		__u32 at = first & (WAKEONE_MAX_SLOTS - 1), last = (first - 1) & (WAKEONE_MAX_SLOTS - 1);

		WAKEONE_HIDE(at);
		WAKEONE_HIDE(last);
		before = first ? WAKEONE_READ(e->upto[last & (WAKEONE_MAX_SLOTS - 1)]) : 0;
		own = WAKEONE_READ(e->upto[at & (WAKEONE_MAX_SLOTS - 1)]) - before;
	}
	if (total <= own)
		return WAKEONE_NONE;
	position = wakeone_scale(random, total - own);
	return wakeone_at(e, position + (own & ~wakeone_below(position, before)));
}

/* ---- choosing by load ---------------------------------------------------- */

/* Offset of a slot's load: its open connections, or the length of its queue.
 * Both are below 2^31, so the low half of the former will do (little-endian). */
enum {
	WAKEONE_BY_ACTIVE = __builtin_offsetof(struct wakeone_slot, active),
	WAKEONE_BY_QUEUE = __builtin_offsetof(struct wakeone_slot, queued),
};

/* Without a branch, which would have the verifier check all that follows twice. */
WAKEONE_INLINE __u32 wakeone_by(__u32 queue)
{
	WAKEONE_HIDE(queue);
	return WAKEONE_BY_ACTIVE + (queue & 1) * (WAKEONE_BY_QUEUE - WAKEONE_BY_ACTIVE);
}

/* A slot's load. A count that racing CPUs left below zero is taken as 0. */
WAKEONE_INLINE __u32 wakeone_load(const struct wakeone_slot *s, __u32 by)
{
	__s32 load = *(const volatile __s32 *)((const char *)s + by), sign = load >> 31;

	WAKEONE_HIDE(sign);
	return load & ~sign;
}

/* Returns which of two slots has the lower load for its weight; the first on a tie. */
WAKEONE_INLINE __u32 wakeone_lower(const struct wakeone_table *t, __u32 a, __u32 b, __u32 by)
{
	const struct wakeone_slot *sa = wakeone_slot_at(t, a), *sb = wakeone_slot_at(t, b);
	__u64 of_a = ((__u64)wakeone_load(sa, by) + 1) * wakeone_weight(sb);
	__u64 of_b = ((__u64)wakeone_load(sb, by) + 1) * wakeone_weight(sa);

	return wakeone_either(wakeone_below(of_b, of_a), b, a);
}

/*
 * The least loaded slot of a window of slots that weigh the same. One number
 * holds the load, a number drawn for the slot, and the slot. The smallest such
 * number is the least loaded slot, and each of k equals has probability 1/k.
 *
 * Takes four at a time: a short list's first entries follow its last one.
 * `in_turn` is a constant. Where it is 1, `chance` is the time.
 */
WAKEONE_INLINE int wakeone_least_equal(const struct wakeone_table *t,
				       const struct wakeone_eligible *e,
				       __u32 start, __u32 by, __u32 chance, int in_turn)
{
	__u32 n = WAKEONE_READ(e->count);
	__s64 best = (__s64)(~0ull >> 1);

	for (__u32 base = 0; base < (in_turn ? WAKEONE_TURNS : WAKEONE_WINDOW); base += 4) {
		if (base >= n)
			break;
		WAKEONE_UNROLL
		for (__u32 i = base; i < base + 4; i++) {
			__u32 slot = WAKEONE_READ(e->slot[start + i]);
			__u64 load = wakeone_load(&t->slot[slot], by);
			__u64 tie = in_turn ?
				wakeone_turn_of(&t->slot[slot], load, chance) :
				wakeone_tie_of(&t->slot[slot], slot, load, chance);
			__s64 mine = load << 31 | tie << WAKEONE_SLOT_BITS | slot;

			best = wakeone_either(wakeone_below(mine, best), mine, best);
		}
	}
	return best & (WAKEONE_MAX_SLOTS - 1);
}

/*
 * The same by weight. Compares (load + 1) / weight by cross-multiplying, so the
 * heavier of two empty slots is preferred.
 */
WAKEONE_INLINE int wakeone_least_weighted(const struct wakeone_table *t, __u32 list,
					  __u32 start, __u32 by, __u32 random)
{
	const struct wakeone_eligible *e = wakeone_eligible(t, list);
	__u32 n = WAKEONE_READ(e->count);
	/* More than any slot can hold, so any slot that is not left out is less. */
	__u64 best = WAKEONE_READ(e->slot[start]), best_load = 1ull << 33, best_weight = 1,
	      best_tie = 0;

	for (__u32 base = 0; base < WAKEONE_WINDOW; base += 4) {
		if (base >= n)
			break;
		WAKEONE_UNROLL
		for (__u32 i = base; i < base + 4; i++) {
			__u32 slot = WAKEONE_READ(e->slot[start + i]);
			const struct wakeone_slot *s = &t->slot[slot];
			__u64 load = (__u64)wakeone_load(s, by) + 1;
			__u64 weight = wakeone_weight_in(s, list);
			__u64 tie = wakeone_tie(random, slot) >> 19;
			/* Loads take 32 bits and weights 16, which leaves 13. */
			__s64 mine = ((load * best_weight) << 13) + tie;
			__s64 held = ((best_load * weight) << 13) + best_tie;
			__u64 less = wakeone_below(mine, held);

			best = wakeone_either(less, slot, best);
			best_load = wakeone_either(less, load, best_load);
			best_weight = wakeone_either(less, weight, best_weight);
			best_tie = wakeone_either(less, tie, best_tie);
		}
	}
	return best & (WAKEONE_MAX_SLOTS - 1);
}

/* The least loaded slot of the window that begins at an entry. For `chance` see
 * wakeone_chance. */
WAKEONE_GLOBAL int wakeone_least(const struct wakeone_table *t, __u32 list, __u32 start,
				 __u32 queue, __u32 chance)
{
	const struct wakeone_eligible *e;

	if (!t)
		return WAKEONE_NONE;
	WAKEONE_HIDE(start);
	start &= WAKEONE_MAX_SLOTS - 1;
	e = wakeone_eligible(t, list);
	if (WAKEONE_READ(e->weighted) || list & WAKEONE_LIVING)
		return wakeone_least_weighted(t, list, start, wakeone_by(queue), chance);
	return wakeone_defers(t) && WAKEONE_READ(e->count) <= WAKEONE_TURNS ?
		wakeone_least_equal(t, e, start, wakeone_by(queue), chance, 1) :
		wakeone_least_equal(t, e, start, wakeone_by(queue), chance, 0);
}

/* Returns the slot with the shortest queue of a list longer than a window. */
WAKEONE_GLOBAL int wakeone_shortest(const struct wakeone_table *t, __u32 list, __u32 random)
{
	__u32 n, start, best;

	if (!t)
		return WAKEONE_NONE;
	n = WAKEONE_READ(wakeone_eligible(t, list)->count);
	/* Starts anywhere, so that the first slot does not win all ties. */
	start = wakeone_scale(wakeone_mix(random), n);
	best = wakeone_least(t, list, start, 1, random);
	for (__u32 seen = WAKEONE_WINDOW; seen < WAKEONE_MAX_SLOTS; seen += WAKEONE_WINDOW) {
		__u32 next;

		if (seen >= n)
			break;
		start += WAKEONE_WINDOW;
		start -= n & ~wakeone_below(start, n);
		next = wakeone_least(t, list, start, 1, random);
		best = wakeone_lower(t, best, next, WAKEONE_BY_QUEUE);
	}
	return best;
}

/* ---- the idle slots of a group that is larger than the window ------------- */

/* The place of the lowest bit that is set. (clang 14 cannot count zeros for BPF.) */
WAKEONE_INLINE __u32 wakeone_lowest(__u64 bits)
{
	__u32 place = 0;

	for (__u32 half = 32; half; half /= 2) {
		__u64 low = bits & ((1ull << half) - 1);
		__u32 step = half & wakeone_below(low, 1);

		place += step;
		bits >>= step;
	}
	return place;
}

/*
 * Returns a listed slot without connections, the first one after a random
 * place, or NONE if none is known. A bit that is out of date gives NONE too.
 */
WAKEONE_GLOBAL int wakeone_idle(const struct wakeone_table *t, __u32 list, __u32 random)
{
	const struct wakeone_eligible *e;
	__u32 turn = (random >> 2) & 63;

	if (!t)
		return WAKEONE_NONE;
	e = wakeone_eligible(t, list);
	for (__u32 i = 0; i < WAKEONE_MAX_SLOTS / 64; i++) {
		__u32 word = (random + i) & (WAKEONE_MAX_SLOTS / 64 - 1), slot;
		__u64 bits;

		WAKEONE_HIDE(word);
		word &= WAKEONE_MAX_SLOTS / 64 - 1;
		bits = WAKEONE_READ(t->idle[word]) & WAKEONE_READ(e->mask[word]);
		if (!bits)
			continue;
		bits = bits >> turn | bits << ((64 - turn) & 63);
		slot = word * 64 + ((wakeone_lowest(bits) + turn) & 63);
		return wakeone_load(wakeone_slot_at(t, slot), WAKEONE_BY_ACTIVE) ? WAKEONE_NONE : (int)slot;
	}
	return WAKEONE_NONE;
}

/* Notes that a slot's worker has accepted or closed something now. */
WAKEONE_INLINE void wakeone_note_progress(struct wakeone_table *t, __u32 slot, __u64 now_ns)
{
	struct wakeone_slot *s = wakeone_slot_at(t, slot);

	WAKEONE_WRITE(s->progress, now_ns >> WAKEONE_PROGRESS_SHIFT);
}

/* Counts one more connection at a slot. */
WAKEONE_INLINE void wakeone_enter(struct wakeone_table *t, __u32 slot)
{
	struct wakeone_slot *s = wakeone_slot_at(t, slot);
	__u64 *word = &t->idle[(slot / 64) & (WAKEONE_MAX_SLOTS / 64 - 1)];
	__u64 bit = 1ull << (slot % 64);

	__sync_fetch_and_add(&s->active, 1);
	/* Also corrects a bit that was wrong before. */
	if (WAKEONE_READ(t->flags) & WAKEONE_TABLE_WIDE && WAKEONE_READ(*word) & bit &&
	    wakeone_load(s, WAKEONE_BY_ACTIVE))
		__sync_fetch_and_and(word, ~bit);
}

/* Counts one connection less. */
WAKEONE_INLINE void wakeone_leave(struct wakeone_table *t, __u32 slot)
{
	struct wakeone_slot *s = wakeone_slot_at(t, slot);
	__u64 *word = &t->idle[(slot / 64) & (WAKEONE_MAX_SLOTS / 64 - 1)];

	__sync_fetch_and_add(&s->active, -1);
	if (WAKEONE_READ(t->flags) & WAKEONE_TABLE_WIDE && !wakeone_load(s, WAKEONE_BY_ACTIVE))
		__sync_fetch_and_or(word, 1ull << (slot % 64));
}

/* ---- consistent hashing --------------------------------------------------- */

/* Returns the position of the highest bit that is set. */
WAKEONE_INLINE __u32 wakeone_log2(__u32 x)
{
	__u32 e = 0;

	for (__u32 step = 16; step; step /= 2)
		e += step & ~wakeone_below(x >> (e + step), 1);
	return e;
}

/*
 * Returns -log2 of x as a fraction of 2^32, in 2^-26ths. The mantissa's
 * logarithm is a cubic that is 0 at 0 and 1 at 1, and off by at most 0.001
 * between. The shares that follow from weights are right to two hundredths.
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
 * Returns the better of the best bid so far and the bid of entry i. A bid holds
 * its slot in its low bits. A function of its own, so that the verifier checks
 * it once instead of for each entry.
 */
WAKEONE_GLOBAL __u64 wakeone_outbid(const struct wakeone_table *t, __u32 list, __u32 i,
				    __u32 hash, __u64 best)
{
	__u64 bid, weight, held;
	__u32 slot;

	if (!t)
		return best;
	slot = wakeone_entry(wakeone_eligible(t, list), i);
	weight = wakeone_weight_in(wakeone_slot_at(t, slot), list);
	held = wakeone_weight_in(wakeone_slot_at(t, best & (WAKEONE_MAX_SLOTS - 1)), list);
	bid = wakeone_cost(wakeone_mix(wakeone_mix(slot + 1) ^ hash));
	return wakeone_either(wakeone_below(bid * held, (best >> WAKEONE_SLOT_BITS) * weight),
			      bid << WAKEONE_SLOT_BITS | slot, best);
}

/*
 * Rendezvous hashing (Thaler and Ravishankar, 1998), weighted as Schindelhauer
 * and Schomaker do. Each slot bids for the flow with a number that depends on
 * only these two. The lowest bid for its weight gets the flow. A new slot takes
 * flows from all others and moves none between them. A slot that leaves gives
 * its own flows to the others and moves no other.
 */
WAKEONE_GLOBAL int wakeone_rendezvous(const struct wakeone_table *t, __u32 list, __u32 hash)
{
	__u64 best;
	__u32 n;

	if (!t)
		return WAKEONE_NONE;
	n = WAKEONE_READ(wakeone_eligible(t, list)->count);
	/* Above any bid, with a slot that is listed. */
	best = 1ull << 45 | wakeone_entry(wakeone_eligible(t, list), 0);
	for (__u32 i = 0; i < WAKEONE_MAX_SLOTS; i++) {
		if (i >= n)
			break;
		best = wakeone_outbid(t, list, i, hash, best);
	}
	return best & (WAKEONE_MAX_SLOTS - 1);
}

/* ---- the policies --------------------------------------------------------- */

/* Whether all connections of a client go to one slot. */
WAKEONE_INLINE int wakeone_is_sticky(__u32 policy)
{
	return policy == WAKEONE_SOURCE || policy == WAKEONE_SOURCE_NET;
}

/*
 * Returns the least loaded slot. A group larger than the window first takes an
 * idle one. Failing that, it takes the least loaded of a window at a random
 * place. Joining the least of d queues drawn by chance comes close to joining
 * the least of all (Mitzenmacher 1996), and d is large here. Queue lengths are
 * all compared, as they were all read for it.
 */
WAKEONE_INLINE int wakeone_by_load(const struct wakeone_table *t, const struct wakeone_draw *d,
				   __u32 policy, __u32 list)
{
	/* Queue lengths that nobody publishes any more say nothing. */
	__u32 queue = policy == WAKEONE_SHORTEST_QUEUE && (d->queues_fresh || !d->agent_gone);
	__u32 n = WAKEONE_READ(wakeone_eligible(t, list)->count), start;
	int idle;

	if (n <= WAKEONE_WINDOW)
		return wakeone_least(t, list, 0, queue, wakeone_chance(t, d));
	if (queue)
		return wakeone_shortest(t, list, wakeone_chance(t, d));
	idle = wakeone_idle(t, list, d->random);
	/* If weights differ, a busy slot may be better than an idle one. */
	if (idle >= 0 && !WAKEONE_READ(wakeone_eligible(t, list)->weighted))
		return idle;
	start = wakeone_scale(wakeone_mix(d->random), n);
	return wakeone_least(t, list, start, 0, wakeone_chance(t, d));
}

/* Returns the slot of this CPU if it is listed, else NONE. Two CPUs of one slot
 * are `slots` apart, so neighbouring queues of a network card spread. */
WAKEONE_INLINE int wakeone_cpu(const struct wakeone_table *t, const struct wakeone_eligible *e,
			       const struct wakeone_draw *d)
{
	__u32 n = wakeone_slots(t), i;

	if (!n)
		return WAKEONE_NONE;
	i = d->cpu % n;
	return wakeone_is_listed(e, i) ? (int)i : WAKEONE_NONE;
}

/* Draws two different slots by weight; the second is NONE if there is only one. */
WAKEONE_INLINE int wakeone_two(const struct wakeone_eligible *e, const struct wakeone_draw *d,
			       int *second)
{
	__u32 entry = wakeone_entry_of(e, wakeone_scale(d->random, WAKEONE_READ(e->total)));

	/* The mixed number is independent of the unmixed one. */
	*second = wakeone_second(e, entry, wakeone_mix(d->random));
	return wakeone_entry(e, entry);
}

/* Where this draw points along the weights laid end to end, for policies that
 * ignore load. */
WAKEONE_INLINE __u32 wakeone_position(__u32 policy, const struct wakeone_draw *d, __u32 total)
{
	if (policy == WAKEONE_ROUND_ROBIN)
		return (__u32)(d->tick % total);
	return wakeone_scale(policy == WAKEONE_HASH ? d->hash : d->random, total);
}

/*
 * The slot for a new connection, or WAKEONE_NONE where no slot is up or the
 * policy is unknown: the caller then leaves the choice to the kernel.
 */
WAKEONE_GLOBAL int wakeone_pick(const struct wakeone_table *t, const struct wakeone_draw *d)
{
	const struct wakeone_eligible *e;
	__u32 policy, list, total;
	int slot, second;

	if (!t || !d)
		return WAKEONE_NONE;
	policy = WAKEONE_READ(t->policy);
	list = wakeone_list(t, d->agent_gone);
	e = wakeone_eligible(t, list);
	total = WAKEONE_READ(e->total);
	if (!total || policy >= WAKEONE_POLICIES)
		return WAKEONE_NONE;
	if (policy == WAKEONE_LEAST_CONNECTIONS || policy == WAKEONE_SHORTEST_QUEUE)
		return wakeone_by_load(t, d, policy, list);
	if (policy == WAKEONE_TWO_CHOICES) {
		slot = wakeone_two(e, d, &second);
		return second < 0 ? slot : (int)wakeone_lower(t, slot, second, WAKEONE_BY_ACTIVE);
	}
	if (policy == WAKEONE_CONSISTENT)
		return wakeone_rendezvous(t, list, d->hash);
	/* A client stays where it is also while its worker is stuck. */
	if (wakeone_is_sticky(policy))
		return wakeone_rendezvous(t, wakeone_list(t, 1), d->hash);
	if (policy == WAKEONE_CPU) {
		slot = wakeone_cpu(t, e, d);
		if (slot != WAKEONE_NONE)
			return slot;
	}
	return wakeone_at(e, wakeone_position(policy, d, total));
}

/*
 * The slot for a connection whose first slot has lost its socket: the policy's
 * again, among those not known to be gone. Policies that ignore load give each
 * slot its share of what a gone one had; `hash` and `consistent` do so by flow,
 * `source` by client.
 */
WAKEONE_GLOBAL int wakeone_pick_living(const struct wakeone_table *t, const struct wakeone_draw *d)
{
	__u32 policy, list, n, start, queue;

	if (!t || !d)
		return WAKEONE_NONE;
	policy = WAKEONE_READ(t->policy);
	list = wakeone_list(t, d->agent_gone) | WAKEONE_LIVING;
	n = WAKEONE_READ(wakeone_eligible(t, list)->count);
	if (!n)
		return WAKEONE_NONE;
	if (policy == WAKEONE_HASH || policy == WAKEONE_CONSISTENT || wakeone_is_sticky(policy))
		return wakeone_rendezvous(t, list, d->hash);
	if (policy == WAKEONE_RANDOM || policy == WAKEONE_ROUND_ROBIN || policy == WAKEONE_CPU)
		return wakeone_rendezvous(t, list, d->random);
	queue = policy == WAKEONE_SHORTEST_QUEUE && !d->agent_gone;
	start = wakeone_scale(wakeone_mix(d->random), n);
	return wakeone_least(t, list, start & ~wakeone_below(n, WAKEONE_WINDOW + 1), queue, d->random);
}

/*
 * Returns the slot of wakeone_pick, with the commonest cases inlined: few slots
 * of one weight, none of them marked stuck. A call takes 20 ns and more where
 * returns are protected from speculation (SRSO).
 */
WAKEONE_INLINE int wakeone_pick_in_place(const struct wakeone_table *t,
					 const struct wakeone_draw *d, __u32 policy)
{
	const struct wakeone_eligible *e = wakeone_eligible(t, wakeone_list(t, 0));
	__u32 n = WAKEONE_READ(e->count);

	if (d->agent_gone || !n || WAKEONE_READ(e->weighted))
		return wakeone_pick(t, d);
	if (policy == WAKEONE_LEAST_CONNECTIONS && n <= WAKEONE_WINDOW && !wakeone_defers(t))
		return wakeone_least_equal(t, e, 0, WAKEONE_BY_ACTIVE, d->random, 0);
	if (policy == WAKEONE_HASH || policy == WAKEONE_ROUND_ROBIN || policy == WAKEONE_RANDOM)
		return wakeone_entry(e, wakeone_position(policy, d, n));
	return wakeone_pick(t, d);
}

#endif
