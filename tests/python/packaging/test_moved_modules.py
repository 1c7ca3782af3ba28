"""Old names of modules work, with a DeprecationWarning, and nothing here uses them."""

import importlib
import subprocess
import sys

import pytest

import moe_mlir
from moe_mlir._deprecated_names import MOVED


@pytest.fixture(params=sorted(MOVED))
def name(request):
    """An old name that nobody has used, and that is forgotten afterwards."""
    def forget():
        sys.modules.pop(f"moe_mlir.{request.param}", None)
        vars(moe_mlir).pop(request.param, None)

    forget()
    yield request.param
    forget()


def test_old_names_import(name):
    new = importlib.import_module(f"moe_mlir.{MOVED[name]}")
    with pytest.warns(DeprecationWarning, match=rf"moe_mlir\.{name} is now moe_mlir\.{MOVED[name]}"):
        old = importlib.import_module(f"moe_mlir.{name}")
    public = [attribute for attribute in vars(new) if not attribute.startswith("__")]
    assert public and all(getattr(old, a) is getattr(new, a) for a in public)


def test_the_warning_is_for_who_imports(name):
    with pytest.warns(DeprecationWarning) as warnings:
        exec(compile(f"import moe_mlir.{name}", "a user's file", "exec"), {})
    assert [w.filename for w in warnings] == ["a user's file"]


@pytest.mark.parametrize("name", ["simulate"], indirect=True)
def test_a_function_with_the_old_name_of_a_module_can_be_called(name):
    with pytest.warns(DeprecationWarning):
        from moe_mlir.simulate import Simulation
    with moe_mlir.simulate(chip="sm_80") as simulation:
        assert isinstance(simulation, Simulation) and simulation.chip == "sm_80"


def test_only_old_names_of_modules_are_found():
    assert importlib.util.find_spec("moe_mlir.simulated") is None
    with pytest.raises(AttributeError, match="no attribute 'simulated'"):
        _ = moe_mlir.simulated


def test_old_commands_run():
    done = subprocess.run([sys.executable, "-m", "moe_mlir.reproduce", "--help"],
                          capture_output=True, text=True)
    assert done.returncode == 0 and "Deprecat" not in done.stderr, done.stderr
    assert "usage: moe reproduce" in done.stdout
