/* SPDX-License-Identifier: Apache-2.0 */
/*
 * model: what one file of libcommon/models says about a family, and the small machinery around it.
 *
 * A model is one `const struct model`: config.json to sizes, one walk over its weights, one over
 * its carry, and the forward as flat calls of backend verbs. The walks serve plan (sizes), load
 * (extents) and forward (binding), so they cannot drift.
 */
#ifndef DSPARK_MODEL_H
#define DSPARK_MODEL_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "backend.h"
#include "catalogue.h"

struct err;
struct comm;
struct target;
struct chunk;

/* ---- weights --------------------------------------------------------------------------------- */

/*
 * The unit a weight is acquired and released with. ALWAYS is acquired first and never released
 * (rope frequencies, maps of token ids). LAYER i is held from `pre` to the last `finish` of layer
 * i. The first weight of EMBED is the embedding that target_weights stores; EXPORT is only copied
 * there (the output head).
 */
enum unit_kind { UNIT_ALWAYS, UNIT_EMBED, UNIT_LAYER, UNIT_EXPERTS, UNIT_FINAL, UNIT_EXPORT };

#define WEIGHT_NAME 160
#define WEIGHT_PARTS 4

/*
 * One checkpoint tensor that gives `rows` rows of a weight. "{e}" in a name stands for the expert's
 * number.
 */
struct weight_part {
	char name[WEIGHT_NAME];
	char alt[WEIGHT_NAME];		/* another accepted name, "" = none */
	int64_t rows;
};

/*
 * One weight: [count, rows, cols] made of parts one above the other (q, k, v; gate, up), or of one
 * fused checkpoint tensor with the rows in the same order. A vector is written with vector = true:
 * its tensors have shape [rows].
 */
struct weight_spec {
	struct weight *field;		/* what it fills */
	enum unit_kind unit;
	int layer;			/* of UNIT_LAYER and UNIT_EXPERTS, else -1 */
	int64_t count, rows, cols;
	bool vector;
	enum weight_use use;
	enum weight_unit kind;
	enum shard shard;
	int nparts;
	struct weight_part part[WEIGHT_PARTS];
	/*
	 * [count, rows, cols] or [count * rows, cols]; "" = none. Without parts it must exist
	 * unless optional
	 */
	char fused[WEIGHT_NAME];
	/* NULL-ended list of accepted packed storages (quant.h), NULL or empty = plain only */
	const struct quant *const *quants;
	bool optional;	/* absent altogether (some parts alone are refused): field->count = 0 */
	/* known from config.json: the model's host memory, not read; NULL = read */
	const void *data;
	enum dtype data_dtype;		/* of data: F32, or I32 with WEIGHT_RAW */
	/*
	 * not in the checkpoint: made by `derive` at staging under the part's name, then read from
	 * the stage
	 */
	bool derived;
	/*
	 * set by who resolves, not by models: the experts to look for, [first, first + held); held
	 * 0 = all
	 */
	int64_t first, held;
};

/* The visitor of a walk: 0 to go on, -1 to stop with an error. */
struct weight_walk {
	int (*visit)(struct weight_walk *w, const struct weight_spec *s, struct err *e);
};

/*
 * Helpers for a model's walk: a spec with one part. They return the spec by value for further
 * changes before weight_visit.
 */
struct weight_spec weight_matrix(struct weight *field, enum unit_kind unit, int layer, int64_t rows,
				 int64_t cols, const char *fmt, ...)
	__attribute__((format(printf, 6, 7)));
struct weight_spec weight_vector(struct weight *field, enum unit_kind unit, int layer, int64_t n,
				 const char *fmt, ...) __attribute__((format(printf, 5, 6)));
void weight_part_add(struct weight_spec *s, int64_t rows, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));

/* One stretch of rows of a weight and where it comes from. */
struct weight_source {
	const struct entry *entry;
	/*
	 * of packed codes: the grid of this tensor [ceil(its rows / block_rows), ceil(cols /
	 * block_cols)], of fused ones [count, rows, cols] one for each matrix; NULL = plain
	 */
	const struct entry *scale;
	const struct quant *quant;	/* layout of this tensor, NULL = plain */
	/*
	 * rows of the entry from block0 on have the rows of the grid from grid0 on: fused tensors
	 * have a grid for each matrix
	 */
	int64_t block0, grid0;
	int64_t index;			/* expert, counted from spec.first (0 for count = 1) */
	int64_t row0, rows;		/* of the weight */
	/* first row in the entry, counting an expert-stacked entry as [count*rows, cols] */
	int64_t from;
};

