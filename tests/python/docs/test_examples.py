"""Every code block of the manual and of the README runs as it stands.

A page with commands, files or output is a way that a reader walks: its blocks run in
order, in one folder that holds the files of examples/deploy. A block that
begins with a comment naming a file (`# model.py`, `// router.mlir`) is that
file. A ```text block is what the block before it prints, `...` being anything.
The Python blocks of the other pages run each on their own.
"""

import contextlib
import io
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import torch
from support import forked_python

import moe_mlir
from moe_mlir import nn

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "utils"))

from make_notebooks import FENCE, FILE, agrees  # noqa: E402

BUILD = pathlib.Path(moe_mlir.__file__).absolute().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
# Commands that set up or test everything: what this suite itself is run by, or what runs them.
ELSEWHERE = {
    "./run": "run",
    "./test": "test",
    "./bench": "bench",
    "./setup.sh": "setup.sh",
    "utils/build_wheel.sh": "utils/build_wheel.sh",
    "pip install": "tests/python/packaging/test_wheel.py",
    "cmake -G Ninja": "CMakePresets.json",
    # With checkpoints of a network.
    "vllm serve": "tests/python/serving/test_serving.py",
}
# What a block imports that is not installed everywhere, and how it comes to be.
OPTIONAL = {
    "triton": "Triton is not installed; requirements.txt pins it for Linux on x86-64",
    "vllm": "needs vLLM: utils/check_vllm.py",
    "onnxruntime": "onnxruntime is not installed; requirements.txt pins it",
    "onnxscript": "onnxscript is not installed; requirements.txt pins it",
    "peft": "PEFT is not installed; requirements.txt pins it",
    "lightning": "Lightning is not installed; requirements.txt pins it",
    "kernels": "kernels is not installed; requirements.txt pins it",
    "megatron": "megatron-core is not installed; requirements.txt pins it",
    "tensorboard": "TensorBoard is not installed; requirements.txt pins it",
    "iree.compiler": "needs IREE: pip install iree-base-compiler iree-base-runtime",
}
# What a block calls that imports one of these.
IMPORTS = {"moe_mlir.onnx.": "import onnxscript", "torch.utils.tensorboard": "import tensorboard"}


def fences(page):
    """(line, language, body) of every block."""
    text = page.read_text()
    for match in FENCE.finditer(text):
        yield text.count("\n", 0, match.start()) + 2, match[1], match[2]


def is_walk(page):
    return any(language in ("sh", "text") or FILE.match(body) for _, language, body in fences(page))


def require(code):
    code += "".join(f"\n{line}" for call, line in IMPORTS.items() if call in code)
    for package, reason in OPTIONAL.items():
        if re.search(rf"^\s*(import|from) {package}\b", code, re.MULTILINE):
            pytest.importorskip(package, reason=reason)


def execute(page, line, code):
    require(code)
    torch.manual_seed(0)
    # Blank lines first, so that a traceback shows the line of the page.
    exec(compile("\n" * (line - 1) + code, str(page), "exec"), {"__name__": page.stem})


def single_examples():
    for page in PAGES:
        if not is_walk(page):
            for line, language, code in fences(page):
                if language == "python":
                    yield pytest.param(page, line, code, id=f"{page.stem}:{line}")


@pytest.mark.parametrize("page,line,code", list(single_examples()))
def test_example(page, line, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(BUILD / "bin"), prepend=os.pathsep)
    execute(page, line, code)


# ------------------------------------------------------------- pages with commands


