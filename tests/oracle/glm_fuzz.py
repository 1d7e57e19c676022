#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare random tiny GLM-5 targets (glm_moe_dsa) with their mathematics in float64, written out here.

    PATH=BUILD:$PATH PYTHON glm_fuzz.py [--seed N] [--count N] [--only I,J,...] [--factor F] [--keep DIR] [-j N]

Case I of seed N is a checkpoint, a recipe and rows: any indexer schedule and layout, rows shorter and longer than what is
chosen, groups of experts, shared experts, dense layers, tensors of further-token layers, FP8 beside BF16, files split anywhere,
odd sizes. dspark-plan | dspark-load | dspark-forward | dspark-manifest merge compute it in fp32. A case passes if

  - it has a fault, and dspark-plan refuses it with exit 1 and the words that name the fault; or
  - dspark-manifest verify is content, ids and target_weights are equal, padded positions are zero, and every real position is
    within 4 x 1.5e-5 x max(1, rms of the tensor) plus one rounding step of the cache dtype. Where one is not, positions from
    which on a choice of keys or experts was nearly a tie are left out and counted; exact ties go to the lower number.

PYTHON needs numpy and xxhash. One line a case; exit 0 if all pass, 1 otherwise. --keep DIR leaves the cases that fail there.
"""

import argparse
import collections
import json
import math
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import traceback

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.dirname(HERE), HERE]
sys.dont_write_bytecode = True

import make_model  # noqa: E402
import make_tokens  # noqa: E402
import numpy as np  # noqa: E402
from qwen3_fuzz import NOISE, STEP, Refused, read_cache, read_tensors, run_dspark  # noqa: E402

NEAR = 3e-5  # scores nearer to each other than this, relative to the largest, may change places in fp32

BLOCK = 128

# What may be wrong with any target, and with one that has packed weights.
PLAIN = ("missing", "shape", "config", "dtype", "ep")
PACKED = ("no scale", "scale shape", "method")


# ---- a random case ---------------------------------------------------------------------------------------------------------


class Case:
    """config.json, tensors as stored and as numbers, rows."""

    def __init__(self, seed, index, fault=None):
        self.r = random.Random(f"glm/{seed}/{index}")
        self.np = np.random.default_rng([seed, index])
        self.notes, self.fault, self.ep = [], None, None
        self.config, self.stored, self.number = {}, {}, {}
        self.sizes()
        self.schedules()
        self.experts()
        self.other_keys()
        self.rows()
        self.quantised = self.maybe(0.35) or fault in PACKED
        self.tensors()
        if fault or self.maybe(0.15):
            self.spoil(fault)

    def maybe(self, p):
        return self.r.random() < p

    def put(self, **keys):
        self.config.update(keys)

    def sizes(self):
        r, big = self.r, self.r.random() < 0.2  # blocks of 128 x 128: whole, partial and several of them
        self.L = r.choice((1, 1, 2, 2, 3, 3, 4, 5, 6, 8))
        self.H = r.choice((130, 160, 256, 300)) if big else r.choice((7, 8, 24, 40, 64, 64, 100))
        self.V = r.choice((11, 64, 257))
        self.heads = r.choice((1, 2, 3, 4, 4, 6))
        self.Q = r.choice((128, 200)) if big else r.choice((5, 8, 17, 48, 65))
        self.C = r.choice((128, 144)) if big else r.choice((3, 8, 32, 33, 50))
        self.nope, self.rope = r.choice((1, 5, 16, 24, 32)), r.choice((2, 4, 6, 8, 16))
        self.value = r.choice((1, 3, 8, 32, 40))
        self.ih = r.choice((1, 2, 3, 4, 8, 32))
        self.id = self.rope + r.choice((0, 0, 2, 3, 8, 16))
        self.topk = r.choice((1, 2, 3, 5, 6, 7, 16, 33, 64, 100, 1000))
        self.I = r.choice((1, 12, 40, 96, 130))
        self.eps = r.choice((1e-5, 1e-5, 1e-6, 1e-2))
        self.theta = r.choice((8e6, 1e6, 10000, 500.0))
        self.put(
            model_type="glm_moe_dsa", num_hidden_layers=self.L, hidden_size=self.H, vocab_size=self.V,
            num_attention_heads=self.heads, num_key_value_heads=self.heads, q_lora_rank=self.Q, kv_lora_rank=self.C,
            qk_nope_head_dim=self.nope, qk_rope_head_dim=self.rope, v_head_dim=self.value, index_n_heads=self.ih,
            index_head_dim=self.id, index_topk=self.topk, intermediate_size=self.I, rms_norm_eps=self.eps,
        )
        if self.maybe(0.7):
            self.put(qk_head_dim=self.nope + self.rope)
        if self.maybe(0.8):
            self.put(head_dim=r.choice((192, self.rope, 1)))  # never a size
        if self.maybe(0.2) and self.eps == 1e-5:
            del self.config["rms_norm_eps"]
        if self.maybe(0.6):
            p = {"rope_theta": self.theta, **({"rope_type": "default"} if self.maybe(0.7) else {})}
            self.put(rope_parameters=p)
        else:
            self.put(rope_theta=self.theta, **({"rope_scaling": None} if self.maybe(0.5) else {}))

    def schedules(self):
        r = self.r
        n = self.L + r.choice((0, 0, 1, 3))
        kind = r.choice(("types", "types", "letters", "words", "rule", "rule", "none"))
        self.notes.append(f"indexers by {kind}")
        full = [i == 0 or self.maybe(0.5) for i in range(n)]
        freq, offset = 1, 2
        if kind == "types":
            self.put(indexer_types=["full" if f else "shared" for f in full])
        elif kind == "letters":
            self.put(index_topk_pattern="".join("F" if f else "S" for f in full))
        elif kind == "words":
            self.put(index_topk_pattern=["full" if f else "shared" for f in full])
        elif kind == "rule":
            freq, offset = r.choice((1, 2, 3, 4)), r.choice((1, 2, 3, 4))
            if offset == 2 and self.maybe(0.5):
                self.put(index_topk_freq=freq)
            else:
                self.put(index_topk_freq=freq, index_skip_topk_offset=offset)
        if kind in ("rule", "none"):
            full = [max(i - offset + 1, 0) % freq == 0 for i in range(n)]
        elif self.maybe(0.5):  # looked at by nobody
            self.put(index_topk_freq=r.choice((1, 4)), index_skip_topk_offset=r.choice((2, 3)))
        if kind == "types" and self.maybe(0.3):
            self.put(index_topk_pattern=None)
        self.full = full[: self.L]
        layout = r.choice(("pairs", "halves", "absent"))
        self.halves = layout != "pairs"
        self.notes.append(layout)
        if layout != "absent":
            self.put(indexer_rope_interleave=layout == "pairs")
        if self.maybe(0.5):
            moe = [self.maybe(0.6) for _ in range(n)]
            self.put(mlp_layer_types=["sparse" if m else "dense" for m in moe])
            if self.maybe(0.3):
                self.put(first_k_dense_replace=r.randint(0, 4))
        else:
            dense = r.choice((0, 0, 1, 2, 3))
            if dense != 3 or self.maybe(0.5):
                self.put(first_k_dense_replace=dense)
            moe = [i >= dense for i in range(n)]
        self.moe = moe[: self.L]

    def experts(self):
        r = self.r
        self.groups = r.choice((1, 1, 1, 2, 3, 4))
        self.E = self.groups * r.choice((2, 2, 3, 4, 8)) if self.groups > 1 else r.choice((1, 2, 5, 8, 12))
        self.kept = r.randint(1, self.groups)
        self.K = r.randint(1, min(self.E, 6))
        self.mi = r.choice((1, 4, 20, 33, 64))
        self.shared = r.choice((0, 1, 1, 2, 3))
        self.norm = r.choice((True, True, False))
        self.scale = r.choice((2.5, 1.0, 0.7))
        self.put(n_routed_experts=self.E, num_experts_per_tok=self.K, moe_intermediate_size=self.mi)
        if self.shared != 1 or self.maybe(0.7):
            self.put(n_shared_experts=self.shared)
        if self.groups > 1 or self.maybe(0.5):
            self.put(n_group=self.groups, topk_group=self.kept)
        if not self.norm or self.maybe(0.7):
            self.put(norm_topk_prob=self.norm)
        if self.scale != 2.5 or self.maybe(0.7):
            self.put(routed_scaling_factor=self.scale)
        if self.groups > 1:
            self.notes.append(f"{self.kept} of {self.groups} groups")

    def other_keys(self):
        ignored = {
            "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "scoring_func": "sigmoid",
            "topk_method": "noaux_tc", "moe_layer_freq": 1, "moe_router_dtype": "float32", "ep_size": 1, "pretraining_tp": 1,
            "index_share_for_mtp_iteration": True, "rope_interleave": self.maybe(0.5), "tie_word_embeddings": False,
            "max_position_embeddings": self.r.choice((16, 202752)), "eos_token_id": [1, 2], "pad_token_id": self.r.randrange(self.V),
            "initializer_range": 0.02, "use_cache": True, "num_nextn_predict_layers": 1, "dtype": "bfloat16",
        }
        self.put(**{k: v for k, v in ignored.items() if self.maybe(0.5)})
        self.mtp = self.maybe(0.5)
        self.depth = self.r.randint(1, self.L) if self.maybe(0.15) else None
        if self.depth:
            self.notes.append(f"{self.depth} layers of {self.L}")

    def rows(self):
        r = self.r
        self.seq = r.choice((1, 3, 16, 40, 64, 100, 150, 300))
        self.batch = r.choice((1, 1, 2, 3))
        self.shard = self.batch * r.choice((1, 2, 4))
        n = r.randint(1, 6)
        edge = [x for x in (1, self.topk, self.topk + 1, self.topk - 1, self.seq) if 1 <= x <= self.seq]
        lengths = [r.choice(edge) if self.maybe(0.4) else r.randint(1, self.seq) for _ in range(n)]
        self.dtype = r.choice(("fp32", "fp32", "fp32", "bf16", "fp16"))
        layers = self.depth or self.L
        self.ids = sorted(r.sample(range(-1, layers), r.randint(1, min(6, layers + 1))))
        if self.maybe(0.5) and layers <= 6:
            self.ids = list(range(-1, layers))
        self.options = [
            "--vocab", self.V, "--rows", n, "--seq-length", self.seq, "--seed", r.randrange(1000), "--lengths", ",".join(map(str, lengths)),
            "--micro-batch-size", self.batch, "--shard-size", self.shard, "--cache-dtype", self.dtype, "--pad-token-id", r.randrange(self.V),
            "--layer-ids=" + ",".join(map(str, self.ids)),
        ]
        longest = max(lengths)
        self.notes.append(f"{self.topk} of up to {longest} keys" if longest > self.topk else "all keys")

    # ---- tensors

    def add(self, name, shape, mean, std, dtype="BF16"):
        x = (mean + std * self.np.standard_normal(shape)).astype(np.float32)
        if dtype == "BF16":
            raw = make_model.encode(x.reshape(-1), "bf16")
            x = (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4").reshape(shape)
        else:
            raw = x.astype("<f4").tobytes()
        self.stored[name] = (dtype, list(shape), raw)
        self.number[name] = x.astype(np.float64)

    def matrix(self, name, rows, cols, packs=True, gain=1.0):
        name += ".weight"
        if not (self.quantised and packs and self.maybe(0.9)):
            return self.add(name, (rows, cols), 0, gain * cols**-0.5)
        code = self.np.integers(0, 256, (rows, cols), dtype=np.uint8)
        code[code & 127 == 127] -= 1
        grid = (-(-rows // BLOCK), -(-cols // BLOCK))
        scale = ((0.5 + self.np.random(grid)) * gain * cols**-0.5 / 100).astype(np.float32)
        whole = np.repeat(np.repeat(scale, BLOCK, 0), BLOCK, 1)[:rows, :cols]
        self.stored[name] = ("F8_E4M3", [rows, cols], code.tobytes())
        self.stored[name + "_scale_inv"] = ("F32", list(grid), scale.astype("<f4").tobytes())
        self.number[name] = (make_model.f8_numbers()[code] * whole).astype(np.float64)
        return None

    def mlp(self, stem, width):
        self.matrix(stem + "gate_proj", width, self.H)
        self.matrix(stem + "up_proj", width, self.H)
        self.matrix(stem + "down_proj", self.H, width)

    def tensors(self):
        self.add("model.embed_tokens.weight", (self.V, self.H), 0, 1)
        for i in range(self.L + self.mtp):
            p, a = f"model.layers.{i}.", f"model.layers.{i}.self_attn."
            self.add(p + "input_layernorm.weight", (self.H,), 1, 0.1)
            self.add(p + "post_attention_layernorm.weight", (self.H,), 1, 0.1)
            self.matrix(a + "q_a_proj", self.Q, self.H)
            self.add(a + "q_a_layernorm.weight", (self.Q,), 1, 0.1)
            self.matrix(a + "q_b_proj", self.heads * (self.nope + self.rope), self.Q, gain=2)
            self.matrix(a + "kv_a_proj_with_mqa", self.C + self.rope, self.H)
            self.add(a + "kv_a_layernorm.weight", (self.C,), 1, 0.1)
            self.matrix(a + "kv_b_proj", self.heads * (self.nope + self.value), self.C)
            self.matrix(a + "o_proj", self.H, self.heads * self.value)
            if i == self.L or self.full[i]:
                self.matrix(a + "indexer.wq_b", self.ih * self.id, self.Q)
                self.matrix(a + "indexer.wk", self.id, self.H)
                self.add(a + "indexer.k_norm.weight", (self.id,), 1, 0.1)
                self.add(a + "indexer.k_norm.bias", (self.id,), 0, 0.3)
                self.matrix(a + "indexer.weights_proj", self.ih, self.H, packs=False)
            if i < self.L and not self.moe[i]:
                self.mlp(p + "mlp.", self.I)
                continue
            self.matrix(p + "mlp.gate", self.E, self.H, packs=False)
            self.add(p + "mlp.gate.e_score_correction_bias", (self.E,), 0, self.r.choice((0.1, 0.5)), "F32")
            for e in range(self.E if i < self.L else 1):
                self.mlp(f"{p}mlp.experts.{e}.", self.mi)
            if self.shared:
                self.mlp(p + "mlp.shared_experts.", self.shared * self.mi)
            if i == self.L:
                self.matrix(p + "eh_proj", self.H, 2 * self.H, packs=False)
                for name in ("enorm", "hnorm", "shared_head.norm"):
                    self.add(f"{p}{name}.weight", (self.H,), 1, 0.1)
        self.add("model.norm.weight", (self.H,), 1, 0.1)
        self.matrix("lm_head", self.V, self.H, packs=False)
        if any(k.endswith("_scale_inv") for k in self.stored):
            self.notes.append("FP8")
            self.put(quantization_config={
                "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic",
                "modules_to_not_convert": ["lm_head", "self_attn.indexers_proj"],
            })

    def spoil(self, kind):
        """A fault, and words of the refusal."""
        first = "model.layers.0."
        needed = [n for n in self.stored if n.startswith((first, "model.norm", "model.embed")) and "_scale_inv" not in n]
        scales = [n for n in self.stored if n.startswith(first) and n.endswith("_scale_inv")]
        kind = kind or self.r.choice([*PLAIN, *PACKED] if scales else PLAIN)
        if kind == "missing":
            name = self.r.choice(needed)
            del self.stored[name]
        elif kind == "shape":
            name = self.r.choice(needed)
            dtype, shape, raw = self.stored[name]
            self.stored[name] = (dtype, [*shape[:-1], shape[-1] + 1], raw + bytes(len(raw) // shape[-1]))
        elif kind == "dtype":
            name = self.r.choice([n for n in needed if self.stored[n][0] == "BF16"])
            self.stored[name] = ("I16", *self.stored[name][1:])
        elif kind == "ep":
            self.ep, name = self.E + 1, "does not divide the target's"
        elif kind == "no scale":
            name = self.r.choice(scales)
            del self.stored[name]
        elif kind == "scale shape":
            name = self.r.choice(scales)
            dtype, shape, raw = self.stored[name]
            self.stored[name] = (dtype, [shape[0] + 1, shape[1]], raw + bytes(4 * shape[1]))
        elif kind == "method":
            key, value, name = self.r.choice((
                ("quant_method", "awq", "awq"), ("fmt", "e5m2", "e5m2"), ("weight_block_size", [64, 128], "weight_block_size"),
            ))
            self.config["quantization_config"][key] = value
        else:
            name, value = self.r.choice((
                ("tie_word_embeddings", True), ("qk_head_dim", self.nope + self.rope + 1), ("indexer_rope_interleave", "true"),
                ("num_experts_per_tok", self.E + 1), ("scoring_func", "softmax"), ("index_head_dim", self.rope - 1),
                ("indexer_types", ["shared"] * self.L), ("mlp_layer_types", ["dense"] * (self.L - 1)),
                ("rope_parameters", {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4}),
            ))
            self.put(**{name: value})
            name = {"indexer_types": "layer 0", "rope_parameters": "yarn"}.get(name, name)
        self.fault = name
        self.notes.append(f"fault: {kind} {name}")

    def build(self, where):
        model = os.path.join(where, "model")
        os.makedirs(model)
        with open(os.path.join(model, "config.json"), "w") as f:
            json.dump(self.config, f, indent=1)
        self.write_files(model)
        tokens = make_tokens.options(
            [str(w) for w in self.options]
            + ["--model", "model", "--recipe", os.path.join(where, "recipe.yaml"), "--cache-output-dir", "out"]
            + [os.path.join(where, "tokens.safetensors")]
        )
        make_tokens.write_tokens(tokens)
        make_tokens.write_recipe(tokens)
        if self.depth:
            with open(os.path.join(where, "recipe.yaml"), "a") as f:
                f.write(f"  target_num_hidden_layers: {self.depth}\n")
        if self.ep:
            with open(os.path.join(where, "recipe.yaml"), "a") as f:
                f.write(f"distributed:\n  ep_size: {self.ep}\n")

    def write_files(self, model):
        names = list(self.stored)
        self.r.shuffle(names)
        n = self.r.choice((1, 1, 2, 3))
        files = [names[i::n] for i in range(n)]
        if n == 1:
            write_safetensors(os.path.join(model, "model.safetensors"), self.stored, names)
            return
        where = {}
        for i, part in enumerate(files):
            name = f"model-{i + 1:05d}-of-{n:05d}.safetensors"
            write_safetensors(os.path.join(model, name), self.stored, part)
            where.update({t: name for t in part})
        with open(os.path.join(model, "model.safetensors.index.json"), "w") as f:
            json.dump({"metadata": {}, "weight_map": where}, f)


def write_safetensors(path, stored, names):
    entries, at = {}, 0
    for name in names:
        dtype, shape, raw = stored[name]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text + b"".join(stored[n][2] for n in names))


# ---- the mathematics -------------------------------------------------------------------------------------------------------


def rms_norm(x, w, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w


def layer_norm(x, w, b, eps):
    d = x - x.mean(-1, keepdims=True)
    return d / np.sqrt((d * d).mean(-1, keepdims=True) + eps) * w + b


def silu(x):
    return x / (1 + np.exp(-x))


def largest(score, k):
    """Indices of the k largest numbers, equal ones from the lowest index on, ascending."""
    return np.sort(np.argsort(-score, kind="stable")[:k])


def nearly_tied(score, k, scale):
    """The k-th and the next differ, but by less than fp32 can tell."""
    if k >= len(score):
        return False
    s = np.sort(score)[::-1]
    return 0 < s[k - 1] - s[k] < NEAR * scale


class Oracle:
    """Sections 3 to 9 of the family's mathematics for one row, and from where on it is in doubt."""

    def __init__(self, case):
        self.c, self.w = case, case.number
        half = case.rope // 2
        exponent = np.arange(half, dtype=np.float32) * np.float32(2) / np.float32(case.rope)
        self.freq = (1 / np.float32(case.theta) ** exponent).astype(np.float32)

    def rotate(self, x, halves):
        """x [T, heads, rope]; angles are rounded to fp32 as the reference's are."""
        angle = (np.arange(len(x), dtype=np.float32)[:, None] * self.freq).astype(np.float32).astype(np.float64)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        out, half = np.empty_like(x), x.shape[-1] // 2
        first, second = (slice(0, half), slice(half, None)) if halves else (slice(0, None, 2), slice(1, None, 2))
        a, b = x[..., first], x[..., second]
        out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
        return out

    def choose(self, p, h, qr):
        """For each position the keys it sees."""
        c, w, T = self.c, self.w, len(h)
        if T <= c.topk:
            return [np.arange(t + 1) for t in range(T)]
        q = (qr @ w[p + "wq_b.weight"].T).reshape(T, c.ih, c.id)
        k = layer_norm(h @ w[p + "wk.weight"].T, w[p + "k_norm.weight"], w[p + "k_norm.bias"], 1e-6)[:, None]
        q[..., : c.rope], k[..., : c.rope] = self.rotate(q[..., : c.rope], c.halves), self.rotate(k[..., : c.rope], c.halves)
        weight = h @ w[p + "weights_proj.weight"].T * c.ih**-0.5
        dot = np.einsum("qhd,kd->qhk", q, k[:, 0]) * c.id**-0.5
        score = np.einsum("qh,qhk->qk", weight, np.maximum(dot, 0))
        chosen = []
        for t in range(T):
            s = score[t, : t + 1]
            reach = (np.abs(weight[t])[:, None] * np.abs(dot[t, :, : t + 1])).sum(0).max()
            # a score of 0 is exact where no head comes near to it, and only there
            edge = (np.abs(dot[t, :, : t + 1]) < NEAR * np.abs(dot[t]).max()).any(0) & (s == 0)
            chosen.append(largest(s, c.topk))
            if nearly_tied(s, c.topk, reach) or (t >= c.topk and edge.any() and 0 in (np.sort(s)[::-1][c.topk - 1 : c.topk + 1])):
                self.doubt = min(self.doubt, t)
        return chosen

    def attend(self, i, h):
        c, w, T, p = self.c, self.w, len(h), f"model.layers.{i}.self_attn."
        qr = rms_norm(h @ w[p + "q_a_proj.weight"].T, w[p + "q_a_layernorm.weight"], 1e-6)
        kv = h @ w[p + "kv_a_proj_with_mqa.weight"].T
        lat = rms_norm(kv[:, : c.C], w[p + "kv_a_layernorm.weight"], 1e-6)
        q = (qr @ w[p + "q_b_proj.weight"].T).reshape(T, c.heads, c.nope + c.rope)
        both = (lat @ w[p + "kv_b_proj.weight"].T).reshape(T, c.heads, c.nope + c.value)
        q[..., c.nope :] = self.rotate(q[..., c.nope :], False)
        pe = np.repeat(self.rotate(kv[:, None, c.C :], False), c.heads, 1)
        k, v = np.concatenate([both[..., : c.nope], pe], -1), both[..., c.nope :]
        if c.full[i]:
            self.keys = self.choose(p + "indexer.", h, qr)
        out = np.empty((T, c.heads, c.value))
        for t, keys in enumerate(self.keys):
            s = np.einsum("hd,khd->hk", q[t], k[keys]) * (c.nope + c.rope) ** -0.5
            s = np.exp(s - s.max(-1, keepdims=True))
            out[t] = np.einsum("hk,khd->hd", s / s.sum(-1, keepdims=True), v[keys])
        return out.reshape(T, -1) @ w[p + "o_proj.weight"].T

    def mlp(self, p, h, weight=None):
        a = silu(h @ self.w[p + "gate_proj.weight"].T) * (h @ self.w[p + "up_proj.weight"].T)
        return (a if weight is None else a * weight) @ self.w[p + "down_proj.weight"].T

    def route(self, p, x):
        c = self.c
        s = 1 / (1 + np.exp(-(self.w[p + "gate.weight"] @ x)))
        b = s + self.w[p + "gate.e_score_correction_bias"]
        near = False
        if c.groups > 1:
            each = b.reshape(c.groups, -1)
            group = np.sort(each, 1)[:, -2:].sum(1)
            near = nearly_tied(group, c.kept, 1)
            b = (each * np.isin(np.arange(c.groups), largest(group, c.kept))[:, None]).reshape(-1)
        near = near or nearly_tied(b, c.K, 1)
        ids = largest(b, c.K)
        weight = s[ids]
        if c.norm and c.K > 1:
            weight = weight / (weight.sum() + 1e-20)
        return ids, weight * c.scale, near

    def feed(self, i, h):
        c, p = self.c, f"model.layers.{i}.mlp."
        if not c.moe[i]:
            return self.mlp(p, h)
        out = self.mlp(p + "shared_experts.", h) if c.shared else np.zeros_like(h)
        for t in range(len(h)):
            ids, weight, near = self.route(p, h[t])
            if near:
                self.doubt = min(self.doubt, t)
            for e, x in zip(ids, weight):
                out[t] += self.mlp(f"{p}experts.{e}.", h[t : t + 1], x)[0]
        return out

    def run(self, ids):
        """Captured states [T, n*H], last [T, H], and the first doubtful position."""
        c, w = self.c, self.w
        self.doubt, layers = len(ids), c.depth or c.L
        x = w["model.embed_tokens.weight"][ids]
        state = {-1: x}
        for i in range(layers):
            p = f"model.layers.{i}."
            x = x + self.attend(i, rms_norm(x, w[p + "input_layernorm.weight"], c.eps))
            x = x + self.feed(i, rms_norm(x, w[p + "post_attention_layernorm.weight"], c.eps))
            state[i] = x
        last = rms_norm(x, w["model.norm.weight"], c.eps)
        state[layers - 1] = last
        return np.concatenate([state[i] for i in c.ids], 1), last, self.doubt


