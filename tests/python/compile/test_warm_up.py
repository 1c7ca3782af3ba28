"""moe_mlir.warm_up compiles what later calls run, runs nothing, and leaves all as it was."""

import doctest

import pytest
import torch

import moe_mlir
from moe_mlir import nn


def layers():
    """Each of sizes of its own: a kernel that another layer had is not compiled again."""
    yield nn.MoELayer(nn.SMoE(24, 5, 2), 40, activation="swiglu", bias=True)
    yield nn.MoELayer(nn.DeepSeekV3Router(25, 9, 3, n_group=3, topk_group=2), 41, shared=1)
    yield nn.MoELayer(nn.SymphonySMoE(26, 11, 2, cold_start="base"), 42)
    yield nn.MoELayer(nn.SimilaritySMoE(27, 12, 2, causal=True, learn_tau=True), 43)
    yield nn.MoELayer(nn.SoftMoE(28, 13, slots=2), 44)
    yield nn.MoELayer(nn.VMoE(29, 14), 45, capacity_factor=1.0, priority="gate")


@pytest.mark.parametrize("layer", list(layers()), ids=lambda layer: type(layer.router).__name__)
def test_a_layer_compiles_nothing_after_it(layer, compiled_texts):
    state = {name: x.clone() for name, x in layer.state_dict().items()}
    torch.manual_seed(4)
    d = layer.router.d_model
    count = moe_mlir.warm_up(layer, (torch.empty(1, 1, d),))
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(4)))
    # Ops that depend on few sizes, such as token_rows, other tests may have compiled.
    assert count - 3 <= len(compiled_texts) <= count and compiled_texts
    assert all(torch.equal(x, state[name]) for name, x in layer.state_dict().items())
    assert all(p.grad is None for p in layer.parameters())
    # Other numbers of tokens are the same kernels.
    before = len(compiled_texts)
    y, _ = layer(torch.randn(2, 7, d))
    y.square().sum().backward()
    assert len(compiled_texts) == before
    with torch.no_grad():
        assert moe_mlir.warm_up(layer, (torch.empty(1, 1, d),)) >= 1
        before = len(compiled_texts)
        layer(torch.randn(2, 7, d))
        assert len(compiled_texts) == before


def test_calls_of_an_op(compiled_texts):
    x = torch.empty(1, 72)
    assert moe_mlir.warm_up(moe_mlir.topk_renorm, (x, 3), (x, 5), (x.bfloat16(), 3), (x, 3)) == 3
    assert len(compiled_texts) == 3
    for given in ((torch.randn(9, 72), 3), (torch.randn(2, 4, 72), 5)):
        moe_mlir.topk_renorm(*given)
    assert len(compiled_texts) == 3
    assert moe_mlir.warm_up(moe_mlir.topk_renorm, (x, 3), kwargs=dict(renorm=False)) == 1
    wide = x.clone().requires_grad_()
    assert moe_mlir.warm_up(moe_mlir.topk_renorm, (wide, 3), kwargs=dict(renorm=False)) == 2
    assert moe_mlir.warm_up(moe_mlir.topk_renorm, (wide, 3), backward=False) == 1


def test_nothing_runs():
    x = torch.full((1, 8), float("nan"))
    found = []
    moe_mlir.warm_up(lambda x: found.append(moe_mlir.topk_renorm(x, 2)), (x,))
    (gates, indices), = found
    assert not gates.any() and not indices.any()


def test_a_quantized_layer():
    layer = nn.MoELayer(nn.SMoE(64, 8, 2), 64).eval()
    moe_mlir.quantize(layer)
    with torch.no_grad():
        assert moe_mlir.warm_up(layer, (torch.empty(1, 64),)) >= 2
        assert bool(layer(torch.randn(3, 64))[0].isfinite().all())


def test_the_examples_run():
    names = dict(moe_mlir=moe_mlir, torch=torch)
    (test,) = doctest.DocTestFinder().find(moe_mlir.warm_up, "warm_up", globs=names)
    result = doctest.DocTestRunner().run(test)
    assert result.attempted >= 3 and result.failed == 0


@pytest.mark.parametrize(("arguments", "message"), [
    ((3, (torch.empty(1),)), "expected 'function' to be a function or a module, found int"),
    ((moe_mlir.z_loss, torch.empty(1, 3)), r"expected each call as a tuple.*found Tensor; write \(x,"),
])
def test_what_is_no_call_is_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        moe_mlir.warm_up(*arguments)
