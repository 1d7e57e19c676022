/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The least that loading must do: every weight of a model from numbers in memory, as a checkpoint
 * has them, to where the products want them. All threads, nothing read.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif
#include "log.h"
#include "rig.h"

int pack(const struct rig_options *o, struct err *e)
{
	double seconds[PAIRS_MOST];
	struct rig r;
	int rc = 0;

	for (int i = 0; i <= o->repeats && !rc; i++) {
		rc = rig_open(&r, o, e) || rig_fill(&r, e);
		if (!rc && i)
			seconds[i - 1] = r.filling;
		if (!rc && i == o->repeats)
			rig_result(o, "pack", dtype_recipe_name(o->compute),
				   rig_median(seconds, (int)o->repeats), "s", BOUND_NONE, 0,
				   json_pack("{s:I, s:i}", "bytes", (json_int_t)r.weight_bytes,
					     "threads", r.dev.threads));
		rig_release(&r);
	}
	return rc ? -1 : 0;
}
