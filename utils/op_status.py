#!/usr/bin/env python3
"""Writes the status of every op from the reports of the test suites.

    op_status.py OUT.md REPORT.xml ...

The reports are JUnit files, as `./test` leaves them in build/tests. A test
counts for an op if its name, its parameters or its file name the op; the
column follows from what the test says it is about. `12` means 12 tests passed,
`11/12` that one of 12 failed, an empty cell that none ran.
"""

import argparse
import pathlib
import re
import sys
import xml.etree.ElementTree as ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Column -> what the test's path or name holds; the first that fits takes the test.
COLUMNS = {
    "IR": r"\.mlir\b",
    "reference": r"test_reference|Reference/",
    "gradient": r"gradient|backward|gradcheck",
    "torch": r"opcheck|test_torch_library|fake_results",
    "determinism": r"determinism|thread_count|run_to_run|batch",
    "errors": r"test_op_errors|refuse|_c\d",
    "properties": r"propert|any_seed|any_special",
    "kernel": r"",
}
EDGE = re.compile(r"(?:^|[_@\[:])e(\d{1,2})(?=$|[_\]:-])")


def ops():
    """The ops of the package's contract: the functions of the reference that docs/Spec.md names."""
    spec = (ROOT / "docs" / "Spec.md").read_text()
    named = set(re.findall(r"\bmoe\.([a-z_0-9]+)", spec))
    reference = ROOT / "python" / "moe_mlir" / "reference"
    defined = set()
    for path in reference.glob("*.py"):
        defined |= set(re.findall(r"^def ([a-z]\w*)", path.read_text(), re.MULTILINE))
    also = {"dispersion_weights", "ac_logits", "adjacency_update", "cosine_logits",
            "hyper_router", "grouped_topk", "z_loss"}  # fmt: skip
    return sorted((named | also) & defined)


def cases(report):
    """(text that identifies the test, whether it passed) of those that ran."""
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is None:
            failed = case.find("failure") is not None or case.find("error") is not None
            yield f"{case.get('classname', '')}::{case.get('name', '')}", not failed


def column_of(test):
    return next(name for name, pattern in COLUMNS.items() if re.search(pattern, test))


def count(reports):
    """{op: {column: [passed, ran]}} and {op: set of edge rules with a passing test}."""
    table = {op: {name: [0, 0] for name in COLUMNS} for op in ops()}
    edges = {op: set() for op in table}
    # A word of its own, also with - for _ as in the names of .mlir files.
    patterns = {
        op: re.compile(rf"(?<![a-z]){op.replace('_', '[_-]')}(?![a-z])") for op in table
    }
    for report in reports:
        for test, passed in cases(report):
            for op, pattern in patterns.items():
                if pattern.search(test):
                    cell = table[op][column_of(test)]
                    cell[0] += passed
                    cell[1] += 1
                    if passed:
                        edges[op] |= {int(n) for n in EDGE.findall(test)}
    return table, edges


def markdown(table, edges):
    lines = [
        "# Status of the ops",
        "",
        "Tests that passed, by op, from the last run of the suites (`utils/op_status.py`).",
        "",
        "| op | " + " | ".join(COLUMNS) + " | edge rules |",
        "|---" * (len(COLUMNS) + 2) + "|",
    ]
    for op, columns in table.items():
        cells = [_cell(*counts) for counts in columns.values()]
        rules = ", ".join(f"E{n}" for n in sorted(edges[op]))
        lines.append(f"| {op} | {' | '.join(cells)} | {rules} |")
    return "\n".join(lines) + "\n"


def _cell(passed, ran):
    return "" if not ran else str(passed) if passed == ran else f"{passed}/{ran}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("reports", type=pathlib.Path, nargs="+")
    args = parser.parse_args()
    found = [report for report in args.reports if report.exists()]
    if not found:
        names = ", ".join(map(str, args.reports))
        print(f"error: expected a report in {names}, found none: run ./test", file=sys.stderr)
        return 1
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(markdown(*count(found)))
    print(f"wrote {args.out} from {len(found)} report(s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
