# SPDX-License-Identifier: Apache-2.0
"""Compare a cache directory with a golden case.

usage: compare.py CACHE CASE [--factor 20] [--expected expected-force-hf] | compare.py --bf16 CACHE CASE [--reference DIR]
Ids and masks must be exact, padded positions zero, real positions within factor x the fp32 noise of case.json
(max abs over the tensor). With --bf16, CACHE was computed in bf16: for each captured layer the rms difference from the fp32
states, relative to their rms, may be 1.5 times that of the reference's own bf16 run (DIR, else the case's expected-bf16; exit 77
if it has none). Where a target chooses experts and keys, rounding decides near ties, and few positions make up most of that sum:
so the positions' own relative differences may also, at the first quarter of them, at half and at three quarters, be 1.5
times the reference's. With --rounded, CASE is a cache in fp32, of which CACHE must be the same in its own dtype. Exit 0 within,
1 beyond, with one line per tensor.
"""
import argparse, json, pathlib, re, sys
import numpy as np
from safetensors import safe_open

DTYPE = {"I64": "<i8", "I32": "<i4", "U8": "u1", "I8": "i1", "F8_E4M3": "u1", "F8_E8M0": "u1", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
DTYPE_OF = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
ULP = {"F32": 0.0, "F16": 2.0**-10, "BF16": 2.0**-7}     # one rounding step, relative, when the cache is narrower

def read(path):
    """name -> (stored dtype, array); bfloat16 is widened to float32"""
    raw = path.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    out = {}
    for k, t in json.loads(raw[8:8 + n]).items():
        if k == "__metadata__": continue
        lo, hi = t["data_offsets"]
        x = np.frombuffer(raw[8 + n + lo:8 + n + hi], DTYPE[t["dtype"]]).reshape(t["shape"])
        if t["dtype"] == "BF16": x = (x.astype("<u4") << 16).view("<f4")
        out[k] = (t["dtype"], x)
    return out

def noise_of(info, tensor):
    """largest max_abs fp32 noise that case.json records for `tensor`, else for its real positions as a whole"""
    named, whole = [], []
    def walk(o, path):
        if isinstance(o, dict):
            for k, v in o.items():
                walk(v, path + "/" + k)
        elif "/noise" in path and "bf16" not in path and path.endswith("/max_abs"):
            if tensor in path: named.append(float(o))
            elif path.endswith("/real_positions/max_abs"): whole.append(float(o))
    walk(info, "")
    return max(named or whole, default=None)

a = argparse.ArgumentParser()
a.add_argument("cache"); a.add_argument("case"); a.add_argument("--factor", type=float, default=20)
a.add_argument("--bf16", action="store_true"); a.add_argument("--expected", default="expected")   # e.g. expected-force-hf
a.add_argument("--reference"); a.add_argument("--rounded", action="store_true")
o = a.parse_args()
cache, case = pathlib.Path(o.cache), pathlib.Path(o.case)
exp = case / o.expected

def rounded(x, kind):
    """fp32 in a narrower dtype, to the nearest, ties to even"""
    if kind == "F16": return x.astype("<f2").astype("<f4")
    if kind == "BF16":
        bits = x.astype("<f4").view("<u4")
        return ((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000).astype("<u4").view("<f4")
    return x

if o.rounded:
    files = sorted(p.name for p in case.glob("*.safetensors")); bad = files != sorted(p.name for p in cache.glob("*.safetensors")) or not files
    for name in files:
        g = read(cache / name)
        for k, (kind, x) in read(case / name).items():
            narrow = kind == "F32" and g[k][0] in ("F16", "BF16")
            if kind == "F32" and not narrow or not np.array_equal(rounded(x, g[k][0]) if narrow else x, g[k][1]):
                bad = True; print(f"{name}: {k}, {g[k][0]}, is not {kind}, rounded")
    sys.exit(bad)
info = json.loads((case / "case.json").read_text())
with safe_open(case / "tokens.safetensors", framework="np") as f:
    length = np.diff(f.get_tensor("row_offsets"))

def layer_differences(dirname):
    """layer (or "last") -> [squared difference from expected/, squared state] of every real position"""
    m = json.loads((exp / "manifest.json").read_text()); H = m["hidden_size"]; row = 0; out = {}
    for f in sorted(exp.glob("shard-*.safetensors")):
        e, g = read(f), read(pathlib.Path(dirname) / f.name)
        for k, x in e.items():
            if k in ("input_ids", "loss_mask"): continue
            for i in range(len(x[1])):
                n = int(length[row + i]); w = x[1][i, :n].astype(np.float64); d = g[k][1][i, :n].astype(np.float64) - w
                ids = m["target_layer_ids"] if k == "target_hidden_states" else ["last"]
                for j, l in enumerate(ids):
                    out.setdefault(l, []).append([(x[:, j*H:(j+1)*H]**2).sum(-1) for x in (d, w)])
        row += len(e["input_ids"][1])
    return {l: np.concatenate(x, axis=1) for l, x in out.items()}

def measures(x):
    """rms over all positions, then the quartiles of the positions' own"""
    num, den = x
    return np.array([(num.sum() / den.sum())**0.5, *np.quantile((num / den)**0.5, (0.25, 0.5, 0.75))])

if o.bf16:
    bf16 = pathlib.Path(o.reference) if o.reference else case / "expected-bf16"
    if not bf16.exists(): print("no expected-bf16 in this case"); sys.exit(77)
    ours, ref = layer_differences(cache), layer_differences(bf16); over = 0
    for l in ref:
        a, b = measures(ours[l]), measures(ref[l])
        print(f"layer {l}: rms difference {a[0]:.4f}, quartiles {a[1:].round(4)}, the reference's bf16 {b[0]:.4f}, {b[1:].round(4)}")
        over += not (a <= 1.5 * b + 1e-3).all()
    sys.exit(over > 0)
bad = []
shards = sorted(p.name for p in exp.glob("shard-*.safetensors"))
have = sorted(p.name for p in cache.glob("shard-*.safetensors") if re.fullmatch(r"shard-\d{6}\.safetensors", p.name))
if shards != have:
    bad.append(f"shards {have} instead of {shards}")
m = json.loads((cache / "manifest.json").read_text())
if m.get("complete") is not True:
    bad.append("manifest is not complete")
row, worst = 0, {}
for name in shards:
    e = read(exp / name)
    if not (cache / name).exists():
        row += len(e["input_ids"][1]); continue
    g = read(cache / name)
    for k, (kind, x) in e.items():
        if k not in g or g[k][0] != kind or g[k][1].shape != x.shape:
            bad.append(f"{name}: {k} missing, or shape/dtype differs"); continue
        y = g[k][1]
        if k in ("input_ids", "loss_mask"):
            if not np.array_equal(y, x): bad.append(f"{name}: {k} differs")
            continue
        for i in range(len(x)):
            n = int(length[row + i])
            want = x[i, :n].astype(np.float64)
            d = np.abs(y[i, :n].astype(np.float64) - want) - ULP[kind] * np.abs(want)
            d = float(d.max()) if d.size and np.isfinite(d).all() else (float("inf") if d.size else 0.0)
            worst[k] = max(worst.get(k, 0.0), d)
            if y[i, n:].any(): bad.append(f"{name}: {k} row {row+i} not zero after its {n} tokens")
    row += len(e["input_ids"][1])
for k, d in worst.items():
    noise = noise_of(info, k)
    noise = noise or 3e-5     # e2e cases state none
    line = f"{k}: max abs error {d:.3g} = {d/noise:.1f} x noise {noise:.3g}"
    print(line)
    if not d <= o.factor * noise: bad.append(line)
tw = exp / "target_weights.safetensors"
if tw.exists():
    e, g = read(tw), read(cache / tw.name)
    for k in e:
        if k not in g or g[k][0] != e[k][0] or not np.array_equal(g[k][1], e[k][1]): bad.append(f"target_weights: {k} differs")
else:                                           # they are the model's own, which a case need not hold twice
    own = {}
    for path in (case / "model").glob("*.safetensors"): own.update(read(path))
    tied = json.loads((case / "model" / "config.json").read_text()).get("tie_word_embeddings")
    own = {"embed_tokens.weight": own.get("model.embed_tokens.weight"), "lm_head.weight": own.get("model.embed_tokens.weight" if tied else "lm_head.weight")}
    for k, (kind, x) in read(cache / tw.name).items() if None not in own.values() else ():
        if kind != DTYPE_OF[m["dtype"]] or not np.array_equal(rounded(own[k][1], kind), x): bad.append(f"target_weights: {k} is not the model's")
for b in bad: print("FAIL", b)
sys.exit(1 if bad else 0)
