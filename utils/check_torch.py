"""Runs what depends on torch with other versions of it.

    python utils/check_torch.py BUILD_DIR WHICH [WHICH ..] [-- PYTEST_ARGUMENT ..]

`utils/version_runs.py` explains the arguments.
"""

import sys

import version_runs

# Torch's registration, transforms, tracing, compilation and modules.
TESTS = [
    "ops/test_torch_library.py", "ops/test_transforms.py", "ops/test_autocast.py",
    "ops/test_plain_calls.py", "ops/test_processes.py", "nn/test_methods.py",
    "compile/test_backend.py", "compile/test_inductor_pass.py", "compile/test_experts.py",
    "raising/test_match.py", "importer/test_scores.py", "runtime/test_aoti.py",
]  # fmt: skip

if __name__ == "__main__":
    sys.exit(version_runs.main("torch", TESTS, sys.argv[1:]))
