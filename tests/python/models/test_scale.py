"""Large models: equal layers are imported and compiled once."""

import pytest
import torch

import moe_mlir
from moe_mlir.graph.repeats import find_repeats
from moe_mlir_bench.models import FAMILIES
from moe_mlir_bench.models.scale import import_without_weights


def test_ir_grows_by_a_call_for_each_further_layer():
    lines = {n: import_without_weights(n, 16).text for n in (3, 5)}
    calls = {n: text.count("func.call @layer0") for n, text in lines.items()}
    assert calls == {3: 3, 5: 5}
    assert all(text.count("moe.topk_renorm ins") == 1 for text in lines.values())
    # A layer more is its parameters in the signature, its call, and where the call is.
    parameters = sum(1 for line in lines[5].splitlines() if "layers.4." in line and "%arg" in line)
    grown = lines[5].count("\n") - lines[3].count("\n")
    assert parameters > 0 and grown == 2 * (parameters + 2)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ["Mixtral", "gpt-oss"])
def test_a_model_of_calls_equals_eager(name):
    """gpt-oss alternates two masks, which are an argument of its one function."""
    family, layers = FAMILIES[name], 4
    model = family.build(layers=layers)
    module = moe_mlir.export(model, (), kwargs=family.example())
    assert module.text.count("func.func private") == 1
    assert module.text.count("func.call") == layers
    compiled = moe_mlir.compile(module)
    for shape in ((2, 12), (3, 20)):
        inputs = family.example(*shape, seed=1)
        with torch.no_grad():
            expected = model(**inputs).logits
        torch.testing.assert_close(compiled(**inputs).logits, expected, rtol=1e-5, atol=1e-5)


class Stack(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Scaled(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.weight, self.factor = torch.nn.Parameter(torch.rand(4)), factor

    def forward(self, x):
        return torch.tanh(x * self.weight) * self.factor


@pytest.mark.parametrize("factors, functions", [((2, 2, 2), 1), ((2, 3, 2), 0), ((2, 2), 0),
                                                ((2, 3, 2, 3, 2, 3), 2)])
def test_layers_that_differ_in_a_number_are_not_equal(factors, functions):
    model, x = Stack(Scaled(f) for f in factors), torch.randn(5, 4)
    program = torch.export.export(model, (x,))
    assert len({id(group) for group in find_repeats(program.graph).values()}) == functions
    compiled = moe_mlir.compile(model, (x,))
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-6, atol=1e-6)


class Unsupported(torch.nn.Module):
    def forward(self, x):
        return torch.linalg.eigvalsh(x @ x.t()).sum() + x


def test_unsupported_operations_count_in_every_layer():
    with pytest.raises(ValueError, match="linalg.*: 3 uses, first at .*test_scale.py"):
        moe_mlir.export(Stack(Unsupported() for _ in range(3)), (torch.randn(4, 4),),
                        dynamic_tokens=False)
