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

/* So many sockets are still to be found. */
__u32 left SEC(".data.left") = 0;

struct wakeone_chooser {
	__u32 there;   /* a program chooses */
	__u32 program; /* its id; 0 for a classic one */
};

/* By the socket's cookie. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, struct wakeone_chooser);
} choosers SEC(".maps");

/* Nonzero ends the walk, as EAGAIN to the reader. */
static __always_inline int tell(struct sock *sk)
{
	struct bpf_prog *program = BPF_CORE_READ(sk, sk_reuseport_cb, prog);
	struct wakeone_chooser found = { .there = program != 0 };
	__u64 cookie = BPF_CORE_READ(sk, __sk_common.skc_cookie.counter);

	if (program)
		found.program = BPF_CORE_READ(program, aux, id);
	bpf_map_update_elem(&choosers, &cookie, &found, BPF_ANY);
	return --left == 0;
}

/*
 * Listening sockets come first (tcp_seek_last_pos, net/ipv4/tcp_ipv4.c). The
 * walk ends with the last one that is looked for: the kernel's walk over
 * connections is not safe (recount.bpf.c tells why).
 */
SEC("iter/tcp")
int wakeone_tcp_choosers(struct bpf_iter__tcp *ctx)
{
	struct sock_common *common = ctx->sk_common;

	if (!common)
		return 0;
	if (common->skc_state != STATE_LISTEN)
		return 1;
	return common->skc_num == port ? tell((struct sock *)common) : 0;
}

SEC("iter/udp")
int wakeone_udp_choosers(struct bpf_iter__udp *ctx)
{
	struct sock *sk = (struct sock *)ctx->udp_sk;

	if (!sk || BPF_CORE_READ(sk, __sk_common.skc_num) != port)
		return 0;
	return tell(sk);
}
