/* SPDX-License-Identifier: Apache-2.0 */
/* RMS norm. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <math.h>

#include "ref.h"

void ref_norm(struct device *d, struct tensor out, struct tensor x, const struct weight *w,
	      float eps, int64_t width)
{
	if (!ref_good(d))
		return;
	for (int64_t t = 0; t < x.rows; t++) {
		for (int64_t c0 = 0; c0 + width <= x.cols; c0 += width) {
			double sum = 0, r;

			for (int64_t c = 0; c < width; c++)
				sum += (double)ref_get(x, t, c0 + c) * ref_get(x, t, c0 + c);
			r = 1 / sqrt(sum / (double)width + eps);
			for (int64_t c = 0; c < width; c++)
				ref_set(out, t, c0 + c,
					(float)(ref_get(x, t, c0 + c) * r *
						(w ? ref_vector(w)[c] : 1)));
		}
	}
}
