#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Plans for CUDA, made where there is no device, and what refuses to run them there. The kernels themselves are run on the
# host by tests/cuda/t_* and tests/golden_cuda.t.
# shellcheck source=tests/tap.sh
. "${top_srcdir:?run it by make check}/tests/tap.sh"

cp -R "$top_srcdir/examples/quickstart" "$tmp/q" || exit 99
chmod -R u+w "$tmp/q"
cd "$tmp/q" || exit 99
CUDA_VISIBLE_DEVICES=	# hides a device that is here
export CUDA_VISIBLE_DEVICES

# plan OUT OPTION...
plan() {
	out=$1
	shift
	dspark-plan -c recipe.yaml -t tokens.safetensors "$@" >"$out" 2>err
}

# has FILE REGEX...: its plan record matches all
has() {
	file=$1
	shift
	for what; do
		head -n 1 "$file" | grep -q -e "$what" || return
	done
}

# refused REGEX COMMAND...: exit 1, in these words
refused() {
	words=$1
	shift
	"$@" >out.log 2>err
	[ $? -eq 1 ] && grep -q -e "$words" err
}

# number NAME FILE: the first member NAME of its plan record
number() {
	head -n 1 "$2" | sed -n "s/.*\"$1\":\([0-9]*\).*/\1/p"
}

check "a plan for CUDA needs no device" plan cuda --device cuda
cp err err.cuda
check "it computes in bf16, and the identity says so" has cuda '"device":"cuda"' '"backend":"cuda"' '"compute_dtype":"bf16"'
check "in fp32 where asked to" plan f32 --device cuda --compute-dtype fp32
check "and the identity says so too" has f32 '"backend":"cuda"' '"compute_dtype":"fp32"'
check "on a CPU it is fp32" plan cpu --device cpu
check "with the host's memory alone" sh -c 'head -n 1 cpu | grep -v -q "\"own\"\|host_weights"'
check "device and host memory are told apart" has cuda '"own":[1-9]' '"host_weights":0' '"host":{"held":0,"working":0,"buffers":[1-9]'
check "both are said" grep -q "host memory of a rank" err.cuda
check "windows are larger than a CPU's" [ "$(number window_tokens cuda)" -gt "$(number window_tokens cpu)" ]
check "nccl between ranks means CUDA" plan ranks --world 2 --set dist_env.backend=nccl
check "in the plan" has ranks '"device":"cuda"'
check "but not where a CPU is asked for" plan asked --world 2 --set dist_env.backend=nccl --device cpu
check "in the plan" has asked '"device":"cpu"'
check "nor for one rank without a device" plan one --set dist_env.backend=nccl
check "in the plan of that" has one '"device":"cpu"'
check "a share of what is gathered waits in host memory" plan gather --device cuda --world 2 --weights gather
check "and is counted there" has gather '"weights":"gather","ranks":\[0,1\][^}]*"host":{"held":[1-9]'

# ---- the memory of a device ----
own=$(number own cuda)
check "less than CUDA takes is refused" refused 'the device for itself' plan none --device cuda --memory "$own"
plan wide --device cuda --weights stream
check "a window takes what is there" plan narrow --device cuda --weights stream --memory $((own + 6000000))
check "and is smaller where that is less" [ "$(number window_tokens narrow)" -lt "$(number window_tokens wide)" ]
check "nothing is spilled: a device reaches no files" has narrow '"spill":false'
check "not even where nothing else would do" refused 'no --weights fits' plan none --device cuda --weights stream --memory $((own + 500000))

# ---- forward without a device ----
dspark-load -q cuda >run 2>/dev/null
check "forward says what it lacks" refused "'cuda' is not in this build\|no CUDA device" dspark-forward -q run
check "and has touched nothing" [ ! -e out ]

# ---- the check of a real device ----
asks() {
	"$@" >out.log 2>err
	[ $? -eq 2 ] && grep -q usage err
}
check "check-gpu.sh takes no unknown part" asks sh "$top_srcdir/tests/check-gpu.sh" everything
check "nor an unknown option" asks sh "$top_srcdir/tests/check-gpu.sh" --what
printf '#!/bin/sh\nexit 9\n' >nvidia-smi
chmod +x nvidia-smi
check "without a device it says so" refused 'no CUDA device here' env PATH="$tmp/q:$PATH" sh "$top_srcdir/tests/check-gpu.sh" verbs
done_testing
