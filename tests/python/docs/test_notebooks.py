"""The notebooks of the tutorials: the page's blocks as cells, which print what the page shows."""

import json
import os
import sys
from pathlib import Path

import pytest

import moe_mlir

ROOT = Path(__file__).resolve().parents[3]
BUILD = Path(moe_mlir.__file__).absolute().parents[2]
sys.path.insert(0, str(ROOT / "utils"))

import make_notebooks  # noqa: E402
from make_notebooks import agrees, notebook_of, printed_by  # noqa: E402

NEEDED = ("nbclient", "nbformat", "ipykernel")
PAGES = [ROOT / "docs" / f"{name}.md" for name in make_notebooks.TUTORIALS]


@pytest.fixture
def jupyter(monkeypatch):
    """What executes notebooks, with the tools, headers and libraries of the build tree."""
    for name in NEEDED:
        pytest.importorskip(name, reason=f"{name} is not installed; requirements.txt pins it")
    path = [str(BUILD / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    monkeypatch.setenv("PATH", os.pathsep.join(path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def page_of(folder, text):
    page = folder / "Tutorial.md"
    page.write_text(text)
    return page


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def disagreements(notebook):
    """(line of the page, what it shows, what the cell printed) where the two differ."""
    for cell in code_cells(notebook):
        page = cell["metadata"]["moe_mlir"]
        if "printed" in page and not agrees(page["printed"], printed_by(cell)):
            yield page["line"], page["printed"], printed_by(cell)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_notebook_prints_what_its_page_shows(page, tmp_path, jupyter):
    if page.stem == "TritonKernels":
        pytest.importorskip("triton", reason="Triton is not installed; requirements.txt pins it "
                            "for Linux on x86-64")
    done = make_notebooks.execute(notebook_of(page), tmp_path)
    assert list(disagreements(done)) == []
    assert any(cell["outputs"] for cell in code_cells(done))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_notebook_has_every_block_of_its_page(page):
    blocks = [body for language, body in make_notebooks.FENCE.findall(page.read_text())
              if language in ("python", "sh")]
    sources = "".join(cell["source"] + "\n" for cell in notebook_of(page)["cells"])
    assert blocks and [body for body in blocks if body not in sources] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_notebook_is_a_valid_one(page):
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed; "
                                   "requirements.txt pins it")
    nbformat.validate(nbformat.from_dict(notebook_of(page)))


def test_a_wrong_output_on_a_page_is_found(tmp_path, jupyter):
    page = page_of(tmp_path, "# A\n\n```python\nprint(1 + 1)\n```\n```text\n3\n```\n")
    done = make_notebooks.execute(notebook_of(page), tmp_path)
    assert list(disagreements(done)) == [(4, "3\n", "2\n")]


def test_cells_share_files_and_names(tmp_path, jupyter):
    page = page_of(tmp_path, """# A

```python
# two.py
TWO = 2
```

```python
from two import TWO
```

```sh
python -c "import two; print(two.TWO)"
```
```text
2
```

```python
print(TWO + 1)
```
```text
3
```
""")
    assert list(disagreements(make_notebooks.execute(notebook_of(page), tmp_path))) == []


def test_links_to_pages_become_text_and_pictures_stay(tmp_path):
    page = page_of(tmp_path, "# A\n\n[B](B.md#c), [torch](https://pytorch.org).\n\n"
                   "```python\nwrite(\"drawn.svg\")\n```\n\n![a chart](drawn.svg)\n\n"
                   "![the compiler](architecture.svg)\n")
    cells = [cell["source"] for cell in notebook_of(page)["cells"]]
    assert cells[1] == "B, [torch](https://pytorch.org)."
    assert cells[3].endswith('display(SVG("drawn.svg"))')  # what the block wrote
    assert cells[4].startswith("![the compiler](data:image/svg+xml;base64,")


def test_files_of_the_examples_come_with_a_notebook():
    notebook = notebook_of(ROOT / "docs" / "Deploying.md")
    written = [cell["source"].split()[1] for cell in code_cells(notebook)
               if cell["source"].startswith("%%writefile")]
    assert {"route.cpp", "router.mlir", "generate.cpp", "torch_model.cpp"} <= set(written)
    assert len(written) == len(set(written))


def test_an_executed_notebook_is_kept_while_its_page_is_the_same(tmp_path, jupyter):
    page = page_of(tmp_path, "# A\n\n```python\nprint(1)\n```\n")
    path = make_notebooks.write_notebook(page, tmp_path / "out", run=True)
    first = path.stat().st_mtime_ns
    assert json.loads(path.read_text())["cells"][1]["outputs"][0]["text"] == "1\n"
    make_notebooks.write_notebook(page, tmp_path / "out", run=True)
    assert path.stat().st_mtime_ns == first
    page.write_text(page.read_text().replace("print(1)", "print(2)"))
    make_notebooks.write_notebook(page, tmp_path / "out", run=True)
    assert json.loads(path.read_text())["cells"][1]["outputs"][0]["text"] == "2\n"
