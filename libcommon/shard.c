/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shard: rows go to their final offsets as they come, so memory is one padded line of ids. A row is
 * hashed and judged in pieces that stay in a core's cache and written in large ones; it is on its
 * way to the disk when the next one comes, and the fsync of publish finds little left to do.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cache.h"
#include "cache_scan.h"
#include "err.h"
#include "mem.h"
#include "shard.h"
#include "text.h"

#define ALIGN  4096
#define PAGE   4096u
#define PIECE  ((size_t)8 << 20)   /* one write */
#define CACHED ((size_t)256 << 10) /* hashed and judged at a time */
#define STRIDE (DIGEST_HEX)      /* 32 digits and a comma */

char *shard_path(const char *dir, int64_t index, struct err *e)
{
	size_t len = strlen(dir);

	return mem_printf(e, "%s%sshard-%06lld.safetensors", dir,
			  len && dir[len - 1] == '/' ? "" : "/", (long long)index);
}

bool shard_is_done(const char *path, uint64_t size, uint64_t header, const char *identity)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* it may be a FIFO */
	char member[16 + DIGEST_HEX];
	unsigned char buf[256];
	struct stat st;
	uint64_t length = 0;
	bool done;
	int i;

	if (fd < 0)
		return false;
	snprintf(member, sizeof member, "\"identity\":\"%.*s\"", DIGEST_HEX - 1, identity);
	done = !fstat(fd, &st) && S_ISREG(st.st_mode) && (uint64_t)st.st_size == size &&
	       pread(fd, buf, sizeof buf, 0) == (ssize_t)sizeof buf;
	for (i = 7; done && i >= 0; i--)
		length = length << 8 | buf[i];
	done = done && length + 8 == header &&
	       memmem(buf + 8, sizeof buf - 8, member, strlen(member));
	close(fd);
	return done;
}

/* ---- writing ---------------------------------------------------------------- */

int shard_begin(struct shard_writer *w, const struct cache *c, int64_t index, struct err *e)
{
	const struct geometry *g = &c->g;
	char *path = NULL;
	int rc = -1;

	*w = (struct shard_writer){ .file = FILE_NEW_INIT, .cache = c, .index = index };
	if (index < 0 || index >= geometry_shards(g)) {
		err_fail(e, "shard %lld of a cache of %lld shards cannot be written",
			 (long long)index, (long long)geometry_shards(g));
		goto out;
	}
	w->rows = geometry_shard_rows(g, index);
	geometry_tensors(g, w->rows, geometry_header(g, w->rows), w->tensor);
	w->row_tokens = mem_calloc((size_t)w->rows, sizeof *w->row_tokens, e);
	w->hash = mem_calloc((size_t)w->rows, sizeof *w->hash, e);
	w->line = mem_calloc((size_t)g->seq_length, sizeof *w->line, e);
	w->digest = digest_new(e);
	path = shard_path(c->dir, index, e);
	if (!w->row_tokens || !w->hash || !w->line || !w->digest || !path ||
	    file_new_open(&w->file, path, c->rank, e))
		goto out;
	if (ftruncate(w->file.fd, (off_t)w->tensor[SHARD_LAST].end)) {
		err_errno(e, "cannot size '%s'", w->file.tmp);
		goto out;
	}
	rc = 0;
out:
	free(path);
	if (rc)
		shard_abort(w);
	return rc;
}

static void take_in(struct shard_writer *w, enum shard_tensor t, const char *p, size_t n)
{
	bool floats = t == SHARD_STATES || t == SHARD_LAST, zero;
	size_t at, k;

	for (at = 0; at < n; at += k) {
		k = n - at < CACHED ? n - at : CACHED;
		digest_update(w->digest, p + at, k);
		if (floats && !scan_finite(p + at, k, w->cache->g.dtype, &zero))
			w->nonfinite = true;
	}
}

/*
 * Bytes [0, n) of row `row` of tensor t from `src`, the first `hashed` of them in its hash. Pieces
 * end on pages of the file.
 */
static int put(struct shard_writer *w, int64_t row, enum shard_tensor t, const void *src,
	       size_t hashed, size_t n, struct err *e)
{
	const struct geometry *g = &w->cache->g;
	uint64_t start = w->tensor[t].begin +
			 (uint64_t)row * (uint64_t)g->seq_length * geometry_token_bytes(g, t);
	const char *p = src;
	size_t at, k;

	digest_reset(w->digest);
	for (at = 0; at < n; at += k) {
		k = PIECE - (start + at) % PAGE;
		k = n - at < k ? n - at : k;
		if (at < hashed)
			take_in(w, t, p + at, k < hashed - at ? k : hashed - at);
		if (file_new_write(&w->file, p + at, k, start + at, e))
			return -1;
	}
	digest_hex(w->digest, w->hash[row][t]);
	return 0;
}