class Walk:
    """One reader: a folder, an environment, and what was printed last."""

    def __init__(self, page, folder):
        self.page, self.folder, self.printed = page, folder, ""
        # Forks: `python`, and what moe-compile reads torch programs with.
        path = [forked_python().parent, BUILD / "bin", pathlib.Path(sys.executable).parent,
                os.environ["PATH"]]
        # What utils/version_runs.py puts in front stays there.
        paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        if str(BUILD / "python") not in paths:
            paths.append(str(BUILD / "python"))
        self.environment = dict(os.environ, PATH=os.pathsep.join(map(str, path)),
                                PYTHONPATH=os.pathsep.join(paths), OMP_NUM_THREADS="1")

    def step(self, line, language, body):
        name = FILE.match(body)
        if name:
            require(body)
            (self.folder / name[1]).write_text(body)
        elif language == "sh":
            self.run_commands(line, body)
        elif language == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                execute(self.page, line, body)
            self.printed = printed.getvalue()
        elif language == "text" and self.printed:
            self.compare(line, body)
        elif language not in ("text", "mlir", "properties"):  # test_editor_settings.py has the last
            pytest.fail(f"{self.page.name}:{line}: nothing runs this {language} block")

    def run_commands(self, line, body):
        commands = []
        for command in body.replace("\\\n", " ").splitlines():
            known = [start for start in ELSEWHERE if command.startswith(start)]
            if known:
                assert (ROOT / ELSEWHERE[known[0]]).exists()
            else:
                commands.append(command)
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", "\n".join(commands)],
                              cwd=self.folder, env=self.environment, capture_output=True,
                              text=True, timeout=300)
        assert done.returncode == 0, f"{self.page.name}:{line}: {done.stderr}"
        self.printed = done.stdout

    def compare(self, line, body):
        assert agrees(body, self.printed), (
            f"{self.page.name}:{line}: expected\n{body}found\n{self.printed}")
        self.printed = ""


@pytest.mark.drawn(6)
@pytest.mark.parametrize("page", [p for p in PAGES if is_walk(p)], ids=lambda p: p.stem)
def test_page(page, tmp_path, monkeypatch):
    for example in (ROOT / "examples" / "deploy").iterdir():
        shutil.copy(example, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    if re.search(r"\bmoe cache\b", page.read_text()):  # what it prints depends on what is there
        monkeypatch.setenv("MOE_MLIR_CACHE_DIR", str(tmp_path / "cache"))
    before = set(sys.modules)
    walk = Walk(page, tmp_path)
    try:
        for line, language, body in fences(page):
            walk.step(line, language, body)
    finally:
        # The next page may write a file of the same name.
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
                del sys.modules[name]


# ------------------------------------------------------------------------ content


def test_the_page_of_methods_names_every_router():
    page = (ROOT / "docs" / "Methods.md").read_text()
    table = page[: page.index("## ")]
    code = "".join(body for _, language, body in fences(ROOT / "docs" / "Methods.md")
                   if language == "python")
    for name in nn.__all__:
        router = getattr(nn, name)
        if not isinstance(router, type) or not issubclass(router, nn.Router):
            continue
        if router in (nn.Router, nn.LinearRouter, nn.ComposedRouter):
            continue
        assert f"`{name}" in table, f"{name} has no row"
        assert re.search(rf"\bnn\.{name}\b", code), f"{name} has no snippet"


def test_the_manual_lists_every_environment_variable():
    from moe_mlir._support.environment import VARIABLES

    page = (ROOT / "docs" / "Troubleshooting.md").read_text()
    rows = dict(re.findall(r"^\| `(MOE_MLIR_\w+)` \| (.*) \|$", page, re.MULTILINE))
    assert rows == VARIABLES


def test_every_environment_variable_that_the_product_reads_is_listed():
    from moe_mlir._support import environment

    listed = {*environment.VARIABLES, *environment._OF_THE_SOURCE_TREE}
    sources = [p for folder in
               ("python", "packages", "lib", "include", "simulator", "tools") for p in
               (ROOT / folder).rglob("*") if p.suffix in (".py", ".cpp", ".h")]
    read = set()
    for path in sources:
        read |= set(re.findall(r"\bMOE_MLIR_[A-Z_]+[A-Z]\b", path.read_text()))
    assert read <= listed, f"not in moe_mlir._support.environment: {sorted(read - listed)}"


def test_the_index_lists_every_page():
    index = (ROOT / "docs" / "index.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.stem == "index" or re.search(rf"^{page.stem}$", index, re.MULTILINE), page.name
