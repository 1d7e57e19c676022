/* SPDX-License-Identifier: Apache-2.0 */
/*
 * block: parts of a layer that several families share, as flat calls of verbs. Each adds its result
 * to the residual stream.
 */
#ifndef DSPARK_BLOCK_H
#define DSPARK_BLOCK_H

#include "model.h"

/*
 * Tokens that token-wise products run over at a time, so that a long row costs attention memory
 * only.
 */
#define TOKEN_TILE 1024

/* Grouped-query attention with q, k, v in one product: qkv is [(heads + 2 kv_heads) D, H]. */
struct gqa {
	struct attention attention;	/* width = value_width = D */
	float eps;			/* of q_norm and k_norm */
	const struct weight *qkv, *qkv_bias, *o, *o_bias;	/* biases NULL or F32 vectors */
	const struct weight *q_norm, *k_norm;	/* [D], shared by all heads; NULL = none */
	const struct rope *rope;	/* NULL = no rotation */
};

/* x[T,H] F32 += o(attention(h)), h[T,H]. */
void block_gqa(struct chunk *c, struct tensor x, struct tensor h, const struct gqa *g);

/*
 * Latent attention: keys and values of all heads come from one latent vector a token. q_b is
 * [heads (nope + rotated), Q], kv_b [heads (nope + value), latent], o [H, heads value]; `rope`
 * turns the last `rotated` channels of each head of q.
 */
struct mla {
	int heads;
	int64_t nope, rotated, value, latent;
	float scale;
	const struct weight *q_b, *kv_b, *o;
	const struct rope *rope;
	const float *identity; /* host [latent, latent], 1 on the diagonal; for chosen keys */
};

/*
 * x[T,H] F32 += o(attention) from qr [T,Q], the normed input of q_b, and lat [T, latent | rotated]:
 * the normed latent and the turned key channels that all heads share, both of the compute dtype.
 *
 * Queries of rows longer than keys.cols see the keys of `keys` i32 [T,K] alone; theirs is the
 * absorbed form, whose keys are the latents themselves, so that a key is fetched once for all
 * heads. Shorter rows go the dense way and need no keys. K = 0: all rows do.
 */
void block_mla(struct chunk *c, struct tensor x, struct tensor qr, struct tensor lat,
	       struct tensor keys, const struct mla *m);

/*
 * The rows of a chunk that are longer than `most`, TOKEN_TILE queries at a time: f is called with
 * the piece of such a stretch as part of the chunk.
 */
void block_long_rows(struct chunk *c, int64_t most,
		     void (*f)(void *ctx, struct chunk *c, const struct piece *p), void *ctx);

/* x[T,H] F32 += down(act(gate_up h)): gate_up [2I,H] gate first, down [H,I]. */
void block_mlp(struct chunk *c, struct tensor x, struct tensor h, const struct weight *gate_up,
	       const struct weight *down, const struct act *act);

/*
 * Router product in F32 and the choice: ids and weights of c->routed from h [T,H], which need not
 * be the experts' input.
 */
void block_route(struct chunk *c, struct tensor h, const struct weight *router,
		 const struct router *r);

/*
 * Inverse frequencies, F32 as the reference computes them: theta^(-2j/width), j < width/2, then
 * scaling. `params` is the config's rope_parameters/rope_scaling object or NULL; types default,
 * dynamic, linear, llama3, yarn, longrope, proportional, with the arithmetic of transformers'
 * modeling_rope_utils. `length` is what rows are padded to, for classes whose dynamic and longrope
 * frequencies depend on it, else 0. *scale becomes the factor on cos and sin.
 */
int rope_frequencies(float *freq, int width, double theta, const json_t *params,
		     double max_positions, int64_t length, float *scale, struct err *e);

#endif
