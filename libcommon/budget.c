/* SPDX-License-Identifier: Apache-2.0 */
/* budget: sums over the walk. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif
#include <stdlib.h>
#include <string.h>

#include "budget.h"
#include "checkpoint.h"
#include "err.h"
#include "loader.h"
#include "mem.h"
#include "quant.h"
#include "weights.h"

#define BLOCK_BYTES (256u << 20)

struct budget_weight {
	struct weight shape; /* whole */
	enum unit_kind kind;
	int layer;
	enum shard shard;
	bool known;      /* from config.json: nothing is read */
	uint64_t stored; /* bytes in the checkpoint of one row of one matrix */
	uint64_t grids;  /* of the scales of one matrix */
	uint64_t strip;  /* of one row of a grid, 0 = no scales */
};

/* ---- the walk -------------------------------------------------------------------------------- */

struct walker {
	struct weight_walk walk; /* first */
	struct budget *b;
	const struct checkpoint *c;
	uint64_t stored, grids; /* of the weight under way, whole */
	uint64_t strip;
	int64_t cols;	/* of it, 0 where its numbers are no parameters */
};

static void use(struct walker *w, const struct entry *t, int64_t parameters)
{
	size_t i = (size_t)(t - w->c->entry);

	if (!w->b->reads || w->b->reads[i])
		return;
	w->b->reads[i] = true;
	w->b->used.tensors++;
	w->b->used.parameters += parameters;
	w->b->used.bytes += t->end - t->begin;
}

static int count_source(void *ctx, const struct weight_source *src, struct err *e)
{
	struct walker *w = ctx;

	(void)e;
	if (src->entry->ndim < 0)
		return 0;
	w->stored += (uint64_t)src->rows * entry_row_bytes(src->entry);
	use(w, src->entry, src->rows * w->cols);
	if (src->scale && src->scale->ndim >= 0) {
		w->grids += (uint64_t)weight_grid_rows(src) * entry_row_bytes(src->scale);
		w->strip = entry_row_bytes(src->scale);
		use(w, src->scale, 0);
	}
	return 0;
}

static int visit(struct weight_walk *walk, const struct weight_spec *s, struct err *e)
{
	struct walker *w = (struct walker *)walk;
	struct budget *b = w->b;
	struct weight_storage storage;
	struct budget_weight *x;
	int64_t rows = s->count * s->rows;

	if (mem_grow(&b->weight, &b->cap, b->n + 1, sizeof *b->weight, e))
		return -1;
	w->stored = w->grids = w->strip = 0;
	w->cols = s->kind == WEIGHT_RAW ? 0 : s->cols;
	if (weight_resolve(s, &w->c->catalogue, &storage, count_source, w, e))
		return -1;
	*s->field = (struct weight){ .count = storage.stored == DT_NONE ? 0 : s->count,
				     .rows = s->rows,
				     .cols = s->cols,
				     .use = s->use,
				     .unit = s->kind,
				     .stored = storage.stored,
				     .quant = storage.quant };
	if (!s->field->count || s->unit == UNIT_EXPORT)
		return 0;
	x = &b->weight[b->n++];
	*x = (struct budget_weight){ .shape = *s->field,
				     .kind = s->unit,
				     .layer = s->layer,
				     .shard = s->shard,
				     .known = s->data };
	x->stored = w->stored       ? w->stored / (uint64_t)rows
		    : storage.quant ? quant_row_bytes(storage.quant, s->cols)
				    : (uint64_t)s->cols * dtype_size(storage.stored);
	x->grids = w->grids / (uint64_t)s->count;
	x->strip = w->strip;
	return 0;
}

/* The name of the tensor that nobody reads, or what those of several begin with, and "*". */
static int name_unused(struct budget *b, const struct checkpoint *c, struct err *e)
{
	const char *first = NULL;
	size_t n = 0, same, names = 0;

	for (size_t i = 0; i < c->nentries; i++) {
		const char *name = c->entry[i].name;

		if (b->reads[i])
			continue;
		if (!names++) {
			first = name;
			n = strlen(name);
		}
		for (same = 0; same < n && name[same] == first[same];)
			same++;
		n = same;
	}
	while (names > 1 && n && first[n - 1] != '.')
		n--;
	if (!names)
		return 0;
	b->unused = mem_calloc(n + 2, 1, e);
	if (!b->unused)
		return -1;
	memcpy(b->unused, first, n);
	if (names > 1)
		b->unused[n] = '*';
	return 0;
}

