"""Compiled code for IR text: from memory, from the disk cache, or from the compiler.

Environment: see `moe_mlir.compiler.cache` and `moe_mlir._support.log`; MOE_MLIR_DUMP_DIR names a
folder that gets the IR after every pass of every compilation, one subfolder
each (`moe phases` makes a page of it). MOE_MLIR_KERNELS names a
folder of packed kernels, which are then the only ones for GPUs.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .._native import native
from .._support import files
from .._support.log import logger
from .._support.progress import Clock
from . import cache, crash_report
from .chips import runnable_chips
from .code_id import compiler_id
from .uncached import compile_bytes, target_cpu, tuned

if TYPE_CHECKING:
    from .._moe import Executable

# Executables of this process by key; the least recently used one goes first.
_LOADED_LIMIT = 1024
_loaded: OrderedDict[tuple[str, str, str], Executable] = OrderedDict()
_lock = threading.Lock()


def compile_cached(text: str, *, pipeline: str = "moe-to-cpu") -> Executable:
    """The executable of a module's public functions on this machine's CPU.

    Args:
        text: the module as MLIR text.
        pipeline: the passes that take it to the LLVM dialect.

    Returns:
        moe_mlir._moe.Executable; `.function(name)` is callable.

    Raises:
        MoeError: the compiler's diagnostics.
    """
    memory_key = (text, tuned(pipeline), target_cpu())
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
    return _cached("ptx", text, chip).decode()


def compile_kernels_cached(text: str, chip: str) -> str:
    """JSON of the PTX of a module's kernels and of how to launch them."""
    if folder := os.environ.get("MOE_MLIR_KERNELS"):
        return _read_packed(folder, text, chip)
    return _cached("kernels", text, chip).decode()


def pack_kernels(text: str, chip: str, folder: str | os.PathLike[str]) -> None:
    """Compiles a module for machines without a compiler, where MOE_MLIR_KERNELS names `folder`."""
    path = _packed_path(folder, text, chip)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, compile_kernels_cached(text, chip))


def _packed_path(folder, text, chip):
    return Path(folder) / (cache.make_key("kernels", text, chip) + ".json")


def _read_packed(folder, text, chip):
    for candidate in runnable_chips(chip):
        path = _packed_path(folder, text, candidate)
        if path.exists():
            return path.read_text()
    name = text.partition("@")[2].partition("(")[0]
    raise ImportError(
        f"expected kernels for this '{name}' and {chip} in {folder}, found none: pack them with "
        "moe_mlir.compiler.jit.pack_kernels, or unset MOE_MLIR_KERNELS where the compiler is installed")


def with_kernel_configs(text: str, kernel_configs: Mapping[str, str] | None) -> str:
    """A module that asks for kernels, which is part of every key as its text is.

    Args:
        text: the module as MLIR text.
        kernel_configs: names of ops and the kernel that all ops of a name get
            which ask for none themselves, as in {"softmax_mix": "<schedule = mma>"}.

    Raises:
        MoeError: the dialect has no such op, or there is no such configuration.
    """
    if not kernel_configs:
        return text
    module = native().Module.parse(text)
    for op, config in kernel_configs.items():
        module.set_kernel_config(op, config)
    return module.text(debug_info=True)


def set_num_threads(threads: int) -> None:
    """The most threads a kernel uses; 0 follows torch.set_num_threads."""
    native().set_num_threads(threads)


def get_num_threads() -> int:
    """The number of threads that a large kernel uses now."""
    return native().get_num_threads()


def load_or_compile(text: str, pipeline: str = "moe-to-cpu") -> Executable:
    """As compile_cached, but always from the disk cache or from the compiler."""
    moe = native()
    return moe.Executable(_cached("object", text, pipeline, tuned(pipeline), target_cpu(),
                                  *moe.host_cpu()))


def _cached(kind, text, target, *machine):
    """The bytes of a compilation; `machine` is what they depend on beside the target."""
    target_key = "\0".join((target, *machine))
    key = cache.make_key(kind, text, target_key, native().llvm_version(), compiler_id())
    dump_root = os.environ.get("MOE_MLIR_DUMP_DIR")
    store = cache.open_default()
    # Who wants to see the passes work wants them to run.
    shows_passes = dump_root or logger("remarks").isEnabledFor(logging.INFO)
    if store is not None and not shows_passes:
        payload = store.load(key)
        logger("cache").debug("%s %s in %s", "found" if payload else "missed", key[:16],
                              store.folder)
        if payload is not None:
            return payload
    dump = os.path.join(dump_root, f"{kind}-{key[:16]}") if dump_root else ""
    payload = _compile_and_tell(kind, text, target, dump)
    if store is not None:
        store.store(key, payload)
    return payload


def _compile_and_tell(kind, text, target, dump):
    """Compiles, with progress, remarks and, for a failure, a file that reproduces it."""
    name = re.search(r"func\.func (?:public )?@([\w$.-]+)", text)
    label = f"{name[1] if name else 'a module'} for {target}"
    remarks: list[str] = []
    start = time.perf_counter()
    try:
        with Clock(f"moe-mlir: compiling {label}"):
            payload = compile_bytes(kind, text, target, dump, remarks)
    except native().MoeError as error:
        raise crash_report.explain(error, kind, text, target) from None
    logger("compile").info("compiled %s in %.0f ms: %s of %d bytes", label,
                           1e3 * (time.perf_counter() - start), kind, len(payload))
    for remark in remarks:
        logger("remarks").info("%s", remark)
    return payload
