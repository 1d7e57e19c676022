/* SPDX-License-Identifier: Apache-2.0 */
/*
 * checkpoint: finds the files of a model directory and indexes their tensors.
 *
 * A header is parsed, boiled down to entries (shapes of one file in one block) and dropped, so that
 * half a million tensors cost about 160 bytes each, and one header a thread.
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
#include "parallel.h"
#include "safetensors.h"
#include "text.h"

#define CONFIG "config.json"
#define INDEX "model.safetensors.index.json"
#define SINGLE "model.safetensors"
#define SUFFIX ".safetensors"

#define CONFIG_MAX ((size_t)64 << 20)
#define INDEX_MAX ((size_t)1 << 30)

/* ---- which files ----------------------------------------------------------------------------- */

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
	return strcmp(((const struct checkpoint_file *)a)->name,
		      ((const struct checkpoint_file *)b)->name);
}

static struct checkpoint_file *find_file(const struct checkpoint *c, const char *name)
{
	struct checkpoint_file key = { .name = (char *)name };

	return c->nfiles ? bsearch(&key, c->file, c->nfiles, sizeof key, by_name) : NULL;
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
		else if (has_suffix(ent->d_name, ".bin") ||
			 has_suffix(ent->d_name, ".bin.index.json") ||
			 has_suffix(ent->d_name, ".pth") || has_suffix(ent->d_name, ".pt"))
			*torch = true;
	}
	if (!rc && errno)
		rc = err_input(e, "cannot read directory '%s'", c->dir);
	closedir(d);
	return rc;
}

/* Without an index. */
static int find_files(struct checkpoint *c, bool estimate, struct err *e)
{
	char *single = file_join(c->dir, SINGLE, e);
	bool torch = false, alone = single && file_exists(single);
	size_t cap = 0;

	if (!single)
		return -1;
	free(single);
	if (alone ? add_file(c, &cap, SINGLE, e) : files_of_dir(c, &torch, e))
		return -1;
	if (c->nfiles) {
		qsort(c->file, c->nfiles, sizeof *c->file, by_name);
		return 0;
	}
	if (torch)
		return err_refuse(e,
				  "checkpoint '%s' has only PyTorch files (.bin, .pt): convert it "
				  "to safetensors "
				  "(save_pretrained with safe_serialization) or download the "
				  "safetensors files",
				  c->dir);
	if (!estimate)
		return err_refuse(e,
				  "checkpoint '%s' has no safetensors files: download its weights",
				  c->dir);
	c->partial = true;
	return 0;
}

/* ---- the index ------------------------------------------------------------------------------- */

/*
 * weight_map as pairs of strings. Half a million of them take jansson longer than everything else
 * together, and they are nearly always plain: ASCII without escapes, one object of strings. That
 * form is read here; any other goes through jansson, which also checks what stands around the map.
 */
struct map {
	struct text text;		/* strings point into it, ended by NUL */
	json_t *json;			/* or into this */
	size_t n, cap;
	struct pair {
		const char *name, *file;
	} *pair;
};

static void map_release(struct map *m)
{
	text_release(&m->text);
	json_decref(m->json);
	free(m->pair);
	*m = (struct map){ 0 };
}

static char *skip_space(char *p)
{
	while (*p == ' ' || *p == '\n' || *p == '\t' || *p == '\r')
		p++;
	return p;
}

/* A plain string at p: its bytes' end, where the closing quote stands; NULL if it is none. */
static char *plain_string(char *p)
{
	if (*p != '"')
		return NULL;
	for (p++; *p != '"'; p++)
		if (*p == '\\' || *p < 0x20 ||
		    *p > 0x7e) /* also what is no ASCII, where char is signed or not, and the end */
			return NULL;
	return p;
}

/*
 * p stands behind a '{'. Returns what stands behind the '}', NULL if the map is not plain (the text
 * is changed all the same).
 */
static char *plain_pairs(struct map *m, char *p, struct err *e)
{
	char *name, *file, *end;

	for (p = skip_space(p); *p != '}'; p = skip_space(p)) {
		name = p;
		if (!(end = plain_string(name)))
			return NULL;
		*end = '\0';
		p = skip_space(end + 1);
		if (*p != ':' || !(end = plain_string(file = skip_space(p + 1))))
			return NULL;
		*end = '\0';
		p = skip_space(end + 1);
		if (mem_grow(&m->pair, &m->cap, m->n + 1, sizeof *m->pair, e))
			return NULL;
		m->pair[m->n++] = (struct pair){ name + 1, file + 1 };
		if (*p == ',' && *skip_space(p + 1) == '"')
			p++;
		else if (*p != '}')
			return NULL;
	}
	return p + 1;
}

