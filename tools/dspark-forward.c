/* SPDX-License-Identifier: Apache-2.0 */
/* dspark-forward: runs one rank of a staged plan and publishes its shards. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif
#include <signal.h>
#include <unistd.h>

#include "cli.h"
#include "err.h"
#include "file.h"
#include "forward.h"
#include "log.h"
#include "session.h"

static const char usage[] =
"usage: dspark-forward [-s STAGE] [--rank R] [--comm auto|self|mpi|nccl]\n"
"                      [--progress auto|bar|line|json] [--nonfinite stop|quarantine] [RUN]\n"
"\n"
"Runs the target over this rank's rows and writes the cache. RUN is the output of\n"
"dspark-load; - or none is standard input.\n"
"\n"
"  -s, --stage STAGE     take the weights from this stage instead of the one the run names\n"
"      --rank R          run rank R of the plan, without talking to the others\n"
"      --comm HOW        how ranks are connected; auto finds torchrun, MPI launchers and Slurm\n"
"      --progress STYLE  auto (a bar on a terminal, else a line a minute), bar, line or json\n"
"      --nonfinite HOW   at a state that is NaN or infinite: stop (default), or quarantine: set\n"
"                        its shard aside and go on\n"
"  -h, --help            show this help\n"
"  -V, --version         show the version\n"
"  -q, --quiet           only errors\n"
"  -v, --verbose         say more\n";

enum { OPT_RANK = 256, OPT_COMM, OPT_PROGRESS, OPT_NONFINITE };

static const struct option longopts[] = {
	{ "stage", required_argument, NULL, 's' },
	{ "rank", required_argument, NULL, OPT_RANK },
	{ "comm", required_argument, NULL, OPT_COMM },
	{ "progress", required_argument, NULL, OPT_PROGRESS },
	{ "nonfinite", required_argument, NULL, OPT_NONFINITE },
	CLI_COMMON_LONG
};

static const char *const comms[] = { "auto", "self", "mpi", "nccl", NULL };
static const char *const nonfinites[] = { "stop", "quarantine", NULL };

static int parse(struct cli *cli, struct session_options *o, int argc, char **argv, struct err *e)
{
	int ch, choice;

	while ((ch = getopt_long(argc, argv, "s:" CLI_COMMON_SHORT, longopts, NULL)) != -1) {
		int rc = 0;

		switch (ch) {
		case 's':
			o->stage = optarg;
			break;
		case OPT_RANK:
			rc = cli_int("--rank", optarg, 0, 1 << 20, &o->rank, e);
			break;
		case OPT_COMM:
			rc = cli_choice("--comm", optarg, comms, &choice, e);
			o->comm = rc ? o->comm : comms[choice];
			break;
		case OPT_PROGRESS:
			if (progress_style(optarg, &o->progress))
				rc = err_usage(e, "--progress '%s' is not one of auto, bar, "
					       "line, json", optarg);
			break;
		case OPT_NONFINITE:
			rc = cli_choice("--nonfinite", optarg, nonfinites, &choice, e);
			o->nonfinite = !rc && choice ? NONFINITE_QUARANTINE : NONFINITE_STOP;
			break;
		default:
			rc = cli_common(cli, ch, argv, e);
		}
		if (rc || cli->done)
			return rc;
	}
	o->run = argv[optind];
	if (o->run && argv[optind + 1])
		return err_usage(e, "unexpected operand '%s': give one run", argv[optind + 1]);
	return 0;
}

/* The first signal ends the run at the next chunk of a layer, the second at once. */
static void on_signal(int sig)
{
	(void)sig;
	if (forward_stop) {
		file_abort_all();
		log_interrupted();
		_exit(EXIT_FAILED);
	}
	forward_stop = 1;
}

static void arm_signals(void)
{
	static const int ends[] = { SIGINT, SIGTERM, SIGHUP };
	struct sigaction old, act = { .sa_handler = on_signal, .sa_flags = SA_RESTART };

	for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
		if (!sigaction(ends[i], NULL, &old) && old.sa_handler != SIG_IGN)
			sigaction(ends[i], &act, NULL);
	signal(SIGPIPE, SIG_IGN);
}

int main(int argc, char **argv)
{
	struct session_options o = { .comm = "auto", .rank = -1 };
	struct session s = SESSION_INIT;
	struct err e = ERR_INIT;
	struct cli cli;

	cli_begin(&cli, "dspark-forward", usage);
	if (!parse(&cli, &o, argc, argv, &e) && !cli.done) {
		arm_signals();
		session_run(&s, &o, &argc, &argv, &e);
		if (e.code && session_has_peers(&s))
			log_error("%s", e.text);
		session_end(&s, e.code);
	}
	return cli_end(&cli, &e);
}
