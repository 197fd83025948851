// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
  * Read-only probes for doctor, top and lab. They measure how long connections
  * wait in the accept queue, which process takes them, and which are woken for
  * them. They change nothing, run only while somebody looks, and return at once
  * for other sockets.
  *
  * accept() is watched at the point where it takes a connection from the queue,
  * by a trampoline (fexit). Not every kernel has trampolines. All have the
  * tracepoints of its system calls, which slow down every system call of the
  * machine.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>
#include <stdbool.h>
#include "observe.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define AGAIN 11
#define PROTOCOL_TCP 6
/* include/net/tcp_states.h */
enum {
	STATE_ESTABLISHED = 1,
	STATE_SYN_RECV = 3,
	STATE_FIN_WAIT1 = 4,
	STATE_LAST_ACK = 9,
	STATE_LISTEN = 10,
};

/* The few fields that are read. The kernel's BTF tells where they are. */
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
	possible_net_t skc_net;
} __attribute__((preserve_access_index));
struct qspinlock {
	int val;
};
struct raw_spinlock {
	struct qspinlock raw_lock;
} __attribute__((preserve_access_index));
struct spinlock {
	struct raw_spinlock rlock;
} __attribute__((preserve_access_index));
typedef struct {
	struct spinlock slock;
} __attribute__((preserve_access_index)) socket_lock_t;
struct socket;
struct sock {
	struct sock_common __sk_common;
	unsigned short sk_protocol;
	socket_lock_t sk_lock;
	struct socket *sk_socket;
} __attribute__((preserve_access_index));
struct socket {
	struct sock *sk;
} __attribute__((preserve_access_index));
/* The time when the connection was ready for the application, in us of
 * CLOCK_MONOTONIC. The kernel notes it just before it queues the connection
 * (net/ipv4/tcp_input.c, tcp_init_buffer_space). It notes it again when the
 * application reads, which is after accept(). */
struct tcp_sock {
	struct {
		__u64 time;
	} rcvq_space;
} __attribute__((preserve_access_index));
struct proto_accept_arg {
	int err;
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
	int pid;
	int tgid;
	struct files_struct *files;
} __attribute__((preserve_access_index));

/* Without a value of its own it is in .bss, and takes no room in the object. */
struct wakeone_watched watched;

/* Id of a process or of a thread -> its place in `watched.worker`. Filled by
 * user space. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4 * WAKEONE_WATCHED_WORKERS);
	__type(key, __u32);
	__type(value, __u32);
} places SEC(".maps");

/*
 * The connection that this CPU announces to its listener. The kernel makes the
 * child socket, locks it, and unlocks it after it has woken the listener's
 * threads (net/ipv4/tcp_minisocks.c, tcp_child_process; of TFO
 * net/ipv4/tcp_input.c, tcp_conn_request). No thread can take the child before
 * that. So a wake-up belongs to the listener while the child is locked and has
 * no file. A wake-up for any other socket finds it unlocked, and ends the mark.
 */
struct announced {
	__u64 task;
	__u64 child;
};
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct announced);
} announcing SEC(".maps");

#define ADD(counter, n) ((void)__sync_fetch_and_add(&(counter), (n)))

/* The thread where it is a worker of its own, else its process. */
static __always_inline struct wakeone_watched_worker *worker_of(__u32 tid, __u32 tgid)
{
	__u32 *place = bpf_map_lookup_elem(&places, &tid);

	if (!place && tid != tgid)
		place = bpf_map_lookup_elem(&places, &tgid);
	return place ? &watched.worker[*place & (WAKEONE_WATCHED_WORKERS - 1)] : NULL;
}

/* The same port in another container is another server. The pointer comes from
 * the kernel's arguments, so these are loads. BPF_CORE_READ would call helpers. */
static __always_inline bool is_ours(const struct sock *sk)
{
	return sk->__sk_common.skc_num == watched.port &&
	       sk->__sk_common.skc_net.net->ns.inum == watched.netns;
}

/* The same for a pointer that was found in memory. */
static __always_inline bool found_is_ours(const struct sock *sk)
{
	return BPF_CORE_READ(sk, __sk_common.skc_num) == watched.port &&
	       BPF_CORE_READ(sk, __sk_common.skc_net.net, ns.inum) == watched.netns;
}

static __always_inline void announce(const struct sock *child)
{
	__u32 zero = 0;
	struct announced *mark = bpf_map_lookup_elem(&announcing, &zero);

	if (!mark)
		return;
	mark->task = bpf_get_current_task();
	mark->child = (__u64)child;
}

/* Whether the child is locked, and not accepted yet. Its memory may be another
 * socket's by now, of another port. */
static __always_inline bool is_announced(const struct sock *child)
{
	int lock = 0;

	return !bpf_probe_read_kernel(&lock, sizeof(lock), &child->sk_lock.slock.rlock.raw_lock) &&
	       lock && !BPF_CORE_READ(child, sk_socket) && found_is_ours(child);
}

