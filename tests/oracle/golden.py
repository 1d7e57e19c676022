#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Golden cases of Qwen3 and GLM by the reference.

    golden.py check CASE            computes the case's expected* again; exit 1 unless they are equal bit for bit
    golden.py bf16 CASE             writes the case's expected-bf16: the states alone
    golden.py cut CASE OUT OPTION...    a smaller case of the same kind, with the reference's results for it

      --dense N     width of dense MLPs           --expert N    width of an expert
      --heads N     query heads; key heads in proportion
      --rows I,J    the rows that stay            --mtp         of layers behind the last no attention, one expert

Runs under a Python with nemo-automodel 0.7.0, on a CPU, float32, right-padded rows of which the mask tells the length, in
batches of micro_batch_size, as every case.json says that its expected/ was made. Where the reference wants a GPU while it
builds a model it is told that the CPU is one (bench/reference.py). The `noise` of a case that was cut is the difference of
a run in float64, in which the reference keeps some of its steps in float32.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import sys

os.environ["TORCHDYNAMO_DISABLE"] = "1"
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "bench"))

import torch  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import reference  # noqa: E402

STATES = "target_hidden_states", "target_last_hidden_states"
DTYPES = {"expected": torch.float32, "expected-bf16": torch.bfloat16, "expected-force-hf": torch.float32}

MARGIN = 3e-5  # of a choice, at least

# ---- the reference -------------------------------------------------------------------------------


def glm(case, info, dtype):
    """The recipe's class with the torch backends: the recipe's own need a GPU."""
    import importlib

    def component(module, name):
        return getattr(importlib.import_module("nemo_automodel.components.models." + module), name)

    config = json.loads((case / "model/config.json").read_text())
    config = component("glm_moe_dsa.config", "GlmMoeDsaConfig")(**{**config, "dtype": dtype})
    backend = component("common", "BackendConfig")(**info["reference"]["backend"])
    model = component("glm_moe_dsa.model", "GlmMoeDsaForCausalLM")(config, backend=backend)
    weights = {k: v for k, v in checkpoint(case).items() if not behind(k, config.num_hidden_layers)}
    weights = model.state_dict_adapter.from_hf(weights)
    model.load_state_dict(weights, strict=True)
    return model


def load(case, info, dtype, force_hf):
    if info.get("family") == "glm_moe_dsa":
        return glm(case, info, dtype)
    options = {"force_hf": True} if force_hf else {}
    auto = reference.reference(torch).NeMoAutoModelForCausalLM
    return auto.from_pretrained(str(case / "model"), torch_dtype=dtype, **options).to("cpu")


def run(case, dtype, force_hf=False):
    """name -> states of all rows, [N, S, width]"""
    info = json.loads((case / "case.json").read_text())
    model = load(case, info, dtype, force_hf).eval().requires_grad_(False)
    target = reference.reference(torch).HFDSparkTargetModel(model, info["target_layer_ids"])
    (ids, real), out, n = padded(case, info), [], info["micro_batch_size"]
    for i in range(0, len(ids), n):
        out.append(target.generate_batch(ids[i : i + n], real[i : i + n], real[i : i + n]))
    return {name: torch.cat([getattr(b, name) for b in out]) for name in STATES}


# ---- files ---------------------------------------------------------------------------------------


def checkpoint(case):
    weights = {}
    for path in sorted((case / "model").glob("*.safetensors")):
        weights.update(load_file(path))
    return weights


def behind(name, layers):
    m = re.match(r"model\.layers\.(\d+)\.", name)
    return m and int(m.group(1)) >= layers


def padded(case, info):
    t = load_file(case / "tokens.safetensors")
    offsets, S = t["row_offsets"].tolist(), info["seq_length"]
    n = len(offsets) - 1
    ids = torch.full((n, S), info.get("pad_token_id", info.get("pad_id")))
    real = torch.zeros((n, S), dtype=torch.long)
    for i in range(n):
        length = offsets[i + 1] - offsets[i]
        ids[i, :length] = t["input_ids"][offsets[i] : offsets[i + 1]]
        real[i, :length] = 1
    return ids, real


def shard_size(info):
    return info.get("shard_size", info.get("cache_shard_size"))


