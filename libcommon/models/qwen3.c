/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Qwen3 and Qwen3-MoE: pre-norm decoder with grouped-query attention, RMS-normed q and k,
 * half-split RoPE, SwiGLU or routed SwiGLU experts. Reference: nemo_automodel
 * components/models/qwen3/model.py and components/models/qwen3_moe/{model,layers}.py; with
 * target_force_hf transformers' classes, which differ in YaRN, sliding windows and where an
 * expert's weight multiplies.
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
#include "log.h"
#include "mem.h"
#include "quant.h"

#define CONFIG "config.json"
#define MOST_LAYERS 65536 /* what is made for each layer and each half head must stay small */
#define MOST_WIDTH  65536
#define RESIDUAL 0			/* carry: the residual stream, F32 [T,H] */

struct layer {
	bool moe, sliding;
	struct weight attn_norm, mlp_norm;		/* [H] */
	struct weight qkv, qkv_bias;			/* [(nq + 2 nkv) D, H], the same rows */
	struct weight q_norm, k_norm;			/* [D] */
	struct weight o, o_bias;			/* [H, nq D], [H] */
	struct weight gate_up, down;	/* [2I, H], [H, I]; with moe [E, 2I, H], [E, H, I] */
	struct weight router;				/* [E, H] */
};

struct qwen3 {
	int64_t H, I, V, L;			/* hidden, dense intermediate, vocabulary, layers */
	int64_t nq, nkv, D;				/* query heads, kv heads, head width */
	int64_t E, K, expert_I;				/* experts, chosen, their intermediate */
	int64_t window;					/* of sliding layers */
	double eps;
	bool moe_type, force_hf, bias, tied, renormalise;
	float *freq;					/* [D/2] */
	struct rope rope;
	struct quants quants;				/* of the layers' products */
	struct weight embed, freqs, norm, head;
	struct layer *layer;				/* [L] */
};

/* ---- config.json ----------------------------------------------------------------------------- */

static int bounded_key(const json_t *c, const char *key, int64_t most, int64_t *out, struct err *e)
{
	if (json_int(c, CONFIG, key, out, e))
		return -1;
	if (*out < 1 || *out > most)
		return err_refuse(e, CONFIG ": '%s' is %lld, not a size from 1 to %lld", key,
				  (long long)*out, (long long)most);
	return 0;
}

static int size_key(const json_t *c, const char *key, int64_t *out, struct err *e)
{
	return bounded_key(c, key, INT32_MAX, out, e);
}

static int size_key_or(const json_t *c, const char *key, int64_t def, int64_t *out, struct err *e)
{
	if (json_has(c, key))
		return size_key(c, key, out, e);
	*out = def;
	return 0;
}

static int read_sizes(struct qwen3 *q, const json_t *c, struct err *e)
{
	if (size_key(c, "hidden_size", &q->H, e) || size_key(c, "vocab_size", &q->V, e) ||
	    bounded_key(c, "num_hidden_layers", MOST_LAYERS, &q->L, e) ||
	    size_key(c, "num_attention_heads", &q->nq, e) ||
	    size_key(c, "intermediate_size", &q->I, e))
		return -1;
	/* An explicit null means "as many as query heads" for the dense model. */
	if (size_key_or(c, "num_key_value_heads",
			q->moe_type                                 ? 4
			: json_object_get(c, "num_key_value_heads") ? q->nq
								    : 32,
			&q->nkv, e) ||
	    size_key_or(c, "head_dim", q->moe_type ? q->H / q->nq : 128, &q->D, e) ||
	    json_real_or(c, CONFIG, "rms_norm_eps", 1e-6, &q->eps, e) ||
	    json_bool_or(c, CONFIG, "attention_bias", false, &q->bias, e) ||
	    json_bool_or(c, CONFIG, "tie_word_embeddings", false, &q->tied, e))
		return -1;
	if (q->nq % q->nkv)
		return err_refuse(e,
				  CONFIG ": num_attention_heads (%lld) is not a multiple of "
					 "num_key_value_heads (%lld)",
				  (long long)q->nq, (long long)q->nkv);
	if (!(q->eps >= 0) || q->eps > 1)
		return err_refuse(e, CONFIG ": rms_norm_eps is %g, not a number from 0 to 1",
				  q->eps);
	if (q->D > MOST_WIDTH)
		return err_refuse(e, CONFIG ": head_dim is %lld, more than %d", (long long)q->D,
				  MOST_WIDTH);
	if (q->D < 2 || q->D % 2)
		return err_refuse(e,
				  CONFIG
				  ": head_dim is %lld, but rotary embedding needs an even width",
				  (long long)q->D);
	if (q->moe_type && q->tied && !q->force_hf)
		return err_refuse(
			e, CONFIG
			": tie_word_embeddings is not supported for qwen3_moe; set "
			"recipe_args.target_force_hf: true if the checkpoint really is tied");
	return 0;
}

