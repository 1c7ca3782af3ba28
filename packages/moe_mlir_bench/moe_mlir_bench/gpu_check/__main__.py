"""`pack` collects the kernels; `run` checks and times them (see the package)."""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_mlir._support import files
from moe_mlir._support.command_line import Parser

from . import catalogue, machine
from .supervise import Report, Supervisor, summary


def run(options: Any) -> int:
    import torch

    rehearses = options.device == "sim"
    seconds = options.seconds or (7200 if rehearses else catalogue.BUDGET)
    names = options.groups and options.groups.split(",")
    groups = catalogue.groups(rehearses, seconds, names, options.only)
    print(catalogue.describe(groups), flush=True)
    if options.plan:
        return 0
    # This process is to have no context, which a case could spoil.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("expected a GPU that torch can use, found none; --device=sim runs the "
                         "checks in the simulator")
    report = Report(options.out)
    report.add(machine=machine.facts(options.device, options.chip), seconds=seconds)
    arguments = [f"--device={options.device}", f"--out={options.out}"]
    arguments += [f"--chip={options.chip}"] if options.chip else []
    supervisor = Supervisor(report, arguments)
    try:
        for group in groups:
            if group.name == "sanitizer":
                machine.sanitize(supervisor, report, group, options.device)
            elif group.units:
                supervisor.run_group(group)
    except KeyboardInterrupt:
        report.add(case="the run", group=group.name, problem="interrupted")
    return _finish(report, options)


def _finish(report, options) -> int:
    from . import benchmark

    if table := benchmark.table(report.lines):
        print(table)
    cases = report.cases()
    report.add(summary=summary(cases), end=time.strftime("%F %T %z"))
    print(f"{summary(cases)}; report in {report.folder}")
    if options.json:
        files.write(options.json, json.dumps(report.lines, indent=1) + "\n")
    return int(not cases or any(line["problem"] for line in cases))


def worker(options: Any) -> int:
    from .target import Target
    from .worker import serve

    return serve(Target(options.device, options.chip), options.out)


def fixtures(options: Any) -> int:
    """Copies what hardware answered to where the tests of the simulator find it."""
    from .vectors import replay

    found = sorted((options.report / "instructions").glob("*.npz"))
    if not found:
        raise SystemExit(f"expected vectors in {options.report / 'instructions'}, found none: run "
                         "the group 'instructions'")
    options.to.mkdir(parents=True, exist_ok=True)
    differing = 0
    for path in found:
        if problem := replay(path):
            differing += 1
            print(f"{path.stem}: {problem}")
        files.write(options.to / path.name, path.read_bytes())
    print(f"{len(found)} files in {options.to}; the simulator differs from {differing}")
    return 0


def _add_where(parser) -> None:
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda",
                        help="the GPU, or the simulator at a fraction of the sizes")
    parser.add_argument("--chip", help="run the kernels of this chip, such as sm_80 on a newer GPU")
    parser.add_argument("--out", type=Path, default=Path("gpu-check-report"),
                        help="folder of the report (default gpu-check-report)")


def parser() -> Parser:
    parser = Parser("gpu-check", "Checks and times the kernels on a machine that has a GPU and no compiler, in "
                    "eight minutes.\nWrites a report to a folder; exits with status 1 if a check "
                    "fails.", examples=(
        "moe gpu-check pack FOLDER            where the compiler is",
        "python FOLDER/run.py                 on the machine with the GPU",
        "moe gpu-check run --plan             list the checks and run nothing"))
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND",
                                     parser_class=argparse.ArgumentParser)
    packing = commands.add_parser("pack", help="collect kernels and code in a folder")
    packing.add_argument("folder", type=Path)
    packing.add_argument("--chips", default="sm_80,sm_90,sm_90a",
                         help="chips to compile for (default sm_80,sm_90,sm_90a)")
    running = commands.add_parser("run", help="check the kernels, then time them")
    _add_where(running)
    running.add_argument("--json", type=Path, help="also write the report to this file, as one list")
    running.add_argument("--seconds", type=float, default=0,
                         help=f"of the whole run (default {catalogue.BUDGET}; simulator 7200); what "
                              "does not fit is listed as not run")
    running.add_argument("--groups", help="of " + ", ".join(catalogue.SHARES) + ", and faults, "
                         "which fail on purpose (default all but faults)")
    running.add_argument("--only", default="", help="cases whose name contains this")
    running.add_argument("--plan", action="store_true", help="print cases and seconds, run nothing")
    _add_where(commands.add_parser("worker", help="run the cases that are named on the input"))
    making = commands.add_parser("fixtures", help="make tests of the simulator from a report")
    making.add_argument("report", type=Path, help="folder of a run")
    making.add_argument("--to", type=Path, default=Path("tests/python/sim/hardware"),
                        help="folder (default tests/python/sim/hardware)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    if options.command == "pack":
        from .pack import pack

        pack(options.folder, options.chips.split(","))
        return 0
    return {"run": run, "worker": worker, "fixtures": fixtures}[options.command](options)


if __name__ == "__main__":
    os.environ.setdefault("MOE_MLIR_CACHE", "0")
    sys.exit(main())
