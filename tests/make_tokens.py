#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write a tokens file of random rows, and on request the recipe that fits it.

    make_tokens.py --vocab 512 --rows 40 --seq-length 64 tokens.safetensors
    make_tokens.py --model DIR --rows 100 --lengths quarter --recipe recipe.yaml tokens.safetensors

--lengths says how long rows are: `uniform` in [1, seq_length], `full`, `quarter` (a quarter of
seq_length), or an explicit list `5,64,1,0` that is repeated until there are --rows rows. Row r's loss
mask is 1 from a random position on. The same options give the same bytes. Rows are made in pieces, so
a file of any size needs little memory beyond 8 bytes a row. Needs numpy and xxhash.
"""

import argparse
import hashlib
import json
import os
import struct
import sys

import numpy as np

try:
    import xxhash
except ImportError:
    sys.exit(
        "make_tokens.py: the python module 'xxhash' is missing: rows_xxh3_128 cannot be computed"
    )

PIECE = 1 << 16  # rows made at a time


def stream(seed, name):
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return np.random.PCG64(int.from_bytes(digest[:16], "little"))


def below(bits, bound):
    """int64 array -> one integer in [0, bound) each, 0 where bound is 0; a slight bias is fine."""
    raw = (bits.random_raw(bound.size) >> np.uint64(32)).astype(np.int64)
    return (raw * bound) >> 32


def row_lengths(a):
    if a.lengths == "uniform":
        return 1 + below(stream(a.seed, "lengths"), np.full(a.rows, a.seq_length, np.int64))
    if a.lengths == "full":
        return np.full(a.rows, a.seq_length, np.int64)
    if a.lengths == "quarter":
        return np.full(a.rows, max(1, a.seq_length // 4), np.int64)
    return np.resize(np.array([int(n) for n in a.lengths.split(",")], np.int64), a.rows)


def pieces(offsets):
    for first in range(0, len(offsets) - 1, PIECE):
        yield first, min(first + PIECE, len(offsets) - 1)


def make_ids(a, offsets):
    bits = stream(a.seed, "ids")
    for first, last in pieces(offsets):
        count = int(offsets[last] - offsets[first])
        ids = below(bits, np.full(count, a.vocab, np.int64)).astype("<i4")
        plant(ids, a.plant, offsets, first, last)
        yield ids.tobytes()


def make_mask(a, offsets):
    bits = stream(a.seed, "mask")
    for first, last in pieces(offsets):
        lengths = np.diff(offsets[first : last + 1])
        starts = below(bits, lengths)
        at = np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(
            offsets[first:last] - offsets[first], lengths
        )
        mask = (at >= np.repeat(starts, lengths)).astype(np.uint8)
        plant(mask, a.plant_mask, offsets, first, last)
        yield mask.tobytes()


def plant(x, wishes, offsets, first, last):
    for row, position, value in wishes:
        if first <= row < last:
            x[offsets[row] - offsets[first] + position] = value


def head(a, offsets, rows_hash):
    n, tokens = len(offsets) - 1, int(offsets[-1])
    meta = {
        "format": "dspark-tokens",
        "version": "1",
        "seq_length": str(a.seq_length),
        "num_rows": str(n),
        "pad_token_id": str(a.vocab - 3 if a.pad_token_id is None else a.pad_token_id),
        "chat_template_sha256": hashlib.sha256(a.chat_template.encode()).hexdigest(),
        "train_data_path": a.train_data_path,
        "train_split": json.dumps(a.train_split),
        "shuffle_seed": str(a.shuffle_seed),
        "mask_reasoning_content": "false",
        "mask_generation_prompt": "false",
        "rows_xxh3_128": rows_hash,
        "tokenizer_xxh3_128": "",
    }
    ends = np.cumsum([8 * (n + 1), 4 * tokens, tokens]).tolist()
    text = json.dumps(
        {
            "__metadata__": meta,
            "row_offsets": {"dtype": "I64", "shape": [n + 1], "data_offsets": [0, ends[0]]},
            "input_ids": {"dtype": "I32", "shape": [tokens], "data_offsets": ends[:2]},
            "loss_mask": {"dtype": "U8", "shape": [tokens], "data_offsets": ends[1:]},
        },
        separators=(",", ":"),
    ).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_tokens(a):
    offsets = np.zeros(a.rows + 1, np.int64)
    np.cumsum(row_lengths(a), out=offsets[1:])
    # the hash covers input_ids, loss_mask, row_offsets in this order; in the file the offsets come
    # first, as they need the widest alignment
    rows_hash, blank = xxhash.xxh3_128(), head(a, offsets, "0" * 32)
    with open(a.out, "wb") as f:
        f.write(blank)
        f.write(offsets.astype("<i8").tobytes())
        for make in (make_ids, make_mask):
            for data in make(a, offsets):
                rows_hash.update(data)
                f.write(data)
        rows_hash.update(offsets.astype("<i8").tobytes())
        f.seek(0)
        f.write(head(a, offsets, rows_hash.hexdigest()))


def write_recipe(a):
    lines = [
        "dist_env:",
        "  backend: gloo",
        "recipe_args:",
        f"  target_model_name_or_path: {json.dumps(a.model or 'model')}",
        f"  train_data_path: {json.dumps(a.train_data_path)}",
        f"  seq_length: {a.seq_length}",
        f"  micro_batch_size: {a.micro_batch_size}",
        f"  shuffle_seed: {a.shuffle_seed}",
        f"  cache_output_dir: {json.dumps(a.cache_output_dir)}",
        f"  cache_dtype: {a.cache_dtype}",
        f"  cache_shard_size: {a.shard_size}",
    ]
    if a.train_split is not None:
        lines.append(f"  train_split: {json.dumps(a.train_split)}")
    if a.chat_template:
        lines.append(f"  chat_template: {json.dumps(a.chat_template)}")
    if a.layer_ids:
        lines.append(f"  target_layer_ids: [{', '.join(map(str, a.layer_ids))}]")
    else:
        lines.append(f"  draft_num_hidden_layers: {a.draft_layers}")
    with open(a.recipe, "w") as f:
        f.write("\n".join(lines) + "\n")


def triple(text):
    place, _, value = text.partition("=")
    row, _, position = place.partition(":")
    return int(row), int(position), int(value)


def options(argv):
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("out", metavar="TOKENS")
    p.add_argument(
        "--vocab", type=int, metavar="N", help="ids lie in [0, N); default: vocab_size of --model"
    )
    p.add_argument(
        "--model",
        metavar="DIR",
        help="checkpoint the recipe names; relative to where commands will run",
    )
    p.add_argument("--rows", type=int, default=16, metavar="N")
    p.add_argument("--seq-length", type=int, default=64, metavar="N")
    p.add_argument(
        "--lengths",
        default="uniform",
        metavar="HOW",
        help="uniform, full, quarter or a list such as 5,64,1",
    )
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--pad-token-id", type=int, metavar="ID", help="default: vocab - 3")
    p.add_argument("--train-data-path", default="rows.jsonl", metavar="PATH")
    p.add_argument("--train-split", metavar="SPLIT")
    p.add_argument("--shuffle-seed", type=int, default=42, metavar="N")
    p.add_argument(
        "--chat-template", default="", metavar="TEXT", help="its hash goes into the tokens file"
    )
    p.add_argument(
        "--plant",
        type=triple,
        action="append",
        default=[],
        metavar="ROW:POS=ID",
        help="set one id, e.g. a bad one",
    )
    p.add_argument(
        "--plant-mask", type=triple, action="append", default=[], metavar="ROW:POS=VALUE"
    )
    p.add_argument("--recipe", metavar="FILE", help="write a recipe too, with the options below")
    p.add_argument("--micro-batch-size", type=int, default=1, metavar="N")
    p.add_argument("--shard-size", type=int, default=4, metavar="N")
    p.add_argument("--cache-dtype", choices=("bf16", "fp16", "fp32"), default="fp32")
    p.add_argument("--cache-output-dir", default="out", metavar="DIR")
    p.add_argument("--layer-ids", type=lambda s: [int(n) for n in s.split(",")], metavar="I,J,...")
    p.add_argument(
        "--draft-layers", type=int, default=3, metavar="N", help="where --layer-ids is not given"
    )
    a = p.parse_args(argv)
    if a.vocab is None:
        if a.model is None:
            p.error("give --vocab or --model")
        with open(os.path.join(a.model, "config.json")) as f:
            a.vocab = json.load(f)["vocab_size"]
    if a.seq_length < 1 or a.rows < 0 or a.vocab < 1:
        p.error("--seq-length and --vocab must be positive, --rows must not be negative")
    return a


if __name__ == "__main__":
    args = options(sys.argv[1:])
    write_tokens(args)
    if args.recipe:
        write_recipe(args)
