"""Side-by-side benchmark on this CPU: ours, torch eager, torch.compile, a peer.

Times are CPU seconds of the measuring thread, which a busy machine disturbs
least; the rivals take turns, each result is checked against float64 first, and
the least of all rounds is reported beside the median of ours. `ratio` is the
fastest rival over ours; `limit` the slower of the measured memory bandwidth
and FMA peak on the bytes and operations that cannot be avoided.
"""

import argparse
import ctypes
import json
import statistics
import sys
import time
import warnings

import torch

from . import machine as machines
from .cases import CASES

_INPUT_SETS = 4  # different values in turn, so that no branch is learnt by heart
_SAMPLE_SECONDS = 2e-3


def main(argv=None):
    options = _parse(argv)
    cases = [c for c in CASES if c.quick or not options.quick]
    if options.op:
        known = sorted({c.op for c in CASES})
        if options.op not in known:
            sys.exit(f"bench: expected --op to be one of {', '.join(known)}, found '{options.op}'")
        cases = [c for c in cases if c.op == options.op]
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="index_reduce.* is in beta")
    machine = machines.measure()
    print(
        f"{machine.model}, one thread: {machine.fma_gflops:.0f} GFLOP/s f32 FMA, "
        f"{machine.read_gbytes:.0f} GB/s memory read; torch {torch.__version__}"
    )
    _print_header()
    records, failures = [], 0
    for case in cases:
        try:
            records.append(_measure(case, machine, options))
        except AssertionError as error:
            failures += 1
            print(f"{case.title}: wrong result, not timed: {error}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(records, file, indent=1)
            file.write("\n")
    sys.exit(1 if failures else 0)


def _parse(argv):
    parser = argparse.ArgumentParser(prog="bench", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only the shapes with a stated goal")
    parser.add_argument("--json", metavar="FILE", help="also write the records as JSON")
    parser.add_argument("--op", metavar="NAME", help="only this op")
    parser.add_argument(
        "--no-inductor", action="store_true", help="leave out torch.compile, which takes longest"
    )
    return parser.parse_args(argv)


# ---------------------------------------------------------------------- timing


def _measure(case, machine, options):
    sets = [case.inputs(100 * i) for i in range(_INPUT_SETS)]
    with torch.no_grad():
        results = case.ours(*sets[0])
        case.check(sets[0], results)
        rivals = {"ours": case.ours, "eager": case.eager}
        if case.peer:
            rivals[case.peer[0]] = case.peer[1]
        if not options.no_inductor:
            torch._dynamo.reset()
            rivals["inductor"] = torch.compile(case.eager, dynamic=False)
            rivals["inductor"](*sets[0])
        samples = _take_turns(rivals, sets, rounds=5 if options.quick else 15)
        peak = _peak_mb(case.ours, sets[0])
    best = {name: min(times) for name, times in samples.items()}
    peer = case.peer[0] if case.peer else None
    limit = machine.limit_us(case.flops, case.moved)
    record = dict(
        op=case.op,
        shape=case.shape,
        dtype=str(case.dtype).removeprefix("torch."),
        threads=1,
        ours_us=best["ours"],
        ours_median_us=statistics.median(samples["ours"]),
        eager_us=best["eager"],
        inductor_us=best.get("inductor"),
        peer=peer,
        peer_us=best.get(peer),
        ratio=min(t for name, t in best.items() if name != "ours") / best["ours"],
        limit_us=limit,
        percent_of_limit=100 * limit / best["ours"],
        peak_mb=peak,
    )
    _print_row(case, record)
    return record


def _take_turns(rivals, sets, rounds):
    """CPU microseconds a call: name -> one sample a round."""
    calls = {name: _calls_per_sample(run, sets) for name, run in rivals.items()}
    samples = {name: [] for name in rivals}
    for _ in range(rounds):
        for name, run in rivals.items():
            start = time.thread_time()
            for i in range(calls[name]):
                run(*sets[i % _INPUT_SETS])
            samples[name].append((time.thread_time() - start) / calls[name] * 1e6)
    return samples


def _calls_per_sample(run, sets):
    for inputs in sets:
        run(*inputs)
    start = time.thread_time()
    run(*sets[0])
    return max(1, min(1000, round(_SAMPLE_SECONDS / max(time.thread_time() - start, 1e-7))))


def _peak_mb(run, inputs):
    """Memory that one call adds at its peak, results included; None where unknown."""
    try:
        before = _reset_peak()
        results = run(*inputs)
        peak = _status_kb("VmHWM")
        del results
        return round((peak - before) / 1024, 2)
    except OSError:
        return None


def _reset_peak():
    # Freed memory that the allocator kept would hide what the call takes.
    getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _status_kb("VmRSS")


def _status_kb(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(field))


# ----------------------------------------------------------------------- table

_COLUMNS = ("ours us", "median", "eager us", "inductor", "peer us", "ratio", "limit", "%", "MB")


def _print_header():
    print(f"{'op':<62}" + "".join(f"{name:>10}" for name in _COLUMNS))


def _print_row(case, record):
    def number(value, digits=1):
        return f"{'-':>10}" if value is None else f"{value:>10.{digits}f}"

    columns = (
        number(record["ours_us"]),
        number(record["ours_median_us"]),
        number(record["eager_us"]),
        number(record["inductor_us"]),
        number(record["peer_us"]),
        number(record["ratio"], 2),
        number(record["limit_us"]),
        number(record["percent_of_limit"]),
        number(record["peak_mb"]),
    )
    print(f"{case.title:<62}" + "".join(columns), flush=True)


if __name__ == "__main__":
    main()
