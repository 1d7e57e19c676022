/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stage_copy: sequential reads in pieces that are hashed in a core's cache, large sequential writes
 * behind them (outlet.h). The next pieces of the source are asked for in time, so that neither end
 * waits for the other and the last fsync is short.
 *
 *	raw: header with room for the hashes | tensors ...	then the header with the hashes
 *	lz4: block | block | ...				the table goes to the index
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "err.h"
#include "file.h"
#include "mem.h"
#include "outlet.h"
#include "pack.h"
#include "parallel.h"
#include "safetensors.h"
#include "stage_copy.h"
#include "stage_derive.h"

#define PIECE ((size_t)8 << 20)
#define AHEAD (4 * PIECE)
#define CACHED ((size_t)256 << 10)
#define PIECE_BLOCKS (PIECE / PACK_BLOCK)
#define RAW_FORMAT "dspark-stage"

/* ---- packing a piece on all cores ------------------------------------------------------------ */

/* Each block of a piece has its own room and scratch memory. */
struct packer {
	const char *src;
	size_t n;
	enum dtype dtype;
	size_t len[PIECE_BLOCKS];
	char *out, *scratch;		/* [PIECE_BLOCKS] of pack_bound(PACK_BLOCK), PACK_SCRATCH */
};

static int pack_one(void *ctx, int64_t i, struct err *e)
{
	struct packer *p = ctx;
	size_t b = (size_t)i, at = b * PACK_BLOCK,
	       n = p->n - at < PACK_BLOCK ? p->n - at : PACK_BLOCK;

	(void)e;
	p->len[b] = pack_block(p->out + b * pack_bound(PACK_BLOCK), p->src + at, n, p->dtype,
			       p->scratch + b * PACK_SCRATCH);
	return 0;
}

static void packer_free(struct packer *p)
{
	if (p) {
		free(p->out);
		free(p->scratch);
	}
	free(p);
}

static struct packer *packer_new(struct err *e)
{
	struct packer *p = mem_calloc(1, sizeof *p, e);

	if (!p)
		return NULL;
	p->out = mem_aligned(PIECE_BLOCKS * pack_bound(PACK_BLOCK), e);
	p->scratch = mem_aligned(PIECE_BLOCKS * PACK_SCRATCH, e);
	if (p->out && p->scratch)
		return p;
	packer_free(p);
	return NULL;
}

/* ---- files ----------------------------------------------------------------------------------- */

int stage_copier_open(struct stage_copier *k, const char *dir, const struct checkpoint *c,
		      struct progress *p, struct err *e)
{
	size_t i;

	*k = (struct stage_copier){ .dir = dir, .checkpoint = c, .progress = p };
	k->fd = mem_calloc(c->nfiles + 1, sizeof *k->fd, e);
	for (i = 0; k->fd && i <= c->nfiles; i++)
		k->fd[i] = -1;
	k->buf = mem_aligned(PIECE, e);
	return k->fd && k->buf ? 0 : -1;
}

void stage_copier_release(struct stage_copier *k)
{
	size_t i;

	for (i = 0; k->fd && i <= k->checkpoint->nfiles; i++)
		if (k->fd[i] >= 0)
			close(k->fd[i]);
	free(k->fd);
	free(k->buf);
	packer_free(k->packer);
	*k = (struct stage_copier){ 0 };
}

/* Asks for what lies ahead of byte `at` of n from `begin` on, once for each piece. */
static void ask_ahead(int fd, uint64_t begin, uint64_t n, uint64_t at)
{
	uint64_t left = n - (at - begin);

	if ((at - begin) % PIECE == 0)
		posix_fadvise(fd, (off_t)at, (off_t)(left < AHEAD ? left : AHEAD),
			      POSIX_FADV_WILLNEED);
}

static void advance(struct stage_copier *k, uint64_t n)
{
	k->done += n;
	if (k->progress)
		progress_update(k->progress, (int64_t)k->done, 0, 0);
}

/*
 * A checkpoint's file, or the derived one behind them; `path` is for messages and freed by the
 * caller.
 */
static int source(struct stage_copier *k, int i, char **path, struct err *e)
{
	bool derived = (size_t)i == k->checkpoint->nfiles;

	*path = derived ? file_join(k->dir, STAGE_DERIVED, e)
			: file_join(k->checkpoint->dir, k->checkpoint->file[i].name, e);
	if (*path && k->fd[i] < 0) {
		k->fd[i] = file_open(*path, e);
		if (k->fd[i] >= 0)
			posix_fadvise(k->fd[i], 0, 0, POSIX_FADV_SEQUENTIAL);
	}
	return *path ? k->fd[i] : -1;
}

