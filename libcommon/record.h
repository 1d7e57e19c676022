/* SPDX-License-Identifier: Apache-2.0 */
/*
 * record: a run as JSON Lines. Each line is an object with a "record" member: plan, host, range,
 * stage, shard, summary.
 */
#ifndef DSPARK_RECORD_H
#define DSPARK_RECORD_H

#include <jansson.h>
#include <stddef.h>
#include <stdio.h>

struct err;

struct run {
	char *name;		/* for messages: the path, or "standard input" */
	size_t n, cap;
	json_t **record;	/* in order */
};

/*
 * Reads to the end. `path` NULL or "-" is stdin, refused with EXIT_USAGE when it is a terminal.
 * Lines that are not an object with a string "record" are refused with their line number; an empty
 * run is legal here.
 */
int run_read(struct run *r, const char *path, struct err *e);
int run_parse(struct run *r, const char *s, size_t n, const char *name, struct err *e);
void run_release(struct run *r);

/* First / next record of a kind: start with *at = 0. Borrowed, NULL at the end. */
json_t *run_next(const struct run *r, const char *kind, size_t *at);
json_t *run_last(const struct run *r, const char *kind);

/* One record as one line; the write is checked (late errors are caught by cli_end). */
int record_write(FILE *out, const json_t *rec, struct err *e);
int run_copy(FILE *out, const struct run *r, struct err *e);

#endif
