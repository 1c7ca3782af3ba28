"""Times on a GPU: ours, torch eager, and the best peer, in one process.

Each call is captured 20 times in a CUDA graph over inputs that rotate through
more than the L2 cache, so what is timed is the kernels and not their launch from
Python. The limits are measured in the same run: the bandwidth of a copy and the
rate of a bf16 GEMM. `% of limit` is the larger of bytes / bandwidth and
operations / rate, over the time.
"""

import statistics
from dataclasses import dataclass, field
from typing import Callable

import torch
import torch.nn.functional as F

import moe_mlir as m
from moe_mlir.ops._kernel import ELEMENT_TYPES

_CALLS = 20
_REPLAYS = 15
_ROTATED_BYTES = 150 << 20


@dataclass
class Row:
    name: str
    make: Callable  # a device's name -> fresh inputs on it
    ours: Callable
    eager: Callable
    bytes: int
    operations: int = 0
    peers: dict = field(default_factory=dict)


def _selection_rows():
    for tokens, experts, k in ((16384, 16, 2), (16384, 64, 8), (16384, 128, 8), (8192, 256, 8),
                               (16384, 256, 8), (64, 128, 8), (1, 256, 8)):
        for dtype in (torch.bfloat16, torch.float32):
            def eager(z, k=k):
                values, indices = torch.topk(z.float(), k)
                return values.softmax(-1), indices

            size = tokens * (experts * dtype.itemsize + 12 * k)
            yield Row(f"topk_renorm {tokens}x{experts} k{k} {ELEMENT_TYPES[dtype]}",
                      lambda device, t=tokens, e=experts, d=dtype: [_randn(t, e, dtype=d, device=device)],
                      lambda z, k=k: m.topk_renorm(z, k), eager, size,
                      peers={"triton": lambda z, k=k: _triton(z, k)})


def _triton(z, k):
    from . import triton_router

    return triton_router.topk_renorm(z, k)


def _mixing_rows():
    for batch, tokens, width, experts, dtype in (
            (48, 512, 352, 16, torch.bfloat16), (4, 4096, 512, 16, torch.bfloat16),
            (4, 4096, 128, 64, torch.bfloat16), (8, 512, 352, 16, torch.float32)):
        for causal in (False, True):
            def sdpa(u, p, causal=causal):
                q = u.unsqueeze(1)
                v = F.pad(p, (0, u.shape[-1] - p.shape[-1])).unsqueeze(1)
                return F.scaled_dot_product_attention(q, q, v, is_causal=causal, scale=1.0)

            def eager(u, p, causal=causal):
                s = (u @ u.mT).float()
                if causal:
                    s.masked_fill_(torch.ones_like(s, dtype=torch.bool).triu(1), -float("inf"))
                return s.softmax(-1).to(u.dtype) @ p

            pairs = batch * tokens * tokens / (2 if causal else 1)
            yield Row(f"similarity_inform {batch}x{tokens}x{width} E{experts} {ELEMENT_TYPES[dtype]}"
                      f"{' causal' if causal else ''}",
                      lambda device, b=batch, t=tokens, w=width, e=experts, d=dtype: [
                          _randn(b, t, w, dtype=d, device=device, scale=(8 / w) ** 0.5),
                          _randn(b, t, e, device=device).softmax(-1).to(d)],
                      lambda u, p, c=causal: m.similarity_inform(u, p, causal=c), eager,
                      batch * tokens * ((width + experts) * dtype.itemsize + 4 * experts),
                      operations=int(2 * pairs * (width + experts)), peers={"sdpa": sdpa})


def _statistics_rows():
    for tokens, width, experts in ((16384, 512, 64), (16384, 4096, 64)):
        def eager(h, a, e=experts):
            one = F.one_hot(a, e).float()
            mean = (one.T @ h) / one.sum(0).clamp(min=1)[:, None]
            return torch.zeros(e, h.shape[1], device=h.device).index_add_(
                0, a, (h - mean[a]).abs()) / one.sum(0).clamp(min=1)[:, None]

        # Two reads: the means, then the deviations from them.
        yield Row(f"mad_dispersion {tokens}x{width} E{experts}",
                  lambda device, t=tokens, w=width, e=experts: [
                      _randn(t, w, device=device), torch.randint(e, (t,), device=device)],
                  lambda h, a, e=experts: m.mad_dispersion(h, a, e), eager, 2 * tokens * width * 4)

    yield Row("adjacency_update 16384 k8 E64",
              lambda device: [torch.rand(64, 64, device=device),
                              torch.rand(16384, 64, device=device).topk(8).indices],
              m.adjacency_update, m.reference.adjacency_update, 16384 * 64 + 2 * 64 * 64 * 4)


def all_rows() -> list[Row]:
    return [*_selection_rows(), *_mixing_rows(), *_statistics_rows()]


# ---------------------------------------------------------------- measurement


def _randn(*shape, device, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, device=device) * scale).to(dtype)


def time_call(call, inputs) -> float:
    """Microseconds of one call, the median over replays of a graph of many."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for given in inputs[:2]:
            call(*given)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call(*inputs[i % len(inputs)]) for i in range(_CALLS)]
    graph.replay()
    times = []
    for _ in range(_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / _CALLS)
    del kept
    return statistics.median(times)


def measure_limits() -> dict:
    """Bytes a second of a copy (read and write) and bf16 operations a second of a GEMM."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    copy = time_call(lambda a, b: b.copy_(a), [(source, target)])
    a, b = (_randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = time_call(lambda a, b: a @ b, [(a, b)])
    return {"bytes_per_second": 2 * source.nbytes / copy * 1e6,
            "operations_per_second": 2 * 8192**3 / product * 1e6}


def measure(row: Row, limits: dict) -> dict:
    first = row.make("cuda")
    size = max(1, sum(x.nbytes for x in first))
    count = max(2, min(64, _ROTATED_BYTES // size + 1))
    inputs = [first, *(row.make("cuda") for _ in range(count - 1))]
    result = {"row": row.name, "ours_us": time_call(row.ours, inputs)}
    for name, call in {"eager": row.eager, **row.peers}.items():
        try:
            result[f"{name}_us"] = time_call(call, inputs)
        except Exception as error:  # a peer that cannot run is a fact of the table
            torch.cuda.synchronize()
            result[f"{name}_error"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    bound = 1e6 * max(row.bytes / limits["bytes_per_second"],
                      row.operations / limits["operations_per_second"])
    result["limit_us"] = bound
    result["percent_of_limit"] = 100 * bound / result["ours_us"]
    return result


def print_table(results) -> None:
    peers = ("eager", "triton", "sdpa")
    print(f"{'':52}{'ours us':>9}" + "".join(f"{p + ' us':>12}" for p in peers)
          + f"{'% of limit':>12}")
    for r in results:
        cells = "".join(f"{r.get(p + '_us', float('nan')):12.1f}" for p in peers)
        print(f"{r['row']:52}{r['ours_us']:9.1f}{cells.replace('nan', '  -')}"
              f"{r['percent_of_limit']:12.1f}")
