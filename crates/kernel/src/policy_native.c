/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The policies compiled for this machine: what the tests and the simulator run. */
#include "policy.h"

int wakeone_native_pick(const struct wakeone_table *t, const struct wakeone_draw *d)
{
	return wakeone_pick(t, d);
}

int wakeone_native_two(const struct wakeone_table *t, __u32 tier,
		       const struct wakeone_draw *d, int *second)
{
	return wakeone_two(t, tier, d, second);
}

__u32 wakeone_native_tier(const struct wakeone_slot *s, __u32 agent_gone)
{
	return wakeone_tier(s, agent_gone);
}
