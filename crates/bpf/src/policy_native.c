/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The policies compiled for this machine: what the tests and the simulator run. */
#include "eligible.h"
#include "quic.h"

int wakeone_native_pick(const struct wakeone_table *t, const struct wakeone_draw *d)
{
	return wakeone_pick(t, d);
}

int wakeone_native_pick_in_place(const struct wakeone_table *t, const struct wakeone_draw *d)
{
	return wakeone_pick_in_place(t, d, t->policy);
}

int wakeone_native_pick_living(const struct wakeone_table *t, const struct wakeone_draw *d)
{
	return wakeone_pick_living(t, d);
}

int wakeone_native_two(const struct wakeone_table *t, const struct wakeone_draw *d, int *second)
{
	const struct wakeone_eligible *e = wakeone_eligible(t, wakeone_list(t, d->agent_gone));

	*second = WAKEONE_NONE;
	return e->count ? wakeone_two(e, d, second) : WAKEONE_NONE;
}

__u32 wakeone_native_tier(const struct wakeone_slot *s, __u32 ignore_stuck)
{
	return wakeone_tier(s, ignore_stuck);
}

void wakeone_native_publish(struct wakeone_table *t)
{
	wakeone_publish(t);
}

void wakeone_native_enter(struct wakeone_table *t, __u32 slot)
{
	wakeone_enter(t, slot);
}

void wakeone_native_leave(struct wakeone_table *t, __u32 slot)
{
	wakeone_leave(t, slot);
}

void wakeone_native_correct(struct wakeone_table *t, __u32 slot, __s64 by)
{
	wakeone_correct(t, slot, by);
}

/* As read_packet of quic.bpf.c, from memory. */
void wakeone_native_quic(const __u8 *bytes, __u32 length, struct wakeone_quic_packet *p)
{
	__u32 at;

	memset(p, 0, sizeof(*p));
	if (length < WAKEONE_QUIC_LONG_AT)
		return;
	at = wakeone_quic_id_at(bytes[0]);
	if (length < at + WAKEONE_QUIC_ID_MAX)
		return;
	memcpy(&p->id, bytes + at, WAKEONE_QUIC_ID_MAX);
	wakeone_quic_take(p, bytes);
}

void wakeone_native_quic_cut(struct wakeone_quic_id *id, __u32 length)
{
	wakeone_quic_cut(id, length);
}

__u32 wakeone_native_quic_token(const struct wakeone_quic_id *id)
{
	return wakeone_quic_token(id);
}

__u32 wakeone_native_quic_lengths(__u32 lengths, __u32 length)
{
	return wakeone_quic_lengths(lengths, length);
}
