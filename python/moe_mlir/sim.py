"""Run PTX kernels on the CPU, with checks.

>>> import numpy as np
>>> from moe_mlir import sim
>>> x = np.arange(64, dtype=np.float32)
>>> report = sim.launch(ptx, "scale", grid=1, block=64, args=[x, 2.0, 64])
>>> print(report)            # findings, if any, and the counters
>>> assert report.ok

Arrays are NumPy arrays or anything with `data_ptr()` on the CPU (torch
tensors); they are read and written in place, and each is one bounds-checked
allocation. Scalars take their type from the kernel's `.param`.
"""

from __future__ import annotations

import ctypes
import json
import operator
import os
import pathlib
from typing import Any, Sequence

import numpy as np

from ._sim_memory import (
    HostArray,
    device_address,
    is_tensor,
    regions_of,
    shape_of,
)
from ._sim_report import Finding, Report, SharedEvent

__all__ = [
    "ALLOWANCES",
    "CHECKS",
    "Finding",
    "Module",
    "PtxError",
    "Report",
    "SharedEvent",
    "TensorMap",
    "compile_triton",
    "launch",
    "launch_triton",
]

#: Every check that `launch` knows. Deadlock detection is always on.
CHECKS = ("race", "bounds", "uninit", "align")
#: What the race check lets pass if asked to.
ALLOWANCES = ("equal-stores", "unfenced-init", "equal-shared-stores")
_DECLARED_ALIGNMENT = 1 << len(CHECKS + ALLOWANCES)
_NO_SMEM_OPT_IN = 2 * _DECLARED_ALIGNMENT
_NONPORTABLE_CLUSTER = 2 * _NO_SMEM_OPT_IN
_TRACE_SHARED = 2 * _NONPORTABLE_CLUSTER

_NUMERICS = ("exact", "tensor_core", "perturbed")
_SWIZZLES = {"none": 0, "32B": 1, "64B": 2, "128B": 3}


class PtxError(ValueError):
    """The PTX text cannot be loaded; the message lists every reason."""


# --------------------------------------------------------------------------
# The C ABI (include/MoE/Simulator/CApi.h)
# --------------------------------------------------------------------------


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("read_only", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("name", ctypes.c_char_p),
    ]


class _Launch(ctypes.Structure):
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
        ("buffers", ctypes.POINTER(_Buffer)),
        ("num_buffers", ctypes.c_uint64),
    ]


def _library_path() -> pathlib.Path:
    configured = os.environ.get("MOE_MLIR_SIM_LIBRARY")
    if configured:
        return pathlib.Path(configured)
    return pathlib.Path(__file__).with_name("libmoe_sim.so")


_loaded_library = None


