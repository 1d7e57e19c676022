/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Routed experts. The device alone knows which expert has how many slots: one block counts and
 * sorts slots by expert, and the grids of the products are as large as any choice can need; a block
 * finds its expert in sums over the experts, and those behind the last tile end at once.
 *
 *	slots by expert -> gate and up of gathered rows of x, activation -> [slots, I]
 *	-> down, a panel of columns at a time, F32 [slots, panel] -> sums over slots, in slot order
 *
 * The order of slots within an expert is left to chance and changes nothing: a row's sums depend on
 * no other row, and slots are added up where their places are looked up.
 *
 * Panels keep the workspace small: of a GLM-5.2 layer (8 slots, 6144 -> 2048 -> 6144, bf16) 2,048
 * tokens fit at once with panels of 896 columns, where whole rows of down's output would need 4
 * times the memory. Tiles of one expert that share columns of the weight are neighbours in the
 * grid, so the weight comes from memory once.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include "gemm.cuh"

#define THREADS		256
#define SORT_THREADS	1024
#define PANEL		512	/* columns of down at least, where there are so many */

/* ---- slots by expert ------------------------------------------------------------------------- */

/* Where slots lie in the workspace. */
struct slots {
	int *start;	/* [experts + 1] first row of each; the last = how many rows */
	int *tile;	/* [experts + 1] first tile of rows of each */
	int *source;	/* [slots] of a row: its slot, token * k + s */
	int *place;	/* [slots] of a slot: its row, -1 = of no expert here */
};

/* Sums of fill[], and of tiles, in front of each expert; by one warp. */
__device__ static void scan(int *fill, int n, const struct slots &s)
{
	int lane = threadIdx.x, rows = 0, tiles = 0;

	for (int base = 0; base < n; base += WARP) {
		int have = base + lane < n ? fill[base + lane] : 0, r = have,
		    t = (have + TILE - 1) / TILE, need = t;

		for (int i = 1; i < WARP; i *= 2) {
			int r2 = __shfl_up_sync(ALL_LANES, r, i),
			    t2 = __shfl_up_sync(ALL_LANES, t, i);

			r += lane >= i ? r2 : 0;
			t += lane >= i ? t2 : 0;
		}
		if (base + lane < n) {
			fill[base + lane] = s.start[base + lane] = rows + r - have;
			s.tile[base + lane] = tiles + t - need;
		}
		rows += __shfl_sync(ALL_LANES, r, WARP - 1);
		tiles += __shfl_sync(ALL_LANES, t, WARP - 1);
	}
	if (!lane) {
		s.start[n] = rows;
		s.tile[n] = tiles;
	}
}

__global__ static void __launch_bounds__(SORT_THREADS)
	sort_slots(struct slots s, struct view ids, int64_t first, int count)
{
	CUDA_SHARED(shared);
	int *fill = (int *)shared, n = (int)(ids.rows * ids.cols);

	for (int i = threadIdx.x; i < count; i += SORT_THREADS)
		fill[i] = 0;
	__syncthreads();
	for (int i = threadIdx.x; i < n; i += SORT_THREADS) {
		int64_t e = view_id(ids, i / ids.cols, i % ids.cols) - first;

		if (e >= 0 && e < count)
			atomicAdd(&fill[e], 1);
	}
	__syncthreads();
	if (threadIdx.x < WARP)
		scan(fill, count, s);
	__syncthreads();
	for (int i = threadIdx.x; i < n; i += SORT_THREADS) {
		int64_t e = view_id(ids, i / ids.cols, i % ids.cols) - first;
		int at = e >= 0 && e < count ? atomicAdd(&fill[e], 1) : -1;

		s.place[i] = at;
		if (at >= 0)
			s.source[at] = i;
	}
}

/* ---- products -------------------------------------------------------------------------------- */

