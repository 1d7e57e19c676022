/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How a plan comes about. The order of refusals is the reference's where it has one: parallelism,
 * cache settings, target, ids, then the rows, then the directory, then space and memory.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "budget.h"
#include "cache.h"
#include "checkpoint.h"
#include "err.h"
#include "exchange.h"
#include "file.h"
#include "json.h"
#include "layout.h"
#include "log.h"
#include "mem.h"
#include "recipe.h"
#include "stage.h"
#include "text.h"
#include "tokens.h"

#ifdef HAVE_CUDA
static const bool have_cuda = true;
#else
static const bool have_cuda = false;
#endif

#define WORLD_MAX (1 << 20)
#define SHA256_EMPTY "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

/* ---- memory of a rank ------------------------------------------------------------------------ */

static int64_t longest_row(const struct plan *p, const struct tokens *t)
{
	int64_t most = 0;

	if (!t)
		return p->g.seq_length;
	for (int64_t i = 0; i < t->rows; i++)
		if (tokens_length(t, i) > most)
			most = tokens_length(t, i);
	return most;
}

/* What a choice of residency, window and block leads to. */
struct candidate {
	struct budget_choice c;
	int64_t window, window_most, chunk, chunk_most, exchange_rows;
	bool spill;
	struct budget_weights weights; /* of share 0 */
	uint64_t scratch, carry, exchange, capture, own, total;
};

static bool gathers(enum residency r)
{
	return r == WEIGHTS_GATHER || r == WEIGHTS_GATHER_STREAM;
}

static bool streams(enum residency r)
{
	return r == WEIGHTS_STREAM || r == WEIGHTS_GATHER_STREAM;
}

static void cut_chunks(const struct plan *p, const struct budget *b, struct candidate *x)
{
	int64_t chunk = x->c.apart ? LAYOUT_DEVICE_CHUNK : LAYOUT_CHUNK_TOKENS;

	x->window_most = p->longest > x->window ? p->longest : x->window;
	x->chunk = x->window < chunk ? x->window : chunk;
	x->chunk_most = p->longest > x->chunk ? p->longest : x->chunk;
	x->exchange_rows = exchange_rows(x->chunk_most, b->most.experts, b->most.k, p->ep);
}

/* Of the memory that --memory speaks of. */
static uint64_t captures(const struct candidate *x)
{
	return x->spill || x->c.apart ? 0 : x->capture;
}

/* Two windows of captured states: one being filled, one being written. */
static void add_up(const struct plan *p, const struct budget *b, struct candidate *x)
{
	bool split = budget_splits(b, &x->c);

	cut_chunks(p, b, x);
	budget_weights(b, &x->c, 0, &x->weights);
	x->scratch = budget_scratch(b, p->ids, p->g.nids, x->chunk_most, split);
	x->carry = budget_carry(b, x->window_most, split);
	x->exchange = exchange_bytes(&b->most, x->exchange_rows, p->compute);
	x->capture = 2 * (uint64_t)x->window_most * (uint64_t)(p->g.nids + 1) *
		     (uint64_t)p->g.hidden * dtype_size(p->g.dtype);
	x->own = x->c.apart ? DEVICE_OWN_BYTES : 0;
	x->total = x->weights.held + x->weights.working + x->scratch + x->exchange + x->own +
		   (x->spill ? 0 : x->carry) + captures(x);
}

/* The largest blocks of experts with which the candidate fits; of one expert where none do. */
static bool fit_blocks(const struct plan *p, const struct budget *b, uint64_t memory,
		       struct candidate *x)
{
	x->c.block = budget_block(b, &x->c);
	for (;;) {
		int64_t now = x->c.block ? x->c.block : b->most.experts, blocks;

		if (x->c.block) {	/* of one size, as nearly as can be */
			blocks = (b->most.experts + now - 1) / now;
			x->c.block = (b->most.experts + blocks - 1) / blocks;
		}
		add_up(p, b, x);
		if (!memory || x->total <= memory)
			return true;
		if (now <= 1 || x->c.mesh.ep > 1 || !budget_splits(b, &x->c))
			return false;
		x->c.block = now / 2;
	}
}

