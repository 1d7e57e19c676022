/* SPDX-License-Identifier: Apache-2.0 */
/* Verbs that move rows and compute nothing: upload, store, rows, pick. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdlib.h>
#include <string.h>

#include "mem.h"
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

/* A row of the table, which is kept as `from`. */
static void put_row(char *dst, enum dtype to, const char *src, enum dtype from,
		    const struct weight *table, enum dtype compute)
{
	if (dtype_is_float(from))
		numbers(dst, to, src, from, ref_operand(table, compute), table->cols);
	else
		integers(dst, to, src, from, table->cols);
}

static bool inside(struct device *d, int32_t id, const struct weight *table)
{
	if (id >= 0 && id < table->rows)
		return true;
	err_refuse(&d->err, "row id %d is outside a table of %lld rows", id,
		   (long long)table->rows);
	return false;
}

/* Blocks of rows that come through the reader: bounded whatever the chunk is. */
#define BLOCK_BYTES (1 << 20)

struct block {
	char *rows;		/* [most, cols] as stored */
	int32_t *id;		/* [most] */
	int64_t most;
};

/* The rows of ids [first, first + n), counted through ids [T,k] row by row, to their places. */
static void read_block(struct device *d, struct tensor out, const struct weight *table,
		       struct tensor ids, const struct block *b, int64_t first, int64_t n)
{
	size_t row = (size_t)table->cols * dtype_size(table->stored);

	for (int64_t i = 0; i < n; i++)
		b->id[i] = ref_id(ids, (first + i) / ids.cols, (first + i) % ids.cols);
	if (table->reader->rows(table->reader->ctx, b->id, n, b->rows, &d->err))
		return;
	for (int64_t i = 0; i < n; i++)
		put_row(ref_at(out, (first + i) / ids.cols, (first + i) % ids.cols * table->cols),
			out.dtype, b->rows + (size_t)i * row, table->stored, table, d->compute);
}

/* Nothing is asked for before all ids are known to be good. */
static void read_rows(struct device *d, struct tensor out, const struct weight *table,
		      struct tensor ids)
{
	int64_t row = table->cols * (int64_t)dtype_size(table->stored), all = out.rows * ids.cols;
	struct block b;

	for (int64_t i = 0; i < all; i++)
		if (!inside(d, ref_id(ids, i / ids.cols, i % ids.cols), table))
			return;
	if (!all || ref_weight_usable(table, &d->err))
		return;
	b.most = row < BLOCK_BYTES ? BLOCK_BYTES / row : 1;
	b.most = b.most < all ? b.most : all;
	b.rows = mem_aligned((size_t)(b.most * row), &d->err);
	b.id = mem_calloc((size_t)b.most, sizeof *b.id, &d->err);
	for (int64_t i = 0; i < all && ref_good(d); i += b.most)
		read_block(d, out, table, ids, &b, i, all - i < b.most ? all - i : b.most);
	free(b.rows);
	free(b.id);
}

void ref_rows(struct device *d, struct tensor out, const struct weight *table, struct tensor ids)
{
	if (!ref_good(d))
		return;
	if (table->reader) {
		read_rows(d, out, table, ids);
		return;
	}
	for (int64_t t = 0; t < out.rows; t++)
		for (int64_t k = 0; k < ids.cols; k++) {
			const struct ref_weight *w = ref_of(table);
			int32_t id = ref_id(ids, t, k);

			if (!inside(d, id, table))
				return;
			put_row(ref_at(out, t, k * table->cols), out.dtype,
				w->data + (size_t)(id * table->cols) * dtype_size(w->dtype),
				w->dtype, table, d->compute);
		}
}

void ref_pick(struct device *d, struct tensor out, struct tensor x, struct tensor index)
{
	size_t row = (size_t)out.cols * dtype_size(out.dtype);

	if (!ref_good(d))
		return;
	for (int64_t i = 0; i < out.rows; i++) {
		int32_t from = ref_id(index, i, 0);

		if (from < 0 || from >= x.rows) {
			err_refuse(&d->err, "row %d cannot be picked from %lld rows", from,
				   (long long)x.rows);
			return;
		}
		memcpy(ref_at(out, i, 0), ref_at(x, from, 0), row);
	}
}
