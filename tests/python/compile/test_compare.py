"""moe_mlir.compare: equal, differently rounded, tied and wrong models told apart."""

import copy
import re

import pytest
import torch
import transformers

import moe_mlir
from moe_mlir_bench.models import FAMILIES


def ids(tokens, seed=0):
    return torch.randint(3, 64, (1, tokens), generator=torch.Generator().manual_seed(seed))


def build(dtype=torch.float32):
    return FAMILIES["OLMoE"].build(dtype, attn_implementation="sdpa")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_model_is_ok(dtype):
    """With a cache, whose tensors are outputs, and with packed weights, which stay packed."""
    model = build(dtype)
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    compiled = moe_mlir.compile(model, (ids(5),), kwargs=dict(cache=cache))
    packed = [type(p) for p in model.parameters()]
    found = moe_mlir.compare(model, compiled, (ids(9),), kwargs=dict(cache=cache))
    assert found.ok, str(found)
    names = [output.name for output in found.outputs]
    assert names[0] == "logits" and any(name.endswith("layers.0.keys") for name in names)
    assert found.tokens == 9
    assert str(found).endswith("\nok")
    assert [type(p) for p in model.parameters()] == packed
    assert cache.layers[0].cumulative_length == 0


class Other(torch.nn.Module):
    """A copy of a model of which one thing is another."""

    def __init__(self, model, change):
        super().__init__()
        self.model, self.change = copy.deepcopy(model), change

    def forward(self, *args, **kwargs):
        return self.change(self.model(*args, **kwargs))


def with_logits(change):
    def changed(outputs):
        outputs.logits = change(outputs.logits)
        return outputs
    return changed


def poke(logits, value):
    logits = logits.clone()
    logits[0, 2, 7] = value
    return logits


@pytest.mark.parametrize(("change", "message"), [
    (lambda x: poke(x, x[0, 2, 7] + 0.01), "1 of 6 rows are off by up to 0.01"),
    (lambda x: poke(x, float("nan")), "other places are infinite or no numbers"),
    (lambda x: x.half(), r"expected torch.float32 \[1, 6, 64\], found torch.float16 \[1, 6, 64\]"),
    (lambda x: x[:, 1:], r"found torch.float32 \[1, 5, 64\]"),
    (lambda x: x.bfloat16().float(), "6 of 6 rows are off"),
])
def test_a_fault_is_found(change, message):
    model = build()
    found = moe_mlir.compare(model, Other(model, with_logits(change)), (ids(6),),
                             kwargs=dict(use_cache=False))
    assert not found.ok
    assert str(found).endswith("the compiled model is wrong")
    (fault,) = (output.fault for output in found.outputs if output.fault)
    assert re.search(message, fault), fault


class Tied(torch.nn.Module):
    """Two experts, of which each row takes the one with the larger score; in one row they tie."""

    def __init__(self):
        super().__init__()
        self.score = torch.nn.Parameter(torch.tensor([[1.0, 0.5], [0.5, 1.0]]))
        self.experts = torch.nn.Parameter(torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(0)))
        self.swap = False

    def forward(self, x):
        scores = x @ self.score
        first = scores[:, 0] >= scores[:, 1]
        if self.swap:  # of equal scores the other
            first = scores[:, 0] > scores[:, 1]
        each = torch.einsum("nd,edf->enf", x, self.experts)
        return torch.where(first[:, None], each[0], each[1])


def test_another_expert_of_equal_scores_is_a_near_tie():
    model, other = Tied(), Tied()
    other.swap = True
    tied = torch.tensor([[3.0, 1.0], [2.0, 2.0], [1.0, 2.0], [0.5, 4.0]])
    found = moe_mlir.compare(model, other, (tied,))
    assert found.ok and found.outputs[0].near_ties == 1, str(found)
    assert found.outputs[0].difference > 0.1
    # The same difference where nothing ties is a fault.
    with torch.no_grad():
        other.experts[0, 0] += 0.5
    assert not moe_mlir.compare(model, other, (tied,)).ok


def test_weights_that_cannot_be_converted_are_an_error():
    with pytest.raises(TypeError, match="expected 'model' to be a torch.nn.Module, found function"):
        moe_mlir.compare(lambda x: x, lambda x: x, (torch.ones(1),))


def test_a_quantized_model_beside_the_model_that_was_quantized():
    model = build()
    exact = copy.deepcopy(model)
    moe_mlir.quantize(model, "int4", linears=False)
    inputs = dict(kwargs=dict(use_cache=False))
    compiled = moe_mlir.compile(model, (ids(6),), **inputs)
    with pytest.raises(TypeError, match="found a quantized one, 'model.layers.0.mlp.experts"):
        moe_mlir.compare(model, compiled, (ids(6),), **inputs)
    found = moe_mlir.compare(model, compiled, (ids(6),), reference=exact, **inputs)
    logits = found.outputs[0]
    assert found.ok, str(found)
    assert logits.difference < logits.eager_error / 100  # rounding to 4 bits
