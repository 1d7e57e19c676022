/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda: what the sources of this folder share. Included by CUDA C++ alone.
 *
 * Three streams: `compute` takes all verbs in order, `upload` the filling of weights from the
 * loader's thread, `download` what store brings to host memory. Verbs never wait for the device.
 * The sources also run on the host, under the emulator of tests/cuda, which takes the place of
 * <cuda_runtime.h>.
 */
#ifndef DSPARK_CUDA_H
#define DSPARK_CUDA_H

#include <cuda_runtime.h>
#include <pthread.h>

extern "C" {
#include "kernels.h"
}

/*
 * Workspace of the compute stream: what a verb may use beyond its arguments, whatever T is. Large
 * enough for one row of the widest product; larger work goes in tiles of rows.
 */
#ifdef CUDA_EMULATED	/* small, so that tests meet tiles */
#define CUDA_WORK ((size_t)1 << 20)
#else
#define CUDA_WORK ((size_t)256 << 20)
#endif

/* Bytes that cuda_arguments takes at once. */
#define CUDA_ARGUMENTS ((size_t)1 << 20)

/* Bad data that only a kernel can see; kept by the first one that meets it, named by sync. */
enum cuda_fault_kind {
	FAULT_NONE,
	FAULT_ROW_ID,		/* rows: id `a` is outside a table of `b` rows */
	FAULT_PICK,		/* pick: index `a` is outside `b` rows */
	FAULT_SLOT,		/* combine: index `a` of slot `c` is outside `b` rows */
	FAULT_KEY,		/* attention_at: `a` is no key of a row of `b`, or out of order */
};

struct cuda_fault {
	int kind, c;
	long long a, b;
};

/*
 * Memory that is filled round and round in parts, each used again when a stream has passed its
 * event.
 */
#define CUDA_PARTS 4

struct cuda_ring {
	char *host, *device;	/* pinned host memory, and as much of the device */
	size_t part, at;	/* bytes of a part; used of the current one */
	int current;
	cudaEvent_t passed[CUDA_PARTS];
	bool used[CUDA_PARTS];
};

/* The last copies of a stream, whose time is counted when their turn comes again, or by sync. */
#define CUDA_COPIES 256

struct cuda_clock {
	cudaEvent_t began[CUDA_COPIES], ended[CUDA_COPIES];
	bool used[CUDA_COPIES];
	int current;
	double seconds;
};

struct blas;
struct cuda_uploads;

struct cuda {
	int ordinal;		/* of the device */
	int sms;		/* multiprocessors */
	int major, minor;	/* compute capability */
	size_t shared_most;	/* dynamic shared memory that a block may have */
	cudaStream_t compute, upload, download;
	void *work;		/* CUDA_WORK bytes, of the compute stream */
	struct cuda_ring arguments;
	struct cuda_ring down;		/* device memory alone: states on their way to the host */
	struct cuda_fault *fault, *fault_host;	/* device memory; pinned */
	struct blas *blas;
	struct cuda_uploads *uploads;
	bool busy;			/* something was started since the last sync */
	cudaEvent_t began, ended;	/* of the compute stream since then */
	double compute_seconds;
	struct cuda_clock downloads;
};

static inline struct cuda *cuda_of(const struct device *d)
{
	return (struct cuda *)d->state;
}

/* False where a verb must not run: the device has failed before. */
static inline bool cuda_good(const struct device *d)
{
	return !d->err.code;
}

/* Whether a call succeeded; the first that did not becomes the device's failure. */
bool cuda_ok(struct device *d, cudaError_t rc, const char *what);
/* The same for functions that report themselves: 0, or -1 with `e` set. */
int cuda_check(cudaError_t rc, const char *what, struct err *e);

/*
 * `bytes` of host memory, at most CUDA_ARGUMENTS, as device memory, for kernels that are started on
 * the compute stream before the next call. NULL where the device has failed.
 */
const void *cuda_arguments(struct device *d, const void *p, size_t bytes);

/* To be called before anything is put into the compute stream by other ways than cuda_launch. */
void cuda_begin(struct device *d);

/* Makes the calling thread's current device that of `d`. */
bool cuda_enter(struct device *d);

/* Starts a kernel; nothing happens where the device has failed, or the grid is empty. */
template <typename... P, typename... A>
static inline void cuda_launch(struct device *d, cudaStream_t stream, dim3 grid, dim3 block,
			       size_t shared, void (*kernel)(P...), A... args)
{
	cudaLaunchConfig_t c = {};

	if (!cuda_good(d) || !grid.x || !grid.y || !grid.z)
		return;
	if (stream == cuda_of(d)->compute)
		cuda_begin(d);
	c.gridDim = grid;
	c.blockDim = block;
	c.dynamicSmemBytes = shared;
	c.stream = stream;
	/* 48 KiB need no leave, what a kernel has of its own among them */
	if (shared > 40 * 1024 &&
	    !cuda_ok(d, cudaFuncSetAttribute((const void *)kernel,
					     cudaFuncAttributeMaxDynamicSharedMemorySize,
					     (int)shared),
		     "shared memory of a kernel"))
		return;
	cuda_ok(d, cudaLaunchKernelEx(&c, kernel, static_cast<P>(args)...), "starting a kernel");
}

static inline unsigned cuda_blocks(int64_t n, int64_t each)
{
	return (unsigned)((n + each - 1) / each);
}

/* ---- weights --------------------------------------------------------------------------------- */

