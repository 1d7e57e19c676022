#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# How fast is dspark, and beside what? Every ratio is the median of PAIRS rounds in which all contestants take turns.
#
#	make bench			all parts, about 50 minutes on two idle cores
#	make bench BENCH='fp32 start'	some
#	make bench BENCH=table		the last results of all parts again; BENCH=markdown for the README
#	make profile			part `shares`: where the time of the forward goes
#
# Part		what					beside what
# products	matmul and experts			oneDNN's own packed product
# profile	shares of the forward			the whole
# fp32 quarter	dspark-forward, rows full and 25% full	the reference's generate_batch, with and without its head
# bf16 moe
# stream		weights read for every window		the same, resident
# gather		2 ranks that share the weights		2 ranks that hold all
# start		command start to layer 0		reading by cat, then widening and packing from memory
# memory	largest memory, waiting for the writer	what is planned; the run
# copy		dspark-load --copy			cat FILES >COPY; sync
# verify	dspark-manifest verify			xxhsum -H2
# write		the writer alone			dd conv=fsync
# packed	products of FP8, MXFP4, INT4 weights	the same of BF16 weights
# sparse	a GLM-5.2 layer, keys chosen		the same, all keys (7 GB of memory)
# lengths rows	tokens a second
#
# The files (4 GB, up to 6 GB more while it runs) lie in BENCH_DIR, bench/ of the build by default, and are kept; bench.json there
# holds the last results of each part. REFERENCE_PYTHON names a Python with nemo-automodel 0.7.0: without it those parts are
# skipped. BENCH_SMALL=1 takes sizes that say nothing, to try the script. The Makefile gives PATH (the built commands first),
# top_srcdir, top_builddir, PYTHON and MPIEXEC.
set -u
LC_ALL=C
export LC_ALL
: "${PYTHON:=:}" "${MPIEXEC:=}" "${REFERENCE_PYTHON:=}" "${PAIRS:=7}" "${BENCH_ROWS:=4}" "${OMP_NUM_THREADS:=$(getconf _NPROCESSORS_ONLN)}"
export OMP_NUM_THREADS
src=$(cd "${top_srcdir:?run it by make bench}" && pwd) || exit 3
build=$(cd "${top_builddir:?run it by make bench}" && pwd) || exit 3
kernels=$build/tests/bench/kernels writer=$build/tests/bench/writer
case $REFERENCE_PYTHON in
/* | '') ;;
*/*) REFERENCE_PYTHON=$PWD/$REFERENCE_PYTHON ;;
esac
dir=${BENCH_DIR:-$build/bench}
mkdir -p "$dir" && cd "$dir" || exit 3
dir=$PWD
json=$dir/bench.json
layers=28 hidden=1024 width=128 inner=3072 expert=768 vocab=151936 shards=4 rows_in_all=24
if [ -n "${BENCH_SMALL-}" ]; then layers=6 hidden=64 width=16 inner=128 expert=32 vocab=4096 shards=1 rows_in_all=2; fi
work=$(mktemp -d "$dir/tmp.XXXXXX") || exit 3
server=
trap 'if [ -n "$server" ]; then kill "$server"; fi; rm -rf "$work"' EXIT
trap 'exit 3' HUP INT TERM

say() {
	echo "bench: $*" >&2
}

die() {
	say "$*"
	exit 3
}

# ---- numbers -----------------------------------------------------------------------------------------------------------

calc() {
	awk "BEGIN { printf \"%.6f\", $1 }"
}

# timed COMMAND...: its seconds in $took
timed() {
	began=$(date +%s%N)
	"$@" || die "'$*' failed"
	took=$(calc "($(date +%s%N) - $began) / 1e9")
}

