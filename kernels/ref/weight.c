/* SPDX-License-Identifier: Apache-2.0 */
/* Weights of ref: kept in the order of the checkpoint, in the dtype of their use. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdlib.h>

#include <string.h>

#include "mem.h"
#include "quant.h"
#include "ref.h"

static enum dtype kept_as(const struct weight *w, enum dtype compute)
{
	switch (w->use) {
	case USE_PRODUCT:
	case USE_GATED:
		return ref_operand(w, compute);
	case USE_VECTOR:
		return DT_F32;
	case USE_TABLE:
	case USE_RAW:
		break;
	}
	return w->stored;
}

int ref_weight_usable(const struct weight *w, struct err *e)
{
	if (w->quant && ((w->use != USE_PRODUCT && w->use != USE_GATED) ||
			 w->stored != quant_stored(w->quant)))
		return err_refuse(e, "a weight packed as %s cannot be used here",
				  dtype_name(w->stored));
	if (w->quant)
		return 0;
	if (w->use != USE_RAW && !dtype_is_float(w->stored))
		return err_refuse(e, "a weight stored as %s cannot be used as numbers",
				  dtype_name(w->stored));
	return 0;
}

/* Zeroed memory that the system has not given yet where it is large: rows that nobody fills. */
static struct ref_weight *alloc_handle(size_t bytes, struct err *e)
{
	size_t line = __alignof__(struct ref_weight);
	char *block = mem_calloc(line + sizeof(struct ref_weight) + bytes, 1, e);
	struct ref_weight *h;

	if (!block)
		return NULL;
	h = (struct ref_weight *)(block + (line - (uintptr_t)block % line) % line);
	h->block = block;
	return h;
}

/* Bytes of a row as kept. */
static int64_t row_bytes(const struct weight *w, enum dtype kept)
{
	return w->quant ? (int64_t)quant_row_bytes(w->quant, w->cols)
			: mem_mul(w->cols, (int64_t)dtype_size(kept));
}

int ref_weight_alloc(struct device *d, struct weight *w, struct err *e)
{
	enum dtype kept = kept_as(w, d->compute);
	int64_t bytes = mem_mul(mem_mul(w->count, w->rows), row_bytes(w, kept));
	struct ref_weight *h;

	if (ref_weight_usable(w, e))
		return -1;
	if (bytes < 0)
		return err_fail(
			e,
			"a weight of %lld x %lld x %lld elements is larger than the address space",
			(long long)w->count, (long long)w->rows, (long long)w->cols);
	h = alloc_handle((size_t)bytes, e);
	if (!h)
		return -1;
	h->dtype = kept;
	w->handle = h;
	if (w->quant && ref_scales_init(&h->scales, w, e)) {
		ref_weight_free(d, w);
		return -1;
	}
	return 0;
}

/* Vectors take part in the dtype of their unit too, though they are kept as F32. */
static void round_all(float *p, int64_t n, enum dtype d)
{
	for (int64_t i = 0; i < n; i++)
		p[i] = ref_round(p[i], d);
}

int ref_fill_usable(const struct weight *w, enum dtype from, const void *scales, struct err *e)
{
	if (!w->quant && !scales)
		return 0;
	if (w->quant && scales && from == w->stored)
		return 0;
	return err_refuse(e, "a weight kept as %s cannot be filled with %s %s scales",
			  dtype_name(w->stored), dtype_name(from), scales ? "and" : "without");
}

int ref_weight_fill(struct device *d, struct weight *w, int64_t index, int64_t row0, int64_t n,
		    const void *src, enum dtype from, const void *scales, struct err *e)
{
	struct ref_weight *h = w->handle;
	char *dst;

	if (index < 0 || index >= w->count || row0 < 0 || n < 0 || n > w->rows - row0)
		return err_fail(
			e,
			"rows %lld..%lld of matrix %lld are outside a weight of %lld x %lld rows",
			(long long)row0, (long long)(row0 + n), (long long)index,
			(long long)w->count, (long long)w->rows);
	if (ref_fill_usable(w, from, scales, e))
		return -1;
	if (w->quant) {
		memcpy(h->data + (size_t)((index * w->rows + row0) * row_bytes(w, h->dtype)), src,
		       (size_t)(n * row_bytes(w, h->dtype)));
		return ref_scales_put(&h->scales, index, row0, n, scales, e);
	}
	if (from != h->dtype && (!dtype_is_float(from) || !dtype_is_float(h->dtype)))
		return err_refuse(e, "a weight stored as %s cannot become %s", dtype_name(from),
				  dtype_name(h->dtype));
	dst = h->data + (size_t)((index * w->rows + row0) * w->cols) * dtype_size(h->dtype);
	dtype_convert(dst, h->dtype, src, from, (size_t)(n * w->cols));
	if (w->use == USE_VECTOR)
		round_all((float *)dst, n * w->cols, ref_operand(w, d->compute));
	return 0;
}

int ref_weight_ready(struct device *d, struct weight *w, struct err *e)
{
	(void)d;
	(void)w;
	(void)e;
	return 0;
}

void ref_weight_free(struct device *d, struct weight *w)
{
	struct ref_weight *h = w->handle;

	(void)d;
	if (h && w->quant)
		ref_scales_release(&h->scales);
	if (h)
		free(h->block);
	w->handle = NULL;
}

const char *ref_operands(const struct weight *w, int64_t index, int64_t row, void *work)
{
	const struct ref_weight *h = ref_of(w);
	int64_t at = index * w->rows + row;
	const void *scales;
	float *f = work;

	if (!w->quant)
		return h->data + (size_t)(at * w->cols) * dtype_size(h->dtype);
	scales = ref_scales_row(&h->scales, index, row);
	if (scales)
		quant_values(f, w->quant, h->data + (size_t)(at * row_bytes(w, h->dtype)), scales,
			     w->cols);
	else
		memset(f, 0, (size_t)w->cols * sizeof *f);
	dtype_convert(f + w->cols, h->dtype, f, DT_F32, (size_t)w->cols);
	return (const char *)(f + w->cols);
}
