"""Prints what each family of Triton kernels shows in the simulator.

    PYTHONPATH=BUILD/python python tests/python/sim/triton_kernels/table.py [FAMILY ..]
        [--chip CHIP ..] [--mutants]

A row is a family on a chip: launches, those without a false alarm, those with right results, CPU
seconds of the compilation and of the launches, and with `--mutants` (minutes) how many of the kernels
with a synchronisation less were caught. Those that redundancy.py proves to be correct kernels are
counted apart. The last lines are the sums, and every mutant that was neither caught nor proven.
"""

import argparse
import os
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mutation  # noqa: E402

import triton_kernels  # noqa: E402
from triton_kernels import CHIPS, FAMILIES, POLICIES, SEEDS  # noqa: E402
from triton_kernels.synchronisations import deletions, proof  # noqa: E402


def seconds():
    return sum(os.times()[:4])


def measure(family, chip):
    """Counts of one family on one chip."""
    row, begin = Counter(), seconds()
    kernels = family.compile(chip)
    row["compiled"] = seconds() - begin
    begin = seconds()
    for seed in SEEDS:
        for policy in POLICIES:
            reports, right = family.run(kernels, chip, seed, policy)
            row["runs"] += 1
            row["launches"] += len(reports)
            row["clean"] += not any(family.alarms(report) for report in reports)
            row["right"] += right
    row["ran"] = seconds() - begin
    return row


def break_kernels(family, chip, missed):
    """Counts of the mutants of one family on one chip."""
    row, cases = Counter(), {case.name: case for case in triton_kernels.CASES}
    jobs = [(i, m) for i, case in enumerate(triton_kernels.CASES)
            if case.family is family and case.chip == chip for m in deletions(case)]
    for outcome in mutation.run_mutants(jobs, workers=1, corpus="triton_kernels"):
        if outcome.how is None and proof(cases[outcome.case], outcome.key):
            row["redundant"] += 1
            continue
        row["mutants"] += 1
        row["caught"] += outcome.how is not None
        if outcome.how in (None, "hang", "crash", "invalid"):
            missed.append(outcome)
    return row


def line(name, chip, row):
    text = (f"{name:28} {chip:6} {row['clean']:4}/{row['runs']:<4} {row['right']:4}/{row['runs']:<4}"
            f" {row['compiled']:8.2f} {row['ran']:7.2f}")
    if row["mutants"] or row["redundant"]:
        text += f" {row['caught']:5}/{row['mutants']:<5} {row['redundant']:9}"
    print(text, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--chip", action="append", choices=CHIPS)
    parser.add_argument("--mutants", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.families) - set(FAMILIES):
        parser.error(f"expected families out of {sorted(FAMILIES)}, found {sorted(unknown)}")
    print(f"{'family':28} {'chip':6} {'clean':>9} {'right':>9} {'compile s':>9} {'run s':>6}"
          + (f" {'caught':>11} {'redundant':>9}" if options.mutants else ""))
    total, missed = Counter(), []
    for name in options.families or FAMILIES:
        for chip in options.chip or CHIPS:
            if chip in FAMILIES[name].chips:
                row = measure(FAMILIES[name], chip)
                if options.mutants:
                    row += break_kernels(FAMILIES[name], chip, missed)
                line(name, chip, row)
                total += row
    line("sum", "", total)
    for outcome in missed:
        print(f"not caught: {outcome.name} line {outcome.line}: {outcome.before} {outcome.how or ''}")


if __name__ == "__main__":
    main()