static int read_experts(struct qwen3 *q, const json_t *c, struct err *e)
{
	const char *key = json_has(c, "num_experts") ? "num_experts" : "num_local_experts";

	if (json_int_or(c, CONFIG, key, 128, &q->E, e))
		return -1;
	if (q->E < 0 || q->E > 1 << 20)
		return err_refuse(e, CONFIG ": '%s' is %lld", key, (long long)q->E);
	if (size_key_or(c, "num_experts_per_tok", 8, &q->K, e) ||
	    size_key_or(c, "moe_intermediate_size", 768, &q->expert_I, e) ||
	    json_bool_or(c, CONFIG, "norm_topk_prob", false, &q->renormalise, e))
		return -1;
	/* The default class leaves a single probability as it is; transformers makes it 1. */
	q->renormalise = q->renormalise && (q->K > 1 || q->force_hf);
	return 0;
}

/* Layer i is MoE iff it is not in mlp_only_layers and (i + 1) mod decoder_sparse_step is 0. */
static int mark_moe(struct qwen3 *q, const json_t *c, struct err *e)
{
	const json_t *only = json_object_get(c, "mlp_only_layers");
	int64_t step;

	if (size_key_or(c, "decoder_sparse_step", 1, &step, e))
		return -1;
	if (json_has(c, "mlp_only_layers") && !json_is_array(only))
		return err_refuse(e, CONFIG ": mlp_only_layers is not a list of layers");
	for (int64_t i = 0; i < q->L; i++)
		q->layer[i].moe = q->E > 0 && (i + 1) % step == 0;
	for (size_t n = 0; n < json_array_size(only); n++) {
		int64_t i = json_integer_value(json_array_get(only, n));

		if (!json_is_integer(json_array_get(only, n)))
			return err_refuse(e, CONFIG ": mlp_only_layers[%zu] is not the number of "
					  "a layer", n);
		if (i >= 0 && i < q->L)
			q->layer[i].moe = false;
	}
	for (int64_t i = 0; i < q->L; i++)
		if (q->layer[i].moe && q->K > q->E)
			return err_refuse(e,
					  CONFIG
					  ": num_experts_per_tok (%lld) is larger than the number "
					  "of experts (%lld)",
					  (long long)q->K, (long long)q->E);
	return 0;
}

static int mark_listed(struct qwen3 *q, const json_t *types, bool use, struct err *e)
{
	if ((int64_t)json_array_size(types) != q->L)
		return err_refuse(e, CONFIG ": layer_types has %zu entries for %lld layers",
				  json_array_size(types), (long long)q->L);
	for (int64_t i = 0; i < q->L; i++) {
		const char *type = json_string_value(json_array_get(types, (size_t)i));

		if (type && !strcmp(type, "sliding_attention"))
			q->layer[i].sliding = true;
		else if (!type || strcmp(type, "full_attention"))
			return err_refuse(e,
					  CONFIG ": layer_types[%lld] is neither full_attention "
						 "nor sliding_attention",
					  (long long)i);
		if (q->layer[i].sliding && !use)
			return err_refuse(e,
					  CONFIG ": layer_types[%lld] is sliding_attention, but "
						 "use_sliding_window is false",
					  (long long)i);
	}
	return 0;
}

