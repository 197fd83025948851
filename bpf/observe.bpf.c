// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Read-only probes for doctor, top and lab: how long connections wait in the
 * accept queue, who takes them, and who is woken for them. They change nothing,
 * run only while somebody looks, and leave at once for what is not asked about.
 *
 * fentry would say the same with less, but not every kernel has it:
 * tracepoints are what all have.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>
#include <stdbool.h>
#include "observe.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define AGAIN 11
/* include/net/tcp_states.h */
enum { STATE_ESTABLISHED = 1, STATE_SYN_RECV = 3, STATE_CLOSE = 7, STATE_LISTEN = 10 };

/* The few fields that are read; where they are is the kernel's BTF's to say. */
struct ns_common {
	unsigned int inum;
} __attribute__((preserve_access_index));
struct net {
	struct ns_common ns;
} __attribute__((preserve_access_index));
typedef struct {
	struct net *net;
} __attribute__((preserve_access_index)) possible_net_t;
struct sock_common {
	unsigned short skc_num;
	volatile unsigned char skc_state;
	possible_net_t skc_net;
} __attribute__((preserve_access_index));
struct sock {
	struct sock_common __sk_common;
} __attribute__((preserve_access_index));
struct socket {
	struct sock *sk;
} __attribute__((preserve_access_index));
struct file {
	void *private_data;
} __attribute__((preserve_access_index));
struct fdtable {
	unsigned int max_fds;
	struct file **fd;
} __attribute__((preserve_access_index));
struct files_struct {
	struct fdtable *fdt;
} __attribute__((preserve_access_index));
struct task_struct {
	int tgid;
	struct files_struct *files;
} __attribute__((preserve_access_index));

struct wakeone_watched watched SEC(".data.watched") = {};

/* Process id -> its place in `watched.worker`, by user space. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4 * WAKEONE_WATCHED_WORKERS);
	__type(key, __u32);
	__type(value, __u32);
} places SEC(".maps");

/* Connection (its address in the kernel) -> when its handshake completed. LRU:
 * one that is never accepted must not stay for ever. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, __u64);
	__type(value, __u64);
} born SEC(".maps");

/* Whose connection this CPU is waking threads for: valid for the task that was
 * current then, and for a moment. Another socket's news end it. */
struct waking {
	__u64 task;
	__u64 at_ns;
};
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct waking);
} waking_for SEC(".maps");

/* A herd of a thousand takes some milliseconds to wake. */
#define WAKING_NS 20000000

#define ADD(counter, n) ((void)__sync_fetch_and_add(&(counter), (n)))

static __always_inline struct wakeone_watched_worker *worker_of(__u32 tgid)
{
	__u32 *place = bpf_map_lookup_elem(&places, &tgid);

	return place ? &watched.worker[*place & (WAKEONE_WATCHED_WORKERS - 1)] : NULL;
}

/* The same port in another container is another server. */
static __always_inline bool is_ours(const struct sock *sk)
{
	return BPF_CORE_READ(sk, __sk_common.skc_num) == watched.port &&
	       BPF_CORE_READ(sk, __sk_common.skc_net.net, ns.inum) == watched.netns;
}

SEC("tp_btf/inet_sock_set_state")
int BPF_PROG(wakeone_established, const struct sock *sk, int from, int to)
{
	__u64 key = (__u64)sk, now;

	if (sk->__sk_common.skc_num != watched.port || !is_ours(sk))
		return 0;
	if (from == STATE_SYN_RECV && to == STATE_ESTABLISHED) {
		now = bpf_ktime_get_ns();
		bpf_map_update_elem(&born, &key, &now, BPF_ANY);
	} else if (to == STATE_CLOSE) {
		bpf_map_delete_elem(&born, &key);
	}
	return 0;
}

SEC("tp_btf/sk_data_ready")
int BPF_PROG(wakeone_ready, const struct sock *sk)
{
	__u32 zero = 0;
	struct waking *waking = bpf_map_lookup_elem(&waking_for, &zero);

	if (!waking)
		return 0;
	waking->task = 0;
	if (sk->__sk_common.skc_state != STATE_LISTEN || !is_ours(sk))
		return 0;
	ADD(watched.connections, 1);
	waking->task = bpf_get_current_task();
	waking->at_ns = bpf_ktime_get_ns();
	return 0;
}