/* gate and up, or a panel of down. */
struct grouped_product {
	struct slots s;
	int count;			/* experts */
	int64_t tiles;			/* of columns */
	int64_t k;
	const char *x;			/* operands */
	int64_t x_ld;
	int per_row;			/* slots to a row of x; 0 = rows of x are sorted already */
	bool x_whole, w_whole;
	void *const *matrix;		/* [experts] */
	struct packed q;		/* of packed weights; scales of the first expert */
	int64_t q_step;			/* bytes of scales of an expert */
	int64_t first, n;		/* rows of the weight, or of its gate half */
	char *out;			/* operands [rows, n], or F32 */
	struct act act;
	struct view weights;		/* p NULL = none */
};

struct place {
	int expert, rows;		/* of the tile */
	int64_t row, col;		/* first ones */
};

/* Blocks: expert by expert, in it columns by columns, in those rows by rows. */
__device__ static inline bool find_place(struct place *p, const struct grouped_product &g,
					 int width)
{
	int64_t b = blockIdx.x;
	int low = 0, high = g.count, tiles, left;

	if (b >= g.s.tile[g.count] * g.tiles)
		return false;
	while (high - low > 1) {
		int middle = (low + high) / 2;

		if (g.s.tile[middle] * g.tiles <= b)
			low = middle;
		else
			high = middle;
	}
	b -= g.s.tile[low] * g.tiles;
	tiles = g.s.tile[low + 1] - g.s.tile[low];
	p->expert = low;
	p->row = g.s.start[low] + b % tiles * TILE;
	p->col = b / tiles * width;
	left = g.s.start[low + 1] - (int)p->row;
	p->rows = left < TILE ? left : TILE;
	return true;
}

template <typename T>
__device__ static inline void rows_of_x(struct side<T> *x, const struct grouped_product &g,
					const struct place &p)
{
	for (int i = 0; i < 2; i++) {
		int r = (int)threadIdx.x / 4 + TILE / 2 * i;
		int64_t row = p.row + r;

		if (r < p.rows && g.per_row)
			row = g.s.source[row] / g.per_row;
		x->row[i] = r < p.rows ? (const T *)g.x + row * g.x_ld : NULL;
	}
	x->k_step = 1;
	x->whole = g.x_whole;
}

/* Row i of a tile of the weight: which of the matrix, -1 = none. */
template <typename T, bool gated>
__device__ static inline int64_t weight_row(const struct grouped_product &g, const struct place &p,
					    int i)
{
	if (gated)
		return gated_row<T>(p.col, i, g.n);
	return p.col + i < g.n ? g.first + p.col + i : -1;
}

template <typename T, bool gated>
__device__ static inline struct side<T> rows_of_weight(const struct grouped_product &g,
						       const struct place &p, struct side<T> *)
{
	const T *matrix = (const T *)g.matrix[p.expert];
	struct side<T> w;

	for (int i = 0; i < 2; i++) {
		int64_t row = weight_row<T, gated>(g, p, (int)threadIdx.x / 4 + TILE / 2 * i);

		w.row[i] = row >= 0 ? matrix + row * g.k : NULL;
	}
	w.k_step = 1;
	w.whole = g.w_whole;
	return w;
}

template <typename T, bool gated>
__device__ static inline struct packed_side rows_of_weight(const struct grouped_product &g,
							   const struct place &p,
							   struct packed_side *)
{
	const unsigned char *matrix = (const unsigned char *)g.matrix[p.expert];
	int64_t row = weight_row<T, gated>(g, p, (int)threadIdx.x / 2);

	if (row < 0)
		return packed_side{ g.q, NULL, NULL };
	return packed_side{ g.q, matrix + row * g.q.row_bytes,
			    scale_row(g.q, g.q.scales + p.expert * g.q_step, row) };
}

