#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare random tiny Qwen3 and Qwen3-MoE targets with the reference, nemo-automodel 0.7.0 on the CPU.

    PATH=BUILD:$PATH PYTHON qwen3_fuzz.py --shim DIR [--seed N] [--count N] [--only I,J,...] [--factor F] [--keep DIR]

Case I of seed N is a checkpoint, a recipe and rows drawn from the whole option space that dspark accepts, and a little
beyond. Both sides compute it in fp32: dspark-plan | dspark-load | dspark-forward | dspark-manifest merge, and the
reference's loader with its own capture on the padded rows. A case passes if

  - both refuse it (dspark with exit 1 in the plan), or one of them does, for a reason listed in INTENDED or THEIRS; or
  - both run, dspark-manifest verify is content, manifest.json has the reference's bytes, target_weights and the ids are equal,
    padded positions are zero, and every real position is within 20 x 1.5e-5 x max(1, rms of the tensor) plus one rounding
    step of the cache dtype. Positions after a routing decision that the reference itself took with a margin of less
    than 1e-5 of the probability are left out and counted.

PYTHON needs nemo-automodel 0.7.0, numpy and xxhash. DIR holds cpu_shim.py, which lets the reference run without a GPU driver.
One line a case; exit 0 if all pass, 1 otherwise. --keep DIR leaves the cases that fail there.
"""

import argparse
import collections
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import traceback
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))

import make_model  # noqa: E402
import make_tokens  # noqa: E402
import numpy as np  # noqa: E402

NOISE, FACTOR = 1.5e-5, 20
STEP = {"fp32": 0.0, "fp16": 2.0**-10, "bf16": 2.0**-7}
MARGIN = 1e-5

# dspark refuses what the reference runs, on purpose: part of dspark's sentence -> why.
INTENDED = {
    "partial_rotary_factor is not supported": "no published Qwen3 has it and the reference's two classes disagree",
    "use_sliding_window is true": "the reference's qwen3_moe ignores the window silently",
    "is missing from": "force_hf fills a missing tensor with random numbers",
    "hidden_act": "only silu is published",
    "rope_theta must exceed 1": "theta of at most 1 turns the frequencies upside down",
}

# The reference cannot run what dspark runs: part of its sentence -> why.
THEIRS = {
    "CheckpointException": "the default class does not know fused experts, dspark reads them",
    "strides should be multiple of 16 bytes": "torch's grouped product wants widths that are multiples of 4",
}


# ---- a random case --------------------------------------------------------------------------------------------------


class Case:
    """What one case is made of: options for make_model and make_tokens, and what only the recipe knows."""

    def __init__(self, seed, index):
        self.r = random.Random(f"{seed}/{index}")
        self.notes = []
        self.moe = self.r.random() < 0.5
        self.force_hf = self.r.random() < 0.35
        self.model = ["--seed", str(index), "--type", "qwen3_moe" if self.moe else "qwen3"]
        self.sizes()
        self.layout()
        self.rope()
        self.window()
        if self.moe:
            self.experts()
        self.odd_keys()
        self.storage()
        self.rows()

    def maybe(self, p):
        return self.r.random() < p

    def opt(self, *words):
        self.model += [str(w) for w in words]

    def key(self, name, value):
        self.opt("--set", f"{name}={json.dumps(value)}")

    def sizes(self):
        r = self.r
        self.layers = r.choice((1, 2, 2, 2, 3, 3, 4, 4, 5, 7)) if self.maybe(0.85) else r.randint(8, 14)
        self.kv = r.choice((1, 1, 2, 3, 4))
        self.heads = self.kv * r.choice((1, 2, 3, 4))
        self.D = r.choice((2, 4, 6, 10, 16, 18, 32, 32, 34, 64, 66, 128))
        self.hidden = r.choice((8, 24, 32, 48, 64, 64, 72, 100, 130))
        self.vocab = r.choice((7, 64, 257, 512))
        if self.maybe(0.12):
            self.D = 2 * r.randint(1, 16)
            if self.moe:
                self.hidden = self.heads * self.D
                if self.maybe(0.3):
                    self.hidden += r.randrange(self.heads)
            else:
                self.D = 128
            self.opt("--unset", "head_dim")
            self.notes.append("head_dim absent")
        if self.maybe(0.06):
            self.kv = 4 if self.moe else self.heads
            if self.moe:
                self.heads = 4 * r.choice((1, 2, 3))
                self.opt("--unset", "num_key_value_heads")
            else:
                self.key("num_key_value_heads", None)
            self.notes.append("kv heads by default")
        self.opt("--layers", self.layers, "--hidden", self.hidden, "--heads", self.heads, "--kv", self.kv)
        self.opt("--head-dim", self.D, "--intermediate", r.choice((8, 40, 64, 128, 200)), "--vocab", self.vocab)
        self.opt("--dtype", r.choice(("bf16", "bf16", "f16", "f32")), "--eps", r.choice((1e-6, 1e-6, 1e-5, 1e-3)))
        if self.maybe(0.35):
            self.opt("--files", r.choice((2, 3, 5)))
        if self.maybe(0.4):
            self.opt("--attention-bias")
            if self.maybe(0.1):
                self.key("attention_bias", False)
                self.notes.append("stray biases")
        elif self.maybe(0.02):
            self.key("attention_bias", True)
        if self.moe:
            if self.force_hf and self.maybe(0.2):
                self.key("tie_word_embeddings", True)
            elif self.maybe(0.03):
                self.key("tie_word_embeddings", True)
        elif self.maybe(0.5):
            self.opt("--untied")
        elif self.maybe(0.3):
            self.opt("--redundant-head")
        if self.maybe(0.02):
            self.opt("--drop", "model.layers.0.self_attn.k_norm.weight")
        if self.maybe(0.02):
            self.opt("--reshape", f"model.norm.weight={self.hidden + 1}")

    def storage(self):
        """What make_model cannot write is made of its files: fused experts, tensors of several dtypes."""
        self.fused = self.moe and self.maybe(0.35 if self.force_hf else 0.04)
        self.mixed = self.maybe(0.15)
        if self.fused:
            self.notes.append("fused experts")
        if self.mixed:
            self.notes.append("mixed dtypes")

    def layout(self):
        self.new = self.maybe(0.5)
        self.positions = self.r.choice((40960, 40960, 4096, 512, 128, 64))
        self.opt("--layout", 5 if self.new else 4, "--max-position", self.positions)

    def scaling(self, kind):
        r = self.r
        p = {"factor": r.choice((1.0, 1.5, 2, 4.0, 8.0))}
        original = r.choice((None, 32, 64, 256, 4096, 32768))
        if self.moe and not self.force_hf and self.maybe(0.7):  # the default class's YaRN runs for few sizes only
            self.theta = 1000000.0
            self.opt("--rope-theta", self.theta)
            self.D = self.D if self.D >= 64 else r.choice((64, 128))
            self.opt("--head-dim", self.D)
            original = r.choice((4096, 2048, 8192, 1000))
            p["original_max_position_embeddings"] = original
        if kind == "llama3":
            p.update(low_freq_factor=r.choice((1.0, 2)), high_freq_factor=r.choice((4.0, 8)))
        if kind == "yarn":
            for key, values in (
                ("beta_fast", (32, 16.0, 8)),
                ("beta_slow", (1, 2.0, 0.5)),
                ("attention_factor", (1.0, 0.7, 1.3)),
                ("truncate", (True, False)),
                ("mscale", (1.0, 0.707)),
                ("mscale_all_dim", (1.0, 0.5, 0)),
            ):
                if self.maybe(0.3):
                    p[key] = r.choice(values)
            if self.maybe(0.07):
                p["factor"] = None
            if self.maybe(0.05):
                p["attention_factor"] = None
        if kind == "longrope":
            for key in ("short_factor", "long_factor"):
                p[key] = [round(r.uniform(1, 4), 3) for _ in range(self.D // 2)]
            if self.maybe(0.3):
                p["attention_factor"] = r.choice((1.0, 1.2))
            if self.maybe(0.3):
                del p["factor"]
        if self.maybe(0.04):
            del p[r.choice(sorted(p))]
        if original and kind in ("llama3", "yarn", "longrope"):
            if self.maybe(0.12):
                self.key("original_max_position_embeddings", original)
                self.notes.append("original_max at the top")
            else:
                p["original_max_position_embeddings"] = original
        return p

    def rope(self):
        r = self.r
        self.theta = r.choice((10000.0, 1000000.0, 1000000, 5000000.0, 500.0))
        self.opt("--rope-theta", self.theta)
        kind = r.choice(("none",) * 5 + ("default", "linear", "llama3", "dynamic", "yarn", "yarn", "yarn", "longrope", "proportional"))
        if self.maybe(0.02):
            kind = r.choice(("ntk", "su", "mrope"))
        self.notes.append(f"rope {kind}")
        if kind == "none":
            if self.maybe(0.1):
                self.opt("--unset", "rope_parameters" if self.new else "rope_theta")
                self.notes.append("no theta")
            return
        p = self.scaling(kind) if kind != "default" else {}
        p["type" if self.maybe(0.3) else "rope_type"] = kind
        if self.new and "type" in p:
            self.key("rope_parameters", {"rope_theta": self.theta, **p})
        else:
            self.opt("--rope", json.dumps(p))

    def window(self):
        r = self.r
        if self.moe and not self.force_hf and self.maybe(0.95):
            return
        if self.maybe(0.6):
            if not self.new and self.maybe(0.3):
                self.key("sliding_window", r.choice((4, 64)))
            return
        self.opt("--sliding-window", r.choice((1, 2, 3, 8, 17, 32, 64, 200)))
        self.opt("--max-window-layers", r.randint(0, self.layers))
        self.notes.append("window")
        if self.maybe(0.25) and not self.moe:
            self.key("layer_types", [r.choice(("sliding_attention", "full_attention")) for _ in range(self.layers)])
            if self.maybe(0.15):
                self.key("use_sliding_window", False)
        elif self.maybe(0.1):
            self.opt("--unset", "max_window_layers")
        if self.maybe(0.05):
            self.key("sliding_window", None)

    def experts(self):
        r = self.r
        experts = r.choice((1, 2, 3, 4, 8, 16))
        k = 1 if self.maybe(0.3) else r.randint(1, experts)
        self.opt("--moe-intermediate", r.choice((8, 24, 32, 80)), "--topk", k)
        if self.maybe(0.5):
            self.opt("--no-norm-topk-prob")
        if self.maybe(0.06):
            self.opt("--mlp-only-layers", ",".join(map(str, range(self.layers))))
            self.key("num_local_experts" if self.new else "num_experts", 0)
            self.key("mlp_only_layers", [])
            self.notes.append("no experts")
            return
        self.opt("--experts", experts)
        if self.maybe(0.25):
            self.opt("--decoder-sparse-step", r.choice((2, 3)))
        if self.maybe(0.25):
            self.opt("--mlp-only-layers", r.randrange(self.layers))
        if self.maybe(0.15):
            old, new = ("num_local_experts", "num_experts") if self.new else ("num_experts", "num_local_experts")
            self.opt("--unset", old)
            self.key(new, experts)

    def odd_keys(self):
        if self.maybe(0.03):
            self.key("hidden_act", self.r.choice(("gelu", "relu")))
        if self.maybe(0.03):
            self.key("head_dim", self.r.choice((self.D + 1, None, 0)))
        if self.maybe(0.02):
            self.key("num_key_value_heads", self.kv + 1)
        if self.moe and self.maybe(0.02):
            self.key("num_experts_per_tok", 99)
        if self.maybe(0.03):
            self.key("vocab_size", self.vocab + 1)
        if self.maybe(0.05):
            self.key("pad_token_id", self.r.randrange(self.vocab))
        if self.maybe(0.02):
            self.key("partial_rotary_factor", 0.5)
        if self.maybe(0.1):
            self.opt("--unset", self.r.choice(("attention_bias", "tie_word_embeddings", "use_sliding_window", "rms_norm_eps")))

    def rows(self):
        r = self.r
        self.seq = r.choice((1, 2, 3, 16, 33, 64, 100, 150, 256, 300))
        self.batch = r.choice((1, 1, 2, 3))
        self.shard = self.batch * r.choice((1, 2, 4))
        n = r.randint(1, 9)
        lengths = [r.choice((1, self.seq, r.randint(1, self.seq), r.randint(1, self.seq))) for _ in range(n)]
        self.dtype = r.choice(("fp32", "fp32", "fp32", "bf16", "fp16"))
        self.tokens = ["--vocab", self.vocab, "--rows", n, "--seq-length", self.seq, "--seed", r.randrange(1000)]
        self.tokens += ["--lengths", ",".join(map(str, lengths)), "--micro-batch-size", self.batch]
        self.tokens += ["--shard-size", self.shard, "--cache-dtype", self.dtype, "--pad-token-id", r.randrange(self.vocab)]
        self.ids = None
        if self.maybe(0.6):
            possible = range(-1, self.layers)
            self.ids = sorted(r.sample(possible, r.randint(1, min(6, len(possible)))))
            if self.maybe(0.04):
                self.ids = r.choice(([self.layers], [0, 0], [1, 0], [-2]))
            self.tokens += ["--layer-ids=" + ",".join(map(str, self.ids))]
        else:
            self.draft = r.randint(1, 7)
            self.tokens += ["--draft-layers", self.draft]

    def build(self, where):
        model = make_model.options([*self.model, os.path.join(where, "model")])
        make_model.write_model(model)
        if self.fused or self.mixed:
            rewrite(self, os.path.join(where, "model"))
        tokens = make_tokens.options(
            [str(w) for w in self.tokens]
            + ["--model", os.path.join(where, "model"), "--recipe", os.path.join(where, "recipe.yaml")]
            + ["--cache-output-dir", os.path.join(where, "out"), os.path.join(where, "tokens.safetensors")]
        )
        make_tokens.write_tokens(tokens)
        make_tokens.write_recipe(tokens)
        with open(os.path.join(where, "recipe.yaml"), "a") as f:
            f.write(f"  target_force_hf: {json.dumps(self.force_hf)}\n")
        with open(os.path.join(where, "case.json"), "w") as f:
            json.dump({"model": self.model, "tokens": [str(t) for t in self.tokens], "force_hf": self.force_hf}, f, indent=1)


def rewrite(case, path):
    """One file in place of make_model's, with stacked experts and with other dtypes here and there."""
    import torch
    from safetensors.torch import load_file, save_file

    names = [n for n in os.listdir(path) if n.endswith(".safetensors")]
    tensors = {}
    for name in names:
        tensors.update(load_file(os.path.join(path, name)))
        os.unlink(os.path.join(path, name))
    if len(names) > 1:
        os.unlink(os.path.join(path, "model.safetensors.index.json"))
    for i in range(case.layers if case.fused else 0):
        stem = f"model.layers.{i}.mlp.experts."
        n = len([t for t in tensors if t.startswith(stem)]) // 3
        if n:
            take = {k: [tensors.pop(f"{stem}{e}.{k}_proj.weight") for e in range(n)] for k in ("gate", "up", "down")}
            tensors[stem + "gate_up_proj"] = torch.stack([torch.cat(p) for p in zip(take["gate"], take["up"])])
            tensors[stem + "down_proj"] = torch.stack(take["down"])
    for name in sorted(tensors) if case.mixed else ():
        tensors[name] = tensors[name].to(case.r.choice((torch.float32, torch.bfloat16, torch.float16)))
    save_file(tensors, os.path.join(path, "model.safetensors"), {"format": "pt"})