static int mark_sliding(struct qwen3 *q, const json_t *c, struct err *e)
{
	const json_t *types = json_object_get(c, "layer_types");
	int64_t first;
	bool use;

	if (json_bool_or(c, CONFIG, "use_sliding_window", false, &use, e) ||
	    json_int_or(c, CONFIG, "max_window_layers", 28, &first, e))
		return -1;
	q->window = 0;
	if (use &&
	    !(json_object_get(c, "sliding_window") &&
	      json_is_null(json_object_get(c, "sliding_window"))) &&
	    size_key_or(c, "sliding_window", 4096, &q->window, e))
		return -1;
	if (q->moe_type) {
		if (use && !q->force_hf)
			return err_refuse(e, CONFIG
					  ": use_sliding_window is true, which the reference's "
					  "qwen3_moe ignores; set it to false, or "
					  "recipe_args.target_force_hf: true to slide every layer");
		for (int64_t i = 0; i < q->L; i++)
			q->layer[i].sliding = q->window > 0;
		return 0;
	}
	if (types && !json_is_null(types))
		return mark_listed(q, types, use && q->window > 0, e);
	for (int64_t i = 0; i < q->L; i++)
		q->layer[i].sliding = q->window > 0 && i >= first;
	return 0;
}

/* The keys without which transformers refuses a rope type, in any class. */
static int require_keys(const json_t *p, const char *type, struct err *e)
{
	static const struct { const char *type, *key;
	} required[] = {
		{ "linear", "factor" },
		{ "dynamic", "factor" },
		{ "yarn", "factor" },
		{ "llama3", "factor" },
		{ "llama3", "low_freq_factor" },
		{ "llama3", "high_freq_factor" },
		{ "longrope", "short_factor" },
		{ "longrope", "long_factor" },
	};

	for (size_t i = 0; i < sizeof required / sizeof *required; i++)
		if (!strcmp(type, required[i].type) && !json_object_get(p, required[i].key))
			return err_refuse(e, CONFIG ": rope type '%s' needs '%s'", type,
					  required[i].key);
	return 0;
}

/*
 * The types that transformers fills original_max_position_embeddings in for: with
 * max_position_embeddings where the object has none. One at the top level of the file comes late,
 * when transformers' functions compute frequencies, and then wins: the default classes call these
 * for yarn and longrope of the dense model only.
 */
static void fill_original(json_t *p, const json_t *c, const char *type, bool late,
			  double max_positions)
{
	const char *key = "original_max_position_embeddings";

	if (strcmp(type, "yarn") && strcmp(type, "llama3") && strcmp(type, "longrope"))
		return;
	if (late && json_has(c, key))
		json_object_set(p, key, json_object_get(c, key));
	else if (!json_has(p, key))
		json_object_set_new(p, key, json_real(max_positions));
}

/*
 * One flat object whatever the layout, rope_scaling or rope_parameters, with rope_type and what
 * transformers fills in.
 */