/* Two sums of a thread, `apart` columns of each other; `left` from the first to the end. */
__device__ static inline void save_two(char *out, enum dtype d, int64_t at, int64_t left, float a,
				       float b, int apart)
{
	if (apart == 1 && left > 1 && at % 2 == 0) {
		if (d == DT_F32)
			*(float2 *)(out + at * 4) = make_float2(a, b);
		else
			*(uint32_t *)(out + at * 2) = pack_bf16(a, b);
		return;
	}
	if (left > 0)
		save_number(out, d, at, a);
	if (left > apart)
		save_number(out, d, at + apart, b);
}

/* The activation of a tile, times the slots' weights, rounded as operands. */
template <typename T>
__device__ static inline void save_gated(const float acc[64], const struct grouped_product &g,
					 const struct place &p)
{
	constexpr enum dtype type = sizeof(T) == 2 ? DT_BF16 : DT_F32;
	constexpr int apart = sizeof(T) == 2 ? 1 : 16;

#pragma unroll
	for (int r = 0; r < 8; r++) {
		int row = sum_row(r, T());
		int64_t at = p.row + row;
		float weight = 1;

		if (row >= p.rows)
			continue;
		if (g.weights.p) {
			int slot = g.s.source[at];

			weight = view_get(g.weights, slot / g.weights.cols, slot % g.weights.cols);
		}
#pragma unroll
		for (int c = 0; c < 4; c += 2) {
			int64_t col = p.col + gated_col<T>(sum_col(gate_of<T>(c), T()));
			float f[2];

#pragma unroll
			for (int i = 0; i < 2; i++)
				f[i] = act_number(g.act,
						  acc[sum_at(r, gate_of<T>(c + i), T())],
						  acc[sum_at(r, up_of<T>(c + i), T())]) *
				       weight;
			save_two(g.out, type, at * g.n + col, g.n - col, f[0], f[1], apart);
		}
	}
}

template <typename T>
__device__ static inline void save_sums(const float acc[64], const struct grouped_product &g,
					const struct place &p)
{
	constexpr int apart = sizeof(T) == 2 ? 1 : 16;

#pragma unroll
	for (int r = 0; r < 8; r++) {
		int row = sum_row(r, T());

		if (row >= p.rows)
			continue;
#pragma unroll
		for (int c = 0; c < 8; c += 2) {
			int64_t col = p.col + sum_col(c, T());

			save_two(g.out, DT_F32, (p.row + row) * g.n + col, g.n - col,
				    acc[sum_at(r, c, T())], acc[sum_at(r, c + 1, T())], apart);
		}
	}
}

/* W: struct side<T>, or packed_side. */
template <typename T, typename W, bool gated>
__global__ static void __launch_bounds__(TILE_THREADS, sizeof(T) == 2 ? 2 : 1)
	expert_product(const __grid_constant__ struct grouped_product g)
{
	CUDA_SHARED(shared);
	struct place p;
	struct side<T> x;
	float acc[64];

	if (!find_place(&p, g, gated ? TILE / 2 : TILE))
		return;
	rows_of_x<T>(&x, g, p);
	tile_product<T>(acc, shared, x, rows_of_weight<T, gated>(g, p, (W *)NULL), (int)g.k,
			p.rows);
	if (gated)
		save_gated<T>(acc, g, p);
	else
		save_sums<T>(acc, g, p);
}

/* ---- sums over slots ------------------------------------------------------------------------- */

/*
 * Columns of `sum` from y F32 [rows, sum.cols]. Each product and each sum is rounded by itself, as
 * the verb combine does.
 */
__global__ static void __launch_bounds__(THREADS)
	add_slots(struct view sum, const float *y, const int *place, int k, struct view weights,
		  bool add)
{
	for (int64_t t = blockIdx.y; t < sum.rows; t += gridDim.y)
		for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < sum.cols;
		     i += gridDim.x * (int64_t)THREADS) {
			float f = add ? view_get(sum, t, i) : 0;

			for (int s = 0; s < k; s++) {
				int row = place[t * k + s];

				if (row < 0)
					continue;
				f = __fadd_rn(f, __fmul_rn(y[row * sum.cols + i],
							   weights.p ? view_get(weights, t, s)
								     : 1));
			}
			view_set(sum, t, i, f);
		}
}

