/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A stand-in for libnccl.so.2, for tests: processes of one host, over sockets, with what makes the
 * real one hard to use. Communicators must not block; a call while the last one is in progress is
 * refused; a group reaches its stream some time after it has ended, the first one not before the
 * peers have one, too; it runs when the stream gets there; buffers must be device memory; all ranks
 * must call the same, in order. A peer that dies is an error unless NCCL_STANDIN is "deaf", when
 * the others wait as they do over NVLink.
 */
#include <errno.h>
#include <nccl.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define LOOK_MS 20
#define OPS_MOST 2048

/* An abstract address, and its length. */
struct address {
	struct sockaddr_un a;
	socklen_t len;
};

enum kind { SEND, RECEIVE, BROADCAST, ALL_GATHER, ALL_REDUCE, SPLIT, FINAL };

struct op {
	enum kind kind;
	const void *from;
	void *to;
	size_t bytes;
	int root; /* or peer, or the reduction */
};

struct group {
	struct group *next;
	struct op *op;
	int n;
	cudaStream_t stream;
	int released, done; /* atomic: the stream is there, the stream may go on */
};

struct ncclComm {
	int rank, world;
	int *fd; /* [world] */
	pthread_mutex_t lock;
	pthread_cond_t turn;
	ncclResult_t state;
	bool aborted, finalised, met;
	int threads; /* that are at work on it */
	struct group *groups; /* that the stream has been given, in order */
	int outstanding;
	uint64_t calls;
};

static _Thread_local char last[256];
static _Thread_local int depth;
static _Thread_local ncclComm_t group_comm;
static _Thread_local ncclResult_t group_error;
static _Thread_local struct group *group;

__attribute__((format(printf, 2, 3)))
static ncclResult_t fail(ncclResult_t r, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(last, sizeof last, fmt, ap);
	va_end(ap);
	if (getenv("NCCL_DEBUG"))
		fprintf(stderr, "stand-in: %s\n", last);
	return r;
}

static bool deaf(void)
{
	const char *s = getenv("NCCL_STANDIN");

	return s && strstr(s, "deaf");
}

static void doze(long us)
{
	struct timespec t = { us / 1000000, us % 1000000 * 1000 };

	nanosleep(&t, NULL);
}

static bool is_aborted(ncclComm_t c)
{
	bool r;

	pthread_mutex_lock(&c->lock);
	r = c->aborted;
	pthread_mutex_unlock(&c->lock);
	return r;
}

static void set_state(ncclComm_t c, ncclResult_t r)
{
	pthread_mutex_lock(&c->lock);
	/* an error stays */
	if (c->state == ncclInProgress || c->state == ncclSuccess)
		c->state = r;
	pthread_cond_broadcast(&c->turn);
	pthread_mutex_unlock(&c->lock);
}

/* A thread for work on a communicator, which abort waits for. */
struct job {
	ncclComm_t comm;
	void (*run)(struct job *j);
	struct group *group;
	ncclUniqueId id;
	ncclComm_t *made;
	int colour, key;
};

static void *job_main(void *arg)
{
	struct job *j = arg;
	ncclComm_t c = j->comm;

	j->run(j);
	free(j);
	pthread_mutex_lock(&c->lock);
	c->threads--;
	pthread_cond_broadcast(&c->turn);
	pthread_mutex_unlock(&c->lock);
	return NULL;
}

static void start(struct job job)
{
	struct job *j = malloc(sizeof *j);
	pthread_t thread;

	*j = job;
	pthread_mutex_lock(&job.comm->lock);
	job.comm->threads++;
	pthread_mutex_unlock(&job.comm->lock);
	if (pthread_create(&thread, NULL, job_main, j))
		abort();
	pthread_detach(thread);
}

/* ---- moving bytes ---------------------------------------------------------------------------- */

struct header {
	uint64_t call, kind, root, bytes;
};

/* What goes to, or comes from, one peer in a group. */
struct lane {
	struct {
		struct header h;
		char *p;
	} *item;
	int n, cap, at;
	uint64_t moved; /* of the item, with its header */
	struct header came;
};

