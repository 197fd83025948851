// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Tells which program chooses for the reuseport groups of a port. No system
 * call does: SO_ATTACH_REUSEPORT_EBPF replaces whatever program is there, and
 * SO_DETACH_REUSEPORT_BPF takes it away, each without a word to its owner.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "iter.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

enum { STATE_LISTEN = 10 };

struct bpf_prog_aux {
	__u32 id;
} __attribute__((preserve_access_index));
struct bpf_prog {
	struct bpf_prog_aux *aux;
} __attribute__((preserve_access_index));
struct sock_reuseport {
	struct bpf_prog *prog;
} __attribute__((preserve_access_index));
struct sock {
	struct sock_common __sk_common;
	struct sock_reuseport *sk_reuseport_cb;
} __attribute__((preserve_access_index));
struct udp_sock {
	/* Only its address is of interest: a struct sock stands there. */
	int dummy;
};

const volatile __u32 port = 0;

/* One record of the iterators, for each socket. */
struct wakeone_chooser {
	__u64 cookie;
	__u32 there;   /* a program chooses */
	__u32 program; /* its id; 0 for a classic one */
};

static __always_inline int tell(struct bpf_iter_meta *meta, struct sock *sk)
{
	struct bpf_prog *program = BPF_CORE_READ(sk, sk_reuseport_cb, prog);
	struct wakeone_chooser found = {
		.cookie = BPF_CORE_READ(sk, __sk_common.skc_cookie.counter),
		.there = program != 0,
	};

	if (program)
		found.program = BPF_CORE_READ(program, aux, id);
	bpf_seq_write(meta->seq, &found, sizeof(found));
	return 0;
}

SEC("iter/tcp")
int wakeone_tcp_choosers(struct bpf_iter__tcp *ctx)
{
	struct sock_common *common = ctx->sk_common;

	if (!common)
		return 0;
	/* Listening sockets come first (tcp_seek_last_pos, net/ipv4/tcp_ipv4.c).
	 * The walk ends behind them, as EAGAIN to the reader. */
	if (common->skc_state != STATE_LISTEN)
		return 1;
	return common->skc_num == port ? tell(ctx->meta, (struct sock *)common) : 0;
}

SEC("iter/udp")
int wakeone_udp_choosers(struct bpf_iter__udp *ctx)
{
	struct sock *sk = (struct sock *)ctx->udp_sk;

	if (!sk || BPF_CORE_READ(sk, __sk_common.skc_num) != port)
		return 0;
	return tell(ctx->meta, sk);
}
