/* SPDX-License-Identifier: Apache-2.0 */
/* cache_view: what is there, by names and manifests; headers are opened one at a time. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdlib.h>

#include "cache.h"
#include "cache_view.h"
#include "err.h"
#include "file.h"
#include "mem.h"
#include "text.h"

static int see(void *ctx, int64_t shard, struct err *e)
{
	struct cache_view *v = ctx;

	(void)e;
	if (shard < v->shards) {
		v->present[shard] = true;
	} else {
		v->strangers++;
		v->stranger = shard;
	}
	return 0;
}

int cache_view_open(struct cache_view *v, const char *dir, struct err *e)
{
	struct cache_state s = { 0 };
	int rc = -1;

	*v = (struct cache_view){ .dir = mem_strdup(dir, e) };
	if (!v->dir || cache_inspect(&s, dir, e))
		goto out;
	if (!s.exists) {
		err_refuse(e,
			   "'%s' holds no cache: neither dspark.json nor "
			   "manifest.json is there",
			   dir);
		goto out;
	}
	v->foreign = s.foreign;
	v->complete = s.complete;
	v->identity = json_incref(s.identity);
	if (!s.foreign && vouch_read(&v->vouch, dir, e))
		goto out;
	v->digest = s.foreign ? NULL : v->vouch.identity.digest;
	if (geometry_read(&v->g, v->identity, dir, e))
		goto out;
	v->shards = geometry_shards(&v->g);
	v->present = mem_calloc((size_t)v->shards, sizeof *v->present, e);
	if (!v->present || cache_each_shard(dir, see, v, e))
		goto out;
	rc = 0;
out:
	cache_state_release(&s);
	if (rc)
		cache_view_release(v);
	return rc;
}

void cache_view_release(struct cache_view *v)
{
	vouch_release(&v->vouch);
	json_decref(v->identity);
	free(v->present);
	free(v->dir);
	*v = (struct cache_view){ 0 };
}

int cache_view_shard(const struct cache_view *v, int64_t shard, struct shard_head *h, struct err *e)
{
	char *path = shard_path(v->dir, shard, e);
	int rc = -1;

	if (path)
		rc = shard_head_open(h, path, &v->g, geometry_shard_rows(&v->g, shard), v->digest,
				     e);
	free(path);
	return rc;
}

int cache_view_weights(const struct cache_view *v, struct weights_head *h, struct err *e)
{
	char *path = file_join(v->dir, "target_weights.safetensors", e);
	int rc = -1;

	if (path)
		rc = weights_head_open(h, path, &v->g, v->digest, e);
	free(path);
	return rc;
}

int64_t cache_intervals(struct text *out, const bool *flag, int64_t n)
{
	int64_t i, end, count = 0;
	int shown = 0;

	for (i = 0; i < n; i = end) {
		end = i + 1;
		if (!flag[i])
			continue;
		while (end < n && flag[end])
			end++;
		count += end - i;
		if (shown++ == 40)
			text_add(out, ", ...");
		if (shown > 40)
			continue;
		text_printf(out, "%s%lld", shown > 1 ? ", " : "", (long long)i);
		if (end - i > 1)
			text_printf(out, "-%lld", (long long)end - 1);
	}
	return count;
}
