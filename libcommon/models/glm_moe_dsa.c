/* SPDX-License-Identifier: Apache-2.0 */
/*
 * GLM-5, 5.1 and 5.2: multi-head latent attention over keys that an indexer chooses, layers that
 * share another's choice, dense layers first, then sigmoid-routed experts in groups beside a shared
 * one. Reference: nemo_automodel components/models/glm_moe_dsa/{model,layers,config}.py,
 * components/models/deepseek_v3/rope_utils.py and components/moe/layers.py.
 *
 * Rows of up to index_topk tokens choose nothing: every query sees all keys, and the indexer does
 * not run.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "block.h"
#include "err.h"
#include "json.h"
#include "mem.h"

#define CONFIG "config.json"
#define MOST_LAYERS 65536
#define MOST_WIDTH  65536		/* of a head */
#define MOST_LATENT 8192		/* its square is made */
#define MOST_COUNT  (1 << 20)		/* heads, experts, chosen keys */
#define LATENT_EPS  1e-6f		/* of norms inside attention, whatever rms_norm_eps is */
#define RESIDUAL 0			/* carry: the residual stream, F32 [T,H] */
#define CHOICE 1			/* carry: the keys of the last full layer, i32 [T,topk] */

struct layer {
	bool full, moe;
	struct weight attn_norm, mlp_norm;	/* [H] */
	struct weight q_a, q_a_norm, q_b;	/* [Q, H], [Q], [heads (nope + rope), Q] */
	struct weight kv_a, kv_a_norm, kv_b;	/* [C + rope, H], [C], [heads (nope + value), C] */
	struct weight o;			/* [H, heads value] */
	struct weight iq_b, ik;			/* [ih id, Q], [id, H]; full layers */
	struct weight ik_norm, ik_bias;		/* [id] */
	struct weight iw;			/* [ih, H] */
	struct weight gate_up, down;		/* [2I, H], [H, I]; with moe of the shared expert */
	struct weight router, bias;		/* [E, H], [E] F32 */
	struct weight experts_gate_up, experts_down;	/* [E, 2mi, H], [E, H, mi] */
};

struct glm {
	int64_t H, V, L;			/* hidden, vocabulary, layers that run */
	int64_t heads, Q, C;			/* attention heads, q_lora, kv_lora */
	int64_t nope, rotated, value;		/* of a head */
	int64_t ih, id, topk;			/* index heads, their width, keys a query sees */
	int64_t I, mi, E, K, shared;		/* widths of dense and expert; experts */
	int64_t groups, groups_kept;
	double eps, routed_scale;
	bool renormalise, halves, packed;
	float *freq;				/* [rope/2] */
	float *identity;			/* [C, C] */
	struct rope rope, k_rope, index_rope;	/* of q heads, of the shared key, of the indexer */
	struct weight embed, freqs, norm, head;
	struct layer *layer;			/* [L] */
};

/* ---- config.json ----------------------------------------------------------------------------- */

static int bounded(const json_t *c, const char *key, int64_t least, int64_t most, int64_t *out,
		   struct err *e)
{
	if (json_int(c, CONFIG, key, out, e))
		return -1;
	if (*out < least || *out > most)
		return err_refuse(e, CONFIG ": '%s' is %lld, not a number from %lld to %lld", key,
				  (long long)*out, (long long)least, (long long)most);
	return 0;
}

static int bounded_or(const json_t *c, const char *key, int64_t least, int64_t most, int64_t def,
		      int64_t *out, struct err *e)
{
	*out = def;
	return json_has(c, key) ? bounded(c, key, least, most, out, e) : 0;
}

/* A key that this family has in one form only. */
static int only_text(const json_t *c, const char *key, const char *want, struct err *e)
{
	const char *have;

	if (json_str_or(c, CONFIG, key, want, &have, e))
		return -1;
	if (strcmp(have, want))
		return err_refuse(e, CONFIG ": %s '%s' is not supported (%s is)", key, have, want);
	return 0;
}

static int only_false(const json_t *c, const char *key, const char *why, struct err *e)
{
	bool have;

	if (json_bool_or(c, CONFIG, key, false, &have, e))
		return -1;
	return have ? err_refuse(e, CONFIG ": %s is true: %s", key, why) : 0;
}

