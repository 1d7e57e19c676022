#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Where a unit of weights comes from, and who computes an expert, changes no byte: golden targets on 1 to 4 ranks with every
# residency and every ep_size that divides ranks and experts, against one rank that holds everything. DSPARK_TEST_QUICK
# takes one case, and small windows alone.
# shellcheck source=tests/tap.sh
. "${top_srcdir:?run it by make check}/tests/tap.sh"

OMP_NUM_THREADS=$(threads 2)
export OMP_NUM_THREADS
golden=$top_srcdir/tests/data/golden
if [ -z "$MPIEXEC" ]; then
	skip "residencies of several ranks" "this build has no MPI"
	done_testing
fi

# run OUT WORLD OPTION...: a cache of $case in OUT; LOAD holds options of dspark-load
run() (
	out=$1 world=$2
	shift 2
	cd "$golden/$case" || exit
	rm -rf "$out" "$tmp/stage"
	dspark-plan -q -c recipe.yaml -t tokens.safetensors --device cpu --set "recipe_args.cache_output_dir=$out" \
		--world "$world" "$@" >"$tmp/plan" &&
	dspark-load -q ${LOAD:+"$LOAD"} -s "$tmp/stage" "$tmp/plan" >"$tmp/run" || exit
	if [ "$world" -eq 1 ]; then
		dspark-forward -q "$tmp/run" >"$tmp/log"
	else
		"$MPIEXEC" -n "$world" dspark-forward -q "$tmp/run" >"$tmp/log"
	fi && dspark-manifest merge -q "$out" >"$tmp/merged"
)

# same NAME REFERENCE WORLD OPTION...
same() {
	name=$1 reference=$2
	shift 2
	if run "$tmp/v" "$@" >"$tmp/tap.out" 2>&1 && diff -r "$reference" "$tmp/v" >>"$tmp/tap.out" 2>&1; then
		pass "$case: $name"
	else
		fail "$case: $name" "$tmp/tap.out"
	fi
}

# The member of the first record that has it.
member() {
	sed -n "s/.*\"$1\":\\([^,}]*\\).*/\\1/p" "$2" | head -n 1
}

# each ep_size that divides world $1 and experts $2 (0: a dense target, whose ep_size divides nothing)
sizes() {
	for ep in 1 2 3 4; do
		if [ $(($1 % ep)) -eq 0 ] && [ $(($2 % ep)) -eq 0 ]; then echo "$ep"; fi
	done
}

# matrix EXPERTS REFERENCE OPTION...
matrix() {
	experts=$1 reference=$2
	shift 2
	for world in 1 2 3 4; do
		for weights in resident gather stream gather,stream; do
			for ep in $(sizes "$world" "$experts"); do
				same "$world ranks, $weights, ep_size $ep${1:+, $*}" "$reference" "$world" --weights "$weights" \
					--set "distributed.ep_size=$ep" "$@"
			done
		done
	done
}

# one_case NAME EXPERTS [whole]: in small windows, and in whole ones
one_case() {
	case=$1 experts=$2
	check "$case: one rank, resident" run "$tmp/one" 1 --weights resident
	if [ "${3-}" = whole ] && [ -z "${DSPARK_TEST_QUICK-}" ]; then matrix "$experts" "$tmp/one"; fi
	# windows of some tokens: units come and go several times, some ranks end before others
	matrix "$experts" "$tmp/one" --window-tokens 40
	rm -rf "$tmp/one"
}

one_case qwen3moe-norm 16 whole
if [ -z "${DSPARK_TEST_QUICK-}" ]; then
	one_case qwen3moe-mixed-v5 10
	one_case qwen3moe-yarn 8
	one_case qwen3-untied-bias-yarn 1
	one_case glm52-bf16 12
	one_case glm5-halfsplit-groups 16
	one_case glm52-fp8 4
fi

