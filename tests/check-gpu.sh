#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What only a GPU can tell: whether the kernels are right on it, and how fast they are. Eight minutes on a fresh machine.
#
#	check-gpu.sh [-b BUILD] [-o DIR] [PART...]
#
# PARTs, all by default, in this order:
#	code		tensor-core instructions and spilled registers of each kernel (needs no GPU)
#	verbs		every verb against ref
#	golden		golden cases, fp32 and bf16 (Python with numpy and safetensors)
#	memcheck	compute-sanitizer on the verbs
#	dense, moe	a target of the shape of Qwen3-8B, and one of 256 experts, random weights: speed (Python with numpy and xxhash)
#	torch		the same target by transformers, one row at a time (Python with torch and transformers)
# Without -b it builds in BUILD, build-gpu by default, for the device that is here. DEPS=DIR holds .deb packages of libraries, which are
# unpacked beside the build where a machine cannot install any. DIR (BUILD/check-gpu) gets logs and table; TMPDIR needs 40 GB.
# SECONDS_MOST (460), PYTHON (python3) and PEAK (dense bf16 TFLOP/s, by default what the device's name says) may be set.
#
# Exit: 0 all passed, 1 something failed or there is no GPU, 2 usage, 3 cannot build.
set -u
LC_ALL=C
export LC_ALL
src=$(cd "$(dirname "$0")/.." && pwd) || exit 3
started=$(date +%s)
: "${SECONDS_MOST:=460}" "${PYTHON:=python3}" "${PEAK:=}" "${DEPS:=}" "${TMPDIR:=/tmp}"
build='' out=''

usage() {
	echo "usage: check-gpu.sh [-b BUILD] [-o DIR] [code|verbs|golden|memcheck|dense|moe|torch]..." >&2
	exit 2
}

while getopts b:o: opt; do
	case $opt in
	b) build=$OPTARG ;;
	o) out=$OPTARG ;;
	*) usage ;;
	esac
done
shift $((OPTIND - 1))
for part; do
	case $part in
	code | verbs | golden | memcheck | dense | moe | torch) ;;
	*) usage ;;
	esac
done
parts="${*:-code verbs golden memcheck dense moe torch}"

die() {
	code=$1
	shift
	echo "check-gpu.sh: $*" >&2
	exit "$code"
}

left() {
	echo $((SECONDS_MOST - $(date +%s) + started))
}

say() {
	printf '\n==== [%3d s] %s\n' $(($(date +%s) - started)) "$*"
}

# limit SECONDS: no more than what is left, at least one
limit() {
	l=$(left)
	if [ "$1" -lt "$l" ]; then l=$1; fi
	if [ "$l" -lt 1 ]; then l=1; fi
	echo "$l"
}

# row WHAT VALUE: a line of the table
row() {
	printf '%-58s %s\n' "$1" "$2" >>"$out/table"
}

failed=0
result() {
	row "$1" "$2"
	case $2 in FAILED*) failed=$((failed + 1)) ;; esac
}

# ---- the device ----
gpu=no
query() {
	nvidia-smi --query-gpu="$1" --format=csv,noheader,nounits 2>/dev/null | head -n 1 | sed 's/^ *//; s/ *$//'
}
device=$(query name)
if [ -n "$device" ]; then gpu=yes; fi
if [ "$gpu" = no ] && [ "$parts" != code ]; then
	die 1 "no CUDA device here (nvidia-smi names none): only the part 'code' runs without one"
fi
if [ -z "$PEAK" ]; then
	case $device in
	*H100* | *H200*) PEAK=989 ;;
	*B200*) PEAK=2250 ;;
	*A100* | *A800*) PEAK=312 ;;
	esac
fi

