/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cache_verify: every byte of a cache against what vouches for it. Threads take one file each;
 * findings are printed in shard order at the end. With --discard the directory is locked as merge
 * locks it, and `complete` is cleared before the first file moves.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cache.h"
#include "cache_logits.h"
#include "cache_scan.h"
#include "cache_view.h"
#include "err.h"
#include "file.h"
#include "json.h"
#include "log.h"
#include "mem.h"
#include "parallel.h"

#define TARGET_WEIGHTS "target_weights.safetensors"
#define TEXT_MAX       ((size_t)1 << 30)

struct verify {
	struct cache_view v;
	bool *missing;        /* [shards] */
	struct faults *shard; /* [shards] */
	struct faults weights, vouch, manifest;
	bool no_weights;
	uint64_t bytes; /* of all files that were read */
	struct progress progress;
	uint64_t done;        /* bytes */
	pthread_mutex_t lock; /* of progress, bytes and done */
};

static void advance(void *ctx, uint64_t bytes)
{
	struct verify *k = ctx;

	pthread_mutex_lock(&k->lock);
	k->done += bytes;
	progress_update(&k->progress, (int64_t)(k->done >> 20), 0, 0);
	pthread_mutex_unlock(&k->lock);
}

/* What dspark.json says of a file against the file. Before merge it says nothing. */
static void check_listed(const struct verify *k, const char *name, uint64_t size,
			 const char *header, struct faults *f)
{
	const json_t *o = json_object_get(k->v.vouch.files, name);
	const char *want = json_string_value(json_object_get(o, "header_xxh3_128"));

	if (!k->v.vouch.files)
		return;
	if (!o || !want)
		faults_add(f, "dspark.json does not list it");
	else if ((uint64_t)json_integer_value(json_object_get(o, "size")) != size)
		faults_add(f, "it has %llu bytes, dspark.json says %lld", (unsigned long long)size,
			   (long long)json_integer_value(json_object_get(o, "size")));
	else if (*header && strcmp(header, want))
		faults_add(f, "its header does not have the hash that dspark.json states");
}

static const char *base(const char *path)
{
	const char *slash = strrchr(path, '/');

	return slash ? slash + 1 : path;
}

static int verify_shard(struct verify *k, int64_t i, struct err *e)
{
	char header[DIGEST_HEX] = "", *path;
	struct err gone = ERR_INIT;
	uint64_t size;
	int rc = -1;

	k->missing[i] = !k->v.present[i];
	if (k->missing[i])
		return 0;
	path = shard_path(k->v.dir, i, e);
	if (!path)
		return -1;
	if (file_size(path, &size, NULL, &gone)) {
		faults_add(&k->shard[i], "%s", gone.text);
		rc = text_ok(&k->shard[i].text, e);
	} else if (!cache_scan_shard(&k->v, i, &k->shard[i], header, advance, k, e)) {
		check_listed(k, base(path), size, header, &k->shard[i]);
		pthread_mutex_lock(&k->lock);
		k->bytes += size;
		pthread_mutex_unlock(&k->lock);
		rc = text_ok(&k->shard[i].text, e);
	}
	free(path);
	return rc;
}

static int verify_weights(struct verify *k, struct err *e)
{
	char header[DIGEST_HEX] = "", *path = file_join(k->v.dir, TARGET_WEIGHTS, e);
	struct err gone = ERR_INIT;
	uint64_t size;
	int rc = -1;

	if (!path)
		return -1;
	k->no_weights = !file_exists(path);
	if (k->no_weights) {
		rc = 0;
	} else if (file_size(path, &size, NULL, &gone)) {
		faults_add(&k->weights, "%s", gone.text);
		rc = 0;
	} else if (!cache_scan_weights(&k->v, &k->weights, header, e)) {
		check_listed(k, TARGET_WEIGHTS, size, header, &k->weights);
		pthread_mutex_lock(&k->lock);
		k->bytes += size;
		pthread_mutex_unlock(&k->lock);
		rc = text_ok(&k->weights.text, e);
	}
	free(path);
	return rc;
}

/* The weights first: they may be the largest file, and one thread reads it. */
static int verify_file(void *ctx, int64_t i, struct err *e)
{
	return i ? verify_shard(ctx, i - 1, e) : verify_weights(ctx, e);
}

