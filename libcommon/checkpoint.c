/* SPDX-License-Identifier: Apache-2.0 */
/*
 * checkpoint: finds the files of a model directory and indexes their tensors.
 *
 * A header is parsed, boiled down to entries (names and shapes of one file in one block) and dropped before the next, so that half a million
 * tensors cost about 150 bytes each and the largest header once.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <dirent.h>
#include <endian.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "checkpoint.h"
#include "err.h"
#include "file.h"
#include "json.h"
#include "mem.h"
#include "safetensors.h"
#include "text.h"

#define CONFIG "config.json"
#define INDEX "model.safetensors.index.json"
#define SINGLE "model.safetensors"
#define SUFFIX ".safetensors"

#define CONFIG_MAX ((size_t)64 << 20)
#define INDEX_MAX ((size_t)1 << 30)

/* ---- entries by name ------------------------------------------------------------------------------------------------- */

static uint64_t name_hash(const char *s)
{
	uint64_t h = 0xcbf29ce484222325;	/* FNV-1a, its low bits mixed once more: tensor names differ in few digits */

	for (; *s; s++)
		h = (h ^ (unsigned char)*s) * 0x100000001b3;
	return h ^ h >> 29;
}

int entry_index_build(struct entry_index *x, const struct entry *entry, size_t n, const struct entry **twice, struct err *e)
{
	size_t i, at, buckets = 16;

	*twice = NULL;
	if (n >= UINT32_MAX)
		return err_refuse(e, "%zu tensors are more than can be indexed", n);
	while (buckets < 2 * n)
		buckets *= 2;
	x->bucket = mem_calloc(buckets, sizeof *x->bucket, e);
	if (!x->bucket)
		return -1;
	x->n = buckets;
	for (i = 0; i < n; i++) {
		for (at = name_hash(entry[i].name) & (buckets - 1); x->bucket[at]; at = (at + 1) & (buckets - 1))
			if (!strcmp(entry[x->bucket[at] - 1].name, entry[i].name)) {
				*twice = &entry[i];
				return -1;
			}
		x->bucket[at] = (uint32_t)(i + 1);
	}
	return 0;
}

const struct entry *entry_index_find(const struct entry_index *x, const struct entry *entry, const char *name)
{
	size_t at;

	if (!x->n)
		return NULL;
	for (at = name_hash(name) & (x->n - 1); x->bucket[at]; at = (at + 1) & (x->n - 1))
		if (!strcmp(entry[x->bucket[at] - 1].name, name))
			return &entry[x->bucket[at] - 1];
	return NULL;
}

void entry_index_release(struct entry_index *x)
{
	free(x->bucket);
	*x = (struct entry_index){ 0 };
}

int64_t entry_rows(const struct entry *t)
{
	int64_t rows = 1;
	int i;

	if (t->ndim == 1)
		return t->shape[0];
	for (i = 0; i + 1 < t->ndim; i++)
		rows *= t->shape[i];
	return rows;
}

uint64_t entry_row_bytes(const struct entry *t)
{
	return (t->ndim > 1 ? (uint64_t)t->shape[t->ndim - 1] : 1) * dtype_size(t->dtype);
}

/* ---- which files ----------------------------------------------------------------------------------------------------- */

static bool has_suffix(const char *s, const char *suffix)
{
	size_t n = strlen(s), m = strlen(suffix);

	return n > m && !strcmp(s + n - m, suffix);
}

static int add_file(struct checkpoint *c, size_t *cap, const char *name, struct err *e)
{
	if (mem_grow(&c->file, cap, c->nfiles + 1, sizeof *c->file, e))
		return -1;
	c->file[c->nfiles] = (struct checkpoint_file){ .name = mem_strdup(name, e) };
	return c->file[c->nfiles].name ? (c->nfiles++, 0) : -1;
}

static int by_name(const void *a, const void *b)
{
	return strcmp(((const struct checkpoint_file *)a)->name, ((const struct checkpoint_file *)b)->name);
}

static struct checkpoint_file *find_file(const struct checkpoint *c, const char *name)
{
	struct checkpoint_file key = { .name = (char *)name };

	return c->nfiles ? bsearch(&key, c->file, c->nfiles, sizeof key, by_name) : NULL;
}

