/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rotary positions. The angle is the F32 product, as references compute it: at large positions its
 * rounding is part of the model.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <math.h>
#include <stdlib.h>

#include "mem.h"
#include "ref.h"

/* The head's n numbers to h, divided by their root mean square and times w where it is not NULL. */
static void load_head(double *h, struct tensor x, int64_t t, int64_t c0, int64_t n, const float *w,
		      float eps)
{
	double sum = 0;

	for (int64_t c = 0; c < n; c++) {
		h[c] = ref_get(x, t, c0 + c);
		sum += h[c] * h[c];
	}
	for (int64_t c = 0; w && c < n; c++)
		h[c] *= 1 / sqrt(sum / (double)n + eps) * w[c];
}

static void rotate(double *h, const struct rope *r, float position)
{
	int64_t half = r->width / 2;

	for (int64_t j = 0; j < half; j++) {
		float angle = position * ref_vector(r->freq)[j], cosine = cosf(angle) * r->scale,
		      sine = sinf(r->inverse ? -angle : angle) * r->scale;
		double *p = h + r->offset + (r->layout == ROPE_HALF ? j : 2 * j),
		       *q = r->layout == ROPE_HALF ? p + half : p + 1;
		double a = *p, b = *q;

		*p = a * cosine - b * sine;
		*q = b * cosine + a * sine;
	}
}

void ref_rope(struct device *d, struct tensor x, int heads, const struct weight *norm, float eps,
	      const struct rope *r, struct tensor pos)
{
	int64_t n = x.cols / heads;
	double *h;

	if (!ref_good(d))
		return;
	h = mem_calloc((size_t)n, sizeof *h, &d->err);
	for (int64_t t = 0; t < x.rows && h; t++)
		for (int64_t c0 = 0; c0 < x.cols; c0 += n) {
			load_head(h, x, t, c0, n, norm ? ref_vector(norm) : NULL, eps);
			rotate(h, r, (float)ref_id(pos, t, 0));
			for (int64_t c = 0; c < n; c++)
				ref_set(x, t, c0 + c, (float)h[c]);
		}
	free(h);
}
