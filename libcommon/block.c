/* SPDX-License-Identifier: Apache-2.0 */
/* Shared parts of layers. Scratch is a stack: what a part takes it gives back. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif
#include <math.h>
#include <string.h>

#include "block.h"
#include "err.h"
#include "json.h"

/* Norm and rotation of q or k, as far as the target has them. */
static void prepare_heads(struct chunk *c, struct tensor x, int heads, const struct weight *norm,
			  const struct gqa *g)
{
	if (g->rope)
		c->dev->be->rope(c->dev, x, heads, norm, g->eps, g->rope, c->pos);
	else if (norm)
		c->dev->be->norm(c->dev, x, x, norm, g->eps, g->attention.width);
}

void block_gqa(struct chunk *c, struct tensor x, struct tensor h, const struct gqa *g)
{
	const struct backend *be = c->dev->be;
	const struct attention *a = &g->attention;
	int64_t D = a->width, nq = a->heads * D, nk = a->kv_heads * D;
	uint64_t mark = scratch_mark(c);
	/* [T, q | k | v] */
	struct tensor qkv = scratch(c, c->dev->compute, c->tokens, nq + 2 * nk);
	struct tensor out = scratch(c, c->dev->compute, c->tokens, nq);
	struct tensor q = tensor_cols(qkv, 0, nq), k = tensor_cols(qkv, nq, nk),
		      v = tensor_cols(qkv, nq + nk, nk);

	be->matmul(c->dev, qkv, h, g->qkv, g->qkv_bias, false);
	prepare_heads(c, q, a->heads, g->q_norm, g);
	prepare_heads(c, k, a->kv_heads, g->k_norm, g);
	be->attention(c->dev, out, q, chunk_keys(c, k), chunk_keys(c, v), a, c->piece, c->npieces);
	be->matmul(c->dev, x, out, g->o, g->o_bias, true);
	scratch_release(c, mark);
}

/* ---- latent attention ------------------------------------------------------------------------ */

#define GROUP 64 /* most short rows that go through attention together */

struct dense {
	struct tensor q, kv, k, v, out;
};

struct sparse {
	struct tensor eye, w;       /* [latent, latent], kv_b^T [latent, heads (nope + value)] */
	struct tensor q, keyed;     /* [n, heads (nope + rotated)], [n, heads (latent + rotated)] */
	struct tensor latents, out; /* [n, heads latent], [n, heads value] */
};

static struct dense dense_room(struct chunk *c, const struct mla *m, int64_t rows)
{
	enum dtype d = c->dev->compute;

	return (struct dense){
		.q = scratch(c, d, rows, m->heads * (m->nope + m->rotated)),
		.kv = scratch(c, d, rows, m->heads * (m->nope + m->value)),
		.k = scratch(c, d, rows, m->heads * (m->nope + m->rotated)),
		.v = scratch(c, d, rows, m->heads * m->value),
		.out = scratch(c, d, rows, m->heads * m->value),
	};
}

static struct sparse sparse_room(struct chunk *c, const struct mla *m, int64_t rows)
{
	enum dtype d = c->dev->compute;

	return (struct sparse){
		.eye = scratch(c, DT_F32, m->latent, m->latent),
		.w = scratch(c, d, m->latent, m->heads * (m->nope + m->value)),
		.q = scratch(c, d, rows, m->heads * (m->nope + m->rotated)),
		.keyed = scratch(c, d, rows, m->heads * (m->latent + m->rotated)),
		.latents = scratch(c, d, rows, m->heads * m->latent),
		.out = scratch(c, d, rows, m->heads * m->value),
	};
}

static int64_t smaller(int64_t a, int64_t b)
{
	return a < b ? a : b;
}

/* Most tokens of short rows at a time: a long one among them must fit. */
static int64_t dense_rows(const struct chunk *c, int64_t most)
{
	return most ? smaller(c->tokens, most > TOKEN_TILE ? most : TOKEN_TILE) : c->tokens;
}