/* ---- the verb -------------------------------------------------------------------------------- */

/* A call, and how its workspace is divided for `rows` tokens at a time. */
struct call {
	const struct experts *ex;
	enum dtype operand;
	int64_t slots, I, rows, panel;
	bool rounds;
	struct slots s;
	char *x, *act;
	float *y;
};

static size_t round_up(int64_t bytes)
{
	return ((size_t)bytes + 255) & ~(size_t)255;
}

/* Bytes for n tokens and panels of `panel` columns; `place` sets where all of it lies. */
static size_t lay_out(struct call *c, char *at, int64_t n, int64_t panel, int64_t hidden)
{
	int64_t slots = n * c->slots, size = (int64_t)dtype_size(c->operand),
		table = (c->ex->count + 1) * (int64_t)sizeof(int);
	char *begin = at;

	c->s.start = (int *)at;
	at += round_up(table);
	c->s.tile = (int *)at;
	at += round_up(table);
	c->s.source = (int *)at;
	at += round_up(slots * (int64_t)sizeof(int));
	c->s.place = (int *)at;
	at += round_up(slots * (int64_t)sizeof(int));
	c->x = at;
	at += c->rounds ? round_up(n * hidden * size) : 0;
	c->act = at;
	at += round_up(slots * c->I * size);
	c->y = (float *)at;
	at += round_up(slots * panel * (int64_t)sizeof(float));
	return (size_t)(at - begin);
}

/* As many tokens as fit beside a panel, in equal tiles; then as wide a panel as fits. */
static bool plan_call(struct device *d, struct call *c, struct tensor x, int64_t cols)
{
	char *work = (char *)cuda_of(d)->work;
	int64_t least = cols < PANEL ? cols : PANEL, low = 0, high = x.rows, tiles;

	while (low < high) {
		int64_t middle = (low + high + 1) / 2;

		if (lay_out(c, work, middle, least, x.cols) <= CUDA_WORK)
			low = middle;
		else
			high = middle - 1;
	}
	if (!low) {
		err_fail(&d->err, "%lld slots of %lld numbers are too much for the workspace",
			 (long long)c->slots, (long long)c->I);
		return false;
	}
	tiles = (x.rows + low - 1) / low;
	c->rows = (x.rows + tiles - 1) / tiles;
	c->panel = cols;
	while (lay_out(c, work, c->rows, c->panel, x.cols) > CUDA_WORK)
		c->panel = (c->panel - 1) / TILE * TILE;
	return true;
}

static bool on_16(const void *p, int64_t ld, size_t size)
{
	return (uintptr_t)p % 16 == 0 && (size_t)ld * size % 16 == 0;
}

/* Any choice of `rows` slots needs at most so many tiles of rows. */
static int64_t most_tiles(int64_t rows, int64_t experts)
{
	return rows / TILE + (rows < experts ? rows : experts);
}

static void weight_of(struct grouped_product *g, const struct weight *w)
{
	const struct cuda_weight *h = cuda_weight_of(w);

	g->matrix = h->matrix_device;
	g->k = w->cols;
	if (w->quant) {
		g->q = packed_of(w);
		g->q_step = h->chunks * (int64_t)h->chunk;
	} else {
		/* matrices are allocated each for itself */
		g->w_whole = (size_t)w->cols * dtype_size(h->dtype) % 16 == 0;
	}
}

template <typename T, bool gated>
static void start(struct device *d, const struct grouped_product *g, bool packed, int64_t slots)
{
	dim3 grid((unsigned)(most_tiles(slots, g->count) * g->tiles));

	if (packed)
		cuda_launch(d, cuda_of(d)->compute, grid, TILE_THREADS, TILE_SHARED,
			    expert_product<T, struct packed_side, gated>, *g);
	else
		cuda_launch(d, cuda_of(d)->compute, grid, TILE_THREADS, TILE_SHARED,
			    expert_product<T, struct side<T>, gated>, *g);
}

