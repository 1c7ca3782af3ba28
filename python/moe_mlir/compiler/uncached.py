"""The compiler without its caches: IR text in, code out.

Environment: MOE_MLIR_CPU names the CPU to compile for, such as "x86-64-v3"
(AVX2); default: this machine's. MOE_MLIR_TUNING: see `tuning_table`.
"""

import os

from .._native import native
from .host_cpu import missing_for, recommended
from .tuning_table import cpu_pipeline


def compile_bytes(kind: str, text: str, target: str, dump_dir: str = "", remarks=None) -> bytes:
    """What the compiler makes of a module, past all caches.

    Args:
        kind: "object", "ptx" or "kernels".
        text: the module as MLIR text.
        target: the pipeline of an object, else the chip.
        dump_dir: a folder for the IR after every pass.
        remarks: a list that gets the compiler's warnings and remarks.
    """
    compiler = getattr(native(), f"compile_{kind}")
    options = {"cpu": target_cpu()} if kind == "object" else {}
    if kind == "object":
        target = tuned(target)
    code = compiler(text, target, dump_dir=dump_dir, remarks=remarks, **options)
    return code if isinstance(code, bytes) else code.encode()


def tuned(pipeline: str) -> str:
    """A pipeline with the numbers for the CPU, if it is "moe-to-cpu"; part of every key."""
    return cpu_pipeline(target_cpu()) if pipeline == "moe-to-cpu" else pipeline


def target_cpu() -> str:
    """"native", or a smaller CPU whose kernels this machine is to run."""
    cpu = os.environ.get("MOE_MLIR_CPU", "native")
    missing = missing_for(cpu)
    if missing:
        raise ValueError(f"expected MOE_MLIR_CPU to name a CPU whose code this machine runs, such as "
                         f"{recommended()}, found '{cpu}', which needs {', '.join(missing)}")
    return cpu