/*
 * The handle of a weight. Matrices lie one by one, each allocated when its first row is filled:
 * [rows, cols] packed, as F32 for vectors, the operand dtype for products, the file's for tables;
 * gate rows before up rows. Of packed storage they are codes, quant_row_bytes a row, and `dtype` is
 * what they become.
 *
 * Scales of a packed matrix: for every 64 rows 64 bytes, which of `slots` rows of scales each has,
 * counted from 1 (0 = the row was never filled, its numbers are 0), and those rows of `scale_row`
 * bytes: chunks of `chunk` bytes (struct ref_scales).
 */
struct cuda_weight {
	enum dtype dtype;
	void **matrix;		/* host [count]: device memory, or NULL */
	void **matrix_device;	/* the same in device memory; made by ready */
	const unsigned char *scales;	/* device, [count, chunks * chunk]; NULL = plain */
	int64_t chunks;
	size_t chunk, scale_row;
	int slots;
	struct cuda_filling *filling;	/* between alloc and ready */
};

static inline const struct cuda_weight *cuda_weight_of(const struct weight *w)
{
	return (const struct cuda_weight *)w->handle;
}

/* A USE_VECTOR weight's numbers, in device memory. */
static inline const float *cuda_vector(const struct weight *w)
{
	return (const float *)cuda_weight_of(w)->matrix[0];
}

/* The dtype in which a product with `w` takes its operands. */
static inline enum dtype cuda_operand(const struct weight *w, enum dtype compute)
{
	return w->unit == WEIGHT_FP32 ? DT_F32 : compute;
}

/* ---- products -------------------------------------------------------------------------------- */

/*
 * out[m,n] = x[m,k] w[n,k]^T (+ out with `add`) (+ bias [n] F32). x and w are of `operand`, F32 or
 * BF16, sums in F32; `ld` elements from one row to the next. `count` > 1: as many products, `step`
 * elements apart in each operand. All in device memory, on the compute stream.
 */
struct gemm {
	int64_t m, n, k;
	enum dtype operand, result;
	const void *x, *w;
	void *out;
	int64_t x_ld, w_ld, out_ld;
	int64_t count, x_step, w_step, out_step;
	const float *bias;
	bool add;
	bool across;	/* w is [k, *]: sums run down its rows */
};

int blas_open(struct cuda *c, struct err *e);
void blas_close(struct cuda *c);	/* legal where it was not opened */
/* Whether cuBLASLt has such results; others come from a slower kernel of our own. */
bool blas_takes(enum dtype operand, enum dtype result, bool bias);
void blas_gemm(struct device *d, const struct gemm *g);

/* x as operands, [rows, cols] without gaps. */
void cuda_round_rows(struct device *d, void *out, enum dtype operand, struct tensor x);

/* ---- verbs and the rest of the table --------------------------------------------------------- */

/* What fills weights (weight.cu); seconds that copies took so far. */
int cuda_uploads_open(struct cuda *c, struct err *e);
void cuda_uploads_close(struct cuda *c);	/* legal where it was not opened */
double cuda_uploads_seconds(struct cuda *c);

int cuda_weight_alloc(struct device *d, struct weight *w, struct err *e);
int cuda_weight_fill(struct device *d, struct weight *w, int64_t index, int64_t row0, int64_t n,
		     const void *src, enum dtype from, const void *scales, struct err *e);
int cuda_weight_ready(struct device *d, struct weight *w, struct err *e);
void cuda_weight_free(struct device *d, struct weight *w);
void cuda_rows(struct device *d, struct tensor out, const struct weight *table, struct tensor ids);
void cuda_matmul(struct device *d, struct tensor out, struct tensor x, const struct weight *w,
		 const struct weight *bias, bool add);
void cuda_matmul_gate(struct device *d, struct tensor out, struct tensor x, const struct weight *w,
		      const struct act *a);
void cuda_norm(struct device *d, struct tensor out, struct tensor x, const struct weight *w,
	       float eps, int64_t width);
void cuda_layer_norm(struct device *d, struct tensor out, struct tensor x, const struct weight *w,
		     const struct weight *bias, float eps, int64_t width);
void cuda_rope(struct device *d, struct tensor x, int heads, const struct weight *norm, float eps,
	       const struct rope *r, struct tensor pos);
void cuda_attention(struct device *d, struct tensor out, struct tensor q, struct tensor k,
		    struct tensor v, const struct attention *a, const struct piece *pieces, int n);
void cuda_choose(struct device *d, struct tensor keys, struct tensor q, struct tensor k,
		 struct tensor w, const struct piece *pieces, int n);
void cuda_attention_at(struct device *d, struct tensor out, struct tensor q, struct tensor k,
		       struct tensor v, struct tensor keys, const struct attention *a,
		       const struct piece *pieces, int n);
void cuda_product(struct device *d, struct tensor out, struct tensor x, struct tensor y,
		  const struct grouped *g);
void cuda_copy(struct device *d, struct tensor out, int64_t out_step, struct tensor x,
	       int64_t x_step, int64_t width, int n);
void cuda_gate(struct device *d, struct tensor out, struct tensor x, const struct act *a);
void cuda_add(struct device *d, struct tensor x, struct tensor y);
void cuda_route(struct device *d, struct tensor ids, struct tensor weights, struct tensor logits,
		const struct router *r);
void cuda_experts(struct device *d, struct tensor sum, struct tensor x, struct tensor ids,
		  struct tensor weights, const struct experts *ex, bool add);
void cuda_pick(struct device *d, struct tensor out, struct tensor x, struct tensor index);
void cuda_combine(struct device *d, struct tensor sum, struct tensor y, struct tensor index,
		  struct tensor weights, bool add);

#endif
