"""The manual reads as PyTorch's and LLVM's do: turns of phrase that were replaced stay away."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
TEXTS = [*PAGES, *(ROOT / "python" / "moe_mlir").rglob("*.py"),
         *(ROOT / "packages").rglob("*.py"), *ROOT.glob("tools/**/*.cpp"),
         *ROOT.glob("include/**/*.td")]

# What was written, and what a reader understands.
RETIRED = {
    r"raises? the routers": "replaces routers with compiled ops",
    r"leaves the rest to": "Inductor compiles the rest",
    r"where a goal is missed, says": "benchmarks and known gaps:",
    r"without a finding": "validated in simulation",
    r"no time on a GPU yet": "not yet benchmarked on hardware",
    r"module a method": "one module per published method",
    r"the house\b": "the code",
    r"model of somebody else": "an existing model",
    r"Is it all there": "Verify the installation",
    r"\| wish \| do \|": "goal, command",
    r"(asks?|tells?|and) how sure|tells as much on its way": "needs per-head entropy, returned in the same pass",
    r"made\s+on the way": "intermediate probabilities and logits",
    r"tokens that mix with themselves meet once": "Why is each token pair computed once?",
    r"What surrounds a kernel": "Call overhead and compile time",
}


@pytest.mark.parametrize("pattern, instead", RETIRED.items(), ids=RETIRED)
def test_a_retired_phrase_is_not_used(pattern, instead):
    found = [f"{path.relative_to(ROOT)}: {match[0]}" for path in TEXTS
             for match in re.finditer(pattern, path.read_text())]
    assert not found, f"expected for example '{instead}' in their place"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_no_line_is_a_comment_of_the_markdown_dialect(path):
    """MyST drops lines that begin with a percent sign, without a warning."""
    assert not re.findall(r"^%.*", path.read_text(), re.MULTILINE)