static json_t *standard_rope(const struct qwen3 *q, const json_t *c, double *theta,
			     double *max_positions, struct err *e)
{
	const json_t *given = json_has(c, "rope_scaling") ? json_object_get(c, "rope_scaling")
							  : json_object_get(c, "rope_parameters");
	json_t *p = json_is_object(given) ? json_copy((json_t *)given) : json_object();
	const char *type;
	double partial;

	if (!p) {
		err_fail(e, "out of memory");
		return NULL;
	}
	if (given && !json_is_null(given) && !json_is_object(given)) {
		err_refuse(e, CONFIG ": %s is not an object",
			   json_has(c, "rope_scaling") ? "rope_scaling" : "rope_parameters");
		goto bad;
	}
	if (json_real_or(c, CONFIG, "rope_theta", 10000, theta, e) ||
	    json_real_or(p, CONFIG, "rope_theta", *theta, theta, e) ||
	    json_real_or(c, CONFIG, "max_position_embeddings", 32768, max_positions, e) ||
	    json_real_or(c, CONFIG, "partial_rotary_factor", 1, &partial, e) ||
	    json_real_or(p, CONFIG, "partial_rotary_factor", partial, &partial, e) ||
	    json_str_or(p, CONFIG, "type", "default", &type, e) ||
	    json_str_or(p, CONFIG, "rope_type", type, &type, e) || require_keys(p, type, e))
		goto bad;
	if (partial != 1 || !(*theta > 1)) {
		err_refuse(e, CONFIG ": %s",
			   partial != 1 ? "partial_rotary_factor is not supported for Qwen3"
					: "rope_theta must exceed 1");
		goto bad;
	}
	json_object_set_new(p, "rope_type", json_string(type));
	fill_original(p, c, type, q->force_hf || (!q->moe_type && strcmp(type, "llama3")),
		      *max_positions);
	return p;
bad:
	json_decref(p);
	return NULL;
}

/*
 * The default MoE class has a YaRN of its own: on whenever factor > 1 whatever the type says,
 * bounds neither rounded nor clamped, the multiplier always 0.1 ln(factor) + 1
 * (components/models/gpt_oss/rope_utils.py).
 */
static int moe_yarn(struct qwen3 *q, const json_t *p, double theta, struct err *e)
{
	double factor, orig, slow, fast, lo, hi, half = (double)q->D / 2;

	if (json_is_null(json_object_get(p, "factor")))
		return err_refuse(e, CONFIG ": the rope scaling's factor is null, which the "
					    "reference's qwen3_moe cannot run");
	if (json_real_or(p, CONFIG, "factor", 1, &factor, e) ||
	    json_real_or(p, CONFIG, "beta_slow", 1, &slow, e) ||
	    json_real_or(p, CONFIG, "beta_fast", 32, &fast, e) ||
	    json_real_or(p, CONFIG, "original_max_position_embeddings", 4096, &orig, e) ||
	    rope_frequencies(q->freq, (int)q->D, theta, NULL, 0, 0, &q->rope.scale, e))
		return -1;
	if (!(factor > 1))
		return 0;
	lo = half * log(orig / (fast * 2 * M_PI)) / log(theta);
	hi = half * log(orig / (slow * 2 * M_PI)) / log(theta);
	if (!(lo > 0 && lo < hi && hi < half - 1))
		return err_refuse(e,
				  CONFIG ": rope scaling with factor %g over %g positions has its "
					 "ramp outside the head (%g to %g of %g); the "
					 "reference cannot run it",
				  factor, orig, lo, hi, half);
	q->rope.scale = (float)(0.1 * log(factor) + 1);
	for (int j = 0; j < q->D / 2; j++) {
		float ramp = fminf(fmaxf(((float)j - (float)lo) / (float)(hi - lo), 0), 1);

		q->freq[j] = q->freq[j] / (float)factor * ramp + q->freq[j] * (1 - ramp);
	}
	return 0;
}

static int read_rope(struct qwen3 *q, const json_t *c, int64_t seq_length, struct err *e)
{
	double theta, max_positions;
	json_t *p = standard_rope(q, c, &theta, &max_positions, e);
	int rc = -1;

	if (!p)
		return -1;
	q->freq = mem_calloc((size_t)q->D / 2, sizeof *q->freq, e);
	q->rope = (struct rope){ .width = (int)q->D, .layout = ROPE_HALF, .freq = &q->freqs };
	if (!q->freq)
		goto out;
	rc = q->moe_type && !q->force_hf
		     ? moe_yarn(q, p, theta, e)
		     : rope_frequencies(q->freq, (int)q->D, theta, p, max_positions,
					q->force_hf ? seq_length : 0, &q->rope.scale, e);
out:
	json_decref(p);
	return rc;
}

