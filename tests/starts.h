/* SPDX-License-Identifier: Apache-2.0 */
/*
 * starts: a test program starts itself as the ranks of a world, as torchrun does it: by environment
 * variables alone. `PROGRAM WHAT nccl` is a rank.
 */
#ifndef DSPARK_STARTS_H
#define DSPARK_STARTS_H

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tap.h"

/* What a start consists of. */
struct start {
	const char *what, *port, *restart;
	int n, missing;			/* the rank that is not started, -1 = none */
	pid_t pid[8];
	FILE *said[8];
};

static inline pid_t start_rank(const struct start *s, const char *self, int rank, FILE *said)
{
	char number[16], world_size[16];
	pid_t pid = fork();

	if (pid)
		return pid;
	snprintf(number, sizeof number, "%d", rank);
	snprintf(world_size, sizeof world_size, "%d", s->n);
	setenv("RANK", number, 1);
	setenv("LOCAL_RANK", number, 1);
	setenv("WORLD_SIZE", world_size, 1);
	setenv("LOCAL_WORLD_SIZE", world_size, 1);
	setenv("MASTER_ADDR", "127.0.0.1", 1);
	setenv("MASTER_PORT", s->port ? s->port : "29500", 1);
	setenv("TORCHELASTIC_RUN_ID", "none", 1);
	setenv("TORCHELASTIC_RESTART_COUNT", s->restart ? s->restart : "0", 1);
	dup2(fileno(said), STDOUT_FILENO);
	dup2(fileno(said), STDERR_FILENO);
	alarm(100);
	execl(self, self, s->what, "nccl", (char *)NULL);
	_exit(127);
}

static inline void start(struct start *s, const char *self)
{
	for (int r = 0; r < s->n; r++) {
		s->said[r] = tmpfile();
		s->pid[r] = r == s->missing ? -1 : start_rank(s, self, r, s->said[r]);
	}
}

static inline void end_start(struct start *s, int sig)
{
	for (int r = 0; r < s->n; r++)
		if (s->pid[r] > 0)
			kill(s->pid[r], sig);
}

/* Waits for rank r: its exit status, 128 and more for a signal. */
static inline int ended(struct start *s, int r)
{
	int status = 0;

	if (s->pid[r] < 0 || waitpid(s->pid[r], &status, 0) != s->pid[r])
		return -1;
	s->pid[r] = -1;
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* All ranks' statuses in one number, 9 for a signal: 33 = two ranks ended with 3. */
static inline int ends(struct start *s)
{
	int all = 0;

	for (int r = 0; r < s->n; r++) {
		int code = ended(s, r);

		if (code >= 0)
			all = 10 * all + (code > 8 ? 9 : code);
	}
	return all;
}

static inline bool says(struct start *s, int r, const char *words)
{
	char text[4096];
	size_t n;

	rewind(s->said[r]);
	n = fread(text, 1, sizeof text - 1, s->said[r]);
	text[n] = '\0';
	if (strstr(text, words))
		return true;
	printf("# rank %d says: %s\n", r, text);
	return false;
}

/* What rank 0 of `ranks` says is part of what this program says. */
static inline void show(struct start *s, int r)
{
	char line[1024];

	rewind(s->said[r]);
	while (fgets(line, sizeof line, s->said[r]))
		if (strncmp(line, "ok ", 3) && strncmp(line, "1..", 3))
			printf("# %s", line);
}

static inline void release(struct start *s)
{
	for (int r = 0; r < s->n; r++)
		if (s->said[r])
			fclose(s->said[r]);
}

/* Files that are left in the directory, but for those that tell of an end. */
static inline int left_in(const char *dir)
{
	char command[4096];
	int n = -1;
	FILE *f;

	snprintf(command, sizeof command, "ls -A '%s' | grep -c 'start[.][0-9]*[.]0$'", dir);
	f = popen(command, "r");
	if (!f || fscanf(f, "%d", &n) != 1)
		n = -1;
	if (f)
		pclose(f);
	return n;
}

static inline void run_start(const char *self, const char *what, int n, int want, const char *name)
{
	struct start s = { .what = what, .n = n, .missing = -1 };
	int got;

	start(&s, self);
	got = ends(&s);
	for (int r = 0; got != want && r < n; r++)
		show(&s, r);
	is_int(got, want, "nccl: %s", name);
	release(&s);
}

#endif