static void project_queries(struct chunk *c, struct tensor q, struct tensor qr, int64_t begin,
			    const struct mla *m)
{
	c->dev->be->matmul(c->dev, q, tensor_rows(qr, begin, q.rows), m->q_b, NULL, false);
	c->dev->be->rope(c->dev, q, m->heads, NULL, 0, m->rope,
			 tensor_rows(c->pos, begin, q.rows));
}

/* Whole rows: n pieces, which count from the first token, `begin`, of the chunk. */
static void dense_group(struct chunk *c, struct tensor x, struct tensor qr, struct tensor lat,
			const struct mla *m, int64_t room, const struct piece *pieces, int n,
			int64_t begin)
{
	const struct backend *be = c->dev->be;
	uint64_t mark = scratch_mark(c);
	struct dense s = dense_room(c, m, room);
	int64_t tokens = pieces[n - 1].begin + pieces[n - 1].count, head = m->nope + m->rotated,
		both = m->nope + m->value;
	struct attention a = { .heads = m->heads, .kv_heads = m->heads, .width = (int)head,
			       .value_width = (int)m->value, .scale = m->scale };
	struct tensor l = tensor_rows(lat, begin, tokens), q = tensor_rows(s.q, 0, tokens),
		      kv = tensor_rows(s.kv, 0, tokens), k = tensor_rows(s.k, 0, tokens),
		      v = tensor_rows(s.v, 0, tokens), out = tensor_rows(s.out, 0, tokens);

	project_queries(c, q, qr, begin, m);
	be->matmul(c->dev, kv, tensor_cols(l, 0, m->latent), m->kv_b, NULL, false);
	be->copy(c->dev, k, head, kv, both, m->nope, m->heads);
	be->copy(c->dev, tensor_cols(k, m->nope, k.cols - m->nope), head,
		 tensor_cols(l, m->latent, m->rotated), 0, m->rotated, m->heads);
	be->copy(c->dev, v, m->value, tensor_cols(kv, m->nope, kv.cols - m->nope), both, m->value,
		 m->heads);
	be->attention(c->dev, out, q, k, v, &a, pieces, n);
	be->matmul(c->dev, tensor_rows(x, begin, tokens), out, m->o, NULL, true);
	scratch_release(c, mark);
}

/* Rows up to `most` tokens, neighbours together as far as there is room. */
static void dense_rows_of(struct chunk *c, struct tensor x, struct tensor qr, struct tensor lat,
			  const struct mla *m, int64_t most)
{
	int64_t room = dense_rows(c, most);

	for (int i = 0; i < c->npieces;) {
		struct piece group[GROUP];
		int64_t begin = c->piece[i].begin, tokens = 0;
		int n = 0;

		for (; n < GROUP && i < c->npieces; i++, n++) {
			struct piece p = c->piece[i];

			if ((most && p.length > most) || tokens + p.count > room)
				break;
			p.begin -= begin;
			p.kv_begin -= begin;
			tokens += p.count;
			group[n] = p;
		}
		if (n)
			dense_group(c, x, qr, lat, m, room, group, n, begin);
		else
			i++;
	}
}

void block_long_rows(struct chunk *c, int64_t most,
		     void (*f)(void *ctx, struct chunk *c, const struct piece *p), void *ctx)
{
	for (int i = 0; i < c->npieces; i++)
		for (int64_t t = 0; c->piece[i].length > most && t < c->piece[i].count;
		     t += TOKEN_TILE) {
			struct piece p = c->piece[i];

			p.begin += t;
			p.first += t;
			p.count = smaller(p.count - t, TOKEN_TILE);
			f(ctx, c, &p);
		}
}

struct absorbed {
	struct tensor x, qr, lat, keys;
	const struct mla *m;
	struct sparse room;
};

