#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# dspark-tokenize against the rows of the reference: every text-* case. A case of GOLDEN that is the same as the bundled one runs once.
# shellcheck source=tests/tap.sh
. "${top_srcdir:?run it by make check}/tests/tap.sh"

bundled=$top_srcdir/tests/data/golden
if [ -n "${DSPARK_TEST_QUICK-}" ]; then
	skip "text cases" "they run no C"
	done_testing
fi
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

# Whole recipes: the rows that the reference fed its target, by the hash over ids, masks and offsets.
rows_hash() {
	head -c 65536 "$1" | grep -a -o '"rows_xxh3_128": *"[0-9a-f]*"' | tr -d ' '
}

same_rows() {
	(cd "$1" && dspark-tokenize -q -c recipe.yaml -o "$tmp/tokens.safetensors") || return
	rows_hash "$1/tokens.safetensors" >"$tmp/want"
	rows_hash "$tmp/tokens.safetensors" >"$tmp/have"
	[ -s "$tmp/want" ] && diff "$tmp/want" "$tmp/have"
}

for root in "$bundled" ${GOLDEN:+"$GOLDEN"}; do
	for dir in "$root"/e2e-*/; do
		dir=${dir%/}
		case ${dir##*/} in
		*parquet*) need_python "${dir##*/}: rows" datasets || continue ;;
		esac
		check "${dir##*/}: rows" same_rows "$dir"
	done
done

# The tokens file of the example is what its rows give.
check "examples/quickstart: rows" same_rows "$top_srcdir/examples/quickstart"
done_testing