static int count_checkpoint(struct budget *b, const struct checkpoint *c, struct err *e)
{
	b->reads = mem_calloc(c->nentries, sizeof *b->reads, e);
	if (!b->reads)
		return -1;
	b->checkpoint.tensors = (int64_t)c->nentries;
	for (size_t i = 0; i < c->nentries; i++)
		b->checkpoint.bytes += c->entry[i].end - c->entry[i].begin;
	return 0;
}

int budget_open(struct budget *b, struct target *t, const struct checkpoint *c, enum dtype compute,
		struct err *e)
{
	struct walker w = { .walk = { visit }, .b = b, .c = c };

	*b = (struct budget){ .target = t, .compute = compute };
	if (!c->partial && count_checkpoint(b, c, e))
		return -1;
	routing_most(t, &b->most);
	if (t->model->weights(t, &w.walk, e))
		return -1;
	return b->reads ? name_unused(b, c, e) : 0;
}

void budget_release(struct budget *b)
{
	free(b->weight);
	free(b->reads);
	free(b->unused);
	memset(b, 0, sizeof *b);
}

/* ---- weights --------------------------------------------------------------------------------- */

/* What has to be known of a unit. */
struct size {
	enum unit_kind kind;
	int layer, members;
	uint64_t all, block;         /* on the device: of all it has, of a block */
	uint64_t own;                /* stored, of this share */
	uint64_t wire;               /* stored, of a block, of all members */
	int64_t experts, block_size; /* of this rank; of a block */
};

static uint64_t packed(const struct budget *b, const struct budget_weight *x, int64_t count)
{
	struct weight w = x->shape;

	w.count = count;
	return count ? weight_bytes(&w, b->compute) : 0;
}

static int64_t block_of(int64_t experts, const struct budget_choice *c)
{
	return c->block && c->mesh.ep == 1 && c->block < experts ? c->block : experts;
}

/* Scales that n rows of the stack need: whole grids of the matrices that they touch. */
static uint64_t grids_of(const struct budget_weight *x, int64_t n)
{
	int64_t touched = n ? n / x->shape.rows + 2 : 0;

	return (uint64_t)(touched < x->shape.count ? touched : x->shape.count) * x->grids;
}

static void add_weight(const struct budget *b, const struct budget_choice *c,
		       const struct budget_weight *x, int share, struct size *u)
{
	bool expert = x->shard == SHARD_EXPERT;
	int64_t count = expert ? x->shape.count / c->mesh.ep : x->shape.count,
		block = expert ? block_of(count, c) : count, first, n;
	int members = x->known ? 1 : stage_members(&c->mesh, x->shard);

	u->all += packed(b, x, count);
	u->block += packed(b, x, block);
	if (expert) {
		u->experts = count;
		u->block_size = block;
	}
	if (members == 1)
		return;
	u->members = members;
	stage_share(&c->mesh, share, x->shard, x->shape.count, x->shape.rows, &first, &n);
	u->own += (uint64_t)n * x->stored + grids_of(x, n);
	u->wire += (uint64_t)(block * x->shape.rows) * x->stored;
	if (x->strip)
		u->wire += (uint64_t)block *
			   loader_scale_bytes(x->grids, x->strip,
					      (uint64_t)x->shape.rows * x->stored, members);
}

/* Weights of a unit follow one another in the walk. */
static size_t next_unit(const struct budget *b, const struct budget_choice *c, size_t i, int share,
			struct size *u)
{
	const struct budget_weight *x = &b->weight[i];

	*u = (struct size){ .kind = x->kind, .layer = x->layer, .members = 1 };
	for (; i < b->n && b->weight[i].kind == u->kind && b->weight[i].layer == u->layer; i++)
		add_weight(b, c, &b->weight[i], share, u);
	return i;
}

static bool by_row(const struct budget_weight *x, const struct budget_choice *c)
{
	return x->shard == SHARD_TABLE && !x->known && c->residency != WEIGHTS_RESIDENT;
}

struct working {
	uint64_t layer, block, wire;
	bool several; /* blocks of a layer */
};

static void add_unit(const struct budget_choice *c, const struct size *u, struct working *w,
		     struct budget_weights *out)
{
	w->wire = u->wire > w->wire ? u->wire : w->wire;
	if (weights_unit_stays(u->kind, c->residency, c->keep, u->members)) {
		out->held += u->all;
		return;
	}
	if (c->residency == WEIGHTS_GATHER)
		*(c->apart ? &out->host_held : &out->held) += u->own;
	if (u->block > out->largest) {
		out->largest = u->block;
		out->kind = u->kind;
		out->layer = u->layer;
	}
	if (u->kind == UNIT_LAYER) {
		w->layer = u->block > w->layer ? u->block : w->layer;
	} else {
		w->block = u->block > w->block ? u->block : w->block;
		w->several = w->several || u->block_size < u->experts;
	}
}