# ---- the build ----
libraries() {
	root=$build/deps
	mkdir -p "$root"
	for deb in "$DEPS"/*.deb; do
		dpkg-deb -x "$deb" "$root" || return
	done
	libs=$(find "$root" -name '*.so*' -exec dirname '{}' + | sort -u)
	pc=$(find "$root" -name '*.pc' -exec dirname '{}' + | sort -u | paste -s -d: -)
	PKG_CONFIG_PATH=$pc PKG_CONFIG_SYSROOT_DIR=$root
	LDFLAGS=$(for l in $libs; do printf -- '-L%s -Wl,-rpath,%s ' "$l" "$l"; done)
	CPPFLAGS="-isystem $root/usr/include $(find "$root/usr/include" -mindepth 1 -maxdepth 1 -name '*-linux-gnu*' -printf '-isystem %p ' 2>/dev/null)"
	export PKG_CONFIG_PATH PKG_CONFIG_SYSROOT_DIR LDFLAGS CPPFLAGS
}

make_build() {
	build=$src/build-gpu
	mkdir -p "$build" && cd "$build" || return
	if [ -n "$DEPS" ]; then libraries || return; fi
	if [ ! -x "$src/configure" ]; then (cd "$src" && ./bootstrap) || return; fi
	capability=$(query compute_cap | tr -d .)
	if [ "$capability" = 90 ]; then capability=90a; fi
	"$src/configure" -q --with-cuda --without-mpi PYTHON="$PYTHON" CUDA_ARCH="$capability" || return
	jobs=$(getconf _NPROCESSORS_ONLN)
	make -s -j "$jobs" all && make -s -j "$jobs" tests/t_verbs tests/t_sparse tests/t_quant tests/t_parts
}

if [ -z "$build" ]; then
	build=$src/build-gpu
	mkdir -p "$build" || exit 3
	say "building in $build"
	(make_build) >"$build/check-gpu.log" 2>&1 || {
		tail -n 60 "$build/check-gpu.log"
		die 3 "the build failed, see $build/check-gpu.log"
	}
fi
build=$(cd "$build" && pwd) || exit 3
if [ ! -x "$build/dspark-forward" ] || [ ! -f "$build/libcuda.a" ]; then
	die 3 "'$build' holds no build with CUDA: make it with ./configure --with-cuda"
fi
out=${out:-$build/check-gpu}
mkdir -p "$out" && out=$(cd "$out" && pwd) && : >"$out/table" || exit 3
PATH=$build:$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
top_srcdir=$src top_builddir=$build
export PATH PYTHON top_srcdir top_builddir
tmp=$(mktemp -d "$TMPDIR/dspark-gpu.XXXXXX") || exit 3
trap 'rm -rf "$tmp"' EXIT
trap 'exit 3' HUP INT TERM
if [ "$gpu" = yes ]; then row "device" "$device, $(query memory.total) MiB, driver $(query driver_version)"; fi

python_has() {
	"$PYTHON" -c "import $1" 2>/dev/null
}

# ---- what the compiler made ----
part_code() {
	command -v cuobjdump >/dev/null || {
		result "code" "no cuobjdump here"
		return
	}
	for o in "$build"/kernels/cuda/*.o; do
		name=${o##*/}
		cuobjdump -sass "$o" 2>/dev/null >"$tmp/sass"
		tensor=$(grep -c -E '(HMMA|HGMMA|UTCHMMA)' "$tmp/sass")
		cuobjdump -res-usage "$o" >"$out/${name%.o}.usage" 2>&1
		spills=$(grep -o 'LOCAL:[0-9]*' "$out/${name%.o}.usage" | grep -c -v 'LOCAL:0$')
		stacks=$(grep -o 'STACK:[0-9]*' "$out/${name%.o}.usage" | grep -c -v 'STACK:0$')
		registers=$(grep -o 'REG:[0-9]*' "$out/${name%.o}.usage" | cut -d: -f2 | sort -n | tail -n 1)
		row "code: ${name%.o}: tensor-core instructions" \
			"$tensor; ${registers:-0} registers at most; $spills functions with local memory, $stacks with a stack"
		case ${name%.o} in
		attention | experts | attention_at)
			if [ "$tensor" -eq 0 ]; then result "code: ${name%.o}" "FAILED: no tensor-core instruction"; fi
			;;
		esac
	done
}

