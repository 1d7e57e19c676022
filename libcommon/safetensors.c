/* SPDX-License-Identifier: Apache-2.0 */
/*
 * safetensors: a header is believed only when its tensors cover the data exactly once: sorted by
 * offset each begins where the one before ends, the first at 0, the last at the end of the file.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "err.h"
#include "file.h"
#include "json.h"
#include "mem.h"
#include "safetensors.h"
#include "text.h"

#define HEADER_MAX 100000000 /* the format's own limit */

static uint64_t le64(const unsigned char b[8])
{
	uint64_t v = 0;
	int i;

	for (i = 7; i >= 0; i--)
		v = v << 8 | b[i];
	return v;
}

static int bad(const char *path, const char *name, const char *problem, struct err *e)
{
	return err_refuse(e, "'%s': tensor '%s' %s", path, name, problem);
}

/*
 * `unit` times the elements, or -1 on overflow. Zero dimensions come first: 0 x 2^40 x 2^40 holds
 * nothing.
 */
static int64_t volume(const struct st_tensor *t, int64_t unit)
{
	int i;

	for (i = 0; i < t->ndim; i++)
		if (!t->shape[i])
			return 0;
	for (i = 0; i < t->ndim; i++)
		unit = mem_mul(unit, t->shape[i]);
	return unit;
}

int64_t safetensors_elements(const struct st_tensor *t)
{
	return volume(t, 1);
}

static int64_t tensor_bytes(const struct st_tensor *t)
{
	return volume(t, (int64_t)dtype_size(t->dtype));
}

static int read_shape(struct st_tensor *t, const char *path, const json_t *shape, struct err *e)
{
	size_t i, n = json_array_size(shape);

	if (!json_is_array(shape))
		return bad(path, t->name, "has no 'shape' list", e);
	if (n > ST_MAX_DIMS)
		return err_refuse(e, "'%s': tensor '%s' has %zu dimensions, more than %d", path,
				  t->name, n, ST_MAX_DIMS);
	for (i = 0; i < n; i++) {
		const json_t *dim = json_array_get(shape, i);

		if (!json_is_integer(dim) || json_integer_value(dim) < 0)
			return bad(path, t->name,
				   "has a dimension that is not a whole number from 0 on", e);
		t->shape[i] = json_integer_value(dim);
	}
	t->ndim = (int)n;
	return 0;
}

static int read_offsets(struct st_tensor *t, const struct safetensors *s, const json_t *offsets,
			struct err *e)
{
	const json_t *begin = json_array_get(offsets, 0), *end = json_array_get(offsets, 1);
	int64_t from = json_integer_value(begin), to = json_integer_value(end),
		want = tensor_bytes(t);

	if (json_array_size(offsets) != 2 || !json_is_integer(begin) || !json_is_integer(end) ||
	    from < 0 || to < from)
		return bad(s->path, t->name, "has no 'data_offsets' pair of rising whole numbers",
			   e);
	if (want < 0)
		return bad(s->path, t->name, "has a shape larger than any file", e);
	if (to - from != want)
		return err_refuse(e,
				  "'%s': tensor '%s' has %" PRId64
				  " bytes of data, its shape and dtype want %" PRId64,
				  s->path, t->name, to - from, want);
	if ((uint64_t)to > s->size - s->data)
		return err_refuse(e,
				  "'%s': tensor '%s' ends %" PRIu64
				  " bytes behind the end of the file: it is cut short",
				  s->path, t->name, (uint64_t)to - (s->size - s->data));
	t->begin = s->data + (uint64_t)from;
	t->end = s->data + (uint64_t)to;
	return 0;
}

static int read_tensor(struct st_tensor *t, const struct safetensors *s, const char *name,
		       const json_t *o, struct err *e)
{
	const char *dtype = json_string_value(json_object_get(o, "dtype"));

	t->name = mem_strdup(name, e);
	if (!t->name)
		return -1;
	if (!json_is_object(o))
		return bad(s->path, name, "is not described by an object", e);
	if (!dtype)
		return bad(s->path, name, "has no 'dtype' string", e);
	t->dtype = dtype_from_name(dtype);
	if (t->dtype == DT_NONE)
		return err_refuse(
			e,
			"'%s': tensor '%s' has the unknown dtype '%s'; known are F64 F32 F16 BF16, "
			"I64 I32 I16 I8, U8, "
			"BOOL, F8_E4M3 F8_E5M2 F8_E8M0",
			s->path, name, dtype);
	if (read_shape(t, s->path, json_object_get(o, "shape"), e))
		return -1;
	return read_offsets(t, s, json_object_get(o, "data_offsets"), e);
}

