"""What the README tells newcomers to type, from nothing: `pip install .` and the set-up."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "utils"))

import wheel_report  # noqa: E402

pytestmark = pytest.mark.long
ONE_OP = """
import moe_mlir, torch
scores = torch.randn(1000, 64)
gates, indices = moe_mlir.topk_renorm(scores, 8)
expected, chosen = moe_mlir.reference.topk_renorm(scores.double(), 8)
assert torch.equal(indices, chosen)
torch.testing.assert_close(gates.double(), expected, rtol=0, atol=2e-6)
print(moe_mlir.__file__)
"""


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def environment_of_a_newcomer(tmp_path):
    """Nothing that leads to this tree's build or cache, but the compiler cache, which saves minutes."""
    kept = {k: v for k, v in os.environ.items()
            if not k.startswith("MOE_MLIR_") and k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    if shutil.which("ccache"):
        kept.update(CMAKE_CXX_COMPILER_LAUNCHER="ccache", CCACHE_SLOPPINESS=(
            "pch_defines,time_macros,include_file_mtime,include_file_ctime"))
    return dict(kept, MOE_MLIR_CACHE_DIR=str(tmp_path / "cache"))


def test_pip_install_gives_tools_and_ops(tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    scripts = tmp_path / "venv" / "bin"
    environment = environment_of_a_newcomer(tmp_path)
    environment["PATH"] = f"{scripts}:{environment['PATH']}"
    run(scripts / "python", "-m", "pip", "install", "--quiet", ROOT,
        ROOT / "packages" / "moe_mlir_bench", env=environment)
    shown = run(scripts / "moe-compile", "--help", env=environment, cwd=tmp_path)
    assert "--target" in shown.stdout
    (tmp_path / "affine.mlir").write_text("func.func @f(%x: tensor<4xf32>) -> tensor<4xf32> "
                                          "{ return %x : tensor<4xf32> }")
    run(scripts / "moe-opt", tmp_path / "affine.mlir", env=environment)
    shown = run(scripts / "moe", "bench", "--list", env=environment, cwd=tmp_path)
    assert "topk_renorm" in shown.stdout
    package = run(scripts / "python", "-c", ONE_OP, env=environment, cwd=tmp_path).stdout.strip()
    assert Path(package).is_relative_to(tmp_path / "venv")
    assert_llvm_is_within(Path(package).parent)


def assert_llvm_is_within(package):
    """No wheel of LLVM beside ours, and of ours one library that exports no more than is called."""
    assert not [name for name in ("llvm", "mlir") if (package.parent / name).exists()]
    library = package / "libmoe_compiler.so"
    needed = run("readelf", "-d", library).stdout
    assert "libmoe_runtime.so" in needed and "LLVM" not in needed and "MLIR" not in needed
    symbols = [line.split()[-1] for line in run("nm", "-D", "--defined-only", "-C", library)
               .stdout.splitlines()]
    foreign = [name for name in symbols if not name.startswith("moe") and "char**)" not in name]
    assert not [name for name in foreign if "getStaticCache" not in name]
    wheel = wheel_report.entries(package)
    assert sum(e.packed for e in wheel) < 60e6 and sum(e.size for e in wheel) < 180e6


def test_the_set_up_says_how_long_it_takes_and_nothing_of_the_compiler(tmp_path):
    environment = dict(environment_of_a_newcomer(tmp_path), MOE_MLIR_VENV=sys.prefix,
                       MOE_MLIR_BUILD=str(tmp_path / "build"))
    done = run(ROOT / "setup.sh", "moe-compiler", env=environment)
    said = (done.stdout + done.stderr).splitlines()
    assert [line for line in said if not line.startswith("setup: ")] == []
    assert any("minutes on" in line for line in said)
    assert run(ROOT / "setup.sh", "moe-compiler", env=environment).stderr == ""
