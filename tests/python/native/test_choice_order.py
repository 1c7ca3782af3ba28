"""Groups by their best expert and no bias: the logits order, not what a score function makes of them."""

import pytest
import torch

GROUPS = dict(n_group=4, topk_group=2, group_score="max")


def nearly_equal(rows=64, experts=24):
    """Logits that lie some units in the last place apart, and saturated ones; one NaN, some -inf."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.ones(rows, experts).view(torch.int32)
    x = (bits + torch.randint(-4, 5, (rows, experts), generator=generator).int()).view(torch.float32)
    x[rows // 2 :] *= 40.0
    x[1, 5], x[2, ::3], x[3] = torch.nan, -torch.inf, -torch.inf
    return x


def run_decomposed(x, k, score):
    from moe_mlir._native import native
    from moe_mlir.runtime import compile_cached

    n, experts = x.shape
    z, g, i = f"tensor<{n}x{experts}xf32>", f"tensor<{n}x{k}xf32>", f"tensor<{n}x{k}xi64>"
    module = native().Module.parse(f"""
func.func @f(%x: {z}) -> ({g}, {i}) {{
  %g = tensor.empty() : {g}
  %i = tensor.empty() : {i}
  %r:2 = moe.topk_renorm ins(%x : {z}) outs(%g, %i : {g}, {i})
      {{score = #moe.score_function<{score}>, n_group = 4 : i64, topk_group = 2 : i64,
        group_score = #moe.group_score<max>}} -> {g}, {i}
  return %r#0, %r#1 : {g}, {i}
}}""")
    module.run("moe-decompose")
    gates, indices = torch.empty(n, k), torch.empty(n, k, dtype=torch.int64)
    compile_cached(module.text()).function("f")(x, gates, indices)
    return gates, indices


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_groups_by_max_are_ordered_by_the_logits(score):
    import moe_mlir
    from moe_mlir import reference

    x = nearly_equal()
    _, expected = reference.grouped_topk(x, 6, score="none", **GROUPS)
    found = {"reference": reference.grouped_topk(x, 6, score=score, **GROUPS),
             "kernel": moe_mlir.grouped_topk(x, 6, score=score, **GROUPS),
             "decomposed": run_decomposed(x, 6, score)}
    with moe_mlir.simulate("sm_90"):
        found["gpu"] = moe_mlir.grouped_topk(x, 6, score=score, **GROUPS)
    wanted = found["reference"][0]
    for name, (gates, indices) in found.items():
        assert torch.equal(indices, expected), name
        torch.testing.assert_close(gates.double(), wanted.double(), rtol=0, atol=4e-6,
                                   equal_nan=True, msg=name)


def test_a_nan_does_not_count_for_its_group():
    """The places of NaN in a row do not change what else is chosen, on a CPU or a GPU."""
    import moe_mlir
    from moe_mlir import reference

    x = torch.tensor([[5.0, torch.nan, 1.0, 3.0], [torch.nan, 5.0, 1.0, 3.0],
                      [1.0, 3.0, torch.nan, torch.nan], [-torch.inf, 1.0, torch.nan, 3.0]])
    for group_score in ("top2", "max"):
        options = dict(n_group=2, topk_group=1, group_score=group_score, score="none")
        _, expected = reference.grouped_topk(x, 2, **options)
        assert torch.equal(moe_mlir.grouped_topk(x, 2, **options)[1], expected)
        with moe_mlir.simulate("sm_90"):
            assert torch.equal(moe_mlir.grouped_topk(x, 2, **options)[1], expected)
