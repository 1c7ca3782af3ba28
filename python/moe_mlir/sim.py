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

import contextlib
import ctypes
import json
import operator
import os
import pathlib
from typing import Any, NamedTuple, Sequence

import numpy as np

__all__ = [
    "CHECKS",
    "Finding",
    "Module",
    "PtxError",
    "Report",
    "TensorMap",
    "launch",
]

#: Every check that `launch` knows. Deadlock detection is always on.
CHECKS = ("race", "bounds", "uninit", "align")

_NUMERICS = ("exact", "tensor_core", "perturbed")
_SWIZZLES = {"none": 0, "32B": 1, "64B": 2, "128B": 3}
_ALLOCATION_ALIGNMENT = 256  # what cudaMalloc promises


class PtxError(ValueError):
    """The PTX text cannot be loaded; the message lists every reason."""


class _FindingFields(NamedTuple):
    kind: str
    message: str


class Finding(_FindingFields):
    """A pair (kind, message) that also knows where it was found.

    `kind` is "race", "bounds", "uninit", "align", "deadlock" or "trap".
    `line` is the line in the PTX text, `source` "file:line" if the PTX has
    `.loc` directives, `block` a triple, and `other` describes the second
    access of a race. `count` says how often this finding was met.
    """

    kernel: str
    line: int
    source: str
    block: tuple[int, int, int]
    warp: int
    lane: int
    other: str
    count: int

    def __new__(cls, fields: dict[str, Any]) -> "Finding":
        self = super().__new__(cls, fields["kind"], fields["message"])
        self.kernel = fields["kernel"]
        self.line = fields["line"]
        self.source = fields["source"]
        self.block = tuple(fields["block"])
        self.warp = fields["warp"]
        self.lane = fields["lane"]
        self.other = fields["other"]
        self.count = fields["count"]
        return self


class Report:
    """What one launch found and counted."""

    def __init__(self, fields: dict[str, Any]):
        self.kernel: str = fields["kernel"]
        self.findings: list[Finding] = [Finding(f) for f in fields["findings"]]
        self.counters: dict[str, Any] = fields["counters"]
        self._text: str = fields["text"]

    @property
    def ok(self) -> bool:
        return not self.findings

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"<Report {self.kernel}: {len(self.findings)} findings>"


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


class TensorMap:
    """A tensor-map argument (`CUtensorMap`) for cp.async.bulk.tensor.

    `box` is the tile's extent and `dims` the tensor's, innermost dimension
    first as in the CUDA driver; without `dims` the array's own shape counts.
    """

    def __init__(
        self,
        array: Any,
        box: Sequence[int],
        *,
        dims: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
        swizzle: str = "none",
        nan_fill: bool = False,
    ):
        if swizzle not in _SWIZZLES:
            raise ValueError(
                f"expected swizzle to be one of {sorted(_SWIZZLES)}, "
                f"found {swizzle!r}"
            )
        shape, item_size = _shape_of(array)
        self.array = array
        self.item_size = item_size
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
        self.swizzle = _SWIZZLES[swizzle]
        self.nan_fill = nan_fill

    def encode(self, address: int) -> bytes:
        rank = len(self.dims)
        out = ctypes.create_string_buffer(128)
        error = _library().moe_sim_encode_tensor_map(
            out,
            address,
            self.item_size,
            rank,
            (ctypes.c_uint64 * rank)(*self.dims),
            (ctypes.c_uint64 * rank)(*self.strides),
            (ctypes.c_uint32 * rank)(*self.box),
            self.swizzle,
            int(self.nan_fill),
        )
        if error:
            raise ValueError(_take_string(error))
        return out.raw


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "data_ptr") and hasattr(value, "element_size")


def _shape_of(array: Any) -> tuple[list[int], int]:
    if _is_tensor(array):
        return list(array.shape), array.element_size()
    return list(array.shape), array.itemsize


class _Region:
    """Host bytes that the kernel may touch: one array, or the union of
    arrays that overlap. The kernel works on an aligned copy, so that sector
    counts and alignment findings do not depend on where the host allocator
    put the array; an array that starts inside a larger one keeps its offset
    from an aligned start."""

    def __init__(self, start: int, size: int, base: int, name: str):
        self.start, self.end, self.base = start, start + size, base
        self.name = name
        self.read_only = True

    def stage(self) -> None:
        size = self.end - self.start
        bias = (self.start - self.base) % _ALLOCATION_ALIGNMENT
        self._copy = np.empty(size + 2 * _ALLOCATION_ALIGNMENT, np.uint8)
        address = self._copy.ctypes.data
        self.address = address + -address % _ALLOCATION_ALIGNMENT + bias
        ctypes.memmove(self.address, self.start, size)

    def write_back(self) -> None:
        if not self.read_only:
            ctypes.memmove(self.start, self.address, self.end - self.start)


