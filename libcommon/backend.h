/* SPDX-License-Identifier: Apache-2.0 */
/*
 * backend: what a device can do, as verbs on tensors. Interface only; kernels/ holds the
 * implementations: ref/ defines what each verb means, cpu/ and cuda/ replace verbs by faster ones
 * that agree with it.
 *
 * Vocabulary: T tokens of a chunk, H hidden, N out features, K in features, D width of a head, E
 * experts, k slots per token.
 *
 * Verbs return nothing and may run later: the first failure is kept in device.err, makes every
 * later verb of the device a no-op as far as results go, and is reported by sync. Models call
 * nothing but verbs and never look into tensor memory. Arguments by pointer are read before a verb
 * returns. Memory of a verb's own that grows with T is an argument, taken from scratch. With no
 * tokens a verb does nothing, and its weights need not be in device memory.
 *
 * Number rules. Products multiply operands of the compute dtype and accumulate in F32. Everything
 * else computes in F32 whatever its operands are stored as and rounds once when it stores. Products
 * run in fixed tiles, so the result of a row of x does not depend on the other rows of the chunk,
 * on its place, or on the number of threads (DESIGN section 6).
 */
#ifndef DSPARK_BACKEND_H
#define DSPARK_BACKEND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dtype.h"
#include "err.h"

struct device;

/*
 * A view of device memory: [rows, cols], row-major, `ld` elements from one row to the next. Passed
 * by value; owns nothing.
 */
struct tensor {
	void *p;
	enum dtype dtype;
	int64_t rows, cols, ld;
};

static inline struct tensor tensor_cols(struct tensor t, int64_t first, int64_t cols)
{
	t.p = t.p ? (char *)t.p + (size_t)first * dtype_size(t.dtype) : NULL;
	t.cols = cols;
	return t;
}

static inline struct tensor tensor_rows(struct tensor t, int64_t first, int64_t rows)
{
	t.p = t.p ? (char *)t.p + (size_t)(first * t.ld) * dtype_size(t.dtype) : NULL;
	t.rows = rows;
	return t;
}

/* How a weight is used, which decides its layout in device memory. */
enum weight_use {
	USE_PRODUCT,	/* operand of matmul, or `down` of experts: packed by the backend */
	/* operand of matmul_gate, or `gate_up` of experts: rows of gate, then as many of up */
	USE_GATED,
	/* norm weights, biases, sinks, rope frequencies, small matrices: plain F32 */
	USE_VECTOR,
	USE_TABLE,	/* read by row id through `rows`: kept in the file's dtype */
	USE_RAW,	/* integers read by row id (hash routing): kept as they are */
};

/* In which dtype a weight takes part (DESIGN section 4). */
enum weight_unit { WEIGHT_BULK /* compute dtype */, WEIGHT_FP32, WEIGHT_RAW /* integers */ };

enum quant_code { CODE_F8_E4M3, CODE_MXFP4, CODE_INT4 };

/*
 * Packed storage: codes in blocks of block_rows x block_cols that share a scale (blocks are indexed
 * by global row and column).
 *
 *	CODE_F8_E4M3	a byte, F8_E4M3
 *	CODE_MXFP4	half a byte, U8 or I8 [rows, ceil(cols / 2)]: bit 3 the sign, bits 0..2
 *			one of 0, 0.5, 1, 1.5, 2, 3, 4, 6
 *	CODE_INT4	half a byte, I32 [rows, ceil(cols / 8)]: the integer code - 8
 *
 * Of two codes in a byte the one in the low half belongs to the even column. A row of codes begins
 * with an element of its tensor.
 */
struct quant {
	enum quant_code code;
	int block_rows, block_cols;	/* QUANT_ALL_COLS: the whole row */
	/*
	 * DT_F32, DT_BF16, DT_F16, DT_F8_E8M0 (value 2^(byte-127)), DT_U8 (the same bytes under
	 * another tag)
	 */
	enum dtype scale;
	/* replaces ".weight" in the name of the codes, NULL = the name itself */
	const char *codes_suffix;
	/* replaces ".weight" in the name of the scales: ".weight_scale_inv", ".scale" */
	const char *scale_suffix;
	bool zero_scale_is_zero;	/* scale byte 0 means 0, not 2^-127 */
};