# ---- judging ---------------------------------------------------------------------------------------------------------------


def compare_row(case, got, want, last, factor, problems):
    worst = 0.0
    for name, y in (("target_hidden_states", want), ("target_last_hidden_states", last)):
        x = got[name].astype(np.float64)
        for j in range(0, y.shape[1], case.H):
            a, b = x[:, j : j + case.H], y[:, j : j + case.H]
            if not b.size:
                continue
            limit = factor * NOISE * max(1.0, float(np.sqrt(np.mean(b * b)))) + STEP[case.dtype] * np.abs(b)
            ratio = float((np.abs(a - b) / limit).max())
            worst = max(worst, ratio if ratio == ratio else math.inf)
            if not ratio <= 1:
                at = np.unravel_index(int(np.argmax(np.nan_to_num(np.abs(a - b) / limit, nan=np.inf))), b.shape)
                problems.append(f"{name} block {j // case.H}, position {at[0]}: {a[at]:.6g}, not {b[at]:.6g}, {ratio:.3g} x tolerance")
    return worst


def target_weights(case, where, problems):
    ours = read_tensors(os.path.join(where, "out", "target_weights.safetensors"))[0]
    for name, source in (("embed_tokens.weight", "model.embed_tokens.weight"), ("lm_head.weight", "lm_head.weight")):
        want = case.number[source].astype(np.float32)
        if case.dtype == "fp16":
            want = want.astype(np.float16)
        if not np.array_equal(ours[name], want):
            problems.append(f"target_weights {name} differs")


