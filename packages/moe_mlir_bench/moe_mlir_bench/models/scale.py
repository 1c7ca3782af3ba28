"""`python -m moe_mlir_bench.models.scale [--layers 48] [--experts 128]`: a large model without weights.

Imports and compiles a Qwen3-MoE of real width whose weights are on the meta
device, and prints the time and the memory of each step. Equal layers become
one function (`graph.repeats`), so that only torch's own tracing grows with
their number.
"""

import argparse
import resource
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from .families import FAMILIES

_REAL = dict(hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
             num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=151936,
             num_experts_per_tok=8)


def import_without_weights(layers: int, experts: int, **sizes: int) -> Any:
    """The imported module of a model whose weights do not exist."""
    import transformers

    import moe_mlir

    family = FAMILIES["Qwen3-MoE"]
    config = family.configure(layers, **{family.experts: experts}, **sizes)
    with torch.device("meta"):
        model = getattr(transformers, family.model)._from_config(config).eval()
        inputs = {"input_ids": torch.zeros(2, 12, dtype=torch.int64), "use_cache": False}
    return moe_mlir.export(model, (), kwargs=inputs)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m moe_mlir_bench.models.scale", description=__doc__)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    options = parser.parse_args(arguments)
    from moe_mlir._native import native

    begin = _now()
    module = import_without_weights(options.layers, options.experts, **_REAL)
    _report(f"import, {module.text.count(chr(10))} lines of IR", begin)
    begin = _now()
    code = native().compile_object(module.text, "moe-to-cpu", dump_dir="")
    _report(f"compile, {len(code)} bytes of code", begin)
    return 0


def _now():
    return time.perf_counter(), time.process_time()


def _report(step, begin):
    seconds, cpu = (now - then for now, then in zip(_now(), begin))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{step}: {seconds:.1f} s, {cpu:.1f} s of CPU, peak memory {peak:.0f} MB", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