# ---- verbs ----
count() {
	grep -c "$1" "$2" || :
}

# tap NAME SECONDS COMMAND...: a test program's verdict
tap() {
	what=$1 seconds=$(limit "$2") log=$out/$(echo "$1" | tr ' :/' '___').log
	shift 2
	timeout "$seconds" "$@" >"$log" 2>&1
	status=$?
	good=$(count '^ok' "$log")
	if [ "$status" -eq 0 ]; then
		result "$what" "$good passed, $(count '# SKIP' "$log") of them skipped"
	elif [ "$status" -eq 124 ]; then
		result "$what" "$(if grep -q -E '^not ok|ERROR SUMMARY: [1-9]' "$log"; then echo 'FAILED, '; fi)$good passed in $seconds s, not finished"
	else
		result "$what" "FAILED ($status): $good passed, see $log"
		grep -A 3 -E '^(not ok|Bail)|=========' "$log" | head -n 20
	fi
}

part_verbs() {
	for t in t_verbs t_sparse t_quant t_parts; do
		if [ ! -x "$build/tests/$t" ]; then (cd "$build" && make -s "tests/$t") >>"$out/make.log" 2>&1; fi
		tap "verbs: $t" 60 env BED_BACKEND=cuda "$build/tests/$t"
	done
}

part_golden() {
	if ! python_has 'numpy, safetensors'; then
		result "golden" "no Python with numpy and safetensors (PYTHON)"
		return
	fi
	tap golden 90 env DSPARK_DEVICE=cuda DSPARK_TEST_PYTHON=required sh "$src/tests/golden.t"
}

part_memcheck() {
	if ! command -v compute-sanitizer >/dev/null; then
		result "memcheck" "no compute-sanitizer here"
		return
	fi
	for tool in memcheck racecheck; do
		for t in t_verbs t_sparse; do
			tap "compute-sanitizer $tool: $t" 25 env BED_BACKEND=cuda compute-sanitizer --tool "$tool" --error-exitcode 9 "$build/tests/$t"
		done
	done
}

# ---- speed ----
# member NAME FILE: a number of the summary
member() {
	sed -n "s/.*\"$1\":\([0-9.e+-]*\).*/\1/p" "$2" | tail -n 1
}

# busy NAME FILE: a number of its member "busy"
busy() {
	sed -n 's/.*"busy":{\([^}]*\)}.*/\1/p' "$2" | tail -n 1 | tr , '\n' | sed -n "s/\"$1\"://p"
}

calc() {
	awk "BEGIN { printf \"$1\", $2 }"
}

# pipeline MODEL_OPTION...: target, tokens, plan, stage, and the forward of $rows rows, which captures layers $ids
pipeline() {
	timeout "$(limit 90)" "$PYTHON" "$src/tests/gpu/model.py" "$@" --files 16 model >&2 &&
		"$PYTHON" "$src/tests/make_tokens.py" --model model --rows "$rows" --seq-length 4096 --lengths full --recipe recipe.yaml \
			tokens.safetensors >&2 &&
		dspark-plan -v -c recipe.yaml -t tokens.safetensors --device cuda --set recipe_args.cache_output_dir=out \
			--set recipe_args.cache_dtype=bf16 --set "recipe_args.target_layer_ids=[$ids]" --set recipe_args.cache_shard_size=8 >plan &&
		dspark-load -q plan >run &&
		timeout "$(limit 120)" dspark-forward --progress line run >"$out/$name.json"
}