def compare(case, where, factor):
    tokens = read_tensors(os.path.join(where, "tokens.safetensors"))[0]
    offsets, problems, worst, left_out = tokens["row_offsets"], [], 0.0, 0
    n = len(offsets) - 1
    got, oracle = read_cache(os.path.join(where, "out"), n, case.shard), Oracle(case)
    target_weights(case, where, problems)
    for row in range(n):
        ids = tokens["input_ids"][offsets[row] : offsets[row + 1]]
        T = len(ids)
        ours = {k: v[row] for k, v in got.items()}
        if not np.array_equal(ours["input_ids"][:T], ids):
            problems.append(f"row {row}: input_ids differ")
        if any(ours[k][T:].any() for k in ("target_hidden_states", "target_last_hidden_states")):
            problems.append(f"row {row} is not zero at padded positions")
        want, last, doubt = oracle.run(ids)
        for end in (T, doubt):  # what is in doubt need not differ
            part = {k: ours[k][:end] for k in ("target_hidden_states", "target_last_hidden_states")}
            wrong = []
            ratio = compare_row(case, part, want[:end], last[:end], factor, wrong)
            if not wrong:
                break
        left_out += T - end
        worst = max(worst, ratio)
        problems += wrong
    return problems, worst, left_out, int(offsets[-1])


