"""The tables of the model, as Markdown."""

import statistics

from . import calls, chips, measured, recorded


def print_calls() -> None:
    found = measured.load()["rows"]
    ratios = []
    print("\n### Modelled time of calls on H100 and H200\n")
    print("Microseconds; the terms are those of the H200, summed over the launches. The H100 has been "
          "measured.\n")
    print("| call | launches | blocks, SMs in use, waves | KB in flight an SM | dependences "
          "| issue | ALU | FMA | XU | LSU | tensor | shared memory | L2 | DRAM | H100 | H200 "
          "| binding | measured |")
    print("|---" * 18 + "|")
    for call in calls.CALLS:
        record = recorded.record(call)
        times = [recorded.time_call(record, chip) for chip in chips.CHIPS]
        time = found.get(call.name, {}).get("ours_us")
        if time is not None:
            ratios.append(1e6 * times[0].seconds / time)
        print(call_row(call, record, times, time), flush=True)
    print(f"\nOf the {len(ratios)} that were measured, {summary(ratios)}")


def call_row(call, record, times, time=None) -> str:
    first, second = times
    at = second.estimates.index(second.longest)
    launch, longest = record.launches[at], second.longest
    terms = {name: sum(e.terms.get(name, 0.0) for e in second.estimates)
             for name in ("dependences", "issue", "alu", "fma", "xu", "lsu", "tensor", "shared",
                          "L2", "DRAM")}
    cells = [f"`{call.name}`", second.launches,
             f"{launch.blocks:.0f}, {longest.used_sms}, {longest.waves:.2f}",
             f"{longest.bytes_in_flight / 1024:.1f}",
             *(microseconds(seconds) for seconds in terms.values()),
             microseconds(first.seconds), f"**{microseconds(second.seconds)}**", longest.binding]
    cells.append("-" if time is None else microseconds(time / 1e6))
    if call.operations:
        cells[-3] += f" ({call.operations / second.seconds / 1e12:.0f} TFLOP/s)"
    return f"| {' | '.join(map(str, cells))} |"


def microseconds(seconds: float) -> str:
    value = 1e6 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def print_published() -> None:
    from . import published

    found = measured.load()["published"]
    print("\n### The model against published times\n")
    print("Microseconds of kernels that Triton compiles here, and what the H100 took for them.\n")
    print("| kernel | chip | published | model | model / published | measured, H100 | binding | source |")
    print("|---" * 8 + "|")
    ratios, of_measured = [], []
    for entry in published.all_published():
        modelled, estimate = published.microseconds(entry)
        ratio = modelled / entry.microseconds
        time = found.get(entry.name)
        if not entry.fitted:
            ratios.append(ratio)
            if time:
                of_measured.append(published.on_h100(entry) / time)
        print(f"| {entry.name} | {entry.chip.name} | {microseconds(entry.microseconds / 1e6)} "
              f"| {microseconds(modelled / 1e6)} "
              f"| {ratio:.2f}{' (fitted)' if entry.fitted else ''} "
              f"| {microseconds(time / 1e6) if time else '-'} | {estimate.binding} "
              f"| {entry.source} |", flush=True)
    print(f"\nOf the {len(ratios)} published times (all but the copy), {summary(ratios)}")
    if of_measured:
        print(f"Of the {len(of_measured)} measured ones, for an H100 all of them, "
              f"{summary(of_measured)}")


def summary(ratios) -> str:
    off = sorted(max(r, 1 / r) - 1 for r in ratios)
    return (f"the median error is {100 * statistics.median(off):.0f} %, "
            f"{sum(e <= 0.4 for e in off)} are within 40 %, and the largest error is "
            f"{100 * off[-1]:.0f} %.")


def print_constants() -> None:
    print("\n### Constants of the model\n")
    print(chips.SOURCES, end="")
