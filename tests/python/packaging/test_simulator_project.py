"""simulator/ is a project of its own: it configures and builds without the compiler."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROJECT = ROOT / "simulator"
# The one header of the tree beside its own: what is known of chips.
SHARED = "MoE/Support/Chips.h"


@pytest.fixture(scope="module")
def configured(tmp_path_factory):
    cmake = Path(sys.prefix) / "bin" / "cmake"
    if not cmake.exists():
        cmake = shutil.which("cmake") or pytest.skip("no cmake")
    folder = tmp_path_factory.mktemp("simulator")
    done = subprocess.run([cmake, "-S", PROJECT, "-B", folder, "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return cmake, folder


def test_it_compiles_its_own_sources_alone(configured):
    commands = json.loads((configured[1] / "compile_commands.json").read_text())
    compiled = {Path(command["file"]).resolve().relative_to(ROOT) for command in commands}
    own = {path.relative_to(ROOT) for path in PROJECT.rglob("*.cpp")}
    assert own <= compiled
    assert {str(path.parent) for path in compiled - own} == {"lib/Support", "tools/moe-sim"}
    assert not [c for c in commands if re.search(r"llvm|mlir/|torch", c["command"], re.IGNORECASE)]


def test_it_includes_one_header_of_the_compiler():
    included = {name for path in PROJECT.rglob("*") if path.suffix in (".cpp", ".h")
                for name in re.findall(r'#include "(MoE/[^"]+)"', path.read_text())}
    assert SHARED in included
    assert {name for name in included if not name.startswith("MoE/Simulator/")} == {SHARED}


@pytest.mark.long
def test_it_builds_and_runs_a_kernel(configured):
    cmake, folder = configured
    subprocess.run([cmake, "--build", folder, "--parallel", "2"], check=True)
    ptx = ROOT / "tests" / "Simulator" / "saxpy.ptx"
    call = "--grid=2 --block=32 --arg f32:2 --arg buf:f32:40:iota --arg buf:f32:40:ones --arg i32:40 --print 2"
    done = subprocess.run([folder / "bin" / "moe-sim", ptx, *call.split()], capture_output=True,
                          text=True)
    assert "argument 2: 1 3 5 7 9" in done.stdout, done.stderr
    assert (folder / "lib" / "libmoe_sim.so").exists()
