/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stage: who holds which rows, and reading them. Making stages is stage_make.c, their text form
 * stage_index.c.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "err.h"
#include "file.h"
#include "mem.h"
#include "pack.h"
#include "plan.h"
#include "stage.h"
#include "stage_index.h"
#include "text.h"

/* ---- shares ---------------------------------------------------------------------------------- */

struct stage_mesh stage_mesh(const struct plan *p)
{
	return (struct stage_mesh){ p->world, p->ep, p->replicate, p->cut };
}

int stage_shares(const struct stage_mesh *m, int *shares, struct err *e)
{
	int n = m->replicate > 0 ? m->world / m->replicate : 0;

	*shares = m->ep;
	if (m->ep < 1 || m->world % m->ep || n < 1 || n * m->replicate != m->world ||
	    (m->cut && n % m->ep && m->ep % n))
		return err_refuse(e,
				  "%d ranks cannot be divided with dp_replicate_size %d and "
				  "ep_size %d: both must divide the ranks, and of ep_size and "
				  "the size of a shard group, ranks / dp_replicate_size, one "
				  "must divide the other",
				  m->world, m->replicate, m->ep);
	if (m->cut && n > m->ep)
		*shares = n;
	return 0;
}

int stage_members(const struct stage_mesh *m, enum shard shard)
{
	int n = m->cut ? m->world / m->replicate : 1;

	if (shard == SHARD_EXPERT)
		return n > m->ep ? n / m->ep : 1;
	return shard == SHARD_ROWS ? n : 1;
}

static void cut(int64_t d, int m, int i, int64_t *first, int64_t *n)
{
	int64_t c = d / m + (d % m != 0), end;

	*first = i * c < d ? i * c : d;
	end = d - *first < c ? d : *first + c;
	*n = end - *first;
}

void stage_share(const struct stage_mesh *m, int share, enum shard shard, int64_t count,
		 int64_t rows, int64_t *first, int64_t *n)
{
	int members = stage_members(m, shard);

	if (shard == SHARD_EXPERT) {
		int64_t stack = count / m->ep * rows;

		/* counted within the shard group, of which ep consecutive ranks come first */
		cut(stack, members, share / m->ep % members, first, n);
		*first += share % m->ep * stack;
	} else {
		cut(count * rows, members, share % members, first, n);
	}
}

void stage_key(char hex[DIGEST_HEX], const char *weights_identity, const struct stage_mesh *m,
	       int64_t layers, bool force_hf, const char *derived)
{
	struct stage_mesh k = m->cut ? *m : (struct stage_mesh){ 1, m->ep, 1, false };
	char s[512];
	int n = snprintf(s, sizeof s,
			 "dspark-stage 2\n%s\ncut %d world %d ep %d replicate %d\nlayers %" PRId64
			 " hf %d\nderived %s\n",
			 weights_identity, k.cut, k.world, k.ep, k.replicate, layers, force_hf,
			 derived);

	digest_xxh3(hex, s, (size_t)n);
}

uint64_t stage_bytes(const struct entry *t)
{
	return (uint64_t)t->rows * entry_row_bytes(t);
}

/* ---- opening --------------------------------------------------------------------------------- */

/*
 * Buffers of one reading thread: a packed block, scratch, an unpacked block. Free ones wait in a
 * list.
 */
struct stage_buffer {
	struct stage_buffer *next;
	char *packed, *scratch, *block;
};

/* What a file was when the stage was opened. */
struct seen {
	uint64_t size;
	int64_t mtime_ns;
};

struct stage_state {
	struct stage_index index;
	struct seen *seen;		/* [nfiles] */
	struct entry_index by_name;
	pthread_mutex_t lock;
	struct stage_buffer *idle;
};

static const struct entry *find(const struct catalogue *c, const char *name)
{
	const struct stage *s = (const struct stage *)c;

	return entry_index_find(&s->state->by_name, s->entry, name);
}