/* The windows that may be taken. */
static void windows(const struct candidate *x, const struct layout_options *o, int64_t *most,
		    int64_t *least)
{
	bool streamed = streams(x->c.residency);

	if (o->window_tokens) {
		*most = *least = o->window_tokens;
	} else if (x->c.apart) {
		*most = streamed ? LAYOUT_DEVICE_STREAMED : LAYOUT_DEVICE_TOKENS;
		*least = LAYOUT_DEVICE_LEAST;
	} else {
		*most = streamed ? LAYOUT_WINDOW_STREAMED : LAYOUT_WINDOW_TOKENS;
		*least = LAYOUT_WINDOW_TOKENS;
	}
}

/*
 * The largest window from the most down to the least; where weights come and go, and that is not
 * enough, what a window holds is spilled, unless it has to be a device's own memory.
 */
static bool fit(const struct plan *p, const struct budget *b, const struct layout_options *o,
		struct candidate *x)
{
	bool may_spill = streams(x->c.residency) && !x->c.apart;
	int64_t most, least;

	windows(x, o, &most, &least);
	for (int spill = 0; spill <= may_spill; spill++)
		for (x->window = most; x->window >= least; x->window /= 2) {
			x->spill = spill;
			if (fit_blocks(p, b, o->memory, x))
				return true;
		}
	x->window = least;
	fit_blocks(p, b, o->memory, x);
	return false;
}

/* Has the plan's shard group several ranks, which may gather? */
static bool is_group(const struct plan *p)
{
	return p->world / p->replicate > 1;
}

static struct candidate candidate(const struct plan *p, enum residency r)
{
	bool cut = gathers(r) && is_group(p);

	return (struct candidate){ .c = { .residency = r,
					  .mesh = { p->world, p->ep, p->replicate, cut },
					  .apart = plan_apart(p) } };
}

/* Why a candidate does not fit: what is always held, a unit that comes and goes, or all of it. */
static void why_not(struct text *t, const struct candidate *x, uint64_t memory)
{
	const struct budget_weights *w = &x->weights;

	text_printf(t, "%s weights need ", residency_name(x->c.residency));
	text_bytes(t, (double)x->total);
	text_add(t, " a rank, but --memory allows ");
	text_bytes(t, (double)memory);
	if (w->held > memory) {
		text_add(t, ": a rank holds ");
		text_bytes(t, (double)w->held);
		text_add(t, " of them all the time");
	} else if (w->layer >= 0 && w->held + w->working > memory) {
		text_printf(t, ": %s of layer %d, ",
			    w->kind == UNIT_EXPERTS ? "a block of the experts"
						    : "attention and dense part",
			    w->layer);
		text_bytes(t, (double)w->largest);
		text_printf(t,
			    ", does not fit as often as it is needed beside what is always held "
			    "(%llu bytes)",
			    (unsigned long long)w->held);
	} else {
		text_printf(t, ": weights %llu, activations %llu, %s %llu bytes%s",
			    (unsigned long long)(w->held + w->working),
			    (unsigned long long)(x->scratch + x->exchange +
						 (x->spill ? 0 : x->carry)),
			    x->c.apart ? "the device for itself" : "buffers",
			    (unsigned long long)(captures(x) + x->own),
			    x->spill ? ", windows spilled" : "");
	}
}

/* Residencies from the fastest to the smallest; only the ranks of a group gather. */
static int by_speed(const struct plan *p, enum residency out[WEIGHTS_COUNT])
{
	int n = 0;

	out[n++] = WEIGHTS_RESIDENT;
	if (is_group(p)) {
		out[n++] = WEIGHTS_GATHER;
		out[n++] = WEIGHTS_GATHER_STREAM;
	}
	out[n++] = WEIGHTS_STREAM;
	return n;
}

/* What would do instead of a candidate that does not fit. */
static void what_fits(struct text *t, const struct plan *p, const struct budget *b,
		      const struct layout_options *o, const struct candidate *x)
{
	enum residency list[WEIGHTS_COUNT];
	struct candidate least = *x, y;
	int n = by_speed(p, list);

	for (int i = 0; i < n; i++) {
		y = candidate(p, list[i]);
		if (fit(p, b, o, &y)) {
			text_printf(t, "; --weights %s fits, in ", residency_name(list[i]));
			text_bytes(t, (double)y.total);
			return;
		}
		if (y.total < least.total)
			least = y;
	}
	text_add(t, "; no --weights fits: allow at least ");
	text_bytes(t, (double)least.total);
	text_printf(t, " (%llu bytes), for %s weights", (unsigned long long)least.total,
		    residency_name(least.c.residency));
	if (least.c.mesh.ep > 1 && least.weights.kind == UNIT_EXPERTS)
		text_add(t, ", or raise distributed.ep_size");
	if (least.window > p->longest)
		text_add(t, ", or lower --window-tokens");
}