#define QUANT_ALL_COLS (1 << 30)

/*
 * Different rows of scales among 64 rows of a weight: blocks begin anew with every part of it, of
 * which there are at most 4.
 */
#define QUANT_SCALE_ROWS(q) \
	((q)->block_rows > 1 && 64 / (q)->block_rows + 8 < 64 ? 64 / (q)->block_rows + 8 : 64)

/*
 * A table that is not in device memory. rows puts rows ids[0..n) of it to host memory `dst`, n x
 * cols elements as stored, packed; 0, or -1 with `e` set. The verb `rows` asks from the thread that
 * called it, as often as it likes, for ids that it has held against the table's rows.
 */
struct table_reader {
	int (*rows)(void *ctx, const int32_t *ids, int64_t n, void *dst, struct err *e);
	void *ctx;
};

/*
 * A weight as the model sees it: [count, rows, cols], out features first; a vector is [1, n, 1].
 * `count` > 1 are the experts held. The fields up to `quant` are set by binding, `handle` belongs
 * to the backend: NULL while the weight is not in device memory, and always where a USE_TABLE or
 * USE_RAW weight has a reader, which outlives its use.
 */
struct weight {
	int64_t count, rows, cols;
	enum weight_use use;
	enum weight_unit unit;
	enum dtype stored;		/* dtype in the checkpoint */
	const struct quant *quant;	/* packed storage, NULL = plain */
	const struct table_reader *reader;	/* NULL = `handle` holds it */
	void *handle;
};

/*
 * Where rows of the data set lie in a chunk. q tokens [begin, begin+count) of the chunk are
 * positions first.. of a row of `length` real tokens; the keys it may see are tokens [kv_begin,
 * kv_begin+kv_count) of the k and v tensors, positions 0... Whole rows have begin = kv_begin, count
 * = kv_count = length, first = 0.
 */
struct piece {
	int64_t begin, count, first, length;
	int64_t kv_begin, kv_count;
};

struct attention {
	int heads, kv_heads;		/* query head n uses kv head n / (heads / kv_heads) */
	int width, value_width;		/* per head: of q and k, of v and the output */
	float scale;			/* multiplies q.k */
	/* key j is visible to query i when j <= i and i - j < window; 0 = no window */
	int64_t window;
	/* [heads] F32 logits that only enter the denominator; NULL = none */
	const struct weight *sink;
};

enum rope_layout { ROPE_HALF /* pairs (j, j + width/2) */, ROPE_PAIR /* pairs (2j, 2j + 1) */ };

struct rope {
	int offset, width;		/* the rotated channels of each head */
	enum rope_layout layout;
	bool inverse;			/* negated angle */
	float scale;			/* multiplies cos and sin (YaRN attention factor) */
	const struct weight *freq;	/* [width/2] F32: angle = (float)position * freq[j] */
};

enum act_kind {
	ACT_SILU,		/* g * sigmoid(g) * u */
	ACT_SILU_CLAMP,		/* silu(min(g, limit)) * clamp(u, -limit, limit) */
	ACT_GELU_TANH,		/* gelu_tanh(g) * u */
	/* beta tanh(g/beta) sigmoid(g) * (linear tanh(u/linear), or u where linear = 0) */
	ACT_SITU,
};

struct act {
	enum act_kind kind;
	float limit, beta, linear;
};

enum router_score { SCORE_SOFTMAX, SCORE_SIGMOID, SCORE_SQRT_SOFTPLUS };

/*
 * Choice of k experts a token. s = score(logits) in F32; c = s + bias; with groups > 1 the experts
 * fall into equal runs, a group's score is the sum of its two best c, and the c of all but the
 * `groups_kept` best groups become `dropped` (0 or -inf). The k largest c are taken, ties to the
 * lowest id; weight = s (or c with weigh_choice) of each; `renormalise`: divided by (their sum +
 * 1e-20); times `scale`.
 */
