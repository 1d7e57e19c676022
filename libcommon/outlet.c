/* SPDX-License-Identifier: Apache-2.0 */
/*
 * outlet: two buffers that go round. Every buffer but the last is full, so each write starts at a
 * multiple of a buffer: aligned, whatever the sizes of what was put in.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdlib.h>
#include <string.h>

#include "mem.h"
#include "outlet.h"

static void *write_buffers(void *arg)
{
	struct outlet *o = arg;
	struct err e = ERR_INIT;
	uint64_t at = 0;
	int i = 0;

	pthread_mutex_lock(&o->lock);
	for (;; i ^= 1) {
		while (!o->full[i] && !o->ending)
			pthread_cond_wait(&o->turn, &o->lock);
		if (!o->full[i] || o->err.code)
			break;
		pthread_mutex_unlock(&o->lock);
		file_new_write(o->file, o->buf[i], o->full[i], at, &e);
		pthread_mutex_lock(&o->lock);
		at += o->full[i];
		o->full[i] = 0;
		o->err = e;
		pthread_cond_broadcast(&o->turn);
	}
	pthread_mutex_unlock(&o->lock);
	return NULL;
}

int outlet_open(struct outlet *o, struct file_new *f, struct err *e)
{
	int rc;

	*o = (struct outlet){ .file = f };
	o->buf[0] = mem_aligned(OUTLET_BUFFER, e);
	o->buf[1] = o->buf[0] ? mem_aligned(OUTLET_BUFFER, e) : NULL;
	if (!o->buf[1])
		goto bad;
	pthread_mutex_init(&o->lock, NULL);
	pthread_cond_init(&o->turn, NULL);
	rc = pthread_create(&o->thread, NULL, write_buffers, o);
	o->started = !rc;
	if (!rc)
		return 0;
	err_fail(e, "cannot start the thread that writes '%s': %s", f->path, strerror(rc));
	pthread_mutex_destroy(&o->lock);
	pthread_cond_destroy(&o->turn);
bad:
	outlet_abort(o);
	return -1;
}

/* Gives the buffer to the thread and waits for the other one. */
static int turn_round(struct outlet *o, struct err *e)
{
	int other = o->mine ^ 1, rc = 0;

	pthread_mutex_lock(&o->lock);
	o->full[o->mine] = o->fill;
	pthread_cond_broadcast(&o->turn);
	while (o->full[other] && !o->err.code)
		pthread_cond_wait(&o->turn, &o->lock);
	if (o->err.code) {
		if (!e->code)
			*e = o->err;
		rc = -1;
	}
	pthread_mutex_unlock(&o->lock);
	o->mine = other;
	o->fill = 0;
	return rc;
}

char *outlet_room(struct outlet *o, size_t *n)
{
	*n = OUTLET_BUFFER - o->fill;
	return o->buf[o->mine] + o->fill;
}

int outlet_add(struct outlet *o, size_t n, struct err *e)
{
	o->fill += n;
	o->at += n;
	return o->fill == OUTLET_BUFFER ? turn_round(o, e) : 0;
}

int outlet_put(struct outlet *o, const void *buf, size_t n, struct err *e)
{
	const char *p = buf;
	size_t k;

	for (; n; n -= k, p += k) {
		char *to = outlet_room(o, &k);

		k = n < k ? n : k;
		memcpy(to, p, k);
		if (outlet_add(o, k, e))
			return -1;
	}
	return 0;
}

static void end_thread(struct outlet *o, bool now)
{
	pthread_mutex_lock(&o->lock);
	o->ending = true;
	if (now && !o->err.code)
		o->err.code = EXIT_FAILED;
	pthread_cond_broadcast(&o->turn);
	pthread_mutex_unlock(&o->lock);
	pthread_join(o->thread, NULL);
	pthread_mutex_destroy(&o->lock);
	pthread_cond_destroy(&o->turn);
	o->started = false;
}

int outlet_close(struct outlet *o, struct err *e)
{
	int rc = o->fill ? turn_round(o, e) : 0;

	end_thread(o, false);
	if (o->err.code && !e->code)
		*e = o->err;
	rc = rc || o->err.code ? -1 : 0;
	outlet_abort(o);
	return rc;
}

void outlet_abort(struct outlet *o)
{
	if (o->started)
		end_thread(o, true);
	free(o->buf[0]);
	free(o->buf[1]);
	*o = (struct outlet){ 0 };
}
