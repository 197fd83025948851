/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * A group in memory, for the simulator. The build compiles this file once for
 * each variant; WAKEONE_GROUP names its functions.
 */
#include "contract.h"

#ifdef WAKEONE_FRESHEST
/* Of busy slots that are tied the one that made progress last: the age of its
 * progress in us, as far as it fits. Of idle ones any, so that shares stay even. */
#define WAKEONE_TIE(table, slot, load, random) \
	((load) ? wakeone_age(table, slot) : wakeone_tie(random, slot) >> (1 + WAKEONE_SLOT_BITS))

static inline __u32 wakeone_age(const struct wakeone_table *t, __u32 slot)
{
	__u32 age = (__u32)t->tick - t->slot[slot].reserved;
	__u32 most = (1u << (31 - WAKEONE_SLOT_BITS)) - 1;

	return age < most ? age : most;
}
#endif

#include "eligible.h"

/* Everything that the simulator does with a group; a mirror is in policy_group.rs. */
struct wakeone_group_functions {
	__u64 size;
	__u64 slots;
	void (*begin)(struct wakeone_table *t, __u32 policy, __u32 slots);
	void (*set)(struct wakeone_table *t, __u32 slot, __u32 flags, __u32 weight);
	void (*publish)(struct wakeone_table *t);
	int (*pick)(struct wakeone_table *t, const struct wakeone_draw *d);
	void (*enter)(struct wakeone_table *t, __u32 slot);
	void (*leave)(struct wakeone_table *t, __u32 slot);
	void (*queued)(struct wakeone_table *t, __u32 slot, __u32 length);
	void (*progress)(struct wakeone_table *t, __u32 slot, __u32 now_us);
	__s64 (*active)(const struct wakeone_table *t, __u32 slot);
	__u64 (*selected)(const struct wakeone_table *t, __u32 slot);
};

static void begin(struct wakeone_table *t, __u32 policy, __u32 slots)
{
	memset(t, 0, sizeof(*t));
	t->policy = policy;
	t->slots = slots;
}

static void set(struct wakeone_table *t, __u32 slot, __u32 flags, __u32 weight)
{
	t->slot[slot].flags = flags;
	t->slot[slot].weight = weight;
}

static int pick(struct wakeone_table *t, const struct wakeone_draw *d)
{
	int slot;

#ifdef WAKEONE_FRESHEST
	t->tick = d->tick;
#endif
	slot = wakeone_pick_in_place(t, d, t->policy);
	if (slot != WAKEONE_NONE)
		t->slot[slot].selected++;
	return slot;
}

static void enter(struct wakeone_table *t, __u32 slot)
{
	wakeone_enter(t, slot);
}

static void leave(struct wakeone_table *t, __u32 slot)
{
	wakeone_leave(t, slot);
}

static void queued(struct wakeone_table *t, __u32 slot, __u32 length)
{
	t->slot[slot].queued = length;
}

static void progress(struct wakeone_table *t, __u32 slot, __u32 now_us)
{
	t->slot[slot].reserved = now_us;
}

static __s64 active(const struct wakeone_table *t, __u32 slot)
{
	return t->slot[slot].active;
}

static __u64 selected(const struct wakeone_table *t, __u32 slot)
{
	return t->slot[slot].selected;
}

const struct wakeone_group_functions WAKEONE_GROUP = {
	.size = sizeof(struct wakeone_table),
	.slots = WAKEONE_MAX_SLOTS,
	.begin = begin,
	.set = set,
	.publish = wakeone_publish,
	.pick = pick,
	.enter = enter,
	.leave = leave,
	.queued = queued,
	.progress = progress,
	.active = active,
	.selected = selected,
};
