/* SPDX-License-Identifier: Apache-2.0 */
/*
 * literal: a value of the command line as Python's literal syntax would read it, so that overrides
 * mean what they mean to the reference.
 */
#ifndef DSPARK_LITERAL_H
#define DSPARK_LITERAL_H

#include <jansson.h>

struct err;

/*
 * none, None, true, True, false, False; integers (also 0x, 0o, 0b and 1_000), reals, quoted strings
 * with Python's escapes, lists, tuples (as lists; "1,2,3" is one), dicts with string keys.
 * Everything else, and every text longer than 1,000 bytes, is the string `s` itself; so are values
 * that JSON cannot hold (sets, bytes, complex and infinite numbers, integers beyond int64). New
 * reference; NULL only without memory or for invalid UTF-8.
 */
json_t *literal_parse(const char *s, struct err *e);

#endif
