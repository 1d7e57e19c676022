/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products by cuBLASLt, opened when a device is. Its matrices are column-major: out^T = w x^T, and
 * the rows of ours are its columns. What it has no algorithm for goes through a kernel of our own.
 *
 * Sums stay in F32 until they are rounded once: CUBLAS_COMPUTE_32F never takes TF32, and where a
 * sum is split its parts are added in F32 too (reduction schemes that add in the type of the result
 * are not allowed).
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <cublasLt.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "gemm.cuh"

extern "C" {
#include "mem.h"
}

#define BLAS_WORK	((size_t)32 << 20)
#define SHAPES		512	/* remembered: a new one takes the place of another */
#define KEY		18

/* A shape, and what cuBLASLt does for it. */
struct shape {
	int64_t key[KEY];
	cublasLtMatmulDesc_t op;
	cublasLtMatrixLayout_t w, x, out;
	cublasLtMatmulAlgo_t algorithm;
	bool used, found;
};

#define FUNCTIONS(F)                   \
	F(cublasLtCreate)              \
	F(cublasLtDestroy)             \
	F(cublasLtGetStatusString)     \
	F(cublasLtMatmul)              \
	F(cublasLtMatmulAlgoGetHeuristic) \
	F(cublasLtMatmulDescCreate)    \
	F(cublasLtMatmulDescDestroy)   \
	F(cublasLtMatmulDescSetAttribute) \
	F(cublasLtMatmulPreferenceCreate) \
	F(cublasLtMatmulPreferenceDestroy) \
	F(cublasLtMatmulPreferenceSetAttribute) \
	F(cublasLtMatrixLayoutCreate)  \
	F(cublasLtMatrixLayoutDestroy) \
	F(cublasLtMatrixLayoutSetAttribute)

struct blas {
	void *library;
#define F(name) decltype(&::name) name;
	FUNCTIONS(F)
#undef F
	cublasLtHandle_t handle;
	void *work;
	struct shape shape[SHAPES];
};

/* ---- opening --------------------------------------------------------------------------------- */

