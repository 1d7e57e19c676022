/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The part of CUDA's language and runtime that kernels/cuda uses, for the host: in the place of
 * NVIDIA's header where kernels are compiled to be run by the emulator (emulator.cc, runtime.cc).
 *
 * A block's threads are fibers of one host thread that go on until they wait for each other, so a
 * missing barrier is seen as a wrong result, or by ThreadSanitizer, which knows fibers and
 * barriers, as a race. Blocks run one after another. Streams run as late as the API allows.
 */
#ifndef DSPARK_TESTS_CUDA_RUNTIME_H
#define DSPARK_TESTS_CUDA_RUNTIME_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define CUDA_EMULATED 1
#define CUDART_VERSION 13000

/* ---- what both C and C++ see: the runtime's functions ---------------------------------------- */

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cudaError {
	cudaSuccess = 0,
	cudaErrorInvalidValue = 1,
	cudaErrorMemoryAllocation = 2,
	cudaErrorNoDevice = 100,
	cudaErrorInvalidDevice = 101,
	cudaErrorNotReady = 600,
	cudaErrorHostMemoryAlreadyRegistered = 712,
	cudaErrorHostMemoryNotRegistered = 713,
	cudaErrorLaunchFailure = 719
} cudaError_t;

typedef struct emulated_stream *cudaStream_t;
typedef struct emulated_event *cudaEvent_t;
typedef struct emulated_pool *cudaMemPool_t;

enum cudaMemcpyKind {
	cudaMemcpyHostToHost,
	cudaMemcpyHostToDevice,
	cudaMemcpyDeviceToHost,
	cudaMemcpyDeviceToDevice,
	cudaMemcpyDefault
};

enum cudaMemoryType {
	cudaMemoryTypeUnregistered,
	cudaMemoryTypeHost,
	cudaMemoryTypeDevice,
	cudaMemoryTypeManaged
};

struct cudaPointerAttributes {
	enum cudaMemoryType type;
	int device;
	void *devicePointer, *hostPointer;
};

enum cudaDeviceAttr {
	cudaDevAttrMultiProcessorCount = 16,
	cudaDevAttrComputeCapabilityMajor = 75,
	cudaDevAttrComputeCapabilityMinor = 76,
	cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaMemPoolAttr { cudaMemPoolAttrReleaseThreshold = 4 };

#define cudaStreamNonBlocking 1u
#define cudaEventDisableTiming 2u
#define cudaHostAllocDefault 0u
#define cudaHostRegisterDefault 0u

const char *cudaGetErrorString(cudaError_t e);
const char *cudaGetErrorName(cudaError_t e);
cudaError_t cudaGetLastError(void);
cudaError_t cudaPeekAtLastError(void);
cudaError_t cudaGetDeviceCount(int *n);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr a, int device);
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device);
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr a, void *value);
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t keep);
cudaError_t cudaMemGetInfo(size_t *left, size_t *all);
cudaError_t cudaDeviceSynchronize(void);
cudaError_t cudaMalloc(void **p, size_t bytes);
cudaError_t cudaFree(void *p);
cudaError_t cudaMallocAsync(void **p, size_t bytes, cudaStream_t s);
cudaError_t cudaFreeAsync(void *p, cudaStream_t s);
cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void *p);
cudaError_t cudaHostRegister(void *p, size_t bytes, unsigned flags);
cudaError_t cudaHostUnregister(void *p);
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p);
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
			    cudaStream_t s);
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
			      size_t width, size_t height, enum cudaMemcpyKind kind,
			      cudaStream_t s);
cudaError_t cudaMemset(void *p, int byte, size_t bytes);
cudaError_t cudaMemsetAsync(void *p, int byte, size_t bytes, cudaStream_t s);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t s);
cudaError_t cudaStreamSynchronize(cudaStream_t s);
cudaError_t cudaStreamQuery(cudaStream_t s);
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags);
cudaError_t cudaLaunchHostFunc(cudaStream_t s, void (*f)(void *), void *ctx);
cudaError_t cudaEventCreate(cudaEvent_t *e);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t e);
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s);
cudaError_t cudaEventSynchronize(cudaEvent_t e);
cudaError_t cudaEventQuery(cudaEvent_t e);
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to);
cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute a, int value);

/* Work of a stream that takes its time, as a collective: `step` is asked until it gives nonzero. */
void emulated_enqueue_steps(cudaStream_t s, int (*step)(void *), void *ctx);

#ifdef __cplusplus
}

/* ---- the language ---------------------------------------------------------------------------- */

#include <algorithm>
#include <functional>

#define __global__
#define __device__
#define __host__
#define __shared__ static thread_local
#define __constant__ static
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

