/* SPDX-License-Identifier: Apache-2.0 */
/*
 * GLM's config.json: what is refused, and in which words; which layers choose keys of their own and
 * which have experts, told from the tensors that the weight walk asks for.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif
#include <stdlib.h>
#include <string.h>

#include "err.h"
#include "json.h"
#include "log.h"
#include "model.h"
#include "tap.h"

#define COUNT(a) ((int)(sizeof(a) / sizeof *(a)))

static const char base[] =
	"{\"model_type\": \"glm_moe_dsa\", \"vocab_size\": 32, \"hidden_size\": 16,"
	" \"num_hidden_layers\": 7, \"num_attention_heads\": 2, \"q_lora_rank\": 8,"
	" \"kv_lora_rank\": 8, \"qk_nope_head_dim\": 4, \"qk_rope_head_dim\": 4,"
	" \"v_head_dim\": 6, \"head_dim\": 192, \"index_n_heads\": 2, \"index_head_dim\": 6,"
	" \"index_topk\": 3, \"intermediate_size\": 12, \"moe_intermediate_size\": 4,"
	" \"n_routed_experts\": 8, \"num_experts_per_tok\": 2, \"n_shared_experts\": 1,"
	" \"rope_parameters\": {\"rope_theta\": 10000, \"rope_type\": \"default\"}}";

/* The base with members of `change` in place of its own. */
static json_t *config_with(const char *change)
{
	struct err e = ERR_INIT;
	json_t *c = json_parse(base, strlen(base), "base", &e),
	       *with = json_parse(change, strlen(change), "change", &e);

	if (!c || !with) {
		printf("Bail out! %s\n", e.text);
		exit(1);
	}
	json_object_update(c, with);
	json_decref(with);
	return c;
}

static void refused(const char *change, int64_t layers, const char *words)
{
	struct target_options o = { .num_hidden_layers = layers };
	json_t *c = config_with(change);
	struct err e = ERR_INIT;
	struct target t;
	bool opened = !target_open(&t, "dir", c, &o, &e);

	if (!ok(!opened && strstr(e.text, words), "%s is refused", change))
		printf("# opened %d: %s\n", opened, e.text);
	if (opened)
		target_release(&t);
	json_decref(c);
}

/* Per layer F or S, whether its indexer's tensors are asked for, and d or m, its experts'. */
struct walker {
	struct weight_walk walk; /* first */
	char full[16], moe[16];
};

static int visit(struct weight_walk *w, const struct weight_spec *s, struct err *e)
{
	struct walker *x = (struct walker *)w;

	(void)e;
	if (s->layer < 0)
		return 0;
	if (strstr(s->part[0].name, "indexer.wk"))
		x->full[s->layer] = 'F';
	if (strstr(s->part[0].name, "mlp.gate.weight"))
		x->moe[s->layer] = 'm';
	return 0;
}

static void scheduled(const char *change, int64_t layers, const char *full, const char *moe)
{
	struct target_options o = { .num_hidden_layers = layers };
	struct walker w = { .walk = { visit } };
	json_t *c = config_with(change);
	struct err e = ERR_INIT;
	struct target t;

	if (!ok(!target_open(&t, "dir", c, &o, &e), "%s is accepted", change)) {
		printf("# %s\n", e.text);
		json_decref(c);
		return;
	}
	memset(w.full, 'S', (size_t)t.layers);
	memset(w.moe, 'd', (size_t)t.layers);
	is_int(t.model->weights(&t, &w.walk, &e), 0, "%s: walk", change);
	is_str(w.full, full, "%s: indexers", change);
	is_str(w.moe, moe, "%s: experts", change);
	target_release(&t);
	json_decref(c);
}

