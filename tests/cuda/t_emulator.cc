/* SPDX-License-Identifier: Apache-2.0 */
/* The emulator itself: what kernels rely on, and that it does things as late as a device may. */
#include <ptx_emulated.h>

#include "../tap.h"

static cudaStream_t stream, other;

template <typename... P, typename... A>
static cudaError_t run(dim3 grid, dim3 block, size_t shared, void (*kernel)(P...), A... args)
{
	cudaLaunchConfig_t c = {};

	c.gridDim = grid;
	c.blockDim = block;
	c.dynamicSmemBytes = shared;
	c.stream = stream;
	return cudaLaunchKernelEx(&c, kernel, args...);
}

template <typename T> static T *device(size_t n)
{
	T *p = NULL;

	if (cudaMalloc((void **)&p, n * sizeof(T)) != cudaSuccess)
		abort();
	return p;
}

/* ---- threads --------------------------------------------------------------------------------- */

__global__ static void places(int *out)
{
	int block = (int)(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z));
	int thread = (int)(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z));
	int n = (int)(blockDim.x * blockDim.y * blockDim.z);

	out[block * n + thread] = block * 1000 + thread;
}

static void test_places(void)
{
	int *out = device<int>(24 * 60), bad = 0;

	run(dim3(2, 3, 4), dim3(3, 4, 5), 0, places, out);
	cudaStreamSynchronize(stream);
	for (int i = 0; i < 24 * 60; i++)
		bad += out[i] != i / 60 * 1000 + i % 60;
	ok(!bad, "every thread of every block runs once, in its place");
	cudaFree(out);
}

__global__ static void reversed(int *out, int steps)
{
	CUDA_SHARED(room);
	int *a = (int *)room, n = (int)blockDim.x, i = (int)threadIdx.x;

	a[i] = i;
	for (int s = 0; s < steps; s++) {
		int v;

		__syncthreads();
		v = a[n - 1 - i];
		__syncthreads();
		a[i] = v + 1;
	}
	out[i] = a[i];
}

static void test_barrier(void)
{
	int *out = device<int>(100), bad = 0;

	run(1, 100, 100 * sizeof(int), reversed, out, 5);
	cudaStreamSynchronize(stream);
	for (int i = 0; i < 100; i++)
		bad += out[i] != 99 - i + 5;
	ok(!bad, "a barrier holds up all threads of a block, in order of no thread");
	cudaFree(out);
}

__global__ static void early(int *out)
{
	if (threadIdx.x >= 40)
		return;
	__syncthreads();
	out[threadIdx.x] = __syncthreads_count(threadIdx.x % 2);
}

static void test_early(void)
{
	int *out = device<int>(40), bad = 0;

	run(1, 64, 0, early, out);
	cudaStreamSynchronize(stream);
	for (int i = 0; i < 40; i++)
		bad += out[i] != 20;
	ok(!bad, "threads that have ended hold up nobody, and votes count the others");
	cudaFree(out);
}

/* ---- warps ----------------------------------------------------------------------------------- */

__global__ static void shuffles(int *out)
{
	int i = (int)threadIdx.x, l = i % 32, *o = out + 8 * i;

	o[0] = __shfl_sync(0xffffffffu, i, 3) == i - l + 3;
	o[1] = __shfl_sync(0xffffffffu, i, 9, 8) == i - l % 8 + 1;
	o[2] = __shfl_xor_sync(0xffffffffu, i, 5) == (i ^ 5);
	o[3] = __shfl_down_sync(0xffffffffu, i, 4) == (l + 4 < 32 ? i + 4 : i);
	o[4] = __shfl_up_sync(0xffffffffu, i, 2, 16) == (l % 16 < 2 ? i : i - 2);
	o[5] = __ballot_sync(0xffffffffu, l % 3 == 0) == 0x49249249u;
	o[6] = l < 16 ? __any_sync(0xffffu, l == 15) : !__any_sync(0xffff0000u, l == 15);
	o[7] = __all_sync(0xffffffffu, i >= 0);
}

static void test_shuffles(void)
{
	static const char *const what[] = { "shfl",  "shfl of 8", "shfl_xor",	   "shfl_down",
					    "shfl_up", "ballot",    "any of half warps", "all" };
	int *out = device<int>(8 * 96);

	run(1, 96, 0, shuffles, out);
	cudaStreamSynchronize(stream);
	for (int k = 0; k < 8; k++) {
		int good = 0;

		for (int i = 0; i < 96; i++)
			good += out[8 * i + k];
		ok(good == 96, "%s", what[k]);
	}
	cudaFree(out);
}

