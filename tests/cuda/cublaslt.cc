/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A stand-in for cuBLASLt: does what descriptors say, element by element, and refuses what its
 * documentation does not offer. An algorithm knows for which shapes and alignments it was found,
 * and is no good for others.
 */
#include <string.h>

#include <vector>

#include <cublasLt.h>
#include <ptx_emulated.h>

struct cublasLtContext {
	int unused;
};

struct emulated_matmul {
	cublasComputeType_t compute;
	cudaDataType scale;
	int32_t transa, transb, bias_type;
	uint32_t epilogue;
	const void *bias;
};

struct emulated_layout {
	cudaDataType type;
	uint64_t rows, cols;
	int64_t ld, step;
	int32_t count;
};

struct emulated_preference {
	uint64_t work;
	uint32_t schemes, align[4];
};

bool emulated_cublaslt_refuses;

const char *cublasLtGetStatusString(cublasStatus_t s)
{
	switch (s) {
	case CUBLAS_STATUS_SUCCESS:
		return "success";
	case CUBLAS_STATUS_INVALID_VALUE:
		return "an unsupported value or parameter was passed to the function";
	case CUBLAS_STATUS_NOT_SUPPORTED:
		return "the functionality requested is not supported";
	default:
		return "failure";
	}
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *h)
{
	*h = new cublasLtContext();
	return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t h)
{
	delete h;
	return CUBLAS_STATUS_SUCCESS;
}