int main(void)
{
	static const struct { const char *change, *words;
	} bad[] = {
		{ "{\"rope_parameters\": {\"rope_theta\": 10000, \"rope_type\": \"yarn\"}}",
		  "rope type 'yarn'" },
		{ "{\"rope_parameters\": null}", "rope_theta" },
		{ "{\"tie_word_embeddings\": true}", "tie_word_embeddings" },
		{ "{\"indexer_types\": [\"shared\", \"full\", \"full\", \"full\", \"full\", "
		  "\"full\", \"full\"]}",
		  "layer 0" },
		{ "{\"indexer_types\": [\"full\", \"half\", \"full\", \"full\", \"full\", "
		  "\"full\", \"full\"]}",
		  "indexer_types[1]" },
		{ "{\"indexer_types\": [\"full\"]}", "1 entries for 7 layers" },
		{ "{\"indexer_types\": \"FFFFFFF\"}", "indexer_types is not a list" },
		{ "{\"index_topk_pattern\": \"FSSSX\"}", "5 entries for 7 layers" },
		{ "{\"index_topk_pattern\": \"FSSSXSS\"}", "index_topk_pattern[4]" },
		{ "{\"mlp_layer_types\": [\"dense\", \"thin\", \"sparse\", \"sparse\", \"sparse\", "
		  "\"sparse\", \"sparse\"]}",
		  "mlp_layer_types[1]" },
		{ "{\"indexer_rope_interleave\": 1}", "indexer_rope_interleave" },
		{ "{\"qk_head_dim\": 192}", "qk_head_dim is 192" },
		{ "{\"qk_rope_head_dim\": 5}", "even width" },
		{ "{\"index_head_dim\": 2}", "index_head_dim (2)" },
		{ "{\"n_group\": 3}", "multiple of n_group" },
		{ "{\"n_group\": 8}", "fewer than two experts" },
		{ "{\"n_group\": 2, \"topk_group\": 3}", "topk_group (3)" },
		{ "{\"num_experts_per_tok\": 9}", "larger than n_routed_experts" },
		{ "{\"hidden_act\": \"gelu\"}", "hidden_act 'gelu'" },
		{ "{\"scoring_func\": \"softmax\"}", "scoring_func 'softmax'" },
		{ "{\"topk_method\": \"greedy\"}", "topk_method 'greedy'" },
		{ "{\"moe_layer_freq\": 2}", "moe_layer_freq is 2" },
		{ "{\"attention_bias\": true}", "attention_bias" },
		{ "{\"kv_lora_rank\": 0}", "'kv_lora_rank' is 0" },
		{ "{\"index_topk\": null}", "index_topk" },
		{ "{\"quantization_config\": {\"quant_method\": \"gptq\"}}", "'gptq'" },
		{ "{\"quantization_config\": {\"quant_method\": \"fp8\", \"weight_block_size\": "
		  "[64, 128]}}",
		  "weight_block_size" },
	};

	log_level(-1);
	for (int i = 0; i < COUNT(bad); i++)
		refused(bad[i].change, 0, bad[i].words);
	refused("{}", 8, "target_num_hidden_layers is 8");

	scheduled("{}", 0, "FFFFFFF", "dddmmmm");
	scheduled("{\"index_topk_freq\": 4, \"index_skip_topk_offset\": 3}", 0, "FFFSSSF",
		  "dddmmmm");
	scheduled("{\"index_topk_freq\": 2, \"first_k_dense_replace\": 1}", 0, "FFSFSFS",
		  "dmmmmmm");
	scheduled("{\"index_topk_pattern\": \"FSSFSSSSS\", \"index_topk_freq\": 1}", 0, "FSSFSSS",
		  "dddmmmm");
	scheduled("{\"indexer_types\": [\"full\", \"shared\", \"full\", \"shared\", \"shared\", "
		  "\"shared\", \"full\"], \"index_topk_pattern\": \"FFFFFFF\", "
		  "\"mlp_layer_types\": [\"sparse\", \"dense\", \"sparse\", \"dense\", "
		  "\"dense\", \"dense\", \"sparse\"]}",
		  0, "FSFSSSF", "mdmdddm");
	scheduled("{\"rope_parameters\": null, \"rope_theta\": 500, \"n_shared_experts\": 0}", 4,
		  "FFFF", "dddm");
	return tap_end();
}
