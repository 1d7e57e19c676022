# SPDX-License-Identifier: Apache-2.0
"""rms.py A B LIMIT [SHARE]: whether the states of cache B lie within LIMIT of those of cache A.

The measure is the root-mean-square difference over all real positions relative to the root mean square of A, for each
captured layer and the last state. One line each; exit 1 beyond the limit. Ids, masks and row lengths must be equal.
SHARE of the positions, those that differ most, do not count: where a target chooses experts and keys, rounding lets some
choices fall otherwise.
"""
import json, pathlib, sys
import numpy as np

DTYPE = {"I64": "<i8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def read(path):
    """metadata, name -> array (bfloat16 widened)"""
    raw = path.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    head = json.loads(raw[8:8 + n])
    meta, out = head.pop("__metadata__", {}), {}
    for name, t in head.items():
        lo, hi = t["data_offsets"]
        x = np.frombuffer(raw[8 + n + lo:8 + n + hi], DTYPE[t["dtype"]]).reshape(t["shape"])
        out[name] = (x.astype("<u4") << 16).view("<f4") if t["dtype"] == "BF16" else x
    return meta, out


def main(a, b, limit, share=0.0):
    a, b = pathlib.Path(a), pathlib.Path(b)
    manifest = json.loads((a / "manifest.json").read_text())
    H, ids = manifest["hidden_size"], manifest["target_layer_ids"]
    num, den, rows = {}, {}, 0
    for file in sorted(a.glob("shard-*.safetensors")):
        (ma, x), (mb, y) = read(file), read(b / file.name)
        if ma["row_tokens"] != mb["row_tokens"]:
            sys.exit(f"{file.name}: row_tokens differ")
        for name in ("input_ids", "loss_mask"):
            if not np.array_equal(x[name], y[name]):
                sys.exit(f"{file.name}: {name} differs")
        for i, n in enumerate(int(v) for v in ma["row_tokens"].split(",")):
            for name, cols in (("target_hidden_states", ids), ("target_last_hidden_states", ["last"])):
                for j, layer in enumerate(cols):
                    u = x[name][i, :n, j * H:(j + 1) * H].astype(np.float64)
                    d = y[name][i, :n, j * H:(j + 1) * H].astype(np.float64) - u
                    num.setdefault(layer, []).extend((d * d).sum(-1))
                    den.setdefault(layer, []).extend((u * u).sum(-1))
            rows += 1
    bad = rows == 0
    for layer in num:
        errors, squares = np.array(num[layer]), np.array(den[layer])
        kept = np.argsort(errors / squares)[:len(errors) - int(share * len(errors))]
        rms = (errors[kept].sum() / squares[kept].sum()) ** 0.5
        print(f"layer {layer}: rms difference {rms:.4f}")
        bad |= not rms <= limit
    return bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], *map(float, sys.argv[3:])))
