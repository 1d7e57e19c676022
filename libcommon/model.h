/* SPDX-License-Identifier: Apache-2.0 */
/*
 * model: what one file of libcommon/models says about a family, and the small machinery around it.
 *
 * A model is one `const struct model`: config.json to sizes, one walk over its weights, one over its carry, and the forward as flat
 * calls of backend verbs. The walks serve plan (sizes), load (extents) and forward (binding), so they cannot drift.
 */
#ifndef DSPARK_MODEL_H
#define DSPARK_MODEL_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "backend.h"

struct err;
struct comm;
struct target;
struct chunk;

/* ---- weights ------------------------------------------------------------------------------------------------------- */

enum shard {
	SHARD_WHOLE,	/* on every rank */
	SHARD_ROWS,	/* FSDP: rank r of n holds rows [r*c, min((r+1)*c, rows)), c = ceil(rows/n) */
	SHARD_EXPERT,	/* E/ep consecutive experts; with ep < world ROWS over the ep_shard group */
	SHARD_TABLE,	/* read by row id, never gathered */
};

/* The unit a weight is acquired and released with. EXPORT is only copied to target_weights (the output head). */
enum unit_kind { UNIT_EMBED, UNIT_LAYER, UNIT_EXPERTS, UNIT_FINAL, UNIT_EXPORT };

/* Packed storage: codes in blocks of block_rows x block_cols that share a scale (blocks are indexed by global row and column). */
struct quant {
	enum { CODE_F8_E4M3, CODE_MXFP4, CODE_INT4 } code;
	int block_rows, block_cols;
	enum dtype scale;		/* DT_F32, DT_BF16, DT_F8_E8M0 (value 2^(byte-127)), DT_U8 (the same bytes under another tag) */
	const char *codes_suffix;	/* replaces ".weight" in the name of the codes, NULL = the name itself */
	const char *scale_suffix;	/* replaces ".weight" in the name of the scales: ".weight_scale_inv", ".scale" */
	bool zero_scale_is_zero;	/* scale byte 0 means 0, not 2^-127 */
};

#define WEIGHT_NAME 160
#define WEIGHT_PARTS 4

/* One checkpoint tensor that gives `rows` rows of a weight. "{e}" in a name stands for the expert's number. */
struct weight_part {
	char name[WEIGHT_NAME];
	char alt[WEIGHT_NAME];		/* another accepted name, "" = none */
	int64_t rows;
	bool optional;			/* absent: its rows are zero (biases that only some layers have) */
};

/*
 * One weight: [count, rows, cols] made of parts one above the other (q, k, v; gate, up), or of one fused checkpoint tensor
 * [count, rows, cols] with the rows in the same order. A vector is written with vector = true: its tensors have shape [rows].
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
	char fused[WEIGHT_NAME];	/* "" = none */
	const struct quant *const *quants;	/* NULL-ended list of accepted packed storages, NULL = plain only */
	bool optional;			/* absent altogether: field->count = 0 */
	const void *derived;		/* made by the model's derive, not read from the checkpoint: its data, F32; NULL = read */
};

/* The visitor of a walk: 0 to go on, -1 to stop with an error. */
struct weight_walk {
	int (*visit)(struct weight_walk *w, const struct weight_spec *s, struct err *e);
};

/* Helpers for a model's walk: a spec with one part. They return the spec by value for further changes before weight_visit. */
struct weight_spec weight_matrix(struct weight *field, enum unit_kind unit, int layer, int64_t rows, int64_t cols,
				 const char *fmt, ...) __attribute__((format(printf, 6, 7)));
struct weight_spec weight_vector(struct weight *field, enum unit_kind unit, int layer, int64_t n, const char *fmt, ...)
	__attribute__((format(printf, 5, 6)));
