"""Fifteen transformers models: routers found, compiled by torch, imported whole.

One layer with routers each, whose numbers are the model's own; `python -m
moe_mlir_bench.models` does the same with two and prints the table of docs/Models.md.
"""

import copy

import pytest
import torch
from seeds import some
from support import Selections

import moe_mlir
from moe_mlir.frontends import dynamo
from moe_mlir_bench.models import FAMILIES

dynamo.register()
SIZES = ("input_ids", "decoder_input_ids", "attention_mask")


every_family = pytest.mark.parametrize("family", FAMILIES, indirect=True)
# Which model it is matters to the import; to the rest, which form of router.
a_family_of_each_form = pytest.mark.parametrize(
    "family", some(FAMILIES, by=lambda name: FAMILIES[name].form), indirect=True)


@pytest.fixture
def family(request):
    torch._dynamo.reset()
    return FAMILIES[request.param]


def shape_of(family):
    """Of an example; code that is unrolled over the tokens gets few."""
    return (2, 12) if family.dynamic else (2, 5)


def capturable(family, model):
    """The model, without the loop over experts that no compiler captures."""
    if family.form == "F8":
        import moe_mlir.hf
        model = copy.deepcopy(model)
        assert moe_mlir.hf.patch(model) == family.routers()
    return model


def relative(found, expected):
    return (found - expected).abs().max() / expected.abs().max().clamp(min=1e-6)


@pytest.mark.drawn(3)
@a_family_of_each_form
def test_every_router_is_recognised(family):
    matches = moe_mlir.explain(family.build(), (), kwargs=family.example(*shape_of(family)))
    assert [m.form for m in matches] == [family.form] * family.routers()
    for match in matches:
        assert match.recognised and match.num_experts == 8, match
        # The line of the model's code that selects.
        path, line = match.location.rsplit(":", 1)
        with open(path) as file:
            code = file.readlines()[int(line) - 1]
        assert any(word in code for word in ("topk", "argmax", "max(", "sparsemixer")), code


@pytest.mark.drawn(4)
@every_family
def test_the_whole_model_is_imported(family):
    model = family.build()
    imported = capturable(family, model)
    example = shape_of(family)
    module = moe_mlir.export(imported, (), kwargs=family.example(*example))
    assert module.text.count("moe.topk_renorm ins") == family.routers() * (
        2 if family.form == "F9" else 1)
    # Llama4 runs every expert on every token.
    dispatches = 0 if family.form == "F7" else family.routers()
    assert module.text.count("moe.dispatch ins") == dispatches
    assert module.text.count("moe.combine ins") == dispatches
    assert "dense<" not in module.text  # parameters stay outside
    compiled = moe_mlir.compile(module)
    for shape in (example, (3, 20)) if family.dynamic else (example,):
        inputs = family.example(*shape, seed=1)
        with torch.no_grad():
            expected = model(**inputs).logits
        assert relative(compiled(**inputs).logits, expected) < 1e-5


@pytest.mark.drawn(3)
@a_family_of_each_form
def test_torch_compile_trains_in_one_graph(family):
    """Outputs and gradients of eager, whatever batch and tokens, without a second graph."""
    model = family.build()
    trained = capturable(family, model)
    compiled = torch.compile(trained, backend="moe", fullgraph=True, options={"rest": "eager"})
    shapes = (shape_of(family), (5, 7) if family.dynamic else shape_of(family))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for shape in shapes:
            inputs = family.example(*shape, seed=1)
            for name in SIZES:
                if name in inputs and family.dynamic:
                    torch._dynamo.mark_dynamic(inputs[name], (0, 1))
            cotangent = torch.randn(*shape, 64)
            results = []
            for run, owner in ((model, model), (compiled, trained)):
                owner.zero_grad()
                logits = run(**inputs).logits
                logits.backward(cotangent)
                gradients = {n: p.grad for n, p in owner.named_parameters()}
                results.append((logits.detach(), copy.deepcopy(gradients)))
            (expected, exact), (found, ours) = results
            assert relative(found, expected) < 1e-5
            for name, gradient in exact.items():
                if gradient is not None:
                    assert relative(ours[name], gradient) < 1e-4, name


@pytest.mark.drawn(3)
@a_family_of_each_form
def test_bfloat16_is_no_worse_than_eager(family):
    model = family.build(torch.bfloat16)
    exact = copy.deepcopy(model).double()
    if family.form not in ("F7", "F8"):
        exact.set_experts_implementation("batched_mm")  # torch's grouped product is f32 at most
    inputs = family.example(*shape_of(family))
    compiled = torch.compile(capturable(family, model), backend="moe", fullgraph=True,
                             options={"rest": "eager"})
    with torch.no_grad():
        reference = exact(**inputs).logits
        found = compiled(**inputs).logits
        with Selections(settle=True):
            eager = model(**inputs).logits
        errors = [(logits.double() - reference).abs().mean() for logits in (found, eager)]
    # Experts are rounded in other places than eager's: over seeds the ratio is 0.99 to 1.02.
    assert errors[0] <= errors[1] * 1.05


def test_routers_of_a_deeper_model_are_counted_by_layer():
    family = FAMILIES["DeepSeek-V3"]
    matches = moe_mlir.explain(family.build(layers=4), (), kwargs=family.example())
    assert [m.module for m in matches] == [f"model.layers.{i}.mlp.gate" for i in (1, 2, 3)]


def test_inductor_runs_the_rest():
    torch._dynamo.reset()
    family = FAMILIES["DeepSeek-V3"]
    router = family.build().model.layers[1].mlp.gate
    compiled = torch.compile(router, backend="moe", fullgraph=True)
    with torch.no_grad():
        for rows in (4, 9):
            x = torch.randn(rows, 32)
            torch._dynamo.mark_dynamic(x, 0)
            for ours, eager in zip(compiled(x), router(x)):
                ours, eager = ours.sort(-1)[0], eager.sort(-1)[0]
                torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)
