"""CPUs to compile for, by the names that LLVM has for them."""

from moe_mlir.compiler import host_cpu

# From 128-bit vectors without fused products to AVX-512 with products of bf16 and arithmetic of f16.
LEVELS = ("x86-64", "x86-64-v2", "x86-64-v3", "skylake-avx512", "icelake-server", "znver4",
          "sapphirerapids", "native")  # fmt: skip


def runnable():
    """Those of LEVELS whose code this machine runs."""
    return [cpu for cpu in LEVELS if not host_cpu.missing_for(cpu)]
