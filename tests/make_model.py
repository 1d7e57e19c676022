#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write a random Qwen3 or Qwen3-MoE checkpoint in the published layout.

    make_model.py DIR                                        6 layers, hidden 64, tied, BF16
    make_model.py --type qwen3_moe --experts 8 --topk 2 DIR
    make_model.py --layers 28 --hidden 1024 --heads 16 --kv 8 --head-dim 128 \\
        --intermediate 3072 --vocab 151936 --files 2 DIR     the shape of Qwen3-0.6B, 1.2 GB
    make_model.py --fp8 128,128 DIR                          projections as FP8 codes with scales
    make_model.py --fp8 128,128 --expanded DIR               the same numbers as F32
    make_model.py --int4 32 DIR, --mxfp4 DIR                 projections as compressed-tensors' codes

The same options give the same bytes on any machine: a tensor's values depend on --seed and its name
alone, never on the file split, and come from integer arithmetic on a raw PCG64 stream. Tensors are
written piece by piece, so memory stays under 100 MB. Weights have variance 1/fan_in, embeddings 1,
norms lie near 1, biases are small: activations stay O(1). Needs numpy.
"""

import argparse
import hashlib
import json
import math
import os
import struct
import sys

import numpy as np

PIECE = 1 << 20  # elements made at a time
DTYPES = {
    "bf16": ("BF16", "bfloat16", 2),
    "f16": ("F16", "float16", 2),
    "f32": ("F32", "float32", 4),
}
SIZE = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "U8": 1}
SIZE |= {"I32": 4, "I64": 8}
NAN = {"BF16": b"\xc0\x7f", "F16": b"\x00\x7e", "F32": b"\x00\x00\xc0\x7f", "F8_E4M3": b"\x7f"}
SCALES = {"f32": "F32", "bf16": "BF16", "f16": "F16", "e8m0": "F8_E8M0", "u8": "U8"}


def stream(seed, name):
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return np.random.PCG64(int.from_bytes(digest[:16], "little"))


def bell(raw):
    """uint64 [n] -> float32 [n], mean 0, variance 1, at most 3.5: sums of four 16-bit uniforms."""
    total = np.zeros(raw.shape, np.int64)
    for shift in (0, 16, 32, 48):
        total += ((raw >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64)
    return ((total - 131070) * (1.0 / math.sqrt((2.0**32 - 1) / 3))).astype(np.float32)


def encode(x, dtype):
    if dtype == "f32":
        return x.astype("<f4").tobytes()
    if dtype == "f16":
        return x.astype("<f2").tobytes()
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()  # to nearest even


def f8_numbers():
    """float32 [256]: sign, 4 bits of exponent, 3 of mantissa, bias 7."""
    c = np.arange(256)
    exponent, mantissa = c >> 3 & 15, c & 7
    x = np.where(
        exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent.astype(float) - 10)
    )
    return np.where(c & 128, -x, x).astype(np.float32)


def tensors(a):
    """Yield (name, shape, mean, standard deviation) in the order in which the files hold them."""
    hidden, qdim, kdim = a.hidden, a.heads * a.head_dim, a.kv * a.head_dim

    def matrix(name, rows, cols):
        return name + ".weight", [rows, cols], 0.0, cols**-0.5

    def norm(name, size):
        return name + ".weight", [size], 1.0, 0.1

    def mlp(prefix, width):
        yield matrix(prefix + "gate_proj", width, hidden)
        yield matrix(prefix + "up_proj", width, hidden)
        yield matrix(prefix + "down_proj", hidden, width)

    yield "model.embed_tokens.weight", [a.vocab, hidden], 0.0, 1.0
    for i in range(a.layers):
        p = f"model.layers.{i}."
        yield norm(p + "input_layernorm", hidden)
        for name, rows, cols in (
            ("q", qdim, hidden),
            ("k", kdim, hidden),
            ("v", kdim, hidden),
            ("o", hidden, qdim),
        ):
            yield matrix(p + f"self_attn.{name}_proj", rows, cols)
            if a.attention_bias:
                yield p + f"self_attn.{name}_proj.bias", [rows], 0.0, 0.1
        yield norm(p + "self_attn.q_norm", a.head_dim)
        yield norm(p + "self_attn.k_norm", a.head_dim)
        yield norm(p + "post_attention_layernorm", hidden)
        if is_moe_layer(a, i):
            yield matrix(p + "mlp.gate", a.experts, hidden)
            for e in range(a.experts):
                yield from mlp(p + f"mlp.experts.{e}.", a.moe_intermediate)
        else:
            yield from mlp(p + "mlp.", a.intermediate)
    yield norm("model.norm", hidden)
    if not a.tied or a.redundant_head:
        yield matrix("lm_head", a.vocab, hidden)


def is_moe_layer(a, i):
    return (
        a.type == "qwen3_moe"
        and i not in a.mlp_only_layers
        and (i + 1) % a.decoder_sparse_step == 0
    )


def config(a):
    moe, new = a.type == "qwen3_moe", a.layout == 5
    c = {
        "architectures": ["Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM"],
        "attention_bias": a.attention_bias,
        "attention_dropout": 0.0,
        "bos_token_id": a.vocab - 2,
        "eos_token_id": a.vocab - 1,
        "head_dim": a.head_dim,
        "hidden_act": "silu",
        "hidden_size": a.hidden,
        "initializer_range": 0.02,
        "intermediate_size": a.intermediate,
        "max_position_embeddings": a.max_position,
        "max_window_layers": a.layers if a.max_window_layers is None else a.max_window_layers,
        "model_type": a.type,
        "num_attention_heads": a.heads,
        "num_hidden_layers": a.layers,
        "num_key_value_heads": a.kv,
        "rms_norm_eps": a.eps,
        "sliding_window": a.sliding_window,
        "tie_word_embeddings": a.tied,
        "dtype" if new else "torch_dtype": DTYPES[a.dtype][1],
        "transformers_version": "5.18.0" if new else "4.51.0",
        "use_cache": True,
        "use_sliding_window": a.sliding_window is not None,
        "vocab_size": a.vocab,
    }
    if new:
        c["rope_parameters"] = {
            "rope_theta": a.rope_theta,
            "rope_type": "default",
            **(a.rope or {}),
        }
        c["pad_token_id"] = None
        if not moe:
            c["layer_types"] = layer_types(a, c["max_window_layers"])
    else:
        c["rope_theta"], c["rope_scaling"] = a.rope_theta, a.rope
    if moe:
        c.update(
            {
                "decoder_sparse_step": a.decoder_sparse_step,
                "mlp_only_layers": a.mlp_only_layers,
                "moe_intermediate_size": a.moe_intermediate,
                "norm_topk_prob": a.norm_topk_prob,
                "num_local_experts" if new else "num_experts": a.experts,
                "num_experts_per_tok": a.topk,
                "output_router_logits": False,
                "router_aux_loss_coef": 0.001,
            }
        )
    if a.fp8 and not a.expanded:
        c["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": a.fp8,
        }
    if a.int4 is not None or a.mxfp4:
        c["quantization_config"] = compressed(a)
    for key, value in a.set:
        c[key] = value
    for key in a.unset:
        c.pop(key, None)
    return dict(sorted(c.items()))


def compressed(a):
    weights = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": 32 if a.mxfp4 else a.int4 or None,
        "num_bits": 4,
        "observer": "minmax",
        "strategy": "group" if a.mxfp4 or a.int4 else "channel",
        "symmetric": True,
        "type": "float" if a.mxfp4 else "int",
    }
    group = {
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": "mxfp4-pack-quantized" if a.mxfp4 else "pack-quantized",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def layer_types(a, first):
    slides = a.sliding_window is not None
    return [
        "sliding_attention" if slides and i >= first else "full_attention" for i in range(a.layers)
    ]


def split(a, plan):
    """Cut the tensors into at most --files runs of about equal bytes; a layer may lie in two."""
    total = sum(nbytes(t) for t in plan)
    files, done = [[]], 0
    for t in plan:
        if files[-1] and done >= total * len(files) / a.files and len(files) < a.files:
            files.append([])
        files[-1].append(t)
        done += nbytes(t)
    return files, total


def nbytes(t):
    return math.prod(t.shape) * SIZE[t.dtype]


class Tensor:
    """A tensor of the files: how it is stored, and its bytes piece by piece."""

    def __init__(self, a, name, shape, mean, std):
        self.a, self.name, self.shape, self.mean, self.std = a, name, shape, mean, std
        self.dtype = DTYPES[a.dtype][0]

    def pieces(self):
        bits, left = stream(self.a.seed, self.name), math.prod(self.shape)
        while left > 0:
            n = min(left, PIECE)
            yield self.encode(bits.random_raw(n))
            left -= n

    def encode(self, raw):
        x = bell(raw) * np.float32(self.std) + np.float32(self.mean)
        return encode(x.astype(np.float32), self.a.dtype)


class Codes(Tensor):
    """All code points but NaN, equally often; their root mean square is about 100."""

    def __init__(self, *args):
        super().__init__(*args)
        self.dtype = "F32" if self.a.expanded else "F8_E4M3"
        self.scales = Scales(self, *self.a.fp8, "_scale_inv", self.std / 100)
        self.at = 0

    def encode(self, raw):
        code = (raw & np.uint64(255)).astype(np.uint8)
        code[code & 127 == 127] -= 1
        if not self.a.expanded:
            return code.tobytes()
        (rows, cols), grid = self.a.fp8, self.scales.grid()
        i = self.at + np.arange(raw.size)
        self.at += raw.size
        r, c = i // self.shape[1], i % self.shape[1]
        return (f8_numbers()[code] * grid[r // rows, c // cols]).astype("<f4").tobytes()


class Halves(Tensor):
    """All codes of 4 bits, equally often: as integers (I32) or as MXFP4 (U8)."""

    def __init__(self, *args):
        super().__init__(*args)
        self.whole, self.wide = self.shape, self.a.int4 or self.shape[1]
        if self.a.mxfp4:
            self.wide = 32
        self.scales = Scales(self, 1, self.wide, "_scale", self.std / (3 if self.a.mxfp4 else 5))
        self.dtype, each = ("U8", 2) if self.a.mxfp4 else ("I32", 8)
        self.name += "_packed"
        self.shape = [self.whole[0], -(-self.whole[1] // each)]
        self.each = each

    def pieces(self):
        rows, cols = self.whole
        code = stream(self.a.seed, self.name).random_raw(rows * cols).reshape(rows, cols) & np.uint64(15)
        code = np.pad(code, ((0, 0), (0, self.shape[1] * self.each - cols)))
        words = np.zeros(self.shape, np.uint64)
        for i in range(self.each):
            words |= code[:, i :: self.each] << np.uint64(4 * i)
        yield words.astype("u1" if self.each == 2 else "<u4").tobytes()


class Shape(Tensor):
    def __init__(self, of):
        super().__init__(of.a, of.name.removesuffix("_packed") + "_shape", [2], 0, 0)
        self.dtype, self.of = "I64", of

    def pieces(self):
        yield np.array(self.of.whole, "<i8").tobytes()


class Scales(Tensor):
    def __init__(self, of, rows, cols, suffix, std):
        shape = [-(-of.shape[0] // rows), -(-of.shape[1] // cols)]
        super().__init__(of.a, of.name + suffix, shape, 0, std)
        self.dtype = SCALES[self.a.scales]

    def encode(self, raw):
        u = (raw >> np.uint64(40)).astype(np.float32) / np.float32(2**24)
        if self.dtype in ("F32", "BF16", "F16"):
            return encode((u + np.float32(0.5)) * np.float32(self.std), self.dtype.lower())
        return (127 + math.frexp(self.std)[1] - (u * 3).astype(np.int64)).astype("u1").tobytes()

    def grid(self):
        raw = b"".join(self.pieces())
        if self.dtype == "BF16":
            wide = np.frombuffer(raw, "<u2").astype("<u4") << 16
            return wide.view("<f4").reshape(self.shape)
        if self.dtype in ("F32", "F16"):
            kind = "<f4" if self.dtype == "F32" else "<f2"
            return np.frombuffer(raw, kind).astype("<f4").reshape(self.shape)
        return np.exp2(np.frombuffer(raw, "u1").astype(np.float32) - 127).reshape(self.shape)


def packs(a):
    return a.fp8 or a.mxfp4 or a.int4 is not None


def stored(a):
    """The tensors as the files hold them."""
    apart = []
    for name, shape, mean, std in tensors(a):
        if name in a.drop:
            continue
        shape = a.reshape.get(name, shape)
        if packs(a) and name.endswith("_proj.weight") and not any(p in name for p in a.plain):
            t = Codes(a, name, shape, mean, std) if a.fp8 else Halves(a, name, shape, mean, std)
            t.shape = a.reshape.get(t.name, t.shape)
            if t.name not in a.drop:
                yield t
            if a.int4 is not None:
                yield Shape(t)
            if a.expanded or t.scales.name in a.drop:
                continue
            t.scales.shape = a.reshape.get(t.scales.name, t.scales.shape)
            if a.scales_apart:
                apart.append(t.scales)
            else:
                yield t.scales
        else:
            yield Tensor(a, name, shape, mean, std)
    yield from apart


def header(group):
    entries, at = {"__metadata__": {"format": "pt"}}, 0
    for t in group:
        end = at + nbytes(t)
        entries[t.name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, at


def write_file(a, path, group):
    head, size = header(group)
    with open(path, "wb") as f:
        f.write(head)
        if a.header_only:
            f.truncate(len(head) + size)
        else:
            for t in group:
                for piece in t.pieces():
                    f.write(piece)
        at = len(head)
        for t in group:
            for index in a.nan.get(t.name, []):
                f.seek(at + (math.prod(t.shape) // 2 if index is None else index) * SIZE[t.dtype])
                f.write(NAN[t.dtype])
            at += nbytes(t)


def write_model(a):
    os.makedirs(a.dir, exist_ok=True)
    with open(os.path.join(a.dir, "config.json"), "w") as f:
        f.write(json.dumps(config(a), indent=2) + "\n")
    known = {t[0] for t in tensors(a)}
    ends = ["_scale_inv"] if a.fp8 else ["_packed", "_scale", "_shape"] if packs(a) else []
    known |= {name + end for name in known for end in ends}
    for name in [*a.nan, *a.drop, *a.reshape]:
        if name not in known:
            sys.exit(f"make_model.py: no tensor '{name}' in this model")
    plan = list(stored(a))
    files, total = split(a, plan)
    many, where = len(files) > 1, {}
    for i, group in enumerate(files):
        name = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" if many else "model.safetensors"
        write_file(a, os.path.join(a.dir, name), group)
        where.update({t.name: name for t in group})
    if many:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        with open(os.path.join(a.dir, "model.safetensors.index.json"), "w") as f:
            f.write(json.dumps(index, indent=2) + "\n")


def key_value(text):
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def planted(text):
    name, _, index = text.partition("@")
    return name, int(index) if index else None


def shaped(text):
    name, _, shape = text.partition("=")
    return name, [int(n) for n in shape.split(",")]


def blocks(text):
    rows, cols = (int(n) for n in text.split(","))
    return [rows, cols]


def integers(text):
    return [int(n) for n in text.split(",")] if text else []


def positive(text):
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive number")
    return int(text)


def options(argv):
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("dir", metavar="DIR")
    p.add_argument("--type", choices=("qwen3", "qwen3_moe"), default="qwen3")
    for name, default in (
        ("layers", 6),
        ("hidden", 64),
        ("heads", 4),
        ("kv", 2),
        ("head-dim", 32),
        ("intermediate", 128),
        ("vocab", 512),
        ("max-position", 40960),
    ):
        p.add_argument("--" + name, type=positive, default=default, metavar="N")
    p.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    p.add_argument(
        "--untied",
        dest="tied",
        action="store_false",
        help="store an lm_head (always so for qwen3_moe)",
    )
    p.add_argument(
        "--redundant-head",
        action="store_true",
        help="tied, with another lm_head in the file all the same",
    )
    p.add_argument("--attention-bias", action="store_true", help="biases on q, k, v and o")
    p.add_argument("--eps", type=float, default=1e-6, help="rms_norm_eps")
    p.add_argument("--rope-theta", type=float, default=1000000.0)
    p.add_argument(
        "--rope",
        type=json.loads,
        metavar="JSON",
        help='scaling, e.g. {"rope_type": "yarn", "factor": 4.0}',
    )
    p.add_argument(
        "--sliding-window", type=positive, metavar="N", help="also sets use_sliding_window"
    )
    p.add_argument(
        "--max-window-layers",
        type=int,
        metavar="N",
        help="first layer that slides (default: none does)",
    )
    p.add_argument("--experts", type=positive, default=8, metavar="N")
    p.add_argument("--topk", type=positive, default=2, metavar="N")
    p.add_argument("--moe-intermediate", type=positive, default=32, metavar="N")
    p.add_argument("--no-norm-topk-prob", dest="norm_topk_prob", action="store_false")
    p.add_argument("--decoder-sparse-step", type=positive, default=1, metavar="N")
    p.add_argument("--mlp-only-layers", type=integers, default=[], metavar="I,J,...")
    p.add_argument(
        "--layout",
        type=int,
        choices=(4, 5),
        default=4,
        help="config.json as transformers 4 or 5 writes it",
    )
    p.add_argument(
        "--set",
        type=key_value,
        action="append",
        default=[],
        metavar="KEY=JSON",
        help="any key of config.json",
    )
    p.add_argument(
        "--unset", action="append", default=[], metavar="KEY", help="leave a key out of config.json"
    )
    p.add_argument(
        "--files",
        type=positive,
        default=1,
        metavar="N",
        help="safetensors files; more than one adds an index",
    )
    p.add_argument(
        "--fp8", type=blocks, metavar="ROWS,COLS", help="projections in F8_E4M3 with blocks of scales"
    )
    p.add_argument(
        "--int4", type=int, metavar="GROUP", help="projections in packed INT4, 0 = by channel"
    )
    p.add_argument("--mxfp4", action="store_true", help="projections in packed MXFP4")
    p.add_argument("--scales", choices=sorted(SCALES), help="(f32; u8 with --mxfp4)")
    p.add_argument("--expanded", action="store_true", help="the numbers of --fp8 as F32, plain")
    p.add_argument(
        "--plain",
        action="append",
        default=[],
        metavar="TEXT",
        help="projections with TEXT in their name are not packed",
    )
    p.add_argument(
        "--scales-apart", action="store_true", help="all scales behind the weights: in other files"
    )
    p.add_argument("--seed", type=int, default=0)
    p.add_argument(
        "--nan",
        type=planted,
        action="append",
        default=[],
        metavar="TENSOR[@INDEX]",
        help="a NaN at this element (default: the middle one)",
    )
    p.add_argument(
        "--drop", action="append", default=[], metavar="TENSOR", help="leave a tensor out"
    )
    p.add_argument("--reshape", type=shaped, action="append", default=[], metavar="TENSOR=N,N")
    p.add_argument(
        "--header-only",
        action="store_true",
        help="true headers, the data one hole: for plans of huge models",
    )
    a = p.parse_args(argv)
    a.reshape, nan = dict(a.reshape), {}
    a.scales = a.scales or ("u8" if a.mxfp4 else "f32")
    for name, index in a.nan:
        nan.setdefault(name, []).append(index)
    a.nan = nan
    a.tied = a.tied and a.type == "qwen3"
    if a.redundant_head and not a.tied:
        p.error("--redundant-head needs a tied model")
    if a.heads % a.kv:
        p.error("--heads must be a multiple of --kv")
    return a


if __name__ == "__main__":
    write_model(options(sys.argv[1:]))
