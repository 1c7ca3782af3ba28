"""moe_mlir.compile: the callable's contract."""

import pytest
import torch

import moe_mlir
from moe_mlir_bench.demo.model import Config, LanguageModel


class Gated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x, *, scale=1.0, gate=None):
        y = self.layer(x) * scale
        return {"y": y if gate is None else y * gate, "count": 3}


def test_the_callable_has_the_models_signature():
    model, x, gate = Gated(), torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    compiled = moe_mlir.compile(model, (x,), kwargs={"scale": 2.0, "gate": gate})
    found = compiled(x, scale=2.0, gate=gate)
    expected = model(x, scale=2.0, gate=gate)
    assert found.keys() == expected.keys() and found["count"] == 3
    torch.testing.assert_close(found["y"], expected["y"])


def test_later_updates_of_weights_are_seen():
    model, x = torch.nn.Linear(8, 4), torch.randn(3, 8)
    compiled = moe_mlir.compile(model, (x,))
    with torch.no_grad():
        model.weight.mul_(2)
    torch.testing.assert_close(compiled(x), model(x))


def test_strided_inputs_are_read_right():
    model, x = torch.nn.Linear(8, 4), torch.randn(8, 3)
    compiled = moe_mlir.compile(model, (torch.randn(5, 8),))
    torch.testing.assert_close(compiled(x.t()), model(x.t()))


@pytest.fixture(scope="module")
def projection():
    return moe_mlir.compile(torch.nn.Linear(8, 4), (torch.randn(3, 8),))


@pytest.mark.parametrize("call, error, message", [
    (lambda f: f(torch.randn(3, 7)), ValueError, r"input 'input': expected shape .*8.* found \[3, 7\]"),
    (lambda f: f(torch.randn(8)), ValueError, r"input 'input': expected 2 dims, found shape \(8,\)"),
    (lambda f: f(torch.randn(3, 8).double()), TypeError, "expected torch.float32, found torch.float64"),
    (lambda f: f(torch.randn(3, 8, device="meta")), TypeError, "expected a CPU tensor, found meta"),
    (lambda f: f(), TypeError, "expected the inputs that the model was exported with"),
    (lambda f: f([1.0] * 8), TypeError, "expected the inputs"),
])
def test_wrong_inputs_are_refused_by_name(projection, call, error, message):
    with pytest.raises(error, match=message):
        call(projection)


def test_a_number_other_than_at_export_is_refused():
    model, x = Gated(), torch.randn(2, 3, 8)
    compiled = moe_mlir.compile(model, (x,), kwargs={"scale": 2.0})
    with pytest.raises(ValueError, match="expected 2.0, the value at export, found 3.0"):
        compiled(x, scale=3.0)


def test_unknown_target():
    with pytest.raises(ValueError, match="expected 'target' to be one of cpu, sm_80.*found 'tpu'"):
        moe_mlir.compile(torch.nn.Linear(8, 4), (torch.randn(3, 8),), target="tpu")


@pytest.mark.drawn(2)
@pytest.mark.parametrize("method", ["smoe", "similarity"])
@pytest.mark.parametrize("dynamic", [True, False])
def test_the_demo_model_equals_eager(method, dynamic):
    torch.manual_seed(0)
    model = LanguageModel(Config(method=method, layers=2)).eval()
    example = torch.randint(0, 256, (2, 12))
    module = moe_mlir.export(model, (example,), dynamic_tokens=dynamic)
    compiled = moe_mlir.compile(module)
    shapes = [(2, 12), (1, 1), (3, 100)] if dynamic else [(2, 12)]
    for shape in shapes:
        tokens = torch.randint(0, 256, shape)
        with torch.no_grad():
            expected = model(tokens)
        torch.testing.assert_close(compiled(tokens), expected, rtol=1e-5, atol=1e-5)
    assert all(b.moe.router.impl == "torch" for b in model.blocks), "export leaves the model as it was"


def test_results_are_contiguous_tensors_of_their_own():
    """As docs/Limits.md says; eager returns its input, views of one tensor, and one tensor twice."""
    class Shared(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.ones(3))

        def forward(self, x):
            y = x + 1
            return x, y, y, y.t(), y[:, 1:], self.kept

    model, x = Shared(), torch.randn(2, 3)
    compiled = moe_mlir.compile(model, (x,))
    for _ in range(2):
        results = compiled(x)
        torch.testing.assert_close(results, model(x))
        memories = {t.untyped_storage().data_ptr() for t in (*results, x, model.kept)}
        assert len(memories) == 8 and all(t.is_contiguous() for t in results)
