/* SPDX-License-Identifier: Apache-2.0 */
/*
 * watchdog: the thread looks at one number now and then. Two looks that find the same number, with
 * a call entered, mean that the call lasted from one to the other: enter and leave need no clock.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <math.h>
#include <signal.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "err.h"
#include "log.h"
#include "watchdog.h"

#define LOOKS 16 /* at least, before the limit is reached */

static void give_up(struct watchdog *w, double stuck)
{
	const char *what = atomic_load_explicit(&w->what, memory_order_relaxed);

	log_error("%s has not come back for %.0f s: this rank ends; look at the other ranks and "
		  "the network between them; published shards are safe, the same command goes on",
		  what, stuck);
	if (w->last)
		w->last();
	_exit(EXIT_FAILED);
}

static struct timespec in_seconds(double s)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	s += 1e-9 * (double)t.tv_nsec;
	t.tv_sec += (time_t)floor(s);
	t.tv_nsec = (long)(1e9 * (s - floor(s)));
	return t;
}

static void *watch(void *arg)
{
	struct watchdog *w = arg;
	double every = fmin(1, w->limit / LOOKS), stuck = 0, before = log_seconds(), now;
	uint64_t seen = 0, state;

	pthread_mutex_lock(&w->lock);
	while (!w->end) {
		struct timespec until = in_seconds(every);

		pthread_cond_timedwait(&w->ended, &w->lock, &until);
		state = atomic_load_explicit(&w->state, memory_order_acquire);
		now = log_seconds();
		/* a much longer look is one that we, too, did not live through */
		if (state == seen && state & WATCHDOG_CALLS)
			stuck += fmin(now - before, 2 * every);
		else
			stuck = 0;
		if (stuck > w->limit && !w->end)
			give_up(w, stuck);
		seen = state;
		before = now;
	}
	pthread_mutex_unlock(&w->lock);
	return NULL;
}

/* Signals go to the threads that are there for them. */
static int create_deaf(struct watchdog *w)
{
	sigset_t all, old;
	int rc;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	rc = pthread_create(&w->thread, NULL, watch, w);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	return rc;
}

int watchdog_start(struct watchdog *w, double seconds, void (*last)(void), struct err *e)
{
	pthread_condattr_t attr;
	int rc;

	if (seconds <= 0)
		return 0;
	w->limit = seconds + seconds / 10 + 2;
	w->last = last;
	w->end = false;
	pthread_mutex_init(&w->lock, NULL);
	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&w->ended, &attr);
	pthread_condattr_destroy(&attr);
	rc = create_deaf(w);
	w->started = !rc;
	if (!rc)
		return 0;
	pthread_cond_destroy(&w->ended);
	pthread_mutex_destroy(&w->lock);
	return err_fail(e, "cannot start the thread that watches the transport: %s", strerror(rc));
}

void watchdog_stop(struct watchdog *w)
{
	if (!w->started)
		return;
	pthread_mutex_lock(&w->lock);
	w->end = true;
	pthread_cond_signal(&w->ended);
	pthread_mutex_unlock(&w->lock);
	pthread_join(w->thread, NULL);
	pthread_cond_destroy(&w->ended);
	pthread_mutex_destroy(&w->lock);
	w->started = false;
}
