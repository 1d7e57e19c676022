#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What packed checkpoints hold, told by their files alone.

    packed.py expand MODEL OUT    every packed weight of MODEL as plain F32, decoded by numpy
    packed.py fuse MODEL OUT      the experts of each layer as gate_up_proj and down_proj
    packed.py same A B            exit 1 unless both hold the same tensors

Written apart from make_model.py, which encodes, and from dspark: nothing of theirs is used here. The
results lie in one file each. Needs numpy.
"""

import json
import pathlib
import re
import struct
import sys

import numpy as np

HALVES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def read(model):
    """config, name -> (dtype, shape, bytes)"""
    tensors = {}
    for path in sorted(pathlib.Path(model).glob("*.safetensors")):
        raw = path.read_bytes()
        (n,) = struct.unpack("<Q", raw[:8])
        head = json.loads(raw[8 : 8 + n])
        head.pop("__metadata__", None)
        for name, t in head.items():
            lo, hi = (8 + n + at for at in t["data_offsets"])
            tensors[name] = t["dtype"], t["shape"], raw[lo:hi]
    return json.loads((pathlib.Path(model) / "config.json").read_text()), tensors


def write(out, config, tensors):
    out = pathlib.Path(out)
    out.mkdir(exist_ok=True)
    head, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        head[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(head).encode()
    with open(out / "model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            f.write(data)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def scales_of(dtype, shape, data):
    if dtype == "F32":
        x = np.frombuffer(data, "<f4")
    elif dtype == "F16":
        x = np.frombuffer(data, "<f2").astype(np.float32)
    elif dtype == "BF16":
        x = np.frombuffer(b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2)), "<f4")
    else:
        x = np.ldexp(np.float32(1), np.frombuffer(data, "u1").astype(int) - 127)
    return x.reshape(shape)


def four_bits(data, rows):
    """The codes of each row from its lowest bit on."""
    bits = np.unpackbits(np.frombuffer(data, "u1").reshape(rows, -1), axis=1, bitorder="little")
    return bits.reshape(rows, -1, 4) @ np.array([1, 2, 4, 8])


def codes_of(dtype, shape, data, cols):
    if dtype == "F8_E4M3":
        c = np.frombuffer(data, "u1").astype("<u2")
        return ((c & 0x80) << 8 | (c & 0x7F) << 7).view("<f2").astype(np.float32).reshape(shape) * 256
    c = four_bits(data, shape[0])[:, :cols]
    if dtype == "I32":
        return (c - 8).astype(np.float32)
    return np.where(c & 8, -HALVES[c & 7], HALVES[c & 7])


def block_of(quantisation, dtype, rows, cols):
    """Rows and columns that share a scale."""
    if dtype == "F8_E4M3":
        return quantisation["weight_block_size"]
    (group,) = quantisation["config_groups"].values()
    size = group["weights"]["group_size"]
    return 1, cols if size in (None, -1) else size


def expand(config, tensors):
    quantisation = config.pop("quantization_config")
    cols = {name[:-13]: np.frombuffer(t[2], "<i8")[1] for name, t in tensors.items()
            if name.endswith(".weight_shape")}
    out = {}
    for name, (dtype, shape, data) in tensors.items():
        base = re.sub(r"\.weight(_packed)?$", "", name)
        scale = next((tensors[base + end] for end in (".weight_scale_inv", ".weight_scale")
                      if base + end in tensors), None)
        if re.search(r"\.weight_(scale|scale_inv|shape)$", name):
            continue
        if scale is None or base == name:
            out[name] = dtype, shape, data
            continue
        wide = int(cols.get(base, shape[1] * (2 if dtype == "U8" else 1)))
        x, grid = codes_of(dtype, shape, data, wide), scales_of(*scale)
        high, long = block_of(quantisation, dtype, *x.shape)
        grid = np.repeat(np.repeat(grid, high, 0), long, 1)[: x.shape[0], : x.shape[1]]
        out[base + ".weight"] = "F32", list(x.shape), (x * grid).astype("<f4").tobytes()
    return config, out


def fuse(config, tensors):
    out, stacks = {}, {}
    for name, t in tensors.items():
        m = re.fullmatch(r"(.*\.experts\.)(\d+)\.(gate|up|down)_proj\.weight(_scale_inv)?", name)
        if not m:
            out[name] = t
            continue
        kind = "down_proj" if m[3] == "down" else "gate_up_proj"
        stacks.setdefault(m[1] + kind + (m[4] or ""), {})[int(m[2]), m[3] == "up"] = t
    for name, parts in stacks.items():
        order = [parts[key] for key in sorted(parts)]
        experts = 1 + max(e for e, _ in parts)
        dtype, (rows, cols), _ = order[0]
        shape = [experts, rows * len(order) // experts, cols]
        out[name] = dtype, shape, b"".join(data for _, _, data in order)
    return config, out


def main(what, a, b):
    if what == "same":
        return read(a)[1] != read(b)[1]
    write(b, *{"expand": expand, "fuse": fuse}[what](*read(a)))
    return False


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