/* Row of its grid that row `row` of the source's entry needs, and rows of it that all need. */
int64_t weight_grid_row(const struct weight_source *s, int64_t row);
int64_t weight_grid_rows(const struct weight_source *s);

/*
 * How a weight is kept. Parts that are stored in different layouts are expanded while they are
 * read: quant is NULL then, stored F32.
 */
struct weight_storage {
	enum dtype stored;		/* DT_NONE = absent */
	const struct quant *quant;
};

/*
 * Finds every tensor of a spec, checks names, shapes and dtypes, and calls `each` (may be NULL) for
 * every source in order (index, then row0). Refuses a missing tensor, a wrong shape, a dtype that
 * is not its kind's, an optional weight of which only parts exist, and packed storage outside
 * `quants`: codes without scales, scales without codes, a grid that is not what the blocks give,
 * zero points and orders of columns. Whether and how a tensor is packed is told by the names, the
 * dtypes and the shapes of its codes and of the scales beside them.
 */
int weight_resolve(const struct weight_spec *s, const struct catalogue *c,
		   struct weight_storage *out,
		   int (*each)(void *ctx, const struct weight_source *src, struct err *e),
		   void *ctx, struct err *e);

/* ---- carry ----------------------------------------------------------------------------------- */

/*
 * A per-token array that outlives a layer; number n of the list is chunk.carry[n]. ratio r > 1: an
 * entry per r consecutive tokens of a row of data, a last partial group has none; the chunk's view
 * has keys / r rows, and the entries of piece p are rows p.kv_begin / r .. + p.length / r of it
 * (whole divisions: groups of different pieces never meet, because floor is superadditive).
 */
struct carry_spec {
	const char *name;
	enum dtype dtype;		/* DT_NONE = the compute dtype */
	int64_t width, ratio;		/* elements a row; tokens an entry stands for */
	/* over chunk.keys (whole rows) instead of chunk.tokens; always so for ratio > 1 */
	bool keys;
	/* layers between which it lives; -1 = from embed on, `layers` = to final */
	int first, last;
};

#define CARRY_MAX 16

/* ---- the forward ----------------------------------------------------------------------------- */

/* Scratch memory of a chunk, a stack. With base NULL (plan) it only measures. */
struct arena {
	char *base;
	uint64_t size, used, peak;
};

/*
 * The routed experts of a layer, known without running it, so that plan and forward can make room
 * for what travels.
 */
struct routing {
	int64_t experts, k;
	int64_t in, out;		/* Hin, Hout */
};

/*
 * Between `layer` and `finish`. The forward gives the tensors before `layer`, which fills input,
 * ids (ascending by expert id in every row, hash routing too), weights, and of experts all but
 * first and count. `finish` finds sum, the carry and an empty scratch: experts may have run in
 * blocks over all chunks in between.
 */
struct routed {
	struct experts experts;
	struct tensor input, ids, weights;	/* [T,in] compute dtype, i32 [T,k], F32 [T,k] */
	struct tensor sum;			/* F32 [T,out] */
};

/* Tokens that go through a layer together. Pieces are host memory, ids and pos device memory. */
struct chunk {
	struct device *dev;
	int64_t tokens;
	/* tokens of the whole rows, what kv_begin counts; = tokens without context parallelism */
	int64_t keys;
	int npieces;
	const struct piece *piece;
	struct tensor ids, pos;		/* i32 [T,1] */
	struct tensor carry[CARRY_MAX];
	struct arena scratch;
	struct routed routed;
	struct tensor result;	/* [T,H] F32, left by final: the state after the final norm */
	const struct comm *ep, *cp;	/* rank groups, NULL = alone */
};

/*
 * [rows, cols] from the chunk's scratch. Exhaustion (a fault of the plan) is kept in dev->err. What
 * a model takes depends on tokens and keys alone and grows with them, never on the number or length
 * of pieces: it is measured with one row of the largest size.
 */
struct tensor scratch(struct chunk *c, enum dtype dtype, int64_t rows, int64_t cols);
static inline uint64_t scratch_mark(const struct chunk *c) { return c->scratch.used; }
static inline void scratch_release(struct chunk *c, uint64_t mark) { c->scratch.used = mark; }

/* The tensors of c->routed but `experts`, from scratch. */
void routed_room(struct chunk *c, const struct routing *r);

/*
 * The same as views of window arrays input, ids, weights and sum, for `tokens` tokens from `begin`
 * on; bytes of these arrays for `tokens` tokens; the largest sizes that any layer has, false where
 * none has routed experts.
 */