static int open_head(struct stage *s, struct stage_head *h, const char *key, struct err *e)
{
	int rc = stage_head_read(h, s->dir, e);

	if (rc > 0)
		return err_refuse(e, "'%s' holds no stage (no stage.json): run dspark-load",
				  s->dir);
	if (rc)
		return -1;
	if (strcmp(h->key, key))
		return err_refuse(e,
				  "'%s' is the stage of other weights or another sharding than the "
				  "plan's (its key is %s, the plan's %s): "
				  "run dspark-load on this plan",
				  s->dir, h->key, key);
	s->form = h->form;
	s->shares = h->shares;
	memcpy(s->key, h->key, DIGEST_HEX);
	memcpy(s->digest, h->digest, DIGEST_HEX);
	return 0;
}

static int open_index(struct stage *s, int rank, struct err *e)
{
	struct stage_index *x = &s->state->index;
	const struct entry *twice;
	char *path;
	int rc = -1;

	if (stage_index_name(&path, s->dir, s->share, e))
		return -1;
	if (!file_exists(path)) {
		err_refuse(
			e,
			"the share of rank %d is not staged in '%s': run dspark-load%s --ranks %d",
			rank, s->dir,
			s->form == STAGE_REFERENCE ? ""
			: s->form == STAGE_LZ4     ? " --copy=lz4"
						   : " --copy",
			rank);
		goto out;
	}
	if (stage_index_read(x, path, e))
		goto out;
	if (strcmp(x->key, s->key) || x->form != s->form || x->share != s->share) {
		err_refuse(
			e,
			"'%s' does not belong to the stage.json beside it: run dspark-load again",
			path);
		goto out;
	}
	s->nentries = x->n;
	s->entry = x->entry;
	rc = entry_index_build(&s->state->by_name, x->entry, x->n, &twice, e);
	if (rc && twice)
		err_refuse(e, "'%s' lists tensor '%s' twice", path, twice->name);
out:
	free(path);
	return rc;
}

/* By reference the checkpoint's files, else the one copy. */
static int name_files(struct stage *s, const struct stage_head *h, struct err *e)
{
	size_t i;

	s->nfiles = s->form == STAGE_REFERENCE ? h->nfiles : 1;
	s->file = mem_calloc(s->nfiles, sizeof *s->file, e);
	s->fd = mem_calloc(s->nfiles, sizeof *s->fd, e);
	s->state->seen = mem_calloc(s->nfiles, sizeof *s->state->seen, e);
	if (!s->file || !s->fd || !s->state->seen)
		return -1;
	for (i = 0; i < s->nfiles; i++)
		s->fd[i] = -1;
	for (i = 0; i < s->nfiles; i++) {
		s->file[i] = s->form == STAGE_REFERENCE
				     ? file_join(h->checkpoint, h->file[i].name, e)
				     : file_join(s->dir, s->state->index.file, e);
		if (!s->file[i])
			return -1;
	}
	return 0;
}

static int check_file(const struct stage *s, size_t i, const struct stage_head *h, struct err *e)
{
	int64_t mtime;
	uint64_t size;

	if (file_size(s->file[i], &size, &mtime, e))
		return err_context(e, "stage '%s'", s->dir);
	if (s->form == STAGE_REFERENCE && (size != h->file[i].size || mtime != h->file[i].mtime_ns))
		return err_refuse(e,
				  "'%s' changed since it was staged in '%s': run dspark-plan and "
				  "dspark-load again",
				  s->file[i], s->dir);
	if (s->form != STAGE_REFERENCE && size != s->state->index.size)
		return err_refuse(e,
				  "'%s' is damaged: it has %" PRIu64 " bytes, %" PRIu64
				  " were staged; run dspark-load again",
				  s->file[i], size, s->state->index.size);
	s->state->seen[i] = (struct seen){ size, mtime };
	return 0;
}