/*
 * A checkpoint that is being written or downloaded must not become a copy that claims its identity.
 */
static int check_sources(const struct stage_copier *k, struct err *e)
{
	const struct checkpoint *c = k->checkpoint;
	size_t i;

	for (i = 0; i < c->nfiles; i++) {
		char *path = k->fd[i] < 0 ? NULL : file_join(c->dir, c->file[i].name, e);
		int64_t mtime = 0;
		uint64_t size = 0;
		int rc;

		if (k->fd[i] < 0)
			continue;
		rc = !path || file_size(path, &size, &mtime, e) ? -1 : 0;
		if (!rc && (size != c->file[i].size || mtime != c->file[i].mtime_ns))
			rc = err_fail(e, "'%s' changed while it was copied", path);
		free(path);
		if (rc)
			return -1;
	}
	return 0;
}

/* The copy being written. */
struct target_file {
	struct stage_copier *k;
	struct file_new file;
	struct outlet out;		/* out.at: where the next byte goes */
	struct digest *digest;		/* of the tensor */
	enum dtype dtype;
	uint64_t *block;		/* LZ4: the tensor's table, filled as blocks are written */
	struct text header;		/* raw: with the hashes, for the room at the beginning */
};

/* Bytes [at, at + n) of a source, read to where they are written from. */
static int copy_raw(struct target_file *t, int fd, const char *path, uint64_t at, uint64_t n,
		    struct err *e)
{
	uint64_t begin = at, end = at + n;
	size_t part;

	for (; at < end; at += part) {
		char *to = outlet_room(&t->out, &part);

		part = part < CACHED ? part : CACHED;
		part = end - at < part ? (size_t)(end - at) : part;
		part = part < PIECE - (at - begin) % PIECE ? part : PIECE - (at - begin) % PIECE;
		ask_ahead(fd, begin, n, at);
		if (file_pread(fd, path, to, part, at, e))
			return -1;
		digest_update(t->digest, to, part);
		if (outlet_add(&t->out, part, e))
			return -1;
		advance(t->k, part);
	}
	return 0;
}

static int pack_piece(struct target_file *t, size_t n, struct err *e)
{
	struct packer *p = t->k->packer;
	size_t i;

	p->src = t->k->buf;
	p->n = n;
	p->dtype = t->dtype;
	if (parallel_each((int64_t)((n + PACK_BLOCK - 1) / PACK_BLOCK), parallel_threads(),
			  pack_one, p, e))
		return -1;
	for (i = 0; i * PACK_BLOCK < n; i++) {
		if (outlet_put(&t->out, p->out + i * pack_bound(PACK_BLOCK), p->len[i], e))
			return -1;
		t->block[1] = t->block[0] + p->len[i];
		t->block++;
	}
	return 0;
}

static int copy_packed(struct target_file *t, int fd, const char *path, uint64_t at, uint64_t n,
		       struct err *e)
{
	uint64_t begin = at, end = at + n;
	size_t part;

	for (; at < end; at += part) {
		part = end - at < PIECE ? (size_t)(end - at) : PIECE;
		ask_ahead(fd, begin, n, at);
		if (file_pread(fd, path, t->k->buf, part, at, e))
			return -1;
		digest_update(t->digest, t->k->buf, part);
		if (pack_piece(t, part, e))
			return -1;
		advance(t->k, part);
	}
	return 0;
}

/* ---- writing --------------------------------------------------------------------------------- */

/*
 * The header of a raw copy: tensors in the order of the index, cut ones as [rows, columns]; begin
 * and end are set.
 */
static int raw_header(struct text *out, struct st_tensor *st, size_t n, const struct stage_index *x,
		      const char *hashes, struct err *e)
{
	json_t *meta = json_pack("{s:s, s:s, s:o, s:s}",
				 "format", RAW_FORMAT, "key", x->key, "share",
				 json_sprintf("%d", x->share), "xxh3_128", hashes);
	int rc = meta ? safetensors_header(out, st, n, meta, 0, 4096, e)
		      : err_fail(e, "out of memory: cannot write a header");

	json_decref(meta);
	return rc;
}

/* The tensors of which something is held; those of no rows stand in the index only. */
static struct st_tensor *raw_tensors(const struct stage_index *x, size_t *n, struct err *e)
{
	struct st_tensor *st = mem_calloc(x->n, sizeof *st, e);
	size_t i;

