/* SPDX-License-Identifier: Apache-2.0 */
/* The device: streams, memory, what goes to it and comes from it, and the table of verbs. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "number.cuh"

extern "C" {
#include "mem.h"
}

#define DOWN_PART ((size_t)16 << 20)	/* bytes of states that go to the host at once */
#define OWN_SHARED   4096		/* shared memory that kernels may have of their own */
#define MOST_THREADS 16			/* of the host, for reading and filling */

/* ---- errors ---------------------------------------------------------------------------------- */

int cuda_check(cudaError_t rc, const char *what, struct err *e)
{
	if (rc == cudaSuccess)
		return 0;
	cudaGetLastError();	/* not to be met again by who calls next */
	return err_fail(e, "%s: CUDA says '%s'", what, cudaGetErrorString(rc));
}

bool cuda_ok(struct device *d, cudaError_t rc, const char *what)
{
	return !cuda_check(rc, what, &d->err);
}

bool cuda_enter(struct device *d)
{
	return cuda_ok(d, cudaSetDevice(cuda_of(d)->ordinal), "the device");
}

/* ---- opening and closing --------------------------------------------------------------------- */

static int ring_open(struct cuda_ring *r, size_t part, bool host, struct err *e)
{
	r->part = part;
	for (int i = 0; i < CUDA_PARTS; i++)
		if (cuda_check(cudaEventCreate(&r->passed[i]), "an event", e))
			return -1;
	if (host && cuda_check(cudaHostAlloc((void **)&r->host, CUDA_PARTS * part,
					     cudaHostAllocDefault),
			       "pinned host memory", e))
		return -1;
	return cuda_check(cudaMalloc((void **)&r->device, CUDA_PARTS * part), "device memory", e);
}

static void ring_close(struct cuda_ring *r)
{
	for (int i = 0; i < CUDA_PARTS; i++) {
		if (r->passed[i])
			cudaEventDestroy(r->passed[i]);
	}
	if (r->host)
		cudaFreeHost(r->host);
	cudaFree(r->device);
	*r = cuda_ring{};
}

static int clock_open(struct cuda_clock *t, struct err *e)
{
	for (int i = 0; i < CUDA_COPIES; i++)
		if (cuda_check(cudaEventCreate(&t->began[i]), "an event", e) ||
		    cuda_check(cudaEventCreate(&t->ended[i]), "an event", e))
			return -1;
	return 0;
}

static void clock_close(struct cuda_clock *t)
{
	for (int i = 0; i < CUDA_COPIES; i++) {
		if (t->began[i])
			cudaEventDestroy(t->began[i]);
		if (t->ended[i])
			cudaEventDestroy(t->ended[i]);
	}
}

static void cuda_close(struct device *d)
{
	struct cuda *c = cuda_of(d);
	cudaStream_t stream[] = { c ? c->compute : NULL, c ? c->upload : NULL,
				  c ? c->download : NULL };

	if (!c)
		return;
	cudaSetDevice(c->ordinal);
	for (cudaStream_t s : stream)
		if (s)
			cudaStreamSynchronize(s);
	blas_close(c);
	cuda_uploads_close(c);
	ring_close(&c->arguments);
	ring_close(&c->down);
	clock_close(&c->downloads);
	if (c->began)
		cudaEventDestroy(c->began);
	if (c->ended)
		cudaEventDestroy(c->ended);
	if (c->fault_host)
		cudaFreeHost(c->fault_host);
	cudaFree(c->fault);
	cudaFree(c->work);
	for (cudaStream_t s : stream)
		if (s)
			cudaStreamDestroy(s);
	free(c);
	memset(d, 0, sizeof *d);
}

/* Ranks of a host take its devices in turn; a launcher may show each rank its own alone. */
static int choose_device(struct cuda *c, const struct device_options *o, struct err *e)
{
	int n = 0;
	cudaError_t rc = cudaGetDeviceCount(&n);

	if (rc != cudaSuccess || n < 1) {
		cudaGetLastError();
		return err_refuse(e,
				  "no CUDA device can be used here (CUDA says '%s'): run on a "
				  "machine that has one, or plan with --device cpu",
				  cudaGetErrorString(rc == cudaSuccess ? cudaErrorNoDevice : rc));
	}
	c->ordinal = o->local_rank % n;
	return cuda_check(cudaSetDevice(c->ordinal), "the device", e);
}

