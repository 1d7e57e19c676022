/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ref: what every verb means, in plain scalar C. Sums run in double and are rounded to F32 once, so
 * that ref is the oracle of the faster backends; then results are rounded once to the dtype they
 * are stored in.
 *
 * Other backends may fall back to these functions: tensors are host memory here, and weights that
 * are no products have the layout of struct ref_weight in all CPU backends.
 */
#ifndef DSPARK_REF_H
#define DSPARK_REF_H

#include "kernels.h"
#include "scales.h"

/*
 * The handle of a weight: [count, rows, cols] packed. F32 for vectors, the operand dtype for
 * products, the file's for tables. Of packed storage the data are codes, and dtype is what they
 * become. It lies within `block`, which is what is freed.
 */
struct ref_weight {
	void *block;
	enum dtype dtype;
	struct ref_scales scales;
	char data[] __attribute__((aligned(64)));
};

static inline const struct ref_weight *ref_of(const struct weight *w)
{
	return (const struct ref_weight *)w->handle;
}

/* A USE_VECTOR weight's numbers. */
static inline const float *ref_vector(const struct weight *w)
{
	return (const float *)ref_of(w)->data;
}

static inline void *ref_at(struct tensor t, int64_t row, int64_t col)
{
	return (char *)t.p + (size_t)(row * t.ld + col) * dtype_size(t.dtype);
}

static inline float ref_load(const void *p, enum dtype d)
{
	switch (d) {
	case DT_F32:
		return *(const float *)p;
	case DT_BF16:
		return dtype_bf16_to_f32(*(const uint16_t *)p);
	default:
		return dtype_f16_to_f32(*(const uint16_t *)p);
	}
}

static inline void ref_save(void *p, enum dtype d, float f)
{
	switch (d) {
	case DT_F32:
		*(float *)p = f;
		break;
	case DT_BF16:
		*(uint16_t *)p = dtype_f32_to_bf16(f);
		break;
	default:
		*(uint16_t *)p = dtype_f32_to_f16(f);
	}
}

static inline float ref_get(struct tensor t, int64_t row, int64_t col)
{
	return ref_load(ref_at(t, row, col), t.dtype);
}

static inline void ref_set(struct tensor t, int64_t row, int64_t col, float f)
{
	ref_save(ref_at(t, row, col), t.dtype, f);
}

/* f as an operand of a product in dtype d. */
static inline float ref_round(float f, enum dtype d)
{
	return d == DT_BF16 ? dtype_bf16_to_f32(dtype_f32_to_bf16(f)) : f;
}

static inline int32_t ref_id(struct tensor ids, int64_t row, int64_t col)
{
	return *(const int32_t *)ref_at(ids, row, col);
}

/* The dtype in which a product with `w` takes its operands. */
static inline enum dtype ref_operand(const struct weight *w, enum dtype compute)
{
	return w->unit == WEIGHT_FP32 ? DT_F32 : compute;
}

/* False where a verb must not run: the device has failed before. */
static inline bool ref_good(const struct device *d)
{
	return !d->err.code;
}

/*
 * The row of y [rows, N] that slot s of token t adds in combine, negative = none. Outside y that is
 * `e`, and none.
 */
int64_t ref_slot_row(struct tensor index, int64_t t, int64_t s, int64_t rows, struct err *e);

/*
 * How many keys row t of keys [T,K] names; -1 with `e` set where one is no key of the piece or they
 * do not ascend.
 */
int64_t ref_keys_of(struct tensor keys, int64_t t, const struct piece *p, struct err *e);

/* Refuses a weight that verbs could not read as numbers or integers. */
int ref_weight_usable(const struct weight *w, struct err *e);

/* Refuses a filling that is not as the weight is kept: codes come with scales, numbers without. */
int ref_fill_usable(const struct weight *w, enum dtype from, const void *scales, struct err *e);

/*
 * A row of a product as operands of the handle's dtype: where it lies, or made in `work`, which has
 * room for 2 * cols floats.
 */
const char *ref_operands(const struct weight *w, int64_t index, int64_t row, void *work);

float ref_act(const struct act *a, float g, float u);
/* p[n] = exp(p[j]) / (sum of exp(p) + exp(*sink)); sink NULL = none. */
void ref_softmax(double *p, int64_t n, const float *sink);

/* One token's choice; `work` has room for 2 * experts floats. */
void ref_route_row(int32_t *ids, float *weights, const float *logits, const struct router *r,
		   float *work);

void *ref_alloc(struct device *d, size_t bytes, struct err *e);
void ref_free(struct device *d, void *p);
int ref_sync(struct device *d, struct err *e);
void ref_upload(struct device *d, struct tensor out, const void *src);
void ref_store(struct device *d, void *dst, enum dtype to, int64_t dst_ld, struct tensor x);
int ref_weight_alloc(struct device *d, struct weight *w, struct err *e);
int ref_weight_fill(struct device *d, struct weight *w, int64_t index, int64_t row0, int64_t n,
		    const void *src, enum dtype from, const void *scales, struct err *e);
int ref_weight_ready(struct device *d, struct weight *w, struct err *e);
void ref_weight_free(struct device *d, struct weight *w);
void ref_rows(struct device *d, struct tensor out, const struct weight *table, struct tensor ids);
void ref_matmul(struct device *d, struct tensor out, struct tensor x, const struct weight *w,
		const struct weight *bias, bool add);
void ref_matmul_gate(struct device *d, struct tensor out, struct tensor x, const struct weight *w,
		     const struct act *a);
void ref_norm(struct device *d, struct tensor out, struct tensor x, const struct weight *w,
	      float eps, int64_t width);
void ref_rope(struct device *d, struct tensor x, int heads, const struct weight *norm, float eps,
	      const struct rope *r, struct tensor pos);
void ref_attention(struct device *d, struct tensor out, struct tensor q, struct tensor k,
		   struct tensor v, const struct attention *a, const struct piece *pieces, int n);
void ref_layer_norm(struct device *d, struct tensor out, struct tensor x, const struct weight *w,
		    const struct weight *bias, float eps, int64_t width);
void ref_choose(struct device *d, struct tensor keys, struct tensor q, struct tensor k,
		struct tensor w, const struct piece *pieces, int n);
void ref_attention_at(struct device *d, struct tensor out, struct tensor q, struct tensor k,
		      struct tensor v, struct tensor keys, const struct attention *a,
		      const struct piece *pieces, int n);
void ref_product(struct device *d, struct tensor out, struct tensor x, struct tensor y,
		 const struct grouped *g);
void ref_copy(struct device *d, struct tensor out, int64_t out_step, struct tensor x,
	      int64_t x_step, int64_t width, int n);
void ref_gate(struct device *d, struct tensor out, struct tensor x, const struct act *a);
void ref_add(struct device *d, struct tensor x, struct tensor y);
void ref_route(struct device *d, struct tensor ids, struct tensor weights, struct tensor logits,
	       const struct router *r);
void ref_experts(struct device *d, struct tensor sum, struct tensor x, struct tensor ids,
		 struct tensor weights, const struct experts *ex, bool add);
void ref_pick(struct device *d, struct tensor out, struct tensor x, struct tensor index);
void ref_combine(struct device *d, struct tensor sum, struct tensor y, struct tensor index,
		 struct tensor weights, bool add);

#endif
