/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The plan's text form. The record is complete: load and forward need it, the tokens file, the
 * checkpoint and nothing of the recipe. What may differ between two runs of the same command stands
 * in `host`, so that plans can be compared byte for byte.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif
#include <stdlib.h>
#include <string.h>

#include "backend.h"
#include "err.h"
#include "file.h"
#include "json.h"
#include "mem.h"
#include "plan.h"
#include "text.h"
#include "tokens.h"

static const char *const residencies[] = { "resident", "gather", "stream", "gather,stream" };

const char *residency_name(enum residency r)
{
	return residencies[r];
}

static int residency_find(const char *name, enum residency *r, struct err *e)
{
	for (int i = 0; i < WEIGHTS_COUNT; i++)
		if (!strcmp(name, residencies[i])) {
			*r = (enum residency)i;
			return 0;
		}
	return err_refuse(e, "the plan's weights '%s' are unknown to this version", name);
}

void plan_release(struct plan *p)
{
	for (int r = 0; p->range && r < p->world; r++)
		free(p->range[r].shards);
	free(p->range);
	free(p->memory);
	json_decref(p->recipe);
	json_decref(p->config);
	identity_release(&p->identity);
	free(p->tokens);
	free(p->target_dir);
	free(p->cache_dir);
	free(p->ids);
	free(p->device);
	free(p->balance);
	free(p->unused);
	free(p->cwd);
	free(p->target_found);
	memset(p, 0, sizeof *p);
}

bool plan_apart(const struct plan *p)
{
	return !strcmp(p->device, "cuda");
}

uint64_t plan_rank_bytes(const struct plan *p)
{
	uint64_t window = p->spill ? 0 : p->carry_bytes + p->capture_bytes;

	if (plan_apart(p))
		window = p->carry_bytes + DEVICE_OWN_BYTES;
	return p->weight_bytes + p->scratch_bytes + p->exchange_bytes + window;
}

uint64_t plan_host_bytes(const struct plan *p)
{
	return plan_apart(p) ? p->host_weight_bytes + p->capture_bytes : 0;
}

bool plan_lockstep(const struct plan *p)
{
	return p->world > 1 && (p->cut || p->ep > 1);
}

/* ---- to records ------------------------------------------------------------------------------ */

static json_t *ids_json(const struct plan *p)
{
	json_t *a = json_array();

	for (int i = 0; i < p->g.nids; i++)
		json_array_append_new(a, json_integer(p->ids[i]));
	return a;
}

static json_t *cache_json(const struct plan *p)
{
	return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:s, s:o, s:I, s:I, s:I, s:I, s:I}",
		"rows", (json_int_t)p->g.rows, "seq_length", (json_int_t)p->g.seq_length,
		"shard_size", (json_int_t)p->g.shard_size,
		"shards", (json_int_t)geometry_shards(&p->g), "hidden", (json_int_t)p->g.hidden,
		"vocab", (json_int_t)p->g.vocab,
		"dtype", dtype_recipe_name(p->g.dtype), "layer_ids", ids_json(p),
		"shard_bytes", (json_int_t)p->shard_bytes,
		"last_shard_bytes", (json_int_t)p->last_shard_bytes,
		"target_weights_bytes", (json_int_t)p->target_weights_bytes,
		"total_bytes", (json_int_t)p->total_bytes,
		"allocated_bytes", (json_int_t)p->allocated_bytes);
}

static json_t *rank_json(const struct plan *p)
{
	json_t *o = json_pack("{s:I, s:I, s:I, s:I, s:I, s:I}",
		"weights", (json_int_t)p->weight_bytes,
		"activations",
		(json_int_t)(p->scratch_bytes + p->carry_bytes + p->exchange_bytes),
		"scratch", (json_int_t)p->scratch_bytes,
		"carry", (json_int_t)p->carry_bytes,
		"exchange", (json_int_t)p->exchange_bytes,
		"buffers", (json_int_t)p->capture_bytes);

	if (plan_apart(p)) {
		json_object_set_new(o, "own", json_integer((json_int_t)DEVICE_OWN_BYTES));
		json_object_set_new(o, "host_weights",
				    json_integer((json_int_t)p->host_weight_bytes));
	}
	return o;
}

