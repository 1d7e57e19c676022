/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cache_logits: what the cached last states say of the next token, a check that states, ids and
 * lm_head belong together.
 */
#ifndef DSPARK_CACHE_LOGITS_H
#define DSPARK_CACHE_LOGITS_H

#include "cache_view.h"

struct err;
struct text;

/*
 * Recomputes logits = lm_head . last state in F32 at up to 64 positions spread over up to 16 rows
 * (positions whose next token is real) and appends one sentence: positions, mean next-token loss
 * beside ln V, share of arg maxima that are the next token. Logits as they are: a soft cap of the
 * model is not applied. Refuses a logit that is not finite, with its row and position.
 */
int cache_logits(const struct cache_view *v, struct text *out, struct err *e);

#endif
