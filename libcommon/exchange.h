/* SPDX-License-Identifier: Apache-2.0 */
/*
 * exchange: expert parallelism. Tokens travel to the ranks that hold their experts, and the
 * experts' outputs come back, one row a slot, to be summed where the token lives, in slot order, as
 * a single rank sums them.
 *
 * It goes in rounds of tokens, as many as leave no rank with more than `rows` rows: the ranks tell
 * each other how many rows go where, and halve the round together until it fits. A rank without
 * tokens takes part with its experts.
 *
 * Where the device's memory is the host's, transports take it. Else they take the device's own
 * (device_buffers), or rows go by copies in host memory.
 */
#ifndef DSPARK_EXCHANGE_H
#define DSPARK_EXCHANGE_H

#include <stdint.h>

#include "model.h"

struct comm;
struct err;

enum exchange_way { EXCHANGE_HOST, EXCHANGE_DEVICE, EXCHANGE_STAGED };

struct exchange {
	enum exchange_way way;
	struct device *dev;
	struct comm *ep;		/* the ranks that hold all experts between them, in order */
	struct routing most;		/* largest sizes of any layer */
	int64_t rows;			/* that a rank sends, or receives, in a round, at most */

	/* device memory */
	void *index, *sent, *came, *ids, *weights, *out, *back, *place;
	void *sent_ids, *sent_weights;	/* of rows that are sent, where the device's memory goes */
	/* host memory */
	int32_t *host_ids, *host_place, *host_index;
	float *host_weights;
	void *stage_in, *stage_out;	/* of staged rows */
	struct exchange_slot *slot_sent, *slot_came;
	int64_t *matrix, *mine;		/* counts of all ranks, and as many copies of this rank's */
	int64_t *send, *receive;	/* [ranks] */
	int64_t round;			/* tokens of the next round */
	double seconds;			/* in collectives */
};

/*
 * Rows of a round: enough for tiles of every expert and for a chunk that is spread evenly, and
 * never too few for one token a rank. 0 where there is nothing to exchange.
 */
int64_t exchange_rows(int64_t chunk_tokens, int64_t experts, int64_t k, int ep);
/* Bytes of device and host memory. */
uint64_t exchange_bytes(const struct routing *most, int64_t rows, enum dtype compute);

int exchange_open(struct exchange *x, struct device *d, struct comm *ep, const struct routing *most,
		  int64_t rows, struct err *e);
void exchange_release(struct exchange *x);	/* legal on a zeroed one */

/*
 * Fills routed.sum of a chunk of a layer with r->experts experts, of which this rank holds
 * r->experts / ranks: routed.experts.first and count are set. Collective, also without tokens.
 */
int exchange_experts(struct exchange *x, struct chunk *c, const struct routing *r, struct err *e);

#endif
