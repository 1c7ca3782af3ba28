"""Times that others have published, and what the model says of the same work.

On a machine with a GPU, `python -m gpu_model.published REPORT` (in utils) times the same kernels
there, for a report of gpu_check that `gpu_figures.py --record REPORT` takes.
"""

import functools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from moe_mlir._support import files

from . import chips, kernel_time

BF16, F32, F16 = torch.bfloat16, torch.float32, torch.float16


@dataclass(frozen=True)
class Published:
    """A kernel whose time on a chip is known, and where from."""

    name: str
    chip: chips.Chip
    microseconds: float
    source: str
    make: Callable  # the call
    least_bytes: float
    fitted: bool = False  # it is a constant of the model


def _router(experts, k, tokens, dtype, activated, chip, microseconds, source):
    from . import triton_kernels

    size = tokens * (experts * dtype.itemsize + 8 * k)
    name = f"router {tokens}x{experts} k{k} {'bf16' if dtype == BF16 else 'f32'}"
    return Published(name, chip, microseconds, source,
                     lambda: triton_kernels.router(tokens, experts, k, dtype, activated), size)


def _attention(batch_heads, tokens, width, warps, teraflops, source):
    from . import triton_kernels

    work = 4 * batch_heads * tokens**2 * width
    return Published(
        f"attention {batch_heads}x{tokens} width {width} f16", chips.H100,
        work / teraflops / 1e6, source,
        lambda: triton_kernels.attention(batch_heads, tokens, width, 128, width, warps, 3),
        8 * batch_heads * tokens * width)


def all_published() -> list:
    from . import triton_kernels

    elements, rows, columns = 2**28, 8192, 4096
    selections = [(128, 8, 1, 2.2), (256, 8, 1, 2.2), (512, 10, 1, 3.6),
                  (128, 8, 16384, 12.4), (256, 8, 16384, 22.5), (512, 10, 16384, 50.6)]
    activated = [(128, 4096, 6.34), (256, 8192, 13.94), (512, 8192, 20.66)]
    decoding = [(128, 1, 1.83), (256, 1, 2.36), (512, 1, 2.90), (128, 64, 2.16), (256, 64, 2.51)]
    return [
        Published("copy of 2^28 f32", chips.H100, 8 * elements / 3.09e6,
                  "92 % of 3.35 TB/s, as the constant", lambda: triton_kernels.copy(elements),
                  8 * elements, fitted=True),
        Published(f"softmax {rows}x{columns} bf16", chips.H100, 4 * rows * columns / 3.01e6,
                  "3.01 TB/s of a softmax in CuTe DSL, sysml.cs.princeton.edu/blogs/"
                  "memory-bound-kernels.html",
                  lambda: triton_kernels.softmax(rows, columns, BF16, 8), 4 * rows * columns),
        *(_router(e, k, n, BF16, False, chips.H100, t, "FlashML-org/FreeToken#319")
          for e, k, n, t in selections),
        *(_router(e, 8, n, F32, True, chips.H100, t, "sgl-project/sglang#29771")
          for e, n, t in activated),
        *(_router(e, 8, n, F32, True, chips.H200, t, "sgl-project/sglang#25835")
          for e, n, t in decoding),
        *(_attention(128, n, 128, 8, rate, "facebookexperimental/triton#205")
          for n, rate in ((1024, 406.8), (2048, 427.8), (4096, 459.6), (8192, 464.4),
                          (16384, 487.0))),
        _attention(32, 16384, 64, 4, 403, "Triton in the FlashAttention 3 paper, arXiv:2407.08608"),
        *(Published(f"router GEMV {n}x7168 -> 256 bf16", chips.H200, t,
                    "vllm-project/vllm#44217, on a B200",
                    lambda n=n: triton_kernels.router_gemv(n, 7168, 256), 2 * 7168 * 256)
          for n, t in ((1, 1.76), (4, 2.67), (8, 3.62))),
    ]


def microseconds(entry: Published):
    """What the model says, and the estimate of the launch."""
    return _estimate(entry, entry.chip)


def on_h100(entry: Published) -> float:
    return _estimate(entry, chips.H100)[0]


def _estimate(entry, chip):
    estimate = kernel_time.estimate(_launch(entry), chip, entry.least_bytes)
    return 1e6 * (estimate.seconds + chip.launch), estimate


@functools.cache
def _launch(entry):
    return entry.make().launch()


def measure() -> dict[str, float | str]:
    """Microseconds of the same kernels on this machine's GPU, by name, or why there are none."""
    found: dict[str, float | str] = {}
    for entry in all_published():
        try:
            found[entry.name] = entry.make().measure()
        except Exception as error:  # of one kernel; the others have their times
            found[entry.name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found


if __name__ == "__main__":
    files.write(Path(sys.argv[1]) / "published.json", json.dumps(measure(), indent=1) + "\n")
