"""The environment variables of moe-mlir: what they are for, and which of those set are none.

None of them names code to load, except for MOE_MLIR_PTXAS and
MOE_MLIR_SIM_LIBRARY, which name the file that does what they say, and
MOE_MLIR_BENCH_*, which the benchmark alone reads.
"""

import difflib
import os

VARIABLES = {
    "MOE_MLIR_BENCH_ONNXRUNTIME": "a folder with onnxruntime and onnx, to measure beside ours",
    "MOE_MLIR_BENCH_VLLM": "a folder with vLLM's wheel for CPUs, unpacked, to measure beside ours",
    "MOE_MLIR_CACHE": "0: no disk cache",
    "MOE_MLIR_CACHE_DIR": "the folder of the disk cache (default: the user's cache folder)",
    "MOE_MLIR_CACHE_READONLY": "1: look up in the disk cache, never write",
    "MOE_MLIR_CACHE_SIZE": "bytes that the disk cache keeps (default 2 GiB)",
    "MOE_MLIR_CACHE_TRACES": "0: trace models in each process anew, store no programs of traces",
    "MOE_MLIR_CPU": "a smaller CPU, as LLVM names it, whose code to run (default: native)",
    "MOE_MLIR_DUMP_DIR": "a folder that gets the IR after every pass of every compilation",
    "MOE_MLIR_KERNELS": "a folder of packed kernels, then the only ones for GPUs",
    "MOE_MLIR_LOGS": "what to log on stderr: cache, compile, remarks or all, by commas",
    "MOE_MLIR_PROGRESS": "0: no progress on the terminal",
    "MOE_MLIR_PTXAS": "the ptxas to assemble with",
    "MOE_MLIR_REPRODUCER_DIR": "a folder for what reproduces a failed compilation",
    "MOE_MLIR_SIM_LIBRARY": "the simulator's library, instead of the one beside the package",
    "MOE_MLIR_TUNING": "a table of `moe tune`; off: no table (default: the user's)",
}
# Of the scripts and the test suite in the source tree.
_OF_THE_SOURCE_TREE = {"MOE_MLIR_BUILD", "MOE_MLIR_CMAKE_ARGS", "MOE_MLIR_SEED",
                       "MOE_MLIR_TEST_CACHE", "MOE_MLIR_VENV", "MOE_MLIR_VERIFY_ROUNDTRIP"}  # fmt: skip


def unknown(environment=os.environ) -> list:
    """A sentence for every variable that is set and means nothing, with the nearest that does."""
    sentences = []
    for name in sorted(environment):
        if not name.startswith("MOE_MLIR_") or name in VARIABLES or name in _OF_THE_SOURCE_TREE:
            continue
        near = difflib.get_close_matches(name, VARIABLES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        sentences.append(f"expected a variable of moe-mlir, found {name}, which none reads{hint}")
    return sentences