static void lane_add(struct lane *l, struct header h, const void *p)
{
	if (l->n == l->cap) {
		l->cap = l->cap ? 2 * l->cap : 8;
		l->item = realloc(l->item, (size_t)l->cap * sizeof *l->item);
	}
	l->item[l->n].h = h;
	l->item[l->n++].p = (char *)(uintptr_t)p;
}

/* 1 moved something, 0 not now, -1 the peer is gone, -2 it says something else. */
static int lane_move(struct lane *l, int fd, bool out)
{
	uint64_t all = sizeof(struct header) + l->item[l->at].h.bytes, off = l->moved;
	bool head = off < sizeof(struct header);
	char *p = head ? (char *)(out ? &l->item[l->at].h : &l->came) + off
		       : l->item[l->at].p + (off - sizeof(struct header));
	size_t n = (size_t)((head ? sizeof(struct header) : all) - off);
	ssize_t r = out ? send(fd, p, n, MSG_NOSIGNAL | MSG_DONTWAIT)
			: recv(fd, p, n, MSG_DONTWAIT);

	if (r < 0)
		return errno == EAGAIN || errno == EINTR ? 0 : -1;
	if (!r)
		return -1;
	l->moved += (uint64_t)r;
	if (!out && l->moved == sizeof(struct header) &&
	    memcmp(&l->came, &l->item[l->at].h, sizeof l->came))
		return -2;
	if (l->moved == all) {
		l->moved = 0;
		l->at++;
	}
	return 1;
}

/* Until all lanes are empty. */
static ncclResult_t move_all(ncclComm_t c, struct lane *out, struct lane *in)
{
	struct pollfd *p = calloc((size_t)c->world, sizeof *p);
	bool *lost = calloc((size_t)c->world, sizeof *lost);
	ncclResult_t rc = ncclSuccess;

	while (rc == ncclSuccess) {
		int left = 0;

		for (int i = 0; i < c->world; i++) {
			bool o = out[i].at < out[i].n, n = in[i].at < in[i].n;

			p[i] = (struct pollfd){ .fd = lost[i] || !(o || n) ? -1 : c->fd[i],
						.events = (short)((o ? POLLOUT : 0) |
								  (n ? POLLIN : 0)) };
			left += o || n;
		}
		if (!left)
			break;
		if (is_aborted(c))
			rc = ncclInternalError;
		else if (poll(p, (nfds_t)c->world, LOOK_MS) < 0 && errno != EINTR)
			rc = fail(ncclSystemError, "poll: %s", strerror(errno));
		for (int i = 0; rc == ncclSuccess && i < c->world; i++) {
			int a = 1, b = 1;

			if (p[i].fd < 0 || !p[i].revents)
				continue;
			while (a > 0 && in[i].at < in[i].n)
				a = lane_move(&in[i], c->fd[i], false);
			while (b > 0 && out[i].at < out[i].n)
				b = lane_move(&out[i], c->fd[i], true);
			if (a == -2)
				rc = fail(ncclInternalError, "rank %d calls something else", i);
			else if (a < 0 || b < 0)
				lost[i] = true;
			if (lost[i] && !deaf())
				rc = fail(ncclRemoteError, "rank %d is gone", i);
		}
	}
	free(p);
	free(lost);
	return rc;
}

/* What a rank sends itself in a group. */
static ncclResult_t to_itself(const struct group *g, int rank)
{
	int r = 0;

	for (int s = 0; s < g->n; s++) {
		if (g->op[s].kind != SEND || g->op[s].root != rank)
			continue;
		while (r < g->n && !(g->op[r].kind == RECEIVE && g->op[r].root == rank))
			r++;
		if (r == g->n || g->op[r].bytes != g->op[s].bytes)
			return fail(ncclInvalidUsage, "a send to itself is not received");
		memcpy(g->op[r].to, g->op[s].from, g->op[s].bytes);
		r++;
	}
	return ncclSuccess;
}

static void copy(void *to, const void *from, size_t n)
{
	if (to != from)
		memmove(to, from, n);
}

static void reduce(int64_t *to, const char *all, size_t n, int world, int op)
{
	for (size_t i = 0; i < n; i++) {
		int64_t v = 0;

		for (int r = 0; r < world; r++) {
			int64_t x;

			memcpy(&x, all + ((size_t)r * n + i) * sizeof x, sizeof x);
			if (!r)
				v = x;
			else if (op == ncclSum)
				v += x;
			else if (op == ncclMax)
				v = x > v ? x : v;
			else
				v = x < v ? x : v;
		}
		to[i] = v;
	}
}

