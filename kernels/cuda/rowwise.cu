/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Verbs whose rows, or runs of a row, have nothing to do with each other: norms, rotary positions,
 * gates, sums, copies, rows of tables. They move memory: neighbouring threads take neighbouring
 * numbers, vectors of them where the operands lie on 16-byte boundaries.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdlib.h>
#include <string.h>

#include "number.cuh"

extern "C" {
#include "mem.h"
#include "ref/ref.h"
}

#define THREADS	 256
#define BLOCKS	 65535u	/* most along a grid's second axis; kernels go round */
#define PER_VEC	 4	/* numbers that a thread takes at once */

static dim3 grid_of(int64_t across, int64_t rows)
{
	return dim3(cuda_blocks(across, 1), rows < BLOCKS ? (unsigned)rows : BLOCKS);
}

static unsigned runs_grid(int64_t runs)
{
	return runs < 0x7fffffff ? (unsigned)runs : 0x7fffffffu;
}

/* ---- four numbers at once -------------------------------------------------------------------- */

/* Whether every row begins where four numbers can be read at once, and has whole fours. */
static bool in_fours(struct tensor t)
{
	size_t size = dtype_size(t.dtype);

	return (uintptr_t)t.p % (PER_VEC * size) == 0 && t.ld % PER_VEC == 0 &&
	       t.cols % PER_VEC == 0;
}

__device__ static inline void load_four(float v[PER_VEC], const struct view &x, int64_t row,
					int64_t col)
{
	int64_t at = row * x.ld + col;

	if (x.dtype == DT_F32) {
		float4 f = *(const float4 *)((const float *)x.p + at);

		v[0] = f.x;
		v[1] = f.y;
		v[2] = f.z;
		v[3] = f.w;
	} else {
		uint2 h = *(const uint2 *)((const uint16_t *)x.p + at);
		uint16_t part[PER_VEC] = { (uint16_t)h.x, (uint16_t)(h.x >> 16), (uint16_t)h.y,
					   (uint16_t)(h.y >> 16) };

		for (int i = 0; i < PER_VEC; i++)
			v[i] = x.dtype == DT_BF16 ? bf16_to_float(part[i]) : f16_to_float(part[i]);
	}
}

__device__ static inline void save_four(const struct view &x, int64_t row, int64_t col,
					const float v[PER_VEC])
{
	int64_t at = row * x.ld + col;

	if (x.dtype == DT_F32) {
		*(float4 *)((float *)x.p + at) = make_float4(v[0], v[1], v[2], v[3]);
	} else {
		uint32_t part[PER_VEC];

		for (int i = 0; i < PER_VEC; i++)
			part[i] = x.dtype == DT_BF16 ? float_to_bf16(v[i]) : float_to_f16(v[i]);
		*(uint2 *)((uint16_t *)x.p + at) =
			make_uint2(part[0] | part[1] << 16, part[2] | part[3] << 16);
	}
}

/* N numbers, 1 or PER_VEC. */
template <int N>
__device__ static inline void load_some(float v[PER_VEC], const struct view &x, int64_t row,
					int64_t col)
{
	if (N == 1)
		v[0] = view_get(x, row, col);
	else
		load_four(v, x, row, col);
}

template <int N>
__device__ static inline void save_some(const struct view &x, int64_t row, int64_t col,
					const float v[PER_VEC])
{
	if (N == 1)
		view_set(x, row, col, v[0]);
	else
		save_four(x, row, col, v);
}

/* N of a vector that lies on its own boundary. */
template <int N> __device__ static inline void load_vector(float v[PER_VEC], const float *p, int64_t c)
{
	if (N == 1) {
		v[0] = p[c];
	} else {
		float4 f = *(const float4 *)(p + c);

		v[0] = f.x;
		v[1] = f.y;
		v[2] = f.z;
		v[3] = f.w;
	}
}

/* ---- norms ----------------------------------------------------------------------------------- */

/* A run has a warp to itself where it is short, else a block. */
#define SHORT_RUN 512

