#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write a published model as a header-only checkpoint: all that a plan needs, none of the weights.

    headers.py MODEL DIR    config.json, and safetensors files whose headers name every tensor; the
                            data behind a header is one hole
    headers.py MODEL        writes nothing, counts only
    headers.py --list       the models

Prints one line of JSON: `tensors`, `parameters` and `bytes` of all of them, `files`, and `skipped`:
what a checkpoint holds and the forward never looks at, as [name in the table, tensors, parameters,
bytes];
`parameters` are the numbers of all tensors, whatever they are stored as; scales are none.
`published`: what is published, with the digits that are known: `tensors`, `files`, `G` parameters
and `GB` in 10^9; `uG` and `uGB` are of all that is not skipped, `+GB` is of what is.

Exit 77: the file system keeps no holes, or not such long files. DIR must be new or empty.

The tables below say what lies in the published files, not what this program's models read. A family
is a table of tensors, a table of models, and one function from a row of the latter to config.json
and to the names that the former uses.

    name     {layer} and {expert} are numbers; {a,b} stands for a and for b
    where    `once`, `all` layers, or a name that the function gives: layers, or yes or no
    shape    separated by commas; arithmetic over the function's names, ceil(a, b) rounds up
    dtype    as safetensors spells it; `q8` is BF16 or, where the function's name `q8` is a dtype,
             F8_E4M3 beside scales of that dtype for blocks of 128 x 128, named NAME_scale_inv
    skipped  the word, where the forward does not look at the tensor, as it never does at layers
             from `layers` on
