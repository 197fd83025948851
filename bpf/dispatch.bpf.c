// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Puts each connection into the queue of the worker that policy.h chooses
 * (sk_reuseport), and counts connections in and out (sock_ops).
 *
 * Everything fails open: if we cannot choose, the kernel's hash does, and a
 * counter shows it. Nothing is dropped here.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <stdbool.h>
#include "policy.h"
#include "maps.h"
#include "choose.h"
#include "count.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* TCP states, include/net/tcp_states.h */
enum {
	STATE_FIN_WAIT1 = 4,
	STATE_CLOSE = 7,
	STATE_LAST_ACK = 9,
	STATE_NEW_SYN_RECV = 12,
};

/* Puts the type into the object's BTF. Only native tests draw with it. */
struct wakeone_draw *draw_type;

/* ---- choosing ---------------------------------------------------------- */

/*
 * The invariant of the counts. A slot's `active` is the sum of these:
 *
 *   + connections counted in by a tag of this slot, and not counted out
 *   + notes that lead to the slot
 *   - notes that come from it
 *
 * A note is made or changed together with the counts, and its removal takes
 * the change back. So each count ends at 0, whatever way connections go. If a
 * move counted one out by mistake, the end of its note counts it in again.
 *
 * That moves make no mistake rests on a second invariant. A connection without
 * a note waits at the listener where it was born: each move leaves a note, also
 * where the kernel chose. Such a connection has the tag of its listener, unless
 * that was tagged while connections may have waited there. The listener is
 * WAKEONE_UNSETTLED then, and the notes of moves off it are WAKEONE_FROZEN: they
 * change no count.
 */

/* Returns where a connection that was never moved is counted. */
static __always_inline __u32 birthplace(struct sk_reuseport_md *md, int *trouble)
{
	__u64 cookie = bpf_get_socket_cookie(md->sk);
	__u32 *known = bpf_map_lookup_elem(&listeners, &cookie);
	__u32 slot;

	if (!known) {
		*trouble = WAKEONE_EXIT_UNKNOWN_LISTENER;
		return WAKEONE_FROZEN;
	}
	slot = *known & ~WAKEONE_UNSETTLED;
	if (slot >= WAKEONE_MAX_SLOTS) {
		*trouble = WAKEONE_EXIT_BAD_TAG;
		return WAKEONE_FROZEN;
	}
	if (*known & WAKEONE_UNSETTLED || WAKEONE_READ(table.flags) & WAKEONE_TABLE_UNNOTED)
		return WAKEONE_FROZEN;
	return slot;
}

/* Returns a connection's note. The first one changes no count. */
static __always_inline struct wakeone_note *note_of(struct sk_reuseport_md *md, __u64 cookie,
						    int *trouble)
{
	struct wakeone_note *note = bpf_map_lookup_elem(&moved, &cookie), fresh;

	if (note)
		return note;
	fresh.from = birthplace(md, trouble);
	fresh.to = fresh.from;
	if (bpf_map_update_elem(&moved, &cookie, &fresh, BPF_NOEXIST)) {
		__sync_fetch_and_or(&table.flags, WAKEONE_TABLE_UNNOTED);
		*trouble = WAKEONE_EXIT_MOVED_FULL;
		return NULL;
	}
	ADD(table.moved_live, 1);
	return bpf_map_lookup_elem(&moved, &cookie);
}

/*
 * Moves a waiting connection's count to the slot it goes to, or only notes that
 * it moves. The child's lock is held across reuseport_migrate_sock()
 * (net/ipv4/inet_connection_sock.c, inet_csk_listen_stop), so neither its
 * handshake nor its close can run beside this. A request that is not yet a
 * connection is in no count. Nor is a connection any more that a reset closed
 * while it waited.
 */
