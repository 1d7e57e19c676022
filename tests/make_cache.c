/* SPDX-License-Identifier: Apache-2.0 */
/*
 * make_cache: writes a cache, or part of one, with the real writer: what manifest.t looks at.
 *
 *	make_cache DIR [KEY=VALUE]...
 *
 *	rows seq shard hidden ids vocab seed	numbers
 *	dtype=fp32|bf16|fp16 name=TEXT		name is target_model
 *	from=CACHE tokens=FILE			values of another cache, lengths of a tokens file
 *	skip=A,B-C				shards that are left out
 *	plan=TEXT rank=N			who writes
 *	wait=1					after opening, waits for the end of stdin
 *	die=N					SIGKILL to itself inside the N-th shard it writes
 *
 * Exit status as the commands'.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cache.h"
#include "cache_view.h"
#include "err.h"
#include "json.h"
#include "log.h"
#include "mem.h"
#include "tokens.h"

struct job {
	struct geometry g;
	int64_t seed, die, rank;
	const char *skip, *plan, *name;
	bool wait;
	struct cache_view from;
	struct tokens tokens;
	uint64_t state;
};

static double uniform(struct job *j)
{
	j->state = j->state * 6364136223846793005u + 1442695040888963407u;
	return (double)(j->state >> 11) / 9007199254740992.0 * 2 - 1;
}

static void fill(struct job *j, void *out, enum dtype d, int64_t n)
{
	int64_t i;

	for (i = 0; i < n; i++) {
		float f = (float)uniform(j);

		dtype_convert((char *)out + (size_t)i * dtype_size(d), d, &f, DT_F32, 1);
	}
}

static int weights(void *ctx, int which, int64_t row0, int64_t n, float *buf, struct err *e)
{
	struct job *j = ctx;
	struct weights_head h;
	size_t size = dtype_size(j->g.dtype);
	void *raw;
	int rc;

	if (!j->from.dir) {
		j->state = (uint64_t)(j->seed + which * 1000000 + row0);
		fill(j, buf, DT_F32, n * j->g.hidden);
		return 0;
	}
	if (cache_view_weights(&j->from, &h, e))
		return -1;
	raw = malloc((size_t)(n * j->g.hidden) * size);
	rc = safetensors_read(&h.file, h.tensor[which], raw, (uint64_t)(row0 * j->g.hidden) * size,
			      (size_t)(n * j->g.hidden) * size, e);
	if (!rc)
		dtype_convert(buf, DT_F32, raw, j->g.dtype, (size_t)(n * j->g.hidden));
	free(raw);
	weights_head_release(&h);
	return rc;
}

static bool listed(const char *list, int64_t n)
{
	char *end;

	while (list && *list) {
		int64_t a = strtoll(list, &end, 10), b = a;

		if (*end == '-')
			b = strtoll(end + 1, &end, 10);
		if (n >= a && n <= b)
			return true;
		list = *end ? end + 1 : end;
	}
	return false;
}

static int row_from(struct job *j, int64_t row, int32_t *ids, uint8_t *mask, void *states,
		    void *last, int64_t *len, struct err *e)
{
	struct shard_head h;
	int64_t shard = row / j->g.shard_size, at = row % j->g.shard_size;
	int rc;

	*len = tokens_length(&j->tokens, row);
	if (tokens_rows(&j->tokens, row, 1, ids, mask, e) ||
	    cache_view_shard(&j->from, shard, &h, e))
		return -1;
	rc = shard_read(&h, &j->g, SHARD_STATES, at, 0, *len, states, e) ||
	     shard_read(&h, &j->g, SHARD_LAST, at, 0, *len, last, e);
	shard_head_release(&h);
	return rc ? -1 : 0;
}

static int row_made(struct job *j, int64_t row, int32_t *ids, uint8_t *mask, void *states,
		    void *last, int64_t *len)
{
	int64_t i;

	j->state = (uint64_t)(j->seed * 7919 + row);
	uniform(j);
	*len = 1 + (int64_t)((uniform(j) + 1) / 2 * (double)(j->g.seq_length - 1) + 0.5);
	for (i = 0; i < *len; i++) {
		ids[i] = (int32_t)((uniform(j) + 1) / 2 * (double)j->g.vocab);
		mask[i] = uniform(j) > 0;
	}
	fill(j, states, j->g.dtype, *len * j->g.hidden * j->g.nids);
	fill(j, last, j->g.dtype, *len * j->g.hidden);
	return 0;
}

static int write_shard(struct job *j, const struct cache *c, int64_t shard, bool die, struct err *e)
{
	size_t state = (size_t)j->g.hidden * dtype_size(j->g.dtype), s = (size_t)j->g.seq_length;
	int32_t *ids = calloc(s, sizeof *ids);
	uint8_t *mask = calloc(s, 1);
	void *states = calloc(s, state * (size_t)j->g.nids), *last = calloc(s, state);
	struct shard_writer w = { 0 };
	int64_t n = geometry_shard_rows(&j->g, shard), r, len;
	int rc = shard_begin(&w, c, shard, e);

	for (r = n - 1; r >= 0 && !rc; r--) { /* any order is legal */
		int64_t row = shard * j->g.shard_size + r;

		rc = j->from.dir ? row_from(j, row, ids, mask, states, last, &len, e)
				 : row_made(j, row, ids, mask, states, last, &len);
		if (!rc)
			rc = shard_row(&w, r, ids, mask, len, states, last, e);
		if (die)
			raise(SIGKILL);
	}
	if (!rc)
		rc = shard_publish(&w, NULL, e);
	shard_abort(&w);
	free(ids);
	free(mask);
	free(states);
	free(last);
	return rc;
}

