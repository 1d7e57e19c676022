/* SPDX-License-Identifier: Apache-2.0 */
/* mem: every size is checked for overflow before it reaches the allocator. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <malloc.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "err.h"
#include "mem.h"

#define HUGE_PAGE ((size_t)2 << 20)
#define HUGE_FROM ((size_t)4 << 20)

static void *out_of_memory(struct err *e, size_t bytes)
{
	err_fail(e, "out of memory: cannot allocate %zu bytes", bytes);
	return NULL;
}

static void *too_large(struct err *e, size_t n, size_t size)
{
	err_fail(
		e,
		"out of memory: an array of %zu elements of %zu bytes is larger than the "
		"address space",
		n, size);
	return NULL;
}

void *mem_calloc(size_t n, size_t size, struct err *e)
{
	size_t bytes;
	void *p;

	if (__builtin_mul_overflow(n, size, &bytes))
		return too_large(e, n, size);
	p = calloc(bytes ? bytes : 1, 1);
	return p ? p : out_of_memory(e, bytes);
}

int mem_grow(void *array, size_t *cap, size_t want, size_t size, struct err *e)
{
	size_t n = *cap + *cap / 2, bytes;
	void *old, *new;

	if (want <= *cap)
		return 0;
	if (n < want)
		n = want;
	if (n < 8)
		n = 8;
	if (__builtin_mul_overflow(n, size, &bytes)) {
		too_large(e, n, size);
		return -1;
	}
	memcpy(&old, array, sizeof old); /* `array` is the address of a pointer of any type */
	new = realloc(old, bytes ? bytes : 1);
	if (!new) {
		out_of_memory(e, bytes);
		return -1;
	}
	memcpy(array, &new, sizeof new);
	*cap = n;
	return 0;
}

/*
 * glibc raises the size from which blocks are mapped on their own as such blocks are freed. Aligned
 * ones then lie between others, and what is freed of them is not found again.
 */
static void map_huge_apart(void)
{
#ifdef M_MMAP_THRESHOLD
	mallopt(M_MMAP_THRESHOLD, (int)HUGE_FROM);
#endif
}

void *mem_aligned(size_t bytes, struct err *e)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	size_t align = bytes >= HUGE_FROM ? HUGE_PAGE : 64;
	void *p;

	if (align == HUGE_PAGE)
		pthread_once(&once, map_huge_apart);
	if (posix_memalign(&p, align, bytes ? bytes : 1))
		return out_of_memory(e, bytes);
	if (align == HUGE_PAGE)
		madvise(p, bytes / HUGE_PAGE * HUGE_PAGE,
			MADV_HUGEPAGE); /* a wish: refusal costs speed only */
	return p;
}

char *mem_strdup(const char *s, struct err *e)
{
	char *copy = strdup(s);

	return copy ? copy : out_of_memory(e, strlen(s) + 1);
}

char *mem_printf(struct err *e, const char *fmt, ...)
{
	char *s;
	va_list ap;
	int n;

	va_start(ap, fmt);
	n = vasprintf(&s, fmt, ap);
	va_end(ap);
	return n >= 0 ? s : out_of_memory(e, strlen(fmt));
}

int64_t mem_mul(int64_t a, int64_t b)
{
	int64_t r;

	return a < 0 || b < 0 || __builtin_mul_overflow(a, b, &r) ? -1 : r;
}

int64_t mem_add(int64_t a, int64_t b)
{
	int64_t r;

	return a < 0 || b < 0 || __builtin_add_overflow(a, b, &r) ? -1 : r;
}
