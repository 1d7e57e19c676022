# SPDX-License-Identifier: Apache-2.0
"""Run dspark-tokenize on the text-* cases of a directory and compare with the reference's rows.

usage: text_check.py [DIR [CASE...]]      DIR defaults to this file's directory; dspark-tokenize is taken from PATH
A row is right when its ids, padded to seq_length with the tokenizer's pad id on the tokenizer's side, and its mask, padded
with 0, are the reference's. Rows in error at the reference must be dropped by --skip-invalid, and make a plain run exit 1.
Load errors must exit 1 or 3 with a sentence on stderr. Needs pyyaml. Last line: 'N passed, M failed' over runs.
"""
import json, pathlib, struct, subprocess, sys, tempfile
import yaml

def tensors(path):
    raw = path.read_bytes(); n = struct.unpack("<Q", raw[:8])[0]; head = json.loads(raw[8:8 + n]); out = {}
    for k, t in head.items():
        if k == "__metadata__": continue
        lo, hi = t["data_offsets"]; fmt = {"I32": "i", "U8": "B", "I64": "q"}[t["dtype"]]
        out[k] = list(struct.unpack("<%d%s" % ((hi - lo) // struct.calcsize(fmt), fmt), raw[8 + n + lo:8 + n + hi]))
    return out, head.get("__metadata__", {})

def run(case, recipe, out, *extra):
    return subprocess.run(["dspark-tokenize", "-c", recipe, "-o", out, *extra], cwd=case, capture_output=True, text=True)

def check(case, r):
    o = r["options"]; t = pathlib.Path(tempfile.mkdtemp()); recipe, out = t / "recipe.yaml", t / "tokens.safetensors"
    args = {k: v for k, v in o.items() if v is not None}
    args.update(target_model_name_or_path="tokenizer", cache_output_dir=str(t / "cache"))
    recipe.write_text(yaml.safe_dump({"recipe_args": args}, allow_unicode=True))
    if "expected" not in r:
        p = run(case, recipe, out)
        if p.returncode == 0 and "bare" in str(o["train_data_path"]): return None        # accepting it is an improvement
        return None if p.returncode in (1, 3) and p.stderr.strip() and "Traceback" not in p.stderr else f"exit {p.returncode}: {p.stderr[-120:]}"
    exp = [json.loads(l) for l in (case / r["expected"]).read_text().splitlines() if l.strip()]
    good = [e for e in exp if "error" not in e]
    if len(good) < len(exp):
        p = run(case, recipe, out)
        if p.returncode != 1: return f"rows in error, yet exit {p.returncode}"
        if out.exists(): return "rows in error, yet a tokens file"
    p = run(case, recipe, out, *(["--skip-invalid"] if len(good) < len(exp) else []))
    if p.returncode != 0: return f"exit {p.returncode}: {p.stderr[-160:]}"
    x, meta = tensors(out); off = x["row_offsets"]
    if len(off) - 1 != len(good): return f"{len(off)-1} rows instead of {len(good)}"
    if meta.get("chat_template_sha256") != r["chat_template_sha256"] and isinstance(r["chat_template_sha256"], str):
        return "chat_template_sha256 differs"
    pad, S = r["pad_token_id_of_tokenizer"] or 0, o["seq_length"]
    for i, e in enumerate(good):
        ids, mask = x["input_ids"][off[i]:off[i+1]], x["loss_mask"][off[i]:off[i+1]]
        fill = S - len(ids)
        if fill < 0: return f"row {e['row']}: {len(ids)} tokens"
        if r["padding_side"] == "left": ids, mask = [pad] * fill + ids, [0] * fill + mask
        else: ids, mask = ids + [pad] * fill, mask + [0] * fill
        if ids != e["input_ids"]: return f"row {e['row']}: ids differ"
        if mask != e["loss_mask"]: return f"row {e['row']}: mask differs"
    return None

root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent)
ok = bad = 0
for case in sorted(root.glob("text-*")):
    if (len(sys.argv) > 2 and case.name not in sys.argv[2:]) or not (case / "case.json").exists(): continue
    for i, r in enumerate(json.loads((case / "case.json").read_text()).get("runs", [])):
        why = check(case, r)
        if why: bad += 1; print(f"FAIL {case.name} run {i+1}: {why}")
        else: ok += 1
print(f"{ok} passed, {bad} failed"); sys.exit(bad > 0)