	*n = 0;
	for (i = 0; st && i < x->n; i++) {
		const struct entry *t = &x->entry[i];
		struct st_tensor *to = &st[*n];

		if (!stage_bytes(t))
			continue;
		++*n;
		*to = (struct st_tensor){
			.name = (char *)t->name, .dtype = t->dtype, .ndim = t->ndim
		};
		memcpy(to->shape, t->shape, (size_t)t->ndim * sizeof *t->shape);
		if (t->rows == entry_rows(t))
			continue;
		to->ndim = t->ndim > 1 ? 2 : 1;
		to->shape[0] = t->rows;
		if (t->ndim > 1)
			to->shape[1] = t->shape[t->ndim - 1];
	}
	return st;
}

static char *no_hashes(size_t n, struct err *e)
{
	char *s = mem_calloc(n * (DIGEST_HEX - 1) + 1, 1, e);

	if (s)
		memset(s, '0', n * (DIGEST_HEX - 1));
	return s;
}

typedef int copy_fn(struct target_file *t, int fd, const char *path, uint64_t at, uint64_t n,
		    struct err *e);

static int copy_tensor(struct target_file *t, const struct entry *from, copy_fn *copy,
		       char hash[DIGEST_HEX], struct err *e)
{
	char *path;
	int fd = source(t->k, from->file, &path, e), rc = -1;

	digest_reset(t->digest);
	t->dtype = from->dtype;
	if (fd >= 0)
		rc = copy(t, fd, path, from->begin, from->end - from->begin, e);
	digest_hex(t->digest, hash);
	free(path);
	return rc;
}

/*
 * Reserving the space at once finds a full disk early and keeps the file in few pieces; where it
 * cannot be done nothing is lost.
 */
static int reserve(struct target_file *t, uint64_t n, struct err *e)
{
	if (n && fallocate(t->file.fd, 0, 0, (off_t)n) && errno == ENOSPC)
		return err_errno(e, "cannot write '%s' of %" PRIu64 " bytes", t->file.path, n);
	return 0;
}

static int write_raw(struct target_file *t, struct stage_index *x, struct entry *place,
		     char (*hash)[DIGEST_HEX], struct err *e)
{
	char *hashes = NULL;
	size_t i, n, k = 0, len;
	struct st_tensor *st = raw_tensors(x, &n, e);
	int rc = -1;

	hashes = no_hashes(n, e);
	if (!st || !hashes || raw_header(&t->header, st, n, x, hashes, e) ||
	    reserve(t, n ? st[n - 1].end : t->header.len, e))
		goto out;
	len = t->header.len;
	if (outlet_put(&t->out, t->header.s, len, e))
		goto out;
	for (i = 0; i < x->n; i++) {
		place[i].begin = t->out.at;
		if (copy_tensor(t, &x->entry[i], copy_raw, hash[i], e))
			goto out;
		place[i].end = t->out.at;
		if (place[i].end > place[i].begin)
			memcpy(hashes + k++ * (DIGEST_HEX - 1), hash[i], DIGEST_HEX - 1);
	}
	if (raw_header(&t->header, st, n, x, hashes, e))
		goto out;
	if (t->header.len != len)
		err_fail(e, "the header of '%s' changed its length from %zu to %zu bytes",
			 t->file.path, len, t->header.len);
	else
		rc = 0;
out:
	free(hashes);
	free(st);
	return rc;
}

static int write_packed(struct target_file *t, struct stage_index *x, struct entry *place,
			char (*hash)[DIGEST_HEX], struct err *e)
{
	size_t i;

	if (!t->k->packer && !(t->k->packer = packer_new(e)))
		return -1;
	for (i = 0; i < x->n; i++) {
		if (stage_index_blocks(
			    x, i, (stage_bytes(&x->entry[i]) + PACK_BLOCK - 1) / PACK_BLOCK, e))
			return -1;
		t->block = x->place[i].block;
		t->block[0] = place[i].begin = t->out.at;
		if (copy_tensor(t, &x->entry[i], copy_packed, hash[i], e))
			return -1;
		place[i].end = t->out.at;
	}
	return 0;
}

static char *copy_name(const struct stage_index *x, struct err *e)
{
	return mem_printf(e, "rank-%05d.%s", x->share,
			  x->form == STAGE_LZ4 ? "lz4" : "safetensors");
}

/* The copy is there: its places replace those in the checkpoint. */
static void settle(struct stage_index *x, const struct entry *place, char (*hash)[DIGEST_HEX],
		   char *name, uint64_t size)
{
	size_t i;

	for (i = 0; i < x->n; i++) {
		x->entry[i].file = 0;
		x->entry[i].begin = place[i].begin;
		x->entry[i].end = place[i].end;
		memcpy(x->place[i].hash, hash[i], DIGEST_HEX);
	}
	x->file = name;
	x->size = size;
}