/* Of a device with memory of its own: that, and what lies in host memory beside it. */
static json_t *apart_json(const struct plan_memory *m)
{
	return json_pack("{s:s, s:[i, i], s:I, s:I, s:I, s:I, s:I, s:{s:I, s:I, s:I, s:I}}",
		"weights", residency_name(m->residency), "ranks", m->first, m->last,
		"held", (json_int_t)m->held, "working", (json_int_t)m->working,
		"activations", (json_int_t)m->activations, "own", (json_int_t)m->own,
		"total", (json_int_t)m->total,
		"host", "held", (json_int_t)m->host_held, "working", (json_int_t)m->host_working,
		"buffers", (json_int_t)m->host_buffers, "total",
		(json_int_t)(m->host_held + m->host_working + m->host_buffers));
}

static json_t *memory_json(const struct plan *p)
{
	json_t *a = json_array();

	for (size_t i = 0; i < p->nmemory; i++) {
		const struct plan_memory *m = &p->memory[i];

		if (plan_apart(p)) {
			json_array_append_new(a, apart_json(m));
			continue;
		}
		json_array_append_new(a, json_pack("{s:s, s:[i, i], s:I, s:I, s:I, s:I, s:I}",
			"weights", residency_name(m->residency), "ranks", m->first, m->last,
			"held", (json_int_t)m->held, "working", (json_int_t)m->working,
			"activations", (json_int_t)m->activations,
			"buffers", (json_int_t)m->buffers, "total", (json_int_t)m->total));
	}
	return a;
}

static json_t *run_json(const struct plan *p)
{
	return json_pack("{s:s, s:s, s:s, s:b, s:b, s:b, s:b, s:I, s:I, s:I, s:i, s:i, s:i, s:I, "
		"s:I, s:I, s:I, s:f, s:s}",
		"device", p->device, "compute_dtype", dtype_recipe_name(p->compute),
		"weights", residency_name(p->residency),
		"target_force_hf", p->force_hf, "cut", p->cut, "keep", p->keep, "spill", p->spill,
		"block_experts", (json_int_t)p->block_experts,
		"exchange_rows", (json_int_t)p->exchange_rows,
		"target_num_hidden_layers", (json_int_t)p->target_layers,
		"ep_size", p->ep, "cp_size", p->cp, "dp_replicate_size", p->replicate,
		"window_tokens", (json_int_t)p->window_tokens,
		"chunk_tokens", (json_int_t)p->chunk_tokens,
		"window_most", (json_int_t)p->window_most, "chunk_most", (json_int_t)p->chunk_most,
		"timeout_minutes", p->timeout_minutes, "balance", p->balance);
}

static json_t *checkpoint_json(const struct plan *p)
{
	return json_pack("{s:I, s:I, s:I, s:I, s:I, s:s?}",
		"bytes", (json_int_t)p->checkpoint.bytes, "used", (json_int_t)p->used.bytes,
		"tensors", (json_int_t)p->checkpoint.tensors,
		"used_tensors", (json_int_t)p->used.tensors,
		"used_parameters", (json_int_t)p->used.parameters, "unused", p->unused);
}

static json_t *plan_json(const struct plan *p)
{
	return json_pack("{s:s, s:i, s:i, s:b, s:s, s:s, s:s?, s:s, s:s, s:o, s:o, s:o, "
		"s:o, s:o, s:O, s:s, s:O, s:O}",
		"record", "plan", "version", p->version, "world", p->world, "runnable", p->runnable,
		"target", p->target_dir, "cache_output_dir", p->cache_dir, "tokens", p->tokens,
		"weights_xxh3_128", p->weights, "stage_key", p->stage_key,
		"checkpoint", checkpoint_json(p),
		"cache", cache_json(p), "run", run_json(p), "rank_bytes", rank_json(p),
		"memory", memory_json(p),
		"identity", p->identity.json, "identity_xxh3_128", p->identity.digest,
		"recipe", p->recipe, "config", p->config);
}

