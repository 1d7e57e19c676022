/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Routed experts, and the sum over slots alone. gate and up stay in F32; the activation, with the
 * slot's weight unless that comes after down, is rounded once as operand of down; down's output is
 * F32 and the sum over slots runs in F32, in slot order. Both verbs add by one function, so that
 * both give the same bits.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdlib.h>
#include <string.h>

#include "mem.h"
#include "ref.h"

/* out[rows] = matrix `index` of w times x. */
static void product(float *out, const float *x, const struct weight *w, int64_t index, float *row)
{
	enum dtype d = ref_of(w)->dtype;

	for (int64_t n = 0; n < w->rows; n++) {
		const char *m = ref_operands(w, index, n, row);
		double sum = 0;

		for (int64_t c = 0; c < w->cols; c++)
			sum += (double)x[c] * ref_load(m + (size_t)c * dtype_size(d), d);
		out[n] = (float)sum;
	}
}

static void add_slot(float *sum, const float *y, float weight, int64_t n)
{
	for (int64_t c = 0; c < n; c++)
		sum[c] += y[c] * weight;
}

struct work {
	float *x, *gate_up, *down;	/* [Hin or I], [2I], [Hout] */
	float *row;			/* for ref_operands */
};

static void one_slot(struct tensor sum, int64_t t, const struct experts *ex, int64_t index,
		     float weight, const struct work *w)
{
	int64_t I = ex->down->cols;

	product(w->gate_up, w->x, ex->gate_up, index, w->row);
	for (int64_t c = 0; c < I; c++) {
		float a = ref_act(&ex->act, w->gate_up[c], w->gate_up[I + c]);

		w->gate_up[c] =
			ref_round(ex->weight_after_down ? a : a * weight, ref_of(ex->down)->dtype);
	}
	product(w->down, w->gate_up, ex->down, index, w->row);
	add_slot(ref_at(sum, t, 0), w->down, ex->weight_after_down ? weight : 1, ex->down->rows);
}

void ref_experts(struct device *d, struct tensor sum, struct tensor x, struct tensor ids,
		 struct tensor weights, const struct experts *ex, bool add)
{
	struct work w = { NULL, NULL, NULL, NULL };
	int64_t wide;

	if (!ref_good(d))
		return;
	wide = ex->gate_up->cols > ex->down->cols ? ex->gate_up->cols : ex->down->cols;
	w.row = mem_calloc((size_t)wide * 2, sizeof(float), &d->err);
	w.x = mem_calloc((size_t)ex->gate_up->cols, sizeof(float), &d->err);
	w.gate_up = mem_calloc((size_t)ex->gate_up->rows, sizeof(float), &d->err);
	w.down = mem_calloc((size_t)ex->down->rows, sizeof(float), &d->err);
	for (int64_t t = 0; t < x.rows && ref_good(d); t++) {
		if (!add)
			memset(ref_at(sum, t, 0), 0, (size_t)sum.cols * dtype_size(sum.dtype));
		for (int64_t c = 0; c < x.cols; c++)
			w.x[c] = ref_round(ref_get(x, t, c), ref_of(ex->gate_up)->dtype);
		for (int64_t s = 0; s < ids.cols; s++) {
			int64_t index = ref_id(ids, t, s) - ex->first;

			if (index >= 0 && index < ex->count)
				one_slot(sum, t, ex, index, ref_get(weights, t, s), &w);
		}
	}
	free(w.x);
	free(w.gate_up);
	free(w.down);
	free(w.row);
}

int64_t ref_slot_row(struct tensor index, int64_t t, int64_t s, int64_t rows, struct err *e)
{
	int32_t row = ref_id(index, t, s);

	if (row < rows)
		return row;
	err_refuse(e, "slot %lld of a token is row %d of its parts, of which there are %lld",
		   (long long)s, row, (long long)rows);
	return -1;
}

void ref_combine(struct device *d, struct tensor sum, struct tensor y, struct tensor index,
		 struct tensor weights, bool add)
{
	for (int64_t t = 0; t < sum.rows && ref_good(d); t++) {
		if (!add)
			memset(ref_at(sum, t, 0), 0, (size_t)sum.cols * sizeof(float));
		for (int64_t s = 0; s < index.cols; s++) {
			int64_t row = ref_slot_row(index, t, s, y.rows, &d->err);

			if (row >= 0)
				add_slot(ref_at(sum, t, 0), ref_at(y, row, 0),
					 weights.p ? ref_get(weights, t, s) : 1, sum.cols);
		}
	}
}
