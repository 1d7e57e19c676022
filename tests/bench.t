#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The measurements of `make bench` and `make profile` run, on sizes that say nothing about speed, and their lines can be read.
# shellcheck source=tests/tap.sh
. "${top_srcdir:?run it by make check}/tests/tap.sh"

kernels=${top_builddir:?}/tests/bench/kernels
cd "$tmp" || exit 99

# model FILE TYPE MORE: a small config.json; no checkpoint belongs to it
model() {
	cat >"$1" <<-END
	{"model_type": "$2", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
	 "head_dim": 32, "intermediate_size": 96, "vocab_size": 200, $3 "rms_norm_eps": 1e-6}
	END
}
model dense.json qwen3 ''
model moe.json qwen3_moe '"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48,'

# numbers FILE LINES: so many lines at least, each a result with a name and a finite value above 0
numbers() {
	cat "$1"
	awk -v least="$2" '
		!/^\{"part":"[a-z]+","name":"[^"]+","value":[0-9][^,]*,"unit":"[^"]+".*\}$/ { bad++ }
		{ sub(/.*"value":/, ""); if (!($0 + 0 > 0)) bad++ }
		END { exit bad || NR < least }' "$1"
}

# measured LINES ARG...
measured() {
	least=$1
	shift
	"$kernels" "$@" >out || return
	numbers out "$least"
}

for dtype in fp32 bf16; do
	for target in dense moe; do
		check "profile, $dtype, $target" measured 5 profile -n 1 -s 40 -r 2 -d "$dtype" $target.json
		if grep -q 'HAVE_ONEDNN 1' "$top_builddir/config.h"; then
			check "products, $dtype, $target" measured 5 products -n 1 -m 40 -d "$dtype" $target.json
		fi
	done
done
for dtype in fp32 bf16; do
	for target in dense moe; do
		check "packed, $dtype, $target" measured 6 packed -n 1 -m 40 -d "$dtype" $target.json
	done
done
cat >glm.json <<-END
	{"model_type": "glm_moe_dsa", "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "q_lora_rank": 48,
	 "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 32, "index_n_heads": 8, "index_head_dim": 32,
	 "index_topk": 50, "intermediate_size": 96, "moe_intermediate_size": 20, "n_routed_experts": 12, "num_experts_per_tok": 3,
	 "rope_theta": 10000}
END
for dtype in fp32 bf16; do
	check "sparse, $dtype, all keys" measured 1 sparse -n 1 -s 40 -d "$dtype" glm.json
	check "sparse, $dtype, chosen keys" measured 1 sparse -n 1 -s 90 -d "$dtype" glm.json
	check "of at most index_topk keys" grep '"most_keys":50,' out
done
if need_python "the lines are JSON" json; then
	check "the lines are JSON" "$PYTHON" -c 'import json, sys
for line in open("out"): json.loads(line)'
fi
# One part of bench.sh from checkpoint to table, in a round that says nothing.
bench() {
	BENCH_SMALL=1 PAIRS=1 BENCH_DIR=$tmp/bench sh "$top_srcdir/tests/bench/bench.sh" start >out || return
	grep '^{"part":"start"' bench/bench.json >lines
	numbers lines 6 && [ "$(grep -c '^start ' out)" -eq 6 ]
}
if need_python "bench.sh" numpy,xxhash; then
	check "bench.sh" bench
fi

table() {
	"$kernels" profile -t -n 1 -s 40 -r 1 dense.json >out && grep "^matmul " out
}
check "a table" table
done_testing
