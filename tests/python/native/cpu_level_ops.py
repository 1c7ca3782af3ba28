"""Every op with its gradient in each element type, judged by the reference in float64.

Run as a program, under MOE_MLIR_CPU: ends with 1 and a line for each failure.
`record()` gives the kernels that this takes, as one module.
"""

import re
import sys
from unittest import mock

import torch

import moe_mlir
from moe_mlir import reference
from moe_mlir.compiler import jit
from moe_mlir_bench.gpu_check import cases
from moe_mlir_bench.gpu_check.cases import OPS, operands

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What may have 16 bits: activations and what they are multiplied by.
_NARROW = {"h", "u", "q", "rows", "weight", "wo", "phi", "z"}
# Ops that take all of their inputs in f32.
_WIDE = {"hyper_router", "threshold_renorm", "adjacency_gate", "adjacency_update", "bias_update",
         "dispersion_weights", "densify", "balance_loss", "dispatch"}  # fmt: skip
_FORWARD = 2e-6
# No multiples of a vector's lanes: masks, and rests that are copied one by one.
ODD = {"n": 5, "e": 268, "d": 33, "k": 3}


def forms():
    """(op, element type) of all that is run."""
    return [(op, dtype) for op in OPS for dtype in (DTYPES if op not in _WIDE else DTYPES[:1])]


def inputs(dtype):
    """Operands whose values `dtype` holds, so that float64 reads the same."""
    made = operands()
    for name in _NARROW:
        made[name] = made[name].to(dtype)
    return made


def run(library, call, made):
    """The results and the gradients of all operands that get one."""
    leaves = {name: x.detach().clone().requires_grad_(x.is_floating_point())
              for name, x in made.items()}
    results = call(library, leaves)
    results = results if isinstance(results, tuple) else (results,)
    generator = torch.Generator().manual_seed(1)
    loss = 0
    for result in results:
        if result.is_floating_point() and result.requires_grad:
            weight = torch.randn(result.shape, generator=generator)
            loss = loss + (result * weight.to(result.dtype)).sum(dtype=torch.float64)
    if isinstance(loss, torch.Tensor):
        loss.backward()
    gradients = {name: x.grad for name, x in leaves.items() if x.grad is not None}
    return results, gradients


def _error(found, expected, tolerance):
    """Empty, or how far `found` is from `expected`."""
    if not found.is_floating_point():
        return "" if torch.equal(found, expected.to(found.dtype)) else "integers differ"
    if not torch.equal(found.isnan(), expected.isnan()):
        return "NaN in other places"
    scale = 1 + expected.nan_to_num(0).abs().max() if expected.numel() else 1
    # Half a unit in the last place of what is returned.
    limit = (tolerance + (torch.finfo(found.dtype).eps / 2)) * scale
    worst = (found.double() - expected).nan_to_num(0).abs().max() if found.numel() else 0
    return "" if worst <= limit else f"error {float(worst):.2g} exceeds {float(limit):.2g}"


def check(op, dtype):
    """A sentence for every difference."""
    made = inputs(dtype)
    wide = {name: x.double() if x.is_floating_point() else x for name, x in made.items()}
    found, gradients = run(moe_mlir, OPS[op], made)
    expected, expected_gradients = run(reference, OPS[op], wide)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        if problem := _error(a, b, _FORWARD):
            yield f"{op} {dtype} result {i}: {problem}"
    # What reads a rounded result's cotangent reads it rounded.
    narrow = 0 if found[0].dtype == torch.float32 else torch.finfo(dtype).eps
    for name, gradient in gradients.items():
        if problem := _error(gradient, expected_gradients[name], 20 * _FORWARD + narrow):
            yield f"{op} {dtype} gradient of {name}: {problem}"


def check_model():
    """An imported model: its element types meet in arithmetic that no op has."""

    class Router(torch.nn.Module):
        def __init__(self, dtype):
            super().__init__()
            self.gate = torch.nn.Linear(16, 8, dtype=dtype)

        def forward(self, h):
            gates = torch.nn.functional.silu(self.gate(h)).float().softmax(-1)
            best, ids = gates.topk(2, -1)
            best = best / best.sum(-1, keepdim=True)
            return (best.to(h.dtype) * h[:, :2]).sum(-1, keepdim=True) + h, ids

    for dtype in DTYPES:
        torch.manual_seed(0)
        model, h = Router(dtype).eval(), torch.randn(12, 16, dtype=dtype)
        with torch.no_grad():
            expected, ids = Router.forward(model.double(), h.double())
            found, found_ids = moe_mlir.compile(model.to(dtype), (h,))(h)
        # One rounding of the logits, one of the gates, one of the sum.
        limit = 4 * torch.finfo(dtype).eps * (1 + float(expected.abs().max()))
        error = float((found.double() - expected).abs().max())
        if error > limit or not torch.equal(found_ids, ids):
            yield f"model {dtype}: error {error:.2g} exceeds {limit:.2g}, or other experts"


def record():
    """One module with a function for every kernel of every form, at even and odd sizes."""
    texts, compile_cached = [], jit.compile_cached

    def keep(text, *arguments, **options):
        if text not in texts:
            texts.append(text)
        return compile_cached(text, *arguments, **options)

    jit.compile_cached = keep
    try:
        for sizes in ({}, ODD):
            with mock.patch.dict(vars(cases), sizes):
                for op, dtype in forms():
                    run(moe_mlir, OPS[op], inputs(dtype))
    finally:
        jit.compile_cached = compile_cached
    return "".join(re.sub(r"func\.func @(\w+)\(", rf"func.func @\g<1>_{i}(", text)
                   for i, text in enumerate(texts))


def main():
    problems = [p for op, dtype in forms() for p in check(op, dtype)]
    problems += check_model()
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