static json_t *range_json(const struct plan_range *r)
{
	json_t *shards = json_array();

	for (int i = 0; i < r->nintervals; i++)
		json_array_append_new(shards, json_pack("[I, I]", (json_int_t)r->shards[i][0],
							(json_int_t)r->shards[i][1]));
	return json_pack("{s:s, s:i, s:o, s:I, s:I, s:I}",
		"record", "range", "rank", r->rank, "shards", shards,
		"rows", (json_int_t)r->rows, "tokens", (json_int_t)r->tokens,
		"windows", (json_int_t)r->windows);
}

static int digest_records(char hex[DIGEST_HEX], const json_t *plan, json_t *const *ranges, int n,
			  struct err *e)
{
	json_t *bare = json_copy((json_t *)plan);
	struct text t = TEXT_INIT;
	int rc = -1;

	if (!bare)
		return err_fail(e, "out of memory");
	json_object_del(bare, "digest");
	json_line(&t, bare);
	for (int i = 0; i < n; i++)
		json_line(&t, ranges[i]);
	if (!text_ok(&t, e)) {
		digest_xxh3(hex, t.s, t.len);
		rc = 0;
	}
	json_decref(bare);
	text_release(&t);
	return rc;
}

int plan_write(FILE *out, struct plan *p, json_t *host, struct err *e)
{
	int n = p->range ? p->world : 0, rc = -1;
	json_t *plan = plan_json(p), **range = mem_calloc((size_t)n + 1, sizeof *range, e);

	if (!range)
		goto out;
	for (int i = 0; i < n; i++)
		if (!(range[i] = range_json(&p->range[i])))
			break;
	if (!plan) {
		err_refuse(e, "the plan cannot be written: a path in it is not valid UTF-8");
		goto out;
	}
	if (n && !range[n - 1]) {
		err_fail(e, "out of memory");
		goto out;
	}
	if (digest_records(p->digest, plan, range, n, e))
		goto out;
	json_object_set_new(plan, "digest", json_string(p->digest));
	if (record_write(out, plan, e) || record_write(out, host, e))
		goto out;
	for (int i = 0; i < n; i++)
		if (record_write(out, range[i], e))
			goto out;
	rc = 0;
out:
	for (int i = 0; range && i < n; i++)
		json_decref(range[i]);
	free(range);
	json_decref(plan);
	return rc;
}

/* ---- from records ---------------------------------------------------------------------------- */

#define PLAN "the plan record"

static int take_str(const json_t *o, const char *key, char **out, struct err *e)
{
	const char *s;

	if (json_str_or(o, PLAN, key, NULL, &s, e))
		return -1;
	if (!s)
		return err_refuse(e, PLAN " has no '%s'", key);
	*out = mem_strdup(s, e);
	return *out ? 0 : -1;
}

static int take_digest(const json_t *o, const char *key, char out[DIGEST_HEX], struct err *e)
{
	const char *s;

	if (json_str(o, PLAN, key, &s, e))
		return -1;
	if (strlen(s) != DIGEST_HEX - 1)
		return err_refuse(e, PLAN ": '%s' is not a digest", key);
	memcpy(out, s, DIGEST_HEX);
	return 0;
}

static int take_size(const json_t *o, const char *key, int64_t min, int64_t *out, struct err *e)
{
	if (json_int(o, PLAN, key, out, e))
		return -1;
	if (*out < min)
		return err_refuse(e, PLAN ": '%s' is %lld", key, (long long)*out);
	return 0;
}

static int take_bytes(const json_t *o, const char *key, uint64_t *out, struct err *e)
{
	int64_t v;

	if (take_size(o, key, 0, &v, e))
		return -1;
	*out = (uint64_t)v;
	return 0;
}

static int take_int(const json_t *o, const char *key, int min, int *out, struct err *e)
{
	int64_t v;

	if (take_size(o, key, min, &v, e))
		return -1;
	if (v > INT32_MAX)
		return err_refuse(e, PLAN ": '%s' is %lld", key, (long long)v);
	*out = (int)v;
	return 0;
}

