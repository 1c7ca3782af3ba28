#!/usr/bin/env python
"""Times a layer of experts with weights of 4 and 8 bits beside one in bfloat16.

    PYTHONPATH=build/python python utils/quantized_times.py [--threads N] [--tokens 1,4,16,128]
        [--formats 'int4;MXFP4'] [--shape 2048,768,128,8] [--peer llama.cpp=./ggml-layer:q4_K,q8_0]

All formats get the same weights, tokens and choices, in turns. Each call needs other experts than
the one before it, so that their weights come from memory. A number is the mean of the least times
of the calls; GB/s are the weights that one token reads, and the last line is what reading that
memory, and adding it up, takes by itself. A peer, built from ggml_layer.cpp, runs before and after
ours for each number of tokens; the lesser of its times counts.
"""

import argparse
import subprocess
import time
from typing import NamedTuple

import torch

from moe_mlir._support.huge_pages import empty
from moe_mlir.experts import ExpertActivation, run_experts
from moe_mlir.experts.quantized_weight import quantized
from moe_mlir.ops._panels import pack_weight
from moe_mlir.ops._quantized import Quantization

SWIGLU = ExpertActivation("silu", gate="concatenated")
FORMATS = {
    "int4": Quantization("int4", 32), "int4, int8 rows": Quantization("int4", 32, "int8"),
    "MXFP4": Quantization("fp4_e2m1", 32), "MXFP4, int8 rows": Quantization("fp4_e2m1", 32, "int8"),
    "int8": Quantization("int8", 32), "int8, int8 rows": Quantization("int8", 32, "int8"),
    "FP8 of 128": Quantization("fp8_e4m3", 128),
}  # fmt: skip


class Shape(NamedTuple):
    """The sizes of a layer: features, hidden features, experts, and experts of a token."""

    d: int
    hidden: int
    experts: int
    k: int


def layers(names, shape):
    """Of each format both weights, and the bytes of one expert."""
    torch.manual_seed(0)
    first = torch.randn(shape.experts, 2 * shape.hidden, shape.d).mul_(0.02).bfloat16()
    last = torch.randn(shape.experts, shape.d, shape.hidden).mul_(0.02).bfloat16()
    found = {}
    for name in names:
        if name == "bfloat16":
            found[name] = pack_weight(first, halves=True), pack_weight(last, halves=False)
            continue
        quantization = FORMATS[name]
        exponents = name.startswith("MX")
        found[name] = (quantized(first, quantization, halves=True, exponents=exponents),
                       quantized(last, quantization, exponents=exponents))
    return {name: (both, sum(weight.nbytes for weight in both) / shape.experts)
            for name, both in found.items()}


def calls_of(tokens, shape):
    """Sets of tokens, eight or more; those of one token choose all experts in turn."""
    count = max(8, shape.experts // shape.k)
    turns = torch.cat([torch.randperm(shape.experts)
                       for _ in range(-(-count * shape.k // shape.experts))])
    sets = []
    for turn in turns[:count * shape.k].view(count, 1, shape.k):
        chosen = turn if tokens == 1 else torch.rand(tokens, shape.experts).topk(shape.k).indices
        sets.append((torch.randn(tokens, shape.d).bfloat16(), torch.rand(tokens, shape.k), chosen))
    return sets


def least_times(weights, tokens, shape):
    sets = calls_of(tokens, shape)
    best = {name: [float("inf")] * len(sets) for name in weights}
    for _ in range(max(5, 60 // tokens)):
        for name, (both, _) in weights.items():
            for number, values in enumerate(sets):
                start = time.perf_counter()
                run_experts(*values, *both, activation=SWIGLU)
                best[name][number] = min(best[name][number], time.perf_counter() - start)
    return {name: sum(each) / len(each) for name, each in best.items()}


def read_bandwidth():
    """GB/s of sums of 28 MB each from pages like those of weights."""
    memory = empty((1 << 27,), torch.float32).fill_(1.0)
    parts = memory.split(7 << 20)
    best = [float("inf")] * len(parts)
    for _ in range(10):
        for number, part in enumerate(parts):
            start = time.perf_counter()
            part.sum()
            best[number] = min(best[number], time.perf_counter() - start)
    return memory.nbytes / sum(best) / 1e9


def peer_time(program, of_type, tokens, arguments):
    """Seconds, as a program made of ggml_layer.cpp prints milliseconds."""
    sizes = [str(size) for size in (arguments.threads, tokens, *arguments.shape)]
    done = subprocess.run([program, of_type, *sizes], capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1]) / 1e3


def measure(weights, tokens, arguments):
    """Of each format, and of each type of each peer, the time."""
    def of_peers():
        return {f"{name} {of_type}": peer_time(program, of_type, tokens, arguments)
                for name, program, types in arguments.peer for of_type in types}
    before = of_peers()
    times = least_times(weights, tokens, arguments.shape)
    after = of_peers()
    return times | {name: min(time, after[name]) for name, time in before.items()}


def peer(text):
    name, _, rest = text.partition("=")
    program, _, types = rest.partition(":")
    return name, program, types.split(",")


def shape(text):
    return Shape(*map(int, text.split(",")))


def parse():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", default="1,4,16,128")
    parser.add_argument("--shape", type=shape, default=Shape(2048, 1024, 64, 8),
                        metavar="D,HIDDEN,EXPERTS,K", help="default: 2048,1024,64,8")
    parser.add_argument("--formats", default=";".join(("bfloat16", *FORMATS)),
                        help="names of the first column, with ; between them")
    parser.add_argument("--peer", type=peer, action="append", default=[],
                        help="NAME=PROGRAM:TYPES, a program made of ggml_layer.cpp")
    return parser.parse_args()


def main():
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    counts = [int(count) for count in arguments.tokens.split(",")]
    weights = layers(arguments.formats.split(";"), arguments.shape)
    with torch.no_grad():
        times = {tokens: measure(weights, tokens, arguments) for tokens in counts}
    print("| weights | MB an expert |", " | ".join(f"T = {tokens}, ms" for tokens in counts),
          "| GB/s at T = 1 |")
    print("|---" * (3 + len(counts)) + "|")
    for name in times[counts[0]]:
        _, size = weights.get(name, (None, None))
        rate = f"{arguments.shape.k * size / times[1][name] / 1e9:.1f}" if size and 1 in times else ""
        cells = " | ".join(f"{1e3 * times[tokens][name]:.3g}" for tokens in counts)
        print(f"| {name} | {f'{size / 1e6:.2f}' if size else ''} | {cells} | {rate} |")
    print(f"\nReading alone, {arguments.threads} thread(s): {read_bandwidth():.1f} GB/s")


if __name__ == "__main__":
    main()
