#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make the example's target model: model/ beside this script, from rows.jsonl and the texts below.

    make.py [DIR]    writes config.json, model.safetensors, tokenizer.json, tokenizer_config.json

The model is Qwen3 in small: the published file layout and tensor names, random weights, and a
byte-level BPE trained on the example's own rows. It has learnt nothing, but everything around it is
real. The same bytes come out each time: weights are integer arithmetic on a raw PCG64 stream. Needs
numpy and tokenizers (0.23 made the files in the tree).
"""

import hashlib
import json
import math
import os
import struct
import sys

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

HERE = os.path.dirname(os.path.abspath(__file__))
VOCAB, HIDDEN, LAYERS, HEADS, KV, HEAD_DIM, WIDTH = 2048, 64, 6, 4, 2, 32, 128
SEED = 3

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = [
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]

# the split of Qwen's tokenizers: contractions, words, single digits, punctuation, line ends, spaces
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TEMPLATE = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- 'You may call these functions:\n' }}
    {%- for tool in tools %}
        {{- tool | tojson + '\n' }}
    {%- endfor %}
    {{- 'Write a call as a JSON object with "name" and "arguments" between ' }}
    {{- '<tool_call> and </tool_call>.<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- generation %}
        {%- if message.reasoning_content %}
            {{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}
                {{- '\n' }}
            {%- endif %}
            {%- set arguments = call.function.arguments %}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- arguments if arguments is string else arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
        {%- endgeneration %}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user\n' }}
        {%- endif %}
        {{- '<tool_response>\n' + message.content + '\n</tool_response>' }}
        {{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' else '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

TOOL_FRAME = """You may call these functions:
{"type": "function", "function": {"name": "", "description": "", "parameters": {}}}
Write a call as a JSON object with "name" and "arguments" between the marks:
{"name": "", "arguments": {"": ""}}
"""

TEXT = """A model reads a row of tokens and gives a state for each of them. The states of some layers
are kept, the others are forgotten. A second, smaller model learns from what was kept, and the large
one does not have to be asked again.

The river had been high all week. On the last day of the month the water went down, and people came
out to see what it had left behind: branches, a wooden chair, three bottles, and a small boat without
a name. There is nothing to be said against a good question. Which one is it? Where does it come from?
How long will it take, what does it cost, and who is going to do the work? She would have liked to know
whether the others thought the same, but they were already talking about something else, about the
weather and the price of apples, and so she put the letter back into her pocket.

for (i = 0; i < n; i++) {
\tif (x[i] == y[i])
\t\tcontinue;
\treturn -1;
}
return 0;

import os
import sys


class Row:
    def __init__(self, tokens):
        self.tokens = tokens

    def __len__(self):
        return len(self.tokens)


def read(path):
    with open(path, "rb") as f:
        return f.read()


if len(sys.argv) != 2:
    print("usage: %s FILE" % sys.argv[0])
    sys.exit(2)

{"name": "value", "items": [1, 2, 3], "type": "object", "properties": {}, "required": []}

Der Zug fährt um halb sieben ab und kommt kurz vor Mitternacht an. Wer nicht warten will, nimmt das
Schiff, das ist zwar langsamer, aber man sieht mehr vom Land und vom Wasser.

Le matin, nous allons au marché et nous achetons des pommes, du pain et une bouteille de cidre.
L'après-midi, il y a toujours quelqu'un pour raconter une histoire.

El río pasa por la ciudad y llega al mar. Por la tarde la gente sale a la calle, habla con los
vecinos y mira las barcas.