static int read_ids(struct plan *p, const json_t *c, struct err *e)
{
	const json_t *ids = json_object_get(c, "layer_ids");

	p->g.nids = (int)json_array_size(ids);
	p->ids = mem_calloc((size_t)p->g.nids, sizeof *p->ids, e);
	if (!p->ids)
		return -1;
	for (int i = 0; i < p->g.nids; i++) {
		p->ids[i] = json_integer_value(json_array_get(ids, (size_t)i));
		if (p->ids[i] < (i ? p->ids[i - 1] + 1 : -1))
			return err_refuse(e, PLAN ": 'layer_ids' are not strictly increasing");
	}
	return 0;
}

static int read_cache(struct plan *p, const json_t *c, struct err *e)
{
	const char *dtype;

	if (take_size(c, "rows", 0, &p->g.rows, e) ||
	    take_size(c, "seq_length", 1, &p->g.seq_length, e) ||
	    take_size(c, "shard_size", 1, &p->g.shard_size, e) ||
	    take_size(c, "hidden", 1, &p->g.hidden, e) ||
	    take_size(c, "vocab", 1, &p->g.vocab, e) || json_str(c, PLAN, "dtype", &dtype, e) ||
	    read_ids(p, c, e) || take_bytes(c, "shard_bytes", &p->shard_bytes, e) ||
	    take_bytes(c, "last_shard_bytes", &p->last_shard_bytes, e) ||
	    take_bytes(c, "target_weights_bytes", &p->target_weights_bytes, e) ||
	    take_bytes(c, "total_bytes", &p->total_bytes, e) ||
	    take_bytes(c, "allocated_bytes", &p->allocated_bytes, e) ||
	    json_int(p->identity.json, PLAN, "pad_token_id", &p->g.pad_token_id, e))
		return -1;
	p->g.dtype = dtype_from_recipe(dtype);
	return geometry_check(&p->g, PLAN, e);
}

static int read_run(struct plan *p, const json_t *r, struct err *e)
{
	const char *compute, *weights;

	if (take_str(r, "device", &p->device, e) ||
	    json_str(r, PLAN, "compute_dtype", &compute, e) ||
	    json_str(r, PLAN, "weights", &weights, e) ||
	    residency_find(weights, &p->residency, e) ||
	    json_bool_or(r, PLAN, "target_force_hf", false, &p->force_hf, e) ||
	    json_bool_or(r, PLAN, "cut", false, &p->cut, e) ||
	    json_bool_or(r, PLAN, "keep", false, &p->keep, e) ||
	    json_bool_or(r, PLAN, "spill", false, &p->spill, e) ||
	    take_size(r, "block_experts", 0, &p->block_experts, e) ||
	    take_size(r, "exchange_rows", 0, &p->exchange_rows, e) ||
	    take_size(r, "target_num_hidden_layers", 0, &p->target_layers, e) ||
	    take_int(r, "ep_size", 1, &p->ep, e) || take_int(r, "cp_size", 1, &p->cp, e) ||
	    take_int(r, "dp_replicate_size", 1, &p->replicate, e) ||
	    take_size(r, "window_tokens", 1, &p->window_tokens, e) ||
	    take_size(r, "chunk_tokens", 1, &p->chunk_tokens, e) ||
	    take_size(r, "window_most", 0, &p->window_most, e) ||
	    take_size(r, "chunk_most", 0, &p->chunk_most, e) ||
	    json_real_or(r, PLAN, "timeout_minutes", 30, &p->timeout_minutes, e) ||
	    take_str(r, "balance", &p->balance, e))
		return -1;
	p->compute = dtype_from_recipe(compute);
	if (p->compute != DT_F32 && p->compute != DT_BF16)
		return err_refuse(e, PLAN ": compute_dtype '%s' is neither fp32 nor bf16", compute);
	return 0;
}