/* Few files hold many tensors, and neighbours in the index mostly share one: look at the last first, then at all. */
static int files_of_index(struct checkpoint *c, const char *path, const json_t *map, struct err *e)
{
	size_t cap = 0, i = 0;
	const char *name;
	json_t *value;

	json_object_foreach((json_t *)map, name, value) {
		const char *file = json_string_value(value);

		if (!file)
			return err_refuse(e, "'%s': weight_map gives '%s' no file name", path, name);
		if (!*file || strchr(file, '/') || *file == '.')
			return err_refuse(e, "'%s': weight_map gives '%s' the file '%s', which is not a name in this directory", path,
					  name, file);
		if (i < c->nfiles && !strcmp(c->file[i].name, file))
			continue;
		for (i = 0; i < c->nfiles && strcmp(c->file[i].name, file);)
			i++;
		if (i == c->nfiles && add_file(c, &cap, file, e))
			return -1;
	}
	return c->nfiles ? 0 : err_refuse(e, "'%s': weight_map is empty", path);
}

/* Every *.safetensors of the directory; *torch tells whether PyTorch weights lie there. */
static int files_of_dir(struct checkpoint *c, bool *torch, struct err *e)
{
	DIR *d = opendir(c->dir);
	struct dirent *ent;
	size_t cap = 0;
	int rc = 0;

	if (!d)
		return err_input(e, "cannot open directory '%s'", c->dir);
	while (!rc && (errno = 0, ent = readdir(d))) {
		if (ent->d_name[0] == '.')
			continue;
		if (has_suffix(ent->d_name, SUFFIX))
			rc = add_file(c, &cap, ent->d_name, e);
		else if (has_suffix(ent->d_name, ".bin") || has_suffix(ent->d_name, ".bin.index.json") ||
			 has_suffix(ent->d_name, ".pth") || has_suffix(ent->d_name, ".pt"))
			*torch = true;
	}
	if (!rc && errno)
		rc = err_input(e, "cannot read directory '%s'", c->dir);
	closedir(d);
	return rc;
}

static int find_files(struct checkpoint *c, const json_t *map, const char *index, bool estimate, struct err *e)
{
	char *single = file_join(c->dir, SINGLE, e);
	bool torch = false, alone = single && file_exists(single);
	size_t cap = 0;
	int rc;

	if (!single)
		return -1;
	free(single);
	rc = map ? files_of_index(c, index, map, e) : alone ? add_file(c, &cap, SINGLE, e) : files_of_dir(c, &torch, e);
	if (rc)
		return -1;
	if (c->nfiles) {
		qsort(c->file, c->nfiles, sizeof *c->file, by_name);
		return 0;
	}
	if (torch)
		return err_refuse(e, "checkpoint '%s' has only PyTorch files (.bin, .pt): convert it to safetensors "
				  "(save_pretrained with safe_serialization) or download the safetensors files", c->dir);
	if (!estimate)
		return err_refuse(e, "checkpoint '%s' has no safetensors files: download its weights", c->dir);
	c->partial = true;
	return 0;
}

/* ---- their tensors --------------------------------------------------------------------------------------------------- */

/* A block for n entries with `dims` dimensions and `bytes` of names in all; the cursor cuts pieces from it. */
struct cut {
	int64_t *shape;
	char *name;
};

static int block_new(struct checkpoint *c, size_t i, size_t dims, size_t bytes, struct cut *cut, struct err *e)
{
	c->block[i] = mem_calloc(1, dims * sizeof(int64_t) + bytes, e);
	if (!c->block[i])
		return -1;
	cut->shape = c->block[i];
	cut->name = (char *)(cut->shape + dims);
	return 0;
}

static const char *cut_name(struct cut *cut, const char *name)
{
	size_t n = strlen(name) + 1;
	char *p = memcpy(cut->name, name, n);

	cut->name += n;
	return p;
}

static void put_entry(struct checkpoint *c, size_t file, const struct st_tensor *t, struct cut *cut)
{
	struct entry *to = &c->entry[c->nentries++];

	*to = (struct entry){ .name = cut_name(cut, t->name), .dtype = t->dtype, .ndim = t->ndim, .shape = cut->shape,
			      .file = (int)file, .begin = t->begin, .end = t->end };
	memcpy(cut->shape, t->shape, (size_t)t->ndim * sizeof *cut->shape);
	cut->shape += t->ndim;
	to->rows = entry_rows(to);
}

/* A tensor counts where no index rules, or where the index sends its name to this file. */
static bool counts(const json_t *map, const char *name, const char *file)
{
	return !map || !strcmp(json_string_value(json_object_get(map, name)) ?: "", file);
}

static int take_tensors(struct checkpoint *c, size_t i, size_t *cap, const struct safetensors *s, const json_t *map, struct err *e)
{
	const char *file = c->file[i].name;
	size_t k, n = 0, dims = 0, bytes = 0;
	struct cut cut;

	for (k = 0; k < s->n; k++)
		if (counts(map, s->tensor[k].name, file)) {
			n++;
			dims += (size_t)s->tensor[k].ndim;
			bytes += strlen(s->tensor[k].name) + 1;
		}
	if (mem_grow(&c->entry, cap, c->nentries + n, sizeof *c->entry, e) || block_new(c, i, dims, bytes, &cut, e))
		return -1;
	for (k = 0; k < s->n; k++)
		if (counts(map, s->tensor[k].name, file))
			put_entry(c, i, &s->tensor[k], &cut);
	return 0;
}