static int refuse_unsupported(const json_t *c, struct err *e)
{
	const char *act;

	if (json_str_or(c, CONFIG, "hidden_act", "silu", &act, e))
		return -1;
	if (strcmp(act, "silu"))
		return err_refuse(e, CONFIG ": hidden_act '%s' is not supported (silu is)", act);
	return 0;
}

static void qwen3_release(struct target *t)
{
	struct qwen3 *q = t->state;

	if (!q)
		return;
	free(q->freq);
	free(q->layer);
	free(q);
	t->state = NULL;
}

static int qwen3_config(struct target *t, const json_t *c, const struct target_options *o,
			struct err *e)
{
	struct qwen3 *q = t->state = mem_calloc(1, sizeof *q, e);

	if (!q)
		return -1;
	q->moe_type = !strcmp(t->type, "qwen3_moe");
	q->force_hf = o->force_hf;
	if (o->num_hidden_layers)
		log_warn("recipe_args.target_num_hidden_layers has no effect on %s", t->type);
	if (refuse_unsupported(c, e) || quants_read(&q->quants, c, e) || read_sizes(q, c, e) ||
	    (q->moe_type && read_experts(q, c, e)))
		return -1;
	q->layer = mem_calloc((size_t)q->L, sizeof *q->layer, e);
	if (!q->layer || mark_moe(q, c, e) || mark_sliding(q, c, e) ||
	    read_rope(q, c, o->seq_length, e))
		return -1;
	t->vocab = q->V;
	t->hidden = q->H;
	t->layers = q->L;
	t->experts = q->E;
	t->ncarry = 1;
	t->carry[RESIDUAL] =
		(struct carry_spec){ "residual", DT_F32, q->H, 1, false, -1, (int)q->L };
	return 0;
}

/* ---- weights --------------------------------------------------------------------------------- */

#define LAYER "model.layers.%d."

static int attention_weights(struct qwen3 *q, int i, struct weight_walk *w, struct err *e)
{
	struct layer *l = &q->layer[i];
	int64_t n = q->nq * q->D, kv = q->nkv * q->D;
	struct weight_spec s;

	s = weight_vector(&l->attn_norm, UNIT_LAYER, i, q->H, LAYER "input_layernorm.weight", i);
	if (w->visit(w, &s, e))
		return -1;
	s = weight_matrix(&l->qkv, UNIT_LAYER, i, n, q->H, LAYER "self_attn.q_proj.weight", i);
	weight_part_add(&s, kv, LAYER "self_attn.k_proj.weight", i);
	weight_part_add(&s, kv, LAYER "self_attn.v_proj.weight", i);
	s.quants = q->quants.list;
	if (w->visit(w, &s, e))
		return -1;
	s = weight_vector(&l->q_norm, UNIT_LAYER, i, q->D, LAYER "self_attn.q_norm.weight", i);
	if (w->visit(w, &s, e))
		return -1;
	s = weight_vector(&l->k_norm, UNIT_LAYER, i, q->D, LAYER "self_attn.k_norm.weight", i);
	if (w->visit(w, &s, e))
		return -1;
	s = weight_matrix(&l->o, UNIT_LAYER, i, q->H, n, LAYER "self_attn.o_proj.weight", i);
	s.quants = q->quants.list;
	if (w->visit(w, &s, e))
		return -1;
	if (!q->bias)
		return 0;
	s = weight_vector(&l->qkv_bias, UNIT_LAYER, i, n, LAYER "self_attn.q_proj.bias", i);
	weight_part_add(&s, kv, LAYER "self_attn.k_proj.bias", i);
	weight_part_add(&s, kv, LAYER "self_attn.v_proj.bias", i);
	if (w->visit(w, &s, e))
		return -1;
	s = weight_vector(&l->o_bias, UNIT_LAYER, i, q->H, LAYER "self_attn.o_proj.bias", i);
	return w->visit(w, &s, e);
}

