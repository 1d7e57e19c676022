/* SPDX-License-Identifier: Apache-2.0 */
/* The ref backend's table, and device memory, which is host memory here. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdlib.h>

#include "mem.h"
#include "ref.h"

static int ref_open(struct device *d, const struct device_options *o, struct err *e)
{
	(void)e;
	*d = (struct device){ .be = &backend_ref, .compute = o->compute, .threads = 1 };
	return 0;
}

static void ref_close(struct device *d)
{
	*d = (struct device){ 0 };
}

int ref_sync(struct device *d, struct err *e)
{
	if (!d->err.code)
		return 0;
	if (!e->code)
		*e = d->err;
	return -1;
}

void *ref_alloc(struct device *d, size_t bytes, struct err *e)
{
	(void)d;
	return mem_aligned(bytes, e);
}

void ref_free(struct device *d, void *p)
{
	(void)d;
	free(p);
}

const struct backend backend_ref = {
	.name = "ref",
	.host_memory = true,
	.open = ref_open,
	.close = ref_close,
	.sync = ref_sync,
	.alloc = ref_alloc,
	.free = ref_free,
	.upload = ref_upload,
	.store = ref_store,
	.weight_alloc = ref_weight_alloc,
	.weight_fill = ref_weight_fill,
	.weight_ready = ref_weight_ready,
	.weight_free = ref_weight_free,
	.rows = ref_rows,
	.matmul = ref_matmul,
	.matmul_gate = ref_matmul_gate,
	.norm = ref_norm,
	.layer_norm = ref_layer_norm,
	.rope = ref_rope,
	.attention = ref_attention,
	.choose = ref_choose,
	.attention_at = ref_attention_at,
	.product = ref_product,
	.copy = ref_copy,
	.gate = ref_gate,
	.add = ref_add,
	.route = ref_route,
	.experts = ref_experts,
	.pick = ref_pick,
	.combine = ref_combine,
};
