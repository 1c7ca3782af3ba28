"""Every rule of the specification that has a behaviour has a test that carries its label."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
SPEC = "".join((ROOT / "docs" / f"{page}.md").read_text()
               for page in ("Spec", "SpecPapers", "SpecTests"))

# Entries of section 7 that are about the papers' texts, numbers or claims alone.
WITHOUT_BEHAVIOUR = {
    1: "perplexities of the papers that disagree",
    4: "wrong citations",
    6: "sizes of a model",
    10: "a slope in a table",
    15: "claims on a table",
    19: "claims on tables",
    20: "a printed index and a caption",
}


def names():
    """Names of all tests: pytest functions, functions in .mlir tests, C++ tests."""
    tests = ROOT / "tests"
    text = [path.read_text() for path in tests.rglob("test_*.py")]
    found = re.findall(r"^\s*def (test_\w+)", "\n".join(text), re.MULTILINE)
    for path in tests.rglob("*.mlir"):
        found += re.findall(r"@(\w+)", path.read_text())
    return found


NAMES = names()
EDGES = sorted({int(n) for n in re.findall(r"^\| E(\d+) \|", SPEC, re.MULTILINE)})
CONTRADICTIONS = sorted({int(n) for n in re.findall(r"^- C(\d+)\. ", SPEC, re.MULTILINE)})


def test_the_labels_were_found():
    assert EDGES == list(range(1, 22))
    assert CONTRADICTIONS == list(range(1, 22))


@pytest.mark.parametrize("number", EDGES)
def test_edge_rule_has_a_test(number):
    label = rf"_e{number}(_|$)"
    assert any(re.search(label, name) for name in NAMES), f"no test is named _e{number}"


@pytest.mark.parametrize("number", CONTRADICTIONS)
def test_contradiction_has_a_test_or_no_behaviour(number):
    tested = any(re.match(rf"test_c{number}_", name) for name in NAMES)
    assert tested != (number in WITHOUT_BEHAVIOUR)


def constraints():
    """<op>_c<n> of the table of section 3.12."""
    section = SPEC[SPEC.index("### 3.12") : SPEC.index("## 4.")]
    for line in section.splitlines():
        if not line.startswith("| ") or line.startswith("| op"):
            continue
        ops, text = [cell.strip() for cell in line.strip("|").split("|")][:2]
        parts = re.split(r"(?:^|\. )(\w+): ", text)
        groups = [(op, parts[0]) for op in ops.split("; ")] if len(parts) == 1 else []
        groups += list(zip(parts[1::2], parts[2::2]))
        for op, rules in groups:
            for number in re.findall(r"\bc(\d+) ", rules):
                yield op, int(number)


@pytest.mark.parametrize("op,number", sorted(set(constraints())))
def test_constraint_has_a_test(op, number):
    if op == "both":
        op = "adjacency_update"
    label = rf"{op}_c{number}(_|$)"
    assert any(re.search(label, name) for name in NAMES), f"no test is named {op}_c{number}"