static int read_metadata(struct safetensors *s, json_t *meta, struct err *e)
{
	const char *key;
	json_t *v;

	if (!json_is_object(meta))
		return err_refuse(e, "'%s': '__metadata__' is not an object", s->path);
	json_object_foreach(meta, key, v) if (!json_is_string(v)) return err_refuse(
		e, "'%s': '__metadata__' member '%s' is not a string", s->path, key);
	s->metadata = json_incref(meta);
	return 0;
}

static int by_place(const void *a, const void *b)
{
	const struct st_tensor *x = a, *y = b;

	if (x->begin != y->begin)
		return x->begin < y->begin ? -1 : 1;
	return x->end < y->end ? -1 : x->end > y->end;
}

static int by_name(const void *a, const void *b)
{
	return strcmp(((const struct st_tensor *)a)->name, ((const struct st_tensor *)b)->name);
}

static int check_cover(struct safetensors *s, struct err *e)
{
	uint64_t at = s->data;
	size_t i;

	qsort(s->tensor, s->n, sizeof *s->tensor, by_place);
	for (i = 0; i < s->n; at = s->tensor[i++].end) {
		const struct st_tensor *t = &s->tensor[i];

		if (t->begin < at)
			return err_refuse(e, "'%s': tensors '%s' and '%s' overlap", s->path,
					  s->tensor[i - 1].name, t->name);
		if (t->begin > at)
			return err_refuse(e,
					  "'%s': %" PRIu64
					  " bytes before tensor '%s' belong to no tensor",
					  s->path, t->begin - at, t->name);
	}
	if (at != s->size)
		return err_refuse(e, "'%s': %" PRIu64 " bytes after the last tensor belong to none",
				  s->path, s->size - at);
	return 0;
}

static int read_tensors(struct safetensors *s, json_t *header, struct err *e)
{
	const char *name;
	json_t *o;

	s->tensor = mem_calloc(json_object_size(header), sizeof *s->tensor, e);
	if (!s->tensor)
		return -1;
	json_object_foreach(header, name, o)
	{
		if (!strcmp(name, "__metadata__")) {
			if (read_metadata(s, o, e))
				return -1;
			continue;
		}
		s->n++; /* counted first, so that release frees the name */
		if (read_tensor(&s->tensor[s->n - 1], s, name, o, e))
			return -1;
	}
	if (check_cover(s, e))
		return -1;
	qsort(s->tensor, s->n, sizeof *s->tensor, by_name);
	return 0;
}

/* The header's text: sets s->data. */
static int read_header(struct safetensors *s, char **text, struct err *e)
{
	unsigned char len[8];
	uint64_t n;

	if (s->size < 8)
		return err_refuse(e, "'%s' is too short for a safetensors file: %" PRIu64 " bytes",
				  s->path, s->size);
	if (file_pread(s->fd, s->path, len, 8, 0, e))
		return -1;
	n = le64(len);
	if (n > HEADER_MAX)
		return err_refuse(e,
				  "'%s' is no safetensors file: its header would have %" PRIu64
				  " bytes, over 100 MB",
				  s->path, n);
	if (n > s->size - 8)
		return err_refuse(e,
				  "'%s' is cut short: a header of %" PRIu64
				  " bytes in a file of %" PRIu64,
				  s->path, n, s->size);
	*text = mem_calloc(n + 1, 1, e);
	if (!*text)
		return -1;
	s->data = 8 + n;
	return file_pread(s->fd, s->path, *text, n, 8, e);
}

static int open_header(struct safetensors *s, struct err *e)
{
	char *text = NULL;
	json_t *header = NULL;
	int rc = -1;

	if (read_header(s, &text, e))
		goto out;
	if (*text != '{') {
		err_refuse(e, "'%s' is no safetensors file: its header does not begin with '{'",
			   s->path);
		goto out;
	}
	header = json_parse(text, s->data - 8, s->path, e);
	if (!header) {
		err_context(e, "safetensors header");
		goto out;
	}
	rc = read_tensors(s, header, e);
out:
	json_decref(header);
	free(text);
	return rc;
}

int safetensors_open(struct safetensors *s, const char *path, struct err *e)
{
	struct stat st;

	*s = (struct safetensors)SAFETENSORS_INIT;
	s->path = mem_strdup(path, e);
	if (!s->path)
		return -1;
	s->fd = file_open(path, e);
	if (s->fd < 0)
		goto fail;
	if (fstat(s->fd, &st)) {
		err_input(e, "cannot look at '%s'", path);
		goto fail;
	}
	s->size = (uint64_t)st.st_size;
	if (open_header(s, e))
		goto fail;
	return 0;
fail:
	safetensors_release(s);
	return -1;
}