int shard_row(struct shard_writer *w, int64_t row, const int32_t *ids, const uint8_t *mask,
	      int64_t len, const void *states, const void *last, struct err *e)
{
	const struct geometry *g = &w->cache->g;
	size_t real = (size_t)len * sizeof(int64_t),
	       whole = (size_t)g->seq_length * sizeof(int64_t);
	int64_t i;

	if (row < 0 || row >= w->rows || len < 1 || len > g->seq_length || w->row_tokens[row])
		return err_fail(e,
				"row %lld of shard %lld with %lld tokens cannot be "
				"written: not in the shard, not 1 to %lld "
				"tokens, or there already",
				(long long)row, (long long)w->index, (long long)len,
				(long long)g->seq_length);
	for (i = 0; i < g->seq_length; i++)
		w->line[i] = i < len ? ids[i] : g->pad_token_id;
	if (put(w, row, SHARD_IDS, w->line, real, whole, e))
		return -1;
	for (i = 0; i < g->seq_length; i++)
		w->line[i] = i < len ? mask[i] : 0;
	if (put(w, row, SHARD_MASK, w->line, real, whole, e))
		return -1;
	real = (size_t)len * geometry_token_bytes(g, SHARD_STATES);
	if (put(w, row, SHARD_STATES, states, real, real, e))
		return -1;
	real = (size_t)len * geometry_token_bytes(g, SHARD_LAST);
	if (put(w, row, SHARD_LAST, last, real, real, e))
		return -1;
	w->row_tokens[row] = len;
	w->written++;
	return 0;
}

static int set(json_t *o, const char *key, const struct text *t, struct err *e)
{
	if (text_ok(t, e))
		return -1;
	return json_object_set_new(o, key, json_string(t->s))
		       ? err_fail(e, "out of memory for a shard's header")
		       : 0;
}

static json_t *metadata(const struct shard_writer *w, struct err *e)
{
	json_t *m = json_pack("{s:s}", "identity", w->cache->identity);
	struct text t = TEXT_INIT;
	char key[64];
	int64_t r;
	int k, rc;

	for (r = 0; r < w->rows; r++)
		text_printf(&t, "%s%lld", r ? "," : "", (long long)w->row_tokens[r]);
	rc = m ? set(m, "row_tokens", &t, e) : err_fail(e, "out of memory for a shard's header");
	for (k = 0; k < SHARD_TENSORS && !rc; k++) {
		text_clear(&t);
		for (r = 0; r < w->rows; r++)
			text_printf(&t, "%s%s", r ? "," : "", w->hash[r][k]);
		snprintf(key, sizeof key, "xxh3_128.%s", shard_tensor_name(k));
		rc = set(m, key, &t, e);
	}
	text_release(&t);
	if (!rc)
		return m;
	json_decref(m);
	return NULL;
}

int shard_mark_bad(struct shard_writer *w, struct err *e)
{
	char *path = mem_printf(e, "%s.bad", w->file.path);
	int n;

	for (n = 1; path && file_exists(path); n++) {
		free(path);
		path = mem_printf(e, "%s.%d.bad", w->file.path, n);
	}
	if (!path)
		return -1;
	free(w->file.path);
	w->file.path = path;
	return 0;
}

int shard_publish(struct shard_writer *w, uint64_t *bytes, struct err *e)
{
	uint64_t header = w->tensor[0].begin, size = w->tensor[SHARD_LAST].end;
	struct text t = TEXT_INIT;
	json_t *m = NULL;
	int rc = -1;

	if (w->written != w->rows) {
		err_fail(e,
			 "shard %lld cannot be published: %lld of its %lld rows are "
			 "missing",
			 (long long)w->index, (long long)(w->rows - w->written),
			 (long long)w->rows);
		goto out;
	}
	m = metadata(w, e);
	if (!m || safetensors_header(&t, w->tensor, SHARD_TENSORS, m, header, ALIGN, e) ||
	    file_pwrite(w->file.fd, w->file.tmp, t.s, t.len, 0, e) || file_new_publish(&w->file, e))
		goto out;
	if (bytes)
		*bytes = size;
	rc = 0;
out:
	json_decref(m);
	text_release(&t);
	shard_abort(w);
	return rc;
}