"""

import argparse
import errno
import itertools
import json
import math
import os
import re
import struct
import sys

BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "U8": 1, "I32": 4, "I64": 8}
SHARD = 5 << 30  # bytes of a file at most, if it holds more than one tensor

SCALE = "_scale_inv"

# ---- Qwen3, Qwen3-MoE ----------------------------------------------------------------------------

QWEN3_TENSORS = """
model.embed_tokens.weight                                       once  V,H      BF16
model.layers.{layer}.self_attn.q_proj.weight                    all   nq*D,H   q8
model.layers.{layer}.self_attn.{k,v}_proj.weight                all   nkv*D,H  q8
model.layers.{layer}.self_attn.o_proj.weight                    all   H,nq*D   q8
model.layers.{layer}.self_attn.{q,k}_norm.weight                all   D        BF16
model.layers.{layer}.mlp.{gate,up}_proj.weight                  dense I,H      q8
model.layers.{layer}.mlp.down_proj.weight                       dense H,I      q8
model.layers.{layer}.mlp.gate.weight                            moe   E,H      BF16
model.layers.{layer}.mlp.experts.{expert}.{gate,up}_proj.weight moe   Ie,H     q8
model.layers.{layer}.mlp.experts.{expert}.down_proj.weight      moe   H,Ie     q8
model.layers.{layer}.{input,post_attention}_layernorm.weight    all   H        BF16
model.norm.weight                                               once  H        BF16
lm_head.weight                                                  head  V,H      BF16
lm_head.weight                                                  copy  V,H      BF16 skipped
"""

# head: own, copy (tied, but stored) or none (tied). I of a MoE model names no tensor.
QWEN3_MODELS = """
model                  layers H    nq nkv I     experts Ie   head  uG     uGB   +GB
Qwen3-0.6B             28     1024 16 8   3072  0       0    copy  0.596  1.19  0.31
Qwen3-1.7B             28     2048 16 8   6144  0       0    copy  1.72   3.44  0.62
Qwen3-4B               36     2560 32 8   9728  0       0    none  4.02   8.04  0
Qwen3-8B               36     4096 32 8   12288 0       0    own   8.19   16.4  0
Qwen3-14B              40     5120 40 8   17408 0       0    own   14.8   29.5  0
Qwen3-32B              64     5120 64 8   25600 0       0    own   32.8   65.5  0
Qwen3-30B-A3B          48     2048 32 4   6144  128     768  own   30.5   61.1  0
Qwen3-235B-A22B        94     4096 64 4   12288 128     1536 own   235    470   0
Qwen3-Coder-480B-A35B  62     6144 96 8   8192  160     2560 own   480    960   0
Qwen3-8B-FP8           36     4096 32 8   12288 0       0    own   8.19   -     0
Qwen3-30B-A3B-FP8      48     2048 32 4   6144  128     768  own   30.5   -     0
"""


def fp8_config(plain):
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": plain,
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }


def qwen3(m):
    layers, experts = int(m["layers"]), int(m["experts"])
    coder = m["model"].startswith("Qwen3-Coder")
    config = {
        "architectures": ["Qwen3MoeForCausalLM" if experts else "Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": int(m["H"]),
        "initializer_range": 0.02,
        "intermediate_size": int(m["I"]),
        "max_position_embeddings": 262144 if coder else 40960,
        "max_window_layers": layers,
        "model_type": "qwen3_moe" if experts else "qwen3",
        "num_attention_heads": int(m["nq"]),
        "num_hidden_layers": layers,
        "num_key_value_heads": int(m["nkv"]),
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000000 if coder else 1000000,
        "sliding_window": None,
        "tie_word_embeddings": m["head"] != "own",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    if experts:
        config.update(
            decoder_sparse_step=1,
            mlp_only_layers=[],
            moe_intermediate_size=int(m["Ie"]),
            norm_topk_prob=True,
            num_experts=experts,
            num_experts_per_tok=8,
            output_router_logits=False,
            router_aux_loss_coef=0.001,
        )
    q8 = "BF16" if m["model"].endswith("-FP8") else None
    if q8:
        config["quantization_config"] = fp8_config(["lm_head", "model.layers.0.input_layernorm"])
    names = {key: int(m[key]) for key in ("H", "nq", "nkv", "I", "Ie")}
    every = range(layers)
    names.update(V=151936, D=128, E=experts, all=every, layers=layers, q8=q8)
    names.update(moe=every if experts else [], dense=[] if experts else every)
    names.update(head=m["head"] == "own", copy=m["head"] == "copy")
    return config, names


# ---- GLM-5, 5.1, 5.2 -----------------------------------------------------------------------------

GLM_TENSORS = """
model.embed_tokens.weight                                       once  V,H             BF16
model.layers.{layer}.{input,post_attention}_layernorm.weight    all   H               BF16
model.layers.{layer}.self_attn.q_a_proj.weight                  all   Q,H             q8
model.layers.{layer}.self_attn.q_a_layernorm.weight             all   Q               BF16
model.layers.{layer}.self_attn.q_b_proj.weight                  all   nq*(nope+rot),Q q8
model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight        all   C+rot,H         q8
model.layers.{layer}.self_attn.kv_a_layernorm.weight            all   C               BF16
model.layers.{layer}.self_attn.kv_b_proj.weight                 all   nq*(nope+Dv),C  q8
model.layers.{layer}.self_attn.o_proj.weight                    all   H,nq*Dv         q8
model.layers.{layer}.self_attn.indexer.wq_b.weight              full  ih*Di,Q         q8
model.layers.{layer}.self_attn.indexer.wk.weight                full  Di,H            q8
model.layers.{layer}.self_attn.indexer.k_norm.{weight,bias}     full  Di              BF16
model.layers.{layer}.self_attn.indexer.weights_proj.weight      full  ih,H            BF16
model.layers.{layer}.mlp.{gate,up}_proj.weight                  dense I,H             q8
model.layers.{layer}.mlp.down_proj.weight                       dense H,I             q8
model.layers.{layer}.mlp.gate.weight                            moe   E,H             BF16
model.layers.{layer}.mlp.gate.e_score_correction_bias           moe   E               F32
model.layers.{layer}.mlp.experts.{expert}.{gate,up}_proj.weight moe   Ie,H            q8
model.layers.{layer}.mlp.experts.{expert}.down_proj.weight      moe   H,Ie            q8
model.layers.{layer}.mlp.shared_experts.{gate,up}_proj.weight   moe   Ie,H            q8
model.layers.{layer}.mlp.shared_experts.down_proj.weight        moe   H,Ie            q8
model.layers.{layer}.eh_proj.weight                             mtp   H,2*H           BF16
model.layers.{layer}.{e,h}norm.weight                           mtp   H               BF16
model.layers.{layer}.shared_head.norm.weight                    mtp   H               BF16
model.norm.weight                                               once  H               BF16
lm_head.weight                                                  once  V,H             BF16
"""

# indexer: in all layers, or in some, which the others share. GLM-5.1 is GLM-5 with other weights.
GLM_MODELS = """
model        indexer q8 theta   positions tensors files G      uG     GB
GLM-5        all     0  1000000 202752    -       -     -      744    -
GLM-5.2      some    0  8000000 1048576   59585   -     753.33 743.38 1506.66
GLM-5.2-FP8  some    1  8000000 1048576   118629  141   753.33 743.38 755.62
"""


def glm(m):
    layers, dense, heads, q8 = 78, 3, 64, "F32" if m["q8"] == "1" else None
    every = range(layers + 1)  # the last predicts a second token
    full = [i for i in every if m["indexer"] == "all" or i in (0, layers) or i % 4 == 2 or i == 1]
    config = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "eos_token_id": [154820, 154827, 154829],
        "ep_size": 1,
        "first_k_dense_replace": dense,
        "head_dim": 192 if m["indexer"] == "some" else 64,
        "hidden_act": "silu",
        "hidden_size": 6144,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "index_topk": 2048,
        "indexer_rope_interleave": True,
        "initializer_range": 0.02,
        "intermediate_size": 12288,
        "kv_lora_rank": 512,
        "max_position_embeddings": int(m["positions"]),
        "mlp_layer_types": ["dense" if i < dense else "sparse" for i in range(layers)],
        "model_type": "glm_moe_dsa",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": heads,
        "num_experts_per_tok": 8,
        "num_hidden_layers": layers,
        "num_key_value_heads": heads,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 154820,
        "pretraining_tp": 1,
        "q_lora_rank": 2048,
        "qk_head_dim": 256,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": int(m["theta"]), "rope_type": "default"},
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_cache": True,
        "v_head_dim": 256,
        "vocab_size": 154880,
    }
    if m["indexer"] == "some":
        types = ["full" if i in full else "shared" for i in range(layers)]
        config.update(indexer_types=types, index_share_for_mtp_iteration=True)
        config.update(index_topk_freq=4, index_topk_pattern=None, index_skip_topk_offset=3)
    if q8:
        config["quantization_config"] = fp8_config(["lm_head", "model.embed_tokens"])
    names = dict(H=6144, V=154880, Q=2048, C=512, nq=heads, nope=192, rot=64, Dv=256, ih=32, Di=128)
    names.update(I=12288, Ie=2048, E=256, q8=q8, all=every, layers=layers, full=full)
    names.update(dense=every[:dense], moe=every[dense:], mtp=every[layers:])
    return config, names


FAMILIES = [(qwen3, QWEN3_TENSORS, QWEN3_MODELS), (glm, GLM_TENSORS, GLM_MODELS)]

# ---- tables to tensors ---------------------------------------------------------------------------


def models(text):
    """The rows of a table of models, each a dictionary."""
    head, *rows = (line.split() for line in text.strip().splitlines())
    return [dict(zip(head, row)) for row in rows]


def alternatives(name):
    """"x{a,b}y" as xay, xby."""
    m = re.search(r"\{([^{}]*,[^{}]*)\}", name)
    if not m:
        return [name]
    before, after = name[: m.start()], name[m.end() :]
    return [n for a in m.group(1).split(",") for n in alternatives(before + a + after)]


def ceil(a, b):
    return -(-a // b)


def rows(text, names):
    """(line's name, name, where, shape, dtype, skipped) of a table of tensors."""
    arithmetic = {"__builtins__": {}, "ceil": ceil, **names}
    for line in text.strip().splitlines():
        name, where, shape, dtype, *skipped = line.split()
        if skipped not in ([], ["skipped"]):
            sys.exit(f"headers.py: '{line}' ends in something else than 'skipped'")
        if dtype not in BYTES and dtype != "q8":
            sys.exit(f"headers.py: '{line}' has a dtype that is not known")
        sizes = eval(f"[{shape}]", arithmetic)  # noqa: S307, a table of this file
        scales = [ceil(n, 128) for n in sizes] if dtype == "q8" and names["q8"] else None
        dtype = dtype if dtype != "q8" else "F8_E4M3" if scales else "BF16"
        for n in alternatives(name):
            yield name, n, where, sizes, dtype, bool(skipped)
            if scales:
                yield name + SCALE, n + SCALE, where, scales, names["q8"], bool(skipped)


def tensors(text, names):
    """(line's name, name, shape, dtype, skipped): what is there once before and behind the layers,
    each layer's tensors together, each expert's too."""
    table = rows(text, names)
    for layered, group in itertools.groupby(table, key=lambda r: "{layer}" in r[1]):
        group = list(group)
        if not layered:
            for line, name, where, shape, dtype, skipped in group:
                if where == "once" or names[where]:
                    yield line, name, shape, dtype, skipped
            continue
        for layer in names["all"]:
            here = [r for r in group if layer in names[r[2]]]
            for *t, skipped in of_layer(here, str(layer), names):
                yield *t, skipped or layer >= names["layers"]


def of_layer(table, layer, names):
    for routed, group in itertools.groupby(table, key=lambda r: "{expert}" in r[1]):
        group = [(r[0], r[1].replace("{layer}", layer), *r[3:]) for r in group]
        if not routed:
            yield from group
            continue
        for e in map(str, range(names["E"])):
            for line, name, *rest in group:
                yield line, name.replace("{expert}", e), *rest


def size(shape, dtype):
    return math.prod(shape) * BYTES[dtype]


def files(all_tensors):
    """Files of at most SHARD bytes, cut between tensors in order."""
    shards, left = [[]], SHARD
    for t in all_tensors:
        n = size(t[2], t[3])
        if shards[-1] and n > left:
            shards.append([])
            left = SHARD
        shards[-1].append(t)
        left -= n
    return shards


# ---- files ---------------------------------------------------------------------------------------


def header(shard):
    """A safetensors header and the bytes behind it; wide numbers first, then by name, as the
    library sorts them."""
    entries, at = {"__metadata__": {"format": "pt"}}, 0
    for _, name, shape, dtype, _ in sorted(shard, key=lambda t: (-BYTES[t[3]], t[1])):
        end = at + size(shape, dtype)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, at


def no_holes(why):
    print(f"headers.py: {why}", file=sys.stderr)
    sys.exit(77)


def write_file(path, shard):
    head, behind = header(shard)
    try:
        with open(path, "xb") as f:
            f.write(head)
            f.truncate(len(head) + behind)
    except OSError as e:
        if e.errno != errno.EFBIG:
            raise
        no_holes(f"'{path}' cannot be {len(head) + behind} bytes long")


def probe(path):
    """Before terabytes are asked for: whether 64 MiB of nothing take no space."""
    with open(path, "xb") as f:
        f.truncate(64 << 20)
        f.flush()
        taken = os.fstat(f.fileno()).st_blocks * 512
    os.remove(path)
    if taken > 1 << 20:
        no_holes(f"the file system of '{path}' keeps no holes")


def write_model(where, config, shards, total):
    os.makedirs(where, exist_ok=True)
    if os.listdir(where):
        sys.exit(f"headers.py: '{where}' is not empty")
    probe(os.path.join(where, "probe"))
    with open(os.path.join(where, "config.json"), "x") as f:
        f.write(json.dumps(dict(sorted(config.items())), indent=2) + "\n")
    places = {}
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        name = name if len(shards) > 1 else "model.safetensors"
        write_file(os.path.join(where, name), shard)
        places.update((t[1], name) for t in shard)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        with open(os.path.join(where, "model.safetensors.index.json"), "x") as f:
            f.write(json.dumps(index, indent=2) + "\n")


def count(model, found, nfiles):
    parameters, skipped = 0, {}
    for line, name, shape, dtype, skip in found:
        p = 0 if name.endswith(SCALE) else math.prod(shape)
        parameters += p
        if skip:
            here = skipped.setdefault(line, [0, 0, 0])
            for i, n in enumerate((1, p, size(shape, dtype))):
                here[i] += n
    known = ("tensors", "files", "G", "uG", "GB", "uGB", "+GB")
    return {
        "model": model["model"],
        "tensors": len(found),
        "parameters": parameters,
        "bytes": sum(size(t[2], t[3]) for t in found),
        "files": nfiles,
        "skipped": [[line, *sums] for line, sums in skipped.items()],
        "published": {key: model[key] for key in known if model.get(key, "-") != "-"},
    }


def main(argv):
    known = {m["model"]: (f, t, m) for f, t, table in FAMILIES for m in models(table)}
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--list", action="store_true", help="print the models' names")
    p.add_argument("model", metavar="MODEL", nargs="?", choices=known)
    p.add_argument("dir", metavar="DIR", nargs="?")
    a = p.parse_args(argv)
    if a.list:
        print("\n".join(known))
        return
    if not a.model:
        p.error("which model?")
    family, table, model = known[a.model]
    config, names = family(model)
    found = list(tensors(table, names))
    if len({t[1] for t in found}) != len(found):
        sys.exit(f"headers.py: a tensor of {a.model} comes twice")
    shards = files(found)
    line = count(model, found, len(shards))
    if a.dir:
        write_model(a.dir, config, shards, line["bytes"])
    print(json.dumps(line))


if __name__ == "__main__":
    main(sys.argv[1:])
