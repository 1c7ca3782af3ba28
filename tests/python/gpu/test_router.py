"""Projection and selection as one kernel, executed in the PTX simulator."""

import math

import numpy as np
import pytest
import torch

from kernels import compile_kernels, shaped
from reference import gates_row, order

sim = pytest.importorskip("moe_mlir.sim")


def module_text(e, d, k, *, dtype, bias):
    h, w = shaped("tensor", (None, d), dtype), shaped("tensor", (e, d), dtype)
    b = shaped("tensor", (e,), dtype)
    parameter = f", %b: {b}" if bias else ""
    clause = f" bias(%b : {b})" if bias else ""
    return f"""
func.func @route(%h: {h}, %w: {w}{parameter}) -> (tensor<?x{k}xf32>, tensor<?x{k}xi32>) {{
  %c0 = arith.constant 0 : index
  %n = tensor.dim %h, %c0 : {h}
  %z0 = tensor.empty(%n) : tensor<?x{e}xf32>
  %z = moe.router_logits ins(%h, %w : {h}, {w}){clause}
      outs(%z0 : tensor<?x{e}xf32>) -> tensor<?x{e}xf32>
  %g0 = tensor.empty(%n) : tensor<?x{k}xf32>
  %i0 = tensor.empty(%n) : tensor<?x{k}xi32>
  %r:2 = moe.topk_renorm ins(%z : tensor<?x{e}xf32>)
      outs(%g0, %i0 : tensor<?x{k}xf32>, tensor<?x{k}xi32>)
      -> tensor<?x{k}xf32>, tensor<?x{k}xi32>
  return %r#0, %r#1 : tensor<?x{k}xf32>, tensor<?x{k}xi32>
}}"""


def run(n, e, d, k, *, dtype=torch.float32, bias=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(n, d, generator=generator).to(dtype)
    w = (torch.randn(e, d, generator=generator) / math.sqrt(d)).to(dtype)
    inputs, shapes = [h, w], [(None, d), (e, d)]
    if bias:
        inputs.append(torch.randn(e, generator=generator).to(dtype))
        shapes.append((e,))
    (kernel,) = compile_kernels(module_text(e, d, k, dtype=dtype, bias=bias))
    z = h.double() @ w.double().T
    if bias:
        z = z + inputs[2].double()
    shapes += [(None, k)] * 2
    for options in ({"seed": 1}, {"seed": 2, "policy": 1}):
        gates = torch.full((n, k), 77.0)
        indices = torch.full((n, k), 77, dtype=torch.int32)
        report = kernel.run([*inputs, gates, indices], shapes, **options)
        assert report is None or not report.findings
        check(z.numpy(), gates.double().numpy(), indices.long().numpy(), d)


def check(z, gates, indices, d):
    if not z.size:
        return
    largest = np.abs(z).max()
    atol = 1e-6 + (8 + math.sqrt(d)) * 2.0**-24 * largest
    k = gates.shape[1]
    for x, gate, index in zip(z, gates, indices):
        assert len(set(index)) == k
        assert ((0 <= index) & (index < len(x))).all()
        chosen = x[index]
        assert (chosen >= x[order(x)[k - 1]] - atol).all()
        assert (chosen[:-1] >= chosen[1:] - atol).all()
        form = {"score": "softmax", "renorm": True}
        # A gate is 1-Lipschitz in each of its logits' errors, and there are two
        # of them: its own and the normaliser's.
        np.testing.assert_allclose(
            gate, gates_row(x, x, index, form), rtol=0, atol=2 * atol
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_routes(dtype):
    run(21, 16, 96, 2, dtype=dtype)


@pytest.mark.parametrize("n", [0, 1, 17])
def test_any_number_of_tokens(n):
    run(n, 8, 40, 2, seed=n)


@pytest.mark.parametrize("e, d, k", [(1, 1, 1), (7, 33, 3), (130, 64, 8), (5, 31, 5)])
def test_sizes_that_divide_nothing(e, d, k):
    run(6, e, d, k, seed=e)


def test_bias():
    run(9, 12, 50, 3, bias=True, dtype=torch.bfloat16)


def test_so_many_experts_that_tiles_shrink():
    run(5, 2048, 32, 4)