static int refuse_unsupported(const json_t *c, struct err *e)
{
	int64_t freq;

	if (only_text(c, "hidden_act", "silu", e) || only_text(c, "scoring_func", "sigmoid", e) ||
	    only_text(c, "topk_method", "noaux_tc", e) ||
	    only_false(c, "attention_bias", "the reference builds no biases", e) ||
	    only_false(c, "tie_word_embeddings", "the reference refuses tied embeddings", e) ||
	    json_int_or(c, CONFIG, "moe_layer_freq", 1, &freq, e))
		return -1;
	if (freq != 1)
		return err_refuse(e, CONFIG ": moe_layer_freq is %lld, only 1 is supported",
				  (long long)freq);
	return 0;
}

/* head_dim is no size of this family: files have it with another meaning each. */
static int read_attention(struct glm *g, const json_t *c, struct err *e)
{
	int64_t whole;

	if (bounded(c, "num_attention_heads", 1, MOST_COUNT, &g->heads, e) ||
	    bounded(c, "q_lora_rank", 1, INT32_MAX, &g->Q, e) ||
	    bounded(c, "kv_lora_rank", 1, MOST_LATENT, &g->C, e) ||
	    bounded(c, "qk_nope_head_dim", 1, MOST_WIDTH, &g->nope, e) ||
	    bounded(c, "qk_rope_head_dim", 2, MOST_WIDTH, &g->rotated, e) ||
	    bounded(c, "v_head_dim", 1, MOST_WIDTH, &g->value, e) ||
	    json_int_or(c, CONFIG, "qk_head_dim", g->nope + g->rotated, &whole, e))
		return -1;
	if (whole != g->nope + g->rotated)
		return err_refuse(e, CONFIG ": qk_head_dim is %lld, but qk_nope_head_dim and "
					    "qk_rope_head_dim add up to %lld",
				  (long long)whole, (long long)(g->nope + g->rotated));
	if (g->rotated % 2)
		return err_refuse(e, CONFIG ": qk_rope_head_dim is %lld, but rotary embedding "
					    "needs an even width",
				  (long long)g->rotated);
	return 0;
}

static int read_indexer(struct glm *g, const json_t *c, struct err *e)
{
	bool pairs;

	if (bounded(c, "index_n_heads", 1, MOST_COUNT, &g->ih, e) ||
	    bounded(c, "index_head_dim", 1, MOST_WIDTH, &g->id, e) ||
	    bounded(c, "index_topk", 1, MOST_COUNT, &g->topk, e) ||
	    json_bool_or(c, CONFIG, "indexer_rope_interleave", false, &pairs, e))
		return -1;
	g->halves = !pairs;
	if (g->id < g->rotated)
		return err_refuse(e, CONFIG ": index_head_dim (%lld) is smaller than "
					    "qk_rope_head_dim (%lld)",
				  (long long)g->id, (long long)g->rotated);
	return 0;
}

static int read_sizes(struct glm *g, const json_t *c, int64_t layers, struct err *e)
{
	if (bounded(c, "hidden_size", 1, INT32_MAX, &g->H, e) ||
	    bounded(c, "vocab_size", 1, INT32_MAX, &g->V, e) ||
	    bounded(c, "num_hidden_layers", 1, MOST_LAYERS, &g->L, e) ||
	    bounded(c, "intermediate_size", 1, INT32_MAX, &g->I, e) ||
	    json_real_or(c, CONFIG, "rms_norm_eps", 1e-5, &g->eps, e))
		return -1;
	if (!(g->eps >= 0) || g->eps > 1)
		return err_refuse(e, CONFIG ": rms_norm_eps is %g, not a number from 0 to 1",
				  g->eps);
	if (layers > g->L)
		return err_refuse(e, "recipe_args.target_num_hidden_layers is %lld, but the target "
				     "has %lld layers",
				  (long long)layers, (long long)g->L);
	if (layers)
		g->L = layers;
	return 0;
}

