"""Buffers to which a forward assigns tensors, at any depth of a model."""

import copy

import pytest
import torch

import moe_mlir
from moe_mlir.frontends.trace_errors import TraceFailed


class Running(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("before", torch.ones(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        before = self.mean
        self.before, self.count = self.mean, self.count + 1
        self.mean = self.mean * 0.9 + x.mean(0) * 0.1
        self.mean.add_(1)
        return x - self.mean, before, before[:2], self.mean


class Swapped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Running(), Running()

    def forward(self, x):
        y = self.first(x)
        z = self.second(y[0])
        self.first.mean, self.second.mean = self.second.mean, self.first.mean
        return y, z


@pytest.mark.parametrize("kind", [Running, Swapped])
def test_assignments_are_updates(kind):
    torch.manual_seed(0)
    eager = kind().eval()
    model = copy.deepcopy(eager)
    compiled = moe_mlir.compile(model, (torch.randn(2, 8),))
    torch.testing.assert_close(dict(model.named_buffers()), dict(eager.named_buffers()))
    for count in (2, 3, 3):
        x = torch.randn(count, 8)
        torch.testing.assert_close(compiled(x), eager(x))
        torch.testing.assert_close(dict(model.named_buffers()), dict(eager.named_buffers()))


class OtherDtype(Running):
    def forward(self, x):
        self.mean = self.mean.double()
        return x


class OtherParameter(torch.nn.Linear):
    def forward(self, x):
        self.weight = torch.nn.Parameter(self.weight * 2)
        return x @ self.weight


def test_a_buffer_of_another_type_is_refused():
    with pytest.raises(TraceFailed, match=r"expected buffer 'mean' to keep .*, float32\[8\], found .*float64"):
        moe_mlir.export(OtherDtype(), (torch.randn(2, 8),))


def test_another_parameter_is_refused():
    with pytest.raises(TraceFailed, match="expected a forward that keeps its parameters, found .* 'weight'"):
        moe_mlir.export(OtherParameter(8, 8), (torch.randn(2, 8),))
