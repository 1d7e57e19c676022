/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products with weights. What cuBLASLt cannot take as it lies goes through the workspace, which is
 * divided in three: rows of x that have to be rounded, rows of a packed weight, sums in F32 that
 * something follows. The work then goes in tiles of rows of x and panels of rows of the weight.
 *
 * matmul_gate leaves both sums of a panel in F32 there and gates them by a kernel of its own: on
 * compute capability 9.0 and later a product of cuBLASLt is nearly twice as fast as one by mma.sync
 * with the gate inside, and the sums, 8 bytes an element of a product thousands of terms long, are
 * mostly read again from the second-level cache.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include "packed.cuh"

#define THREADS 256
#define ROWS_WORK	(CUDA_WORK / 16 * 5)
#define WEIGHT_WORK	(CUDA_WORK / 16 * 6)
#define ROWS_MOST	4096
#define SUMS_WORK	(CUDA_WORK / 16 * 5)
#define PANEL		128	/* of the weight at least */

/* ---- what stands around a product ------------------------------------------------------------ */

/* x as operands, packed. */
template <typename T>
__global__ static void __launch_bounds__(THREADS) round_rows(T *out, struct view x)
{
	constexpr enum dtype type = sizeof(T) == 2 ? DT_BF16 : DT_F32;

	for (int64_t t = blockIdx.y; t < x.rows; t += gridDim.y)
		for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < x.cols;
		     i += gridDim.x * (int64_t)THREADS)
			save_number((char *)out, type, t * x.cols + i, view_get(x, t, i));
}

void cuda_round_rows(struct device *d, void *out, enum dtype operand, struct tensor x)
{
	dim3 grid(cuda_blocks(x.cols, THREADS * 4), x.rows < 32768 ? (unsigned)x.rows : 32768);

	if (operand == DT_F32)
		cuda_launch(d, cuda_of(d)->compute, grid, THREADS, 0, round_rows<float>,
			    (float *)out, view_of(x));
	else
		cuda_launch(d, cuda_of(d)->compute, grid, THREADS, 0, round_rows<uint16_t>,
			    (uint16_t *)out, view_of(x));
}

/*
 * Rows [first, first + n) of a packed weight as operands. A thread makes 16 numbers of a row, so
 * that it reads 16 (or 8) bytes at once.
 */
template <typename T>
__global__ static void __launch_bounds__(THREADS)
	expand_rows(T *out, const unsigned char *codes, struct packed q, int64_t first, int64_t n,
		    int64_t cols)
{
	int64_t at = (blockIdx.x * (int64_t)THREADS + threadIdx.x) * 16;
	constexpr int each = 16 / (int)sizeof(T);

	for (int64_t r = blockIdx.y; r < n && at < cols; r += gridDim.y) {
		int64_t row = first + r;
		const unsigned char *p = codes + row * q.row_bytes,
				    *scales = scale_row(q, q.scales, row);
		T *to = out + r * cols + at;

		if (q.straight) {
			float f[16];
			uint32_t c[4];

			load_codes<16>(c, q, p, at);
			expand_codes<16>(f, c, scale_number(q, scales, at / q.block_cols), q.code);
			for (int i = 0; i < 16; i += each)
				*(uint4 *)(to + i) = pack_operands(f + i, T());
			continue;
		}
#pragma unroll 1
		for (int i = 0; i < 16 && at + i < cols; i++)
			save_number((char *)to, sizeof(T) == 2 ? DT_BF16 : DT_F32, i,
				    packed_number(q, p, scales, at + i));
	}
}

static void expand(struct device *d, void *out, const struct weight *w, int64_t first, int64_t n)
{
	dim3 grid(cuda_blocks(w->cols, THREADS * 16), n < 32768 ? (unsigned)n : 32768);
	const unsigned char *codes = (const unsigned char *)cuda_weight_of(w)->matrix[0];
	struct packed q = packed_of(w);

	if (cuda_weight_of(w)->dtype == DT_F32)
		cuda_launch(d, cuda_of(d)->compute, grid, THREADS, 0, expand_rows<float>,
			    (float *)out, codes, q, first, n, w->cols);
	else
		cuda_launch(d, cuda_of(d)->compute, grid, THREADS, 0, expand_rows<uint16_t>,
			    (uint16_t *)out, codes, q, first, n, w->cols);
}

