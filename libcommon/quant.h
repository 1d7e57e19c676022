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

/* The dtype of a packed weight's `stored`, and what a checkpoint may store such codes as. */
enum dtype quant_stored(const struct quant *q);
bool quant_stores(const struct quant *q, enum dtype d);

/* Numbers in an element of that dtype: 1, 2 or 8. */
static inline int64_t quant_per_element(const struct quant *q)
{
	return q->code == CODE_F8_E4M3 ? 1 : q->code == CODE_MXFP4 ? 2 : 8;
}

/* Elements of a row of `cols` numbers; their bytes; scales that such a row has. */
static inline int64_t quant_row_elements(const struct quant *q, int64_t cols)
{
	return (cols + quant_per_element(q) - 1) / quant_per_element(q);
}

static inline size_t quant_row_bytes(const struct quant *q, int64_t cols)
{
	return (size_t)quant_row_elements(q, cols) * (q->code == CODE_INT4 ? 4 : 1);
}

static inline int64_t quant_blocks(const struct quant *q, int64_t cols)
{
	return (cols + q->block_cols - 1) / q->block_cols;
}

/* Scale i of the row of scales at p, which may be any byte's address; `n` from the first on. */
float quant_scale(const struct quant *q, const void *p, int64_t i);
void quant_scales(float *dst, const struct quant *q, const void *p, int64_t first, int64_t n);

/* The number of one code without its scale: of a byte, or of the low half of one. */
float quant_code(const struct quant *q, uint8_t code);

/* The codes of a row, a byte each, of `cols` numbers. */
void quant_codes(uint8_t *dst, const struct quant *q, const void *codes, int64_t cols);

/* `cols` numbers from their codes and their row of scales. */
void quant_values(float *dst, const struct quant *q, const void *codes, const void *scales,
		  int64_t cols);

/*
 * The layouts that a checkpoint may use for the weights that its model lets be packed:
 * `list` is a weight_spec's `quants`, its first the one that estimates take. Not to be moved.
 */
#define QUANTS_MOST 16

struct quants {
	struct quant layout[QUANTS_MOST];
	const struct quant *list[QUANTS_MOST + 1];	/* NULL-ended */
	int n;
};

/*
 * From config.json's quantization_config. Without that key the list is empty. Reads
 *
 *	quant_method fp8		fmt e4m3, weight_block_size [rows, columns]; scales in F32,
 *					BF16, F16, F8_E8M0 or U8 under ".weight_scale_inv"
 *	compressed-tensors,		pack-quantized: symmetric integers of 4 bits in groups of
 *	each group by its format	columns, or by channel; codes under ".weight_packed", scales
 *					in BF16, F16 or F32 under ".weight_scale"
 *					mxfp4-pack-quantized: groups of 32, scales in U8 or F8_E8M0
 *
 * and refuses everything else, and what makes numbers of anything but weights coarser. Neither
 * targets nor names to ignore are looked at: what stands in the checkpoint tells which weights are
 * packed (weight_resolve).
 */
int quants_read(struct quants *q, const json_t *config, struct err *e);

#endif
