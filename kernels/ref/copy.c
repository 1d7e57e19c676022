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
		dtype_convert((char *)dst + (size_t)(t * dst_ld) * dtype_size(to), to, ref_at(x, t, 0), x.dtype, (size_t)x.cols);
}

/* Integers are copied. Numbers are rounded to the unit's dtype first, whatever `out` can hold. */
static void one_row(struct tensor out, int64_t t, const char *src, enum dtype from, enum dtype unit)
{
	if (!dtype_is_float(from)) {
		memcpy(ref_at(out, t, 0), src, (size_t)out.cols * dtype_size(from));
		return;
	}
	dtype_convert(ref_at(out, t, 0), out.dtype, src, from, (size_t)out.cols);
	if (unit == DT_BF16 && out.dtype != DT_BF16)
		for (int64_t c = 0; c < out.cols; c++) {
			uint16_t h;

			dtype_convert(&h, DT_BF16, src + (size_t)c * dtype_size(from), from, 1);
			ref_set(out, t, c, dtype_bf16_to_f32(h));
		}
}

void ref_rows(struct device *d, struct tensor out, const struct weight *table, struct tensor ids)
{
	const struct ref_weight *w = ref_of(table);
	size_t row = (size_t)table->cols * dtype_size(w->dtype);

	for (int64_t t = 0; t < out.rows && ref_good(d); t++) {
		int32_t id = ref_id(ids, t, 0);

		if (id < 0 || id >= table->rows)
			err_refuse(&d->err, "row id %d is outside a table of %lld rows", id, (long long)table->rows);
		else
			one_row(out, t, w->data + (size_t)id * row, w->dtype, ref_operand(table, d->compute));
	}
}
