#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tokens a second of transformers on the GPU for what dspark-forward does: the yardstick.

    torch_forward.py MODEL ROWS LENGTH LAYER,LAYER,...

Rows of LENGTH random tokens, one at a time in bf16, without the output head; the outputs of the layers
and the state after the final norm are brought to host memory. Prints one number, the median of ROWS.
"""

import sys
import time

import torch
import transformers


def main():
    model, rows, length, layers = (
        sys.argv[1],
        int(sys.argv[2]),
        int(sys.argv[3]),
        [int(n) for n in sys.argv[4].split(",")],
    )
    m = transformers.AutoModel.from_pretrained(
        model, dtype=torch.bfloat16, attn_implementation="sdpa", device_map="cuda"
    ).eval()
    states = {}
    for i in layers:
        m.layers[i].register_forward_hook(
            lambda _m, _in, out, i=i: states.__setitem__(
                i, out[0] if isinstance(out, tuple) else out
            )
        )
    width = m.config.hidden_size
    host = torch.empty((len(layers) + 1, length, width), dtype=torch.bfloat16, pin_memory=True)
    seconds = []
    with torch.inference_mode():
        for _ in range(rows + 2):
            ids = torch.randint(0, m.config.vocab_size, (1, length), device="cuda")
            torch.cuda.synchronize()
            start = time.monotonic()
            last = m(input_ids=ids, use_cache=False).last_hidden_state
            for k, i in enumerate(layers):
                host[k].copy_(states[i][0], non_blocking=True)
            host[-1].copy_(last[0], non_blocking=True)
            torch.cuda.synchronize()
            seconds.append(time.monotonic() - start)
    seconds = sorted(seconds[2:])
    print(f"{length / seconds[len(seconds) // 2]:.0f}")


if __name__ == "__main__":
    main()