/* All of the copy is in the file; *size: its bytes. */
static int write_copy(struct target_file *t, struct stage_index *x, struct entry *place,
		      char (*hash)[DIGEST_HEX], uint64_t *size, struct err *e)
{
	int rc;

	if (outlet_open(&t->out, &t->file, e))
		return -1;
	rc = x->form == STAGE_LZ4 ? write_packed(t, x, place, hash, e)
				  : write_raw(t, x, place, hash, e);
	*size = t->out.at;
	if (rc)
		outlet_abort(&t->out);
	else
		rc = outlet_close(&t->out, e);
	if (rc || !t->header.len)
		return rc;
	return file_pwrite(t->file.fd, t->file.tmp, t->header.s, t->header.len, 0, e);
}

int stage_copy_make(struct stage_copier *k, struct stage_index *x, struct err *e)
{
	struct target_file t = { .k = k, .file = FILE_NEW_INIT, .digest = digest_new(e) };
	struct entry *place = mem_calloc(x->n, sizeof *place, e);
	char(*hash)[DIGEST_HEX] = mem_calloc(x->n, sizeof *hash, e), *name = copy_name(x, e),
	*path = NULL;
	uint64_t size;
	int rc = -1;

	if (!t.digest || !place || !hash || !name || !(path = file_join(k->dir, name, e)) ||
	    file_new_open(&t.file, path, x->share, e))
		goto out;
	if (write_copy(&t, x, place, hash, &size, e) || check_sources(k, e) ||
	    file_new_publish(&t.file, e))
		goto out;
	settle(x, place, hash, name, size);
	name = NULL;
	rc = 0;
out:
	file_new_abort(&t.file);
	text_release(&t.header);
	digest_free(t.digest);
	free(place);
	free(hash);
	free(name);
	free(path);
	return rc;
}

/* ---- verifying ------------------------------------------------------------------------------- */

static int misfit(const char *path, const char *why)
{
	log_warn("'%s' %s: it is made again", path, why);
	return 1;
}

static int hash_bytes(struct target_file *t, int fd, const char *path, uint64_t at, uint64_t n,
		      struct err *e)
{
	uint64_t begin = at, end = at + n;
	size_t part;

	for (; at < end; at += part) {
		part = end - at < CACHED ? (size_t)(end - at) : CACHED;
		ask_ahead(fd, begin, n, at);
		if (file_pread(fd, path, t->k->buf, part, at, e))
			return -1;
		digest_update(t->digest, t->k->buf, part);
		advance(t->k, part);
	}
	return 0;
}

/*
 * The raw copy carries its hashes itself, so that it is kept even where its index was not written
 * any more.
 */
static int verify_raw(struct target_file *t, const struct stage_index *x, const char *path,
		      struct entry *place, char (*hash)[DIGEST_HEX], uint64_t *size, struct err *e)
{
	struct safetensors s = SAFETENSORS_INIT;
	struct err why = ERR_INIT;
	const char *hashes, *key;
	uint64_t at;
	size_t i;
	int rc = -1;

	if (safetensors_open(&s, path, &why)) {
		rc = why.code == EXIT_REFUSED ? misfit(path, "is no whole copy")
					      : err_fail(e, "%s", why.text);
		goto out;
	}
	key = safetensors_meta(&s, "key");
	hashes = safetensors_meta(&s, "xxh3_128");
	if (!key || strcmp(key, x->key) || !hashes || strlen(hashes) != s.n * (DIGEST_HEX - 1)) {
		rc = misfit(path, "belongs to another stage");
		goto out;
	}
	for (i = 0, at = s.data; i < x->n; i++) {
		const struct st_tensor *st = safetensors_find(&s, x->entry[i].name);
		uint64_t n = stage_bytes(&x->entry[i]);

		digest_reset(t->digest);
		if (n && (!st || st->dtype != x->entry[i].dtype || st->begin != at ||
			  st->end - st->begin != n)) {
			rc = misfit(path, "holds other tensors");
			goto out;
		}
		if (hash_bytes(t, s.fd, path, at, n, e))
			goto out;
		digest_hex(t->digest, hash[i]);
		if (n && memcmp(hash[i], hashes, DIGEST_HEX - 1)) {
			rc = misfit(path, "is damaged");
			goto out;
		}
		place[i].begin = at;
		place[i].end = at += n;
		hashes += n ? DIGEST_HEX - 1 : 0;
	}
	*size = s.size;
	rc = at == s.size ? 0 : misfit(path, "holds other tensors");
out:
	safetensors_release(&s);
	return rc;
}