/* Only the files that the share reads: a rank of many need not look at hundreds of others. */
static int check_files(struct stage *s, const struct stage_head *h, struct err *e)
{
	bool *used = mem_calloc(s->nfiles, sizeof *used, e);
	int rc = used ? 0 : -1;
	size_t i;

	for (i = 0; !rc && i < s->nentries; i++) {
		if ((size_t)s->entry[i].file >= s->nfiles)
			rc = err_refuse(e,
					"the index of share %d in '%s' names a file that the stage "
					"does not have",
					s->share, s->dir);
		else
			used[s->entry[i].file] = true;
	}
	for (i = 0; !rc && i < s->nfiles; i++)
		if (used[i])
			rc = check_file(s, i, h, e);
	free(used);
	return rc;
}

int stage_open(struct stage *s, const char *dir, const char *key, int rank, struct err *e)
{
	struct stage_head h = { 0 };
	int rc = -1;

	*s = (struct stage){ .catalogue = { .find = find, .staged = true } };
	s->dir = mem_strdup(dir, e);
	s->catalogue.path = s->dir;
	s->state = mem_calloc(1, sizeof *s->state, e);
	if (!s->dir || !s->state)
		goto out;
	pthread_mutex_init(&s->state->lock, NULL);
	if (open_head(s, &h, key, e))
		goto out;
	s->share = rank % s->shares;
	if (open_index(s, rank, e) || name_files(s, &h, e) || check_files(s, &h, e))
		goto out;
	rc = 0;
out:
	stage_head_release(&h);
	if (rc)
		stage_release(s);
	return rc;
}

static void buffer_free(struct stage_buffer *b)
{
	if (b) {
		free(b->packed);
		free(b->scratch);
		free(b->block);
	}
	free(b);
}

void stage_release(struct stage *s)
{
	size_t i;

	for (i = 0; i < s->nfiles; i++) {
		if (s->fd && s->fd[i] >= 0)
			close(s->fd[i]);
		if (s->file)
			free(s->file[i]);
	}
	free(s->fd);
	free(s->file);
	if (s->state) {
		while (s->state->idle) {
			struct stage_buffer *b = s->state->idle;

			s->state->idle = b->next;
			buffer_free(b);
		}
		free(s->state->seen);
		stage_index_release(&s->state->index);
		entry_index_release(&s->state->by_name);
		pthread_mutex_destroy(&s->state->lock);
		free(s->state);
	}
	free(s->dir);
	*s = (struct stage){ 0 };
}

/* ---- reading --------------------------------------------------------------------------------- */

/* The descriptor of a file; whoever opens it second closes his own again. */
static int file_of(struct stage *s, int i, struct err *e)
{
	int fd = __atomic_load_n(&s->fd[i], __ATOMIC_ACQUIRE), none = -1;

	if (fd >= 0)
		return fd;
	fd = file_open(s->file[i], e);
	if (fd < 0 || __atomic_compare_exchange_n(&s->fd[i], &none, fd, false, __ATOMIC_ACQ_REL,
						  __ATOMIC_ACQUIRE))
		return fd;
	close(fd);
	return none;
}

static struct stage_buffer *buffer_take(struct stage_state *st, struct err *e)
{
	struct stage_buffer *b;

	pthread_mutex_lock(&st->lock);
	b = st->idle;
	if (b)
		st->idle = b->next;
	pthread_mutex_unlock(&st->lock);
	if (b)
		return b;
	b = mem_calloc(1, sizeof *b, e);
	if (!b)
		return NULL;
	b->packed = mem_aligned(pack_bound(PACK_BLOCK), e);
	b->scratch = mem_aligned(PACK_SCRATCH, e);
	b->block = mem_aligned(PACK_BLOCK, e);
	if (b->packed && b->scratch && b->block)
		return b;
	buffer_free(b);
	return NULL;
}

static void buffer_give(struct stage_state *st, struct stage_buffer *b)
{
	pthread_mutex_lock(&st->lock);
	b->next = st->idle;
	st->idle = b;
	pthread_mutex_unlock(&st->lock);
}

static int damaged(const struct stage *s, const struct entry *t, struct err *e)
{
	return err_refuse(e,
			  "tensor '%s' in '%s' is damaged: its bytes are not those that were "
			  "staged; run dspark-load again",
			  t->name, s->file[t->file]);
}

