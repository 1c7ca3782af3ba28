"""The simulator's library and its C ABI (simulator/include/MoE/Simulator/CApi.h)."""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib

from .._support.paths import PACKAGE


class Buffer(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("read_only", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("name", ctypes.c_char_p),
    ]


class Launch(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        ("dynamic_smem", ctypes.c_uint64),
        ("checks", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("numerics", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("params", ctypes.c_void_p),
        ("params_size", ctypes.c_uint64),
        ("buffers", ctypes.POINTER(Buffer)),
        ("num_buffers", ctypes.c_uint64),
    ]


def _library_path() -> pathlib.Path:
    configured = os.environ.get("MOE_MLIR_SIM_LIBRARY")
    if configured:
        return pathlib.Path(configured)
    return PACKAGE / "libmoe_sim.so"


@functools.cache
def library() -> ctypes.CDLL:
    """The simulator, loaded at its first use."""
    path = _library_path()
    if not path.exists():
        raise ImportError(
            f"expected the PTX simulator at {path}, found nothing: build the "
            "target moe_sim or set MOE_MLIR_SIM_LIBRARY to libmoe_sim.so"
        )
    loaded = ctypes.CDLL(str(path))
    # Strings come back as void pointers: they must go to moe_sim_free.
    loaded.moe_sim_load.restype = ctypes.c_void_p
    loaded.moe_sim_load.argtypes = [
        ctypes.c_char_p,
        ctypes.c_uint64,
        ctypes.POINTER(ctypes.c_void_p),
    ]
    loaded.moe_sim_unload.restype = None
    loaded.moe_sim_unload.argtypes = [ctypes.c_void_p]
    loaded.moe_sim_describe.restype = ctypes.c_void_p
    loaded.moe_sim_describe.argtypes = [ctypes.c_void_p]
    loaded.moe_sim_launch.restype = ctypes.c_void_p
    loaded.moe_sim_launch.argtypes = [
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.POINTER(Launch),
        ctypes.POINTER(ctypes.c_void_p),
    ]
    loaded.moe_sim_encode_tensor_map.restype = ctypes.c_void_p
    loaded.moe_sim_encode_tensor_map.argtypes = [
        ctypes.c_void_p,  # 128 bytes out
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_uint32,
        ctypes.POINTER(ctypes.c_uint64),
        ctypes.POINTER(ctypes.c_uint64),
        ctypes.POINTER(ctypes.c_uint32),
        ctypes.POINTER(ctypes.c_uint32),
        ctypes.c_uint32,
        ctypes.c_uint32,
    ]
    loaded.moe_sim_free.restype = None
    loaded.moe_sim_free.argtypes = [ctypes.c_void_p]
    return loaded


def take_string(pointer: int | None) -> str:
    """The text of a string that the library owns, which is then freed."""
    if pointer is None:
        raise RuntimeError("expected a text from the simulator, found none")
    text = ctypes.string_at(pointer).decode()
    library().moe_sim_free(pointer)
    return text
