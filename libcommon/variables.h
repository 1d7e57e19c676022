/* SPDX-License-Identifier: Apache-2.0 */
/* variables: environment variables in the texts of a recipe. */
#ifndef DSPARK_VARIABLES_H
#define DSPARK_VARIABLES_H

struct err;
struct text;

/*
 * Appends `s` with ${VAR}, ${VAR,default}, ${oc.env:VAR}, ${oc.env:VAR,default} replaced, then $VAR
 * in the result (names may have dots). An unset variable without default is refused. A '$' that
 * begins none of these stays.
 */
int variables_expand(struct text *out, const char *s, struct err *e);

#endif
