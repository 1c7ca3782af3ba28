"""Modules and folders of the package import each other in one direction, wherever the import is.

A circle is hidden by an import inside of a function, and shows again when
somebody moves that import or wants one of the modules alone. That importing a
module loads the packages it is in counts for nothing here.
"""

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "python" / "moe_mlir"
BENCH = ROOT / "packages" / "moe_mlir_bench" / "moe_mlir_bench"
# Of moe_mlir, but not Python.
NATIVE = {"_moe"}


def module_name(path, package):
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_for_type_checkers(node):
    return isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"


def imported_by(path, package, modules) -> set:
    """The modules of the package that one of its files imports when it runs."""
    found = set()
    tree = ast.parse(path.read_text())
    if path == package / "__init__.py":
        # What it shows to type checkers alone, of names that are loaded at their first use.
        tree.body = [node for node in tree.body if not is_for_type_checkers(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            folder = path.relative_to(package.parent).parts[:-1]
            base = ".".join([*folder[: len(folder) + 1 - node.level] * (node.level > 0),
                             *filter(None, [node.module])])
            # A name is a module, or else it is from the module.
            found |= {name if (name := f"{base}.{alias.name}") in modules else base
                      for alias in node.names if alias.name not in NATIVE}
    return found & modules


def import_graph(package) -> dict:
    names = {module_name(path, package): path for path in package.rglob("*.py")}
    return {name: imported_by(path, package, set(names)) - {name}
            for name, path in names.items()}


def circle_in(graph):
    """Modules of which each imports the next, the first once more at the end; None without one."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1][::-1]
    return None


def test_no_modules_import_each_other():
    graph = import_graph(PACKAGE)
    assert len(graph) > 100 and "moe_mlir.gpu.sizes" in graph["moe_mlir.artifact.functions"]
    assert circle_in(graph) is None


def test_no_folders_import_each_other():
    folders = {}
    for name, others in import_graph(PACKAGE).items():
        folder, *imported = [(n.split(".") + [""])[1] for n in (name, *others)]
        folders.setdefault(folder, set()).update(set(imported) - {folder})
    # The package itself, which imports ops to register them.
    del folders[""]
    assert {"raising", "graph"} <= folders["frontends"]
    assert circle_in(folders) is None


def test_the_references_judge_and_do_not_serve():
    """Who reads them: the routers' form in plain torch, alone."""
    users = {name for name, others in import_graph(PACKAGE).items()
             if any(other.startswith("moe_mlir.reference") for other in others)}
    assert {n for n in users if n.split(".")[1] != "reference"} == {"moe_mlir.nn._router"}


def test_no_modules_of_what_measures_import_each_other():
    graph = import_graph(BENCH)
    assert len(graph) > 50
    assert "moe_mlir_bench.bench.machine" in graph["moe_mlir_bench.models.speed"]
    assert circle_in(graph) is None


def test_the_compiler_needs_nothing_of_what_measures_it():
    """But for the families' names in `moe explain`, which says so where they are not installed."""
    modules = {module_name(path, BENCH) for path in BENCH.rglob("*.py")}
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")
             if imported_by(path, PACKAGE, modules)}
    assert found == {"cli/explain.py"}
    tree = ast.parse((PACKAGE / "cli" / "explain.py").read_text())
    assert not [node for node in tree.body if "moe_mlir_bench" in ast.unparse(node)
                and not isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("imports", ["from . import a", "from .a import thing", "import pack.a",
                                     "def f():\n  from pack import a"])
def test_finds_a_circle(tmp_path, imports):
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("from . import b\nthing = 1\n")
    (package / "b.py").write_text("import os\n")
    assert circle_in(import_graph(package)) is None
    (package / "b.py").write_text(imports + "\n")
    assert circle_in(import_graph(package)) in (["pack.a", "pack.b", "pack.a"],
                                                ["pack.b", "pack.a", "pack.b"])
