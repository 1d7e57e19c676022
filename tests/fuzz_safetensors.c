/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_safetensors: any bytes as a file; what is accepted must cover it exactly and read within
 * bounds.
 */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "err.h"
#include "fuzz.h"
#include "safetensors.h"

static void check(const struct safetensors *s)
{
	uint64_t sum = 0;
	size_t i;

	for (i = 0; i < s->n; i++) {
		const struct st_tensor *t = &s->tensor[i];
		struct err e = ERR_INIT;
		char byte;

		if (t->begin < s->data || t->end < t->begin || t->end > s->size ||
		    safetensors_find(s, t->name) != t)
			abort();
		if ((uint64_t)safetensors_elements(t) * dtype_size(t->dtype) != t->end - t->begin)
			abort();
		if (t->end > t->begin &&
		    safetensors_read(s, t, &byte, t->end - t->begin - 1, 1, &e))
			abort();
		sum += t->end - t->begin;
	}
	if (s->data + sum != s->size)
		abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	int fd = memfd_create("fuzz", MFD_CLOEXEC);
	struct safetensors s;
	struct err e = ERR_INIT;
	char path[64];

	snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
	if (fd < 0 || write(fd, data, n) != (ssize_t)n)
		abort();
	if (!safetensors_open(&s, path, &e))
		check(&s);
	else if (e.code != EXIT_REFUSED)
		abort();
	safetensors_release(&s);
	close(fd);
	return 0;
}
