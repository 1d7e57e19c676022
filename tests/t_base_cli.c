/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cli and log: a small command run in a child: its exit code, what it prints, and its progress on a
 * terminal of known width.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli.h"
#include "err.h"
#include "file.h"
#include "log.h"
#include "tap.h"
#include "text.h"

static const char usage[] = "usage: tool [-n N] [-s SIZE] [-d DEVICE]\n";

/* As every main() is. */
static int tool(int argc, char **argv)
{
	static const struct option options[] = { { "number", required_argument, NULL, 'n' },
						 { "size", required_argument, NULL, 's' },
						 { "device", required_argument, NULL, 'd' },
						 CLI_COMMON_LONG };
	static const char *const devices[] = { "auto", "cpu", "cuda", NULL };
	struct err e = ERR_INIT;
	struct cli c;
	int64_t n = -1;
	uint64_t size = 0;
	int ch, device = 0;

	cli_begin(&c, "tool", usage);
	while (!e.code && !c.done &&
	       (ch = getopt_long(argc, argv, "n:s:d:" CLI_COMMON_SHORT, options, NULL)) != -1) {
		if (ch == 'n')
			cli_int("--number", optarg, -5, 10, &n, &e);
		else if (ch == 's')
			cli_size("--size", optarg, &size, &e);
		else if (ch == 'd')
			cli_choice("--device", optarg, devices, &device, &e);
		else
			cli_common(&c, ch, argv, &e);
	}
	if (!e.code && !c.done) {
		log_info("information");
		log_debug("detail");
		log_warn("careful");
		printf("%lld %llu %d %d\n", (long long)n, (unsigned long long)size, device,
		       argc - optind);
	}
	return cli_end(&c, &e);
}

/* Reads `fd` to its end. */
static void drain(int fd, struct text *t)
{
	char buf[4096];
	ssize_t n;

	while ((n = read(fd, buf, sizeof buf)) > 0 || (n < 0 && errno == EINTR))
		if (n > 0)
			text_addn(t, buf, (size_t)n);
	text_add(t, "");
}

/*
 * Runs `tool`; stdout goes to `to` unless NULL ("" closes it). Returns the exit code, or 256 +
 * signal.
 */
static int run_tool(char **argv, const char *to, struct text *out, struct text *err)
{
	int o[2], r[2], status, argc = 0, fd;
	pid_t pid;

	while (argv[argc])
		argc++;
	if (pipe(o) || pipe(r))
		return -1;
	fflush(stdout);
	pid = fork();
	if (!pid) {
		dup2(r[1], STDERR_FILENO);
		if (!to) {
			dup2(o[1], STDOUT_FILENO);
		} else if (*to) {
			fd = open(to, O_WRONLY);
			dup2(fd, STDOUT_FILENO);
		} else {
			close(STDOUT_FILENO);
		}
		close(o[0]);
		close(o[1]);
		close(r[0]);
		close(r[1]);
		optind = 0;
		_exit(tool(argc, argv));
	}
	close(o[1]);
	close(r[1]);
	text_clear(out);
	text_clear(err);
	drain(o[0], out);
	drain(r[0], err);
	close(o[0]);
	close(r[0]);
	waitpid(pid, &status, 0);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 256 + WTERMSIG(status);
}

#define TRY  "Try 'tool --help' for more information.\n"
#define SAID "tool: information\ntool: warning: careful\n"
#define NOT_SIZE(v) \
	"tool: option '--size': '" v "' is not a size: bytes, or K M G T (powers of 1024)\n" TRY
#define NOT_INT(v) "tool: option '--number': '" v "' is not a whole number from -5 to 10\n" TRY

