"""`python -m moe_mlir_bench.models --speed [NAME ..]`: models of real widths, beside eager and Inductor.

Random weights, attention as users run it, a cache of keys and values of fixed
size: the tokens/s of a prompt and of greedy steps after it, the seconds from a
model in memory to its first token, and what a way to run it adds to the resident
memory. The last two come from a process of each way's own, which begins with
empty caches on disk; a second one finds there what the first one left. Then
all ways run in one process, in turns, on the same weights, and their times are
CPU times of the calling thread.
"""

import argparse
import contextlib
import gc
import json
import logging
import multiprocessing
import os
import shlex
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moe_mlir._support import files
from moe_mlir._torch import dynamo
from moe_mlir.frontends.dynamo import register

from ..bench.machine import machine_name
from . import cpp_program, page
from .cpp_program import CppProgram
from .near_ties import judge
from .real_widths import DTYPES, SIZES, build
from .speed_page import Row, section, table
from .ways import FORMS, Way, Weights

WAYS = (*FORMS, cpp_program.NAME, cpp_program.PACKED)


@dataclass(frozen=True)
class Job:
    """One model and what is asked of it; processes of their own get it."""

    name: str
    dtype: str
    sizes: dict[str, Any]
    prompt: int
    steps: int
    rounds: int
    threads: int
    room: int       # of a cache, in tokens
    folder: str     # for caches and artifacts, one folder a way

    def folder_of(self, way: str) -> Path:
        folder = Path(self.folder) / str(WAYS.index(way))
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder


def measure(name: str, dtype: str, prompt: int, steps: int, rounds: int,
            sizes: dict[str, Any] | None = None, ways: Sequence[str] = WAYS, threads: int = 1,
            log: Callable[[str], object] = lambda text: None, room: int | None = None) -> list[Row]:
    """The rows of one model in these ways; `sizes` replace its own.

    Caches have room for all its tokens, or for `room`.
    """
    sizes = sizes or {}
    layers = sizes.get("num_hidden_layers")
    label = name if layers is None else f"{name}, {layers} layer{'s' * (layers != 1)}"
    if room is not None:
        label += f", room for {room}"
    rows = [Row(label, dtype, way) for way in WAYS if way in ways]
    with tempfile.TemporaryDirectory(prefix="moe-mlir-speed-") as folder:
        job = Job(name, dtype, sizes, prompt, steps, rounds, threads,
                  prompt + steps + 1 if room is None else room, folder)
        for number, row in enumerate(rows):
            log(f"{name} {dtype}: {row.way}")
            (rows[number],) = _apart(_start, job, [row])
            if not rows[number].reason and row.way in FORMS:
                (rows[number],) = _apart(_start, job, [rows[number]])
        log(f"{name} {dtype}: all, in turns")
        done = {row.way: row for row in _apart(_run_in_turns, job,
                                               [row for row in rows if not row.reason])}
    return [done.get(row.way, row) for row in rows]


# ---- in processes of their own -----------------------------------------------------