/* scores = (q W_k) . latent + q . rotated; out = (sum of p latent) W_v^T, head by head. */
static void sparse_rows(void *ctx, struct chunk *c, const struct piece *p)
{
	const struct absorbed *s = ctx;
	const struct backend *be = c->dev->be;
	const struct mla *m = s->m;
	int64_t head = m->nope + m->rotated, both = m->nope + m->value,
		keyed = m->latent + m->rotated;
	struct attention a = { .heads = m->heads, .kv_heads = 1, .width = (int)keyed,
			       .value_width = (int)m->latent, .scale = m->scale };
	struct grouped in = { m->heads, m->latent, m->nope, keyed, head, both, false },
		       up = { m->heads, m->value, m->latent, m->value, m->latent, both, true };
	struct tensor q = tensor_rows(s->room.q, 0, p->count),
		      k = tensor_rows(s->room.keyed, 0, p->count),
		      l = tensor_rows(s->room.latents, 0, p->count),
		      out = tensor_rows(s->room.out, 0, p->count),
		      row = tensor_rows(s->lat, p->kv_begin, p->kv_count);
	struct piece part = { 0, p->count, p->first, p->length, 0, p->kv_count };

	project_queries(c, q, s->qr, p->begin, m);
	be->product(c->dev, k, q, s->room.w, &in);
	be->copy(c->dev, tensor_cols(k, m->latent, k.cols - m->latent), keyed,
		 tensor_cols(q, m->nope, q.cols - m->nope), head, m->rotated, m->heads);
	be->attention_at(c->dev, l, k, row, tensor_cols(row, 0, m->latent),
			 tensor_rows(s->keys, p->begin, p->count), &a, &part, 1);
	be->product(c->dev, out, l, tensor_cols(s->room.w, m->nope, s->room.w.cols - m->nope), &up);
	be->matmul(c->dev, tensor_rows(s->x, p->begin, p->count), out, m->o, NULL, true);
}

static bool has_long_row(const struct chunk *c, int64_t most)
{
	for (int i = 0; i < c->npieces; i++)
		if (c->piece[i].length > most)
			return true;
	return false;
}

void block_mla(struct chunk *c, struct tensor x, struct tensor qr, struct tensor lat,
	       struct tensor keys, const struct mla *m)
{
	struct absorbed s = { .x = x, .qr = qr, .lat = chunk_keys(c, lat), .keys = keys, .m = m };
	uint64_t mark = scratch_mark(c);

	/* what is taken must not depend on which rows the chunk has */
	dense_room(c, m, dense_rows(c, keys.cols));
	scratch_release(c, mark);
	dense_rows_of(c, x, qr, s.lat, m, keys.cols);
	if (!keys.cols || c->tokens <= keys.cols)
		return;
	s.room = sparse_room(c, m, smaller(c->tokens, TOKEN_TILE));
	if (has_long_row(c, keys.cols)) {
		c->dev->be->upload(c->dev, s.room.eye, m->identity);
		c->dev->be->matmul(c->dev, s.room.w, s.room.eye, m->kv_b, NULL, false);
		block_long_rows(c, keys.cols, sparse_rows, &s);
	}
	scratch_release(c, mark);
}

/* ---- feed-forward ---------------------------------------------------------------------------- */

void block_mlp(struct chunk *c, struct tensor x, struct tensor h, const struct weight *gate_up,
	       const struct weight *down, const struct act *act)
{
	const struct backend *be = c->dev->be;
	uint64_t mark = scratch_mark(c);
	int64_t most = c->tokens < TOKEN_TILE ? c->tokens : TOKEN_TILE;
	struct tensor a = scratch(c, c->dev->compute, most, gate_up->rows / 2);

	for (int64_t t = 0; t < c->tokens; t += TOKEN_TILE) {
		int64_t n = c->tokens - t < TOKEN_TILE ? c->tokens - t : TOKEN_TILE;
		struct tensor an = tensor_rows(a, 0, n);

		be->matmul_gate(c->dev, an, tensor_rows(h, t, n), gate_up, act);
		be->matmul(c->dev, tensor_rows(x, t, n), an, down, NULL, true);
	}
	scratch_release(c, mark);
}

