"""What this CPU can do: its name and its measured peaks, each from a compiled loop."""

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from . import reading

_ACCUMULATORS = 12  # covers the latency of two FMA pipes and fits 16 vector registers
_COPY_BYTES = 128 << 20


@dataclass
class Limit:
    """The formula T = max(bytes / BW, flops / F, exps / X), term by term, in microseconds."""

    memory_us: float
    flops_us: float
    exps_us: float

    @property
    def us(self) -> float:
        return max(self.memory_us, self.flops_us, self.exps_us)

    @property
    def bound(self) -> str | None:
        """The binding term; None where the row has no term."""
        if self.us == 0:
            return None
        terms = {"memory": self.memory_us, "flops": self.flops_us, "exp": self.exps_us}
        return max(terms, key=lambda name: terms[name])


@dataclass
class Machine:
    """Peaks of one core. `dot_gflops` is None without a bf16 dot product."""

    model: str
    fma_gflops: float
    gemm_gflops: float  # what torch's library reaches on 512 x 512 x 512
    dot_gflops: float | None
    exp_giga: float
    read_gbytes: float
    copy_gbytes: float
    huge_read_gbytes: float | None = None  # from pages of 2 MiB, which no tensor lies in unasked
    level: str = ""  # the vectors of the code that is measured

    @property
    def name(self) -> str:
        """What tells the machines of a page apart."""
        return ", ".join(filter(None, (self.model, self.level)))

    def limit(
        self,
        flops: float,
        moved: float,
        exps: float = 0,
        dtype: torch.dtype = torch.float32,
    ) -> Limit:
        peak = self.fma_gflops
        if dtype == torch.bfloat16 and self.dot_gflops:
            peak = self.dot_gflops
        return Limit(
            moved / self.read_gbytes * 1e-3, flops / peak * 1e-3, exps / self.exp_giga * 1e-3
        )

    def has_slow_library(self) -> bool:
        """Whether torch's GEMM leaves half of the peak unused, as on vectors of half the width."""
        return self.gemm_gflops < 0.6 * self.fma_gflops

    def facts(self) -> dict[str, Any]:
        return asdict(self)

    def sentence(self) -> str:
        dot = "no bf16 dot product" if self.dot_gflops is None else f"{self.dot_gflops:.0f} bf16"
        pages = self.huge_read_gbytes
        huge = "" if pages is None else f" ({pages:.0f} from 2 MiB pages)"
        return (
            f"{self.name}, one core: {self.fma_gflops:.0f} GFLOP/s f32 FMA "
            f"(torch's GEMM {self.gemm_gflops:.0f}), {dot}, "
            f"{self.exp_giga:.1f} Gexp/s, {self.read_gbytes:.0f} GB/s read{huge}, "
            f"{self.copy_gbytes:.0f} GB/s copy (read + write)"
        )


def measure() -> Machine:
    from moe_mlir.compiler.host_cpu import features_for
    from moe_mlir.compiler.uncached import target_cpu

    # The roofs are those of code for the same CPU as the kernels'.
    cpu = target_cpu()
    features = features_for(cpu)
    lanes = 16 if "avx512f" in features else 8
    read, huge_read = reading.measure(lanes)
    dot = _gigaops(_dot_step, lanes, 4 * lanes) if "avx512bf16" in features else None
    return Machine(
        cpu_model(),
        _gigaops(_fma_step, lanes, 2 * lanes),
        _gemm_gflops(),
        dot,
        _gigaops(_exp_step, lanes, lanes),
        read,
        _copy_gbytes(),
        huge_read,
        _level(cpu, features),
    )


def machine_name() -> str:
    """This CPU and the vectors of the code that is measured, as `Machine.name` says it."""
    from moe_mlir.compiler.host_cpu import features_for
    from moe_mlir.compiler.uncached import target_cpu

    return f"{cpu_model()}, {_level(target_cpu(), features_for(target_cpu()))}"


