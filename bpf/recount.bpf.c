// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Counts in the connections that were open before the dispatch program came,
 * and counts all of them again.
 *
 * No iterator over the TCP sockets is used. It takes a reference of each socket
 * in the table (bpf_iter_tcp_established_batch, net/ipv4/tcp_ipv4.c). A request
 * is put there before its count of references is set (reqsk_queue_hash_req,
 * net/ipv4/inet_connection_sock.c), and that forgets the iterator's. So the
 * request is freed while it waits in the accept queue: the kernel warns of a use
 * after free, and a connection is lost. Nor is an iterator over the tags: it takes
 * no reference, and a socket that is freed meanwhile stops Linux 7.0 and newer (see
 * `queues`). User space lists the sockets and their tags by sock_diag, which is
 * free of both, and hands those without a tag to a program by their addresses.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <stdbool.h>
#include "policy.h"
#include "maps.h"
#include "count.h"
#include "iter.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

enum { STATE_ESTABLISHED = 1, STATE_CLOSE_WAIT = 8 };

struct sock {
	struct sock_common __sk_common;
} __attribute__((preserve_access_index));
struct request_sock {
	struct request_sock *dl_next;
	struct sock *sk;
} __attribute__((preserve_access_index));
struct request_sock_queue {
	struct request_sock *rskq_accept_head;
} __attribute__((preserve_access_index));
struct inet_connection_sock {
	struct request_sock_queue icsk_accept_queue;
} __attribute__((preserve_access_index));
struct bpf_map;
struct bpf_iter__bpf_sk_storage_map {
	struct bpf_iter_meta *meta;
	struct bpf_map *map;
	struct sock *sk;
	void *value;
} __attribute__((preserve_access_index));

/* ---- who waits in which queue -------------------------------------------- */

/* The listeners whose queues are to be read. User space holds each of them while
 * it is in here. So none is freed beside the walk: that is where the kernel reads
 * a storage's owner without a look at whether there is one
 * (__bpf_sk_storage_map_seq_show, net/core/bpf_sk_storage.c; since Linux 7.0 the
 * end of a socket sets that pointer to null). */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, __u32);
} queues SEC(".maps");

/* Cookie of a connection that waits -> slot of its queue. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 262144);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, __u32);
} waiting SEC(".maps");

#define MOST_WAITING 65536

struct walk {
	struct request_sock *next;
	__u32 slot;
};

static int note_waiting(__u32 i, struct walk *walk)
{
	struct request_sock *request = walk->next;
	__u64 cookie;

	if (!request)
		return 1;
	cookie = BPF_CORE_READ(request, sk, __sk_common.skc_cookie.counter);
	if (cookie)
		bpf_map_update_elem(&waiting, &cookie, &walk->slot, BPF_ANY);
	walk->next = BPF_CORE_READ(request, dl_next);
	return 0;
}

/* The queue may change beside this. A connection that is missed was accepted
 * meanwhile, and the next attempt knows its holder. */
SEC("iter/bpf_sk_storage_map")
int wakeone_queued(struct bpf_iter__bpf_sk_storage_map *ctx)
{
	struct inet_connection_sock *listener = (void *)ctx->sk;
	__u32 *slot = ctx->value;
	struct walk walk;

	if (!listener || !slot)
		return 0;
	walk.slot = *slot;
	walk.next = BPF_CORE_READ(listener, icsk_accept_queue.rskq_accept_head);
	bpf_loop(MOST_WAITING, note_waiting, &walk, 0);
	return 0;
}

/* ---- counting one in ----------------------------------------------------- */

/* A connection that was open before. It stands where a packet does, and the
 * kernel reads a protocol at its byte 12. */
struct wakeone_open {
	__u32 packet[4];
	__u32 local[4], remote[4]; /* IPv4: the first one */
	__u16 local_port, remote_port; /* these five in network order */
	__u32 is_ipv6;
	__u32 slot;   /* of the worker that has it; WAKEONE_FROZEN: nobody knows */
	__u32 waits;  /* nobody has accepted it yet */
	__u64 cookie;
};

/* How many of them are counted by their tags, by the tags' slots. sock_diag does
 * not list those that the client has reset and the server has not closed. */
struct {
	__s64 slot[WAKEONE_MAX_SLOTS];
} early SEC(".data.early") = {};

static __always_inline void add_early(__u32 slot, __s64 number)
{
	ADD(early.slot[slot & (WAKEONE_MAX_SLOTS - 1)], number);
}

enum wakeone_counted_in {
	WAKEONE_IN_GONE = 0,      /* it is not open any more */
	WAKEONE_IN_KNOWN = 1,     /* it has a tag */
	WAKEONE_IN_COUNTED = 2,
	WAKEONE_IN_LEFT_OUT = 3,  /* nobody knows whose it is */
};