# contest FUNCTION...: each leaves seconds in $took. Lines of them, in this order, in $work/rounds; who begins changes. The first
# call of each does not count.
contest() {
	for who; do
		"$who"
	done
	: >"$work/rounds"
	round=0
	while [ "$round" -lt "$PAIRS" ]; do
		turn=0
		while [ "$turn" -lt $# ]; do
			n=$(((round + turn) % $# + 1))
			eval "who=\${$n}"
			"$who"
			echo "$n $took"
			turn=$((turn + 1))
		done >"$work/turns"
		sort -n "$work/turns" | awk '{ printf "%s%s", sep, $2; sep = " " } END { print "" }' >>"$work/rounds"
		round=$((round + 1))
	done
	say "$*: $(tail -n 1 "$work/rounds")"
}

load() {
	cut -d ' ' -f 1 /proc/loadavg
}

# result PART NAME VALUE UNIT BOUND TARGET [MEMBERS]: BOUND is `at least`, `at most` or `-`
result() {
	awk -v part="$1" -v name="$2" -v value="$3" -v unit="$4" -v bound="$5" -v target="$6" -v more="${7-}" -v load="$(load)" '
	BEGIN {
		printf "{\"part\":\"%s\",\"name\":\"%s\",\"value\":%.6g,\"unit\":\"%s\"", part, name, value, unit
		if (bound != "-") {
			holds = bound == "at least" ? value + 0 >= target + 0 : value + 0 <= target + 0
			printf ",\"bound\":\"%s\",\"target\":%s,\"holds\":%s", bound, target, holds ? "true" : "false"
		}
		if (more != "") printf ",%s", more
		printf ",\"load\":%s}\n", load
	}' >>"$work/results"
}

# ratio PART NAME BOUND TARGET OVER UNDER: the median over the rounds of column OVER / column UNDER
ratio() {
	awk -v over="$5" -v under="$6" '
	function sort(x, n,    i, j, t) {
		for (i = 2; i <= n; i++)
			for (j = i; j > 1 && x[j - 1] > x[j]; j--) { t = x[j]; x[j] = x[j - 1]; x[j - 1] = t }
	}
	function median(x, n) { return n % 2 ? x[(n + 1) / 2] : (x[n / 2] + x[n / 2 + 1]) / 2 }
	{ n++; a[n] = $over; b[n] = $under; r[n] = $over / $under }
	END {
		sort(a, n); sort(b, n); sort(r, n)
		printf "%.6f \"pairs\":%d,\"least\":%.4g,\"most\":%.4g,\"over\":%.6g,\"under\":%.6g\n",
			median(r, n), n, r[1], r[n], median(a, n), median(b, n)
	}' "$work/rounds" >"$work/ratio"
	read -r value members <"$work/ratio"
	result "$1" "$2" "$value" ratio "$3" "$4" "$members"
}

# ---- checkpoints and runs ----------------------------------------------------------------------------------------------

make_model() {
	[ -e "$1/model.safetensors" ] && return
	say "writing the checkpoint '$1'"
	name=$1
	shift
	rm -rf "$name.new"
	"$PYTHON" "$src/tests/make_model.py" "$@" "$name.new" || die "make_model.py failed: '$PYTHON' needs numpy"
	mv "$name.new" "$name" || exit 3
}

# The shape of Qwen3-0.6B; 64 experts of which 8 are taken; some layers of the first; layers that cost nothing.
dense() {
	make_model dense --layers "$layers" --hidden "$hidden" --heads 16 --kv 8 --head-dim "$width" --intermediate "$inner" \
		--vocab "$vocab"
}
moe() {
	make_model moe --type qwen3_moe --layers 4 --hidden "$hidden" --heads 16 --kv 4 --head-dim "$width" --experts 64 --topk 8 \
		--moe-intermediate "$expert" --vocab 32000
}
few() {
	make_model few --layers 4 --hidden "$hidden" --heads 16 --kv 8 --head-dim "$width" --intermediate "$inner" --vocab 32000
}
thin() {
	make_model thin --layers 6 --hidden 1024 --heads 2 --kv 1 --head-dim 128 --intermediate 64 --vocab 4096
}

# The same shapes for what needs no checkpoint.
configs() {
	attention="\"hidden_size\": $hidden, \"num_attention_heads\": 16, \"head_dim\": $width, \"intermediate_size\": $inner"
	rest='"rms_norm_eps": 1e-6, "rope_theta": 1000000, "max_position_embeddings": 40960'
	cat >dense.json <<-END
	{"model_type": "qwen3", $attention, $rest, "num_hidden_layers": $layers, "num_key_value_heads": 8, "vocab_size": $vocab}
	END
	cat >moe.json <<-END
	{"model_type": "qwen3_moe", $attention, $rest, "num_hidden_layers": 4, "num_key_value_heads": 4, "vocab_size": 32000,
	 "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": $expert, "norm_topk_prob": true}
	END
}

# tokens NAME MODEL ROWS LENGTHS LAYERS DTYPE SHARD: NAME.tokens, NAME.yaml
tokens() {
	"$PYTHON" "$src/tests/make_tokens.py" --model "$2" --rows "$3" --seq-length 512 --lengths "$4" --draft-layers "$5" \
		--cache-dtype "$6" --shard-size "$7" --cache-output-dir "$1.out" --recipe "$1.yaml" "$1.tokens" ||
		die "make_tokens.py failed: '$PYTHON' needs numpy and xxhash"
}

# planned NAME DTYPE [OPTION...]: NAME.plan and NAME.run of a cache that is not there
planned() {
	run=$1 dtype=$2
	shift 2
	rm -rf "$run.out" "$run.stage"
	if ! dspark-plan -q -c "$run.yaml" -t "$run.tokens" --device cpu --compute-dtype "$dtype" "$@" >"$run.plan" ||
		! dspark-load -q -s "$run.stage" "$run.plan" >"$run.run"; then
		die "cannot plan '$run'"
	fi
}

# forward NAME: runs it; shards that are there are made again, the embeddings of the cache are not
forward() {
	rm -f "$1".out/shard-*
	timed dspark-forward -q "$1.run" >"$1.log"
}

# summary NAME MEMBER: a number of the summary record
summary() {
	sed -n "/\"record\":\"summary\"/s/.*\"$2\":\\([0-9.e+-]*\\)[,}].*/\\1/p" "$1.log"
}

# The loop over layers without waiting for weights: reading rows, computing, converting and handing over states. The files are
# written behind it. The reference's time is that of the same steps; it writes nothing.
loop() {
	forward "$1"
	took=$(calc "$(summary "$1" tokens) / $(summary "$1" tokens_per_second) - $(summary "$1" 'start":[^,]*,"weights')")
}

# ---- the reference -----------------------------------------------------------------------------------------------------

# What the reference is, or nothing.
versions() {
	[ -n "$REFERENCE_PYTHON" ] && "$REFERENCE_PYTHON" - nemo-automodel torch transformers <<-'END' 2>/dev/null
	import sys
	from importlib.metadata import version
	print(", ".join(f"{name} {version(name)}" for name in sys.argv[1:]))
	END
}

# reference MODEL LAYERS: starts the server; false, and a word about it, where there is none
reference() {
	if [ -z "$(versions)" ]; then
		say "$part: skipped, REFERENCE_PYTHON names no Python with nemo-automodel"
		printf '{"part":"%s","skipped":"no reference"}\n' "$part" >>"$work/results"
		return 1
	fi
	rm -f "$work/ask" "$work/answer"
	mkfifo "$work/ask" "$work/answer" || exit 3
	"$REFERENCE_PYTHON" "$src/tests/bench/reference.py" --rows "$BENCH_ROWS" --layers "$2" "$1" \
		<"$work/ask" >"$work/answer" 2>"$work/reference.err" &
	server=$!
	exec 3>"$work/ask" 4<"$work/answer"
	if ! read -r ready <&4 || [ "$ready" != ready ]; then
		cat "$work/reference.err" >&2
		die "the reference does not start"
	fi
}

ask() {
	echo "$*" >&3
	if ! read -r took <&4; then
		tail -n 20 "$work/reference.err" >&2
		die "the reference has failed"
	fi
}

dismiss() {
	exec 3>&- 4<&-
	wait "$server"
	server=
	rm -rf ours.out
}

ref_full() { ask full fp32 head; }
ref_full_headless() { ask full fp32 headless; }
ref_quarter() { ask quarter fp32 head; }
ref_bf16() { ask full bf16 head; }
ref_bf16_headless() { ask full bf16 headless; }

# ---- parts -------------------------------------------------------------------------------------------------------------

has() {
	grep -q "^flags.* $1" /proc/cpuinfo
}

# measured ARG...: lines of the program `kernels`
measured() {
	say "kernels $*"
	"$kernels" "$@" >"$work/lines" || die "kernels $* failed"
	sed "s/}\$/,\"load\":$(load)}/" "$work/lines" >>"$work/results"
}

run_products() {
	configs
	for config in dense.json moe.json; do
		for dtype in fp32 bf16; do
			measured products -n "$PAIRS" -d "$dtype" "$config"
		done
	done
}

run_profile() {
	configs
	for dtype in fp32 bf16; do
		for length in 512 4096; do
			measured profile -n 5 -l 7 -d "$dtype" -s "$length" dense.json
		done
	done
}

run_shares() {
	configs
	for dtype in fp32 bf16; do
		for length in 512 4096; do
			"$kernels" profile -t -n 3 -l 7 -d "$dtype" -s "$length" dense.json || exit
			echo
		done
	done
}

ours() { loop ours; }
ours_without_amx() {
	isa=${ONEDNN_MAX_CPU_ISA-}
	ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16
	export ONEDNN_MAX_CPU_ISA
	loop ours
	if [ -n "$isa" ]; then ONEDNN_MAX_CPU_ISA=$isa; else unset ONEDNN_MAX_CPU_ISA; fi
}

# opponents MODEL LENGTHS LAYERS DTYPE
opponents() {
	"$1"
	reference "$1" "$3" || return
	tokens ours "$1" "$BENCH_ROWS" "$2" "$3" "$4" "$BENCH_ROWS"
	planned ours "$4"
}

run_fp32() {
	opponents dense full 5 fp32 || return 0
	contest ours ref_full ref_full_headless
	dismiss
	ratio fp32 "fp32, full rows: reference / dspark" 'at least' 1.25 2 1
	ratio fp32 "fp32, full rows: reference without its head / dspark" 'at least' 0.97 3 1
}

run_quarter() {
	opponents dense quarter 5 fp32 || return 0
	contest ours ref_quarter
	dismiss
	ratio quarter "fp32, rows 25% full: reference / dspark" 'at least' 4.5 2 1
}

run_bf16() {
	if ! has avx512_bf16; then
		say "bf16: skipped, this CPU has no bf16 products"
		printf '{"part":"bf16","skipped":"no AVX512_BF16"}\n' >>"$work/results"
		return 0
	fi
	opponents dense full 5 bf16 || return 0
	contest ours ours_without_amx ref_bf16 ref_bf16_headless ref_full
	dismiss
	ratio bf16 "bf16, full rows: reference / dspark" 'at least' 1.25 3 1
	ratio bf16 "bf16, full rows: reference without its head / dspark" - 0 4 1
	if has amx_bf16; then
		ratio bf16 "bf16 with AMX: reference in fp32, its default / dspark" 'at least' 3.5 5 1
	fi
	ratio bf16 "bf16 with AVX512_BF16 alone: reference in fp32 / dspark" 'at least' 1.5 5 2
}

run_moe() {
	for dtype in fp32 bf16; do
		opponents moe full 3 "$dtype" || return 0
		if [ "$dtype" = fp32 ]; then contest ours ref_full; else contest ours ref_bf16; fi
		dismiss
		ratio moe "64 experts, $dtype, full rows: reference / dspark" - 0 2 1
	done
}

# From the start of the process: what it took, less what it said of itself, and the start it told.
until_layer_0() {
	forward start
	took=$(calc "$took - $(summary start seconds) + $(summary start start)")
}
start_fresh() {
	rm -rf start.out
	until_layer_0
}
start_again() { until_layer_0; }
start_weights() {
	until_layer_0
	took=$(calc "$took + $(summary start 'start":[^,]*,"weights')")
}
read_and_pack() {
	timed cat dense/model.safetensors >/dev/null
	took=$(calc "$took + $("$kernels" pack -n 1 -d "$dtype" dense.json | sed -n 's/.*"value":\([0-9.e+-]*\),.*/\1/p')")
}

run_start() {
	dense
	configs
	for dtype in fp32 bf16; do
		tokens start dense 1 4 5 "$dtype" 1
		planned start "$dtype"
		contest start_fresh start_again start_weights read_and_pack
		ratio start "$dtype: start to layer 0, new cache / reading and packing" 'at most' 1.5 1 4
		ratio start "$dtype: start to layer 0, resumed / reading and packing" 'at most' 1.5 2 4
		ratio start "$dtype: the same and all weights / reading and packing" 'at most' 1.5 3 4
	done
}

run_memory() {
	dense
	for case in 'fp32 1' "fp32 $rows_in_all" 'bf16 4'; do
		dtype=${case% *} size=${case#* }
		tokens memory dense "$rows_in_all" full 5 "$dtype" "$size"
		planned memory "$dtype"
		forward memory
		plan=$(sed -n 's/.*"rank_bytes":{"weights":\([0-9]*\).*/\1/p' memory.plan)
		peak=$(summary memory peak)
		result memory "$dtype, shards of $size rows: largest memory beyond the weights" \
			"$(calc "($peak - $plan) / 1e6")" MB 'at most' 400 "\"planned\":$plan,\"peak\":$peak"
		result memory "$dtype, shards of $size rows: waiting for the writer" \
			"$(calc "$(summary memory waiting_for_writer) / $(summary memory seconds)")" 'of the run' 'at most' 0.05
		rm -rf memory.out
	done
}

copy_ours() {
	rm -rf copy.stage copy.cat
	sync
	timed dspark-load -q --copy -s copy.stage copy.plan >/dev/null
}
cat_and_sync() {
	cat dense/*.safetensors >copy.cat
	sync
}
copy_cat() {
	rm -rf copy.stage copy.cat
	sync
	timed cat_and_sync
}

run_copy() {
	dense
	tokens copy dense 1 4 5 bf16 1
	planned copy bf16
	contest copy_ours copy_cat
	rm -rf copy.stage copy.cat
	ratio copy "cat FILES >COPY; sync / dspark-load --copy" 'at least' 0.8 2 1
}

thin_cache() {
	thin
	tokens thin-cache thin $((16 * shards)) full 5 fp32 16
	planned thin-cache fp32
	forward thin-cache
	dspark-manifest merge -q thin-cache.out >/dev/null || die "cannot merge"
}
verify_ours() { timed dspark-manifest verify -q thin-cache.out >/dev/null; }
verify_xxhsum() { timed xxhsum -q -H2 thin-cache.out/*.safetensors >/dev/null; }

run_verify() {
	if ! command -v xxhsum >/dev/null; then
		say "verify: skipped, no xxhsum here (Debian: xxhash)"
		printf '{"part":"verify","skipped":"no xxhsum"}\n' >>"$work/results"
		return 0
	fi
	thin_cache
	contest verify_ours verify_xxhsum
	rm -rf thin-cache.out
	ratio verify "xxhsum -H2 / dspark-manifest verify" 'at least' 0.8 2 1
}

write_ours() {
	rm -rf write.out write.dd
	sync
	took=$("$writer" write.out write.tokens 1024 5 fp32 16) || die "the writer failed"
	took=${took% *}
}
shards_by_dd() {
	cat thin-cache.out/shard-* | dd of=write.dd bs=1M iflag=fullblock conv=fsync 2>/dev/null
}
write_dd() {
	rm -rf write.out write.dd
	sync
	timed shards_by_dd
}

run_write() {
	thin_cache
	tokens write thin $((16 * shards)) full 5 fp32 16
	contest write_ours write_dd
	rm -rf write.out write.dd thin-cache.out
	ratio write "dd conv=fsync / shards by the writer" - 0 2 1
}

# speed PART NAME ARG...: the first line that a profile gives, under another name
speed() {
	say "$*"
	sort=$1 name=$2
	shift 2
	value=$("$kernels" profile -n 3 -l 4 "$@" dense.json | sed -n '1s/.*"value":\([0-9.e+-]*\),.*/\1/p')
	result "$sort" "$name" "$value" tokens/s - 0
}

run_lengths() {
	configs
	for dtype in fp32 bf16; do
		for length in 128 256 512 1024 2048 4096; do
			speed lengths "$dtype, 4 layers, 4096 tokens in rows of $length" -d "$dtype" -s "$length"
		done
	done
}

run_rows() {
	configs
	for dtype in fp32 bf16; do
		for rows in 1 2 4 8 16; do
			speed rows "$dtype, 4 layers, $rows rows of 512" -d "$dtype" -r "$rows"
		done
	done
}

title() {
	if [ "$1" = few ]; then echo dense; else echo "64 experts"; fi
}

# Weights that stay, without the time until they are there, beside weights that come and go, all of it. Caches are dropped where
# that is allowed.
stays() { loop stays; }
streams() {
	sync
	if [ -w /proc/sys/vm/drop_caches ]; then echo 3 >/proc/sys/vm/drop_caches; fi
	forward streams
	took=$(calc "$(summary streams tokens) / $(summary streams tokens_per_second)")
}

run_stream() {
	few
	moe
	for case in 'few fp32' 'moe fp32' 'moe bf16'; do
		model=${case% *} dtype=${case#* }
		for run in stays streams; do
			tokens "$run" "$model" 32 full 3 bf16 32
		done
		planned stays "$dtype" --weights resident --window-tokens 16384
		planned streams "$dtype" --weights stream --window-tokens 16384
		contest stays streams
		rm -rf stays.out streams.out
		ratio stream "$(title "$model"), $dtype: resident / streamed, windows of 16,384 tokens" 'at least' 0.85 1 2
	done
}

# The slower of two ranks, without the time until its weights were there where they stay.
two_ranks() {
	rm -f "$1".out/shard-*
	OMP_NUM_THREADS=$half "$MPIEXEC" -n 2 dspark-forward -q "$1.run" >"$1.log" || die "two ranks failed"
	took=$(awk -v stays="$2" '
	function get(key) { return match($0, "\"" key "\":[0-9.e+-]*") ? substr($0, RSTART + length(key) + 3, RLENGTH - length(key) - 3) : 0 }
	/"record":"summary"/ {
		t = get("tokens") / get("tokens_per_second") - (stays ? get("weights") : 0)
		most = t > most ? t : most
	}
	END { printf "%.6f", most }' "$1.log")
}
ranks_stay() { two_ranks stays 1; }
ranks_gather() { two_ranks gathers 0; }
ranks_exchange() { two_ranks exchanges 0; }

run_gather() {
	if [ -z "${MPIEXEC-}" ]; then
		say "gather: skipped, this build has no MPI"
		printf '{"part":"gather","skipped":"no MPI"}\n' >>"$work/results"
		return 0
	fi
	OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none
	export OMPI_ALLOW_RUN_AS_ROOT OMPI_ALLOW_RUN_AS_ROOT_CONFIRM OMPI_MCA_rmaps_base_oversubscribe OMPI_MCA_hwloc_base_binding_policy
	half=$(((OMP_NUM_THREADS + 1) / 2))
	few
	moe
	for model in few moe; do
		for run in stays gathers exchanges; do
			tokens "$run" "$model" 32 full 3 bf16 8
		done
		planned stays fp32 --world 2 --weights resident --window-tokens 4096
		planned gathers fp32 --world 2 --weights gather --window-tokens 4096
		if [ "$model" = moe ]; then
			planned exchanges fp32 --world 2 --weights gather --window-tokens 4096 --set distributed.ep_size=2
			contest ranks_stay ranks_gather ranks_exchange
			ratio gather "64 experts, fp32, 2 ranks: resident / gathered, windows of 4,096 tokens" 'at least' 0.9 1 2
			ratio gather "64 experts, fp32, 2 ranks: resident / ep_size 2, windows of 4,096 tokens" - 0 1 3
		else
			contest ranks_stay ranks_gather
			ratio gather "dense, fp32, 2 ranks: resident / gathered, windows of 4,096 tokens" 'at least' 0.9 1 2
		fi
		rm -rf stays.out gathers.out exchanges.out
	done
}

# The widths of GLM-5.2 but for the feed-forward, which both sides share: full heads, and few.
run_sparse() {
	lengths='1024 2048 4096 8192 16384 32768' latent=512 index=128 topk=2048
	if [ -n "${BENCH_SMALL-}" ]; then lengths='40 80' latent=32 index=32 topk=50; fi
	for heads in 64 8; do
		cat >glm.json <<-END
		{"model_type": "glm_moe_dsa", "vocab_size": 1024, "num_hidden_layers": 1, "hidden_size": $((12 * latent)),
		 "num_attention_heads": $heads, "q_lora_rank": $((4 * latent)), "kv_lora_rank": $latent, "qk_nope_head_dim": $((3 * latent / 8)),
		 "qk_rope_head_dim": $((latent / 8)), "v_head_dim": $((latent / 2)), "index_n_heads": 32, "index_head_dim": $index,
		 "index_topk": $topk, "indexer_rope_interleave": true, "intermediate_size": 64, "moe_intermediate_size": 64,
		 "n_routed_experts": 8, "num_experts_per_tok": 2, "rope_theta": 8000000}
		END
		for length in $lengths; do
			measured sparse -n 3 -d bf16 -s "$length" glm.json
		done
	done
}

# A dense model's shapes, and experts with 512 rows each.
run_packed() {
	hidden=4096 inner=12288 expert=1536
	if [ -n "${BENCH_SMALL-}" ]; then hidden=64 inner=96 expert=32; fi
	for type in qwen3 qwen3_moe; do
		cat >packed.json <<-END
		{"model_type": "$type", "vocab_size": 1024, "num_hidden_layers": 1, "hidden_size": $hidden, "num_attention_heads": 32,
		 "num_key_value_heads": 8, "head_dim": $((hidden / 32)), "intermediate_size": $inner, "moe_intermediate_size": $expert,
		 "num_experts": 8, "num_experts_per_tok": 2}
		END
		measured packed -d bf16 packed.json
	done
}

# ---- all together ------------------------------------------------------------------------------------------------------

flags() {
	sed -n '/^flags/{s/.*: //;s/ /\n/g;p;q;}' /proc/cpuinfo | grep -xE 'avx2|avx512f|avx512_bf16|amx_bf16' | tr '\n' ' '
}

machine() {
	printf '{"part":"machine","cpu":"%s","isa":"%s","max_isa":"%s"' \
		"$(sed -n 's/^model name.*: //p;T;q' /proc/cpuinfo)" "$(flags)" "${ONEDNN_MAX_CPU_ISA-}"
	printf ',"cores":%s,"threads":%s,"memory_mb":%s,"kernel":"%s"' "$(getconf _NPROCESSORS_ONLN)" "$OMP_NUM_THREADS" \
		"$(awk '/MemTotal/ { print int($2 / 1024) }' /proc/meminfo)" "$(uname -sr)"
	printf ',"dspark":"%s","onednn":"%s","reference":"%s"' "$(dspark-plan --version | sed -n '1s/.* //p')" \
		"$("$kernels" onednn)" "$(versions)"
	printf ',"small":"%s","date":"%s","load":%s}\n' "${BENCH_SMALL-}" "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$(load)"
}

# The last results of other parts stay in the file.
keep() {
	touch "$json"
	grep -v "^{\"part\":\"$1\"" "$json" >"$json.new"
	cat "$work/results" >>"$json.new"
	mv "$json.new" "$json"
	cat "$work/results" >>"$work/all"
}

# table FILE [markdown]
table() {
	awk -v markdown="${2-}" '
	function get(key,    s) {
		if (!match($0, "\"" key "\":(\"[^\"]*\"|[^,}]*)")) return ""
		s = substr($0, RSTART + length(key) + 3, RLENGTH - length(key) - 3)
		gsub(/"/, "", s)
		return s
	}
	/"skipped"/ { printf "%-9s skipped: %s\n", get("part"), get("skipped"); next }
	/"part":"machine"/ {
		printf "%s, %s cores, %s threads, %s\n", get("cpu"), get("cores"), get("threads"), get("isa")
		printf "oneDNN %s; %s; load %s\n", get("onednn"), get("reference"), get("load")
		if (markdown) printf "\n| | | wanted |\n| --- | --- | --- |\n"
		next
	}
	{
		wanted = get("bound")
		if (wanted != "") wanted = wanted " " get("target")
		value = get("value") + 0
		number = sprintf(value < 1000 ? "%.3g" : "%.0f", value)
		if (markdown) {
			unit = get("unit") == "ratio" ? "" : " " get("unit")
			printf "| %s | %s%s | %s |\n", get("name"), number, unit, wanted
			next
		}
		if (wanted != "") wanted = wanted ": " (get("holds") == "true" ? "holds" : "MISSED")
		printf "%-9s %-66s %9s %-10s %s\n", get("part"), get("name"), number, get("unit"), wanted
	}' "$1"
}

parts='products profile fp32 quarter bf16 moe stream gather start memory copy verify write lengths rows packed sparse'
case $* in
shares)
	run_shares
	exit
	;;
table | markdown)
	for part in machine $parts; do
		grep "^{\"part\":\"$part\"" "$json"
	done >"$work/all"
	table "$work/all" "${1#table}"
	exit
	;;
esac
# shellcheck disable=SC2086 # names without blanks
if [ $# -eq 0 ]; then set -- $parts; fi
for part; do
	command -v "run_$part" >/dev/null || die "there is no part '$part'"
done
machine >"$work/results"
keep machine
for part; do
	: >"$work/results"
	began_part=$(date +%s)
	"run_$part"
	keep "$part"
	say "$part took $(($(date +%s) - began_part)) s"
done
table "$work/all"