static void test_options(void)
{
	static const struct {
		char *argv[5];
		const char *to;
		int code;
		const char *out, *err;
	} t[] = {
		{ { "tool" }, NULL, 0, "-1 0 0 0\n", SAID },
		{ { "tool", "-q" }, NULL, 0, "-1 0 0 0\n", "" },
		{ { "tool", "-v", "x" },
		  NULL,
		  0,
		  "-1 0 0 1\n",
		  "tool: information\ntool: detail\ntool: warning: careful\n" },
		{ { "tool", "-h" }, NULL, 0, usage, "" },
		{ { "tool", "--help", "--nonsense" }, NULL, 0, usage, "" },
		{ { "tool", "-V" }, NULL, 0, NULL, "" },
		{ { "tool", "--verb", "-n", "3" },
		  NULL,
		  0,
		  "3 0 0 0\n",
		  "tool: information\ntool: detail\ntool: warning: careful\n" },
		{ { "tool", "--nonsense" },
		  NULL,
		  2,
		  "",
		  "tool: unknown or ambiguous option '--nonsense'\n" TRY },
		{ { "tool", "--nonsense=3" },
		  NULL,
		  2,
		  "",
		  "tool: unknown or ambiguous option '--nonsense'\n" TRY },
		{ { "tool", "--ver" },
		  NULL,
		  2,
		  "",
		  "tool: unknown or ambiguous option '--ver'\n" TRY },
		{ { "tool", "--help=3" },
		  NULL,
		  2,
		  "",
		  "tool: option '--help' takes no value\n" TRY },
		{ { "tool", "--size" }, NULL, 2, "", "tool: option '--size' needs a value\n" TRY },
		{ { "tool", "-s" }, NULL, 2, "", "tool: option '-s' needs a value\n" TRY },
		{ { "tool", "-x" }, NULL, 2, "", "tool: unknown option '-x'\n" TRY },
		{ { "tool", "-qx", "-n" }, NULL, 2, "", "tool: unknown option '-x'\n" TRY },
		{ { "tool", "--device=cpu", "-xq", "-n" },
		  NULL,
		  2,
		  "",
		  "tool: unknown option '-x'\n" TRY },
		{ { "tool", "--help=3", "-q" },
		  NULL,
		  2,
		  "",
		  "tool: option '--help' takes no value\n" TRY },
		{ { "tool", "-qs" }, NULL, 2, "", "tool: option '-s' needs a value\n" TRY },
		{ { "tool", "-" }, NULL, 0, "-1 0 0 1\n", SAID },
		{ { "tool", "-n", "-5" }, NULL, 0, "-5 0 0 0\n", SAID },
		{ { "tool", "-n", "10" }, NULL, 0, "10 0 0 0\n", SAID },
		{ { "tool", "-n", "11" }, NULL, 2, "", NOT_INT("11") },
		{ { "tool", "-n", "" }, NULL, 2, "", NOT_INT("") },
		{ { "tool", "-n", " 1" }, NULL, 2, "", NOT_INT(" 1") },
		{ { "tool", "-n", "1x" }, NULL, 2, "", NOT_INT("1x") },
		{ { "tool", "-n", "0x1" }, NULL, 2, "", NOT_INT("0x1") },
		{ { "tool", "-n", "99999999999999999999" },
		  NULL,
		  2,
		  "",
		  NOT_INT("99999999999999999999") },
		{ { "tool", "-s", "17" }, NULL, 0, "-1 17 0 0\n", SAID },
		{ { "tool", "-s", "80G" }, NULL, 0, "-1 85899345920 0 0\n", SAID },
		{ { "tool", "-s", "2K" }, NULL, 0, "-1 2048 0 0\n", SAID },
		{ { "tool", "-s", "16777215T" }, NULL, 0, "-1 18446742974197923840 0 0\n", SAID },
		{ { "tool", "-s", "16777216T" },
		  NULL,
		  2,
		  "",
		  "tool: option '--size': '16777216T' is too large\n" TRY },
		{ { "tool", "-s", "18446744073709551615" },
		  NULL,
		  0,
		  "-1 18446744073709551615 0 0\n",
		  SAID },
		{ { "tool", "-s", "18446744073709551616" },
		  NULL,
		  2,
		  "",
		  "tool: option '--size': '18446744073709551616' is too large\n" TRY },
		{ { "tool", "-s", "-1" }, NULL, 2, "", NOT_SIZE("-1") },
		{ { "tool", "-s", "+1" }, NULL, 2, "", NOT_SIZE("+1") },
		{ { "tool", "-s", "" }, NULL, 2, "", NOT_SIZE("") },
		{ { "tool", "-s", "G" }, NULL, 2, "", NOT_SIZE("G") },
		{ { "tool", "-s", "1Gx" }, NULL, 2, "", NOT_SIZE("1Gx") },
		{ { "tool", "-s", "1.5G" }, NULL, 2, "", NOT_SIZE("1.5G") },
		{ { "tool", "-s", "99999999999999999999x" },
		  NULL,
		  2,
		  "",
		  NOT_SIZE("99999999999999999999x") },
		{ { "tool", "-d", "cuda" }, NULL, 0, "-1 0 2 0\n", SAID },
		{ { "tool", "-d", "cud" },
		  NULL,
		  2,
		  "",
		  "tool: option '--device': 'cud' is not one of auto, cpu, cuda\n" TRY },
		{ { "tool", "-q" },
		  "/dev/full",
		  3,
		  "",
		  "tool: cannot write standard output: No space left on device\n" },
		{ { "tool", "--help" },
		  "/dev/full",
		  3,
		  "",
		  "tool: cannot write standard output: No space left on device\n" },
		{ { "tool", "-q" },
		  "",
		  3,
		  "",
		  "tool: cannot write standard output: Bad file descriptor\n" },
		{ { "tool", "-q", "-x" }, "", 2, "", "tool: unknown option '-x'\n" TRY },
	};
	struct text out = TEXT_INIT, err = TEXT_INIT;
	size_t i;

	for (i = 0; i < sizeof t / sizeof t[0]; i++) {
		char *argv[6] = { NULL };
		int code;

		memcpy(argv, t[i].argv, sizeof t[i].argv);
		code = run_tool(argv, t[i].to, &out, &err);
		is_int(code, t[i].code, "%s %s %s >%s: exit code", argv[0], argv[1] ? argv[1] : "",
		       argv[1] && argv[2] ? argv[2] : "", t[i].to ? t[i].to : "pipe");
		if (t[i].out)
			is_str(out.s, t[i].out, "its output");
		else
			ok(!strncmp(out.s, "tool (dspark) ", 14) && out.s[out.len - 1] == '\n',
			   "its version: %.40s", out.s);
		is_str(err.s, t[i].err, "its messages");
	}
	text_release(&out);
	text_release(&err);
}

