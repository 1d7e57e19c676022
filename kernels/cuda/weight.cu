/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Weights in device memory. The loader's threads fill them: rows go through pinned memory to the
 * device as they are stored, and are converted there.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdlib.h>
#include <string.h>

#include "number.cuh"

extern "C" {
#include "mem.h"
#include "quant.h"
#include "ref/ref.h"
}

#define WAYS	4			/* runs of rows that may be under way at once */
#define PART	((size_t)8 << 20)	/* bytes of one */
#define THREADS 256

/* A buffer on either side. Who fills has one for himself, until the device has passed it. */
struct way {
	char *host, *device;
	cudaEvent_t began, passed;
	bool used, taken;
};

struct cuda_uploads {
	pthread_mutex_t lock;
	pthread_cond_t free;
	struct way way[WAYS];
	double seconds;
};

/* What is needed until the weight is ready. */
struct cuda_filling {
	pthread_mutex_t lock;
	struct ref_scales scales;
};

/* ---- ways to the device ---------------------------------------------------------------------- */

int cuda_uploads_open(struct cuda *c, struct err *e)
{
	struct cuda_uploads *u = (struct cuda_uploads *)mem_calloc(1, sizeof *u, e);

	if (!u)
		return -1;
	pthread_mutex_init(&u->lock, NULL);
	pthread_cond_init(&u->free, NULL);
	c->uploads = u;
	for (struct way &w : u->way)
		if (cuda_check(cudaHostAlloc((void **)&w.host, PART, cudaHostAllocDefault),
			       "pinned host memory", e) ||
		    cuda_check(cudaMalloc((void **)&w.device, PART), "device memory", e) ||
		    cuda_check(cudaEventCreate(&w.began), "an event", e) ||
		    cuda_check(cudaEventCreate(&w.passed), "an event", e))
			return -1;
	return 0;
}

void cuda_uploads_close(struct cuda *c)
{
	struct cuda_uploads *u = c->uploads;

	if (!u)
		return;
	for (struct way &w : u->way) {
		if (w.host)
			cudaFreeHost(w.host);
		cudaFree(w.device);
		if (w.began)
			cudaEventDestroy(w.began);
		if (w.passed)
			cudaEventDestroy(w.passed);
	}
	pthread_mutex_destroy(&u->lock);
	pthread_cond_destroy(&u->free);
	free(u);
	c->uploads = NULL;
}

/* Under lock: the time of a way's last copy is counted once. */
static void count_way(struct cuda_uploads *u, struct way *w)
{
	float ms;

	if (w->used && cudaEventElapsedTime(&ms, w->began, w->passed) == cudaSuccess)
		u->seconds += 1e-3 * ms;
	w->used = false;
	cudaGetLastError();	/* a way that is still under way is none */
}

double cuda_uploads_seconds(struct cuda *c)
{
	struct cuda_uploads *u = c->uploads;
	double seconds;

	pthread_mutex_lock(&u->lock);
	for (struct way &w : u->way)
		if (!w.taken && w.used && cudaEventQuery(w.passed) == cudaSuccess)
			count_way(u, &w);
	seconds = u->seconds;
	pthread_mutex_unlock(&u->lock);
	cudaGetLastError();
	return seconds;
}

static struct way *find_way(struct cuda_uploads *u)
{
	for (struct way &w : u->way)
		if (!w.taken)
			return &w;
	return NULL;
}

static void give_way(struct cuda_uploads *u, struct way *w)
{
	pthread_mutex_lock(&u->lock);
	w->taken = false;
	pthread_cond_signal(&u->free);
	pthread_mutex_unlock(&u->lock);
}

/* A way that the device has passed; NULL with `e` set. */
static struct way *take_way(struct cuda_uploads *u, struct err *e)
{
	struct way *w;
	int rc = 0;

