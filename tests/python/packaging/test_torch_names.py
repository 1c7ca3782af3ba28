"""torch's private names are in one folder, and each is still in the torch that is installed."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "python" / "moe_mlir"
ROOM = PACKAGE / "_torch"


def dotted(node):
    """"torch._C.name" of such an expression; None of others."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return None


def private_names(text):
    """The names of torch in a module of which a part begins with an underscore."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(dotted(node))
    # What an op is called is no name of Python.
    found = {name for name in found if name and name.startswith("torch.")
             and not name.startswith("torch.ops.")}
    private = {name for name in found if any(
        part.startswith("_") and not part.startswith("__") for part in name.split("."))}
    # Of torch._C._name the part torch._C says nothing more.
    return {name for name in private if not any(other.startswith(name + ".") for other in private)}


def names_of_the_room():
    return sorted({name for path in ROOM.glob("*.py") for name in private_names(path.read_text())})


@pytest.mark.parametrize("name", names_of_the_room())
def test_torch_still_has(name):
    """A version without one fails here, under its name."""
    parts = name.split(".")
    value, i = importlib.import_module("torch"), 1
    while i < len(parts) and hasattr(value, parts[i]):
        value, i = getattr(value, parts[i]), i + 1
    if i < len(parts):  # a module that nobody has imported yet
        value = importlib.import_module(".".join(parts[:-1]))
        assert hasattr(value, parts[-1]), f"this torch has no {name}"


def test_no_other_module_names_them():
    sources = [*PACKAGE.rglob("*.py"), *(ROOT / "packages").rglob("*.py")]
    found = {str(path.relative_to(ROOT)): names for path in sources
             if path.parent != ROOM and (names := private_names(path.read_text()))}
    assert found == {}
    assert len(names_of_the_room()) > 30


def test_a_private_name_is_seen():
    assert private_names("import torch\ntorch._C._is_tracing()\ntorch.ops.aten._to_copy") == {
        "torch._C._is_tracing"}
    assert private_names("from torch.utils import _pytree") == {"torch.utils._pytree"}
    assert private_names("from torch._ops import OpOverload") == {"torch._ops.OpOverload"}
