/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cli: what every command's main() shares: names, --help, --version, numbers, signals and the last
 * look at stdout.
 *
 * A main() is: cli_begin; a getopt_long loop whose default case is `if (cli_common(&c, ch)) ...`;
 * work; return cli_end(...).
 */
#ifndef DSPARK_CLI_H
#define DSPARK_CLI_H

#include <getopt.h>
#include <stdbool.h>
#include <stdint.h>

struct err;

struct cli {
	const char *name;	/* "dspark-plan" */
	const char *usage;	/* the whole --help text; its first line is "usage: ..." */
	bool done;		/* --help or --version was served: return cli_end at once */
};

/*
 * Options every command has; CLI_COMMON_SHORT goes into the getopt string, CLI_COMMON_LONG into the
 * table (last).
 */
#define CLI_COMMON_SHORT "hVqv"
#define CLI_COMMON_LONG \
	{ "help", no_argument, NULL, 'h' }, { "version", no_argument, NULL, 'V' }, \
	{ "quiet", no_argument, NULL, 'q' }, { "verbose", no_argument, NULL, 'v' }, \
	{ NULL, 0, NULL, 0 }

/*
 * Names the program for log and errors, sets getopt's opterr = 0, arms SIGINT/SIGTERM/SIGHUP to
 * remove temporaries and exit 3 (dspark-forward installs its own later).
 */
void cli_begin(struct cli *c, const char *name, const char *usage);

/*
 * Serves h V q v; anything else ('?', ':') is a usage error. Returns 0 served, -1 with `e` set.
 * argv is for the message.
 */
int cli_common(struct cli *c, int ch, char **argv, struct err *e);

/*
 * Prints e if set (with "Try 'NAME --help' for more information." for usage errors), closes stdout
 * and checks it, returns the exit code.
 */
int cli_end(const struct cli *c, struct err *e);

int cli_int(const char *option, const char *value, int64_t min, int64_t max, int64_t *out,
	    struct err *e);

/* Bytes, or K M G T: powers of 1024. */
int cli_size(const char *option, const char *value, uint64_t *out, struct err *e);

/* Index of `value` in the NULL-ended list, or a usage error that names the choices. */
int cli_choice(const char *option, const char *value, const char *const *choices, int *out,
	       struct err *e);

#endif
