#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# dspark-tokenize against the rows of the reference: every text-* case. A case of GOLDEN that is the same as the bundled one runs once.
# shellcheck source=tests/tap.sh
. "${top_srcdir:?run it by make check}/tests/tap.sh"

bundled=$top_srcdir/tests/data/golden
if ! need_python "text cases" transformers,jinja2,yaml,numpy,xxhash; then done_testing; fi
if ! command -v dspark-tokenize >/dev/null; then
	skip "text cases" "built without Python"
	done_testing
fi

one_case() {
	case $1 in
	*/text-parquet-*) need_python "$2" datasets || return ;;
	esac
	check "$2" "$PYTHON" "$top_srcdir/tests/text_check.py" "${1%/*}" "${1##*/}"
}

cases=0
for dir in "$bundled"/text-*/; do
	dir=${dir%/}
	if ! grep -q '"runs"' "$dir/case.json"; then continue; fi
	one_case "$dir" "${dir##*/}"
	cases=$((cases + 1))
done
if [ -n "$GOLDEN" ] && [ -z "${DSPARK_TEST_QUICK-}" ]; then
	for dir in "$GOLDEN"/text-*/; do
		dir=${dir%/}
		if ! grep -q '"runs"' "$dir/case.json"; then continue; fi
		if diff -r -q -x 'rendered*' "$dir" "$bundled/${dir##*/}" >/dev/null 2>&1; then continue; fi
		one_case "$dir" "GOLDEN/${dir##*/}"
	done
fi
check "there are cases" [ "$cases" -ge 15 ]
done_testing
