"""The routing ops on CUDA tensors: kernels loaded by the driver, launched on torch's stream.

Results and workspace come from torch's allocator, kernels go to the current
stream, and nothing waits: a call can be captured in a CUDA graph once its
shapes have been run. `libmoe_cuda_runtime` finds the driver when it is first
used; there is no build for a CUDA version.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .._support.paths import PACKAGE
from ..compiler import jit
from ..compiler.chips import chips, own_chip, runnable_chips, target_chips
from .launch import LaunchPlan

if TYPE_CHECKING:
    import torch

    from .launch import KernelLaunch


class GpuError(RuntimeError):
    """A kernel could not be loaded or launched; the text is the driver's reason."""


class Runtime:
    """A library that runs kernels: "cuda" for the driver, "sim" for the simulator."""

    def __init__(self, kind: str):
        path = PACKAGE / f"libmoe_{kind}_runtime.so"
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise GpuError(f"expected {path.name} beside the package: {error}") from None
        pointer, text = ctypes.c_void_p, ctypes.c_char_p
        for name in ("load", "find", "launch", "unavailable", "report"):
            getattr(library, "moe_gpu_" + name).restype = text
        library.moe_gpu_load.argtypes = (text, ctypes.POINTER(pointer))
        library.moe_gpu_find.argtypes = (pointer, text, ctypes.POINTER(pointer))
        library.moe_gpu_launch.argtypes = (
            pointer, ctypes.POINTER(ctypes.c_uint64), ctypes.c_uint32, ctypes.c_uint32, pointer,
            pointer)
        if reason := library.moe_gpu_unavailable():
            raise GpuError(f"cannot run kernels on a GPU: {reason.decode()}")
        self.library = library

    def load(self, ptx: str) -> ctypes.c_void_p:
        module = ctypes.c_void_p()
        self._check(self.library.moe_gpu_load(ptx.encode(), ctypes.byref(module)))
        return module

    def find(self, module: ctypes.c_void_p, name: str) -> ctypes.c_void_p:
        function = ctypes.c_void_p()
        self._check(self.library.moe_gpu_find(module, name.encode(), ctypes.byref(function)))
        return function

    def launch(
        self,
        function: ctypes.c_void_p,
        launch: KernelLaunch,
        stream: int,
        parameters: ctypes.Array,
    ) -> None:
        self._check(self.library.moe_gpu_launch(
            function, _extents(launch.grid), launch.block_size, launch.dynamic_smem, stream, parameters))

    @staticmethod
    def _check(reason):
        if reason:
            raise GpuError(reason.decode())


@functools.lru_cache(maxsize=4096)
def _extents(grid: tuple[int, ...]) -> ctypes.Array:
    return (ctypes.c_uint64 * 3)(*grid, *[1] * (3 - len(grid)))


class GpuFunction:
    """A function of kernels on tensors of one GPU.

    Modules stay loaded as long as the process lives, as torch's own do: a
    captured graph may hold their kernels.
    """

    def __init__(self, runtime: Runtime, module: ctypes.c_void_p, plan: LaunchPlan):
        self._runtime = runtime
        self._module = module
        self._plan = plan
        self._kernels: dict[str, Any] = {}
        self._prepared: dict[tuple, _Prepared] = {}

    def __call__(self, *buffers: Any, stream: int = 0) -> torch.Tensor | None:
        """Puts the kernels for inputs and result buffers on a stream."""
        # Copies live until the launches are on the stream, as the workspace does.
        given, buffers = buffers, tuple(self._plan.align(buffers))
        shapes = tuple([getattr(buffer, "shape", ()) for buffer in buffers])
        prepared = self._prepared.get(shapes)
        if prepared is None:
            prepared = self._prepare(shapes, buffers)
        values = self._plan.encode(buffers)
        workspace = None
        if prepared.workspace is not None:
            workspace = _allocate(prepared.workspace, buffers)
            values.append(workspace.data_ptr())
        values += prepared.sizes
        parameters = _pack(values)
        for function, launch in prepared.launches:
            own = parameters if launch.parameters is None else _pack(launch.take(values))
            try:
                self._runtime.launch(function, launch, stream, own)
            except GpuError as error:
                sizes = ", ".join(str(tuple(shape)) for shape in shapes)
                raise GpuError(f"{self._plan.name} on {sizes}: {error}") from None
        self._plan.put_back(given, buffers)
        return workspace

    def _prepare(self, shapes, buffers) -> _Prepared:
        """What follows from the shapes alone, kept for the next call."""
        sizes = self._plan.sizes(buffers)
        workspace = self._plan.workspace(buffers)
        if workspace is not None:
            sizes.append(workspace)
        prepared = _Prepared(sizes, workspace, [
            (self._find(launch.name), launch) for launch in self._plan.launches(buffers)])
        if len(self._prepared) >= _MOST_PREPARED:
            self._prepared.clear()
        self._prepared[shapes] = prepared
        return prepared

    def _find(self, name):
        if name not in self._kernels:
            self._kernels[name] = self._runtime.find(self._module, name)
        return self._kernels[name]


# Shapes of a function whose launches are kept.
_MOST_PREPARED = 1024


