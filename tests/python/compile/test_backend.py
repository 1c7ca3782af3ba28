"""torch.compile(model, backend="moe")."""

import pytest
import torch

from moe_mlir import backend
from moe_mlir.demo.model import Config, LanguageModel

backend.register()


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
        raised = backend._raise_before_autograd(module)
        seen.extend(str(n.target) for n in raised.graph.nodes)
        return backend.moe(module, inputs)
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