struct dim3 {
	unsigned x, y, z;
	constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct float2 {
	float x, y;
};
struct __attribute__((aligned(16))) float4 {
	float x, y, z, w;
};
struct uint2 {
	unsigned x, y;
};
struct __attribute__((aligned(16))) uint4 {
	unsigned x, y, z, w;
};
struct __attribute__((aligned(16))) int4 {
	int x, y, z, w;
};

static inline float2 make_float2(float x, float y) { return { x, y }; }
static inline float4 make_float4(float x, float y, float z, float w) { return { x, y, z, w }; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return { x, y }; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w)
{
	return { x, y, z, w };
}

using std::max;
using std::min;

/* The thread that runs, and its block. */
extern __thread dim3 threadIdx, blockIdx, blockDim, gridDim;
extern __thread char *emulated_shared;	/* dynamic, of its exact size */

#define warpSize 32

/* Waiting: for the block; for the lanes of `mask`; and for both, with what each lane brings. */
void emulated_block_barrier(void);
/* Lane i's `bytes` (at most 64) at result + 64 * i, good until the second next call. */
const char *emulated_exchange(unsigned mask, const void *mine, size_t bytes);
/* Sum over the block of `mine`, after a barrier. */
int emulated_block_count(int mine);
int emulated_lane(void);

static inline void __syncthreads(void) { emulated_block_barrier(); }
static inline int __syncthreads_count(int p) { return emulated_block_count(p != 0); }
static inline int __syncthreads_or(int p) { return emulated_block_count(p != 0) > 0; }
static inline int __syncthreads_and(int p)
{
	return emulated_block_count(p == 0) == 0;
}
static inline void __syncwarp(unsigned mask = 0xffffffffu) { emulated_exchange(mask, "", 1); }
static inline void __threadfence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void __threadfence_block(void) {}
static inline unsigned __activemask(void) { return 0xffffffffu; }

template <typename T> static inline T emulated_from(unsigned mask, T v, int lane)
{
	const char *all = emulated_exchange(mask, &v, sizeof v);
	T r;

	memcpy(&r, all + 64 * lane, sizeof r);
	return r;
}

template <typename T> static inline T __shfl_sync(unsigned mask, T v, int from, int width = 32)
{
	int lane = emulated_lane();

	return emulated_from(mask, v, lane / width * width + (from & (width - 1)));
}

template <typename T> static inline T __shfl_xor_sync(unsigned mask, T v, int by, int width = 32)
{
	int lane = emulated_lane(), to = lane ^ by;

	return emulated_from(mask, v, to / width <= lane / width ? to : lane);
}

template <typename T> static inline T __shfl_down_sync(unsigned mask, T v, int by, int width = 32)
{
	int lane = emulated_lane();

	return emulated_from(mask, v, lane % width + by < width ? lane + by : lane);
}

template <typename T> static inline T __shfl_up_sync(unsigned mask, T v, int by, int width = 32)
{
	int lane = emulated_lane();

	return emulated_from(mask, v, lane % width >= by ? lane - by : lane);
}

static inline unsigned __ballot_sync(unsigned mask, int p)
{
	int mine = p != 0;
	const char *all = emulated_exchange(mask, &mine, sizeof mine);
	unsigned r = 0;

	for (int i = 0; i < 32; i++)
		if (mask >> i & 1 && *(const int *)(all + 64 * i))
			r |= 1u << i;
	return r;
}

static inline int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }
static inline int __all_sync(unsigned mask, int p) { return __ballot_sync(mask, p) == mask; }

static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
static inline int __ffs(int v) { return __builtin_ffs(v); }
static inline int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }

static inline float __uint_as_float(unsigned v)
{
	float f;

	memcpy(&f, &v, sizeof f);
	return f;
}

static inline unsigned __float_as_uint(float f)
{
	unsigned v;

	memcpy(&v, &f, sizeof v);
	return v;
}

static inline int __float_as_int(float f) { return (int)__float_as_uint(f); }
static inline float __int_as_float(int v) { return __uint_as_float((unsigned)v); }

static inline float rsqrtf(float f) { return 1.0f / sqrtf(f); }
#define __expf expf
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
template <typename T> static inline T __ldg(const T *p) { return *p; }

template <typename T> static inline T atomicCAS(T *p, T expected, T v)
{
	__atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
	return expected;
}

template <typename T> static inline T atomicAdd(T *p, T v)
{
	return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}

template <> inline float atomicAdd(float *p, float v)
{
	unsigned old = __atomic_load_n((unsigned *)p, __ATOMIC_RELAXED), next;

	do
		next = __float_as_uint(__uint_as_float(old) + v);
	while (!__atomic_compare_exchange_n((unsigned *)p, &old, next, false, __ATOMIC_RELAXED,
					    __ATOMIC_RELAXED));
	return __uint_as_float(old);
}

template <typename T> static inline T atomicMax(T *p, T v)
{
	T old = __atomic_load_n(p, __ATOMIC_RELAXED);

	while (old < v && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_RELAXED,
						       __ATOMIC_RELAXED))
		;
	return old;
}

template <typename T> static inline T atomicMin(T *p, T v)
{
	T old = __atomic_load_n(p, __ATOMIC_RELAXED);

	while (v < old && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_RELAXED,
						       __ATOMIC_RELAXED))
		;
	return old;
}

template <typename T> static inline T atomicExch(T *p, T v)
{
	return __atomic_exchange_n(p, v, __ATOMIC_RELAXED);
}

template <typename T> static inline T atomicOr(T *p, T v)
{
	return __atomic_fetch_or(p, v, __ATOMIC_RELAXED);
}

/* ---- starting kernels ------------------------------------------------------------------------ */

struct cudaLaunchConfig_t {
	dim3 gridDim, blockDim;
	size_t dynamicSmemBytes;
	cudaStream_t stream;
	void *attrs;
	unsigned numAttrs;
};

/* Checks the sizes and puts the grid into the stream. */
cudaError_t emulated_launch(const struct cudaLaunchConfig_t *c, const void *kernel,
			    std::function<void()> body);
/* Puts anything else there. */
void emulated_enqueue(cudaStream_t s, std::function<void()> work);

template <typename... P, typename... A>
static inline cudaError_t cudaLaunchKernelEx(const struct cudaLaunchConfig_t *c,
					     void (*kernel)(P...), A... args)
{
	return emulated_launch(c, (const void *)kernel, [=]() { kernel(args...); });
}

#endif /* __cplusplus */

#endif