# speed NAME FLOPS_A_TOKEN LAYERS MODEL_OPTION...: lines of the table
speed() {
	name=$1 flops=$2 ids=$3
	shift 3
	if ! python_has 'numpy, xxhash'; then
		result "$name" "no Python with numpy and xxhash (PYTHON)"
		return 1
	fi
	dir=$tmp/$name
	mkdir -p "$dir" && cd "$dir" || return
	if ! pipeline "$@" 2>"$out/$name.log"; then
		result "$name" "FAILED, see $out/$name.log"
		tail -n 5 "$out/$name.log"
		rm -rf "$dir"
		return 1
	fi
	s=$out/$name.summary
	grep '"record":"summary"' "$out/$name.json" >"$s"
	tokens=$(member tokens "$s") compute=$(busy compute "$s")
	rate=$(calc %.0f "$tokens / $compute")
	row "$name: tokens a second of the device, of the forward" "$rate, $(calc %.0f "$(member tokens_per_second "$s")")"
	if [ -n "$PEAK" ]; then row "$name: MFU" "$(calc '%.1f %%' "100 * $rate * $flops / ($PEAK * 1e12)") of $PEAK TFLOP/s (wanted: 55 %)"; fi
	row "$name: GB/s written" "$(calc %.2f "$(member bytes "$s") / 1e9 / ($(member seconds "$s") - $(member start "$s"))")"
	row "$name: seconds until layer 0, in all" "$(calc %.1f "$(member start "$s")"), $(calc %.1f "$(member seconds "$s")")"
	row "$name: waiting for the writer" "$(calc '%.1f %%' "100 * $(member waiting_for_writer "$s") / $(member seconds "$s")") (wanted: 5 %)"
	for stage in compute upload gather exchange download writer; do
		row "$name: seconds at work: $stage" "$(calc %.2f "$(busy $stage "$s")")"
	done
	rm -rf out
	return 0
}

# Products: 2 flops a weight and token, the embedding aside. Attention: 4 * heads * width flops a pair, half of the pairs seen.
flops() { # layers hidden heads kv width inner length
	awk -v l="$1" -v h="$2" -v q="$3" -v k="$4" -v w="$5" -v i="$6" -v s="$7" \
		'BEGIN { printf "%.0f", l * (2 * (h * w * (2 * q + 2 * k) + 3 * h * i) + 2 * q * w * s) }'
}

part_dense() {
	rows=64
	speed dense "$(flops 36 4096 32 8 128 12288 4096)" 1,9,17,25,33 --layers 36 --hidden 4096 --heads 32 --kv 8 --head-dim 128 \
		--intermediate 12288 --vocab 151936 --untied
	case " $parts " in *' torch '*) ;; *) rm -rf "$tmp/dense" ;; esac
}

part_moe() {
	rows=64
	speed moe "$(flops 4 2048 32 4 128 6144 4096)" 0,1,2 --type qwen3_moe --layers 4 --hidden 2048 --heads 32 --kv 4 --head-dim 128 \
		--experts 256 --topk 8 --moe-intermediate 768 --vocab 151936
	rm -rf "$tmp/moe"
}

part_torch() {
	if ! python_has 'torch, transformers'; then
		result "torch" "no Python with torch and transformers (PYTHON)"
		return
	fi
	if [ ! -d "$tmp/dense/model" ]; then
		result "torch" "no target: part 'dense' makes it"
		return
	fi
	theirs=$(timeout "$(limit 90)" "$PYTHON" "$src/tests/gpu/torch_forward.py" "$tmp/dense/model" 10 4096 1,9,17,25,33 2>"$out/torch.log") || {
		result "torch" "no answer, see $out/torch.log"
		return
	}
	row "dense: transformers, tokens a second" "$theirs"
	row "dense: dspark / transformers" "$(calc %.2f "$rate / $theirs") (wanted: 1.3)"
	rm -rf "$tmp/dense"
}

for part in $parts; do
	say "$part"
	if [ "$(left)" -lt 5 ]; then
		result "$part" "not run: $SECONDS_MOST seconds are over"
		continue
	fi
	"part_$part"
done
say "done"
cat "$out/table"
if [ "$failed" -ne 0 ]; then die 1 "$failed of the lines above failed; logs are in $out"; fi
