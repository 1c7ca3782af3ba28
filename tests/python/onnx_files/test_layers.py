"""Layers of experts as files: activations, gates, choices, routers of moe_mlir.nn."""

import itertools

import pytest
import torch
from sessions import File, error

import moe_mlir
from moe_mlir import nn
from moe_mlir.experts import run_experts
from moe_mlir.onnx.nodes import attributes_of
from moe_mlir.ops._expert_activation import ExpertActivation

TOLERANCE = 1e-5
D, HIDDEN, EXPERTS, K = 32, 24, 6, 2
# All that the nodes know.
ACTIVATIONS = [
    ExpertActivation("relu"), ExpertActivation("silu"), ExpertActivation("gelu_tanh"),
    ExpertActivation("none"), ExpertActivation("silu", gate="concatenated"),
    ExpertActivation("silu", gate="interleaved"),
    ExpertActivation("silu", 1.702, "interleaved", limit=0.7, up_offset=1.0),
    ExpertActivation("silu", 1.5, "concatenated", limit=0.5, up_limit=0.5, up_offset=0.25),
]


class Layer(torch.nn.Module):
    """Experts of any activation, behind gates that are given."""

    def __init__(self, activation, *, biases=True, transposed=False):
        super().__init__()
        self.activation, self.transposed = activation, transposed
        features = HIDDEN if activation.gate == "none" else 2 * HIDDEN

        def weight(*shape):
            return torch.nn.Parameter(torch.randn(shape) * shape[-1] ** -0.5)

        self.w_in, self.w_out = weight(EXPERTS, features, D), weight(EXPERTS, D, HIDDEN)
        if transposed:
            self.w_in, self.w_out = (torch.nn.Parameter(w.detach().mT.contiguous())
                                     for w in (self.w_in, self.w_out))
        self.b_in = weight(EXPERTS, features) if biases else None
        self.b_out = weight(EXPERTS, D) if biases else None

    def forward(self, x, scores, indices):
        return run_experts(x, self.gates(scores), indices, self.w_in, self.w_out, b_in=self.b_in,
                           b_out=self.b_out, activation=self.activation, transposed=self.transposed)

    def gates(self, scores):
        return torch.sigmoid(scores) * 2.5

    def exact(self, x, scores, indices):
        """In float64, expert by expert; an index of none adds nothing."""
        x, gates = x.double(), self.gates(scores).double()
        w_in, w_out = (w.double().mT if self.transposed else w.double()
                       for w in (self.w_in, self.w_out))
        y = torch.zeros_like(x)
        for t, j in itertools.product(range(len(x)), range(indices.shape[1])):
            e = indices[t, j]
            if 0 <= e < EXPERTS:
                b_in, b_out = (0 if b is None else b[e].double() for b in (self.b_in, self.b_out))
                y[t] += gates[t, j] * (w_out[e] @ self.activation(w_in[e] @ x[t] + b_in) + b_out)
        return y


def example(tokens=7):
    indices = torch.stack([torch.randperm(EXPERTS)[:K] for _ in range(tokens)])
    return torch.randn(tokens, D), torch.randn(tokens, K), indices


def export(layer, inputs, tmp_path, **options):
    assert moe_mlir.onnx.export(layer, inputs, tmp_path / "layer.onnx", **options) == 1
    return File(tmp_path / "layer.onnx")


@pytest.mark.drawn(4)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@torch.no_grad()
def test_a_layer(activation, biases, transposed, tmp_path):
    torch.manual_seed(0)
    layer, inputs = Layer(activation, biases=biases, transposed=transposed), example()
    file = export(layer, inputs, tmp_path)
    for given in (inputs, example(1), example(40)):
        assert error(file(*given)["output"], layer.exact(*given)) < TOLERANCE


def test_activations_beyond_those_are_refused():
    others = [ExpertActivation("relu2"), ExpertActivation("gelu"), ExpertActivation("silu", 1.702),
              ExpertActivation("gelu", gate="concatenated"),
              ExpertActivation("silu", gate="concatenated", limit=1.0, up_limit=2.0),
              ExpertActivation("silu", gate="concatenated", bound="clamp_activated", limit=1.0),
              ExpertActivation("silu", gate="concatenated", up_limit=1.0)]
    assert all(attributes_of(activation) is None for activation in others)
    assert None not in map(attributes_of, ACTIVATIONS)


@torch.no_grad()
def test_choices_of_no_expert_repeated_experts_and_gates_of_zero(tmp_path):
    layer = Layer(ExpertActivation("silu", gate="concatenated"))
    x, scores, indices = example(6)
    indices[0, 0], indices[1], indices[2] = -1, torch.tensor([EXPERTS, -1]), 4
    scores[3, 0], scores[4] = -200.0, -200.0  # whose sigmoid is 0
    file = export(layer, (x, scores, indices), tmp_path)
    found = file(x, scores, indices)["output"]
    assert error(found, layer.exact(x, scores, indices)) < TOLERANCE
    assert not found[1].any() and not found[4].any()


