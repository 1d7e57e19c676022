/* SPDX-License-Identifier: Apache-2.0 */
/*
 * blas_gemm by what cuBLASLt is told and by the kernel of our own, against sums in double; and the
 * stand-in for cuBLASLt, which has to refuse what the library does.
 */
#include <cublasLt.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <vector>

#include "cuda/cuda.h"

extern "C" {
#include "kernels.h"
}
#include "../tap.h"

static struct device d;
static uint64_t state = 88172645463325252u;

static float random_number(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return (float)(int32_t)(state >> 32) / 2147483648.0f;
}

/* n numbers of a dtype in device memory that is theirs alone, `odd` elements from its beginning. */
struct numbers {
	char *base, *p;
	enum dtype dtype;
	std::vector<float> v;
};

static struct numbers make(enum dtype dtype, int64_t n, int odd)
{
	struct numbers a;
	size_t size = dtype_size(dtype);
	struct err e = ERR_INIT;

	a.base = (char *)d.be->alloc(&d, (size_t)(n + odd) * size, &e);
	a.p = a.base + (size_t)odd * size;
	a.dtype = dtype;
	a.v.resize((size_t)n);
	/* device memory is host memory here, and nothing is under way */
	for (int64_t i = 0; i < n; i++) {
		float f = random_number();

		dtype_convert(a.p + (size_t)i * size, dtype, &f, DT_F32, 1);
		dtype_convert(&a.v[(size_t)i], DT_F32, a.p + (size_t)i * size, dtype, 1);
	}
	return a;
}

struct shape {
	int64_t m, n, k, count;
	int pad;	/* elements between rows; and in front of everything */
};

/* What out has to be; where no product reaches, what it was. */
static std::vector<float> expected(const struct gemm *g, const struct numbers &x,
				   const struct numbers &w, const struct numbers &out,
				   const struct numbers &bias)
{
	std::vector<float> v = out.v;

	for (int64_t z = 0; z < g->count; z++)
		for (int64_t i = 0; i < g->m; i++)
			for (int64_t j = 0; j < g->n; j++) {
				size_t at = (size_t)(z * g->out_step + i * g->out_ld + j);
				double sum = (g->bias ? (double)bias.v[(size_t)j] : 0) +
					     (g->add ? (double)v[at] : 0);

				for (int64_t c = 0; c < g->k; c++)
					sum += (double)x.v[(size_t)(z * g->x_step + i * g->x_ld +
								    c)] *
					       w.v[(size_t)(z * g->w_step +
							    (g->across ? c * g->w_ld + j
								       : j * g->w_ld + c))];
				v[at] = (float)sum;
			}
	return v;
}

static int64_t differ(const struct gemm *g, const struct numbers &out,
		      const std::vector<float> &want, bool inside)
{
	double bound = g->result == DT_F32 ? 3e-6 : g->result == DT_F16 ? 1e-3 : 8e-3;
	int64_t bad = 0;

	for (size_t i = 0; i < want.size(); i++) {
		int64_t left = (int64_t)i % g->out_step;
		bool in = left / g->out_ld < g->m && left % g->out_ld < g->n;
		float f;

		if (in != inside)
			continue;
		dtype_convert(&f, DT_F32, out.p + i * dtype_size(g->result), g->result, 1);
		bad += inside ? !(fabs((double)f - (double)want[i]) <=
				  bound * (1 + fabs((double)want[i]) + (double)g->k / 16))
			      : f != want[i];
	}
	return bad;
}

