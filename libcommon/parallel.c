/* SPDX-License-Identifier: Apache-2.0 */
/*
 * parallel: workers draw indices from one counter; whoever fails first keeps its sentence and
 * closes the counter.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "err.h"
#include "parallel.h"

#define THREADS_MAX 64

struct crew {
	int (*work)(void *ctx, int64_t i, struct err *e);
	void *ctx;
	int64_t n;
	_Atomic int64_t next;
	pthread_mutex_t lock;
	struct err err; /* under lock */
};

static void *labour(void *arg)
{
	struct crew *c = arg;
	struct err e = ERR_INIT;
	int64_t i;

	while ((i = atomic_fetch_add(&c->next, 1)) < c->n) {
		if (!c->work(c->ctx, i, &e))
			continue;
		pthread_mutex_lock(&c->lock);
		if (!c->err.code)
			c->err = e;
		pthread_mutex_unlock(&c->lock);
		atomic_store(&c->next, c->n);
		break;
	}
	return NULL;
}

int parallel_each(int64_t n, int threads, int (*work)(void *ctx, int64_t i, struct err *e),
		  void *ctx, struct err *e)
{
	struct crew c = {
		.work = work, .ctx = ctx, .n = n, .lock = PTHREAD_MUTEX_INITIALIZER, .err = ERR_INIT
	};
	pthread_t hand[THREADS_MAX];
	int hands = 0;

	if (threads > THREADS_MAX)
		threads = THREADS_MAX;
	while (hands + 1 < threads && hands + 1 < n &&
	       !pthread_create(&hand[hands], NULL, labour, &c))
		hands++;
	labour(&c);
	while (hands)
		pthread_join(hand[--hands], NULL);
	pthread_mutex_destroy(&c.lock);
	if (!c.err.code)
		return 0;
	if (!e->code)
		*e = c.err;
	return -1;
}

int parallel_threads(void)
{
	long n = sysconf(_SC_NPROCESSORS_ONLN);

	return n < 2 ? 2 : n > 16 ? 16 : (int)n;
}