/* manifest.json must be what the identity says, and once merged what dspark.json vouches for. */
static int verify_manifest(struct verify *k, struct err *e)
{
	char *path = file_join(k->v.dir, "manifest.json", e), hash[DIGEST_HEX];
	struct text have = TEXT_INIT, want = TEXT_INIT;
	struct err gone = ERR_INIT;
	int rc = -1;

	if (!path || identity_manifest(&want, k->v.identity, k->v.complete, e))
		goto out;
	if (file_read_all(path, TEXT_MAX, &have, &gone)) {
		faults_add(&k->manifest, "%s", gone.text);
	} else if (k->v.foreign) {
		/* written by the reference: cache_view_open has read it */
	} else if (have.len != want.len || memcmp(have.s, want.s, want.len)) {
		faults_add(&k->manifest, "it is not the manifest of this cache's identity");
	} else if (k->v.complete) {
		digest_xxh3(hash, have.s, have.len);
		if (!k->v.vouch.files)
			faults_add(&k->vouch,
				   "it states no hashes although manifest.json says complete");
		else if (strcmp(hash, k->v.vouch.manifest))
			faults_add(&k->manifest,
				   "it does not have the hash that dspark.json states");
	}
	if (k->v.vouch.files && (int64_t)json_object_size(k->v.vouch.files) != k->v.shards + 1)
		faults_add(&k->vouch, "it lists %zu files, not %lld",
			   json_object_size(k->v.vouch.files), (long long)k->v.shards + 1);
	rc = text_ok(&k->manifest.text, e) || text_ok(&k->vouch.text, e) ? -1 : 0;
out:
	text_release(&have);
	text_release(&want);
	free(path);
	return rc;
}

/* ---- what was found ---------------------------------------------------------------- */

static void print_faults(const struct verify *k, const char *name, const struct faults *f)
{
	const char *s = f->text.s, *end;
	int64_t shown = 0;

	for (; s && *s; s = end + 1, shown++) {
		end = strchr(s, '\n');
		printf("%s/%s: %.*s\n", k->v.dir, name, (int)(end - s), s);
	}
	if (f->n > shown)
		printf("%s/%s: and %lld more\n", k->v.dir, name, (long long)(f->n - shown));
}

static void print_all(const struct verify *k)
{
	char name[64];
	int64_t i;

	print_faults(k, "dspark.json", &k->vouch);
	print_faults(k, "manifest.json", &k->manifest);
	print_faults(k, TARGET_WEIGHTS, &k->weights);
	for (i = 0; i < k->v.shards; i++) {
		snprintf(name, sizeof name, "shard-%06lld.safetensors", (long long)i);
		print_faults(k, name, &k->shard[i]);
	}
	if (k->v.strangers)
		printf("%s/shard-%06lld.safetensors: beyond the last shard of "
		       "this cache (%lld such files)\n",
		       k->v.dir, (long long)k->v.stranger, (long long)k->v.strangers);
}

static bool has_faults(const struct verify *k)
{
	int64_t i;

	for (i = 0; i < k->v.shards; i++)
		if (k->shard[i].n)
			return true;
	return k->weights.n || k->vouch.n || k->manifest.n || k->v.strangers;
}

/* "bad: shards 3, 7, target_weights.safetensors; missing: shards 12-40 (30 of 100)" */
static int describe(const struct verify *k, struct text *out, struct err *e)
{
	const struct {
		const char *name;
		int64_t bad;
	} other[] = {
		{ TARGET_WEIGHTS, k->weights.n },
		{ "manifest.json", k->manifest.n },
		{ "dspark.json", k->vouch.n },
	};
	bool *bad = mem_calloc((size_t)k->v.shards, sizeof *bad, e);
	struct text list = TEXT_INIT;
	int64_t i, n;
	size_t o;

	if (!bad)
		return -1;
	for (i = 0; i < k->v.shards; i++)
		bad[i] = k->shard[i].n > 0;
	n = cache_intervals(&list, bad, k->v.shards);
	if (n)
		text_printf(out, "bad: shard%s %s (%lld of %lld)", n > 1 ? "s" : "", list.s,
			    (long long)n, (long long)k->v.shards);
	for (o = 0; o < sizeof other / sizeof *other; o++)
		if (other[o].bad)
			text_printf(out, "%s%s", out->len ? ", " : "bad: ", other[o].name);
	if (k->v.strangers)
		text_printf(out, "%s%lld shards too many",
			    out->len ? ", " : "bad: ", (long long)k->v.strangers);
	text_clear(&list);
	n = cache_intervals(&list, k->missing, k->v.shards);
	if (n)
		text_printf(out, "%smissing: shard%s %s (%lld of %lld)", out->len ? "; " : "",
			    n > 1 ? "s" : "", list.s, (long long)n, (long long)k->v.shards);
	if (k->no_weights)
		text_printf(out, "%s" TARGET_WEIGHTS,
			    n ? ", " : out->len ? "; missing: " : "missing: ");
	n = text_ok(&list, e) || text_ok(out, e);
	text_release(&list);
	free(bad);
	return n ? -1 : 0;
}