struct router {
	int experts, k;
	enum router_score score;
	const struct weight *bias;	/* [E] F32 or NULL */
	int groups, groups_kept;
	float dropped;
	bool weigh_choice, renormalise;
	float scale;
};

/* The routed experts of a layer. gate_up is [E, 2I, Hin], gate rows first; down is [E, Hout, I]. */
struct experts {
	int64_t first, count;	/* experts held here: [first, first + count) of the layer's */
	const struct weight *gate_up, *down;
	struct act act;
	bool weight_after_down;	/* else the slot's weight multiplies the activation, before down */
};

/*
 * A product of two tensors, group by group. Group g sums over k columns of x and makes n columns of
 * out; `out_step`, `x_step` and `y_step` columns lie between the first ones of two groups.
 */
struct grouped {
	int groups;
	int64_t n, k;
	int64_t out_step, x_step, y_step;
	bool across; /* y is [k, *]: sums run down its rows, else y is [n, *] */
};

struct device_options {
	enum dtype compute;		/* DT_F32 or DT_BF16 */
	int threads;			/* 0 = OMP_NUM_THREADS, else cores / local ranks */
	int local_rank, local_size;
};

/*
 * Where a device's time went, in seconds since it was opened: the verbs, weights on their way to
 * it, states on their way from it. Beside each other, not one after the other.
 */
struct device_times {
	double compute, upload, download;
};

/*
 * What a device that has memory of its own takes of it at most for itself: the context of its
 * driver, the code of its kernels, workspaces and buffers on the way.
 */
#define DEVICE_OWN_BYTES ((uint64_t)1536 << 20)

struct backend {
	const char *name;		/* "ref", "cpu", "cuda" */

	/*
	 * Device memory is host memory: after sync, transports and the forward may read and write
	 * what alloc gave.
	 */
	bool host_memory;

	/* Fills d->be, compute, threads, state. The device is closed by close. */
	int (*open)(struct device *d, const struct device_options *o, struct err *e);
	void (*close)(struct device *d);

	/* Waits for everything and returns the kept failure, if any. */
	int (*sync)(struct device *d, struct err *e);

	/* Device memory, 64-byte aligned, uninitialised. NULL with `e` set. */
	void *(*alloc)(struct device *d, size_t bytes, struct err *e);
	void (*free)(struct device *d, void *p);

	/*
	 * Host [rows, cols] of out.dtype, packed, to the device; the source may be reused on
	 * return.
	 */
	void (*upload)(struct device *d, struct tensor out, const void *src);

	/*
	 * x to host memory as `to` (F32, BF16, F16, or x's own dtype), dst_ld elements a row;
	 * complete after sync.
	 */
	void (*store)(struct device *d, void *dst, enum dtype to, int64_t dst_ld, struct tensor x);

	/*
	 * Weights. alloc makes room for `w` as described; fill puts rows [row0, row0+n) of matrix
	 * `index`, in any order, each row once; calls for different rows may run on different
	 * threads; ready ends the filling. A matrix of which no row was filled takes no memory as
	 * far as the system allows, and may not be used; the missing rows of others are zero. free
	 * is legal on a weight without handle. `src` holds n rows as stored: n*cols host elements
	 * of dtype `from`, converted to what the weight needs, or their codes (quant_row_bytes a
	 * row) where w->quant is set. `scales` [n, ceil(cols / block_cols)] of quant->scale are
	 * NULL for plain weights, else one row for each weight row: block rows are repeated by the
	 * caller, and 64 rows from a multiple of 64 on have at most QUANT_SCALE_ROWS different
	 * ones.
	 */
	int (*weight_alloc)(struct device *d, struct weight *w, struct err *e);
	int (*weight_fill)(struct device *d, struct weight *w, int64_t index, int64_t row0,
			   int64_t n, const void *src, enum dtype from, const void *scales,
			   struct err *e);
	int (*weight_ready)(struct device *d, struct weight *w, struct err *e);
	void (*weight_free)(struct device *d, struct weight *w);