static int read_file(struct checkpoint *c, size_t i, size_t *cap, const json_t *map, bool estimate, struct err *e)
{
	struct checkpoint_file *f = &c->file[i];
	struct safetensors s = SAFETENSORS_INIT;
	char *path = file_join(c->dir, f->name, e);
	int rc = -1;

	if (!path)
		return -1;
	if (!file_exists(path) && (errno == ENOENT || errno == ENOTDIR)) {
		f->missing = c->partial = true;
		rc = estimate ? 0 : err_refuse(e, "'%s/" INDEX "' names '%s', which is missing: download it", c->dir, f->name);
		goto out;
	}
	if (file_size(path, &f->size, &f->mtime_ns, e) || safetensors_open(&s, path, e))
		goto out;
	f->data = s.data;
	if (f->size != s.size) {
		err_fail(e, "'%s' changed while it was read", path);
		goto out;
	}
	rc = take_tensors(c, i, cap, &s, map, e);
out:
	safetensors_release(&s);
	free(path);
	return rc;
}

/* Entries for the names that the index sends to missing files. */
static int take_missing(struct checkpoint *c, size_t *cap, const json_t *map, struct err *e)
{
	size_t bytes = 0, n = 0;
	const char *name;
	struct cut cut;
	json_t *value;

	json_object_foreach((json_t *)map, name, value)
		if (find_file(c, json_string_value(value))->missing) {
			bytes += strlen(name) + 1;
			n++;
		}
	if (mem_grow(&c->entry, cap, c->nentries + n, sizeof *c->entry, e) || block_new(c, c->nfiles, 0, bytes, &cut, e))
		return -1;
	json_object_foreach((json_t *)map, name, value) {
		struct checkpoint_file *f = find_file(c, json_string_value(value));

		if (f->missing)
			c->entry[c->nentries++] = (struct entry){ .name = cut_name(&cut, name), .ndim = -1,
								  .file = (int)(f - c->file) };
	}
	return 0;
}

static int index_entries(struct checkpoint *c, struct err *e)
{
	const struct entry *first, *twice;

	if (!entry_index_build(&c->index, c->entry, c->nentries, &twice, e))
		return 0;
	if (!twice)
		return -1;
	first = entry_index_find(&c->index, c->entry, twice->name);
	return err_refuse(e, "tensor '%s' is both in '%s' and in '%s' of '%s', and there is no '" INDEX "' to decide: "
			  "remove the file that does not belong to the checkpoint", twice->name, c->file[first->file].name,
			  c->file[twice->file].name, c->dir);
}

/* The index and the files must agree: a name it lists has to be where it says. */
static int check_index(const struct checkpoint *c, const json_t *map, struct err *e)
{
	const char *name;
	json_t *value;

	if (c->nentries == json_object_size(map))
		return 0;
	json_object_foreach((json_t *)map, name, value)
		if (!entry_index_find(&c->index, c->entry, name))
			return err_refuse(e, "'%s/" INDEX "' places tensor '%s' in '%s', which does not hold it: "
					  "download the checkpoint again", c->dir, name, json_string_value(value));
	return err_refuse(e, "'%s/" INDEX "' does not agree with its files", c->dir);
}

static int read_files(struct checkpoint *c, const json_t *map, bool estimate, struct err *e)
{
	size_t i, cap = 0;

	c->block = mem_calloc(c->nfiles + 1, sizeof *c->block, e);
	if (!c->block)
		return -1;
	for (i = 0; i < c->nfiles; i++)
		if (read_file(c, i, &cap, map, estimate, e))
			return -1;
	if (c->partial && map && take_missing(c, &cap, map, e))
		return -1;
	if (index_entries(c, e))
		return -1;
	return map ? check_index(c, map, e) : 0;
}

/* The index as an object with a weight_map; NULL without error where there is none. */
static json_t *read_index(const char *path, struct err *e)
{
	json_t *index;

	if (!file_exists(path) && errno == ENOENT)
		return NULL;
	index = json_read(path, INDEX_MAX, e);
	if (index && !json_is_object(json_object_get(index, "weight_map"))) {
		err_refuse(e, "'%s' has no object 'weight_map'", path);
		json_decref(index);
		return NULL;
	}
	return index;
}

