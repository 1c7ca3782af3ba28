"""Runs tests with other versions of a package than the pinned one, or with one that is not pinned:
what check_torch.py, check_transformers.py and check_vllm.py have in common.

    python utils/check_NAME.py BUILD_DIR WHICH [WHICH ..] [-- PYTEST_ARGUMENT ..]

WHICH is a version (5.24.0), or "newest": it is installed with what it depends on into a folder of
BUILD_DIR, in front of the packages of the running interpreter. Or it is the path of an interpreter
that finds a version of its own, and pytest. PYTEST_ARGUMENTs replace the tests. The exit code is 0
only if all tests pass with every version.
"""

import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
_VERSION = re.compile(r"\d+(\.\w+)+(\+\w+)?|newest")


@dataclasses.dataclass
class Python:
    """An interpreter, and the folders that it looks into first."""

    command: str
    folders: tuple[pathlib.Path, ...] = ()


@dataclasses.dataclass
class Source:
    """A package, the distribution that has it, and what that asks for without need."""

    package: str
    distribution: str
    unused: tuple[str, ...]


def main(package: str, tests: list[str], arguments: list[str], *, distribution: str = "",
         unused: tuple[str, ...] = ()) -> int:
    """Runs the tests with each version; a package may come from a distribution of another name.

    `unused` are packages that it asks for, and that are removed.
    """
    divider = arguments.index("--") if "--" in arguments else len(arguments)
    named, options = arguments[:divider], arguments[divider + 1 :]
    if len(named) < 2:
        print(__doc__.replace("NAME", package), file=sys.stderr)
        return 2
    build = pathlib.Path(named[0]).resolve()
    options = options or [str(ROOT / "tests" / "python" / test) for test in tests]
    source = Source(package, distribution or package, unused)
    failed = [which for which in named[1:] if not _passes(source, which, build, options)]
    print(f"{len(named) - 1 - len(failed)} versions passed, {len(failed)} failed"
          + "".join(f"\n  {which}" for which in failed))
    return bool(failed)


def _passes(source, which, build, options) -> bool:
    package = source.package
    python = _installed(source, which, build) if _VERSION.fullmatch(which) else Python(which)
    if python is None:
        return False
    environment = _environment(build, python)
    found = subprocess.run(
        [python.command, "-c", f"import {package}, moe_mlir; print({package}.__version__)"],
        env=environment, capture_output=True, text=True)
    if found.returncode:
        print(f"== {which}: {package} and moe_mlir cannot be imported\n{found.stderr}", flush=True)
        return False
    print(f"== {which}: {package} {found.stdout.strip()}", flush=True)
    begin = time.monotonic()
    command = [python.command, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    code = subprocess.run(command, env=environment, cwd=ROOT).returncode
    print(f"== {which}: {'failed' if code else 'passed'} in {time.monotonic() - begin:.0f} s",
          flush=True)
    return not code


def _installed(source, version, build) -> Python | None:
    """This interpreter with another version of a package; None if it cannot be installed."""
    name = source.distribution
    folder = build / "versions" / f"{name}-{version}"
    if version == "newest" or not folder.exists():
        # Moved where it belongs once it is whole.
        unfinished = folder.with_name(folder.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        wanted = name if version == "newest" else f"{name}=={version}"
        done = subprocess.run([sys.executable, "-m", "pip", "install", "-qq", "--target",
                               unfinished, wanted])  # fmt: skip
        if done.returncode:
            print(f"== {version}: {wanted} cannot be installed", flush=True)
            return None
        for unused in source.unused:
            for part in unfinished.glob(f"{unused}*"):
                shutil.rmtree(part)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    return Python(sys.executable, (folder,))


def _environment(build, python) -> dict[str, str]:
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (*python.folders, build / "python")))
    environment["MOE_MLIR_CACHE_DIR"] = str(build / "tests" / "cache")
    environment["PATH"] = os.pathsep.join(
        [str(build / "bin"), str(pathlib.Path(sys.executable).parent), environment["PATH"]])
    return environment
