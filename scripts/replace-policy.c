/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Loaded into a test program before it runs (LD_PRELOAD), this puts its own
 * native build of the policies in the place of the program's: scripts/mutate-policy
 * changes that, and needs not link the program again for each change.
 *
 * WAKEONE_REPLACED lists the functions, X(name, address in the program).
 */
#define _GNU_SOURCE
#include <link.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* jmp *distance(%rip): the shortest way to anywhere, by an address that is
 * stored near. The smallest of the functions have eleven bytes. */
#define JUMP 6
#define NEAR (64 << 20)

#define X(name, at) extern char name[] __attribute__((visibility("hidden")));
WAKEONE_REPLACED
#undef X

/* The first object that is told of is the program. */
static int base_of(struct dl_phdr_info *info, size_t size, void *base)
{
	(void)size;
	*(char **)base = (char *)info->dlpi_addr;
	return 1;
}

static void replace(char *old, char *new, char **stored)
{
	uintptr_t from = (uintptr_t)old & -sysconf(_SC_PAGESIZE);
	long distance = (char *)stored - (old + JUMP);
	int32_t near = distance;

	*stored = new;
	if (near != distance ||
	    mprotect((void *)from, (uintptr_t)old + JUMP - from, PROT_READ | PROT_WRITE | PROT_EXEC))
		abort();
	memcpy(old, "\xff\x25", 2);
	memcpy(old + 2, &near, 4);
}

__attribute__((constructor)) static void replace_all(void)
{
	char *base = NULL, **stored;

	dl_iterate_phdr(base_of, &base);
	stored = mmap(base - NEAR, sysconf(_SC_PAGESIZE), PROT_READ | PROT_WRITE,
		      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (stored == MAP_FAILED)
		abort();
#define X(name, at) replace(base + at, name, stored++);
	WAKEONE_REPLACED
#undef X
}