void budget_weights(const struct budget *b, const struct budget_choice *c, int share,
		    struct budget_weights *out)
{
	struct working w = { 0, 0, 0, false };
	struct size u;

	*out = (struct budget_weights){ .layer = -1 };
	for (size_t i = 0; i < b->n;) {
		if (by_row(&b->weight[i], c)) {
			i++;
			continue;
		}
		i = next_unit(b, c, i, share, &u);
		add_unit(c, &u, &w, out);
	}
	/* one computes while the next is made */
	out->working = 2 * w.layer + (w.several ? 2 : 1) * w.block;
	/* NCCL gathers in the device's memory, MPI in the host's */
	out->working += w.wire;
	out->host_working += c->apart ? w.wire : 0;
}

bool budget_splits(const struct budget *b, const struct budget_choice *c)
{
	int members = stage_members(&c->mesh, SHARD_EXPERT);

	return b->most.experts && !weights_unit_stays(UNIT_EXPERTS, c->residency, c->keep, members);
}

int64_t budget_block(const struct budget *b, const struct budget_choice *c)
{
	int64_t least = b->most.experts / 8, most;
	uint64_t bytes = 0;
	int layer = -1;

	for (size_t i = 0; i < b->n; i++) {
		const struct budget_weight *x = &b->weight[i];

		if (x->shard == SHARD_EXPERT && (layer < 0 || layer == x->layer)) {
			layer = x->layer;
			bytes += packed(b, x, 1);
		}
	}
	if (!budget_splits(b, c) || c->mesh.ep > 1 || !bytes)
		return 0;
	most = (int64_t)(BLOCK_BYTES / bytes);
	most = most > least ? most : least;
	return most < 1 ? 1 : most < b->most.experts ? most : 0;
}

/* ---- activations ----------------------------------------------------------------------------- */

/* Experts run with the chunk's tensors and an empty scratch, `layer` and `finish` with both. */
static void measure_layer(struct target *t, int i, bool split, struct chunk *c)
{
	struct routing r;
	uint64_t mark;

	c->scratch.used = 0;
	if (t->model->pre)
		t->model->pre(t, i, c);
	c->scratch.used = 0;
	if (!t->model->routed || !t->model->routed(t, i, &r)) {
		t->model->layer(t, i, c);
		return;
	}
	if (split)
		routed_views(&c->routed, (void *const[4]){ NULL }, &r, 0, c->tokens,
			     c->dev->compute);
	else
		routed_room(c, &r);
	mark = scratch_mark(c);
	t->model->layer(t, i, c);
	scratch_release(c, mark);
	t->model->finish(t, i, c);
}

uint64_t budget_scratch(const struct budget *b, const int64_t *ids, int nids, int64_t tokens,
			bool split)
{
	struct target *t = b->target;
	struct device d = { .be = &backend_measure, .compute = b->compute };
	struct piece whole = { .count = tokens, .length = tokens, .kv_count = tokens };
	struct chunk c = { .dev = &d,
			   .tokens = tokens,
			   .keys = tokens,
			   .npieces = 1,
			   .piece = &whole,
			   .ids = { NULL, DT_I32, tokens, 1, 1 },
			   .pos = { NULL, DT_I32, tokens, 1, 1 } };

	for (int i = 0; i < t->ncarry; i++)
		c.carry[i] = carry_view(&t->carry[i], NULL, 0, tokens, b->compute);
	t->model->embed(t, &c);
	for (int i = 0; i < t->layers; i++)
		measure_layer(t, i, split, &c);
	c.scratch.used = 0;
	t->model->final(t, &c);
	for (int i = 0; i < nids; i++) {
		uint64_t mark = scratch_mark(&c);

		t->model->captured(t, ids[i], &c);
		scratch_release(&c, mark);
	}
	return c.scratch.peak;
}

uint64_t budget_carry(const struct budget *b, int64_t tokens, bool split)
{
	uint64_t bytes = (uint64_t)tokens * 2 * sizeof(int32_t); /* ids and positions */
	size_t routed[4];

	for (int i = 0; i < b->target->ncarry; i++)
		bytes += carry_bytes(&b->target->carry[i], tokens, b->compute);
	routed_bytes(routed, &b->most, tokens, b->compute);
	for (int i = 0; split && i < 4; i++)
		bytes += routed[i];
	return bytes;
}