static int too_large(const struct plan *p, const struct budget *b, const struct candidate *x,
		     const struct layout_options *o, struct err *e)
{
	struct text t = TEXT_INIT;
	int rc = -1;

	why_not(&t, x, o->memory);
	what_fits(&t, p, b, o, x);
	if (text_ok(&t, e))
		goto out;
	if (o->force)
		log_warn("%s", t.s);
	rc = o->force ? 0 : err_refuse(e, "%s", t.s);
out:
	text_release(&t);
	return rc;
}

/*
 * The residencies that are tried, in this order, up to the first that fits: the one asked for; else
 * what the recipe says, or with --memory from the fastest to the smallest.
 */
static int order(const struct plan *p, const struct recipe *r, const struct target *target,
		 const struct layout_options *o, enum residency out[WEIGHTS_COUNT])
{
	bool group = is_group(p);
	int n = 0;

	if (o->weights >= 0) {
		out[n++] = (enum residency)o->weights;
		return n;
	}
	if (!o->memory) {
		out[n++] = group && r->offload		     ? WEIGHTS_GATHER_STREAM
			   : group && target->sharded ? WEIGHTS_GATHER
						      : WEIGHTS_RESIDENT;
		return n;
	}
	return by_speed(p, out);
}

static void adopt(struct plan *p, const struct candidate *x)
{
	p->residency = x->c.residency;
	p->cut = x->c.mesh.cut;
	p->keep = x->c.keep;
	p->spill = x->spill;
	p->block_experts = x->c.block;
	p->window_tokens = x->window;
	p->window_most = x->window_most;
	p->chunk_tokens = x->chunk;
	p->chunk_most = x->chunk_most;
	p->exchange_rows = x->exchange_rows;
	p->weight_bytes = x->weights.held + x->weights.working;
	p->host_weight_bytes = x->weights.host_held + x->weights.host_working;
	p->scratch_bytes = x->scratch;
	p->carry_bytes = x->carry;
	p->exchange_bytes = x->exchange;
	p->capture_bytes = x->capture;
}

/* Runs of ranks that need the same under a residency. */
static int list_memory(struct plan *p, const struct budget *b, const struct candidate *x,
		       struct err *e)
{
	struct plan_memory *last = NULL;
	struct budget_weights w;
	int shares;

	if (stage_shares(&x->c.mesh, &shares, e))
		return -1;
	for (int rank = 0; rank < p->world; rank++) {
		budget_weights(b, &x->c, rank % shares, &w);
		if (last && last->held == w.held && last->working == w.working &&
		    last->host_held == w.host_held) {
			last->last = rank;
			continue;
		}
		if (mem_grow(&p->memory, &p->memory_cap, p->nmemory + 1, sizeof *p->memory, e))
			return -1;
		last = &p->memory[p->nmemory++];
		*last = (struct plan_memory){
			.residency = x->c.residency,
			.first = rank,
			.last = rank,
			.held = w.held,
			.working = w.working,
			.activations = x->scratch + x->exchange + (x->spill ? 0 : x->carry),
			.buffers = captures(x),
			.own = x->own,
			.host_held = w.host_held,
			.host_working = w.host_working,
			.host_buffers = x->c.apart ? x->capture : 0,
		};
		last->total = last->held + last->working + last->activations + last->buffers +
			      last->own;
	}
	return 0;
}

/* How every residency would do, the chosen one as chosen. */
static int list_all(struct plan *p, const struct budget *b, const struct candidate *chosen,
		    const struct layout_options *o, struct err *e)
{
	for (int r = 0; r < WEIGHTS_COUNT; r++) {
		struct candidate x = candidate(p, (enum residency)r);

		if ((enum residency)r == chosen->c.residency)
			x = *chosen;
		else if (gathers((enum residency)r) && !is_group(p))
			continue;
		else
			fit(p, b, o, &x);
		if (list_memory(p, b, &x, e))
			return -1;
	}
	return 0;
}

