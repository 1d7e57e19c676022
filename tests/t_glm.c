/* SPDX-License-Identifier: Apache-2.0 */
/*
 * GLM's config.json: what is refused, and in which words; which layers choose keys of their own and
 * which have experts, told from the tensors that the weight walk asks for. Attention of published
 * widths on a device that computes nothing: which verbs see which queries, and how memory grows.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif
#include <stdlib.h>
#include <string.h>

#include "backend.h"
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

/* ---- attention of published widths ----------------------------------------------------------- */

#define TOPK 2048

static const char published[] =
	"{\"num_attention_heads\": 64, \"hidden_size\": 6144, \"q_lora_rank\": 2048,"
	" \"kv_lora_rank\": 512, \"qk_nope_head_dim\": 192, \"qk_rope_head_dim\": 64,"
	" \"v_head_dim\": 256, \"index_n_heads\": 32, \"index_head_dim\": 128,"
	" \"index_topk\": 2048,"
	" \"intermediate_size\": 12288, \"moe_intermediate_size\": 2048,"
	" \"indexer_types\": [\"full\", \"shared\", \"full\", \"shared\", \"shared\", \"shared\","
	" \"full\"]}";

/* What verbs were given since it was cleared. */
static struct {
	int64_t dense, longest;        /* queries of attention, longest row among them */
	int64_t chosen, most, shortest; /* queries of attention_at, most keys, shortest row */
	int64_t scored;                /* queries of choose */
	bool astray;                   /* a query whose keys are those of no row of the chunk */
} seen;

static void seen_attention(struct device *d, struct tensor out, struct tensor q, struct tensor k,
			   struct tensor v, const struct attention *a, const struct piece *p, int n)
{
	(void)d, (void)out, (void)v, (void)a;
	for (int i = 0; i < n; i++) {
		seen.dense += p[i].count;
		seen.longest = p[i].length > seen.longest ? p[i].length : seen.longest;
		seen.astray |= p[i].begin + p[i].count > q.rows ||
			       p[i].kv_begin + p[i].kv_count > k.rows || p[i].kv_count > TOPK;
	}
}

static void seen_choose(struct device *d, struct tensor keys, struct tensor q, struct tensor k,
			struct tensor w, const struct piece *p, int n)
{
	(void)d, (void)w;
	for (int i = 0; i < n; i++) {
		seen.scored += p[i].count;
		seen.astray |= keys.cols != TOPK || p[i].begin + p[i].count > q.rows ||
			       p[i].kv_begin + p[i].kv_count > k.rows;
	}
}

static void seen_attention_at(struct device *d, struct tensor out, struct tensor q, struct tensor k,
			      struct tensor v, struct tensor keys, const struct attention *a,
			      const struct piece *p, int n)
{
	(void)d, (void)out, (void)v, (void)a;
	seen.most = keys.cols > seen.most ? keys.cols : seen.most;
	for (int i = 0; i < n; i++) {
		seen.chosen += p[i].count;
		if (!seen.shortest || p[i].length < seen.shortest)
			seen.shortest = p[i].length;
		seen.astray |= p[i].begin + p[i].count > q.rows || keys.rows != q.rows ||
			       p[i].kv_begin + p[i].kv_count > k.rows;
	}
}

/* Runs `layer` over these rows; the scratch that it asked for. */
static uint64_t run_layer(struct target *t, int layer, const int64_t *length, int rows)
{
	struct backend be = backend_measure;
	struct device d = { .be = &be, .compute = DT_BF16 };
	struct piece piece[8];
	struct chunk c = { .dev = &d, .npieces = rows, .piece = piece };
	struct routing r;

	be.attention = seen_attention;
	be.choose = seen_choose;
	be.attention_at = seen_attention_at;
	memset(&seen, 0, sizeof seen);
	for (int i = 0; i < rows; i++) {
		piece[i] = (struct piece){ c.tokens, length[i], 0, length[i], c.tokens, length[i] };
		c.tokens += length[i];
	}
	c.keys = c.tokens;
	c.ids = c.pos = (struct tensor){ NULL, DT_I32, c.tokens, 1, 1 };
	for (int i = 0; i < t->ncarry; i++)
		c.carry[i] = carry_view(&t->carry[i], NULL, 0, c.tokens, d.compute);
	if (t->model->routed(t, layer, &r))
		routed_room(&c, &r);
	t->model->layer(t, layer, &c);
	return c.scratch.peak;
}