void block_route(struct chunk *c, struct tensor h, const struct weight *router,
		 const struct router *r)
{
	const struct backend *be = c->dev->be;
	uint64_t mark = scratch_mark(c);
	struct tensor logits = scratch(c, DT_F32, c->tokens, r->experts);

	be->matmul(c->dev, logits, h, router, NULL, false);
	be->route(c->dev, c->routed.ids, c->routed.weights, logits, r);
	scratch_release(c, mark);
}

/* ---- RoPE frequencies ------------------------------------------------------------------------ */

/* 1 / theta^(2j/width) in F32, like the reference: the exponent and the power round to F32. */
static float base_frequency(int j, int width, double theta)
{
	float exponent = (float)(2 * j) / (float)width;

	return 1.0f / powf((float)theta, exponent);
}

static int positive(const json_t *p, const char *key, double def, double *out, struct err *e)
{
	if (json_real_or(p, "the rope parameters", key, def, out, e))
		return -1;
	if (!(*out > 0))
		return err_refuse(e, "the rope parameters need a positive '%s'", key);
	return 0;
}

/* Llama 3.1: long wavelengths are divided by factor, short ones kept, between them a blend. */
static int llama3(float *freq, int half, const json_t *p, double max_positions, struct err *e)
{
	double factor, low, high, orig;

	if (positive(p, "factor", 1, &factor, e) || positive(p, "low_freq_factor", 1, &low, e) ||
	    positive(p, "high_freq_factor", 4, &high, e) ||
	    positive(p, "original_max_position_embeddings", max_positions, &orig, e))
		return -1;
	for (int j = 0; j < half; j++) {
		double wave = 2 * M_PI / freq[j];

		if (wave > orig / low) {
			freq[j] = (float)(freq[j] / factor);
		} else if (wave >= orig / high) {
			double s = (orig / wave - low) / (high - low);

			freq[j] = (float)((1 - s) * freq[j] / factor + s * freq[j]);
		}
	}
	return 0;
}

static double mscale(double factor, double m)
{
	return factor <= 1 ? 1 : 0.1 * m * log(factor) + 1;
}

/*
 * The multiplier on cos and sin: attention_factor, or what mscale and mscale_all_dim give, or 0.1
 * ln(factor) + 1.
 */
static int yarn_scale(const json_t *p, double factor, float *scale, struct err *e)
{
	double given, m, all;

	if (json_real_or(p, "the rope parameters", "attention_factor", 0, &given, e) ||
	    json_real_or(p, "the rope parameters", "mscale", 0, &m, e) ||
	    json_real_or(p, "the rope parameters", "mscale_all_dim", 0, &all, e))
		return -1;
	if (json_has(p, "attention_factor"))
		*scale = (float)given;
	else if (m != 0 && all != 0)
		*scale = (float)(mscale(factor, m) / mscale(factor, all));
	else
		*scale = (float)mscale(factor, 1);
	return 0;
}

static int yarn(float *freq, int width, double theta, const json_t *p, double max_positions,
		float *scale, struct err *e)
{
	double factor, fast, slow, orig, lo, hi;
	bool truncate;

	if (positive(p, "original_max_position_embeddings", max_positions, &orig, e) ||
	    positive(p, "beta_fast", 32, &fast, e) || positive(p, "beta_slow", 1, &slow, e) ||
	    json_bool_or(p, "the rope parameters", "truncate", true, &truncate, e) ||
	    positive(p, "factor", max_positions / orig, &factor, e) ||
	    yarn_scale(p, factor, scale, e))
		return -1;
	lo = width * log(orig / (fast * 2 * M_PI)) / (2 * log(theta));
	hi = width * log(orig / (slow * 2 * M_PI)) / (2 * log(theta));
	if (truncate) {
		lo = floor(lo);
		hi = ceil(hi);
	}
	lo = fmax(lo, 0);
	hi = fmin(hi, width - 1);
	if (lo == hi)
		hi += 0.001;
	for (int j = 0; j < width / 2; j++) {
		float r = (float)fmin(fmax((j - lo) / (hi - lo), 0), 1);

		freq[j] = freq[j] * (1 - r) + freq[j] / (float)factor * r;
	}
	return 0;
}

/*
 * LongRoPE: the short factors, or the long ones for rows padded to more than the original length.
 */
