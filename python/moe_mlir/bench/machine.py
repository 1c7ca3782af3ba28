"""What this CPU can do: its name, its FMA peak and its memory bandwidth, measured."""

import time
from dataclasses import dataclass

import torch

_ACCUMULATORS = 12  # covers the latency of two FMA pipes and fits 16 vector registers


@dataclass
class Machine:
    model: str
    fma_gflops: float
    read_gbytes: float

    def limit_us(self, flops, moved):
        """The least time: the slower of the arithmetic and the memory traffic."""
        return max(flops / self.fma_gflops, moved / self.read_gbytes) * 1e-3


def measure():
    return Machine(_cpu_model(), _fma_gflops(), _read_gbytes())


def _cpu_model():
    try:
        with open("/proc/cpuinfo") as lines:
            pairs = (line.split(":", 1) for line in lines if ":" in line)
            fields = {key.strip(): value.strip() for key, value in pairs}
        name = fields.get("model name", "unknown CPU")
        where = [f"{key} {fields[key]}" for key in ("cpu family", "model") if key in fields]
        return f"{name} ({', '.join(where)})" if where else name
    except OSError:
        return "unknown CPU"


def _fma_loop(lanes):
    """A loop that does nothing but independent fused multiply-adds in registers."""
    vector = f"vector<{lanes}xf32>"
    ids = range(_ACCUMULATORS)
    starts = ", ".join(f"%a{i} = %start{i}" for i in ids)
    types = ", ".join([vector] * _ACCUMULATORS)
    lines = [
        "func.func @fma_loop(%count: tensor<i64>, %x: tensor<f32>) -> tensor<f32> {",
        "  %zero = arith.constant 0 : index",
        "  %one = arith.constant 1 : index",
        "  %n64 = tensor.extract %count[] : tensor<i64>",
        "  %n = arith.index_cast %n64 : i64 to index",
        "  %x0 = tensor.extract %x[] : tensor<f32>",
        f"  %v = vector.broadcast %x0 : f32 to {vector}",
    ]
    for i in ids:
        lines.append(f"  %start{i} = arith.constant dense<{i}.0> : {vector}")
    lines.append(
        f"  %r:{_ACCUMULATORS} = scf.for %i = %zero to %n step %one iter_args({starts}) -> ({types}) {{"
    )
    for i in ids:
        lines.append(f"    %b{i} = vector.fma %a{i}, %v, %v : {vector}")
    lines.append(f"    scf.yield {', '.join(f'%b{i}' for i in ids)} : {types}")
    lines.append("  }")
    total = "%r#0"
    for i in ids[1:]:
        lines.append(f"  %s{i} = arith.addf {total}, %r#{i} : {vector}")
        total = f"%s{i}"
    lines += [
        f"  %sum = vector.reduction <add>, {total} : {vector} into f32",
        "  %out = tensor.from_elements %sum : tensor<f32>",
        "  return %out : tensor<f32>",
        "}",
    ]
    return "\n".join(lines) + "\n"


def _fma_gflops():
    from ..runtime import compile_cached

    lanes = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
    executable = compile_cached(_fma_loop(lanes))
    loop = executable.function("fma_loop")
    count, x, out = torch.tensor(2_000_000), torch.tensor(0.5), torch.empty(())
    best = min(_thread_seconds(lambda: loop(count, x, out)) for _ in range(5))
    return 2 * lanes * _ACCUMULATORS * int(count) / best * 1e-9


def _read_gbytes():
    x = torch.ones(32 << 20)
    best = min(_thread_seconds(x.sum) for _ in range(5))
    return x.numel() * x.element_size() / best * 1e-9


def _thread_seconds(run):
    start = time.thread_time()
    run()
    return time.thread_time() - start
