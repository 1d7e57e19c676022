/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stage_index: writes and believes heads and indexes. A text is parsed only after its own hash has
 * been checked; what the hash cannot vouch for (numbers that contradict each other) is refused all
 * the same, since stages are public files.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "err.h"
#include "file.h"
#include "json.h"
#include "mem.h"
#include "pack.h"
#include "safetensors.h"
#include "stage_index.h"

#define HEAD_FORMAT "dspark-stage"
#define INDEX_FORMAT "dspark-stage-index"
#define VERSION 1
#define TEXT_MAX ((size_t)4 << 30)

#define SEAL "\"xxh3_128\":\""
#define SEAL_END "\"}\n"
#define SEAL_LEN (sizeof SEAL - 1 + DIGEST_HEX - 1 + sizeof SEAL_END - 1)

static const char *const forms[] = { "reference", "copy", "lz4" };

const char *stage_form_name(enum stage_form f)
{
	return forms[f];
}

static void seal(struct text *t, size_t before, char hex[DIGEST_HEX])
{
	digest_xxh3(hex, t->s, before);
	text_printf(t, SEAL "%s" SEAL_END, hex);
}

/* `brace`: bytes of the last line that stand before the seal and are not hashed. */
static bool is_sealed(const struct text *t, size_t brace, char hex[DIGEST_HEX])
{
	size_t body = t->len - SEAL_LEN;

	if (t->len < SEAL_LEN + brace || memcmp(t->s + body, SEAL, sizeof SEAL - 1))
		return false;
	digest_xxh3(hex, t->s, body - brace);
	return !memcmp(t->s + body + sizeof SEAL - 1, hex, DIGEST_HEX - 1) &&
	       !memcmp(t->s + t->len - (sizeof SEAL_END - 1), SEAL_END, sizeof SEAL_END - 1);
}

static int read_common(const json_t *o, const char *path, const char *format, char key[DIGEST_HEX],
		       enum stage_form *form, struct err *e)
{
	const char *s, *k, *f;
	int64_t version;

	if (json_str(o, path, "format", &s, e) || json_int(o, path, "version", &version, e))
		return -1;
	if (strcmp(s, format) || version != VERSION)
		return err_refuse(e,
				  "'%s' has format '%s' version %" PRId64 ", not '%s' version %d",
				  path, s, version, format, VERSION);
	if (json_str(o, path, "key", &k, e) || json_str(o, path, "form", &f, e))
		return -1;
	for (*form = 0; *form < STAGE_FORMS && strcmp(forms[*form], f);)
		++*form;
	if (*form == STAGE_FORMS || strlen(k) != DIGEST_HEX - 1)
		return err_refuse(e, "'%s' has an unknown form '%s' or a bad key", path, f);
	memcpy(key, k, DIGEST_HEX);
	return 0;
}

/* ---- the head -------------------------------------------------------------------------------- */

void stage_head_release(struct stage_head *h)
{
	size_t i;

	for (i = 0; i < h->nfiles; i++)
		free(h->file[i].name);
	free(h->file);
	free(h->checkpoint);
	*h = (struct stage_head){ 0 };
}

int stage_head_text(struct text *out, struct stage_head *h, struct err *e)
{
	json_t *o = json_pack("{s:s, s:i, s:s, s:s, s:i, s:s*}",
			      "format", HEAD_FORMAT, "version", VERSION, "key", h->key,
			      "form", forms[h->form], "shares", h->shares,
			      "checkpoint", h->checkpoint);
	size_t i;

	if (!o)
		return err_refuse(e, "the checkpoint's path '%s' is not valid UTF-8",
				  h->checkpoint ? h->checkpoint : "");
	text_clear(out);
	json_line(out, o);
	json_decref(o);
	if (text_ok(out, e))
		return -1;
	out->s[--out->len] = '\0';	/* the closing brace: the object goes on */
	if (h->checkpoint)
		text_add(out, ",\"files\":[");
	for (i = 0; i < h->nfiles; i++) {
		o = json_pack("{s:s, s:I, s:I}",
			      "name", h->file[i].name, "size", (json_int_t)h->file[i].size,
			      "mtime_ns", (json_int_t)h->file[i].mtime_ns);
		if (!o)
			return err_refuse(e, "the file name '%s' is not valid UTF-8",
					  h->file[i].name);
		text_add(out, i ? ",\n" : "\n");
		json_line(out, o);
		json_decref(o);
	}
	text_add(out, h->checkpoint ? "\n],\n" : ",\n");
	if (text_ok(out, e))
		return -1;
	seal(out, out->len, h->digest);
	return text_ok(out, e);
}