static json_t *manifest(const struct job *j)
{
	json_t *ids = json_array();
	int i;

	for (i = 0; i < j->g.nids; i++)
		json_array_append_new(ids, json_integer(i));
	return json_pack("{s:s, s:s, s:i, s:I, s:b, s:b, s:i, s:I, s:I, s:I, s:i, "
			 "s:I, s:I, s:o, s:s, s:s, s:I, s:s, s:n}",
			 "chat_template_sha256", "0123", "dtype", dtype_recipe_name(j->g.dtype),
			 "format_version", 1, "hidden_size", (json_int_t)j->g.hidden,
			 "mask_generation_prompt", 0, "mask_reasoning_content", 0,
			 "num_hidden_layers", 8, "num_samples", (json_int_t)j->g.rows, "seq_length",
			 (json_int_t)j->g.seq_length, "shard_size", (json_int_t)j->g.shard_size,
			 "shuffle_seed", 42, "target_hidden_dim",
			 (json_int_t)(j->g.hidden * j->g.nids), "target_last_hidden_dim",
			 (json_int_t)j->g.hidden, "target_layer_ids", ids, "target_model", j->name,
			 "target_model_type", "qwen3", "target_vocab_size", (json_int_t)j->g.vocab,
			 "train_data_path", "rows.jsonl", "train_split");
}

static int set_from(struct job *j, const char *from, const char *tokens, struct identity *id,
		    struct err *e)
{
	if (cache_view_open(&j->from, from, e) || tokens_open(&j->tokens, tokens, e))
		return -1;
	j->g = j->from.g;
	j->g.pad_token_id = j->tokens.pad_token_id;
	id->json = json_deep_copy(j->from.identity);
	return 0;
}

static int write_all(struct job *j, const char *dir, const struct identity *id, struct err *e)
{
	struct cache_weights w = { weights, j };
	int64_t shards = geometry_shards(&j->g), i, count, written = 0;
	bool *done = calloc((size_t)shards + 1, sizeof *done);
	struct cache c = CACHE_INIT;
	int rc = cache_done(dir, &j->g, id->digest, done, &count, e);

	for (i = 0; i < shards; i++)
		done[i] |= listed(j->skip, i);
	for (i = count = 0; i < shards; i++)
		count += !done[i];
	if (!rc)
		rc = cache_open(&c, dir, &j->g, id, j->plan, (int)j->rank, count > 0, &w, e);
	if (!rc && j->wait) {
		puts("open");
		fflush(stdout);
		while (getchar() != EOF)
			;
	}
	for (i = 0; i < shards && !rc; i++)
		if (!done[i])
			rc = write_shard(j, &c, i, ++written == j->die, e);
	cache_close(&c);
	free(done);
	return rc;
}

int main(int argc, char **argv)
{
	struct job j = { .g = { .rows = 10,
				.seq_length = 16,
				.shard_size = 4,
				.hidden = 8,
				.nids = 2,
				.vocab = 50,
				.dtype = DT_F32,
				.pad_token_id = 3 },
			 .plan = "made",
			 .name = "model",
			 .tokens = TOKENS_INIT };
	struct {
		const char *key;
		int64_t *to;
	} number[] = {
		{ "rows", &j.g.rows },     { "seq", &j.g.seq_length }, { "shard", &j.g.shard_size },
		{ "hidden", &j.g.hidden }, { "vocab", &j.g.vocab },    { "seed", &j.seed },
		{ "die", &j.die },         { "rank", &j.rank },
	};
	const char *from = NULL, *tokens = NULL;
	struct identity id = { 0 };
	struct err e = ERR_INIT;
	size_t k;
	int i, rc = 0;

	log_program("make_cache");
	for (i = 2; i < argc; i++) {
		char *value = strchr(argv[i], '=');

		if (!value)
			return 2;
		*value++ = '\0';
		for (k = 0; k < sizeof number / sizeof *number; k++)
			if (!strcmp(argv[i], number[k].key))
				*number[k].to = strtoll(value, NULL, 10);
		if (!strcmp(argv[i], "ids"))
			j.g.nids = atoi(value);
		else if (!strcmp(argv[i], "dtype"))
			j.g.dtype = dtype_from_recipe(value);
		else if (!strcmp(argv[i], "skip"))
			j.skip = value;
		else if (!strcmp(argv[i], "plan"))
			j.plan = value;
		else if (!strcmp(argv[i], "name"))
			j.name = value;
		else if (!strcmp(argv[i], "wait"))
			j.wait = true;
		else if (!strcmp(argv[i], "from"))
			from = value;
		else if (!strcmp(argv[i], "tokens"))
			tokens = value;
	}
	if (from)
		rc = set_from(&j, from, tokens, &id, &e);
	else
		id.json = json_pack("{s:o}", "manifest", manifest(&j));
	if (!rc) {
		json_object_set_new(id.json, "pad_token_id", json_integer(j.g.pad_token_id));
		json_object_set_new(id.json, "rows_xxh3_128", json_integer(j.seed));
		rc = geometry_check(&j.g, "arguments", &e) || identity_finish(&id, &e) ||
		     write_all(&j, argv[1], &id, &e);
	}
	if (e.code)
		fprintf(stderr, "make_cache: %s\n", e.text);
	identity_release(&id);
	cache_view_release(&j.from);
	tokens_release(&j.tokens);
	return rc ? e.code : 0;
}