/* Whether the text without the map's pairs is JSON with an empty weight_map at its top. */
static bool frame_is_good(const char *head, size_t n, const char *tail, const char *path)
{
	struct text t = TEXT_INIT;
	struct err none = ERR_INIT;
	json_t *o = NULL;
	bool good;

	text_addn(&t, head, n);
	text_add(&t, "}");
	text_add(&t, tail);
	if (!text_ok(&t, &none))
		o = json_parse(t.s, t.len, path, &none);
	good = json_is_object(json_object_get(o, "weight_map")) &&
	       !json_object_size(json_object_get(o, "weight_map"));
	json_decref(o);
	text_release(&t);
	return good;
}

static bool read_plain(struct map *m, const char *path, struct err *e)
{
	static const char key[] = "\"weight_map\"";
	char *at = strstr(m->text.s, key), *map, *tail;

	if (!at || strlen(m->text.s) != m->text.len)
		return false;
	map = skip_space(at + sizeof key - 1);
	if (*map != ':' || *(map = skip_space(map + 1)) != '{')
		return false;
	map++;
	tail = plain_pairs(m, map, e);
	return tail && frame_is_good(m->text.s, (size_t)(map - m->text.s), tail, path);
}

static int read_json(struct map *m, const char *path, struct err *e)
{
	const char *name;
	json_t *value, *map;

	m->n = 0;
	m->json = json_read(path, INDEX_MAX, e);
	if (!m->json)
		return -1;
	map = json_object_get(m->json, "weight_map");
	if (!json_is_object(map))
		return err_refuse(e, "'%s' has no object 'weight_map'", path);
	json_object_foreach(map, name, value) {
		if (!json_is_string(value))
			return err_refuse(e, "'%s': weight_map gives '%s' no file name", path,
					  name);
		if (mem_grow(&m->pair, &m->cap, m->n + 1, sizeof *m->pair, e))
			return -1;
		m->pair[m->n++] = (struct pair){ name, json_string_value(value) };
	}
	return 0;
}

/*
 * Few files hold many tensors, and neighbours in the index mostly share one: look at the last
 * first, then at all.
 */
static int files_of_map(struct checkpoint *c, const struct map *m, const char *path, struct err *e)
{
	size_t cap = 0, i = 0, k;

	for (k = 0; k < m->n; k++) {
		const char *file = m->pair[k].file;

		if (i < c->nfiles && !strcmp(c->file[i].name, file))
			continue;
		if (!*file || strchr(file, '/') || *file == '.')
			return err_refuse(e,
					  "'%s': weight_map gives '%s' the file '%s', which is not "
					  "a name in this directory",
					  path, m->pair[k].name, file);
		for (i = 0; i < c->nfiles && strcmp(c->file[i].name, file);)
			i++;
		if (i == c->nfiles && add_file(c, &cap, file, e))
			return -1;
	}
	if (!c->nfiles)
		return err_refuse(e, "'%s': weight_map is empty", path);
	qsort(c->file, c->nfiles, sizeof *c->file, by_name);
	return 0;
}

/* The names of the map as entries without a place; the files will fill them. */
static int entries_of_map(struct checkpoint *c, const struct map *m, const char *path,
			  struct err *e)
{
	const struct entry *twice;
	size_t k, i = 0, bytes = 0;
	char *name;

	for (k = 0; k < m->n; k++)
		bytes += strlen(m->pair[k].name) + 1;
	c->entry = mem_calloc(m->n, sizeof *c->entry, e);
	c->names = name = mem_calloc(bytes, 1, e);
	if (!c->entry || !name)
		return -1;
	for (k = 0; k < m->n; k++) {
		if (strcmp(c->file[i].name, m->pair[k].file))
			i = (size_t)(find_file(c, m->pair[k].file) - c->file);
		c->entry[k] = (struct entry){ .name = name, .ndim = -1, .file = (int)i };
		name = stpcpy(name, m->pair[k].name) + 1;
	}
	c->nentries = m->n;
	if (entry_index_build(&c->index, c->entry, c->nentries, &twice, e))
		return twice ? err_refuse(e, "'%s': weight_map has tensor '%s' twice", path,
					  twice->name)
			     : -1;
	return 0;
}