static int read_head_files(struct stage_head *h, const json_t *o, const char *path, struct err *e)
{
	const json_t *files = json_object_get(o, "files");
	size_t i, n = json_array_size(files);
	const char *s;

	if (h->form != STAGE_REFERENCE)
		return 0;
	if (json_str(o, path, "checkpoint", &s, e))
		return -1;
	h->checkpoint = mem_strdup(s, e);
	h->file = mem_calloc(n, sizeof *h->file, e);
	if (!h->checkpoint || !h->file)
		return -1;
	for (i = 0; i < n; i++) {
		const json_t *f = json_array_get(files, i);
		int64_t size;

		if (json_str(f, path, "name", &s, e) || json_int(f, path, "size", &size, e) ||
		    json_int(f, path, "mtime_ns", &h->file[i].mtime_ns, e))
			return -1;
		h->file[i].size = (uint64_t)size;
		h->file[i].name = mem_strdup(s, e);
		if (!h->file[i].name)
			return -1;
		h->nfiles++;
	}
	return 0;
}

static int parse_head(struct stage_head *h, const struct text *t, const char *path, struct err *e)
{
	json_t *o = json_parse(t->s, t->len, path, e);
	int64_t shares;
	int rc = -1;

	if (!o || read_common(o, path, HEAD_FORMAT, h->key, &h->form, e) ||
	    json_int(o, path, "shares", &shares, e))
		goto out;
	if (shares < 1 || shares > INT32_MAX) {
		err_refuse(e, "'%s': %" PRId64 " shares", path, shares);
		goto out;
	}
	h->shares = (int)shares;
	rc = read_head_files(h, o, path, e);
out:
	json_decref(o);
	return rc;
}

int stage_head_parse(struct stage_head *h, const struct text *t, const char *what, struct err *e)
{
	*h = (struct stage_head){ 0 };
	if (!is_sealed(t, 0, h->digest))
		return err_refuse(e,
				  "'%s' is damaged or no stage of dspark: its last member does not "
				  "vouch for its bytes; remove its "
				  "directory and run dspark-load again, or give another -s",
				  what);
	if (!parse_head(h, t, what, e))
		return 0;
	stage_head_release(h);
	return -1;
}

int stage_head_read(struct stage_head *h, const char *dir, struct err *e)
{
	char *path = file_join(dir, "stage.json", e);
	struct text t = TEXT_INIT;
	int rc = -1;

	*h = (struct stage_head){ 0 };
	if (!path)
		return -1;
	if (!file_exists(path))
		rc = 1;
	else if (!file_read_all(path, TEXT_MAX, &t, e))
		rc = stage_head_parse(h, &t, path, e);
	text_release(&t);
	free(path);
	return rc;
}

/* ---- an index -------------------------------------------------------------------------------- */

#define CHUNK ((size_t)1 << 20)

/* n bytes that live as long as the index, aligned to 8. */
static void *cut(struct stage_index *x, size_t n, struct err *e)
{
	void *p;

	n = (n + 7) & ~(size_t)7;
	if (n > x->left) {
		size_t size = n > CHUNK ? n : CHUNK;

		if (mem_grow(&x->chunk, &x->capchunks, x->nchunks + 1, sizeof *x->chunk, e))
			return NULL;
		x->next = x->chunk[x->nchunks] = mem_calloc(size, 1, e);
		if (!x->next)
			return NULL;
		x->nchunks++;
		x->left = size;
	}
	p = x->next;
	x->next += n;
	x->left -= n;
	return p;
}

void stage_index_release(struct stage_index *x)
{
	size_t i;

	for (i = 0; i < x->nchunks; i++)
		free(x->chunk[i]);
	free(x->chunk);
	free(x->entry);
	free(x->place);
	free(x->file);
	*x = (struct stage_index){ 0 };
}

int stage_index_name(char **path, const char *dir, int share, struct err *e)
{
	*path = mem_printf(e, "%s/index-%05d.jsonl", dir, share);
	return *path ? 0 : -1;
}

uint64_t stage_index_bytes(const struct stage_index *x)
{
	uint64_t sum = 0;
	size_t i;

	for (i = 0; i < x->n; i++)
		sum += stage_bytes(&x->entry[i]);
	return sum;
}

int stage_index_add(struct stage_index *x, const struct entry *t, struct err *e)
{
	size_t cap = x->cap;

	if (mem_grow(&x->entry, &x->cap, x->n + 1, sizeof *x->entry, e) ||
	    mem_grow(&x->place, &cap, x->n + 1, sizeof *x->place, e))
		return -1;
	x->entry[x->n] = *t;
	x->place[x->n++] = (struct stage_place){ 0 };
	return 0;
}