	pthread_mutex_lock(&u->lock);
	while (!(w = find_way(u)))
		pthread_cond_wait(&u->free, &u->lock);
	w->taken = true;
	pthread_mutex_unlock(&u->lock);
	if (w->used)
		rc = cuda_check(cudaEventSynchronize(w->passed), "filling a weight", e);
	pthread_mutex_lock(&u->lock);
	if (!rc)
		count_way(u, w);
	pthread_mutex_unlock(&u->lock);
	if (!rc)
		return w;
	give_way(u, w);
	return NULL;
}

/* ---- alloc and free -------------------------------------------------------------------------- */

static enum dtype kept_as(const struct weight *w, enum dtype compute)
{
	switch (w->use) {
	case USE_PRODUCT:
	case USE_GATED:
		return cuda_operand(w, compute);
	case USE_VECTOR:
		return DT_F32;
	case USE_TABLE:
	case USE_RAW:
		break;
	}
	return w->stored;
}

/* Bytes of a row as kept. */
static int64_t row_bytes(const struct weight *w, enum dtype kept)
{
	return w->quant ? (int64_t)quant_row_bytes(w->quant, w->cols)
			: mem_mul(w->cols, (int64_t)dtype_size(kept));
}

/* Of a matrix, rounded up so that a last row may be read by 16 bytes. */
static size_t matrix_bytes(const struct weight *w, enum dtype kept)
{
	return ((size_t)(w->rows * row_bytes(w, kept)) + 15) & ~(size_t)15;
}

static void release_filling(struct cuda_weight *h)
{
	if (!h->filling)
		return;
	ref_scales_release(&h->filling->scales);
	pthread_mutex_destroy(&h->filling->lock);
	free(h->filling);
	h->filling = NULL;
}

static struct cuda_filling *new_filling(const struct weight *w, struct err *e)
{
	struct cuda_filling *f = (struct cuda_filling *)mem_calloc(1, sizeof *f, e);

	if (!f)
		return NULL;
	if (w->quant && ref_scales_init(&f->scales, w, e)) {
		free(f);
		return NULL;
	}
	pthread_mutex_init(&f->lock, NULL);
	return f;
}

int cuda_weight_alloc(struct device *d, struct weight *w, struct err *e)
{
	enum dtype kept = kept_as(w, d->compute);
	struct cuda_weight *h;

	if (ref_weight_usable(w, e))
		return -1;
	if (mem_mul(mem_mul(w->count, w->rows), row_bytes(w, kept)) < 0)
		return err_fail(
			e,
			"a weight of %lld x %lld x %lld elements is larger than the address space",
			(long long)w->count, (long long)w->rows, (long long)w->cols);
	h = (struct cuda_weight *)mem_calloc(1, sizeof *h, e);
	if (!h)
		return -1;
	w->handle = h;
	h->dtype = kept;
	h->matrix = (void **)mem_calloc((size_t)w->count, sizeof *h->matrix, e);
	h->filling = h->matrix ? new_filling(w, e) : NULL;
	if (h->filling)
		return 0;
	cuda_weight_free(d, w);
	return -1;
}

/* Behind what the compute stream still does with it. */
void cuda_weight_free(struct device *d, struct weight *w)
{
	struct cuda_weight *h = (struct cuda_weight *)w->handle;
	cudaStream_t s = cuda_of(d)->compute;

	if (!h)
		return;
	cudaSetDevice(cuda_of(d)->ordinal);
	/* a filling that failed may have left work behind in its stream */
	if (h->filling)
		cudaStreamSynchronize(cuda_of(d)->upload);
	for (int64_t i = 0; h->matrix && i < w->count; i++)
		if (h->matrix[i])
			cudaFreeAsync(h->matrix[i], s);
	if (h->matrix_device)
		cudaFreeAsync(h->matrix_device, s);
	if (h->scales)
		cudaFreeAsync((void *)h->scales, s);
	release_filling(h);
	free(h->matrix);
	free(h);
	w->handle = NULL;
}

/* ---- filling --------------------------------------------------------------------------------- */

