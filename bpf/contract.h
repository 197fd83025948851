/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The types that the kernel side and user space share, and nothing else.
 *
 * User space never mirrors these types by hand: the Rust ones are generated
 * from the BTF of the compiled object. Fixed-width types only; a change of
 * layout changes WAKEONE_CONTRACT, and a group pinned by another version is
 * replaced, never reinterpreted.
 */
#ifndef WAKEONE_CONTRACT_H
#define WAKEONE_CONTRACT_H

#ifdef __bpf__
#include <linux/types.h>
#else
#include <asm/types.h>
#endif

#define WAKEONE_CONTRACT 8
/* The simulator compiles the policies once more, with room for more slots. */
#ifndef WAKEONE_SLOT_BITS
#define WAKEONE_SLOT_BITS 8
#define WAKEONE_ENTRY __u8
#endif
#define WAKEONE_MAX_SLOTS (1 << WAKEONE_SLOT_BITS)
/* Each address has a reuseport group and a program. */
#define WAKEONE_MAX_ADDRESSES 16
/* The largest number of slots that a search for the least loaded one looks at.
 * A larger group is searched in a window of this size at a random place. */
#ifndef WAKEONE_WINDOW
#define WAKEONE_WINDOW 32
#endif
/* Load comparisons multiply active counts with weights. The bound lets the
 * product of two such numbers fit 64 bits with room to spare. */
#define WAKEONE_MAX_WEIGHT 65535
/* 4 us: far less than a request that others should not wait behind. */
#define WAKEONE_PROGRESS_SHIFT 12
/* The clock of flows: CLOCK_MONOTONIC_COARSE >> this, about a second. */
#define WAKEONE_FLOW_SHIFT 30
/* Homes of flows, for each address. As many as 64 bits each make 4 MiB. */
#define WAKEONE_HOMES 524288
/* Connection IDs of QUIC that are longer are not told apart: RFC 9000 allows no
 * longer ones. */
#define WAKEONE_QUIC_ID_MAX 20
/* IDs of connections, for each group, and those that nobody has used yet. */
#define WAKEONE_QUIC_IDS 131072
#define WAKEONE_QUIC_OFFERS 65536
/* A slot of a QUIC group has a second place for a socket, so many places on. */
#define WAKEONE_SECOND_AT WAKEONE_MAX_SLOTS

enum wakeone_slot_flag {
	/* A listening socket stands in the array at this index. */
	WAKEONE_SLOT_UP = 1,
	/* Its worker is being replaced: no new connections. */
	WAKEONE_SLOT_DRAINING = 2,
	/* Its worker does not accept: no new connections while the agent lives. */
	WAKEONE_SLOT_STUCK = 4,
	/* Its listener is closed for the moment in which its queue is moved. The
	 * agent sets this before the move. If the agent dies meanwhile, the mark
	 * stays and the next agent makes the listener listen again. Choices
	 * ignore it. */
	WAKEONE_SLOT_MOVING = 8,
	/* The workers share one queue, and this one is woken for connections. Only
	 * user space has to do with that: see crates/arming. */
	WAKEONE_SLOT_ARMED = 16,
	/* New connections of QUIC go to the slot's second socket. */
	WAKEONE_SLOT_SECOND = 32,
};

