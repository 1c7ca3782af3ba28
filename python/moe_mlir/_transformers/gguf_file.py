"""A GGUF file: what it says of its model, and the rows of its tensors, which are read when asked for.

The layout is that of ggml (docs/gguf.md). The readers of gguf and of transformers make objects of
each word of a vocabulary, seconds of them; here a vocabulary is skipped, and transformers is given
a file without one.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import torch

# The numbers of a file by their types; a text is type 8, an array 9.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
# Of one, transformers would count the letters.
WORDS_OF_DESCRIPTION = 2


class Field(NamedTuple):
    """A value, of an array the number of elements, and the bytes that tell a key and the value."""

    value: Any
    data: bytes


class GGUFTensor(NamedTuple):
    """A tensor, its rows in the last dimension but one, and where its bytes are."""

    name: str
    type_name: str          # of gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    row_bytes: int
    begin: int

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])


class GGUFFile:
    """The keys and tensors of a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file, \
                    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                header = _Header(data)
                self.fields = header.fields()
                self.tensors = header.tensors(self.fields)
        except (struct.error, ValueError, KeyError, OverflowError) as error:
            raise ValueError(f"expected a GGUF file that is whole, found {path}: {error}") from error

    @property
    def architecture(self) -> str:
        return self.value("general.architecture")

    def value(self, key: str, default: Any = None) -> Any:
        return self.fields[key].value if key in self.fields else default

    @property
    def words(self) -> int | None:
        return self.value("tokenizer.ggml.tokens")

    def read(self, tensor: GGUFTensor, first: int, count: int) -> torch.Tensor:
        """The bytes of rows, `[rows, bytes]`; pages of a mapped file would count as our memory."""
        rows = torch.empty(count, tensor.row_bytes, dtype=torch.uint8)
        with open(self.path, "rb", buffering=0) as file:
            file.seek(tensor.begin + first * tensor.row_bytes)
            found = file.readinto(rows.numpy())
        if found != rows.nbytes:
            raise ValueError(f"expected {rows.nbytes} bytes of {tensor.name!r} in {self.path}, found "
                             f"{found}")
        return rows

    def write_description(self, path: Path) -> None:
        """A small GGUF file that says the same of the model.

        Arrays of the tokenizer have their first elements there, tensors one number. The number of
        words is a key of its own.
        """
        fields = [self._described(key, field) for key, field in self.fields.items()
                  if key != "general.alignment"]
        if self.words is not None and (key := f"{self.architecture}.vocab_size") not in self.fields:
            fields.append(_text(key) + struct.pack("<II", 4, self.words))
        tensors = [_text(tensor.name) + struct.pack("<IQIQ", 1, 1, 0, 0) for tensor in self.tensors]
        data = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields)) + b"".join(
            fields + tensors)
        path.write_bytes(data + bytes(-len(data) % 32 + 32))

    @staticmethod
    def _described(key, field):
        head = len(_text(key))
        kind, element, count = struct.unpack_from("<IIQ", field.data.ljust(head + 16), head)
        count = min(count, WORDS_OF_DESCRIPTION)
        if kind != _ARRAY or not key.startswith("tokenizer."):
            return field.data
        header = _Header(field.data, begin := head + 16)
        for _ in range(count):
            header.skip(element)
        return (field.data[:head] + struct.pack("<IIQ", kind, element, count)
                + field.data[begin:header.at])


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


class _Header:
    """Reads a file from its begin on."""

    def __init__(self, data, at: int = 0) -> None:
        self._data, self.at = data, at

    def fields(self) -> dict[str, Field]:
        if self._data[:4] != b"GGUF":
            raise ValueError("expected it to begin with 'GGUF'")
        self.at = 4
        version = self._number("I")
        if version not in (2, 3):
            raise ValueError(f"expected version 2 or 3, little-endian, found {version}")
        self._tensor_count, count = self._number("Q"), self._number("Q")
        found: dict[str, Field] = {}
        for _ in range(count):
            begin, key = self.at, self._read_text()
            if key in found:
                raise ValueError(f"expected each key once, found two of {key!r}")
            value = self._value(self._number("I"))
            found[key] = Field(value, self._data[begin:self.at])
        if not isinstance(found["general.architecture"].value, str):
            raise ValueError("expected 'general.architecture' to be a text")
        return found

    def tensors(self, fields: dict[str, Field]) -> list[GGUFTensor]:
        found = {}
        for _ in range(self._tensor_count):
            tensor = self._tensor()
            if tensor.name in found:
                raise ValueError(f"expected each tensor once, found two of {tensor.name!r}")
            found[tensor.name] = tensor
        alignment = fields["general.alignment"].value if "general.alignment" in fields else 32
        if not isinstance(alignment, int) or alignment <= 0 or alignment & alignment - 1:
            raise ValueError(f"expected an alignment that is a power of two, found {alignment}")
        begin = -(-self.at // alignment) * alignment
        for name, tensor in found.items():
            found[name] = tensor = tensor._replace(begin=begin + tensor.begin)
            if (end := tensor.begin + tensor.rows * tensor.row_bytes) > len(self._data):
                raise ValueError(f"expected {end} bytes, up to the end of {name!r}, found "
                                 f"{len(self._data)}")
        return list(found.values())

    def _tensor(self) -> GGUFTensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self._read_text()
        shape = tuple(self._number("Q") for _ in range(self._number("I")))[::-1]
        kind, begin = GGMLQuantizationType(self._number("I")), self._number("Q")
        weights, size = GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % weights:
            raise ValueError(f"expected rows of {name!r} of blocks of {weights}, found {list(shape)}")
        return GGUFTensor(name, kind.name, shape, shape[-1] // weights * size, begin)

    def _number(self, format: str):
        number, = struct.unpack_from(f"<{format}", self._data, self.at)
        self.at += struct.calcsize(format)
        return number

    def _read_text(self) -> str:
        size = self._number("Q")
        data = self._data[self.at:self.at + size]
        if len(data) != size:
            raise ValueError(f"expected a text of {size} bytes, found {len(data)}")
        self.at += size
        return data.decode()

    def _value(self, kind: int):
        if kind == _TEXT:
            return self._read_text()
        if kind != _ARRAY:
            return self._number(_NUMBERS[kind])
        begin = self.at
        count = struct.unpack_from("<Q", self._data, begin + 4)[0]
        self.skip(kind)
        return count

    def skip(self, kind: int) -> None:
        if kind in _NUMBERS:
            self.at += struct.calcsize(_NUMBERS[kind])
        elif kind == _TEXT:
            self._skip_texts(1)
        elif kind == _ARRAY:
            element, count = self._number("I"), self._number("Q")
            self._skip_array(element, count)
        else:
            raise ValueError(f"expected a type of ggml, found {kind}")
        if self.at > len(self._data):
            raise ValueError(f"expected {self.at} bytes or more, found {len(self._data)}")

    def _skip_array(self, element, count):
        if count > len(self._data):
            raise ValueError(f"expected an array that the file has room for, found {count} elements")
        if element in _NUMBERS:
            self.at += count * struct.calcsize(_NUMBERS[element])
        elif element == _TEXT:
            self._skip_texts(count)
        else:
            for _ in range(count):
                self.skip(element)

    def _skip_texts(self, count):
        unpack, data, at = struct.Struct("<Q").unpack_from, self._data, self.at
        for _ in range(count):
            at += 8 + unpack(data, at)[0]
        self.at = at