void shard_abort(struct shard_writer *w)
{
	file_new_abort(&w->file);
	free(w->row_tokens);
	free(w->hash);
	free(w->line);
	digest_free(w->digest);
	*w = (struct shard_writer){ .file = FILE_NEW_INIT };
}

/* ---- reading ---------------------------------------------------------------- */

static int check_tensors(struct shard_head *h, const struct geometry *g, bool ours, struct err *e)
{
	struct st_tensor want[SHARD_TENSORS];
	int i, d;

	if (h->file.n != SHARD_TENSORS)
		return err_refuse(e, "'%s' holds %zu tensors, not %d", h->file.path, h->file.n,
				  SHARD_TENSORS);
	geometry_tensors(g, h->rows, geometry_header(g, h->rows), want);
	for (i = 0; i < SHARD_TENSORS; i++) {
		const struct st_tensor *t = safetensors_find(&h->file, want[i].name);

		h->tensor[i] = t;
		if (!t)
			return err_refuse(e, "'%s' has no tensor '%s'", h->file.path, want[i].name);
		if (t->dtype != want[i].dtype)
			return err_refuse(e, "'%s': '%s' is %s, not %s", h->file.path, t->name,
					  dtype_name(t->dtype), dtype_name(want[i].dtype));
		for (d = 0;
		     d < want[i].ndim && t->ndim == want[i].ndim && t->shape[d] == want[i].shape[d];
		     d++)
			;
		if (d < want[i].ndim)
			return err_refuse(e,
					  "'%s': '%s' does not have the shape of %lld rows of this "
					  "cache",
					  h->file.path, t->name, (long long)h->rows);
		if (ours && (t->begin != want[i].begin || t->end != want[i].end))
			return err_refuse(e,
					  "'%s': '%s' lies elsewhere than this cache's layout says",
					  h->file.path, t->name);
	}
	return 0;
}

static int read_lengths(struct shard_head *h, const struct geometry *g, struct err *e)
{
	const char *s = safetensors_meta(&h->file, "row_tokens");
	char *end = NULL;
	int64_t r;

	h->row_tokens = mem_calloc((size_t)h->rows, sizeof *h->row_tokens, e);
	if (!h->row_tokens)
		return -1;
	for (r = 0; s && r < h->rows; r++, s = end + 1) {
		h->row_tokens[r] = *s >= '0' && *s <= '9' ? strtoll(s, &end, 10) : 0;
		if (h->row_tokens[r] < 1 || h->row_tokens[r] > g->seq_length ||
		    *end != (r + 1 < h->rows ? ',' : '\0'))
			break;
	}
	return s && r == h->rows
		       ? 0
		       : err_refuse(e,
				    "'%s': row_tokens is not a length from 1 to %lld for each "
				    "of %lld rows",
				    h->file.path, (long long)g->seq_length, (long long)h->rows);
}

static bool is_digest(const char *s)
{
	return strspn(s, "0123456789abcdef") == DIGEST_HEX - 1;
}

static int read_hashes(struct shard_head *h, enum shard_tensor t, struct err *e)
{
	char key[64];
	int64_t r;

	snprintf(key, sizeof key, "xxh3_128.%s", shard_tensor_name(t));
	h->hash[t] = safetensors_meta(&h->file, key);
	if (!h->hash[t] || strlen(h->hash[t]) + 1 != (size_t)h->rows * STRIDE)
		return err_refuse(e, "'%s': %s is not a hash for each of %lld rows", h->file.path,
				  key, (long long)h->rows);
	for (r = 0; r < h->rows; r++)
		if (!is_digest(h->hash[t] + r * STRIDE))
			return err_refuse(e, "'%s': %s has no hash for row %lld", h->file.path, key,
					  (long long)r);
	return 0;
}

static int hash_header(const struct safetensors *s, char hex[DIGEST_HEX], struct err *e)
{
	char *buf = mem_aligned((size_t)s->data, e);
	int rc = -1;

	if (buf && !file_pread(s->fd, s->path, buf, (size_t)s->data, 0, e)) {
		digest_xxh3(hex, buf, (size_t)s->data);
		rc = 0;
	}
	free(buf);
	return rc;
}

static int check_identity(const struct safetensors *s, const char *identity, struct err *e)
{
	const char *have = safetensors_meta(s, "identity");

	if (have && !strcmp(have, identity))
		return 0;
	return err_refuse(e, "'%s' belongs to another cache: its identity is %s, not %s", s->path,
			  have ? have : "absent", identity);
}

static int check_ours(struct shard_head *h, const struct geometry *g, const char *identity,
		      struct err *e)
{
	int i;