static __always_inline int count_move(struct sk_reuseport_md *md, struct bpf_sock *child, __u32 to)
{
	__u32 state = child->state, from;
	struct wakeone_note *note;
	int trouble = 0;

	if (state == STATE_NEW_SYN_RECV || state == STATE_CLOSE ||
	    !(WAKEONE_READ(table.flags) & WAKEONE_TABLE_COUNTED))
		return 0;
	note = note_of(md, bpf_get_socket_cookie(child), &trouble);
	if (!note || note->from == WAKEONE_FROZEN || to == WAKEONE_NOWHERE)
		return trouble;
	from = note->to;
	note->to = to;
	wakeone_leave(&table, from);
	ADD(wakeone_slot_at(&table, from)->migrated_out, 1);
	ADD(wakeone_slot_at(&table, to)->migrated_in, 1);
	wakeone_enter(&table, to);
	return trouble;
}

/* Counts a closing listener's connection, or request, that came to a slot. If
 * the kernel chooses, nobody knows which (WAKEONE_NOWHERE). */
__noinline int moved_to(struct sk_reuseport_md *md, __u32 slot)
{
	/* Twice read, twice checked: the verifier wants one variable. */
	struct bpf_sock *child = md->migrating_sk;
	int trouble;

	if (!child)
		return 0;
	trouble = count_move(md, child, slot);
	if (trouble > 0 && trouble < WAKEONE_EXITS)
		ADD(table.exits[trouble], 1);
	if (slot != WAKEONE_NOWHERE)
		ADD(table.exits[WAKEONE_EXIT_MIGRATED], 1);
	return 0;
}

/* Leaves the choice to the kernel. */
static __always_inline int leave_to_kernel(struct sk_reuseport_md *md, enum wakeone_exit why)
{
	moved_to(md, WAKEONE_NOWHERE);
	return leave(why, SK_PASS);
}

/* Chooses a slot other than the policy's, which was empty. */
__noinline int try_others(struct sk_reuseport_md *md, __u32 random)
{
	int slot = other_slot(md, random);

	if (slot < 0)
		return leave_to_kernel(md, WAKEONE_EXIT_SELECT_FAILED);
	count_selected(slot);
	if (md->migrating_sk)
		return moved_to(md, slot);
	return leave(WAKEONE_EXIT_RETRIED, 0);
}

/*
 * Draws chance. Policies that only break ties by it use the connection's own
 * hash, which is keyed with the kernel's secret, uniform, and already computed.
 * Policies that are nothing but chance get real draws.
 */
static __always_inline void draw_chance(struct wakeone_draw *d, __u32 policy)
{
	if (policy == WAKEONE_RANDOM || policy == WAKEONE_TWO_CHOICES)
		d->random = bpf_get_prandom_u32();
	else
		d->random = d->hash * 0x9e3779b1u; /* Knuth's multiplicative hash */
	if (policy == WAKEONE_ROUND_ROBIN)
		d->tick = __sync_fetch_and_add(&table.tick, 1);
	if (policy == WAKEONE_CPU)
		d->cpu = bpf_get_smp_processor_id();
}

/* Protocol and address family, include/uapi/linux/if_ether.h and include/linux/socket.h */
#define ETH_P_IP 0x0800
#define AF_INET6 10
/* Where a header has the source address. */
enum {
	SOURCE_IN_IPV4 = 12,
	SOURCE_IN_IPV6 = 8,
};

/* Reads a client's address: that of IPv4, or the first half of that of IPv6, which
 * has the network (RFC 4291). Returns whether it is of IPv6. */
static __always_inline bool read_source(struct sk_reuseport_md *md, __u32 word[2])
{
	struct bpf_sock *child = md->migrating_sk;
	bool is_6;

	if (!child) {
		is_6 = md->eth_protocol != bpf_htons(ETH_P_IP);
		if (is_6)
			bpf_skb_load_bytes_relative(md, SOURCE_IN_IPV6, word, 8, BPF_HDR_START_NET);
		else
			bpf_skb_load_bytes_relative(md, SOURCE_IN_IPV4, word, 4, BPF_HDR_START_NET);
		return is_6;
	}
	if (child->family != AF_INET6) {
		word[0] = child->dst_ip4;
		return false;
	}
	/* Each is read alone: the verifier allows no wider access. */
	word[0] = WAKEONE_READ(child->dst_ip6[0]);
	word[1] = WAKEONE_READ(child->dst_ip6[1]);
	if (word[0] || word[1] || WAKEONE_READ(child->dst_ip6[2]) != bpf_htonl(0xffff))
		return true;
	/* A client of IPv4 at a listener of IPv6. */
	word[0] = WAKEONE_READ(child->dst_ip6[3]);
	return false;
}

