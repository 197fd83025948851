/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The kernel's types that programs on socket iterators read. Each of them has
 * its own struct sock, for each reads other fields.
 */
#ifndef WAKEONE_ITER_H
#define WAKEONE_ITER_H

typedef struct {
	__s64 counter;
} atomic64_t;
struct sock_common {
	unsigned short skc_num;
	volatile unsigned char skc_state;
	atomic64_t skc_cookie;
} __attribute__((preserve_access_index));
struct bpf_iter_meta {
	void *seq;
} __attribute__((preserve_access_index));
struct bpf_iter__tcp {
	struct bpf_iter_meta *meta;
	struct sock_common *sk_common;
} __attribute__((preserve_access_index));
struct udp_sock;
struct bpf_iter__udp {
	struct bpf_iter_meta *meta;
	struct udp_sock *udp_sk;
} __attribute__((preserve_access_index));

#endif
