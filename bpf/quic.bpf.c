// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Each packet of QUIC goes to the worker that has its connection. Each new
 * connection goes to the worker that policy.h chooses.
 *
 * A client's packet names its connection by an ID that the server made, so the
 * packets that the server sends are looked at as well: those with a long header
 * tell its IDs. An ID that was only offered to a client is kept apart from those
 * that clients use. Somebody who sends from a foreign address never learns an ID,
 * and pushes out none of those.
 *
 * A connection stays with its worker, whatever mark that has: no other worker
 * has its keys.
 *
 * Like the dispatch program it fails open, with one exception: a group that
 * closes refuses new connections, as its closed port soon will.
 */
#define WAKEONE_PLACES (2 * WAKEONE_MAX_SLOTS)
#include "datagram.h"
#include "quic.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

static __always_inline __u32 waiting_in(__u64 sk)
{
	return bytes_in(sk);
}

/* The IDs by which clients name their connections, and where those are. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, WAKEONE_QUIC_IDS);
	__type(key, struct wakeone_quic_id);
	__type(value, struct wakeone_home);
} ids SEC(".maps");

/* IDs that the server has offered to clients, and those that clients made for
 * their first packets. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, WAKEONE_QUIC_OFFERS);
	__type(key, struct wakeone_quic_id);
	__type(value, struct wakeone_home);
} offers SEC(".maps");

/* The token that a worker puts into its IDs -> the place of its socket + 1. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4 * WAKEONE_MAX_SLOTS);
	__type(key, __u32);
	__type(value, __u32);
} tokens SEC(".maps");

/* Bytes of a UDP header. */
#define UDP 8

/* Gives a packet to a socket that has its connection. */
static __always_inline bool go_on(struct sk_reuseport_md *md, __u32 at)
{
	__u32 place = (at & WAKEONE_HOME_AT) - 1;

	return bpf_sk_select_reuseport(md, &sockets, &place, 0) == 0;
}

static __always_inline __u32 slot_of(__u32 at)
{
	return ((at & WAKEONE_HOME_AT) - 1) & (WAKEONE_MAX_SLOTS - 1);
}

/* Moves an offered ID to those that are used: its client gets the server's packets. */
static __always_inline __u32 take_offer(const struct wakeone_quic_id *id, __u32 at, __u32 now)
{
	struct wakeone_home used = { .at = at & WAKEONE_HOME_AT, .used = now };

	bpf_map_update_elem(&ids, id, &used, BPF_NOEXIST);
	return used.at | WAKEONE_HOME_PROVEN;
}

/* Where the connection with this ID is; 0: nobody knows. */
static __always_inline __u32 by_id(const struct wakeone_quic_id *id, __u32 now)
{
	struct wakeone_home *home = bpf_map_lookup_elem(&ids, id);
	__u32 at;

	if (home) {
		at = WAKEONE_READ(home->at) | WAKEONE_HOME_PROVEN;
		if (WAKEONE_READ(home->used) != now)
			WAKEONE_WRITE(home->used, now);
		return at;
	}
	home = bpf_map_lookup_elem(&offers, id);
	if (!home)
		return 0;
	at = WAKEONE_READ(home->at);
	return at & WAKEONE_HOME_LEARNED ? take_offer(id, at, now) : at;
}

/* Reads a packet's ID, unless it is too short to be one of QUIC. */
static __always_inline void read_packet(struct sk_reuseport_md *md, struct wakeone_quic_packet *p)
{
	__u8 head[WAKEONE_QUIC_LONG_AT] = {};

	if (bpf_skb_load_bytes(md, UDP, head, sizeof(head)) ||
	    bpf_skb_load_bytes(md, UDP + wakeone_quic_id_at(head[0]), &p->id, WAKEONE_QUIC_ID_MAX))
		return;
	wakeone_quic_take(p, head);
}

/* A short header does not tell the length of its ID: all that the server has are
 * tried. */
static __always_inline __u32 by_short_id(const struct wakeone_quic_packet *p, __u32 now)
{
	__u32 lengths = WAKEONE_READ(table.quic_lengths);

	for (__u32 i = 0; i < WAKEONE_QUIC_LENGTHS; i++) {
		struct wakeone_quic_id id = p->id;
		__u32 length = wakeone_quic_length_at(lengths, i), at;

		if (!length)
			break;
		wakeone_quic_cut(&id, length);
		at = by_id(&id, now);
		if (at)
			return at;
	}
	return 0;
}

/* Where the worker is whose token an ID has; 0: none. */
static __always_inline __u32 by_token(const struct wakeone_quic_packet *p)
{
	struct wakeone_quic_id id = p->id;
	__u32 token, *at;

	if (!(WAKEONE_READ(table.flags) & WAKEONE_TABLE_TOKENS))
		return 0;
	if (!p->is_long)
		wakeone_quic_cut(&id, WAKEONE_QUIC_ID_MAX);
	token = wakeone_quic_token(&id);
	at = bpf_map_lookup_elem(&tokens, &token);
	return at ? *at & WAKEONE_HOME_AT : 0;
}