enum wakeone_table_flag {
	/* The group shuts down: its listeners drop new SYNs by a filter of their
	 * own, so that the client's retransmission reaches a successor instead of
	 * a dying queue. No slot is chosen for those. */
	WAKEONE_TABLE_CLOSING = 1,
	/* Connections are counted in and out (sock_ops is attached): a move has
	 * to keep the counts true. Without it there is nothing to keep. */
	WAKEONE_TABLE_COUNTED = 2,
	/* Some slot is marked stuck, or was until just now. It then matters
	 * whether the agent lives, and the programs read the clock for that. */
	WAKEONE_TABLE_MARKED = 4,
	/* The sockets are of UDP: `selected` counts datagrams, `queued` and
	 * `queue_limit` are bytes, and nothing is open or moved. */
	WAKEONE_TABLE_DATAGRAMS = 8,
	/* A datagram goes to the slot of the last one of its flow. */
	WAKEONE_TABLE_AFFINITY = 16,
	/* The workers shared one socket before, where any of them got any
	 * datagram: a flow that is too much for one may be spread again. */
	WAKEONE_TABLE_SHARED = 1024,
	/* With CLOSING: new SYNs are answered with a reset, so that a load
	 * balancer turns to another machine at once. */
	WAKEONE_TABLE_REFUSING = 64,
	/* The window does not show all slots: the programs track the idle ones. */
	WAKEONE_TABLE_WIDE = 32,
	/* A move could not be noted. A connection without a note may wait anywhere
	 * then, until user space has marked all listeners WAKEONE_UNSETTLED. */
	WAKEONE_TABLE_UNNOTED = 128,
	/* A listener has TCP_DEFER_ACCEPT: connections are counted when their first
	 * data comes, and ties go in turn. */
	WAKEONE_TABLE_DEFERS = 256,
	/* The server has set a program of its own on the group, or taken ours
	 * away. The agent writes this; ours does not run then. */
	WAKEONE_TABLE_REPLACED = 512,
	/* The workers share one queue, and no program chooses: user space keeps
	 * this table in a file. */
	WAKEONE_TABLE_ONE_QUEUE = 2048,
	/* Packets of QUIC go where the IDs in them say: see quic.h. */
	WAKEONE_TABLE_QUIC = 4096,
	/* The workers put tokens into their connection IDs. */
	WAKEONE_TABLE_TOKENS = 8192,
};

/* One counter for each way out of the programs. The first two are the right
 * place for a connection; each of the others is a reason to look. */
enum wakeone_exit {
	WAKEONE_EXIT_SELECTED = 0,      /* the policy's slot took the connection */
	WAKEONE_EXIT_MIGRATED = 1,      /* a closing listener's connection was moved */
	WAKEONE_EXIT_RETRIED = 2,       /* the policy's slot was empty, another took it */
	WAKEONE_EXIT_NO_SLOT = 3,       /* no slot is up: the kernel chose */
	WAKEONE_EXIT_SELECT_FAILED = 4, /* every slot refused: the kernel chose */
	WAKEONE_EXIT_BAD_POLICY = 5,    /* unknown policy number: the kernel chose */
	WAKEONE_EXIT_CLOSING = 6,       /* the group closes: its listeners drop the SYN */
	WAKEONE_EXIT_UNKNOWN_LISTENER = 7, /* moved off a listener we never saw */
	WAKEONE_EXIT_MOVED_FULL = 8,    /* no room to note a move: old slot keeps it */
	WAKEONE_EXIT_BAD_TAG = 9,       /* a listener's tag is no number of a slot */
	/* The kernel's hash was to choose: for a flow from before, or while the
	 * group's sockets change. */
	WAKEONE_EXIT_BY_HASH = 10,
	/* A packet of QUIC for a connection that nobody has: its worker tells the
	 * client so, by a stateless reset. */
	WAKEONE_EXIT_STRAY = 11,
	/* A packet of QUIC went by the connection of its ID, by the token in its ID, or
	 * by its flow. One that begins a connection is SELECTED. */
	WAKEONE_EXIT_BY_ID = 12,
	WAKEONE_EXIT_BY_TOKEN = 13,
	WAKEONE_EXIT_BY_FLOW = 14,
	WAKEONE_EXITS = 15,
};

/* Where the datagrams of a flow go. Flows whose hashes have the same last bits
 * share a home, and so a worker, which harms none. */
struct wakeone_home {
	__u32 at;           /* a slot + 1, or one of the following */
	__u32 used;         /* when the last one came, by the clock of flows */
};

enum wakeone_home_at {
	WAKEONE_HOME_NONE = 0,
	/* The kernel's hash puts them where they were before we came. */
	WAKEONE_HOME_KERNEL = 65536,
	/* No worker alone can serve them: each is placed by the policy. */
	WAKEONE_HOME_EACH = 65537,
	/* Of QUIC the place of a socket + 1, with one of the marks below. */
	WAKEONE_HOME_AT = 1023,
	/* The flow's client has used an ID that it can only have from the server. */
	WAKEONE_HOME_PROVEN = 131072,
	/* The flow has taught an ID in this tick of the clock of flows. Of an ID: the
	 * server has made it, so the next packet with it proves its flow. */
	WAKEONE_HOME_LEARNED = 262144,
};