/* The hash of a client's address, or of its network: /24, of IPv6 /48. */
__noinline int source_of(struct sk_reuseport_md *md, __u32 net)
{
	__u32 word[2] = {};

	if (!read_source(md, word))
		word[0] &= net ? bpf_htonl(0xffffff00) : ~0u;
	else if (net)
		word[1] &= bpf_htonl(0xffff0000);
	return wakeone_mix(wakeone_mix(word[0]) ^ word[1]);
}

/* The time where ties go in turn. A global function: its branch would double
 * what the verifier has to walk in the caller. */
__noinline int turn_clock(void)
{
	if (!(WAKEONE_READ(table.flags) & WAKEONE_TABLE_DEFERS))
		return 0;
	return bpf_ktime_get_ns() >> WAKEONE_PROGRESS_SHIFT;
}

/* Whether sockets have come of which an agent that lives will know soon. A
 * global function, as turn_clock(). */
__noinline int is_changing(void)
{
	return WAKEONE_READ(table.changes) != WAKEONE_READ(table.changes_seen) &&
	       !heartbeat_is_old();
}

static __always_inline int dispatch(struct sk_reuseport_md *md, bool queues_fresh)
{
	__u32 policy = WAKEONE_READ(table.policy);
	__u32 flags = WAKEONE_READ(table.flags);
	struct wakeone_draw draw = {
		.hash = md->hash,
		.agent_gone = agent_gone(policy),
		.queues_fresh = queues_fresh,
	};
	int slot;

	/* The kernel answers SK_DROP with a reset (tcp_v4_rcv finds no socket). If
	 * a group must not refuse, each of its listeners has a filter that drops. */
	if (flags & WAKEONE_TABLE_CLOSING && !md->migrating_sk)
		return leave(WAKEONE_EXIT_CLOSING,
			     flags & WAKEONE_TABLE_REFUSING ? SK_DROP : SK_PASS);
	if (is_changing() && !md->migrating_sk)
		return leave(WAKEONE_EXIT_BY_HASH, SK_PASS);
	if (policy >= WAKEONE_POLICIES)
		return leave_to_kernel(md, WAKEONE_EXIT_BAD_POLICY);

	draw_chance(&draw, policy);
	if (wakeone_is_sticky(policy))
		draw.hash = source_of(md, policy == WAKEONE_SOURCE_NET);
	draw.now = turn_clock();
	slot = wakeone_pick_in_place(&table, &draw, policy);
	if (slot < 0)
		return leave_to_kernel(md, WAKEONE_EXIT_NO_SLOT);
	fetch_counters(slot);
	if (!try_slot(md, slot)) {
		try_others(md, wakeone_mix(draw.random));
		return SK_PASS;
	}
	count_selected(slot);
	/* In the cache line that was just written. A branch would cost the
	 * verifier a fifth more. */
	WAKEONE_WRITE(wakeone_slot_at(&table, slot)->chosen, draw.now);
	if (md->migrating_sk)
		moved_to(md, slot);
	return SK_PASS;
}

SEC("sk_reuseport/migrate")
int wakeone_dispatch(struct sk_reuseport_md *md)
{
	return dispatch(md, false);
}

/* ---- the same, with the accept queues' lengths read where they are ------ */

static __always_inline __u32 waiting_in(__u64 sk)
{
	return peek(sk + bpf_core_field_offset(struct sock, sk_ack_backlog));
}