SEC("tp_btf/sched_waking")
int BPF_PROG(wakeone_waking, struct task_struct *task)
{
	__u32 zero = 0;
	struct announced *mark = bpf_map_lookup_elem(&announcing, &zero);
	struct wakeone_watched_worker *worker;

	if (!mark || !mark->child)
		return 0;
	if (mark->task != bpf_get_current_task() || !is_announced((void *)mark->child)) {
		mark->child = 0;
		return 0;
	}
	worker = worker_of(task->pid, task->tgid);
	if (!worker)
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
	/* Finds the highest bit, by halves. */
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

static __always_inline void count_time(struct wakeone_times *times, __u64 since, __u64 now)
{
	/* Another CPU may have read the clock, so the difference may be negative. */
	__u64 us = now > since ? now - since : 0;
	__u32 bucket = bucket_of(us);

	ADD(times->count, 1);
	ADD(times->us_sum, us);
	if (us > times->us_max)
		times->us_max = us;
	/* Without it the compiler folds the mask into what it knows of the octave. */
	barrier_var(bucket);
	ADD(times->bucket[bucket & (WAKEONE_WAIT_BUCKETS - 1)], 1);
}

static __always_inline void count_wait(struct wakeone_watched_worker *worker, struct sock *child,
				       __u64 now)
{
	/* With Multipath TCP the application gets another kind of socket. */
	if (BPF_CORE_READ(child, sk_protocol) == PROTOCOL_TCP)
		count_time(&worker->wait, BPF_CORE_READ((struct tcp_sock *)child, rcvq_space.time),
			   now);
}

static __always_inline struct wakeone_watched_worker *current_worker(void)
{
	__u64 id = bpf_get_current_pid_tgid();

	return worker_of(id, id >> 32);
}

/*
 * The worker closes a connection. If it serves one at a time, this is the one
 * that it accepted last, and the time between is the service time. A connection
 * that was reset ends without this; the next accept() then counts as overlapping.
 */
static __always_inline void count_end(void)
{
	struct wakeone_watched_worker *worker = current_worker();
	__u64 since;

	if (!worker)
		return;
	since = worker->accepted_us;
	worker->accepted_us = 0;
	if (since)
		count_time(&worker->held, since, bpf_ktime_get_ns() / 1000);
}

SEC("tp_btf/inet_sock_set_state")
int BPF_PROG(wakeone_state, const struct sock *sk, int from, int to)
{
	bool ends = to == STATE_FIN_WAIT1 || to == STATE_LAST_ACK;

	/* Most states of most sockets are none of these. */
	if (!ends && !(from == STATE_LISTEN && to == STATE_SYN_RECV) &&
	    !(from == STATE_SYN_RECV && to == STATE_ESTABLISHED))
		return 0;
	if (!is_ours(sk))
		return 0;
	if (ends)
		count_end();
	else if (to == STATE_SYN_RECV)
		announce(sk);
	else
		ADD(watched.connections, 1);
	return 0;
}

static __always_inline void count_accept(struct wakeone_watched_worker *worker,
					 struct sock *child, int error)
{
	if (child) {
		__u64 now = bpf_ktime_get_ns() / 1000;

		ADD(worker->accepted, 1);
		if (worker->accepted_us)
			ADD(worker->overlapping, 1);
		worker->accepted_us = now;
		count_wait(worker, child, now);
	} else if (error == -AGAIN) {
		ADD(worker->accepted_empty, 1);
	}
}

/* One of these two is loaded: the one with this kernel's arguments. */
SEC("fexit/inet_csk_accept")
int BPF_PROG(wakeone_accept, struct sock *listener, struct proto_accept_arg *arg,
	     struct sock *child)
{
	struct wakeone_watched_worker *worker = current_worker();

	/* A worker may have other listeners. */
	if (worker && is_ours(listener))
		count_accept(worker, child, child ? 0 : arg->err);
	return 0;
}

/* Before Linux 6.10. */
SEC("fexit/inet_csk_accept")
int BPF_PROG(wakeone_accept_by_flags, struct sock *listener, int flags, int *err, bool kern,
	     struct sock *child)
{
	struct wakeone_watched_worker *worker = current_worker();
	int error = 0;

	if (!worker || !is_ours(listener))
		return 0;
	if (!child)
		bpf_probe_read_kernel(&error, sizeof(error), err);
	count_accept(worker, child, error);
	return 0;
}

/* ---- where there are no trampolines ------------------------------------- */

/* When accept returns, the descriptor is in the table already. */
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

static __always_inline int call_returned(long result)
{
	struct wakeone_watched_worker *worker = current_worker();
	struct sock *child = NULL;

	if (!worker)
		return 0;
	if (result >= 0) {
		child = socket_of((void *)bpf_get_current_task(), result);
		if (!child || !found_is_ours(child))
			return 0;
	}
	count_accept(worker, child, result);
	return 0;
}

struct syscall_exit {
	__u64 common;
	long number;
	long result;
};

SEC("tracepoint/syscalls/sys_exit_accept4")
int wakeone_call_accept4(struct syscall_exit *exit)
{
	return call_returned(exit->result);
}

SEC("tracepoint/syscalls/sys_exit_accept")
int wakeone_call_accept(struct syscall_exit *exit)
{
	return call_returned(exit->result);
}
