#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Read a dspark cache with the reference's own training code and compare DSpark losses with another cache of the same rows.

    PYTHON train_reader.py CACHE REFERENCE --model DIR [--batch N] [--layers N] [--tolerance X]

CACHE is dspark's, REFERENCE what nemo-automodel 0.7.0 wrote for the same rows, DIR the target whose config.json shapes the draft.

 1. CachedDSparkDataset, the cached dataloader, the manifest check of train_dspark and read_target_weight_modules take both caches and
    give the same rows, masks and weights.
 2. One small draft (Qwen3DSparkModel, seeded, with the cache's embedding and head, Markov and confidence heads) computes loss, its terms and
    the gradient of every trained parameter over all batches from each cache. The anchors are drawn from the same seed. They may differ
    by X relative to their size (default: 2e-6 for an fp32 cache, 2e-4 for bf16 and fp16, where some values round the other way).
 3. Padding is harmless: with random numbers in CACHE's padded states, the loss and the gradient do not change by a bit.
 4. The comparison can fail: noise of 10 % on the states of one row a batch changes the gradient by more than X, as does one row
    shifted by one position.

PYTHON needs nemo-automodel. Exit 0 if all hold, 1 otherwise.
"""

import argparse
import json
import logging
import os
import sys
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
from nemo_automodel.components.datasets.llm import dspark_cache  # noqa: E402
from nemo_automodel.components.speculative.dspark.core import DSparkTrainerModule  # noqa: E402
from nemo_automodel.components.speculative.dspark.draft_qwen3 import Qwen3DSparkModel  # noqa: E402
from nemo_automodel.recipes.llm.train_dspark import _validate_cached_dspark_manifest  # noqa: E402
from transformers import AutoConfig, Qwen3Config  # noqa: E402

TERMS = ("loss", "ce_loss", "l1_loss", "confidence_loss", "tau_num")
TOLERANCE = {"fp32": 2e-6, "fp16": 2e-4, "bf16": 2e-4}
STATES = ("target_hidden_states", "target_last_hidden_states")
problems = []


def check(good, text):
    print(("ok   " if good else "FAIL ") + text)
    if not good:
        problems.append(text)


def open_cache(path, target, batch):
    """Manifest, batches in order, embedding and head, as train_dspark gets them."""
    manifest = dspark_cache.read_manifest(path)
    dtype = dspark_cache.DTYPE_MAP[manifest["dtype"]]
    _validate_cached_dspark_manifest(
        path, manifest, target, manifest["target_layer_ids"], target_model=manifest["target_model"],
        target_model_type=manifest["target_model_type"], seq_length=manifest["seq_length"],
        compute_dtype=torch.float32 if dtype == torch.float32 else torch.bfloat16,
    )  # fmt: skip
    data = dspark_cache.CachedDSparkDataset(path)
    loader = dspark_cache.build_cached_dspark_dataloader(cache_dir=path, batch_size=batch, shuffle=False)
    batches = list(loader)
    rows = sum(len(b["input_ids"]) for b in batches)
    check(rows == len(data) == manifest["num_samples"], f"{path}: {rows} rows in {len(batches)} batches, dtype {manifest['dtype']}")
    return manifest, batches, *dspark_cache.read_target_weight_modules(path)


def build_trainer(target, manifest, layers, embed, head):
    """The draft that train_dspark would build for a Qwen3 target, seeded."""
    c = target.to_dict()
    c.update(
        architectures=["Qwen3DSparkModel"], num_hidden_layers=layers, layer_types=["full_attention"] * layers, max_window_layers=layers,
        num_target_layers=target.num_hidden_layers, target_layer_ids=manifest["target_layer_ids"], block_size=5, num_anchors=12,
        mask_token_id=0, markov_rank=16, markov_head_type="vanilla", enable_confidence_head=True, confidence_head_with_markov=True,
        tie_word_embeddings=False, use_sliding_window=False, pad_token_id=None,
    )  # fmt: skip
    c.pop("model_type", None)
    config = Qwen3Config.from_dict(c)
    config._attn_implementation = "sdpa"
    torch.manual_seed(20)
    draft = Qwen3DSparkModel(config).float()
    draft.initialize_embeddings_and_head(embed_tokens=embed, lm_head=head, freeze=True)
    return DSparkTrainerModule(draft, loss_decay_gamma=4.0)


def measure(trainer, batches):
    """Each term summed over all batches, and the gradient of the loss as one vector."""
    total = dict.fromkeys(TERMS, 0.0)
    trainer.zero_grad()
    for i, b in enumerate(batches):
        torch.manual_seed(1000 + i)  # the anchors
        m = trainer(
            input_ids=b["input_ids"], loss_mask=b["loss_mask"],
            target_hidden_states=b[STATES[0]].float(), target_last_hidden_states=b[STATES[1]].float(),
        )  # fmt: skip
        m.loss.backward()
        for t in TERMS:
            total[t] += float(getattr(m, t).detach())
    grads = [p.grad.flatten() for p in trainer.parameters() if p.grad is not None]
    return total, torch.cat(grads).double()


def padded_positions(b):
    """Positions after the last one whose state is not zero in dspark's cache."""
    real = (b[STATES[1]] != 0).any(-1)
    return real.flip(1).cumsum(1).flip(1) == 0


def changed(batches, change):
    out = []
    for b in batches:
        b = {k: v.clone() for k, v in b.items()}
        change(b)
        out.append(b)
    return out


def fill_padding(b):
    pad = padded_positions(b)
    for name in STATES:
        b[name][pad] = torch.randn(int(pad.sum()), b[name].shape[-1]).to(b[name].dtype)


def disturb_row(b):
    for name in STATES:
        b[name][0] = (b[name][0].float() * (1 + 0.1 * torch.randn(b[name][0].shape))).to(b[name].dtype)


def shift_row(b):
    for name in STATES:
        b[name][0] = b[name][0].roll(1, 0)


def same_rows(ours, theirs):
    worst = 0.0
    for a, b in zip(ours, theirs):
        for name in ("input_ids", "loss_mask"):
            if not torch.equal(a[name], b[name]):
                return False, worst
        real = ~padded_positions(a)
        for name in STATES:
            worst = max(worst, float((a[name].float() - b[name].float())[real].abs().max()))
    return len(ours) == len(theirs), worst


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("cache")
    p.add_argument("reference")
    p.add_argument("--model", required=True, metavar="DIR")
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--layers", type=int, default=2, help="of the draft")
    p.add_argument("--tolerance", type=float)
    a = p.parse_args()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    target = AutoConfig.from_pretrained(a.model)
    manifest, ours, embed, head = open_cache(a.cache, target, a.batch)
    other, theirs, ref_embed, ref_head = open_cache(a.reference, target, a.batch)
    differ = [k for k in manifest if k != "target_model" and manifest[k] != other.get(k)]
    check(not differ, f"manifests agree{': not in ' + json.dumps(differ) if differ else ''}")
    check(torch.equal(embed.weight, ref_embed.weight) and torch.equal(head.weight, ref_head.weight), "target weights are equal")
    good, worst = same_rows(ours, theirs)
    check(good, f"the dataloaders give the same ids and masks; states differ by {worst:.3g} at most")
    limit = a.tolerance or TOLERANCE[manifest["dtype"]]
    trainer = build_trainer(target, manifest, a.layers, embed, head)
    x, gx = measure(trainer, ours)
    y, gy = measure(trainer, theirs)
    for t in TERMS:
        d = abs(x[t] - y[t]) / max(abs(y[t]), 1e-9)
        check(d <= limit, f"{t}: {x[t]:.8f} from dspark's cache, {y[t]:.8f} from the reference's, relative difference {d:.2e}")
    d = float((gx - gy).norm() / gy.norm())
    check(d <= limit, f"gradient of {gy.numel()} parameters: norm {float(gy.norm()):.6g}, relative difference {d:.2e}")
    pads = sum(int(padded_positions(b).sum()) for b in ours)
    z, gz = measure(trainer, changed(ours, fill_padding))
    check(z == x and torch.equal(gx, gz), f"random states at all {pads} padded positions change neither loss nor gradient")
    for change, what in ((disturb_row, "noise of 10 % on"), (shift_row, "a shift by one position of")):
        z, gz = measure(trainer, changed(ours, change))
        d = float((gx - gz).norm() / gx.norm())
        check(z["loss"] != x["loss"] and d > limit, f"{what} the first row of each batch is seen: gradient differs by {d:.2e}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