static int read_properties(struct cuda *c, enum dtype compute, struct err *e)
{
	int shared = 0;
	const struct {
		int *value;
		enum cudaDeviceAttr attribute;
	} all[] = { { &c->sms, cudaDevAttrMultiProcessorCount },
		    { &c->major, cudaDevAttrComputeCapabilityMajor },
		    { &c->minor, cudaDevAttrComputeCapabilityMinor },
		    { &shared, cudaDevAttrMaxSharedMemoryPerBlockOptin } };

	for (const auto &a : all)
		if (cuda_check(cudaDeviceGetAttribute(a.value, a.attribute, c->ordinal),
			       "the device's properties", e))
			return -1;
	c->shared_most = (size_t)shared - OWN_SHARED;
	if (c->major < 8)
		return err_refuse(e,
				  "CUDA device %d has compute capability %d.%d, but 8.0 (Ampere) or "
				  "newer is needed%s",
				  c->ordinal, c->major, c->minor,
				  compute == DT_BF16 ? " for bf16 products" : "");
	return 0;
}

static int open_streams(struct cuda *c, struct err *e)
{
	cudaStream_t *stream[] = { &c->compute, &c->upload, &c->download };

	for (cudaStream_t *s : stream)
		if (cuda_check(cudaStreamCreateWithFlags(s, cudaStreamNonBlocking), "a stream", e))
			return -1;
	return cuda_check(cudaEventCreate(&c->began), "an event", e) ||
			       cuda_check(cudaEventCreate(&c->ended), "an event", e)
		       ? -1
		       : 0;
}

/* Weights that go leave their memory to those that come. */
static int keep_pool(struct cuda *c, struct err *e)
{
	cudaMemPool_t pool;
	uint64_t all = UINT64_MAX;

	return cuda_check(cudaDeviceGetDefaultMemPool(&pool, c->ordinal), "the memory pool", e) ||
			       cuda_check(cudaMemPoolSetAttribute(
						  pool, cudaMemPoolAttrReleaseThreshold, &all),
					  "the memory pool", e)
		       ? -1
		       : 0;
}

static int open_memory(struct cuda *c, struct err *e)
{
	if (keep_pool(c, e) ||
	    cuda_check(cudaMalloc(&c->work, CUDA_WORK), "device memory", e) ||
	    cuda_check(cudaMalloc((void **)&c->fault, sizeof *c->fault), "device memory", e) ||
	    cuda_check(cudaHostAlloc((void **)&c->fault_host, sizeof *c->fault_host,
				     cudaHostAllocDefault),
		       "pinned host memory", e) ||
	    cuda_check(cudaMemsetAsync(c->fault, 0, sizeof *c->fault, c->compute), "device memory",
		       e))
		return -1;
	return ring_open(&c->arguments, CUDA_ARGUMENTS, true, e) ||
			       ring_open(&c->down, DOWN_PART, false, e) ||
			       clock_open(&c->downloads, e)
		       ? -1
		       : 0;
}

static int host_threads(const struct device_options *o)
{
	cpu_set_t set;
	int cores = sched_getaffinity(0, sizeof set, &set) ? 1 : CPU_COUNT(&set);
	int n = o->threads > 0 ? o->threads : cores / (o->local_size > 1 ? o->local_size : 1);

	return n < 1 ? 1 : n < MOST_THREADS ? n : MOST_THREADS;
}

static int cuda_open(struct device *d, const struct device_options *o, struct err *e)
{
	struct cuda *c = (struct cuda *)mem_calloc(1, sizeof *c, e);

	if (!c)
		return -1;
	d->be = &backend_cuda;
	d->compute = o->compute;
	d->threads = host_threads(o);
	d->state = c;
	if (choose_device(c, o, e) || read_properties(c, o->compute, e) || open_streams(c, e) ||
	    open_memory(c, e) || cuda_uploads_open(c, e) || blas_open(c, e)) {
		cuda_close(d);
		return -1;
	}
	return 0;
}

