/*
 * Answers every DNS question for an address with 192.0.2.1. An unprivileged
 * receiver for `wakeone run -l udp://`: it reads the socket that it is given
 * (descriptor 3, LISTEN_FDS) and knows nothing of the others.
 *
 *   cc -O2 -o dns_responder examples/dns_responder.c
 *   wakeone run -w 4 -l udp://:5353 --affinity none -- ./dns_responder
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

enum { SOCKET = 3, HEADER = 12, SIZE = 1500, BATCH = 64 };

static unsigned char queries[BATCH][SIZE], answers[BATCH][SIZE + 16];
static struct sockaddr_storage from[BATCH];

/* Length of the answer to a query (RFC 1035, section 4); 0: it is no query. */
static size_t answer(const unsigned char *q, size_t length, unsigned char *a)
{
	size_t end = HEADER, question;
	int found;

	if (length < HEADER || q[2] & 0x80 || q[4] != 0 || q[5] != 1)
		return 0;
	while (end < length && q[end]) {
		if (q[end] > 63)
			return 0;
		end += 1 + q[end];
	}
	if (end + 5 > length)
		return 0;
	found = !memcmp(q + end + 1, "\0\1\0\1", 4); /* A, IN */
	question = end + 5 - HEADER;
	memcpy(a, q, 2);
	a[2] = 0x84 | (q[2] & 0x79);
	a[3] = 0;
	memcpy(a + 4, "\0\1\0\0\0\0\0\0", 8);
	a[7] = found;
	memcpy(a + HEADER, q + HEADER, question);
	if (!found)
		return HEADER + question;
	memcpy(a + HEADER + question, "\xc0\x0c\0\1\0\1\0\0\0\x3c\0\4\xc0\0\2\1", 16);
	return HEADER + question + 16;
}

int main(void)
{
	struct mmsghdr in[BATCH], out[BATCH];
	struct iovec in_part[BATCH], out_part[BATCH];

	if (!getenv("LISTEN_FDS")) {
		fprintf(stderr, "dns_responder: start it with `wakeone run -l udp://:5353 -- %s`\n",
			program_invocation_name);
		return 2;
	}
	for (;;) {
		int count, answered = 0, sent = 0;

		for (int i = 0; i < BATCH; i++) {
			in_part[i] = (struct iovec){ queries[i], SIZE };
			in[i] = (struct mmsghdr){ .msg_hdr = {
				.msg_name = &from[i], .msg_namelen = sizeof(from[i]),
				.msg_iov = &in_part[i], .msg_iovlen = 1 } };
		}
		count = recvmmsg(SOCKET, in, BATCH, MSG_WAITFORONE, NULL);
		if (count < 0 && errno != EINTR) {
			perror("dns_responder: recvmmsg");
			return 1;
		}
		for (int i = 0; i < count; i++) {
			size_t length = answer(queries[i], in[i].msg_len, answers[answered]);

			if (!length)
				continue;
			out_part[answered] = (struct iovec){ answers[answered], length };
			out[answered] = (struct mmsghdr){ .msg_hdr = {
				.msg_name = &from[i], .msg_namelen = in[i].msg_hdr.msg_namelen,
				.msg_iov = &out_part[answered], .msg_iovlen = 1 } };
			answered++;
		}
		while (sent < answered) {
			int done = sendmmsg(SOCKET, out + sent, answered - sent, 0);

			/* A client that is gone already is no reason to stop. */
			sent += done > 0 ? done : 1;
		}
	}
}
