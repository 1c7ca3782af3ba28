"""Runs the lit suite and pytest, and prints one closing line with the counts.

    python utils/run_tests.py BUILD_DIR [--long] [--filter TEXT]

The last line of the output is `N passed, N failed`, with `, N skipped` where
tests were skipped or unsupported; the line before it says how many false alarms
the simulator's tests saw and how many broken kernels they caught. The exit code is 0 only if nothing failed
and something ran.
"""

import argparse
import os
import pathlib
import random
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent


NO_TESTS_COLLECTED = 5  # pytest's exit code


def find_lit() -> list[str]:
    # `python -m lit.main` runs nothing and exits 0, hence the explicit call.
    return [sys.executable, "-c", "from lit.main import main; main()"]


def count(report: pathlib.Path) -> tuple[int, int, int]:
    """(passed, failed, skipped) of a JUnit report."""
    passed = failed = skipped = 0
    for case in ElementTree.parse(report).iter("testcase"):
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


def main() -> int:
    options = parse_arguments()
    build = options.build.resolve()

    environment = dict(os.environ)
    environment.setdefault("MOE_MLIR_SEED", str(random.SystemRandom().randrange(2**31)))
    environment["PYTHONPATH"] = str(build / "python")
    environment["MOE_MLIR_CACHE_DIR"] = str(build / "tests" / "cache")
    environment["PATH"] = os.pathsep.join(
        [str(build / "bin"), os.path.dirname(sys.executable), environment["PATH"]]
    )

    lit_report = build / "tests" / "lit.xml"
    lit_command = find_lit() + [
        str(build / "tests"), str(build / "tests-docs"), "-v",
        "--xunit-xml-output", str(lit_report),
    ]
    pytest_report = build / "tests" / "pytest.xml"
    pytest_command = [
        sys.executable, "-m", "pytest", str(ROOT / "tests" / "python"), "-q",
        "-n", "2", f"--junitxml={pytest_report}", "-p", "no:cacheprovider",
        "-o", "junit_family=xunit1",  # the one that has properties
    ]
    if options.filter:
        lit_command += ["--filter", options.filter, "--allow-empty-runs"]
        pytest_command += ["-k", options.filter]
    suites = [("lit", lit_command, lit_report), ("pytest", pytest_command, pytest_report)]
    if options.long:
        pytest_command += ["-m", "long"]
        suites = suites[1:]

    print(describe_run(environment), flush=True)
    totals = [0, 0, 0]
    for suite in suites:
        for i, number in enumerate(run_suite(*suite, environment)):
            totals[i] += number
    sys.path.insert(0, str(ROOT / "tests" / "python" / "sim"))
    from figures import summary

    if line := summary(properties(pytest_report)):
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
