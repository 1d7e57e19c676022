/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bed: what the tests of verbs share: random numbers, tensors and weights on a device, and running
 * a program again under each instruction set. One source file a program.
 */
#ifndef DSPARK_BED_H
#define DSPARK_BED_H

#include <math.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "err.h"
#include "kernels.h"
#include "tap.h"

#define GUARD 0x5a		/* bytes around the columns of a tensor, which no verb may touch */

static uint64_t bed_state = 88172645463325252u;

static inline float bed_random(void)	/* in [-1, 1) */
{
	bed_state ^= bed_state << 13;
	bed_state ^= bed_state >> 7;
	bed_state ^= bed_state << 17;
	return (float)(int32_t)(bed_state >> 32) / 2147483648.0f;
}

static inline void *bed_must(void *p, const struct err *e)
{
	if (p)
		return p;
	printf("Bail out! %s\n", e->text);
	exit(1);
}

static inline void bed_check(int rc, const struct err *e)
{
	if (!rc)
		return;
	printf("Bail out! %s\n", e->text);
	exit(1);
}

/* n numbers in [-1, 1), kept in bf16 precision so that every dtype holds them. */
static inline float *bed_numbers(int64_t n)
{
	struct err e = { 1, "no memory" };
	float *p = bed_must(malloc((size_t)(n + 1) * sizeof *p), &e);

	for (int64_t i = 0; i < n; i++)
		p[i] = dtype_bf16_to_f32(dtype_f32_to_bf16(bed_random()));
	return p;
}

/*
 * The backends to test: all of this build that need no device, or the one that BED_BACKEND names,
 * when the program is compiled or when it runs. None where these are CUDA's kernels on the host,
 * which take long, and DSPARK_TEST_QUICK is set.
 */
static inline const char *bed_only(void)
{
#ifdef BED_BACKEND
	return BED_BACKEND;
#else
	return getenv("BED_BACKEND");
#endif
}

static inline const char *const *bed_backends(void)
{
	static const char *names[8];
	const char *const *all = backend_names();
	size_t n = 0;

#ifdef BED_BACKEND
	if (getenv("DSPARK_TEST_QUICK")) {
		tap_skip("kernels take long on the host: DSPARK_TEST_QUICK");
		return names;
	}
#endif
	for (size_t i = 0; all[i] && n < 7; i++)
		if (bed_only() ? !strcmp(all[i], bed_only()) : strcmp(all[i], "cuda") != 0)
			names[n++] = all[i];
	names[n] = NULL;
	if (n)
		return names;
	printf("Bail out! backend '%s' is not in this build\n", bed_only());
	exit(1);
}

static inline void bed_open(struct device *d, const char *backend, enum dtype compute, int threads)
{
	struct device_options o = { .compute = compute, .threads = threads, .local_size = 1 };
	struct err e = ERR_INIT;

#ifdef __SANITIZE_THREAD__
	o.threads = 1;	/* gcc's OpenMP runtime is not instrumented: its barriers are invisible */
#endif
	bed_check(backend_open(d, backend, &o, &e), &e);
}

/*
 * [rows, cols] on the device with `pad` guard elements behind each row; values F32 [rows, cols] or
 * NULL for guards everywhere.
 */
static inline struct tensor bed_tensor(struct device *d, enum dtype type, int64_t rows,
				       int64_t cols, int64_t pad, const float *values)
{
	size_t size = dtype_size(type), bytes = (size_t)(rows * (cols + pad)) * size;
	struct err e = ERR_INIT;
	struct tensor t = { bed_must(d->be->alloc(d, bytes, &e), &e), type, rows, cols,
			    cols + pad },
		      whole = t;
	char *host = bed_must(malloc(bytes + 1), &e);

	memset(host, GUARD, bytes);
	whole.cols = whole.ld;
	d->be->upload(d, whole, host);
	for (int64_t i = 0; values && i < rows * cols; i++)
		dtype_convert(host + (size_t)i * size, type, &values[i], DT_F32, 1);
	if (values)
		d->be->upload(d, t, host);
	free(host);
	return t;
}

static inline struct tensor bed_ints(struct device *d, int64_t rows, int64_t cols,
				     const int32_t *values)
{
	struct err e = ERR_INIT;
	struct tensor t = { bed_must(d->be->alloc(d, (size_t)(rows * cols) * sizeof *values, &e),
				     &e),
			    DT_I32, rows, cols, cols };

	d->be->upload(d, t, values);
	return t;
}