SEC("tp_btf/sched_waking")
int BPF_PROG(wakeone_waking, struct task_struct *task)
{
	__u32 zero = 0;
	struct waking *waking = bpf_map_lookup_elem(&waking_for, &zero);
	struct wakeone_watched_worker *worker;

	if (!waking || !waking->task || waking->task != bpf_get_current_task())
		return 0;
	worker = worker_of(task->tgid);
	if (!worker || bpf_ktime_get_ns() - waking->at_ns > WAKING_NS)
		return 0;
	ADD(watched.wakeups, 1);
	ADD(worker->woken, 1);
	return 0;
}

static __always_inline __u32 bucket_of(__u64 us)
{
	__u32 octave = 0;
	__u64 rest = us;

	if (us < WAKEONE_WAIT_STEPS)
		return us;
	/* The highest bit, by halves. */
	if (rest >> 32) { octave += 32; rest >>= 32; }
	if (rest >> 16) { octave += 16; rest >>= 16; }
	if (rest >> 8) { octave += 8; rest >>= 8; }
	if (rest >> 4) { octave += 4; rest >>= 4; }
	if (rest >> 2) { octave += 2; rest >>= 2; }
	if (rest >> 1) { octave += 1; }
	if (octave > 34)
		return WAKEONE_WAIT_BUCKETS - 1;
	return (octave - 3) * WAKEONE_WAIT_STEPS +
	       ((us >> (octave - 4)) & (WAKEONE_WAIT_STEPS - 1));
}

/* The descriptor is in the table already when accept returns. */
static __always_inline struct sock *socket_of(struct task_struct *task, long fd)
{
	struct fdtable *table = BPF_CORE_READ(task, files, fdt);
	struct file **files = BPF_CORE_READ(table, fd), *file = NULL;
	struct socket *socket;

	if (fd < 0 || fd >= BPF_CORE_READ(table, max_fds))
		return NULL;
	if (bpf_probe_read_kernel(&file, sizeof(file), files + fd) || !file)
		return NULL;
	socket = BPF_CORE_READ(file, private_data);
	return socket ? BPF_CORE_READ(socket, sk) : NULL;
}

static __always_inline int accepted(long result)
{
	struct wakeone_watched_worker *worker = worker_of(bpf_get_current_pid_tgid() >> 32);
	struct sock *sk;
	__u64 key, *since, us;
	__u32 bucket;

	if (!worker)
		return 0;
	if (result < 0) {
		if (result == -AGAIN)
			ADD(worker->accepted_empty, 1);
		else
			ADD(worker->accepted_error, 1);
		return 0;
	}
	sk = socket_of((void *)bpf_get_current_task(), result);
	/* A worker may have other listeners. */
	if (!sk || !is_ours(sk))
		return 0;
	ADD(worker->accepted, 1);
	key = (__u64)sk;
	since = bpf_map_lookup_elem(&born, &key);
	if (!since) {
		ADD(watched.untracked, 1);
		return 0;
	}
	us = (bpf_ktime_get_ns() - *since) / 1000;
	bpf_map_delete_elem(&born, &key);
	ADD(worker->waits, 1);
	ADD(worker->wait_us_sum, us);
	if (us > worker->wait_us_max)
		worker->wait_us_max = us;
	bucket = bucket_of(us);
	/* Or the compiler folds the mask into what it knows of the octave. */
	barrier_var(bucket);
	ADD(worker->wait[bucket & (WAKEONE_WAIT_BUCKETS - 1)], 1);
	return 0;
}

struct syscall_exit {
	__u64 common;
	long number;
	long result;
};

SEC("tracepoint/syscalls/sys_exit_accept4")
int wakeone_accept4(struct syscall_exit *exit)
{
	return accepted(exit->result);
}

SEC("tracepoint/syscalls/sys_exit_accept")
int wakeone_accept(struct syscall_exit *exit)
{
	return accepted(exit->result);
}
