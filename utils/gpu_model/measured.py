"""What a GPU took for the same calls: the rows of a report of gpu_check, beside the model's."""

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moe_mlir._support import files
from moe_mlir_bench.gpu_check.benchmark import bound

PATH = Path(__file__).with_name("measured.json")
_PEERS = {"eager": "eager", "grouped_mm": "`torch._grouped_mm`", "linear_triton": "cuBLAS, Triton",
          "triton": "Triton", "flash": "flash SDPA", "cudnn": "cuDNN SDPA", "sdpa": "SDPA"}


def record(report: Path) -> None:
    """Keeps of a report's folder what the page states: medians of times, and rates."""
    lines = [json.loads(line) for line in (report / "report.jsonl").read_text().splitlines()]
    gpu = next(line for line in lines if "gpu" in line)
    facts = {
        "gpu": gpu["gpu"], "driver": lines[0]["machine"]["driver"].split("\n")[1].split(",")[0],
        "torch": lines[0]["machine"]["torch"], "date": lines[-1]["end"].split()[0],
        "limits": next((line["limits"] for line in lines if "limits" in line), {}),
        "rows": {line["case"].removeprefix("time of "): _medians(line["row"])
                 for line in lines if "row" in line},
        "published": {},
    }
    published = report / "published.json"
    if published.exists():
        facts["published"] = {name: time for name, time in json.loads(published.read_text()).items()
                              if isinstance(time, float)}
    files.write(PATH, json.dumps(facts, indent=1) + "\n")


def _medians(row) -> dict[str, Any]:
    return {key: round(statistics.median(value), 2) if key.endswith("_us") else value
            for key, value in row.items()}


def load() -> dict[str, Any]:
    return json.loads(PATH.read_text())


def rows(facts: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], str, float]]:
    """(name, row, the quickest other's name, microseconds of that)."""
    for name, row in facts["rows"].items():
        others = {key[:-3]: value for key, value in row.items()
                  if key.endswith("_us") and key != "ours_us"}
        best = min(others, key=others.__getitem__, default="")
        yield name, row, _PEERS.get(best, best), others.get(best, float("nan"))


def print_measured() -> None:
    facts = load()
    print(f"\n### Measured times of calls on an {facts['gpu'].removeprefix('NVIDIA ')}\n")
    print(f"Microseconds, medians of 15 replays of a captured graph, inputs in turn from 150 MB: driver "
          f"{facts['driver']}, torch {facts['torch']}, {facts['date']}.\n")
    print("| call | ours | eager | quickest other | its time | ours is | % of limit |")
    print("|---" * 7 + "|")
    for name, row, best, time in rows(facts):
        eager = f"{row['eager_us']:,.1f}" if "eager_us" in row else "-"
        share = 100 * bound(row, facts["limits"]) / row["ours_us"]
        faster = "-" if not best else f"{time / row['ours_us']:.2f}x"
        print(f"| `{name}` | {row['ours_us']:,.1f} | {eager} | {best or '-'} "
              f"| {f'{time:,.1f}' if best else '-'} | {faster} | {share:.0f} |")


def print_limits() -> None:
    """What the chip does at best, as the report measured it."""
    limits = load()["limits"]
    clusters = ", ".join(f"{count} of {size}" for size, count in limits["active_clusters"].items())
    print("\n### Rates of that GPU\n")
    print("| rate | measured |")
    print("|---|---|")
    for name, key, unit in (
            ("reading 1 GiB", "bytes_read_per_second", 1e12),
            ("copying 1 GiB, bytes read and written", "bytes_per_second", 1e12),
            ("reading 8 MiB in L2 by all multiprocessors", "l2_bytes_read_per_second", 1e12)):
        print(f"| {name} | {limits[key] / unit:.2f} TB/s |")
    print(f"| product of 8192 x 8192 x 8192, bf16 | {limits['operations_per_second'] / 1e12:.0f} TFLOP/s |")
    print(f"| exponentials (`ex2.approx`) | {limits['exponentials_per_second'] / 1e12:.2f} T/s |")
    print(f"| an empty kernel in a graph | {limits['launch_us']:.2f} us |")
    print(f"| clusters of blocks that fill a multiprocessor, at once | {clusters} |")
