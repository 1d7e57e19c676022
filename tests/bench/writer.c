/* SPDX-License-Identifier: Apache-2.0 */
/*
 * writer: how fast states become published shards: hashing, looking for NaN, writing and syncing,
 * by the thread and the buffers of a run, with nothing computed beside it.
 *
 *	writer DIR TOKENS HIDDEN IDS DTYPE SHARD_SIZE
 *
 * Prints "SECONDS BYTES", from the first window handed over to the last shard published.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif
#include <stdio.h>
#include <stdlib.h>

#include "capture.h"
#include "err.h"
#include "layout.h"
#include "log.h"
#include "mem.h"
#include "tokens.h"

struct job {
	struct geometry g;
	struct tokens tokens;
	struct identity id;
	struct cache cache;
	struct capture capture;
	int64_t *ids;
	int64_t window, rows; /* tokens of a window at most; rows that fit */
};

static void count_shard(void *ctx, json_t *record)
{
	++*(int64_t *)ctx;
	json_decref(record);
}

static json_t *manifest(const struct job *j)
{
	return json_pack("{s:s, s:s, s:I, s:I, s:I}", "target_model", "bench", "dtype",
			 dtype_recipe_name(j->g.dtype), "num_samples", (json_int_t)j->g.rows,
			 "shard_size", (json_int_t)j->g.shard_size, "hidden_size",
			 (json_int_t)j->g.hidden);
}

static int open_job(struct job *j, const char *dir, const char *tokens, struct err *e)
{
	int64_t length = 0;

	if (tokens_open(&j->tokens, tokens, e))
		return -1;
	j->g.rows = j->tokens.rows;
	j->g.seq_length = j->tokens.seq_length;
	j->g.pad_token_id = j->tokens.pad_token_id;
	for (int64_t i = 0; i < j->g.rows; i++)
		if (tokens_length(&j->tokens, i) > length)
			length = tokens_length(&j->tokens, i);
	j->rows = length && LAYOUT_WINDOW_TOKENS > length ? LAYOUT_WINDOW_TOKENS / length : 1;
	j->window = j->rows * length;
	j->ids = mem_calloc((size_t)j->g.nids, sizeof *j->ids, e);
	j->id.json = json_pack("{s:o, s:I, s:s}", "manifest", manifest(j), "pad_token_id",
			       (json_int_t)j->g.pad_token_id, "rows_xxh3_128", j->tokens.rows_xxh3);
	if (!j->ids || geometry_check(&j->g, "arguments", e) || identity_finish(&j->id, e))
		return -1;
	return cache_open(&j->cache, dir, &j->g, &j->id, "bench", 0, true, NULL, e);
}

/* Numbers of every size, none of them repeated within a window. */
static void fill(const struct job *j, struct capture_buffer *b)
{
	int64_t n = j->window * j->g.hidden;

	for (int64_t i = 0; i < n * (j->g.nids + 1); i++) {
		float f = (float)(i * 2654435761u % 1000003u) * 1e-3f - 500;
		char *p = i < n * j->g.nids ? b->states : b->last;
		int64_t at = i < n * j->g.nids ? i : i - n * j->g.nids;

		dtype_convert(p + (size_t)at * dtype_size(j->g.dtype), j->g.dtype, &f, DT_F32, 1);
	}
}

static int write_all(struct job *j, double *seconds, struct err *e)
{
	double start;

	if (capture_open(&j->capture, j->window, e))
		return -1;
	for (int i = 0; i < 2; i++)
		fill(j, &j->capture.buffer[i]);
	start = log_seconds();
	for (int64_t first = 0; first < j->g.rows; first += j->rows) {
		int64_t n = j->g.rows - first < j->rows ? j->g.rows - first : j->rows;
		struct capture_buffer *b;

		if (capture_take(&j->capture, first, n, &b, e))
			return -1;
		capture_give(&j->capture, b);
	}
	if (capture_close(&j->capture, e))
		return -1;
	*seconds = log_seconds() - start;
	return 0;
}

int main(int argc, char **argv)
{
	struct job j = { .tokens = TOKENS_INIT, .cache = CACHE_INIT };
	struct err e = ERR_INIT;
	int64_t shards = 0;
	double seconds;

	log_program("writer");
	if (argc != 7) {
		log_error("give DIR TOKENS HIDDEN IDS DTYPE SHARD_SIZE");
		return EXIT_USAGE;
	}
	j.g = (struct geometry){ .hidden = atoi(argv[3]),
				 .nids = atoi(argv[4]),
				 .vocab = INT32_MAX,
				 .dtype = dtype_from_recipe(argv[5]),
				 .shard_size = atoi(argv[6]) };
	j.capture = (struct capture){
		.cache = &j.cache, .tokens = &j.tokens, .published = count_shard, .ctx = &shards
	};
	if (!open_job(&j, argv[1], argv[2], &e)) {
		j.capture.ids = j.ids;
		if (!write_all(&j, &seconds, &e))
			printf("%.6f %llu\n", seconds, (unsigned long long)j.capture.bytes);
	}
	if (e.code)
		log_error("%s", e.text);
	capture_abort(&j.capture);
	cache_close(&j.cache);
	identity_release(&j.id);
	tokens_release(&j.tokens);
	free(j.ids);
	return e.code;
}
