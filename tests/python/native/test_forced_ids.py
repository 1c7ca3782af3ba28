"""Forced ids that are no expert: gate and gradient 0, and no access outside of the buffers."""

import pytest
import torch

EXPERTS = 4
IDS = (EXPERTS, EXPERTS + 40, -1, -7)

TEXT = """
func.func @f(%dg: tensor<?x2xf32>, %g: tensor<?x2xf32>, %i: tensor<?x2xi32>, %x: tensor<?x4xf32>)
    -> tensor<?x4xf32> {
  %c0 = arith.constant 0 : index
  %n = tensor.dim %x, %c0 : tensor<?x4xf32>
  %e = tensor.empty(%n) : tensor<?x4xf32>
  %r = moe.topk_renorm_backward ins(%dg, %g, %i : tensor<?x2xf32>, tensor<?x2xf32>, tensor<?x2xi32>)
      scores(%x : tensor<?x4xf32>) outs(%e : tensor<?x4xf32>)
      {score = #moe.score_function<SCORE>} -> tensor<?x4xf32>
  return %r : tensor<?x4xf32>
}
"""


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("id", IDS)
def test_a_gradient_stays_within_its_row(score, id):
    from moe_mlir.runtime import compile_cached

    ids = torch.tensor([[1, id]], dtype=torch.int32)
    gates, cotangent = torch.tensor([[0.7, 0.3]]), torch.tensor([[2.0, 5.0]])
    scores = torch.arange(EXPERTS).float().view(1, -1)
    # The row lies in the middle of memory that nobody else may touch.
    memory = torch.full((64, EXPERTS), -123.0)
    row = memory[32:33]
    compile_cached(TEXT.replace("SCORE", score)).function("f")(cotangent, gates, ids, scores, row)
    assert (memory[:32] == -123).all() and (memory[33:] == -123).all()
    assert row.isfinite().all() and (row[0, [0, 2, 3]] == 0).all()


@pytest.mark.parametrize("id", [2**32 + 1, -(2**32) + 1, 2**40])
def test_an_id_beyond_32_bits_is_no_expert(id):
    import moe_mlir

    x = torch.tensor([[0.5, 2.0, 1.0, -1.0]])
    forced = torch.tensor([[2, id]])
    gates, indices = moe_mlir.grouped_topk(x, 2, forced=forced, renorm=False)
    assert gates[0, 0] == x.sigmoid()[0, 2] and gates[0, 1] == 0 and indices[0, 0] == 2