/*
 * Unpacks whole blocks to where they belong, those that are only partly wanted to the side first.
 */
static int read_blocks(struct stage *s, int fd, const struct entry *t, char *buf, uint64_t off,
		       uint64_t n, struct err *e)
{
	const struct stage_place *place = &s->state->index.place[t - s->entry];
	struct stage_buffer *b = buffer_take(s->state, e);
	uint64_t total = stage_bytes(t), end = off + n;
	int rc = b ? 0 : -1;

	while (!rc && off < end) {
		uint64_t k = off / PACK_BLOCK, first = k * PACK_BLOCK,
			 len = place->block[k + 1] - place->block[k];
		uint64_t whole = total - first < PACK_BLOCK ? total - first : PACK_BLOCK;
		uint64_t part = first + whole < end ? first + whole - off : end - off;
		char *to = part == whole ? buf : b->block;

		rc = file_pread(fd, s->file[t->file], b->packed, len, place->block[k], e);
		if (!rc && pack_unpack(to, whole, b->packed, len, b->scratch))
			rc = damaged(s, t, e);
		if (!rc && to != buf)
			memcpy(buf, to + (off - first), part);
		buf += part;
		off += part;
	}
	if (b)
		buffer_give(s->state, b);
	return rc;
}

static int check_hash(const struct stage *s, const struct entry *t, const void *buf, uint64_t n,
		      struct err *e)
{
	char hex[DIGEST_HEX];

	digest_xxh3(hex, buf, n);
	return strcmp(hex, s->state->index.place[t - s->entry].hash) ? damaged(s, t, e) : 0;
}

/* Where no hash judges what was read: a file written meanwhile must not become the target. */
static int check_unchanged(const struct stage *s, int i, int fd, struct err *e)
{
	const struct seen *seen = &s->state->seen[i];
	struct stat st;

	if (fstat(fd, &st))
		return err_input(e, "cannot look at '%s'", s->file[i]);
	if ((uint64_t)st.st_size == seen->size &&
	    (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec == seen->mtime_ns)
		return 0;
	return err_refuse(e, "'%s' changed while it was read: run %sdspark-load again", s->file[i],
			  s->form == STAGE_REFERENCE ? "dspark-plan and " : "");
}

int stage_read(struct stage *s, const struct entry *t, void *buf, uint64_t off, uint64_t n,
	       struct err *e)
{
	uint64_t total = stage_bytes(t);
	int fd;

	if (off > total || n > total - off)
		return err_fail(
			e,
			"bytes %" PRIu64 " to %" PRIu64
			" of tensor '%s' are not in the share staged in '%s', which has %" PRIu64,
			off, off + n, t->name, s->dir, total);
	if (!n)
		return 0;
	fd = file_of(s, t->file, e);
	if (fd < 0)
		return -1;
	if (s->form == STAGE_LZ4)
		return read_blocks(s, fd, t, buf, off, n, e);
	if (file_pread(fd, s->file[t->file], buf, n, t->begin + off, e))
		return -1;
	return s->form == STAGE_COPY && n == total ? check_hash(s, t, buf, n, e)
						   : check_unchanged(s, t->file, fd, e);
}

void stage_ahead(struct stage *s, const struct entry *t, uint64_t off, uint64_t n)
{
	const struct stage_place *place = &s->state->index.place[t - s->entry];
	uint64_t total = stage_bytes(t), begin = t->begin + off;
	struct err none = ERR_INIT;
	int fd;

	if (!n || off > total || n > total - off || (fd = file_of(s, t->file, &none)) < 0)
		return;
	if (s->form == STAGE_LZ4) {
		begin = place->block[off / PACK_BLOCK];
		n = place->block[(off + n - 1) / PACK_BLOCK + 1] - begin;
	}
	posix_fadvise(fd, (off_t)begin, (off_t)n, POSIX_FADV_WILLNEED);
}