static void test_signals(void)
{
	static const int signals[] = { SIGINT, SIGTERM, SIGHUP };
	char path[] = "/tmp/dspark-cli.XXXXXX", name[64];
	struct err e = ERR_INIT;
	int status, i, ready[2];
	pid_t pid;
	char byte;

	if (!mkdtemp(path) || pipe(ready))
		return;
	snprintf(name, sizeof name, "%s/file", path);
	for (i = 0; i < 4; i++) {
		fflush(stdout);
		pid = fork();
		if (!pid) {
			struct file_new f;
			struct cli c;

			/* under nohup, or behind a shell's &, some came to us ignored */
			for (int k = 0; k < 3; k++)
				signal(signals[k], SIG_DFL);
			if (i == 3)
				signal(SIGHUP, SIG_IGN);
			alarm(60);
			cli_begin(&c, "tool", usage);
			file_new_open(&f, name, 0, &e);
			if (write(ready[1], "", 1) != 1)
				_exit(99);
			if (i == 3) {
				raise(SIGHUP);
				file_new_abort(&f);
				_exit(0);
			}
			for (;;)
				pause();
		}
		if (read(ready[0], &byte, 1) != 1)
			break;
		if (i < 3)
			kill(pid, signals[i]);
		waitpid(pid, &status, 0);
		if (i < 3)
			ok(WIFEXITED(status) && WEXITSTATUS(status) == 3, "%s: exit 3",
			   strsignal(signals[i]));
		else
			ok(WIFEXITED(status) && !WEXITSTATUS(status),
			   "a hangup ignored from the start stays ignored");
	}
	is_int(rmdir(path), 0, "no temporary is left");
}

