/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA runtime for the emulator. Device memory is host memory, filled with what is no number.
 * A stream is a queue that is worked off when somebody waits for it, and no earlier: memory that is
 * read or freed without waiting is then not what it should be. One lock is held while work runs.
 */
#include <pthread.h>
#include <stdio.h>
#include <time.h>

#include <deque>
#include <map>
#include <vector>

#include <cuda_runtime.h>

#define DEVICES 4	/* that are here, all the same one */
#define SHARED_MOST 232448	/* bytes of a block on compute capability 9.0 */

void emulated_run(const struct cudaLaunchConfig_t *c, const std::function<void()> &body);

struct emulated_event {
	cudaStream_t stream;
	uint64_t at;		/* the stream's work up to here */
	double seconds;		/* when it was passed */
};

struct emulated_stream {
	std::deque<std::function<bool()>> work;	/* false: it has to be asked again */
	uint64_t put, done;
	bool busy;		/* in the work at its front */
};

struct region {
	size_t bytes;
	enum cudaMemoryType type;
};

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static std::map<const char *, struct region> regions;
static thread_local int current;
static thread_local cudaError_t last;

struct locked {
	locked() { pthread_mutex_lock(&lock); }
	~locked() { pthread_mutex_unlock(&lock); }
};

static cudaError_t result(cudaError_t e)
{
	if (e != cudaSuccess)
		last = e;
	return e;
}

static const struct region *find(const void *p)
{
	auto i = regions.upper_bound((const char *)p);

	if (i == regions.begin())
		return NULL;
	--i;
	return (const char *)p < i->first + i->second.bytes ? &i->second : NULL;
}

static bool is_pageable(const void *p)
{
	return !find(p);
}

/* ---- streams --------------------------------------------------------------------------------- */

/* As far as that goes now. Whether it is all. */
static bool run_until(cudaStream_t s, uint64_t at)
{
	while (s->done < at && !s->work.empty()) {
		if (s->busy)
			return false;
		s->busy = true;
		bool ended = s->work.front()();
		s->busy = false;
		if (!ended)
			return false;
		s->work.pop_front();
		s->done++;
	}
	return true;
}

/* For what waits: others may have to do something for it, who need the lock. */
static void finish(cudaStream_t s, uint64_t at)
{
	while (!run_until(s, at)) {
		struct timespec t = { 0, 50000 };

		pthread_mutex_unlock(&lock);
		nanosleep(&t, NULL);
		pthread_mutex_lock(&lock);
	}
}

static void put(cudaStream_t s, std::function<bool()> work)
{
	struct locked l;

	if (!s) {
		fprintf(stderr, "emulated runtime: the default stream is not for us\n");
		abort();
	}
	s->work.push_back(std::move(work));
	s->put++;
}

void emulated_enqueue_steps(cudaStream_t s, int (*step)(void *), void *ctx)
{
	put(s, [=]() { return step(ctx) != 0; });
}

void emulated_enqueue(cudaStream_t s, std::function<void()> work)
{
	put(s, [work]() {
		work();
		return true;
	});
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags)
{
	(void)flags;
	*s = new emulated_stream();
	return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
	struct locked l;

	finish(s, s->put);
	return cudaSuccess;
}

/* Nothing is done by asking, except every other time: who polls must get there. */
cudaError_t cudaStreamQuery(cudaStream_t s)
{
	struct locked l;

	if (s->done == s->put)
		return cudaSuccess;
	run_until(s, s->put);
	return cudaErrorNotReady;
}

cudaError_t cudaStreamDestroy(cudaStream_t s)
{
	cudaStreamSynchronize(s);
	delete s;
	return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void)
{
	fprintf(stderr, "emulated runtime: wait for a stream instead of the device\n");
	abort();
}

cudaError_t cudaLaunchHostFunc(cudaStream_t s, void (*f)(void *), void *ctx)
{
	emulated_enqueue(s, [=]() { f(ctx); });
	return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags)
{
	(void)flags;
	*e = new emulated_event();
	return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *e)
{
	return cudaEventCreateWithFlags(e, 0);
}