int stage_index_blocks(struct stage_index *x, size_t i, size_t n, struct err *e)
{
	x->place[i].nblocks = n;
	x->place[i].block = cut(x, (n + 1) * sizeof(uint64_t), e);
	return x->place[i].block ? 0 : -1;
}

static int tensor_line(struct text *out, const struct stage_index *x, size_t i, struct err *e)
{
	const struct entry *t = &x->entry[i];
	const struct stage_place *p = &x->place[i];
	json_t *o, *shape = json_array(), *blocks = x->form == STAGE_LZ4 ? json_array() : NULL;
	size_t k;

	for (k = 0; k < (size_t)t->ndim; k++)
		json_array_append_new(shape, json_integer(t->shape[k]));
	for (k = 0; k < p->nblocks; k++)
		json_array_append_new(blocks,
				      json_integer((json_int_t)(p->block[k + 1] - p->block[k])));
	o = json_pack("{s:s, s:s, s:o, s:I, s:I, s:i, s:I, s:I, s:s*, s:o*}",
		      "name", t->name, "dtype", dtype_name(t->dtype),
		      "shape", shape, "row", (json_int_t)t->row0, "rows", (json_int_t)t->rows,
		      "file", t->file,
		      "begin", (json_int_t)t->begin, "end", (json_int_t)t->end,
		      "xxh3_128", p->hash[0] ? p->hash : NULL, "blocks", blocks);
	if (!o)
		return err_fail(e, "out of memory: cannot write the index of tensor '%s'", t->name);
	json_line(out, o);
	text_add(out, "\n");
	json_decref(o);
	return 0;
}

int stage_index_text(struct text *out, const struct stage_index *x, struct err *e)
{
	json_t *o = json_pack("{s:s, s:i, s:s, s:s, s:i, s:I, s:I, s:s*}",
			      "format", INDEX_FORMAT, "version", VERSION, "key", x->key,
			      "form", forms[x->form], "share", x->share,
			      "tensors", (json_int_t)x->n,
			      "bytes", (json_int_t)stage_index_bytes(x), "file", x->file);
	char hex[DIGEST_HEX];
	size_t i;

	if (!o || (x->file && json_object_set_new(o, "size", json_integer((json_int_t)x->size)))) {
		json_decref(o);
		return err_fail(e, "out of memory: cannot write an index");
	}
	text_clear(out);
	json_line(out, o);
	text_add(out, "\n");
	json_decref(o);
	for (i = 0; i < x->n; i++)
		if (tensor_line(out, x, i, e))
			return -1;
	if (text_ok(out, e))
		return -1;
	i = out->len;
	text_add(out, "{");
	seal(out, i, hex);
	return text_ok(out, e);
}

static int bad_tensor(const char *path, const char *name, struct err *e)
{
	return err_refuse(
		e, "'%s': tensor '%s' contradicts itself: the index was not written by dspark-load",
		path, name);
}

static int read_shape(struct stage_index *x, struct entry *t, const json_t *o, const char *path,
		      struct err *e)
{
	const json_t *shape = json_object_get(o, "shape");
	int64_t *dim, total = 1;
	int i;

	if (!json_is_array(shape) || json_array_size(shape) > ST_MAX_DIMS)
		return bad_tensor(path, t->name, e);
	t->ndim = (int)json_array_size(shape);
	t->shape = dim = cut(x, (size_t)t->ndim * sizeof *dim, e);
	if (!dim)
		return -1;
	for (i = 0; i < t->ndim; i++) {
		dim[i] = json_integer_value(json_array_get(shape, (size_t)i));
		total = mem_mul(total, dim[i]);
	}
	return total < 0 || mem_mul(total, 8) < 0 ? bad_tensor(path, t->name, e) : 0;
}

/* The table of block lengths, as offsets: they fill [begin, end) exactly. */
static int read_blocks(struct stage_index *x, const struct entry *t, struct stage_place *p,
		       const json_t *blocks, const char *path, struct err *e)
{
	size_t i, n = json_array_size(blocks);

	if (n != (stage_bytes(t) + PACK_BLOCK - 1) / PACK_BLOCK)
		return bad_tensor(path, t->name, e);
	if (stage_index_blocks(x, (size_t)(p - x->place), n, e))
		return -1;
	p->block[0] = t->begin;
	for (i = 0; i < n; i++) {
		json_int_t len = json_integer_value(json_array_get(blocks, i));

		if (len < 1 || (uint64_t)len > pack_bound(PACK_BLOCK))
			return bad_tensor(path, t->name, e);
		p->block[i + 1] = p->block[i] + (uint64_t)len;
	}
	return p->block[i] == t->end ? 0 : bad_tensor(path, t->name, e);
}

