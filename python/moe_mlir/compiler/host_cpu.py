"""What this machine's CPU can execute."""

import functools

from .._native import native

_LEVELS = ("x86-64-v4", "x86-64-v3", "x86-64-v2")


def missing_features(features: str) -> list:
    """Those of LLVM's features ("+avx2,+fma,..") that this CPU lacks, without the plus."""
    absent = {f[1:] for f in native().host_cpu()[1].split(",") if f.startswith("-")}
    return sorted({f[1:] for f in features.split(",") if f.startswith("+")} & absent)


def features_for(cpu: str) -> frozenset[str]:
    """LLVM's features that code for `cpu` may use; "native": those of this CPU."""
    text = native().host_cpu()[1] if cpu == "native" else native().code_features(cpu)
    return frozenset(f[1:] for f in text.split(",") if f.startswith("+"))


@functools.cache
def missing_for(cpu: str) -> list:
    """The features that code for `cpu` needs and this CPU lacks."""
    return [] if cpu == "native" else missing_features(native().code_features(cpu))


def recommended() -> str:
    """The largest level of x86-64 that this CPU has, as LLVM names it."""
    for level in _LEVELS:
        if not missing_for(level):
            return level
    return "x86-64"