/* variant: 1 result BF16, 2 F16; 4 bias; 8 add; 16 across */
static void one(const struct shape *s, enum dtype operand, int variant, bool own)
{
	struct gemm g = {};
	struct numbers x, w, out, bias;
	std::vector<float> want;
	struct err e = ERR_INIT;

	g.m = s->m;
	g.n = s->n;
	g.k = s->k;
	g.count = s->count;
	g.operand = operand;
	g.result = variant & 2 ? DT_F16 : variant & 1 ? DT_BF16 : DT_F32;
	g.add = variant & 8;
	g.across = variant & 16;
	g.x_ld = s->k + s->pad;
	g.w_ld = (g.across ? s->n : s->k) + s->pad;
	g.out_ld = s->n + s->pad;
	g.x_step = s->m * g.x_ld;
	g.w_step = (g.across ? s->k : s->n) * g.w_ld;
	g.out_step = s->m * g.out_ld;
	x = make(operand, s->count * g.x_step, s->pad);
	w = make(operand, s->count * g.w_step, s->pad);
	out = make(g.result, s->count * g.out_step, s->pad);
	bias = make(DT_F32, s->n, s->pad);
	g.x = x.p;
	g.w = w.p;
	g.out = out.p;
	g.bias = variant & 4 ? (const float *)bias.p : NULL;
	want = expected(&g, x, w, out, bias);
	emulated_cublaslt_refuses = own;
	for (int again = 0; again < (g.add ? 1 : 2); again++)
		blas_gemm(&d, &g);
	ok(!d.be->sync(&d, &e), "%s runs %s", own ? "our own" : "cuBLASLt", e.text);
	is_int(differ(&g, out, want, true), 0,
	       "%s: %d x %d x %d, %d of them, %d apart, of %s, variant %d",
	       own ? "our own" : "cuBLASLt", (int)s->m, (int)s->n, (int)s->k, (int)s->count,
	       s->pad, dtype_name(operand), variant);
	is_int(differ(&g, out, want, false), 0, "nothing beside them");
	emulated_cublaslt_refuses = false;
	for (const struct numbers *a : { &x, &w, &out, &bias })
		d.be->free(&d, a->base);
}

static void test_products(void)
{
	static const struct shape shapes[] = {
		{ 1, 1, 1, 1, 0 },	{ 5, 7, 9, 3, 1 },    { 130, 136, 40, 1, 8 },
		{ 33, 260, 72, 2, 0 },	{ 129, 70, 131, 1, 3 }, { 64, 64, 256, 2, 16 },
	};

	for (const struct shape &s : shapes)
		for (int v = 0; v < 32; v += 5)
			for (enum dtype operand : { DT_F32, DT_BF16 })
				for (bool own : { false, true })
					one(&s, operand, s.count > 1 ? v & ~4 : v, own);
}

/* More shapes than are remembered, each twice: what takes the place of another is its own. */
static void test_many_shapes(void)
{
	static float room[64 * 700];
	struct numbers x = make(DT_F32, 700, 0), w = make(DT_F32, 3, 0);
	struct err e = ERR_INIT;
	struct gemm g = {};
	int bad = 0;
	float *out = (float *)d.be->alloc(&d, sizeof room, &e);

	g.n = 1;
	g.k = 1;
	g.operand = g.result = DT_F32;
	g.x = x.p;
	g.w = w.p;
	g.out = out;
	g.count = g.x_ld = g.w_ld = g.out_ld = 1;
	for (int again = 0; again < 2; again++)
		for (int m = 1; m <= 700; m++) {
			g.m = m;
			blas_gemm(&d, &g);
		}
	ok(!d.be->sync(&d, &e), "1400 products of 700 shapes %s", e.text);
	for (int i = 0; i < 700; i++)
		bad += out[i] != x.v[(size_t)i] * w.v[0];
	is_int(bad, 0, "of which all are right");
	d.be->free(&d, out);
	d.be->free(&d, x.base);
	d.be->free(&d, w.base);
}

/* ---- the stand-in ---------------------------------------------------------------------------- */

struct call {
	cublasComputeType_t compute;
	cudaDataType a, b, out, bias;
	bool has_bias;
	int64_t lda, k_of_b;
	cublasStatus_t want;
	const char *what;
};