/* A zeroed struct, whose fd would be 0, has no path and owns nothing. */
void safetensors_release(struct safetensors *s)
{
	size_t i;

	if (s->path && s->fd >= 0)
		close(s->fd);
	for (i = 0; i < s->n; i++)
		free(s->tensor[i].name);
	free(s->tensor);
	free(s->path);
	json_decref(s->metadata);
	*s = (struct safetensors)SAFETENSORS_INIT;
}

const struct st_tensor *safetensors_find(const struct safetensors *s, const char *name)
{
	const struct st_tensor key = { .name = (char *)name };

	return s->n ? bsearch(&key, s->tensor, s->n, sizeof key, by_name) : NULL;
}

const char *safetensors_meta(const struct safetensors *s, const char *key)
{
	return json_string_value(json_object_get(s->metadata, key));
}

int safetensors_read(const struct safetensors *s, const struct st_tensor *t, void *buf,
		     uint64_t off, size_t n, struct err *e)
{
	if (off > t->end - t->begin || n > t->end - t->begin - off)
		return err_refuse(e,
				  "'%s': bytes %" PRIu64 " to %" PRIu64
				  " of tensor '%s' were asked for, it has %" PRIu64,
				  s->path, off, off + n, t->name, t->end - t->begin);
	return file_pread(s->fd, s->path, buf, n, t->begin + off, e);
}

static int add_metadata(struct text *out, const json_t *meta, struct err *e)
{
	const char *key, *comma = "";
	json_t *v;

	text_add(out, "\"__metadata__\":{");
	json_object_foreach((json_t *)meta, key, v)
	{
		if (!json_is_string(v))
			return err_refuse(e, "safetensors metadata '%s' is not a string", key);
		text_add(out, comma);
		json_quote(out, key);
		text_add(out, ":");
		json_quote(out, json_string_value(v));
		comma = ",";
	}
	text_add(out, "}");
	return 0;
}

/* Sets begin and end relative to the data; *at moves on. */
static int add_tensor(struct text *out, struct st_tensor *t, uint64_t *at, struct err *e)
{
	int64_t bytes = tensor_bytes(t);
	int i;

	if (bytes < 0 || *at > (uint64_t)INT64_MAX - (uint64_t)bytes)
		return err_refuse(e, "tensor '%s' is larger than any file", t->name);
	t->begin = *at;
	t->end = *at += (uint64_t)bytes;
	json_quote(out, t->name);
	text_printf(out, ":{\"dtype\":\"%s\",\"shape\":[", dtype_name(t->dtype));
	for (i = 0; i < t->ndim; i++)
		text_printf(out, "%s%" PRId64, i ? "," : "", t->shape[i]);
	text_printf(out, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", t->begin, t->end);
	return 0;
}

static void put_length(char *p, uint64_t n)
{
	int i;

	for (i = 0; i < 8; i++)
		p[i] = (char)(n >> 8 * i);
}

int safetensors_header(struct text *out, struct st_tensor *t, size_t n, const json_t *metadata,
		       uint64_t pad_to, uint64_t align, struct err *e)
{
	uint64_t at = 0, len;
	size_t i;

	text_clear(out);
	text_addn(out, "\0\0\0\0\0\0\0", 8);
	text_add(out, "{");
	if (metadata && add_metadata(out, metadata, e))
		return -1;
	for (i = 0; i < n; i++) {
		if (i || metadata)
			text_add(out, ",");
		if (add_tensor(out, &t[i], &at, e))
			return -1;
	}
	text_add(out, "}");
	if (text_ok(out, e))
		return -1;
	if (pad_to && out->len > pad_to)
		return err_refuse(e,
				  "a safetensors header of %zu bytes exceeds the %" PRIu64
				  " set aside for it",
				  out->len, pad_to);
	len = out->len > pad_to ? out->len : pad_to;
	align = align ? align : 8;
	len = (len + align - 1) / align * align;
	if (len - 8 > HEADER_MAX)
		return err_refuse(e,
				  "a safetensors header of %" PRIu64
				  " bytes exceeds the format's 100 MB",
				  len);
	text_pad(out, ' ', len);
	if (text_ok(out, e))
		return -1;
	put_length(out->s, len - 8);
	for (i = 0; i < n; i++) {
		t[i].begin += len;
		t[i].end += len;
	}
	return 0;
}