#ifdef CUDA_EMULATED	/* the stand-in is linked */
static int load(struct blas *b, struct err *)
{
#define F(name) b->name = name;
	FUNCTIONS(F)
#undef F
	return 0;
}
#else
static int load(struct blas *b, struct err *e)
{
	char name[64];

	snprintf(name, sizeof name, "libcublasLt.so.%d", CUDART_VERSION / 1000);
	b->library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
	if (!b->library)
		return err_fail(e, "cuBLASLt cannot be loaded (%s): add the directory of '%s' to "
				   "LD_LIBRARY_PATH",
				dlerror(), name);
#define F(function)                                                                       \
	b->function = (decltype(b->function))dlsym(b->library, #function);                \
	if (!b->function)                                                                 \
		return err_fail(e, "'%s' has no function '%s'", name, #function);
	FUNCTIONS(F)
#undef F
	return 0;
}
#endif

static int check(struct blas *b, cublasStatus_t rc, const char *what, struct err *e)
{
	if (rc == CUBLAS_STATUS_SUCCESS)
		return 0;
	return err_fail(e, "%s: cuBLASLt says '%s'", what, b->cublasLtGetStatusString(rc));
}

int blas_open(struct cuda *c, struct err *e)
{
	struct blas *b = c->blas = (struct blas *)mem_calloc(1, sizeof *b, e);

	if (!b || load(b, e) || check(b, b->cublasLtCreate(&b->handle), "opening", e) ||
	    cuda_check(cudaMalloc(&b->work, BLAS_WORK), "device memory", e))
		return -1;
	return 0;
}

static void forget(struct blas *b, struct shape *s)
{
	if (s->op)
		b->cublasLtMatmulDescDestroy(s->op);
	for (cublasLtMatrixLayout_t l : { s->w, s->x, s->out })
		if (l)
			b->cublasLtMatrixLayoutDestroy(l);
	memset(s, 0, sizeof *s);
}

void blas_close(struct cuda *c)
{
	struct blas *b = c->blas;

	if (!b)
		return;
	for (struct shape &s : b->shape)
		forget(b, &s);
	cudaFree(b->work);
	if (b->handle)
		b->cublasLtDestroy(b->handle);
	/* the library stays: it may have left something for the end of the process */
	free(b);
	c->blas = NULL;
}

/* ---- what cuBLASLt is told ------------------------------------------------------------------- */

/* The largest power of 2 up to 256 on which all matrices of an operand begin. */
static uint32_t alignment(const struct gemm *g, const void *p, int64_t step, enum dtype d)
{
	uintptr_t all = (uintptr_t)p | (g->count > 1 ? (uintptr_t)step * dtype_size(d) : 0);
	uint32_t a = 256;

	while (all % a)
		a /= 2;
	return a;
}

static uint32_t x_alignment(const struct gemm *g)
{
	return alignment(g, g->x, g->x_step, g->operand);
}

static uint32_t w_alignment(const struct gemm *g)
{
	return alignment(g, g->w, g->w_step, g->operand);
}

static uint32_t out_alignment(const struct gemm *g)
{
	return alignment(g, g->out, g->out_step, g->result);
}

static cudaDataType type_of(enum dtype d)
{
	return d == DT_F32 ? CUDA_R_32F : CUDA_R_16BF;
}

/* Its table of types: sums of BF16 become F32 or BF16, a bias is of the result's type. */
bool blas_takes(enum dtype operand, enum dtype result, bool bias)
{
	return result == DT_F32 || (result == DT_BF16 && operand == DT_BF16 && !bias);
}

static int layout(struct blas *b, cublasLtMatrixLayout_t *l, enum dtype d, int64_t rows,
		  int64_t cols, int64_t ld, int64_t count, int64_t step, struct err *e)
{
	int32_t n = (int32_t)count;

	return check(b,
		     b->cublasLtMatrixLayoutCreate(l, type_of(d), (uint64_t)rows, (uint64_t)cols,
						   ld),
		     "a layout", e) ||
		       check(b,
			     b->cublasLtMatrixLayoutSetAttribute(
				     *l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &n, sizeof n),
			     "a layout", e) ||
		       check(b,
			     b->cublasLtMatrixLayoutSetAttribute(
				     *l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &step,
				     sizeof step),
			     "a layout", e);
}

static int set(struct blas *b, cublasLtMatmulDesc_t op, cublasLtMatmulDescAttributes_t a,
	       const void *p, size_t size, struct err *e)
{
	return check(b, b->cublasLtMatmulDescSetAttribute(op, a, p, size), "a product", e);
}

static int describe(struct blas *b, struct shape *s, const struct gemm *g, struct err *e)
{
	int32_t w_is = g->across ? CUBLAS_OP_N : CUBLAS_OP_T, x_is = CUBLAS_OP_N;
	uint32_t epilogue = g->bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
	int32_t bias_type = CUDA_R_32F;
	int64_t w_rows = g->across ? g->n : g->k, w_cols = g->across ? g->k : g->n;

	if (layout(b, &s->w, g->operand, w_rows, w_cols, g->w_ld, g->count, g->w_step, e) ||
	    layout(b, &s->x, g->operand, g->k, g->m, g->x_ld, g->count, g->x_step, e) ||
	    layout(b, &s->out, g->result, g->n, g->m, g->out_ld, g->count, g->out_step, e) ||
	    check(b, b->cublasLtMatmulDescCreate(&s->op, CUBLAS_COMPUTE_32F, CUDA_R_32F),
		  "a product", e) ||
	    set(b, s->op, CUBLASLT_MATMUL_DESC_TRANSA, &w_is, sizeof w_is, e) ||
	    set(b, s->op, CUBLASLT_MATMUL_DESC_TRANSB, &x_is, sizeof x_is, e) ||
	    set(b, s->op, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue, e))
		return -1;
	if (!g->bias)
		return 0;
	return set(b, s->op, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &bias_type, sizeof bias_type,
		   e) ||
	       set(b, s->op, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &g->bias, sizeof g->bias, e);
}

static int prefer(struct blas *b, cublasLtMatmulPreference_t p, const struct gemm *g,
		  struct err *e)
{
	size_t work = BLAS_WORK;
	uint32_t scheme = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, w = w_alignment(g),
		 x = x_alignment(g), out = out_alignment(g);
	const struct {
		cublasLtMatmulPreferenceAttributes_t a;
		const void *p;
		size_t size;
	} all[] = { { CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &work, sizeof work },
		    { CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &scheme, sizeof scheme },
		    { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &w, sizeof w },
		    { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &x, sizeof x },
		    { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &out, sizeof out },
		    { CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &out, sizeof out } };

	for (const auto &a : all)
		if (check(b, b->cublasLtMatmulPreferenceSetAttribute(p, a.a, a.p, a.size),
			  "a product", e))
			return -1;
	return 0;
}

/* s->found: whether there is an algorithm. */
static int choose(struct blas *b, struct shape *s, const struct gemm *g, struct err *e)
{
	cublasLtMatmulHeuristicResult_t r = {};
	cublasLtMatmulPreference_t p = NULL;
	cublasStatus_t status;
	int n = 0, rc = -1;

	if (describe(b, s, g, e) ||
	    check(b, b->cublasLtMatmulPreferenceCreate(&p), "a product", e))
		return -1;
	if (prefer(b, p, g, e))
		goto out;
	status = b->cublasLtMatmulAlgoGetHeuristic(b->handle, s->op, s->w, s->x, s->out, s->out, p,
						   1, &r, &n);
	if (status != CUBLAS_STATUS_NOT_SUPPORTED && check(b, status, "a product", e))
		goto out;
	s->found = status == CUBLAS_STATUS_SUCCESS && n > 0 && r.state == CUBLAS_STATUS_SUCCESS;
	s->algorithm = r.algo;
	rc = 0;
out:
	b->cublasLtMatmulPreferenceDestroy(p);
	return rc;
}

/* What is remembered of the shape, or found out; NULL with the device's failure set. */
static struct shape *shape_of(struct device *d, const struct gemm *g)
{
	struct blas *b = cuda_of(d)->blas;
	int64_t key[KEY] = { g->m,	  g->n,	       g->k,		g->operand,
			     g->result,	  g->x_ld,     g->w_ld,		g->out_ld,
			     g->count,	  g->x_step,   g->w_step,	g->out_step,
			     g->across,	  x_alignment(g), w_alignment(g), out_alignment(g),
			     g->bias ? alignment(g, g->bias, 0, DT_F32) : 0, g->add };
	uint64_t hash = 0;
	struct shape *s;

	for (int64_t k : key)
		hash = (hash ^ (uint64_t)k) * 0x9e3779b97f4a7c15u, hash ^= hash >> 29;
	s = &b->shape[hash % SHAPES];
	if (s->used && !memcmp(s->key, key, sizeof key))
		return s;
	forget(b, s);
	if (choose(b, s, g, &d->err)) {
		forget(b, s);
		return NULL;
	}
	memcpy(s->key, key, sizeof key);
	s->used = true;
	return s;
}

/* ---- our own --------------------------------------------------------------------------------- */

struct own {
	struct gemm g;
	int64_t tiles;		/* of rows */
	bool x_whole, w_whole;
};

template <typename T>
__global__ static void __launch_bounds__(TILE_THREADS, sizeof(T) == 2 ? 2 : 1)
	own_product(const __grid_constant__ struct own o)
{
	CUDA_SHARED(shared);
	const struct gemm &g = o.g;
	int64_t m0 = blockIdx.x % o.tiles * TILE, n0 = blockIdx.x / o.tiles * TILE, z = blockIdx.y;
	int rows = g.m - m0 < TILE ? (int)(g.m - m0) : TILE;
	const T *xp = (const T *)g.x + z * g.x_step, *wp = (const T *)g.w + z * g.w_step;
	struct side<T> x, w;
	float acc[64];

	for (int i = 0; i < 2; i++) {
		int64_t r = threadIdx.x / 4 + TILE / 2 * i;

		x.row[i] = r < rows ? xp + (m0 + r) * g.x_ld : NULL;
		w.row[i] = n0 + r < g.n ? wp + (n0 + r) * (g.across ? 1 : g.w_ld) : NULL;
	}
	x.k_step = 1;
	w.k_step = g.across ? g.w_ld : 1;
	x.whole = o.x_whole;
	w.whole = o.w_whole;
	tile_product<T>(acc, shared, x, w, (int)g.k, rows);
#pragma unroll
	for (int r = 0; r < 8; r++)
#pragma unroll
		for (int c = 0; c < 8; c++) {
			int row = sum_row(r, T());
			int64_t col = n0 + sum_col(c, T()),
				at = z * g.out_step + (m0 + row) * g.out_ld + col;
			float f = acc[sum_at(r, c, T())];

			if (row >= rows || col >= g.n)
				continue;
			f += g.bias ? g.bias[col] : 0;
			f += g.add ? load_number((const char *)g.out, g.result, at) : 0;
			save_number((char *)g.out, g.result, at, f);
		}
}

/* Whether all rows begin on 16 bytes. */
static bool whole(const void *p, int64_t ld, int64_t step, size_t size)
{
	return (uintptr_t)p % 16 == 0 && (size_t)ld * size % 16 == 0 &&
	       (size_t)step * size % 16 == 0;
}

static void multiply_here(struct device *d, const struct gemm *g)
{
	size_t size = dtype_size(g->operand);
	struct own o = { *g, (g->m + TILE - 1) / TILE, whole(g->x, g->x_ld, g->x_step, size),
			 !g->across && whole(g->w, g->w_ld, g->w_step, size) };
	dim3 grid((unsigned)(o.tiles * ((g->n + TILE - 1) / TILE)), (unsigned)g->count);

	if (g->operand == DT_F32)
		cuda_launch(d, cuda_of(d)->compute, grid, TILE_THREADS, TILE_SHARED,
			    own_product<float>, o);
	else
		cuda_launch(d, cuda_of(d)->compute, grid, TILE_THREADS, TILE_SHARED,
			    own_product<uint16_t>, o);
}

/* ---- a product ------------------------------------------------------------------------------- */

void blas_gemm(struct device *d, const struct gemm *g)
{
	struct cuda *c = cuda_of(d);
	struct blas *b = c->blas;
	const float one = 1, beta = g->add ? 1 : 0;
	struct shape *s = NULL;
	cublasStatus_t rc;

	if (!cuda_good(d) || !g->m || !g->n || !g->count)
		return;
	if (blas_takes(g->operand, g->result, g->bias != NULL)) {
		s = shape_of(d, g);
		if (!s)
			return;
	}
	if (!s || !s->found) {
		multiply_here(d, g);
		return;
	}
	cuda_begin(d);
	if (g->bias && set(b, s->op, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &g->bias, sizeof g->bias,
			   &d->err))
		return;
	rc = b->cublasLtMatmul(b->handle, s->op, &one, g->w, s->w, g->x, s->x, &beta, g->out,
			       s->out, g->out, s->out, &s->algorithm, b->work, BLAS_WORK,
			       c->compute);
	check(b, rc, "a product", &d->err);
}