static int read_rank_bytes(struct plan *p, const json_t *b, struct err *e)
{
	if (plan_apart(p) && take_bytes(b, "host_weights", &p->host_weight_bytes, e))
		return -1;
	return take_bytes(b, "weights", &p->weight_bytes, e) ||
			       take_bytes(b, "scratch", &p->scratch_bytes, e) ||
			       take_bytes(b, "carry", &p->carry_bytes, e) ||
			       take_bytes(b, "exchange", &p->exchange_bytes, e) ||
			       take_bytes(b, "buffers", &p->capture_bytes, e)
		       ? -1
		       : 0;
}

static int read_identity(struct plan *p, const json_t *rec, struct err *e)
{
	char want[DIGEST_HEX];

	p->identity.json = json_incref(json_object_get(rec, "identity"));
	if (!json_is_object(p->identity.json))
		return err_refuse(e, PLAN " has no 'identity'");
	if (identity_finish(&p->identity, e) || take_digest(rec, "identity_xxh3_128", want, e))
		return -1;
	if (strcmp(want, p->identity.digest))
		return err_refuse(e, PLAN " was changed: its identity does not have the digest it "
					  "states; run dspark-plan again");
	return 0;
}

static int read_intervals(struct plan_range *r, const json_t *shards, int64_t nshards,
			  struct err *e)
{
	r->nintervals = (int)json_array_size(shards);
	r->shards = mem_calloc((size_t)r->nintervals, sizeof *r->shards, e);
	if (!r->shards)
		return -1;
	for (int i = 0; i < r->nintervals; i++) {
		const json_t *pair = json_array_get(shards, (size_t)i);
		int64_t first = json_integer_value(json_array_get(pair, 0)),
			end = json_integer_value(json_array_get(pair, 1));

		if (first < (i ? r->shards[i - 1][1] : 0) || end <= first || end > nshards)
			return err_refuse(
				e, "the range record of rank %d has shards outside the cache",
				r->rank);
		r->shards[i][0] = first;
		r->shards[i][1] = end;
		r->nshards += end - first;
	}
	return 0;
}

/* Ranges may come in any order; each rank once. */
static int read_ranges(struct plan *p, const struct run *run, json_t **rec, struct err *e)
{
	size_t at = 0;
	int seen = 0;

	p->range = mem_calloc((size_t)p->world, sizeof *p->range, e);
	if (!p->range)
		return -1;
	for (json_t *r; (r = run_next(run, "range", &at)); seen++) {
		struct plan_range *to;
		int rank = 0;

		if (take_int(r, "rank", 0, &rank, e))
			return -1;
		if (rank >= p->world || rec[rank])
			return err_refuse(e, "%s: a range record for rank %d %s", run->name, rank,
					  rank >= p->world ? "is outside the plan's world"
							   : "stands twice");
		rec[rank] = r;
		to = &p->range[rank];
		to->rank = rank;
		if (take_size(r, "rows", 0, &to->rows, e) ||
		    take_size(r, "tokens", 0, &to->tokens, e) ||
		    take_size(r, "windows", 0, &to->windows, e) ||
		    read_intervals(to, json_object_get(r, "shards"), geometry_shards(&p->g), e))
			return -1;
	}
	if (seen < p->world)
		return err_refuse(e,
				  "%s: %d range records for a world of %d: the run is cut short, "
				  "run dspark-plan again",
				  run->name, seen, p->world);
	return 0;
}

static int read_host(struct plan *p, const struct run *run, struct err *e)
{
	const json_t *host = run_last(run, "host");
	const char *cwd, *found;

	if (json_str_or(host, "the host record", "cwd", "", &cwd, e) ||
	    json_str_or(host, "the host record", "target_dir", NULL, &found, e))
		return -1;
	p->cwd = mem_strdup(cwd, e);
	p->target_found = found ? mem_strdup(found, e) : NULL;
	return p->cwd && (p->target_found || !found) ? 0 : -1;
}

static int check_digest(struct plan *p, const struct run *run, const json_t *rec, json_t **ranges,
			struct err *e)
{
	char hex[DIGEST_HEX];

	if (take_digest(rec, "digest", p->digest, e) ||
	    digest_records(hex, rec, ranges, p->world, e))
		return -1;
	if (strcmp(hex, p->digest))
		return err_refuse(e,
				  "%s: the plan or its ranges were changed after dspark-plan wrote "
				  "them; run dspark-plan again",
				  run->name);
	return 0;
}

