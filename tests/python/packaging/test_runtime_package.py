"""The runtime without the compiler: what find_package(MoERuntime) and pkg-config give programs."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import run_tool

import moe_mlir
import moe_mlir_command

ROOT = Path(__file__).resolve().parents[3]
BUILD = Path(moe_mlir.__file__).absolute().parents[2]
DEPLOY = ROOT / "examples" / "deploy"
FIRST_LINE = "token 0: expert 0 with gate 0.953, expert 1 with 0.047"
LAYOUTS = ("build tree", "prefix", "wheel")


def run(*command, **options):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def cmake(*arguments, **options):
    found = Path(sys.prefix) / "bin" / "cmake"
    if not found.exists():
        found = shutil.which("cmake") or pytest.skip("no cmake")
    return run(found, *arguments, **options)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder of each layout that has lib/cmake. Installed trees are moved: no file may say where
    it was put first."""
    first, then = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("then")
    cmake("--install", BUILD, "--component", "runtime", "--prefix", first / "prefix", "--strip")
    cmake("--install", BUILD, "--prefix", first / "site-packages", "--strip")
    for name in ("prefix", "site-packages"):
        (first / name).rename(then / name)
    return {"build tree": BUILD, "prefix": then / "prefix",
            "wheel": then / "site-packages" / "moe_mlir"}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("artifact") / "router.artifact"
    done = run_tool("moe-compile", DEPLOY / "router.mlir", "-o", folder, "--target=cpu")
    assert done.returncode == 0, done.stderr
    return folder


def alone():
    """No variable that leads a program to this tree's libraries."""
    return {k: v for k, v in os.environ.items()
            if k not in ("LD_LIBRARY_PATH", "PKG_CONFIG_PATH", "CMAKE_PREFIX_PATH")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_project_finds_it_by_find_package(layout, installed, artifact, tmp_path):
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    found = installed[layout] / "lib" / "cmake" / "MoERuntime"
    cmake("-S", tmp_path / "deploy", "-B", tmp_path / "build", f"-DMoERuntime_DIR={found}",
          env=alone())
    cmake("--build", tmp_path / "build", "--target", "route")
    assert FIRST_LINE in run(tmp_path / "build" / "route", artifact, env=alone())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_program_finds_it_by_pkg_config(layout, installed, artifact, tmp_path):
    """By the commands of the page, with the folder that `moe config` names for a wheel."""
    if shutil.which("pkg-config") is None:
        pytest.skip("no pkg-config: install the Debian package pkg-config")
    page = (ROOT / "docs" / "Deploying.md").read_text()
    commands = re.search(r"^    (g\+\+ .*pkg-config.*\n(    .*\n)*)", page, re.MULTILINE)[1]
    folder = installed[layout] / "lib" / "pkgconfig"
    environment = dict(alone(), PKG_CONFIG_PATH=str(folder))
    assert run("pkg-config", "--modversion", "moe-runtime",
               env=environment).strip() == moe_mlir.__version__
    shutil.copy(DEPLOY / "route.cpp", tmp_path)
    run("bash", "-euc", commands, cwd=tmp_path, env=environment)
    assert FIRST_LINE in run(tmp_path / "route", artifact, env=alone())


def test_a_prefix_is_found_by_its_path_and_has_the_tool(installed, artifact, tmp_path):
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    shown = cmake("-S", tmp_path / "deploy", "-B", tmp_path / "build",
                  f"-DCMAKE_PREFIX_PATH={installed['prefix']}", "--log-level=STATUS", env=alone())
    assert "Generating done" in shown
    cache = (tmp_path / "build" / "CMakeCache.txt").read_text()
    assert f"MoERuntime_DIR:PATH={installed['prefix']}/lib/cmake/MoERuntime" in cache
    shown = run(installed["prefix"] / "bin" / "moe-run", artifact, "--list", env=alone())
    assert "function: route" in shown


@pytest.mark.parametrize("version, fits", [("0.1", True), ("0.2", False), ("1.0", False)])
def test_versions_with_another_minor_number_are_refused(version, fits, installed, tmp_path):
    """docs/Versions.md: headers change with minor versions alone."""
    assert moe_mlir.__version__.startswith("0.1.")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(other LANGUAGES CXX)\n"
        f"find_package(MoERuntime {version} CONFIG)\n"
        'message(STATUS "found: ${MoERuntime_FOUND}")\n')
    shown = cmake("-S", tmp_path, "-B", tmp_path / "build",
                  f"-DCMAKE_PREFIX_PATH={installed['prefix']}", env=alone())
    assert f"found: {1 if fits else 0}" in shown