static ncclResult_t run_group(ncclComm_t c, const struct group *g)
{
	struct lane *out = calloc((size_t)c->world, sizeof *out),
		    *in = calloc((size_t)c->world, sizeof *in);
	char **room = calloc((size_t)g->n, sizeof *room);
	ncclResult_t rc = to_itself(g, c->rank);

	for (int i = 0; i < g->n; i++) {
		struct op *o = &g->op[i];
		bool pair = o->kind == SEND || o->kind == RECEIVE;
		struct header h = { pair ? 0 : ++c->calls, pair ? SEND : o->kind,
				    pair ? 0 : (uint64_t)o->root, o->bytes };
		char *to = o->to;

		if (o->kind == ALL_REDUCE)
			to = room[i] = malloc(o->bytes * (size_t)c->world + 1);
		for (int r = 0; r < c->world; r++) {
			bool every = o->kind >= ALL_GATHER;

			if (r == c->rank) {
				if (every || (o->kind == BROADCAST && o->root == r))
					copy(every ? to + (size_t)r * o->bytes : to, o->from,
					     o->bytes);
				continue;
			}
			if (every || (o->kind == BROADCAST && o->root == c->rank) ||
			    (o->kind == SEND && o->root == r))
				lane_add(&out[r], h, o->from);
			if (every || (o->kind == BROADCAST && o->root == r) ||
			    (o->kind == RECEIVE && o->root == r))
				lane_add(&in[r], h, every ? to + (size_t)r * o->bytes : to);
		}
	}
	rc = rc == ncclSuccess ? move_all(c, out, in) : rc;
	for (int i = 0; i < g->n; i++) {
		if (room[i] && rc == ncclSuccess)
			reduce(g->op[i].to, room[i], g->op[i].bytes / sizeof(int64_t), c->world,
			       g->op[i].root);
		free(room[i]);
	}
	for (int r = 0; r < c->world; r++) {
		free(out[r].item);
		free(in[r].item);
	}
	free(out);
	free(in);
	free(room);
	return rc;
}

/* Among ranks, what is not for a stream. */
static ncclResult_t tell_all(ncclComm_t c, enum kind kind, const void *mine, void *all, size_t n)
{
	struct op o = { .kind = kind, .from = mine, .to = all, .bytes = n };
	struct group g = { .op = &o, .n = 1 };

	return run_group(c, &g);
}

/* ---- the stream ------------------------------------------------------------------------------ */

static int step(void *ctx)
{
	struct group *g = ctx;

	__atomic_store_n(&g->released, 1, __ATOMIC_RELEASE);
	if (!__atomic_load_n(&g->done, __ATOMIC_ACQUIRE))
		return 0;
	free(g->op);
	free(g);
	return 1;
}

/* What a kernel would do: everything in the order of the stream. */
static void execute(struct job *j)
{
	ncclComm_t c = j->comm;
	int patience = 0;

	for (;;) {
		struct group *g;
		ncclResult_t rc;

		pthread_mutex_lock(&c->lock);
		while (!c->groups && !c->aborted && !c->finalised)
			pthread_cond_wait(&c->turn, &c->lock);
		g = c->groups;
		if (!g || c->aborted) {
			pthread_mutex_unlock(&c->lock);
			return;
		}
		pthread_mutex_unlock(&c->lock);
		if (!__atomic_load_n(&g->released, __ATOMIC_ACQUIRE)) {
			doze(100);
			/* a device gets there by itself, if late: nobody needs to ask */
			if (++patience > 100)
				cudaStreamQuery(g->stream);
			continue;
		}
		patience = 0;
		rc = run_group(c, g);
		if (rc != ncclSuccess) {	/* the stream stands until abort */
			set_state(c, rc);
			return;
		}
		pthread_mutex_lock(&c->lock);
		c->groups = g->next;
		c->outstanding--;
		pthread_cond_broadcast(&c->turn);
		pthread_mutex_unlock(&c->lock);
		__atomic_store_n(&g->done, 1, __ATOMIC_RELEASE);
	}
}

