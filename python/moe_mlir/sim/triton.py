"""Kernels that Triton compiled, in the simulator: what Triton's own launcher for CUDA does."""

from __future__ import annotations

import contextlib
import functools
import operator
import re
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from .arguments import SWIZZLES, TensorMap
from .memory import HostArray, is_tensor
from .module import CHECKS, Module, extent

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

    from .report import Report

# Element types of Triton's pointers -> what an array may hold. NumPy lacks some: their bits do.
_ELEMENTS = {
    "fp64": ("float64",), "fp32": ("float32",), "fp16": ("float16",),
    "bf16": ("bfloat16", "uint16", "int16"),
    "fp8e4nv": ("float8_e4m3fn", "uint8", "int8"), "fp8e5": ("float8_e5m2", "uint8", "int8"),
    "fp8e4b15": ("uint8", "int8"),
    "i1": ("bool",), "u1": ("bool",),
    **{f"{letter}{bits}": (f"{sign}int{bits}",)
       for letter, sign in (("i", ""), ("u", "u")) for bits in (8, 16, 32, 64)},
}
_FLOATS = {"fp16": "e", "fp32": "f", "f32": "f", "fp64": "d"}
# Where CUtensorMapDataType numbers a type otherwise than the device's tensormap.replace.
_TENSOR_MAP_TYPES = {8: 10, 9: 8, 10: 9}
_TENSOR_MAP_TF32 = 11
# The chips that Triton 3.9 compiles for. At another number its LLVM ends the process.
_CAPABILITIES = (60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121)
# What Triton emits although the memory model forbids it, and no author of a kernel can change.
_TRITONS_WAYS = ("unfenced-init", "equal-shared-stores", "repeated-setmaxnreg")


class _Argument(NamedTuple):
    """One argument of the Python function; `path` finds it in the signature."""

    name: str
    path: tuple
    type: str
    value: Any


# ------------------------------------------------------------------------------------------------
# The arguments of the Python function
# ------------------------------------------------------------------------------------------------


def _metadata(compiled):
    """The metadata of a kernel that launches here, else an error."""
    if not hasattr(compiled, "asm") or not hasattr(compiled, "metadata"):
        hint = (": pass it to compile_triton first" if hasattr(compiled, "warmup") else "")
        raise TypeError("expected a kernel compiled by Triton (of triton.compile or "
                        f"compile_triton), found {type(compiled).__name__}{hint}")
    if "ptx" not in compiled.asm:
        raise ValueError("expected a kernel compiled for a CUDA target, found one for "
                         f"{compiled.metadata.target.backend!r}")
    if not hasattr(compiled.src, "fn"):
        raise TypeError("expected a kernel compiled from a Python function, found one from "
                        f"{type(compiled.src).__name__}: launch its PTX (compiled.asm['ptx']) "
                        "with sim.launch")
    return compiled.metadata


def _given(compiled, args) -> dict[str, Any]:
    """The arguments by name; those that were compiled in may be left out."""
    params = compiled.src.fn.params
    names = [p.name for p in params]
    if isinstance(args, Mapping):
        if unknown := sorted(set(args) - set(names)):
            raise ValueError(f"expected arguments out of {names}, found {unknown}")
        return dict(args)
    args = list(args)
    annotated = [p.name for p in params if not p.is_constexpr]
    passed = [n for n in names if compiled.src.signature[n] != "constexpr"]
    for order in (names, annotated, passed):
        if len(order) == len(args):
            return dict(zip(order, args))
    raise ValueError(f"expected {len(passed)} arguments for kernel {compiled.metadata.name} "
                     f"({', '.join(passed)}), or all {len(names)} with those that were compiled "
                     f"in, found {len(args)}")


def _same_constant(found, expected) -> bool:
    found, expected = (getattr(v, "value", v) for v in (found, expected))
    try:
        return bool(found == expected)
    except Exception:  # An array has no truth.
        return False


def _flatten(compiled, given) -> list[_Argument]:
    """The arguments that the kernel takes, in order; checks those that were compiled in."""
    constants = compiled.src.constants
    found = []

    def visit(name, path, kind, value):
        if isinstance(kind, tuple):
            if not isinstance(value, (tuple, list)) or len(value) != len(kind):
                raise TypeError(f"expected {name!r} to be a tuple of {len(kind)}, found {value!r}")
            for i, (inner, element) in enumerate(zip(kind, value)):
                visit(f"{name}[{i}]", (*path, i), inner, element)
        elif kind != "constexpr":
            found.append(_Argument(name, path, kind, value))
        elif path in constants and not _same_constant(value, constants[path]):
            raise ValueError(f"expected {name!r} to be {constants[path]!r}, which was compiled "
                             f"into the kernel, found {value!r}: compile it for this value")

    for i, param in enumerate(compiled.src.fn.params):
        kind = compiled.src.signature[param.name]
        if param.name in given:
            visit(param.name, (i,), kind, given[param.name])
        elif kind != "constexpr":
            raise ValueError(f"expected a value for argument {param.name!r} of kernel "
                             f"{compiled.metadata.name}, found none")
    return found


