#!/usr/bin/env python
"""Times a layer of experts with weights of 4 and 8 bits beside one in bfloat16.

    PYTHONPATH=build/python python utils/quantized_times.py [--threads N] [--tokens 1,4,16,128]

All formats get the same weights, tokens and choices, in turns. Each call needs other experts than
the one before it, so that their weights come from memory. A number is the mean of the least times
of the calls; GB/s are the weights that one token reads, and the last line is what reading that
memory, and adding it up, takes by itself.
"""

import argparse
import time

import torch

from moe_mlir._support.huge_pages import empty
from moe_mlir.experts import ExpertActivation, run_experts
from moe_mlir.experts.quantized_weight import quantized
from moe_mlir.ops._panels import pack_weight
from moe_mlir.ops._quantized import Quantization

D, HIDDEN, EXPERTS, K = 2048, 1024, 64, 8
SWIGLU = ExpertActivation("silu", gate="concatenated")
FORMATS = {
    "int4": Quantization("int4", 32), "int4, int8 rows": Quantization("int4", 32, "int8"),
    "MXFP4": Quantization("fp4_e2m1", 32), "MXFP4, int8 rows": Quantization("fp4_e2m1", 32, "int8"),
    "int8": Quantization("int8", 32), "int8, int8 rows": Quantization("int8", 32, "int8"),
    "FP8 of 128": Quantization("fp8_e4m3", 128),
}  # fmt: skip


def layers():
    """Of each format both weights, and the bytes of one expert."""
    torch.manual_seed(0)
    first = torch.randn(EXPERTS, 2 * HIDDEN, D).mul_(0.02).bfloat16()
    last = torch.randn(EXPERTS, D, HIDDEN).mul_(0.02).bfloat16()
    found = {"bfloat16": (pack_weight(first, halves=True), pack_weight(last, halves=False))}
    for name, quantization in FORMATS.items():
        exponents = name.startswith("MX")
        found[name] = (quantized(first, quantization, halves=True, exponents=exponents),
                       quantized(last, quantization, exponents=exponents))
    return {name: (both, sum(weight.nbytes for weight in both) / EXPERTS)
            for name, both in found.items()}


def calls_of(tokens):
    """Eight sets of tokens; those of one token choose all experts in turn."""
    sets = []
    turns = torch.cat([torch.randperm(EXPERTS) for _ in range(8 * K // EXPERTS)]).view(8, 1, K)
    for turn in turns:
        chosen = turn if tokens == 1 else torch.rand(tokens, EXPERTS).topk(K).indices
        sets.append((torch.randn(tokens, D).bfloat16(), torch.rand(tokens, K), chosen))
    return sets


def least_times(weights, tokens):
    sets = calls_of(tokens)
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


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", default="1,4,16,128")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    counts = [int(count) for count in arguments.tokens.split(",")]
    weights = layers()
    with torch.no_grad():
        times = {tokens: least_times(weights, tokens) for tokens in counts}
    print("| weights | MB an expert |", " | ".join(f"T = {tokens}, ms" for tokens in counts),
          "| GB/s at T = 1 |")
    print("|---" * (3 + len(counts)) + "|")
    for name, (_, size) in weights.items():
        rate = f"{K * size / times[1][name] / 1e9:.1f}" if 1 in times else ""
        cells = " | ".join(f"{1e3 * times[tokens][name]:.3g}" for tokens in counts)
        print(f"| {name} | {size / 1e6:.2f} | {cells} | {rate} |")
    print(f"\nReading alone, {arguments.threads} thread(s): {read_bandwidth():.1f} GB/s")


if __name__ == "__main__":
    main()
