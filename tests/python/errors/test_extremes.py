"""Names and numbers at the end of what is accepted: right, or an error."""


import pytest
import torch
from support import run_tool

import moe_mlir
from moe_mlir._native import native
from moe_mlir.importer.builder import string_literal
from moe_mlir.ops._expert_activation import ExpertActivation
from moe_mlir.ops.run_experts import run_experts


def save(model, path):
    torch.export.save(torch.export.export(model, (torch.ones(2, 4),)), path)


class Reserved(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_parameter("__metadata__", torch.nn.Parameter(torch.randn(4)))
        self.tied = self.__metadata__

    def forward(self, x):
        return x * self.get_parameter("__metadata__") + self.tied


def test_a_parameter_of_a_reserved_name(tmp_path):
    model = Reserved()
    save(model, tmp_path / "m.pt2")
    done = run_tool("moe-compile", tmp_path / "m.pt2", "-o", tmp_path / "m")
    assert done.returncode == 0, done.stderr
    x = torch.randn(2, 4)
    torch.testing.assert_close(moe_mlir.load(tmp_path / "m")(x), model(x))
    assert run_tool("moe-run", tmp_path / "m", "--list").returncode == 0


def test_a_name_with_quotes():
    name = 'a"} loc("b\\ü\n'
    text = f"func.func @f(%a: tensor<4xf32> {{moe.name = {string_literal(name)}}}) {{ return }}"
    assert r"a\22} loc(\22b" in str(native().Module.parse(text))


class Places(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, idx):
        return moe_mlir.dispatch(idx, 4, capacity_factor=self.factor)


def test_dispatch_at_its_ends():
    idx = torch.randint(0, 4, (64, 2))
    expected = moe_mlir.dispatch(idx, 4)

    for factor in (4.0, 1e9, 1e19, 1e300):
        places = Places(factor)
        with moe_mlir.simulate():
            simulated = places(idx)
        for found in (places(idx), simulated, moe_mlir.compile(places, (idx,))(idx)):
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a, b), factor
    for alignment in (2**29 + 2, 2**31, 2**40):
        with pytest.raises(ValueError, match="expected 'alignment' to leave all rows of 4 experts"):
            moe_mlir.dispatch(idx, 4, alignment=alignment)


def test_no_experts():
    with pytest.raises(ValueError, match="expected 'w_in' to have at least 1 expert"):
        run_experts(torch.randn(3, 4), torch.ones(3, 1),
                    torch.zeros(3, 1, dtype=torch.int64), torch.empty(0, 8, 4), None,
                    torch.empty(0, 4, 8), None, activation=ExpertActivation(activation="relu", gate="none"))


def test_a_chip_without_kernels():
    with pytest.raises(ValueError, match="expected a chip among sm_80.*found 'h100'"):
        with moe_mlir.simulate(chip="h100"):
            pass
