/* SPDX-License-Identifier: Apache-2.0 */
/* geometry: arithmetic on the shape of a cache. All products are bounded by geometry_check. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stddef.h>

#include "err.h"
#include "geometry.h"
#include "json.h"
#include "mem.h"

#define PAGE       4096
#define HEADER_MAX 100000000
#define SHARDS_MAX 1000000

const char *shard_tensor_name(enum shard_tensor t)
{
	static const char *const name[SHARD_TENSORS] = {
		"input_ids",
		"loss_mask",
		"target_hidden_states",
		"target_last_hidden_states",
	};

	return name[t];
}

static uint64_t round_up(uint64_t n, uint64_t to)
{
	return (n + to - 1) / to * to;
}

/* Bytes of a file whose data is a * b * c * d, or -1. */
static int64_t product(int64_t a, int64_t b, int64_t c, int64_t d)
{
	int64_t p = mem_mul(a, b);

	p = p < 0 ? p : mem_mul(p, c);
	return p < 0 ? p : mem_mul(p, d);
}

int geometry_check(const struct geometry *g, const char *what, struct err *e)
{
	int64_t per_token, most, n;

	if (g->rows < 0 || g->seq_length < 1 || g->shard_size < 1 || g->hidden < 1 || g->nids < 1 ||
	    g->vocab < 1)
		return err_refuse(e,
				  "%s: num_samples %lld, seq_length %lld, shard_size %lld, "
				  "hidden_size %lld, %d captured "
				  "layers, target_vocab_size %lld: each must be at least 1 "
				  "(num_samples 0)",
				  what, (long long)g->rows, (long long)g->seq_length,
				  (long long)g->shard_size, (long long)g->hidden, g->nids,
				  (long long)g->vocab);
	if (g->dtype != DT_F32 && g->dtype != DT_BF16 && g->dtype != DT_F16)
		return err_refuse(e, "%s: dtype must be fp32, bf16 or fp16", what);
	if (g->rows > 0 && (g->rows - 1) / g->shard_size >= SHARDS_MAX)
		return err_refuse(e,
				  "%s: %lld rows in shards of %lld are more than %d shards, "
				  "which names of six digits "
				  "cannot count: raise cache_shard_size",
				  what, (long long)g->rows, (long long)g->shard_size, SHARDS_MAX);
	n = g->shard_size < g->rows ? g->shard_size : g->rows;
	if (n > HEADER_MAX / 128 || geometry_header(g, n) > HEADER_MAX)
		return err_refuse(e,
				  "%s: the header of a shard of %lld rows would exceed 100 "
				  "MB: lower cache_shard_size",
				  what, (long long)n);
	per_token = product(g->hidden, g->nids + 1, 4, 1);
	most = per_token < 0 ? -1 : mem_add(per_token, 16);
	most = most < 0 ? -1 : product(most, g->seq_length, n ? n : 1, 2);
	if (most < 0 || product(g->vocab, g->hidden, 16, 2) < 0)
		return err_refuse(e, "%s: a file would exceed 2^63 bytes", what);
	return 0;
}

int geometry_read(struct geometry *g, const json_t *identity, const char *what, struct err *e)
{
	const json_t *m = json_object_get(identity, "manifest"),
		     *ids = json_object_get(m, "target_layer_ids");
	const char *dtype;

	*g = (struct geometry){ 0 };
	if (!json_is_object(m))
		return err_refuse(e, "%s: the manifest's fields are missing", what);
	if (json_int(m, what, "num_samples", &g->rows, e) ||
	    json_int(m, what, "seq_length", &g->seq_length, e) ||
	    json_int(m, what, "shard_size", &g->shard_size, e) ||
	    json_int(m, what, "hidden_size", &g->hidden, e) ||
	    json_int(m, what, "target_vocab_size", &g->vocab, e) ||
	    json_str(m, what, "dtype", &dtype, e) ||
	    json_int_or(identity, what, "pad_token_id", -1, &g->pad_token_id, e))
		return -1;
	if (!json_is_array(ids) || json_array_size(ids) > 100000)
		return err_refuse(e, "%s: target_layer_ids must be a list", what);
	g->nids = (int)json_array_size(ids);
	g->dtype = dtype_from_recipe(dtype);
	return geometry_check(g, what, e);
}

int64_t geometry_shards(const struct geometry *g)
{
	return g->rows ? (g->rows - 1) / g->shard_size + 1 : 0;
}

int64_t geometry_shard_rows(const struct geometry *g, int64_t shard)
{
	int64_t left = g->rows - shard * g->shard_size;

	return left < g->shard_size ? left : g->shard_size;
}

uint64_t geometry_token_bytes(const struct geometry *g, enum shard_tensor t)
{
	uint64_t state = (uint64_t)g->hidden * dtype_size(g->dtype);

	if (t == SHARD_IDS || t == SHARD_MASK)
		return sizeof(int64_t);
	return t == SHARD_STATES ? state * (uint64_t)g->nids : state;
}

void geometry_tensors(const struct geometry *g, int64_t n, uint64_t data,
		      struct st_tensor t[SHARD_TENSORS])
{
	int i;

	for (i = 0; i < SHARD_TENSORS; i++) {
		bool states = i == SHARD_STATES || i == SHARD_LAST;

		t[i] = (struct st_tensor){
			.name = (char *)shard_tensor_name(i),
			.dtype = states ? g->dtype : DT_I64,
			.ndim = states ? 3 : 2,
			.shape = { n, g->seq_length,
				   i == SHARD_STATES ? g->hidden * g->nids : g->hidden },
			.begin = data,
			.end = data +
			       (uint64_t)n * (uint64_t)g->seq_length * geometry_token_bytes(g, i),
		};
		data = t[i].end;
	}
}

static uint64_t digits(int64_t n)
{
	uint64_t d = 1;

	while (n >= 10) {
		n /= 10;
		d++;
	}
	return d;
}

/*
 * Room for the longest header: per row its length, a hash of each tensor and their separators; 1536
 * bytes hold the rest (names, four tensor entries with numbers of up to 20 digits, the identity).
 */
uint64_t geometry_header(const struct geometry *g, int64_t n)
{
	return round_up(1536 + (uint64_t)n * (digits(g->seq_length) + 1 + SHARD_TENSORS * 33),
			PAGE);
}

uint64_t geometry_shard_bytes(const struct geometry *g, int64_t n)
{
	struct st_tensor t[SHARD_TENSORS];

	geometry_tensors(g, n, geometry_header(g, n), t);
	return t[SHARD_LAST].end;
}

uint64_t geometry_target_weights(const struct geometry *g)
{
	return PAGE + 2 * (uint64_t)g->vocab * (uint64_t)g->hidden * dtype_size(g->dtype);
}

/*
 * x bytes anywhere touch less than x / block + 2 blocks; header, ids and mask are one whole run.
 * File systems count the blocks of a long extent map too: one for about 300 extents.
 */
uint64_t geometry_allocated(const struct geometry *g, int64_t n, int64_t tokens, uint64_t block,
			    bool sparse)
{
	uint64_t full = round_up(geometry_shard_bytes(g, n), block), b,
		 extents = 2 * (uint64_t)n + 1;
	int i;

	if (!sparse || !n)
		return full;
	b = round_up(geometry_header(g, n) + 16 * (uint64_t)n * (uint64_t)g->seq_length, block) /
	    block;
	for (i = SHARD_STATES; i <= SHARD_LAST; i++)
		b += geometry_token_bytes(g, i) * (uint64_t)tokens / block + 2 * (uint64_t)n;
	if (extents > 4)
		b += 1 + extents / 300;
	return b * block < full ? b * block : full;
}
