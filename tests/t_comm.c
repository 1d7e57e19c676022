/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Transports: which one a launcher's environment leads to, the one that is alone, every collective
 * of MPI on 1 to 4 ranks with counts of zero and transfers that are cut, and how waiting ends when
 * a rank stays away. The program starts itself under $MPIEXEC as `t_comm ranks`: there each rank
 * checks, rank 0 prints. `t_comm dog HOW` is a process with a watchdog.
 *
 * Built as tests/cuda/t_comm (over the emulated runtime and the stand-in for NCCL) it
 * does the same with NCCL, starting ranks as torchrun does, by environment variables.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "err.h"
#include "kernels.h"
#include "log.h"
#include "tap.h"
#include "watchdog.h"

/* The real NCCL needs devices. */
#if defined HAVE_NCCL && defined BED_BACKEND
#define STAND_IN 1
#endif
#ifdef STAND_IN
#include <cuda_runtime.h>

#include "starts.h"
#endif

static void doze(long ms)
{
	struct timespec t = { ms / 1000, ms % 1000 * 1000000 };

	nanosleep(&t, NULL);
}

/* ---- one process ----------------------------------------------------------------------------- */

static const char *const names[] = {
	"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
	"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
	"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALRANKID", "MV2_COMM_WORLD_SIZE",
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
		int rank;
		/*
		 * "rank/world local_rank/local_size collective", or part of the refusal behind '!'
		 */
		const char *want;
		/* what comm_connected says of these ranks, if it refuses them */
		const char *refusal;
	} table[] = {
		{ "", "auto", -1, "0/1 0/1 1", NULL },
		{ "", "self", -1, "0/1 0/1 1", NULL },
		{ "", "auto", 2, "2/0 0/1 0", "started by --rank cannot exchange" },
		{ "", "self", 2, "2/0 0/1 0", "started by --rank cannot exchange" },
		{ "", "mpi", 1, "!--rank", NULL },
		{ "RANK=3 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2", "auto", -1, "3/8 1/2 0",
		  "started by torchrun cannot" },
		{ "RANK=3 WORLD_SIZE=8 LOCAL_RANK=1", "auto", -1, "3/8 1/2 0", "torchrun" },
		{ "RANK=3 WORLD_SIZE=8 LOCAL_RANK=1", "auto", 5, "5/0 0/1 0", "--rank" },
		{ "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0", "auto", -1, "0/1 0/1 1", NULL },
		{ "RANK=8 WORLD_SIZE=8", "auto", -1, "!do not name a rank", NULL },
		{ "RANK=x WORLD_SIZE=8", "auto", -1, "!is not a number", NULL },
		{ "RANK= WORLD_SIZE=", "auto", -1, "0/1 0/1 1", NULL },
		{ "WORLD_SIZE=8", "auto", -1, "0/1 0/1 1", NULL },
		{ "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1", "auto", -1, "0/1 0/1 1", NULL },
		{ "SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=6 SLURM_LOCALID=1 SLURM_NODEID=2 "
		  "SLURM_STEP_TASKS_PER_NODE=1,3(x2),9",
		  "auto", -1, "5/6 1/3 0", "started by a Slurm step cannot" },
		{ "SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=6 SLURM_LOCALID=3", "auto", -1, "5/6 3/4 0",
		  "a Slurm step" },
#ifdef HAVE_NCCL
		{ "", "nccl", -1, "0/1 0/1 1", NULL },
		{ "RANK=3 WORLD_SIZE=8 LOCAL_RANK=1", "nccl", -1, "3/8 1/2 0", "torchrun" },
		{ "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 "
		  "OMPI_COMM_WORLD_LOCAL_SIZE=2",
		  "nccl", -1, "1/2 1/2 0", "an MPI launcher" },
		{ "PMI_RANK=1 PMI_SIZE=4 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2", "nccl", -1,
		  "1/4 0/2 0", "an MPI launcher" },
		{ "SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=6 SLURM_LOCALID=3", "nccl", -1, "5/6 3/4 0",
		  "a Slurm step" },
#else
		{ "", "nccl", -1, "!nccl", NULL },
#endif
		{ "", "tcp", -1, "!unknown", NULL },
	};

	for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
		struct err e = ERR_INIT;
		struct comm c;
		char got[64];

		launched_by(table[i].env);
		if (comm_open(&c, table[i].name, table[i].rank, NULL, NULL, &e)) {
			ok(table[i].want[0] == '!' && strstr(e.text, table[i].want + 1) && e.code,
			   "'%s' --comm %s --rank %d: %s", table[i].env, table[i].name,
			   table[i].rank, e.text);
			continue;
		}
		snprintf(got, sizeof got, "%d/%d %d/%d %d", c.rank, c.world, c.local_rank,
			 c.local_size, c.t->collective);
		is_str(got, table[i].want, "'%s' --comm %s --rank %d", table[i].env, table[i].name,
		       table[i].rank);
		c.world = c.world ? c.world : 8;
		ok(comm_connected(&c, &e) ? table[i].refusal && e.code == EXIT_REFUSED &&
						    strstr(e.text, table[i].refusal)
					  : !table[i].refusal,
		   "'%s' --rank %d: connected? %s", table[i].env, table[i].rank, e.text);
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
	struct comm_request r;
	bool done;

	comm_self_open(&c);
	ok(!c.t->barrier(&c, &e) && !c.t->allreduce(&c, &v, 1, COMM_SUM, &e) && v == 5 &&
		   !c.t->bcast(&c, buf, 8, 0, &e),
	   "alone: barrier, allreduce, bcast");
	ok(!c.t->gather(&c, buf, 8, 0, &got, &len, &e) && len == 8 && !memcmp(got, buf, 8),
	   "alone: gather");
	for (int i = 0; i < 2; i++)
		ok(!c.t->allgather_start(&c, &r, out, &len, i ? out : buf, &e) &&
			   !c.t->allgather_end(&c, &r, i, &done, &e) && done &&
			   !memcmp(out, buf, 8),
		   "alone: allgather%s", i ? " in place" : "");
	ok(!c.t->alltoallv(&c, out, &rows, buf, &rows, 4, &e) && !memcmp(out, buf, 8),
	   "alone: alltoallv");
	ok(!c.t->split(&c, &s, 1, 1, &e) && s.world == 1, "alone: split");
	free(got);
	comm_told_open(&c, 1, 2, 0, 1);
	ok(c.t->barrier(&c, &e) == -1 && e.code == EXIT_REFUSED,
	   "told ranks have no collectives: %s", e.text);
}