	/*
	 * out[T, n*cols]: rows ids[t,0] .. ids[t,n-1] of the table side by side; ids i32 [T,n].
	 * Numbers are rounded to the compute dtype when the table is BULK; integers become out's
	 * integer dtype. A table with a reader gives the same bits.
	 */
	void (*rows)(struct device *d, struct tensor out, const struct weight *table,
		     struct tensor ids);

	/*
	 * out[T,N] = x[T,K] w^T (+ bias[N] F32), or out += with `add`. x is rounded to the operand
	 * dtype (compute dtype; F32 for FP32 weights) first.
	 */
	void (*matmul)(struct device *d, struct tensor out, struct tensor x, const struct weight *w,
		       const struct weight *bias, bool add);

	/*
	 * out[T,I] = act(x[T,K] w[0..I)^T, x w[I..2I)^T), w [2I,K] of USE_GATED. Both products stay
	 * in F32; x is rounded as in matmul.
	 */
	void (*matmul_gate)(struct device *d, struct tensor out, struct tensor x,
			    const struct weight *w, const struct act *a);

	/*
	 * out = x / sqrt(mean(x^2) + eps) * w over each run of `width` columns (cols / width runs,
	 * one weight [width] for all; w NULL = no weight). out may be x.
	 */
	void (*norm)(struct device *d, struct tensor out, struct tensor x, const struct weight *w,
		     float eps, int64_t width);

	/*
	 * out = (x - mean) / sqrt(mean((x - mean)^2) + eps) * w + bias over each run of `width`
	 * columns; one w and bias [width] for all. out may be x.
	 */
	void (*layer_norm)(struct device *d, struct tensor out, struct tensor x,
			   const struct weight *w, const struct weight *bias, float eps,
			   int64_t width);

	/*
	 * Rotates x [T, heads*width of a head] in place, each head after a norm by `norm` [width of
	 * a head] and eps where it is not NULL; pos i32 [T,1].
	 */
	void (*rope)(struct device *d, struct tensor x, int heads, const struct weight *norm,
		     float eps, const struct rope *r, struct tensor pos);

	/*
	 * out[T, heads*value_width] from q[T, heads*width], k[*, kv_heads*width], v[*,
	 * kv_heads*value_width]. Never materialises [S,S]; key blocks count from position 0 of the
	 * row. A query without visible key gives 0. `pieces` is host memory.
	 */
	void (*attention)(struct device *d, struct tensor out, struct tensor q, struct tensor k,
			  struct tensor v, const struct attention *a, const struct piece *pieces,
			  int n);

	/*
	 * Of rows of data too long for every query to see all keys: which it sees. keys i32 [T,K]:
	 * the positions, ascending, of the K keys with the largest scores among those at positions
	 * up to the query's own; equal scores go to the lower position, NaN is the smallest. -1
	 * stands behind the last where there are fewer than K.
	 *
	 * score(t, j) = sum over heads h of w[t,h] * max(q[t,h] . k[j], 0), w F32 [T,heads], q [T,
	 * heads*width], k [*, width], kept in F32. Memory grows with T and K, never with T times
	 * the keys. `pieces` is host memory.
	 */
	void (*choose)(struct device *d, struct tensor keys, struct tensor q, struct tensor k,
		       struct tensor w, const struct piece *pieces, int n);

	/*
	 * attention where query t sees the keys at kv_begin + keys[t,j], j = 0, 1, .. up to the
	 * first negative one, and nothing else: keys i32 [T,K], ascending in every row; a->window
	 * is not looked at. Work and memory follow K. v may be columns of k.
	 */
	void (*attention_at)(struct device *d, struct tensor out, struct tensor q, struct tensor k,
			     struct tensor v, struct tensor keys, const struct attention *a,
			     const struct piece *pieces, int n);