/* A connection ID: its bytes, zeros, and its length in the last byte. */
struct wakeone_quic_id {
	__u64 word[3];
};

/* One worker's place. Fields that different writers touch for each connection
 * share a cache line on purpose: a selection reads flags, weight and active of
 * all slots, and cannot afford more than one line for each. */
struct wakeone_slot {
	__u32 flags;
	__u32 weight;
	__s64 active;       /* established and not yet closed, queued ones included */
	__u64 selected;     /* times the selector put a SYN, a migrated one or a datagram here */
	__u64 established;  /* connections that completed the handshake here */
	__u64 closed;       /* connections counted out */
	__u64 migrated_in;  /* queued connections that came from another slot */
	/* When its worker last closed a connection, or got one while it had none:
	 * CLOCK_MONOTONIC >> WAKEONE_PROGRESS_SHIFT. */
	__u32 progress;
	/* When it was chosen last, in the same unit, if the group DEFERS. */
	__u32 chosen;
	/* Published by the agent: length of the accept queue, and its backlog. Of
	 * UDP: bytes that wait to be read, and size of the receive buffer. */
	__u32 queued;
	__u32 queue_limit;
	__u64 migrated_out; /* queued connections that went to another slot */
	/* Written by the agent only. */
	__u64 rescues;      /* times this slot's queue was moved away */
	__u64 rescued;      /* connections moved by that */
	__u64 stuck_ns;     /* time spent marked stuck, in all */
	__u64 restarts;     /* workers started again in this slot */
	__u32 pid;          /* the worker; 0: none */
	/* Written by the programs: no socket was found here at the last try. A
	 * policy's first choice ignores this, so an old mark does no harm. */
	__u32 gone;
	__u64 dropped;      /* datagrams that its sockets had no room for */
	/* A vote among the flows of a UDP slot: the home of the one that may have
	 * most of the datagrams, and how many more it had than all others. */
	__u32 heavy_home;
	__u32 heavy_lead;
} __attribute__((aligned(128)));

/*
 * The slots that a policy may choose: all of the best tier that is not empty.
 * They change rarely and are read often. So user space makes the list
 * (eligible.h), and a program finds its slot without a scan.
 *
 * A reader may see a list that is being replaced. Whatever it reads there is
 * the number of a slot, and a slot without a socket is passed over.
 */
struct wakeone_eligible {
	__u32 count;        /* slots listed */
	__u32 total;        /* of their weights; `count` where all weigh the same */
	__u32 weighted;     /* not all weigh the same: `upto` counts */
	__u32 reserved;
	__u64 mask[WAKEONE_MAX_SLOTS / 64]; /* the same slots, a bit each */
	__u32 upto[WAKEONE_MAX_SLOTS];      /* sum of the weights up to this entry */
	/* The first entries follow the last one: a window need not wrap. */
	WAKEONE_ENTRY slot[WAKEONE_MAX_SLOTS + WAKEONE_WINDOW];
} __attribute__((aligned(64)));

/* Which of a generation's two lists. The second ignores stuck marks, for when
 * no agent refreshes them any more. */
enum wakeone_list {
	WAKEONE_LIST_MARKED = 0,
	WAKEONE_LIST_UNMARKED = 1,
	WAKEONE_LISTS = 2,
};

