"""A compiled Symphony step counts its co-selections in the loop that selects."""

import pytest
import torch

import moe_mlir
from moe_mlir import nn, reference
from moe_mlir._native import native

D, E, K = 24, 16, 2
# Less than a tile, whole tiles, a tile more, and several tiles a part.
SIZES = [0, 1, 63, 64, 65, 500, 4096, 4097, 9000]


class Step(torch.nn.Module):
    """Algorithm 1 to the letter: the graph comes in and goes out."""

    def __init__(self):
        super().__init__()
        self.router = nn.SymphonySMoE(D, E, K)

    def forward(self, h, adjacency):
        routing = self.router(h, adjacency=adjacency)
        return routing.gates, routing.indices, routing.state["adjacency"]


@pytest.fixture(scope="module")
def step():
    torch.manual_seed(0)
    return Step().eval()


@pytest.fixture(scope="module")
def compiled(step):
    return moe_mlir.compile(step, inputs(12))


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def inputs(n):
    g = torch.Generator().manual_seed(n)
    return torch.randn(n, D, generator=g), torch.rand(E, E, generator=g)


def test_the_step_is_one_parallel_loop(compiled):
    module = native().Module.parse(compiled.module.text)
    module.run("moe-to-cpu")
    assert module.text().count("llvm.call @moe_parallel_for") == 1


@pytest.mark.parametrize("n", SIZES)
def test_equals_the_reference(step, compiled, n):
    h, graph = inputs(n)
    gates, indices, updated = compiled(h, graph)
    z = step.router.logits(h).detach().double()
    g = reference.adjacency_gate(z.softmax(-1), graph.double())
    torch.testing.assert_close(gates.double(), g.gather(-1, indices), rtol=0, atol=1e-6)
    torch.testing.assert_close(gates.double(), g.topk(K).values, rtol=0, atol=1e-6)
    expected = reference.adjacency_update(graph.double(), z.topk(K).indices)
    torch.testing.assert_close(updated.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("n", [65, 4097, 9000])
def test_bits_do_not_depend_on_the_threads(compiled, threads, n):
    h, graph = inputs(n)
    threads(1)
    alone = compiled(h, graph)
    for count in (2, 3):
        threads(count)
        for a, b in zip(compiled(h, graph), alone, strict=True):
            assert torch.equal(a, b)