/* The bytes of t's columns, packed, in its own dtype; the device must have no failure. */
static inline void *bed_bytes(struct device *d, struct tensor t)
{
	struct err e = ERR_INIT;
	char *p = bed_must(malloc((size_t)(t.rows * t.cols) * dtype_size(t.dtype) + 1), &e);

	d->be->store(d, p, t.dtype, t.cols, t);
	bed_check(d->be->sync(d, &e), &e);
	return p;
}

static inline float *bed_floats(struct device *d, struct tensor t)
{
	struct err e = ERR_INIT;
	float *p = bed_must(malloc((size_t)(t.rows * t.cols) * sizeof *p + 1), &e);

	d->be->store(d, p, DT_F32, t.cols, t);
	bed_check(d->be->sync(d, &e), &e);
	return p;
}

static inline bool bed_guards(struct device *d, struct tensor t)
{
	struct tensor pad = { (char *)t.p + (size_t)t.cols * dtype_size(t.dtype), t.dtype, t.rows,
			      t.ld - t.cols, t.ld };
	unsigned char *p = bed_bytes(d, pad);
	size_t n = (size_t)(pad.rows * pad.cols) * dtype_size(t.dtype), i;

	for (i = 0; i < n && p[i] == GUARD; i++)
		;
	free(p);
	return i == n;
}

static inline void bed_drop(struct device *d, struct tensor t)
{
	d->be->free(d, t.p);
}

/* A weight from F32 numbers, stored as `stored`, filled in three pieces out of order. */
static inline void bed_weight(struct device *d, struct weight *w, enum weight_use use,
			      enum weight_unit unit, enum dtype stored, int64_t count, int64_t rows,
			      int64_t cols, const float *values)
{
	struct err e = ERR_INIT;
	int64_t cut[] = { rows / 3, rows - rows / 4 };
	char *p = bed_must(malloc((size_t)(count * rows * cols) * dtype_size(stored) + 1), &e);

	dtype_convert(p, stored, values, DT_F32, (size_t)(count * rows * cols));
	*w = (struct weight){ .count = count, .rows = rows, .cols = cols,
			      .use = use, .unit = unit, .stored = stored };
	bed_check(d->be->weight_alloc(d, w, &e), &e);
	for (int64_t i = 0; i < count; i++) {
		int64_t part[][2] = { { cut[0], cut[1] }, { 0, cut[0] }, { cut[1], rows } };

		for (int k = 0; k < 3; k++)
			bed_check(d->be->weight_fill(d, w, i, part[k][0], part[k][1] - part[k][0],
						     p + (size_t)((i * rows + part[k][0]) * cols) *
								     dtype_size(stored),
						     stored, NULL, &e),
				  &e);
	}
	bed_check(d->be->weight_ready(d, w, &e), &e);
	free(p);
}

/*
 * The numbers that are not within `bound` of what is wanted. NaN is within nothing, on either side.
 */
static inline int64_t bed_differ(const float *got, const float *want, int64_t n, double relative,
				 double absolute)
{
	int64_t bad = 0;

	for (int64_t i = 0; i < n; i++)
		if (!(fabs((double)got[i] - (double)want[i]) <=
		      absolute + relative * fabs((double)want[i])))
			bad++;
	return bad;
}

static inline bool bed_forced_isa(void)
{
	return getenv("BED_ISA");
}

/*
 * Runs this program again under each instruction set that oneDNN can be held to below the best,
 * which the program itself has used (where the machine has less, it is used again). The runs print
 * their TAP to us; what fails there is shown, and each run is one test here. In such a run the
 * function returns at once, and where one backend alone is tested.
 */
static inline void bed_each_isa(const char *self)
{
	static const char *const isa[] = { "SSE41", "AVX2", "AVX512_CORE", "AVX512_CORE_BF16" };

	if (bed_forced_isa() || bed_only())
		return;
	for (size_t i = 0; i < sizeof isa / sizeof isa[0]; i++) {
		char command[4096], line[1024];
		int status, n = 0;
		FILE *f;

		snprintf(command, sizeof command, "BED_ISA=1 ONEDNN_MAX_CPU_ISA=%s '%s'", isa[i],
			 self);
		f = popen(command, "r");
		while (f && fgets(line, sizeof line, f)) {
			n += !strncmp(line, "ok ", 3);
			if (!strncmp(line, "not ok", 6) || !strncmp(line, "Bail", 4))
				printf("# %s: %s", isa[i], line);
		}
		status = f ? pclose(f) : -1;
		ok(status == 0 && n > 0, "%d tests under %s", n, isa[i]);
	}
}

#endif