/* The sum over the threads that share a run. */
template <bool whole_block> __device__ static inline float run_sum(float f, float *room)
{
	return whole_block ? block_sum(f, room) : warp_sum(f);
}

struct norm_job {
	struct view out, x;
	const float *w, *bias;	/* either may be NULL */
	float eps;
	int64_t width, runs;	/* of a row */
	bool centred;		/* the mean goes first */
};

template <int N, bool whole_block>
__global__ static void __launch_bounds__(THREADS) norm_runs(struct norm_job j)
{
	__shared__ float room[THREADS / WARP];
	int team = whole_block ? THREADS : WARP, me = (int)threadIdx.x % team;
	int64_t first = blockIdx.x * (int64_t)(THREADS / team) + threadIdx.x / team,
		step = gridDim.x * (int64_t)(THREADS / team), all = j.x.rows * j.runs;

	for (int64_t run = first; run < all; run += step) {
		int64_t row = run / j.runs, c0 = run % j.runs * j.width;
		float v[PER_VEC], w[PER_VEC] = { 1, 1, 1, 1 }, bias[PER_VEC] = { 0, 0, 0, 0 };
		float sum = 0, mean = 0, r;

		for (int64_t c = me * N; j.centred && c < j.width; c += team * N) {
			load_some<N>(v, j.x, row, c0 + c);
			for (int i = 0; i < N; i++)
				sum += v[i];
		}
		if (j.centred)
			mean = run_sum<whole_block>(sum, room) / (float)j.width;
		sum = 0;
		for (int64_t c = me * N; c < j.width; c += team * N) {
			load_some<N>(v, j.x, row, c0 + c);
			for (int i = 0; i < N; i++)
				sum += (v[i] - mean) * (v[i] - mean);
		}
		r = 1.0f / sqrtf(run_sum<whole_block>(sum, room) / (float)j.width + j.eps);
		for (int64_t c = me * N; c < j.width; c += team * N) {
			load_some<N>(v, j.x, row, c0 + c);
			if (j.w)
				load_vector<N>(w, j.w, c);
			if (j.bias)
				load_vector<N>(bias, j.bias, c);
			for (int i = 0; i < N; i++)
				v[i] = (v[i] - mean) * r * w[i] + bias[i];
			save_some<N>(j.out, row, c0 + c, v);
		}
	}
}

static void norm(struct device *d, const struct norm_job *j, bool fours)
{
	int64_t runs = j->x.rows * j->runs;
	cudaStream_t s = cuda_of(d)->compute;

	if (j->width > SHORT_RUN)
		cuda_launch(d, s, runs_grid(runs), THREADS, 0,
			    fours ? norm_runs<PER_VEC, true> : norm_runs<1, true>, *j);
	else
		cuda_launch(d, s, runs_grid((runs + THREADS / WARP - 1) / (THREADS / WARP)),
			    THREADS, 0, fours ? norm_runs<PER_VEC, false> : norm_runs<1, false>,
			    *j);
}

void cuda_norm(struct device *d, struct tensor out, struct tensor x, const struct weight *w,
	       float eps, int64_t width)
{
	struct norm_job j = {};

	if (!cuda_good(d) || !x.rows || width < 1 || x.cols < width)
		return;
	j.out = view_of(out);
	j.x = view_of(x);
	j.w = w ? cuda_vector(w) : NULL;
	j.eps = eps;
	j.width = width;
	j.runs = x.cols / width;
	norm(d, &j, in_fours(out) && in_fours(x) && width % PER_VEC == 0);
}

void cuda_layer_norm(struct device *d, struct tensor out, struct tensor x, const struct weight *w,
		     const struct weight *bias, float eps, int64_t width)
{
	struct norm_job j = {};

	if (!cuda_good(d) || !x.rows || width < 1 || x.cols < width)
		return;
	j.out = view_of(out);
	j.x = view_of(x);
	j.w = cuda_vector(w);
	j.bias = cuda_vector(bias);
	j.eps = eps;
	j.width = width;
	j.runs = x.cols / width;
	j.centred = true;
	norm(d, &j, in_fours(out) && in_fours(x) && width % PER_VEC == 0);
}

