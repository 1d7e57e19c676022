/* SPDX-License-Identifier: Apache-2.0 */
/*
 * log: each line is one write(2), so that the lines of ranks sharing a terminal or a file never
 * mix.
 *
 * While a progress bar stands on the terminal's last line, a message erases it, prints itself and
 * draws it again, all in the same write.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include "log.h"

#define LINE  4096
#define BAR   256
#define ERASE "\r\033[K"

static const char *program = "dspark";
static int rank_here, ranks = 1, level;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char bar[BAR]; /* what stands on the terminal's last line */
static atomic_bool bar_shown;

void log_program(const char *name)
{
	program = name;
}

const char *log_name(void)
{
	return program;
}

void log_rank(int rank, int world)
{
	rank_here = rank;
	ranks = world;
}

void log_level(int new_level)
{
	level = new_level;
}

double log_seconds(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* stderr is the last resort: where it fails there is nobody to tell. */
static void put(const char *s, size_t n)
{
	while (n) {
		ssize_t done = write(STDERR_FILENO, s, n);

		if (done < 0 && errno == EINTR)
			continue;
		if (done <= 0)
			return;
		s += done;
		n -= (size_t)done;
	}
}

/* `len` is what snprintf said: more than fits means cut. */
static size_t cut(int len, size_t room)
{
	return len < 0 ? 0 : (size_t)len < room ? (size_t)len : room - 1;
}

/* A whole line, without its newline, around the bar. */
static void put_line(const char *line)
{
	char buf[sizeof ERASE + LINE + 1 + BAR];
	bool shown;
	int n;

	pthread_mutex_lock(&lock);
	shown = atomic_load(&bar_shown);
	n = snprintf(buf, sizeof buf, "%s%s\n%s", shown ? ERASE : "", line, shown ? bar : "");
	put(buf, cut(n, sizeof buf));
	pthread_mutex_unlock(&lock);
}

/*
 * Names and values in a message come from the user's files: what could steer a terminal is shown,
 * not sent, and what follows a newline is indented, so that no text poses as a message of ours.
 */
static void plain_text(char *out, size_t room, const char *s)
{
	size_t n = 0;

	for (; *s && n + 5 < room; s++) {
		unsigned char c = (unsigned char)s[0], next = (unsigned char)s[1];

		if (c == '\n') {
			n += (size_t)sprintf(out + n, "\n    ");
		} else if (c == 0xc2 && next >= 0x80 && next < 0xa0) {
			n += (size_t)sprintf(out + n, "\\x%02x", next);
			s++;
		} else if (c < ' ' || c == 0x7f) {
			n += (size_t)sprintf(out + n, "\\x%02x", c);
		} else {
			out[n++] = (char)c;
		}
	}
	out[n] = '\0';
}

static void message(const char *kind, const char *fmt, va_list ap)
{
	char line[LINE], text[LINE];
	size_t n;
	int saved = errno;

	if (ranks > 1)
		n = cut(snprintf(line, sizeof line, "%s[%d]: %s", program, rank_here, kind),
			sizeof line);
	else
		n = cut(snprintf(line, sizeof line, "%s: %s", program, kind), sizeof line);
	vsnprintf(text, sizeof text, fmt, ap);
	plain_text(line + n, sizeof line - n, text);
	put_line(line);
	errno = saved;
}

void log_error(const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	message("", fmt, ap);
	va_end(ap);
}

void log_warn(const char *fmt, ...)
{
	va_list ap;

	if (level < 0)
		return;
	va_start(ap, fmt);
	message("warning: ", fmt, ap);
	va_end(ap);
}

void log_info(const char *fmt, ...)
{
	va_list ap;

	if (level < 0)
		return;
	va_start(ap, fmt);
	message("", fmt, ap);
	va_end(ap);
}

void log_debug(const char *fmt, ...)
{
	va_list ap;

	if (level < 1)
		return;
	va_start(ap, fmt);
	message("", fmt, ap);
	va_end(ap);
}

void log_interrupted(void)
{
	int saved = errno;

	if (atomic_exchange(&bar_shown, false))
		put("\n", 1);
	errno = saved;
}

int progress_style(const char *name, enum progress_style *style)
{
	static const char *const names[] = { "auto", "bar", "line", "json" };
	size_t i;

	for (i = 0; i < sizeof names / sizeof names[0]; i++) {
		if (!strcmp(name, names[i])) {
			*style = (enum progress_style)i;
			return 0;
		}
	}
	return -1;
}

void progress_begin(struct progress *p, enum progress_style style, const char *what, int64_t total)
{
	if (level < 0)
		style = PROGRESS_NONE;
	else if (style == PROGRESS_AUTO)
		style = isatty(STDERR_FILENO) ? PROGRESS_BAR : PROGRESS_LINE;
	*p = (struct progress){
		.style = style, .what = what, .total = total, .start = log_seconds()
	};
	p->last = style == PROGRESS_BAR ? p->start - 60 : p->start;
}

/* "4:07", "2:31:09", "3d04h"; "-:--" when unknown. */
static void clock_text(char *out, size_t room, double seconds)
{
	long s = (long)(seconds + 0.5);

	if (seconds < 0 || seconds > 1e8)
		snprintf(out, room, "-:--");
	else if (s < 3600)
		snprintf(out, room, "%ld:%02ld", s / 60, s % 60);
	else if (s < 100 * 3600)
		snprintf(out, room, "%ld:%02ld:%02ld", s / 3600, s / 60 % 60, s % 60);
	else
		snprintf(out, room, "%ldd%02ldh", s / 86400, s / 3600 % 24);
}

/* Three figures and a letter. */
static void short_number(char *out, size_t room, double v)
{
	static const char unit[] = " kMGTPE";
	size_t u = 0;

	while (v >= 999.5 && unit[u + 1]) {
		v /= 1000;
		u++;
	}
	snprintf(out, room, "%.*f%.*s", v < 9.995 ? 2 : v < 99.95 ? 1 : 0, v, u ? 1 : 0, unit + u);
}

static double eta(const struct progress *p, double now)
{
	if (p->done <= 0 || p->total <= 0)
		return -1;
	return (now - p->start) / (double)p->done * (double)(p->total - p->done);
}

/* " 1.25k tokens/s, 3.40G written" and the like, with what is known. */
static size_t rate_text(const struct progress *p, double now, char *out, size_t room)
{
	double seconds = now - p->start > 1e-3 ? now - p->start : 1e-3;
	char num[32], left[32];
	size_t n = 0;

	out[0] = '\0';
	if (p->tokens) {
		short_number(num, sizeof num, (double)p->tokens / seconds);
		n += cut(snprintf(out + n, room - n, ", %s tokens/s", num), room - n);
	} else if (p->done) {
		short_number(num, sizeof num, (double)p->done / seconds);
		n += cut(snprintf(out + n, room - n, ", %s %s/s", num, p->what), room - n);
	}
	if (p->bytes) {
		short_number(num, sizeof num, (double)p->bytes);
		n += cut(snprintf(out + n, room - n, ", %sB", num), room - n);
	}
	clock_text(num, sizeof num, seconds);
	clock_text(left, sizeof left, eta(p, now));
	n += cut(snprintf(out + n, room - n, ", %s, ETA %s", num, left), room - n);
	return n;
}

static int percent(const struct progress *p)
{
	if (p->total <= 0)
		return 100;
	return (int)(100.0 * (double)p->done / (double)p->total);
}

/* 0 where the terminal does not say. */
static size_t terminal_width(void)
{
	struct winsize w;

	return ioctl(STDERR_FILENO, TIOCGWINSZ, &w) ? 0 : w.ws_col;
}

/* The last column stays free: some terminals wrap as soon as it is filled. */
static void draw_bar(const struct progress *p, double now)
{
	char words[192], out[sizeof ERASE + BAR];
	size_t width = terminal_width(), n, cells, filled, i;

	if (!width)
		width = 80;
	if (width > BAR - 1)
		width = BAR - 1;
	n = cut(snprintf(words, sizeof words, "%3d%% %lld/%lld %s", percent(p), (long long)p->done,
			 (long long)p->total, p->what),
		sizeof words);
	rate_text(p, now, words + n, sizeof words - n);
	n = strlen(words);

	pthread_mutex_lock(&lock);
	cells = width > n + 14 ? width - n - 4 : 0;
	if (cells > 30)
		cells = 30;
	i = 0;
	if (cells) {
		filled = p->total > 0 ? (size_t)((double)cells * (double)p->done / (double)p->total)
				      : cells;
		bar[i++] = '[';
		for (; i <= cells; i++)
			bar[i] = i <= filled ? '#' : '.';
		bar[i++] = ']';
		bar[i++] = ' ';
	}
	snprintf(bar + i, width > i ? width - i : 1, "%s", words);
	n = cut(snprintf(out, sizeof out, ERASE "%s", bar), sizeof out);
	put(out, n);
	atomic_store(&bar_shown, true);
	pthread_mutex_unlock(&lock);
}

static void erase_bar(void)
{
	pthread_mutex_lock(&lock);
	if (atomic_exchange(&bar_shown, false))
		put(ERASE, sizeof ERASE - 1);
	pthread_mutex_unlock(&lock);
}

static void print_line(const struct progress *p, double now)
{
	char words[192];

	rate_text(p, now, words, sizeof words);
	log_info("%lld/%lld %s (%d%%)%s", (long long)p->done, (long long)p->total, p->what,
		 percent(p), words);
}

static void print_json(const struct progress *p, double now)
{
	char line[512];

	snprintf(
		line, sizeof line,
		"{\"progress\": {\"what\": \"%s\", \"rank\": %d, \"done\": %lld, \"total\": %lld, "
		"\"tokens\": %lld, \"bytes\": %lld, \"seconds\": %.3f, \"eta\": %.0f}}",
		p->what, rank_here, (long long)p->done, (long long)p->total, (long long)p->tokens,
		(long long)p->bytes, now - p->start, eta(p, now));
	put_line(line);
}

static void show(struct progress *p, double now)
{
	p->last = now;
	if (p->style == PROGRESS_BAR)
		draw_bar(p, now);
	else if (p->style == PROGRESS_JSON)
		print_json(p, now);
	else if (p->style == PROGRESS_LINE)
		print_line(p, now);
}

void progress_update(struct progress *p, int64_t done, int64_t tokens, int64_t bytes)
{
	double now = log_seconds(), every = p->style == PROGRESS_BAR    ? 0.1
					    : p->style == PROGRESS_LINE ? 60
									: 1;

	p->done = done;
	p->tokens = tokens;
	p->bytes = bytes;
	if (now - p->last >= every)
		show(p, now);
}

/*
 * The last state is always said, but on a terminal, where the summary that follows says it better.
 */
void progress_end(struct progress *p)
{
	if (p->style == PROGRESS_BAR)
		erase_bar();
	else
		show(p, log_seconds());
	p->style = PROGRESS_NONE;
}
