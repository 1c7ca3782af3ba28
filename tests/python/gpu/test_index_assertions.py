"""Indices out of range in kernels of an imported model: an assertion fails, nothing is read."""

import pytest
import torch
import torch.nn.functional as F

import moe_mlir
from moe_mlir.sim.simulation import SimulationError


class Rows(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(10, 8))

    def forward(self, ids):
        return F.embedding(ids, self.table) * 2


def test_an_index_out_of_range_fails_an_assertion():
    model = Rows()
    compiled = moe_mlir.compile(model, (torch.zeros(2, 3).long(),), target="sm_90")
    with moe_mlir.simulate():
        ids = torch.randint(0, 10, (2, 5))
        torch.testing.assert_close(compiled(ids), model(ids))
        for wrong in (10, -1, 2 ** 40):
            with pytest.raises(SimulationError, match="a device-side assertion failed"):
                compiled(torch.full((2, 3), wrong))


class Classes(torch.nn.Module):
    def forward(self, ids):
        return F.one_hot(ids, 4).float() * 2


def test_assertions_between_kernels_are_left_out():
    compiled = moe_mlir.compile(Classes(), (torch.zeros(3).long(),), target="sm_90")
    ids = torch.tensor([3, 0, 1])
    with moe_mlir.simulate():
        torch.testing.assert_close(compiled(ids), Classes()(ids))