/* ---- descriptors ----------------------------------------------------------------------------- */

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *d, cublasComputeType_t compute,
					cudaDataType_t scale)
{
	*d = new emulated_matmul{ compute, scale, CUBLAS_OP_N, CUBLAS_OP_N, -1,
				  CUBLASLT_EPILOGUE_DEFAULT, NULL };
	return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d)
{
	delete d;
	return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t put(void *to, size_t size, const void *from, size_t bytes)
{
	if (!to || size != bytes)
		return CUBLAS_STATUS_INVALID_VALUE;
	memcpy(to, from, bytes);
	return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d,
					      cublasLtMatmulDescAttributes_t a, const void *p,
					      size_t bytes)
{
	switch (a) {
	case CUBLASLT_MATMUL_DESC_TRANSA:
		return put(&d->transa, sizeof d->transa, p, bytes);
	case CUBLASLT_MATMUL_DESC_TRANSB:
		return put(&d->transb, sizeof d->transb, p, bytes);
	case CUBLASLT_MATMUL_DESC_EPILOGUE:
		return put(&d->epilogue, sizeof d->epilogue, p, bytes);
	case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
		return put(&d->bias, sizeof d->bias, p, bytes);
	case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
		return put(&d->bias_type, sizeof d->bias_type, p, bytes);
	}
	return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *l, cudaDataType type,
					  uint64_t rows, uint64_t cols, int64_t ld)
{
	*l = new emulated_layout{ type, rows, cols, ld, 0, 1 };
	return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l)
{
	delete l;
	return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t l,
						cublasLtMatrixLayoutAttribute_t a, const void *p,
						size_t bytes)
{
	switch (a) {
	case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT:
		return put(&l->count, sizeof l->count, p, bytes);
	case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET:
		return put(&l->step, sizeof l->step, p, bytes);
	default:
		return CUBLAS_STATUS_INVALID_VALUE;
	}
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *p)
{
	*p = new emulated_preference{ 0, CUBLASLT_REDUCTION_SCHEME_MASK, { 256, 256, 256, 256 } };
	return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p)
{
	delete p;
	return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p,
						    cublasLtMatmulPreferenceAttributes_t a,
						    const void *from, size_t bytes)
{
	switch (a) {
	case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
		return put(&p->work, sizeof p->work, from, bytes);
	case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
		return put(&p->schemes, sizeof p->schemes, from, bytes);
	default:
		return put(&p->align[a - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES],
			   sizeof p->align[0], from, bytes);
	}
}

/* ---- what is offered ------------------------------------------------------------------------- */

static bool layout_good(const struct emulated_layout *l)
{
	return l->rows && l->cols && l->ld >= (int64_t)l->rows && l->count > 0;
}

/* The table of types of CUBLAS_COMPUTE_32F with factors of F32, as far as it is known here. */
static bool types_good(const struct emulated_matmul *op, const struct emulated_layout *a,
		       const struct emulated_layout *b, const struct emulated_layout *c,
		       const struct emulated_layout *d)
{
	int32_t bias = op->bias_type < 0 ? d->type : op->bias_type;

	if (op->compute != CUBLAS_COMPUTE_32F || op->scale != CUDA_R_32F || a->type != b->type ||
	    c->type != d->type)
		return false;
	if (op->epilogue != CUBLASLT_EPILOGUE_DEFAULT &&
	    (op->epilogue != CUBLASLT_EPILOGUE_BIAS || bias != d->type))
		return false;
	return d->type == CUDA_R_32F || d->type == a->type;
}

static bool shapes_good(const struct emulated_matmul *op, const struct emulated_layout *a,
			const struct emulated_layout *b, const struct emulated_layout *c,
			const struct emulated_layout *d)
{
	uint64_t m = op->transa ? a->cols : a->rows, k = op->transa ? a->rows : a->cols,
		 n = op->transb ? b->rows : b->cols;

	return layout_good(a) && layout_good(b) && layout_good(c) && layout_good(d) &&
	       k == (op->transb ? b->cols : b->rows) && d->rows == m && d->cols == n &&
	       c->rows == m && c->cols == n && a->count == d->count && b->count == d->count &&
	       c->count == d->count;
}

static uint64_t digest(const struct emulated_matmul *op, const struct emulated_layout *const l[4])
{
	uint64_t h = (uint64_t)op->transa << 1 | (uint64_t)op->transb | (uint64_t)op->epilogue << 2;

	for (int i = 0; i < 4; i++)
		for (uint64_t v : { (uint64_t)l[i]->type, l[i]->rows, l[i]->cols,
				    (uint64_t)l[i]->ld, (uint64_t)l[i]->step,
				    (uint64_t)l[i]->count })
			h = (h ^ v) * 1099511628211u;
	return h;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t h, cublasLtMatmulDesc_t op,
					      cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
					      cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
					      cublasLtMatmulPreference_t p, int most,
					      cublasLtMatmulHeuristicResult_t results[], int *n)
{
	const struct emulated_layout *l[4] = { a, b, c, d };

	*n = 0;
	if (!h || most < 1 || !shapes_good(op, a, b, c, d))
		return CUBLAS_STATUS_INVALID_VALUE;
	if (emulated_cublaslt_refuses || !types_good(op, a, b, c, d))
		return CUBLAS_STATUS_NOT_SUPPORTED;
	results[0] = {};
	results[0].algo.data[0] = digest(op, l);
	for (int i = 0; i < 4; i++)
		results[0].algo.data[1 + i] = p->align[i];
	results[0].workspaceSize = (size_t)p->work;
	results[0].algo.data[5] = p->work;
	results[0].algo.data[6] = p->schemes;
	results[0].state = CUBLAS_STATUS_SUCCESS;
	*n = 1;
	return CUBLAS_STATUS_SUCCESS;
}

/* ---- the product ----------------------------------------------------------------------------- */

static float get(const void *p, cudaDataType type, int64_t i)
{
	return type == CUDA_R_32F    ? ((const float *)p)[i]
	       : type == CUDA_R_16BF ? bf16_to_float(((const uint16_t *)p)[i])
				     : f16_to_float(((const uint16_t *)p)[i]);
}

static void set(void *p, cudaDataType type, int64_t i, float f)
{
	if (type == CUDA_R_32F)
		((float *)p)[i] = f;
	else
		((uint16_t *)p)[i] = type == CUDA_R_16BF ? float_to_bf16(f) : float_to_f16(f);
}

/* Rows of op(A), or columns of op(B), as F32 one behind the other: [cols or rows of D, k]. */
static std::vector<float> runs(const char *p, const struct emulated_layout *l, int32_t z,
			       bool k_is_rows)
{
	int64_t k = (int64_t)(k_is_rows ? l->rows : l->cols),
		n = (int64_t)(k_is_rows ? l->cols : l->rows);
	std::vector<float> v((size_t)(n * k));

	for (int64_t i = 0; i < n; i++)
		for (int64_t j = 0; j < k; j++)
			v[(size_t)(i * k + j)] = get(p, l->type,
						     z * l->step + (k_is_rows ? i * l->ld + j
									     : j * l->ld + i));
	return v;
}

struct job {
	struct emulated_matmul op;
	struct emulated_layout a, b, c, d;
	const char *A, *B, *C;
	char *D;
	float alpha, beta;
};

static void run(const struct job &j, int32_t z)
{
	std::vector<float> a = runs(j.A, &j.a, z, j.op.transa),
			   b = runs(j.B, &j.b, z, !j.op.transb);
	size_t k = (size_t)(j.op.transa ? j.a.rows : j.a.cols);

	for (uint64_t col = 0; col < j.d.cols; col++)
		for (uint64_t row = 0; row < j.d.rows; row++) {
			const float *x = &a[row * k], *y = &b[col * k];
			int64_t c = z * j.c.step + (int64_t)col * j.c.ld + (int64_t)row,
				d = z * j.d.step + (int64_t)col * j.d.ld + (int64_t)row;
			double sum = 0;
			float f;

			for (size_t i = 0; i < k; i++)
				sum += (double)x[i] * y[i];
			f = j.alpha * (float)sum;
			if (j.beta != 0)
				f += j.beta * get(j.C, j.c.type, c);
			if (j.op.epilogue == CUBLASLT_EPILOGUE_BIAS)
				f += get(j.op.bias,
					 j.op.bias_type < 0 ? j.d.type
							    : (cudaDataType)j.op.bias_type,
					 (int64_t)row);
			set(j.D, j.d.type, d, f);
		}
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t h, cublasLtMatmulDesc_t op, const void *alpha,
			      const void *A, cublasLtMatrixLayout_t a, const void *B,
			      cublasLtMatrixLayout_t b, const void *beta, const void *C,
			      cublasLtMatrixLayout_t c, void *D, cublasLtMatrixLayout_t d,
			      const cublasLtMatmulAlgo_t *algo, void *work, size_t bytes,
			      cudaStream_t stream)
{
	const struct emulated_layout *l[4] = { a, b, c, d };
	const void *p[4] = { A, B, C, D };
	struct job j;

	if (!h || !algo || !shapes_good(op, a, b, c, d) || algo->data[0] != digest(op, l) ||
	    algo->data[5] > bytes || (algo->data[5] && !work) ||
	    (op->epilogue == CUBLASLT_EPILOGUE_BIAS && !op->bias))
		return CUBLAS_STATUS_INVALID_VALUE;
	for (int i = 0; i < 4; i++)
		if ((uintptr_t)p[i] % algo->data[1 + i])
			return CUBLAS_STATUS_INVALID_VALUE;
	if (!types_good(op, a, b, c, d))
		return CUBLAS_STATUS_NOT_SUPPORTED;
	j = { *op,	       *a,	      *b,
	      *c,	       *d,	      (const char *)A,
	      (const char *)B, (const char *)C, (char *)D,
	      *(const float *)alpha, *(const float *)beta };
	emulated_enqueue(stream, [j]() {
		for (int32_t z = 0; z < j.d.count; z++)
			run(j, z);
	});
	return CUBLAS_STATUS_SUCCESS;
}
