"""What cannot be written is an error before anything is; a file is there whole or not at all."""

import doctest
import importlib
import sys
import warnings

import onnx_samples as samples
import pytest
import torch
from sessions import File, error

import moe_mlir
from moe_mlir import nn
from moe_mlir.onnx import model_file


def refuse(model, inputs, tmp_path, message, kind=ValueError, **options):
    with pytest.raises(kind, match=message):
        moe_mlir.onnx.export(model, inputs, tmp_path / "model.onnx", **options)
    assert not list(tmp_path.iterdir())


def test_a_model_without_experts(tmp_path):
    refuse(torch.nn.Linear(4, 4), (torch.ones(2, 4),), tmp_path,
           "expected a model with layers of experts that run as one op, found none")


def test_no_model_and_no_inputs(tmp_path):
    refuse("model", (torch.ones(2),), tmp_path, "expected 'model' to be a torch.nn.Module", TypeError)
    refuse(samples.Layer(), torch.ones(2), tmp_path, "expected 'args' to be a tuple", TypeError)


def test_another_suffix_and_no_folder(tmp_path):
    layer, x = samples.Layer(), torch.ones(2, 8)
    with pytest.raises(ValueError, match="expected a path that ends in .onnx, found"):
        moe_mlir.onnx.export(layer, (x,), tmp_path / "model.pt2")
    with pytest.raises(FileNotFoundError, match="expected a folder '.*none', found none"):
        moe_mlir.onnx.export(layer, (x,), tmp_path / "none" / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_an_activation_that_the_node_lacks(tmp_path):
    x = torch.ones(2, 8)
    refuse(samples.Layer(activation=samples.RELU2), (x,), tmp_path,
           r"'layer': expected an activation of onnxruntime's node: .*found .*relu2")
    refuse(samples.Layer(activation=samples.GELU), (x,), tmp_path, "tanh_gelu=True writes")
    refuse(samples.Layer(activation=torch.sin), (x,), tmp_path,
           "expected experts that run as one op, found some in parts")


def test_gates_that_may_be_negative(tmp_path):
    refuse(samples.Layer(gates=torch.tanh), (torch.ones(2, 8),), tmp_path,
           "expected gates that cannot be negative")


def test_a_capacity(tmp_path):
    layer = nn.MoELayer(nn.SMoE(8, 4, 2), 16, capacity_factor=1.0)
    refuse(layer, (torch.ones(2, 8),), tmp_path, "the model: expected experts that run as one op",
           tanh_gelu=True)


def test_other_types(tmp_path):
    refuse(samples.Layer().bfloat16(), (torch.ones(2, 8, dtype=torch.bfloat16),), tmp_path,
           r"expected float32, found torch.bfloat16; call model.float\(\) first")


def test_packed_weights(tmp_path):
    layer = nn.MoELayer(nn.SMoE(32, 4, 2), 64).eval()
    assert moe_mlir.pack_experts(layer) == 1
    refuse(layer, (torch.ones(2, 32),), tmp_path, "call moe_mlir.unpack_experts", tanh_gelu=True)


def test_state(tmp_path):
    refuse(samples.Counting(), (torch.ones(2, 8),), tmp_path,
           r"found that it writes 1 \('calls'\); a file keeps no state")


def test_what_torch_cannot_write(tmp_path):
    refuse(samples.Layer(gates=samples.complex_gates), (torch.ones(2, 8),), tmp_path,
           "torch.onnx cannot write what is around the experts: ")


def test_another_way_through_the_code_is_named(tmp_path):
    layer = samples.Branching()
    with pytest.warns(UserWarning, match=r"another way through its code unless .*batch.*100"):
        moe_mlir.onnx.export(layer, (torch.ones(3, 8),), tmp_path / "model.onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moe_mlir.onnx.export(layer, (torch.ones(3, 8),), tmp_path / "model.onnx", dynamic=False)


def test_packages_are_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refuse(samples.Layer(), (torch.ones(2, 8),), tmp_path, "found no onnx and no onnxscript",
           ImportError)


def test_importing_the_module_imports_no_onnx():
    code = "import sys, moe_mlir.onnx; assert not {'onnx', 'onnxscript', 'onnx_ir'} & set(sys.modules)"
    import subprocess
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch):
    layer, x = samples.Layer(), torch.ones(2, 8)
    path = tmp_path / "model.onnx"
    moe_mlir.onnx.export(layer, (x,), path)
    before = path.read_bytes()
    import onnx_ir

    def fail(*args, **kwargs):
        raise OSError("no space left")
    monkeypatch.setattr(onnx_ir, "save", fail)
    with pytest.raises(OSError, match="no space left"):
        moe_mlir.onnx.export(layer, (x,), path)
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    assert path.read_bytes() == before


@torch.no_grad()
def test_weights_beside_the_file(tmp_path, monkeypatch):
    layer, x = samples.Layer(), torch.randn(5, 8)
    moe_mlir.onnx.export(layer, (x,), tmp_path / "model.onnx", external_data=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    assert error(File(tmp_path / "model.onnx")(x)["output"], layer(x)) < 1e-5
    monkeypatch.setattr(model_file, "_MOST_INSIDE", 100)
    other = tmp_path / "large"
    other.mkdir()
    with pytest.raises(ValueError, match="expected at most .* of weights in one file"):
        moe_mlir.onnx.export(layer, (x,), other / "model.onnx", external_data=False)
    assert not list(other.iterdir())
    moe_mlir.onnx.export(layer, (x,), other / "model.onnx")
    assert error(File(other / "model.onnx")(x)["output"], layer(x)) < 1e-5


@torch.no_grad()
def test_a_file_of_given_sizes(tmp_path):
    layer, x = samples.Layer(), torch.randn(5, 8)
    moe_mlir.onnx.export(layer, (x,), tmp_path / "model.onnx", dynamic=False)
    file = File(tmp_path / "model.onnx")
    assert file.session.get_inputs()[0].shape == [5, 8]
    assert error(file(x)["output"], layer(x)) < 1e-5


def test_the_example_of_the_documentation_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"torch": torch, "moe_mlir": moe_mlir}
    for test in doctest.DocTestFinder().find(model_file.export, "export", globs=names):
        assert doctest.DocTestRunner().run(test).failed == 0
    assert (tmp_path / "layer.onnx").exists()
