"""Every ```python fence of the manual runs as it stands."""

import pathlib
import re

import pytest
import torch

from moe_mlir import nn

ROOT = pathlib.Path(__file__).resolve().parents[3]
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def examples():
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text()
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 2
            yield pytest.param(page, line, match[1], id=f"{page.stem}:{line}")


@pytest.mark.parametrize("page,line,code", list(examples()))
def test_example(page, line, code):
    torch.manual_seed(0)
    # Blank lines first, so that a traceback shows the line of the page.
    exec(compile("\n" * (line - 1) + code, str(page), "exec"), {"__name__": page.stem})


def test_the_page_of_methods_names_every_router():
    page = (ROOT / "docs" / "Methods.md").read_text()
    table = page[: page.index("## ")]
    code = "".join(match[1] for match in FENCE.finditer(page))
    for name in nn.__all__:
        router = getattr(nn, name)
        if not isinstance(router, type) or not issubclass(router, nn.Router):
            continue
        if router in (nn.Router, nn.LinearRouter, nn.ComposedRouter):
            continue
        assert f"`{name}" in table, f"{name} has no row"
        assert re.search(rf"\bnn\.{name}\b", code), f"{name} has no snippet"