春の風が吹いて、川の水は静かに流れています。子どもたちは橋の上で遊んでいます。
今天天气很好，我们去河边走走，晚上一起喝茶。
Сегодня хорошая погода, мы идём к реке, а вечером будем пить чай и разговаривать.
"""


def strings(x):
    """Every string inside a JSON value, in order."""
    if isinstance(x, str):
        yield x
    elif isinstance(x, dict):
        for value in x.values():
            yield from strings(value)
    elif isinstance(x, list):
        for value in x:
            yield from strings(value)


def corpus():
    with open(os.path.join(HERE, "rows.jsonl"), encoding="utf-8") as f:
        for line in f:
            row = json.loads(line)
            for tool in row.pop("tools", []):
                yield json.dumps(tool)
            yield from strings(row)
    yield TEXT
    yield from [TOOL_FRAME, "system\nuser\nassistant\n"] * 20


def train_tokenizer():
    t = Tokenizer(models.BPE())
    t.normalizer = normalizers.NFC()
    t.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    t.post_processor = processors.ByteLevel(trim_offsets=False, use_regex=False)
    t.decoder = decoders.ByteLevel()
    # the texts yield fewer entries than the embedding has rows; as in published models, the last
    # rows are spare
    t.train_from_iterator(
        corpus(),
        trainers.BpeTrainer(
            vocab_size=VOCAB - len(SPECIAL) - len(MARKS),
            min_frequency=2,
            show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        ),
    )
    t.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in SPECIAL])
    t.add_tokens([AddedToken(s, normalized=False) for s in MARKS])
    if t.get_vocab_size() > VOCAB:
        sys.exit(f"make.py: the tokenizer has {t.get_vocab_size()} entries, the model only {VOCAB}")
    return t


def tokenizer_config(t):
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(t.token_to_id(s)): {
                "content": s,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": s in SPECIAL,
            }
            for s in SPECIAL + MARKS
        },
        "bos_token": None,
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 40960,
        "pad_token": "<|endoftext|>",
        "padding_side": "right",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }


def model_config(t):
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": t.token_to_id("<|endoftext|>"),
        "eos_token_id": t.token_to_id("<|im_end|>"),
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": WIDTH,
        "max_position_embeddings": 40960,
        "max_window_layers": LAYERS,
        "model_type": "qwen3",
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCAB,
    }


def weights():
    """Yield (name, shape, mean, standard deviation)."""
    yield "model.embed_tokens.weight", [VOCAB, HIDDEN], 0, 1
    for i in range(LAYERS):
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{i}.{name}.weight", [HIDDEN], 1, 0.1
        for name in ("q_norm", "k_norm"):
            yield f"model.layers.{i}.self_attn.{name}.weight", [HEAD_DIM], 1, 0.1
        for name, rows, cols in (
            ("self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN),
            ("self_attn.k_proj", KV * HEAD_DIM, HIDDEN),
            ("self_attn.v_proj", KV * HEAD_DIM, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
            ("mlp.gate_proj", WIDTH, HIDDEN),
            ("mlp.up_proj", WIDTH, HIDDEN),
            ("mlp.down_proj", HIDDEN, WIDTH),
        ):
            yield f"model.layers.{i}.{name}.weight", [rows, cols], 0, cols**-0.5
    yield "model.norm.weight", [HIDDEN], 1, 0.1


def random_bf16(name, shape, mean, std):
    """Sums of four 16-bit uniforms: nearly normal and, unlike logarithms, the same everywhere."""
    digest = hashlib.sha256(f"{SEED}/{name}".encode()).digest()
    raw = np.random.PCG64(int.from_bytes(digest[:16], "little")).random_raw(math.prod(shape))
    total = (
        sum((raw >> np.uint64(16 * k)) & np.uint64(0xFFFF) for k in range(4)).astype(np.int64)
        - 131070
    )
    x = (total * (std / math.sqrt((2.0**32 - 1) / 3)) + mean).astype(np.float32)
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def write_weights(path):
    header, data, at = {"__metadata__": {"format": "pt"}}, [], 0
    for name, shape, mean, std in sorted(weights()):
        data.append(random_bf16(name, shape, mean, std))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + len(data[-1])]}
        at += len(data[-1])
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(data))


def write_json(path, value, indent=2):
    with open(path, "w", encoding="utf-8") as f:
        f.write(json.dumps(value, indent=indent, ensure_ascii=False) + "\n")


def main():
    out = sys.argv[1] if len(sys.argv) > 1 else os.path.join(HERE, "model")
    os.makedirs(out, exist_ok=True)
    t = train_tokenizer()
    write_json(os.path.join(out, "tokenizer.json"), json.loads(t.to_str()), indent=None)
    write_json(os.path.join(out, "tokenizer_config.json"), tokenizer_config(t))
    write_json(os.path.join(out, "config.json"), model_config(t))
    write_weights(os.path.join(out, "model.safetensors"))


if __name__ == "__main__":
    main()
