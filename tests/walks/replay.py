"""Replays the walks of docs/Contributing.md on a copy of the tree.

    python tests/walks/replay.py [WALK ..] [--tree FOLDER]

Applies the patches, builds what their tests need once for all of them, and runs the tests that
they add. FOLDER keeps the copy and its build, so that a patch that was mended costs what it
changes; what is built there comes from ccache where it is installed. A patch that no longer
applies: `git apply --3way` it, mend it, and write `git diff --cached` over it.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
WALKS = {path.stem: path for path in sorted(FOLDER.glob("*.patch"))}
# The compiler for lit; what kernels of the CPU and the GPU run on for Python.
TARGETS = ("moe-compiler", "moe_sim", "moe_sim_runtime", "moe_torch")

sys.path.insert(0, str(ROOT / "utils"))
from run_tests import find_lit, make_environment  # noqa: E402


def git(*arguments, cwd=ROOT, **environment) -> str:
    done = subprocess.run(["git", *map(str, arguments)], cwd=cwd, env={**os.environ, **environment},
                          capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"git {arguments[0]} in {cwd}: {done.stderr.strip()}")
    return done.stdout


def touched(walk) -> list[str]:
    """The files that a walk changes or adds."""
    return [line.split("\t")[2] for line in git("apply", "--numstat", WALKS[walk]).splitlines()]


def product_files(walk) -> list[str]:
    """Those outside of tests and docs."""
    return [name for name in touched(walk) if not name.startswith(("tests/", "docs/"))]


def lit_tests(walk) -> list[str]:
    return [name for name in touched(walk) if name.endswith(".mlir")]


def python_tests(walk) -> list[str]:
    return [name for name in touched(walk) if name.startswith("tests/python/")]


def copy_tree(to: Path, walks) -> None:
    """The tree with the walks in it; what stays as it was keeps its time, and what is built of it."""
    names = git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    with tempfile.TemporaryDirectory() as temporary:
        fresh = Path(temporary)
        for name in names:
            if (ROOT / name).is_file():
                (fresh / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, fresh / name)
        for walk in walks:
            # Inside of a repository, git would take the names as its own.
            git("apply", WALKS[walk], cwd=fresh, GIT_CEILING_DIRECTORIES=str(fresh.parent))
        for source in fresh.rglob("*"):
            target = to / source.relative_to(fresh)
            if source.is_dir() or target.is_file() and target.read_bytes() == source.read_bytes():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)


def replay(walks, tree: Path) -> None:
    """Builds the tree with the walks in it and runs their tests; CalledProcessError if one fails."""
    copy_tree(tree, walks)
    build = tree / "build"
    environment = make_environment(build)
    environment |= {"MOE_MLIR_VENV": sys.prefix, "MOE_MLIR_BUILD": str(build)}
    subprocess.run(["./setup.sh", *TARGETS], cwd=tree, env=environment, check=True)
    lit = [build / name for walk in walks for name in lit_tests(walk)]
    subprocess.run([*find_lit(), "-v", *lit], cwd=tree, env=environment, check=True)
    if python := [name for walk in walks for name in python_tests(walk)]:
        subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *python],
                       cwd=tree, env=environment, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("walks", nargs="*", metavar="WALK",
                        help="default all: " + ", ".join(WALKS))
    parser.add_argument("--tree", type=Path, help="folder of the copy (default: a new one)")
    options = parser.parse_args()
    if unknown := set(options.walks) - set(WALKS):
        parser.error(f"expected walks out of {', '.join(WALKS)}, found {', '.join(unknown)}")
    walks = options.walks or list(WALKS)
    with tempfile.TemporaryDirectory() as temporary:
        replay(walks, (options.tree or Path(temporary)).resolve())
    print(f"{', '.join(walks)}: ok")


if __name__ == "__main__":
    main()
