"""Replays the walks of docs/Contributing.md, each on the same copy of the tree.

    python tests/walks/replay.py [WALK ..] [--tree FOLDER]

Applies a patch, builds moe-opt, runs the tests of lit that the patch adds, and takes the patch
back. FOLDER keeps the copy and its build for the next time; what is built there comes from ccache
where it is installed. A patch that no longer applies: `git apply --3way` it, mend it, and write
`git diff --cached` over it.
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


def git(*arguments, cwd=ROOT) -> str:
    done = subprocess.run(["git", *map(str, arguments)], cwd=cwd, capture_output=True, text=True)
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


def copy_tree(to: Path) -> None:
    names = git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    for name in names:
        source, target = ROOT / name, to / name
        if not source.is_file():
            continue
        if target.exists() and target.read_bytes() == source.read_bytes():
            continue  # as old as what was built of it
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


def replay(walk, tree: Path) -> None:
    environment = {"MOE_MLIR_VENV": sys.prefix, **os.environ, "MOE_MLIR_BUILD": str(tree / "build")}
    git("apply", WALKS[walk], cwd=tree)
    try:
        subprocess.run(["./setup.sh", "moe-opt", "moe_runtime"], cwd=tree, env=environment,
                       check=True)
        subprocess.run([sys.executable, "-c", "from lit.main import main; main()", "-v",
                        *(f"build/{name}" for name in lit_tests(walk))], cwd=tree,
                       env=environment, check=True)
    finally:
        git("apply", "--reverse", WALKS[walk], cwd=tree)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("walks", nargs="*", metavar="WALK", help=", ".join(WALKS))
    parser.add_argument("--tree", type=Path, help="folder of the copy (default: a new one)")
    options = parser.parse_args()
    if unknown := set(options.walks) - set(WALKS):
        parser.error(f"expected walks out of {', '.join(WALKS)}, found {', '.join(unknown)}")
    with tempfile.TemporaryDirectory() as temporary:
        tree = (options.tree or Path(temporary)).resolve()
        copy_tree(tree)
        for walk in options.walks or WALKS:
            replay(walk, tree)
            print(f"{walk}: ok", flush=True)


if __name__ == "__main__":
    main()
