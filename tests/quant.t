#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Quantised Qwen3 checkpoints: the states of the same numbers written as F32, whatever blocks, scales, files, ranks and
# residencies; what a plan counts; what is refused. DSPARK_TEST_QUICK shortens the loops.
# shellcheck source=tests/tap.sh
. "${top_srcdir:?run it by make check}/tests/tap.sh"

tests=$(cd "$top_srcdir/tests" && pwd)
cd "$tmp" || exit 99
OMP_NUM_THREADS=$(threads 2)
export OMP_NUM_THREADS
need_python "quantised checkpoints" numpy,xxhash,safetensors || done_testing

# No size but the number of experts is a multiple of anything: blocks are partial on both axes.
make() {
	dir=$1
	shift
	rm -rf "$dir"
	"$PYTHON" "$tests/make_model.py" --layers 3 --hidden 88 --heads 6 --kv 3 --head-dim 28 --intermediate 150 \
		--moe-intermediate 44 --vocab 100 --files 3 "$@" "$dir"
}

# recipe MODEL, and rows for it
recipe() {
	"$PYTHON" "$tests/make_tokens.py" --model "$1" --rows 6 --seq-length 48 --lengths 48,7,1,33,20,48 --recipe recipe.yaml \
		tokens
}

# run OUT WORLD OPTION...; LOAD holds options of dspark-load
run() {
	out=$1 world=$2
	shift 2
	rm -rf "$out" stage
	dspark-plan -q -c recipe.yaml -t tokens --device cpu --set "recipe_args.cache_output_dir=$out" --world "$world" \
		--set 'recipe_args.target_layer_ids=[-1,1,2]' --set recipe_args.cache_dtype=fp32 "$@" >plan &&
	dspark-load -q ${LOAD:+"$LOAD"} -s stage plan >run || return
	if [ "$world" -eq 1 ]; then
		dspark-forward -q run >log
	else
		"$MPIEXEC" -n "$world" dspark-forward -q run >log
	fi && dspark-manifest merge -q "$out" >merged
}

# equal OPTION...: a packed model, and its numbers as F32, give the same states in fp32 and in bf16
equal() {
	name=$1
	shift
	check "$name: packed" make packed "$@"
	check "$name: plain" make plain --expanded "$@"
	for compute in fp32 bf16; do
		for model in packed plain; do
			check "$name: rows of $model" recipe $model
			check "$name: $model, $compute" run "$model.$compute" 1 --compute-dtype $compute
		done
		check "$name: the same states in $compute" "$PYTHON" "$tests/rms.py" plain.$compute packed.$compute 0
	done
	check "$name: bf16 is near fp32" "$PYTHON" "$tests/rms.py" packed.fp32 packed.bf16 0.06
	differs() { ! "$PYTHON" "$tests/rms.py" packed.fp32 packed.bf16 0; }
	check "$name: bf16 is not fp32" differs
}

moe="--type qwen3_moe --experts 4 --topk 2"
# shellcheck disable=SC2086 # options without blanks
{
equal "dense, blocks of 128" --fp8 128,128
equal "MoE, scales in another file" $moe --fp8 32,32 --scales-apart
if [ -z "${DSPARK_TEST_QUICK-}" ]; then
	equal "MoE, scales in E8M0" $moe --fp8 128,128 --fp8-scales e8m0
	equal "dense, scales in U8, tied" --fp8 32,32 --fp8-scales u8
	equal "MoE, some tensors of a weight are plain" $moe --fp8 32,32 --plain k_proj --plain experts.1. --plain layers.2.mlp
	equal "MoE, odd blocks" $moe --fp8 5,7
fi
}

# ---- ranks and residencies --------------------------------------------------------------------------------------------------
# same NAME REFERENCE WORLD OPTION...
same() {
	name=$1 reference=$2
	shift 2
	if run v "$@" >tap.log 2>&1 && diff -r "$reference" v >>tap.log 2>&1; then pass "$name"; else fail "$name" tap.log; fi
}