# ------------------------------------------------------------------------------------------------
# The parameters of the PTX kernel
# ------------------------------------------------------------------------------------------------


def _is_array(value) -> bool:
    return isinstance(value, np.ndarray) or is_tensor(value)


def _pointer(name, kind, value, divisor):
    """An array that fits a pointer, or the address 0 for None."""
    if value is None:
        return bytes(8)
    if not _is_array(value):
        raise TypeError(f"expected {name!r} to be an array or a tensor ({kind}), found "
                        f"{type(value).__name__}")
    element = kind.lstrip("*").removeprefix("k")
    dtype = str(value.dtype).removeprefix("torch.")
    if element in _ELEMENTS and dtype not in _ELEMENTS[element]:
        raise TypeError(f"expected {name!r} to have elements of {_ELEMENTS[element][0]} as the "
                        f"kernel was compiled for ({kind}), found {dtype}")
    host = HostArray(value, repr(name))
    if (host.start - host.base) % divisor:
        raise ValueError(f"expected {name!r} to start at a multiple of {divisor} bytes, which the "
                         f"kernel was compiled for, found {host.start - host.base} bytes behind "
                         "the start of its memory: compile it for such a view")
    return value


def _bfloat16(value) -> bytes:
    bits = int(np.float32(value).view(np.uint32))
    if value != value:
        return struct.pack("<H", 0x7FC0)
    return struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


