"""Runs what depends on torch with other versions of it.

    python utils/check_torch.py BUILD_DIR PYTHON [PYTHON ..] [-- PYTEST_ARGUMENT ..]

Each PYTHON is an interpreter, or a script that calls one, that finds a torch of
its own and pytest. The exit code is 0 only if all tests pass with all of them.
"""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Torch's registration, transforms, tracing, compilation and modules.
TESTS = [
    "ops/test_torch_library.py", "ops/test_transforms.py", "ops/test_autocast.py",
    "ops/test_plain_calls.py", "ops/test_processes.py", "nn/test_methods.py",
    "compile/test_backend.py", "compile/test_inductor_pass.py", "compile/test_experts.py",
    "fx/test_match.py", "importer/test_scores.py", "runtime/test_aoti.py",
]  # fmt: skip
VERSION = "import torch, moe_mlir; print(torch.__version__)"


def main() -> int:
    if len(sys.argv) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    arguments = sys.argv[1:]
    divider = arguments.index("--") if "--" in arguments else len(arguments)
    (build, *pythons), options = arguments[:divider], arguments[divider + 1 :]
    build = pathlib.Path(build).resolve()
    environment = dict(os.environ)
    environment["PYTHONPATH"] = str(build / "python")
    environment["MOE_MLIR_CACHE_DIR"] = str(build / "tests" / "cache")
    environment["PATH"] = os.pathsep.join([str(build / "bin"), environment["PATH"]])
    tests = [str(ROOT / "tests" / "python" / test) for test in TESTS]
    failed = []
    for python in pythons:
        found = subprocess.run([python, "-c", VERSION], env=environment, capture_output=True,
                               text=True)  # fmt: skip
        version = found.stdout.strip() or f"no torch ({found.stderr.strip().splitlines()[-1]})"
        print(f"== {python}: torch {version}", flush=True)
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(options or tests)]
        if found.returncode or subprocess.run(command, env=environment, cwd=ROOT).returncode:
            failed.append(python)
    print(f"{len(pythons) - len(failed)} versions passed, {len(failed)} failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
