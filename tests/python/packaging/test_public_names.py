"""What `dir` shows of a public module: its public names, and nothing that it uses itself."""

import importlib
import importlib.util
import subprocess
import sys

import pytest

import moe_mlir

MODULES = ("distributed", "experts", "hf", "megatron", "metrics", "nn", "onnx", "ops", "plots",
           "reference", "sim")


@pytest.mark.parametrize("name", MODULES)
def test_dir_of_a_module_is_its_public_names(name):
    module = importlib.import_module(f"moe_mlir.{name}")
    assert dir(module) == sorted(module.__all__)
    assert not [n for n in dir(module) if n.startswith("_") or not hasattr(module, n)]


def test_dir_of_the_package_has_what_is_loaded_at_its_first_use():
    optional = {name for name, package in (("hf", "transformers"), ("onnx", "onnx"))
                if importlib.util.find_spec(package) is not None}
    assert set(dir(moe_mlir)) == {*moe_mlir.__all__, *optional, "__version__"}
    assert all(hasattr(moe_mlir, name) for name in dir(moe_mlir))


def test_dir_of_the_package_loads_nothing():
    program = ("import sys, moe_mlir; names = dir(moe_mlir); assert 'nn' in names; "
               "print('moe_mlir.nn' in sys.modules, 'transformers' in sys.modules)")
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout.split() == ["False", "False"], run.stderr
