/* What the parts of the library share.
 *
 * The library decides nothing: it sees when a process first waits for connections on a listener, asks the broker in
 * the `wakeone run --split` process, and puts the socket that it gets in the listener's place. It allocates nothing,
 * starts no thread, keeps no descriptor between two calls, and leaves errno as the real call left it.
 */
#ifndef WAKEONE_SPLIT_H
#define WAKEONE_SPLIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Descriptors from here on are left alone: listeners are opened early. */
#define SPLIT_MOST_FDS 65536

/* What is known of a descriptor. */
enum state {
	STATE_UNKNOWN = 0, /* not yet looked at, or a listener that is to be asked for */
	STATE_PLAIN,       /* no listener */
	STATE_CONNECTION,  /* came out of accept */
	STATE_DATAGRAM,    /* a UDP socket that this process bound, or about which the broker was asked in it */
	STATE_POLLED,      /* such a one that is polled: who polls and who then receives may be two, so that all share it */
	STATE_INHERITED,   /* a UDP socket from before this process was forked: to be asked for */
	STATE_FOREIGN,     /* a listener that is none of ours: not TCP, or already of a reuseport group */
	STATE_SETTLED,     /* the broker was asked in this process: own queue, or the shared one for good */
	STATE_LATER,       /* it could not be asked when the listener was polled; not before it is polled again */
};

/* How a process came to wait for connections, or for datagrams. */
enum how { HOW_ACCEPT = 1, HOW_EPOLL = 2, HOW_POLL = 3, HOW_RECEIVE = 4 };

/* -- state.c: what is known of descriptors, and of this process -- */

/* Whether there is a broker to ask, and this process is the one that the table is about (a fork is noticed here). */
bool split_active(void);
enum state split_state(int fd);
void split_set(int fd, enum state state);
/* Whether it is a UDP socket that may have queues beside it. */
static inline bool split_is_datagram(int fd)
{
	enum state state = split_state(fd);
	return state == STATE_DATAGRAM || state == STATE_POLLED;
}
/* Forgets a range of descriptors, both ends included. */
void split_forget(unsigned first, unsigned last);
/* Whether this is a child of vfork: the memory is the parent's, the descriptors are not. */
bool split_in_vfork_child(void);
/* One thread at a time asks the broker, with all signals blocked: their handlers may fork, or wait for connections.
 * False: this very thread is asking already (the handler of a fault), or another one takes too long. */
bool split_lock(void);
void split_unlock(void);
/* Threads of this process that wait on a listener for which the broker could not be asked: it stays as long. */
extern _Atomic int split_sharing;
/* Under the lock: whether a signal waits for it to be given up that has an effect; and one that has a handler, by which
 * a call ends with EINTR. `restarts`: the call goes on after handlers that were set with SA_RESTART. */
bool split_signal_waits(void);
bool split_interrupted(bool restarts);

/* -- broker.c: asking -- */

/* Reads the broker's name and token from the environment. */
bool split_find_broker(void);
/* A socket listens; `own`: it is in a reuseport group because we put it there. False: it is not to be split. */
bool split_tell_opens(int fd);
bool split_tell_listen(int fd, bool own);
/* Has the listener replaced by a queue of this process's own, where the broker says so. False: it could not be asked
 * now, for want of descriptors or because of a signal. */
bool split_claim(int fd, enum how how);
/* A queue beside a UDP socket, for a thread, at this number or above; -1 where there is none, -2 if it could not be asked
 * for now, because of a signal. */
int split_ask_queue(int fd, int from);
/* A thread's queue is to be chosen no more. True: the broker has it read; false: that is up to us. */
bool split_tell_given_back(int queue);
/* Whether an empty datagram was sent by the broker, to have us read a queue that was left behind: that, or -1. */
bool split_ask_left(int fd, int from, int *queue);
/* Says something on standard error, once, if that is still what it was when the process started. */
void split_say_once(const char *sentence);
void split_remember_stderr(void);

/* -- readers.c: UDP sockets that several threads receive from -- */

/* What to receive from instead of a descriptor; `place` is the thread's, if it has one. -1: something was just left
 * behind, look there first. */
int split_source(int fd, void **place);
/* Whether nothing was received because the thread was only to be woken: to keep the socket itself from now on, or to see
 * what another one left behind. */
bool split_kicked(int fd, void *place);
/* Whether an empty datagram was one that only was to wake somebody. */
bool split_woken(int fd);
/* Whether a thread's queue was shut down, to wake it. */
bool split_is_shut(void *place);
/* Has the broker asked about a UDP socket that this process was born with. */
void split_inherit(int fd, enum how how);
/* The socket is polled: its process's threads share it from now on. */
void split_polls(int fd);
/* Queues of threads and processes that ended, one after the other: the next one's number after that one; -1: no more. */
int split_next_orphan(int fd, int after);
int split_orphan(int number);
void split_orphan_is_empty(int number);
/* Numbers that are closed or replaced, both ends included. */
void split_closed(unsigned first, unsigned last);
void split_forget_readers(void);

#endif
