"""A mix and the selection that reads it as one kernel, executed in the PTX simulator."""

import pytest
import torch
from gpu_kernels import compile_kernels

sim = pytest.importorskip("moe_mlir.sim")

TEXT = """
func.func @choose(%u: tensor<2x?x{d}x{t}>, %e: tensor<2x?x{e}xf32>)
    -> (tensor<2x?x2xf32>, tensor<2x?x2xi32>) {{
  %c1 = arith.constant 1 : index
  %n = tensor.dim %u, %c1 : tensor<2x?x{d}x{t}>
  %p0 = tensor.empty(%n) : tensor<2x?x{e}xf32>
  %l0 = tensor.empty(%n) : tensor<2x?xf32>
  %g0 = tensor.empty(%n) : tensor<2x?x2xf32>
  %i0 = tensor.empty(%n) : tensor<2x?x2xi32>
  %p:2 = moe.similarity_inform ins(%u, %e : tensor<2x?x{d}x{t}>, tensor<2x?x{e}xf32>)
      outs(%p0, %l0 : tensor<2x?x{e}xf32>, tensor<2x?xf32>)
      {{visibility = #moe.visibility<causal>}} -> tensor<2x?x{e}xf32>, tensor<2x?xf32>
  %r:2 = moe.topk_renorm ins(%p#0 : tensor<2x?x{e}xf32>)
      outs(%g0, %i0 : tensor<2x?x2xf32>, tensor<2x?x2xi32>) {{kind = #moe.score_kind<probs>}}
      -> tensor<2x?x2xf32>, tensor<2x?x2xi32>
  return %r#0, %r#1 : tensor<2x?x2xf32>, tensor<2x?x2xi32>
}}
"""


@pytest.mark.parametrize("dtype, chip, experts", [
    (torch.float32, "sm_90", 16), (torch.bfloat16, "sm_80", 16), (torch.bfloat16, "sm_120", 128),
    (torch.float32, "sm_90", 256),
])
def test_is_one_kernel(dtype, chip, experts):
    n, d = 70, 32
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(2, n, d, generator=generator).to(dtype) / 2
    e = torch.randn(2, n, experts, generator=generator).softmax(-1)
    name = {torch.float32: "f32", torch.bfloat16: "bf16"}[dtype]
    (kernel,) = compile_kernels(TEXT.format(d=d, e=experts, t=name), chip)
    gates, indices = torch.full((2, n, 2), 77.0), torch.full((2, n, 2), 77, dtype=torch.int32)
    shapes = [(2, None, d), (2, None, experts), (2, None, 2), (2, None, 2)]
    report = kernel.run([u, e, gates, indices], shapes)
    assert report is None or not report.findings

    logits = u.double() @ u.double().mT
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
    p = logits.masked_fill(hidden, -torch.inf).softmax(-1) @ e.double()
    best = p.topk(2).values
    chosen = p.gather(-1, indices.long())
    torch.testing.assert_close(chosen, best, rtol=0, atol=1e-5)
    torch.testing.assert_close(gates.double(), chosen / chosen.sum(-1, keepdim=True),
                               rtol=0, atol=1e-4)
