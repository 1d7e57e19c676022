#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the reference computes in bfloat16 for a golden case of GLM.

    glm_bf16.py CASE OUT            the case's expected-bf16/: states in BF16, one file a shard
    glm_bf16.py --check CASE        computes in float32 and compares with expected/; exit 1 if they differ

Runs under a Python with nemo-automodel 0.7.0, on a CPU, as case.json says that expected/ was made:
the model class with the torch backends, and batches of micro_batch_size rows. Rows are padded on the
right and the mask says so.
"""

import importlib
import json
import os
import pathlib
import sys

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

STATES = "target_hidden_states", "target_last_hidden_states"


def reference(module, name):
    return getattr(importlib.import_module("nemo_automodel.components." + module), name)


def load(case, info, dtype):
    """The model with the case's weights in `dtype`."""
    config = json.loads((case / "model/config.json").read_text())
    config = reference("models.glm_moe_dsa.config", "GlmMoeDsaConfig")(**{**config, "dtype": dtype})
    backend = reference("models.common", "BackendConfig")(**info["reference"]["backend"])
    model = reference("models.glm_moe_dsa.model", "GlmMoeDsaForCausalLM")(config, backend=backend)
    weights = {}
    for path in sorted((case / "model").glob("*.safetensors")):
        weights.update(load_file(path))
    behind = [f"model.layers.{i}." for i in range(config.num_hidden_layers, config.num_hidden_layers + 8)]
    weights = {k: v for k, v in weights.items() if not k.startswith(tuple(behind))}
    weights = model.state_dict_adapter.from_hf(weights)
    exact = {k: v.float() if v.dtype == torch.float32 or dtype == torch.float32 else v for k, v in weights.items()}
    model.load_state_dict(exact, strict=True)
    return model.eval().requires_grad_(False)


def run(case, dtype):
    """name -> states of all rows, [N, S, width]"""
    info = json.loads((case / "case.json").read_text())
    model = load(case, info, dtype)
    target = reference("speculative.dspark.target", "HFDSparkTargetModel")(model, info["target_layer_ids"])
    rows, out = padded(case, info), []
    for i in range(0, len(rows[0]), info["micro_batch_size"]):
        ids, real = (x[i : i + info["micro_batch_size"]] for x in rows)
        out.append(target.generate_batch(ids, real, real))
    return info, {name: torch.cat([getattr(b, name) for b in out]) for name in STATES}


def padded(case, info):
    t = load_file(case / "tokens.safetensors")
    offsets, S = t["row_offsets"].tolist(), info["seq_length"]
    n = len(offsets) - 1
    ids, real = torch.full((n, S), info["pad_token_id"]), torch.zeros((n, S), dtype=torch.long)
    for i in range(n):
        length = offsets[i + 1] - offsets[i]
        ids[i, :length] = t["input_ids"][offsets[i] : offsets[i + 1]]
        real[i, :length] = 1
    return ids, real


def check(case):
    info, states = run(case, torch.float32)
    good = True
    for i, path in enumerate(sorted((case / "expected").glob("shard-*.safetensors"))):
        for name, want in load_file(path).items():
            if name in STATES:
                have = states[name][i * info["shard_size"] :][: len(want)]
                error = ((have - want).norm() / want.norm()).item()
                print(f"{path.name}: {name}: relative difference {error:.2g}")
                good &= error < 1e-5
    return good


def main(argv):
    if len(argv) != 2:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    if argv[0] == "--check":
        return check(pathlib.Path(argv[1]))
    info, states = run(pathlib.Path(argv[0]), torch.bfloat16)
    out, n = pathlib.Path(argv[1]), info["shard_size"]
    out.mkdir()
    for i in range(-(-len(states[STATES[0]]) // n)):
        shard = {name: x[i * n : (i + 1) * n].contiguous() for name, x in states.items()}
        assert all(x.dtype == torch.bfloat16 for x in shard.values())
        save_file(shard, out / f"shard-{i:06d}.safetensors")
    return True


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))
