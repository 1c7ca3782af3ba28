"""Runs what depends on transformers with other versions of it.

    python utils/check_transformers.py BUILD_DIR WHICH [WHICH ..] [-- PYTEST_ARGUMENT ..]

`utils/version_runs.py` explains the arguments.
"""

import sys

import version_runs

TESTS = [
    # moe_mlir.compile with and without a cache, and its generate.
    "models/test_transformers_names.py", "models/test_static_cache.py",
    "models/test_compile_models.py", "compile/test_guarded_updates.py",
    # backend="moe", and generate with it.
    "models/test_generate.py", "compile/test_experts.py",
    # hf.patch, the experts "moe", packed weights.
    "models/test_hf.py", "models/test_hf_hooks.py", "models/test_expert_forms.py",
    "models/test_packing.py", "models/test_packing_linears.py",
    # What is recognised, of whole models and of each class of routers.
    "models/test_families.py", "models/test_router_classes.py", "importer/test_transformers.py",
    # Routers by kernels, and use_kernels of versions that take the installed kernels.
    "integrations/test_kernels.py",
    # The manual's calls, with the export of a decoder to C++.
    "docs/test_examples.py::test_page[HuggingFace]", "docs/test_examples.py::test_page[Deploying]",
    "docs/test_examples.py::test_page[GettingStarted]",
]  # fmt: skip

if __name__ == "__main__":
    sys.exit(version_runs.main("transformers", TESTS, sys.argv[1:]))