static bool same_tensor(const struct entry *a, const struct entry *b)
{
	return !strcmp(a->name, b->name) && a->dtype == b->dtype && a->ndim == b->ndim &&
	       a->row0 == b->row0 && a->rows == b->rows &&
	       !memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape);
}

static bool same_tensors(const struct stage_index *a, const struct stage_index *b)
{
	size_t i;

	if (a->n != b->n || strcmp(a->key, b->key) || a->form != b->form || a->share != b->share)
		return false;
	for (i = 0; i < a->n; i++)
		if (!same_tensor(&a->entry[i], &b->entry[i]))
			return false;
	return true;
}

/* Each block vouches for its own bytes: nothing has to be unpacked. */
static int verify_blocks(struct stage_copier *k, int fd, const char *path,
			 const struct stage_index *x, struct err *e)
{
	size_t i, b;

	posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL);
	for (i = 0; i < x->n; i++) {
		const struct stage_place *p = &x->place[i];

		for (b = 0; b < p->nblocks; b++) {
			size_t n = (size_t)(p->block[b + 1] - p->block[b]);

			if (file_pread(fd, path, k->buf, n, p->block[b], e))
				return -1;
			if (pack_check(k->buf, n))
				return misfit(path, "is damaged");
		}
		advance(k, stage_bytes(&x->entry[i]));
	}
	return 0;
}

static int adopt(struct stage_index *x, struct stage_index *have, struct err *e)
{
	size_t i;

	for (i = 0; i < x->n; i++) {
		if (stage_index_blocks(x, i, have->place[i].nblocks, e))
			return -1;
		memcpy(x->place[i].block, have->place[i].block,
		       (have->place[i].nblocks + 1) * sizeof(uint64_t));
		memcpy(x->place[i].hash, have->place[i].hash, DIGEST_HEX);
		x->entry[i].file = 0;
		x->entry[i].begin = have->entry[i].begin;
		x->entry[i].end = have->entry[i].end;
	}
	x->file = have->file;
	x->size = have->size;
	have->file = NULL;
	return 0;
}

static int keep_packed(struct stage_copier *k, struct stage_index *x, const char *path,
		       struct err *e)
{
	struct stage_index have = { 0 };
	struct err why = ERR_INIT;
	char *index = NULL;
	uint64_t size;
	int fd = -1, rc = -1;

	if (stage_index_name(&index, k->dir, x->share, e))
		goto out;
	if (!file_exists(index) || stage_index_read(&have, index, &why)) {
		rc = misfit(path, "has no good index");
		goto out;
	}
	if (!same_tensors(x, &have) || file_size(path, &size, NULL, e) || size != have.size) {
		rc = e->code ? -1 : misfit(path, "does not fit its index");
		goto out;
	}
	fd = file_open(path, e);
	rc = fd < 0 ? -1 : verify_blocks(k, fd, path, &have, e);
	if (!rc)
		rc = adopt(x, &have, e);
out:
	if (fd >= 0)
		close(fd);
	stage_index_release(&have);
	free(index);
	return rc;
}

static int keep_raw(struct stage_copier *k, struct stage_index *x, const char *path, char **name,
		    struct err *e)
{
	struct target_file t = { .k = k, .file = FILE_NEW_INIT, .digest = digest_new(e) };
	struct entry *place = mem_calloc(x->n, sizeof *place, e);
	char (*hash)[DIGEST_HEX] = mem_calloc(x->n, sizeof *hash, e);
	uint64_t size = 0;
	int rc = -1;

	if (t.digest && place && hash)
		rc = verify_raw(&t, x, path, place, hash, &size, e);
	if (!rc) {
		settle(x, place, hash, *name, size);
		*name = NULL;
	}
	digest_free(t.digest);
	free(place);
	free(hash);
	return rc;
}

int stage_copy_keep(struct stage_copier *k, struct stage_index *x, struct err *e)
{
	char *name = copy_name(x, e), *path = name ? file_join(k->dir, name, e) : NULL;
	uint64_t before = k->done;
	int rc = -1;

	if (!path)
		goto out;
	if (!file_exists(path))
		rc = 1;
	else
		rc = x->form == STAGE_LZ4 ? keep_packed(k, x, path, e)
					  : keep_raw(k, x, path, &name, e);
	if (rc > 0)
		k->done = before;
out:
	free(path);
	free(name);
	return rc;
}
