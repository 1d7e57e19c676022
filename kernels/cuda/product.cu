/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products of two tensors, group by group: one strided batch. Groups whose numbers have to be
 * rounded go through the workspace, as many at a time as fit, one behind the other.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include "number.cuh"

#define THREADS 256

/* Groups of x side by side: each [rows, cols], `step` columns apart, packed group by group. */
template <typename T>
__global__ static void __launch_bounds__(THREADS)
	round_groups(T *out, struct view x, int64_t step, int64_t cols)
{
	constexpr enum dtype type = sizeof(T) == 2 ? DT_BF16 : DT_F32;
	int64_t g = blockIdx.y;

	out += g * x.rows * cols;
	for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < x.rows * cols;
	     i += gridDim.x * (int64_t)THREADS)
		save_number((char *)out, type, i, view_get(x, i / cols, g * step + i % cols));
}

static void round_to(struct device *d, void *out, struct tensor x, int64_t step, int64_t cols,
		     int groups)
{
	unsigned blocks = cuda_blocks(x.rows * cols, THREADS * 4);
	dim3 grid(blocks < 4096 ? blocks : 4096, (unsigned)groups);

	if (d->compute == DT_F32)
		cuda_launch(d, cuda_of(d)->compute, grid, THREADS, 0, round_groups<float>,
			    (float *)out, view_of(x), step, cols);
	else
		cuda_launch(d, cuda_of(d)->compute, grid, THREADS, 0, round_groups<uint16_t>,
			    (uint16_t *)out, view_of(x), step, cols);
}

/* One operand: where it lies, or where rounded numbers of `groups` groups will. */
struct side {
	struct tensor t;
	int64_t step, rows, cols;	/* of a group */
	bool rounds;
	char *room;
};

static size_t side_bytes(const struct side *s, enum dtype operand)
{
	return s->rounds ? ((size_t)(s->rows * s->cols) * dtype_size(operand) + 255) &
				   ~(size_t)255
			 : 0;
}

static void side_of(struct device *d, const struct side *s, int groups, const void **p,
		    int64_t *ld, int64_t *step)
{
	*p = s->rounds ? s->room : s->t.p;
	*ld = s->rounds ? s->cols : s->t.ld;
	*step = s->rounds ? s->rows * s->cols : s->step;
	if (s->rounds)
		round_to(d, s->room, s->t, s->step, s->cols, groups);
}

static void some_groups(struct device *d, struct tensor out, struct side *x, struct side *y,
			const struct grouped *g, int first, int n)
{
	struct side xs = *x, ys = *y;
	struct gemm p = {};

	xs.t = tensor_cols(x->t, first * g->x_step, (n - 1) * g->x_step + x->cols);
	ys.t = tensor_cols(y->t, first * g->y_step, (n - 1) * g->y_step + y->cols);
	ys.room = xs.room + (size_t)n * side_bytes(x, d->compute);
	p.m = out.rows;
	p.n = g->n;
	p.k = g->k;
	p.operand = d->compute;
	p.result = out.dtype;
	p.count = n;
	p.across = g->across;
	side_of(d, &xs, n, &p.x, &p.x_ld, &p.x_step);
	side_of(d, &ys, n, &p.w, &p.w_ld, &p.w_step);
	p.out = tensor_cols(out, first * g->out_step, g->n).p;
	p.out_ld = out.ld;
	p.out_step = g->out_step;
	blas_gemm(d, &p);
}

/* Rows of x at a time, and groups of them, for which there is room. */
void cuda_product(struct device *d, struct tensor out, struct tensor x, struct tensor y,
		  const struct grouped *g)
{
	struct side xs = { x, g->x_step, out.rows, g->k, x.dtype != d->compute,
			   (char *)cuda_of(d)->work },
		    ys = { y, g->y_step, g->across ? g->k : g->n, g->across ? g->n : g->k,
			   y.dtype != d->compute, NULL };
	size_t left, row = (size_t)g->k * dtype_size(d->compute);
	int64_t rows = out.rows, groups = g->groups;

	if (!cuda_good(d) || !out.rows || g->groups < 1)
		return;
	left = side_bytes(&ys, d->compute);
	if (left + row + 512 > CUDA_WORK) {
		err_fail(&d->err, "a group of %lld x %lld numbers is too large for the workspace",
			 (long long)g->n, (long long)g->k);
		return;
	}
	left = CUDA_WORK - left - 512;
	if (xs.rounds && (size_t)rows > left / row)
		rows = (int64_t)(left / row);
	for (int64_t t = 0; t < out.rows; t += rows) {
		int64_t n = out.rows - t < rows ? out.rows - t : rows;
		size_t each;

		xs.rows = n;
		xs.t = tensor_rows(x, t, n);
		each = side_bytes(&xs, d->compute) + side_bytes(&ys, d->compute);
		groups = each && (size_t)g->groups > CUDA_WORK / each
				 ? (int64_t)(CUDA_WORK / each)
				 : g->groups;
		for (int64_t i = 0; i < g->groups; i += groups)
			some_groups(d, tensor_rows(out, t, n), &xs, &ys, g, (int)i,
				    (int)(g->groups - i < groups ? g->groups - i : groups));
	}
}
