#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check dspark-tokenize's parts against vectors of the reference.

usage: vectors.py TOKENIZE KIND DIR     TOKENIZE: tools/dspark-tokenize.py; KIND: strings, jinja or shuffle; DIR: text-vectors
Prints each difference; exit 0 if there is none and the file held vectors.
"""
import importlib.machinery
import importlib.util
import json
import os
import sys

sys.dont_write_bytecode = True

def load(path):
    loader = importlib.machinery.SourceFileLoader("tokenize_tool", path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("tokenize_tool", loader))
    loader.exec_module(module)
    return module

def strings(tool, folder):
    """text -> ids and code point offsets"""
    settings = tool.Settings({"target_model_name_or_path": os.path.join(folder, "tokenizer"), "train_data_path": "-",
                              "seq_length": 8, "chat_template": "{{ 1 }}"})
    encoder = tool.Encoder(tool.load_tokenizer(settings), settings)
    def check(vector):
        ids, encoding = encoder.encode(vector["text"])
        return ids, [list(pair) for pair in encoding.offsets]
    return check, lambda vector: (vector["ids"], vector["offsets"])

def jinja(tool, folder):
    """template and variables -> text or the kind of error, in the environment that Encoder renders with"""
    from transformers.utils.chat_template_utils import _compile_jinja_template
    def check(vector):
        try:
            return _compile_jinja_template(vector["template"]).render(**vector["variables"])
        except Exception as e:
            return type(e).__name__
    return check, lambda vector: vector["error"]["type"] if "error" in vector else vector["output"]

def shuffle(tool, folder):
    """rows and seed -> order"""
    return (lambda vector: tool.shuffled(vector["n"], vector["seed"]).tolist(),
            lambda vector: vector["permutation"])

def main():
    tool, kind, folder = load(sys.argv[1]), sys.argv[2], sys.argv[3]
    check, wanted = {"strings": strings, "jinja": jinja, "shuffle": shuffle}[kind](tool, folder)
    count = bad = 0
    with open(os.path.join(folder, kind + ".jsonl"), encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            vector = json.loads(line)
            count += 1
            if check(vector) != wanted(vector):
                bad += 1
                print(f"{kind}.jsonl:{number}: have {check(vector)!r}, want {wanted(vector)!r}")
    print(f"{count} vectors, {bad} differ")
    return bad > 0 or count < 10

if __name__ == "__main__":
    sys.exit(main())