static int read_experts(struct glm *g, const json_t *c, struct err *e)
{
	if (bounded(c, "n_routed_experts", 1, MOST_COUNT, &g->E, e) ||
	    bounded(c, "num_experts_per_tok", 1, MOST_COUNT, &g->K, e) ||
	    bounded(c, "moe_intermediate_size", 1, INT32_MAX, &g->mi, e) ||
	    bounded_or(c, "n_shared_experts", 0, INT16_MAX, 1, &g->shared, e) ||
	    bounded_or(c, "n_group", 1, MOST_COUNT, 1, &g->groups, e) ||
	    bounded_or(c, "topk_group", 1, MOST_COUNT, 1, &g->groups_kept, e) ||
	    json_bool_or(c, CONFIG, "norm_topk_prob", true, &g->renormalise, e) ||
	    json_real_or(c, CONFIG, "routed_scaling_factor", 2.5, &g->routed_scale, e))
		return -1;
	if (g->K > g->E)
		return err_refuse(e, CONFIG ": num_experts_per_tok (%lld) is larger than "
					    "n_routed_experts (%lld)",
				  (long long)g->K, (long long)g->E);
	if (g->E % g->groups)
		return err_refuse(e, CONFIG ": n_routed_experts (%lld) is not a multiple of "
					    "n_group (%lld)",
				  (long long)g->E, (long long)g->groups);
	if (g->groups > 1 && g->E / g->groups < 2)
		return err_refuse(e, CONFIG ": n_group (%lld) leaves fewer than two experts in a "
					    "group",
				  (long long)g->groups);
	if (g->groups_kept > g->groups)
		return err_refuse(e, CONFIG ": topk_group (%lld) is larger than n_group (%lld)",
				  (long long)g->groups_kept, (long long)g->groups);
	g->renormalise = g->renormalise && g->K > 1;
	return 0;
}

/* One word of a schedule a layer: `yes` or `no`, whole or, in a string, its first letter. */
static int mark(struct glm *g, const json_t *list, const char *key, const char *yes, const char *no,
		size_t offset, struct err *e)
{
	const char *letters = json_string_value(list);
	size_t n = letters ? strlen(letters) : json_array_size(list);

	if (!letters && !json_is_array(list))
		return err_refuse(e, CONFIG ": %s is not a list of '%s' and '%s'", key, yes, no);
	if (n < (size_t)g->L)
		return err_refuse(e, CONFIG ": %s has %zu entries for %lld layers", key, n,
				  (long long)g->L);
	for (int64_t i = 0; i < g->L; i++) {
		const char *word = json_string_value(json_array_get(list, (size_t)i));
		bool *to = (bool *)((char *)&g->layer[i] + offset);

		if (letters ? letters[i] == yes[0] - 'a' + 'A' : word && !strcmp(word, yes))
			*to = true;
		else if (letters ? letters[i] != no[0] - 'a' + 'A' : !word || strcmp(word, no))
			return err_refuse(e, CONFIG ": %s[%lld] is neither '%s' nor '%s'", key,
					  (long long)i, yes, no);
	}
	return 0;
}

static int mark_listed(struct glm *g, const json_t *c, const char *key, const char *yes,
		       const char *no, size_t offset, struct err *e)
{
	const json_t *list = json_object_get(c, key);

	if (!json_is_array(list))
		return err_refuse(e, CONFIG ": %s is not a list", key);
	return mark(g, list, key, yes, no, offset, e);
}

/* Which layers have an indexer of their own; the others use what the last of these chose. */
static int mark_full(struct glm *g, const json_t *c, struct err *e)
{
	size_t offset = offsetof(struct layer, full);
	int64_t freq, from;

	if (bounded_or(c, "index_topk_freq", 1, INT32_MAX, 1, &freq, e) ||
	    bounded_or(c, "index_skip_topk_offset", 0, INT32_MAX, 2, &from, e))
		return -1;
	if (json_has(c, "indexer_types")) {
		if (mark_listed(g, c, "indexer_types", "full", "shared", offset, e))
			return -1;
	} else if (json_has(c, "index_topk_pattern")) {
		if (mark(g, json_object_get(c, "index_topk_pattern"), "index_topk_pattern", "full",
			 "shared", offset, e))
			return -1;
	} else {
		for (int64_t i = 0; i < g->L; i++)
			g->layer[i].full = (i + 1 > from ? i + 1 - from : 0) % freq == 0;
	}
	if (!g->layer[0].full)
		return err_refuse(e, CONFIG ": layer 0 shares the keys of an earlier layer, and "
					    "there is none");
	return 0;
}

