/* SPDX-License-Identifier: Apache-2.0 */
/*
 * safetensors: headers of safetensors files, read strictly and written byte-exactly. Data is read
 * by offset, never mapped whole.
 *
 *	u64 n | JSON header, n bytes, space-padded | data
 */
#ifndef DSPARK_SAFETENSORS_H
#define DSPARK_SAFETENSORS_H

#include <jansson.h>
#include <stdint.h>

#include "dtype.h"

struct err;
struct text;

#define ST_MAX_DIMS 8

struct st_tensor {
	char *name;
	enum dtype dtype;
	int ndim;
	int64_t shape[ST_MAX_DIMS];
	uint64_t begin, end;		/* bytes, from the start of the FILE */
};

struct safetensors {
	char *path;
	int fd;				/* -1 when not open */
	uint64_t data;			/* where the data starts = 8 + header length */
	uint64_t size;			/* of the file */
	size_t n;
	struct st_tensor *tensor;	/* sorted by name */
	json_t *metadata;		/* __metadata__, an object of strings; NULL if absent */
};

#define SAFETENSORS_INIT { .fd = -1 }

/*
 * Refuses: header over 100 MB or beyond the file, not an object, unknown dtype, bad shape, a size
 * that is not the shape's, overlapping tensors, holes, bytes after the last tensor, a short file,
 * metadata other than strings. 0-dimensional tensors are legal.
 */
int safetensors_open(struct safetensors *s, const char *path, struct err *e);
void safetensors_release(struct safetensors *s);

/* NULL if absent. */
const struct st_tensor *safetensors_find(const struct safetensors *s, const char *name);
const char *safetensors_meta(const struct safetensors *s, const char *key);

int64_t safetensors_elements(const struct st_tensor *t);

/* Bytes [off, off+n) of tensor t. */
int safetensors_read(const struct safetensors *s, const struct st_tensor *t, void *buf,
		     uint64_t off, size_t n, struct err *e);

/*
 * Header bytes (with the u64) for tensors laid out one after another in the given order; begin/end
 * are filled in, relative to the start of the file. `metadata` (strings, may be NULL) comes first.
 * The result is padded with spaces to `pad_to` bytes if larger than needed, then to a multiple of
 * `align` (0 = 8). Refuses to exceed `pad_to` when it is not 0.
 */
int safetensors_header(struct text *out, struct st_tensor *t, size_t n, const json_t *metadata,
		       uint64_t pad_to, uint64_t align, struct err *e);

#endif
