// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Counts in the connections that were open before the dispatch program came.
 * Run it once over all TCP sockets, after the counting program is attached and
 * the listeners are tagged. From then on a connection is born with a tag, and
 * one without a tag was there before. The iterator holds each socket's lock, so
 * neither a handshake nor a close of it runs beside this (net/ipv4/tcp_ipv4.c,
 * bpf_iter_tcp_seq_show).
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <stdbool.h>
#include "policy.h"
#include "maps.h"
#include "iter.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define SOL_TCP 6
/* Linux 6.12; Debian 12's header does not know it. */
#define TCP_SOCK_OPS_CB_FLAGS 1008
#define EINVAL 22
/* A TFO connection waits in the queue before its handshake has ended. */
enum { STATE_ESTABLISHED = 1, STATE_SYN_RECV = 3, STATE_CLOSE_WAIT = 8, STATE_LISTEN = 10 };

struct inode {
	unsigned long i_ino;
} __attribute__((preserve_access_index));
struct file {
	struct inode *f_inode;
} __attribute__((preserve_access_index));
struct socket {
	struct file *file;
} __attribute__((preserve_access_index));
struct sock {
	struct sock_common __sk_common;
	struct socket *sk_socket;
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
struct tcp_sock {
	struct inet_connection_sock inet_conn;
	__u8 bpf_sock_ops_cb_flags;
} __attribute__((preserve_access_index));

/* held: inode of an accepted connection -> slot of the worker that holds it,
 * filled by user space. waiting: address of a waiting connection -> slot, filled
 * by the first pass. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 262144);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, __u32);
} held SEC(".maps"), waiting SEC(".maps");

struct wakeone_recount {
	__u32 port;
	__u32 counting;  /* 0: note who waits in the queues; 1: count */
	__u64 counted;   /* connections counted in */
	__u64 unattributed;  /* open, but nobody knows whose */
	/* Before 6.12 the kernel lets no iterator switch callbacks on. */
	__u64 no_callbacks;
} recount SEC(".data.recount") = {};

#define ADD(counter, n) ((void)__sync_fetch_and_add(&(counter), (n)))
#define MOST_WAITING 65536

struct walk {
	struct request_sock *next;
	__u32 slot;
};

static int note_waiting(__u32 i, struct walk *walk)
{
	struct request_sock *request = walk->next;
	__u64 child;

	if (!request)
		return 1;
	child = (__u64)BPF_CORE_READ(request, sk);
	if (child)
		bpf_map_update_elem(&waiting, &child, &walk->slot, BPF_ANY);
	walk->next = BPF_CORE_READ(request, dl_next);
	return 0;
}

static __always_inline int note_queue(struct sock_common *common, struct tcp_sock *tcp)
{
	__u64 cookie = common->skc_cookie.counter;
	__u32 *slot = bpf_map_lookup_elem(&listeners, &cookie);
	struct walk walk;

	if (!slot)
		return 0;
	walk.slot = *slot & ~WAKEONE_UNSETTLED;
	walk.next = BPF_CORE_READ(tcp, inet_conn.icsk_accept_queue.rskq_accept_head);
	bpf_loop(MOST_WAITING, note_waiting, &walk, 0);
	return 0;
}

static __always_inline __u32 *home_of(struct tcp_sock *tcp)
{
	struct sock *sk = (void *)tcp;
	struct socket *socket = BPF_CORE_READ(sk, sk_socket);
	__u64 key = socket ? BPF_CORE_READ(socket, file, f_inode, i_ino) : (__u64)tcp;

	return socket ? bpf_map_lookup_elem(&held, &key) : bpf_map_lookup_elem(&waiting, &key);
}

/* Leaves a connection in no count. While it waits it can be moved. No move of it
 * may change a count then. */