static int conclude(const struct verify *k, bool discarded, struct err *e)
{
	struct text t = TEXT_INIT, size = TEXT_INIT;
	int rc = describe(k, &t, e);

	text_bytes(&size, (double)k->bytes);
	if (rc || text_ok(&size, e)) {
		rc = -1;
	} else if (t.len && (discarded || !has_faults(k))) {
		rc = err_refuse(e, "'%s': %s%s: run it again", k->v.dir, t.s,
				discarded ? "; bad files are now *.bad" : "");
	} else if (t.len) {
		rc = err_refuse(e, "'%s': %s%s", k->v.dir, t.s,
				k->v.foreign
					? ""
					: ": 'dspark-manifest verify --discard' sets them aside so "
					  "that running again mends");
	} else if (!k->v.complete) {
		rc = err_refuse(e,
				"'%s': all %lld shards are good but it is not complete: "
				"run dspark-manifest merge",
				k->v.dir, (long long)k->v.shards);
	} else {
		printf("%s: complete and %s: %lld rows, %lld shards, %s\n", k->v.dir,
		       k->v.foreign ? "well-formed" : "good", (long long)k->v.g.rows,
		       (long long)k->v.shards, size.s);
		if (k->v.foreign)
			printf("%s: not written by dspark: no hashes vouch for its bytes\n",
			       k->v.dir);
	}
	text_release(&t);
	text_release(&size);
	return rc;
}

/* ---- discard ---------------------------------------------------------------- */

/* NAME becomes NAME.bad, or NAME.N.bad where that name is taken: nothing is lost. */
static int set_aside(const char *dir, const char *name, struct err *e)
{
	char *from = file_join(dir, name, e), *to = from ? mem_printf(e, "%s.bad", from) : NULL;
	int rc = -1, n;

	for (n = 1; to && file_exists(to) && n < 100000; n++) {
		free(to);
		to = mem_printf(e, "%s.%d.bad", from, n);
	}
	if (to)
		rc = rename(from, to) && errno != ENOENT
			     ? err_errno(e, "cannot rename '%s' to '%s'", from, to)
			     : 0;
	if (!rc)
		log_info("renamed '%s' to '%s'", from, to);
	free(from);
	free(to);
	return rc;
}

static int set_aside_stranger(void *ctx, int64_t shard, struct err *e)
{
	const struct verify *k = ctx;
	char name[64];

	snprintf(name, sizeof name, "shard-%06lld.safetensors", (long long)shard);
	if (shard < k->v.shards && !k->shard[shard].n)
		return 0;
	return set_aside(k->v.dir, name, e);
}

/* Back to the state before merge: `complete` first, then the hashes. */
static int reopen(const char *dir, const struct identity *id, struct err *e)
{
	struct text vouch = TEXT_INIT, manifest = TEXT_INIT;
	int rc = -1;

	if (!identity_manifest(&manifest, id->json, false, e) &&
	    !vouch_text(&vouch, id, NULL, NULL, e) &&
	    !cache_put(dir, "manifest.json", 0, manifest.s, manifest.len, e) &&
	    !cache_put(dir, "dspark.json", 0, vouch.s, vouch.len, e))
		rc = 0;
	text_release(&vouch);
	text_release(&manifest);
	return rc;
}

static int discard(const struct verify *k, struct err *e)
{
	if (k->manifest.n && set_aside(k->v.dir, "manifest.json", e))
		return -1;
	if (reopen(k->v.dir, &k->v.vouch.identity, e) ||
	    (k->weights.n && set_aside(k->v.dir, TARGET_WEIGHTS, e)) ||
	    cache_each_shard(k->v.dir, set_aside_stranger, (void *)k, e))
		return -1;
	return file_fsync_dir(k->v.dir, e);
}

