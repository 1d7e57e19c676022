/* SPDX-License-Identifier: Apache-2.0 */
/*
 * outlet: a file written from its beginning to its end, behind the caller: a thread writes one
 * buffer while the caller fills the other.
 */
#ifndef DSPARK_OUTLET_H
#define DSPARK_OUTLET_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "err.h"
#include "file.h"

#define OUTLET_BUFFER ((size_t)8 << 20)

struct outlet {
	struct file_new *file;
	char *buf[2];
	int mine;		/* the buffer being filled; the other one is the thread's or free */
	size_t fill;
	uint64_t at;		/* where in the file the next byte goes */
	pthread_t thread;
	pthread_mutex_t lock;
	pthread_cond_t turn;
	bool started;
	size_t full[2];		/* bytes to be written, 0 = free; under lock, as the next two */
	bool ending;
	struct err err;		/* the thread's */
};

/* The file is the caller's, who leaves it alone until outlet_close or _abort. */
int outlet_open(struct outlet *o, struct file_new *f, struct err *e);

/* Where the next bytes go, *n of them (never 0): the caller puts some there and says how many. */
char *outlet_room(struct outlet *o, size_t *n);
int outlet_add(struct outlet *o, size_t n, struct err *e);
/* Or copies them. */
int outlet_put(struct outlet *o, const void *buf, size_t n, struct err *e);

/* Waits until all is written (not fsynced) and releases the outlet, also when that failed. */
int outlet_close(struct outlet *o, struct err *e);
/* Ends the thread and forgets what is not written. Legal on a zeroed or closed outlet. */
void outlet_abort(struct outlet *o);

#endif
