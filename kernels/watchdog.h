/* SPDX-License-Identifier: Apache-2.0 */
/*
 * watchdog: ends a process whose call into a transport never comes back. Nothing else could: such a
 * call looks at no flag and no clock, and meanwhile all other ranks wait.
 *
 * What bounds ordinary waiting is the timeout of struct comm, whose loops come back between any two
 * looks; the watchdog allows more, so that a rank which can fail in good order does.
 */
#ifndef DSPARK_WATCHDOG_H
#define DSPARK_WATCHDOG_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct err;

/* Zeroed = watches nothing. Stays where it is while it is started. */
struct watchdog {
	double limit;			/* seconds, the margin included */
	void (*last)(void);
	/* calls that are entered in the low 16 bits; above them the number of enters and leaves */
	_Atomic uint64_t state;
	_Atomic(const char *) what;	/* the outermost call */
	pthread_t thread;
	pthread_mutex_t lock;
	pthread_cond_t ended;
	bool started, end;
};

#define WATCHDOG_CALLS 0xffffu
#define WATCHDOG_TURN 0x10000u

/*
 * Starts the thread. Once nothing was entered or left for `seconds` + 10 % + 2 s inside a call, it
 * prints what the call was, calls `last` (file_abort_all; may be NULL) and ends the process with
 * _exit(EXIT_FAILED). Time in which the process was stopped does not count. 0 seconds: no limit,
 * no thread. Before log_rank the message names no rank.
 */
int watchdog_start(struct watchdog *w, double seconds, void (*last)(void), struct err *e);

/* Ends the thread. Legal on a zeroed struct and after itself. */
void watchdog_stop(struct watchdog *w);

/*
 * Around what may hang, by one thread; calls may lie in each other, and an inner one renews the
 * time of the outer. `what` outlives the call: "an all-gather". w = NULL: nobody watches.
 */
static inline void watchdog_enter(struct watchdog *w, const char *what)
{
	if (!w)
		return;
	if (!(atomic_load_explicit(&w->state, memory_order_relaxed) & WATCHDOG_CALLS))
		atomic_store_explicit(&w->what, what, memory_order_relaxed);
	atomic_fetch_add_explicit(&w->state, WATCHDOG_TURN + 1, memory_order_release);
}

static inline void watchdog_leave(struct watchdog *w)
{
	if (w)
		atomic_fetch_add_explicit(&w->state, WATCHDOG_TURN - 1, memory_order_release);
}

#endif