static int mark_moe(struct glm *g, const json_t *c, struct err *e)
{
	int64_t first;

	if (json_has(c, "mlp_layer_types"))
		return mark_listed(g, c, "mlp_layer_types", "sparse", "dense",
				   offsetof(struct layer, moe), e);
	if (bounded_or(c, "first_k_dense_replace", 0, INT32_MAX, 3, &first, e))
		return -1;
	for (int64_t i = 0; i < g->L; i++)
		g->layer[i].moe = i >= first;
	return 0;
}

static int read_rope(struct glm *g, const json_t *c, struct err *e)
{
	const json_t *p = json_has(c, "rope_parameters") ? json_object_get(c, "rope_parameters")
							 : json_object_get(c, "rope_scaling");
	const char *type = "default";
	double theta;

	if (p && !json_is_null(p) && !json_is_object(p))
		return err_refuse(e, CONFIG ": rope_parameters is not an object");
	p = json_is_object(p) ? p : NULL;
	if (json_real_or(c, CONFIG, "rope_theta", 0, &theta, e) ||
	    (p && (json_real_or(p, CONFIG, "rope_theta", theta, &theta, e) ||
		   json_str_or(p, CONFIG, json_has(p, "rope_type") ? "rope_type" : "type",
			       "default", &type, e))))
		return -1;
	if (strcmp(type, "default"))
		return err_refuse(e, CONFIG ": rope type '%s' is not supported for GLM (default "
					    "is)",
				  type);
	if (!(theta > 1))
		return err_refuse(e, CONFIG ": rope_theta is missing or does not exceed 1");
	g->freq = mem_calloc((size_t)g->rotated / 2, sizeof *g->freq, e);
	if (!g->freq)
		return -1;
	g->k_rope = (struct rope){ .width = (int)g->rotated, .layout = ROPE_PAIR,
				   .freq = &g->freqs };
	if (rope_frequencies(g->freq, (int)g->rotated, theta, NULL, 0, 0, &g->k_rope.scale, e))
		return -1;
	g->rope = g->k_rope;
	g->rope.offset = (int)g->nope;
	g->index_rope = g->k_rope;
	g->index_rope.layout = g->halves ? ROPE_HALF : ROPE_PAIR;
	return 0;
}

/* What weight_resolve cannot see: it holds shapes and dtypes against the layout that is meant. */
static int read_quantisation(struct glm *g, const json_t *c, struct err *e)
{
	const json_t *q = json_object_get(c, "quantization_config"), *block;
	const char *method, *format;

	if (!json_has(c, "quantization_config"))
		return 0;
	if (!json_is_object(q))
		return err_refuse(e, CONFIG ": quantization_config is not an object");
	block = json_object_get(q, "weight_block_size");
	if (json_str_or(q, CONFIG, "quant_method", "?", &method, e) ||
	    json_str_or(q, CONFIG, "fmt", "e4m3", &format, e))
		return -1;
	if (strcmp(method, "fp8") || strcmp(format, "e4m3"))
		return err_refuse(e, CONFIG ": packed weights of quant_method '%s', fmt '%s' are "
					    "not supported for GLM (fp8, e4m3 are)",
				  method, format);
	if (json_array_size(block) != 2 || json_integer_value(json_array_get(block, 0)) != 128 ||
	    json_integer_value(json_array_get(block, 1)) != 128)
		return err_refuse(e, CONFIG ": weight_block_size is not [128, 128]");
	g->packed = true;
	return 0;
}

static int make_identity(struct glm *g, struct err *e)
{
	g->identity = mem_calloc((size_t)(g->C * g->C), sizeof *g->identity, e);
	for (int64_t i = 0; g->identity && i < g->C; i++)
		g->identity[i * g->C + i] = 1;
	return g->identity ? 0 : -1;
}

static void glm_release(struct target *t)
{
	struct glm *g = t->state;

	if (!g)
		return;
	free(g->freq);
	free(g->identity);
	free(g->layer);
	free(g);
	t->state = NULL;
}

static int glm_config(struct target *t, const json_t *c, const struct target_options *o,
		      struct err *e)
{
	struct glm *g = t->state = mem_calloc(1, sizeof *g, e);

