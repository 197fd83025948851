/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * A group in memory, for the simulator. The build compiles this file once for
 * each variant; WAKEONE_GROUP names its functions.
 */
#include "contract.h"

#include "eligible.h"

/* Everything that the simulator does with a group; a mirror is in policy_group.rs. */
struct wakeone_group_functions {
	__u64 size;
	__u64 slots;
	void (*begin)(struct wakeone_table *t, __u32 policy, __u32 slots);
	void (*set)(struct wakeone_table *t, __u32 slot, __u32 flags, __u32 weight);
	void (*publish)(struct wakeone_table *t);
	int (*pick)(struct wakeone_table *t, const struct wakeone_draw *d);
	void (*enter)(struct wakeone_table *t, __u32 slot, __u64 now_ns);
	void (*leave)(struct wakeone_table *t, __u32 slot, __u64 now_ns);
	void (*move_away)(struct wakeone_table *t, __u32 slot);
	void (*queued)(struct wakeone_table *t, __u32 slot, __u32 length);
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
	int slot = wakeone_pick_in_place(t, d, t->policy);

	if (slot != WAKEONE_NONE)
		t->slot[slot].selected++;
	return slot;
}

/* Like count_in and count_out of dispatch.bpf.c. */
static void enter(struct wakeone_table *t, __u32 slot, __u64 now_ns)
{
	if (!wakeone_load(&t->slot[slot], WAKEONE_BY_ACTIVE))
		wakeone_note_progress(t, slot, now_ns);
	wakeone_enter(t, slot);
}

static void leave(struct wakeone_table *t, __u32 slot, __u64 now_ns)
{
	wakeone_leave(t, slot);
	wakeone_note_progress(t, slot, now_ns);
}

static void move_away(struct wakeone_table *t, __u32 slot)
{
	wakeone_leave(t, slot);
}

static void queued(struct wakeone_table *t, __u32 slot, __u32 length)
{
	t->slot[slot].queued = length;
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
	.move_away = move_away,
	.queued = queued,
	.active = active,
	.selected = selected,
};
