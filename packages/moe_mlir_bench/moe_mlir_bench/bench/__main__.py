"""Side-by-side benchmark on this CPU: ours, torch eager, torch.compile, a peer.

Each result is checked against float64 before anything is timed; the rivals then
take turns on fresh inputs in one process. Times of one thread are its own CPU
time, which a busy machine disturbs least, and the least of all rounds is
reported; `ratio` is the better of eager and Inductor over ours, `%` the share of
the limit formula's time, from peaks that were measured just before.
"""

import json
import sys
import warnings
from collections.abc import Sequence

import torch

from moe_mlir._support import files
from moe_mlir._support.command_line import Parser

from . import machine as machines
from . import page, regression
from .cases import ROWS
from .rows import Context, Skipped


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    rows = _choose(options)
    if options.list:
        print("\n".join(row.title for row in rows))
        return 0
    if options.records:
        _write([record for file in options.records for record in _read(file)], options)
        return 0
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    warnings.filterwarnings("ignore", message="index_reduce.* is in beta")
    machine = machines.measure()
    print(f"{machine.sentence()}; torch {torch.__version__}, {options.threads} thread(s)")
    context = Context(
        machine, options.threads, 5 if options.quick else 15, not options.no_inductor
    )
    records, wrong = _measure(rows, context, options.json)
    _write(records, options)
    slower = regression.compare(records, options.compare) if options.compare else []
    for line in slower:
        print(f"regression: {line}")
    return 1 if wrong or slower else 0


def _read(path):
    """Records of an earlier run, with today's reasons for goals that are missed."""
    reasons = {row.title: row.why for row in ROWS}
    with open(path) as file:
        records = json.load(file)
    if not records:
        sys.exit(f"bench: expected records in {path}, found none")
    return [{**r, "why": reasons.get(r["title"], r["why"])} for r in records]


def _write(records, options):
    if options.page:
        page.write_page(options.page, records)
    if options.chart:
        files.write(options.chart, page.draw_chart(records))


def parser() -> Parser:
    parser = Parser("bench", __doc__, examples=(
        "moe bench --quick                        shapes with a stated goal",
        "moe bench --op topk_renorm --no-inductor",
        "moe bench --list                         print the titles of the rows"))
    add = parser.add_argument
    add("--quick", action="store_true", help="only the shapes with a stated goal, fewer rounds")
    add("--json", metavar="FILE", help="also write the records as JSON")
    add("--op", metavar="NAME", help="only this op")
    add("--rows", metavar="PATTERN", help="only rows whose title contains this text")
    add("--threads", type=int, default=1, help="threads of every rival; several: wall clock")
    add("--page", metavar="FILE", help="write the machine's part of this page, and its chart")
    add("--chart", metavar="FILE", help="write the chart as SVG")
    add("--compare", metavar="FILE", help="fail where a ratio fell behind this earlier JSON")
    add("--records", metavar="FILE", nargs="+", help="write page and chart from the JSON of "
        "earlier runs, of rows that are in several from the last; measure nothing")
    add("--list", action="store_true", help="print the titles of the rows and stop")
    add("--no-inductor", action="store_true", help="leave out torch.compile, which takes longest")
    return parser


def _parse(argv):
    options = parser().parse_args(argv)
    if options.threads < 1:
        parser().error(f"expected --threads to be at least 1, found {options.threads}")
    return options


def _choose(options):
    # A row that is asked for by name is measured even if it is not quick.
    rows = [r for r in ROWS if r.quick or not options.quick or options.rows]
    if options.op:
        known = sorted({r.op for r in ROWS})
        if options.op not in known:
            sys.exit(f"bench: expected --op to be one of {', '.join(known)}, found '{options.op}'")
        rows = [r for r in rows if r.op == options.op]
    if options.rows:
        rows = [r for r in rows if options.rows in r.title]
        if not rows:
            sys.exit(f"bench: expected --rows to be part of a title, found '{options.rows}'; "
                     "--list prints the titles")
    return rows


def _measure(rows, context, file):
    _print_header()
    records: list[dict] = []
    wrong = 0
    for row in rows:
        try:
            records.append({**row.measure(context), "machine": context.machine.facts()})
        except AssertionError as error:
            wrong += 1
            print(f"{row.title}: wrong result, not timed: {error}")
            continue
        except Skipped as reason:
            print(f"{row.title}: not measured: {reason}")
            continue
        _print_row(records[-1])
        if file:
            _save(records, file)  # after each row: a run of hours may be interrupted
    return records, wrong


def _save(records, path):
    files.write(path, json.dumps(records, indent=1) + "\n")


# ----------------------------------------------------------------------- table

_COLUMNS = (
    ("ours us", "ours_us", 1),
    ("median", "ours_median_us", 1),
    ("eager us", "eager_us", 1),
    ("inductor", "inductor_us", 1),
    ("peer us", "peer_us", 1),
    ("ratio", "ratio", 2),
    ("limit", "limit_us", 1),
    ("%", "percent_of_limit", 1),
    ("MB", "peak_mb", 1),
)


def _print_header():
    print(f"{'row':<76}" + "".join(f"{name:>10}" for name, _, _ in _COLUMNS) + "  goals")


def _print_row(record):
    values = (
        f"{'-':>10}" if record[field] is None else f"{record[field]:>10.{digits}f}"
        for _, field, digits in _COLUMNS
    )
    goals = (
        f"{'MISSED ' if page.is_missed(g) else ''}{g['goal']} "
        + ("(not measured)" if g["found"] is None else f"({g['found']:.4g})")
        for g in record["goals"]
    )
    print(f"{record['title']:<76}{''.join(values)}  {'; '.join(goals)}", flush=True)
    if record["rivals_us"]:
        times = (f"{name} {us:.1f}" for name, us in record["rivals_us"].items())
        missing = (f"{name}: {reason}" for name, reason in record["missing"].items())
        print(f"    {record['read_gbytes']:.1f} GB/s of weights, {record['gflops']:.1f} GFLOP/s; "
              f"rivals, us: {', '.join(times)}", *missing, sep="\n    ", flush=True)


if __name__ == "__main__":
    sys.exit(main())