__global__ static void fragments(float *out, uint32_t *rows, const uint16_t *a, const uint16_t *b)
{
	CUDA_SHARED(room);
	uint16_t *sa = (uint16_t *)room, *sb = sa + 16 * 16;	/* a [16, 16], b [16, 8] */
	int l = (int)threadIdx.x, g = l / 4, c = l % 4;
	uint32_t fa[4], fb[4];
	float d[4] = { 1, 2, 3, 4 };

	copy_async(sa + 8 * l, a + 8 * l, 16);
	if (l < 16)
		copy_async(sb + 8 * l, b + 8 * l, l == 15 ? 8 : 16);
	copy_async_commit();
	rows[l] = *(const uint32_t *)(sa + 8 * l);	/* too early */
	copy_async_wait<0>();
	__syncthreads();
	load_matrix(fa, sa + (l % 8 + l / 8 % 2 * 8) * 16 + l / 16 * 8);
	load_matrix_transposed(fb, sb + (l % 16) * 8);
	mma_bf16(d, fa, fb);
	for (int i = 0; i < 4; i++)
		out[(g + i / 2 * 8) * 8 + 2 * c + i % 2] = d[i];
}

static void test_fragments(void)
{
	uint16_t *a = device<uint16_t>(256), *b = device<uint16_t>(128);
	uint32_t *rows = device<uint32_t>(32);
	float *out = device<float>(128);
	int bad = 0, early = 0;

	for (int i = 0; i < 256; i++)
		a[i] = dtype_f32_to_bf16((float)(i % 11 - 5));
	for (int i = 0; i < 128; i++)
		b[i] = dtype_f32_to_bf16((float)(i % 7 - 3));
	run(1, 32, (256 + 128) * sizeof(uint16_t), fragments, out, rows, a, b);
	cudaStreamSynchronize(stream);
	for (int r = 0; r < 16; r++)
		for (int n = 0; n < 8; n++) {
			float want = (float)(r / 8 * 2 + n % 2 + 1);

			for (int k = 0; k < 16; k++)	/* the last four of b were not copied */
				want += (float)((r * 16 + k) % 11 - 5) *
					(k * 8 + n < 124 ? (float)((k * 8 + n) % 7 - 3) : 0);
			bad += out[r * 8 + n] != want;
		}
	ok(!bad, "products of fragments, matrices from shared memory, copies with zeros behind");
	for (int i = 0; i < 32; i++)
		early += rows[i] == 0xffffffffu;
	ok(early == 32, "a copy that was not waited for has not happened");
	cudaFree(a);
	cudaFree(b);
	cudaFree(rows);
	cudaFree(out);
}

/* ---- streams --------------------------------------------------------------------------------- */

__global__ static void add_one(int *p)
{
	atomicAdd(p, 1);
}

static void test_streams(void)
{
	int *p = device<int>(1), *pinned = NULL, host = 7;
	cudaEvent_t e;

	cudaHostAlloc((void **)&pinned, sizeof *pinned, 0);
	cudaEventCreate(&e);
	cudaMemcpyAsync(p, &host, sizeof host, cudaMemcpyHostToDevice, stream);
	host = 0;
	run(3, 10, 0, add_one, p);
	ok(*p != 37, "work of a stream waits");
	cudaMemcpyAsync(pinned, p, sizeof *p, cudaMemcpyDeviceToHost, stream);
	*pinned = -1;
	cudaEventRecord(e, stream);
	cudaStreamWaitEvent(other, e, 0);
	cudaMemsetAsync(p, 0, sizeof *p, other);
	ok(*pinned == -1, "a copy to pinned memory waits, too");
	cudaStreamSynchronize(other);
	ok(*pinned == 37 && *p == 0, "a stream that waits for an event comes behind it");
	cudaMemcpyAsync(p, pinned, sizeof *p, cudaMemcpyHostToDevice, stream);
	*pinned = 50;
	cudaMemcpyAsync(&host, p, sizeof host, cudaMemcpyDeviceToHost, stream);
	ok(host == 50, "pinned memory is read when the copy runs; pageable memory ends a wait");
	cudaEventDestroy(e);
	cudaFreeHost(pinned);
	cudaFree(p);
}

static void test_refusals(void)
{
	int host = 0, *p = device<int>(1);

	ok(run(1, 1025, 0, add_one, p) == cudaErrorInvalidValue, "1,025 threads");
	ok(run(1, 1, (size_t)1 << 20, add_one, p) == cudaErrorInvalidValue, "a MiB of shared memory");
	ok(run(dim3(1, 65536), 1, 0, add_one, p) == cudaErrorInvalidValue, "65,536 blocks down");
	ok(cudaMemcpyAsync(&host, &host, 4, cudaMemcpyDeviceToHost, stream) == cudaErrorInvalidValue,
	   "a copy from a device that is none");
	ok(cudaFree(&host) == cudaErrorInvalidValue, "freeing what is no device memory");
	ok(cudaGetLastError() == cudaErrorInvalidValue && cudaGetLastError() == cudaSuccess,
	   "the last error is told once");
	cudaFree(p);
}

int main(void)
{
	cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
	cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
	test_places();
	test_barrier();
	test_early();
	test_shuffles();
	test_fragments();
	test_streams();
	test_refusals();
	cudaStreamDestroy(other);
	cudaStreamDestroy(stream);
	return tap_end();
}
