"""The wheel, without a second build: what CMake installs, with the metadata of pyproject.toml.

`site` is laid out as pip would: the package, its metadata, and beside it the
LLVM wheels of this environment, which the relative paths in our libraries name.
A wheel has LLVM in a library of its own, which takes a second build: that is
tested by test_installation.py, among the long tests.
"""

import configparser
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import moe_mlir
from moe_mlir.compiler import code_id

ROOT = Path(__file__).resolve().parents[3]
BUILD = Path(moe_mlir.__file__).absolute().parents[2]
sys.path.insert(0, str(ROOT / "utils"))

import wheel_report  # noqa: E402

TOOLS = ("moe-compile", "moe-lsp-server", "moe-opt", "moe-reduce", "moe-run", "moe-sim")
# LLVM of another prefix than site-packages: the relative paths lead nowhere.
WHEELS = {name: importlib.util.find_spec(name) for name in ("mlir", "llvm")}

pytestmark = pytest.mark.skipif(None in WHEELS.values(), reason="LLVM is not from wheels")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site-packages")
    done = subprocess.run(["cmake", "--install", BUILD, "--prefix", folder, "--strip"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    write_metadata(folder)
    return folder


@pytest.fixture(scope="module")
def environment(site):
    """`site` with the LLVM wheels, as PYTHONPATH."""
    for name, spec in WHEELS.items():
        (site / name).symlink_to(list(spec.submodule_search_locations)[0])
    kept = {k: v for k, v in os.environ.items()
            if k not in ("PYTHONPATH", "LD_LIBRARY_PATH")}
    return dict(kept, PYTHONPATH=str(site))


def write_metadata(folder):
    scikit_build_core = pytest.importorskip("scikit_build_core.build")
    before = os.getcwd()
    os.chdir(ROOT)
    try:
        scikit_build_core.prepare_metadata_for_build_wheel(str(folder), {})
    finally:
        os.chdir(before)


def metadata(site, name):
    (path,) = site.glob(f"moe_mlir-*.dist-info/{name}")
    return path.read_text()


def python(environment, code, *arguments):
    done = subprocess.run([sys.executable, "-c", code, *arguments], env=environment,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_holds_what_it_should_and_nothing_else(site):
    found = [e for e in wheel_report.entries(site) if e.path.parts[0] not in WHEELS]
    tops = {entry.path.parts[0] for entry in found if entry.kind != "metadata"}
    assert tops == {"moe_mlir", "moe_mlir_command.py", "moe_mlir_tools.py"}
    assert {e.path.name for e in found if e.kind == "tools"} == set(TOOLS)
    libraries = {e.path.name for e in found if e.kind == "libraries"}
    # libmoe_torch is built where torch is at hand.
    assert libraries - {"libmoe_torch.so"} == {
        "libmoe_runtime.so", "libmoe_sim.so", "libmoe_sim_runtime.so", "libmoe_cuda_runtime.so"}
    sources = {str(e.path) for e in found if e.path.parts[0] == "moe_mlir" and e.path.suffix == ".py"}
    package = ROOT / "python" / "moe_mlir"
    assert sources == {f"moe_mlir/{p.relative_to(package)}" for p in package.rglob("*.py")}
    assert not [str(e.path) for e in found if e.kind == "other"]


def test_the_native_module_is_for_every_newer_python(site):
    """By its name, which pip and CPython go by, and by what it asks CPython for."""
    (module,) = (site / "moe_mlir").glob("_moe.*")
    assert module.name == "_moe.abi3.so"
    shown = subprocess.run(["nm", "-D", "--undefined-only", module], capture_output=True, text=True)
    asked = {line.split()[-1] for line in shown.stdout.splitlines()}
    assert "PyTuple_GetItem" in asked  # in place of a macro, which looks into the tuple
    assert not [name for name in asked if name.startswith("_Py") and name not in STABLE]


def test_the_disk_cache_tells_compilers_apart_without_reading_all_of_them(site):
    (module,) = (site / "moe_mlir").glob("_moe.*")
    compiler = site / "moe_mlir" / "libmoe_compiler.so"
    for library in (module, compiler) if compiler.exists() else (module,):
        assert len(code_id.file_id(library)) == 20


# Of the stable ABI, for what its macros call.
STABLE = {"_Py_Dealloc", "_Py_NoneStruct", "_Py_TrueStruct", "_Py_FalseStruct",
          "_Py_NotImplementedStruct", "_Py_IncRef", "_Py_DecRef"}


def test_is_small(site):
    found = [e for e in wheel_report.entries(site) if e.path.parts[0] not in WHEELS]
    print(wheel_report.table(found))
    assert sum(e.packed for e in found) < 60e6 and sum(e.size for e in found) < 180e6


def test_no_library_remembers_where_it_was_built(site):
    for entry in wheel_report.entries(site):
        if entry.path.parts[0] in WHEELS or entry.kind not in ("compiler (native module)",
                                                               "libraries", "tools"):
            continue
        shown = subprocess.run(["readelf", "-d", site / entry.path], capture_output=True, text=True)
        paths = [line for line in shown.stdout.splitlines() if "RUNPATH" in line or "RPATH" in line]
        for line in paths:
            for part in line[line.index("[") + 1 : -1].split(":"):
                assert part.startswith("$ORIGIN"), f"{entry.path}: {line}"


def test_entry_points_are_registered_and_equal_those_of_the_build_tree(site):
    parser = configparser.ConfigParser()
    parser.read_string(metadata(site, "entry_points.txt"))
    points = {"torch_dynamo_backends": {"moe": "moe_mlir.frontends.dynamo:moe"},
              "vllm.general_plugins": {"moe_mlir": "moe_mlir.vllm:register"}}
    assert {group: dict(parser[group]) for group in points} == points
    assert set(parser["console_scripts"]) == {"moe", *TOOLS}
    (built,) = (BUILD / "python").glob("moe_mlir-*.dist-info/entry_points.txt")
    build_tree = configparser.ConfigParser()
    build_tree.read_string(built.read_text())
    assert {group: dict(build_tree[group]) for group in points} == points


def test_a_wheel_needs_no_llvm_and_names_what_it_contains(site):
    described = Parser().parsestr(metadata(site, "METADATA"))
    needed = [need for need in described.get_all("Requires-Dist") if "extra" not in need]
    assert {re.match(r"[\w-]+", need)[0] for need in needed} == {
        "nanobind-backend", "numpy", "safetensors", "torch"}
    assert described.get_all("License-File") == ["LICENSE", "THIRD_PARTY_NOTICES"]
    notices = (ROOT / "THIRD_PARTY_NOTICES").read_text()
    assert all(name in notices for name in ("LLVM", "nanobind", "libstdc++"))


def test_the_version_is_the_same_everywhere(site):
    assert Parser().parsestr(metadata(site, "METADATA"))["Version"] == moe_mlir.__version__
    assert f"project(moe-mlir VERSION {moe_mlir.__version__} " in (
        ROOT / "CMakeLists.txt").read_text()


def test_the_installed_package_compiles_and_runs(site, environment, tmp_path):
    environment = dict(environment, MOE_MLIR_CACHE_DIR=str(tmp_path))
    printed = python(environment, """
import torch, moe_mlir
print(moe_mlir.__file__)
gates, indices = moe_mlir.topk_renorm(torch.tensor([[1.0, 3.0, 2.0]]), 2)
print(indices.tolist())
print(torch._dynamo.list_backends(exclude_tags=()).count("moe"))
with moe_mlir.simulate(chip="sm_90") as simulation:
    print(moe_mlir.topk_renorm(torch.tensor([[1.0, 3.0, 2.0]]), 2)[1].tolist())
""").splitlines()
    assert printed == [str(site / "moe_mlir" / "__init__.py"), "[[1, 2]]", "1", "[[1, 2]]"]


@pytest.mark.parametrize("tool", TOOLS)
def test_console_scripts_start_the_tools(environment, tool):
    code = f"import sys, moe_mlir_tools as t; sys.argv[0] = {tool!r}; " \
           f"sys.exit(t.{tool.replace('-', '_')}())"
    option = "--version" if tool == "moe-compile" else "--help"
    assert "moe" in python(environment, code, option)


def test_console_scripts_say_what_to_do_without_their_tool(site, environment, tmp_path):
    (tmp_path / "moe_mlir_tools.py").write_text((site / "moe_mlir_tools.py").read_text())
    done = subprocess.run([sys.executable, "-c", "import sys, moe_mlir_tools as t; "
                           "sys.exit(t.moe_opt())"], capture_output=True, text=True,
                          env=dict(environment, PYTHONPATH=str(tmp_path)))
    assert done.returncode == 1
    assert "expected the tool at" in done.stderr and "install the moe-mlir wheel" in done.stderr


def test_import_loads_nothing_but_the_ops(environment):
    """Compilers, tracers, plots and models come at their first use."""
    loaded = python(environment, """
import sys, torch
before = set(sys.modules)
import moe_mlir
from moe_mlir.compiler import code_id
print(*sorted(set(sys.modules) - before))
""").split()
    assert "moe_mlir.ops.topk_renorm" in loaded
    foreign = {m.partition(".")[0] for m in loaded} - {"moe_mlir"} - sys.stdlib_module_names
    assert not foreign
    heavy = ("_moe", "compiled", "distributed", "frontends", "importer", "nn", "plots",
             "raising")
    assert not {f"moe_mlir.{name}" for name in heavy} & set(loaded)


def test_wheel_report_reads_wheels_and_refuses_the_rest(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("moe_mlir/__init__.py", "x = 1\n" * 1000)
    command = [sys.executable, ROOT / "utils" / "wheel_report.py"]
    done = subprocess.run([*command, tmp_path / "a.whl"], capture_output=True, text=True)
    assert "Python sources  1" in done.stdout and done.returncode == 0
    (tmp_path / "b.whl").write_text("no")
    done = subprocess.run([*command, tmp_path / "b.whl"], capture_output=True, text=True)
    assert done.returncode == 1 and "expected a wheel or a folder" in done.stderr


# ------------------------------------------------------- the wheel of moe_mlir_bench


@pytest.fixture(scope="module")
def bench_site(tmp_path_factory):
    """A folder with what the wheel of packages/moe_mlir_bench holds."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("bench")
    shutil.copytree(ROOT / "packages" / "moe_mlir_bench", folder / "source",
                    ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    build = "import sys; from setuptools import build_meta as b; b.build_wheel(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", build, folder], cwd=folder / "source",
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("moe_mlir_bench-*-py3-none-any.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def test_the_wheel_of_what_measures_holds_its_package_alone(bench_site):
    package = ROOT / "packages" / "moe_mlir_bench"
    found = {str(p.relative_to(bench_site)) for p in bench_site.rglob("*") if p.is_file()}
    sources = {str(p.relative_to(package)) for p in (package / "moe_mlir_bench").rglob("*.py")}
    assert {name for name in found if ".dist-info/" not in name} == {
        *sources, "moe_mlir_bench/py.typed"}
    assert len(sources) > 50 and any(name.endswith("/LICENSE") for name in found)


def test_the_wheel_of_what_measures_is_for_the_same_version(bench_site):
    (path,) = bench_site.glob("*.dist-info/METADATA")
    described = Parser().parsestr(path.read_text())
    assert described["Version"] == moe_mlir.__version__
    needed = [need for need in described.get_all("Requires-Dist") if "extra" not in need]
    assert needed == [f"moe-mlir=={moe_mlir.__version__}"]


@pytest.mark.parametrize("name, shows", [("bench", "topk_renorm"), ("models", "Mixtral")])
def test_commands_of_the_other_distribution_work_where_it_is_installed(
        environment, bench_site, name, shows):
    code = f"import sys, moe_mlir_command as c; sys.exit(c.main(['{name}', '--list']))"
    alone = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True,
                           text=True)
    assert alone.returncode == 2 and alone.stdout == ""
    assert alone.stderr.endswith("found none; `pip install moe-mlir-bench`\n")
    both = dict(environment, PYTHONPATH=f"{environment['PYTHONPATH']}{os.pathsep}{bench_site}")
    assert shows in python(both, code)
    done = subprocess.run([sys.executable, "-m", f"moe_mlir.{name}", "--list"], env=both,
                          capture_output=True, text=True)
    assert done.returncode == 0 and shows in done.stdout, done.stderr