/* ---- watchdog -------------------------------------------------------------------------------- */

/* Longer than a call may last for a watchdog of no seconds, its margin of 2 s. */
#define LONG 2900

static void say_last(void)
{
	if (write(STDOUT_FILENO, "last\n", 5) != 5)
		_exit(9);
}

/*
 * "stuck" never leaves an outer call after an inner one; "inner" stays long in it, with inner
 * calls; "idle" is long between calls. Only the first may be ended.
 */
static int watched(const char *how)
{
	struct watchdog dog = { 0 };
	struct err e = ERR_INIT;

	log_program("t_comm");
	if (watchdog_start(&dog, 0.01, say_last, &e))
		return 8;
	watchdog_enter(&dog, "an all-gather");
	watchdog_enter(&dog, "something else");
	watchdog_leave(&dog);
	if (!strcmp(how, "stuck"))
		doze(60000);
	for (int i = 0; !strcmp(how, "inner") && i < 29; i++) {
		watchdog_enter(&dog, "something else");
		doze(LONG / 29);
		watchdog_leave(&dog);
	}
	watchdog_leave(&dog);
	if (!strcmp(how, "idle"))
		doze(LONG);
	watchdog_stop(&dog);
	watchdog_stop(&dog);
	watchdog_enter(NULL, "nothing");
	watchdog_leave(NULL);
	return 7;
}