	if (!g || refuse_unsupported(c, e) || read_sizes(g, c, o->num_hidden_layers, e) ||
	    read_attention(g, c, e) || read_indexer(g, c, e) || read_experts(g, c, e))
		return -1;
	g->layer = mem_calloc((size_t)g->L, sizeof *g->layer, e);
	if (!g->layer || mark_full(g, c, e) || mark_moe(g, c, e) || read_rope(g, c, e) ||
	    read_quantisation(g, c, e) || make_identity(g, e))
		return -1;
	t->vocab = g->V;
	t->hidden = g->H;
	t->layers = g->L;
	t->experts = g->E;
	t->sharded = true;
	t->ncarry = 2;
	t->carry[RESIDUAL] =
		(struct carry_spec){ "residual", DT_F32, g->H, 1, false, -1, (int)g->L };
	t->carry[CHOICE] =
		(struct carry_spec){ "chosen keys", DT_I32, g->topk, 1, false, 0, (int)g->L - 1 };
	return 0;
}

/* ---- weights --------------------------------------------------------------------------------- */

#define LAYER "model.layers.%d."

static const struct quant fp8 = { .code = CODE_F8_E4M3,
				  .block_rows = 128,
				  .block_cols = 128,
				  .scale = DT_F32,
				  .scale_suffix = ".weight_scale_inv" };
static const struct quant *const packings[] = { &fp8, NULL };

/* A matrix that the FP8 checkpoints pack. */
static struct weight_spec packable(const struct glm *g, struct weight_spec s)
{
	s.quants = g->packed ? packings : NULL;
	return s;
}

static int visit(struct weight_walk *w, struct weight_spec s, struct err *e)
{
	return w->visit(w, &s, e);
}

static int attention_weights(struct glm *g, int i, struct weight_walk *w, struct err *e)
{
	struct layer *l = &g->layer[i];
	int64_t head = g->nope + g->rotated, both = g->nope + g->value;

#define VECTOR(field, n, name) \
	visit(w, weight_vector(field, UNIT_LAYER, i, n, LAYER "self_attn." name, i), e)
#define MATRIX(field, rows, cols, name)                                                         \
	visit(w,                                                                                \
	      packable(g, weight_matrix(field, UNIT_LAYER, i, rows, cols,                       \
					LAYER "self_attn." name ".weight", i)),                 \
	      e)
	if (MATRIX(&l->q_a, g->Q, g->H, "q_a_proj") ||
	    VECTOR(&l->q_a_norm, g->Q, "q_a_layernorm.weight") ||
	    MATRIX(&l->q_b, g->heads * head, g->Q, "q_b_proj") ||
	    MATRIX(&l->kv_a, g->C + g->rotated, g->H, "kv_a_proj_with_mqa") ||
	    VECTOR(&l->kv_a_norm, g->C, "kv_a_layernorm.weight") ||
	    MATRIX(&l->kv_b, g->heads * both, g->C, "kv_b_proj") ||
	    MATRIX(&l->o, g->H, g->heads * g->value, "o_proj"))
		return -1;
	if (!l->full)
		return 0;
	return MATRIX(&l->iq_b, g->ih * g->id, g->Q, "indexer.wq_b") ||
	       MATRIX(&l->ik, g->id, g->H, "indexer.wk") ||
	       VECTOR(&l->ik_norm, g->id, "indexer.k_norm.weight") ||
	       VECTOR(&l->ik_bias, g->id, "indexer.k_norm.bias") ||
	       visit(w, weight_matrix(&l->iw, UNIT_LAYER, i, g->ih, g->H,
				      LAYER "self_attn.indexer.weights_proj.weight", i), e) ?
		-1 : 0;
#undef VECTOR
#undef MATRIX
}

/* A dense layer's, or the shared expert's. */
static int mlp_weights(struct glm *g, int i, int64_t width, const char *where,
		       struct weight_walk *w, struct err *e)
{
	struct layer *l = &g->layer[i];
	struct weight_spec s =
		packable(g, weight_matrix(&l->gate_up, UNIT_LAYER, i, width, g->H,
					  LAYER "mlp.%sgate_proj.weight", i, where));

	weight_part_add(&s, width, LAYER "mlp.%sup_proj.weight", i, where);
	s.use = USE_GATED;
	if (w->visit(w, &s, e))
		return -1;
	return visit(w,
		     packable(g, weight_matrix(&l->down, UNIT_LAYER, i, g->H, width,
					       LAYER "mlp.%sdown_proj.weight", i, where)),
		     e);
}