/* `moe.reshard_after_forward: false` keeps what was gathered where memory allows. */
static void consider_keeping(struct candidate *x, const struct plan *p, const struct budget *b,
			     const struct recipe *r, const struct layout_options *o)
{
	struct candidate kept = *x;

	if (x->c.residency != WEIGHTS_GATHER || r->reshard_after_forward)
		return;
	kept.c.keep = true;
	if (fit(p, b, o, &kept))
		*x = kept;
}

static int plan_memory(struct plan *p, const struct recipe *r, struct target *target,
		       const struct checkpoint *c, const struct tokens *t,
		       const struct layout_options *o, struct err *e)
{
	enum residency list[WEIGHTS_COUNT];
	struct candidate x = { 0 };
	struct budget b;
	int n = order(p, r, target, o, list), rc = -1;
	bool fits = false;

	p->longest = longest_row(p, t);
	if (budget_open(&b, target, c, p->compute, e))
		goto out;
	p->checkpoint = b.checkpoint;
	p->used = b.used;
	p->unused = b.unused;
	b.unused = NULL;
	for (int i = 0; i < n && !fits; i++) {
		x = candidate(p, list[i]);
		fits = fit(p, &b, o, &x);
	}
	if (!fits && too_large(p, &b, &x, o, e))
		goto out;
	consider_keeping(&x, p, &b, r, o);
	adopt(p, &x);
	rc = list_all(p, &b, &x, o, e);
out:
	budget_release(&b);
	return rc;
}

/* ---- what is captured ------------------------------------------------------------------------ */

static int plan_ids(struct plan *p, const struct recipe *r, const struct target *target,
		    struct err *e)
{
	if (r->n_layer_ids) {
		p->g.nids = r->n_layer_ids;
		p->ids = mem_calloc((size_t)r->n_layer_ids, sizeof *p->ids, e);
		if (p->ids)
			memcpy(p->ids, r->layer_ids, (size_t)r->n_layer_ids * sizeof *p->ids);
	} else {
		p->ids = recipe_default_layers(r->draft_num_hidden_layers, target->layers,
					       &p->g.nids, e);
	}
	if (!p->ids)
		return -1;
	for (int i = 0; i < p->g.nids; i++) {
		struct tap tap;

		if (p->ids[i] < -1 || p->ids[i] >= target->layers)
			return err_refuse(e,
					  "recipe_args.target_layer_ids: layer %lld is outside -1 "
					  "(the embedding output) to %lld",
					  (long long)p->ids[i], (long long)target->layers - 1);
		if (i && p->ids[i] <= p->ids[i - 1])
			return err_refuse(e,
					  "recipe_args.target_layer_ids: %lld after %lld, but ids "
					  "must be strictly increasing",
					  (long long)p->ids[i], (long long)p->ids[i - 1]);
		if (target->model->tap(target, p->ids[i], &tap, e))
			return -1;
	}
	return 0;
}

/*
 * The template hash of the manifest: the tokens file's word, held against the recipe's own template
 * where there is one.
 */
static int plan_template(const struct tokens *t, const char *template_sha, const char **out,
			 struct err *e)
{
	*out = t ? t->template_sha256 : template_sha[0] ? template_sha : SHA256_EMPTY;
	if (t && template_sha[0] && strcmp(template_sha, t->template_sha256))
		return err_refuse(e,
				  "'%s' was made with another chat template (sha256 %.12s..., the "
				  "recipe's is %.12s...): run dspark-tokenize again",
				  t->file.path, t->template_sha256, template_sha);
	return 0;
}

static json_t *manifest_json(const struct plan *p, const struct recipe *r, const struct target *t,
			     const char *template_sha)
{
	json_t *ids = json_array();

	for (int i = 0; i < p->g.nids; i++)
		json_array_append_new(ids, json_integer(p->ids[i]));
	return json_pack("{s:s, s:s, s:i, s:I, s:b, s:b, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:o, "
		"s:s, s:s, s:I, s:s, s:s?}",
		"chat_template_sha256", template_sha, "dtype", dtype_recipe_name(p->g.dtype),
		"format_version", 1,
		"hidden_size", (json_int_t)t->hidden,
		"mask_generation_prompt", r->mask_generation_prompt,
		"mask_reasoning_content", r->mask_reasoning_content,
		"num_hidden_layers", (json_int_t)t->layers,
		"num_samples", (json_int_t)p->g.rows, "seq_length", (json_int_t)p->g.seq_length,
		"shard_size", (json_int_t)p->g.shard_size,
		"shuffle_seed", (json_int_t)r->shuffle_seed,
		"target_hidden_dim", (json_int_t)(t->hidden * p->g.nids),
		"target_last_hidden_dim", (json_int_t)t->hidden,
		"target_layer_ids", ids, "target_model", r->target, "target_model_type", t->type,
		"target_vocab_size", (json_int_t)t->vocab, "train_data_path", r->train_data_path,
		"train_split", r->train_split);
}

