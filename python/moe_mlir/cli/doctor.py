"""What this environment has, for bug reports and for finding out what is missing.

`moe doctor` prints it; works without torch, without a GPU and
without the native module.
"""

import ctypes
import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from .._support import tools
from .._support.command_line import Parser, add_json, print_json
from .._support.paths import PACKAGE
from .._version import __version__

# Packages that bring an LLVM of their own into the process.
_OTHER_LLVMS = ("iree", "llvmlite", "mlir", "torch_mlir", "triton")
_LEAST_TORCH = (2, 11)
_LIBRARIES = ("libmoe_runtime.so", "libmoe_sim.so", "libmoe_sim_runtime.so",
              "libmoe_cuda_runtime.so")


@dataclass
class Report:
    """Facts by name, and the problems among them."""

    facts: dict = field(default_factory=dict)
    problems: list = field(default_factory=list)

    def __str__(self):
        width = max(map(len, self.facts), default=0)
        lines = [f"{name:<{width}}  {value}" for name, value in self.facts.items()]
        lines += [f"problem: {problem}" for problem in self.problems]
        return "\n".join(lines or ["nothing found"])

    __repr__ = __str__


def doctor() -> Report:
    """Looks at versions, CPU, GPU, tools, the cache, variables and copies of LLVM."""
    report = Report()
    _add_versions(report)
    _add_integrations(report)
    _add_compiler(report)
    _add_driver(report)
    _add_installation(report)
    _add_cache(report)
    _add_environment(report)
    _add_llvm_copies(report)
    return report


def _add_versions(report):
    report.facts["moe-mlir"] = __version__
    report.facts["python"] = f"{platform.python_version()} ({sys.executable})"
    report.facts["platform"] = platform.platform()
    if importlib.util.find_spec("torch"):
        import torch

        cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
        report.facts["torch"] = f"{torch.__version__}, GPU: {cuda}"
        version = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
        if version < _LEAST_TORCH:
            report.problems.append(f"expected torch {'.'.join(map(str, _LEAST_TORCH))} or newer, "
                                   f"found {torch.__version__}; install a newer one")
    else:
        report.facts["torch"] = "not installed; artifacts and the compiler work without it"


def _add_integrations(report):
    for package in ("transformers", "safetensors", "matplotlib"):
        try:
            report.facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            report.facts[package] = "not installed"
    points = importlib.metadata.entry_points(group="torch_dynamo_backends", name="moe")
    report.facts["backend"] = ", ".join(point.value for point in points) or "not registered"
    if not points:
        report.problems.append(
            'torch.compile(backend="moe") finds nothing: the package has no metadata; install '
            "the wheel, or use the package in build/python"
        )


def _add_compiler(report):
    from .._native import native
    from ..compiler.chips import target_chips

    try:
        moe = native()
    except ImportError as error:
        report.facts["compiler"] = "none"
        report.problems.append(str(error))
        return
    name, features = moe.host_cpu()
    enabled = [f[1:] for f in features.split(",") if f.startswith("+")]
    vectors = [f for f in ("avx2", "avx512f", "avx512bf16", "amx-tile", "sve") if f in enabled]
    report.facts["compiler"] = f"LLVM {moe.llvm_version()} ({moe.__file__})"
    report.facts["cpu"] = f"{name}, {', '.join(vectors) or 'no wide vectors'}"
    report.facts["threads"] = moe.get_num_threads()
    report.facts["chips"] = ", ".join(target_chips())
    report.facts["ptxas"] = moe.find_ptxas() or (
        "none; PTX works, cubins need the nvidia-cuda-nvcc wheel"
    )


def _add_driver(report):
    """The CUDA driver, which torch need not know of: our GPU runtime loads it itself."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        version, count = ctypes.c_int(), ctypes.c_int()
        driver.cuDriverGetVersion(ctypes.byref(version))
        status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    except (OSError, AttributeError):
        report.facts["CUDA driver"] = "none; GPU kernels run in the simulator"
        return
    release = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    report.facts["CUDA driver"] = f"{release}, {count.value} devices"
    if status:
        report.problems.append(f"the CUDA driver ({release}) answers with error {status}; GPU "
                               "kernels cannot run")


def _add_installation(report):
    missing = {
        "tools": [name for name in tools.TOOLS if tools.find_tool(name) is None],
        "libraries": [name for name in _LIBRARIES if not (PACKAGE / name).exists()],
    }
    for fact, count in (("tools", len(tools.TOOLS)), ("libraries", len(_LIBRARIES))):
        report.facts[fact] = f"{count - len(missing[fact])} of {count}"
        if missing[fact]:
            report.problems.append(f"expected {', '.join(missing[fact])} with the package in "
                                   f"{PACKAGE}, found none; install the wheel again, or build "
                                   "the source tree")


def _add_environment(report):
    from .._support import environment

    settings = [f"{name}={os.environ[name]}" for name in environment.VARIABLES
                if name in os.environ]
    report.facts["variables"] = " ".join(settings) or "none set"
    report.problems += environment.unknown()


def _add_cache(report):
    from ..compiler import cache

    folder = cache.default_folder()
    if os.environ.get("MOE_MLIR_CACHE") == "0":
        report.facts["cache"] = "off (MOE_MLIR_CACHE=0)"
        return
    try:
        entries = cache.Cache(folder).entries()
    except OSError as error:
        report.facts["cache"] = f"{folder}, unusable"
        report.problems.append(f"the disk cache cannot be used: {error}")
        return
    report.facts["cache"] = f"{folder}, {len(entries)} entries, {sum(e[1] for e in entries)} bytes"


def _add_llvm_copies(report):
    mapped = _mapped_llvms()
    report.facts["LLVM mapped"] = ", ".join(mapped) or "none"
    if sum("libLLVM" in path for path in mapped) > 1:
        report.problems.append(
            "more than one libLLVM is mapped into this process; import moe_mlir in a process "
            "without the other packages"
        )
    others = [name for name in _OTHER_LLVMS if importlib.util.find_spec(name)]
    report.facts["own LLVM in"] = ", ".join(others) or "no other package"


def _mapped_llvms() -> list:
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "/" in line}
    except OSError:
        return []
    return sorted(p for p in paths if os.path.basename(p).startswith(("libLLVM", "libMLIR")))


def parser() -> Parser:
    parser = Parser("doctor", "Reports versions, hardware, tools, the cache, and what is missing.\n"
                    "Exits with status 1 if there is a problem.",
                    examples=("moe doctor", "moe doctor --json > report.json"))
    add_json(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    report = doctor()
    if options.json:
        print_json(dataclasses.asdict(report))
    else:
        print(report)
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
