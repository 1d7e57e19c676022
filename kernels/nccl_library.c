/* SPDX-License-Identifier: Apache-2.0 */
/* A process that connects no GPUs needs no NCCL; one that does, any since 2.18 (ncclCommSplit). */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <dlfcn.h>
#include <stddef.h>

#include "err.h"
#include "nccl_library.h"

#define LIBRARY "libnccl.so.2"
#define OLDEST 21800

struct nccl_library nccl;

static int find_functions(struct err *e)
{
#define ADDRESS(name) { "nccl" #name, (void **)&nccl.name },
	static const struct {
		const char *name;
		void **p;
	} all[] = { NCCL_FUNCTIONS(ADDRESS) };
#undef ADDRESS

	for (size_t i = 0; i < sizeof all / sizeof *all; i++)
		if (!(*all[i].p = dlsym(nccl.handle, all[i].name)))
			return err_refuse(e, LIBRARY " has no %s: NCCL 2.18 or newer is needed",
					  all[i].name);
	return 0;
}

int nccl_open(struct err *e)
{
	int version = 0;

	if (nccl.handle)
		return 0;
	nccl.handle = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
	if (!nccl.handle)
		return err_refuse(e,
				  "cannot open " LIBRARY " (%s): install NCCL, or let "
				  "LD_LIBRARY_PATH name the directory that has it",
				  dlerror());
	if (!find_functions(e) && !nccl.GetVersion(&version) && version >= OLDEST)
		return 0;
	err_refuse(e, LIBRARY " is of version %d.%d, but NCCL 2.18 or newer is needed",
		   version / 10000, version / 100 % 100);
	dlclose(nccl.handle);
	nccl.handle = NULL;
	return -1;
}
