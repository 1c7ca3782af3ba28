"""The weights of an artifact: a safetensors file that is written a tensor at a time, and mapped.

Each tensor starts at a multiple of 64 bytes, where kernels take it as it lies. The format allows no
gaps, so tensors of other sizes are followed by one that fills up; readers of the format see both.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import mmap
import os
import struct
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .._support import files
from .arguments import DTYPES

if TYPE_CHECKING:
    import torch

NAME = "weights.safetensors"
ALIGNMENT = 64
_PADDING = "__padding__/"
_DTYPES = {"BOOL": "bool", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
           "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
_SIZES = {"BOOL": 1, "I8": 1, "I16": 2, "I32": 4, "I64": 8, "F16": 2, "BF16": 2, "F32": 4, "F64": 8}
# Python's hash and file objects take this much at once without a copy of their own.
_CHUNK = 1 << 24


# ---- writing -----------------------------------------------------------------------


def write(path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor]) -> dict:
    """Writes the tensors; no more than one of them is copied at a time.

    Returns:
        What the manifest says of the file.
    """
    header = _header(tensors)
    whole = hashlib.sha256(header)
    size = len(header)
    with open(path, "wb") as file:
        file.write(header)
        for tensor in tensors.values():
            size += _write_tensor(file, whole, tensor)
    return {"sha256": whole.hexdigest(), "size": size,
            "header_sha256": hashlib.sha256(header).hexdigest()}


def is_reserved(name: str) -> bool:
    """Whether no tensor can be stored under a name."""
    return name == "__metadata__" or name.startswith(_PADDING)


def _header(tensors) -> bytes:
    names = {value: key for key, value in _DTYPES.items()}
    entries: dict[str, dict] = {}
    at = 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in names:
            raise ValueError(f"expected '{name}' to be of one of the types {sorted(names)}, found "
                             f"{dtype}")
        end = at + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": names[dtype], "shape": list(tensor.shape),
                         "data_offsets": [at, end]}
        at = end + -end % ALIGNMENT
        if at != end:
            entries[f"{_PADDING}{len(entries)}"] = {"dtype": "I8", "shape": [at - end],
                                                    "data_offsets": [end, at]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _write_tensor(file, digest, tensor) -> int:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    for at in range(0, len(flat), _CHUNK):
        piece = flat[at:at + _CHUNK]
        digest.update(piece)
        file.write(piece)
    padding = bytes(-len(flat) % ALIGNMENT)
    digest.update(padding)
    file.write(padding)
    return len(flat) + len(padding)


# ---- reading -----------------------------------------------------------------------


def map_file(path: str | os.PathLike[str]) -> mmap.mmap | bytes:
    """The bytes of a file, on pages that all processes share that map it."""
    with files.open_regular(path) as file:
        # There is no mapping of no bytes.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if os.fstat(
            file.fileno()).st_size else b""


def header_of(data: mmap.mmap | bytes) -> bytes:
    """The part of the file that says where its tensors lie."""
    length = struct.unpack("<Q", data[:8])[0] if len(data) >= 8 else 0
    if len(data) < 8 or length > len(data) - 8:
        raise ValueError(f"{NAME}: ends within its header")
    return data[:8 + length]


def tensors_of(data: mmap.mmap | bytes) -> dict[str, Any]:
    """The tensors of the file by name, of torch if it is installed, else of numpy.

    They lie in `data`, and may not be written to; those that start elsewhere
    than kernels expect are copied.
    """
    header = header_of(data)
    found, spans = {}, []
    for name, entry in _entries(header).items():
        begin, end = entry["data_offsets"]
        spans.append((begin, end, name))
        count = _count(name, entry, len(data) - len(header))
        if not name.startswith(_PADDING):
            found[name] = _tensor(data, len(header) + begin, count, name, entry)
    spans.sort()
    for (_, end, before), (begin, _, name) in zip(spans, spans[1:]):
        if begin < end:
            raise ValueError(f"{NAME}: expected the data of '{name}' apart from that of '{before}', "
                             f"found both at byte {begin}")
    return found


def _entries(header) -> dict:
    try:
        entries = json.loads(header[8:])
        entries.pop("__metadata__", None)
        for entry in entries.values():
            integers = [*entry["shape"], *entry["data_offsets"]]
            if len(entry["data_offsets"]) != 2 or not all(type(i) is int and i >= 0
                                                          for i in integers):
                raise TypeError("expected sizes and two offsets of at least 0")
            if entry["dtype"] not in _DTYPES:
                raise TypeError(f"expected weights of a known element type, found {entry['dtype']}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{NAME}: expected a header that says where tensors lie, found another: "
                         f"{error}") from None
    return entries


def _count(name, entry, available) -> int:
    """The elements of a tensor that lies within the file."""
    begin, end = entry["data_offsets"]
    count = 1
    for size in entry["shape"]:
        count *= size
    if not begin <= end <= available or end - begin != count * _SIZES[entry["dtype"]]:
        raise ValueError(f"{NAME}: expected the data of '{name}' within the file")
    return count


def _tensor(data, offset, count, name, entry):
    dtype = _DTYPES[entry["dtype"]]
    if importlib.util.find_spec("torch"):
        import torch

        if not count:
            return torch.empty(entry["shape"], dtype=getattr(torch, dtype))
        with warnings.catch_warnings():
            # Nothing writes to weights.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            tensor = torch.frombuffer(data, dtype=getattr(torch, dtype), count=count, offset=offset)
        tensor = tensor.view(entry["shape"])
        return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()
    import numpy

    if dtype == "bfloat16":
        raise ValueError(f"expected torch to be installed for '{name}', which is of bfloat16, found "
                         "numpy alone, which has no such type")
    array = numpy.frombuffer(data, dtype, count, offset).reshape(entry["shape"])
    return array if array.ctypes.data % ALIGNMENT == 0 else array.copy()


def find(tensors: Mapping[str, Any], name: str) -> Any:
    """The tensor of a name among those of the file."""
    if name not in tensors:
        raise ValueError(f"{NAME}: expected '{name}', found no such tensor")
    return tensors[name]


def first_value(tensors: Mapping[str, Any], stored_as: str, name: str, dtype: str, shape: list[int],
                file: str) -> Any:
    """The stored first value of `name`, which calls update, of the type that a description says.

    Raises:
        ValueError: it is of another type; in the words of `file`, which describes it.
    """
    first = find(tensors, stored_as)
    if [list(first.shape), str(first.dtype).removeprefix("torch.")] != [shape, DTYPES[dtype]]:
        raise ValueError(f"{file}: expected the first value of '{name}' to be {dtype} {shape}, found "
                         f"{first.dtype} {list(first.shape)}")
    return first


def element_type(tensor: torch.Tensor) -> str:
    """The type of a tensor's elements as manifests name it.

    Raises:
        ValueError: they have none for it.
    """
    names = {dtype: name for name, dtype in DTYPES.items() if name != "index"}
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in names:
        raise ValueError(f"expected tensors of one of the types {sorted(names)}, found {name}")
    return names[name]


def zeros(shape, dtype: str) -> Any:
    """A tensor as `tensors_of` gives them."""
    if importlib.util.find_spec("torch"):
        import torch

        return torch.zeros(shape, dtype=getattr(torch, dtype))
    import numpy

    return numpy.zeros(shape, dtype)