def _library() -> ctypes.CDLL:
    global _loaded_library
    if _loaded_library is not None:
        return _loaded_library
    path = _library_path()
    if not path.exists():
        raise ImportError(
            f"expected the PTX simulator at {path}, found nothing: build the "
            "target moe_sim or set MOE_MLIR_SIM_LIBRARY to libmoe_sim.so"
        )
    library = ctypes.CDLL(str(path))
    # Strings come back as void pointers: they must go to moe_sim_free.
    library.moe_sim_load.restype = ctypes.c_void_p
    library.moe_sim_load.argtypes = [
        ctypes.c_char_p,
        ctypes.c_uint64,
        ctypes.POINTER(ctypes.c_void_p),
    ]
    library.moe_sim_unload.restype = None
    library.moe_sim_unload.argtypes = [ctypes.c_void_p]
    library.moe_sim_describe.restype = ctypes.c_void_p
    library.moe_sim_describe.argtypes = [ctypes.c_void_p]
    library.moe_sim_launch.restype = ctypes.c_void_p
    library.moe_sim_launch.argtypes = [
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.POINTER(_Launch),
        ctypes.POINTER(ctypes.c_void_p),
    ]
    library.moe_sim_encode_tensor_map.restype = ctypes.c_void_p
    library.moe_sim_encode_tensor_map.argtypes = [
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
    library.moe_sim_free.restype = None
    library.moe_sim_free.argtypes = [ctypes.c_void_p]
    _loaded_library = library
    return library


def _take_string(pointer: int) -> str:
    """The text of a string that the library owns, which is then freed."""
    text = ctypes.string_at(pointer).decode()
    _library().moe_sim_free(pointer)
    return text


# --------------------------------------------------------------------------
# Arguments
# --------------------------------------------------------------------------


# CUtensorMapDataType; signed types without an entry have the unsigned one's,
# which only differs in reductions.
_TENSOR_MAP_TYPES = {
    "uint8": 0, "int8": 0, "bool": 0, "float8_e4m3fn": 0, "float8_e5m2": 0,
    "uint16": 1, "int16": 1, "uint32": 2, "int32": 3, "uint64": 4, "int64": 5,
    "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9,
}


class TensorMap:
    """A tensor-map argument (`CUtensorMap`) for cp.async.bulk.tensor.

    `box` is the tile's extent and `dims` the tensor's, innermost dimension
    first as in the CUDA driver; without `dims` the array's own shape counts.
    `element_strides` are as in the driver, too: along a dimension whose stride
    is s, every s-th element of the box is copied (the innermost dimension's
    stride has no effect).
    `dtype` names the elements where the array's type does not, as "bfloat16"
    in an array of 16-bit integers.
    """

    def __init__(
        self,
        array: Any,
        box: Sequence[int],
        *,
        dims: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
        element_strides: Sequence[int] | None = None,
        swizzle: str = "none",
        nan_fill: bool = False,
        dtype: str | None = None,
    ):
        if swizzle not in _SWIZZLES:
            raise ValueError(
                f"expected swizzle to be one of {sorted(_SWIZZLES)}, "
                f"found {swizzle!r}"
            )
        self.array = array
        shape, item_size = shape_of(array)
        name = dtype or str(array.dtype).removeprefix("torch.")
        if name not in _TENSOR_MAP_TYPES:
            raise ValueError(
                f"expected dtype to be one of {sorted(_TENSOR_MAP_TYPES)}, "
                f"found {name!r}"
            )
        self.data_type = _TENSOR_MAP_TYPES[name]
        self.dims = list(dims if dims is not None else reversed(shape))
        if len(box) != len(self.dims):
            raise ValueError(
                f"expected box to have {len(self.dims)} extents as the "
                f"tensor has, found {len(box)}"
            )
        self.box = list(box)
        if strides is None:
            strides = [item_size]
            for extent in self.dims[:-1]:
                strides.append(strides[-1] * extent)
        # Byte strides; the first is the item size.
        self.strides = list(strides)
        self.element_strides = list(element_strides or [1] * len(self.dims))
        if len(self.element_strides) != len(self.dims):
            raise ValueError(
                f"expected {len(self.dims)} element strides, "
                f"found {len(self.element_strides)}"
            )
        self.swizzle = _SWIZZLES[swizzle]
        self.nan_fill = nan_fill

    def encode(self, address: int) -> bytes:
        rank = len(self.dims)
        out = ctypes.create_string_buffer(128)
        error = _library().moe_sim_encode_tensor_map(
            out,
            address,
            self.data_type,
            rank,
            (ctypes.c_uint64 * rank)(*self.dims),
            (ctypes.c_uint64 * rank)(*self.strides[1:]),
            (ctypes.c_uint32 * rank)(*self.box),
            (ctypes.c_uint32 * rank)(*self.element_strides),
            self.swizzle,
            int(self.nan_fill),
        )
        if error:
            raise ValueError(_take_string(error))
        return out.raw


def _flags(what: str, names: Sequence[str], known: Sequence[str]) -> int:
    """A bit for each of `known` that is named."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"expected {what} out of {known}, found {unknown}")
    return sum(1 << known.index(name) for name in set(names))


def _encode_scalar(value: Any, param: dict[str, Any], what: str) -> bytes:
    type_name, size = param["type"], param["size"]
    if isinstance(value, (bytes, bytearray, memoryview)):
        data = bytes(value)
    elif isinstance(value, ctypes.Structure):
        data = bytes(value)
    elif isinstance(value, np.void):
        data = value.tobytes()
    elif isinstance(value, np.generic):
        data = value.tobytes()
    elif param["count"] != 1:
        raise TypeError(
            f"expected {what} to be {size} bytes (bytes, a numpy record or a "
            f"ctypes.Structure), found {type(value).__name__}"
        )
    elif type_name[0] == "f" or type_name == "b16" and isinstance(value, float):
        if not isinstance(value, (int, float)):
            raise TypeError(
                f"expected {what} to be a number, found {type(value).__name__}"
            )
        data = np.dtype(f"f{size}").type(value).tobytes()
    elif isinstance(value, float):
        # LLVM declares a float parameter as .b32 in some versions.
        data = np.dtype(f"f{size}").type(value).tobytes()
    else:
        try:
            number = operator.index(value)
        except TypeError:
            raise TypeError(
                f"expected {what} to be an array or a number for .{type_name}"
                f", found {type(value).__name__}"
            ) from None
        if not -(1 << (8 * size - 1)) <= number < 1 << (8 * size):
            raise ValueError(
                f"expected {what} to fit .{type_name}, found {number}"
            )
        data = (number % (1 << (8 * size))).to_bytes(size, "little")
    if len(data) != size:
        raise ValueError(
            f"expected {what} to have {size} bytes (.{type_name}"
            f"{'' if param['count'] == 1 else '[%d]' % param['count']}), "
            f"found {len(data)}"
        )
    return data


class _Arguments:
    """The parameter block of a launch and the memory it points to."""

    def __init__(
        self,
        kernel: dict[str, Any],
        args: Sequence[Any],
        names: Sequence[str] | None,
    ):
        params = kernel["params"]
        if len(args) != len(params):
            raise ValueError(
                f"expected {len(params)} arguments for kernel "
                f"{kernel['name']}, found {len(args)}"
            )
        if names is None:
            names = [f"argument {i}" for i in range(len(args))]
        arrays: list[HostArray] = []
        owners: list[str] = []
        slots: list[tuple[int, HostArray]] = []
        for i, value in enumerate(args):
            array = value.array if isinstance(value, TensorMap) else value
            if isinstance(array, np.ndarray) or is_tensor(array):
                slots.append((i, HostArray(array, names[i])))
                arrays.append(slots[-1][1])
                owners.append(names[i])
        self.regions = regions_of(arrays, owners)
        addresses = {i: device_address(a, self.regions) for i, a in slots}
        block = bytearray(max(1, kernel["param_bytes"]))
        for i, (value, param) in enumerate(zip(args, params)):
            what = f"{names[i]} ({param['name']})"
            if isinstance(value, TensorMap):
                data = value.encode(addresses[i])
            elif i in addresses:
                data = addresses[i].to_bytes(8, "little")
            else:
                data = _encode_scalar(value, param, what)
            if len(data) != param["size"]:
                raise TypeError(
                    f"expected {what} to be a .{param['type']} of "
                    f"{param['size']} bytes, found "
                    f"{type(value).__name__} of {len(data)} bytes"
                )
            offset = param["offset"]
            block[offset : offset + len(data)] = data
        self.params = ctypes.create_string_buffer(bytes(block), len(block))
        self.buffers = (_Buffer * max(1, len(self.regions)))()
        for buffer, region in zip(self.buffers, self.regions):
            buffer.data = region.address
            buffer.bytes = region.end - region.start
            buffer.read_only = region.read_only
            buffer.name = region.name.encode()


# --------------------------------------------------------------------------
# Modules and launches
# --------------------------------------------------------------------------


def _extent(value: Any, what: str) -> tuple[int, int, int]:
    extents = (value,) if isinstance(value, int) else tuple(value)
    if not 1 <= len(extents) <= 3 or any(int(e) < 1 for e in extents):
        raise ValueError(
            f"expected {what} to be one to three positive integers, "
            f"found {value!r}"
        )
    return tuple(int(e) for e in extents) + (1,) * (3 - len(extents))


def _read_ptx(ptx: Any) -> str:
    if isinstance(ptx, os.PathLike):
        return pathlib.Path(ptx).read_text()
    if "\n" not in ptx and not ptx.lstrip().startswith("."):
        return pathlib.Path(ptx).read_text()
    return ptx


class Module:
    """Parsed and decoded PTX: load once, launch often."""

    def __init__(self, ptx: str | os.PathLike):
        text = _read_ptx(ptx).encode()
        library = _library()
        error = ctypes.c_void_p()
        self._handle = library.moe_sim_load(
            text, len(text), ctypes.byref(error)
        )
        if not self._handle:
            raise PtxError(_take_string(error.value))
        description = json.loads(
            _take_string(library.moe_sim_describe(self._handle))
        )
        self.kernels: dict[str, dict[str, Any]] = {
            k["name"]: k for k in description["kernels"]
        }

    def __del__(self):
        # Late, the interpreter has taken the names of modules away.
        if getattr(self, "_handle", None) and _loaded_library is not None:
            _loaded_library.moe_sim_unload(self._handle)

    def launch(
        self,
        kernel: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any],
        *,
        dynamic_smem: int = 0,
        cluster: int | Sequence[int] | None = None,
        checks: Sequence[str] = CHECKS,
        allow: Sequence[str] = (),
        smem_alignment: str = "hardware",
        smem_opt_in: bool = True,
        nonportable_cluster: bool = False,
        seed: int = 0,
        policy: int = 0,
        numerics: str = "exact",
        threads: int = 0,
        trace_shared: bool = False,
        names: Sequence[str] | None = None,
    ) -> Report:
        """See `launch`; `names` are what errors and findings call the arguments."""
        if kernel not in self.kernels:
            raise ValueError(
                f"expected a kernel of this module "
                f"({', '.join(sorted(self.kernels))}), found {kernel!r}"
            )
        flags = _flags("checks", checks, CHECKS)
        flags |= _flags("allow", allow, ALLOWANCES) << len(CHECKS)
        if smem_alignment not in ("hardware", "declared"):
            raise ValueError(
                "expected smem_alignment to be 'hardware' or 'declared', "
                f"found {smem_alignment!r}"
            )
        if smem_alignment == "declared":
            flags |= _DECLARED_ALIGNMENT
        if not smem_opt_in:
            flags |= _NO_SMEM_OPT_IN
        if nonportable_cluster:
            flags |= _NONPORTABLE_CLUSTER
        if trace_shared:
            flags |= _TRACE_SHARED
        if numerics not in _NUMERICS:
            raise ValueError(
                f"expected numerics to be one of {_NUMERICS}, "
                f"found {numerics!r}"
            )
        if policy not in (0, 1):
            raise ValueError(f"expected policy to be 0 or 1, found {policy!r}")
        arguments = _Arguments(self.kernels[kernel], args, names)
        descriptor = _Launch(
            struct_size=ctypes.sizeof(_Launch),
            grid=_extent(grid, "grid"),
            block=_extent(block, "block"),
            cluster=(0, 0, 0) if cluster is None else _extent(cluster, "cluster"),
            dynamic_smem=dynamic_smem,
            checks=flags,
            policy=policy,
            seed=seed,
            numerics=_NUMERICS.index(numerics),
            threads=threads,
            params=ctypes.addressof(arguments.params),
            params_size=len(arguments.params),
            buffers=arguments.buffers,
            num_buffers=len(arguments.regions),
        )
        error = ctypes.c_void_p()
        result = _library().moe_sim_launch(
            self._handle,
            kernel.encode(),
            ctypes.byref(descriptor),
            ctypes.byref(error),
        )
        if not result:
            raise ValueError(_take_string(error.value))
        for region in arguments.regions:
            region.write_back()
        return Report(json.loads(_take_string(result)))


def launch(
    ptx: str | os.PathLike | Module,
    kernel: str,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Sequence[Any],
    *,
    dynamic_smem: int = 0,
    cluster: int | Sequence[int] | None = None,
    checks: Sequence[str] = CHECKS,
    allow: Sequence[str] = (),
    smem_alignment: str = "hardware",
    smem_opt_in: bool = True,
    nonportable_cluster: bool = False,
    seed: int = 0,
    policy: int = 0,
    numerics: str = "exact",
    threads: int = 0,
    trace_shared: bool = False,
) -> Report:
    """Runs `kernel` of `ptx` (text, a path, or a loaded `Module`).

    `seed` fixes the order of blocks, warps, lanes and asynchronous
    completions: equal seeds give equal runs. `policy` 0 reconverges diverged
    lanes as early as it can, 1 as late as independent thread scheduling
    allows. `numerics` is "exact" (products exact, sums in f32), "tensor_core"
    (truncated block sums) or "perturbed" (approximate instructions off by up
    to two ulp, sums in random order). `threads` 0 uses every core where blocks do
    not communicate, and one otherwise. With `trace_shared` the report lists every
    access to shared memory (`shared_trace`).

    `allow` names what the race check is to let pass: "equal-stores", two warps
    that store the same value to one place; "equal-shared-stores", the same of
    shared memory alone; and "unfenced-init", an asynchronous copy that uses an
    mbarrier without a proxy fence after its initialisation.
    Dynamic shared memory starts at a multiple of 1024, as on hardware where a
    kernel has no static one; with `smem_alignment="declared"` only where the
    kernel's declarations put it, which finds code that hopes for more.

    A launch that the chip of the PTX's `.target` would refuse is a ValueError:
    grids, blocks and clusters, the kernel's own bounds, more shared memory than
    the chip has, more than 48 KB of static shared memory, or, with
    `smem_opt_in=False`, more than 48 KB in all, which a host must opt in to
    (MAX_DYNAMIC_SHARED_SIZE_BYTES). Clusters of more than 8 blocks need
    `nonportable_cluster=True` (NON_PORTABLE_CLUSTER_SIZE_ALLOWED).

    `setmaxnreg` moves registers between the warps of a block, which starts with
    the kernel's registers a thread: as `.maxnreg` says, or what an SM's 65536
    give each thread of `.minnctapersm` blocks. With neither, ptxas ignores
    setmaxnreg, and so does the simulator. A warp waits for registers that other
    warps have not given back; if they never do, that is a "deadlock".
    """
    module = ptx if isinstance(ptx, Module) else Module(ptx)
    return module.launch(
        kernel,
        grid,
        block,
        args,
        dynamic_smem=dynamic_smem,
        cluster=cluster,
        checks=checks,
        allow=allow,
        smem_alignment=smem_alignment,
        smem_opt_in=smem_opt_in,
        nonportable_cluster=nonportable_cluster,
        seed=seed,
        policy=policy,
        numerics=numerics,
        threads=threads,
        trace_shared=trace_shared,
    )


# Behind what it uses of this module.
from ._sim_triton import compile_triton, launch_triton  # noqa: E402