int plan_read(struct plan *p, const struct run *run, struct err *e)
{
	size_t at = 0;
	json_t *rec = run_next(run, "plan", &at), **ranges = NULL;
	int rc = -1;

	memset(p, 0, sizeof *p);
	if (!rec)
		return err_refuse(e, "%s: no plan record: give the output of dspark-plan",
				  run->name);
	if (run_next(run, "plan", &at))
		return err_refuse(e,
				  "%s: two plan records, as where several ranks write one "
				  "log: give one run at a time (dspark-manifest merge takes a "
				  "directory)",
				  run->name);
	if (take_int(rec, "version", 0, &p->version, e))
		return -1;
	if (p->version != PLAN_VERSION)
		return err_refuse(
			e, "%s: plan version %d, this program knows %d: run dspark-plan again",
			run->name, p->version, PLAN_VERSION);
	if (take_int(rec, "world", 1, &p->world, e) ||
	    json_bool_or(rec, PLAN, "runnable", false, &p->runnable, e))
		goto out;
	if (!p->runnable) {
		err_refuse(e,
			   "%s: the plan is an estimate: run dspark-plan with -t TOKENS and the "
			   "whole checkpoint",
			   run->name);
		goto out;
	}
	p->recipe = json_incref(json_object_get(rec, "recipe"));
	p->config = json_incref(json_object_get(rec, "config"));
	ranges = mem_calloc((size_t)p->world, sizeof *ranges, e);
	if (!ranges || take_str(rec, "target", &p->target_dir, e) ||
	    take_str(rec, "cache_output_dir", &p->cache_dir, e) ||
	    take_str(rec, "tokens", &p->tokens, e) ||
	    take_digest(rec, "weights_xxh3_128", p->weights, e) ||
	    take_digest(rec, "stage_key", p->stage_key, e) || read_identity(p, rec, e) ||
	    read_cache(p, json_object_get(rec, "cache"), e) ||
	    read_run(p, json_object_get(rec, "run"), e) ||
	    read_rank_bytes(p, json_object_get(rec, "rank_bytes"), e) ||
	    read_ranges(p, run, ranges, e) || check_digest(p, run, rec, ranges, e) ||
	    read_host(p, run, e))
		goto out;
	rc = 0;
out:
	free(ranges);
	if (rc)
		plan_release(p);
	return rc;
}

/* ---- paths and windows ----------------------------------------------------------------------- */

char *plan_path(const struct plan *p, const char *path, struct err *e)
{
	return p->cwd && p->cwd[0] ? file_join(p->cwd, path, e) : mem_strdup(path, e);
}

char *plan_target(const struct plan *p, struct err *e)
{
	return plan_path(p, p->target_found ? p->target_found : p->target_dir, e);
}

void plan_windows(struct plan_cursor *c, const struct plan *p, const struct plan_range *range,
		  const struct tokens *t)
{
	*c = (struct plan_cursor){ .plan = p, .range = range, .tokens = t, .row = -1 };
}

int64_t plan_fit(const struct tokens *t, int64_t first, int64_t n, int64_t tokens)
{
	int64_t k = 1;

	while (k < n && t->offset[first + k + 1] - t->offset[first] <= tokens)
		k++;
	return k;
}

bool plan_next_window(struct plan_cursor *c, int64_t *first, int64_t *n)
{
	const struct geometry *g = &c->plan->g;
	int64_t end;

	if (c->interval >= c->range->nintervals)
		return false;
	if (c->row < 0)
		c->row = c->range->shards[c->interval][0] * g->shard_size;
	end = c->range->shards[c->interval][1] * g->shard_size;
	if (end > g->rows)
		end = g->rows;
	*first = c->row;
	*n = plan_fit(c->tokens, *first, end - *first, c->plan->window_tokens);
	c->row += *n;
	if (c->row >= end) {
		c->interval++;
		c->row = -1;
	}
	return true;
}
