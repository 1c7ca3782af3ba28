"""Editors and type checkers read the annotations, which py.typed tells them of."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

import moe_mlir
from moe_mlir import ops

_PACKAGE = Path(moe_mlir.__file__).parent
# What a call of a class takes.
_CALLS = ("__init__", "__call__")


def _public_modules():
    for path in sorted(_PACKAGE.rglob("*.py")):
        parts = path.relative_to(_PACKAGE).parts
        hidden = any(part.startswith("_") and part != "__init__.py" for part in parts)
        # What routers share is in files of its own.
        if not hidden or parts[0] == "nn":
            yield path


def _public_functions(body):
    """(function, whether it is a method) of a module's or a class's statements."""
    for node in body:
        name = getattr(node, "name", "_")
        if name.startswith("_") and name not in _CALLS:
            continue
        if isinstance(node, ast.ClassDef):
            yield from ((function, True) for function, _ in _public_functions(node.body))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, False


def _problems(function, is_method):
    """What the annotations of a function lack."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + given.defaults
    pairs = [*zip(positional, defaults), *zip(given.kwonlyargs, given.kw_defaults)]
    pairs += [(a, None) for a in (given.vararg, given.kwarg) if a]
    decorators = {getattr(d, "id", "") for d in function.decorator_list}
    if is_method and "staticmethod" not in decorators:
        pairs = pairs[1:]
    if function.returns is None and function.name != "__init__":
        yield "the result"
    for argument, default in pairs:
        if argument.annotation is None:
            yield argument.arg
        elif isinstance(default, ast.Constant) and default.value is None:
            annotation = ast.unparse(argument.annotation)
            if "None" not in annotation and annotation != "Any":
                yield f"{argument.arg} = None"


@pytest.mark.parametrize("path", list(_public_modules()),
                         ids=lambda path: str(path.relative_to(_PACKAGE)))
def test_a_public_module_is_annotated(path):
    functions = _public_functions(ast.parse(path.read_text()).body)
    missing = {f.name: lacks for f, is_method in functions
               if (lacks := list(_problems(f, is_method)))}
    assert not missing


def test_a_missing_annotation_is_found():
    source = "class C:\n    def f(self, x, *, y: int = None): ...\ndef g(z: int) -> int: ..."
    found = [list(_problems(*pair)) for pair in _public_functions(ast.parse(source).body)]
    assert found == [["the result", "x", "y = None"], []]


def test_the_package_says_that_it_is_typed():
    assert (_PACKAGE / "py.typed").exists()


@pytest.mark.parametrize("name", ops.__all__)
def test_an_op_is_annotated(name):
    signature = inspect.signature(getattr(moe_mlir, name))
    assert signature.return_annotation is not inspect.Signature.empty
    missing = [p.name for p in signature.parameters.values() if p.annotation is p.empty]
    assert not missing
    # None is allowed where it is the default.
    for parameter in signature.parameters.values():
        if parameter.default is None:
            assert "None" in str(parameter.annotation), parameter.name


def _names_for_type_checkers():
    tree = ast.parse((_PACKAGE / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)
                and getattr(node.test, "id", "") == "TYPE_CHECKING"]
    return {name.asname for node in block.body for name in node.names}


def test_type_checkers_see_every_public_name():
    """They do not run the `__getattr__` by which names are loaded at their first use."""
    assert _names_for_type_checkers() == {*moe_mlir.__all__, "hf", "onnx"}


# ---- what strict type checkers say of a program that calls everything -----------------

_PROGRAM = Path(__file__).with_name("typed_program.py")
_BARE = re.compile(r"\b(tuple|list|dict|Callable|Mapping|Sequence|Iterator|PathLike)\b(?!\[)")
# What depends on a user's model, on a device's array, or on transformers' classes.
_ANY = {("CompiledModel.__call__", "return"), ("from_pretrained", "model_class"),
        ("TensorMap", "array")}


def test_the_typed_program_calls_every_public_function():
    text = _PROGRAM.read_text()
    missing = [f"{name}.{f}" for name in ("", "metrics", "distributed", "experts", "plots", "hf", "megatron")
               for module in [importlib.import_module(f"moe_mlir.{name}".rstrip("."))]
               for f in module.__all__ if callable(getattr(module, f)) and f not in (
                   "experts_forward",) and f"{name or 'moe_mlir'}.{f}" not in text]
    assert not missing


def _signatures():
    for name in ("", "nn", "reference", "metrics", "distributed", "experts", "sim", "plots", "hf",
                 "megatron", "onnx"):
        module = importlib.import_module(f"moe_mlir.{name}".rstrip("."))
        for public in module.__all__:
            function = getattr(module, public)
            if inspect.isfunction(function):
                yield f"{name}.{public}".lstrip("."), function


@pytest.mark.parametrize(("name", "function"), list(_signatures()),
                         ids=lambda x: x if isinstance(x, str) else "")
def test_no_argument_or_result_is_of_any_type(name, function):
    signature = inspect.signature(function)
    given = {p.name: str(p.annotation) for p in signature.parameters.values()
             if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    given["return"] = str(signature.return_annotation)
    plain = {n: a.strip("'").replace("typing.", "").replace("collections.abc.", "")
             for n, a in given.items() if (name, n) not in _ANY}
    assert not {n: a for n, a in plain.items() if a in ("Any", "Any | None")}
    assert not {n: a for n, a in plain.items() if _BARE.search(a) and "<class" not in a}


def test_strings_of_ops_are_listed():
    """A choice among words is a Literal, so that editors offer them and checkers refuse others."""
    loose = [(name, p.name) for name in ops.__all__
             for p in inspect.signature(getattr(ops, name)).parameters.values()
             if p.annotation is str]
    assert not loose