static int longrope(float *freq, int width, double theta, const json_t *p, double max_positions,
		    int64_t length, float *scale, struct err *e)
{
	const json_t *factors;
	const char *key;
	double orig, factor, given;

	if (positive(p, "original_max_position_embeddings", max_positions, &orig, e))
		return -1;
	key = (double)length > orig ? "long_factor" : "short_factor";
	factors = json_object_get(p, key);
	if (json_array_size(factors) != (size_t)width / 2)
		return err_refuse(e, "rope type 'longrope' needs '%s' with %d numbers", key,
				  width / 2);
	if (positive(p, "factor", max_positions / orig, &factor, e) ||
	    positive(p, "attention_factor", factor <= 1 ? 1 : sqrt(1 + log(factor) / log(orig)),
		     &given, e))
		return -1;
	*scale = (float)given;
	for (int j = 0; j < width / 2; j++) {
		float power = powf((float)theta, (float)(2 * j) / (float)width);
		double by = json_number_value(json_array_get(factors, (size_t)j));

		if (!(by > 0))
			return err_refuse(e, "rope type 'longrope': '%s'[%d] is not a number above "
					  "0", key, j);
		freq[j] = 1.0f / ((float)by * power);
	}
	return 0;
}

/* Dynamic NTK: rows padded to more than the training length get a larger theta. */
static int dynamic(float *freq, int width, double theta, const json_t *p, double max_positions,
		   int64_t length, struct err *e)
{
	double factor;
	float grown;

	if (positive(p, "factor", 0, &factor, e))
		return -1;
	if (width < 4)
		return err_refuse(e, "rope type 'dynamic' needs heads of at least 4, not %d",
				  width);
	if (!((double)length > max_positions))
		return 0;
	grown = (float)factor * (float)length / (float)max_positions - (float)(factor - 1);
	grown = (float)theta * powf(grown, (float)width / (float)(width - 2));
	for (int j = 0; j < width / 2; j++)
		freq[j] = base_frequency(j, width, grown);
	return 0;
}

/*
 * The first partial_rotary_factor of the head turns, with the exponents of the whole head; the rest
 * stands still.
 */
static int proportional(float *freq, int width, const json_t *p, struct err *e)
{
	double factor, part;

	if (positive(p, "factor", 1, &factor, e) ||
	    positive(p, "partial_rotary_factor", 1, &part, e))
		return -1;
	for (int j = 0; j < width / 2; j++)
		freq[j] = j < (int)floor(part * width / 2) ? freq[j] / (float)factor : 0;
	return 0;
}

int rope_frequencies(float *freq, int width, double theta, const json_t *params,
		     double max_positions, int64_t length, float *scale, struct err *e)
{
	const char *type = "default";
	double factor;

	if (params &&
	    json_str_or(params, "the rope parameters",
			json_has(params, "rope_type") ? "rope_type" : "type", "default", &type, e))
		return -1;
	*scale = 1;
	for (int j = 0; j < width / 2; j++)
		freq[j] = base_frequency(j, width, theta);
	if (!strcmp(type, "default"))
		return 0;
	if (!strcmp(type, "dynamic"))
		return dynamic(freq, width, theta, params, max_positions, length, e);
	if (!strcmp(type, "proportional"))
		return proportional(freq, width, params, e);
	if (!strcmp(type, "linear")) {
		if (positive(params, "factor", 0, &factor, e))
			return -1;
		for (int j = 0; j < width / 2; j++)
			freq[j] /= (float)factor;
		return 0;
	}
	if (!strcmp(type, "llama3"))
		return llama3(freq, width / 2, params, max_positions, e);
	if (!strcmp(type, "yarn"))
		return yarn(freq, width, theta, params, max_positions, scale, e);
	if (!strcmp(type, "longrope"))
		return longrope(freq, width, theta, params, max_positions, length, scale, e);
	return err_refuse(e,
			  "rope type '%s' is not supported (default, dynamic, linear, llama3, "
			  "yarn, longrope, proportional are)",
			  type);
}
