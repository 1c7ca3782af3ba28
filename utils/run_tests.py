"""Runs the lit suite and pytest, and prints one closing line with the counts.

    python utils/run_tests.py BUILD_DIR [--quick | --long] [--filter TEXT] [--cold]

The last line of the output is `N passed, N failed`, with `, N skipped` where
tests were skipped or unsupported; the line before it says how many false alarms
the simulator's tests saw and how many broken kernels they caught, and those
before it which test files took the most CPU time. The exit code is 0 only if
nothing failed and something ran.
"""

import argparse
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "python"), str(ROOT / "tests" / "python" / "sim")]

NO_TESTS_COLLECTED = 5  # pytest's exit code
QUICK_SECONDS = 85  # of lit and pytest together
QUICK_LIT_SECONDS = 30
IMPORT_SECONDS = 20  # before a worker's first test


def find_lit() -> list[str]:
    # `python -m lit.main` runs nothing and exits 0, hence the explicit call.
    return [sys.executable, "-c", "from lit.main import main; main()"]


def cases(report: pathlib.Path):
    return ElementTree.parse(report).iter("testcase")


def count(report: pathlib.Path) -> tuple[int, int, int]:
    """(passed, failed, skipped) of a JUnit report."""
    passed = failed = skipped = 0
    for case in cases(report):
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return passed, failed, skipped


def properties(report: pathlib.Path):
    """(name, value) of what the tests of a JUnit report have recorded."""
    if report.exists():
        for item in ElementTree.parse(report).iter("property"):
            yield item.get("name"), item.get("value")


def run_suite(name, command, report, environment) -> tuple[int, int, int]:
    report.unlink(missing_ok=True)
    print(f"== {name}", flush=True)
    code = subprocess.run(command, env=environment, cwd=ROOT).returncode
    if not report.exists() and code == 0 and "--allow-empty-runs" in command:
        return 0, 0, 0  # lit leaves no report where a filter matches nothing
    if not report.exists():
        print(f"error: {name} ended with exit code {code} and left no report")
        return 0, 1, 0
    passed, failed, skipped = count(report)
    # A suite that fails without a failed test (a broken configuration, a test
    # file that does not import) must not look green.
    is_filtered_away = code == NO_TESTS_COLLECTED and "-k" in command
    if code != 0 and failed == 0 and not is_filtered_away:
        print(f"error: {name} ended with exit code {code}")
        failed = 1
    return passed, failed, skipped


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=pathlib.Path, help="the build directory")
    parser.add_argument(
        "--filter", default="", help="run only tests whose name contains this"
    )
    parser.add_argument(
        "--cold", action="store_true",
        help="start with empty caches, as on a machine where no tests ever ran; they are removed "
        "afterwards",
    )
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument(
        "--quick", action="store_true",
        help="run what fits into 90 seconds: lit, then one case of each test, the cheap ones "
        "first, as the last whole run measured them",
    )
    extent.add_argument(
        "--long", action="store_true",
        help="run the long tests, which a plain run leaves out, and only those",
    )
    return parser.parse_args()


def describe_run(environment) -> str:
    """What a report of a failure needs besides the names of the tests."""
    cpu = "an unknown CPU"
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    level = environment.get("MOE_MLIR_CPU", "native")
    return f"MOE_MLIR_CPU={level} MOE_MLIR_SEED={environment['MOE_MLIR_SEED']} on {cpu}"


def cache_folder() -> pathlib.Path:
    """Where runs leave compiled code for later ones, of this build and of others.

    Every entry is found by its content: the IR and the compiler's own code, or Triton's and
    Inductor's keys. So it need not be cleared, and may lie outside of the source tree.
    """
    configured = os.environ.get("MOE_MLIR_TEST_CACHE")
    if configured:
        return pathlib.Path(configured).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "moe-mlir-tests"