static int plan_identity(struct plan *p, const struct recipe *r, const struct target *target,
			 const struct tokens *t, const char *template_sha, struct err *e)
{
	p->identity.json = json_pack("{s:o, s:I, s:s, s:s, s:s, s:b, s:s, s:s, s:s, s:s, s:i}",
		"manifest", manifest_json(p, r, target, template_sha),
		"pad_token_id", (json_int_t)p->g.pad_token_id,
		"rows_xxh3_128", t ? t->rows_xxh3 : "",
		"tokenizer_xxh3_128", t ? t->tokenizer_xxh3 : "",
		"weights_xxh3_128", p->weights, "target_force_hf", p->force_hf,
		"compute_dtype", dtype_recipe_name(p->compute), "backend", p->device,
		"layer_index", "output of decoder layer i, -1 embedding, last after the final norm",
		"last_hidden", "after the final norm", "numerics", PLAN_NUMERICS);
	if (!p->identity.json)
		return err_fail(e, "out of memory, or a recipe string is not valid UTF-8");
	return identity_finish(&p->identity, e);
}

/* ---- ranges ---------------------------------------------------------------------------------- */

struct todo {
	bool *done;			/* [shards] */
	int64_t shards, left;
};

static int64_t shard_tokens(const struct plan *p, const struct tokens *t, int64_t shard)
{
	int64_t first = shard * p->g.shard_size;

	return t->offset[first + geometry_shard_rows(&p->g, shard)] - t->offset[first];
}

static int range_add(struct plan_range *r, size_t *cap, const struct plan *p,
		     const struct tokens *t, int64_t shard, struct err *e)
{
	if (r->nintervals && r->shards[r->nintervals - 1][1] == shard) {
		r->shards[r->nintervals - 1][1]++;
	} else {
		if (mem_grow(&r->shards, cap, (size_t)r->nintervals + 1, sizeof *r->shards, e))
			return -1;
		r->shards[r->nintervals][0] = shard;
		r->shards[r->nintervals++][1] = shard + 1;
	}
	r->nshards++;
	r->rows += geometry_shard_rows(&p->g, shard);
	r->tokens += shard_tokens(p, t, shard);
	return 0;
}

/*
 * By shards: the reference's partition, left // world shards a rank and one more for the first
 * (left mod world). By tokens: a rank takes shards until the tokens handed out reach its
 * proportional part, so no rank is off by more than half a shard; every rank still gets one where
 * there are enough.
 */
static bool rank_is_full(const struct todo *d, const struct plan_range *r, int world,
			 enum balance how, int64_t given, int64_t left, int64_t next, int64_t total)
{
	int64_t after = world - r->rank - 1;

	if (how == BALANCE_SHARDS)
		return r->nshards >= d->left / world + (r->rank < d->left % world);
	if (!after)
		return false;
	if (left <= after)
		return r->nshards >= 1;
	return r->nshards >= 1 &&
	       (double)given + (double)next / 2 > (double)total / world * (r->rank + 1);
}

static int plan_ranges(struct plan *p, const struct tokens *t, const struct todo *d,
		       enum balance how, struct err *e)
{
	int64_t total = 0, given = 0, left = d->left;
	int rank = 0;
	size_t cap = 0;

	p->range = mem_calloc((size_t)p->world, sizeof *p->range, e);
	if (!p->range)
		return -1;
	for (int i = 0; i < p->world; i++)
		p->range[i].rank = i;
	for (int64_t s = 0; s < d->shards; s++)
		if (!d->done[s])
			total += shard_tokens(p, t, s);
	for (int64_t s = 0; s < d->shards; s++) {
		int64_t tokens;

		if (d->done[s])
			continue;
		tokens = shard_tokens(p, t, s);
		while (rank < p->world - 1 && rank_is_full(d, &p->range[rank], p->world, how, given,
							   left, tokens, total)) {
			rank++;
			cap = 0;
		}
		if (range_add(&p->range[rank], &cap, p, t, s, e))
			return -1;
		given += tokens;
		left--;
	}
	for (int i = 0; i < p->world; i++) {
		struct plan_cursor c;
		int64_t first, n;

		plan_windows(&c, p, &p->range[i], t);
		while (plan_next_window(&c, &first, &n))
			p->range[i].windows++;
	}
	return 0;
}