/* Some time after the end of the group. */
static void launch(struct job *j)
{
	ncclComm_t c = j->comm;
	struct group **at = &c->groups;
	unsigned r = 0;

	(void)!getrandom(&r, sizeof r, 0);
	doze(r % 8 ? 20 : 2000);
	/* connections are made when they are first needed, by both sides */
	if (!c->met) {
		char *all = malloc((size_t)c->world);
		ncclResult_t rc = tell_all(c, FINAL, "", all, 1);

		free(all);
		if (rc != ncclSuccess) {
			free(j->group->op);
			free(j->group);
			set_state(c, rc);
			return;
		}
		c->met = true;
	}
	pthread_mutex_lock(&c->lock);
	while (*at)
		at = &(*at)->next;
	*at = j->group;
	c->outstanding++;
	emulated_enqueue_steps(j->group->stream, step, j->group);
	pthread_cond_broadcast(&c->turn);
	pthread_mutex_unlock(&c->lock);
	set_state(c, ncclSuccess);
}

static ncclResult_t ready(ncclComm_t c, const char *what)
{
	ncclResult_t r;

	if (!c)
		return fail(ncclInvalidArgument, "%s: no communicator", what);
	pthread_mutex_lock(&c->lock);
	r = c->state;
	pthread_mutex_unlock(&c->lock);
	return r == ncclInProgress
		       ? fail(ncclInvalidArgument, "%s: the last call is in progress", what)
		       : r;
}

ncclResult_t ncclGroupStart(void)
{
	if (!depth++) {
		group = calloc(1, sizeof *group);
		group->op = calloc(OPS_MOST, sizeof *group->op);
		group_comm = NULL;
		group_error = ncclSuccess;
	}
	return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
	struct group *g = group;

	if (!depth)
		return fail(ncclInvalidUsage, "a group ends that has not begun");
	if (--depth)
		return ncclSuccess;
	group = NULL;
	if (group_error != ncclSuccess || !g->n) {
		free(g->op);
		free(g);
		return group_error;
	}
	set_state(group_comm, ncclInProgress);
	start((struct job){ .comm = group_comm, .run = launch, .group = g });
	return ncclInProgress;
}

static bool is_device(const void *p)
{
	struct cudaPointerAttributes a;

	return cudaPointerGetAttributes(&a, p) == cudaSuccess && a.type == cudaMemoryTypeDevice;
}

static ncclResult_t add(ncclComm_t c, struct op o, cudaStream_t stream, const char *what)
{
	ncclResult_t r = ready(c, what);

	if (r == ncclSuccess && ((o.from && !is_device(o.from)) || (o.to && !is_device(o.to))))
		r = fail(ncclInvalidArgument, "%s: not device memory", what);
	if (r == ncclSuccess && (o.root < 0 || (o.kind != ALL_REDUCE && o.root >= c->world)))
		r = fail(ncclInvalidArgument, "%s: no rank %d", what, o.root);
	ncclGroupStart();
	if (r == ncclSuccess && group_comm && (group_comm != c || group->stream != stream))
		r = fail(ncclInvalidUsage, "%s: another communicator in the group", what);
	if (r == ncclSuccess && group->n == OPS_MOST)
		r = fail(ncclInvalidUsage, "%s: too many operations in a group", what);
	if (r == ncclSuccess) {
		group_comm = c;
		group->stream = stream;
		group->op[group->n++] = o;
	} else if (group_error == ncclSuccess) {
		group_error = r;
	}
	if (depth > 1) {
		depth--;
		return r;
	}
	return ncclGroupEnd();
}

static size_t size_of(ncclDataType_t t)
{
	return t == ncclInt64 ? 8 : 1;
}

ncclResult_t ncclSend(const void *from, size_t n, ncclDataType_t t, int peer, ncclComm_t c,
		      cudaStream_t s)
{
	return add(c, (struct op){ SEND, from, NULL, n * size_of(t), peer }, s, "a send");
}

ncclResult_t ncclRecv(void *to, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t s)
{
	return add(c, (struct op){ RECEIVE, NULL, to, n * size_of(t), peer }, s, "a receive");
}

ncclResult_t ncclBroadcast(const void *from, void *to, size_t n, ncclDataType_t t, int root,
			   ncclComm_t c, cudaStream_t s)
{
	return add(c, (struct op){ BROADCAST, from, to, n * size_of(t), root }, s, "a broadcast");
}

