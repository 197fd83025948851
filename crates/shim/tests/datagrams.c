/* datagrams CALL COUNT: four threads receive from one socket by CALL. Several clients send datagrams with one
 * number each. A client has a window, so that no queue overflows. Threads end and are replaced all the while, the
 * first one too. Every number must come once, answered from the socket's own address, and no descriptor may be
 * left. */
#define _GNU_SOURCE
#undef _FORTIFY_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { THREADS = 4, CLIENTS = 16, STOP = -1 };

static int server, count;
static const char *call;
static _Atomic int *seen;
static _Atomic int received, finished;

/* A datagram's number and where it came from. */
static int receive(struct sockaddr_in *from)
{
	int number = 0;
	socklen_t length = sizeof(*from);
	struct iovec part = { &number, sizeof(number) };
	struct mmsghdr one = { .msg_hdr = { .msg_name = from, .msg_namelen = sizeof(*from), .msg_iov = &part, .msg_iovlen = 1 } };
	long got;
	from->sin_port = 0;
	if (!strcmp(call, "recv"))
		got = recv(server, &number, sizeof(number), 0);
	else if (!strcmp(call, "read"))
		got = read(server, &number, sizeof(number));
	else if (!strcmp(call, "recvmsg"))
		got = recvmsg(server, &one.msg_hdr, 0);
	else if (!strcmp(call, "recvmmsg"))
		got = recvmmsg(server, &one, 1, 0, NULL) == 1 ? (int)one.msg_len : -1;
	else
		got = recvfrom(server, &number, sizeof(number), 0, (struct sockaddr *)from, &length);
	if (got != sizeof(number)) {
		fprintf(stderr, "%s gave %ld: %s\n", call, got, strerror(errno));
		_exit(1);
	}
	if (from->sin_port == 0 && strcmp(call, "recv") && strcmp(call, "read")) {
		fprintf(stderr, "from nowhere\n");
		_exit(1);
	}
	return number;
}

/* Receives for a while, and ends. */
static void *reader(void *share)
{
	for (long left = (long)share; left > 0; left--) {
		struct sockaddr_in from;
		int number = receive(&from);
		if (number == STOP)
			break;
		atomic_fetch_add(&seen[number], 1);
		atomic_fetch_add(&received, 1);
	}
	atomic_fetch_add(&finished, 1);
	return NULL;
}

static pthread_t start(long share)
{
	pthread_t thread;
	if (pthread_create(&thread, NULL, reader, (void *)share))
		_exit(3);
	return thread;
}

static int open_now(void)
{
	int open = 0;
	DIR *folder = opendir("/proc/self/fd");
	while (readdir(folder))
		open++;
	closedir(folder);
	return open;
}

int main(int number, char **arguments)
{
	call = number > 1 ? arguments[1] : "recvfrom";
	count = number > 2 ? atoi(arguments[2]) : 1000;
	seen = calloc(count, sizeof(*seen));
	int before = open_now();
	server = socket(AF_INET, SOCK_DGRAM, 0);
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr = { htonl(INADDR_LOOPBACK) } };
	socklen_t length = sizeof(address);
	if (bind(server, (struct sockaddr *)&address, sizeof(address)) || getsockname(server, (struct sockaddr *)&address, &length))
		return 3;
	int clients[CLIENTS];
	for (int i = 0; i < CLIENTS; i++)
		clients[i] = socket(AF_INET, SOCK_DGRAM, 0);
	/* Shares of very different length: the first thread ends first. */
	for (int i = 0; i < THREADS; i++) {
		pthread_detach(start(50 + 200 * i));
		usleep(20000);
	}
	int ended = 0, stuck = 0;
	for (int sent = 0; sent < count;) {
		if (sent - atomic_load(&received) > 60) {
			/* Orphaned datagrams may wait until a reader's next datagram wakes it: clients ask again. */
			usleep(100);
			if (++stuck > 50000) {
				fprintf(stderr, "%d sent, %d received, %d ended\n", sent, atomic_load(&received), ended);
				return 1;
			}
			if (atomic_load(&finished) == ended)
				continue;
		} else {
			stuck = 0;
			sendto(clients[sent % CLIENTS], &sent, sizeof(sent), 0, (struct sockaddr *)&address, sizeof(address));
			sent++;
		}
		if (atomic_load(&finished) > ended) {
			/* One ended; it may be any: threads are not joined here. */
			ended++;
			pthread_t thread = start(100 + (sent * 7919L) % 900);
			pthread_detach(thread);
		}
	}
	for (int i = 0; i < 2000 && atomic_load(&received) < count; i++) {
		usleep(1000);
		for (; atomic_load(&finished) > ended; ended++)
			pthread_detach(start(1000000));
	}
	int stop = STOP, lost = 0, twice = 0;
	for (int i = 0; i < count; i++) {
		lost += seen[i] == 0;
		twice += seen[i] > 1;
	}
	fprintf(stderr, "%d received, %d lost, %d twice, %d threads ended\n", atomic_load(&received), lost, twice, ended);
	/* All threads end: each datagram wakes one, whichever queue it is put into. */
	for (int i = 0; i < 5000 && atomic_load(&finished) < ended + THREADS; i++) {
		sendto(clients[i % CLIENTS], &stop, sizeof(stop), 0, (struct sockaddr *)&address, sizeof(address));
		usleep(1000);
	}
	if (atomic_load(&finished) < ended + THREADS) {
		fprintf(stderr, "%d of %d threads ended\n", atomic_load(&finished), ended + THREADS);
		return 1;
	}
	usleep(50000);
	close(server);
	for (int i = 0; i < CLIENTS; i++)
		close(clients[i]);
	if (open_now() != before) {
		fprintf(stderr, "%d descriptors are left\n", open_now() - before);
		return 1;
	}
	return lost || twice;
}