void weight_part_add(struct weight_spec *s, int64_t rows, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* Anything in which tensors are looked up by name: a checkpoint or a stage. */
struct entry {
	const char *name;
	enum dtype dtype;
	int ndim;
	const int64_t *shape;		/* of the whole tensor, also where only a slice is held */
	int file;			/* index into the holder's files */
	uint64_t begin, end;		/* bytes in that file */
	int64_t row0, rows;		/* rows of the first dimension that are held: [row0, row0 + rows) */
};

struct catalogue {
	const struct entry *(*find)(const struct catalogue *c, const char *name);	/* NULL if absent */
	const char *path;		/* for messages */
};

/* One stretch of rows of a weight and where it comes from. */
struct weight_source {
	const struct entry *entry;
	int64_t index;			/* expert (0 for count = 1) */
	int64_t row0, rows;		/* of the weight */
	int64_t from;			/* first row in the entry, counting an expert-stacked entry as [count*rows, cols] */
};

/*
 * Finds every tensor of a spec, checks names, shapes and dtypes, and calls `each` (may be NULL) for every source in order (index, then
 * row0). *stored becomes their dtype, F32 where several floating ones meet. An optional weight that is absent has no sources and *stored is DT_NONE.
 * Refuses a missing tensor, a wrong shape, a dtype that is not its kind's, and packed storage outside `quants`.
 */
int weight_resolve(const struct weight_spec *s, const struct catalogue *c, enum dtype *stored,
		   int (*each)(void *ctx, const struct weight_source *src, struct err *e), void *ctx, struct err *e);

/* ---- carry --------------------------------------------------------------------------------------------------------- */

/* A per-token array that outlives a layer, [ceil(tokens/ratio) , width]; number n of the walk is chunk.carry[n]. */
struct carry_spec {
	const char *name;
	enum dtype dtype;
	int64_t width, ratio;		/* elements a row; tokens of one data row that share it (1 = a row a token) */
	int first, last;		/* layers between which it lives; -1 = from embed on, `layers` = to final */
};

#define CARRY_MAX 16

/* ---- the forward --------------------------------------------------------------------------------------------------- */

/* Scratch memory of a chunk, a stack. With base NULL (plan) it only measures. */
struct arena {
	char *base;
	uint64_t size, used, peak;
};

/* What `layer` leaves for the routed experts and `finish` finds: the forward exchanges, multiplies and sums in between. */
struct routed {
	struct experts experts;		/* of this rank */
	struct tensor input, ids, weights;	/* [T,Hin] compute dtype, i32 [T,k], F32 [T,k] */
	struct tensor sum;		/* F32 [T,Hout] */
};

/* Tokens that go through a layer together. Pieces are host memory, ids and pos device memory. */
struct chunk {
	struct device *dev;
	int64_t tokens;
	int npieces;
	const struct piece *piece;
	struct tensor ids, pos;		/* i32 [T,1] */
	struct tensor carry[CARRY_MAX];
	struct arena scratch;
	struct routed routed;
	struct tensor result;		/* [T,H] F32, left by final: the state after the final norm */
	const struct comm *ep, *cp;	/* rank groups, NULL = alone */
};

/* [rows, cols] from the chunk's scratch. Exhaustion (a fault of the plan) is kept in dev->err. */
struct tensor scratch(struct chunk *c, enum dtype dtype, int64_t rows, int64_t cols);
static inline uint64_t scratch_mark(const struct chunk *c) { return c->scratch.used; }
static inline void scratch_release(struct chunk *c, uint64_t mark) { c->scratch.used = mark; }

/* When a captured id is there to be taken. */
enum tap_phase { TAP_EMBED, TAP_PRE /* after pre of `layer` */, TAP_LAYER /* after `layer` */, TAP_FINAL };
struct tap {
	enum tap_phase phase;
	int layer;
};

/* What the recipe may change about a target. */
struct target_options {
	bool force_hf;
	int64_t num_hidden_layers;	/* 0 = all */
};

/* An opened target: sizes every command needs, and the model's own state (sizes and weights by name). */
struct target {
	const struct model *model;
	char *type;			/* top-level model_type, as the manifest records it */
	int64_t vocab, hidden, layers;	/* of the language model */
	int64_t experts;		/* routed experts of a MoE layer, 0 = none */
	int64_t max_positions;		/* 0 = no limit that is enforced */
	bool sharded;			/* the reference shards this family (gather by default), else it replicates it */
	int ncarry;
	struct carry_spec carry[CARRY_MAX];
	void *state;
};

struct model {
	const char *name;
	const char *const *types;	/* NULL-ended model_type strings */

	/* Fills t (but model and type) from config.json, refusing what cannot be honoured. `release` frees state. */
	int (*config)(struct target *t, const json_t *config, const struct target_options *o, struct err *e);
	void (*release)(struct target *t);

	/* Every tensor, in the order of use. */
	int (*weights)(struct target *t, struct weight_walk *w, struct err *e);

	/* Optional: computes what `derived` specs point to from other files of the model directory. */
	int (*derive)(struct target *t, const char *dir, struct err *e);

	void (*embed)(struct target *t, struct chunk *c);			/* fills the carry that lives from -1 */
	void (*pre)(struct target *t, int layer, struct chunk *c);		/* optional */
	void (*layer)(struct target *t, int layer, struct chunk *c);		/* up to and with the router; whole if dense */
	bool (*routed)(const struct target *t, int layer);			/* optional: layer has routed experts */
	void (*finish)(struct target *t, int layer, struct chunk *c);		/* optional: after the routed sum */
	void (*final)(struct target *t, struct chunk *c);			/* leaves c->result */

	/* Where layer id `id` (-1 .. layers-1, checked by the caller) is captured, or a refusal. */
	int (*tap)(const struct target *t, int64_t id, struct tap *out, struct err *e);
	/* The [T,H] tensor to capture at that point; may use scratch. */
	struct tensor (*captured)(struct target *t, int64_t id, struct chunk *c);
};

/* Finds the family by model_type and runs its config. Refuses unknown types, and MiniMax M3, with a sentence. `dir` is the model directory (messages). */
int target_open(struct target *t, const char *dir, const json_t *config, const struct target_options *o, struct err *e);
void target_release(struct target *t);

/* The table of families, NULL-ended; generated from the list in Makefile.am. */
extern const struct model *const models[];

#endif
