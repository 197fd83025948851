// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Gives the connections of a public address to listeners that are bound to a
 * port of the loopback device (sk_lookup). Shows these listeners' owners the
 * public address (cgroup/getsockname).
 *
 * listen() walks every socket of its port. Accepted connections and those in
 * TIME_WAIT belong to the public port. So listening again costs the same,
 * however many there are (net/ipv4/inet_connection_sock.c,
 * inet_csk_bind_conflict).
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>
#include <stdbool.h>
#include "contract.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define FAMILY_IP4 2
#define FAMILY_IP6 10
#define PROTOCOL_TCP 6
/* One load at a fixed place. Without it the compiler computes an address in the
 * context, which the verifier refuses. */
#define FIELD(field) (*(const volatile __u32 *)&(field))
#define LOOPBACK_IP4 bpf_htonl(0x7f000001)

/* One address of a group. Addresses in the network's order, ports in ours. */
struct wakeone_place {
	__u32 takes_ip4;
	__u32 takes_ip6;
	/* Any address of these families: a wildcard. */
	__u32 any;
	__u32 ip4;
	__u32 ip6[4];
	__u32 port;
	/* The listeners' own: on ::1 where `listens_ip6`, else 127.0.0.1. */
	__u32 listens_ip6;
	__u32 private_port;
	/* The same as an IPv6 socket shows it. */
	__u32 private_ip6[4];
};

/* Set before loading. */
const volatile struct wakeone_place place = {};

/*
 * The listeners by slot: the map that the dispatch program selects from. This
 * type of program may not read an array of reuseport sockets, and a socket
 * cannot be in both. A listener that was shut down stays in this map.
 */
struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__uint(max_entries, WAKEONE_MAX_SLOTS);
	__type(key, __u32);
	__type(value, __u64);
} sockets SEC(".maps");

/* Where a packet goes to. */
struct target {
	__u32 family;
	__u32 port;
	__u32 ip4;
	__u32 ip6[4];
};

static __always_inline bool same_ip6(const __u32 *a, const volatile __u32 *b)
{
	return a[0] == b[0] && a[1] == b[1] && a[2] == b[2] && a[3] == b[3];
}

static __always_inline bool is_public(const struct target *to)
{
	if (to->port != place.port)
		return false;
	if (to->family == FAMILY_IP4)
		return place.takes_ip4 && (place.any || to->ip4 == place.ip4);
	return place.takes_ip6 && (place.any || same_ip6(to->ip6, place.ip6));
}

static __always_inline bool is_private(const struct target *to)
{
	if (to->port != place.private_port)
		return false;
	if (to->family == FAMILY_IP4)
		return !place.listens_ip6 && to->ip4 == LOOPBACK_IP4;
	return place.listens_ip6 && same_ip6(to->ip6, place.private_ip6);
}

/* Assigns the first member that listens. Any member stands for the group, whose
 * own program then chooses. */
static __always_inline void assign(struct bpf_sk_lookup *ctx)
{
	for (__u32 i = 0; i < WAKEONE_MAX_SLOTS; i++) {
		__u32 slot = i;
		struct bpf_sock *sk = bpf_map_lookup_elem(&sockets, &slot);
		bool listens;

		if (!sk)
			continue;
		listens = sk->state == BPF_TCP_LISTEN;
		/* Refused if a program before us chose already: that program
		 * has the last word. */
		if (listens)
			bpf_sk_assign(ctx, sk, 0);
		bpf_sk_release(sk);
		if (listens)
			return;
	}
}

/*
 * If nobody listens the lookup goes on, and finds the socket that reserves the
 * address. That one drops the SYN without an answer, and the client retries.
 */
SEC("sk_lookup")
int wakeone_lookup(struct bpf_sk_lookup *ctx)
{
	struct target to = { .port = FIELD(ctx->local_port) };

	/* Compares ports first: this runs for each new connection of the namespace. */
	if (to.port != place.port && to.port != place.private_port)
		return SK_PASS;
	if (FIELD(ctx->protocol) != PROTOCOL_TCP)
		return SK_PASS;
	to.family = FIELD(ctx->family);
	to.ip4 = FIELD(ctx->local_ip4);
	to.ip6[0] = FIELD(ctx->local_ip6[0]);
	to.ip6[1] = FIELD(ctx->local_ip6[1]);
	to.ip6[2] = FIELD(ctx->local_ip6[2]);
	to.ip6[3] = FIELD(ctx->local_ip6[3]);
	/* The group can be reached where it was told to listen, and nowhere else. */
	if (is_private(&to))
		return SK_DROP;
	if (is_public(&to))
		assign(ctx);
	return SK_PASS;
}

SEC("cgroup/getsockname4")
int wakeone_name4(struct bpf_sock_addr *ctx)
{
	if (FIELD(ctx->user_port) != bpf_htons(place.private_port) ||
	    FIELD(ctx->user_ip4) != LOOPBACK_IP4)
		return 1;
	ctx->user_ip4 = place.ip4;
	ctx->user_port = bpf_htons(place.port);
	return 1;
}

SEC("cgroup/getsockname6")
int wakeone_name6(struct bpf_sock_addr *ctx)
{
	__u32 ip6[4];

	ip6[0] = FIELD(ctx->user_ip6[0]);
	ip6[1] = FIELD(ctx->user_ip6[1]);
	ip6[2] = FIELD(ctx->user_ip6[2]);
	ip6[3] = FIELD(ctx->user_ip6[3]);
	if (FIELD(ctx->user_port) != bpf_htons(place.private_port) ||
	    !same_ip6(ip6, place.private_ip6))
		return 1;
	ctx->user_ip6[0] = place.ip6[0];
	ctx->user_ip6[1] = place.ip6[1];
	ctx->user_ip6[2] = place.ip6[2];
	ctx->user_ip6[3] = place.ip6[3];
	ctx->user_port = bpf_htons(place.port);
	return 1;
}