static int expert_weights(struct glm *g, int i, struct weight_walk *w, struct err *e)
{
	struct layer *l = &g->layer[i];
	struct weight_spec s =
		packable(g, weight_matrix(&l->experts_gate_up, UNIT_EXPERTS, i, g->mi, g->H,
					  LAYER "mlp.experts.{e}.gate_proj.weight", i));

	weight_part_add(&s, g->mi, LAYER "mlp.experts.{e}.up_proj.weight", i);
	s.use = USE_GATED;
	s.count = g->E;
	s.shard = SHARD_EXPERT;
	if (w->visit(w, &s, e))
		return -1;
	s = packable(g, weight_matrix(&l->experts_down, UNIT_EXPERTS, i, g->H, g->mi,
				      LAYER "mlp.experts.{e}.down_proj.weight", i));
	s.count = g->E;
	s.shard = SHARD_EXPERT;
	return w->visit(w, &s, e);
}

static int router_weights(struct glm *g, int i, struct weight_walk *w, struct err *e)
{
	struct layer *l = &g->layer[i];
	struct weight_spec s =
		weight_matrix(&l->router, UNIT_LAYER, i, g->E, g->H, LAYER "mlp.gate.weight", i);

	s.kind = WEIGHT_FP32;
	if (w->visit(w, &s, e))
		return -1;
	s = weight_vector(&l->bias, UNIT_LAYER, i, g->E, LAYER "mlp.gate.e_score_correction_bias",
			  i);
	s.kind = WEIGHT_FP32;
	return w->visit(w, &s, e);
}

static int layer_weights(struct glm *g, int i, struct weight_walk *w, struct err *e)
{
	struct layer *l = &g->layer[i];

	if (visit(w, weight_vector(&l->attn_norm, UNIT_LAYER, i, g->H,
				   LAYER "input_layernorm.weight", i), e) ||
	    attention_weights(g, i, w, e) ||
	    visit(w, weight_vector(&l->mlp_norm, UNIT_LAYER, i, g->H,
				   LAYER "post_attention_layernorm.weight", i), e))
		return -1;
	if (!l->moe)
		return mlp_weights(g, i, g->I, "", w, e);
	if (router_weights(g, i, w, e) ||
	    (g->shared && mlp_weights(g, i, g->shared * g->mi, "shared_experts.", w, e)))
		return -1;
	return expert_weights(g, i, w, e);
}

/* Layers behind the last, which predict further tokens, are not named: nobody reads them. */
static int glm_weights(struct target *t, struct weight_walk *w, struct err *e)
{
	struct glm *g = t->state;
	struct weight_spec s =
		weight_matrix(&g->embed, UNIT_EMBED, -1, g->V, g->H, "model.embed_tokens.weight");

	s.use = USE_TABLE;
	s.shard = SHARD_TABLE;
	if (w->visit(w, &s, e))
		return -1;
	s = weight_vector(&g->freqs, UNIT_ALWAYS, -1, g->rotated / 2, "rope");
	s.kind = WEIGHT_FP32;
	s.shard = SHARD_WHOLE;
	s.data = g->freq;
	s.data_dtype = DT_F32;
	if (w->visit(w, &s, e))
		return -1;
	for (int i = 0; i < g->L; i++)
		if (layer_weights(g, i, w, e))
			return -1;
	if (visit(w, weight_vector(&g->norm, UNIT_FINAL, -1, g->H, "model.norm.weight"), e))
		return -1;
	return visit(w, weight_matrix(&g->head, UNIT_EXPORT, -1, g->V, g->H, "lm_head.weight"), e);
}

/* ---- forward --------------------------------------------------------------------------------- */

static void glm_embed(struct target *t, struct chunk *c)
{
	struct glm *g = t->state;

	c->dev->be->rows(c->dev, c->carry[RESIDUAL], &g->embed, c->ids);
}

/* What attention starts from: inputs of q_b, and latents with their turned key channels. */
static void latents(struct glm *g, const struct layer *l, struct chunk *c, struct tensor h,
		    struct tensor qr, struct tensor lat)
{
	const struct backend *be = c->dev->be;
	uint64_t mark = scratch_mark(c);
	int64_t most = c->tokens < TOKEN_TILE ? c->tokens : TOKEN_TILE;
	struct tensor q = scratch(c, DT_F32, most, g->Q),
		      kv = scratch(c, DT_F32, most, g->C + g->rotated);

