"""Modules under .bfloat16(), .half(), .double(), .to(): right, or refused by name."""

import copy

import pytest
import torch
from methods import METHODS, D, E, K, make, normal
from op_judge import assert_close

import moe_mlir
from moe_mlir import nn, reference

H = normal(2, 9, D)
# State of a layer before, as routers give it: f32 whatever the tokens are.
STATE = ("prev_gates", "noise", "random")


def cast(inputs, dtype):
    floating = {n: v for n, v in inputs.items() if v.is_floating_point() and n not in STATE}
    return {**inputs, **{n: v.to(dtype) for n, v in floating.items()}}


def exact_copy(router, name):
    """The float64 meaning of a router at the values that it has now."""
    exact, _ = make(name)
    exact.double().load_state_dict(copy.deepcopy(router.state_dict()))
    return exact


def dense(routing):
    return reference.densify(routing.gates.double(), routing.indices, E)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", METHODS)
def test_a_narrow_router_is_its_float64_meaning(name, dtype):
    router, inputs = make(name, "moe")
    router.to(dtype)
    inputs = cast(inputs, dtype)
    exact = exact_copy(router, name)
    h = H.to(dtype)
    for mode in (True, False):
        routing = router.train(mode)(h, **inputs)
        wide = {n: v.double() if v.is_floating_point() else v for n, v in inputs.items()}
        expected = exact.train(mode)(h.double(), **wide)
        assert routing.gates.dtype == torch.float32
        # Products in the narrow type round their operands: 2^-8 of a probability.
        assert_close(dense(routing), dense(expected), 2e-2, "gates")
        if expected.combine is not None:
            assert_close(routing.combine, expected.combine, 2e-2)
    moe_mlir.update_routers(router)
    layer = nn.MoELayer(router.train(), 6, shared=1).to(dtype)
    y, _ = layer(h, **inputs)
    y.float().square().sum().backward()
    assert y.dtype == dtype and bool(y.isfinite().all()) and bool(layer.w_in.grad.any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make_router,buffer", [
    (lambda: nn.SymphonySMoE(D, E, K), "adjacency"),
    (lambda: nn.SymphonySoftMoE(D, E), "adjacency"),
    (lambda: nn.DeepSeekV3Router(D, E, K), "bias"),
    (lambda: nn.DeepSeekV3Router(D, E, K, symphony=True), "adjacency"),
])  # fmt: skip
def test_averages_keep_moving_by_their_small_steps(make_router, buffer, dtype):
    """In bfloat16 a bias of 0.5 would not move by 0.001, a graph not by 0.1 of its counts."""
    torch.manual_seed(0)
    narrow = make_router()
    for b in narrow.buffers():
        if b.is_floating_point():
            b.fill_(0.5)
    wide = copy.deepcopy(narrow)
    before = getattr(narrow, buffer).clone()
    narrow.to(dtype)
    assert getattr(narrow, buffer).dtype == torch.float32
    assert torch.equal(getattr(narrow, buffer), before)
    for counter in narrow.counters:
        if hasattr(narrow, counter):
            counts = torch.randint(0, 9, getattr(narrow, counter).shape)
            getattr(narrow, counter).copy_(counts)
            getattr(wide, counter).copy_(counts)
    for router in (narrow, wide):
        moe_mlir.update_routers(router)
    assert torch.equal(getattr(narrow, buffer), getattr(wide, buffer))
    assert not torch.equal(getattr(narrow, buffer), before)
    # A file in bfloat16 does not make it narrow, either.
    state = {n: t.to(dtype) if t.is_floating_point() else t for n, t in wide.state_dict().items()}
    narrow.load_state_dict(state, assign=True)
    assert getattr(narrow, buffer).dtype == torch.float32


def test_a_graph_made_under_a_narrow_default_dtype_is_wide():
    try:
        torch.set_default_dtype(torch.bfloat16)
        routers = nn.SymphonySMoE(D, E, K), nn.DeepSeekV3Router(D, E, K), nn.HyperRouter(D, E, K)
    finally:
        torch.set_default_dtype(torch.float32)
    assert routers[0].adjacency.dtype == routers[1].bias.dtype == torch.float32
    assert routers[2].weight.dtype == torch.float32
    for router in routers:
        assert bool(router(H.bfloat16()).gates.isfinite().all())


def test_a_folded_hyper_router_follows_a_cast():
    router = nn.HyperRouter(D, E, K).eval()
    before = router.weight.clone()
    router.bfloat16()
    folded = router.weight.clone()
    assert not torch.equal(folded, before)
    h = H.bfloat16()
    logits = router(h).logits
    router.train()
    assert_close(router(h).logits, logits.double(), 1e-5)
    assert torch.equal(router.eval().weight, folded)


def test_compiled_kernels_refuse_float64_by_name_and_plain_torch_takes_it():
    router = nn.SMoE(D, E, K).double()
    with pytest.raises(TypeError, match="expected 'h' to have dtype float32 .* found float64"):
        router(H.double())
    plain = nn.SymphonySMoE(D, E, K, init="uniform", impl="torch").double()
    assert plain.adjacency.dtype == torch.float64
    assert plain(H.double()).gates.dtype == torch.float64
