/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pack: lossless blocks of weights for --copy=lz4, each decodable alone. LZ4 only finds repeated
 * bytes, and random-looking floats have none; but their exponents take few values. So a block's
 * elements are split: the byte that holds the exponent is counted down from a base and stored as
 * eight bit planes (the upper ones nearly all zero), the other bytes as byte planes; then each part
 * goes through LZ4, or stays as it is where that does not help.
 *
 *	kind u8 | base u8 | parts u8 | 0 u8 | length of each part u32 (bit 31: not LZ4) |
 *	parts | tail | XXH3-128 of all before, 32 hex digits
 *
 *	kind	exponent byte c			other bytes, a part each	elements
 *	0 raw	-				the n bytes			1 byte, in one part
 *	1 bytes	the byte			-				1 byte
 *	2 f8	rotated left by one		-				1 byte: E4M3, E5M2
 *	3 bf16	exponent			sign and mantissa		2 bytes
 *	4 f16	high byte rotated left by one	low byte			2 bytes
 *	5 f32	exponent			sign and high mantissa,		4 bytes
 *						middle, low
 *
 * Part 0 holds, for m = elements rounded down to a multiple of 64, bit k of (base - c) mod 256 in
 * plane k of m / 8 bytes; in each group of 64 elements bit i of byte j is element 8 i + j. The tail
 * is the bytes of the remaining elements.
 */
#ifndef DSPARK_PACK_H
#define DSPARK_PACK_H

#include <stddef.h>

#include "dtype.h"

/* Decoded bytes of a block; the last one of a tensor is shorter. */
#define PACK_BLOCK ((size_t)256 << 10)

#define PACK_SCRATCH (2 * PACK_BLOCK)	/* bytes of scratch memory that each call needs */

size_t pack_bound(size_t n);		/* most bytes that a block of n takes */

/*
 * Packs n <= PACK_BLOCK bytes of elements of dtype `d` to `dst` (pack_bound(n) bytes). Returns the
 * block's length.
 */
size_t pack_block(void *dst, const void *src, size_t n, enum dtype d, void *scratch);

/* Unpacks a block of `len` bytes to exactly n bytes. -1: damaged. Safe for any input. */
int pack_unpack(void *dst, size_t n, const void *src, size_t len, void *scratch);

/* Checks a block's hash only. */
int pack_check(const void *src, size_t len);

#endif
