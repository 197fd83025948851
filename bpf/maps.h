/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
  * The maps of a group that more than one object uses. They are defined once and
  * pinned by the dispatch program; the other objects open them by their pins.
 */
#ifndef WAKEONE_MAPS_H
#define WAKEONE_MAPS_H

#include "contract.h"

/* Shared by all the listeners of a group, and with user space by mmap. */
struct wakeone_table table SEC(".data.table") = {};

/* Socket cookie of a listener -> its slot. Several listeners may share one: in a
 * rolling restart each slot has two at each address. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 2 * WAKEONE_MAX_ADDRESSES * WAKEONE_MAX_SLOTS);
	__type(key, __u64);
	__type(value, __u32);
} listeners SEC(".maps");

/* Cookie of a connection that was moved while it waited -> the slot it is in
 * now. Its tag still names the old one, as sk_reuseport cannot write a tag.
 * WAKEONE_UNCOUNTED: it waits and is in no count, wherever it is moved. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, __u32);
} moved SEC(".maps");

#define WAKEONE_UNCOUNTED 0xffffffffu

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC | BPF_F_CLONE);
	__type(key, int);
	__type(value, struct wakeone_tag);
} tags SEC(".maps");

#endif
