/* SPDX-License-Identifier: Apache-2.0 */
/* stage_derive: collects what a model derives and lays it out as one safetensors file. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdlib.h>
#include <string.h>

#include "err.h"
#include "mem.h"
#include "safetensors.h"
#include "stage.h"
#include "stage_derive.h"

static int put(void *ctx, const char *name, enum dtype dtype, int64_t rows, int64_t cols,
	       const void *data, struct err *e)
{
	struct stage_derivation *d = ctx;
	int64_t *shape = mem_calloc(2, sizeof *shape, e);
	char *copy = mem_strdup(name, e);

	if (!shape || !copy || mem_grow(&d->entry, &d->cap, d->n + 1, sizeof *d->entry, e)) {
		free(shape);
		free(copy);
		return -1;
	}
	shape[0] = rows;
	shape[1] = cols;
	d->entry[d->n++] = (struct entry){ .name = copy,
					   .dtype = dtype,
					   .ndim = cols == 1 ? 1 : 2,
					   .shape = shape,
					   .rows = rows };
	text_addn(&d->data, data, (size_t)(rows * cols) * dtype_size(dtype));
	return text_ok(&d->data, e);
}

static int lay_out(struct stage_derivation *d, int file, struct err *e)
{
	struct st_tensor *st = mem_calloc(d->n, sizeof *st, e);
	size_t i;
	int rc;

	if (!st)
		return -1;
	for (i = 0; i < d->n; i++) {
		st[i] = (struct st_tensor){ .name = (char *)d->entry[i].name,
					    .dtype = d->entry[i].dtype,
					    .ndim = d->entry[i].ndim };
		memcpy(st[i].shape, d->entry[i].shape, 2 * sizeof *st[i].shape);
	}
	rc = safetensors_header(&d->bytes, st, d->n, NULL, 0, 0, e);
	for (i = 0; !rc && i < d->n; i++) {
		d->entry[i].file = file;
		d->entry[i].begin = st[i].begin;
		d->entry[i].end = st[i].end;
	}
	if (!rc) {
		text_addn(&d->bytes, d->data.s, d->data.len);
		rc = text_ok(&d->bytes, e);
	}
	text_release(&d->data);
	free(st);
	return rc;
}

int stage_derive(struct stage_derivation *d, struct target *t, const char *dir, int file,
		 struct err *e)
{
	*d = (struct stage_derivation){ 0 };
	if (!t->model->derive)
		return 0;
	return t->model->derive(t, dir, d->digest, put, d, e) ? -1 : lay_out(d, file, e);
}

const struct entry *stage_derivation_find(const struct stage_derivation *d, const char *name)
{
	size_t i;

	for (i = 0; i < d->n; i++)
		if (!strcmp(d->entry[i].name, name))
			return &d->entry[i];
	return NULL;
}

void stage_derivation_release(struct stage_derivation *d)
{
	size_t i;

	for (i = 0; i < d->n; i++) {
		free((char *)d->entry[i].name);
		free((int64_t *)d->entry[i].shape);
	}
	free(d->entry);
	text_release(&d->data);
	text_release(&d->bytes);
	*d = (struct stage_derivation){ 0 };
}

int stage_derived(char hex[DIGEST_HEX], struct target *t, const char *dir, struct err *e)
{
	struct stage_derivation d;
	int rc = stage_derive(&d, t, dir, 0, e);

	memcpy(hex, d.digest, DIGEST_HEX);
	stage_derivation_release(&d);
	return rc;
}