# ---- what a plan can add -----------------------------------------------------------------------------------------------------
case=qwen3moe-norm
check "$case: bf16, one rank, resident" run "$tmp/bf16" 1 --weights resident --compute-dtype bf16
check "$case: fp32, one rank, resident" run "$tmp/one" 1 --weights resident
check "$case: the weights of the reference classes" run "$tmp/hf" 1 --set recipe_args.target_force_hf=true
for weights in resident gather stream gather,stream; do
	same "4 ranks, $weights, ep_size 2, bf16" "$tmp/bf16" 4 --weights $weights --compute-dtype bf16 --set distributed.ep_size=2
	same "3 ranks, $weights, bf16" "$tmp/bf16" 3 --weights $weights --compute-dtype bf16
	same "4 ranks, $weights, ep_size 4, slot weights behind down" "$tmp/hf" 4 --weights $weights --set distributed.ep_size=4 \
		--set recipe_args.target_force_hf=true
	same "4 ranks, $weights, ep_size 2, dp_replicate_size 2" "$tmp/one" 4 --weights $weights --set distributed.ep_size=2 \
		--set distributed.dp_replicate_size=2
done
same "4 ranks, gathered weights stay" "$tmp/one" 4 --weights gather --set distributed.reshard_after_forward=false
check "the plan says so" [ "$(member keep "$tmp/plan")" = true ]
for weights in stream gather,stream; do
	same "2 ranks, $weights, blocks of one expert, spilled" "$tmp/one" 2 --weights $weights --memory 1 -f --window-tokens 40
	check "the plan says so" [ "$(member block_experts "$tmp/plan")$(member spill "$tmp/plan")" = 1true ]
done
for form in raw lz4; do
	LOAD=--copy=$form
	same "3 ranks, gather, from a copy, $form" "$tmp/one" 3 --weights gather
	same "4 ranks, gather,stream, ep_size 2, from a copy, $form" "$tmp/one" 4 --weights gather,stream --set distributed.ep_size=2
	same "1 rank, stream, from a copy, $form" "$tmp/one" 1 --weights stream
done
LOAD=

# A shard group of one rank gathers nothing: its ranks need no connection.
alone() {
	rm -rf "$tmp/v" "$tmp/stage"
	(cd "$golden/$case" && dspark-plan -q -c recipe.yaml -t tokens.safetensors --device cpu --world 2 --weights "$1" \
		--set distributed.dp_replicate_size=2 --set "recipe_args.cache_output_dir=$tmp/v" >"$tmp/plan" &&
	 dspark-load -q -s "$tmp/stage" "$tmp/plan" >"$tmp/run" && dspark-forward -q --rank 1 "$tmp/run" >"$tmp/log" &&
	 dspark-forward -q --rank 0 "$tmp/run" >"$tmp/log" && dspark-manifest merge -q "$tmp/v" >"$tmp/merged") &&
		diff -r "$tmp/one" "$tmp/v"
}
for weights in gather gather,stream; do
	check "$case: 2 ranks, $weights, dp_replicate_size 2, one by one" alone $weights
done

# Whatever their plans would have them do together.
differ() {
	for weights in resident gather; do
		(cd "$golden/$case" && dspark-plan -q -c recipe.yaml -t tokens.safetensors --device cpu --world 2 --weights "$weights" \
			--set "recipe_args.cache_output_dir=$tmp/none" >"$tmp/plan" &&
		 dspark-load -q -s "$tmp/stage.$weights" "$tmp/plan" >"$tmp/run.$weights") || return
	done
	"$MPIEXEC" -n 1 dspark-forward -q "$tmp/run.resident" : -n 1 dspark-forward -q "$tmp/run.gather" >"$tmp/log" 2>"$tmp/err"
	status=$?
	cat "$tmp/err"
	[ "$status" -eq 1 ] && grep -q 'the ranks read different plans' "$tmp/err" && [ ! -e "$tmp/none" ]
}
check "ranks with different plans refuse" differ

# Experts that nobody chose are not read: of one token, every layer leaves 12 of 16.
experts_bytes() {
	"$PYTHON" -c 'import json, struct, sys
n = 0
for path in sys.argv[1:]:
    with open(path, "rb") as f:
        head = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        n += sum(t["data_offsets"][1] - t["data_offsets"][0] for k, t in head.items() if ".experts." in k)
print(n)' "$golden/$case"/model/*.safetensors
}
few() {
	all=$(member weights_read "$tmp/log")
	rm -rf "$tmp/v"
	(cd "$golden/$case" && dspark-plan -q -c recipe.yaml -t "$tmp/few" --device cpu --weights stream --window-tokens 1 \
		--set "recipe_args.cache_output_dir=$tmp/v" >"$tmp/plan" &&
	 dspark-load -q -s "$tmp/stage" "$tmp/plan" >"$tmp/run" && dspark-forward -q "$tmp/run" >"$tmp/log") || return
	some=$(member weights_read "$tmp/log")
	echo "a token read $some bytes, all rows $all; experts have $(experts_bytes)"
	[ $((all - some)) -eq $(($(experts_bytes) * 12 / 16)) ]
}
if need_python "experts that nobody chose are not read" numpy,xxhash,safetensors; then
	check "$case: stream" run "$tmp/v" 1 --weights stream
	check "a row of one token" "$PYTHON" "$top_srcdir/tests/first_token.py" "$golden/$case/tokens.safetensors" "$tmp/few"
	check "experts that nobody chose are not read" few