cudaError_t cudaEventDestroy(cudaEvent_t e)
{
	struct locked l;

	/* its recording may still be queued */
	if (e->stream)
		finish(e->stream, e->at);
	delete e;
	return cudaSuccess;
}

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s)
{
	struct locked l;

	emulated_enqueue(s, [=]() { e->seconds = now(); });
	e->stream = s;
	e->at = s->put;
	return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
	struct locked l;

	if (e->stream)
		finish(e->stream, e->at);
	return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t e)
{
	struct locked l;

	if (!e->stream || e->stream->done >= e->at)
		return cudaSuccess;
	run_until(e->stream, e->at);
	return cudaErrorNotReady;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to)
{
	*ms = (float)(1e3 * (to->seconds - from->seconds));
	return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags)
{
	struct locked l;
	cudaStream_t of = e->stream;
	uint64_t at = e->at;

	(void)flags;
	if (of)
		put(s, [=]() { return run_until(of, at); });
	return cudaSuccess;
}

/* ---- kernels --------------------------------------------------------------------------------- */

cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute a, int value)
{
	(void)kernel, (void)a;
	return result(value >= 0 && value <= SHARED_MOST ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t emulated_launch(const struct cudaLaunchConfig_t *c, const void *kernel,
			    std::function<void()> body)
{
	struct cudaLaunchConfig_t copy = *c;
	uint64_t threads = (uint64_t)c->blockDim.x * c->blockDim.y * c->blockDim.z;

	(void)kernel;
	if (!threads || threads > 1024 || c->blockDim.z > 64 || !c->gridDim.x || !c->gridDim.y ||
	    !c->gridDim.z || c->gridDim.x > 0x7fffffff || c->gridDim.y > 65535 ||
	    c->gridDim.z > 65535 || c->dynamicSmemBytes > SHARED_MOST)
		return result(cudaErrorInvalidValue);
	emulated_enqueue(c->stream, [copy, body]() { emulated_run(&copy, body); });
	return cudaSuccess;
}

/* ---- memory ---------------------------------------------------------------------------------- */

static cudaError_t give(void **p, size_t bytes, enum cudaMemoryType type)
{
	struct locked l;

	*p = NULL;
	if (!bytes)
		return cudaSuccess;
	if (bytes > (size_t)1 << 46 || posix_memalign(p, 256, bytes))
		return result(cudaErrorMemoryAllocation);
	memset(*p, 0xff, bytes < (size_t)1 << 26 ? bytes : (size_t)1 << 26);
	regions[(const char *)*p] = { bytes, type };
	return cudaSuccess;
}

static cudaError_t take(void *p)
{
	struct locked l;

	if (!p)
		return cudaSuccess;
	if (!regions.erase((const char *)p))
		return result(cudaErrorInvalidValue);
	free(p);
	return cudaSuccess;
}

cudaError_t cudaMalloc(void **p, size_t bytes)
{
	return give(p, bytes, cudaMemoryTypeDevice);
}

cudaError_t cudaFree(void *p)
{
	return take(p);
}

cudaError_t cudaMallocAsync(void **p, size_t bytes, cudaStream_t s)
{
	(void)s;
	return give(p, bytes, cudaMemoryTypeDevice);
}

cudaError_t cudaFreeAsync(void *p, cudaStream_t s)
{
	emulated_enqueue(s, [=]() {
		if (take(p) != cudaSuccess) {
			fprintf(stderr, "emulated runtime: memory is freed that is not there\n");
			abort();
		}
	});
	return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags)
{
	(void)flags;
	return give(p, bytes, cudaMemoryTypeHost);
}

cudaError_t cudaFreeHost(void *p)
{
	return take(p);
}

cudaError_t cudaHostRegister(void *p, size_t bytes, unsigned flags)
{
	struct locked l;

	(void)flags;
	if (!p || !bytes)
		return result(cudaErrorInvalidValue);
	if (find(p))
		return result(cudaErrorHostMemoryAlreadyRegistered);
	regions[(const char *)p] = { bytes, cudaMemoryTypeHost };
	return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *p)
{
	struct locked l;

	return result(regions.erase((const char *)p) ? cudaSuccess
						     : cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p)
{
	struct locked l;
	const struct region *r = find(p);

	memset(a, 0, sizeof *a);
	a->type = r ? r->type : cudaMemoryTypeUnregistered;
	return cudaSuccess;
}

static void copy_rows(char *to, size_t to_pitch, const char *from, size_t from_pitch, size_t width,
		      size_t height)
{
	for (size_t i = 0; i < height; i++)
		memcpy(to + i * to_pitch, from + i * from_pitch, width);
}

/*
 * From pageable memory the source may be used again at once; to it the call returns when all is
 * there. Else the copy is work of the stream.
 */
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
			      size_t width, size_t height, enum cudaMemcpyKind kind,
			      cudaStream_t s)
{
	struct locked l;
	bool staged = is_pageable(from);

	if (to_pitch < width || from_pitch < width ||
	    (kind == cudaMemcpyHostToDevice && is_pageable(to)) ||
	    (kind == cudaMemcpyDeviceToHost && is_pageable(from)) ||
	    (kind == cudaMemcpyDeviceToDevice && (is_pageable(to) || is_pageable(from))))
		return result(cudaErrorInvalidValue);
	if (staged) {
		std::vector<char> copy(width * height);

		copy_rows(copy.data(), width, (const char *)from, from_pitch, width, height);
		emulated_enqueue(s, [=]() {
			copy_rows((char *)to, to_pitch, copy.data(), width, width, height);
		});
	} else {
		emulated_enqueue(s, [=]() {
			copy_rows((char *)to, to_pitch, (const char *)from, from_pitch, width,
				  height);
		});
	}
	if (is_pageable(to))
		finish(s, s->put);
	return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
			    cudaStream_t s)
{
	return cudaMemcpy2DAsync(to, bytes, from, bytes, bytes, 1, kind, s);
}

/* Of the default stream, which our streams do not wait for: only for memory nobody else uses. */
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
	struct locked l;

	(void)kind;
	memcpy(to, from, bytes);
	return cudaSuccess;
}

cudaError_t cudaMemset(void *p, int byte, size_t bytes)
{
	struct locked l;

	memset(p, byte, bytes);
	return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *p, int byte, size_t bytes, cudaStream_t s)
{
	emulated_enqueue(s, [=]() { memset(p, byte, bytes); });
	return cudaSuccess;
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t keep)
{
	(void)pool, (void)keep;
	return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *left, size_t *all)
{
	*left = *all = (size_t)8 << 30;
	return cudaSuccess;
}

/* ---- devices and errors ---------------------------------------------------------------------- */

const char *cudaGetErrorName(cudaError_t e)
{
	return e == cudaSuccess ? "cudaSuccess" : "cudaError";
}

const char *cudaGetErrorString(cudaError_t e)
{
	switch (e) {
	case cudaSuccess:
		return "no error";
	case cudaErrorMemoryAllocation:
		return "out of memory";
	case cudaErrorInvalidValue:
		return "invalid argument";
	case cudaErrorNoDevice:
		return "no CUDA-capable device is detected";
	default:
		return "an error of the emulator";
	}
}

cudaError_t cudaGetLastError(void)
{
	cudaError_t e = last;

	last = cudaSuccess;
	return e;
}

cudaError_t cudaPeekAtLastError(void)
{
	return last;
}

/* EMULATED_DEVICES=0 is a machine without any. */
cudaError_t cudaGetDeviceCount(int *n)
{
	const char *s = getenv("EMULATED_DEVICES");

	*n = s ? atoi(s) : DEVICES;
	return result(*n ? cudaSuccess : cudaErrorNoDevice);
}

cudaError_t cudaSetDevice(int device)
{
	int n;

	if (cudaGetDeviceCount(&n) != cudaSuccess || device < 0 || device >= n)
		return result(cudaErrorInvalidDevice);
	current = device;
	return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
	*device = current;
	return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr a, int device)
{
	(void)device;
	switch (a) {
	case cudaDevAttrMultiProcessorCount:
		*value = 4;
		break;
	case cudaDevAttrComputeCapabilityMajor:
		*value = 9;
		break;
	case cudaDevAttrComputeCapabilityMinor:
		*value = 0;
		break;
	case cudaDevAttrMaxSharedMemoryPerBlockOptin:
		*value = SHARED_MOST;
		break;
	}
	return cudaSuccess;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device)
{
	(void)device;
	*pool = NULL;
	return cudaSuccess;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr a, void *value)
{
	(void)pool, (void)a, (void)value;
	return cudaSuccess;
}