def test_the_component_has_the_runtime_and_nothing_of_the_compiler(installed):
    prefix = installed["prefix"]
    found = {str(path.relative_to(prefix)) for path in prefix.rglob("*") if path.is_file()}
    headers = {f"include/MoE/Runtime/{path.name}"
               for path in (ROOT / "include" / "MoE" / "Runtime").glob("*.h")}
    assert {name for name in found if name.startswith("include/")} == headers
    assert {name for name in found if name.endswith(".so")} == {
        f"lib/libmoe_{name}runtime.so" for name in ("", "sim_", "cuda_")}
    assert {name for name in found if name.startswith("bin/")} == {"bin/moe-run", "bin/moe-sim"}
    folders = {name.partition("/")[0] for name in found}
    assert folders == {"bin", "include", "lib", "share"}
    for name in found:
        if name.endswith(".so") or name.startswith("bin/"):
            needed = run("readelf", "-d", prefix / name)
            assert not re.search(r"LLVM|MLIR|torch_|python", needed), name
            assert not [line for line in needed.splitlines() if "RUNPATH" in line and "$ORIGIN" not in line]
        elif name.endswith((".cmake", ".pc")):
            text = (prefix / name).read_text()
            assert str(ROOT) not in text and str(BUILD) not in text and "/first" not in text, name


def test_every_header_can_be_the_first_that_a_program_includes(installed, tmp_path):
    include = installed["prefix"] / "include"
    headers = [path.relative_to(include) for path in include.rglob("*.h")]
    assert len(headers) >= 8
    for number, header in enumerate(headers):
        (tmp_path / f"{number}.cpp").write_text(f'#include "{header}"\n')
    run(os.environ.get("CXX", "c++"), "-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only",
        f"-I{include}", *tmp_path.glob("*.cpp"))


# ------------------------------------------------------------------------ moe config


def config(capsys, *arguments):
    status = moe_mlir_command.main(["config", *arguments])
    return status, capsys.readouterr()


def test_config_prints_each_folder_alone_and_all_of_them(capsys):
    status, printed = config(capsys, "--json")
    folders = json.loads(printed.out)
    assert status == 0 and printed.err == ""
    for name, folder in folders.items():
        status, printed = config(capsys, f"--{name.replace('_', '-')}")
        assert (status, printed.out) == (0, f"{folder}\n")
    assert (Path(folders["cmake_dir"]) / "MoERuntimeConfig.cmake").exists()
    assert (Path(folders["include_dir"]) / "MoE" / "Runtime" / "Decoder.h").exists()
    status, printed = config(capsys)
    assert [line.split()[-1] for line in printed.out.splitlines()] == list(folders.values())


def test_config_of_an_installed_package_names_its_own_folders(installed):
    site = installed["wheel"].parent
    code = "import sys, moe_mlir_command as c; sys.exit(c.main(['config', '--json']))"
    shown = run(sys.executable, "-c", code, env=dict(os.environ, PYTHONPATH=str(site)))
    assert {Path(folder) for folder in json.loads(shown).values()} == {
        installed["wheel"] / name for name in ("lib/cmake/MoERuntime", "include", "", "lib/pkgconfig")}


def test_config_says_what_is_missing_and_what_to_do(capsys, monkeypatch, tmp_path):
    from moe_mlir.cli import config as module

    monkeypatch.setattr(module, "folders", lambda: dict.fromkeys(module._OPTIONS, tmp_path))
    status, printed = config(capsys, "--cmake-dir")
    assert status == 1 and printed.out == ""
    assert f"expected {tmp_path}/MoERuntimeConfig.cmake, found none; install" in printed.err
