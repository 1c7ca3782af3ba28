"""moe_mlir.hf: patched routers and the experts implementation "moe"."""

import copy

import pytest
import torch
from support import Selections

from moe_mlir import hf
from moe_mlir_bench.models import FAMILIES


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


def run(model, inputs, cotangent):
    model.zero_grad()
    with Selections(settle=True):  # torch's top-k alone; ours has this order
        logits = model(**inputs).logits
    logits.backward(cotangent)
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters()
                             if p.grad is not None}


def test_a_patched_model_computes_the_same_and_trains(family):
    model = family.build()
    patched = copy.deepcopy(model)
    assert hf.patch(patched) == family.routers()
    assert hf.patch(patched) == 0
    assert [n for n, _ in patched.named_parameters()] == [n for n, _ in model.named_parameters()]
    inputs, cotangent = family.example(), torch.randn(2, 12, 64)
    expected, exact = run(model, inputs, cotangent)
    found, ours = run(patched, inputs, cotangent)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in exact.items():
        scale = gradient.abs().max().clamp(min=1e-6)
        assert (ours[name] - gradient).abs().max() / scale < 1e-4, name


def test_patched_routers_keep_types(family):
    model = family.build(torch.bfloat16)
    patched = copy.deepcopy(model)
    hf.patch(patched)
    with torch.no_grad(), Selections(settle=True):
        expected, found = (m(**family.example()).logits for m in (model, patched))
    assert found.dtype == torch.bfloat16
    # Where a router's own numbers are rounded, ours are rounded at the same places.
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", ["Mixtral", "gpt-oss", "Qwen3-MoE"])
def test_experts_compute_the_same_and_train(name):
    family = FAMILIES[name]
    model = family.build()
    ours = copy.deepcopy(model)
    ours.set_experts_implementation("moe")
    inputs, cotangent = family.example(), torch.randn(2, 12, 64)
    expected, exact = run(model, inputs, cotangent)
    found, gradients = run(ours, inputs, cotangent)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for key, gradient in exact.items():
        scale = gradient.abs().max().clamp(min=1e-6)
        assert (gradients[key] - gradient).abs().max() / scale < 1e-4, key


def test_patch_wants_a_module():
    with pytest.raises(TypeError, match="expected 'model' to be a torch.nn.Module, found dict"):
        hf.patch({})


def test_unknown_models_stay_as_they_are():
    assert hf.patch(torch.nn.Linear(2, 2)) == 0


def test_switch_takes_the_first_of_probabilities_that_round_to_one():
    model = FAMILIES["Switch"].build(torch.bfloat16)
    router = next(m for m in model.modules() if type(m).__name__ == "SwitchTransformersTop1Router")
    with torch.no_grad():
        router.classifier.weight.mul_(0.05)
    patched = copy.deepcopy(router).eval()
    assert hf.patch(patched) == 1
    h = torch.randn(2, 12, router.classifier.in_features, dtype=torch.bfloat16)
    expected, gates, logits = router.eval()(h)
    probabilities = logits.softmax(dim=-1).bfloat16()
    best = probabilities.amax(dim=-1, keepdim=True)
    assert ((probabilities == best).sum(-1) > 1).any()  # there are ties to get wrong
    found, ours, _ = patched(h)
    assert torch.equal(found, expected) and torch.equal(ours, gates)