	/*
	 * out[t, g*out_step + i] = sum over j of x[t, g*x_step + j] * y[i, g*y_step + j], or *
	 * y[j, g*y_step + i] across. Operands of both are rounded as in matmul.
	 */
	void (*product)(struct device *d, struct tensor out, struct tensor x, struct tensor y,
			const struct grouped *g);

	/*
	 * out[t, i*out_step + c] = x[t, i*x_step + c] for i < n and c < width, rounded to the dtype
	 * of out; x_step 0 repeats. Other columns of out stay. out and x do not overlap.
	 */
	void (*copy)(struct device *d, struct tensor out, int64_t out_step, struct tensor x,
		     int64_t x_step, int64_t width, int n);

	/* out[T,I] = act(x[:, 0..I), x[:, I..2I)). */
	void (*gate)(struct device *d, struct tensor out, struct tensor x, const struct act *a);

	/* x += y. */
	void (*add)(struct device *d, struct tensor x, struct tensor y);

	/*
	 * ids i32 [T,k] in ascending order of expert id, weights F32 [T,k], from logits F32 [T,E].
	 */
	void (*route)(struct device *d, struct tensor ids, struct tensor weights,
		      struct tensor logits, const struct router *r);

	/*
	 * sum F32 [T,Hout] = (or += with `add`) over the slots whose expert is held here, in slot
	 * order, of the weighted expert outputs on x[T,Hin]. Slots of other experts add nothing.
	 * The output of down is kept in F32.
	 */
	void (*experts)(struct device *d, struct tensor sum, struct tensor x, struct tensor ids,
			struct tensor weights, const struct experts *ex, bool add);

	/* out[i,:] = x[index[i],:], of any one dtype; index i32 [out.rows, 1]. */
	void (*pick)(struct device *d, struct tensor out, struct tensor x, struct tensor index);

	/*
	 * sum F32 [T,N] = (or += with `add`) over s, in slot order, of y[index[t,s],:] F32, times
	 * weights[t,s] F32 where weights.p is not NULL; index i32 [T,k], negative = nothing.
	 *
	 * Tokens whose slots went to several ranks get the bytes of one call of experts: there each
	 * slot is a row of its own, experts with k = 1 and the slot's weight makes y, and this adds
	 * without weights; with weight_after_down the weights are ones there and enter here. (Where
	 * `add` adds to negative zeros, their sign may differ.)
	 */
	void (*combine)(struct device *d, struct tensor sum, struct tensor y, struct tensor index,
			struct tensor weights, bool add);

	/* ---- of devices that have memory of their own; NULL where it is host memory ---- */

	/*
	 * Copies between host memory and what alloc gave, either way; done when it returns. From
	 * any thread, as are then alloc and free. weight_fill's `src` may be such memory, too.
	 */
	int (*move)(struct device *d, void *to, const void *from, size_t bytes, struct err *e);

	/*
	 * Lets the device copy to and from host memory that was allocated apart (mem_aligned of
	 * whole pages) without a stop on the way: stores to it then run beside the verbs. unpin
	 * comes before the memory goes. Memory that is not pinned works all the same.
	 */
	int (*pin)(struct device *d, void *p, size_t bytes, struct err *e);
	void (*unpin)(struct device *d, void *p);

	/* Bytes of device memory that are free now, and all there are. */
	int (*room)(struct device *d, uint64_t *free, uint64_t *all, struct err *e);

	/* After sync: what was counted up to it. */
	void (*times)(struct device *d, struct device_times *t);
};

struct device {
	const struct backend *be;
	enum dtype compute;
	int threads;
	void *state;
	struct err err;			/* the first failure of a verb */
};

/*
 * Bytes that `w` takes in device memory under a compute dtype, packing included: an upper bound
 * that every backend keeps.
 */
uint64_t weight_bytes(const struct weight *w, enum dtype compute);

/*
 * The device whose verbs do nothing, for measuring what a model's own code takes from scratch. A
 * new verb is added here too.
 */
extern const struct backend backend_measure;

#endif