if [ -n "${DSPARK_TEST_QUICK-}" ]; then worlds=2; else worlds='1 2 3 4'; fi
# matrix NAME REFERENCE OPTION...
matrix() {
	what=$1 reference=$2
	shift 2
	for world in $worlds; do
		for weights in resident gather stream gather,stream; do
			for ep in 1 2 4; do
				if [ $((world % ep)) -ne 0 ]; then continue; fi
				same "$what: $world ranks, $weights, ep_size $ep" "$reference" "$world" --weights $weights \
					--set "distributed.ep_size=$ep" "$@"
			done
		done
	done
}
# shellcheck disable=SC2086 # options without blanks
if [ -n "$MPIEXEC" ]; then
	check "a packed MoE model" make packed $moe --fp8 32,32 --scales-apart
	check "its rows" recipe packed
	check "one rank, bf16" run one 1 --compute-dtype bf16
	matrix "packed" one --compute-dtype bf16 --window-tokens 50
	check "one rank, fp32" run one 1
	same "blocks of one expert" one 1 --weights stream --memory 1 -f --window-tokens 50
	for form in raw lz4; do
		LOAD=--copy=$form
		same "3 ranks, gather, from a copy, $form" one 3 --weights gather
		same "2 ranks, gather,stream, ep_size 2, from a copy, $form" one 2 --weights gather,stream --set distributed.ep_size=2
	done
	LOAD=
	check "a model packed in part" make packed $moe --fp8 32,32 --plain k_proj --plain experts.1.
	check "its rows" recipe packed
	check "one rank" run one 1
	for world in 2 4; do
		same "packed in part: $world ranks, gather" one $world --weights gather
		same "packed in part: $world ranks, stream, ep_size 2" one $world --weights stream --set distributed.ep_size=2
	done
else
	skip "packed weights of several ranks" "this build has no MPI"
fi

# ---- what a plan counts -----------------------------------------------------------------------------------------------------
cat >counts.py <<'END'
import json, sys

def resident(path):
    with open(path) as f:
        plan = json.loads(f.readline())
    return next(m["held"] for m in plan["memory"] if m["weights"] == "resident"), plan["checkpoint"]

(packed, a), (plain, b) = resident(sys.argv[1]), resident(sys.argv[2])
print(f"packed {packed:,}, plain {plain:,}: {packed / plain:.3f}; of the files {a['used']:,} and {b['used']:,}")
sys.exit(not (packed <= 0.55 * plain and a["used"] == a["bytes"] and a["used"] <= 0.55 * b["used"]))
END
large() {
	"$PYTHON" "$tests/make_model.py" --type qwen3_moe --layers 4 --hidden 2048 --heads 32 --kv 4 --head-dim 128 --experts 64 \
		--topk 8 --moe-intermediate 768 --vocab 1000 --header-only "$@" && recipe "$1" &&
	dspark-plan -q -f -c recipe.yaml -t tokens --device cpu --compute-dtype bf16 --set recipe_args.cache_output_dir=never \
		--set recipe_args.target_layer_ids=[3] --weights resident
}
packed_large() { large large --fp8 128,128 >plan.packed; }
plain_large() { large large.plain >plan.plain; }
check "a plan of a large packed model" packed_large
check "a plan of the same in BF16" plain_large
check "packed weights take at most 0.55 of BF16's memory" "$PYTHON" counts.py plan.packed plan.plain
rm -rf large large.plain

# ---- refusals ---------------------------------------------------------------------------------------------------------------
# refuses TEXT OPTION...: one sentence of dspark-plan about such a model
refuses() {
	text=$1
	shift
	make bad "$@" && recipe bad || return
	dspark-plan -q -c recipe.yaml -t tokens --device cpu --set recipe_args.cache_output_dir=never \
		--set 'recipe_args.target_layer_ids=[1]' >stdout 2>err
	status=$?
	cat err
	[ "$status" -eq 1 ] && grep -q -e "$text" err && [ "$(wc -l <err)" -eq 1 ]
}
q=model.layers.1.self_attn.q_proj.weight
check "codes without scales" refuses "its scales '${q}_scale_inv' are missing" --fp8 32,32 --drop ${q}_scale_inv
check "a grid of the wrong shape" refuses "'${q}_scale_inv' of 'bad' have shape \[5, 3\].*grid of \[6, 3\]" --fp8 32,32 \
	--reshape ${q}_scale_inv=5,3
check "one scale a tensor" refuses "have shape \[1\]" --fp8 32,32 --reshape ${q}_scale_inv=1
config='quantization_config={"quant_method":"fp8","fmt":"e4m3","weight_block_size"'
check "other blocks than config.json's" refuses "blocks of 128 x 128" --fp8 32,32 --set "$config:[128,128]}"
check "no blocks" refuses "needs weight_block_size" --fp8 32,32 --set 'quantization_config={"quant_method":"fp8"}'
check "another format" refuses "fmt e5m2" --fp8 32,32 --set 'quantization_config={"quant_method":"fp8","fmt":"e5m2"}'
check "another method" refuses "quant_method 'gptq'" --fp8 32,32 --set 'quantization_config={"quant_method":"gptq"}'
check "codes that config.json does not declare" refuses "stored as F8_E4M3, packed" --fp8 32,32 --unset quantization_config
done_testing
