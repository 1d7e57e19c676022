/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cache_merge: from shards to a cache that vouches for itself. The directory decides, not the
 * records of the run. Headers are read in parallel: over a network a hundred thousand of them are
 * latency.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/vfs.h>
#include <time.h>

#include "cache.h"
#include "cache_view.h"
#include "err.h"
#include "file.h"
#include "log.h"
#include "mem.h"
#include "parallel.h"
#include "record.h"
#include "text.h"

#define READERS      8
#define NFS_MAGIC    0x6969
#define NFS_PATIENCE 60.0 /* seconds: attribute caches live up to 60 */

struct merge {
	struct cache_view view;
	bool *missing; /* [shards] */
	bool no_weights;
	char (*header)[DIGEST_HEX]; /* [shards] */
	int64_t *tokens;            /* [shards] */
	char weights[DIGEST_HEX];
};

static bool is_missing(const struct cache_view *v, int64_t shard, const char *path)
{
	int64_t n = geometry_shard_rows(&v->g, shard);

	return !shard_is_done(path, geometry_shard_bytes(&v->g, n), geometry_header(&v->g, n),
			      v->digest);
}

static int look(void *ctx, int64_t shard, struct err *e)
{
	struct merge *m = ctx;
	struct shard_head h = SHARD_HEAD_INIT;
	char *path = shard_path(m->view.dir, shard, e);
	int rc = path ? 0 : -1;
	int64_t r;

	if (path)
		m->missing[shard] = is_missing(&m->view, shard, path);
	if (!rc && !m->missing[shard])
		rc = cache_view_shard(&m->view, shard, &h, e);
	if (!rc && !m->missing[shard]) {
		memcpy(m->header[shard], h.header_xxh3, DIGEST_HEX);
		for (r = 0; r < h.rows; r++)
			m->tokens[shard] += h.row_tokens[r];
	}
	shard_head_release(&h);
	free(path);
	return rc;
}

static int look_weights(struct merge *m, struct err *e)
{
	struct weights_head h = WEIGHTS_HEAD_INIT;
	char *path = file_join(m->view.dir, "target_weights.safetensors", e);
	int rc = -1;

	if (!path)
		return -1;
	m->no_weights = !file_exists(path);
	if (m->no_weights || !cache_view_weights(&m->view, &h, e)) {
		memcpy(m->weights, h.header_xxh3, DIGEST_HEX);
		rc = 0;
	}
	weights_head_release(&h);
	free(path);
	return rc;
}

static bool is_nfs(const char *dir)
{
	struct statfs fs;

	return !statfs(dir, &fs) && fs.f_type == NFS_MAGIC;
}

/* A name that another host published a moment ago may not be visible here yet. */
static int wait_for_names(struct merge *m, struct err *e)
{
	double until = log_seconds() + NFS_PATIENCE;
	int64_t i, left;

	if (!is_nfs(m->view.dir))
		return 0;
	do {
		for (i = left = 0; i < m->view.shards; i++) {
			if (m->missing[i] && look(m, i, e))
				return -1;
			left += m->missing[i];
		}
		if (m->no_weights && look_weights(m, e))
			return -1;
		if (!left && !m->no_weights)
			break;
		nanosleep(&(struct timespec){ .tv_sec = 2 }, NULL);
	} while (log_seconds() < until);
	return 0;
}

static int refuse_missing(const struct merge *m, struct err *e)
{
	struct text t = TEXT_INIT;
	int64_t count;
	int rc = 0;

	count = cache_intervals(&t, m->missing, m->view.shards);
	if (text_ok(&t, e))
		rc = -1;
	else if (count)
		rc = err_refuse(e, "'%s': shard%s %s missing (%lld of %lld)%s: run it again",
				m->view.dir, count > 1 ? "s" : "", t.s, (long long)count,
				(long long)m->view.shards,
				m->no_weights ? " and target_weights.safetensors" : "");
	else if (m->no_weights)
		rc = err_refuse(e, "'%s': target_weights.safetensors missing: run it again",
				m->view.dir);
	text_release(&t);
	return rc;
}

static int add_file(json_t *files, const char *path, uint64_t size, const char *header,
		    struct err *e)
{
	const char *slash = strrchr(path, '/');
	json_t *f = json_pack("{s:I, s:s}", "size", (json_int_t)size, "header_xxh3_128", header);

	if (f && !json_object_set_new(files, slash ? slash + 1 : path, f))
		return 0;
	return err_fail(e, "out of memory for dspark.json");
}