ncclResult_t ncclAllGather(const void *from, void *to, size_t n, ncclDataType_t t, ncclComm_t c,
			   cudaStream_t s)
{
	return add(c, (struct op){ ALL_GATHER, from, to, n * size_of(t), 0 }, s, "an all-gather");
}

ncclResult_t ncclAllReduce(const void *from, void *to, size_t n, ncclDataType_t t, ncclRedOp_t op,
			   ncclComm_t c, cudaStream_t s)
{
	if (t != ncclInt64 || (op != ncclSum && op != ncclMax && op != ncclMin))
		return fail(ncclInvalidArgument, "a reduction that the stand-in does not have");
	return add(c, (struct op){ ALL_REDUCE, from, to, n * size_of(t), (int)op }, s,
		   "a reduction");
}

/* ---- connecting ------------------------------------------------------------------------------ */

static int listen_at(struct address *a)
{
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	a->a.sun_family = AF_UNIX;
	if (fd < 0 || bind(fd, (struct sockaddr *)&a->a, a->len) || listen(fd, 64))
		return -1;
	a->len = sizeof a->a;
	getsockname(fd, (struct sockaddr *)&a->a, &a->len);
	return fd;
}

/* The kernel chooses. */
static struct address anywhere(void)
{
	return (struct address){ .len = sizeof(sa_family_t) };
}

/* As long as nobody listens there: the real one goes on for a while, too. */
static int reach(ncclComm_t c, const struct address *a)
{
	while (!is_aborted(c)) {
		int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

		if (fd >= 0 && !connect(fd, (const struct sockaddr *)&a->a, a->len))
			return fd;
		close(fd);
		doze(LOOK_MS * 1000);
	}
	return -1;
}

static int receive(ncclComm_t c, int fd)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };

	while (!is_aborted(c))
		if (poll(&p, 1, LOOK_MS) > 0)
			return 0;
	return -1;
}

/* All n bytes, unless the communicator is aborted. */
static bool get(ncclComm_t c, int fd, void *p, size_t n)
{
	for (size_t got = 0; got < n;) {
		ssize_t r = receive(c, fd) ? -1 : recv(fd, (char *)p + got, n - got, 0);

		if (r <= 0)
			return false;
		got += (size_t)r;
	}
	return true;
}

static bool say(int fd, const void *p, size_t n)
{
	return send(fd, p, n, MSG_NOSIGNAL) == (ssize_t)n;
}

/* Sockets with all others: to those before this one, from those behind it. */
static ncclResult_t mesh(ncclComm_t c, int listening, const struct address *all)
{
	c->fd = malloc((size_t)c->world * sizeof *c->fd);
	for (int i = 0; i < c->world; i++)
		c->fd[i] = -1;
	for (int i = 0; i < c->rank; i++) {
		c->fd[i] = reach(c, &all[i]);
		if (c->fd[i] < 0 || !say(c->fd[i], &c->rank, sizeof c->rank))
			return fail(ncclSystemError, "cannot reach rank %d", i);
	}
	for (int i = c->rank + 1; i < c->world; i++) {
		int fd = receive(c, listening) ? -1 : accept(listening, NULL, NULL), who;

		if (fd < 0 || !get(c, fd, &who, sizeof who) || who <= c->rank || who >= c->world)
			return fail(ncclSystemError, "cannot be reached");
		c->fd[who] = fd;
	}
	return ncclSuccess;
}

static ncclComm_t new_comm(int rank, int world)
{
	ncclComm_t c = calloc(1, sizeof *c);

	c->rank = rank;
	c->world = world;
	c->state = ncclInProgress;
	pthread_mutex_init(&c->lock, NULL);
	pthread_cond_init(&c->turn, NULL);
	return c;
}

struct entry {
	int rank, world;
	struct address at;
};

