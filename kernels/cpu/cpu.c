/* SPDX-License-Identifier: Apache-2.0 */
/* The cpu backend's threads and their memory, and the choice of its verbs. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include "cpu.h"
#include "mem.h"

#define SPARE_MOST  ((size_t)64 << 20)
#define BLOCK_LEAST ((size_t)1 << 20) /* smaller ones come from pages that the allocator keeps */

/*
 * The cores this process may use. Ranks of a host share them, unless the launcher has bound each to
 * cores of its own: it is not bound itself, and tells by that what there is to share.
 */
static long cores_of_rank(int ranks)
{
	cpu_set_t own, launcher;
	long n, all;

	if (sched_getaffinity(0, sizeof own, &own))
		return 1;
	n = CPU_COUNT(&own);
	if (ranks < 2)
		return n;
	all = sched_getaffinity(getppid(), sizeof launcher, &launcher) ? n : CPU_COUNT(&launcher);
	return all / ranks < n ? all / ranks : n;
}

/* OMP_NUM_THREADS may be a list for nested regions: the first number counts. */
static int wanted_threads(const struct device_options *o)
{
	const char *s = getenv("OMP_NUM_THREADS");
	long n = o->threads > 0 ? o->threads : s ? strtol(s, NULL, 10) : 0;

	if (n <= 0)
		n = cores_of_rank(o->local_size);
	return n < 1 ? 1 : n < 4096 ? (int)n : 4096;
}

static void free_spare(struct cpu *c)
{
	while (c->spare) {
		struct spare *s = c->spare;

		c->spare = s->next;
		free(s);
	}
}

static void drop_oldest(struct cpu *c)
{
	struct block *b = c->blocks;

	c->blocks = b->next;
	free(b->p);
	free(b);
}

void cpu_close(struct device *d)
{
	struct cpu *c = d->state;

	if (c) {
		for (int i = 0; c->own && i < c->threads; i++)
			free(c->own[i].p);
		free(c->own);
		free(c->shared.p);
		free_spare(c);
		while (c->blocks)
			drop_oldest(c);
		onednn_close(c->dnn);
		pthread_mutex_destroy(&c->lock);
		free(c);
	}
	*d = (struct device){ 0 };
}

/* The verbs for the widest vector unit that oneDNN may use too (ONEDNN_MAX_CPU_ISA counts). */
static const struct backend *choose_verbs(void)
{
#ifdef HAVE_AVX
	if (onednn_has(ONEDNN_AVX512))
		return &cpu_verbs_avx512;
	if (onednn_has(ONEDNN_AVX2))
		return &cpu_verbs_avx2;
#endif
	return &cpu_verbs_base;
}

/*
 * Whether bf16 operands run as such: by AMX, and by AVX512_BF16 where its products are faster than
 * those of F32. Intel's are slower (measured: 220 against 350 GFLOP/s of two cores).
 */
static bool fast_bf16(void)
{
#ifdef HAVE_AVX
	__builtin_cpu_init();
	return onednn_has(ONEDNN_AMX) ||
	       (onednn_has(ONEDNN_AVX512_BF16) && !__builtin_cpu_is("intel"));
#else
	return onednn_has(ONEDNN_AVX512_BF16);
#endif
}

int cpu_open(struct device *d, const struct device_options *o, struct err *e)
{
	struct cpu *c = mem_calloc(1, sizeof *c, e);

	if (!c)
		return -1;
	pthread_mutex_init(&c->lock, NULL);
	c->threads = wanted_threads(o);
	c->bf16 = fast_bf16();
	*d = (struct device){
		.be = choose_verbs(), .compute = o->compute, .threads = c->threads, .state = c
	};
	c->own = mem_calloc((size_t)c->threads, sizeof *c->own, e);
	c->dnn = c->own ? onednn_open(e) : NULL;
	if (!c->dnn) {
		cpu_close(d);
		return -1;
	}
	return 0;
}

void cpu_fail(struct device *d, const struct err *e)
{
#pragma omp critical(cpu_failure)
	if (!d->err.code)
		d->err = *e;
}

static bool grow(struct device *d, struct room *r, size_t bytes)
{
	if (bytes <= r->size)
		return true;
	free(r->p);
	r->p = mem_aligned(bytes, &d->err);
	r->size = r->p ? bytes : 0;
	return r->p;
}

bool cpu_shared(struct device *d, size_t bytes)
{
	return grow(d, &cpu_of(d)->shared, bytes);
}

bool cpu_own(struct device *d, size_t bytes)
{
	struct cpu *c = cpu_of(d);

	for (int i = 0; i < c->threads; i++)
		if (!grow(d, &c->own[i], bytes))
			return false;
	return true;
}

void *cpu_take_block(struct cpu *c, size_t *bytes, struct err *e)
{
	struct block **best = NULL, *b = NULL;
	size_t want = *bytes, dropped = 0;
	void *p = NULL;

	pthread_mutex_lock(&c->lock);
	for (struct block **at = &c->blocks; *at; at = &(*at)->next)
		if ((*at)->bytes >= want && (*at)->bytes / 2 <= want &&
		    (!best || (*at)->bytes < (*best)->bytes))
			best = at;
	if (best) {
		b = *best;
		*best = b->next;
		p = b->p;
		*bytes = b->bytes;
	}
	while (!p && c->blocks && dropped < want) {
		dropped += c->blocks->bytes;
		drop_oldest(c);
	}
	pthread_mutex_unlock(&c->lock);
	free(b);
	return p ? p : mem_aligned(want, e);
}

void cpu_give_block(struct cpu *c, void *p, size_t bytes)
{
	struct block **at = &c->blocks, *b = p && bytes >= BLOCK_LEAST ? malloc(sizeof *b) : NULL;

	if (!b) {
		free(p);
		return;
	}
	*b = (struct block){ NULL, p, bytes };
	pthread_mutex_lock(&c->lock);
	while (*at)
		at = &(*at)->next;
	*at = b;
	pthread_mutex_unlock(&c->lock);
}

/* The smallest that suffices: what is large waits for who needs it. */
void *cpu_take_spare(struct cpu *c, size_t bytes, struct err *e)
{
	struct spare **best = NULL, *s = NULL;

	pthread_mutex_lock(&c->lock);
	for (struct spare **at = &c->spare; *at; at = &(*at)->next)
		if ((*at)->bytes >= bytes && (!best || (*at)->bytes < (*best)->bytes))
			best = at;
	if (best) {
		s = *best;
		*best = s->next;
		c->spare_bytes -= s->bytes;
	}
	pthread_mutex_unlock(&c->lock);
	if (!s) {
		s = mem_aligned(64 + bytes, e);
		if (!s)
			return NULL;
		s->bytes = bytes;
	}
	return (char *)s + 64;
}

void cpu_give_spare(struct cpu *c, void *p)
{
	struct spare *s = p ? (struct spare *)((char *)p - 64) : NULL;
	bool keep;

	if (!s)
		return;
	pthread_mutex_lock(&c->lock);
	keep = c->spare_bytes + s->bytes <= SPARE_MOST;
	if (keep) {
		s->next = c->spare;
		c->spare = s;
		c->spare_bytes += s->bytes;
	}
	pthread_mutex_unlock(&c->lock);
	if (!keep)
		free(s);
}

const struct backend backend_cpu = {
	.name = "cpu", .host_memory = true, .open = cpu_open, .close = cpu_close
};
