"""moe-compile stores the weights that kernels read in panels, for the CPU that it compiles for."""

import gc
import json

import pytest
import torch
from support import run_tool
from torch.multiprocessing.reductions import StorageWeakRef

import moe_mlir
from moe_mlir.compiler.host_cpu import missing_for
from moe_mlir.frontends.export import export_packed
from moe_mlir.nn import MoELayer, SMoE

X = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))


class Net(torch.nn.Module):
    """Experts between linear layers, some of whose weights something else reads, too."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(64, 64), torch.nn.Linear(64, 96)
        self.layer = MoELayer(SMoE(64, 4, 2), 80)
        self.gate, self.narrow = torch.nn.Linear(96, 96), torch.nn.Linear(96, 8)
        self.table = torch.nn.Embedding(96, 96)
        self.head = torch.nn.Linear(96, 96)
        self.read, self.tied = torch.nn.Linear(96, 96), torch.nn.Linear(96, 96)
        self.tied.weight = self.table.weight

    def forward(self, x):
        y = self.gate(self.last(self.layer(self.first(x).tanh())[0]))
        y = self.tied(self.read(y) * self.read.weight.mean()) + self.table.weight[3]
        return self.head(y), self.narrow(y)


PACKED = {"first.weight", "last.weight", "head.weight", "layer.w_in", "layer.w_out"}


def exported():
    torch.manual_seed(0)
    model = Net().eval()
    with torch.no_grad():
        return model, torch.export.export(model, (X,))


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("packed") / "net.pt2"
    model, net = exported()
    torch.export.save(net, path)
    return model, path


def compile_program(path, *options):
    """The artifact, and the names and shapes of the weights that it has in panels."""
    folder = path.with_suffix(".artifact")
    done = run_tool("moe-compile", path, "-o", folder, *options)
    assert done.returncode == 0, done.stderr
    arguments = json.loads((folder / "program.json").read_text())["arguments"]
    return moe_mlir.load(folder), {a["name"]: a["shape"] for a in arguments if len(a["shape"]) > 3}


def test_weights_that_kernels_alone_read_are_in_panels(program):
    model, path = program
    artifact, panels = compile_program(path)
    assert set(panels) == PACKED
    plain, none = compile_program(path, "--pack=false")
    assert none == {}
    for found, same, expected in zip(artifact(X), plain(X), model(X), strict=True):
        assert torch.equal(found, same)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cpu", ["x86-64-v3", "x86-64-v4"])
def test_panels_are_those_of_the_cpu_that_is_compiled_for(program, cpu):
    if missing_for(cpu):
        pytest.skip(f"this machine does not run code for {cpu}")
    model, path = program
    artifact, panels = compile_program(path, f"--cpu={cpu}")
    assert set(panels) == PACKED
    assert {shape[-1] for shape in panels.values()} == {64 if cpu == "x86-64-v4" else 16}
    for found, expected in zip(artifact(X), model(X), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_there_are_never_two_copies():
    _, net = exported()
    old = {name: StorageWeakRef(net.state_dict[name].untyped_storage()) for name in PACKED}
    module = export_packed(net, "native")
    gc.collect()
    assert all(storage.expired() for storage in old.values())
    assert all(module.state[name].dim() > 3 for name in PACKED)


def test_other_output_shows_the_shapes_of_the_model(program):
    done = run_tool("moe-compile", program[1], "-o", "-", "--emit=mlir")
    assert done.returncode == 0 and "packed = " not in done.stdout
