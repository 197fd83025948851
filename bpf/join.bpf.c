// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Lets servers that open their own listener share its address: SO_REUSEPORT is
 * set on a socket of TCP just before it is bound to a port of the group
 * (cgroup/bind). So each worker's listener joins the same reuseport group.
 *
 * The kernel runs this before it looks for conflicts (net/ipv4/af_inet.c,
 * inet_bind), and allows bpf_setsockopt() here since Linux 5.12.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>
#include <stdbool.h>
#include "contract.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define PROTOCOL_TCP 6
/* include/uapi/asm-generic/socket.h */
#define SOL_SOCKET 1
#define SO_REUSEPORT 15

/* The group's ports; 0: none. Set before loading. */
const volatile __u32 ports[WAKEONE_MAX_ADDRESSES] = {};

/* Always lets the bind go on: where the option is refused, so is the bind. */
static __always_inline int join(struct bpf_sock_addr *ctx)
{
	__u32 port = bpf_ntohs(ctx->user_port);
	bool ours = false;
	int on = 1;

	for (__u32 i = 0; i < WAKEONE_MAX_ADDRESSES; i++)
		ours |= port == ports[i];
	if (ours && port && ctx->protocol == PROTOCOL_TCP)
		bpf_setsockopt(ctx, SOL_SOCKET, SO_REUSEPORT, &on, sizeof(on));
	return 1;
}

SEC("cgroup/bind4")
int wakeone_join4(struct bpf_sock_addr *ctx)
{
	return join(ctx);
}

SEC("cgroup/bind6")
int wakeone_join6(struct bpf_sock_addr *ctx)
{
	return join(ctx);
}
