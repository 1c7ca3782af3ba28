"""What the code of an artifact asks of the tensors of a call: kind, memory, device."""

from __future__ import annotations

from .._native import native

# Types of MLIR -> names of torch and numpy.
DTYPES = {"i1": "bool", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64",
          "index": "int64", "f16": "float16", "bf16": "bfloat16", "f32": "float32",
          "f64": "float64"}


def require_kind(what, value, expected) -> None:
    """Raises if a value is no tensor of the type and sizes that the manifest describes."""
    shape = getattr(value, "shape", None)
    if shape is None or not hasattr(value, "dtype"):
        raise TypeError(f"{what}: expected a tensor, found {type(value).__name__}")
    wanted, found = DTYPES[expected["dtype"]], str(value.dtype).removeprefix("torch.")
    if found != wanted:
        raise TypeError(f"{what}: expected {wanted}, found {found}")
    sizes = expected.get("shape", [])
    if len(shape) != len(sizes) or any(e not in (-1, s) for e, s in zip(sizes, shape)):
        raise ValueError(f"{what}: expected shape ["
                         f"{', '.join('?' if e < 0 else str(e) for e in sizes)}], found "
                         f"{list(shape)}")


def require_writable(what, value) -> None:
    """Raises if kernels cannot write a value where it lies."""
    if contiguous(value) is not value:
        raise ValueError(f"expected {what} to be contiguous, found strides; pass .contiguous()")
    if hasattr(value, "flags") and not value.flags.writeable:
        raise ValueError(f"expected {what} to be writable, found a read-only array; pass a copy")


def require_one_device(name, buffers) -> None:
    """Kernels read all buffers by their addresses on one device."""
    places = {str(getattr(b, "device", "cpu")) for b in buffers if hasattr(b, "shape")}
    if len(places) > 1:
        raise ValueError(f"expected all tensors of '{name}' on one device, found them on "
                         f"{' and '.join(sorted(places))}")


def require_no_alias(name, arguments, out) -> None:
    """Raises where a result shares memory with an argument or another result.

    Code that writes the one while it reads the other would take new values for old ones.
    """
    buffers = [value for value in (*arguments, *out) if hasattr(value, "shape")]
    first = len(buffers) - len(out)
    pair = native().aliasing_pair(buffers, [*range(first, len(buffers))])
    if pair is None:
        return
    kinds = [("argument", i) for i, value in enumerate(arguments) if hasattr(value, "shape")]
    kinds += [("result", i) for i in range(len(out))]
    (_, result), (what, position) = (kinds[i] for i in pair)
    raise ValueError(f"expected memory of its own for result {result} of '{name}', found that of "
                     f"{what} {position}")


def contiguous(value):
    """The same numbers in row-major memory, as kernels read them."""
    if hasattr(value, "is_contiguous"):
        return value if value.is_contiguous() else value.contiguous()
    if hasattr(value, "flags") and not value.flags.c_contiguous:
        return value.copy(order="C")
    return value
