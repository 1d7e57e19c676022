/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Transports: which one a launcher's environment leads to, the one that is alone, and every
 * collective of MPI on 1 to 4 ranks with counts of zero and transfers that are cut. The program
 * starts itself under $MPIEXEC as `t_comm ranks`: there each rank checks, rank 0 prints.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "err.h"
#include "kernels.h"
#include "tap.h"

/* ---- one process ----------------------------------------------------------------------------- */

static const char *const names[] = {
	"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
	"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
	"PMI_SIZE", "PMI_RANK", "PMIX_RANK", "MPI_LOCALNRANKS", "SLURM_PROCID",
	"SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID",
	"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE",
};

/* "RANK=3 WORLD_SIZE=4" as the whole environment of launchers. */
static void launched_by(const char *text)
{
	char copy[256], *word, *save = NULL;

	for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
		unsetenv(names[i]);
	snprintf(copy, sizeof copy, "%s", text);
	for (word = strtok_r(copy, " ", &save); word; word = strtok_r(NULL, " ", &save)) {
		char *value = strchr(word, '=');

		*value = '\0';
		setenv(word, value + 1, 1);
	}
}

static void test_environments(void)
{
	static const struct {
		const char *env, *name;
		int rank, world;
		bool replicated;
		/*
		 * "rank/world local_rank/local_size collective", or part of the refusal behind '!'
		 */
		const char *want;
	} table[] = {
		{ "", "auto", -1, 0, false, "0/1 0/1 1" },
		{ "", "self", -1, 4, false, "0/1 0/1 1" },
		{ "", "auto", 2, 4, true, "2/4 0/1 0" },
		{ "", "auto", 2, 0, true, "2/0 0/1 0" },
		{ "", "auto", 0, 1, false, "0/1 0/1 1" },
		{ "", "auto", 2, 4, false, "!cannot exchange" },
		{ "", "auto", 4, 4, true, "!outside the plan's world" },
		{ "", "mpi", 1, 4, true, "!--rank" },
		{ "RANK=3 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2", "auto", -1, 0, true,
		  "3/8 1/2 0" },
		{ "RANK=3 WORLD_SIZE=8 LOCAL_RANK=1", "auto", -1, 0, true, "3/8 1/2 0" },
		{ "RANK=3 WORLD_SIZE=8 LOCAL_RANK=1", "auto", 5, 8, true, "5/8 0/1 0" },
		{ "RANK=3 WORLD_SIZE=8 LOCAL_RANK=1", "auto", -1, 0, false, "!torchrun" },
		{ "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0", "auto", -1, 0, false, "0/1 0/1 1" },
		{ "RANK=8 WORLD_SIZE=8", "auto", -1, 0, true, "!do not name a rank" },
		{ "RANK=x WORLD_SIZE=8", "auto", -1, 0, true, "!is not a number" },
		{ "RANK= WORLD_SIZE=", "auto", -1, 0, true, "0/1 0/1 1" },
		{ "WORLD_SIZE=8", "auto", -1, 0, true, "0/1 0/1 1" },
		{ "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1", "auto", -1, 0, false, "0/1 0/1 1" },
		{ "SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=6 SLURM_LOCALID=1 SLURM_NODEID=2 "
		  "SLURM_STEP_TASKS_PER_NODE=1,3(x2),9",
		  "auto", -1, 0, true, "5/6 1/3 0" },
		{ "SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=6 SLURM_LOCALID=3", "auto", -1, 0, true,
		  "5/6 3/4 0" },
		{ "SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=6", "auto", -1, 0, false, "!Slurm" },
		{ "", "nccl", -1, 0, true, "!nccl" },
		{ "", "tcp", -1, 0, true, "!unknown" },
	};

	for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
		struct err e = ERR_INIT;
		struct comm c;
		char got[64];

		launched_by(table[i].env);
		if (comm_open(&c, table[i].name, table[i].rank, table[i].world, table[i].replicated,
			      NULL, NULL, &e)) {
			ok(table[i].want[0] == '!' && strstr(e.text, table[i].want + 1) && e.code,
			   "'%s' --comm %s --rank %d: %s", table[i].env, table[i].name,
			   table[i].rank, e.text);
			continue;
		}
		snprintf(got, sizeof got, "%d/%d %d/%d %d", c.rank, c.world, c.local_rank,
			 c.local_size, c.t->collective);
		is_str(got, table[i].want, "'%s' --comm %s --rank %d", table[i].env, table[i].name,
		       table[i].rank);
		c.t->close(&c);
	}
	launched_by("");
}

