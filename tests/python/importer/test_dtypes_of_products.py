"""Products of several dtypes: eager refuses them, a trace does not see it."""

import pytest
import torch

import moe_mlir


class Calls(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


A, B, BIAS = torch.randn(3, 4), torch.randn(4, 5), torch.randn(5)
CASES = {
    "linear": (torch.nn.Linear(4, 5), (A.half(),)),
    "bias": (Calls(torch.nn.functional.linear), (A, B.T, BIAS.half())),
    "mm": (Calls(torch.mm), (A, B.half())),
    "addmm": (Calls(torch.addmm), (BIAS.half(), A, B)),
    "einsum": (Calls(lambda a, b: torch.einsum("ij,jk->ik", a, b)), (A, B.half())),
}


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_what_eager_refuses_is_refused(case):
    model, tensors = CASES[case]
    with pytest.raises(RuntimeError, match="same dtype|scalar type"):
        model(*tensors)
    with pytest.raises(RuntimeError, match=r"expected operands of one dtype, found "
                                           r"float\d\d and float\d\d; cast them to one"):
        moe_mlir.compile(model, tensors)


@torch.no_grad()
def test_a_call_of_another_dtype_is_refused_where_no_program_fits():
    """A packed model has another program than an unpacked one, whose dtype was not asked."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64)).eval()
    x = torch.randn(3, 64)
    compiled = moe_mlir.compile(model, (x,))
    moe_mlir.pack_linears(model)
    torch.testing.assert_close(compiled(x), model(x))
    moe_mlir.unpack_linears(model)
    model[0] = torch.nn.Linear(64, 64, bias=False)
    with pytest.raises(RuntimeError, match="expected operands of one dtype"):
        compiled(x.half())
    torch.testing.assert_close(compiled(x), model(x))
