/* SPDX-License-Identifier: Apache-2.0 */
/* catalogue: an open hash, since half a million names are looked up once each. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdlib.h>
#include <string.h>

#include "catalogue.h"
#include "err.h"
#include "mem.h"

static uint64_t name_hash(const char *s)
{
	/* FNV-1a, its low bits mixed once more: tensor names differ in few digits */
	uint64_t h = 0xcbf29ce484222325;

	for (; *s; s++)
		h = (h ^ (unsigned char)*s) * 0x100000001b3;
	return h ^ h >> 29;
}

int entry_index_build(struct entry_index *x, const struct entry *entry, size_t n,
		      const struct entry **twice, struct err *e)
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
		for (at = name_hash(entry[i].name) & (buckets - 1); x->bucket[at];
		     at = (at + 1) & (buckets - 1))
			if (!strcmp(entry[x->bucket[at] - 1].name, entry[i].name)) {
				*twice = &entry[i];
				return -1;
			}
		x->bucket[at] = (uint32_t)(i + 1);
	}
	return 0;
}

const struct entry *entry_index_find(const struct entry_index *x, const struct entry *entry,
				     const char *name)
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
