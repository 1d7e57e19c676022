/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quant: what the bytes of packed storage (struct quant, backend.h) mean. A number is its code
 * times the scale of its block, both exact in F32, the product rounded to F32.
 */
#ifndef DSPARK_QUANT_H
#define DSPARK_QUANT_H

#include <jansson.h>

#include "backend.h"

struct err;

/* Bytes of the codes of `cols` numbers; scales that a row of so many has. */
static inline size_t quant_row_bytes(const struct quant *q, int64_t cols)
{
	return (size_t)(q->code == CODE_F8_E4M3 ? cols : (cols + 1) / 2);
}

static inline int64_t quant_blocks(const struct quant *q, int64_t cols)
{
	return (cols + q->block_cols - 1) / q->block_cols;
}

/* Scale i of the row of scales at p, which may be any byte's address. */
float quant_scale(const struct quant *q, const void *p, int64_t i);

/* `cols` numbers from their codes and their row of scales. */
void quant_values(float *dst, const struct quant *q, const void *codes, const void *scales,
		  int64_t cols);

/*
 * The layouts that a checkpoint may use for the weights that its model lets be packed:
 * `list` is a weight_spec's `quants`, its first the one that estimates take. Not to be moved.
 */
struct quants {
	struct quant layout[3];
	const struct quant *list[4];	/* NULL-ended */
};

/*
 * From config.json's quantization_config: quant_method fp8, fmt e4m3, weight_block_size [rows,
 * columns]; scales in F32, F8_E8M0 or U8 under ".weight_scale_inv". Without that key the list is
 * empty. Refuses everything else that would have to be read.
 */
int quants_read(struct quants *q, const json_t *config, struct err *e);

#endif