/* ---- rotary positions ------------------------------------------------------------------------ */

#define WARPS	  (THREADS / WARP)
#define ROPE_EACH 4	/* heads that a warp takes, where there are as many */

struct rope_job {
	struct view x, pos;
	const float *norm, *freq;
	float eps, scale;
	int64_t heads, head;	/* their number, and channels of one */
	int offset, half;
	bool pairs, inverse;
};

__device__ static inline float rope_get(const struct rope_job &j, int64_t row, int64_t at,
					int64_t c, float r)
{
	float f = view_get(j.x, row, at + c);

	return j.norm ? f * r * j.norm[c] : f;
}

/*
 * A head by a warp. Channels that turn are written by the lane that has both of a pair; the others
 * by whoever comes to them, and only where a norm changes them.
 */
__device__ static void rope_head(const struct rope_job &j, int64_t row, int64_t at,
				 const float *sine, const float *cosine, int lane)
{
	float sum = 0, r = 1;

	for (int64_t c = lane; j.norm && c < j.head; c += WARP) {
		float f = view_get(j.x, row, at + c);

		sum += f * f;
	}
	if (j.norm)
		r = 1.0f / sqrtf(warp_sum(sum) / (float)j.head + j.eps);
	for (int p = lane; p < j.half; p += WARP) {
		int64_t a = j.offset + (j.pairs ? 2 * p : p), b = a + (j.pairs ? 1 : j.half);
		float x = rope_get(j, row, at, a, r), y = rope_get(j, row, at, b, r);

		view_set(j.x, row, at + a, x * cosine[p] - y * sine[p]);
		view_set(j.x, row, at + b, y * cosine[p] + x * sine[p]);
	}
	for (int64_t c = lane; j.norm && c < j.head; c += WARP)
		if (c < j.offset || c >= j.offset + 2 * j.half)
			view_set(j.x, row, at + c, rope_get(j, row, at, c, r));
}

/* A block's warps share the angles of a token, and its heads with the other blocks of a column. */
__global__ static void __launch_bounds__(THREADS) rope_tokens(struct rope_job j)
{
	CUDA_SHARED(shared);
	float *sine = (float *)shared, *cosine = sine + j.half;

	for (int64_t row = blockIdx.x; row < j.x.rows; row += gridDim.x) {
		float position = (float)view_id(j.pos, row, 0);

		__syncthreads();	/* the token before may still be on its way */
		for (int p = (int)threadIdx.x; p < j.half; p += THREADS) {
			sincosf(__fmul_rn(position, j.freq[p]), &sine[p], &cosine[p]);
			sine[p] *= j.inverse ? -j.scale : j.scale;
			cosine[p] *= j.scale;
		}
		__syncthreads();
		for (int64_t h = blockIdx.y * (int64_t)WARPS + threadIdx.x / WARP; h < j.heads;
		     h += gridDim.y * (int64_t)WARPS)
			rope_head(j, row, h * j.head, sine, cosine, (int)threadIdx.x % WARP);
	}
}

void cuda_rope(struct device *d, struct tensor x, int heads, const struct weight *norm, float eps,
	       const struct rope *r, struct tensor pos)
{
	struct rope_job j = {};
	unsigned columns;

	if (!cuda_good(d) || !x.rows || heads < 1)
		return;
	j.x = view_of(x);
	j.pos = view_of(pos);
	j.norm = norm ? cuda_vector(norm) : NULL;
	j.freq = cuda_vector(r->freq);
	j.eps = eps;
	j.scale = r->scale;
	j.heads = heads;
	j.head = x.cols / heads;
	j.offset = r->offset;
	j.half = r->width / 2;
	j.pairs = r->layout == ROPE_PAIR;
	j.inverse = r->inverse;
	columns = cuda_blocks(heads, WARPS * ROPE_EACH);
	cuda_launch(d, cuda_of(d)->compute,
		    dim3(runs_grid(x.rows), columns < BLOCKS ? columns : BLOCKS), THREADS,
		    2 * (size_t)j.half * sizeof(float), rope_tokens, j);
}

