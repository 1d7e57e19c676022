/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cache: what a directory holds and opening it for writing.
 *
 * Order matters to whoever dies in between: dspark.json before manifest.json (a manifest alone
 * means the reference's cache), `complete` is cleared before dspark.json loses its hashes. Two
 * openers without locks write the same bytes, so any order of them is good.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "cache.h"
#include "cache_scan.h"
#include "err.h"
#include "file.h"
#include "json.h"
#include "mem.h"
#include "parallel.h"
#include "text.h"
#include "vouch.h"

#define MANIFEST_MAX ((size_t)16 << 20)
#define ROWS_MAX     ((size_t)8 << 20) /* bytes of F32 rows in hand for target_weights */

/* ---- what is there ---------------------------------------------------------------- */

static int read_manifest(struct cache_state *s, const char *path, struct err *e)
{
	json_t *m = json_read(path, MANIFEST_MAX, e);
	int rc = -1;

	if (!m)
		return -1;
	if (!json_is_object(m)) {
		err_refuse(e, "'%s' is not a JSON object", path);
		goto out;
	}
	if (json_bool_or(m, path, "complete", true, &s->complete, e))
		goto out;
	s->exists = true;
	if (!s->identity) {
		s->foreign = true;
		json_object_del(m, "complete");
		s->identity = json_pack("{s:O}", "manifest", m);
		if (!s->identity) {
			err_fail(e, "out of memory for '%s'", path);
			goto out;
		}
	}
	rc = 0;
out:
	json_decref(m);
	return rc;
}

int cache_inspect(struct cache_state *s, const char *dir, struct err *e)
{
	char *path = file_join(dir, "manifest.json", e);
	struct vouch v = { 0 };
	int rc = -1;

	*s = (struct cache_state){ 0 };
	if (!path || vouch_read(&v, dir, e))
		goto out;
	if (v.json) {
		s->exists = true;
		s->identity = json_incref(v.identity.json);
	}
	if (file_exists(path) && read_manifest(s, path, e))
		goto out;
	rc = 0;
out:
	vouch_release(&v);
	free(path);
	if (rc)
		cache_state_release(s);
	return rc;
}

void cache_state_release(struct cache_state *s)
{
	json_decref(s->identity);
	*s = (struct cache_state){ 0 };
}

/* The index of "shard-DDDDDD.safetensors", or -1: other spellings are nobody's. */
static int64_t shard_index(const char *name)
{
	int64_t index = 0;
	int i;

	if (strncmp(name, "shard-", 6))
		return -1;
	for (i = 6; i < 12; i++) {
		if (!isdigit((unsigned char)name[i]))
			return -1;
		index = index * 10 + (name[i] - '0');
	}
	return strcmp(name + 12, ".safetensors") ? -1 : index;
}

int cache_each_shard(const char *dir, int (*visit)(void *ctx, int64_t shard, struct err *e),
		     void *ctx, struct err *e)
{
	DIR *d = opendir(dir);
	struct dirent *ent;
	int rc = 0;

	if (!d)
		return errno == ENOENT ? 0 : err_input(e, "cannot open directory '%s'", dir);
	while (!rc && (errno = 0, ent = readdir(d))) {
		int64_t index = shard_index(ent->d_name);

		if (index >= 0)
			rc = visit(ctx, index, e);
	}
	if (!rc && errno)
		rc = err_input(e, "cannot read directory '%s'", dir);
	closedir(d);
	return rc;
}

/* Shards are looked at by several threads: on a network file system each look is a round trip. */
#define LOOKERS 16

struct done_walk {
	const char *dir, *identity;
	const struct geometry *g;
	bool *done; /* [shards], NULL = only count */
	int64_t shards;
	int64_t *found; /* [n] by name */
	size_t n, cap;
	_Atomic int64_t count, strangers;
};

static int collect(void *ctx, int64_t shard, struct err *e)
{
	struct done_walk *k = ctx;

	if (mem_grow(&k->found, &k->cap, k->n + 1, sizeof *k->found, e))
		return -1;
	k->found[k->n++] = shard;
	return 0;
}

static int look_done(void *ctx, int64_t i, struct err *e)
{
	struct done_walk *k = ctx;
	int64_t shard = k->found[i], n;
	char *path = shard_path(k->dir, shard, e);
	bool done = false;

	if (!path)
		return -1;
	if (shard < k->shards) {
		n = geometry_shard_rows(k->g, shard);
		done = shard_is_done(path, geometry_shard_bytes(k->g, n), geometry_header(k->g, n),
				     k->identity);
	}
	if (k->done && shard < k->shards)
		k->done[shard] = done;
	k->count += done;
	k->strangers += !done;
	free(path);
	return 0;
}

static int walk_done(struct done_walk *k, struct err *e)
{
	int rc = cache_each_shard(k->dir, collect, k, e);

	if (!rc)
		rc = parallel_each((int64_t)k->n, k->n < LOOKERS ? 1 : LOOKERS, look_done, k, e);
	free(k->found);
	return rc;
}

int cache_done(const char *dir, const struct geometry *g, const char *identity, bool *done,
	       int64_t *count, struct err *e)
{
	struct done_walk k = {
		.dir = dir, .identity = identity, .g = g, .done = done, .shards = geometry_shards(g)
	};

	memset(done, 0, (size_t)k.shards * sizeof *done);
	*count = 0;
	if (walk_done(&k, e))
		return -1;
	*count = k.count;
	return 0;
}

/* ---- opening ---------------------------------------------------------------- */

int cache_put(const char *dir, const char *name, int rank, const char *buf, size_t n, struct err *e)
{
	char *path = file_join(dir, name, e);
	struct text have = TEXT_INIT;
	struct err ignored = ERR_INIT;
	int rc = -1;

	if (!path)
		return -1;
	if (!file_read_all(path, n + 1, &have, &ignored) && have.len == n &&
	    !memcmp(have.s, buf, n))
		rc = 0;
	else
		rc = file_publish(path, rank, buf, n, e);
	text_release(&have);
	free(path);
	return rc;
}

/*
 * Only dspark.json says whose shards these are: without it, files of another identity are
 * somebody's data.
 */
static int refuse_strangers(const char *dir, const struct geometry *g, const char *identity,
			    struct err *e)
{
	struct done_walk k = {
		.dir = dir, .identity = identity, .g = g, .shards = geometry_shards(g)
	};

	if (walk_done(&k, e))
		return -1;
	if (k.strangers)
		return err_refuse(e,
				  "'%s' holds %lld shard files that are not of this cache, "
				  "and no manifest that says whose they are: "
				  "name an empty directory or move them away",
				  dir, (long long)k.strangers);
	return 0;
}

int cache_check(const char *dir, const struct geometry *g, const struct identity *id, struct err *e)
{
	struct text diff = TEXT_INIT;
	struct cache_state s;
	int rc = -1;

	if (cache_inspect(&s, dir, e))
		return -1;
	if (s.exists)
		identity_differences(&diff, s.identity, id->json);
	if (text_ok(&diff, e))
		goto out;
	if (diff.len)
		err_refuse(e,
			   "'%s' holds another cache; name another cache_output_dir, "
			   "or make these agree (there -> now):\n%s",
			   dir, diff.s);
	else if (s.foreign)
		err_refuse(e,
			   "'%s' holds a cache that dspark did not write "
			   "(manifest.json without dspark.json): name another "
			   "cache_output_dir or move it away",
			   dir);
	else
		rc = s.exists ? 0 : refuse_strangers(dir, g, id->digest, e);
out:
	text_release(&diff);
	cache_state_release(&s);
	return rc;
}

static int write_manifests(const struct cache *c, const struct cache_state *s,
			   const struct identity *id, bool work, struct err *e)
{
	struct text vouch = TEXT_INIT, manifest = TEXT_INIT;
	char *path = file_join(c->dir, "manifest.json", e);
	int rc = -1;

	if (!path || vouch_text(&vouch, id, NULL, NULL, e) ||
	    identity_manifest(&manifest, id->json, false, e))
		goto out;
	if (!s->exists && cache_put(c->dir, "dspark.json", c->rank, vouch.s, vouch.len, e))
		goto out;
	if ((work || !file_exists(path)) &&
	    cache_put(c->dir, "manifest.json", c->rank, manifest.s, manifest.len, e))
		goto out;
	if (work && cache_put(c->dir, "dspark.json", c->rank, vouch.s, vouch.len, e))
		goto out;
	rc = 0;
out:
	text_release(&vouch);
	text_release(&manifest);
	free(path);
	return rc;
}

/* A cache whose weights are not finite trains nothing, and verify would refuse it for ever. */
static int check_rows(const struct cache *c, int which, int64_t row, int64_t n, const char *p,
		      struct err *e)
{
	size_t bytes = (size_t)c->g.hidden * dtype_size(c->g.dtype);
	bool zero;

	for (int64_t i = 0; i < n; i++, p += bytes)
		if (!scan_finite(p, bytes, c->g.dtype, &zero))
			return err_refuse(e, "row %lld of the target's %s is not finite as %s: "
					  "check the checkpoint, or set another "
					  "recipe_args.cache_dtype", (long long)(row + i),
					  which ? "lm_head" : "embeddings",
					  dtype_recipe_name(c->g.dtype));
	return 0;
}

/* Rows of one matrix, converted, hashed and written at `off`. */
static int copy_matrix(const struct cache *c, const struct cache_weights *w, int which,
		       struct file_new *f, uint64_t off, char hex[DIGEST_HEX], struct err *e)
{
	int64_t hidden = c->g.hidden, step = (int64_t)(ROWS_MAX / sizeof(float)) / hidden, row, n;
	size_t size = dtype_size(c->g.dtype), bytes;
	float *rows = NULL;
	void *out = NULL;
	struct digest *d = digest_new(e);
	int rc = -1;

	if (step < 1)
		step = 1;
	rows = mem_aligned((size_t)(step * hidden) * sizeof *rows, e);
	out = mem_aligned((size_t)(step * hidden) * size, e);
	if (!d || !rows || !out)
		goto out;
	for (row = 0; row < c->g.vocab; row += n) {
		n = c->g.vocab - row < step ? c->g.vocab - row : step;
		bytes = (size_t)(n * hidden) * size;
		if (w->read(w->ctx, which, row, n, rows, e))
			goto out;
		dtype_convert(out, c->g.dtype, rows, DT_F32, (size_t)(n * hidden));
		if (check_rows(c, which, row, n, out, e))
			goto out;
		digest_update(d, out, bytes);
		if (file_new_write(f, out, bytes, off, e))
			goto out;
		off += bytes;
	}
	digest_hex(d, hex);
	rc = 0;
out:
	digest_free(d);
	free(rows);
	free(out);
	return rc;
}

static int write_weights(const struct cache *c, const char *path, const struct cache_weights *w,
			 struct err *e)
{
	struct st_tensor t[2] = {
		{ .name = "embed_tokens.weight",
		  .dtype = c->g.dtype,
		  .ndim = 2,
		  .shape = { c->g.vocab, c->g.hidden } },
		{ .name = "lm_head.weight",
		  .dtype = c->g.dtype,
		  .ndim = 2,
		  .shape = { c->g.vocab, c->g.hidden } },
	};
	uint64_t size = geometry_target_weights(&c->g),
		 bytes = (uint64_t)(c->g.vocab * c->g.hidden) * dtype_size(c->g.dtype);
	uint64_t header = size - 2 * bytes;
	struct file_new f = FILE_NEW_INIT;
	struct text head = TEXT_INIT;
	char hash[2][DIGEST_HEX];
	json_t *m = NULL;
	int rc = -1, i;

	if (file_new_open(&f, path, c->rank, e))
		return -1;
	for (i = 0; i < 2; i++)
		if (copy_matrix(c, w, i, &f, header + (uint64_t)i * bytes, hash[i], e))
			goto out;
	m = json_pack("{s:s, s:s, s:s}", "identity", c->identity, "xxh3_128.embed_tokens.weight",
		      hash[0], "xxh3_128.lm_head.weight", hash[1]);
	if (!m) {
		err_fail(e, "out of memory for the header of '%s'", path);
		goto out;
	}
	if (safetensors_header(&head, t, 2, m, header, 4096, e) ||
	    file_pwrite(f.fd, f.tmp, head.s, head.len, 0, e))
		goto out;
	rc = file_new_publish(&f, e);
out:
	file_new_abort(&f);
	text_release(&head);
	json_decref(m);
	return rc;
}

static bool has_weights(const struct cache *c, const char *path)
{
	uint64_t size = geometry_target_weights(&c->g);
	uint64_t bytes = (uint64_t)(c->g.vocab * c->g.hidden) * dtype_size(c->g.dtype);

	return shard_is_done(path, size, size - 2 * bytes, c->identity);
}

static int ensure_weights(const struct cache *c, const struct cache_weights *w, struct err *e)
{
	char *path = file_join(c->dir, "target_weights.safetensors", e);
	int rc = -1;

	if (path)
		rc = has_weights(c, path) ? 0 : write_weights(c, path, w, e);
	free(path);
	return rc;
}

int cache_open_weights(struct cache *c, const struct cache_weights *w, struct err *e)
{
	char *path = file_join(c->dir, "target_weights.safetensors", e);
	int rc = path ? 0 : -1;

	if (path && !has_weights(c, path)) {
		rc = cache_lock_again(&c->lock, e) || ensure_weights(c, w, e) ? -1 : 0;
		cache_lock_opened(&c->lock);
	}
	free(path);
	return rc;
}

static bool alone(const struct cache *c)
{
	return c->lock.works && c->lock.alone;
}

int cache_open(struct cache *c, const char *dir, const struct geometry *g,
	       const struct identity *id, const char *plan, int rank, bool work,
	       const struct cache_weights *w, struct err *e)
{
	struct cache_state s = { 0 };
	int rc = -1;

	*c = (struct cache){ .g = *g,
			     .rank = rank,
			     .lock = { .fd = -1, .patience = c->lock.patience } };
	memcpy(c->identity, id->digest, sizeof c->identity);
	c->dir = mem_strdup(dir, e);
	/* looked at twice: somebody else's directory must not even get our lock file */
	if (!c->dir || file_mkdir_p(dir, e) || cache_check(dir, g, id, e))
		goto out;
	if (cache_lock_begin(&c->lock, dir, plan, e) || cache_check(dir, g, id, e) ||
	    cache_inspect(&s, dir, e) || (alone(c) && file_sweep(dir, true, e)) ||
	    write_manifests(c, &s, id, work, e) || (w && ensure_weights(c, w, e)))
		goto out;
	cache_lock_opened(&c->lock);
	/*
	 * needs no lock: it removes only what dead processes of this host left, and a thousand
	 * openers must not wait for it
	 */
	rc = alone(c) ? 0 : file_sweep(dir, false, e);
out:
	cache_state_release(&s);
	if (rc)
		cache_close(c);
	return rc;
}

void cache_close(struct cache *c)
{
	cache_lock_end(&c->lock);
	free(c->dir);
	*c = (struct cache)CACHE_INIT;
}