	if (check_identity(&h->file, identity, e) || read_lengths(h, g, e))
		return -1;
	for (i = 0; i < SHARD_TENSORS; i++)
		if (read_hashes(h, i, e))
			return -1;
	return hash_header(&h->file, h->header_xxh3, e);
}

int shard_head_open(struct shard_head *h, const char *path, const struct geometry *g, int64_t n,
		    const char *identity, struct err *e)
{
	*h = (struct shard_head)SHARD_HEAD_INIT;
	h->rows = n;
	if (!safetensors_open(&h->file, path, e) && !check_tensors(h, g, identity != NULL, e) &&
	    (!identity || !check_ours(h, g, identity, e)))
		return 0;
	shard_head_release(h);
	return -1;
}

void shard_head_release(struct shard_head *h)
{
	safetensors_release(&h->file);
	free(h->row_tokens);
	*h = (struct shard_head)SHARD_HEAD_INIT;
}

int shard_read(const struct shard_head *h, const struct geometry *g, enum shard_tensor t,
	       int64_t row, int64_t first, int64_t n, void *buf, struct err *e)
{
	uint64_t width = geometry_token_bytes(g, t);

	return file_pread(h->file.fd, h->file.path, buf, (size_t)n * width,
			  h->tensor[t]->begin + (uint64_t)(row * g->seq_length + first) * width, e);
}

int64_t shard_skip_hole(const struct shard_head *h, const struct geometry *g, enum shard_tensor t,
			int64_t row, int64_t first)
{
#ifdef SEEK_DATA
	uint64_t width = geometry_token_bytes(g, t),
		 start = h->tensor[t]->begin + (uint64_t)(row * g->seq_length) * width;
	off_t data = lseek(h->file.fd, (off_t)(start + (uint64_t)first * width), SEEK_DATA);
	int64_t at;

	if (data < 0)
		return errno == ENXIO ? g->seq_length : first;
	at = (int64_t)(((uint64_t)data - start) / width);
	return at < g->seq_length ? at : g->seq_length;
#else
	(void)h, (void)g, (void)t, (void)row;
	return first;
#endif
}

/* ---- target weights ---------------------------------------------------------------- */

const char *weights_name(int which)
{
	return which ? "lm_head.weight" : "embed_tokens.weight";
}

static int check_matrix(struct weights_head *h, const struct geometry *g, int which, bool ours,
			struct err *e)
{
	const struct st_tensor *t = safetensors_find(&h->file, weights_name(which));
	char key[64];

	h->tensor[which] = t;
	if (!t)
		return err_refuse(e, "'%s' has no tensor '%s'", h->file.path, weights_name(which));
	if (t->dtype != g->dtype || t->ndim != 2 || t->shape[0] != g->vocab ||
	    t->shape[1] != g->hidden)
		return err_refuse(e, "'%s': '%s' is not %s [%lld, %lld]", h->file.path, t->name,
				  dtype_name(g->dtype), (long long)g->vocab, (long long)g->hidden);
	if (!ours)
		return 0;
	snprintf(key, sizeof key, "xxh3_128.%s", t->name);
	h->hash[which] = safetensors_meta(&h->file, key);
	if (!h->hash[which] || strlen(h->hash[which]) != DIGEST_HEX - 1 ||
	    !is_digest(h->hash[which]))
		return err_refuse(e, "'%s' has no hash of '%s'", h->file.path, t->name);
	return 0;
}

int weights_head_open(struct weights_head *h, const char *path, const struct geometry *g,
		      const char *identity, struct err *e)
{
	*h = (struct weights_head)WEIGHTS_HEAD_INIT;
	if (safetensors_open(&h->file, path, e) || check_matrix(h, g, 0, identity != NULL, e) ||
	    check_matrix(h, g, 1, identity != NULL, e))
		goto fail;
	if (h->file.n != 2) {
		err_refuse(e, "'%s' holds %zu tensors, not 2", path, h->file.n);
		goto fail;
	}
	if (identity && h->file.size != geometry_target_weights(g)) {
		err_refuse(e, "'%s' has %llu bytes, not %llu", path,
			   (unsigned long long)h->file.size,
			   (unsigned long long)geometry_target_weights(g));
		goto fail;
	}
	if (!identity ||
	    (!check_identity(&h->file, identity, e) && !hash_header(&h->file, h->header_xxh3, e)))
		return 0;
fail:
	weights_head_release(h);
	return -1;
}

void weights_head_release(struct weights_head *h)
{
	safetensors_release(&h->file);
	*h = (struct weights_head)WEIGHTS_HEAD_INIT;
}