static void gate_up(struct device *d, const struct call *c, struct tensor x, struct tensor weights)
{
	const struct weight *w = c->ex->gate_up;
	struct grouped_product g = {};

	g.s = c->s;
	g.count = (int)c->ex->count;
	g.tiles = (c->I + TILE / 2 - 1) / (TILE / 2);
	g.x = (const char *)x.p;
	g.x_ld = x.ld;
	g.x_whole = on_16(x.p, x.ld, dtype_size(c->operand));
	g.per_row = (int)c->slots;
	g.n = c->I;
	g.out = c->act;
	g.act = c->ex->act;
	if (!c->ex->weight_after_down)
		g.weights = view_of(weights);
	weight_of(&g, w);
	if (c->operand == DT_F32)
		start<float, true>(d, &g, w->quant, x.rows * c->slots);
	else
		start<uint16_t, true>(d, &g, w->quant, x.rows * c->slots);
}

/* sum: the panel's columns. */
static void down(struct device *d, const struct call *c, struct tensor sum, int64_t first,
		 struct tensor weights, bool add)
{
	const struct weight *w = c->ex->down;
	struct grouped_product g = {};
	dim3 grid(cuda_blocks(sum.cols, THREADS), sum.rows < 32768 ? (unsigned)sum.rows : 32768);

	g.s = c->s;
	g.count = (int)c->ex->count;
	g.tiles = (sum.cols + TILE - 1) / TILE;
	g.x = c->act;
	g.x_ld = c->I;
	g.x_whole = on_16(c->act, c->I, dtype_size(c->operand));
	g.first = first;
	g.n = sum.cols;
	g.out = (char *)c->y;
	weight_of(&g, w);
	if (c->operand == DT_F32)
		start<float, false>(d, &g, w->quant, sum.rows * c->slots);
	else
		start<uint16_t, false>(d, &g, w->quant, sum.rows * c->slots);
	if (!c->ex->weight_after_down)
		weights.p = NULL;
	cuda_launch(d, cuda_of(d)->compute, grid, THREADS, 0, add_slots, view_of(sum), c->y,
		    c->s.place, (int)c->slots, view_of(weights), add);
}

static void some_tokens(struct device *d, const struct call *c, struct tensor sum, struct tensor x,
			struct tensor ids, struct tensor weights, bool add)
{
	struct tensor rounded = { c->x, c->operand, x.rows, x.cols, x.cols };

	cuda_launch(d, cuda_of(d)->compute, 1, SORT_THREADS,
		    (size_t)c->ex->count * sizeof(int), sort_slots, c->s, view_of(ids),
		    c->ex->first, (int)c->ex->count);
	if (c->rounds)
		cuda_round_rows(d, c->x, c->operand, x);
	gate_up(d, c, c->rounds ? rounded : x, weights);
	for (int64_t i = 0; i < sum.cols; i += c->panel)
		down(d, c,
		     tensor_cols(sum, i, sum.cols - i < c->panel ? sum.cols - i : c->panel), i,
		     weights, add);
}

void cuda_experts(struct device *d, struct tensor sum, struct tensor x, struct tensor ids,
		  struct tensor weights, const struct experts *ex, bool add)
{
	struct call c = {};

	if (!cuda_good(d) || !x.rows)
		return;
	c.ex = ex;
	c.operand = cuda_operand(ex->gate_up, d->compute);
	c.slots = ids.cols;
	c.I = ex->down->cols;
	c.rounds = x.dtype != c.operand;
	if (!plan_call(d, &c, x, sum.cols))
		return;
	for (int64_t t = 0; t < x.rows; t += c.rows) {
		int64_t n = x.rows - t < c.rows ? x.rows - t : c.rows;

		some_tokens(d, &c, tensor_rows(sum, t, n), tensor_rows(x, t, n),
			    tensor_rows(ids, t, n), tensor_rows(weights, t, n), add);
	}
}