SEC("sk_reuseport/migrate")
int wakeone_dispatch_walk(struct sk_reuseport_md *md)
{
	bool fresh = table.policy == WAKEONE_SHORTEST_QUEUE && read_queues(md);

	return dispatch(md, fresh);
}

/* ---- counting ---------------------------------------------------------- */

static __always_inline void count_in(struct bpf_sock_ops *ops, struct bpf_sock *sk)
{
	struct wakeone_tag *tag = bpf_sk_storage_get(&tags, sk, 0, 0);
	__u32 took_us;

	if (!tag)
		return; /* not one of ours */
	if (tag->slot >= WAKEONE_MAX_SLOTS) {
		ADD(table.exits[WAKEONE_EXIT_BAD_TAG], 1);
		return;
	}
	if (tag->counted)
		return;
	tag->counted = WAKEONE_TAG_COUNTED;
	/* An idle worker accepts at once. */
	if (!wakeone_load(wakeone_slot_at(&table, tag->slot), WAKEONE_BY_ACTIVE))
		wakeone_note_progress(&table, tag->slot, bpf_ktime_get_ns());
	wakeone_enter(&table, tag->slot);
	ADD(wakeone_slot_at(&table, tag->slot)->established, 1);
	if (!(ops->bpf_sock_ops_cb_flags & BPF_SOCK_OPS_STATE_CB_FLAG))
		bpf_sock_ops_cb_flags_set(ops, ops->bpf_sock_ops_cb_flags |
						       BPF_SOCK_OPS_STATE_CB_FLAG);
	/* Its one sample is the handshake's (tcp_synack_rtt_meas; none if the
	 * SYN-ACK was sent twice). The value is eight times the time. */
	took_us = ops->srtt_us >> 3;
	if (took_us > WAKEONE_READ(table.handshake_us))
		WAKEONE_WRITE(table.handshake_us, took_us);
}

/*
 * The state callbacks stay on. All programs of a socket share the flag
 * (bpf_sock_ops_cb_flags in struct tcp_sock). A program that runs after ours
 * may have asked for them too, and leaves no trace of that. The callbacks of
 * later states leave this program soon.
 */
static __always_inline void state_changed(struct bpf_sock_ops *ops, struct bpf_sock *sk)
{
	__u32 state = ops->args[1];

	if (state == STATE_FIN_WAIT1 || state == STATE_LAST_ACK || state == STATE_CLOSE)
		count_out(ops, bpf_sk_storage_get(&tags, sk, 0, 0));
}

/* The cookie of the group's network namespace, where the kernel tells that of a
 * socket (since Linux 5.15); else 0. A cgroup may have sockets of others, at the
 * same port. Set before loading. */
const volatile __u64 network = 0;

/* Notes a socket that begins to listen. It is in its group already. One that has
 * a slot listens anew, as after a move. */
static __always_inline void note_listener(struct bpf_sock_ops *ops)
{
	__u64 cookie = bpf_get_socket_cookie(ops);

	if (network && bpf_get_netns_cookie(ops) != network)
		return;
	if (!bpf_map_lookup_elem(&listeners, &cookie))
		ADD(table.changes, 1);
	notify_agent();
}

/*
 * A connection counts from PASSIVE_ESTABLISHED, which comes before accept(),
 * to the first step of its end on our side. That is the worker's close
 * (FIN_WAIT1, or LAST_ACK after the client's), or a reset (CLOSE).
 * Returns 1 always: another program of the same cgroup keeps its own reply.
 */
SEC("sockops")
int wakeone_count(struct bpf_sock_ops *ops)
{
	struct bpf_sock *sk;
	__u32 op = ops->op;

	if (op == BPF_SOCK_OPS_TCP_LISTEN_CB && ops->local_port == WAKEONE_READ(table.port))
		note_listener(ops);
	if (op != BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB && op != BPF_SOCK_OPS_STATE_CB)
		return 1;
	sk = ops->sk;
	if (!sk)
		return 1;
	if (op == BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB) {
		count_in(ops, sk);
		return 1;
	}
	state_changed(ops, sk);
	return 1;
}
