/* SPDX-License-Identifier: Apache-2.0 */
/* yaml: a YAML file as a jansson tree, with the scalar rules of PyYAML's safe_load (YAML 1.1). */
#ifndef DSPARK_YAML_H
#define DSPARK_YAML_H

#include <jansson.h>

struct err;

/*
 * One document; anchors, aliases and merge keys (<<) are honoured; duplicate keys: the last wins,
 * as PyYAML. An empty document is null. Non-string keys become their text. Refuses broken YAML with
 * file, line and column, other tags, more than one document, and alias expansion beyond 100,000
 * nodes. New reference or NULL.
 */
json_t *yaml_read(const char *path, struct err *e);
json_t *yaml_parse(const char *s, size_t n, const char *what, struct err *e);

/*
 * A plain scalar by the same rules: "12" -> 12, "1e-3" -> string as PyYAML, "off" -> false, "~" ->
 * null.
 */
json_t *yaml_scalar(const char *s, struct err *e);

#endif
