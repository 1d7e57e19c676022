/* SPDX-License-Identifier: Apache-2.0 */
/* How much device memory a weight takes, known without a device: the promise that every backend's layout keeps. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include "backend.h"

/* Packed products may pad both sizes to whole blocks; a handle, and for each panel of at least 64 rows a record, come on top. */
#define BLOCK 64
#define HANDLE 1024
#define RECORD 64

static uint64_t blocks(int64_t n)
{
	return ((uint64_t)n + BLOCK - 1) / BLOCK;
}

uint64_t weight_bytes(const struct weight *w, enum dtype compute)
{
	uint64_t count = (uint64_t)w->count, plain = count * (uint64_t)w->rows * (uint64_t)w->cols;

	switch (w->use) {
	case USE_PRODUCT:
		return HANDLE + count * blocks(w->rows) *
		       (RECORD + BLOCK * blocks(w->cols) * BLOCK * dtype_size(w->unit == WEIGHT_FP32 ? DT_F32 : compute));
	case USE_VECTOR:
		return HANDLE + plain * sizeof(float);
	case USE_TABLE:
	case USE_RAW:
		break;
	}
	return HANDLE + plain * dtype_size(w->stored);
}