/* ---- sizes and the directory ----------------------------------------------------------------- */

static uint64_t blocks(uint64_t bytes, uint64_t block)
{
	return (bytes + block - 1) / block * block;
}

static bool has_target_weights(const struct plan *p)
{
	struct err none = ERR_INIT;
	char *path = file_join(p->cache_dir, "target_weights.safetensors", &none);
	uint64_t size = 0;
	bool there = path && !file_size(path, &size, NULL, &none);

	free(path);
	return there && size == p->target_weights_bytes;
}

/* Exact file sizes, and what will be allocated for everything and for what is still to do. */
static void plan_sizes(struct plan *p, const struct tokens *t, const struct todo *d,
		       const struct file_space *space, uint64_t *needed)
{
	int64_t shards = geometry_shards(&p->g),
		last = shards ? geometry_shard_rows(&p->g, shards - 1) : 0;

	p->shard_bytes = geometry_shard_bytes(&p->g, p->g.shard_size);
	p->last_shard_bytes = shards ? geometry_shard_bytes(&p->g, last) : 0;
	p->target_weights_bytes = geometry_target_weights(&p->g);
	p->total_bytes =
		p->target_weights_bytes +
		(shards ? (uint64_t)(shards - 1) * p->shard_bytes + p->last_shard_bytes : 0);
	p->allocated_bytes = blocks(p->target_weights_bytes, space->block) + space->block;
	*needed = d->left && !has_target_weights(p) ? p->allocated_bytes : 0;
	for (int64_t s = 0; s < shards && t; s++) {
		uint64_t b = geometry_allocated(&p->g, geometry_shard_rows(&p->g, s),
						shard_tokens(p, t, s), space->block, space->sparse);

		p->allocated_bytes += b;
		if (!d->done[s])
			*needed += b;
	}
}

static int check_space(const struct plan *p, uint64_t needed, uint64_t free_bytes, bool force,
		       struct err *e)
{
	struct text need = TEXT_INIT, have = TEXT_INIT;

	if (needed <= free_bytes)
		return 0;
	text_bytes(&need, (double)needed);
	text_bytes(&have, (double)free_bytes);
	if (force)
		log_warn("'%s' has %s free, but the cache still needs %s", p->cache_dir, have.s,
			 need.s);
	else
		err_refuse(e,
			   "'%s' has %s free, but the cache still needs %s (%llu bytes): make "
			   "room, choose another "
			   "recipe_args.cache_output_dir, or use -f to go on anyway",
			   p->cache_dir, have.s, need.s, (unsigned long long)needed);
	text_release(&need);
	text_release(&have);
	return force ? 0 : -1;
}

/* What an estimate does not know yet is what the cache that is there says. */
static int fill_unknown(json_t *want, const struct plan *p, bool rows, const json_t *have)
{
	static const char *const of_rows[] = { "pad_token_id", "rows_xxh3_128",
					       "tokenizer_xxh3_128" };
	json_t *manifest = json_object_get(want, "manifest");
	int rc = 0;

	for (size_t i = 0; !rows && i < sizeof of_rows / sizeof *of_rows; i++)
		rc |= json_object_set(want, of_rows[i], json_object_get(have, of_rows[i]));
	if (!rows)
		rc |= json_object_set(manifest, "num_samples",
				      json_object_get(json_object_get(have, "manifest"),
						      "num_samples"));
	if (!p->weights[0])
		rc |= json_object_set(want, "weights_xxh3_128",
				      json_object_get(have, "weights_xxh3_128"));
	return rc;
}

