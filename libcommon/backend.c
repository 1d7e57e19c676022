/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How much device memory a weight takes, known without a device: the promise that every backend's
 * layout keeps.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include "quant.h"

/*
 * Packed products may pad both sizes to whole blocks; a handle with what an allocator rounds up,
 * and for each panel of at least 64 rows a record, come on top.
 */
#define BLOCK 64
#define HANDLE 8192
#define RECORD 64

static uint64_t blocks(int64_t n)
{
	return ((uint64_t)n + BLOCK - 1) / BLOCK;
}

/* 64 rows of codes, and of their scales which is whose. */
static uint64_t quant_bytes(const struct weight *w)
{
	const struct quant *q = w->quant;

	return BLOCK * quant_row_bytes(q, (int64_t)blocks(w->cols) * BLOCK) + BLOCK +
	       (uint64_t)QUANT_SCALE_ROWS(q) * (uint64_t)quant_blocks(q, w->cols) *
		       dtype_size(q->scale);
}

uint64_t weight_bytes(const struct weight *w, enum dtype compute)
{
	uint64_t count = (uint64_t)w->count, plain = count * (uint64_t)w->rows * (uint64_t)w->cols;

	if (w->reader)
		return 0;
	switch (w->use) {
	case USE_PRODUCT:
	case USE_GATED:
		if (w->quant)
			return HANDLE + count * blocks(w->rows) * (RECORD + quant_bytes(w));
		return HANDLE +
		       count * blocks(w->rows) *
			       (RECORD +
				BLOCK * blocks(w->cols) * BLOCK *
					dtype_size(w->unit == WEIGHT_FP32 ? DT_F32 : compute));
	case USE_VECTOR:
		return HANDLE + plain * sizeof(float);
	case USE_TABLE:
	case USE_RAW:
		break;
	}
	return HANDLE + plain * dtype_size(w->stored);
}

/* ---- the device that only measures ----------------------------------------------------------- */

static void no_rows(struct device *d, struct tensor out, const struct weight *table,
		    struct tensor ids)
{
	(void)d, (void)out, (void)table, (void)ids;
}

static void no_matmul(struct device *d, struct tensor out, struct tensor x, const struct weight *w,
		      const struct weight *bias, bool add)
{
	(void)d, (void)out, (void)x, (void)w, (void)bias, (void)add;
}

static void no_matmul_gate(struct device *d, struct tensor out, struct tensor x,
			   const struct weight *w, const struct act *a)
{
	(void)d, (void)out, (void)x, (void)w, (void)a;
}

static void no_norm(struct device *d, struct tensor out, struct tensor x, const struct weight *w,
		    float eps, int64_t width)
{
	(void)d, (void)out, (void)x, (void)w, (void)eps, (void)width;
}

static void no_upload(struct device *d, struct tensor out, const void *src)
{
	(void)d, (void)out, (void)src;
}

static void no_layer_norm(struct device *d, struct tensor out, struct tensor x,
			  const struct weight *w, const struct weight *bias, float eps,
			  int64_t width)
{
	(void)d, (void)out, (void)x, (void)w, (void)bias, (void)eps, (void)width;
}

static void no_choose(struct device *d, struct tensor keys, struct tensor q, struct tensor k,
		      struct tensor w, const struct piece *pieces, int n)
{
	(void)d, (void)keys, (void)q, (void)k, (void)w, (void)pieces, (void)n;
}

static void no_attention_at(struct device *d, struct tensor out, struct tensor q, struct tensor k,
			    struct tensor v, struct tensor keys, const struct attention *a,
			    const struct piece *pieces, int n)
{
	(void)d, (void)out, (void)q, (void)k, (void)v, (void)keys, (void)a, (void)pieces, (void)n;
}

static void no_product(struct device *d, struct tensor out, struct tensor x, struct tensor y,
		       const struct grouped *g)
{
	(void)d, (void)out, (void)x, (void)y, (void)g;
}

static void no_copy(struct device *d, struct tensor out, int64_t out_step, struct tensor x,
		    int64_t x_step, int64_t width, int n)
{
	(void)d, (void)out, (void)out_step, (void)x, (void)x_step, (void)width, (void)n;
}

static void no_rope(struct device *d, struct tensor x, int heads, const struct weight *norm,
		    float eps, const struct rope *r, struct tensor pos)
{
	(void)d, (void)x, (void)heads, (void)norm, (void)eps, (void)r, (void)pos;
}

static void no_attention(struct device *d, struct tensor out, struct tensor q, struct tensor k,
			 struct tensor v, const struct attention *a, const struct piece *pieces,
			 int n)
{
	(void)d, (void)out, (void)q, (void)k, (void)v, (void)a, (void)pieces, (void)n;
}

static void no_gate(struct device *d, struct tensor out, struct tensor x, const struct act *a)
{
	(void)d, (void)out, (void)x, (void)a;
}

static void no_add(struct device *d, struct tensor x, struct tensor y)
{
	(void)d, (void)x, (void)y;
}

static void no_route(struct device *d, struct tensor ids, struct tensor weights,
		     struct tensor logits, const struct router *r)
{
	(void)d, (void)ids, (void)weights, (void)logits, (void)r;
}

static void no_experts(struct device *d, struct tensor sum, struct tensor x, struct tensor ids,
		       struct tensor weights, const struct experts *ex, bool add)
{
	(void)d, (void)sum, (void)x, (void)ids, (void)weights, (void)ex, (void)add;
}

static void no_pick(struct device *d, struct tensor out, struct tensor x, struct tensor index)
{
	(void)d, (void)out, (void)x, (void)index;
}

static void no_combine(struct device *d, struct tensor sum, struct tensor y, struct tensor index,
		       struct tensor weights, bool add)
{
	(void)d, (void)sum, (void)y, (void)index, (void)weights, (void)add;
}

const struct backend backend_measure = {
	.name = "measure",
	.upload = no_upload,
	.rows = no_rows,
	.matmul = no_matmul,
	.matmul_gate = no_matmul_gate,
	.norm = no_norm,
	.layer_norm = no_layer_norm,
	.rope = no_rope,
	.attention = no_attention,
	.choose = no_choose,
	.attention_at = no_attention_at,
	.product = no_product,
	.copy = no_copy,
	.gate = no_gate,
	.add = no_add,
	.route = no_route,
	.experts = no_experts,
	.pick = no_pick,
	.combine = no_combine,
};
