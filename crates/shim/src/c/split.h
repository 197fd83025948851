/* The interfaces between the parts of the library.
 *
 * The library decides nothing. It notices when a process, or a thread, first receives from a UDP socket that others
 * receive from too. It asks the broker in the `wakeone run --split` process for a queue. A process has its queue in
 * the socket's place, and a thread beside it. The library allocates nothing, starts no thread, keeps no descriptor between two calls, and leaves errno as the real call
 * left it.
 */
#ifndef WAKEONE_SPLIT_H
#define WAKEONE_SPLIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Descriptors from here on are left alone: servers open their sockets early. */
#define SPLIT_MOST_FDS 65536

/* A program that was just started has those that it inherited below this one. */
#define SPLIT_INHERITED_FDS 1024

/* The state of a descriptor. */
enum state {
	STATE_UNKNOWN = 0, /* nothing of ours: no UDP socket, or one that was not bound under our eyes */
	STATE_DATAGRAM,    /* a UDP socket that this process bound, or about which the broker was asked in it */
	STATE_POLLED,      /* such a socket that is polled: one thread may poll and another receive, so all threads share it */
	STATE_INHERITED,   /* a UDP socket from before this process was forked, or this program started: the broker is still to be asked */
};

/* How a process came to wait for datagrams. */
enum how { HOW_EPOLL = 1, HOW_POLL = 2, HOW_RECEIVE = 3 };

/* -- state.c: the states of descriptors, and of this process -- */

/* There is a broker to ask. `forget` is called in each new process, before anything else. */
void split_begin(void (*forget)(void));
/* Whether there is a broker to ask, and the table describes this process. Detects a fork. */
bool split_active(void);
enum state split_state(int fd);
void split_set(int fd, enum state state);
/* Whether this is a UDP socket that may have queues beside it. */
bool split_is_datagram(int fd);
/* Forgets a range of descriptors, both ends included. */
void split_forget(unsigned first, unsigned last);
/* Whether this is a child of vfork: it shares the parent's memory, but has descriptors of its own. */
bool split_in_vfork_child(void);
/* One thread at a time asks the broker, with all signals blocked: their handlers may fork, or receive. False: this
 * very thread is asking already (in the handler of a fault), or another one takes too long. */
bool split_lock(void);
/* The same, for as long as told. */
bool split_lock_within(int64_t patience_ms);
void split_unlock(void);
/* Under the lock: whether a pending signal would have an effect once the lock is released. */
bool split_signal_waits(void);

/* -- broker.c: asking -- */

/* Reads the broker's name and token from the environment. */
bool split_find_broker(void);
/* Replaces an inherited socket by a queue of this process's own, if the broker grants one. False: the broker could
 * not be asked now, because no descriptor was free or a signal is pending. */
bool split_claim(int fd, enum how how);
/* Asks for a queue beside a UDP socket, for a thread. Returns its descriptor, numbered `from` or above; -1 if
 * there is none; -2 if the broker could not be asked now, because of a signal. */
int split_ask_queue(int fd, int from);
/* Tells the broker that a thread's queue is to be chosen no more. True: the broker has it read. False: this
 * process has to read it. */
bool split_tell_given_back(int queue);
/* Whether the broker sent an empty datagram, to have us read an orphaned queue. `queue` is that queue, or -1. */
bool split_ask_left(int fd, int from, int *queue);
/* Prints a sentence on standard error, once, if that is still the file that it was when the process started. */
void split_say_once(const char *sentence);
void split_remember_stderr(void);

/* -- calls.c: the calls of the C library that are replaced -- */

/* Notes the UDP sockets that this program was started with. */
void split_see_inherited(void);

/* -- readers.c: UDP sockets that several threads receive from -- */

/* The descriptor to receive from instead of `fd`. `place` is the thread's place, if it has one. -1: a queue was
 * just orphaned, look there first. */
int split_source(int fd, void **place);
/* Whether nothing was received because the thread was only woken, to become the socket's primary reader or to read
 * an orphaned queue. */
bool split_kicked(int fd, void *place);
/* Whether an empty datagram was sent only to wake a thread. */
bool split_woken(int fd);
/* Whether a thread's queue was shut down, to wake it. */
bool split_is_shut(void *place);
/* Asks the broker about a UDP socket that this process inherited. */
void split_inherit(int fd, enum how how);
/* Notes that the socket is polled: the threads of its process share it from now on. */
void split_polls(int fd);
/* Iterates over the queues of threads and processes that ended: the number of the one after `after`, or -1. */
int split_next_orphan(int fd, int after);
int split_orphan(int number);
void split_orphan_is_empty(int number);
/* Notes that descriptors are closed or replaced, both ends included. */
void split_closed(unsigned first, unsigned last);
/* Forgets the queues of the parent's threads. */
void split_forget_readers(void);

#endif
