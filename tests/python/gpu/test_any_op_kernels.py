"""Ops without a kernel of their own, executed in the PTX simulator.

They reach the GPU through their decomposition and the lowering of linalg, which
know no op: what is tested here is every kind of loop nest that comes up.
"""

import numpy as np
import pytest
import torch
from gpu_kernels import compile_function
from test_statistics_kernels import launch

sim = pytest.importorskip("moe_mlir.sim")


def gate_text(e, attributes):
    return f"""
func.func @smooth(%p: tensor<?x{e}xf32>, %a: tensor<{e}x{e}xf32>) -> tensor<?x{e}xf32> {{
  %c0 = arith.constant 0 : index
  %n = tensor.dim %p, %c0 : tensor<?x{e}xf32>
  %init = tensor.empty(%n) : tensor<?x{e}xf32>
  %g = moe.adjacency_gate ins(%p, %a : tensor<?x{e}xf32>, tensor<{e}x{e}xf32>)
      outs(%init : tensor<?x{e}xf32>) {{{attributes}}} -> tensor<?x{e}xf32>
  return %g : tensor<?x{e}xf32>
}}"""


def check_gate(n, e, threshold, attributes, a=None):
    generator = torch.Generator().manual_seed(e)
    p = torch.rand(n, e, generator=generator).softmax(-1)
    a = torch.rand(e, e, generator=generator) if a is None else a
    used = torch.where(a >= threshold, a, 0.0).double()
    if "base" in attributes and not a.any():
        used = torch.eye(e).double()
    (g,) = launch(
        compile_function(gate_text(e, attributes)), [p, a], [torch.empty(n, e)]
    )
    np.testing.assert_allclose(
        g.double().numpy(), (p.double() @ used.T).numpy(), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("n", [0, 1, 37])
@pytest.mark.parametrize("e", [5, 48])
def test_adjacency_gate(n, e):
    check_gate(n, e, 0.25, "threshold = 0.25 : f64")


@pytest.mark.parametrize("start", [torch.zeros, torch.ones])
def test_adjacency_gate_from_a_cold_start(start):
    check_gate(
        9, 16, 0.0, "cold_start = #moe.cold_start<base>", a=start(16, 16)
    )


CHAIN = """
func.func @chain(%z: tensor<?x16xf32>, %a: tensor<16x16xf32>)
    -> (tensor<?x2xf32>, tensor<?x2xi32>) {
  %c0 = arith.constant 0 : index
  %n = tensor.dim %z, %c0 : tensor<?x16xf32>
  %e0 = tensor.empty(%n) : tensor<?x16xf32>
  %p = linalg.softmax dimension(1) ins(%z : tensor<?x16xf32>)
      outs(%e0 : tensor<?x16xf32>) -> tensor<?x16xf32>
  %e1 = tensor.empty(%n) : tensor<?x16xf32>
  %g = moe.adjacency_gate ins(%p, %a : tensor<?x16xf32>, tensor<16x16xf32>)
      outs(%e1 : tensor<?x16xf32>) -> tensor<?x16xf32>
  %g0 = tensor.empty(%n) : tensor<?x2xf32>
  %i0 = tensor.empty(%n) : tensor<?x2xi32>
  %r:2 = moe.topk_renorm ins(%g : tensor<?x16xf32>)
      outs(%g0, %i0 : tensor<?x2xf32>, tensor<?x2xi32>)
      {kind = #moe.score_kind<probs>, renorm = false}
      -> tensor<?x2xf32>, tensor<?x2xi32>
  return %r#0, %r#1 : tensor<?x2xf32>, tensor<?x2xi32>
}"""


@pytest.mark.parametrize("n", [0, 1, 45])
def test_softmax_smoothing_and_selection_share_a_kernel(n):
    generator = torch.Generator().manual_seed(3)
    z = torch.randn(n, 16, generator=generator) * 2
    a = torch.rand(16, 16, generator=generator)
    function = compile_function(CHAIN)
    assert len(function.plan.kernel_names) == 1
    outs = [torch.empty(n, 2), torch.empty(n, 2, dtype=torch.int32)]
    gates, indices = launch(function, [z, a], outs)
    expected = z.double().softmax(-1) @ a.double().T
    chosen = expected.gather(1, indices.long())
    torch.testing.assert_close(gates.double(), chosen, rtol=0, atol=1e-6)
    assert (chosen >= expected.topk(2).values - 1e-6).all()


REDUCE = """
func.func @reduce(%x: tensor<?x{d}xf32>) -> tensor<{d}xf32> {{
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<{d}xf32>
  %fill = linalg.fill ins(%zero : f32) outs(%empty : tensor<{d}xf32>) -> tensor<{d}xf32>
  %sum = linalg.generic
      {{indexing_maps = [affine_map<(n, d) -> (n, d)>, affine_map<(n, d) -> (d)>],
       iterator_types = ["reduction", "parallel"]}}
      ins(%x : tensor<?x{d}xf32>) outs(%fill : tensor<{d}xf32>) {{
  ^bb0(%in: f32, %acc: f32):
    %e = math.exp %in : f32
    %l = math.log %e : f32
    %s = arith.addf %acc, %l : f32
    linalg.yield %s : f32
  }} -> tensor<{d}xf32>
  return %sum : tensor<{d}xf32>
}}"""


@pytest.mark.parametrize("n, d", [(0, 3), (1, 3), (3000, 3), (50, 70)])
def test_reductions_over_tokens(n, d):
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(n))
    (total,) = launch(compile_function(REDUCE.format(d=d)), [x], [torch.empty(d)])
    np.testing.assert_allclose(
        total.double().numpy(), x.double().sum(0).numpy(), rtol=0, atol=1e-6 * max(n, 4)
    )


def test_valid_tokens_come_first():
    text = """
func.func @select(%z: tensor<?x24xf32>, %valid: i32) -> (tensor<?x3xf32>, tensor<?x3xi32>) {
  %c0 = arith.constant 0 : index
  %n = tensor.dim %z, %c0 : tensor<?x24xf32>
  %g0 = tensor.empty(%n) : tensor<?x3xf32>
  %i0 = tensor.empty(%n) : tensor<?x3xi32>
  %r:2 = moe.topk_renorm ins(%z : tensor<?x24xf32>) num_valid(%valid : i32)
      outs(%g0, %i0 : tensor<?x3xf32>, tensor<?x3xi32>)
      -> tensor<?x3xf32>, tensor<?x3xi32>
  return %r#0, %r#1 : tensor<?x3xf32>, tensor<?x3xi32>
}"""
    z = torch.randn(40, 24, generator=torch.Generator().manual_seed(1))
    outs = [torch.empty(40, 3), torch.empty(40, 3, dtype=torch.int32)]
    gates, indices = launch(compile_function(text), [z, 21], outs)
    best = z.double().topk(3)
    assert (indices[:21].long() == best.indices[:21]).all()
    torch.testing.assert_close(
        gates[:21].double(), best.values[:21].softmax(-1), rtol=0, atol=1e-6
    )
    assert (indices[21:] == -1).all() and (gates[21:] == 0).all()
