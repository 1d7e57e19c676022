/* SPDX-License-Identifier: Apache-2.0 */
/* Weights of ref: kept in the order of the checkpoint, in the dtype of their use. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdlib.h>

#include "mem.h"
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
	if (w->quant)
		return err_refuse(e, "packed weights are not supported by this backend: use a "
				     "checkpoint in bf16 or fp32");
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

int ref_weight_alloc(struct device *d, struct weight *w, struct err *e)
{
	enum dtype kept = kept_as(w, d->compute);
	int64_t bytes =
		mem_mul(mem_mul(mem_mul(w->count, w->rows), w->cols), (int64_t)dtype_size(kept));
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
	return 0;
}

/* Vectors take part in the dtype of their unit too, though they are kept as F32. */
static void round_all(float *p, int64_t n, enum dtype d)
{
	for (int64_t i = 0; i < n; i++)
		p[i] = ref_round(p[i], d);
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
	if (scales)
		return err_refuse(e, "packed weights are not supported by this backend: use a "
				     "checkpoint in bf16 or fp32");
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
	if (h)
		free(h->block);
	w->handle = NULL;
}
