/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Routed experts. gate and up stay in F32; the activation, with the slot's weight unless that comes
 * after down, is rounded once as operand of down; down's output is F32 and the sum over slots runs
 * in F32, in slot order.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdlib.h>
#include <string.h>

#include "mem.h"
#include "ref.h"

/* out[rows] = matrix `index` of w times x. */
static void product(float *out, const float *x, const struct weight *w, int64_t index)
{
	const struct ref_weight *h = ref_of(w);
	const char *m = h->data + (size_t)(index * w->rows * w->cols) * dtype_size(h->dtype);

	for (int64_t n = 0; n < w->rows; n++) {
		double sum = 0;

		for (int64_t c = 0; c < w->cols; c++)
			sum += (double)x[c] *
			       ref_load(m + (size_t)(n * w->cols + c) * dtype_size(h->dtype),
					h->dtype);
		out[n] = (float)sum;
	}
}

struct work {
	float *x, *gate_up, *down;	/* [Hin or I], [2I], [Hout] */
};

static void one_slot(struct tensor sum, int64_t t, const struct experts *ex, int64_t index,
		     float weight, const struct work *w)
{
	int64_t I = ex->down->cols;

	product(w->gate_up, w->x, ex->gate_up, index);
	for (int64_t c = 0; c < I; c++) {
		float a = ref_act(&ex->act, w->gate_up[c], w->gate_up[I + c]);

		w->gate_up[c] =
			ref_round(ex->weight_after_down ? a : a * weight, ref_of(ex->down)->dtype);
	}
	product(w->down, w->gate_up, ex->down, index);
	for (int64_t c = 0; c < ex->down->rows; c++)
		ref_set(sum, t, c,
			ref_get(sum, t, c) +
				(ex->weight_after_down ? w->down[c] * weight : w->down[c]));
}

void ref_experts(struct device *d, struct tensor sum, struct tensor x, struct tensor ids,
		 struct tensor weights, const struct experts *ex, bool add)
{
	struct work w = { NULL, NULL, NULL };

	if (!ref_good(d))
		return;
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
}
