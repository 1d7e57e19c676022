/* SPDX-License-Identifier: Apache-2.0 */
/*
 * yardstick: a product as oneDNN runs it when left alone: for exactly M rows, the weight packed
 * once in the layout it likes best, the work spread over threads by oneDNN itself.
 */
#ifndef DSPARK_YARDSTICK_H
#define DSPARK_YARDSTICK_H

#include <stdint.h>

#include "dtype.h"
#include "err.h"

struct yardstick;

#ifdef HAVE_ONEDNN
/*
 * dst[M,N] of `out` = src[M,K] w^T, both of `in` (DT_F32 or DT_BF16); w [N,K] is packed here, src
 * and dst stay the caller's. NULL with `e` set.
 */
struct yardstick *yardstick_new(enum dtype in, enum dtype out, int64_t M, int64_t N, int64_t K,
				const void *src, const void *w, void *dst, int threads,
				struct err *e);
int yardstick_run(struct yardstick *y, struct err *e);
void yardstick_free(struct yardstick *y);
const char *yardstick_version(void);
#else
static inline struct yardstick *yardstick_new(enum dtype in, enum dtype out, int64_t M, int64_t N,
					      int64_t K, const void *src, const void *w, void *dst,
					      int threads, struct err *e)
{
	(void)in, (void)out, (void)M, (void)N, (void)K, (void)src, (void)w, (void)dst,
		(void)threads;
	err_refuse(e, "this build has no oneDNN to compare with");
	return NULL;
}

static inline int yardstick_run(struct yardstick *y, struct err *e)
{
	(void)y;
	return err_refuse(e, "this build has no oneDNN to compare with");
}

static inline void yardstick_free(struct yardstick *y)
{
	(void)y;
}

static inline const char *yardstick_version(void)
{
	return "none";
}
#endif

#endif