static __always_inline bool is_open(struct bpf_sock *sk)
{
	__u32 state = sk->state;

	return state == STATE_ESTABLISHED || state == STATE_CLOSE_WAIT;
}

/* Leaves a connection in no count. While it waits it can be moved. No move of it
 * may change a count then. */
static __always_inline int leave_out(__u64 cookie, __u32 waits)
{
	struct wakeone_note frozen = { .from = WAKEONE_FROZEN, .to = WAKEONE_FROZEN };

	if (!waits || bpf_map_lookup_elem(&moved, &cookie))
		return WAKEONE_IN_LEFT_OUT;
	if (!bpf_map_update_elem(&moved, &cookie, &frozen, BPF_NOEXIST))
		ADD(table.moved_live, 1);
	else if (!bpf_map_lookup_elem(&moved, &cookie))
		__sync_fetch_and_or(&table.flags, WAKEONE_TABLE_UNNOTED);
	return WAKEONE_IN_LEFT_OUT;
}

/* An earlier attempt left it out. */
static __always_inline void forget_left_out(__u64 cookie)
{
	struct wakeone_note *note = bpf_map_lookup_elem(&moved, &cookie);

	if (note && note->from == WAKEONE_FROZEN && !bpf_map_delete_elem(&moved, &cookie))
		ADD(table.moved_live, -1);
}

static __always_inline int count(struct bpf_sock *sk, const struct wakeone_open *one)
{
	struct wakeone_tag fresh = { .slot = one->slot, .counted = WAKEONE_TAG_EARLY }, *tag;

	if (!is_open(sk))
		return WAKEONE_IN_GONE;
	/* It was born after the listeners got their tags. */
	if (bpf_sk_storage_get(&tags, sk, NULL, 0))
		return WAKEONE_IN_KNOWN;
	if (fresh.slot >= WAKEONE_MAX_SLOTS)
		return leave_out(one->cookie, one->waits);
	tag = bpf_sk_storage_get(&tags, sk, &fresh, BPF_SK_STORAGE_GET_F_CREATE);
	if (!tag)
		return leave_out(one->cookie, one->waits);
	add_early(fresh.slot, 1);
	forget_left_out(one->cookie);
	wakeone_enter(&table, fresh.slot);
	ADD(wakeone_slot_at(&table, fresh.slot)->established, 1);
	if (is_open(sk) || !__sync_lock_test_and_set(&tag->counted, 0))
		return WAKEONE_IN_COUNTED;
	/* It closed before it had the tag. */
	add_early(fresh.slot, -1);
	wakeone_leave(&table, fresh.slot);
	ADD(wakeone_slot_at(&table, fresh.slot)->closed, 1);
	return WAKEONE_IN_GONE;
}

/* Attached nowhere: user space runs it, once for each connection
 * (bpf_prog_test_run_skb, net/bpf/test_run.c). */
SEC("tc")
int wakeone_count_in(struct __sk_buff *skb)
{
	struct wakeone_open *packet = (void *)(long)skb->data, one;
	struct bpf_sock_tuple tuple = {};
	struct bpf_sock *sk;
	int done;

	if ((void *)(packet + 1) > (void *)(long)skb->data_end)
		return WAKEONE_IN_GONE;
	one = *packet;
	if (one.is_ipv6) {
		__builtin_memcpy(tuple.ipv6.saddr, one.remote, sizeof(one.remote));
		__builtin_memcpy(tuple.ipv6.daddr, one.local, sizeof(one.local));
		tuple.ipv6.sport = one.remote_port;
		tuple.ipv6.dport = one.local_port;
		sk = bpf_sk_lookup_tcp(skb, &tuple, sizeof(tuple.ipv6), BPF_F_CURRENT_NETNS, 0);
	} else {
		tuple.ipv4.saddr = one.remote[0];
		tuple.ipv4.daddr = one.local[0];
		tuple.ipv4.sport = one.remote_port;
		tuple.ipv4.dport = one.local_port;
		sk = bpf_sk_lookup_tcp(skb, &tuple, sizeof(tuple.ipv4), BPF_F_CURRENT_NETNS, 0);
	}
	if (!sk)
		return WAKEONE_IN_GONE;
	done = count(sk, &one);
	bpf_sk_release(sk);
	return done;
}

/* Counts out a connection that was open before the counting program came: no
 * callback tells its end. Each close(2) of a last descriptor comes by here. */
SEC("cgroup/sock_release")
int wakeone_release(struct bpf_sock *sk)
{
	struct wakeone_tag *tag = bpf_sk_storage_get(&tags, sk, 0, 0);

	if (count_out(sk, tag) == WAKEONE_TAG_EARLY)
		add_early(tag->slot, -1);
	return 1;
}
