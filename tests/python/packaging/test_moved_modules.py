"""Old names of modules work, with a DeprecationWarning, and nothing here uses them.

Some name modules of moe_mlir_bench, which an environment need not have.
"""

import importlib
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from support import run_python, serve_python

import moe_mlir
from moe_mlir._deprecated_names import MOVED, SPLIT_OFF, new_name

PYTHON = Path(moe_mlir.__file__).absolute().parents[1]


@pytest.fixture(params=sorted([*MOVED, *SPLIT_OFF, "models.families", "bench.cases.selection"]))
def name(request):
    """An old name that nobody has used, and that is forgotten afterwards."""
    def forget():
        top = request.param.partition(".")[0]
        for old in [old for old in sys.modules if f"{old}.".startswith(f"moe_mlir.{top}.")]:
            del sys.modules[old]
        vars(moe_mlir).pop(top, None)

    forget()
    yield request.param
    forget()


def test_old_names_import(name):
    new = importlib.import_module(new_name(name))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        old = importlib.import_module(f"moe_mlir.{name}")
    # The last one: each part of the name that has another one now is told of.
    assert str(caught[-1].message) == f"moe_mlir.{name} is now {new_name(name)}"
    assert caught[-1].category is DeprecationWarning
    public = [attribute for attribute in vars(new) if not attribute.startswith("__")]
    assert old is new or public and all(getattr(old, a) is getattr(new, a) for a in public)


def test_the_warning_is_for_who_imports(name):
    with pytest.warns(DeprecationWarning) as caught:
        exec(compile(f"import moe_mlir.{name}", "a user's file", "exec"), {})
    assert {w.filename for w in caught if " is now moe_mlir" in str(w.message)} == {"a user's file"}


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


@pytest.mark.parametrize("old, usage", [
    ("reproduce", "moe reproduce"), ("bench", "moe bench"), ("demo", "moe demo"),
    ("gpu_check", "moe gpu-check"), ("models", "moe models"),
    ("models.scale", "python -m moe_mlir_bench.models.scale")])
def test_old_commands_run(old, usage):
    done = run_python("-m", f"moe_mlir.{old}", "--help")
    assert done.returncode == 0 and "Deprecat" not in done.stderr, done.stderr
    assert f"usage: {usage}" in done.stdout


def test_what_was_split_off_is_the_same_modules():
    code = """
import warnings
warnings.simplefilter("ignore")
import moe_mlir.models.families, moe_mlir_bench.models as models
from moe_mlir.models import FAMILIES
from moe_mlir import bench
from moe_mlir.bench.cases.selection import topk_renorm
import moe_mlir_bench.bench.cases.selection as selection
print(FAMILIES is models.FAMILIES, moe_mlir.models.families is models.families,
      topk_renorm is selection.topk_renorm, bench.__name__)
"""
    done = run_python("-c", code)
    assert done.stdout.split() == ["True", "True", "True", "moe_mlir_bench.bench"], done.stderr


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """(python, environment) of a folder with links to the compiler's package alone."""
    folder = tmp_path_factory.mktemp("alone")
    for name in ("moe_mlir", "moe_mlir_command.py", "moe_mlir_tools.py"):
        (folder / name).symlink_to(PYTHON / name)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    with serve_python(["moe_mlir"], environment) as python:
        yield python, environment


@pytest.mark.parametrize("code", [
    "import moe_mlir.bench", "from moe_mlir import models", "import moe_mlir.models.families",
    "import moe_mlir; moe_mlir.demo", "runpy._run_module_as_main('moe_mlir.gpu_check')",
    "import moe_mlir_command; sys.exit(moe_mlir_command.main(['bench', '--list']))",
    "import moe_mlir_command; sys.exit(moe_mlir_command.main(['explain', 'Mixtral']))"])
def test_a_missing_package_is_named_with_its_installation(alone, code, tmp_path):
    python, environment = alone
    done = subprocess.run([python, "-c", f"import runpy, sys\n{code}"], cwd=tmp_path, env=environment,
                          capture_output=True, text=True)
    assert done.returncode != 0 and "`pip install moe-mlir-bench`" in done.stderr, done.stderr
    assert "expected " in done.stderr and "moe_mlir_bench" in done.stderr