static cublasStatus_t ask(const struct call *c)
{
	cublasLtHandle_t h;
	cublasLtMatmulDesc_t op;
	cublasLtMatrixLayout_t a, b, out;
	cublasLtMatmulPreference_t p;
	cublasLtMatmulHeuristicResult_t r;
	int32_t t = CUBLAS_OP_T, bias = c->bias, n = 0;
	uint32_t epilogue = c->has_bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
	cublasStatus_t rc;

	cublasLtCreate(&h);
	cublasLtMatmulDescCreate(&op, c->compute, CUDA_R_32F);
	cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_TRANSA, &t, sizeof t);
	cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue,
				       sizeof epilogue);
	cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &bias, sizeof bias);
	cublasLtMatrixLayoutCreate(&a, c->a, 8, 6, c->lda);
	cublasLtMatrixLayoutCreate(&b, c->b, (uint64_t)c->k_of_b, 5, 8);
	cublasLtMatrixLayoutCreate(&out, c->out, 6, 5, 6);
	cublasLtMatmulPreferenceCreate(&p);
	rc = cublasLtMatmulAlgoGetHeuristic(h, op, a, b, out, out, p, 1, &r, &n);
	cublasLtMatmulPreferenceDestroy(p);
	cublasLtMatrixLayoutDestroy(a);
	cublasLtMatrixLayoutDestroy(b);
	cublasLtMatrixLayoutDestroy(out);
	cublasLtMatmulDescDestroy(op);
	cublasLtDestroy(h);
	return rc == CUBLAS_STATUS_SUCCESS && n != 1 ? CUBLAS_STATUS_NOT_SUPPORTED : rc;
}

static void test_stand_in(void)
{
	static const cudaDataType f = CUDA_R_32F, h = CUDA_R_16BF, s = CUDA_R_16F;
	static const cublasComputeType_t c = CUBLAS_COMPUTE_32F;
	static const struct call calls[] = {
		{ c, h, h, f, f, true, 8, 8, CUBLAS_STATUS_SUCCESS, "BF16 to F32, bias F32" },
		{ c, h, h, h, f, false, 8, 8, CUBLAS_STATUS_SUCCESS, "BF16 to BF16" },
		{ c, f, f, f, f, true, 9, 8, CUBLAS_STATUS_SUCCESS, "F32, gaps between columns" },
		{ c, h, h, h, f, true, 8, 8, CUBLAS_STATUS_NOT_SUPPORTED,
		  "BF16 to BF16, bias F32" },
		{ c, h, h, s, f, false, 8, 8, CUBLAS_STATUS_NOT_SUPPORTED, "BF16 to F16" },
		{ c, f, f, h, f, false, 8, 8, CUBLAS_STATUS_NOT_SUPPORTED, "F32 to BF16" },
		{ c, f, h, f, f, false, 8, 8, CUBLAS_STATUS_NOT_SUPPORTED, "F32 by BF16" },
		{ CUBLAS_COMPUTE_16F, h, h, h, f, false, 8, 8, CUBLAS_STATUS_NOT_SUPPORTED,
		  "sums in F16" },
		{ c, h, h, f, f, false, 7, 8, CUBLAS_STATUS_INVALID_VALUE, "columns that overlap" },
		{ c, h, h, f, f, false, 8, 7, CUBLAS_STATUS_INVALID_VALUE,
		  "sums of different lengths" },
	};

	for (const struct call &k : calls)
		is_int(ask(&k), k.want, "the stand-in: %s", k.what);
}

int main(void)
{
	struct device_options o = {};
	struct err e = ERR_INIT;

	o.compute = DT_BF16;
	o.local_size = 1;
	if (backend_open(&d, "cuda", &o, &e)) {
		printf("Bail out! %s\n", e.text);
		return 1;
	}
	test_products();
	test_many_shapes();
	test_stand_in();
	d.be->close(&d);
	return tap_end();
}
