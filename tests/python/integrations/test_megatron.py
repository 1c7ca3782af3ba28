"""Routers of Megatron-LM by moe ops: the gates, experts and gradients of Megatron's own function."""

import itertools
import warnings

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what it would have on a GPU
    moe_utils = pytest.importorskip(
        "megatron.core.transformer.moe.moe_utils", reason="megatron-core is not installed")
    router = pytest.importorskip("megatron.core.transformer.moe.router")

import moe_mlir.megatron  # noqa: E402
from moe_mlir.megatron import topk_routing_with_score_function as ours  # noqa: E402

# Of two modules' names for one function, the one that routers call.
theirs = router.topk_routing_with_score_function
SIZES = {"one token": (1, 8, 1), "odd": (33, 64, 8), "k = e": (5, 8, 8), "96 experts": (17, 96, 6)}


def calls(k):
    for score, pre, groups, has_bias, scale in itertools.product(
            ("softmax", "sigmoid"), (False, True), (None, (8, 4), (8, 6)), (False, True), (None, 2.5)):
        if groups is None or k // groups[1] in (1, 2):
            grouped = {} if groups is None else dict(num_groups=groups[0], group_topk=groups[1])
            yield has_bias, dict(score_function=score, use_pre_softmax=pre, scaling_factor=scale, **grouped)


@pytest.mark.parametrize("size", SIZES)
def test_routing_is_megatrons(size):
    n, e, k = SIZES[size]
    generator = torch.Generator().manual_seed(0)
    for has_bias, options in calls(k):
        if k == e and options.get("num_groups"):
            continue  # more than the experts of some groups
        logits, weight = (torch.randn(n, e, generator=generator) for _ in range(2))
        bias = torch.randn(e, generator=generator) / 10 if has_bias else None
        found = []
        for function in (ours, theirs):
            z = logits.clone().requires_grad_()
            gates, chosen = function(z, k, expert_bias=bias, **options)
            (gates * weight).sum().backward()
            found.append((gates, chosen, z.grad))
        for mine, expected, tolerance in zip(*found, (1e-6, 0, 1e-5)):
            torch.testing.assert_close(mine, expected, rtol=10 * tolerance, atol=tolerance)


def test_no_tokens():
    gates, chosen = ours(torch.zeros(0, 8), 2, score_function="sigmoid")
    assert gates.shape == chosen.shape == (0, 8) and chosen.dtype == torch.bool


@pytest.mark.parametrize("change, message", [
    (dict(logits=torch.zeros(3, 8, dtype=torch.bfloat16)), 'moe_router_dtype="fp32"'),
    (dict(logits=torch.zeros(8)), r"expected logits \[tokens, experts\], found \[8\]"),
    (dict(score_function="tanh"), "'softmax' or 'sigmoid', found 'tanh'"),
    (dict(topk=6, num_groups=4, group_topk=2), "best one or two experts, found 3"),
    (dict(topk=4, num_groups=8, group_topk=2), "at most the experts of 2 of 8 groups, found 4"),
    (dict(router_replay=object()), "found a RouterReplay"),
])
def test_other_calls_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ours(**dict(logits=torch.zeros(3, 8), topk=2) | change)


@pytest.fixture
def patched():
    assert moe_mlir.megatron.patch() == 2 and moe_mlir.megatron.patch() == 0
    moe_mlir.megatron._said.clear()
    yield router.topk_routing_with_score_function
    assert moe_mlir.megatron.unpatch() == 2 and moe_mlir.megatron.unpatch() == 0
    assert router.topk_routing_with_score_function is theirs
    assert moe_utils.topk_routing_with_score_function is theirs


def test_a_call_that_is_not_taken_is_megatrons(patched):
    logits = torch.randn(4, 8).bfloat16()
    with pytest.warns(UserWarning, match="a router of Megatron runs its own selection: expected logits "
                                         "of float32, found torch.bfloat16"):
        found = patched(logits, 2)
    assert all(map(torch.equal, found, theirs(logits, 2)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # says it once
        patched(logits, topk=2)


@pytest.fixture
def process_groups():
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield ProcessGroupCollection.use_mpu_process_groups()
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::UserWarning:megatron")
def test_a_router_with_its_loss(patched, process_groups, monkeypatch):
    """`TopKRouter.routing`, with the balance loss and its gradient; the gating layer needs a GPU."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, num_moe_experts=8, moe_router_topk=4,
        moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.01, moe_router_dtype="fp32",
        moe_router_score_function="sigmoid", moe_router_num_groups=4, moe_router_group_topk=2,
        moe_router_topk_scaling_factor=2.5, use_cpu_initialization=True)
    layer = router.TopKRouter(config, pg_collection=process_groups)
    logits = torch.randn(6, 2, 8, generator=torch.Generator().manual_seed(0))

    def run():
        z = logits.clone().requires_grad_()
        gates, chosen = layer.routing(z)
        gates.square().sum().backward()
        return gates.detach(), chosen, z.grad
    calls = []
    monkeypatch.setattr(router, "topk_routing_with_score_function",
                        lambda *args, **kwargs: calls.append(1) or patched(*args, **kwargs))
    found = run()
    assert calls
    monkeypatch.setattr(router, "topk_routing_with_score_function", theirs)
    torch.testing.assert_close(found, run(), rtol=1e-5, atol=1e-6)
