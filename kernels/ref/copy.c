/* SPDX-License-Identifier: Apache-2.0 */
/* Verbs that move rows and compute nothing: upload, store, rows. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <string.h>

#include "ref.h"

void ref_upload(struct device *d, struct tensor out, const void *src)
{
	size_t row = (size_t)out.cols * dtype_size(out.dtype);

	if (!ref_good(d))
		return;
	for (int64_t t = 0; t < out.rows; t++)
		memcpy(ref_at(out, t, 0), (const char *)src + (size_t)t * row, row);
}

void ref_store(struct device *d, void *dst, enum dtype to, int64_t dst_ld, struct tensor x)
{
	if (!ref_good(d))
		return;
	for (int64_t t = 0; t < x.rows; t++)
		dtype_convert((char *)dst + (size_t)(t * dst_ld) * dtype_size(to), to,
			      ref_at(x, t, 0), x.dtype, (size_t)x.cols);
}

static int64_t load_integer(const char *src, enum dtype d, int64_t i)
{
	return d == DT_I64 ? ((const int64_t *)src)[i] : ((const int32_t *)src)[i];
}

static void integers(char *dst, enum dtype to, const char *src, enum dtype from, int64_t n)
{
	for (int64_t i = 0; i < n; i++)
		if (to == DT_I64)
			((int64_t *)dst)[i] = load_integer(src, from, i);
		else
			((int32_t *)dst)[i] = (int32_t)load_integer(src, from, i);
}

/* n numbers, rounded to the unit's dtype first, whatever `to` can hold. */
static void numbers(char *dst, enum dtype to, const char *src, enum dtype from, enum dtype unit,
		    int64_t n)
{
	if (unit != DT_BF16 || to == DT_BF16 || from == DT_BF16) {
		dtype_convert(dst, to, src, from, (size_t)n);
		return;
	}
	for (int64_t i = 0; i < n; i++) {
		uint16_t h;

		dtype_convert(&h, DT_BF16, src + (size_t)i * dtype_size(from), from, 1);
		ref_save(dst + (size_t)i * dtype_size(to), to, dtype_bf16_to_f32(h));
	}
}

void ref_rows(struct device *d, struct tensor out, const struct weight *table, struct tensor ids)
{
	const struct ref_weight *w = ref_of(table);
	size_t row = (size_t)table->cols * dtype_size(w->dtype);

	for (int64_t t = 0; t < out.rows && ref_good(d); t++)
		for (int64_t k = 0; k < ids.cols; k++) {
			int32_t id = ref_id(ids, t, k);
			char *dst = ref_at(out, t, k * table->cols);

			if (id < 0 || id >= table->rows)
				err_refuse(&d->err, "row id %d is outside a table of %lld rows", id,
					   (long long)table->rows);
			else if (dtype_is_float(w->dtype))
				numbers(dst, out.dtype, w->data + (size_t)id * row, w->dtype,
					ref_operand(table, d->compute), table->cols);
			else
				integers(dst, out.dtype, w->data + (size_t)id * row, w->dtype,
					 table->cols);
		}
}