static void test_watchdog(const char *self)
{
	static const struct {
		const char *how;
		int code;
		const char *said, *last;
	} table[] = {
		{ "stuck", EXIT_FAILED, "an all-gather has not come back for 2 s: ", "last\n" },
		{ "inner", 7, NULL, NULL },
		{ "idle", 7, NULL, NULL },
	};
	FILE *f[3];

	for (int i = 0; i < 3; i++) {
		char command[4096];

		snprintf(command, sizeof command, "'%s' dog %s 2>&1", self, table[i].how);
		f[i] = popen(command, "r");
	}
	for (int i = 0; i < 3; i++) {
		char text[1024];
		size_t n = f[i] ? fread(text, 1, sizeof text - 1, f[i]) : 0;
		int code = f[i] ? pclose(f[i]) : -1;

		text[n] = '\0';
		is_int(WIFEXITED(code) ? WEXITSTATUS(code) : -1, table[i].code,
		       "watchdog, %s: exit status", table[i].how);
		ok(table[i].said ? strstr(text, table[i].said) && strstr(text, table[i].last) : !n,
		   "watchdog, %s: %s", table[i].how, n ? "says so, and calls its last" : "silent");
	}
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

/* Zeroed memory that the transport's all-gather and alltoallv take. */
static void *room(struct comm *c, uint64_t n)
{
	void *p = NULL;

#ifdef STAND_IN
	if (c->t->device_buffers)
		cudaMalloc(&p, n + 1);
	else
#endif
		p = malloc(n + 1);
	(void)c;
	memset(p, 0, n + 1);
	return p;
}

static void drop(struct comm *c, void *p)
{
#ifdef STAND_IN
	if (c->t->device_buffers) {
		cudaFree(p);
		return;
	}
#endif
	(void)c;
	free(p);
}

static unsigned char *message_in(struct comm *c, int from, int to, uint64_t n)
{
	unsigned char *p = room(c, n), *m = message(from, to, n);

	memcpy(p, m, n);
	free(m);
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

/* What each rank gives: the same, different amounts and one nothing, or all but one nothing. */
enum parts { EQUAL, UNEQUAL, ONE, PARTS };

static uint64_t parts_of(uint64_t *len, int world_size, uint64_t n, enum parts how)
{
	uint64_t sum = 0;

	for (int r = 0; r < world_size; r++) {
		uint64_t uneven = r == 1 ? 0 : n + 3 * (uint64_t)r, one = r == 1 ? n : 0;

		len[r] = how == EQUAL ? n : how == UNEQUAL ? uneven : one;
		sum += len[r];
	}
	return sum;
}

/* One all-gather of the test: started by begin, ended and judged by good_end. */
struct parts_test {
	struct comm_request r;
	uint64_t len[8], sum;
	unsigned char *in, *out;
};

static bool begin(struct comm *c, struct parts_test *t, uint64_t n, enum parts how, bool in_place)
{
	uint64_t len[8], before = 0;
	int rc;

	t->sum = parts_of(t->len, c->world, n, how);
	memcpy(len, t->len, sizeof len);
	for (int r = 0; r < c->rank; r++)
		before += len[r];
	t->in = message_in(c, c->rank, 9, len[c->rank]);
	t->out = room(c, t->sum);
	t->out[t->sum] = 0xa5;
	if (in_place)
		memcpy(t->out + before, t->in, len[c->rank]);
	rc = c->t->allgather_start(c, &t->r, t->out, len, in_place ? t->out + before : t->in,
				   &failure);
	memset(len, 0xff, sizeof len);
	return !rc;
}

static bool good_end(struct comm *c, struct parts_test *t, bool wait)
{
	unsigned char *p = t->out;
	bool good = true, done = false;

	while (good && !done)
		good = !c->t->allgather_end(c, &t->r, wait, &done, &failure) && (done || !wait);
	for (int r = 0; good && r < c->world; p += t->len[r++])
		good = arrived(p, r, 9, t->len[r]);
	good = good && *p == 0xa5;
	drop(c, t->in);
	drop(c, t->out);
	return good;
}

static void check_allgather(struct comm *c, uint64_t n, enum parts how, bool in_place)
{
	struct parts_test t;
	bool good = begin(c, &t, n, how, in_place) && good_end(c, &t, true);

	all_ok(c, good, in_place ? "allgather in place" : "allgather");
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
	in = room(c, (uint64_t)nto * row);
	out = room(c, (uint64_t)nfrom * row);
	for (int64_t r = 0, at = 0; r < c->world; at += to[r++])
		for (uint64_t i = 0; i < (uint64_t)to[r] * row; i++)
			in[(uint64_t)at * row + i] = byte_of(c->rank, (int)r, i);
	good = !c->t->alltoallv(c, out, from, in, to, row, &failure);
	for (int64_t r = 0, at = 0; good && r < c->world; at += from[r++])
		good = arrived(out + (uint64_t)at * row, (int)r, c->rank, (uint64_t)from[r] * row);
	all_ok(c, good, "alltoallv");
	drop(c, in);
	drop(c, out);
}

/* Three under way at once, other calls between them; ended in another order, one only tested. */
static void check_started(struct comm *c, uint64_t n)
{
	struct parts_test t[3];
	bool good = begin(c, &t[0], n, UNEQUAL, false) && begin(c, &t[1], 2 * n, EQUAL, true);

	check_alltoallv(c, (int64_t)n, 1);
	good = good && begin(c, &t[2], n, ONE, false) && !c->t->barrier(c, &failure) &&
	       good_end(c, &t[1], true) && good_end(c, &t[0], false) && good_end(c, &t[2], true);
	all_ok(c, good, "started allgathers");
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
		for (int how = 0; how < 2 * PARTS; how++)
			check_allgather(c, sizes[i], how / 2, how % 2);
		check_started(c, sizes[i]);
		check_alltoallv(c, (int64_t)sizes[i] / 7, 7);
	}
	check_alltoallv(c, 10, 0);
	check_split(c);
}

/* ---- ranks that stay away -------------------------------------------------------------------- */

enum late { LATE_BARRIER, LATE_ROWS, LATE_PARTS, LATE_GATHER, LATE_STOP, LATES };

/* What they are late for goes on after the wait for it has ended, so it stays until the end. */
static struct comm late[LATES];
static unsigned char *late_buf[LATES][2];
static struct comm_request late_parts;
static volatile sig_atomic_t stop;

static void on_alarm(int sig)
{
	(void)sig;
	stop = 1;
}

/* Rank 0 of the world, which is there. */
#define LATE_ROOT(c) ((c)->world - 1)

static int come(struct comm *c, enum late what, struct err *e)
{
	static const int64_t rows[8] = { 1, 1, 1, 1, 1, 1, 1, 1 };
	static const uint64_t len[8] = { 8, 8, 8, 8, 8, 8, 8, 8 };
	unsigned char **buf = late_buf[what];
	static uint64_t n[8];
	char *out[8] = { NULL };
	bool done;
	int rc;

	switch (what) {
	case LATE_ROWS:
		return c->t->alltoallv(c, buf[0], rows, buf[1], rows, 8, e);
	case LATE_PARTS:
		if (c->t->allgather_start(c, &late_parts, buf[0], len, buf[1], e))
			return -1;
		doze(400);
		if (c->t->allgather_end(c, &late_parts, false, &done, e))
			return -1;
		return c->t->allgather_end(c, &late_parts, true, &done, e);
	case LATE_GATHER:
		rc = c->t->gather(c, buf[0], 8, LATE_ROOT(c), out, n, e);
		for (int r = 0; r < c->world; r++)
			free(out[r]);
		return rc;
	default:
		return c->t->barrier(c, e);
	}
}

/* Does the error tell how long was waited for what, who is away, and what to do? */
static bool told_late(const struct err *e, enum late what, int world_size)
{
	static const char *const names[] = { "a barrier", "an exchange of rows",
					     "an all-gather begun ", "a gather" };
	char want[128], who[64] = "";
	double seconds = 0;
	int n = 0;

	if (world_size == 4)
		snprintf(who, sizeof who, "ranks 2, 3 have not answered: look at those ranks");
	else
		snprintf(who, sizeof who, "rank %d has not answered: look at that rank",
			 world_size - 1);
	if (what == LATE_BARRIER || !strcmp(world.t->name, "nccl")) /* NCCL names nobody */
		snprintf(who, sizeof who, "look at the other ranks");
	snprintf(want, sizeof want, " s for %s", names[what]);
	return e->code == EXIT_FAILED && sscanf(e->text, "waited %lf%n", &seconds, &n) == 1 &&
	       seconds > 0.29 && seconds < 30 && !strncmp(e->text + n, want, strlen(want)) &&
	       strstr(e->text, who) && strstr(e->text, "dist_env.timeout_minutes");
}

static bool fails_late(struct comm *c, enum late what)
{
	struct itimerval soon = { .it_value = { 0, 200000 } };
	struct err e = ERR_INIT;
	bool good;

	if (what == LATE_GATHER && c->rank != LATE_ROOT(c)) /* what it gave may be on its way */
		return !come(c, what, &e) || told_late(&e, what, c->world);

	if (what == LATE_STOP) {
		signal(SIGALRM, on_alarm);
		setitimer(ITIMER_REAL, &soon, NULL);
	}
	if (!come(c, what, &e))
		return false;
	good = what == LATE_STOP ? stop && e.code == EXIT_FAILED &&
					   strstr(e.text, "stopped by a signal while waiting")
				 : told_late(&e, what, c->world);
	if (!good)
		snprintf(failure.text, sizeof failure.text, "%s", e.text);
	return good;
}

/*
 * The last ranks stay away until the others have given up. Ranks are numbered backwards in these
 * communicators, messages name them as the world does.
 */
static void check_late(struct comm *c)
{
	bool away = c->rank >= (c->world == 4 ? 2 : c->world - 1);
	struct comm same = { .t = NULL };
	bool good = !c->t->split(c, &same, away, 0, &failure);

	for (int what = 0; what < LATES; what++) {
		good = good && !c->t->split(c, &late[what], 0, -c->rank, &failure);
		late_buf[what][0] = room(c, 64);
		late_buf[what][1] = room(c, 64);
		late[what].timeout = away || what == LATE_STOP ? 100 : 0.3;
		late[what].stop = what == LATE_STOP ? &stop : NULL;
	}
	for (int what = 0; same.t && !away && what < LATES; what++)
		good = !same.t->barrier(&same, &failure) &&
		       fails_late(&late[what], (enum late)what) && good;
	if (c->t->barrier(c, &failure))
		good = false;
	for (int what = 0; good && away && what < LATES; what++)
		good = !come(&late[what], (enum late)what, &failure);
	all_ok(c, good, "timeout and stop end a wait");
	if (same.t)
		same.t->close(&same);
}

static void check_handed_on(struct comm *c)
{
	struct comm part;
	bool good = !c->t->split(c, &part, 0, c->rank, &failure);

	all_ok(c, good && part.timeout == c->timeout && part.dog == c->dog && part.stop == c->stop,
	       "split hands on how waiting ends");
	if (good)
		part.t->close(&part);
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

/* Of MPI, or where `t_comm WHAT nccl` is a rank, of NCCL. */
static int open_ranks(int argc, char **argv, double timeout)
{
	static struct watchdog dog;
	const char *name = argc > 2 ? argv[2] : "auto";

	log_program("t_comm");
	if (watchdog_start(&dog, 100, NULL, &failure) ||
	    comm_open(&world, name, -1, &argc, &argv, &failure))
		return -1;
	world.dog = &dog;
	world.timeout = timeout;
	world.stop = &stop;
	if (strcmp(name, "nccl"))
		return 0;
	return comm_connect_nccl(&world, getenv("T_COMM_DIR"), "plan", &failure);
}

static void end_ranks(void)
{
	struct watchdog *dog = world.dog;

	world.t->close(&world);
	watchdog_stop(dog);
}

static int ranks(int argc, char **argv)
{
	static const uint64_t cuts[] = { 1 << 30, 64, 7 };
	const char *name = argc > 2 ? argv[2] : "mpi";

	if (open_ranks(argc, argv, 100)) {
		printf("not ok 1 - open: %s\n", failure.text);
		return 1;
	}
	for (size_t i = 0; i < sizeof cuts / sizeof cuts[0]; i++) {
		/* the stand-in for NCCL takes a millisecond for a round */
		comm_cut = strcmp(name, "nccl") || i == 0 ? cuts[i] : 20 * cuts[i];
		check_all(&world);
	}
	check_handed_on(&world);
	world.stop = NULL;
	if (world.world > 1)
		check_late(&world);
	check_sleep(&world);
	all_ok(&world,
	       world.local_size == world.world && world.local_rank < world.local_size &&
		       !strcmp(world.t->name, name),
	       "all on this host");
	if (world.rank == 0)
		tap_end();
	for (int what = 0; what < LATES; what++) {
		if (late[what].t)
			late[what].t->close(&late[what]);
		drop(&world, late_buf[what][0]);
		drop(&world, late_buf[what][1]);
	}
	end_ranks();
	return tap_failed != 0;
}

/* One rank aborts while the others wait: all must end, with its code. */
static int doomed(int argc, char **argv)
{
	if (open_ranks(argc, argv, 100))
		return 1;
	if (world.rank == world.world - 1) {
		world.t->abort(&world, 3);
		return 3; /* of a transport that comes back */
	}
	if (world.t->barrier(&world, &failure) &&
	    (strstr(failure.text, "rank 2 has failed, while this one waited for a barrier") ||
	     strstr(failure.text, "a barrier failed in NCCL: remote process"))) {
		world.t->abort(&world, 3);
		end_ranks();
		return 3;
	}
	return 0;
}

/* One rank is stopped while the others wait: they give up, and end it with them. */
static int frozen(int argc, char **argv)
{
	if (open_ranks(argc, argv, 100))
		return 1;
	if (world.rank == world.world - 1)
		raise(SIGSTOP);
	world.timeout = 0.3;
	if (!world.t->barrier(&world, &failure) || !strstr(failure.text, "for a barrier"))
		return 1;
	world.t->abort(&world, 3);
	return 3;
}

#ifdef STAND_IN
/* ---- ranks of NCCL, started as torchrun starts them ------------------------------------------ */

/* One rank is killed in the middle of a transfer; NCCL may notice, or not. */
static int killed(int argc, char **argv)
{
	bool deaf = getenv("NCCL_STANDIN") != NULL;
	const char *said = deaf ? "s for a barrier" : "failed in NCCL: remote process";

	if (open_ranks(argc, argv, deaf ? 0.5 : 100))
		return 1;
	if (world.t->barrier(&world, &failure))
		return 1;
	if (world.rank == world.world - 1)
		raise(SIGKILL);
	if (!world.t->barrier(&world, &failure))
		return 1;
	/* who is told by another that the run has ended has not to find out by itself */
	if (!strstr(failure.text, said) && !strstr(failure.text, "has failed, while"))
		return 1;
	world.t->abort(&world, 3);
	end_ranks();
	return 3;
}

/* An all-gather is under way when the rank fails: its memory may go after abort. */
static int halfway(int argc, char **argv)
{
	struct parts_test t;

	if (open_ranks(argc, argv, 0.5))
		return 1;
	if (world.rank == world.world - 1)
		pause();
	if (!begin(&world, &t, 5000, UNEQUAL, false))
		return 1;
	if (good_end(&world, &t, true))
		return 1;
	world.t->abort(&world, 3);
	return 3;
}

/* Connects, and says how that went. */
static int meets(int argc, char **argv)
{
	int64_t v = 1;

	if (open_ranks(argc, argv, getenv("T_COMM_PATIENT") ? 50 : 1.5)) {
		log_error("%s", failure.text);
		return 3;
	}
	world.timeout = 20;
	if (world.t->allreduce(&world, &v, 1, COMM_SUM, &failure) || v != world.world)
		return 1;
	end_ranks();
	return 0;
}

static void test_faults(const char *self, const char *dir)
{
	struct start lonely = { .what = "meets", .n = 3, .missing = 2 },
		     headless = { .what = "meets", .n = 2, .missing = 0 },
		     frozen_one = { .what = "frozen", .n = 3, .missing = -1 },
		     half = { .what = "halfway", .n = 3, .missing = -1 };

	run_start(self, "doomed", 3, 333, "a rank that fails ends all");
	run_start(self, "killed", 3, 339, "a rank that is killed is noticed");
	setenv("NCCL_STANDIN", "deaf", 1);
	run_start(self, "doomed", 3, 333, "also where NCCL does not notice");
	run_start(self, "killed", 3, 339, "or given up");
	unsetenv("NCCL_STANDIN");

	start(&frozen_one, self);
	is_int(ended(&frozen_one, 0), 3, "nccl: ranks that wait for a stopped one give up");
	end_start(&frozen_one, SIGKILL);
	ends(&frozen_one);
	start(&half, self);
	is_int(ended(&half, 0), 3, "nccl: and end an all-gather that is under way");
	end_start(&half, SIGKILL);
	ends(&half);

	start(&lonely, self);
	is_int(ends(&lonely), 33, "nccl: a rank that never comes");
	ok(says(&lonely, 0, "rank 2 has not shown up in '") &&
		   says(&lonely, 1, "waited 1.5 s for the connection of all ranks"),
	   "nccl: is named");
	start(&headless, self);
	is_int(ends(&headless), 3, "nccl: rank 0 never comes");
	ok(says(&headless, 1, "rank 0 has not been found in '"), "nccl: is named, too");
	is_int(left_in(dir), 0, "nccl: no rank that gave up has left anything");
	release(&lonely);
	release(&headless);
	release(&frozen_one);
	release(&half);
}

/* Ranks that are killed while they connect leave files; those after them do not take these. */
static void test_starts(const char *self, const char *dir)
{
	struct start dead = { .what = "meets", .n = 3, .missing = 2 },
		     one = { .what = "meets", .n = 3, .missing = -1 },
		     other = { .what = "meets", .n = 3, .missing = -1, .port = "29501" },
		     again = { .what = "meets", .n = 2, .missing = -1, .restart = "1" };

	setenv("T_COMM_PATIENT", "1", 1);
	start(&dead, self);
	for (int i = 0; i < 1000 && left_in(dir) < 2; i++)
		doze(20);
	end_start(&dead, SIGKILL);
	is_int(ends(&dead), 99, "nccl: ranks are killed while they connect");
	is_int(left_in(dir), 2, "nccl: and leave files");
	start(&one, self);
	is_int(ends(&one), 0, "nccl: the next start is not misled by them");
	is_int(left_in(dir), 0, "nccl: and leaves none");
	release(&one);
	start(&one, self);
	start(&other, self);
	start(&again, self);
	is_int(ends(&one) + ends(&other) + ends(&again), 0,
	       "nccl: three starts at once in one directory");
	release(&dead);
	release(&one);
	release(&other);
	release(&again);
	setenv("NCCL_COMM_ID", dir, 1);
	run_start(self, "meets", 3, 0, "NCCL_COMM_ID takes the place of the directory");
	unsetenv("NCCL_COMM_ID");
}

/* The stand-in lies beside this program. */
static void test_nccl(const char *self)
{
	char dir[] = "/tmp/t_comm.XXXXXX", libraries[4096], command[64];
	const char *end = strrchr(self, '/');

	if (!end || !mkdtemp(dir)) {
		ok(false, "nccl: a directory of its own");
		return;
	}
	snprintf(libraries, sizeof libraries, "%.*s", (int)(end - self), self);
	setenv("LD_LIBRARY_PATH", libraries, 1);
	setenv("T_COMM_DIR", dir, 1);
	for (int n = 1; n <= 4; n++) {
		char name[64];

		snprintf(name, sizeof name, "collectives of %d ranks", n);
		run_start(self, "ranks", n, 0, name);
	}
	test_faults(self, dir);
	test_starts(self, dir);
	snprintf(command, sizeof command, "rm -rf '%s'", dir);
	ok(!system(command), "nccl: its directory goes");
}
#endif

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
	if (argc > 1 && !strcmp(argv[1], "frozen"))
		return frozen(argc, argv);
	if (argc > 2 && !strcmp(argv[1], "dog"))
		return watched(argv[2]);
#ifdef STAND_IN
	if (argc > 1 && !strcmp(argv[1], "killed"))
		return killed(argc, argv);
	if (argc > 1 && !strcmp(argv[1], "halfway"))
		return halfway(argc, argv);
	if (argc > 1 && !strcmp(argv[1], "meets"))
		return meets(argc, argv);
	if (argc < 2) {
		test_environments();
		test_nccl(argv[0]);
		return tap_end();
	}
#endif
	test_environments();
	test_alone();
	test_watchdog(argv[0]);
#ifdef HAVE_MPI
	if (mpiexec && *mpiexec) {
		for (int n = 1; n <= 4; n++)
			is_int(launch(mpiexec, n, argv[0], "ranks", true), 0,
			       "collectives of %d ranks", n);
		is_int(launch(mpiexec, 3, argv[0], "doomed", false), 3,
		       "a rank that fails ends all");
		is_int(launch(mpiexec, 3, argv[0], "frozen", false), 3,
		       "ranks that wait for a stopped one end all");
		return tap_end();
	}
#endif
	(void)launch;
	tap_skip(mpiexec && *mpiexec ? "this build has no MPI" : "no MPI launcher");
	return tap_end();
}
