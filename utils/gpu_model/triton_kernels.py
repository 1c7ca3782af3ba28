"""Kernels in Triton whose times others have published, compiled here without a GPU."""

import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moe_mlir import sim
from moe_mlir_bench.gpu_check import timing

from . import kernel_time, sass
from .recorded import blocks_of, extend, of_a_block

_TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16",
          torch.int32: "*i32", torch.int64: "*i64", int: "i32"}


@triton.jit
def copy_kernel(source, target, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at))


@triton.jit
def softmax_kernel(source, target, columns, WIDTH: tl.constexpr):
    """A row a program, all of it in registers."""
    row = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    x = tl.load(source + row * columns + column, mask=column < columns,
                other=-float("inf")).to(tl.float32)
    weight = tl.exp(x - tl.max(x, 0))
    tl.store(target + row * columns + column, weight / tl.sum(weight, 0), mask=column < columns)


@triton.jit
def router_gemv_kernel(tokens, weights, logits, N: tl.constexpr, D: tl.constexpr,
                       CHUNK: tl.constexpr, E: tl.constexpr):
    """An expert a program: its logits of N tokens."""
    e = tl.program_id(0)
    n, at = tl.arange(0, N), tl.arange(0, CHUNK)
    total = tl.zeros((N, CHUNK), tl.float32)
    for i in tl.static_range(D // CHUNK):
        w = tl.load(weights + e * D + i * CHUNK + at).to(tl.float32)
        total += w[None, :] * tl.load(
            tokens + n[:, None] * D + i * CHUNK + at[None, :]).to(tl.float32)
    tl.store(logits + n * E + e, tl.sum(total, 1))


@triton.jit
def router_kernel(scores, gates, indices, tokens, E: tl.constexpr, K: tl.constexpr,
                  ROWS: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
                  ACTIVATED: tl.constexpr):
    """The best of a row found K times, the lower index of equals, results in registers.

    With ACTIVATED the softmax of the row comes first, and each choice looks its own up.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column, slot = tl.arange(0, WIDTH), tl.arange(0, SLOTS)
    inside = (row < tokens)[:, None] & (column < E)[None, :]
    z = tl.load(scores + row[:, None] * E + column[None, :], mask=inside,
                other=-float("inf")).to(tl.float32)
    values = tl.full((ROWS, SLOTS), -float("inf"), tl.float32)
    places = tl.zeros((ROWS, SLOTS), tl.int32)
    if ACTIVATED:
        activated = tl.exp(z - tl.max(z, 1)[:, None])
        activated = activated / tl.sum(activated, 1)[:, None]
    for i in tl.static_range(K):
        best = tl.max(z, 1)
        place = tl.min(tl.where(z == best[:, None], column[None, :], WIDTH), 1)
        value = best
        if ACTIVATED:
            value = tl.sum(tl.where(column[None, :] == place[:, None], activated, 0.0), 1)
        values = tl.where(slot[None, :] == i, value[:, None], values)
        places = tl.where(slot[None, :] == i, place[:, None], places)
        z = tl.where(column[None, :] == place[:, None], -float("inf"), z)
    weights = values
    if ACTIVATED:
        weights = tl.where(slot[None, :] < K, values, 0.0)
    else:
        weights = tl.exp(values - tl.max(values, 1)[:, None])
    weights = weights / tl.sum(weights, 1)[:, None]
    at = row[:, None] * K + slot[None, :]
    chosen = (row < tokens)[:, None] & (slot < K)[None, :]
    tl.store(gates + at, weights, mask=chosen)
    tl.store(indices + at, places, mask=chosen)


@triton.jit
def attention_kernel(q, k, v, out, lse, tokens, scale, D: tl.constexpr, ROWS: tl.constexpr,
                     COLUMNS: tl.constexpr):
    """FlashAttention 2 without a mask: a tile of queries a program, an online softmax."""
    base = tl.program_id(1).to(tl.int64) * tokens * D
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    feature, column = tl.arange(0, D), tl.arange(0, COLUMNS)
    queries = tl.load(q + base + row[:, None] * D + feature[None, :])
    best = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    result = tl.zeros((ROWS, D), tl.float32)
    for start in range(0, tokens, COLUMNS):
        keys = tl.load(k + base + (start + column)[None, :] * D + feature[:, None])
        logits = tl.dot(queries, keys)
        higher = tl.maximum(best, tl.max(logits, 1) * scale)
        weight = tl.exp2(logits * scale - higher[:, None])
        shrink = tl.exp2(best - higher)
        total = total * shrink + tl.sum(weight, 1)
        values = tl.load(v + base + (start + column)[:, None] * D + feature[None, :])
        result = tl.dot(weight.to(values.dtype), values, result * shrink[:, None])
        best = higher
    tl.store(out + base + row[:, None] * D + feature[None, :],
             (result / total[:, None]).to(q.dtype.element_ty))
    tl.store(lse + tl.program_id(1) * tokens + row, best + tl.log2(total))


def compile_kernel(kernel, args: dict, constants: dict, warps: int, stages: int):
    """`args` are tensors, and numbers that may change between launches."""
    names = kernel.arg_names
    signature, attributes = {}, {}
    for at, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        value = args[name]
        signature[name] = ("fp32" if isinstance(value, float)
                           else _TYPES[getattr(value, "dtype", int)])
        if not isinstance(value, float):
            attributes[(at,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, {(names.index(n),): c for n, c in constants.items()},
                       attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32),
                          options={"num_warps": warps, "num_stages": stages})


def assemblable(ptx: str) -> str:
    """The same lines without what is said of sources, in a version that ptxas 13.0 reads."""
    text = re.sub(r"^\s*\.(loc|file)\b.*$", "", ptx, flags=re.M)
    text = re.sub(r"^\.version .*$", ".version 9.0", text, flags=re.M)
    return text.split("\t.section")[0]


@dataclass(frozen=True)
class TritonCall:
    """A kernel at a size; a block's work is counted at the simulated sizes."""

    kernel: Any
    make_args: Callable
    constants: dict
    make_grid: Callable
    size: int
    simulated: tuple
    warps: int = 4
    stages: int = 3

    def launch(self) -> kernel_time.Launch:
        """What the model times."""
        kernel, names = self.kernel, self.kernel.arg_names
        compiled = compile_kernel(kernel, self.make_args(self.simulated[0]), self.constants,
                                  self.warps, self.stages)
        ptx, metadata = assemblable(compiled.asm["ptx"]), compiled.metadata
        module, threads = sim.Module(ptx), 32 * metadata.num_warps
        counted = []
        for small in self.simulated:
            grid, args = self.make_grid(small), self.make_args(small)
            # Behind its own arguments a kernel takes two scratch buffers, which these do not use.
            values = [args[name] for name in names if name not in self.constants] + [0, 0]
            report = module.launch(metadata.name, grid, threads, values, checks=(),
                                   dynamic_smem=metadata.shared)
            counted.append(of_a_block(report.counters, blocks_of(grid)))
        average = extend(counted, self.simulated, self.size)
        code = sass.assemble(ptx, "sm_90a", metadata.name)
        return kernel_time.Launch(
            metadata.name, blocks_of(self.make_grid(self.size)), threads,
            code.blocks_an_sm(threads, metadata.shared, "sm_90a"), code,
            sass.spread(average.pop("lines"), ptx), **average)

    def measure(self) -> float:
        """Microseconds on this machine's GPU, inputs in turn from more than its L2."""
        with torch.device("cuda"):
            one = self.make_args(self.size)
            size = sum(x.nbytes for x in one.values() if isinstance(x, torch.Tensor))
            inputs = timing.rotated(lambda: [self.make_args(self.size)], size)
        return statistics.median(timing.samples(self._run, inputs))

    def _run(self, args: dict) -> None:
        self.kernel[self.make_grid(self.size)](**args, **self.constants, num_warps=self.warps,
                                               num_stages=self.stages)


def copy(elements):
    def args(n):
        return {"source": torch.zeros(n), "target": torch.empty(n)}

    return TritonCall(copy_kernel, args, {"BLOCK": 4096}, lambda n: (n // 4096,), elements, (32768,))


def softmax(rows, columns, dtype, warps):
    def args(n):
        return {"source": torch.randn(n, columns).to(dtype),
                "target": torch.empty(n, columns, dtype=dtype), "columns": columns}

    return TritonCall(softmax_kernel, args, {"WIDTH": triton.next_power_of_2(columns)},
                  lambda n: (n,), rows, (8,), warps)


def router(tokens, experts, k, dtype, activated):
    """The k best found one after the other, as the routers of serving engines do."""
    def args(n):
        return {"scores": torch.randn(n, experts).to(dtype), "gates": torch.empty(n, k),
                "indices": torch.empty(n, k, dtype=torch.int32), "tokens": n}

    width = triton.next_power_of_2(experts)
    rows = max(1, min(4, 256 // width))  # a warp each
    constants = {"E": experts, "K": k, "ROWS": rows, "WIDTH": width,
                 "SLOTS": triton.next_power_of_2(k), "ACTIVATED": activated}
    return TritonCall(router_kernel, args, constants, lambda n: (-(-n // rows),), tokens,
                  (min(tokens, 64),), warps=1)


def router_gemv(tokens, width, experts):
    def args(_):
        return {"tokens": torch.randn(tokens, width).bfloat16(),
                "weights": torch.randn(experts, width).bfloat16(),
                "logits": torch.empty(tokens, experts)}

    constants = {"N": tokens, "D": width, "CHUNK": 1024, "E": experts}
    return TritonCall(router_gemv_kernel, args, constants, lambda n: (experts,), 1, (1,))


def attention(batch_heads, tokens, width, rows, columns, warps, stages):
    def args(n):
        # The simulator takes one head of fewer tokens.
        heads = batch_heads if n == tokens else 1
        q, k, v = (torch.randn(heads, n, width).half() for _ in range(3))
        return {"q": q, "k": k, "v": v, "out": torch.empty_like(q), "lse": torch.empty(heads, n),
                "tokens": n, "scale": 0.1}

    def grid(n):
        return (n // rows, batch_heads if n == tokens else 1)

    return TritonCall(attention_kernel, args, {"D": width, "ROWS": rows, "COLUMNS": columns}, grid,
                  tokens, (256, 512), warps, stages)
