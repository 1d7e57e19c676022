/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rendezvous: ranks of one start that share nothing but a directory find each other, and rank 0
 * hands them some bytes.
 *
 *	.nccl.NAME.tmp.start.R.0	rank R is there: a number that it has drawn
 *	.nccl.NAME.tmp.start.0.0	rank 0's bytes, and the numbers of those whom they are for
 *	.nccl.NAME.tmp.STAMP.0.0	a rank has failed after that
 *
 * Files appear by rename. Whatever an earlier start left under the same name, nobody takes it: a
 * rank takes what was written for its own number, and rank 0 writes anew as often as it finds
 * another one. NAME tells starts apart that run at the same time. The names are those of
 * temporaries, so that file_sweep removes what dead ranks left.
 */
#ifndef DSPARK_RENDEZVOUS_H
#define DSPARK_RENDEZVOUS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct err;

#define RENDEZVOUS_BYTES 128
#define RENDEZVOUS_NUMBER 16

struct rendezvous {
	char *dir, *name;
	int rank, world;
	unsigned char number[RENDEZVOUS_NUMBER];	/* this rank's */
	unsigned char stamp[RENDEZVOUS_NUMBER];		/* rank 0's number, once it is known */
	unsigned char bytes[RENDEZVOUS_BYTES];
	unsigned char *seen;	/* rank 0: [world] numbers, zero = has not shown up */
	bool written;		/* this rank's file is there */
	double when;		/* it was written, in seconds */
	double next;		/* until the next writing */
};

/*
 * Makes the directory if it is missing. `name` says which start this is, in any characters, the
 * same on every rank. Rank 0 gives `bytes` [RENDEZVOUS_BYTES], others NULL.
 */
int rendezvous_open(struct rendezvous *r, const char *dir, const char *name, int rank, int world,
		    const void *bytes, struct err *e);

/*
 * One look, to be repeated: by rank 0 until all are connected, by others until *got, when r->bytes
 * are rank 0's. Fails where another start of the same name is under way.
 */
int rendezvous_look(struct rendezvous *r, bool *got, struct err *e);

/* Rank 0: "2, 5" into `list`, the ranks that nothing has been seen of. Returns how many. */
int rendezvous_missing(const struct rendezvous *r, char *list, size_t room);

/* Everybody has what it needs: removes this rank's file. */
void rendezvous_done(struct rendezvous *r);

/* After it: tells the others that this rank has failed, and whether one of them has (-1 = none). */
void rendezvous_fail(struct rendezvous *r);
int rendezvous_failed(const struct rendezvous *r);

/* Removes this rank's file, if it is there still. Legal on a zeroed struct. */
void rendezvous_release(struct rendezvous *r);

#endif