/* n numbers of one dtype as another, rounded to `unit` first where that is BF16. */
__global__ static void __launch_bounds__(THREADS)
	convert(char *out, enum dtype to, const char *in, enum dtype from, enum dtype unit,
		int64_t n)
{
	for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < n;
	     i += gridDim.x * (int64_t)THREADS)
		save_number(out, to, i, round_operand(load_stored(in, from, i, to), unit));
}

static int start_convert(struct cuda *c, char *out, enum dtype to, const char *in,
			 enum dtype from, enum dtype unit, int64_t n, struct err *e)
{
	cudaLaunchConfig_t l = {};

	l.gridDim = n < 1024 * THREADS ? cuda_blocks(n, THREADS) : 1024;
	l.blockDim = THREADS;
	l.stream = c->upload;
	return cuda_check(cudaLaunchKernelEx(&l, convert, out, to, in, from, unit, n),
			  "starting a kernel", e);
}

/* The matrix, with zeros in it, made by who comes first. */
static char *matrix_of(struct cuda *c, struct weight *w, int64_t index, struct err *e)
{
	struct cuda_weight *h = (struct cuda_weight *)w->handle;
	size_t bytes = matrix_bytes(w, h->dtype);
	void *p;

	pthread_mutex_lock(&h->filling->lock);
	p = h->matrix[index];
	if (!p && !cuda_check(cudaMallocAsync(&p, bytes ? bytes : 16, c->upload),
			      "device memory for a weight", e)) {
		h->matrix[index] = p;
		if (cuda_check(cudaMemsetAsync(p, 0, bytes, c->upload), "a weight", e))
			p = NULL;
	}
	pthread_mutex_unlock(&h->filling->lock);
	return (char *)p;
}

/* Elements on their way: where from, and what becomes of them. */
struct sending {
	const char *src;
	bool on_device;			/* src is device memory */
	enum dtype from, to, unit;	/* rounded to the unit's dtype first */
	size_t size, kept;		/* bytes of an element before and after */
	bool same;			/* nothing is converted */
};

/* Bytes, whatever they are. */
static struct sending as_bytes(const void *src, bool on_device)
{
	struct sending s = {};

	s.src = (const char *)src;
	s.on_device = on_device;
	s.size = s.kept = 1;
	s.same = true;
	return s;
}

/* n elements from s->src on to dst, as many as fit a part. */
static int send_part(struct cuda *c, char *dst, const struct sending *s, int64_t first, int64_t n,
		     struct err *e)
{
	enum cudaMemcpyKind kind = s->on_device ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice;
	const char *src = s->src + (size_t)first * s->size;
	size_t bytes = (size_t)n * s->size;
	struct way *way = take_way(c->uploads, e);
	int rc = -1;

	if (!way)
		return -1;
	if (!s->on_device)
		src = (const char *)memcpy(way->host, src, bytes);
	if (cuda_check(cudaEventRecord(way->began, c->upload), "an event", e) ||
	    cuda_check(cudaMemcpyAsync(s->same ? dst : way->device, src, bytes, kind, c->upload),
		       "filling a weight", e) ||
	    (!s->same &&
	     start_convert(c, dst, s->to, way->device, s->from, s->unit, n, e)))
		goto out;
	rc = cuda_check(cudaEventRecord(way->passed, c->upload), "an event", e);
	way->used = !rc;
out:
	if (rc)		/* what has begun must not meet the buffer's next content */
		cudaStreamSynchronize(c->upload);
	give_way(c->uploads, way);
	return rc;
}

/* All n of them; s->src may be used again on return. */
static int send(struct cuda *c, char *dst, const struct sending *s, int64_t n, struct err *e)
{
	int64_t most = (int64_t)(PART / s->size);

	for (int64_t i = 0; i < n; i += most)
		if (send_part(c, dst + (size_t)i * s->kept, s, i, n - i < most ? n - i : most, e))
			return -1;
	return s->on_device ? cuda_check(cudaStreamSynchronize(c->upload), "filling a weight", e)
			    : 0;
}

static bool is_device_memory(const void *p)
{
	struct cudaPointerAttributes a;

	if (cudaPointerGetAttributes(&a, p) == cudaSuccess)
		return a.type == cudaMemoryTypeDevice;
	cudaGetLastError();
	return false;
}