/* ---- gates, sums, copies --------------------------------------------------------------------- */

template <int N>
__global__ static void __launch_bounds__(THREADS, 4)
	gate_rows(struct view out, struct view x, struct act a)
{
	int64_t half = x.cols / 2;

	for (int64_t t = blockIdx.y; t < x.rows; t += gridDim.y)
		for (int64_t c = (blockIdx.x * (int64_t)THREADS + threadIdx.x) * N; c < half;
		     c += gridDim.x * (int64_t)THREADS * N) {
			float g[PER_VEC], u[PER_VEC];

			load_some<N>(g, x, t, c);
			load_some<N>(u, x, t, half + c);
			for (int i = 0; i < N; i++)
				g[i] = act_number(a, g[i], u[i]);
			save_some<N>(out, t, c, g);
		}
}

void cuda_gate(struct device *d, struct tensor out, struct tensor x, const struct act *a)
{
	int64_t half = x.cols / 2;
	bool fours = in_fours(x) && in_fours(out) && half % PER_VEC == 0;
	dim3 grid = grid_of((half + THREADS * PER_VEC - 1) / (THREADS * PER_VEC), x.rows);

	if (cuda_good(d) && half)
		cuda_launch(d, cuda_of(d)->compute, grid, THREADS, 0,
			    fours ? gate_rows<PER_VEC> : gate_rows<1>, view_of(out), view_of(x),
			    *a);
}

template <int N>
__global__ static void __launch_bounds__(THREADS) add_rows(struct view x, struct view y)
{
	for (int64_t t = blockIdx.y; t < x.rows; t += gridDim.y)
		for (int64_t c = (blockIdx.x * (int64_t)THREADS + threadIdx.x) * N; c < x.cols;
		     c += gridDim.x * (int64_t)THREADS * N) {
			float a[PER_VEC], b[PER_VEC];

			load_some<N>(a, x, t, c);
			load_some<N>(b, y, t, c);
			for (int i = 0; i < N; i++)
				a[i] += b[i];
			save_some<N>(x, t, c, a);
		}
}

void cuda_add(struct device *d, struct tensor x, struct tensor y)
{
	dim3 grid = grid_of((x.cols + THREADS * PER_VEC - 1) / (THREADS * PER_VEC), x.rows);

	if (cuda_good(d) && x.cols)
		cuda_launch(d, cuda_of(d)->compute, grid, THREADS, 0,
			    in_fours(x) && in_fours(y) ? add_rows<PER_VEC> : add_rows<1>,
			    view_of(x), view_of(y));
}

/* Runs of a row: n of them, `width` wide. */
struct copy_job {
	struct view out, x;
	int64_t out_step, x_step;
	uint32_t width, all;	/* of a run, of all runs of a row */
};

__global__ static void __launch_bounds__(THREADS) copy_runs(struct copy_job j)
{
	for (int64_t t = blockIdx.y; t < j.out.rows; t += gridDim.y)
		for (uint32_t c = blockIdx.x * THREADS + threadIdx.x; c < j.all;
		     c += gridDim.x * THREADS) {
			uint32_t run = c / j.width, i = c % j.width;

			view_set(j.out, t, run * j.out_step + i,
				 view_get(j.x, t, run * j.x_step + i));
		}
}

/* The same where nothing is converted; all sizes count words of T. */
template <typename T>
__global__ static void __launch_bounds__(THREADS) copy_words(struct copy_job j)
{
	for (int64_t t = blockIdx.y; t < j.out.rows; t += gridDim.y)
		for (uint32_t c = blockIdx.x * THREADS + threadIdx.x; c < j.all;
		     c += gridDim.x * THREADS) {
			uint32_t run = c / j.width, i = c % j.width;

			((T *)j.out.p)[t * j.out.ld + run * j.out_step + i] =
				((const T *)j.x.p)[t * j.x.ld + run * j.x_step + i];
		}
}

