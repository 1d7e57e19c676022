/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hub: models that other programs left in the local Hugging Face cache. Nothing is ever downloaded.
 */
#ifndef DSPARK_HUB_H
#define DSPARK_HUB_H

struct err;

/*
 * The directory that a model's name stands for, malloc'ed: `name` itself if it is one, else the
 * snapshot that refs/main of the local cache names. The cache is HF_HUB_CACHE, else
 * HUGGINGFACE_HUB_CACHE, else hub/ in HF_HOME, else huggingface/hub/ in XDG_CACHE_HOME or ~/.cache.
 */
int hub_find(char **dir, const char *name, struct err *e);

#endif