/* Notes where the packets of a flow go. A mere claim does not replace what the
 * client has proven. */
static __always_inline void note_flow(struct wakeone_home *home, __u32 at, __u32 now)
{
	__u32 before = WAKEONE_READ(home->at), used = WAKEONE_READ(home->used);

	if (used == now && (before & ~WAKEONE_HOME_LEARNED) == at)
		return;
	if (before & ~at & WAKEONE_HOME_PROVEN && now - used <= WAKEONE_READ(table.flow_silence))
		return;
	WAKEONE_WRITE(home->at, at);
	WAKEONE_WRITE(home->used, now);
}

/*
 * An unknown ID on a flow whose client has proven to get our packets: the server
 * gave it another one under encryption. A flow teaches one in a tick of the clock,
 * so a client cannot fill the map.
 */
static __always_inline void learn_from_flow(const struct wakeone_quic_packet *p, struct wakeone_home *home,
					    __u32 at, __u32 now)
{
	__u32 length = wakeone_quic_length_at(WAKEONE_READ(table.quic_lengths), 0);
	struct wakeone_home used = { .at = at & WAKEONE_HOME_AT, .used = now };
	struct wakeone_quic_id id = p->id;

	if (p->is_long || !p->is_whole || !length || !(at & WAKEONE_HOME_PROVEN))
		return;
	if (at & WAKEONE_HOME_LEARNED && WAKEONE_READ(home->used) == now)
		return;
	wakeone_quic_cut(&id, length);
	bpf_map_update_elem(&ids, &id, &used, BPF_ANY);
	WAKEONE_WRITE(home->at, at | WAKEONE_HOME_LEARNED);
	WAKEONE_WRITE(home->used, now);
}

/* A packet of an unknown connection. By its hash, so that the resets that answer it
 * come from one worker. */
static __always_inline int stray(struct sk_reuseport_md *md)
{
	const struct wakeone_eligible *e = wakeone_eligible(&table, wakeone_list(&table, false));
	__u32 n = WAKEONE_READ(e->count), i = wakeone_scale(md->hash, n), slot;

	if (!n)
		return leave(WAKEONE_EXIT_NO_SLOT, SK_PASS);
	WAKEONE_HIDE(i);
	slot = WAKEONE_READ(e->slot[i & (WAKEONE_MAX_SLOTS - 1)]);
	if (!try_slot(md, slot))
		return leave(WAKEONE_EXIT_SELECT_FAILED, SK_PASS);
	return send_to(slot, WAKEONE_EXIT_STRAY);
}

/*
 * Places a connection by the policy. Its next packets have the same ID until its
 * client knows the server's.
 *
 * It counts at once, as many may come before the first is answered. The agent
 * counts only those that go on, and so mends the count soon: a flood of first
 * packets raises all counts alike.
 */
static __always_inline int begin(struct sk_reuseport_md *md, const struct wakeone_quic_packet *p,
				 struct wakeone_home *home, __u32 now, bool walk)
{
	struct wakeone_draw draw = {
		.hash = md->hash,
		.agent_gone = agent_gone(WAKEONE_READ(table.policy)),
		.queues_fresh = queues_fresh(md, walk),
		.now = bpf_ktime_get_ns() >> WAKEONE_PROGRESS_SHIFT,
	};
	enum wakeone_exit why = WAKEONE_EXIT_SELECTED;
	struct wakeone_home offer = { .used = now };
	int slot;

	if (table.policy >= WAKEONE_POLICIES)
		return leave(WAKEONE_EXIT_BAD_POLICY, SK_PASS);
	slot = place(md, &draw, &why);
	if (slot < 0)
		return leave(why, SK_PASS);
	WAKEONE_WRITE(wakeone_slot_at(&table, slot)->chosen, draw.now);
	ADD(wakeone_slot_at(&table, slot)->active, 1);
	offer.at = place_of(slot) + 1;
	bpf_map_update_elem(&offers, &p->id, &offer, BPF_ANY);
	note_flow(home, offer.at, now);
	if (why == WAKEONE_EXIT_SELECTED)
		ADD(table.exits[WAKEONE_EXIT_SELECTED], 1);
	return send_to(slot, why);
}

/* A packet whose ID nobody knows goes with the others of its flow. */
static __always_inline int by_flow(struct sk_reuseport_md *md, const struct wakeone_quic_packet *p,
				   struct wakeone_home *home, __u32 now)
{
	__u32 at = known(home, now);

	if (at == WAKEONE_HOME_KERNEL) {
		note_use(home, at, now);
		return leave(WAKEONE_EXIT_BY_HASH, SK_PASS);
	}
	if (!(at & WAKEONE_HOME_AT) || !go_on(md, at))
		return stray(md);
	learn_from_flow(p, home, at, now);
	note_use(home, at, now);
	return send_to(slot_of(at), WAKEONE_EXIT_BY_FLOW);
}