/* The largest word in which all of the job's sizes and places are whole. */
static int64_t word_of(const struct copy_job *j, int64_t size)
{
	uintptr_t odd = (uintptr_t)j->out.p | (uintptr_t)j->x.p |
			(uintptr_t)((j->out.ld | j->x.ld | j->out_step | j->x_step | j->width) *
				    size);
	int64_t word = 16;

	while (odd % (uintptr_t)word)
		word /= 2;
	return word;
}

static void count_words(struct copy_job *j, int64_t size, int64_t word)
{
	j->out.ld = j->out.ld * size / word;
	j->x.ld = j->x.ld * size / word;
	j->out_step = j->out_step * size / word;
	j->x_step = j->x_step * size / word;
	j->width = (uint32_t)(j->width * size / word);
	j->all = (uint32_t)(j->all * size / word);
}

void cuda_copy(struct device *d, struct tensor out, int64_t out_step, struct tensor x,
	       int64_t x_step, int64_t width, int n)
{
	void (*kernel)(struct copy_job) = copy_runs;
	int64_t size = (int64_t)dtype_size(x.dtype), word;
	struct copy_job j = {};

	if (!cuda_good(d) || n < 1 || width < 1)
		return;
	if (n * width > INT32_MAX / 16) {
		err_refuse(&d->err, "%lld columns are too many to copy", (long long)(n * width));
		return;
	}
	j.out = view_of(out);
	j.x = view_of(x);
	j.out_step = out_step;
	j.x_step = x_step;
	j.width = (uint32_t)width;
	j.all = (uint32_t)(n * width);
	if (out.dtype == x.dtype) {
		word = word_of(&j, size);
		count_words(&j, size, word);
		kernel = word == 16  ? copy_words<uint4>
			 : word == 8 ? copy_words<uint2>
			 : word == 4 ? copy_words<uint32_t>
			 : word == 2 ? copy_words<uint16_t>
				     : copy_words<uint8_t>;
	}
	cuda_launch(d, cuda_of(d)->compute,
		    grid_of((j.all + (int64_t)THREADS - 1) / THREADS, out.rows), THREADS, 0,
		    kernel, j);
}

/* ---- rows of tables -------------------------------------------------------------------------- */

__device__ static inline int64_t load_integer(const char *p, enum dtype d, int64_t i)
{
	return d == DT_I64 ? ((const int64_t *)p)[i] : ((const int32_t *)p)[i];
}

struct table_job {
	struct view out, ids;
	const char *table;
	enum dtype stored, unit;	/* numbers are rounded to the unit's dtype */
	int64_t rows, cols;
	bool integers;
	/*
	 * `table` is columns [column, column + width) of rows that stand in the order in which they
	 * are asked for, from slot `first` on.
	 */
	bool ordered;
	int64_t column, width;
	int64_t first, n;		/* slots of ids, row by row */
	struct cuda_fault *fault;
};

__global__ static void __launch_bounds__(THREADS, 4) take_rows(struct table_job j)
{
	for (int64_t i = blockIdx.x; i < j.n; i += gridDim.x) {
		int64_t slot = j.first + i, t = slot / j.ids.cols, k = slot % j.ids.cols;
		int32_t id = view_id(j.ids, t, k);
		int64_t from = (j.ordered ? i : id) * j.width,
			to = t * j.out.ld + k * j.cols + j.column;
		enum dtype first = j.unit == DT_F32 ? j.out.dtype : j.unit;

		if (id < 0 || id >= j.rows) {
			if (!threadIdx.x)
				report_fault(j.fault, FAULT_ROW_ID, id, j.rows);
			continue;
		}
		for (int64_t c = threadIdx.x; c < j.width; c += THREADS)
			if (!j.integers)
				save_number(j.out.p, j.out.dtype, to + c,
					    round_operand(load_stored(j.table, j.stored, from + c,
								      first),
							  j.unit));
			else if (j.out.dtype == DT_I64)
				((int64_t *)j.out.p)[to + c] =
					load_integer(j.table, j.stored, from + c);
			else
				((int32_t *)j.out.p)[to + c] =
					(int32_t)load_integer(j.table, j.stored, from + c);
	}
}