static int dense_weights(struct qwen3 *q, int i, struct weight_walk *w, struct err *e)
{
	struct layer *l = &q->layer[i];
	struct weight_spec s = weight_matrix(&l->gate_up, UNIT_LAYER, i, q->I, q->H,
					     LAYER "mlp.gate_proj.weight", i);

	weight_part_add(&s, q->I, LAYER "mlp.up_proj.weight", i);
	s.use = USE_GATED;
	s.quants = q->quants.list;
	if (w->visit(w, &s, e))
		return -1;
	s = weight_matrix(&l->down, UNIT_LAYER, i, q->H, q->I, LAYER "mlp.down_proj.weight", i);
	s.quants = q->quants.list;
	return w->visit(w, &s, e);
}

static int expert_weights(struct qwen3 *q, int i, struct weight_walk *w, struct err *e)
{
	struct layer *l = &q->layer[i];
	struct weight_spec s =
		weight_matrix(&l->router, UNIT_LAYER, i, q->E, q->H, LAYER "mlp.gate.weight", i);

	s.kind = WEIGHT_FP32;
	if (w->visit(w, &s, e))
		return -1;
	s = weight_matrix(&l->gate_up, UNIT_EXPERTS, i, q->expert_I, q->H,
			  LAYER "mlp.experts.{e}.gate_proj.weight", i);
	weight_part_add(&s, q->expert_I, LAYER "mlp.experts.{e}.up_proj.weight", i);
	s.use = USE_GATED;
	s.count = q->E;
	s.shard = SHARD_EXPERT;
	s.quants = q->quants.list;
	snprintf(s.fused, sizeof s.fused, LAYER "mlp.experts.gate_up_proj", i);
	if (w->visit(w, &s, e))
		return -1;
	s = weight_matrix(&l->down, UNIT_EXPERTS, i, q->H, q->expert_I,
			  LAYER "mlp.experts.{e}.down_proj.weight", i);
	s.count = q->E;
	s.shard = SHARD_EXPERT;
	s.quants = q->quants.list;
	snprintf(s.fused, sizeof s.fused, LAYER "mlp.experts.down_proj", i);
	return w->visit(w, &s, e);
}

static int qwen3_weights(struct target *t, struct weight_walk *w, struct err *e)
{
	struct qwen3 *q = t->state;
	struct weight_spec s =
		weight_matrix(&q->embed, UNIT_EMBED, -1, q->V, q->H, "model.embed_tokens.weight");

	s.use = USE_TABLE;
	s.shard = SHARD_TABLE;
	if (w->visit(w, &s, e))
		return -1;
	s = weight_vector(&q->freqs, UNIT_ALWAYS, -1, q->D / 2, "rope");
	s.kind = WEIGHT_FP32;
	s.shard = SHARD_WHOLE;
	s.data = q->freq;
	s.data_dtype = DT_F32;
	if (w->visit(w, &s, e))
		return -1;
	for (int i = 0; i < q->L; i++) {
		if (attention_weights(q, i, w, e))
			return -1;
		s = weight_vector(&q->layer[i].mlp_norm, UNIT_LAYER, i, q->H,
				  LAYER "post_attention_layernorm.weight", i);
		if (w->visit(w, &s, e))
			return -1;
		if (q->layer[i].moe ? expert_weights(q, i, w, e) : dense_weights(q, i, w, e))
			return -1;
	}
	s = weight_vector(&q->norm, UNIT_FINAL, -1, q->H, "model.norm.weight");
	if (w->visit(w, &s, e))
		return -1;
	/* Tied: the embedding, even where the file holds a different lm_head. */
	s = weight_matrix(&q->head, UNIT_EXPORT, -1, q->V, q->H, "%s",
			  q->tied ? "model.embed_tokens.weight" : "lm_head.weight");
	return w->visit(w, &s, e);
}