/* ---- memory ---------------------------------------------------------------------------------- */

static int empty_pool(struct cuda *c, struct err *e)
{
	cudaMemPool_t pool;

	return cuda_check(cudaStreamSynchronize(c->upload), "filling weights", e) ||
			       cuda_check(cudaStreamSynchronize(c->compute), "the device", e) ||
			       cuda_check(cudaDeviceGetDefaultMemPool(&pool, c->ordinal),
					  "the memory pool", e) ||
			       cuda_check(cudaMemPoolTrimTo(pool, 0), "the memory pool", e)
		       ? -1
		       : 0;
}

static void *cuda_alloc(struct device *d, size_t bytes, struct err *e)
{
	void *p = NULL;
	char what[64];

	snprintf(what, sizeof what, "%zu bytes of device memory", bytes);
	cudaSetDevice(cuda_of(d)->ordinal);
	bytes = bytes ? bytes : 1;
	/* weights that went may have left all there is to the pool */
	if (cudaMalloc(&p, bytes) == cudaSuccess)
		return p;
	cudaGetLastError();
	if (empty_pool(cuda_of(d), e))
		return NULL;
	return cuda_check(cudaMalloc(&p, bytes), what, e) ? NULL : p;
}

static void cuda_free(struct device *d, void *p)
{
	struct cuda *c = cuda_of(d);

	if (!p)
		return;
	cudaSetDevice(c->ordinal);
	/* cudaFree may wait for the whole device, or not: what is under way must have ended */
	cudaStreamSynchronize(c->compute);
	cudaStreamSynchronize(c->download);
	cudaFree(p);
}

/* On the stream of the weights: what it has to do with is on its way there, or has come by it. */
static int cuda_move(struct device *d, void *to, const void *from, size_t bytes, struct err *e)
{
	struct cuda *c = cuda_of(d);

	return cuda_check(cudaSetDevice(c->ordinal), "the device", e) ||
			       cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault,
							  c->upload),
					  "a copy", e) ||
			       cuda_check(cudaStreamSynchronize(c->upload), "a copy", e)
		       ? -1
		       : 0;
}

static int cuda_room(struct device *d, uint64_t *left, uint64_t *all, struct err *e)
{
	size_t l, a;

	cudaSetDevice(cuda_of(d)->ordinal);
	if (cuda_check(cudaMemGetInfo(&l, &a), "the device's memory", e))
		return -1;
	*left = l;
	*all = a;
	return 0;
}

static int cuda_pin(struct device *d, void *p, size_t bytes, struct err *e)
{
	cudaSetDevice(cuda_of(d)->ordinal);
	return cuda_check(cudaHostRegister(p, bytes, cudaHostRegisterDefault), "pinning memory", e);
}

static void cuda_unpin(struct device *d, void *p)
{
	cudaSetDevice(cuda_of(d)->ordinal);
	if (p && cudaHostUnregister(p) != cudaSuccess)
		cudaGetLastError();
}

/* ---- small things to the device -------------------------------------------------------------- */

void cuda_begin(struct device *d)
{
	struct cuda *c = cuda_of(d);

	if (c->busy)
		return;
	c->busy = true;
	cuda_ok(d, cudaEventRecord(c->began, c->compute), "an event");
}

/* Room for `bytes` in the ring, whose earlier content the compute stream has passed. */
static char *ring_take(struct device *d, struct cuda_ring *r, size_t bytes)
{
	struct cuda *c = cuda_of(d);
	char *p;

	if (r->at + bytes > r->part) {
		if (!cuda_ok(d, cudaEventRecord(r->passed[r->current], c->compute), "an event"))
			return NULL;
		r->used[r->current] = true;
		r->current = (r->current + 1) % CUDA_PARTS;
		r->at = 0;
		if (r->used[r->current] &&
		    !cuda_ok(d, cudaEventSynchronize(r->passed[r->current]), "the device"))
			return NULL;
	}
	p = r->host + (size_t)r->current * r->part + r->at;
	r->at = (r->at + bytes + 255) & ~(size_t)255;
	return p;
}