static void start_rows(struct device *d, const struct table_job *j)
{
	cuda_launch(d, cuda_of(d)->compute, j->n < BLOCKS ? (unsigned)j->n : BLOCKS, THREADS, 0,
		    take_rows, *j);
}

/* ids [T,k] in host memory, all of them known to be good; NULL where one is not. */
static int32_t *host_ids(struct device *d, struct tensor ids, const struct weight *table)
{
	int64_t n = ids.rows * ids.cols;
	int32_t *host = (int32_t *)mem_calloc((size_t)n, sizeof *host, &d->err);

	if (host)
		d->be->store(d, host, DT_I32, ids.cols, ids);
	if (!host || d->be->sync(d, &d->err)) {
		free(host);
		return NULL;
	}
	for (int64_t i = 0; i < n; i++)
		if (host[i] < 0 || host[i] >= table->rows) {
			err_refuse(&d->err, "row id %d is outside a table of %lld rows", host[i],
				   (long long)table->rows);
			free(host);
			return NULL;
		}
	return host;
}

/* Rows of the table from host memory on; one by one, and in pieces, where a row is long. */
static void send_rows(struct device *d, struct table_job *j, const char *rows)
{
	int64_t size = (int64_t)dtype_size(j->stored), most = (int64_t)CUDA_WORK / size;

	for (j->column = 0; j->column < j->cols && cuda_good(d); j->column += most) {
		struct tensor to = { cuda_of(d)->work, DT_U8, j->n, 0, 0 };

		j->width = j->cols - j->column < most ? j->cols - j->column : most;
		to.cols = to.ld = j->width * size;
		d->be->upload(d, to, rows + (size_t)(j->column * size));
		start_rows(d, j);
	}
}

#define READ_BYTES (CUDA_WORK / 16)	/* that a reader is asked for at once */

/* The table's reader gives host memory, which goes to the device block by block. */
static void read_rows(struct device *d, struct table_job *j, const struct weight *table,
		      struct tensor ids)
{
	size_t row = (size_t)table->cols * dtype_size(table->stored);
	int64_t all = ids.rows * ids.cols, most = (int64_t)(READ_BYTES / row);
	int32_t *id = host_ids(d, ids, table);
	char *rows = NULL;

	most = most < 1 ? 1 : most < all ? most : all;
	if (id)
		rows = (char *)mem_calloc((size_t)most, row, &d->err);
	for (j->first = 0; rows && j->first < all && cuda_good(d); j->first += most) {
		j->n = all - j->first < most ? all - j->first : most;
		if (table->reader->rows(table->reader->ctx, id + j->first, j->n, rows, &d->err))
			break;
		send_rows(d, j, rows);
	}
	free(rows);
	free(id);
}

void cuda_rows(struct device *d, struct tensor out, const struct weight *table, struct tensor ids)
{
	struct table_job j = {};

	if (!cuda_good(d) || !out.rows || !ids.cols || !table->cols ||
	    ref_weight_usable(table, &d->err))
		return;
	j.out = view_of(out);
	j.ids = view_of(ids);
	j.stored = table->stored;
	j.unit = cuda_operand(table, d->compute);
	j.rows = table->rows;
	j.cols = j.width = table->cols;
	j.integers = !dtype_is_float(table->stored);
	j.fault = cuda_of(d)->fault;
	j.ordered = table->reader;
	if (table->reader) {
		j.table = (const char *)cuda_of(d)->work;
		read_rows(d, &j, table, ids);
		return;
	}
	j.table = (const char *)cuda_weight_of(table)->matrix[0];
	j.n = out.rows * ids.cols;
	start_rows(d, &j);
}

