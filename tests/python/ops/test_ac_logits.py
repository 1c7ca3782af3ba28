"""moe.ac_logits on the CPU against the float64 reference."""

import pytest
import torch
from op_judge import DTYPES, assert_close, logit_tolerance, random, strided, unaligned

import moe_mlir
from moe_mlir import reference


def operands(n, width, experts, places=1, dtype=torch.float32, seed=0):
    g = random(seed)
    return dict(
        h=torch.randn(n, width, generator=g).to(dtype),
        metric=torch.rand(experts, width, generator=g) + 0.5,
        prev_indices=torch.randint(-1, experts, (n, places), generator=g),
        emb=torch.randn(experts, width, generator=g).to(dtype),
        prev_gates=torch.rand(n, places, generator=g) if places > 1 else None,
    )


def check(*, h, metric, prev_indices, emb, prev_gates=None, bias=None):
    m = metric
    z = moe_mlir.ac_logits(h, m, prev_indices, emb, prev_gates=prev_gates, bias=bias)
    wide = [None if t is None else t.double() for t in (h, m, emb, prev_gates, bias)]
    h, m, emb, prev_gates, bias = wide
    expected = reference.ac_logits(h, m, prev_indices, emb, prev_gates=prev_gates, bias=bias)
    assert z.dtype == torch.float32
    # The terms of the sum are as large as those of |h M| |emb|.
    terms = torch.linalg.vector_norm(emb, dim=-1).max() * (h.abs() * m.max()).norm(dim=-1)
    assert_close(z, expected, max(map(lambda x: logit_tolerance(x, h.shape[-1]), (expected, terms))))
    return z


@pytest.mark.parametrize("width,experts", [(1, 1), (13, 7), (352, 16), (64, 257)])
@pytest.mark.parametrize("places", (1, 2, 8))
def test_equals_reference_for_any_sizes(width, experts, places):
    for n in (0, 1, 7, 64, 100):
        check(**operands(n, width, experts, places, seed=n))


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_reference_for_every_dtype(dtype):
    for places in (1, 3):
        x = operands(9, 33, 8, places, dtype)
        check(**x, bias=torch.randn(8, generator=random(1)).to(dtype))
        check(**{**x, "prev_indices": x["prev_indices"].int()})


def test_leading_dims():
    x = operands(12, 13, 7, 2)
    shaped = {
        name: t.view(2, 3, 2, -1) if name in ("h", "prev_indices", "prev_gates") else t
        for name, t in x.items()
    }
    assert check(**shaped).shape == (2, 3, 2, 7)


@pytest.mark.parametrize("layout", (strided, unaligned))
def test_strided_and_unaligned_operands(layout):
    check(**{name: layout(t) for name, t in operands(11, 33, 8, 2).items()})


@pytest.mark.parametrize("places", (1, 2))
def test_without_a_previous_expert_it_is_the_plain_router(places):
    """Remark 1: the first layer, and tokens that were routed nowhere."""
    x = operands(9, 33, 8, places)
    x["prev_indices"][:] = -1
    z = check(**x)
    assert torch.equal(z, moe_mlir.router_logits(x["h"], x["emb"]))


def test_a_metric_of_ones_is_the_plain_router():
    x = operands(9, 33, 8)
    x["metric"][:] = 1.0
    assert torch.equal(check(**x), moe_mlir.router_logits(x["h"], x["emb"]))


def test_gates_without_weight_leave_the_token_as_it_is():
    x = operands(9, 33, 8, 2)
    x["prev_gates"][:4] = 0.0
    z = check(**x)
    plain = moe_mlir.router_logits(x["h"], x["emb"])
    assert torch.equal(z[:4], plain[:4])


def test_shares_are_taken_over_the_places_that_have_an_expert():
    x = operands(9, 33, 8, 3)
    x["prev_indices"][:, 1] = -1
    lone = {**x, "prev_indices": x["prev_indices"][:, [0, 2]], "prev_gates": x["prev_gates"][:, [0, 2]]}
    assert_close(check(**x), check(**lone).double(), 1e-6)


def test_logits_mix_as_the_metrics_do():
    """C.6: the logits are linear in M."""
    x = operands(9, 33, 8, 2)
    x["prev_indices"] = x["prev_indices"].clamp(min=0)
    parts = [
        check(**{**x, "prev_indices": x["prev_indices"][:, [a]], "prev_gates": None}) for a in (0, 1)
    ]
    share = (x["prev_gates"] / x["prev_gates"].sum(dim=1, keepdim=True)).double()
    mixed = share[:, :1] * parts[0].double() + share[:, 1:] * parts[1].double()
    assert_close(check(**x), mixed, 2e-5)


def test_experts_out_of_range_take_no_part():
    x = operands(9, 33, 8)
    x["prev_indices"][0], x["prev_indices"][1] = 8, 2**40
    z = moe_mlir.ac_logits(**x)
    plain = moe_mlir.router_logits(x["h"], x["emb"])
    assert torch.equal(z[:2], plain[:2])


def test_nan_stays_in_its_token():
    x = operands(4, 13, 7, 2)
    x["h"][1, 3], x["prev_gates"][2, 0] = torch.nan, torch.nan
    x["prev_indices"][2] = torch.tensor([1, 2])
    z = moe_mlir.ac_logits(**x)
    assert bool(z[1:3].isnan().all()) and not z[[0, 3]].isnan().any()


def test_an_infinite_weight_of_another_expert_does_not_leak():
    x = operands(4, 13, 7, 2)
    x["metric"][0] = torch.inf
    x["prev_indices"] = x["prev_indices"].clamp(min=1)
    x["prev_indices"][:, 1] = -1
    assert bool(check(**x).isfinite().all())