/* The child's work on a terminal of `width` columns; all that it wrote. */
static void on_terminal(int width, enum progress_style style, struct text *t)
{
	struct winsize size = { .ws_row = 24, .ws_col = (unsigned short)width };
	char buf[4096];
	pid_t pid;
	int fd;
	ssize_t n;

	fflush(stdout);
	pid = forkpty(&fd, NULL, NULL, &size);
	if (!pid) {
		struct progress p;

		log_program("tool");
		progress_begin(&p, style, "rows", 100);
		progress_update(&p, 0, 0, 0);
		usleep(120000);
		progress_update(&p, 50, 50000, 123456789);
		log_info("in between");
		usleep(120000);
		progress_update(&p, 100, 100000, 987654321);
		progress_end(&p);
		log_info("the end");
		_exit(0);
	}
	text_clear(t);
	while ((n = read(fd, buf, sizeof buf)) > 0)
		text_addn(t, buf, (size_t)n);
	text_add(t, "");
	close(fd);
	waitpid(pid, NULL, 0);
}

/*
 * What a terminal shows of it: lines, after \r and "erase to end of line". Returns the widest line
 * ever drawn.
 */
static size_t screen(const char *s, struct text *lines)
{
	char row[1024] = "";
	size_t col = 0, len = 0, widest = 0;

	text_clear(lines);
	for (; *s; s++) {
		if (*s == '\r') {
			col = 0;
		} else if (*s == '\n') {
			text_addn(lines, row, len);
			text_add(lines, "\n");
			len = col = 0;
		} else if (!strncmp(s, "\033[K", 3)) {
			len = col;
			s += 2;
		} else if (col < sizeof row) {
			row[col++] = *s;
			len = col > len ? col : len;
		}
		widest = len > widest && strncmp(row, "tool:", len < 5 ? len : 5) ? len : widest;
	}
	text_addn(lines, row, len);
	return widest;
}

static void test_progress(void)
{
	static const int widths[] = { 200, 80, 60, 40, 20, 10, 1 };
	struct text raw = TEXT_INIT, lines = TEXT_INIT;
	size_t i, widest;

	for (i = 0; i < sizeof widths / sizeof widths[0]; i++) {
		on_terminal(widths[i], PROGRESS_AUTO, &raw);
		widest = screen(raw.s, &lines);
		is_str(lines.s, "tool: in between\ntool: the end\n",
		       "%d columns: the bar goes without a trace", widths[i]);
		ok(widest < (size_t)widths[i], "%d columns: the widest bar has %zu", widths[i],
		   widest);
		if (widths[i] >= 60)
			ok(strstr(raw.s, " 50% 50/100 rows") && strstr(raw.s, "tokens/s"),
			   "%d columns: it says how far", widths[i]);
		if (widths[i] >= 80)
			ok(strstr(raw.s, "ETA 0:0") && strstr(raw.s, "[###"),
			   "%d columns: how long, and a bar", widths[i]);
	}
	on_terminal(80, PROGRESS_JSON, &raw);
	ok(strstr(raw.s,
		  "{\"progress\": {\"what\": \"rows\", \"rank\": 0, \"done\": 100, \"total\": 100, "
		  "\"tokens\": 100000, "
		  "\"bytes\": 987654321, ") &&
		   !strchr(raw.s, '\033'),
	   "json");
	on_terminal(80, PROGRESS_LINE, &raw);
	ok(strstr(raw.s, "tool: 100/100 rows (100%), ") && !strchr(raw.s, '\033'), "lines");
	on_terminal(80, PROGRESS_NONE, &raw);
	is_str(raw.s, "tool: in between\r\ntool: the end\r\n", "none");
	text_release(&raw);
	text_release(&lines);
}

static void test_names(void)
{
	enum progress_style style = PROGRESS_NONE;

	ok(!progress_style("json", &style) && style == PROGRESS_JSON, "json is a style");
	ok(!progress_style("auto", &style) && style == PROGRESS_AUTO, "auto is a style");
	ok(progress_style("none", &style) == -1 && progress_style("", &style) == -1,
	   "others are not");
	log_program("tool");
	is_str(log_name(), "tool", "the program's name");
}

int main(void)
{
	test_options();
	test_signals();
	test_progress();
	test_names();
	return tap_end();
}
