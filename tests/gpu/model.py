#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write a random checkpoint fast: make_model.py's options and tensors, other numbers.

    model.py --layers 36 --hidden 4096 --heads 32 --kv 8 --head-dim 128 --intermediate 12288 \\
        --vocab 151936 --files 16 DIR

Matrices are bits with a fixed exponent: random signs, magnitudes uniform in [a, 2a), a the power of two
that brings their root mean square within a factor of sqrt(2) of make_model.py's. Vectors are the same as
there. Files are written by as many processes as the machine has cores: gigabytes a second.
"""

import math
import multiprocessing
import os
import sys

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import make_model

PIECE = 1 << 24  # numbers made at a time
RMS = math.sqrt(7 / 3)  # of magnitudes uniform in [1, 2)


class Quick(make_model.Tensor):
    def pieces(self):
        if len(self.shape) == 1:
            yield from super().pieces()
            return
        exponent = round(math.log2(self.std / RMS)) + 127
        bits, left = make_model.stream(self.a.seed, self.name), math.prod(self.shape)
        while left > 0:
            n = min(left, PIECE)
            raw = bits.random_raw((n + 3) // 4).view("<u2")[:n]
            raw &= np.uint16(0x807F)
            raw |= np.uint16(exponent << 7)
            yield raw.tobytes()
            left -= n


def main():
    a = make_model.options(sys.argv[1:])
    if a.dtype != "bf16" or a.fp8:
        sys.exit("model.py: makes BF16 alone")
    write, jobs = make_model.write_file, []
    make_model.Tensor = Quick
    make_model.write_file = lambda *args: jobs.append(args)
    make_model.write_model(a)
    make_model.write_file = write
    workers = [multiprocessing.Process(target=share, args=(write, jobs, i)) for i in range(cores())]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    if any(w.exitcode for w in workers):
        sys.exit("model.py: a file could not be written")


def share(write, jobs, first):
    for job in jobs[first :: cores()]:
        write(*job)


def cores():
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    main()
