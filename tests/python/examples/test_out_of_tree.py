"""examples/out-of-tree: its README's commands build it against this build, and its tests pass."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

import moe_mlir

ROOT = pathlib.Path(__file__).resolve().parents[3]
BUILD = pathlib.Path(moe_mlir.__file__).absolute().parents[2]
README = (ROOT / "examples" / "out-of-tree" / "README.md").read_text()


def from_cache(name):
    """A variable of the build, such as its compiler."""
    cache = (BUILD / "CMakeCache.txt").read_text()
    found = re.search(rf"^{name}:\w+=(.*)$", cache, re.MULTILINE)
    return found[1] if found else ""


def block(language):
    return re.search(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)[1]


@pytest.fixture
def walk(tmp_path):
    """Runs commands as in the root of the sources, and leaves nothing there."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "build").symlink_to(BUILD)
    path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    environment = dict(os.environ, PATH=path, CXX=from_cache("CMAKE_CXX_COMPILER"),
                       # Compiled once, whatever this folder is called.
                       CMAKE_CXX_COMPILER_LAUNCHER=from_cache("CMAKE_CXX_COMPILER_LAUNCHER"),
                       CCACHE_BASEDIR=str(tmp_path))

    def run(commands):
        return subprocess.run(["bash", "-euo", "pipefail", "-c", commands], cwd=tmp_path,
                              env=environment, capture_output=True, text=True, timeout=600)

    return run


def test_the_commands_of_its_readme_build_test_and_run_it(walk):
    done = walk(block("sh"))
    assert done.returncode == 0, done.stdout + done.stderr
    tests = list((ROOT / "examples" / "out-of-tree" / "test").glob("*.mlir"))
    assert re.search(rf"Passed: {len(tests)} \(100", done.stdout), done.stdout
    assert block("text") in done.stdout


def test_another_version_is_refused_with_the_one_that_is_there(walk, tmp_path):
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(other LANGUAGES CXX)\n"
        "find_package(MoE 99.0 REQUIRED CONFIG)\n")
    done = walk("cmake -G Ninja -S . -B other -DMoE_DIR=$PWD/build/lib/cmake/moe")
    assert done.returncode != 0
    assert "99.0" in done.stderr and f"version: {moe_mlir.__version__}" in done.stderr
