"""Random tables of `moe tune`: each is refused with a reason, or no bit of a result depends on it.

    python tests/python/fuzz/tuning_tables.py SEED TABLES KERNELS

Of the tables, so many that are taken are compiled with and run. Prints how many were taken, and
ends with status 1 at the first difference; a crash ends the process.
"""

import json
import random
import sys

import torch

from moe_mlir._native import native
from moe_mlir.cli import tune

NAMES = ["tile-size", "product-vectors", "product-rows", "product-panels", "expert-rows",
         "mix-queries", "fetch-bytes"]
_EDGES = [-2 ** 63, -1, 0, 1, 2, 3, 7, 8, 64, 65, 1023, 1024, 1025, 2 ** 20, 2 ** 20 + 1, 2 ** 31,
          2 ** 63 - 1, 2 ** 63, 1.0, 0.5, 1e400, True, None, "2", [], {}]
# Small kernels that read the numbers: of a product, of experts, of mixing and of a selection.
PROBES = [
    tune.Probe("product", tune.logits_kernel(torch.float32, torch.float32, None, 70, 33), {"n": 21}),
    tune.Probe("bf16", tune.logits_kernel(torch.bfloat16, torch.bfloat16, None, 70, 33), {"n": 21}),
    tune.Probe("experts", tune.linear_kernel(
        torch.float32, 40, 20, torch.int32, None, None, False,
        tune.ExpertActivation(activation="silu", gate="concatenated")), {"r": 30, "e": 3, "b": 4}),
    tune._mixing(40, 24),
    tune._selection(20, 4),
]


def draw_numbers(draw):
    """Mostly ones that are taken: small and even."""
    chosen = draw.sample(NAMES, draw.randint(1, len(NAMES)))
    return {name: draw.choice(_EDGES) if draw.random() < 0.1 else
            2 * draw.randint(1, draw.choice([1, 4, 32, 500])) for name in chosen}


def draw_table(draw, key):
    table = {"moe_mlir_tuning": 1, "cpus": {key: draw_numbers(draw)}}
    if draw.random() < 0.3:
        place = draw.choice([table, table["cpus"], table["cpus"][key]])
        place[draw.choice([*place, "other", ""])] = draw.choice([*_EDGES, table["cpus"]])
    try:
        text = json.dumps(table)
    except ValueError:  # a value put into itself
        return ""
    if draw.random() < 0.2:
        at = draw.randrange(len(text))
        text = text[:at] + draw.choice(["", "[", "}", '"', "\0", "é", "9" * 30, "[" * 5000]) + \
            text[at + draw.choice([0, 1, 9]):]
    return text


def compare(probe, pipeline):
    inputs = probe.inputs(0)
    expected = tune._run(probe.compile(native().cpu_pipeline("native")), probe, inputs)
    found = tune._run(probe.compile(pipeline), probe, inputs)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (
        f"{probe.title}: other bits with {pipeline}")


def main():
    seed, tables, kernels = map(int, sys.argv[1:])
    draw, key, taken = random.Random(seed), native().describe_cpu("native"), []
    usual = native().cpu_pipeline("native")
    for _ in range(tables):
        text = draw_table(draw, key)
        try:
            pipeline = native().cpu_pipeline("native", text)
        except native().MoeError as error:
            assert "tuning table: " in str(error) and len(str(error)) > 40, f"{error!r} of {text!r}"
            continue
        taken.append(pipeline)
    others = [pipeline for pipeline in taken if pipeline != usual]
    for pipeline in draw.sample(others, min(kernels, len(others))):
        compare(draw.choice(PROBES), pipeline)
    print(f"{tables} tables, {len(taken)} taken, {len(others)} with other numbers, "
          f"{min(kernels, len(others))} kernels")


if __name__ == "__main__":
    main()