/* 0 read, 1 there is none. */
static int read_index(struct checkpoint *c, struct err *e)
{
	char *path = file_join(c->dir, INDEX, e);
	struct map m = { 0 };
	int rc = -1;

	if (!path)
		return -1;
	if (!file_exists(path) && errno == ENOENT) {
		rc = 1;
		goto out;
	}
	if (file_read_all(path, INDEX_MAX, &m.text, e) ||
	    (!read_plain(&m, path, e) && (e->code || read_json(&m, path, e))))
		goto out;
	if (files_of_map(c, &m, path, e) || entries_of_map(c, &m, path, e))
		goto out;
	rc = 0;
out:
	map_release(&m);
	free(path);
	return rc;
}

/* ---- their tensors --------------------------------------------------------------------------- */

/*
 * Files are read by several threads. Each has its own block; with an index it fills its own
 * entries, without one it makes a list.
 */
struct reader {
	struct checkpoint *c;
	bool indexed, estimate;
	struct file_list {
		struct entry *entry;
		size_t n;
	} *list;			/* [nfiles] */
};

static const struct entry *find(const struct catalogue *cat, const char *name)
{
	const struct checkpoint *c = (const struct checkpoint *)cat;

	return entry_index_find(&c->index, c->entry, name);
}

/* `name` and `file` stand since the index was read: other threads look at them now. */
static void fill(struct entry *to, const struct st_tensor *t, int64_t **shape)
{
	to->dtype = t->dtype;
	to->ndim = t->ndim;
	to->shape = *shape;
	to->begin = t->begin;
	to->end = t->end;
	memcpy(*shape, t->shape, (size_t)t->ndim * sizeof **shape);
	*shape += t->ndim;
	to->rows = entry_rows(to);
}

/* The index decides: names that it does not send to this file are passed over. */
static int fill_entries(struct checkpoint *c, size_t i, const struct safetensors *s, struct err *e)
{
	size_t k, dims = 0;
	int64_t *shape;

	for (k = 0; k < s->n; k++)
		dims += (size_t)s->tensor[k].ndim;
	c->block[i] = shape = mem_calloc(dims, sizeof *shape, e);
	if (!shape)
		return -1;
	for (k = 0; k < s->n; k++) {
		struct entry *t = (struct entry *)find(&c->catalogue, s->tensor[k].name);

		if (t && t->file == (int)i)
			fill(t, &s->tensor[k], &shape);
	}
	return 0;
}

static int list_entries(struct reader *r, size_t i, const struct safetensors *s, struct err *e)
{
	struct file_list *list = &r->list[i];
	size_t k, dims = 0, bytes = 0;
	int64_t *shape;
	char *name;

	for (k = 0; k < s->n; k++) {
		dims += (size_t)s->tensor[k].ndim;
		bytes += strlen(s->tensor[k].name) + 1;
	}
	list->entry = mem_calloc(s->n, sizeof *list->entry, e);
	r->c->block[i] = shape = mem_calloc(1, dims * sizeof *shape + bytes, e);
	if (!list->entry || !shape)
		return -1;
	name = (char *)(shape + dims);
	for (k = 0; k < s->n; k++) {
		list->entry[k].name = name;
		name = stpcpy(name, s->tensor[k].name) + 1;
		list->entry[k].file = (int)i;
		fill(&list->entry[k], &s->tensor[k], &shape);
	}
	list->n = s->n;
	return 0;
}

static int read_file(void *ctx, int64_t n, struct err *e)
{
	struct reader *r = ctx;
	struct checkpoint *c = r->c;
	size_t i = (size_t)n;
	struct checkpoint_file *f = &c->file[i];
	struct safetensors s = SAFETENSORS_INIT;
	char *path = file_join(c->dir, f->name, e);
	int rc = -1;

	if (!path)
		return -1;
	if (!file_exists(path) && errno == ENOENT) {
		f->missing = true;
		rc = r->estimate ? 0
				 : err_refuse(e,
					      "'%s/" INDEX
					      "' names '%s', which is missing: download it",
					      c->dir, f->name);
		goto out;
	}
	if (file_size(path, &f->size, &f->mtime_ns, e) || safetensors_open(&s, path, e))
		goto out;
	f->data = s.data;
	if (f->size != s.size)
		err_fail(e, "'%s' changed while it was read", path);
	else
		rc = r->indexed ? fill_entries(c, i, &s, e) : list_entries(r, i, &s, e);
out:
	safetensors_release(&s);
	free(path);
	return rc;
}