def judge(case, where, factor):
    """(verdict, detail, positions, positions left out): verdict is ok, refused or FAIL."""
    try:
        run_dspark(where)
    except Refused as e:
        if case.fault and case.fault in str(e):
            return "refused", str(e), 0, 0
        return "FAIL", f"refused: {e}", 0, 0
    if case.fault:
        return "FAIL", "was not refused", 0, 0
    problems, worst, left_out, positions = compare(case, where, factor)
    detail = f"{worst:.3f} of the tolerance, {positions} positions" + (f", {left_out} left out" if left_out else "")
    return ("FAIL", "; ".join(problems[:4])) + (positions, left_out) if problems else ("ok", detail, positions, left_out)


def one(job):
    a, index = job
    where = tempfile.mkdtemp(prefix="glm-fuzz.")
    case = None
    try:
        case = Case(a.seed, index, (PLAIN + PACKED)[index % len(PLAIN + PACKED)] if a.faults else None)
        case.build(where)
        result = judge(case, where, a.factor)
    except Exception as e:
        if not isinstance(e, RuntimeError):
            traceback.print_exc()
        result = ("FAIL", f"{type(e).__name__}: {e}", 0, 0)
    if result[0] == "FAIL" and a.keep:
        os.makedirs(a.keep, exist_ok=True)
        shutil.copytree(where, os.path.join(a.keep, f"{a.seed}-{index}"), dirs_exist_ok=True)
    shutil.rmtree(where)
    return index, ", ".join(case.notes) if case else "", result


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--count", type=int, default=50)
    p.add_argument("--only", metavar="I,J,...", help="these cases of the seed alone")
    p.add_argument("--faults", action="store_true", help="a fault in every case, each kind in turn")
    p.add_argument("--keep", metavar="DIR", help="keep failing cases there")
    p.add_argument("--factor", type=float, default=4, help="how many times the noise is good (default %(default)s)")
    p.add_argument("-j", type=int, default=1, metavar="N", help="cases at a time")
    a = p.parse_args()
    tally, positions, left_out = collections.Counter(), 0, 0
    jobs = [(a, int(i)) for i in (a.only.split(",") if a.only else range(a.count))]
    with multiprocessing.Pool(a.j) as pool:
        for index, notes, (verdict, detail, n, out) in pool.imap(one, jobs):
            print(f"{verdict} {a.seed}/{index} [{notes}]: {detail}", flush=True)
            tally[verdict] += 1
            positions += n
            left_out += out
    print(", ".join(f"{n} {v}" for v, n in sorted(tally.items())) + f"; {positions} positions, {left_out} left out")
    return 1 if tally["FAIL"] or left_out * 10 > positions else 0


if __name__ == "__main__":
    sys.exit(main())
