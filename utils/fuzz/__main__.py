"""Feeds changed inputs to what reads files of ours, and reports what ends badly.

    python utils/fuzz --list
    python utils/fuzz TARGET [--runs N] [--seed S] [--seconds T]
    python utils/fuzz all --seconds 60        every target, a minute each

A finding is a signal, a failed assertion, a sanitizer's report, more than ten seconds for one
input, or a refusal that does not say what is wrong. Its input goes to --out. After
`utils/sanitize.sh fuzz` the targets of moe-fuzz run under sanitizers, and with clang's libFuzzer
inputs that reach new code become seeds: --build build-fuzz chooses that build.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import decoder  # noqa: E402
import ir  # noqa: E402
import pt2  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
# Python's targets, with what one input costs: how many of them are worth a run of many.
OTHERS = {"ir": "modules of moe ops through moe-opt: round trips, passes, both pipelines",
          "pt2": "exported torch programs through moe-compile"}


@dataclass
class Result:
    target: str
    runs: int = 0
    accepted: int = 0
    seconds: float = 0
    findings: list = field(default_factory=list)

    def row(self):
        accepted = f"{self.accepted}" if self.accepted else ""
        return (f"{self.target:10} {self.runs:>10} inputs {accepted:>9} accepted "
                f"{self.seconds:8.0f} s {len(self.findings):>4} findings")


def find_tool(build: Path, name: str) -> Path:
    for path in (build / "bin" / name, build / name):
        if path.exists():
            return path
    raise SystemExit(f"expected {name} in {build}, found none: run ./setup.sh, or "
                     "utils/sanitize.sh fuzz")


def native_targets(tool: Path) -> dict:
    listed = subprocess.run([tool, "--list"], capture_output=True, text=True, check=True).stdout
    return dict(re.findall(r"^(\w+) +(.*)$", listed, flags=re.M))


def compile_artifacts(compiler: Path, folder: Path, with_program: bool, with_decoder: bool) -> Path:
    """One artifact of each kind, for every machine, so small that an input takes no time."""
    sources = ROOT / "utils/fuzz/corpus/artifacts"
    cpu, gpu = ["--target=cpu", "--cpu=x86-64"], ["--target=sm_80"]
    for name, source, options in (("cpu", "router", cpu), ("gpu", "router", gpu),
                                  ("calls", "calls", cpu), ("updates", "updates", cpu)):
        subprocess.run([compiler, sources / f"{source}.mlir", "-o", folder / name, *options],
                       check=True)
    if with_decoder:
        with tempfile.TemporaryDirectory() as programs:
            subprocess.run([compiler, decoder.save(Path(programs, "decoder")), "-o", folder / "decoder",
                            *cpu], check=True)
    if with_program:
        with tempfile.TemporaryDirectory() as programs:
            subprocess.run([compiler, pt2.save_seeds(Path(programs))[0], "-o", folder / "program",
                            "--target=cpu", "--cpu=x86-64"], check=True)
    return folder


def fuzz_native(tool: Path, options, result: Result, expired) -> None:
    """Runs moe-fuzz, again after each finding, with another seed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [tool, result.target, "--out", options.out]
        if result.target in ("artifact", "calls"):
            command += ["--artifacts", compile_artifacts(
                find_tool(options.compiler, "moe-compile"), Path(folder),
                # Exporting one takes longer than a short run.
                with_program=options.runs >= 1000,
                # Its functions take no calls but those of a decoder.
                with_decoder=result.target == "artifact")]
            options.end = time.monotonic() + options.seconds  # of inputs, not of seeds
        environment = {"ASAN_OPTIONS": "allocator_may_return_null=1:detect_container_overflow=0",
                       "UBSAN_OPTIONS": "print_stacktrace=1", **os.environ}
        for seed in range(options.seed, options.seed + 1000):
            left = max(1, int(options.end - time.monotonic())) if options.seconds else 0
            done = subprocess.run(
                [*command, "--seed", str(seed), "--runs", str(options.runs - result.runs),
                 "--seconds", str(left)], env=environment, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, errors="replace")
            if count := re.search(r"(\d+) inputs, (\d+) accepted", done.stdout):
                result.runs += int(count[1])
                result.accepted += int(count[2])
            if done.returncode == 0:
                return
            keep_finding(options.out, result, seed, done)
            if not count and "moe-fuzz: error:" in done.stdout or expired():
                return


def keep_finding(out: Path, result: Result, seed: int, done) -> None:
    told = [line for line in done.stdout.splitlines() if re.search(
        r"ERROR: |SUMMARY|runtime error:|Assertion|finding:|error:", line)]
    what = told[0] if told else f"exit status {done.returncode}"
    result.findings.append(what)
    (out / f"{result.target}-{seed}.log").write_text(done.stdout)
    written = out / f"{result.target}-finding"
    if written.exists():
        shutil.move(written, out / f"{result.target}-{seed}.input")
    print(f"finding: {result.target}: {what}", flush=True)


def run_target(name: str, options) -> Result:
    result, start = Result(name), time.monotonic()
    options.end = start + options.seconds

    def expired():
        return options.seconds and time.monotonic() > options.end

    if name == "ir":
        result.runs, result.findings = ir.fuzz(
            ROOT, str(find_tool(options.compiler, "moe-opt")), options.runs, options.seed,
            options.out, expired)
    elif name == "pt2":
        result.runs, result.accepted, result.findings = pt2.fuzz(
            find_tool(options.compiler, "moe-compile"), options.runs, options.seed, options.out,
            expired)
    else:
        fuzz_native(find_tool(options.build, "moe-fuzz"), options, result, expired)
    result.seconds = time.monotonic() - start
    return result


def main() -> int:
    parser = argparse.ArgumentParser(prog="python utils/fuzz", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", help="a target of --list, or all")
    parser.add_argument("--list", action="store_true", help="print the targets")
    parser.add_argument("--runs", type=int, help="inputs to run (default: 1000, or any number "
                        "with --seconds)")
    parser.add_argument("--seed", type=int, default=1, help="of the changes (default 1)")
    parser.add_argument("--seconds", type=int, default=0, help="stop after this time")
    parser.add_argument("--build", type=Path, default=ROOT / "build",
                        help="where moe-fuzz is (default build)")
    parser.add_argument("--compiler", type=Path, default=ROOT / "build",
                        help="where moe-opt and moe-compile are (default build)")
    parser.add_argument("--out", type=Path, default=Path("fuzz-findings"),
                        help="where findings go (default fuzz-findings)")
    options = parser.parse_args()
    if options.runs is None:
        options.runs = 10**12 if options.seconds else 1000
    targets = {**native_targets(find_tool(options.build, "moe-fuzz")), **OTHERS}
    if options.list:
        for name, summary in targets.items():
            print(f"{name:10} {summary}")
        return 0
    if options.target != "all" and options.target not in targets:
        parser.error(f"expected one of {', '.join(targets)} or all, found {options.target}")
    options.out.mkdir(parents=True, exist_ok=True)
    results = []
    for name in targets if options.target == "all" else [options.target]:
        results.append(run_target(name, options))
        print(results[-1].row(), flush=True)
    if len(results) > 1:
        print(f"{sum(r.runs for r in results)} inputs, "
              f"{sum(len(r.findings) for r in results)} findings")
    return 1 if any(r.findings for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