class OfExponentials(Layer):
    def gates(self, scores):
        # onnxruntime's sigmoid is 0 below 1e-8.
        return torch.exp(scores)


@torch.no_grad()
def test_gates_of_very_different_sizes(tmp_path):
    layer = OfExponentials(ExpertActivation("silu"))
    x, scores, indices = example(30)
    scores = scores * 20
    found = export(layer, (x, scores, indices), tmp_path)(x, scores, indices)["output"]
    expected = layer.exact(x, scores, indices)
    # Row by row: the smallest row has as many digits as the largest.
    for row, exact in zip(found, expected):
        assert error(row, exact) < 2e-5


@torch.no_grad()
def test_nan_shows(tmp_path):
    layer = Layer(ExpertActivation("silu"))
    x, scores, indices = example(4)
    file = export(layer, (x, scores, indices), tmp_path)
    scores[1, 0] = float("nan")
    x[2, 5] = float("nan")
    assert file(x, scores, indices)["output"].isnan().all(1).tolist() == [False, True, True, False]


class OfOurs(torch.nn.Module):
    def __init__(self, router):
        super().__init__()
        self.experts = nn.MoELayer(router, d_hidden=HIDDEN)

    def forward(self, x):
        y, routing = self.experts(x)
        return {"y": y, "gates": routing.gates, "indices": routing.indices}


ROUTERS = {
    "smoe": lambda: nn.SMoE(D, EXPERTS, K),
    "switch": lambda: nn.Switch(D, EXPERTS, 1),
    "cosine": lambda: nn.XMoE(D, EXPERTS, K),
    "similarity": lambda: nn.SimilaritySMoE(D, EXPERTS, K, causal=True),
    "threshold": lambda: nn.DynamicTopP(D, EXPERTS, K),
    "deepseek": lambda: nn.DeepSeekV3Router(D, EXPERTS, K),
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", ROUTERS)
@torch.no_grad()
def test_routers_of_ours(name, tmp_path):
    """Experts and gates are the kernels'; nodes have the gelu of tanh, not that of erf."""
    torch.manual_seed(0)
    model = OfOurs(ROUTERS[name]()).eval()
    file = export(model, (torch.randn(2, 5, D),), tmp_path, tanh_gelu=True)
    for x in (torch.randn(2, 5, D), torch.randn(1, 9, D)):
        found, expected = file(x), model(x)
        assert torch.equal(found["indices"], expected["indices"])
        torch.testing.assert_close(found["gates"], expected["gates"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found["y"], expected["y"], rtol=0, atol=1e-3)


class CallsOps(torch.nn.Module):
    """Selection by ops, of scores of which many are equal."""

    def __init__(self, select):
        super().__init__()
        self.select = select
        self.experts = Layer(ExpertActivation("relu"))

    def forward(self, x, scores):
        gates, indices = self.select(scores)
        experts = self.experts
        y = run_experts(x, gates, indices, experts.w_in, experts.w_out, activation=torch.relu)
        return y, gates, indices


SELECTIONS = {
    "softmax": lambda scores: moe_mlir.topk_renorm(scores, K),
    "as they are": lambda scores: moe_mlir.topk_renorm(scores.softmax(-1), K, kind="probs",
                                                       renorm=False, route_scale=2.0),
    "sigmoid": lambda scores: moe_mlir.grouped_topk(scores, K, eps=1e-6, route_scale=1.5),
    "best groups": lambda scores: moe_mlir.grouped_topk(
        scores, K, score="softmax", n_group=2, topk_group=1, group_score="max", renorm=False),
    "masked": lambda scores: moe_mlir.topk_renorm(scores, K, mask=scores[:, 0] > 0),
    "groups": lambda scores: moe_mlir.grouped_topk(scores, K, n_group=3, topk_group=2,
                                                   bias=torch.arange(EXPERTS) * 0.5),
}


@pytest.mark.parametrize("name", SELECTIONS)
@torch.no_grad()
def test_ties_of_ops(name, tmp_path):
    torch.manual_seed(0)
    model = CallsOps(SELECTIONS[name])
    x, scores = torch.randn(50, D), torch.randint(0, 3, (50, EXPERTS)).float()
    found, expected = export(model, (x, scores), tmp_path)(x, scores), model(x, scores)
    y, gates, indices = found.values()
    assert torch.equal(indices, expected[2])
    torch.testing.assert_close(gates, expected[1])
    assert error(y, expected[0]) < TOLERANCE