class _Prepared(NamedTuple):
    """Sizes that kernels are given, bytes of workspace, and the launches with their kernels."""

    sizes: list[int]
    workspace: int | None
    launches: list[tuple[Any, KernelLaunch]]


def _allocate(size, buffers):
    """Kept until the launches are on the stream: torch gives it to later work of that alone."""
    import torch

    device = next(b.device for b in buffers if isinstance(b, torch.Tensor))
    return torch.empty(size, dtype=torch.uint8, device=device)


def _pack(values):
    """An array of pointers to 8-byte values; a kernel reads the first bytes of each."""
    count = max(1, len(values))
    block = (ctypes.c_uint64 * count)(*(v & (2**64 - 1) for v in values))
    base = ctypes.addressof(block)
    pointers = (ctypes.c_void_p * count)(*range(base, base + 8 * count, 8))
    pointers.values = block  # type: ignore[attr-defined]  # lives as long as what points to it
    return pointers


def chip_for(capability: tuple[int, int]) -> str:
    """The compiler's target for a GPU: its own, or the newest one whose PTX it runs.

    >>> chip_for((9, 0)), chip_for((8, 7))
    ('sm_90a', 'sm_86')
    """
    chip = own_chip(10 * capability[0] + capability[1])
    if chip is None:
        oldest = chips()[target_chips()[0]]
        raise GpuError(
            f"expected a GPU of compute capability {oldest.number / 10} or later, found "
            f"{capability[0]}.{capability[1]}")
    return chip


_chip: contextvars.ContextVar[str | None] = contextvars.ContextVar("moe_mlir_chip", default=None)


@contextlib.contextmanager
def compile_for(chip: str | None) -> Iterator[None]:
    """While the block lasts, ops on CUDA tensors take the kernels of an earlier chip.

    A newer GPU then runs what an older one would, such as the kernels of sm_80 on Hopper.
    None changes nothing.
    """
    token = _chip.set(chip)
    try:
        yield
    finally:
        _chip.reset(token)


def chosen_chip(capability: tuple[int, int]) -> str:
    """`chip_for`, or the chip of the innermost `compile_for`, which the GPU must run."""
    own, chosen = chip_for(capability), _chip.get()
    if chosen is None:
        return own
    if chosen not in runnable_chips(own):
        raise GpuError(f"expected a chip whose kernels run on {own} "
                       f"({', '.join(runnable_chips(own))}), found '{chosen}'")
    return chosen


@functools.cache
def cuda_runtime() -> Runtime:
    return Runtime("cuda")


@functools.lru_cache(maxsize=1024)
def gpu_functions(
    runtime: Runtime,
    text: str,
    chip: str,
    device: int = 0,
) -> dict[str, GpuFunction]:
    """The public functions of a module of MLIR text on one GPU, by name."""
    code = json.loads(jit.compile_kernels_cached(text, chip))
    module = load_kernels(runtime, code["ptx"], device)
    return {f["name"]: GpuFunction(runtime, module, LaunchPlan(f)) for f in code["functions"]}


@functools.lru_cache(maxsize=1024)
def load_kernels(runtime: Runtime, ptx: str, device: int) -> ctypes.c_void_p:
    """The kernels of PTX on a GPU, which must be current."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise GpuError(
            "expected the kernels to be loaded before a CUDA graph is captured, which permits no "
            "loading: run the same shapes once before the capture")
    return runtime.load(ptx)


def run(text: str, name: str, tensors: Sequence[Any]) -> None:
    """Runs function `name` of a module on CUDA inputs and result buffers."""
    import torch

    with _on_device_of(tensors) as (runtime, index, stream):
        chip = chosen_chip(torch.cuda.get_device_capability(index))
        gpu_functions(runtime, text, chip, index)[name](*tensors, stream=stream)


def run_kernels(ptx: str, plan: LaunchPlan, buffers: Sequence[Any]) -> None:
    """Runs the kernels of one function of PTX on CUDA inputs and result buffers."""
    with _on_device_of(buffers) as (runtime, index, stream):
        _function(runtime, ptx, plan, index)(*buffers, stream=stream)


@functools.lru_cache(maxsize=1024)
def _function(runtime, ptx, plan, device):
    return GpuFunction(runtime, load_kernels(runtime, ptx, device), plan)


@contextlib.contextmanager
def _on_device_of(buffers):
    """The runtime, with the GPU of the buffers current, its number and torch's stream."""
    import torch

    device = next(b.device for b in buffers if isinstance(b, torch.Tensor))
    runtime = cuda_runtime()
    index = torch.cuda.current_device() if device.index is None else device.index
    # Puts back the device that was current: the runtime makes its own so.
    elsewhere = index != torch.cuda.current_device()
    with torch.cuda.device(index) if elsewhere else contextlib.nullcontext():
        runtime.library.mgpuSetDefaultDevice(index)
        yield runtime, index, torch.cuda.current_stream(index).cuda_stream


__all__ = ["GpuError", "GpuFunction", "Runtime", "chip_for", "chosen_chip", "compile_for",
           "cuda_runtime", "gpu_functions", "load_kernels", "run", "run_kernels"]