static int fill_usable(const struct weight *w, int64_t index, int64_t row0, int64_t n,
		       enum dtype from, const void *scales, struct err *e)
{
	enum dtype kept = cuda_weight_of(w)->dtype;

	if (index < 0 || index >= w->count || row0 < 0 || n < 0 || n > w->rows - row0)
		return err_fail(
			e,
			"rows %lld..%lld of matrix %lld are outside a weight of %lld x %lld rows",
			(long long)row0, (long long)(row0 + n), (long long)index,
			(long long)w->count, (long long)w->rows);
	if (ref_fill_usable(w, from, scales, e))
		return -1;
	if (!w->quant && from != kept &&
	    (!dtype_is_float(from) || !dtype_is_float(kept) || kept == DT_F64))
		return err_refuse(e, "a weight stored as %s cannot become %s", dtype_name(from),
				  dtype_name(kept));
	return 0;
}

int cuda_weight_fill(struct device *d, struct weight *w, int64_t index, int64_t row0, int64_t n,
		     const void *src, enum dtype from, const void *scales, struct err *e)
{
	struct cuda *c = cuda_of(d);
	struct cuda_weight *h = (struct cuda_weight *)w->handle;
	struct sending s;
	char *dst;

	if (fill_usable(w, index, row0, n, from, scales, e) ||
	    cuda_check(cudaSetDevice(c->ordinal), "the device", e))
		return -1;
	if (!n || !w->cols)
		return 0;
	dst = matrix_of(c, w, index, e);
	if (!dst || (w->quant && ref_scales_put(&h->filling->scales, index, row0, n, scales, e)))
		return -1;
	dst += row0 * row_bytes(w, h->dtype);
	s = as_bytes(src, is_device_memory(src));
	if (w->quant)
		return send(c, dst, &s, n * row_bytes(w, h->dtype), e);
	s.from = from;
	s.to = h->dtype;
	s.unit = w->use == USE_VECTOR ? cuda_operand(w, d->compute) : DT_F32;
	s.size = dtype_size(from);
	s.kept = dtype_size(h->dtype);
	s.same = from == s.to && (s.unit == DT_F32 || s.unit == from);
	return send(c, dst, &s, n * w->cols, e);
}

static int send_scales(struct cuda *c, struct weight *w, struct err *e)
{
	struct cuda_weight *h = (struct cuda_weight *)w->handle;
	const struct ref_scales *s = &h->filling->scales;
	struct sending from = as_bytes(s->data, false);
	size_t bytes = (size_t)(w->count * s->chunks) * s->chunk;
	void *p = NULL;

	h->chunks = s->chunks;
	h->chunk = s->chunk;
	h->scale_row = s->row;
	h->slots = (int)s->slots;
	if (cuda_check(cudaMallocAsync(&p, bytes ? bytes : 16, c->upload),
		       "device memory for scales", e))
		return -1;
	h->scales = (unsigned char *)p;
	return send(c, (char *)p, &from, (int64_t)bytes, e);
}

int cuda_weight_ready(struct device *d, struct weight *w, struct err *e)
{
	struct cuda *c = cuda_of(d);
	struct cuda_weight *h = (struct cuda_weight *)w->handle;
	size_t bytes = (size_t)w->count * sizeof *h->matrix;

	if (cuda_check(cudaSetDevice(c->ordinal), "the device", e) ||
	    (w->quant && send_scales(c, w, e)) ||
	    cuda_check(cudaMallocAsync((void **)&h->matrix_device, bytes ? bytes : 16, c->upload),
		       "device memory for a weight", e) ||
	    cuda_check(cudaMemcpyAsync(h->matrix_device, h->matrix, bytes, cudaMemcpyHostToDevice,
				       c->upload),
		       "filling a weight", e) ||
	    cuda_check(cudaStreamSynchronize(c->upload), "filling a weight", e))
		return -1;
	release_filling(h);
	return 0;
}