static __always_inline int leave_out(struct tcp_sock *tcp)
{
	struct wakeone_note frozen = { .from = WAKEONE_FROZEN, .to = WAKEONE_FROZEN };
	__u64 cookie;

	ADD(recount.unattributed, 1);
	if (BPF_CORE_READ((struct sock *)tcp, sk_socket))
		return 0;
	cookie = bpf_get_socket_cookie(tcp);
	if (bpf_map_lookup_elem(&moved, &cookie))
		return 0;
	if (!bpf_map_update_elem(&moved, &cookie, &frozen, BPF_NOEXIST))
		ADD(table.moved_live, 1);
	else if (!bpf_map_lookup_elem(&moved, &cookie))
		__sync_fetch_and_or(&table.flags, WAKEONE_TABLE_UNNOTED);
	return 0;
}

/* Has the counting program called when the connection ends. Nonzero: failed. */
static __always_inline long watch_end(struct tcp_sock *tcp)
{
	int flags = BPF_SOCK_OPS_STATE_CB_FLAG;
	long refused;

	if (recount.no_callbacks)
		return -EINVAL;
	/* Another program may have asked for callbacks of its own. */
	flags |= BPF_CORE_READ(tcp, bpf_sock_ops_cb_flags);
	refused = bpf_setsockopt(tcp, SOL_TCP, TCP_SOCK_OPS_CB_FLAGS, &flags, sizeof(flags));
	if (refused == -EINVAL)
		recount.no_callbacks = 1;
	return refused;
}

/* An earlier pass left it out. */
static __always_inline void forget_left_out(struct tcp_sock *tcp)
{
	__u64 cookie = bpf_get_socket_cookie(tcp);
	struct wakeone_note *note = bpf_map_lookup_elem(&moved, &cookie);

	if (note && note->from == WAKEONE_FROZEN && !bpf_map_delete_elem(&moved, &cookie))
		ADD(table.moved_live, -1);
}

static __always_inline int count(struct tcp_sock *tcp)
{
	struct wakeone_tag fresh = {}, *tag;
	struct wakeone_slot *s;
	__u32 *slot;

	/* It has a tag: it was born after the listeners got theirs. */
	if (bpf_sk_storage_get(&tags, tcp, NULL, 0))
		return 0;
	slot = home_of(tcp);
	/* Without the callback its end would go unnoticed. */
	if (!slot || *slot >= WAKEONE_MAX_SLOTS || watch_end(tcp))
		return leave_out(tcp);
	fresh.slot = *slot;
	fresh.counted = 1;
	tag = bpf_sk_storage_get(&tags, tcp, &fresh, BPF_SK_STORAGE_GET_F_CREATE);
	if (!tag)
		return leave_out(tcp);
	forget_left_out(tcp);
	ADD(recount.counted, 1);
	s = &table.slot[fresh.slot & (WAKEONE_MAX_SLOTS - 1)];
	wakeone_enter(&table, fresh.slot);
	ADD(s->established, 1);
	return 0;
}

SEC("iter/tcp")
int wakeone_recount(struct bpf_iter__tcp *ctx)
{
	struct sock_common *common = ctx->sk_common;
	struct tcp_sock *tcp;
	unsigned char state;

	if (!common || common->skc_num != recount.port)
		return 0;
	state = common->skc_state;
	tcp = bpf_skc_to_tcp_sock(common);
	if (!tcp)
		return 0;
	if (!recount.counting)
		return state == STATE_LISTEN ? note_queue(common, tcp) : 0;
	if (state != STATE_ESTABLISHED && state != STATE_CLOSE_WAIT && state != STATE_SYN_RECV)
		return 0;
	return count(tcp);
}

/* How many open connections the tags of each slot count: `active` without the
 * notes of moves. */
struct {
	__u64 slot[WAKEONE_MAX_SLOTS];
} tagged SEC(".data.tagged") = {};

SEC("iter/tcp")
int wakeone_tagged(struct bpf_iter__tcp *ctx)
{
	struct sock_common *common = ctx->sk_common;
	struct tcp_sock *tcp = common ? bpf_skc_to_tcp_sock(common) : NULL;
	struct wakeone_tag *tag;

	if (!tcp)
		return 0;
	tag = bpf_sk_storage_get(&tags, tcp, NULL, 0);
	if (tag && tag->counted && tag->slot < WAKEONE_MAX_SLOTS)
		ADD(tagged.slot[tag->slot & (WAKEONE_MAX_SLOTS - 1)], 1);
	return 0;
}