/* out = sums (+ bias) (+ out); sums F32 of as many columns. */
__global__ static void __launch_bounds__(THREADS)
	finish_sums(struct view out, const float *sums, const float *bias, bool add)
{
	for (int64_t t = blockIdx.y; t < out.rows; t += gridDim.y)
		for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < out.cols;
		     i += gridDim.x * (int64_t)THREADS) {
			float f = sums[t * out.cols + i];

			f += bias ? bias[i] : 0;
			f += add ? view_get(out, t, i) : 0;
			view_set(out, t, i, f);
		}
}

/* out = act(gate sums, up sums), F32 of as many columns. */
__global__ static void __launch_bounds__(THREADS)
	gate_sums(struct view out, const float *gate, const float *up, struct act a)
{
	for (int64_t t = blockIdx.y; t < out.rows; t += gridDim.y)
		for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < out.cols;
		     i += gridDim.x * (int64_t)THREADS)
			view_set(out, t, i,
				 act_number(a, gate[t * out.cols + i], up[t * out.cols + i]));
}

static dim3 grid_of(struct tensor out)
{
	return dim3(cuda_blocks(out.cols, THREADS * 4),
		    out.rows < 32768 ? (unsigned)out.rows : 32768);
}

/* ---- tiles and panels ------------------------------------------------------------------------ */

/* How a product is cut, and where its parts lie in the workspace. */
struct plan {
	const struct weight *w;
	enum dtype operand;
	size_t size;			/* of an operand */
	bool rounds, expands, sums;	/* which parts it needs */
	int64_t rows, panel;		/* of x, of out */
	char *x, *weight;
	float *sum;
};

static int64_t least(int64_t a, int64_t b)
{
	return a < b ? a : b;
}

/* Rows of the weight in whole runs of PANEL, as many as fit. */
static int64_t panel_of(int64_t rows)
{
	return rows < PANEL ? rows : rows / PANEL * PANEL;
}

/* `halves` sums belong to a column of out, of which there are `cols`. */
static bool plan_product(struct device *d, struct plan *p, struct tensor x, int64_t cols,
			 const struct weight *w, bool sums, int halves)
{
	int64_t row;

	p->w = w;
	p->operand = cuda_weight_of(w)->dtype;
	p->size = dtype_size(p->operand);
	row = w->cols * (int64_t)p->size;
	p->rounds = x.dtype != p->operand;
	p->expands = w->quant;
	p->sums = sums;
	p->x = (char *)cuda_of(d)->work;
	p->weight = p->x + ROWS_WORK;
	p->sum = (float *)(p->weight + WEIGHT_WORK);
	p->rows = x.rows;
	p->panel = cols;
	if (p->rounds)
		p->rows = least(p->rows, (int64_t)ROWS_WORK / row);
	if (p->expands)
		p->panel = panel_of(least(p->panel, (int64_t)WEIGHT_WORK / row));
	if (sums) {
		/* more would leave panels too few columns to fill a device */
		p->rows = least(p->rows, ROWS_MOST);
		p->rows = least(p->rows, (int64_t)SUMS_WORK / (4 * PANEL * halves));
		if (p->rows)
			p->panel = panel_of(least(p->panel, (int64_t)SUMS_WORK /
								    (4 * halves * p->rows)));
	}
	if (p->rows > 0 && p->panel > 0)
		return true;
	err_fail(&d->err, "rows of %lld numbers are too long for the workspace",
		 (long long)w->cols);
	return false;
}

/* A product of rows of x, as operands, with `n` rows of the weight. */
static struct gemm gemm_of(const struct plan *p, struct tensor x, int64_t first, int64_t n,
			   const void *expanded)
{
	struct gemm g = {};

	g.m = x.rows;
	g.n = n;
	g.k = p->w->cols;
	g.operand = p->operand;
	g.x = x.p;
	g.x_ld = x.ld;
	g.w = p->expands ? expanded
			 : (const char *)cuda_weight_of(p->w)->matrix[0] +
				   (size_t)(first * g.k) * p->size;
	g.w_ld = g.k;
	g.count = 1;
	return g;
}