static int check_directory(const struct plan *p, const struct tokens *t, struct err *e)
{
	struct identity want = { .json = json_deep_copy(p->identity.json) };
	struct cache_state s = { 0 };
	int rc = -1;

	memcpy(want.digest, p->identity.digest, sizeof want.digest);
	if (!want.json) {
		err_fail(e, "out of memory");
		goto out;
	}
	if (cache_inspect(&s, p->cache_dir, e))
		goto out;
	if (!p->runnable && s.exists && !s.foreign)
		fill_unknown(want.json, p, t, s.identity);
	rc = p->runnable || s.exists ? cache_check(p->cache_dir, &p->g, &want, e) : 0;
out:
	cache_state_release(&s);
	identity_release(&want);
	return rc;
}

/* ---- the whole ------------------------------------------------------------------------------- */

static int plan_mesh(struct plan *p, const struct recipe *r, const struct target *target,
		     const struct layout_options *o, struct err *e)
{
	int shares;

	if (r->ep_size > WORLD_MAX || r->cp_size > WORLD_MAX || r->dp_replicate_size > WORLD_MAX)
		return err_refuse(e,
				  "distributed: ep_size, cp_size and dp_replicate_size may be at "
				  "most %d",
				  WORLD_MAX);
	p->ep = (int)r->ep_size;
	p->cp = (int)r->cp_size;
	p->replicate = (int)r->dp_replicate_size;
	p->world = (int)(o->world ? o->world : r->ep_size);
	if (p->world % p->ep)
		return err_refuse(
			e, "distributed.ep_size is %d, which does not divide a world of %d ranks",
			p->ep, p->world);
	if (p->ep > 1 && target->experts && target->experts % p->ep)
		return err_refuse(e,
				  "distributed.ep_size is %d, which does not divide the target's "
				  "%lld experts",
				  p->ep, (long long)target->experts);
	if (p->world % p->cp)
		return err_refuse(
			e, "distributed.cp_size is %d, which does not divide a world of %d ranks",
			p->cp, p->world);
	if (p->cp > 1)
		return err_refuse(e,
				  "distributed.cp_size is %d: context parallelism is not supported "
				  "in this version, set it to 1",
				  p->cp);
	if (!target->experts)
		p->ep = 1; /* nothing is divided */
	return stage_shares(&(struct stage_mesh){ p->world, p->ep, p->replicate, true }, &shares,
			    e);
}

/* Whether this build could use a device that this machine has, and that is not hidden from it. */
static bool cuda_here(void)
{
	const char *visible = getenv("CUDA_VISIBLE_DEVICES");

	if (!have_cuda || (visible && (!*visible || !strcmp(visible, "-1"))))
		return false;
	return !access("/dev/nvidiactl", F_OK) || !access("/proc/driver/nvidia/gpus", F_OK);
}

/* Several ranks under nccl mean CUDA, as in the reference, wherever the plan is made. */
static int plan_device(struct plan *p, const struct recipe *r, const struct layout_options *o,
		       struct err *e)
{
	bool nccl = p->world > 1 && r->backend && !strcmp(r->backend, "nccl"),
	     automatic = !strcmp(o->device, "auto");
	const char *device = !automatic ? o->device : nccl || cuda_here() ? "cuda" : "cpu";

	if (automatic && nccl && !have_cuda)
		log_info("dist_env.backend is nccl and there are %d ranks: planned for CUDA, which "
			 "this build does not have; --device cpu plans for CPUs",
			 p->world);
	p->device = mem_strdup(device, e);
	if (!p->device)
		return -1;
	p->compute = o->compute != DT_NONE ? o->compute : plan_apart(p) ? DT_BF16 : DT_F32;
	return 0;
}

static int plan_copy(struct plan *p, const struct recipe *r, const struct tokens *t,
		     const char *tokens_path, const struct layout_options *o, struct err *e)
{
	p->version = PLAN_VERSION;
	p->force_hf = r->target_force_hf;
	p->target_layers = r->target_num_hidden_layers;
	p->timeout_minutes = r->timeout_minutes;
	p->recipe = json_incref(r->tree);
	p->g.seq_length = r->seq_length;
	p->g.shard_size = r->cache_shard_size;
	p->g.dtype = r->cache_dtype;
	p->g.rows = t ? t->rows : 0;
	p->g.pad_token_id = t ? t->pad_token_id : 0;
	p->tokens = tokens_path ? mem_strdup(tokens_path, e) : NULL;
	p->target_dir = mem_strdup(r->target, e);
	p->cache_dir = mem_strdup(r->cache_output_dir, e);
	p->balance = mem_strdup(o->balance == BALANCE_SHARDS ? "shards" : "tokens", e);
	return p->target_dir && p->cache_dir && p->balance && (p->tokens || !tokens_path) ? 0 : -1;
}