def _level(cpu, features):
    vectors = "AVX-512" if "avx512f" in features else "AVX2" if "avx2" in features else "SSE"
    return vectors if cpu == "native" else f"{vectors} by MOE_MLIR_CPU={cpu}"


def cpu_model():
    try:
        with open("/proc/cpuinfo") as lines:
            pairs = (line.split(":", 1) for line in lines if ":" in line)
            fields = {key.strip(): value.strip() for key, value in pairs}
        name = fields.get("model name", "unknown CPU")
        where = [f"{key} {fields[key]}" for key in ("cpu family", "model") if key in fields]
        return f"{name} ({', '.join(where)})" if where else name
    except OSError:
        return "unknown CPU"


# ------------------------------------------------------------------ arithmetic


def _fma_step(i, vector, lanes):
    yield f"%b{i} = vector.fma %a{i}, %v, %v : {vector}"


def _dot_step(i, vector, lanes):
    # Assembly without side effects: an intrinsic call might have some, which
    # bufferization refuses.
    yield (
        f'%b{i} = llvm.inline_asm asm_dialect = att "vdpbf16ps $3, $2, $0", "=v,0,v,v" '
        f"%a{i}, %v, %v : ({vector}, {vector}, {vector}) -> {vector}"
    )


def _exp_step(i, vector, lanes):
    # Each exponential waits for the one before in its chain; the chains overlap.
    yield f"%m{i} = arith.mulf %a{i}, %v : {vector}"
    yield f"%b{i} = math.exp %m{i} : {vector}"


def _loop(step, lanes):
    """A loop that does nothing but `step` on independent accumulators in registers."""
    vector = f"vector<{lanes}xf32>"
    ids = range(_ACCUMULATORS)
    starts = ", ".join(f"%a{i} = %start{i}" for i in ids)
    types = ", ".join([vector] * _ACCUMULATORS)
    lines = [
        "func.func @loop(%count: tensor<i64>, %x: tensor<f32>) -> tensor<f32> {",
        "  %zero = arith.constant 0 : index",
        "  %one = arith.constant 1 : index",
        "  %n64 = tensor.extract %count[] : tensor<i64>",
        "  %n = arith.index_cast %n64 : i64 to index",
        "  %x0 = tensor.extract %x[] : tensor<f32>",
        f"  %v = vector.broadcast %x0 : f32 to {vector}",
        *(f"  %start{i} = arith.constant dense<{i / 16}> : {vector}" for i in ids),
        f"  %r:{_ACCUMULATORS} = scf.for %i = %zero to %n step %one "
        f"iter_args({starts}) -> ({types}) {{",
        *(f"    {line}" for i in ids for line in step(i, vector, lanes)),
        f"    scf.yield {', '.join(f'%b{i}' for i in ids)} : {types}",
        "  }",
    ]
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


def _gigaops(step, lanes, operations):
    """1e9 operations a second of a loop whose step on one vector does `operations`."""
    from moe_mlir.compiler.jit import compile_cached

    loop = compile_cached(_loop(step, lanes)).function("loop")
    count, x, out = torch.tensor(400_000), torch.tensor(0.5), torch.empty(())
    best = min(_thread_seconds(lambda: loop(count, x, out)) for _ in range(7))
    return operations * _ACCUMULATORS * int(count) / best * 1e-9


def _gemm_gflops(n=512):
    a, b = torch.randn(n, n), torch.randn(n, n)
    return 2 * n**3 / min(_thread_seconds(lambda: a @ b) for _ in range(7)) * 1e-9


# ---------------------------------------------------------------------- memory


def _copy_gbytes():
    """Copying, with both directions counted."""
    x = torch.ones(_COPY_BYTES // 4)
    y = torch.empty_like(x)
    copy = min(_thread_seconds(lambda: y.copy_(x)) for _ in range(7))
    return 2 * _COPY_BYTES / copy * 1e-9


def _thread_seconds(run):
    start = time.thread_time()
    run()
    return time.thread_time() - start