	for (int64_t t = 0; t < c->tokens; t += TOKEN_TILE) {
		int64_t n = c->tokens - t < TOKEN_TILE ? c->tokens - t : TOKEN_TILE;
		struct tensor hn = tensor_rows(h, t, n), qn = tensor_rows(q, 0, n),
			      kvn = tensor_rows(kv, 0, n), to = tensor_rows(lat, t, n),
			      key = tensor_cols(kvn, g->C, g->rotated);

		be->matmul(c->dev, qn, hn, &l->q_a, NULL, false);
		be->norm(c->dev, tensor_rows(qr, t, n), qn, &l->q_a_norm, LATENT_EPS, g->Q);
		be->matmul(c->dev, kvn, hn, &l->kv_a, NULL, false);
		be->norm(c->dev, tensor_cols(to, 0, g->C), tensor_cols(kvn, 0, g->C),
			 &l->kv_a_norm, LATENT_EPS, g->C);
		be->rope(c->dev, key, 1, NULL, 0, &g->k_rope, tensor_rows(c->pos, t, n));
		be->copy(c->dev, tensor_cols(to, g->C, g->rotated), 0, key, 0, g->rotated, 1);
	}
	scratch_release(c, mark);
}

/* The indexer's keys, one a token for all its heads. */
static void index_keys(struct glm *g, const struct layer *l, struct chunk *c, struct tensor h,
		       struct tensor keys)
{
	const struct backend *be = c->dev->be;
	uint64_t mark = scratch_mark(c);
	int64_t most = c->tokens < TOKEN_TILE ? c->tokens : TOKEN_TILE;
	struct tensor k = scratch(c, DT_F32, most, g->id);

	for (int64_t t = 0; t < c->tokens; t += TOKEN_TILE) {
		int64_t n = c->tokens - t < TOKEN_TILE ? c->tokens - t : TOKEN_TILE;
		struct tensor kn = tensor_rows(k, 0, n);

		be->matmul(c->dev, kn, tensor_rows(h, t, n), &l->ik, NULL, false);
		be->layer_norm(c->dev, kn, kn, &l->ik_norm, &l->ik_bias, LATENT_EPS, g->id);
		be->rope(c->dev, kn, 1, NULL, 0, &g->index_rope, tensor_rows(c->pos, t, n));
		be->copy(c->dev, tensor_rows(keys, t, n), 0, kn, 0, g->id, 1);
	}
	scratch_release(c, mark);
}

struct indexer {
	struct glm *g;
	const struct layer *l;
	struct tensor h, qr, keys;	/* [T,H], [T,Q], [keys,id] */
	struct tensor q, w;		/* of TOKEN_TILE queries: [n, ih id], F32 [n, ih] */
};

/* The constant factors of the published scores would not change what is chosen. */
static void choose_rows(void *ctx, struct chunk *c, const struct piece *p)
{
	const struct indexer *x = ctx;
	const struct backend *be = c->dev->be;
	struct glm *g = x->g;
	struct tensor q = tensor_rows(x->q, 0, p->count), w = tensor_rows(x->w, 0, p->count);
	struct piece part = { 0, p->count, p->first, p->length, 0, p->kv_count };

	be->matmul(c->dev, q, tensor_rows(x->qr, p->begin, p->count), &x->l->iq_b, NULL, false);
	be->rope(c->dev, q, (int)g->ih, NULL, 0, &g->index_rope,
		 tensor_rows(c->pos, p->begin, p->count));
	be->matmul(c->dev, w, tensor_rows(x->h, p->begin, p->count), &x->l->iw, NULL, false);
	be->choose(c->dev, tensor_rows(c->carry[CHOICE], p->begin, p->count), q,
		   tensor_rows(x->keys, p->kv_begin, p->kv_count), w, &part, 1);
}

/* Fills the choice of rows longer than it. */
static void choose(struct glm *g, const struct layer *l, struct chunk *c, struct tensor h,
		   struct tensor qr)
{
	uint64_t mark = scratch_mark(c);
	int64_t most = c->tokens < TOKEN_TILE ? c->tokens : TOKEN_TILE;
	struct indexer x = { .g = g, .l = l, .h = h, .qr = qr };