static void test_alone(void)
{
	struct err e = ERR_INIT;
	struct comm c, s;
	int64_t v = 5, rows = 2;
	char buf[8] = "abcdefg", out[8] = "", *got = NULL;
	uint64_t len = 0;

	comm_self_open(&c);
	ok(!c.t->barrier(&c, &e) && !c.t->allreduce(&c, &v, 1, COMM_SUM, &e) && v == 5 &&
		   !c.t->bcast(&c, buf, 8, 0, &e),
	   "alone: barrier, allreduce, bcast");
	ok(!c.t->gather(&c, buf, 8, 0, &got, &len, &e) && len == 8 && !memcmp(got, buf, 8),
	   "alone: gather");
	ok(!c.t->allgather(&c, out, buf, 8, &e) && !memcmp(out, buf, 8) &&
		   !c.t->allgather(&c, out, out, 8, &e),
	   "alone: allgather");
	ok(!c.t->alltoallv(&c, out, &rows, buf, &rows, 4, &e) && !memcmp(out, buf, 8),
	   "alone: alltoallv");
	ok(!c.t->split(&c, &s, 1, 1, &e) && s.world == 1, "alone: split");
	free(got);
	comm_told_open(&c, 1, 2, 0, 1);
	ok(c.t->barrier(&c, &e) == -1 && e.code == EXIT_REFUSED,
	   "told ranks have no collectives: %s", e.text);
}

/* ---- ranks ----------------------------------------------------------------------------------- */

static struct comm world;
static struct err failure;

/* All ranks must agree that `good`; rank 0 prints. */
static void all_ok(struct comm *c, bool good, const char *what)
{
	int64_t v = good && !failure.code;

	if (c->t->allreduce(c, &v, 1, COMM_MIN, &failure))
		v = 0;
	if (world.rank == 0)
		ok(v == 1, "%d ranks, cut %d: %s %s", c->world, (int)comm_cut, what, failure.text);
}

/* Byte i of what rank `from` sends to rank `to`. */
static unsigned char byte_of(int from, int to, uint64_t i)
{
	return (unsigned char)(from * 61 + to * 17 + i * 7 + i / 251);
}

static unsigned char *message(int from, int to, uint64_t n)
{
	unsigned char *p = malloc(n + 1);

	for (uint64_t i = 0; i < n; i++)
		p[i] = byte_of(from, to, i);
	return p;
}

static bool arrived(const unsigned char *p, int from, int to, uint64_t n)
{
	for (uint64_t i = 0; i < n; i++)
		if (p[i] != byte_of(from, to, i))
			return false;
	return true;
}

static void check_small(struct comm *c)
{
	int64_t v[3] = { c->rank, -c->rank, 1 + c->rank }, w = c->world;

	all_ok(c,
	       !c->t->allreduce(c, v, 3, COMM_MAX, &failure) && v[0] == w - 1 && v[1] == 0 &&
		       v[2] == w,
	       "allreduce MAX");
	v[0] = c->rank - 7;
	all_ok(c, !c->t->allreduce(c, v, 1, COMM_MIN, &failure) && v[0] == -7, "allreduce MIN");
	v[0] = c->rank;
	all_ok(c, !c->t->allreduce(c, v, 1, COMM_SUM, &failure) && v[0] == w * (w - 1) / 2,
	       "allreduce SUM");
	all_ok(c, !c->t->barrier(c, &failure), "barrier");
}

static void check_bcast(struct comm *c, uint64_t n)
{
	for (int root = 0; root < c->world; root++) {
		unsigned char *p = message(c->rank == root ? root : root + 1, 0, n);

		all_ok(c, !c->t->bcast(c, p, n, root, &failure) && arrived(p, root, 0, n), "bcast");
		free(p);
	}
}