def _scalar(name, kind, value, divisor):
    """The bytes of a number."""
    if kind in _FLOATS or kind == "bf16":
        if not isinstance(value, (int, float, np.number)):
            raise TypeError(f"expected {name!r} to be a number ({kind}), found "
                            f"{type(value).__name__}")
        value = float(value)
        return (_bfloat16(value) if kind == "bf16"
                else np.array(value, _FLOATS[kind]).tobytes())
    if not (match := re.fullmatch(r"([iu])(1|8|16|32|64)", kind)):
        raise NotImplementedError(f"expected a pointer, a number or a tensor descriptor for "
                                  f"{name!r}, found an argument of type {kind}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"expected {name!r} to be an integer ({kind}), found "
                        f"{type(value).__name__}") from None
    bits = int(match[2])
    low, high = (0, 1 << bits) if match[1] == "u" or bits == 1 else (
        -(1 << bits - 1), 1 << bits - 1)
    if not low <= number < high:
        raise ValueError(f"expected {name!r} to fit {kind}, found {number}")
    if number % divisor:
        raise ValueError(f"expected {name!r} to be a multiple of {divisor}, which the kernel was "
                         f"compiled for, found {number}: compile it for this value")
    return (number % (1 << bits)).to_bytes(max(1, bits // 8), "little")


def _tensor_map(name, descriptor, meta):
    """The tensor map that Triton's launcher makes of a descriptor."""
    if meta.get("is_im2col") or meta["fp4_padded"]:
        what = "im2col" if meta.get("is_im2col") else "padded 4-bit"
        raise NotImplementedError(f"expected a tiled tensor map for {name!r}, found a {what} one, "
                                  "which the simulator does not know")
    size = meta["elem_size"]
    swizzle = {number: text for text, number in SWIZZLES.items()}[meta["swizzle"]]
    strides = [size, *(size * s for s in reversed(descriptor.strides[:-1]))]
    map = TensorMap(descriptor.base, list(reversed(meta["block_size"])),
                        dims=list(reversed(descriptor.shape)), strides=strides, swizzle=swizzle,
                        nan_fill=descriptor.padding == "nan")
    map.data_type = _TENSOR_MAP_TYPES.get(meta["elem_type"], meta["elem_type"])
    if descriptor.round_f32_to_tf32:
        map.data_type = _TENSOR_MAP_TF32
    return map


def _descriptor(name, kind, value, meta):
    """(name, parameter) pairs of a tensor descriptor: itself, its shape, its strides."""
    if not hasattr(value, "block_shape"):
        raise TypeError(f"expected {name!r} to be a triton.tools.tensor_descriptor."
                        f"TensorDescriptor, found {type(value).__name__}")
    element = re.findall(r"tensordesc(?:_im2col)?<([^[>]*)", kind)[0]
    base = _pointer(f"{name}.base", "*" + element, value.base, 16)
    blocks = [int(n) for n in re.findall(r"\[([^\]]*)\]", kind)[0].split(",")]
    if list(value.block_shape) != blocks:
        raise ValueError(f"expected {name!r} to have blocks of {blocks}, which the kernel was "
                         f"compiled for, found {list(value.block_shape)}")

    def numbers(what, kind, values):
        return [(f"{name}.{what}", _scalar(f"{name}.{what}", kind, v, 1)) for v in values]

    if meta is not None:
        head = [(name, _tensor_map(name, value, meta))]
    else:
        # A chip without tensor maps: the kernel computes addresses.
        flags = [value.padding == "nan", value.round_f32_to_tf32]
        head = [(f"{name}.base", base), *numbers("shape", "i64", value.shape),
                *numbers("strides", "i64", value.strides), *numbers("padding", "i1", flags)]
    return head + numbers("shape", "i32", value.shape) + numbers("strides", "i64", value.strides)


def _divisor(attributes) -> int:
    return max((n for key, n in attributes or () if key == "tt.divisibility"), default=1)


def _parameters(compiled, args) -> list:
    """(name, parameter) pairs for sim.launch, without the hidden ones."""
    metas = iter(compiled.metadata.tensordesc_meta or ())
    pairs = []
    for name, path, kind, value in _flatten(compiled, _given(compiled, args)):
        divisor = _divisor(compiled.src.attrs.get(path))
        if kind.startswith("tensordesc"):
            pairs += _descriptor(name, kind, value, next(metas, None))
        elif kind.startswith("*"):
            pairs.append((name, _pointer(name, kind, value, divisor)))
        else:
            pairs.append((name, _scalar(name, kind, value, divisor)))
    return pairs


def _scratch(size, blocks, value):
    """The memory of a hidden pointer."""
    return np.full(size * blocks, value, np.uint8) if size else bytes(8)


# ------------------------------------------------------------------------------------------------
# Compilation and launch
# ------------------------------------------------------------------------------------------------

_load = functools.lru_cache(maxsize=256)(Module)
_compiling = threading.Lock()


class _Chip:
    """What Triton asks its driver for while it compiles."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self):
        return -self.arch  # Triton keeps kernels by device; no GPU has this number.

    def get_current_stream(self, device):
        return 0


@contextlib.contextmanager
def _active(chip):
    from triton.runtime import driver

    with _compiling:
        before = driver._active
        driver.set_active(chip)
        try:
            yield
        finally:
            driver.set_active(before)


class _Pointer:
    """A NumPy array as Triton looks at tensors: elements and alignment."""

    def __init__(self, array):
        self.dtype = array.dtype
        host = HostArray(array, "an argument")
        self.offset = host.start - host.base

    def data_ptr(self):
        return self.offset


def capability_of(chip: str) -> int:
    """The number of a chip's name.

    Raises:
        ValueError: it is no chip of NVIDIA that Triton compiles for.

    >>> capability_of("sm_90a")
    90
    """
    match = re.fullmatch(r"sm_(\d{2,3})a?", chip)
    if match is None or int(match[1]) not in _CAPABILITIES:
        names = ", ".join(f"sm_{number}" for number in _CAPABILITIES)
        raise ValueError(f"expected a chip among {names}, found {chip!r}")
    return int(match[1])


def compile_triton(
    kernel: JITFunction,
    args: Sequence[Any] | Mapping[str, Any],
    *,
    chip: str = "sm_90",
    **options: Any,
) -> CompiledKernel:
    """Compiles a `@triton.jit` function for a chip, without a GPU.

    The kernel is specialised as `kernel[grid](*args, **options)` would do: on the types of `args`,
    on pointers and integers that are multiples of 16, and on integers equal to 1.

    Args:
        kernel: a `@triton.jit` function; of an autotuned one pass `.fn` and a configuration.
        args: NumPy arrays, CPU tensors, numbers and `TensorDescriptor`s, a sequence in the order of
            the function's parameters or a mapping by name.
        chip: "sm_80", "sm_89", "sm_90" ..; for sm_90 and above the letter a may follow.
        options: `tl.constexpr` parameters by name, and Triton's options `num_warps`, `num_stages`,
            `num_ctas` ..

    Returns:
        Triton's compiled kernel, with `asm["ptx"]`, `metadata` and `src`.

    Raises:
        TypeError: `kernel` is no `@triton.jit` function.
        ValueError: `chip` is no chip of NVIDIA that Triton compiles for.
    """
    from triton.runtime.jit import JITFunction

    if not isinstance(kernel, JITFunction):
        raise TypeError(f"expected a @triton.jit function, found {type(kernel).__name__}"
                        + (": pass its .fn, and a configuration as options"
                           if hasattr(kernel, "fn") else ""))
    capability = capability_of(chip)

    def as_triton_looks(value):
        return _Pointer(value) if isinstance(value, np.ndarray) else value

    positional: list[Any] = []
    named = dict(options)
    if isinstance(args, Mapping):
        named.update((name, as_triton_looks(value)) for name, value in args.items())
    else:
        positional = [as_triton_looks(value) for value in args]
    with _active(_Chip(capability)):
        return kernel.warmup(*positional, grid=(1,), **named)


def launch_triton(
    compiled: CompiledKernel,
    grid: int | Sequence[int],
    args: Sequence[Any] | Mapping[str, Any],
    *,
    checks: Sequence[str] = CHECKS,
    allow: Sequence[str] = _TRITONS_WAYS,
    smem_alignment: Literal["hardware", "declared"] = "hardware",
    seed: int = 0,
    policy: Literal[0, 1] = 0,
    numerics: Literal["exact", "tensor_core", "perturbed"] = "exact",
    threads: int = 0,
    trace_shared: bool = False,
) -> Report:
    """Runs a kernel that Triton compiled, with checks, as Triton's launcher would on a GPU.

    The block is of `32 * num_warps` threads, those of warp specialisation counted, the cluster of
    `num_ctas` blocks, dynamic shared memory of `metadata.shared` bytes; the kernel's scratch memory
    is allocated; a tensor descriptor becomes a tensor map with its shape and strides.

    >>> import torch, triton, triton.language as tl
    >>> from moe_mlir import sim
    >>> @triton.jit
    ... def scale(x, y, n, B: tl.constexpr):
    ...     i = tl.program_id(0) * B + tl.arange(0, B)
    ...     tl.store(y + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)
    >>> x, y = torch.ones(100), torch.zeros(100)
    >>> kernel = sim.compile_triton(scale, (x, y, 100), chip="sm_90", B=64)
    >>> report = sim.launch_triton(kernel, (2,), (x, y, 100))
    >>> assert report.ok and y.eq(2).all()

    Args:
        compiled: what `compile_triton`, `triton.compile` or `kernel.warmup` returned.
        grid: one to three numbers of programs, as in `kernel[grid]`.
        args: NumPy arrays, CPU tensors, numbers and `triton.tools.tensor_descriptor`s of any shape,
            contiguous, read and written in place. A mapping by parameter name, or a sequence: of
            all parameters, of those that are not `tl.constexpr`, or of those that were not compiled
            in (Triton compiles integers equal to 1 in, too).
        checks, allow, smem_alignment, seed, policy, numerics, threads, trace_shared: see `launch`.
            Three things that Triton itself emits are let pass here: no proxy fence behind the
            initialisation of an mbarrier, equal stores to shared memory by warps that hold copies
            of a tensor, and a setmaxnreg that repeats the one before.

    Returns:
        a Report; its findings name the kernel's lines of Python as `source`.

    Raises:
        TypeError: an argument is of another kind or has other elements than the kernel was compiled
            for, or `compiled` is no compiled kernel.
        ValueError: the number of arguments, a value that was compiled in, an integer's range, the
            alignment or the contiguity of an array is not what the kernel was compiled for.
        NotImplementedError: a tensor map of a kind that the simulator does not know.
        PtxError: the kernel has an instruction that the simulator does not know.
    """
    metadata = _metadata(compiled)
    x, y, z = extent(grid, "grid")
    pairs = _parameters(compiled, args)
    blocks = x * y * z * metadata.num_ctas
    # Not zeros: nothing may rely on what was there before. The profile's is zero on a GPU, too.
    hidden = [("the kernel's scratch memory", _scratch(metadata.global_scratch_size, blocks, 0xCD)),
              ("the profile's scratch memory", _scratch(metadata.profile_scratch_size, blocks, 0))]
    module = _load(compiled.asm["ptx"])
    expected = len(module.kernels[metadata.name]["params"])
    if len(pairs) + len(hidden) != expected:
        raise ValueError(f"expected {expected} parameters as the PTX of kernel {metadata.name} "
                         f"has, found {len(pairs)} and {len(hidden)} of scratch memory: was it "
                         "compiled with instrumentation?")
    names, parameters = zip(*pairs, *hidden)
    return module.launch(
        metadata.name, (x * metadata.num_ctas, y, z), 32 * metadata.num_warps, parameters,
        dynamic_smem=metadata.shared,
        cluster=(metadata.num_ctas, 1, 1) if metadata.num_ctas > 1 else None,
        nonportable_cluster=metadata.num_ctas > 8, checks=checks, allow=allow,
        smem_alignment=smem_alignment, seed=seed, policy=policy, numerics=numerics,
        threads=threads, trace_shared=trace_shared, names=names)
