/* SPDX-License-Identifier: Apache-2.0 */
/* The verbs as compiled for one vector unit. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include "cpu.h"

const struct backend cpu_verbs = {
	.name = "cpu",
	.host_memory = true,
	.open = cpu_open,
	.close = cpu_close,
	.sync = ref_sync,
	.alloc = ref_alloc,
	.free = ref_free,
	.upload = cpu_upload,
	.store = cpu_store,
	.weight_alloc = cpu_weight_alloc,
	.weight_fill = cpu_weight_fill,
	.weight_ready = cpu_weight_ready,
	.weight_free = cpu_weight_free,
	.rows = cpu_rows,
	.matmul = cpu_matmul,
	.matmul_gate = cpu_matmul_gate,
	.norm = cpu_norm,
	.layer_norm = cpu_layer_norm,
	.rope = cpu_rope,
	.attention = cpu_attention,
	.choose = cpu_choose,
	.attention_at = cpu_attention_at,
	.product = cpu_product,
	.copy = cpu_copy,
	.gate = cpu_gate,
	.add = cpu_add,
	.route = cpu_route,
	.experts = cpu_experts,
	.pick = cpu_pick,
	.combine = cpu_combine,
};
