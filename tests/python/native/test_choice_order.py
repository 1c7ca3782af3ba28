"""Groups by their best expert and no bias: logits order, not what a score function makes of them."""

import pytest
import torch

GROUPS = dict(n_group=4, topk_group=2, group_score="max")


def nearly_equal(rows=64, experts=24):
    """Logits some units in the last place apart, and saturated ones; one NaN, some -inf."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.ones(rows, experts).view(torch.int32)
    steps = torch.randint(-4, 5, (rows, experts), generator=generator).int()
    x = (bits + steps).view(torch.float32)
    x[rows // 2 :] *= 40.0
    x[1, 5], x[2, ::3], x[3] = torch.nan, -torch.inf, -torch.inf
    return x


def run_decomposed(x, k, score, topk_group=2, group_score="max", bias=None):
    from moe_mlir._native import native
    from moe_mlir.compiler.jit import compile_cached

    n, experts = x.shape
    z, g, i = f"tensor<{n}x{experts}xf32>", f"tensor<{n}x{k}xf32>", f"tensor<{n}x{k}xi64>"
    kind = "probs" if score == "none" else "logits"
    group_score = {"max": "max", "top2": "top2_sum"}[group_score]
    biased = f" : {z})" + (f" bias(%b : tensor<{experts}xf32>)" if bias is not None else "")
    bias = torch.zeros(experts) if bias is None else bias
    module = native().Module.parse(f"""
func.func @f(%x: {z}, %b: tensor<{experts}xf32>) -> ({g}, {i}) {{
  %g = tensor.empty() : {g}
  %i = tensor.empty() : {i}
  %r:2 = moe.topk_renorm ins(%x{biased} outs(%g, %i : {g}, {i})
      {{kind = #moe.score_kind<{kind}>, score = #moe.score_function<{score}>, n_group = 4 : i64,
        topk_group = {topk_group} : i64, group_score = #moe.group_score<{group_score}>}} -> {g}, {i}
  return %r#0, %r#1 : {g}, {i}
}}""")
    module.run("moe-decompose")
    gates, indices = torch.empty(n, k), torch.empty(n, k, dtype=torch.int64)
    compile_cached(module.text()).function("f")(x, bias, gates, indices)
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


def rows_that_their_groups_do_not_fill():
    """Four groups of two, of which the second or third wins with one number and one -inf or NaN."""
    low, nan = -torch.inf, torch.nan
    return torch.tensor([[0.5, 0.0, 9.0, low, 1.0, 1.0, low, low],
                         [low, low, low, 9.0, low, low, low, low],
                         [low, 0.5, low, low, 9.0, low, 1.0, low],
                         [0.5, 0.0, 9.0, nan, 1.0, 1.0, low, low],
                         [low, low, low, low, low, low, low, low]])


@pytest.mark.drawn(10)
@pytest.mark.parametrize("group_score", ["top2", "max"])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus", "none"])
@pytest.mark.parametrize("bias", [None, 0.0, -torch.inf, torch.nan], ids=str)
def test_no_expert_of_a_dropped_group_is_chosen(score, group_score, bias):
    """Not even where the groups that stay have nothing else than -inf or NaN to offer."""
    import moe_mlir
    from moe_mlir import reference

    x = rows_that_their_groups_do_not_fill()
    if bias is not None:
        # The expert that wins its group in the first row, and one of another.
        bias = torch.zeros(8).index_fill(0, torch.tensor([2, 5]), bias)
    options = dict(n_group=4, topk_group=1, group_score=group_score, score=score, bias=bias)
    gates, expected = reference.grouped_topk(x, 2, **options)
    assert torch.equal(expected[:, 0] // 2, expected[:, 1] // 2)
    limits = dict(topk_group=1, group_score=group_score, bias=bias)
    found = {"kernel": moe_mlir.grouped_topk(x, 2, **options),
             "decomposed": run_decomposed(x, 2, score, **limits)}
    for chip in ("sm_80", "sm_90"):
        with moe_mlir.simulate(chip):
            found[chip] = moe_mlir.grouped_topk(x, 2, **options)
    for name, (ours, indices) in found.items():
        assert torch.equal(indices, expected), name
        torch.testing.assert_close(ours.double(), gates.double(), rtol=0, atol=4e-6, equal_nan=True,
                                   msg=name)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_probability_of_zero_wins_against_a_dropped_group(score):
    """As in eager, which writes -inf over the scores of the other groups, not over the logits."""
    import moe_mlir

    x = rows_that_their_groups_do_not_fill()[:3]
    s = torch.softmax(x, -1) if score == "softmax" else torch.sigmoid(x)
    kept = s.view(-1, 4, 2).max(-1).values.argmax(-1, keepdim=True)
    mask = torch.zeros(len(x), 4).scatter(-1, kept, 1.0).bool().repeat_interleave(2, -1)
    eager = s.masked_fill(~mask, -torch.inf).topk(2).indices
    options = dict(score=score, n_group=4, topk_group=1, group_score="max")
    assert torch.equal(moe_mlir.grouped_topk(x, 2, **options)[1], eager)
    assert torch.equal(run_decomposed(x, 2, score, topk_group=1)[1], eager)


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