/* Words of pinned host memory, which kernels read where it is. */
__global__ static void fetch(uint32_t *to, const uint32_t *from, unsigned n)
{
	for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n;
	     i += gridDim.x * blockDim.x)
		to[i] = from[i];
}

/* By a kernel: a copy would stand behind those of weights, which have the same engine. */
const void *cuda_arguments(struct device *d, const void *p, size_t bytes)
{
	struct cuda *c = cuda_of(d);
	struct cuda_ring *r = &c->arguments;
	char *host, *device;

	if (!cuda_good(d))
		return NULL;
	if (bytes > CUDA_ARGUMENTS) {
		err_fail(&d->err, "%zu bytes of arguments are more than fit", bytes);
		return NULL;
	}
	cuda_begin(d);
	host = ring_take(d, r, bytes);
	if (!host)
		return NULL;
	memcpy(host, p, bytes);
	device = r->device + (host - r->host);
	/* places begin and end on whole words */
	cuda_launch(d, c->compute, cuda_blocks((int64_t)bytes, 4096), 256, 0, fetch,
		    (uint32_t *)device, (const uint32_t *)host, (unsigned)((bytes + 3) / 4));
	return cuda_good(d) ? device : NULL;
}

static void upload_rows(struct device *d, struct tensor out, const char *src)
{
	struct cuda *c = cuda_of(d);
	size_t row = (size_t)out.cols * dtype_size(out.dtype),
	       pitch = (size_t)out.ld * dtype_size(out.dtype);
	char *host = ring_take(d, &c->arguments, row * (size_t)out.rows);

	if (!host)
		return;
	memcpy(host, src, row * (size_t)out.rows);
	cuda_ok(d, cudaMemcpy2DAsync(out.p, pitch, host, row, row, (size_t)out.rows,
				     cudaMemcpyHostToDevice, c->compute),
		"upload");
}

/* Columns of one row, where not even one row fits the ring. */
static void upload_long_row(struct device *d, struct tensor row, const char *src)
{
	int64_t most = (int64_t)(CUDA_ARGUMENTS / dtype_size(row.dtype));

	for (int64_t i = 0; i < row.cols; i += most)
		upload_rows(d,
			    tensor_cols(row, i, row.cols - i < most ? row.cols - i : most),
			    src + (size_t)i * dtype_size(row.dtype));
}

static void cuda_upload(struct device *d, struct tensor out, const void *src)
{
	size_t row = (size_t)out.cols * dtype_size(out.dtype);
	int64_t most = row ? (int64_t)(CUDA_ARGUMENTS / row) : 0;

	if (!cuda_good(d) || !row || !out.rows)
		return;
	cuda_begin(d);
	for (int64_t t = 0; t < out.rows; t += most ? most : 1) {
		const char *from = (const char *)src + (size_t)t * row;
		int64_t n = out.rows - t < most ? out.rows - t : most;

		if (most)
			upload_rows(d, tensor_rows(out, t, n), from);
		else
			upload_long_row(d, tensor_rows(out, t, 1), from);
	}
}

/* ---- states to the host ---------------------------------------------------------------------- */

#define PACK_THREADS 256

/* x, packed, as `to`; neighbouring threads take neighbouring columns. */
__global__ static void __launch_bounds__(PACK_THREADS)
	pack_rows(char *out, enum dtype to, struct view x)
{
	for (int64_t t = blockIdx.x; t < x.rows; t += gridDim.x)
		for (int64_t i = threadIdx.x; i < x.cols; i += PACK_THREADS)
			save_number(out, to, t * x.cols + i, view_get(x, t, i));
}

/* The same where nothing is converted: elements of `size` bytes. */
template <typename T>
__global__ static void __launch_bounds__(PACK_THREADS) pack_same(T *out, struct view x)
{
	for (int64_t t = blockIdx.x; t < x.rows; t += gridDim.x)
		for (int64_t i = threadIdx.x; i < x.cols; i += PACK_THREADS)
			out[t * x.cols + i] = ((const T *)x.p)[t * x.ld + i];
}

