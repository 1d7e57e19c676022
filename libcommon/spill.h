/* SPDX-License-Identifier: Apache-2.0 */
/*
 * spill: memory that lies in a file, for what a window holds where that is larger than the memory a
 * rank may take. The file is in TMPDIR (/tmp), has no name, and goes with the process; its blocks
 * are reserved, so that a full disk is found at once. What was not used lately costs no memory but
 * where TMPDIR is memory itself.
 */
#ifndef DSPARK_SPILL_H
#define DSPARK_SPILL_H

#include <stddef.h>

struct err;

/* Page-aligned, zeroed. EXIT_FAILED where there is no room. */
void *spill_map(size_t bytes, struct err *e);
void spill_unmap(void *p, size_t bytes);	/* p may be NULL */

#endif
