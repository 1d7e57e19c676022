/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of scales, each of 64 rows' different ones once. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdlib.h>
#include <string.h>

#include "mem.h"
#include "quant.h"
#include "scales.h"

#define CHUNK 64

static unsigned char *chunk_of(const struct ref_scales *s, int64_t index, int64_t row)
{
	return s->data + (size_t)(index * s->chunks + row / CHUNK) * s->chunk;
}

int ref_scales_init(struct ref_scales *s, const struct weight *w, struct err *e)
{
	int64_t bytes;

	*s = (struct ref_scales){ .chunks = (w->rows + CHUNK - 1) / CHUNK,
				  .slots = QUANT_SCALE_ROWS(w->quant),
				  .row = (size_t)quant_blocks(w->quant, w->cols) *
					 dtype_size(w->quant->scale) };
	s->chunk = CHUNK + (size_t)s->slots * s->row;
	bytes = mem_mul(mem_mul(w->count, s->chunks), (int64_t)s->chunk);
	if (bytes < 0)
		return err_fail(e, "the scales of a weight are larger than the address space");
	s->data = mem_calloc((size_t)bytes, 1, e);
	if (!s->data)
		return -1;
	pthread_mutex_init(&s->lock, NULL);
	return 0;
}

void ref_scales_release(struct ref_scales *s)
{
	if (s->data)
		pthread_mutex_destroy(&s->lock);
	free(s->data);
	s->data = NULL;
}

/*
 * The slot that has these scales, or a free one that takes them; `slots` where none is free. Where
 * there is one for each row, that of `row`.
 */
static int64_t slot_for(const struct ref_scales *s, unsigned char *chunk, int64_t row,
			const void *scales)
{
	int64_t used = 0, i;

	if (s->slots == CHUNK) {
		memcpy(chunk + CHUNK + (size_t)row * s->row, scales, s->row);
		return row;
	}
	for (i = 0; i < CHUNK; i++)
		used = chunk[i] > used ? chunk[i] : used;
	for (i = 0; i < used; i++)
		if (!memcmp(chunk + CHUNK + (size_t)i * s->row, scales, s->row))
			return i;
	if (i < s->slots)
		memcpy(chunk + CHUNK + (size_t)i * s->row, scales, s->row);
	return i;
}

int ref_scales_put(struct ref_scales *s, int64_t index, int64_t row0, int64_t n,
		   const void *scales, struct err *e)
{
	const char *row = scales, *last = NULL;
	unsigned char *chunk = NULL;
	int64_t slot = 0, i;

	pthread_mutex_lock(&s->lock);
	for (i = row0; i < row0 + n && slot < s->slots; i++, row += s->row) {
		unsigned char *at = chunk_of(s, index, i);

		if (s->slots == CHUNK || at != chunk || memcmp(row, last, s->row))
			slot = slot_for(s, at, i % CHUNK, row);
		chunk = at;
		last = row;
		if (slot < s->slots)
			at[i % CHUNK] = (unsigned char)(slot + 1);
	}
	pthread_mutex_unlock(&s->lock);
	if (slot < s->slots)
		return 0;
	return err_refuse(e, "64 rows of a weight have more than %lld different rows of scales",
			  (long long)s->slots);
}

const void *ref_scales_row(const struct ref_scales *s, int64_t index, int64_t row)
{
	const unsigned char *chunk = chunk_of(s, index, row);
	int slot = chunk[row % CHUNK];

	return slot ? chunk + CHUNK + (size_t)(slot - 1) * s->row : NULL;
}
