"""model.compile(backend="moe", dynamic=True), then model.generate: as GettingStarted teaches it."""

import pytest
import torch
from support import Selections, tied_rows

from moe_mlir.frontends import dynamo
from moe_mlir_bench.models import FAMILIES

dynamo.register()
BATCH, PROMPT, NEW = 2, 7, 6


class Spy:
    """The backend; counts the moe ops, and torch's top-k and sort, of each graph that it made."""

    def __init__(self, rest):
        self.rest, self.seen = rest, []

    def __call__(self, module, inputs):
        raised = dynamo._raise_before_autograd(module) or module
        names = [str(node.target) for graph in raised.modules()
                 if isinstance(graph, torch.fx.GraphModule) for node in graph.graph.nodes]
        self.seen.append((names.count("moe.topk_renorm.default"),
                          names.count("moe.run_experts.default"),
                          sum(("topk" in name or "sort" in name or "grouped" in name)
                              and "moe." not in name for name in names)))
        return dynamo.moe(module, inputs, options={"rest": self.rest})


def generate(model, cache):
    ids = torch.randint(3, 64, (BATCH, PROMPT), generator=torch.Generator().manual_seed(0))
    options = {} if cache == "dynamic" else {"cache_implementation": cache}
    return model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, **options)


def tokens_before_ties(selections, layers):
    """For each sequence, the tokens that no tie between experts has come before."""
    steps = []
    for at in range(0, len(selections.found), layers):
        step = Selections()
        step.found = selections.found[at:at + layers]
        rows = step.found[0][0].numel() // step.found[0][0].shape[-1]
        steps.append(tied_rows(step, rows).reshape(BATCH, -1).any(-1))
    assert len(steps) == NEW
    return PROMPT + torch.stack(steps).int().cummax(0).values.logical_not().sum(0)


def check(name, cache, rest, layers):
    torch._dynamo.reset()
    attention = "eager" if name == "gpt-oss" else "sdpa"  # its sinks
    model = FAMILIES[name].build(layers=layers, attn_implementation=attention)
    with Selections() as selections:
        expected = generate(model, cache)
    spy = Spy(rest)
    model.compile(backend=spy, dynamic=True)
    found = generate(model, cache)
    assert set(spy.seen) == {(layers, layers, 0)}, spy.seen
    ends = tokens_before_ties(selections, layers)
    assert (ends > PROMPT).any()
    for ours, eager, end in zip(found, expected, ends):
        assert torch.equal(ours[:end], eager[:end])
    return spy.seen


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name, cache", [("Mixtral", "dynamic"), ("Granite-MoE", "static"),
                                         ("gpt-oss", "dynamic")])
def test_generation_has_the_tokens_of_eager(name, cache):
    seen = check(name, cache, "eager", layers=1)
    # The prompt, the first token after it, and all others; a sliding window makes one more.
    assert 2 <= len(seen) <= (4 if name == "gpt-oss" else 3)


@pytest.mark.long
@pytest.mark.parametrize("rest", ["eager", "inductor"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["Granite-MoE", "Mixtral", "OLMoE", "Qwen3-MoE", "gpt-oss"])
def test_generation_of_deeper_models(name, cache, rest):
    check(name, cache, rest, layers=2)