/* The lists one behind the other. */
static int join_lists(struct reader *r, struct err *e)
{
	const struct entry *first, *twice;
	struct checkpoint *c = r->c;
	size_t i, n = 0;

	for (i = 0; i < c->nfiles; i++)
		n += r->list[i].n;
	c->entry = mem_calloc(n, sizeof *c->entry, e);
	if (!c->entry)
		return -1;
	for (i = 0; i < c->nfiles; i++) {
		memcpy(c->entry + c->nentries, r->list[i].entry, r->list[i].n * sizeof *c->entry);
		c->nentries += r->list[i].n;
	}
	if (!entry_index_build(&c->index, c->entry, c->nentries, &twice, e))
		return 0;
	if (!twice)
		return -1;
	first = find(&c->catalogue, twice->name);
	return err_refuse(e,
			  "tensor '%s' is both in '%s' and in '%s' of '%s', and there is no '" INDEX
			  "' to decide: "
			  "remove the file that does not belong to the checkpoint",
			  twice->name, c->file[first->file].name, c->file[twice->file].name,
			  c->dir);
}

/* A name of the index has to be where it says. */
static int check_index(struct checkpoint *c, struct err *e)
{
	size_t i;

	for (i = 0; i < c->nentries; i++) {
		const struct entry *t = &c->entry[i];

		if (t->ndim < 0 && !c->file[t->file].missing)
			return err_refuse(e,
					  "'%s/" INDEX
					  "' places tensor '%s' in '%s', which does not hold it: "
					  "download the checkpoint again",
					  c->dir, t->name, c->file[t->file].name);
		c->partial |= t->ndim < 0;
	}
	return 0;
}

static int read_files(struct checkpoint *c, bool indexed, bool estimate, struct err *e)
{
	struct reader r = { c, indexed, estimate, NULL };
	int rc = -1;
	size_t i;

	c->block = mem_calloc(c->nfiles, sizeof *c->block, e);
	r.list = mem_calloc(c->nfiles, sizeof *r.list, e);
	if (c->block && r.list)
		rc = parallel_each((int64_t)c->nfiles, parallel_threads(), read_file, &r, e);
	if (!rc)
		rc = indexed ? check_index(c, e) : join_lists(&r, e);
	for (i = 0; r.list && i < c->nfiles; i++)
		free(r.list[i].entry);
	free(r.list);
	return rc;
}

static int read_config(struct checkpoint *c, struct err *e)
{
	char *path = file_join(c->dir, CONFIG, e);
	int rc = -1;

	if (!path)
		return -1;
	c->config = json_read(path, CONFIG_MAX, e);
	if (c->config)
		rc = json_is_object(c->config) ? 0
					       : err_refuse(e, "'%s' is not a JSON object", path);
	free(path);
	return rc;
}

int checkpoint_open(struct checkpoint *c, const char *dir, bool estimate, struct err *e)
{
	int index, rc = -1;

	*c = (struct checkpoint){ .catalogue.find = find };
	c->dir = mem_strdup(dir, e);
	c->catalogue.path = c->dir;
	if (!c->dir || read_config(c, e))
		goto out;
	index = read_index(c, e);
	if (index >= 0 && (!index || !find_files(c, estimate, e)))
		rc = read_files(c, !index, estimate, e);
	c->catalogue.partial = c->partial;
out:
	if (rc)
		checkpoint_release(c);
	return rc;
}

void checkpoint_release(struct checkpoint *c)
{
	size_t i;

	for (i = 0; c->block && i < c->nfiles; i++)
		free(c->block[i]);
	for (i = 0; i < c->nfiles; i++)
		free(c->file[i].name);
	free(c->block);
	free(c->names);
	free(c->file);
	free(c->entry);
	free(c->dir);
	json_decref(c->config);
	entry_index_release(&c->index);
	*c = (struct checkpoint){ 0 };
}

/* ---- identity -------------------------------------------------------------------------------- */

#define SAMPLES 64
#define SAMPLE 4096
#define PIECE ((size_t)1 << 20)

static void hash_u64(struct digest *d, uint64_t v)
{
	v = htole64(v);
	digest_update(d, &v, sizeof v);
}

static int hash_range(struct digest *d, int fd, const char *path, uint64_t at, uint64_t n,
		      char *buf, struct err *e)
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

static int hash_file(struct digest *d, const struct checkpoint *c, const struct checkpoint_file *f,
		     char *buf, struct err *e)
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
		if (hash_range(d, fd, path, f->data + (uint64_t)k * (n - SAMPLE) / (SAMPLES - 1),
			       SAMPLE, buf, e))
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
		return err_refuse(e, "checkpoint '%s' is not whole: download all of its files",
				  c->dir);
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