static int read_config(struct checkpoint *c, struct err *e)
{
	char *path = file_join(c->dir, CONFIG, e);
	int rc = -1;

	if (!path)
		return -1;
	c->config = json_read(path, CONFIG_MAX, e);
	if (c->config)
		rc = json_is_object(c->config) ? 0 : err_refuse(e, "'%s' is not a JSON object", path);
	free(path);
	return rc;
}

static const struct entry *find(const struct catalogue *cat, const char *name)
{
	const struct checkpoint *c = (const struct checkpoint *)cat;

	return entry_index_find(&c->index, c->entry, name);
}

int checkpoint_open(struct checkpoint *c, const char *dir, bool estimate, struct err *e)
{
	json_t *index = NULL, *map = NULL;
	char *path = NULL;
	int rc = -1;

	*c = (struct checkpoint){ .catalogue.find = find };
	c->dir = mem_strdup(dir, e);
	c->catalogue.path = c->dir;
	path = c->dir ? file_join(dir, INDEX, e) : NULL;
	if (!path || read_config(c, e))
		goto out;
	index = read_index(path, e);
	if (e->code)
		goto out;
	map = json_object_get(index, "weight_map");
	if (find_files(c, map, path, estimate, e) || read_files(c, map, estimate, e))
		goto out;
	rc = 0;
out:
	json_decref(index);
	free(path);
	if (rc)
		checkpoint_release(c);
	return rc;
}

void checkpoint_release(struct checkpoint *c)
{
	size_t i;

	for (i = 0; c->block && i <= c->nfiles; i++)
		free(c->block[i]);
	for (i = 0; i < c->nfiles; i++)
		free(c->file[i].name);
	free(c->block);
	free(c->file);
	free(c->entry);
	free(c->dir);
	json_decref(c->config);
	entry_index_release(&c->index);
	*c = (struct checkpoint){ 0 };
}

/* ---- identity -------------------------------------------------------------------------------------------------------- */

#define SAMPLES 64
#define SAMPLE 4096
#define PIECE ((size_t)1 << 20)

static void hash_u64(struct digest *d, uint64_t v)
{
	v = htole64(v);
	digest_update(d, &v, sizeof v);
}

static int hash_range(struct digest *d, int fd, const char *path, uint64_t at, uint64_t n, char *buf, struct err *e)
{
	while (n) {
		size_t part = n < PIECE ? (size_t)n : PIECE;

		if (file_pread(fd, path, buf, part, at, e))
			return -1;
		digest_update(d, buf, part);
		at += part;
		n -= part;
	}
	return 0;
}

static int hash_file(struct digest *d, const struct checkpoint *c, const struct checkpoint_file *f, char *buf, struct err *e)
{
	uint64_t n = f->size - f->data;
	char *path = file_join(c->dir, f->name, e);
	int fd = path ? file_open(path, e) : -1;
	int k, rc = -1;

	if (fd < 0)
		goto out;
	hash_u64(d, f->size);
	if (hash_range(d, fd, path, 0, f->data, buf, e))
		goto out;
	if (n <= (uint64_t)SAMPLES * SAMPLE) {
		rc = hash_range(d, fd, path, f->data, n, buf, e);
		goto out;
	}
	for (k = 0; k < SAMPLES; k++)
		if (hash_range(d, fd, path, f->data + (uint64_t)k * (n - SAMPLE) / (SAMPLES - 1), SAMPLE, buf, e))
			goto out;
	rc = 0;
out:
	if (fd >= 0)
		close(fd);
	free(path);
	return rc;
}

static int hash_config(struct digest *d, const struct checkpoint *c, struct err *e)
{
	char *path = file_join(c->dir, CONFIG, e);
	struct text t = TEXT_INIT;
	int rc = path ? file_read_all(path, CONFIG_MAX, &t, e) : -1;

	if (!rc) {
		hash_u64(d, t.len);
		digest_update(d, t.s, t.len);
	}
	text_release(&t);
	free(path);
	return rc;
}

int checkpoint_identity(const struct checkpoint *c, char hex[DIGEST_HEX], struct err *e)
{
	struct digest *d = NULL;
	char *buf = NULL;
	int rc = -1;
	size_t i;

	if (c->partial)
		return err_refuse(e, "checkpoint '%s' is not whole: download all of its files", c->dir);
	d = digest_new(e);
	buf = mem_aligned(PIECE, e);
	if (!d || !buf || hash_config(d, c, e))
		goto out;
	hash_u64(d, c->nfiles);
	for (i = 0; i < c->nfiles; i++)
		if (hash_file(d, c, &c->file[i], buf, e))
			goto out;
	digest_hex(d, hex);
	rc = 0;
out:
	digest_free(d);
	free(buf);
	return rc;
}