struct wakeone_table {
	__u32 contract;
	__u32 policy;
	__u32 slots;        /* slots in use: 1..WAKEONE_MAX_SLOTS */
	__u32 flags;
	/* The generation. Its last bit selects the lists that are valid. */
	__u32 generation;
	/* The longest recent handshake, from SYN-ACK to ACK. The programs raise
	 * it without synchronization; the agent lowers it over time. */
	__u32 handshake_us;
	__u64 tick;         /* round-robin position */
	/* CLOCK_MONOTONIC_COARSE at the agent's last look; 0: never had one. */
	__u64 heartbeat_ns;
	__u64 heartbeat_limit_ns; /* older than this: the agent is gone */
	__u64 moved_live;   /* notes in the map of moved connections */
	__u64 exits[WAKEONE_EXITS];
	/* The slots without connections, a bit each, if the group is WIDE. A hint:
	 * two CPUs that race may leave a wrong bit. */
	__u64 idle[WAKEONE_MAX_SLOTS / 64];
	/* The build of the programs that run here: they may change while the
	 * contract does not. 0: an older build, which does not tell. */
	__u64 build;
	/* Connections by which user space found an active count wrong, and mended it. */
	__u64 drift_mended;
	/* A socket that begins to listen at this port is told to the agent; 0: none. */
	__u32 port;
	/* Flows that are too much for one worker, as the agent sees it. */
	__u32 heavy_flows;
	/* By the clock of flows: a home that was silent for so long is given anew,
	 * and until when a flow without a home may be one of before. */
	__u32 flow_silence;
	__u32 flows_until;
	/* How many sockets began to listen at this port that have no slot, and how
	 * many of them the agent knew when it last looked. While it does not know
	 * all, the kernel's hash chooses among all sockets, old and new: we would
	 * have the few that have slots serve everybody. */
	__u32 changes;
	__u32 changes_seen;
	/* The lengths of the IDs that the server's sockets have made, a byte each; 0:
	 * none. A short header does not tell the length of its ID. */
	__u32 quic_lengths;
	__u32 reserved1;
	struct wakeone_slot slot[WAKEONE_MAX_SLOTS];
	struct wakeone_eligible eligible[2 * WAKEONE_LISTS];
	/* Queue lengths by address, if there are several addresses. A slot's
	 * `queued` is their sum: each writer adds its own difference to it. */
	__u32 waiting[WAKEONE_MAX_ADDRESSES][WAKEONE_MAX_SLOTS];
};

/* Written on each listener by user space; a connection is born with a copy. */
struct wakeone_tag {
	__u32 slot;
	__u32 counted;      /* enum wakeone_tag_counted */
};

enum wakeone_tag_counted {
	WAKEONE_TAG_UNCOUNTED = 0,
	WAKEONE_TAG_COUNTED = 1,
	/* It was open before the counting program came. */
	WAKEONE_TAG_EARLY = 2,
};

/* In place of the slot that a connection moves to: the kernel chooses. */
#define WAKEONE_NOWHERE 0x7ffffffe
/* In place of the slot that a connection came from: no move of it changes a
 * count. Whether it was counted in is not known, or it was not. */
#define WAKEONE_FROZEN 0x7fffffff
/* Set in the number of a listener's slot: a connection that waits there may
 * have another tag than its listener has now, or none. */
#define WAKEONE_UNSETTLED 0x80000000

/*
 * The change that moves made to the active counts for one connection: one less
 * in `from`, one more in `to`. The first move makes it, others change `to`.
 */
struct wakeone_note {
	__u32 from;         /* its tag's slot, or WAKEONE_FROZEN */
	__u32 to;           /* the slot that counts it now */
};

#ifdef __cplusplus
#define WAKEONE_ASSERT static_assert
#else
#define WAKEONE_ASSERT _Static_assert
#endif
WAKEONE_ASSERT(sizeof(struct wakeone_slot) == 128, "one slot, two cache lines");
WAKEONE_ASSERT(sizeof(struct wakeone_tag) == 8, "tag layout");
WAKEONE_ASSERT(sizeof(struct wakeone_note) == 8, "note layout");
WAKEONE_ASSERT(WAKEONE_SLOT_BITS != 8 || sizeof(struct wakeone_table) ==
	       256 + 128 * WAKEONE_MAX_SLOTS + 2 * WAKEONE_LISTS * sizeof(struct wakeone_eligible) +
		       4 * WAKEONE_MAX_ADDRESSES * WAKEONE_MAX_SLOTS,
	       "header, slots, lists and queues, nothing between");

#endif