static __always_inline int choose(struct sk_reuseport_md *md, bool walk)
{
	__u32 key = md->hash % WAKEONE_HOMES, now = flow_clock(), at = 0;
	enum wakeone_exit why = WAKEONE_EXIT_BY_ID;
	struct wakeone_home *home = bpf_map_lookup_elem(&homes, &key);
	struct wakeone_quic_packet p = {};

	if (!home) /* for the verifier */
		return SK_PASS;
	read_packet(md, &p);
	if (p.is_whole)
		at = p.is_long ? by_id(&p.id, now) : by_short_id(&p, now);
	if (!at && p.is_whole) {
		at = by_token(&p);
		why = WAKEONE_EXIT_BY_TOKEN;
	}
	if (at && go_on(md, at)) {
		note_flow(home, at, now);
		return send_to(slot_of(at), why);
	}
	if (!p.begins)
		return by_flow(md, &p, home, now);
	if (WAKEONE_READ(table.flags) & WAKEONE_TABLE_CLOSING)
		return leave(WAKEONE_EXIT_CLOSING, SK_DROP);
	return begin(md, &p, home, now, walk);
}

SEC("sk_reuseport")
int wakeone_quic(struct sk_reuseport_md *md)
{
	return choose(md, false);
}

SEC("sk_reuseport")
int wakeone_quic_walk(struct sk_reuseport_md *md)
{
	return choose(md, true);
}

/* ---- what the server sends ----------------------------------------------- */

#define PROTOCOL_UDP 17

/* Returns where the payload of a packet of UDP begins; 0: it is another one. Options
 * of IPv6 are not looked behind: no server sends them. */
static __always_inline __u32 payload_of(struct __sk_buff *skb)
{
	__u8 head[10];

	if (bpf_skb_load_bytes(skb, 0, head, sizeof(head)))
		return 0;
	if (head[0] >> 4 == 4 && head[9] == PROTOCOL_UDP)
		return (head[0] & 15) * 4 + UDP;
	if (head[0] >> 4 == 6 && head[6] == PROTOCOL_UDP)
		return 40 + UDP;
	return 0;
}

/* Notes whether the workers put their tokens into their IDs. Where they do not, an ID
 * may have another worker's token by chance. */
static __always_inline void see_token(const struct wakeone_quic_id *id, __u32 place)
{
	__u32 token = wakeone_quic_token(id), flags = WAKEONE_READ(table.flags);
	__u32 *at = bpf_map_lookup_elem(&tokens, &token);
	bool has = at && *at == place;

	if (has && !(flags & WAKEONE_TABLE_TOKENS))
		__sync_fetch_and_or(&table.flags, WAKEONE_TABLE_TOKENS);
	if (!has && flags & WAKEONE_TABLE_TOKENS)
		__sync_fetch_and_and(&table.flags, ~WAKEONE_TABLE_TOKENS);
}

/* Takes in the ID that the server has chosen, if a packet tells one. */
static __always_inline void learn(struct __sk_buff *skb)
{
	__u8 head[WAKEONE_QUIC_LONG_AT], length = 0;
	__u32 from = payload_of(skb), *place;
	struct wakeone_home offer = { .used = flow_clock() }, *before;
	struct wakeone_quic_id id = {};
	__u64 cookie;

	if (!from || bpf_skb_load_bytes(skb, from, head, sizeof(head)) ||
	    !wakeone_quic_is_long(head[0]))
		return;
	/* Version 0 lists versions: no connection was made. */
	if (!wakeone_quic_version(head) || head[5] > WAKEONE_QUIC_ID_MAX)
		return;
	cookie = bpf_get_socket_cookie(skb);
	place = bpf_map_lookup_elem(&listeners, &cookie);
	if (!place || *place >= WAKEONE_PLACES)
		return;
	from += WAKEONE_QUIC_LONG_AT + head[5];
	if (bpf_skb_load_bytes(skb, from, &length, 1) || !length || length > WAKEONE_QUIC_ID_MAX ||
	    bpf_skb_load_bytes(skb, from + 1, &id, WAKEONE_QUIC_ID_MAX))
		return;
	wakeone_quic_cut(&id, length);
	see_token(&id, *place + 1);
	offer.at = (*place + 1) | WAKEONE_HOME_LEARNED;
	before = bpf_map_lookup_elem(&offers, &id);
	if (!before || before->at != offer.at)
		bpf_map_update_elem(&offers, &id, &offer, BPF_ANY);
	if (WAKEONE_READ(table.quic_lengths) != wakeone_quic_lengths(table.quic_lengths, length))
		table.quic_lengths = wakeone_quic_lengths(table.quic_lengths, length);
}

SEC("cgroup_skb/egress")
int wakeone_quic_learn(struct __sk_buff *skb)
{
	learn(skb);
	return 1;
}
