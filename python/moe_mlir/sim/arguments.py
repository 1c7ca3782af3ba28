"""The arguments of a kernel: its parameter block, and the memory that this points to."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from .library import Buffer, library, take_string
from .memory import HostArray, device_address, is_tensor, regions_of, shape_of

SWIZZLES = {"none": 0, "32B": 1, "64B": 2, "128B": 3}
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
        if swizzle not in SWIZZLES:
            raise ValueError(
                f"expected swizzle to be one of {sorted(SWIZZLES)}, "
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
        self.swizzle = SWIZZLES[swizzle]
        self.nan_fill = nan_fill

    def encode(self, address: int) -> bytes:
        rank = len(self.dims)
        out = ctypes.create_string_buffer(128)
        error = library().moe_sim_encode_tensor_map(
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
            raise ValueError(take_string(error))
        return out.raw


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
        shape = "" if param["count"] == 1 else f"[{param['count']}]"
        raise ValueError(
            f"expected {what} to have {size} bytes (.{type_name}{shape}), found {len(data)}"
        )
    return data


class Arguments:
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
        self.buffers = (Buffer * max(1, len(self.regions)))()
        for buffer, region in zip(self.buffers, self.regions):
            buffer.data = region.address
            buffer.bytes = region.end - region.start
            buffer.read_only = region.read_only
            buffer.name = region.name.encode()