static int list_files(const struct merge *m, json_t *files, uint64_t *total, struct err *e)
{
	const struct geometry *g = &m->view.g;
	int64_t i;

	for (i = 0; i < m->view.shards; i++) {
		uint64_t size = geometry_shard_bytes(g, geometry_shard_rows(g, i));
		char *path = shard_path("", i, e);
		int rc = path ? add_file(files, path, size, m->header[i], e) : -1;

		free(path);
		if (rc)
			return -1;
		*total += size;
	}
	*total += geometry_target_weights(g);
	return add_file(files, "target_weights.safetensors", geometry_target_weights(g), m->weights,
			e);
}

/* dspark.json first: from then on it is true of everything but `complete`, which comes last. */
static int finish(const struct merge *m, uint64_t *total, struct err *e)
{
	struct text vouch = TEXT_INIT, manifest = TEXT_INIT;
	json_t *files = json_object();
	char hash[DIGEST_HEX];
	int rc = -1;

	if (!files) {
		err_fail(e, "out of memory for dspark.json");
		goto out;
	}
	if (list_files(m, files, total, e) ||
	    identity_manifest(&manifest, m->view.identity, true, e))
		goto out;
	digest_xxh3(hash, manifest.s, manifest.len);
	if (vouch_text(&vouch, &m->view.vouch.identity, files, hash, e) ||
	    cache_put(m->view.dir, "dspark.json", 0, vouch.s, vouch.len, e) ||
	    cache_put(m->view.dir, "manifest.json", 0, manifest.s, manifest.len, e))
		goto out;
	rc = 0;
out:
	json_decref(files);
	text_release(&vouch);
	text_release(&manifest);
	return rc;
}

static int report(const struct merge *m, uint64_t total, struct err *e)
{
	int64_t i, tokens = 0;
	json_t *rec;
	int rc;

	for (i = 0; i < m->view.shards; i++)
		tokens += m->tokens[i];
	rec = json_pack("{s:s, s:s, s:s, s:b, s:I, s:I, s:I, s:I}", "record", "manifest",
			"cache_output_dir", m->view.dir, "identity_xxh3_128", m->view.digest,
			"complete", 1, "rows", (json_int_t)m->view.g.rows, "tokens",
			(json_int_t)tokens, "shards", (json_int_t)m->view.shards, "bytes",
			(json_int_t)total);
	rc = rec ? record_write(stdout, rec, e)
		 : err_fail(e, "'%s' cannot be written as a record", m->view.dir);
	json_decref(rec);
	return rc;
}

static int check(struct merge *m, struct err *e)
{
	if (m->view.foreign)
		return err_refuse(e,
				  "'%s' is not a cache of dspark (no dspark.json): there is "
				  "nothing to merge",
				  m->view.dir);
	if (m->view.strangers)
		return err_refuse(e,
				  "'%s' holds shards beyond the last of this cache (%lld, "
				  "one is shard-%06lld): move them away",
				  m->view.dir, (long long)m->view.strangers,
				  (long long)m->view.stranger);
	m->missing = mem_calloc((size_t)m->view.shards, sizeof *m->missing, e);
	m->header = mem_calloc((size_t)m->view.shards, sizeof *m->header, e);
	m->tokens = mem_calloc((size_t)m->view.shards, sizeof *m->tokens, e);
	if (!m->missing || !m->header || !m->tokens)
		return -1;
	if (parallel_each(m->view.shards, READERS, look, m, e) || look_weights(m, e)) {
		if (e->code == EXIT_REFUSED)
			err_context(e, "damaged, 'dspark-manifest verify --discard %s' says more",
				    m->view.dir);
		return -1;
	}
	return wait_for_names(m, e) || refuse_missing(m, e);
}

int cache_merge(const char *dir, struct err *e)
{
	struct cache_lock lock = CACHE_LOCK_INIT;
	struct merge m = { 0 };
	uint64_t total = 0;
	int rc = -1;

	/* looked at before the lock: a directory without a cache gets no lock file */
	if (cache_view_open(&m.view, dir, e))
		goto out;
	if (!m.view.foreign) {
		if (cache_lock_begin(&lock, dir, NULL, e))
			goto out;
		cache_lock_opened(&lock);
		cache_view_release(&m.view);
		if (cache_view_open(&m.view, dir, e))
			goto out;
	}
	if (check(&m, e) || file_sweep(dir, lock.works, e) || finish(&m, &total, e))
		goto out;
	rc = report(&m, total, e);
out:
	cache_lock_end(&lock);
	cache_view_release(&m.view);
	free(m.missing);
	free(m.header);
	free(m.tokens);
	return rc;
}
