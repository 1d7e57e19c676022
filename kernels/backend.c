/* SPDX-License-Identifier: Apache-2.0 */
/* The table of backends. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <string.h>

#include "kernels.h"

static const struct {
	const char *name;
	const struct backend *backend;	/* NULL: not in this build */
} table[] = {
	{ "ref", &backend_ref },
#ifdef HAVE_ONEDNN
	{ "cpu", &backend_cpu },
#else
	{ "cpu", &backend_ref },	/* slow, but the same verbs */
#endif
#ifdef HAVE_CUDA
	{ "cuda", &backend_cuda },
#else
	{ "cuda", NULL },
#endif
};

#define TABLE (sizeof table / sizeof table[0])

int backend_open(struct device *d, const char *name, const struct device_options *o, struct err *e)
{
	size_t i;

	memset(d, 0, sizeof *d);
	for (i = 0; i < TABLE; i++) {
		if (strcmp(table[i].name, name))
			continue;
		if (!table[i].backend)
			return err_refuse(e,
					  "backend '%s' is not in this build of dspark: build it "
					  "with the library it needs, "
					  "or plan for another device",
					  name);
		if (o->compute != DT_F32 && o->compute != DT_BF16)
			return err_refuse(e,
					  "compute dtype '%s' is not supported, use fp32 or bf16",
					  dtype_recipe_name(o->compute));
		return table[i].backend->open(d, o, e);
	}
	return err_refuse(e, "backend '%s' is unknown, use ref, cpu or cuda", name);
}

const char *const *backend_names(void)
{
	static const char *names[TABLE + 1];
	size_t i, n = 0;

	for (i = 0; i < TABLE; i++)
		if (table[i].backend)
			names[n++] = table[i].name;
	names[n] = NULL;
	return names;
}