void routed_views(struct routed *x, void *const array[4], const struct routing *r, int64_t begin,
		  int64_t tokens, enum dtype compute);
void routed_bytes(size_t bytes[4], const struct routing *r, int64_t tokens, enum dtype compute);
bool routing_most(const struct target *t, struct routing *most);

/*
 * x [T,w] of all ranks of c->cp as [keys,w] in scratch, so that piece.kv_* index it; x itself
 * without context parallelism. Collective: every rank calls it, also with no tokens.
 */
struct tensor chunk_keys(struct chunk *c, struct tensor x);

/*
 * The chunk's view [n, width] of carry `spec`, whose window array at `base` holds all tokens; the
 * chunk begins at token `begin` of the window.
 */
struct tensor carry_view(const struct carry_spec *spec, void *base, int64_t begin, int64_t tokens,
			 enum dtype compute);
/* Bytes of a window array for `tokens` tokens. */
uint64_t carry_bytes(const struct carry_spec *spec, int64_t tokens, enum dtype compute);

/* When a captured id is there to be taken. */
enum tap_phase {
	TAP_EMBED,
	TAP_PRE /* after pre of `layer` */,
	TAP_LAYER /* after `layer` */,
	TAP_FINAL
};
struct tap {
	enum tap_phase phase;
	int layer;
};

/* What the recipe may change about a target. */
struct target_options {
	bool force_hf;
	int64_t num_hidden_layers;	/* 0 = all */
	/* what the reference pads every row to: some rope types depend on it */
	int64_t seq_length;
};

/*
 * An opened target: sizes every command needs, and the model's own state (sizes and weights by
 * name).
 */
struct target {
	const struct model *model;
	char *type;			/* top-level model_type, as the manifest records it */
	int64_t vocab, hidden, layers;	/* of the language model */
	int64_t experts;		/* routed experts of a MoE layer, 0 = none */
	int64_t max_positions;		/* 0 = no limit that is enforced */
	/* the reference shards this family (gather by default), else it replicates it */
	bool sharded;
	int ncarry;
	struct carry_spec carry[CARRY_MAX];
	void *state;
};

struct model {
	const char *name;
	const char *const *types;	/* NULL-ended model_type strings */

	/*
	 * Fills t (but model and type) from config.json, refusing what cannot be honoured.
	 * `release` frees state.
	 */
	int (*config)(struct target *t, const json_t *config, const struct target_options *o,
		      struct err *e);
	void (*release)(struct target *t);

	/* Every tensor, in the order of use; those of a unit one after the other. */
	int (*weights)(struct target *t, struct weight_walk *w, struct err *e);

	/*
	 * Optional: makes every `derived` weight from other files of the model directory and gives
	 * it to `put`; digest (hex) covers all bytes it read and enters the stage key.
	 */
	int (*derive)(struct target *t, const char *dir, char digest[33],
		      int (*put)(void *ctx, const char *name, enum dtype dtype, int64_t rows,
				 int64_t cols, const void *data, struct err *e),
		      void *ctx, struct err *e);

	/* fills the carry that lives from -1 */
	void (*embed)(struct target *t, struct chunk *c);
	void (*pre)(struct target *t, int layer, struct chunk *c);		/* optional */
	/* up to and with the router; whole if dense */
	void (*layer)(struct target *t, int layer, struct chunk *c);
	/* optional: layer has routed experts; fills r */
	bool (*routed)(const struct target *t, int layer, struct routing *r);
	/* optional: after the routed sum */
	void (*finish)(struct target *t, int layer, struct chunk *c);
	void (*final)(struct target *t, struct chunk *c);		/* leaves c->result */

	/* Where layer id `id` (-1 .. layers-1, checked by the caller) is captured, or a refusal. */
	int (*tap)(const struct target *t, int64_t id, struct tap *out, struct err *e);
	/* The [T,H] tensor to capture at that point; may use scratch. */
	struct tensor (*captured)(struct target *t, int64_t id, struct chunk *c);
};

/*
 * Finds the family by model_type and runs its config. Refuses unknown types, and MiniMax M3, with a
 * sentence. `dir` is the model directory (messages).
 */
int target_open(struct target *t, const char *dir, const json_t *config,
		const struct target_options *o, struct err *e);
void target_release(struct target *t);

/* The table of families, NULL-ended; generated from the list in Makefile.am. */
extern const struct model *const models[];

#endif