def make_environment(build, caches):
    environment = dict(os.environ)
    environment.setdefault("MOE_MLIR_SEED", str(random.SystemRandom().randrange(2**31)))
    # Two workers are enough processes: Inductor would start two more in each.
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    environment["PYTHONPATH"] = str(build / "python")
    caches.mkdir(parents=True, exist_ok=True, mode=0o700)
    environment["MOE_MLIR_CACHE_DIR"] = str(caches / "kernels")
    environment["TRITON_CACHE_DIR"] = str(caches / "triton")
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(caches / "inductor")
    environment["PATH"] = os.pathsep.join(
        [str(build / "bin"), os.path.dirname(sys.executable), environment["PATH"]]
    )
    return environment


def lit_suite(build, options):
    report = build / "tests" / "lit.xml"
    command = find_lit() + [
        str(build / "tests"), str(build / "tests-docs"), "-v",
        "--xunit-xml-output", str(report),
    ]
    if options.filter:
        command += ["--filter", options.filter, "--allow-empty-runs"]
    if options.quick:  # what runs ptxas or a C++ program takes half of the time
        command += ["--filter-out", "ptxas|Reference", "--max-time", str(QUICK_LIT_SECONDS)]
    return "lit", command, report


def pytest_suite(build, options, started, times):
    report = build / "tests" / "pytest.xml"
    command = [
        sys.executable, "-m", "pytest", str(ROOT / "tests" / "python"), "-q",
        # Neighbours stay with one worker, so that it makes their fixtures once.
        "-n", "2", "--dist", "worksteal",
        f"--junitxml={report}", "-p", "no:cacheprovider",
        "-o", "junit_family=xunit1",  # the one that has properties and files
    ]
    if options.filter:
        command += ["-k", options.filter]
    if options.long:
        command += ["-m", "long"]
    if options.quick:
        left = max(started + QUICK_SECONDS - time.time(), 1)
        command += [f"--quick-seconds={left - IMPORT_SECONDS}", f"--quick-until={time.time() + left}",
                    f"--quick-times={times}"]
    return "pytest", command, report


def remember_times(file, report):
    """What `./test --quick` chooses by: the mean seconds of each test function's cases."""
    from quick import function_of

    seconds = {}
    for case in cases(report):
        if case.get("file"):
            name = function_of(case.get("file"), case.get("name"))
            seconds.setdefault(name, []).append(float(case.get("time")))
    means = {name: round(sum(all_) / len(all_), 2) for name, all_ in sorted(seconds.items())}
    file.write_text(json.dumps(means, indent=1))


def main() -> int:
    options = parse_arguments()
    if options.cold:
        with tempfile.TemporaryDirectory(prefix="moe-mlir-cold-") as folder:
            return run(options, pathlib.Path(folder))
    return run(options, cache_folder())


def run(options, caches: pathlib.Path) -> int:
    started = time.time()
    build = options.build.resolve()
    environment = make_environment(build, caches)
    print(describe_run(environment), flush=True)

    totals = [0, 0, 0]
    if not options.long:
        totals = list(run_suite(*lit_suite(build, options), environment))
    name, command, report = pytest_suite(build, options, started, caches / "times.json")
    for i, number in enumerate(run_suite(name, command, report, environment)):
        totals[i] += number
    import costs
    from figures import summary

    seconds = costs.of_files(cases(report)) if report.exists() else {}
    if lines := costs.summary(seconds):
        print(lines)
    if not (options.filter or options.long or options.quick) and report.exists():
        remember_times(caches / "times.json", report)
        for line in costs.over_budget(seconds):
            print(f"error: {line}")
            totals[1] += 1
    if line := summary(properties(report)):
        print(line)
    passed, failed, skipped = totals
    if passed == 0 and failed == 0:
        print("error: no test ran")
        failed = 1
    tail = f", {skipped} skipped" if skipped else ""
    print(f"{passed} passed, {failed} failed{tail}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
