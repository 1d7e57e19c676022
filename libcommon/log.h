/* SPDX-License-Identifier: Apache-2.0 */
/*
 * log: what goes to stderr, always whole lines, "PROGRAM: message" or "PROGRAM[RANK]: message" with
 * more than one rank. The program name, rank and verbosity are the only globals of libcommon.
 */
#ifndef DSPARK_LOG_H
#define DSPARK_LOG_H

#include <stdint.h>

struct err;

void log_program(const char *name);
const char *log_name(void);
void log_rank(int rank, int world);
void log_level(int level);		/* -1 quiet (errors only), 0 normal, 1 verbose */

void log_error(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* "warning: ..."; not with -q */
void log_warn(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
void log_info(const char *fmt, ...) __attribute__((format(printf, 1, 2)));	/* not with -q */
void log_debug(const char *fmt, ...) __attribute__((format(printf, 1, 2)));	/* only with -v */

/*
 * Progress of a known amount of work. `auto` is a bar on a terminal, a line a minute otherwise;
 * nothing with -q. json: one {"progress": {what, rank, done, total, tokens, bytes, seconds, eta}}
 * object a second (eta -1: not known yet). line and json also say the last state in progress_end; a
 * bar is erased. Thread-safe against log_*; update from one thread.
 */
enum progress_style { PROGRESS_AUTO, PROGRESS_BAR, PROGRESS_LINE, PROGRESS_JSON, PROGRESS_NONE };

struct progress {
	enum progress_style style;
	const char *what;		/* "rows", "bytes" */
	int64_t total, done;		/* in `what` */
	int64_t tokens, bytes;		/* 0 = not shown */
	double start, last;		/* seconds, monotonic */
};

/* -1 if `name` is not one of auto bar line json. */
int progress_style(const char *name, enum progress_style *style);
void progress_begin(struct progress *p, enum progress_style style, const char *what, int64_t total);
void progress_update(struct progress *p, int64_t done, int64_t tokens, int64_t bytes);
void progress_end(struct progress *p);

double log_seconds(void);		/* monotonic clock */

/*
 * For signal handlers that end the process: leaves a line with a progress bar. Async-signal-safe.
 */
void log_interrupted(void);

#endif