/* Rank 0's: hears of everybody, and tells everybody. */
static void *root_main(void *arg)
{
	int listening = *(int *)arg, *fd = NULL, n = 0, world = 0;
	struct entry *all = NULL;

	free(arg);
	do {
		struct entry e;
		int from = accept(listening, NULL, NULL);

		if (from < 0 || recv(from, &e, sizeof e, MSG_WAITALL) != sizeof e)
			continue;
		if (!all) {
			world = e.world;
			all = calloc((size_t)world, sizeof *all);
			fd = calloc((size_t)world, sizeof *fd);
		}
		all[e.rank] = e;
		fd[n++] = from;
	} while (!n || n < world);
	for (int i = 0; i < n; i++) {
		send(fd[i], all, (size_t)world * sizeof *all, MSG_NOSIGNAL);
		close(fd[i]);
	}
	close(listening);
	free(all);
	free(fd);
	return NULL;
}

static ncclResult_t start_root(struct address *a)
{
	int *fd = malloc(sizeof *fd);
	pthread_t thread;

	*fd = listen_at(a);
	if (*fd < 0)
		return fail(ncclSystemError, "cannot listen: %s", strerror(errno));
	if (pthread_create(&thread, NULL, root_main, fd))
		return ncclSystemError;
	pthread_detach(thread);
	return ncclSuccess;
}

static const char *everywhere(void)
{
	const char *s = getenv("NCCL_COMM_ID");

	return s && *s ? s : NULL;
}

static struct address named(const char *name)
{
	struct address a = { .len = 0 };
	int n = snprintf(a.a.sun_path + 1, sizeof a.a.sun_path - 1, "dspark-%s", name);

	a.a.sun_family = AF_UNIX;
	a.len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
	return a;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
	struct address a = everywhere() ? named(everywhere()) : anywhere();
	ncclResult_t r = everywhere() ? ncclSuccess : start_root(&a);

	_Static_assert(sizeof a <= sizeof *id, "an address fits");
	memset(id, 0, sizeof *id);
	memcpy(id, &a, sizeof a);
	return r;
}

static ncclResult_t come_in(struct job *j)
{
	ncclComm_t c = j->comm;
	struct entry *all = calloc((size_t)c->world, sizeof *all), me = { c->rank, c->world,
									   anywhere() };
	struct address root, *at = calloc((size_t)c->world, sizeof *at);
	int listening = listen_at(&me.at), fd;
	ncclResult_t rc = ncclSuccess;

	memcpy(&root, &j->id, sizeof root);
	fd = reach(c, &root);
	if (listening < 0 || fd < 0 || !say(fd, &me, sizeof me) ||
	    !get(c, fd, all, (size_t)c->world * sizeof *all))
		rc = fail(ncclRemoteError, "rank 0 is gone");
	for (int i = 0; i < c->world; i++)
		at[i] = all[i].at;
	rc = rc == ncclSuccess ? mesh(c, listening, at) : rc;
	close(listening);
	close(fd);
	free(all);
	free(at);
	return rc;
}

static void begin(ncclComm_t c)
{
	start((struct job){ .comm = c, .run = execute });
}

static void init(struct job *j)
{
	ncclResult_t rc = come_in(j);

	if (rc == ncclSuccess)
		begin(j->comm);
	set_state(j->comm, rc);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank,
				    ncclConfig_t *config)
{
	struct address root;

	if (!config || config->size != sizeof *config || config->magic != 0xcafebeef)
		return fail(ncclInvalidArgument, "a configuration that nobody has initialised");
	if (config->blocking != 0)
		return fail(ncclInvalidArgument, "the stand-in does not block");
	if (ranks < 1 || rank < 0 || rank >= ranks)
		return fail(ncclInvalidArgument, "no rank %d of %d", rank, ranks);
	memcpy(&root, &id, sizeof root);
	if (everywhere() && !rank && start_root(&root) != ncclSuccess)
		return ncclSystemError;
	*comm = new_comm(rank, ranks);
	start((struct job){ .comm = *comm, .run = init, .id = id });
	return ncclInProgress;
}

struct wish {
	int colour, key;
	struct address at;
};

