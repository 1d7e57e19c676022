/* SPDX-License-Identifier: Apache-2.0 */
/* cli: the frame of every command. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdio_ext.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"
#include "err.h"
#include "file.h"
#include "log.h"

#ifndef PACKAGE_VERSION
#define PACKAGE_VERSION "unknown"
#endif

static void on_signal(int sig)
{
	(void)sig;
	file_abort_all();
	log_interrupted();
	_exit(EXIT_FAILED);
}

/* A signal that was ignored when we started (nohup, a shell's background job) stays ignored. */
static void arm(int sig)
{
	struct sigaction old, act = { .sa_handler = on_signal };

	sigfillset(&act.sa_mask);
	if (!sigaction(sig, NULL, &old) && old.sa_handler != SIG_IGN)
		sigaction(sig, &act, NULL);
}

/*
 * A standard stream that is closed from the start would be the number of the first file we open,
 * and records or messages would go into that file. What takes its place fails as a closed one does.
 */
static void keep_standard_streams(void)
{
	static const int modes[] = { O_WRONLY, O_RDONLY, O_RDONLY };
	int fd;

	for (fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
		if (fcntl(fd, F_GETFD) < 0 && errno == EBADF && open("/dev/null", modes[fd]) != fd)
			_exit(EXIT_FAILED);
}

void cli_begin(struct cli *c, const char *name, const char *usage)
{
	keep_standard_streams();
	*c = (struct cli){ .name = name, .usage = usage };
	log_program(name);
	opterr = 0;
	arm(SIGINT);
	arm(SIGTERM);
	arm(SIGHUP);
	arm(SIGXCPU);
	signal(SIGXFSZ, SIG_IGN); /* then a write beyond the limit fails like any other */
}

/* Does the usage text have the option -c? It lists them all. */
static bool in_usage(const char *usage, int c)
{
	const char word[] = { '-', (char)c, '\0' };
	const char *p;

	for (p = usage; (p = strstr(p, word)); p += 2)
		if ((p == usage || strchr(" [(|,\n\t", p[-1])) && !isalnum((unsigned char)p[2]))
			return true;
	return false;
}

/*
 * getopt answers '?' to every mistake; optopt is 0 for an unknown long option, else the letter, or
 * the value of the long option. A letter that the usage text has is known, so what is wrong with it
 * is its missing value.
 */
static int bad_option(const struct cli *c, int ch, char **argv, struct err *e)
{
	const char *arg = argv[optind - 1], *now = argv[optind];
	bool known = optopt && in_usage(c->usage, optopt);
	/* an unknown letter inside a cluster, "-xq": getopt has not left it yet */
	bool inside = optopt && !known && now && now[0] == '-' && now[1] != '-' &&
		      strchr(now + 1, optopt);
	bool is_long = !inside && !strncmp(arg, "--", 2) && arg[2];
	int name = (int)strcspn(arg, "=");

	if (is_long && !optopt)
		return err_usage(e, "unknown or ambiguous option '%.*s'", name, arg);
	if (is_long && arg[name])
		return err_usage(e, "option '%.*s' takes no value", name, arg);
	if (is_long)
		return err_usage(e, "option '%s' needs a value", arg);
	if (ch == ':' || known)
		return err_usage(e, "option '-%c' needs a value", optopt);
	return err_usage(e, "unknown option '-%c'", optopt);
}

int cli_common(struct cli *c, int ch, char **argv, struct err *e)
{
	switch (ch) {
	case 'h':
		fputs(c->usage, stdout);
		c->done = true;
		return 0;
	case 'V':
		printf("%s (dspark) %s\n", c->name, PACKAGE_VERSION);
		c->done = true;
		return 0;
	case 'q':
		log_level(-1);
		return 0;
	case 'v':
		log_level(1);
		return 0;
	default:
		return bad_option(c, ch, argv, e);
	}
}

/* A stdout that was closed from the start is no error as long as nothing was written to it. */
static int close_stdout(struct err *e)
{
	bool had_error = ferror(stdout), pending = __fpending(stdout) > 0;

	errno = 0;
	if (fclose(stdout) && (had_error || pending || errno != EBADF))
		return err_errno(e, "cannot write standard output");
	return had_error ? err_fail(e, "cannot write standard output") : 0;
}

int cli_end(const struct cli *c, struct err *e)
{
	close_stdout(e);
	if (!e->code)
		return EXIT_DONE;
	log_error("%s", e->text);
	if (e->code == EXIT_USAGE)
		dprintf(STDERR_FILENO, "Try '%s --help' for more information.\n", c->name);
	return e->code;
}

int cli_int(const char *option, const char *value, int64_t min, int64_t max, int64_t *out,
	    struct err *e)
{
	intmax_t n;
	char *end;

	errno = 0;
	n = strtoimax(value, &end, 10);
	if (end == value || *end || errno || value[strspn(value, "+-0123456789")] || n < min ||
	    n > max) {
		if (max == INT64_MAX)
			return err_usage(e,
					 "option '%s': '%s' is not a whole number from %" PRId64
					 " on",
					 option, value, min);
		return err_usage(e,
				 "option '%s': '%s' is not a whole number from %" PRId64
				 " to %" PRId64,
				 option, value, min, max);
	}
	*out = n;
	return 0;
}

int cli_size(const char *option, const char *value, uint64_t *out, struct err *e)
{
	static const char unit[] = "KMGT";
	const char *letter;
	uintmax_t n;
	char *end;
	int shift;

	errno = 0;
	n = strtoumax(value, &end, 10);
	if (value[0] < '0' || value[0] > '9')
		goto bad;
	letter = *end ? strchr(unit, *end) : NULL;
	if (*end && (!letter || end[1]))
		goto bad;
	shift = letter ? 10 * (int)(letter - unit + 1) : 0;
	if (errno || n > UINT64_MAX >> shift)
		return err_usage(e, "option '%s': '%s' is too large", option, value);
	*out = n << shift;
	return 0;
bad:
	return err_usage(e, "option '%s': '%s' is not a size: bytes, or K M G T (powers of 1024)",
			 option, value);
}

int cli_choice(const char *option, const char *value, const char *const *choices, int *out,
	       struct err *e)
{
	char list[ERR_TEXT / 2] = "";
	size_t n = 0;
	int i;

	for (i = 0; choices[i]; i++) {
		if (!strcmp(value, choices[i])) {
			*out = i;
			return 0;
		}
		if (n < sizeof list)
			n += (size_t)snprintf(list + n, sizeof list - n, "%s%s", i ? ", " : "",
					      choices[i]);
	}
	return err_usage(e, "option '%s': '%s' is not one of %s", option, value, list);
}