fi

# ---- states that are not finite ------------------------------------------------------------------------------------------------
# One expert gives NaN. A rank whose tokens choose it sets shards aside, and ends with 1 when all others have published theirs.
aside() (
	cd "$tmp" || exit
	rm -rf "aside$1"
	dspark-plan -q -c nan.yaml -t nan.tokens --device cpu --world "$1" --set "recipe_args.cache_output_dir=aside$1" >plan &&
		dspark-load -q -s nan.stage plan >run || exit
	"$MPIEXEC" -n "$1" dspark-forward -q --nonfinite quarantine run >log 2>err
	status=$?
	cat err
	bad=$(find "aside$1" -name '*.bad' | wc -l) good=$(find "aside$1" -name 'shard-*.safetensors' | wc -l)
	echo "exit $status, $good shards and $bad aside, $(grep -c '"record":"summary"' log) summaries"
	[ "$status" -eq 1 ] && [ "$bad" -gt 0 ] && [ "$good" -gt 0 ] && [ $((bad + good)) -eq 20 ] &&
		[ "$(grep -c '"record":"summary"' log)" -eq "$1" ]
)
if need_python "states that are not finite" numpy,xxhash; then
	tests=$(cd "$top_srcdir/tests" && pwd)
	check "a target with an expert of NaN" "$PYTHON" "$tests/make_model.py" --type qwen3_moe --layers 2 --experts 8 --topk 1 \
		--nan model.layers.0.mlp.experts.3.down_proj.weight "$tmp/nan.model"
	check "rows for it" "$PYTHON" "$tests/make_tokens.py" --model "$tmp/nan.model" --rows 20 --lengths 1 --shard-size 1 \
		--layer-ids 0 --recipe "$tmp/nan.yaml" "$tmp/nan.tokens"
	check "one rank sets shards aside" aside 1
	check "3 ranks do, and publish the others" aside 3
	check "the same ones" diff -r "$tmp/aside1" "$tmp/aside3"
fi

# ---- what fits -----------------------------------------------------------------------------------------------------------------
# chosen WEIGHTS OPTION...: what --weights auto takes
chosen() {
	want=$1
	shift
	(cd "$golden/$case" && dspark-plan -q -c recipe.yaml -t tokens.safetensors --device cpu \
		--set "recipe_args.cache_output_dir=$tmp/none" "$@") >"$tmp/plan" || return
	took=$(sed -n 's/.*"compute_dtype":"[a-z0-9]*","weights":"\([a-z,]*\)".*/\1/p' "$tmp/plan")
	echo "took $took"
	[ "$took" = "$want" ]
}

smaller() {
	chosen gather "$@" || [ "$took" = gather,stream ] || [ "$took" = stream ]
}
check "auto without --memory" chosen resident
check "auto, the recipe offloads" chosen gather,stream --world 2 --set distributed.offload_policy=true
check "auto with enough memory" chosen resident --memory 1G --world 2
total=$(sed -n 's/.*"weights":"resident","ranks":\[0,[0-9]*\],[^}]*"total":\([0-9]*\)}.*/\1/p' "$tmp/plan")
check "auto with a byte too little for resident" smaller --world 2 --memory $((total - 1))
check "auto with that byte" chosen resident --world 2 --memory "$total"

refused() {
	! (cd "$golden/$case" && dspark-plan -q -c recipe.yaml -t tokens.safetensors --device cpu \
		--set "recipe_args.cache_output_dir=$tmp/none" --weights stream --memory 100K) 2>"$tmp/err" >/dev/null &&
		cat "$tmp/err" && grep -q 'of layer [0-9]*.*does not fit' "$tmp/err" && [ "$(wc -l <"$tmp/err")" -eq 1 ]
}
check "what fits nowhere is refused by the unit's name" refused
done_testing