struct pick_job {
	char *out;
	const char *x;
	const int32_t *index;
	int64_t rows, from;			/* of out, of x */
	int64_t out_pitch, x_pitch, index_ld;	/* bytes; elements */
	int words;
	struct cuda_fault *fault;
};

/* Rows in words of T. */
template <typename T>
__global__ static void __launch_bounds__(THREADS) pick_rows(struct pick_job j)
{
	for (int64_t i = blockIdx.x; i < j.rows; i += gridDim.x) {
		int32_t from = j.index[i * j.index_ld];
		const T *x = (const T *)(j.x + from * j.x_pitch);
		T *out = (T *)(j.out + i * j.out_pitch);

		if (from < 0 || from >= j.from) {
			if (!threadIdx.x)
				report_fault(j.fault, FAULT_PICK, from, j.from);
			continue;
		}
		for (int c = (int)threadIdx.x; c < j.words; c += THREADS)
			out[c] = x[c];
	}
}

void cuda_pick(struct device *d, struct tensor out, struct tensor x, struct tensor index)
{
	int64_t size = (int64_t)dtype_size(out.dtype), row = out.cols * size;
	uintptr_t odd = (uintptr_t)out.p | (uintptr_t)x.p |
			(uintptr_t)(row | out.ld * size | x.ld * size);
	struct pick_job j = {};

	if (!cuda_good(d) || !row)
		return;
	j.out = (char *)out.p;
	j.x = (const char *)x.p;
	j.index = (const int32_t *)index.p;
	j.rows = out.rows;
	j.from = x.rows;
	j.out_pitch = out.ld * size;
	j.x_pitch = x.ld * size;
	j.index_ld = index.ld;
	j.words = (int)(row / (odd % 16 == 0 ? 16 : odd % 2 == 0 ? 2 : 1));
	j.fault = cuda_of(d)->fault;
	cuda_launch(d, cuda_of(d)->compute, out.rows < BLOCKS ? (unsigned)out.rows : BLOCKS, THREADS,
		    0,
		    odd % 16 == 0  ? pick_rows<uint4>
		    : odd % 2 == 0 ? pick_rows<uint16_t>
				   : pick_rows<uint8_t>,
		    j);
}

struct combine_job {
	struct view sum, y, index, weights;
	bool weighted, add;
	struct cuda_fault *fault;
};

/* The slots of a token are added by one thread a column, in their order. */
__global__ static void __launch_bounds__(THREADS, 4) combine_rows(struct combine_job j)
{
	for (int64_t t = blockIdx.y; t < j.sum.rows; t += gridDim.y)
		for (int64_t c = blockIdx.x * (int64_t)THREADS + threadIdx.x; c < j.sum.cols;
		     c += gridDim.x * (int64_t)THREADS) {
			float *to = (float *)j.sum.p + t * j.sum.ld + c, all = j.add ? *to : 0;

			for (int64_t s = 0; s < j.index.cols; s++) {
				int32_t row = view_id(j.index, t, s);

				if (row >= j.y.rows)
					report_fault(j.fault, FAULT_SLOT, row, j.y.rows, (int)s);
				else if (row >= 0)
					all += (j.weighted ? view_get(j.weights, t, s) : 1.0f) *
					       ((const float *)j.y.p)[row * j.y.ld + c];
			}
			*to = all;
		}
}

void cuda_combine(struct device *d, struct tensor sum, struct tensor y, struct tensor index,
		  struct tensor weights, bool add)
{
	struct combine_job j = {};

	if (!cuda_good(d) || !sum.cols)
		return;
	j.sum = view_of(sum);
	j.y = view_of(y);
	j.index = view_of(index);
	j.weights = view_of(weights);
	j.weighted = weights.p;
	j.add = add;
	j.fault = cuda_of(d)->fault;
	cuda_launch(d, cuda_of(d)->compute, grid_of((sum.cols + THREADS - 1) / THREADS, sum.rows),
		    THREADS, 0, combine_rows, j);
}