static void split(struct job *j)
{
	ncclComm_t c = j->comm, made;
	struct wish me = { j->colour, j->key, anywhere() }, *all = calloc((size_t)c->world,
									   sizeof *all);
	struct address *at = calloc((size_t)c->world, sizeof *at);
	int listening = listen_at(&me.at), n = 0, rank = 0;
	ncclResult_t rc = tell_all(c, SPLIT, &me, all, sizeof me);

	for (int r = 0; rc == ncclSuccess && r < c->world; r++)
		if (all[r].colour == me.colour) {
			int before = 0;

			for (int i = 0; i < c->world; i++)
				before += all[i].colour == me.colour &&
					  (all[i].key < all[r].key ||
					   (all[i].key == all[r].key && i < r));
			at[before] = all[r].at;
			rank = r == c->rank ? before : rank;
			n++;
		}
	if (rc == ncclSuccess) {
		made = new_comm(rank, n);
		rc = mesh(made, listening, at);
		made->state = rc;
		if (rc == ncclSuccess)
			begin(made);
		__atomic_store_n(j->made, made, __ATOMIC_RELEASE);
	}
	close(listening);
	free(all);
	free(at);
	set_state(c, rc);
}

ncclResult_t ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t *made, ncclConfig_t *config)
{
	ncclResult_t r = ready(c, "a split");

	if (r != ncclSuccess)
		return r;
	if (config)
		return fail(ncclInvalidArgument, "the stand-in splits off likes of the parent");
	if (c->outstanding)
		return fail(ncclInvalidUsage, "a split while operations are outstanding");
	*made = NULL;
	set_state(c, ncclInProgress);
	start((struct job){ .comm = c, .run = split, .made = made, .colour = color, .key = key });
	return ncclInProgress;
}

/* ---- the end --------------------------------------------------------------------------------- */

static void finalise(struct job *j)
{
	ncclComm_t c = j->comm;
	char *all = malloc((size_t)c->world);
	ncclResult_t rc;

	pthread_mutex_lock(&c->lock);
	while (c->outstanding && !c->aborted)
		pthread_cond_wait(&c->turn, &c->lock);
	pthread_mutex_unlock(&c->lock);
	rc = tell_all(c, FINAL, "", all, 1);
	free(all);
	pthread_mutex_lock(&c->lock);
	c->finalised = true;
	pthread_mutex_unlock(&c->lock);
	set_state(c, rc);
}

ncclResult_t ncclCommFinalize(ncclComm_t c)
{
	ncclResult_t r = ready(c, "a finalisation");

	if (r != ncclSuccess)
		return r;
	set_state(c, ncclInProgress);
	start((struct job){ .comm = c, .run = finalise });
	return ncclInProgress;
}

static void release(ncclComm_t c)
{
	pthread_mutex_lock(&c->lock);
	c->aborted = true;
	pthread_cond_broadcast(&c->turn);
	while (c->threads)
		pthread_cond_wait(&c->turn, &c->lock);
	pthread_mutex_unlock(&c->lock);
	for (struct group *g = c->groups, *next; g; g = next) {
		next = g->next;
		__atomic_store_n(&g->done, 1, __ATOMIC_RELEASE);
	}
	for (int i = 0; c->fd && i < c->world; i++)
		if (c->fd[i] >= 0)
			close(c->fd[i]);
	free(c->fd);
	pthread_mutex_destroy(&c->lock);
	pthread_cond_destroy(&c->turn);
	free(c);
}

ncclResult_t ncclCommDestroy(ncclComm_t c)
{
	if (!c->finalised)
		return fail(ncclInvalidUsage, "destroyed before it was finalised");
	release(c);
	return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t c)
{
	release(c);
	return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *error)
{
	if (!c)
		return fail(ncclInvalidArgument, "no communicator");
	pthread_mutex_lock(&c->lock);
	*error = c->state;
	pthread_mutex_unlock(&c->lock);
	return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t c, int *count)
{
	*count = c->world;
	return ready(c, "a question");
}

ncclResult_t ncclCommUserRank(const ncclComm_t c, int *rank)
{
	*rank = c->rank;
	return ready(c, "a question");
}

ncclResult_t ncclGetVersion(int *version)
{
	*version = NCCL_VERSION_CODE;
	return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t r)
{
	static const char *const text[] = { "no error", "unhandled cuda error", "system error",
					    "internal error", "invalid argument", "invalid usage",
					    "remote process exited or there was a network error",
					    "in progress" };

	return (unsigned)r < sizeof text / sizeof *text ? text[r] : "unknown result code";
}

const char *ncclGetLastError(ncclComm_t c)
{
	(void)c;
	return last;
}
