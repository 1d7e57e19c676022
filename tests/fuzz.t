#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The fuzz targets over files we have, whole and cut short, and over what a fuzzer found once (tests/data/fuzz/NAME/).
# shellcheck source=tests/tap.sh
. "${top_srcdir:?run it by make check}/tests/tap.sh"

golden=$top_srcdir/tests/data/golden
mkdir "$tmp/yaml" "$tmp/safetensors" "$tmp/record" "$tmp/stage"
i=0
for f in "$golden"/*/recipe.yaml "$top_srcdir"/examples/recipes/*.yaml; do
	i=$((i + 1))
	cp "$f" "$tmp/yaml/$i"
done
i=0
for f in "$golden"/*/tokens.safetensors "$golden"/qwen3-tied/expected/*.safetensors; do
	i=$((i + 1))
	head -c 200000 "$f" >"$tmp/safetensors/$i"
done
dspark-plan -q -c "$golden/qwen3-tied/recipe.yaml" --set "recipe_args.target_model_name_or_path=$golden/qwen3-tied/model" \
	--set "recipe_args.cache_output_dir=$tmp/none" >"$tmp/record/1"
printf '%s\n' '{"record":"plan"}' '{"record":"range","rank":0}' '[]' >"$tmp/record/2"

cp "$top_srcdir"/tests/data/fuzz/stage/* "$tmp/stage"

for kind in yaml safetensors record stage; do
	target=${top_builddir:-.}/tests/fuzz_$kind
	if [ ! -x "$target" ]; then
		skip "fuzz_$kind" "not built"
		continue
	fi
	for f in "$tmp/$kind"/*; do
		for n in 1 7 8 9 63 200 777; do
			head -c "$n" "$f" >"$f.$n"
			tail -c "+$n" "$f" >"$f.t$n"
		done
	done
	set -- "$tmp/$kind"/*
	for f in "$top_srcdir/tests/data/fuzz/$kind"/*; do
		if [ -f "$f" ]; then set -- "$@" "$f"; fi
	done
	check "fuzz_$kind: $# files" "$target" "$@"
done
done_testing