/* ---- forward --------------------------------------------------------------------------------- */

static void qwen3_embed(struct target *t, struct chunk *c)
{
	struct qwen3 *q = t->state;

	c->dev->be->rows(c->dev, c->carry[RESIDUAL], &q->embed, c->ids);
}

static void qwen3_layer(struct target *t, int i, struct chunk *c)
{
	struct qwen3 *q = t->state;
	struct layer *l = &q->layer[i];
	struct tensor x = c->carry[RESIDUAL];
	struct tensor h = l->moe ? c->routed.input : scratch(c, c->dev->compute, c->tokens, q->H);
	struct act silu = { .kind = ACT_SILU };
	struct gqa gqa = {
		.attention = {
			.heads = (int)q->nq, .kv_heads = (int)q->nkv,
			.width = (int)q->D, .value_width = (int)q->D,
			.scale = 1 / sqrtf((float)q->D), .window = l->sliding ? q->window : 0,
		},
		.eps = (float)q->eps,
		.qkv = &l->qkv, .qkv_bias = q->bias ? &l->qkv_bias : NULL,
		.o = &l->o, .o_bias = q->bias ? &l->o_bias : NULL,
		.q_norm = &l->q_norm, .k_norm = &l->k_norm, .rope = &q->rope,
	};

	c->dev->be->norm(c->dev, h, x, &l->attn_norm, (float)q->eps, q->H);
	block_gqa(c, x, h, &gqa);
	c->dev->be->norm(c->dev, h, x, &l->mlp_norm, (float)q->eps, q->H);
	if (l->moe) {
		struct router router = { .experts = (int)q->E,
					 .k = (int)q->K,
					 .score = SCORE_SOFTMAX,
					 .renormalise = q->renormalise,
					 .scale = 1 };

		c->routed.experts = (struct experts){ .gate_up = &l->gate_up,
						      .down = &l->down,
						      .act = silu,
						      .weight_after_down = q->force_hf };
		block_route(c, h, &l->router, &router);
	} else {
		block_mlp(c, x, h, &l->gate_up, &l->down, &silu);
	}
}

static bool qwen3_routed(const struct target *t, int i, struct routing *r)
{
	const struct qwen3 *q = t->state;

	*r = (struct routing){ q->E, q->K, q->H, q->H };
	return q->layer[i].moe;
}

static void qwen3_finish(struct target *t, int i, struct chunk *c)
{
	(void)t, (void)i;
	c->dev->be->add(c->dev, c->carry[RESIDUAL], c->routed.sum);
}

static void qwen3_final(struct target *t, struct chunk *c)
{
	struct qwen3 *q = t->state;

	c->result = scratch(c, DT_F32, c->tokens, q->H);
	c->dev->be->norm(c->dev, c->result, c->carry[RESIDUAL], &q->norm, (float)q->eps, q->H);
}

/*
 * The last id is the state after the final norm, as in the reference
 * (components/speculative/dspark/target.py).
 */
static int qwen3_tap(const struct target *t, int64_t id, struct tap *out, struct err *e)
{
	(void)e;
	out->layer = (int)id;
	out->phase = id < 0 ? TAP_EMBED : id == t->layers - 1 ? TAP_FINAL : TAP_LAYER;
	return 0;
}

static struct tensor qwen3_captured(struct target *t, int64_t id, struct chunk *c)
{
	return id == t->layers - 1 ? c->result : c->carry[RESIDUAL];
}

static const char *const types[] = { "qwen3", "qwen3_moe", NULL };

const struct model model_qwen3 = {
	.name = "qwen3",
	.types = types,
	.config = qwen3_config,
	.release = qwen3_release,
	.weights = qwen3_weights,
	.embed = qwen3_embed,
	.layer = qwen3_layer,
	.routed = qwen3_routed,
	.finish = qwen3_finish,
	.final = qwen3_final,
	.tap = qwen3_tap,
	.captured = qwen3_captured,
};