/* Rows of x as operands: where they are, or rounded. */
static struct tensor operands(struct device *d, const struct plan *p, struct tensor x)
{
	struct tensor r = { p->x, p->operand, x.rows, x.cols, x.cols };

	if (!p->rounds)
		return x;
	cuda_round_rows(d, p->x, p->operand, x);
	return r;
}

/* ---- matmul ---------------------------------------------------------------------------------- */

static void one_panel(struct device *d, const struct plan *p, struct tensor out, struct tensor x,
		      int64_t first, const float *bias, bool add)
{
	struct gemm g;

	if (p->expands)
		expand(d, p->weight, p->w, first, out.cols);
	g = gemm_of(p, x, first, out.cols, p->weight);
	g.out = p->sums ? p->sum : out.p;
	g.out_ld = p->sums ? out.cols : out.ld;
	g.result = p->sums ? DT_F32 : out.dtype;
	g.bias = p->sums || !bias ? NULL : bias + first;
	g.add = add && !p->sums;
	blas_gemm(d, &g);
	if (p->sums)
		cuda_launch(d, cuda_of(d)->compute, grid_of(out), THREADS, 0, finish_sums,
			    view_of(out), p->sum, bias ? bias + first : NULL, add);
}

void cuda_matmul(struct device *d, struct tensor out, struct tensor x, const struct weight *w,
		 const struct weight *bias, bool add)
{
	struct plan p;
	const float *b;

	if (!cuda_good(d) || !x.rows || !w->rows)
		return;
	b = bias ? cuda_vector(bias) : NULL;
	if (!plan_product(d, &p, x, w->rows, w,
			  !blas_takes(cuda_weight_of(w)->dtype, out.dtype, bias), 1))
		return;
	for (int64_t t = 0; t < x.rows; t += p.rows) {
		int64_t rows = least(p.rows, x.rows - t);
		struct tensor xt = operands(d, &p, tensor_rows(x, t, rows));

		for (int64_t n = 0; n < w->rows; n += p.panel)
			one_panel(d, &p,
				  tensor_cols(tensor_rows(out, t, rows), n,
					      least(p.panel, w->rows - n)),
				  xt, n, b, add);
	}
}

/* ---- matmul_gate ----------------------------------------------------------------------------- */

static void one_gated_panel(struct device *d, const struct plan *p, struct tensor out,
			    struct tensor x, int64_t first, const struct act *a)
{
	float *sum[2] = { p->sum, p->sum + x.rows * out.cols };

	for (int i = 0; i < 2; i++) {
		int64_t row = first + i * (p->w->rows / 2);
		struct gemm g;

		if (p->expands)
			expand(d, p->weight, p->w, row, out.cols);
		g = gemm_of(p, x, row, out.cols, p->weight);
		g.out = sum[i];
		g.out_ld = out.cols;
		g.result = DT_F32;
		blas_gemm(d, &g);
	}
	cuda_launch(d, cuda_of(d)->compute, grid_of(out), THREADS, 0, gate_sums, view_of(out),
		    sum[0], sum[1], *a);
}

void cuda_matmul_gate(struct device *d, struct tensor out, struct tensor x, const struct weight *w,
		      const struct act *a)
{
	int64_t half = w->rows / 2;
	struct plan p;

	if (!cuda_good(d) || !x.rows || !half || !plan_product(d, &p, x, half, w, true, 2))
		return;
	for (int64_t t = 0; t < x.rows; t += p.rows) {
		int64_t rows = least(p.rows, x.rows - t);
		struct tensor xt = operands(d, &p, tensor_rows(x, t, rows));

		for (int64_t n = 0; n < half; n += p.panel)
			one_gated_panel(d, &p,
					tensor_cols(tensor_rows(out, t, rows), n,
						    least(p.panel, half - n)),
					xt, n, a);
	}
}
