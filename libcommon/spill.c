/* SPDX-License-Identifier: Apache-2.0 */
/* spill: an unlinked file, mapped. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "err.h"
#include "file.h"
#include "mem.h"
#include "spill.h"

static const char *directory(void)
{
	const char *dir = getenv("TMPDIR");

	return dir && *dir ? dir : "/tmp";
}

static int open_unnamed(const char *dir, struct err *e)
{
	char *path = file_join(dir, ".dspark-spill.XXXXXX", e);
	int fd = path ? mkostemp(path, O_CLOEXEC) : -1;

	if (path && fd < 0)
		err_errno(e, "cannot make a spill file in '%s' (see TMPDIR)", dir);
	else if (path)
		unlink(path);
	free(path);
	return fd;
}

void *spill_map(size_t bytes, struct err *e)
{
	const char *dir = directory();
	int fd = open_unnamed(dir, e), rc;
	void *p = NULL;

	bytes = bytes ? bytes : 1;
	if (fd < 0)
		return NULL;
	rc = posix_fallocate(fd, 0, (off_t)bytes);
	if (rc) {
		errno = rc;
		err_errno(e, "cannot reserve %zu bytes for a spill file in '%s' (see TMPDIR)",
			  bytes, dir);
	} else {
		p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		if (p == MAP_FAILED) {
			err_errno(e, "cannot map %zu bytes of a spill file in '%s'", bytes, dir);
			p = NULL;
		}
	}
	close(fd);
	return p;
}

void spill_unmap(void *p, size_t bytes)
{
	if (p)
		munmap(p, bytes ? bytes : 1);
}