# ---- safetensors ----------------------------------------------------------------------------------------------------

NUMPY = {"I64": "<i8", "I32": "<i4", "U8": "u1", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def read_tensors(path):
    """name -> array (BF16 widened to F32), and the metadata"""
    with open(path, "rb") as f:
        raw = f.read()
    size = struct.unpack("<Q", raw[:8])[0]
    head, out = json.loads(raw[8 : 8 + size]), {}
    meta = head.pop("__metadata__", {})
    for name, t in head.items():
        begin, end = t["data_offsets"]
        x = np.frombuffer(raw[8 + size + begin : 8 + size + end], NUMPY[t["dtype"]]).reshape(t["shape"])
        out[name] = (x.astype("<u4") << 16).view("<f4") if t["dtype"] == "BF16" else x
    return out, meta


def padded(where, seq):
    """input_ids, loss_mask [N,S] int64, lengths [N], pad-filled as the recipe does, and the metadata"""
    t, meta = read_tensors(os.path.join(where, "tokens.safetensors"))
    offsets = t["row_offsets"]
    n, lengths = len(offsets) - 1, np.diff(offsets)
    ids, mask = np.full((n, seq), int(meta["pad_token_id"]), np.int64), np.zeros((n, seq), np.int64)
    for i in range(n):
        ids[i, : lengths[i]] = t["input_ids"][offsets[i] : offsets[i + 1]]
        mask[i, : lengths[i]] = t["loss_mask"][offsets[i] : offsets[i + 1]]
    return ids, mask, lengths, meta


# ---- the two sides --------------------------------------------------------------------------------------------------


class Refused(Exception):
    pass


def run_dspark(where):
    """Runs the four commands. Refused for exit 1 of the plan, RuntimeError for any other failure."""

    def step(words, stdin=None):
        p = subprocess.run(words, input=stdin, capture_output=True, cwd=where, timeout=300)
        return p.returncode, p.stdout, p.stderr.decode(errors="replace").strip()

    code, plan, said = step(["dspark-plan", "-q", "-c", "recipe.yaml", "-t", "tokens.safetensors", "--device", "cpu"])
    if code == 1 and not plan:
        raise Refused(said.splitlines()[-1])
    for words in (["dspark-plan"], ["dspark-load", "-q"], ["dspark-forward", "-q"], ["dspark-manifest", "merge"]):
        if words[0] != "dspark-plan":
            code, plan, said = step(words, plan)
        if code:
            raise RuntimeError(f"{words[0]}: exit {code}: {said}")
    code, _, said = step(["dspark-manifest", "verify", "out"])
    if code:
        raise RuntimeError(f"dspark-manifest verify: exit {code}: {said}")


class Reference:
    """nemo-automodel's loader, capture and cache functions."""

    def __init__(self, shim):
        sys.path.insert(0, shim)
        import logging

        import torch

        torch.set_num_threads(1)
        import cpu_shim

        cpu_shim.install()
        from nemo_automodel._transformers import NeMoAutoModelForCausalLM
        from nemo_automodel.components.datasets.llm import dspark_cache
        from nemo_automodel.components.speculative.dspark import registry, target, target_utils
        from nemo_automodel.components.speculative.dspark.common import validate_target_layer_ids

        self.torch, self.loader, self.cache = torch, NeMoAutoModelForCausalLM, dspark_cache
        self.registry, self.target, self.check_ids = registry, target, validate_target_layer_ids
        self.read_type = target_utils.read_target_model_type
        logging.disable(logging.CRITICAL)
        warnings.filterwarnings("ignore")

    def watch_routers(self, model, batch, seq, doubt):
        """Marks in doubt [B,S] where a router's choice was nearly a tie."""
        handles, torch = [], self.torch
        for module in model.modules():
            if type(module).__name__ not in ("Gate", "Qwen3MoeTopKRouter"):
                continue

            def hook(gate, inputs):
                k = getattr(gate, "topk", None) or gate.top_k
                p = torch.softmax(inputs[0].reshape(-1, inputs[0].shape[-1]).double() @ gate.weight.double().T, -1)
                if k < p.shape[1]:
                    top = p.topk(k + 1, -1).values
                    near = (top[:, k - 1] - top[:, k]) < MARGIN * top[:, k - 1]
                    if near.shape[0] == batch * seq:
                        np.logical_or(doubt, near.reshape(batch, seq).numpy(), out=doubt)

            handles.append(module.register_forward_pre_hook(hook))
        return handles

    def run(self, case, where):
        """The cache tensors of every row, target weights, doubtful positions, and the manifest's bytes."""
        torch = self.torch
        path = os.path.join(where, "model")
        ids, mask, lengths, meta = padded(where, case.seq)
        kind = self.read_type(path, False)
        model = self.loader.from_pretrained(path, trust_remote_code=False, torch_dtype=torch.float32, force_hf=case.force_hf)
        model.eval().requires_grad_(False)
        layers = int(model.config.num_hidden_layers)
        chosen = self.check_ids(list(case.ids or self.registry.build_target_layer_ids(layers, case.draft)), layers)
        wrapper = self.target.HFDSparkTargetModel(model, target_layer_ids=chosen)
        dtype = self.cache.DTYPE_MAP[case.dtype]
        parts, doubts = [], []
        for at in range(0, len(ids), case.batch):
            b = slice(at, min(at + case.batch, len(ids)))
            real = torch.from_numpy(np.arange(case.seq)[None] < lengths[b, None]).long()
            doubt = np.zeros(real.shape, bool)
            handles = self.watch_routers(model, *real.shape, doubt)
            with torch.no_grad():
                got = wrapper.generate_batch(
                    input_ids=torch.from_numpy(ids[b]), attention_mask=real, loss_mask=torch.from_numpy(mask[b])
                )
            for h in handles:
                h.remove()
            parts.append(self.cache.compute_batch_cache(got, dtype))
            doubts.append(doubt)
        manifest = self.cache.build_cache_manifest(
            target_model=path, target_model_type=kind, target_text_config=model.config, seq_length=case.seq, dtype=case.dtype,
            num_samples=len(ids), shard_size=case.shard, target_layer_ids=chosen, train_data_path="rows.jsonl", train_split=None,
            shuffle_seed=42, mask_reasoning_content=False, mask_generation_prompt=False,
            chat_template_sha256=meta["chat_template_sha256"],
        )
        os.makedirs(os.path.join(where, "ref"), exist_ok=True)
        self.cache.write_manifest(os.path.join(where, "ref"), {**manifest, "complete": True})
        weights = {
            "embed_tokens.weight": model.get_input_embeddings().weight.to(dtype).float().numpy(),
            "lm_head.weight": model.get_output_embeddings().weight.to(dtype).float().numpy(),
        }
        rows = {k: torch.cat([p[k] for p in parts]) for k in parts[0]}
        rows = {k: (v if v.dtype == torch.int64 else v.float()).numpy() for k, v in rows.items()}
        return rows, weights, np.concatenate(doubts), lengths


# ---- judging --------------------------------------------------------------------------------------------------------


def read_cache(out, n, shard):
    parts = [read_tensors(os.path.join(out, f"shard-{i:06d}.safetensors"))[0] for i in range((n + shard - 1) // shard)]
    return {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}


def compare(case, where, factor, want, weights, doubt, lengths):
    """Problems, the worst error in units of the tolerance, and how many real positions were left out."""
    problems, worst = [], 0.0
    got = read_cache(os.path.join(where, "out"), len(lengths), case.shard)
    with open(os.path.join(where, "ref", "manifest.json"), "rb") as a, open(os.path.join(where, "out", "manifest.json"), "rb") as b:
        if a.read() != b.read():
            problems.append("manifest.json differs")
    ours = read_tensors(os.path.join(where, "out", "target_weights.safetensors"))[0]
    for name, w in weights.items():
        if not np.array_equal(ours[name].astype("<f4"), w):
            problems.append(f"target_weights {name} differs")
    for name in ("input_ids", "loss_mask"):
        if not np.array_equal(got[name], want[name]):
            problems.append(f"{name} differs")
    real = np.arange(case.seq)[None] < lengths[:, None]
    use = real & ~(np.cumsum(doubt, 1) > 0)
    width = want["target_last_hidden_states"].shape[-1]
    for name in ("target_hidden_states", "target_last_hidden_states"):
        if got[name].shape != want[name].shape:
            problems.append(f"{name} has shape {got[name].shape}, not {want[name].shape}")
            continue
        if got[name][~real].any():
            problems.append(f"{name} is not zero at padded positions")
        for j in range(0, want[name].shape[-1], width):
            x, y = got[name][..., j : j + width][use].astype(np.float64), want[name][..., j : j + width][use].astype(np.float64)
            if not y.size:
                continue
            limit = factor * NOISE * max(1.0, float(np.sqrt(np.mean(y * y)))) + STEP[case.dtype] * np.abs(y)
            ratio = float((np.abs(x - y) / limit).max())
            worst = max(worst, ratio)
            if not ratio <= 1:
                problems.append(f"{name} block {j // width}: max abs error {np.abs(x - y).max():.3g} = {ratio:.3g} x tolerance")
    return problems, worst, int((real & ~use).sum())


def judge(case, where, reference, factor):
    """(verdict, detail): verdict is ok, refused, intended or FAIL."""
    try:
        run_dspark(where)
        ours = None
    except Refused as e:
        ours = str(e)
    try:
        result = reference.run(case, where)
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # whatever the reference raises is its refusal; CheckpointException is no Exception
        theirs = f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else ''}"
        if ours is not None:
            return "refused", f"{ours} | {theirs}"
        for text, why in THEIRS.items():
            if text in theirs and (case.fused or "Checkpoint" not in text):
                return "intended", f"only the reference refuses: {theirs} ({why})"
        return "FAIL", f"only the reference refuses: {theirs}"
    if ours is not None:
        for text, why in INTENDED.items():
            if text in ours:
                return "intended", f"{ours} ({why})"
        return "FAIL", f"only dspark refuses: {ours}"
    problems, worst, left_out = compare(case, where, factor, *result)
    detail = f"{worst:.3f} of the tolerance" + (f", {left_out} positions left out" if left_out else "")
    return ("FAIL", "; ".join(problems)) if problems else ("ok", detail)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shim", required=True, metavar="DIR", help="where cpu_shim.py is")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--count", type=int, default=50)
    p.add_argument("--only", metavar="I,J,...", help="these cases of the seed alone")
    p.add_argument("--keep", metavar="DIR", help="keep failing cases there")
    p.add_argument("--factor", type=float, default=FACTOR, help="how many times the noise is good (default %(default)s)")
    a = p.parse_args()
    reference, tally = Reference(a.shim), collections.Counter()
    for index in [int(i) for i in a.only.split(",")] if a.only else range(a.count):
        case, where = Case(a.seed, index), tempfile.mkdtemp(prefix="qwen3-fuzz.")
        try:
            case.build(where)
            verdict, detail = judge(case, where, reference, a.factor)
        except Exception as e:
            verdict, detail = "FAIL", f"{type(e).__name__}: {e}"
            if not isinstance(e, RuntimeError):
                traceback.print_exc()
        kind = ("moe" if case.moe else "dense") + ("/force_hf" if case.force_hf else "")
        print(f"{verdict} {a.seed}/{index} {kind} [{', '.join(case.notes)}]: {detail}", flush=True)
        tally[verdict] += 1
        if verdict == "FAIL" and a.keep:
            os.makedirs(a.keep, exist_ok=True)
            shutil.copytree(where, os.path.join(a.keep, f"{a.seed}-{index}"), dirs_exist_ok=True)
        shutil.rmtree(where)
    print(", ".join(f"{n} {v}" for v, n in sorted(tally.items())))
    return 1 if tally["FAIL"] else 0


if __name__ == "__main__":
    sys.exit(main())
