"""torch.compile(model, backend="moe")."""

import functools

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from moe_mlir.frontends import dynamo
from moe_mlir_bench.demo.model import Config, LanguageModel

dynamo.register()


@pytest.fixture
def model():
    torch._dynamo.reset()
    torch.manual_seed(0)
    return LanguageModel(Config(layers=1, context=1000))


def test_one_graph_for_all_token_counts(model):
    model.eval()
    compiled = torch.compile(model, backend="moe", fullgraph=True)
    counters = torch._dynamo.utils.counters["stats"]
    before, graphs = counters["unique_graphs"], []
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for count in (1, 2, 3, 7, 64, 1000):
            tokens = torch.randint(0, 256, (1, count))
            # The count is open from the start, 1 included.
            torch._dynamo.decorators.mark_unbacked(tokens, 1)
            torch.testing.assert_close(compiled(tokens), model(tokens), rtol=1e-5, atol=1e-5)
            graphs.append(counters["unique_graphs"] - before)
    assert set(graphs) == {1}


def test_routers_run_as_moe_ops_and_train(model):
    seen = []

    def spy(module, inputs):
        raised = dynamo._raise_before_autograd(module)
        seen.extend(str(n.target) for n in raised.graph.nodes)
        return dynamo.moe(module, inputs)
    tokens = torch.randint(0, 256, (2, 24))
    loss = torch.compile(model, backend=spy, fullgraph=True)(tokens).square().mean()
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    model(tokens).square().mean().backward()
    assert seen.count("moe.topk_renorm.default") == 1 and "aten.topk.default" not in seen
    for name, parameter in model.named_parameters():
        scale = parameter.grad.abs().max().clamp(min=1e-6)
        assert (found[name] - parameter.grad).abs().max() / scale < 1e-4, name


def test_a_model_without_routers_goes_to_inductor_as_it_is():
    torch._dynamo.reset()
    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    torch.testing.assert_close(torch.compile(layer, backend="moe")(x), layer(x))


# -------------------------------------------------------- weights that change later


def replace_gate(model):
    model.gate = torch.nn.Linear(8, 6, bias=False, dtype=model.gate.weight.dtype)


CHANGES = {
    "half": lambda m: m.half(), "bfloat16": lambda m: m.to(torch.bfloat16),
    "double": lambda m: m.double(),
    "in place": lambda m: m.gate.weight.data.mul_(-1),
    "a file": lambda m: m.load_state_dict(Routed().state_dict()),
    "a file, assigned": lambda m: m.load_state_dict(Routed().state_dict(), assign=True),
    "a layer": replace_gate,
}


def test_weights_that_change_after_the_compilation_are_used():
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, h = Routed(), torch.randn(5, 8)
    spy = Spy()
    compiled = torch.compile(model, backend=spy)
    for name, change in CHANGES.items():
        before = compiled(h.to(model.gate.weight.dtype)).double()
        change(model)
        x = h.to(model.gate.weight.dtype)
        tolerance = {torch.float16: 2e-3, torch.bfloat16: 0.02}.get(x.dtype, 1e-6)
        torch.testing.assert_close(compiled(x), model(x), rtol=tolerance, atol=tolerance, msg=name)
        assert name in ("half", "bfloat16", "double") or not torch.allclose(compiled(x).double(), before)
    assert spy.seen.count("moe.topk_renorm.default") >= 1
    model.to(device="meta")
    with pytest.raises(RuntimeError, match="device"):
        compiled(h)


# ------------------------------------------------- what training puts around routers


class Routed(torch.nn.Module):
    """Experts' biases weighed by a router that casts nothing."""

    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(8, 6, bias=False)
        self.experts = torch.nn.Linear(6, 8)

    def forward(self, h):
        gates, indices = self.gate(h).softmax(-1).topk(2, dim=-1)
        gates = gates / gates.sum(-1, keepdim=True)
        dense = torch.zeros(*h.shape[:-1], 6, dtype=gates.dtype).scatter(-1, indices, gates)
        return self.experts(dense)


class Spy:
    """The backend without Inductor; notes the ops of the graphs that it made."""

    def __init__(self):
        self.seen = []

    def __call__(self, module, inputs):
        raised = dynamo._raise_before_autograd(module) or module
        for graph in (m for m in raised.modules() if isinstance(m, torch.fx.GraphModule)):
            self.seen += [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
        return dynamo.moe(module, inputs, options={"rest": "eager"})


def trained(function, parameters, h):
    """(output, gradients) of one step."""
    y = function(h)
    return y, torch.autograd.grad(y.float().square().mean(), parameters)


def assert_trains_as_eager(function, model, h, routers, tolerance=1e-5):
    torch._dynamo.reset()
    spy, parameters = Spy(), list(model.parameters())
    y, found = trained(torch.compile(function, backend=spy, fullgraph=True), parameters, h)
    wanted, expected = trained(function, parameters, h)
    assert spy.seen.count("moe.topk_renorm.default") == routers
    assert y.dtype == wanted.dtype
    for a, b in zip((y, *found), (wanted, *expected), strict=True):
        largest = float(b.detach().abs().max())
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * largest)


@pytest.fixture
def two_layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(Routed(), Routed()), torch.randn(5, 8)


def checkpointed(model, h):
    for layer in model:
        h = h + checkpoint(layer, h, use_reentrant=False)
    return h


def test_checkpoints_keep_their_routers(two_layers):
    model, h = two_layers
    assert_trains_as_eager(lambda h: checkpointed(model, h), model, h, routers=2)
    layer = torch.nn.Linear(8, 8)
    assert_trains_as_eager(lambda h: checkpoint(layer, h, use_reentrant=False), layer, h, routers=0)


ASKED = []


def recompute(context, op, *args, **kwargs):
    ASKED.append(str(op))
    return CheckpointPolicy.PREFER_RECOMPUTE


policy = functools.partial(create_selective_checkpoint_contexts, recompute)


def test_a_checkpoint_decides_what_it_saves(two_layers):
    model, h = two_layers

    def function(h):
        return checkpoint(model[0], h, use_reentrant=False, context_fn=policy)

    assert_trains_as_eager(function, model[0], h, routers=1)
    assert "moe.topk_renorm.default" in ASKED


def test_a_checkpoint_inside_of_autocast_is_left_as_it_is(two_layers):
    model, h = two_layers

    def function(h):
        with torch.autocast("cpu", torch.bfloat16):
            return checkpointed(model, h)

    assert_trains_as_eager(function, model, h, routers=0, tolerance=0.02)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("inside", [True, False])
def test_routers_train_under_autocast(two_layers, inside):
    model, h = two_layers

    def function(h):
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            return model(h)

    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        assert_trains_as_eager(function if inside else model, model, h, 2, tolerance=0.02)


def test_routers_train_in_16_bits(two_layers):
    model, h = two_layers
    assert_trains_as_eager(model.bfloat16(), model, h.bfloat16(), routers=2, tolerance=0.02)


def test_checkpoints_of_transformers_keep_their_routers():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, head_dim=8,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, num_experts=4,
        num_experts_per_tok=2, use_cache=False)).train()
    model.gradient_checkpointing_enable()
    ids = torch.randint(32, (1, 6))
    expected = model(ids, labels=ids).loss
    expected.backward()
    wanted = [p.grad for p in model.parameters()]
    model.zero_grad()
    spy = Spy()
    loss = torch.compile(model, backend=spy)(ids, labels=ids).loss
    loss.backward()
    assert spy.seen.count("moe.topk_renorm.default") == 2
    torch.testing.assert_close(loss, expected)
    for parameter, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-6)
