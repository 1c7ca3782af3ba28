"""The manual builds without a warning, and has what it promises; one build serves all tests."""

import fcntl
import html
import html.parser
import inspect
import os
import re
import urllib.parse
from pathlib import Path

import pytest
from support import run_python

import moe_mlir
from moe_mlir import distributed, hf, metrics, nn, plots, reference, sim

ROOT = Path(__file__).resolve().parents[3]
BUILD = Path(moe_mlir.__file__).absolute().parents[1]


@pytest.fixture(scope="module")
def manual(tmp_path_factory):
    """The folder of the pages, which the workers of a run share."""
    pytest.importorskip("furo", reason="the manual's theme is not installed; requirements.txt "
                        "pins it")
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    pages = root / "manual"
    with open(root / "manual.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (pages / "objects.inv").exists():
            build(pages, root / "doctrees")
    return pages


def build(pages, doctrees):
    done = run_python("-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d", doctrees,
                      ROOT / "docs", pages)
    assert done.returncode == 0, done.stderr


def inventory(manual):
    """Kind -> names of all that has an anchor."""
    from sphinx.util.inventory import InventoryFile

    with open(manual / "objects.inv", "rb") as file:
        return {kind: set(names) for kind, names in
                InventoryFile.load(file, "", os.path.join).items()}


def public_names():
    for module in (moe_mlir, nn, hf, metrics, plots, distributed, sim, reference):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isroutine(value) or inspect.isclass(value):
                yield f"{module.__name__}.{name}"


def test_the_manual_has_every_public_function_and_class(manual):
    found = set().union(*(names for kind, names in inventory(manual).items()
                          if kind.startswith("py:")))
    names = set(public_names())
    assert len(names) > 100
    # The same function under two names is on one page.
    assert sorted(names - found - {"moe_mlir.update_routers"}) == []


def test_the_manual_has_every_op_of_the_dialect(manual):
    found = inventory(manual)["std:label"]
    for name in ("moe.topk_renorm", "moe.softmax_mix_backward_dq", "moe.assert",
                 "pass-moe-tile-and-fuse", "pass-convert-moe-to-gpu"):
        assert name in found
    assert {f"moe.{op}" for op in moe_mlir.ops.__all__} - found == {
        "moe.attention", "moe.grouped_topk"}  # other names of softmax_mix and topk_renorm


def test_the_manual_has_the_functions_of_cpp(manual):
    """All of them: test_cpp_reference.py."""
    found = inventory(manual)
    assert {"moe::runtime::Artifact::getFunction", "moe::runtime::Decoder::run", "moe_call",
            "mlir::moe::registerEverything"} <= found["cpp:function"]
    assert "moe::runtime::GpuDevice" in found["cpp:class"]


def test_code_of_mlir_has_colours(manual):
    page = (manual / "reference" / "dialect" / "Selection.html").read_text()
    assert '<span class="nf">moe.topk_renorm</span>' in page


class _Page(html.parser.HTMLParser):
    """The anchors and the links of a page."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links = set(), []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if values.get("id"):
            self.ids.add(values["id"])
        for name in ("href", "src"):
            if values.get(name):
                self.links.append(values[name])


@pytest.fixture(scope="module")
def pages(manual):
    return {path: _Page(path) for path in sorted(manual.rglob("*.html"))}


def dead_links(pages):
    """(page, link) of each link within the manual that leads nowhere."""
    for path, page in pages.items():
        for link in page.links:
            target = urllib.parse.urlsplit(link)
            if target.scheme or target.netloc:
                continue
            file = path if not target.path else (path.parent / target.path).resolve()
            anchor = urllib.parse.unquote(target.fragment)
            if not file.exists() or anchor and file in pages and anchor not in pages[file].ids:
                yield path.name, link


def test_no_link_within_the_manual_is_dead(pages):
    assert sum(len(page.links) for page in pages.values()) > 5000
    assert list(dead_links(pages)) == []


def test_a_dead_link_is_found(tmp_path):
    (tmp_path / "a.html").write_text('<p id="x"></p><a href="#x"></a><a href="#y"></a>'
                                     '<a href="b.html"></a><a href="https://example.org/#z"></a>')
    pages = {tmp_path / "a.html": _Page(tmp_path / "a.html")}
    assert list(dead_links(pages)) == [("a.html", "#y"), ("a.html", "b.html")]


def test_links_from_outside_into_the_manual_are_alive(manual, pages):
    """Those of README.md and the other pages at the root, which lead to the sources of pages."""
    found = 0
    for source in ROOT.glob("*.md"):
        for name, anchor in re.findall(r"\]\(docs/(\w+)\.md(?:#([\w-]+))?\)", source.read_text()):
            found += 1
            page = pages[manual / f"{name}.html"]
            assert not anchor or anchor in page.ids, f"{source.name}: docs/{name}.md#{anchor}"
    assert found > 10


def test_no_product_in_a_formula_is_emphasis(pages):
    """`4*16*257` without a code span."""
    found = [(path.name, match[0]) for path in pages for match in
             re.finditer(r"\w<em>[^<]*</em>|<em>[^<]*</em>\w", path.read_text())]
    assert found == []


def links(path, text):
    """Where links with this text lead to from a page."""
    return set(re.findall(rf'href="([^"]+)"[^>]*>(?:<[^>]+>)*{re.escape(text)}(?:</\w+>)*</a>',
                          path.read_text()))


@pytest.mark.parametrize("page, text, target", [
    ("Methods", "E17", "Spec.html#e17"),
    ("Methods", "C13", "SpecPapers.html#c13"),
    ("Methods", "P4", "#papers"),
    ("SpecTests", "E16", "Spec.html#e16"),
    ("Spec", "Trap 7", "SpecTests.html#trap-7"),
    ("Spec", "section 7", "SpecPapers.html#contradictions-and-how-they-are-resolved"),
    ("OwnRouter", "E3", "Spec.html#e3"),
    ("Methods", "topk_renorm", "reference/Selection.html#moe_mlir.topk_renorm"),
    ("Methods", "SymphonySMoE", "reference/Routers.html#moe_mlir.nn.SymphonySMoE"),
    ("HuggingFace", "moe_mlir.unpack_experts(model)",
     "reference/Weights.html#moe_mlir.unpack_experts"),
])
def test_names_and_labels_are_links(manual, page, text, target):
    found = links(manual / f"{page}.html", html.escape(text))
    assert found == {target}


@pytest.mark.parametrize("page, texts", [
    ("Statistics", ["that mean before the cap",  # the fourth row of a table of values
                    'href="Attributes.html#attribute-moe-dispersion-scale"']),
    ("Mixing", ["+</span> <span class=\"pre\">LSE(posterior"]),  # a code span of two lines
    ("Attributes", ["eq7", "wgmma", "How a kernel runs an op"]),
    ("Transforms", ["Number of ops that could not be converted"]),
])
def test_what_definitions_say_is_whole(manual, page, texts):
    text = (manual / "reference" / "dialect" / f"{page}.html").read_text()
    assert [part for part in texts if part not in text] == []
