#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Quantised Qwen3 checkpoints (FP8, INT4, MXFP4): the states of the same numbers written as F32, as numpy decodes them from the
# files, whatever blocks, scales, files, ranks and residencies; what a plan counts; what is refused. DSPARK_TEST_QUICK shortens
# the loops.
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

# fuse: of model `packed`
fuse() {
	"$PYTHON" "$tests/packed.py" fuse packed fused && rm -rf packed && mv fused packed
}

# equal NAME OPTION...: a packed model, and its numbers as F32, give the same states in fp32 and in bf16. FUSE=1: its experts fused
equal() {
	name=$1
	shift
	rm -rf plain
	check "$name: packed" make packed "$@"
	check "$name: plain" "$PYTHON" "$tests/packed.py" expand packed plain
	if [ -n "${FUSE-}" ]; then check "$name: fused" fuse; fi
	for compute in fp32 bf16; do
		for model in packed plain; do
			check "$name: rows of $model" recipe $model
			check "$name: $model, $compute" run "$model.$compute" 1 --compute-dtype $compute
		done
		check "$name: the same states in $compute" "$PYTHON" "$tests/rms.py" plain.$compute packed.$compute 0
	done
	# rounding may choose other experts
	check "$name: bf16 is near fp32" "$PYTHON" "$tests/rms.py" packed.fp32 packed.bf16 0.06 0.1
	differs() { ! "$PYTHON" "$tests/rms.py" packed.fp32 packed.bf16 0; }
	check "$name: bf16 is not fp32" differs
}

