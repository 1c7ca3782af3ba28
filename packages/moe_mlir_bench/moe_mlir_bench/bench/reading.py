"""How fast one core reads memory: the best of several ways to read it.

One way is not enough for a roof. A sum over one run of addresses, as torch's,
waits for the prefetcher at the end of each page; several runs side by side hide
that, and how many of them are best depends on the CPU. In pages of 2 MiB a core
reads faster still; what an allocator returns lies in pages of 4 KiB unless it
was asked for others.
"""

import mmap
import time

import torch

from moe_mlir._support import huge_pages

_RUNS = (1, 2, 4, 8)
_VECTORS = 4  # read a step, shared by the runs
_BYTES = 256 << 20
_REPEATS = 12


def measure(lanes: int) -> tuple[float, float | None]:
    """GB/s from memory as torch allocates it, and from 2 MiB pages where there are any."""
    readers = [_compile(runs, lanes) for runs in _RUNS]
    small = _best(readers, torch.ones(_BYTES // 4))
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return small, None
    pages = huge_pages.empty((_BYTES // 4,), torch.float32).fill_(1)
    return small, max(small, _best(readers, pages))


def _best(readers, x):
    out = torch.empty(())
    seconds = float("inf")
    # In turns, so that a busy moment does not fall on all repeats of one way.
    for _ in range(_REPEATS):
        for read in (*(lambda r=reader: r(x, out) for reader in readers), x.sum):
            start = time.thread_time()
            read()
            seconds = min(seconds, time.thread_time() - start)
    return x.numel() * x.element_size() / seconds * 1e-9


def _compile(runs, lanes):
    from moe_mlir.compiler.jit import compile_cached

    return compile_cached(_text(runs, lanes)).function("read")


def _text(runs, lanes):
    """The sum of a tensor, read as `runs` runs of addresses side by side."""
    vector = f"vector<{lanes}xf32>"
    each = max(1, _VECTORS // runs)
    places = [(run, part) for run in range(runs) for part in range(each)]
    count = len(places)
    starts = ", ".join(f"%a{i} = %zero" for i in range(count))
    types = ", ".join([vector] * count)
    lines = [
        "func.func @read(%x: tensor<?xf32>) -> tensor<f32> {",
        "  %c0 = arith.constant 0 : index",
        "  %pad = arith.constant 0.0 : f32",
        f"  %zero = arith.constant dense<0.0> : {vector}",
        f"  %step = arith.constant {each * lanes} : index",
        f"  %runs = arith.constant {runs} : index",
        "  %size = tensor.dim %x, %c0 : tensor<?xf32>",
        "  %length = arith.divui %size, %runs : index",
        f"  %r:{count} = scf.for %i = %c0 to %length step %step "
        f"iter_args({starts}) -> ({types}) {{",
    ]
    for i, (run, part) in enumerate(places):
        lines += [
            f"    %run{i} = arith.constant {run} : index",
            f"    %part{i} = arith.constant {part * lanes} : index",
            f"    %begin{i} = arith.muli %length, %run{i} : index",
            f"    %at{i} = arith.addi %i, %part{i} : index",
            f"    %k{i} = arith.addi %begin{i}, %at{i} : index",
            f"    %v{i} = vector.transfer_read %x[%k{i}], %pad {{in_bounds = [true]}} "
            f": tensor<?xf32>, {vector}",
            f"    %b{i} = arith.addf %a{i}, %v{i} : {vector}",
        ]
    lines += [f"    scf.yield {', '.join(f'%b{i}' for i in range(count))} : {types}", "  }"]
    total = "%r#0"
    for i in range(1, count):
        lines.append(f"  %s{i} = arith.addf {total}, %r#{i} : {vector}")
        total = f"%s{i}"
    lines += [
        f"  %sum = vector.reduction <add>, {total} : {vector} into f32",
        "  %out = tensor.from_elements %sum : tensor<f32>",
        "  return %out : tensor<f32>",
        "}",
    ]
    return "\n".join(lines) + "\n"
