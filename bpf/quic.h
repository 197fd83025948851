/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What the bytes of a QUIC packet tell without its keys (RFC 8999, RFC 9000 §17):
 * pure functions, compiled for the kernel and for the tests. All bytes are the
 * client's, and may be anything.
 *
 * Of a datagram with several packets, or of a train of datagrams that the kernel
 * took in at once, only the first packet is looked at: all are of one connection.
 */
#ifndef WAKEONE_QUIC_H
#define WAKEONE_QUIC_H

#include "policy.h"

/* The bytes before the receiver's ID in a long header, which are flags, version and
 * the ID's length, and in a short one, which are flags. No packet ends within 20
 * bytes after those, however short its ID is: a sender's ID and a sealed payload
 * follow, and one of fewer than 21 bytes is none (RFC 9000 §10.3). */
#define WAKEONE_QUIC_LONG_AT 6
#define WAKEONE_QUIC_SHORT_AT 1

#define WAKEONE_QUIC_V1 0x00000001
#define WAKEONE_QUIC_V2 0x6b3343cf

WAKEONE_INLINE __u32 wakeone_quic_is_long(__u8 first)
{
	return first >> 7;
}

WAKEONE_INLINE __u32 wakeone_quic_version(const __u8 *head)
{
	return (__u32)head[1] << 24 | (__u32)head[2] << 16 | (__u32)head[3] << 8 | head[4];
}

/*
 * Whether a packet with a long header belongs to a handshake that is under way:
 * its ID is one that a server has made. Any other may begin a connection, also
 * one of a version that is not known here.
 */
WAKEONE_INLINE __u32 wakeone_quic_is_under_way(const __u8 *head)
{
	__u32 version = wakeone_quic_version(head), type = head[0] >> 4 & 3;

	return (version == WAKEONE_QUIC_V1 && type == 2) || (version == WAKEONE_QUIC_V2 && type == 3);
}

/* The bits of a word of an ID that are in use. */
WAKEONE_INLINE __u64 wakeone_quic_mask(__u32 length, __u32 word)
{
	__s32 bytes = (__s32)length - 8 * (__s32)word;
	__u64 some = ~(~0ull << (8 * bytes & 63)) & wakeone_below(0, bytes);

	return wakeone_either(wakeone_below(7, bytes), ~0ull, some);
}

/*
 * Cuts an ID to its length, which may be up to 20. The machine's least byte comes
 * first: so it is on all that run BPF programs today.
 */
WAKEONE_INLINE void wakeone_quic_cut(struct wakeone_quic_id *id, __u32 length)
{
	id->word[0] &= wakeone_quic_mask(length, 0);
	id->word[1] &= wakeone_quic_mask(length, 1);
	id->word[2] &= wakeone_quic_mask(length, 2);
	id->word[2] |= (__u64)length << 56;
}

WAKEONE_INLINE __u32 wakeone_quic_length(const struct wakeone_quic_id *id)
{
	return (__u32)(id->word[2] >> 56);
}

/*
 * The token in an ID that its server made by the plaintext algorithm of
 * draft-ietf-quic-load-balancers: the first byte tells configuration and length, the
 * next two are the server's number. 0: the ID is too short for one.
 */
WAKEONE_INLINE __u32 wakeone_quic_token(const struct wakeone_quic_id *id)
{
	__u32 token = (__u32)(id->word[0] >> 8 & 0xff) << 8 | (__u32)(id->word[0] >> 16 & 0xff);

	return wakeone_quic_length(id) < 3 ? 0 : token;
}

/* The beginning of a packet, as it was read. */
struct wakeone_quic_packet {
	struct wakeone_quic_id id; /* cut to its length, if the header is long */
	__u32 is_long;
	__u32 begins;              /* it may be the first one of a connection */
	__u32 is_whole;            /* it has an ID */
};

/* Takes in the first bytes of a packet whose `id` holds the 20 bytes after them. */
WAKEONE_INLINE void wakeone_quic_take(struct wakeone_quic_packet *p, const __u8 *head)
{
	p->is_long = wakeone_quic_is_long(head[0]);
	p->is_whole = 1;
	if (!p->is_long)
		return;
	p->is_whole = head[5] <= WAKEONE_QUIC_ID_MAX;
	p->begins = !wakeone_quic_is_under_way(head);
	wakeone_quic_cut(&p->id, head[5]);
}

/* Where the ID begins in a packet whose first byte this is. */
WAKEONE_INLINE __u32 wakeone_quic_id_at(__u8 first)
{
	return wakeone_quic_is_long(first) ? WAKEONE_QUIC_LONG_AT : WAKEONE_QUIC_SHORT_AT;
}

/* As many lengths of IDs are told apart in one group. */
#define WAKEONE_QUIC_LENGTHS 4

WAKEONE_INLINE __u32 wakeone_quic_length_at(__u32 lengths, __u32 i)
{
	return lengths >> (8 * i & 31) & 0xff;
}

/* Takes a length into a group's lengths, the newest first. The oldest falls out. */
WAKEONE_INLINE __u32 wakeone_quic_lengths(__u32 lengths, __u32 length)
{
	for (__u32 i = 0; i < WAKEONE_QUIC_LENGTHS; i++) {
		if (wakeone_quic_length_at(lengths, i) == length)
			return lengths;
	}
	return lengths << 8 | length;
}

#endif