static int plan_target_facts(struct plan *p, const struct recipe *r, struct target *target,
			     const struct checkpoint *c, char derived[DIGEST_HEX], struct err *e)
{
	p->config = json_incref(c->config);
	p->g.hidden = target->hidden;
	p->g.vocab = target->vocab;
	if (target->max_positions && r->seq_length > target->max_positions)
		return err_refuse(
			e, "recipe_args.seq_length is %lld, but the target ends at %lld positions",
			(long long)r->seq_length, (long long)target->max_positions);
	if (plan_ids(p, r, target, e) || geometry_check(&p->g, "the recipe's cache", e))
		return -1;
	if (!c->partial &&
	    (checkpoint_identity(c, p->weights, e) || stage_derived(derived, target, c->dir, e)))
		return -1;
	return 0;
}

/* With the directory known: what is left, how the ranks share it, how big it becomes. */
static int plan_work(struct plan *p, const struct tokens *t, const struct layout_options *o,
		     struct err *e)
{
	struct todo d = { .shards = geometry_shards(&p->g) };
	struct file_space space;
	uint64_t needed;
	int64_t done = 0;
	int rc = -1;

	d.done = mem_calloc((size_t)d.shards, sizeof *d.done, e);
	if (!d.done || check_directory(p, t, e) ||
	    cache_done(p->cache_dir, &p->g, p->identity.digest, d.done, &done, e) ||
	    file_space(p->cache_dir, &space, e))
		goto out;
	d.left = d.shards - done;
	plan_sizes(p, t, &d, &space, &needed);
	if (t && check_space(p, needed, space.free, o->force, e))
		goto out;
	rc = p->runnable ? plan_ranges(p, t, &d, o->balance, e) : 0;
out:
	free(d.done);
	return rc;
}

int layout_plan(struct plan *p, const struct recipe *r, struct target *target,
		const struct checkpoint *c, const struct tokens *t, const char *tokens_path,
		const char *template_sha, const struct layout_options *o, struct err *e)
{
	char derived[DIGEST_HEX] = "";
	struct stage_mesh mesh;
	const char *sha;

	memset(p, 0, sizeof *p);
	p->runnable = t && !c->partial;
	if (plan_copy(p, r, t, tokens_path, o, e) || plan_mesh(p, r, target, o, e) ||
	    plan_device(p, r, o, e) || plan_target_facts(p, r, target, c, derived, e))
		goto bad;
	if (t && (tokens_match(t, r, e) || plan_template(t, template_sha, &sha, e) ||
		  tokens_verify(t, target->vocab, e)))
		goto bad;
	if (!t && plan_template(NULL, template_sha, &sha, e))
		goto bad;
	if (plan_memory(p, r, target, c, t, o, e))
		goto bad;
	mesh = stage_mesh(p);
	stage_key(p->stage_key, p->weights, &mesh, p->target_layers, p->force_hf, derived);
	if (plan_identity(p, r, target, t, sha, e) || plan_work(p, t, o, e))
		goto bad;
	return 0;
bad:
	plan_release(p);
	return -1;
}

json_t *layout_host(const struct plan *p, const struct recipe *r, struct err *e)
{
	char cwd[4096], name[256] = "";
	struct file_space space;
	int64_t done = 0;
	json_t *host;

	if (!getcwd(cwd, sizeof cwd)) {
		err_errno(e, "cannot find the working directory");
		return NULL;
	}
	gethostname(name, sizeof name - 1);
	if (file_space(p->cache_dir, &space, e))
		return NULL;
	done = geometry_shards(&p->g);
	for (int i = 0; p->range && i < p->world; i++)
		done -= p->range[i].nshards;
	host = json_pack("{s:s, s:s, s:s, s:s?, s:I, s:I, s:I, s:b}",
		"record", "host", "cwd", cwd, "host", name,
		"target_dir", strcmp(r->target, r->target_dir) ? r->target_dir : NULL,
		"free_bytes", (json_int_t)space.free,
		"block_bytes", (json_int_t)space.block,
		"shards_present", (json_int_t)(p->range ? done : 0), "sparse", space.sparse);
	if (!host)
		err_fail(e, "out of memory, or a path is not valid UTF-8");
	return host;
}