def shards(info, tensors):
    n = shard_size(info)
    for i in range(-(-len(next(iter(tensors.values()))) // n)):
        yield f"shard-{i:06d}.safetensors", {k: x[i * n : (i + 1) * n].contiguous() for k, x in tensors.items()}


def write_shards(out, info, tensors):
    out.mkdir(parents=True, exist_ok=True)
    for name, shard in shards(info, tensors):
        save_file(shard, out / name)


# ---- check, bf16 ---------------------------------------------------------------------------------


def check(case):
    info, good = json.loads((case / "case.json").read_text()), True
    for name, dtype in DTYPES.items():
        if not (case / name).exists():
            continue
        states, worst = run(case, dtype, "force-hf" in name), 0.0
        for file, shard in shards(info, states):
            want = load_file(case / name / file)
            worst = max([worst] + [(shard[k].double() - want[k].double()).abs().max().item() for k in STATES])
        print(f"{case.name}/{name}: max abs difference {worst:g}", flush=True)
        good &= worst == 0
    return good


def bf16(case):
    info = json.loads((case / "case.json").read_text())
    states = run(case, torch.bfloat16)
    assert all(x.dtype == torch.bfloat16 for x in states.values())
    write_shards(case / "expected-bf16", info, states)
    return True


# ---- cut -----------------------------------------------------------------------------------------


def first(w, dim, n, packed):
    """The first n of rows or columns, of a grid of scales the blocks of these."""
    return w.narrow(int(dim), 0, -(-n // 128) if packed else n)


def widths(name, a, c):
    """(dimension, n) of what a cut shortens in a tensor, or None; c: config.json before."""
    m = re.search(r"\.(experts\.\d+\.|shared_experts\.)?(gate|up|down)_proj\.", name)
    if m:
        n = a.dense if not m.group(1) else a.expert
        shared = c.get("n_shared_experts", 1) if m.group(1) == "shared_experts." else 1
        return n and (m.group(2) == "down", n * shared)
    m = a.heads and re.search(r"self_attn\.([qkvo]|[qkv]+_b)_proj\.(weight|bias)", name)
    if not m or m.group(1, 2) == ("o", "bias"):
        return None
    nope = c.get("qk_nope_head_dim")
    key_heads = c["num_key_value_heads"] * a.heads // c["num_attention_heads"]
    head = {"o": c.get("v_head_dim", c["head_dim"]), "q_b": nope and nope + c["qk_rope_head_dim"],
            "kv_b": nope and nope + c["v_head_dim"]}.get(m.group(1), c["head_dim"])
    return m.group(1) == "o", head * (key_heads if m.group(1) in ("k", "v") else a.heads)


def cut_weight(name, w, a, c):
    """What stays of a tensor, None for nothing."""
    if a.mtp and behind(name, c["num_hidden_layers"]) and re.search(r"self_attn|shared_e|experts\.[1-9]", name):
        return None
    cut = widths(name, a, c)
    return first(w, *cut, name.endswith("_scale_inv")).contiguous() if cut else w


def cut_model(case, out, a):
    c = json.loads((case / "model/config.json").read_text())
    shutil.copytree(case / "model", out / "model")
    places = {}
    for path in sorted((out / "model").glob("*.safetensors")):
        kept = {k: cut_weight(k, w, a, c) for k, w in load_file(path).items()}
        kept = {k: w for k, w in kept.items() if w is not None}
        path.unlink()
        save_file(kept, path, {"format": "pt"})
        places.update((k, path.name) for k in kept)
    index = out / "model/model.safetensors.index.json"
    if index.exists():
        total = sum(w.numel() * w.element_size() for w in checkpoint(out).values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}, indent=2)
        index.write_text(text + "\n")
    if a.dense:
        c["intermediate_size"] = a.dense
    if a.expert:
        c["moe_intermediate_size"] = a.expert
    if a.heads:
        c["num_key_value_heads"] = c["num_key_value_heads"] * a.heads // c["num_attention_heads"]
        c["num_attention_heads"] = a.heads
    (out / "model/config.json").write_text(json.dumps(c, indent=2) + "\n")


def cut_rows(case, out, rows):
    import xxhash

    with safe_open(case / "tokens.safetensors", "pt") as f:
        meta = f.metadata()
        t = {k: f.get_tensor(k) for k in f.keys()}
    o = t["row_offsets"].tolist()
    for k in ("input_ids", "loss_mask"):
        t[k] = torch.cat([t[k][o[i] : o[i + 1]] for i in rows])
    lengths = [o[i + 1] - o[i] for i in rows]
    t["row_offsets"] = torch.tensor([0, *lengths]).cumsum(0)
    digest = xxhash.xxh3_128()
    for k in ("input_ids", "loss_mask", "row_offsets"):
        digest.update(t[k].numpy().tobytes())
    meta.update(num_rows=str(len(rows)), rows_xxh3_128=digest.hexdigest())
    save_file(t, out / "tokens.safetensors", meta)
    return lengths


def noise(out, states, lengths):
    exact, worst = run(out, torch.float64), {}
    for name in STATES:
        pairs = [(states[name][i, :n].double(), exact[name][i, :n].double()) for i, n in enumerate(lengths)]
        worst[name] = {"max_abs": max((x - y).abs().max().item() for x, y in pairs)}
    return {"explain": "against the same run in float64, real positions", **worst}


class Margins:
    """The smallest distance between the last chosen and the first rejected number of any topk meanwhile."""

    def __enter__(self):
        self.least, self.before = float("inf"), (torch.topk, torch.Tensor.topk)

        def watched(x, k, *a, **o):
            self.look(x.detach(), k)
            return self.before[0](x, k, *a, **o)

        torch.topk = torch.Tensor.topk = watched
        return self

    def __exit__(self, *_):
        torch.topk, torch.Tensor.topk = self.before

    def look(self, x, k):
        if k < x.shape[-1]:
            best = self.before[0](x.double(), k + 1).values
            gap = (best[..., k - 1] - best[..., k])[best[..., k] > -1e30]
            self.least = min([self.least, *gap.tolist()])


def options(a):
    return {k: v for k, v in vars(a).items() if v and k not in ("command", "case", "out")}


def cut(case, out, a):
    info = json.loads((case / "case.json").read_text())
    rows = a.rows or list(range(len(info["lengths"])))
    out.mkdir()
    shutil.copy(case / "recipe.yaml", out)
    cut_model(case, out, a)
    lengths = cut_rows(case, out, rows)
    known = "case family what notes reference model_type target_layer_ids seq_length micro_batch_size shard_size " \
        "cache_shard_size pad_token_id pad_id compute_dtype cache_dtype weights_storage checkpoint_dtype config_layout"
    info = {k: info[k] for k in known.split() if k in info}
    info.update(lengths=lengths, num_samples=len(rows), cut={"by": "tests/oracle/golden.py", **options(a)})
    (out / "case.json").write_text(json.dumps(info, indent=1) + "\n")
    whole = {}
    for path in sorted((case / "expected").glob("shard-*.safetensors")):
        for k, x in load_file(path).items():
            whole[k] = torch.cat([whole[k], x]) if k in whole else x
    if (case / "expected/target_weights.safetensors").exists():
        (out / "expected").mkdir()
        shutil.copy(case / "expected/target_weights.safetensors", out / "expected")
    for name, dtype in DTYPES.items():
        if (case / name).exists():
            with Margins() as margins:
                states = run(out, dtype, "force-hf" in name)
            if dtype == torch.float32 and margins.least < MARGIN:
                print(f"{name}: a choice is only {margins.least:g} from a tie: cut otherwise", file=sys.stderr)
                return False
            tensors = {k: x[rows] for k, x in whole.items() if k not in STATES} if dtype == torch.float32 else {}
            write_shards(out / name, info, {**tensors, **states})
            if name == "expected":
                info["smallest_margin_of_a_choice"] = margins.least if margins.least < float("inf") else None
                info["noise"] = noise(out, states, lengths)
            if name == "expected-force-hf" and all(near(states[k], load_all(out / "expected", k), lengths) for k in STATES):
                shutil.rmtree(out / name)
                continue
            if dtype == torch.float32:
                manifest = (case / name / "manifest.json").read_text()
                samples = re.sub(r'"num_samples": \d+', f'"num_samples": {len(rows)}', manifest)
                (out / name / "manifest.json").write_text(samples)
    (out / "case.json").write_text(json.dumps(info, indent=1) + "\n")
    return check(out)


def cut_recipe(case, out, a):
    """A case with rows.jsonl: the reference's recipe runs on what was cut, its first rows."""
    import subprocess

    keep = len(a.rows) if a.rows else None
    if a.rows and a.rows != list(range(keep)):
        sys.exit("golden.py: of a recipe's rows the first ones stay")
    out.mkdir()
    for name in ("recipe.yaml", "rows.jsonl"):
        (out / name).write_text("".join((case / name).read_text().splitlines(True)[: keep if "rows" in name else None]))
    cut_model(case, out, a)
    info = json.loads((case / "case.json").read_text())
    info.update(num_samples=keep or info["num_samples"], cut={"by": "tests/oracle/golden.py", **options(a)})
    (out / "case.json").write_text(json.dumps(info, indent=1) + "\n")
    tokenize = pathlib.Path(__file__).resolve().parent.parent.parent / "tools/dspark-tokenize.py"
    os.chdir(out)
    subprocess.run([sys.executable, tokenize, "-q", "-c", "recipe.yaml", "-o", "tokens.safetensors"], check=True)
    reference.reference(torch)
    from nemo_automodel.recipes.llm.precompute_dspark_dist import main as recipe

    sys.argv = ["precompute_dspark_dist", "-c", "recipe.yaml", "--recipe_args.cache_output_dir", "expected"]
    return not recipe()


def load_all(where, name):
    return torch.cat([load_file(p)[name] for p in sorted(where.glob("shard-*.safetensors"))])


def near(x, y, lengths):
    """Nothing but noise at real positions: one of the two is enough."""
    return all((x[i, :n] - y[i, :n]).abs().max() < 1e-4 for i, n in enumerate(lengths))


def main(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("command", choices=("check", "bf16", "cut"))
    p.add_argument("case", type=pathlib.Path)
    p.add_argument("out", type=pathlib.Path, nargs="?")
    for name in ("--dense", "--expert", "--heads"):
        p.add_argument(name, type=int)
    p.add_argument("--rows", type=lambda s: [int(i) for i in s.split(",")])
    p.add_argument("--mtp", action="store_true")
    a = p.parse_args(argv)
    torch.set_num_threads(1)
    if a.command != "cut":
        return (check if a.command == "check" else bf16)(a.case)
    return (cut_recipe if (a.case / "rows.jsonl").exists() else cut)(a.case, a.out, a)


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))
