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
    from moe_mlir.compiler.jit import compile_cached

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
def test_an_id_beyond_32_bits_is_no_expert_and_comes_out_as_it_went_in(id):
    import moe_mlir

    x = torch.tensor([[0.5, 2.0, 1.0, -1.0]])
    for k in (2, 20):  # in registers, and on the stack
        forced = torch.tensor([[2] + [id] * (k - 1)])
        scores = torch.cat([x, torch.zeros(1, 16)], dim=-1)
        gates, indices = moe_mlir.grouped_topk(scores, k, forced=forced, renorm=False)
        assert gates[0, 0] == x.sigmoid()[0, 2] and (gates[0, 1:] == 0).all()
        assert torch.equal(indices, forced)


# The last two are 1 and 3 in 32 bits.
FORCED = torch.tensor([[3, -1, 1], [EXPERTS, 0, 3], [2, 3, 2**32 + 1], [-(2**32) + 3, -1, 3]])
NO_EXPERT = (FORCED < 0) | (FORCED >= EXPERTS)


def run_decomposed(x, renorm, eps, score, index_type):
    from moe_mlir._native import native
    from moe_mlir.compiler.jit import compile_cached

    n, k = FORCED.shape
    g, i, f = f"tensor<{n}x{k}xf32>", f"tensor<{n}x{k}x{index_type}>", f"tensor<{n}x{k}xi64>"
    kind = ", kind = #moe.score_kind<probs>" if score == "none" else ""
    module = native().Module.parse(f"""
func.func @f(%x: tensor<{n}x{EXPERTS}xf32>, %f: {f}) -> ({g}, {i}) {{
  %g = tensor.empty() : {g}
  %i = tensor.empty() : {i}
  %r:2 = moe.topk_renorm ins(%x : tensor<{n}x{EXPERTS}xf32>) forced(%f : {f}) outs(%g, %i : {g}, {i})
      {{renorm = {str(renorm).lower()}, eps = {eps} : f64, score = #moe.score_function<{score}>{kind}}}
      -> {g}, {i}
  return %r#0, %r#1 : {g}, {i}
}}""")
    module.run("moe-decompose")
    assert "moe.topk_renorm" not in module.text()
    indices = torch.empty(n, k, dtype=torch.int64 if index_type == "i64" else torch.int32)
    gates = torch.empty(n, k)
    compile_cached(module.text()).function("f")(x, FORCED, gates, indices)
    return gates, indices


@pytest.mark.parametrize("renorm, eps, score", [
    (True, 0.0, "softmax"), (True, 0.5, "sigmoid"), (True, 0.0, "none"), (False, 0.0, "softmax")])
def test_a_place_without_an_expert_has_gate_zero_beside_a_chosen_nan(renorm, eps, score):
    """docs/Spec.md 9.1: the sum of the gates is NaN, 0 / NaN is not the answer."""
    import moe_mlir
    from moe_mlir import reference

    x = torch.randn(4, EXPERTS, generator=torch.Generator().manual_seed(1))
    x[:3, 3] = torch.nan
    x[3, 3] = torch.inf
    options = dict(forced=FORCED, renorm=renorm, eps=eps, score=score)
    found = {"kernel": moe_mlir.grouped_topk(x, 3, **options),
             "narrow": moe_mlir.grouped_topk(x, 3, index_dtype=torch.int32, **options),
             "reference": reference.grouped_topk(x.double(), 3, **options),
             "decomposed": run_decomposed(x, renorm, eps, score, "i64"),
             "decomposed, narrow": run_decomposed(x, renorm, eps, score, "i32")}
    with moe_mlir.simulate("sm_90"):
        found["gpu"] = moe_mlir.grouped_topk(x, 3, **options)
        found["gpu, narrow"] = moe_mlir.grouped_topk(x, 3, index_dtype=torch.int32, **options)
    for name, (gates, indices) in found.items():
        assert (gates[NO_EXPERT] == 0).all(), name
        assert gates[:3][~NO_EXPERT[:3]].isnan().all(), name
        # What 32 bits do not hold is -1 there, and never an expert.
        is_wide = (FORCED - FORCED.to(torch.int32)) != 0
        expected = FORCED.masked_fill(is_wide, -1) if indices.dtype == torch.int32 else FORCED
        assert torch.equal(indices.long(), expected), name