/* Queries of rows up to index_topk see all keys, those of longer rows chosen ones. */
static void test_queries(struct target *t)
{
	static const int64_t mixed[] = { 1000, 5000, 2048, 2049, 7, 1 };

	for (int layer = 0; layer < 4; layer++) {
		run_layer(t, layer, mixed, COUNT(mixed));
		is_int(seen.dense, 1000 + 2048 + 7 + 1, "layer %d: queries over all keys", layer);
		is_int(seen.longest, 2048, "layer %d: the longest row of these", layer);
		is_int(seen.chosen, 5000 + 2049, "layer %d: queries over chosen keys", layer);
		is_int(seen.shortest, 2049, "layer %d: the shortest row of these", layer);
		is_int(seen.most, TOPK, "layer %d: keys of a query", layer);
		is_int(seen.scored, layer == 0 || layer == 2 ? 5000 + 2049 : 0,
		       "layer %d: queries that choose", layer);
		ok(!seen.astray, "layer %d: nobody leaves its row", layer);
	}
	run_layer(t, 0, mixed + 2, 1);
	is_int(seen.scored + seen.chosen, 0, "a chunk of a short row chooses nothing");
}

/* [T,T] of one byte a pair would be 2 GB at 128k tokens of the last doubling alone. */
static void test_memory(struct target *t)
{
	for (int layer = 0; layer < 4; layer++) {
		uint64_t bytes[8];

		for (int i = 0; i < 8; i++)
			bytes[i] = run_layer(t, layer, (const int64_t[]){ 1024 << i }, 1);
		for (int i = 3; i + 1 < 8; i++)
			is_int((int64_t)(bytes[i + 1] - bytes[i]),
			       (int64_t)(bytes[i] - bytes[i - 1]) * 2,
			       "layer %d: %dk tokens cost each what they cost of %dk", layer,
			       1 << (i + 1), 1 << i);
		ok(bytes[7] / (128 << 10) < 64 << 10, "layer %d: %d bytes a token of 128k", layer,
		   (int)(bytes[7] / (128 << 10)));
	}
}

static void test_published(void)
{
	struct target_options o = { 0 };
	json_t *c = config_with(published);
	struct err e = ERR_INIT;
	struct target t;

	if (ok(!target_open(&t, "dir", c, &o, &e), "published widths are accepted")) {
		test_queries(&t);
		test_memory(&t);
		target_release(&t);
	}
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
		{ "{\"index_topk_pattern\": \"SFFFFFF\"}", "layer 0" },
		{ "{\"index_topk_pattern\": [\"shared\", \"full\", \"full\", \"full\", \"full\", "
		  "\"full\", \"full\"]}",
		  "layer 0" },
		{ "{\"index_topk_freq\": 4, \"index_skip_topk_offset\": 0}", "layer 0" },
		{ "{\"indexer_types\": [\"full\", 7, \"full\", \"full\", \"full\", \"full\", "
		  "\"full\"]}",
		  "indexer_types[1]" },
		{ "{\"mlp_layer_types\": [\"dense\"]}", "1 entries for 7 layers" },
		{ "{\"indexer_rope_interleave\": \"true\"}", "indexer_rope_interleave" },
		{ "{\"rope_parameters\": {\"rope_theta\": 10000, \"type\": \"linear\", "
		  "\"factor\": 2}}",
		  "rope type 'linear'" },
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
		{ "{\"quantization_config\": {\"quant_method\": \"fp8\", \"fmt\": \"e5m2\"}}",
		  "'e5m2'" },
		{ "{\"quantization_config\": [\"fp8\"]}", "quantization_config is not an object" },
		{ "{\"quantization_config\": {\"quant_method\": \"fp8\", \"weight_block_size\": "
		  "[64, 128]}}",
		  "weight_block_size" },
	};

	log_level(-1);
	for (int i = 0; i < COUNT(bad); i++)
		refused(bad[i].change, 0, bad[i].words);
	refused("{}", 8, "target_num_hidden_layers is 8");

	test_published();
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