class _HostArray:
    def __init__(self, array: Any, what: str):
        if _is_tensor(array):
            if getattr(array, "device", None) is not None:
                if array.device.type != "cpu":
                    raise ValueError(
                        f"expected {what} to be on the cpu, found "
                        f"{array.device}"
                    )
            if not array.is_contiguous():
                raise ValueError(
                    f"expected {what} to be contiguous, found strides "
                    f"{tuple(array.stride())}: pass .contiguous()"
                )
            self.start = array.data_ptr()
            self.size = array.numel() * array.element_size()
            self.base = array.untyped_storage().data_ptr()
            self.read_only = False
            return
        if not array.flags.c_contiguous:
            raise ValueError(
                f"expected {what} to be contiguous, found strides "
                f"{array.strides}: pass numpy.ascontiguousarray(...)"
            )
        self.start = array.ctypes.data
        self.size = array.nbytes
        root = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        self.base = root.ctypes.data
        self.read_only = not array.flags.writeable


def _regions(arrays: list[_HostArray], names: list[str]) -> list[_Region]:
    """Merges arrays that share bytes: they are one allocation."""
    merged: list[_Region] = []
    order = sorted(range(len(arrays)), key=lambda i: arrays[i].start)
    for i in order:
        array = arrays[i]
        last = merged[-1] if merged else None
        if last is not None and array.size and array.start < last.end:
            last.end = max(last.end, array.start + array.size)
        elif last is not None and array.size == 0 and array.start <= last.end:
            pass
        else:
            last = _Region(array.start, array.size, array.base, names[i])
            merged.append(last)
        last.read_only &= array.read_only
    for region in merged:
        region.stage()
    return merged


def _device_address(array: _HostArray, regions: list[_Region]) -> int:
    # Arrays may touch: an address belongs to the last region that starts there.
    region = [r for r in regions if r.start <= array.start][-1]
    return region.address + (array.start - region.start)


_INTEGER_TYPES = {"s": "i", "u": "u", "b": "u"}


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

    def __init__(self, kernel: dict[str, Any], args: Sequence[Any]):
        params = kernel["params"]
        if len(args) != len(params):
            raise ValueError(
                f"expected {len(params)} arguments for kernel "
                f"{kernel['name']}, found {len(args)}"
            )
        arrays: list[_HostArray] = []
        names: list[str] = []
        slots: list[tuple[int, _HostArray]] = []
        for i, value in enumerate(args):
            array = value.array if isinstance(value, TensorMap) else value
            if isinstance(array, np.ndarray) or _is_tensor(array):
                slots.append((i, _HostArray(array, f"argument {i}")))
                arrays.append(slots[-1][1])
                names.append(f"argument {i}")
        self.regions = _regions(arrays, names)
        addresses = {i: _device_address(a, self.regions) for i, a in slots}
        block = bytearray(max(1, kernel["param_bytes"]))
        for i, (value, param) in enumerate(zip(args, params)):
            what = f"argument {i} ({param['name']})"
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
        if getattr(self, "_handle", None):
            with contextlib.suppress(Exception):
                _library().moe_sim_unload(self._handle)

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
        seed: int = 0,
        policy: int = 0,
        numerics: str = "exact",
        threads: int = 0,
    ) -> Report:
        """See `launch`."""
        if kernel not in self.kernels:
            raise ValueError(
                f"expected a kernel of this module "
                f"({', '.join(sorted(self.kernels))}), found {kernel!r}"
            )
        unknown = [c for c in checks if c not in CHECKS]
        if unknown:
            raise ValueError(
                f"expected checks out of {CHECKS}, found {unknown}"
            )
        if numerics not in _NUMERICS:
            raise ValueError(
                f"expected numerics to be one of {_NUMERICS}, "
                f"found {numerics!r}"
            )
        if policy not in (0, 1):
            raise ValueError(f"expected policy to be 0 or 1, found {policy!r}")
        arguments = _Arguments(self.kernels[kernel], args)
        descriptor = _Launch(
            struct_size=ctypes.sizeof(_Launch),
            grid=_extent(grid, "grid"),
            block=_extent(block, "block"),
            cluster=(0, 0, 0) if cluster is None else _extent(cluster, "cluster"),
            dynamic_smem=dynamic_smem,
            checks=sum(1 << CHECKS.index(c) for c in set(checks)),
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
    seed: int = 0,
    policy: int = 0,
    numerics: str = "exact",
    threads: int = 0,
) -> Report:
    """Runs `kernel` of `ptx` (text, a path, or a loaded `Module`).

    `seed` fixes the order of blocks, warps, lanes and asynchronous
    completions: equal seeds give equal runs. `policy` 0 reconverges diverged
    lanes as early as it can, 1 as late as independent thread scheduling
    allows. `numerics` is "exact" (products exact, sums in f32), "tensor_core"
    (truncated block sums) or "perturbed" (approximate instructions off by up
    to two ulp, sums in random order). `threads` 0 uses every core where blocks do
    not communicate, and one otherwise.
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
        seed=seed,
        policy=policy,
        numerics=numerics,
        threads=threads,
    )