moe="--type qwen3_moe --experts 4 --topk 2"
# shellcheck disable=SC2086 # options without blanks
{
equal "dense, blocks of 128" --fp8 128,128
equal "MoE, scales in another file" $moe --fp8 32,32 --scales-apart
equal "MoE, INT4 in groups of 32, scales in another file" $moe --int4 32 --scales bf16 --scales-apart
equal "dense, MXFP4" --mxfp4
FUSE=1
equal "MoE, fused, gate and up in a block each" $moe --fp8 128,128 --scales bf16
FUSE=
if [ -z "${DSPARK_TEST_QUICK-}" ]; then
	equal "dense, scales in F16" --fp8 32,32 --scales f16
	equal "MoE, scales in E8M0" $moe --fp8 128,128 --scales e8m0
	equal "dense, scales in U8, tied" --fp8 32,32 --scales u8
	equal "MoE, some tensors of a weight are plain" $moe --fp8 32,32 --plain k_proj --plain experts.1. --plain layers.2.mlp
	equal "MoE, odd blocks" $moe --fp8 5,7
	equal "MoE, scales in BF16" $moe --fp8 128,128 --scales bf16
	equal "dense, INT4 by channel, scales in F16, biases" --int4 0 --scales f16 --attention-bias
	equal "dense, INT4 in groups of 128, scales in F32" --int4 128
	equal "MoE, INT4 in odd groups" $moe --int4 5 --scales bf16
	equal "MoE, MXFP4, scales in E8M0, some tensors plain" $moe --mxfp4 --scales e8m0 --plain v_proj --plain experts.2.
	FUSE=1
	equal "MoE, fused" $moe --moe-intermediate 64 --fp8 32,32
	equal "MoE, fused, gate and up of one block" $moe --moe-intermediate 64 --fp8 64,32 --scales e8m0
	FUSE=
fi
agree() { "$PYTHON" "$tests/packed.py" expand packed plain && "$PYTHON" "$tests/packed.py" same plain other; }
check "a packed model" make packed --fp8 5,7
check "its numbers" make other --expanded --fp8 5,7
check "two decoders agree" agree
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
# dense NAME OPTION...: the same of a model without experts
dense() {
	name=$1
	shift
	check "$name, dense" make packed "$@"
	check "its rows" recipe packed
	check "one rank, bf16" run one 1 --compute-dtype bf16
	for world in $worlds; do
		for weights in resident gather stream gather,stream; do
			same "$name, dense: $world ranks, $weights" one "$world" --weights $weights --compute-dtype bf16 \
				--window-tokens 50
		done
	done
}

# copies NAME: both forms of a staged copy, for several ranks
copies() {
	for form in raw lz4; do
		LOAD=--copy=$form
		same "$1: 3 ranks, gather, from a copy, $form" one 3 --weights gather
		same "$1: 2 ranks, gather,stream, ep_size 2, from a copy, $form" one 2 --weights gather,stream --set distributed.ep_size=2
	done
	LOAD=
}

# shellcheck disable=SC2086 # options without blanks
if [ -n "$MPIEXEC" ]; then
	for code in '--fp8 32,32' '--int4 32 --scales bf16' --mxfp4; do
		if [ "$code" != --mxfp4 ] || [ -z "${DSPARK_TEST_QUICK-}" ]; then
			check "$code: a packed MoE model" make packed $moe $code --scales-apart
			check "its rows" recipe packed
			check "one rank, bf16" run one 1 --compute-dtype bf16
			matrix "$code" one --compute-dtype bf16 --window-tokens 50
			check "one rank, fp32" run one 1
			same "$code: blocks of one expert" one 1 --weights stream --memory 1 -f --window-tokens 50
			copies "$code"
		fi
		if [ -z "${DSPARK_TEST_QUICK-}" ]; then dense "$code" $code; fi
	done
	for code in '--fp8 32,32' '--int4 5 --scales bf16'; do
		check "a model packed in part" make packed $moe $code --plain k_proj --plain experts.1.
		check "its rows" recipe packed
		check "one rank" run one 1
		for world in 2 4; do
			same "$code in part: $world ranks, gather" one $world --weights gather
			same "$code in part: $world ranks, stream, ep_size 2" one $world --weights stream --set distributed.ep_size=2
		done
	done
	check "a packed MoE model" make packed $moe --fp8 128,128 --scales bf16
	check "its experts fused" fuse
	check "its rows" recipe packed
	check "one rank" run one 1
	for world in 2 4; do
		same "fused: $world ranks, gather" one $world --weights gather
		same "fused: $world ranks, gather,stream, ep_size 2" one $world --weights gather,stream --set distributed.ep_size=2
	done
	copies "fused"
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
most = float(sys.argv[3])
sys.exit(not (packed <= most * plain and a["used"] >= 0.9999 * a["bytes"] and a["used"] <= most * b["used"]))
END
large() {
	"$PYTHON" "$tests/make_model.py" --type qwen3_moe --layers 4 --hidden 2048 --heads 32 --kv 4 --head-dim 128 --experts 64 \
		--topk 8 --moe-intermediate 768 --vocab 1000 --header-only "$@" && recipe "$1" &&
	dspark-plan -q -f -c recipe.yaml -t tokens --device cpu --compute-dtype bf16 --set recipe_args.cache_output_dir=never \
		--set recipe_args.target_layer_ids=[3] --weights resident
}
plain_large() { large large.plain >plan.plain; }
packed_large() {
	most=$1
	shift
	rm -rf large
	large large "$@" >plan.packed && "$PYTHON" counts.py plan.packed plan.plain "$most"
}
check "a plan of a large model" plain_large
check "FP8 takes at most 0.55 of BF16's memory" packed_large 0.55 --fp8 128,128
check "MXFP4 takes at most 0.3 of it" packed_large 0.3 --mxfp4
check "INT4 in groups of 128 takes at most 0.3 of it" packed_large 0.3 --int4 128 --scales bf16
rm -rf large large.plain

# ---- refusals ---------------------------------------------------------------------------------------------------------------
# refuses TEXT OPTION...: one sentence of dspark-plan about such a model
refuses() {
	text=$1
	shift
	make bad "$@" && recipe bad && refused "$text"
}
refused() {
	text=$1
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
check "AWQ" refuses "quant_method 'awq'" --set 'quantization_config={"quant_method":"awq","bits":4}'

q=model.layers.1.self_attn.q_proj
check "INT4 without scales" refuses "its scales '$q.weight_scale' are missing" --int4 32 --drop $q.weight_scale
check "scales without INT4" refuses "'$q.weight' is missing" --int4 32 --drop $q.weight_packed
check "MXFP4 without scales" refuses "its scales '$q.weight_scale' are missing" --mxfp4 --drop $q.weight_scale
check "scales of another grid" refuses "blocks of 1 x 32.*grid of \[168, 3\]" --int4 32 --reshape $q.weight_scale=168,4
check "codes of another width" refuses "'$q.weight_packed' of 'bad' has shape \[168, 12\].*asks for \[168, 11\]" --int4 32 \
	--reshape $q.weight_packed=168,12
check "INT4 that config.json calls MXFP4" refuses "none of the layouts" --int4 32 --scales u8
check "INT4 that config.json does not declare" refuses "'$q.weight_packed' .* packed\|layers.0.*packed" --int4 32 \
	--unset quantization_config
halves() { "$PYTHON" "$tests/packed.py" fuse packed bad && recipe bad && refused "a grid of \[4, 3, 3\]"; }
across() {
	"$PYTHON" - <<END && recipe bad && refused "do not end where gate ends"
import sys
sys.path.insert(0, "$tests")
import packed
config, tensors = packed.fuse(*packed.read("packed"))
name = "model.layers.0.mlp.experts.gate_up_proj_scale_inv"
dtype, _, data = tensors[name]
tensors[name] = dtype, [4, 3, 3], data[:4 * 4 * 3 * 3]
packed.write("bad", config, tensors)
END
}
turned() {
	"$PYTHON" - <<END && recipe bad && refused "is transposed"
import sys
sys.path.insert(0, "$tests")
import packed
config, tensors = packed.fuse(*packed.read("packed"))
name = "model.layers.0.mlp.experts.gate_up_proj"
dtype, (e, rows, cols), data = tensors[name]
tensors[name] = dtype, [e, cols, rows], data
packed.write("bad", config, tensors)
END
}
# shellcheck disable=SC2086
{
check "a packed MoE model" make packed $moe --fp8 32,32
rm -rf bad
check "blocks that begin anew with up" halves
check "a block that gate and up share" across
check "a plain MoE model" make packed $moe --moe-intermediate 40
rm -rf bad
check "experts that are [in, out]" turned
}
# group TEXT KEY=VALUE: one sentence about a group of compressed-tensors with that in its weights, or the group itself
group() {
	refuses "$1" --set 'quantization_config={"quant_method":"compressed-tensors","format":"'"${FORMAT:-pack-quantized}"'",
		"config_groups":{"group_0":{"targets":["Linear"]'"${3-}"',"weights":{"num_bits":4,"strategy":"group","group_size":32,
		"type":"int","symmetric":true'"$2"'}}}'"${4-}"'}'
}
check "8 bits" group "int of 8 bits" ',"num_bits":8'
check "zero points" group "not symmetric" ',"symmetric":false'
check "columns in another order" group "actorder 'group'" ',"actorder":"group"'
check "one scale a tensor" group "strategy 'tensor'" ',"strategy":"tensor","group_size":null'
check "weights quantised in each forward" group "quantised anew" ',"dynamic":true'
check "activations quantised too" group "activations are quantised too" "" ',"input_activations":{"num_bits":8}'
check "keys and values quantised too" group "keys and values" "" "" ',"kv_cache_scheme":{"num_bits":8}'
check "sparse weights" group "sparse weights" "" "" ',"sparsity_config":{"format":"sparse-24-bitmask"}'
check "rotated weights" group "rotated" "" "" ',"transform_config":{"config_groups":{"u":1}}'
FORMAT=int-quantized
check "another format" group "format 'int-quantized'" ""
FORMAT=mxfp4-pack-quantized
check "MXFP4 in integers" group "int of 4 bits as mxfp4" ""
check "MXFP4 in other groups" group "groups of 16" ',"type":"float","group_size":16'
# The order of columns is neither asked for nor honoured.
order() {
	"$PYTHON" - <<END && recipe bad && refused "'$q.weight_g_idx' .* beside packed codes"
import sys
sys.path.insert(0, "$tests")
import packed
config, tensors = packed.read("packed")
tensors["$q.weight_g_idx"] = "I32", [88], bytes(352)
packed.write("bad", config, tensors)
END
}
check "a packed model" make packed --int4 32
rm -rf bad
check "groups told by g_idx" order
done_testing