static void check_gather(struct comm *c, uint64_t n)
{
	char *out[8] = { NULL };
	uint64_t len[8] = { 0 }, mine = c->rank == 1 ? 0 : n + (uint64_t)c->rank;
	int root = c->world - 1;
	unsigned char *p = message(c->rank, root, mine);
	bool good = !c->t->gather(c, p, mine, root, c->rank == root ? out : NULL,
				  c->rank == root ? len : NULL, &failure);

	for (int r = 0; good && c->rank == root && r < c->world; r++)
		good = len[r] == (r == 1 ? 0 : n + (uint64_t)r) &&
		       arrived((unsigned char *)out[r], r, root, len[r]);
	all_ok(c, good, "gather");
	for (int r = 0; r < c->world; r++)
		free(out[r]);
	free(p);
}

static void check_allgather(struct comm *c, uint64_t n, bool in_place)
{
	unsigned char *p = message(c->rank, 9, n), *out = calloc((size_t)c->world, n + 1),
		      *mine = out + (uint64_t)c->rank * n;
	bool good;

	if (in_place)
		memcpy(mine, p, n);
	good = !c->t->allgather(c, out, in_place ? mine : p, n, &failure);
	for (int r = 0; good && r < c->world; r++)
		good = arrived(out + (uint64_t)r * n, r, 9, n);
	all_ok(c, good, in_place ? "allgather in place" : "allgather");
	free(p);
	free(out);
}

/* Two under way at once, tested until they end, with another collective in between. */
static void check_started(struct comm *c, uint64_t n)
{
	unsigned char *p = message(c->rank, 9, n), *out[2];
	struct comm_request r[2];
	bool good = true, done;

	for (int i = 0; i < 2; i++) {
		out[i] = calloc((size_t)c->world, n + 1);
		good = good && !c->t->allgather_start(c, &r[i], out[i], p, n, &failure);
	}
	good = good && !c->t->barrier(c, &failure);
	for (done = false; good && !done;)
		good = !c->t->allgather_end(c, &r[0], false, &done, &failure);
	good = good && !c->t->allgather_end(c, &r[1], true, &done, &failure) && done;
	for (int i = 0; i < 2; i++) {
		for (int rank = 0; good && rank < c->world; rank++)
			good = arrived(out[i] + (uint64_t)rank * n, rank, 9, n);
		free(out[i]);
	}
	all_ok(c, good, "started allgathers");
	free(p);
}

/* Rows from rank a to rank b; none where that is 0. */
static int64_t rows_of(int a, int b, int64_t most)
{
	return most * ((a + 2 * b) % 3) / 2;
}

static void check_alltoallv(struct comm *c, int64_t most, uint64_t row)
{
	int64_t to[8], from[8], nto = 0, nfrom = 0;
	unsigned char *in, *out;
	bool good;

	for (int r = 0; r < c->world; r++) {
		nto += to[r] = rows_of(c->rank, r, most);
		nfrom += from[r] = rows_of(r, c->rank, most);
	}
	in = malloc((uint64_t)nto * row + 1);
	out = calloc((uint64_t)nfrom * row + 1, 1);
	for (int64_t r = 0, at = 0; r < c->world; at += to[r++])
		for (uint64_t i = 0; i < (uint64_t)to[r] * row; i++)
			in[(uint64_t)at * row + i] = byte_of(c->rank, (int)r, i);
	good = !c->t->alltoallv(c, out, from, in, to, row, &failure);
	for (int64_t r = 0, at = 0; good && r < c->world; at += from[r++])
		good = arrived(out + (uint64_t)at * row, (int)r, c->rank, (uint64_t)from[r] * row);
	all_ok(c, good, "alltoallv");
	free(in);
	free(out);
}

static void check_split(struct comm *c)
{
	struct comm half;
	int colour = c->rank % 2;
	bool good = !c->t->split(c, &half, colour, -c->rank, &failure);

	all_ok(c,
	       good && half.world == (c->world + 1 - colour) / 2 &&
		       half.rank == half.world - 1 - c->rank / 2,
	       "split, ordered by key");
	if (good) {
		int64_t v = 1;

		all_ok(c, !half.t->allreduce(&half, &v, 1, COMM_SUM, &failure) && v == half.world,
		       "allreduce of a part");
		half.t->close(&half);
	}
}

