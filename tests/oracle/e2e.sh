#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# From chat rows to a cache, against the reference: every e2e-* golden case and the bundled example.
#
#	PATH=BUILD:$PATH PYTHON=... e2e.sh GOLDEN [SHIM]
#
# For each case: dspark-tokenize gives the case's rows_xxh3_128, plan | load | forward | merge gives its manifest.json byte for
# byte, compare.py finds the states within noise, and train_reader.py finds the same DSpark losses. With SHIM, the directory that has
# run_recipe.py, the reference's recipe runs on examples/quickstart (fp32 and as written) and is held against ours in the same way.
# PYTHON needs nemo-automodel, which brings all that tools/dspark-tokenize.py needs. Exit 0 if everything agrees.
set -u
here=$(cd "$(dirname "$0")" && pwd)
golden=${1:?usage: e2e.sh GOLDEN [SHIM]}
shim=${2-}
: "${PYTHON:=python3}"
OMP_NUM_THREADS=1
TORCH_COMPILE_DISABLE=1
export OMP_NUM_THREADS TORCH_COMPILE_DISABLE
work=$(mktemp -d "${TMPDIR:-/tmp}/dspark-e2e.XXXXXX") || exit 3
trap 'rm -rf "$work"' EXIT
failed=0

say() {
	if [ "$1" -eq 0 ]; then echo "ok   $2"; else
		echo "FAIL $2"
		failed=1
	fi
}

rows_hash() {
	"$PYTHON" -c 'import sys
from safetensors import safe_open
print(safe_open(sys.argv[1], "np").metadata()["rows_xxh3_128"])' "$1"
}

# build DIR OUT OPTION...: rows, plan, stage, shards and manifest from DIR's recipe
build() {
	dir=$1 out=$2
	shift 2
	rm -rf "$work/stage"
	(cd "$dir" && "$PYTHON" "$here/../../tools/dspark-tokenize.py" -q -c recipe.yaml "$@" -o "$work/tokens.safetensors" &&
	 dspark-plan -q -c recipe.yaml -t "$work/tokens.safetensors" --device cpu --set "recipe_args.cache_output_dir=$out" "$@" >"$work/plan" &&
	 dspark-load -q -s "$work/stage" "$work/plan" >"$work/run" && dspark-forward -q "$work/run" >"$work/log" &&
	 dspark-manifest merge "$out" >"$work/merged" && dspark-manifest verify "$out" >"$work/verified")
}

one_case() {
	dir=$1 name=$2
	rm -rf "$work/out"
	build "$dir" "$work/out"
	say $? "$name: tokenize, plan, load, forward, merge, verify"
	[ "$(rows_hash "$work/tokens.safetensors")" = "$(rows_hash "$dir/tokens.safetensors")" ]
	say $? "$name: rows_xxh3_128 $(rows_hash "$work/tokens.safetensors")"
	cmp "$dir/expected/manifest.json" "$work/out/manifest.json"
	say $? "$name: manifest.json"
	"$PYTHON" "$golden/compare.py" "$work/out" "$dir"
	say $? "$name: states"
	"$PYTHON" "$here/train_reader.py" "$work/out" "$dir/expected" --model "$dir/model" 2>"$work/err"
	say $? "$name: the reference trains on it"
}

example() {
	dtype=$1
	cp -R "$here/../../examples/quickstart" "$work/example-$dtype"
	rm -rf "$work/out" "$work/example-$dtype/out"
	build "$work/example-$dtype" "$work/out" --set "recipe_args.cache_dtype=$dtype"
	say $? "quickstart, $dtype: tokenize, plan, load, forward, merge, verify"
	[ "$(rows_hash "$work/tokens.safetensors")" = "$(rows_hash "$work/example-$dtype/tokens.safetensors")" ]
	say $? "quickstart, $dtype: rows_xxh3_128 of the bundled tokens file"
	(cd "$work/example-$dtype" && "$PYTHON" "$shim/run_recipe.py" -c recipe.yaml --recipe_args.cache_output_dir "$work/ref-$dtype" \
		--recipe_args.cache_dtype "$dtype" >"$work/recipe.log" 2>&1)
	say $? "quickstart, $dtype: the reference's recipe runs"
	cmp "$work/ref-$dtype/manifest.json" "$work/out/manifest.json"
	say $? "quickstart, $dtype: manifest.json"
	"$PYTHON" "$here/train_reader.py" "$work/out" "$work/ref-$dtype" --model "$work/example-$dtype/model" 2>"$work/err"
	say $? "quickstart, $dtype: the reference trains on it"
}

for dir in "$golden"/e2e-*/; do
	dir=${dir%/}
	if [ -e "$dir/expected/shard-000000.safetensors" ]; then one_case "$dir" "${dir##*/}"; fi
done
if [ -n "$shim" ]; then
	example fp32
	example bf16
fi
exit "$failed"