	if (c->tokens <= g->topk)
		return;
	x.keys = scratch(c, c->dev->compute, c->tokens, g->id);
	index_keys(g, l, c, h, x.keys);
	x.keys = chunk_keys(c, x.keys);
	x.q = scratch(c, c->dev->compute, most, g->ih * g->id);
	x.w = scratch(c, DT_F32, most, g->ih);
	block_long_rows(c, g->topk, choose_rows, &x);
	scratch_release(c, mark);
}

static void attend(struct glm *g, const struct layer *l, struct chunk *c, struct tensor h)
{
	uint64_t mark = scratch_mark(c);
	struct tensor qr = scratch(c, c->dev->compute, c->tokens, g->Q),
		      lat = scratch(c, c->dev->compute, c->tokens, g->C + g->rotated);
	struct mla m = { .heads = (int)g->heads,
			 .nope = g->nope,
			 .rotated = g->rotated,
			 .value = g->value,
			 .latent = g->C,
			 .scale = 1 / sqrtf((float)(g->nope + g->rotated)),
			 .q_b = &l->q_b,
			 .kv_b = &l->kv_b,
			 .o = &l->o,
			 .rope = &g->rope,
			 .identity = g->identity };

	latents(g, l, c, h, qr, lat);
	if (l->full)
		choose(g, l, c, h, qr);
	block_mla(c, c->carry[RESIDUAL], qr, lat, c->carry[CHOICE], &m);
	scratch_release(c, mark);
}

static void glm_layer(struct target *t, int i, struct chunk *c)
{
	struct glm *g = t->state;
	struct layer *l = &g->layer[i];
	struct tensor x = c->carry[RESIDUAL];
	struct tensor h = l->moe ? c->routed.input : scratch(c, c->dev->compute, c->tokens, g->H);
	struct act silu = { .kind = ACT_SILU };
	struct router router = { .experts = (int)g->E,
				 .k = (int)g->K,
				 .score = SCORE_SIGMOID,
				 .bias = &l->bias,
				 .groups = (int)g->groups,
				 .groups_kept = (int)g->groups_kept,
				 .renormalise = g->renormalise,
				 .scale = (float)g->routed_scale };

	c->dev->be->norm(c->dev, h, x, &l->attn_norm, (float)g->eps, g->H);
	attend(g, l, c, h);
	c->dev->be->norm(c->dev, h, x, &l->mlp_norm, (float)g->eps, g->H);
	if (!l->moe || g->shared)
		block_mlp(c, x, h, &l->gate_up, &l->down, &silu);
	if (!l->moe)
		return;
	c->routed.experts = (struct experts){ .gate_up = &l->experts_gate_up,
					      .down = &l->experts_down,
					      .act = silu };
	block_route(c, h, &l->router, &router);
}

static bool glm_routed(const struct target *t, int i, struct routing *r)
{
	const struct glm *g = t->state;

	*r = (struct routing){ g->E, g->K, g->H, g->H };
	return g->layer[i].moe;
}

static void glm_finish(struct target *t, int i, struct chunk *c)
{
	(void)t, (void)i;
	c->dev->be->add(c->dev, c->carry[RESIDUAL], c->routed.sum);
}

static void glm_final(struct target *t, struct chunk *c)
{
	struct glm *g = t->state;

	c->result = scratch(c, DT_F32, c->tokens, g->H);
	c->dev->be->norm(c->dev, c->result, c->carry[RESIDUAL], &g->norm, (float)g->eps, g->H);
}

/* As in the reference's capture (components/speculative/dspark/target.py). */
static int glm_tap(const struct target *t, int64_t id, struct tap *out, struct err *e)
{
	(void)e;
	out->layer = (int)id;
	out->phase = id < 0 ? TAP_EMBED : id == t->layers - 1 ? TAP_FINAL : TAP_LAYER;
	return 0;
}

static struct tensor glm_captured(struct target *t, int64_t id, struct chunk *c)
{
	return id == t->layers - 1 ? c->result : c->carry[RESIDUAL];
}

static const char *const types[] = { "glm_moe_dsa", NULL };

const struct model model_glm_moe_dsa = {
	.name = "glm_moe_dsa",
	.types = types,
	.config = glm_config,
	.release = glm_release,
	.weights = glm_weights,
	.embed = glm_embed,
	.layer = glm_layer,
	.routed = glm_routed,
	.finish = glm_finish,
	.final = glm_final,
	.tap = glm_tap,
	.captured = glm_captured,
};
