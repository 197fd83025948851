/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Counts a connection out: when it closes (dispatch.bpf.c), or when its socket
 * does, if it was open before we came (recount.bpf.c).
 */
#ifndef WAKEONE_COUNT_H
#define WAKEONE_COUNT_H

#include "policy.h"
#include "maps.h"

/* Returns the slot that counts the connection now, and removes its note. */
static __always_inline __u32 final_slot(void *ctx, const struct wakeone_tag *tag)
{
	struct wakeone_note *known, note;
	__u64 cookie;

	if (!WAKEONE_READ(table.moved_live))
		return tag->slot;
	cookie = bpf_get_socket_cookie(ctx);
	known = bpf_map_lookup_elem(&moved, &cookie);
	if (!known)
		return tag->slot;
	note = *known;
	/* The change is taken back only by the one that removes the note. */
	if (bpf_map_delete_elem(&moved, &cookie))
		return tag->slot;
	ADD(table.moved_live, -1);
	if (note.from == tag->slot)
		return note.to;
	if (note.from < WAKEONE_MAX_SLOTS)
		wakeone_enter(&table, note.from);
	if (note.to < WAKEONE_MAX_SLOTS)
		wakeone_leave(&table, note.to);
	return tag->slot;
}

/* ctx: of a program that runs for the connection's socket. A reset may run this
 * beside the close. Returns how it was counted: enum wakeone_tag_counted. */
static __always_inline __u32 count_out(void *ctx, struct wakeone_tag *tag)
{
	__u32 slot, counted;

	if (!tag || !tag->counted)
		return WAKEONE_TAG_UNCOUNTED;
	counted = __sync_lock_test_and_set(&tag->counted, WAKEONE_TAG_UNCOUNTED);
	if (!counted)
		return counted;
	slot = final_slot(ctx, tag);
	if (slot < WAKEONE_MAX_SLOTS) {
		wakeone_leave(&table, slot);
		ADD(wakeone_slot_at(&table, slot)->closed, 1);
		wakeone_note_progress(&table, slot, bpf_ktime_get_ns());
	}
	return counted;
}

#endif
