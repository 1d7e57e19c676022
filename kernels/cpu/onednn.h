/* SPDX-License-Identifier: Apache-2.0 */
/*
 * onednn: the only place that knows oneDNN, 2.6 or 3.x. A product is dst[M,N] = src[M,K] w^T
 * with every size fixed, run by the calling thread alone on a weight in oneDNN's own layout.
 * Thread-safe.
 */
#ifndef DSPARK_ONEDNN_H
#define DSPARK_ONEDNN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dtype.h"

struct err;
struct onednn;

/* Order of the numbers that onednn_pack reads. */
enum order {
	ORDER_NK, /* [N,K]: out features first, as checkpoints have them */
	ORDER_KN, /* [K,N] */
};

struct product {
	struct onednn *owner;
	enum dtype operand; /* of src and the weight: DT_F32 or DT_BF16 */
	enum dtype result;  /* of dst: DT_F32, or DT_BF16, rounded once */
	int64_t M, N, K;
	int64_t ld; /* elements from one row of a plain weight in ORDER_NK to the next */
	enum order order;
	bool add; /* dst += instead of dst = */
	/* use the weight layout of this one (same operand, N, K), NULL = the best for this M */
	const struct product *like;
	size_t packed_bytes;  /* of the weight in its layout, a multiple of 64 */
	size_t scratch_bytes; /* that run and pack need, 0 = none */
};

/*
 * A product made ready for one thread: what oneDNN would else make anew for each run. Zeroed = not
 * begun.
 */
struct call {
	const struct product *product;
	void *stream;
	void *memory[4];
};

/*
 * The order in which a weight's numbers are packed, `lanes` after another, the same pattern each
 * time: number g * lanes + l is element [row[g] * rows + row_in[l], col[g] * cols + col_in[l]].
 */
#define LAYOUT_LANES 16
struct layout {
	int64_t groups;
	int lanes;      /* LAYOUT_LANES, or 1 where no pattern is found */
	int rows, cols; /* row_in < rows, col_in < cols */
	uint8_t row_in[LAYOUT_LANES], col_in[LAYOUT_LANES];
	uint16_t *row, *col; /* [groups] */
};

/* The library on this machine. NULL with `e` set. */
struct onednn *onednn_open(struct err *e);
void onednn_close(struct onednn *o);

/* What the machine and ONEDNN_MAX_CPU_ISA allow. */
enum onednn_isa { ONEDNN_AVX2, ONEDNN_AVX512, ONEDNN_AVX512_BF16, ONEDNN_AMX };
bool onednn_has(enum onednn_isa isa);

/*
 * The product with the fields of `want` from operand to like, made on first use and kept until
 * close. NULL with `e` set.
 */
const struct product *onednn_product(struct onednn *o, const struct product *want, struct err *e);

/* The layout of its weight, found out on first use and kept until close. NULL with `e` set. */
const struct layout *onednn_layout(const struct product *p, struct err *e);

/* All pointers are aligned to 64 bytes but src and dst of run, which may be any number's. */
int onednn_pack(const struct product *p, void *packed, const void *src, void *scratch,
		struct err *e);

/* One call runs by one thread at a time; end is legal on a call not begun. */
int onednn_begin(struct call *c, const struct product *p, struct err *e);
int onednn_run(struct call *c, void *dst, const void *src, const void *packed, void *scratch,
	       struct err *e);
void onednn_end(struct call *c);

#endif
