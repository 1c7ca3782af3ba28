"""One vocabulary: the words of docs/Glossary.md, none of those that they replaced."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
FOLDERS = ("lib", "include", "simulator", "python", "packages", "docs")
SUFFIXES = (".cpp", ".h", ".td", ".py", ".md")

# What was once written, and the term that is written instead.
RETIRED = {
    r"(?<!basic )\b[pP]lanes?\b|\w[pP]lanes?\b": "terms",
    r"\b(other|own)(Rows?|Values|Features|Planes|Facts)\b|\bnum(Own|Others)\b": "row, column",
    r"PairStrips|\bkMaxStrips\b|\bperStrip\b|SoftmaxMixStrips": "split",
    r"(?<![rR]e)[tT]urned|\bpaysToTurn\b|\bbool exchanged\b|\.exchanged\b": "transposed",
    r"populateAdjacencyToCPU": "co-selections",
    r"\bforEachMeeting\b|SoftmaxMixSweep|\w*Sweep(Role|Kernel|Plan|Buffers)\b": "role, gradient",
}


def sources():
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in SUFFIXES and path.is_file():
                yield path


SOURCES = {path: path.read_text() for path in sources()}


def found(pattern, texts):
    return [f"{name}: {match[0]}" for name, text in texts.items()
            for match in re.finditer(pattern, text)]


@pytest.mark.parametrize("pattern, term", RETIRED.items(), ids=RETIRED.values())
def test_retired_words_are_not_used(pattern, term):
    texts = {str(path.relative_to(ROOT)): text for path, text in SOURCES.items()}
    assert len(texts) > 300
    assert not found(pattern, texts), f"expected '{term}' in their place"


@pytest.mark.parametrize("text", ["bf16 planes", "kPlanes",
                                  "int64_t otherRows", "numOthers", "PairStrips strips",
                                  "class SelfSweepKernel", "bool isTurned", "kTurnedSteps",
                                  "getTurnedRowBytes()", "turned first", "rule.exchanged", "populateAdjacencyToCPUPatterns"])
def test_retired_words_would_be_found(text):
    assert any(found(pattern, {"x": text}) for pattern in RETIRED)


def test_every_term_is_explained_once_and_in_order():
    page = (ROOT / "docs" / "Glossary.md").read_text()
    terms = re.findall(r"^\| ([^|]+) \| (?:routing|mixing|kernels) \| [^|]+ \|$", page, re.MULTILINE)
    assert len(terms) > 30 and len(set(terms)) == len(terms)
    assert terms == sorted(terms, key=str.lower)
