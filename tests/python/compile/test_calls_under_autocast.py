"""Compiled models under torch.autocast, which is not the same in each call."""

import contextlib
import functools

import pytest
import torch

import moe_mlir


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)

    def forward(self, x):
        y = self.first(x)
        return (y, y.softmax(-1), torch.nn.functional.layer_norm(y, (8,)), self.second(y + x), y @ y.t(),
                torch.cat([y, x]), torch.einsum("bd,cd->bc", x, y))


NONE = contextlib.nullcontext
TO_BFLOAT16, TO_FLOAT16 = (functools.partial(torch.autocast, "cpu", dtype=dtype)
                           for dtype in (torch.bfloat16, torch.float16))
OFF = functools.partial(torch.autocast, "cpu", enabled=False)


@pytest.mark.parametrize("first", [NONE, TO_BFLOAT16, TO_FLOAT16], ids=["none", "bfloat16", "float16"])
def test_results_are_those_of_eager_under_the_autocast_of_the_call(first):
    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(3, 8)
    with first():
        compiled = moe_mlir.compile(model, (x,))
    for around in (NONE, TO_BFLOAT16, NONE, NONE, TO_BFLOAT16, TO_FLOAT16, OFF, TO_BFLOAT16):
        with torch.no_grad(), around():
            torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=2e-2)


def test_a_module_has_the_autocast_of_its_trace():
    model, x = Model().eval(), torch.randn(3, 8)
    compiled = moe_mlir.compile(moe_mlir.export(model, (x,)))
    program = moe_mlir.compile(torch.export.export(model, (x,)))
    with TO_BFLOAT16():
        with pytest.raises(RuntimeError, match="expected no autocast, as .*, found autocast to bfloat16 on cpu"):
            compiled(x)
        assert program(x)[0].dtype is torch.float32