def _apart(function: Callable[[Job, list[Row]], list[Row]], job: Job,
           rows: list[Row]) -> list[Row]:
    """What a function makes of the rows in a process without a past."""
    context = multiprocessing.get_context("forkserver")
    # Not ours: a process that was forked with it loaded runs its kernels on one thread.
    context.set_forkserver_preload(["torch", "transformers"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(function, job, rows).result()
        except BrokenProcessPool as error:  # there may be too little memory
            return [replace(row, reason=_first_line(error)) for row in rows]


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


@contextlib.contextmanager
def _prepared(job: Job) -> Iterator[tuple[Any, torch.Tensor]]:
    """In a process of its own: inside, torch is as all ways get it; gives the model and a prompt."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning)
    register()
    torch.set_num_threads(job.threads)
    model = build(job.name, job.dtype, job.sizes)
    ids = torch.randint(3, 1000, (1, job.prompt), generator=torch.Generator().manual_seed(0))
    # A graph for the prompt and one for the steps, by backend and by model.
    with torch.no_grad(), dynamo.config.patch(recompile_limit=64):
        yield model, ids % model.config.vocab_size


def _use_caches(folder: Path) -> None:
    """Of ours and of Inductor; what a way compiles cold, it finds there afterwards."""
    os.environ["MOE_MLIR_CACHE_DIR"] = str(folder / "moe-mlir")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")


def _make_way(job: Job, weights: Weights, name: str) -> Way | CppProgram:
    _use_caches(job.folder_of(name))
    if name in (cpp_program.NAME, cpp_program.PACKED):
        return CppProgram(name, weights, job.folder_of(name), job.threads)
    return Way(name, weights)


def _start(job: Job, rows: list[Row]) -> list[Row]:
    """A row with the seconds to the first token and with the memory after a step; of a row that has
    them, the seconds with what the caches on disk have then."""
    (row,) = rows
    with _prepared(job) as (model, ids):
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        way = _make_way(job, Weights(model, alone=True), row.way)
        before = resident()
        try:
            first_token = way.start(ids, job.room)
            way.run(ids, 1)
        except Exception as error:  # whatever torch or the model raise: the table says it
            return [replace(row, reason=_first_line(error))]
        if row.first_token is not None:
            return [replace(row, warm=first_token)]
        return [replace(row, first_token=first_token, note=way.note,
                        memory=way.added(before, resident(), size))]


def _run_in_turns(job: Job, rows: Sequence[Row]) -> list[Row]:
    """The rows with their times and tokens."""
    with _prepared(job) as (model, ids):
        rows, tokens = _take_times(job, rows, model, ids)
        gc.collect()  # the packed copy
        return _judge(model, ids, rows, tokens)


def _take_times(job, rows, model, ids) -> tuple[list[Row], dict[str, list[int]]]:
    weights = Weights(model, alone=False)
    ways = {row.way: _make_way(job, weights, row.way) for row in rows}
    reasons: dict[str, str] = {}

    def each(run: Callable[[Any], object]) -> None:
        for name, way in ways.items():
            if name not in reasons:
                _use_caches(job.folder_of(name))
                try:
                    run(way)
                except Exception as error:
                    reasons[name] = _first_line(error)

    each(lambda way: way.start(ids, job.room))
    each(lambda way: way.run(ids, job.steps))  # compiles the step, and warms up
    for way in ways.values():
        way.seconds = {"prompt": [], "steps": []}
    for _ in range(job.rounds):
        each(lambda way: way.run(ids, job.steps))
    done = [replace(row, reason=reasons[row.way]) if row.way in reasons else
            _with_times(job, row, ways[row.way]) for row in rows]
    return done, {name: way.tokens for name, way in ways.items() if name not in reasons}


def _with_times(job, row, way) -> Row:
    prompt = job.prompt / min(way.seconds["prompt"]) if way.has_prompt_of_its_own else None
    return replace(row, prompt=prompt, steps=1 / statistics.median(way.seconds["steps"]))


def _judge(model, ids, rows, tokens) -> list[Row]:
    """The rows with what is to be said of their tokens."""
    expected: list[int] = next(iter(tokens.values()), [])
    verdicts = judge(model, ids, expected, {n: t for n, t in tokens.items() if t != expected})
    judged = []
    for row in rows:
        verdict = verdicts.get(row.way)
        if row.way not in tokens:
            judged.append(row)
        elif verdict is None:
            judged.append(replace(row, tokens="eager's"))
        else:
            note = "; ".join(filter(None, (row.note, str(verdict))))
            judged.append(replace(row, note=note,
                                  tokens="near tie" if verdict.is_near_tie else "others"))
    return judged


# ---- the command --------------------------------------------------------------


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _read(files: Sequence[str]) -> list[Row]:
    rows = []
    for name in files:
        with open(name) as file:
            rows += [Row(**row) for row in json.load(file)]
    return rows


def _measure(options: argparse.Namespace, arguments: str) -> list[Row]:
    """Measures what the options ask for."""
    sizes = {} if options.layers is None else {"num_hidden_layers": options.layers}
    rows: list[Row] = []
    for name in options.names or SIZES:
        for dtype in options.dtype or DTYPES:
            found = measure(name, dtype, options.prompt, options.steps, options.rounds, sizes,
                            options.way or WAYS, options.threads,
                            lambda text: print(text, file=sys.stderr, flush=True), options.room)
            rows += [replace(row, arguments=arguments, machine=machine_name()) for row in found]
            if options.json:
                # After each model, so that an interruption loses one.
                files.write(options.json, json.dumps([asdict(row) for row in rows], indent=2))
    return rows


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="moe models --speed", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--dtype", choices=[*DTYPES], action="append", help="default: all")
    parser.add_argument("--prompt", type=int, default=256, help="tokens (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--room", type=int, metavar="TOKENS",
                        help="that caches have room for (default: as many as there are)")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--way", choices=WAYS, action="append", help="default: all")
    parser.add_argument("--json", metavar="FILE", help="where to write the rows, too")
    parser.add_argument("--read", metavar="FILE", nargs="+",
                        help="measure nothing: the rows of earlier runs with --json")
    parser.add_argument("--output", metavar="FILE", help="the page whose section of models of real "
                        "widths gets the rows, in the place of earlier ones of the same machine, model, "
                        "dtype and way; default: standard output")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in SIZES]
    if unknown:
        parser.error(f"expected names of {', '.join(SIZES)}, found {', '.join(unknown)}")
    most = options.prompt + options.steps + 1
    if options.room is not None and options.room < most:
        parser.error(f"expected --room of at least {most}, for the prompt, its steps and a first "
                     f"one, found {options.room}")
    rows = _read(options.read) if options.read else _measure(options, shlex.join(arguments))
    if options.output is None:
        print(table(rows), end="")
    else:
        earlier = page.read(options.output).get(page.REAL_WIDTHS, "")
        page.write(options.output, page.REAL_WIDTHS, section(rows, earlier))
    return 0
