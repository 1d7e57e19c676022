/* SPDX-License-Identifier: Apache-2.0 */
/* Products of two tensors. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include "ref.h"

void ref_product(struct device *d, struct tensor out, struct tensor x, struct tensor y,
		 const struct grouped *g)
{
	if (!ref_good(d))
		return;
	for (int64_t t = 0; t < out.rows; t++)
		for (int64_t at = 0; at < g->groups * g->n; at++) {
			int64_t group = at / g->n, i = at % g->n, y0 = group * g->y_step;
			double sum = 0;

			for (int64_t j = 0; j < g->k; j++)
				sum += (double)ref_round(ref_get(x, t, group * g->x_step + j),
							 d->compute) *
				       ref_round(g->across ? ref_get(y, j, y0 + i)
							   : ref_get(y, i, y0 + j),
						 d->compute);
			ref_set(out, t, group * g->out_step + i, (float)sum);
		}
}