/*
 * A dspark.json or manifest.json that cannot be read. Without dspark.json the manifest would pass
 * for the reference's, so both go; the next run writes them again and keeps the shards.
 */
static int discard_unreadable(const char *dir, struct err *e)
{
	struct vouch v = { 0 };
	struct err why = ERR_INIT;
	int rc = -1;

	if (vouch_read(&v, dir, &why)) {
		rc = why.code != EXIT_REFUSED || set_aside(dir, "manifest.json", e) ||
		     set_aside(dir, "dspark.json", e);
	} else if (v.json) {
		rc = set_aside(dir, "manifest.json", e) || reopen(dir, &v.identity, e);
	}
	vouch_release(&v);
	return rc ? -1 : file_fsync_dir(dir, e);
}

/* ---- all of it ---------------------------------------------------------------- */

static int open_all(struct verify *k, const char *dir, const struct verify_options *o,
		    struct err *e)
{
	struct err sub = ERR_INIT;

	if (cache_view_open(&k->v, dir, e)) {
		if (o->discard && e->code == EXIT_REFUSED && file_is_dir(dir) &&
		    !discard_unreadable(dir, &sub))
			log_info("'%s': what could not be read is set aside: run it again", dir);
		return -1;
	}
	if (o->discard && k->v.foreign)
		return err_refuse(e, "'%s' was not written by dspark: --discard leaves it alone",
				  dir);
	k->missing = mem_calloc((size_t)k->v.shards, sizeof *k->missing, e);
	k->shard = mem_calloc((size_t)k->v.shards, sizeof *k->shard, e);
	return k->missing && k->shard ? 0 : -1;
}

/* Progress only where a person would wait. */
static int check_all(struct verify *k, struct err *e)
{
	const struct geometry *g = &k->v.g;
	uint64_t row = 0;
	int64_t total;
	int i, rc;

	for (i = 0; i < SHARD_TENSORS; i++)
		row += (uint64_t)g->seq_length * geometry_token_bytes(g, i);
	total = (int64_t)(row * (uint64_t)g->rows >> 20);
	progress_begin(&k->progress, total < 1024 ? PROGRESS_NONE : PROGRESS_AUTO, "MiB", total);
	rc = verify_manifest(k, e) ||
	     parallel_each(k->v.shards + 1, parallel_threads(), verify_file, k, e);
	progress_end(&k->progress);
	return rc ? -1 : 0;
}

static int print_logits(const struct verify *k, struct err *e)
{
	struct text t = TEXT_INIT;
	int rc = cache_logits(&k->v, &t, e);

	if (!rc)
		printf("%s: %s\n", k->v.dir, t.s);
	text_release(&t);
	return rc ? err_context(e, "'%s'", k->v.dir) : 0;
}

/* Only a directory with a dspark.json gets our lock file. */
static int lock_ours(struct cache_lock *lock, const char *dir, struct err *e)
{
	char *path = file_join(dir, "dspark.json", e);
	int rc = path ? 0 : -1;

	if (path && file_exists(path)) {
		rc = cache_lock_begin(lock, dir, NULL, e);
		if (!rc)
			cache_lock_opened(lock);
	}
	free(path);
	return rc;
}

int cache_verify(const char *dir, const struct verify_options *o, struct err *e)
{
	struct verify k = { .lock = PTHREAD_MUTEX_INITIALIZER };
	struct cache_lock lock = CACHE_LOCK_INIT;
	int64_t i;
	int rc = -1;

	if (o->discard && lock_ours(&lock, dir, e))
		goto out;
	if (open_all(&k, dir, o, e) || check_all(&k, e))
		goto out;
	print_all(&k);
	if (o->discard && has_faults(&k) && discard(&k, e))
		goto out;
	rc = conclude(&k, o->discard && has_faults(&k), e);
	if (!rc && o->logits)
		rc = print_logits(&k, e);
out:
	cache_lock_end(&lock);
	for (i = 0; k.shard && i < k.v.shards; i++)
		faults_release(&k.shard[i]);
	faults_release(&k.weights);
	faults_release(&k.vouch);
	faults_release(&k.manifest);
	free(k.missing);
	free(k.shard);
	cache_view_release(&k.v);
	pthread_mutex_destroy(&k.lock);
	return rc;
}
