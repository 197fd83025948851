/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
  * The maps of a group that more than one object uses. They are defined once and
  * pinned by the dispatch program; the other objects open them by their pins.
 */
#ifndef WAKEONE_MAPS_H
#define WAKEONE_MAPS_H

#include "contract.h"

#define ADD(counter, n) ((void)__sync_fetch_and_add(&(counter), (n)))

/* Shared by all the listeners of a group, and with user space by mmap. */
struct wakeone_table table SEC(".data.table") = {};

/* Socket cookie of a listener -> its slot, with the mark WAKEONE_UNSETTLED. Several listeners may share a slot: in a rolling restart
 * each slot has two at each address. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 2 * WAKEONE_MAX_ADDRESSES * WAKEONE_MAX_SLOTS);
	__type(key, __u64);
	__type(value, __u32);
} listeners SEC(".maps");

/* Cookie of a connection that was moved while it waited -> its note. Its tag
 * still names the slot it was born in, as sk_reuseport cannot write a tag. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, struct wakeone_note);
} moved SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC | BPF_F_CLONE);
	__type(key, int);
	__type(value, struct wakeone_tag);
} tags SEC(".maps");

#endif
