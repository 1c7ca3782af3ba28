"""Compiled code for IR text: from memory, from the disk cache, or from the compiler.

Environment: see `moe_mlir.cache`; MOE_MLIR_DUMP_DIR names a folder that gets the
IR after every pass of every compilation, one subfolder each. MOE_MLIR_CPU names
the CPU to compile for, such as "x86-64-v3" (AVX2); default: this machine's.
MOE_MLIR_KERNELS names a folder of packed kernels, which are then the only ones
for GPUs.
"""

import functools
import hashlib
import os
import threading
from collections import OrderedDict
from pathlib import Path

from . import cache
from ._native import native

# In the order in which PTX moves up.
_CHIPS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

# Executables of this process by key; the least recently used one goes first.
_LOADED_LIMIT = 1024
_loaded = OrderedDict()
_lock = threading.Lock()


def compile_cached(text: str, *, pipeline: str = "moe-to-cpu"):
    """The executable of a module's public functions on this machine's CPU.

    Args:
        text: the module as MLIR text.
        pipeline: the passes that take it to the LLVM dialect.

    Returns:
        moe_mlir._moe.Executable; `.function(name)` is callable.

    Raises:
        MoeError: the compiler's diagnostics.
    """
    memory_key = (text, pipeline, _target_cpu())
    with _lock:
        if memory_key in _loaded:
            _loaded.move_to_end(memory_key)
            return _loaded[memory_key]
    executable = load_or_compile(text, pipeline)
    with _lock:
        # Another thread may have been quicker; all callers share one copy.
        executable = _loaded.setdefault(memory_key, executable)
        while len(_loaded) > _LOADED_LIMIT:
            _loaded.popitem(last=False)
    return executable


def compile_ptx_cached(text: str, chip: str) -> str:
    """The PTX of a module's kernels for an NVIDIA chip such as "sm_90"."""
    code = _cached("ptx", text, chip,
                   lambda dump: native().compile_ptx(text, chip, dump_dir=dump).encode())
    return code.decode()


def compile_kernels_cached(text: str, chip: str) -> str:
    """JSON of the PTX of a module's kernels and of how to launch them."""
    if folder := os.environ.get("MOE_MLIR_KERNELS"):
        return _read_packed(folder, text, chip)
    code = _cached("kernels", text, chip,
                   lambda dump: native().compile_kernels(text, chip, dump_dir=dump).encode())
    return code.decode()


def pack_kernels(text: str, chip: str, folder) -> None:
    """Compiles a module for machines without a compiler, where MOE_MLIR_KERNELS names `folder`."""
    path = _packed_path(folder, text, chip)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(compile_kernels_cached(text, chip))


def _packed_path(folder, text, chip):
    return Path(folder) / (cache.make_key("kernels", text, chip) + ".json")


def _read_packed(folder, text, chip):
    # PTX runs on later chips too.
    chips = _CHIPS[: _CHIPS.index(chip) + 1] if chip in _CHIPS else (chip,)
    for candidate in reversed(chips):
        path = _packed_path(folder, text, candidate)
        if path.exists():
            return path.read_text()
    name = text.partition("@")[2].partition("(")[0]
    raise ImportError(
        f"expected kernels for this '{name}' and {chip} in {folder}, found none: pack them with "
        "moe_mlir.runtime.pack_kernels, or unset MOE_MLIR_KERNELS where the compiler is installed")


def set_num_threads(threads: int) -> None:
    """The most threads a kernel uses; 0 follows torch.set_num_threads."""
    native().set_num_threads(threads)


def get_num_threads() -> int:
    """The number of threads that a large kernel uses now."""
    return native().get_num_threads()


def load_or_compile(text: str, pipeline: str = "moe-to-cpu"):
    """As compile_cached, but always from the disk cache or from the compiler."""
    moe, cpu = native(), _target_cpu()
    target = "\0".join((pipeline, cpu, *moe.host_cpu()))
    object_bytes = _cached(
        "object", text, target,
        lambda dump: moe.compile_object(text, pipeline, cpu=cpu, dump_dir=dump))
    return moe.Executable(object_bytes)


def _target_cpu() -> str:
    """"native", or a smaller CPU whose kernels this machine is to run."""
    cpu = os.environ.get("MOE_MLIR_CPU", "native")
    missing = _missing_features(cpu)
    if missing:
        raise ValueError(f"expected MOE_MLIR_CPU to name a CPU whose code this machine runs, "
                         f"found '{cpu}', which needs {', '.join(missing)}")
    return cpu


@functools.cache
def _missing_features(cpu):
    if cpu == "native":
        return []
    needed = native().code_features(cpu).split(",")
    absent = {f[1:] for f in native().host_cpu()[1].split(",") if f.startswith("-")}
    return sorted(f[1:] for f in needed if f[1:] in absent)


def _cached(kind, text, target, compile_to_bytes):
    key = cache.make_key(kind, text, target, native().llvm_version(), _library_id())
    dump_root = os.environ.get("MOE_MLIR_DUMP_DIR")
    store = cache.open_default()
    if store is not None and not dump_root:
        payload = store.load(key)
        if payload is not None:
            return payload
    dump = os.path.join(dump_root, f"{kind}-{key[:16]}") if dump_root else ""
    payload = compile_to_bytes(dump)
    if store is not None:
        store.store(key, payload)
    return payload


@functools.cache
def _library_id() -> bytes:
    """Changes with every build of the compiler, which is inside the native module."""
    with open(native().__file__, "rb") as file:
        return hashlib.sha256(file.read()).digest()
