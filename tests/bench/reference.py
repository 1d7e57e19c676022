#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A server over the reference's target forward, for runs that take turns with it.

    reference.py MODEL [--rows N] [--length N] [--layers N]

Each line of stdin is "SHAPE DTYPE HEAD": full or quarter (rows of --length tokens of which all, or the
first quarter, are real: the reference computes padding), fp32 or bf16, head or headless. The answer
is one line, the seconds of generate_batch and of the conversion to the cache's tensors. The first
request of a dtype loads the model; the first of each kind should not count. The end of stdin ends it.
Runs under a Python that has nemo-automodel; OMP_NUM_THREADS says how many threads it gets.
"""

import argparse
import importlib
import os
import sys
import time

os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")


class Elsewhere:
    """What another object has, but for some names."""

    def __init__(self, origin, **names):
        self.__dict__.update(names, _origin=origin)

    def __getattr__(self, name):
        return getattr(self._origin, name)


def without_cuda(torch):
    """`torch` for code that asks for the current GPU while it builds a model, on a host without one."""

    class Kind(type):
        def __instancecheck__(cls, x):
            return isinstance(x, torch.device)

        def __call__(cls, kind, *index):
            cuda = not isinstance(kind, torch.device) and str(kind).startswith("cuda")
            return torch.device("cpu") if cuda else torch.device(kind, *index)

    class Device(metaclass=Kind):
        pass

    here = torch.device("cpu")
    return Elsewhere(torch, device=Device, cuda=Elsewhere(torch.cuda, current_device=lambda: here))


def reference(torch):
    """The reference's names, its modules told that the GPU is the CPU where there is no GPU."""
    if not torch.cuda.is_available():
        for name in ("_transformers.auto_model", "_transformers.model_init", "components.models.qwen3_moe.model"):
            importlib.import_module("nemo_automodel." + name).torch = without_cuda(torch)
    names = (
        ("_transformers", "NeMoAutoModelForCausalLM"),
        ("components.datasets.llm.dspark_cache", "DTYPE_MAP"),
        ("components.datasets.llm.dspark_cache", "compute_batch_cache"),
        ("components.speculative.dspark.registry", "build_target_layer_ids"),
        ("components.speculative.dspark.target", "HFDSparkTargetModel"),
    )
    return Elsewhere(None, **{n: getattr(importlib.import_module("nemo_automodel." + m), n) for m, n in names})


class Target:
    def __init__(self, a, torch, ref, dtype):
        self.dtype, self.ref = ref.DTYPE_MAP[dtype], ref
        model = ref.NeMoAutoModelForCausalLM.from_pretrained(a.model, torch_dtype=self.dtype)
        self.model = model.to("cpu").eval()
        self.model.requires_grad_(False)
        self.whole = self.model.forward
        layers = self.model.config.num_hidden_layers
        self.wrapper = ref.HFDSparkTargetModel(self.model, ref.build_target_layer_ids(layers, a.layers))
        self.vocab = self.model.config.vocab_size

    def body(self, **inputs):
        """The forward without the head, whose logits nobody reads."""
        keep = {k: inputs[k] for k in ("input_ids", "attention_mask") if k in inputs}
        return self.model.model(**keep)

    def run(self, ids, mask, headless):
        self.model.forward = self.body if headless else self.whole
        start = time.perf_counter()
        batch = self.wrapper.generate_batch(ids, mask, mask)
        self.ref.compute_batch_cache(batch, self.dtype)
        return time.perf_counter() - start


def rows(a, torch, shape, vocab):
    ids = torch.randint(0, vocab, (a.rows, a.length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if shape == "quarter":
        mask[:, max(1, a.length // 4) :] = 0
    return ids, mask


def serve(a, out):
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count())))
    ref, targets = reference(torch), {}
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        shape, dtype, head = line.split()
        if shape not in ("full", "quarter") or head not in ("head", "headless"):
            sys.exit(f"reference.py: '{line.strip()}' is not a request")
        if dtype not in targets:
            targets[dtype] = Target(a, torch, ref, dtype)
        ids, mask = rows(a, torch, shape, targets[dtype].vocab)
        print(f"{targets[dtype].run(ids, mask, head == 'headless'):.6f}", file=out, flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", metavar="MODEL")
    p.add_argument("--rows", type=int, default=4)
    p.add_argument("--length", type=int, default=512)
    p.add_argument("--layers", type=int, default=5, help="draft_num_hidden_layers (5)")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    serve(p.parse_args(), out)


if __name__ == "__main__":
    main()
