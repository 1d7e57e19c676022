/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rotary positions. The angle is the F32 product, as references compute it: at large positions its
 * rounding is part of the model.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <math.h>

#include "ref.h"

static void rotate(struct tensor x, int64_t t, int64_t c0, int64_t c1, float cosine, float sine)
{
	double a = ref_get(x, t, c0), b = ref_get(x, t, c1);

	ref_set(x, t, c0, (float)(a * cosine - b * sine));
	ref_set(x, t, c1, (float)(b * cosine + a * sine));
}

void ref_rope(struct device *d, struct tensor x, int heads, const struct rope *r, struct tensor pos)
{
	int64_t head = x.cols / heads, half = r->width / 2;

	if (!ref_good(d))
		return;
	for (int64_t t = 0; t < x.rows; t++) {
		for (int64_t j = 0; j < half; j++) {
			float angle = (float)ref_id(pos, t, 0) * ref_vector(r->freq)[j];
			float cosine = cosf(angle) * r->scale,
			      sine = sinf(r->inverse ? -angle : angle) * r->scale;
			int64_t c0 = r->offset + (r->layout == ROPE_HALF ? j : 2 * j);
			int64_t c1 = r->layout == ROPE_HALF ? c0 + half : c0 + 1;

			for (int64_t h = 0; h < heads; h++)
				rotate(x, t, h * head + c0, h * head + c1, cosine, sine);
		}
	}
}
