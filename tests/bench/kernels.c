/* SPDX-License-Identifier: Apache-2.0 */
/* Speed of the kernels on the shapes of a config.json; no checkpoint, no files, no ranks. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"
#include "rig.h"
#include "yardstick.h"

static const char usage[] =
"usage: kernels profile  [-d DTYPE] [-s LENGTH] [-r ROWS] [-l LAYERS] [-n REPEATS] CONFIG\n"
"       kernels products [-d DTYPE] [-m TOKENS] [-n PAIRS] CONFIG\n"
"       kernels pack     [-d DTYPE] [-l LAYERS] [-n REPEATS] CONFIG\n"
"       kernels sparse   [-d DTYPE] [-s LENGTH] [-n PAIRS] CONFIG\n"
"       kernels onednn\n"
"\n"
"profile runs the forward of a random target of this config.json over rows of one length and\n"
"says where the time goes; products runs each of its products beside oneDNN's own, packed, with\n"
"the same threads; pack fills all weights from memory; sparse runs the first layer over one row\n"
"with the keys that it chooses and with all; packed runs its products from packed weights beside\n"
"BF16 ones; onednn tells its version. JSON lines, on a terminal a table.\n"
"\n"
"  -d DTYPE      fp32 (default) or bf16\n"
"  -s LENGTH     tokens of a row (512)\n"
"  -r ROWS       rows (4096 tokens of them, at least one)\n"
"  -l LAYERS     only so many layers (all)\n"
"  -m TOKENS     tokens that go through a product together (2048)\n"
"  -n N          measured passes or pairs (7)\n"
"  -j THREADS    threads (OMP_NUM_THREADS, else the cores)\n"
"  -b BACKEND    cpu (default) or ref\n"
"  -t            a table, whatever stdout is\n"
"  -h, --help    show this help\n";

static const struct option longopts[] = { CLI_COMMON_LONG };
static const char *const commands[] = { "profile", "products", "pack", "sparse", "packed",
					NULL };
static const char *const dtypes[] = { "fp32", "bf16", NULL };

static int parse(struct cli *cli, struct rig_options *o, int *command, int argc, char **argv,
		 struct err *e)
{
	static const struct {
		char ch;
		size_t at;
		int64_t least, most;
	} numbers[] = {
		{ 's', offsetof(struct rig_options, length), 1, 1 << 20 },
		{ 'r', offsetof(struct rig_options, rows), 1, 1 << 20 },
		{ 'l', offsetof(struct rig_options, layers), 1, 1 << 16 },
		{ 'm', offsetof(struct rig_options, tokens), 1, 1 << 20 },
		{ 'n', offsetof(struct rig_options, repeats), 1, PAIRS_MOST },
		{ 'j', offsetof(struct rig_options, threads), 1, 4096 },
	};
	int ch, choice = 0;

	while ((ch = getopt_long(argc, argv, "d:s:r:l:m:n:j:b:t" CLI_COMMON_SHORT, longopts,
				 NULL)) != -1) {
		char option[] = { '-', (char)ch, '\0' };
		size_t i = 0;

		while (i < sizeof numbers / sizeof *numbers && numbers[i].ch != ch)
			i++;
		if (i < sizeof numbers / sizeof *numbers) {
			if (cli_int(option, optarg, numbers[i].least, numbers[i].most,
				    (int64_t *)((char *)o + numbers[i].at), e))
				return -1;
		} else if (ch == 'd') {
			if (cli_choice(option, optarg, dtypes, &choice, e))
				return -1;
			o->compute = choice ? DT_BF16 : DT_F32;
		} else if (ch == 'b') {
			o->backend = optarg;
		} else if (ch == 't') {
			o->table = true;
		} else if (cli_common(cli, ch, argv, e)) {
			return -1;
		}
		if (cli->done)
			return 0;
	}
	if (argc - optind == 1 && !strcmp(argv[optind], "onednn")) {
		puts(yardstick_version());
		cli->done = true;
		return 0;
	}
	if (argc - optind != 2)
		return err_usage(e, "give profile, products, pack, sparse or packed, and one "
				"config.json");
	o->config = argv[optind + 1];
	return cli_choice("command", argv[optind], commands, command, e);
}

static int (*const run[])(const struct rig_options *, struct err *) = { profile, products, pack,
									sparse, packed };

int main(int argc, char **argv)
{
	struct rig_options o = { .backend = "cpu",
				 .compute = DT_F32,
				 .length = 512,
				 .tokens = 2048,
				 .repeats = 7,
				 .table = isatty(STDOUT_FILENO) };
	struct err e = ERR_INIT;
	struct cli cli;
	int command;

	cli_begin(&cli, "kernels", usage);
	if (!parse(&cli, &o, &command, argc, argv, &e) && !cli.done)
		run[command](&o, &e);
	return cli_end(&cli, &e);
}