static void pack(struct device *d, char *out, enum dtype to, struct tensor x)
{
	struct cuda *c = cuda_of(d);
	unsigned blocks = x.rows < 65535 ? (unsigned)x.rows : 65535;
	struct view v = view_of(x);

	if (to != x.dtype)
		cuda_launch(d, c->compute, blocks, PACK_THREADS, 0, pack_rows, out, to, v);
	else if (dtype_size(to) == 8)
		cuda_launch(d, c->compute, blocks, PACK_THREADS, 0, pack_same<uint64_t>,
			    (uint64_t *)out, v);
	else if (dtype_size(to) == 4)
		cuda_launch(d, c->compute, blocks, PACK_THREADS, 0, pack_same<uint32_t>,
			    (uint32_t *)out, v);
	else if (dtype_size(to) == 2)
		cuda_launch(d, c->compute, blocks, PACK_THREADS, 0, pack_same<uint16_t>,
			    (uint16_t *)out, v);
	else
		cuda_launch(d, c->compute, blocks, PACK_THREADS, 0, pack_same<uint8_t>,
			    (uint8_t *)out, v);
}

/* Counts a copy, unless it is still under way: nobody waits for the sake of its time. */
static void clock_count(struct cuda_clock *t, int i)
{
	float ms;

	if (t->used[i] && cudaEventQuery(t->ended[i]) == cudaSuccess &&
	    cudaEventElapsedTime(&ms, t->began[i], t->ended[i]) == cudaSuccess)
		t->seconds += 1e-3 * ms;
	t->used[i] = false;
	cudaGetLastError();
}

/* A part of the ring that an earlier copy has left. */
static char *down_take(struct device *d)
{
	struct cuda *c = cuda_of(d);
	struct cuda_ring *r = &c->down;
	int i = r->current = (r->current + 1) % CUDA_PARTS;

	if (r->used[i] &&
	    !cuda_ok(d, cudaStreamWaitEvent(c->compute, r->passed[i], 0), "a copy"))
		return NULL;
	return r->device + (size_t)i * r->part;
}

/* Rows that fit a part of the ring: packed by the compute stream, taken by the other. */
static void store_rows(struct device *d, char *dst, enum dtype to, int64_t dst_ld,
		       struct tensor x)
{
	struct cuda *c = cuda_of(d);
	size_t size = dtype_size(to), row = (size_t)x.cols * size;
	char *room = down_take(d);
	struct cuda_ring *r = &c->down;
	struct cuda_clock *t = &c->downloads;
	int i = r->current, k = t->current = (t->current + 1) % CUDA_COPIES;

	if (!room)
		return;
	clock_count(t, k);
	pack(d, room, to, x);
	/* began[] stands in the download stream: what it waits for is not its time */
	if (!cuda_ok(d, cudaEventRecord(c->ended, c->compute), "an event") ||
	    !cuda_ok(d, cudaStreamWaitEvent(c->download, c->ended, 0), "an event") ||
	    !cuda_ok(d, cudaEventRecord(t->began[k], c->download), "an event") ||
	    !cuda_ok(d, cudaMemcpy2DAsync(dst, (size_t)dst_ld * size, room, row, row,
					  (size_t)x.rows, cudaMemcpyDeviceToHost, c->download),
		     "store") ||
	    !cuda_ok(d, cudaEventRecord(t->ended[k], c->download), "an event") ||
	    !cuda_ok(d, cudaEventRecord(r->passed[i], c->download), "an event"))
		return;
	t->used[k] = r->used[i] = true;
}

static void cuda_store(struct device *d, void *dst, enum dtype to, int64_t dst_ld, struct tensor x)
{
	size_t size = dtype_size(to);
	int64_t cols = (int64_t)(DOWN_PART / size);

	if (!cuda_good(d) || !x.rows || !x.cols)
		return;
	cols = x.cols < cols ? x.cols : cols;
	for (int64_t c = 0; c < x.cols; c += cols) {
		int64_t n = x.cols - c < cols ? x.cols - c : cols,
			most = (int64_t)(DOWN_PART / ((size_t)n * size));

		for (int64_t t = 0; t < x.rows; t += most)
			store_rows(d, (char *)dst + (size_t)(t * dst_ld + c) * size, to, dst_ld,
				   tensor_cols(tensor_rows(x, t, x.rows - t < most ? x.rows - t
										   : most),
					       c, n));
	}
}

