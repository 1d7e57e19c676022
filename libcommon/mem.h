/* SPDX-License-Identifier: Apache-2.0 */
/* mem: allocation that reports instead of crashing. Everything returned is released with free(). */
#ifndef DSPARK_MEM_H
#define DSPARK_MEM_H

#include <stddef.h>
#include <stdint.h>

struct err;

/*
 * Zeroed array of n elements of `size` bytes; n = 0 gives a unique pointer. NULL with EXIT_FAILED
 * on overflow or no memory.
 */
void *mem_calloc(size_t n, size_t size, struct err *e);

/*
 * Makes room for at least `want` elements in *array (capacity *cap), growing geometrically; new
 * elements are not cleared.
 */
int mem_grow(void *array, size_t *cap, size_t want, size_t size, struct err *e);

/* Uninitialised, aligned to 64 bytes (2 MiB and MADV_HUGEPAGE from 4 MiB on). `bytes` may be 0. */
void *mem_aligned(size_t bytes, struct err *e);

char *mem_strdup(const char *s, struct err *e);
char *mem_printf(struct err *e, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* a * b and a + b, or -1 on overflow of int64_t; operands must be >= 0. */
int64_t mem_mul(int64_t a, int64_t b);
int64_t mem_add(int64_t a, int64_t b);

#endif
