"""moe_mlir.export of forwards that cast their layers to what these are, as routers of Switch do."""

import pytest
import torch

import moe_mlir
from moe_mlir.frontends.module_casts import casts_without_effect


class Casting(torch.nn.Module):
    def __init__(self, *wanted):
        super().__init__()
        self.layer, self.wanted = torch.nn.Linear(4, 4), wanted

    def forward(self, x):
        self.layer = self.layer.to(*self.wanted)
        return self.layer(x)


@pytest.mark.parametrize("wanted", [(torch.float32,), ("cpu",), (torch.device("cpu"), torch.float32)], ids=str)
def test_a_cast_to_what_a_layer_is_changes_nothing(wanted):
    model, x = Casting(*wanted), torch.ones(2, 4)
    torch.testing.assert_close(moe_mlir.compile(model, (x,))(x), model(x))


def test_other_casts_are_made():
    layer = torch.nn.Linear(4, 4)
    layer.register_buffer("ids", torch.zeros(2, dtype=torch.int64))
    with casts_without_effect():
        assert layer.to(torch.float32) is layer
        assert layer.to(dtype=torch.float64) is layer and layer.weight.dtype == torch.float64
        assert layer.to(torch.ones(1, dtype=torch.bfloat16)).weight.dtype == torch.bfloat16
        assert layer.ids.dtype == torch.int64
    assert torch.nn.Module.to.__module__ == "torch.nn.modules.module"