/* ---- waiting --------------------------------------------------------------------------------- */

static void name_fault(const struct cuda_fault *f, struct err *e)
{
	switch (f->kind) {
	case FAULT_NONE:
		break;
	case FAULT_ROW_ID:
		err_refuse(e, "row id %lld is outside a table of %lld rows", f->a, f->b);
		break;
	case FAULT_PICK:
		err_refuse(e, "row %lld cannot be picked from %lld rows", f->a, f->b);
		break;
	case FAULT_SLOT:
		err_refuse(e, "slot %d of a token is row %lld of its parts, of which there are %lld",
			   f->c, f->a, f->b);
		break;
	case FAULT_KEY:
		err_refuse(e, "key %lld of a row of %lld is out of its place", f->a, f->b);
		break;
	}
}

static void count_compute(struct device *d)
{
	struct cuda *c = cuda_of(d);
	float ms = 0;

	if (!c->busy)
		return;
	c->busy = false;
	if (cuda_ok(d, cudaEventElapsedTime(&ms, c->began, c->ended), "an event"))
		c->compute_seconds += 1e-3 * ms;
}

static int cuda_sync(struct device *d, struct err *e)
{
	struct cuda *c = cuda_of(d);

	/* also after a failure: memory is about to go that copies may still use */
	if (!cuda_enter(d) || !cuda_ok(d, cudaEventRecord(c->ended, c->compute), "an event") ||
	    !cuda_ok(d, cudaMemcpyAsync(c->fault_host, c->fault, sizeof *c->fault,
					cudaMemcpyDeviceToHost, c->compute),
		     "the device"))
		goto out;
	if (cuda_ok(d, cudaStreamSynchronize(c->compute), "the device")) {
		count_compute(d);
		name_fault(c->fault_host, &d->err);
		if (c->fault_host->kind != FAULT_NONE)	/* named once, as other failures are */
			cuda_ok(d, cudaMemsetAsync(c->fault, 0, sizeof *c->fault, c->compute),
				"the device");
	}
	if (cuda_ok(d, cudaStreamSynchronize(c->download), "store"))
		for (int i = 0; i < CUDA_COPIES; i++)
			clock_count(&c->downloads, i);
out:
	if (!d->err.code)
		return 0;
	if (!e->code)
		*e = d->err;
	return -1;
}

static void cuda_times(struct device *d, struct device_times *t)
{
	struct cuda *c = cuda_of(d);

	t->compute = c->compute_seconds;
	t->upload = cuda_uploads_seconds(c);
	t->download = c->downloads.seconds;
}

/* ---- the table ------------------------------------------------------------------------------- */

extern "C" const struct backend backend_cuda = {
	.name = "cuda",
	.host_memory = false,
	.open = cuda_open,
	.close = cuda_close,
	.sync = cuda_sync,
	.alloc = cuda_alloc,
	.free = cuda_free,
	.upload = cuda_upload,
	.store = cuda_store,
	.weight_alloc = cuda_weight_alloc,
	.weight_fill = cuda_weight_fill,
	.weight_ready = cuda_weight_ready,
	.weight_free = cuda_weight_free,
	.rows = cuda_rows,
	.matmul = cuda_matmul,
	.matmul_gate = cuda_matmul_gate,
	.norm = cuda_norm,
	.layer_norm = cuda_layer_norm,
	.rope = cuda_rope,
	.attention = cuda_attention,
	.choose = cuda_choose,
	.attention_at = cuda_attention_at,
	.product = cuda_product,
	.copy = cuda_copy,
	.gate = cuda_gate,
	.add = cuda_add,
	.route = cuda_route,
	.experts = cuda_experts,
	.pick = cuda_pick,
	.combine = cuda_combine,
	.move = cuda_move,
	.pin = cuda_pin,
	.unpin = cuda_unpin,
	.room = cuda_room,
	.times = cuda_times,
};