static int read_tensor(struct stage_index *x, const json_t *o, const char *path, struct err *e)
{
	const char *name, *dtype, *hash;
	int64_t begin, end, file;
	struct entry t = { 0 };
	char *copy;

	if (json_str(o, path, "name", &name, e) || json_str(o, path, "dtype", &dtype, e) ||
	    json_int(o, path, "file", &file, e) || json_int(o, path, "begin", &begin, e) ||
	    json_int(o, path, "end", &end, e) || json_int(o, path, "row", &t.row0, e) ||
	    json_int(o, path, "rows", &t.rows, e) || json_str_or(o, path, "xxh3_128", "", &hash, e))
		return -1;
	t.name = copy = cut(x, strlen(name) + 1, e);
	if (!copy)
		return -1;
	strcpy(copy, name);
	t.dtype = dtype_from_name(dtype);
	t.file = (int)file;
	t.begin = (uint64_t)begin;
	t.end = (uint64_t)end;
	if (read_shape(x, &t, o, path, e))
		return -1;
	if (t.dtype == DT_NONE || file < 0 || file > INT32_MAX || begin < 0 || end < begin ||
	    t.row0 < 0 || t.rows < 0 || t.rows > entry_rows(&t) ||
	    t.row0 > entry_rows(&t) - t.rows ||
	    (strlen(hash) != DIGEST_HEX - 1) != (x->form == STAGE_REFERENCE) ||
	    (x->form != STAGE_LZ4 && t.end - t.begin != stage_bytes(&t)))
		return bad_tensor(path, name, e);
	if (stage_index_add(x, &t, e))
		return -1;
	if (x->form != STAGE_REFERENCE)
		memcpy(x->place[x->n - 1].hash, hash, DIGEST_HEX);
	return x->form == STAGE_LZ4 ? read_blocks(x, &t, &x->place[x->n - 1],
						  json_object_get(o, "blocks"), path, e)
				    : 0;
}

static int read_first(struct stage_index *x, const json_t *o, const char *path, int64_t *tensors,
		      struct err *e)
{
	int64_t share, size;
	const char *file;

	if (read_common(o, path, INDEX_FORMAT, x->key, &x->form, e) ||
	    json_int(o, path, "share", &share, e) || json_int(o, path, "tensors", tensors, e) ||
	    json_str_or(o, path, "file", NULL, &file, e) ||
	    json_int_or(o, path, "size", 0, &size, e))
		return -1;
	if ((x->form == STAGE_REFERENCE) != !file || (file && strchr(file, '/')) || size < 0 ||
	    share < 0 || share > INT32_MAX)
		return err_refuse(e, "'%s' contradicts itself: it was not written by dspark-load",
				  path);
	x->share = (int)share;
	x->size = (uint64_t)size;
	x->file = file ? mem_strdup(file, e) : NULL;
	return file && !x->file ? -1 : 0;
}

static int parse_index(struct stage_index *x, const struct text *t, const char *path, struct err *e)
{
	const char *line = t->s, *end = t->s + t->len - SEAL_LEN - 1, *stop;
	int64_t tensors = -1;

	for (; line < end; line = stop + 1) {
		json_t *o;
		int rc;

		stop = memchr(line, '\n', (size_t)(end - line));
		if (!stop)
			return err_refuse(
				e, "'%s' was not written by dspark-load: its lines are cut", path);
		o = json_parse(line, (size_t)(stop - line), path, e);
		rc = !o            ? -1
		     : tensors < 0 ? read_first(x, o, path, &tensors, e)
				   : read_tensor(x, o, path, e);
		json_decref(o);
		if (rc)
			return -1;
	}
	return tensors == (int64_t)x->n
		       ? 0
		       : err_refuse(e, "'%s' lists %zu tensors where it says %" PRId64, path, x->n,
				    tensors);
}

int stage_index_parse(struct stage_index *x, const struct text *t, const char *what, struct err *e)
{
	char hex[DIGEST_HEX];

	*x = (struct stage_index){ 0 };
	if (!is_sealed(t, 1, hex))
		return err_refuse(e,
				  "'%s' is damaged: its last line does not vouch for its bytes; "
				  "run dspark-load again",
				  what);
	if (!parse_index(x, t, what, e))
		return 0;
	stage_index_release(x);
	return -1;
}

int stage_index_read(struct stage_index *x, const char *path, struct err *e)
{
	struct text t = TEXT_INIT;
	int rc = -1;

	*x = (struct stage_index){ 0 };
	if (!file_read_all(path, TEXT_MAX, &t, e))
		rc = stage_index_parse(x, &t, path, e);
	text_release(&t);
	return rc;
}