static void check_all(struct comm *c)
{
	static const uint64_t sizes[] = { 0, 1, 63, 64, 65, 5000 };

	check_small(c);
	for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
		check_bcast(c, sizes[i]);
		check_gather(c, sizes[i]);
		check_allgather(c, sizes[i], false);
		check_allgather(c, sizes[i], true);
		check_started(c, sizes[i]);
		check_alltoallv(c, (int64_t)sizes[i] / 7, 7);
	}
	check_alltoallv(c, 10, 0);
	check_split(c);
}

/* The others wait a second for rank 0: they must sleep, not burn a core. */
static void check_sleep(struct comm *c)
{
	struct rusage before, after;
	double used;

	getrusage(RUSAGE_SELF, &before);
	if (c->rank == 0)
		sleep(1);
	c->t->barrier(c, &failure);
	getrusage(RUSAGE_SELF, &after);
	used = (double)(after.ru_utime.tv_sec - before.ru_utime.tv_sec + after.ru_stime.tv_sec -
			before.ru_stime.tv_sec) +
	       1e-6 * (double)(after.ru_utime.tv_usec - before.ru_utime.tv_usec +
			       after.ru_stime.tv_usec - before.ru_stime.tv_usec);
	all_ok(c, used < 0.2, "waiting ranks sleep");
}

static int ranks(int argc, char **argv)
{
	static const uint64_t cuts[] = { 1 << 30, 64, 7 };

	if (comm_open(&world, "auto", -1, 0, false, &argc, &argv, &failure)) {
		printf("not ok 1 - open: %s\n", failure.text);
		return 1;
	}
	for (size_t i = 0; i < sizeof cuts / sizeof cuts[0]; i++) {
		comm_cut = cuts[i];
		check_all(&world);
	}
	check_sleep(&world);
	all_ok(&world,
	       world.local_size == world.world && world.local_rank < world.local_size &&
		       !strcmp(world.t->name, "mpi"),
	       "all on this host");
	if (world.rank == 0)
		tap_end();
	world.t->close(&world);
	return tap_failed != 0;
}

/* One rank aborts while the others wait: all must end, with its code. */
static int doomed(int argc, char **argv)
{
	if (comm_open(&world, "mpi", -1, 0, false, &argc, &argv, &failure))
		return 1;
	if (world.rank == world.world - 1)
		world.t->abort(&world, 3);
	world.t->barrier(&world, &failure);
	world.t->close(&world);
	return 0;
}

/* ---- under a launcher ------------------------------------------------------------------------ */

static int launch(const char *mpiexec, int n, const char *self, const char *what, bool show)
{
	char command[4096], line[1024];
	int good = 0;
	FILE *f;

	snprintf(command, sizeof command, "%s -n %d '%s' %s 2>&1", mpiexec, n, self, what);
	f = popen(command, "r");
	while (f && fgets(line, sizeof line, f)) {
		good += !strncmp(line, "ok ", 3);
		if (show && strncmp(line, "ok ", 3) && strncmp(line, "1..", 3))
			printf("# %s", line);
	}
	n = f ? pclose(f) : -1;
	return WIFEXITED(n) && (WEXITSTATUS(n) || good || !show) ? WEXITSTATUS(n) : -1;
}

int main(int argc, char **argv)
{
	const char *mpiexec = getenv("MPIEXEC");

	if (argc > 1 && !strcmp(argv[1], "ranks"))
		return ranks(argc, argv);
	if (argc > 1 && !strcmp(argv[1], "doomed"))
		return doomed(argc, argv);
	test_environments();
	test_alone();
#ifdef HAVE_MPI
	if (mpiexec && *mpiexec) {
		for (int n = 1; n <= 4; n++)
			is_int(launch(mpiexec, n, argv[0], "ranks", true), 0,
			       "collectives of %d ranks", n);
		is_int(launch(mpiexec, 3, argv[0], "doomed", false), 3,
		       "a rank that fails ends all");
		return tap_end();
	}
#endif
	(void)launch;
	tap_skip(mpiexec && *mpiexec ? "this build has no MPI" : "no MPI launcher");
	return tap_end();
}
