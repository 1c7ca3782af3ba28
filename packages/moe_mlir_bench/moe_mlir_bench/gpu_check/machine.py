"""Facts of the machine, and compute-sanitizer where it is installed."""

import dataclasses
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from .target import Target

# What runs under the sanitizer: a kernel of each kind.
SANITIZED = ("router 70x4096 E128 k8 bf16", "similarity_inform 2x150x64 E24 bf16 causal",
             "attention 1x2x150x128 bf16 causal", "topk_renorm", "mad_dispersion",
             "adjacency_update", "dispatch", "gradient of attention")
_TOOLS = ("memcheck", "racecheck")


def facts(device: str, chip: str | None) -> dict:
    """What a reader of the report needs to know of where it was written; touches no GPU."""
    import torch

    result = {"device": device, "chip": chip, "python": sys.version.split()[0],
              "torch": torch.__version__, "platform": platform.platform(),
              "cpus": os.cpu_count()}
    for package in ("triton", "numpy"):
        try:
            result[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            result[package] = None
    if device == "cuda":
        # Driver, clocks and their limits, power, errors: all that it says of itself.
        result["nvidia_smi"] = nvidia_smi("-q", "-d", "CLOCK,POWER,TEMPERATURE,ECC,PERFORMANCE")
        result["driver"] = nvidia_smi("--query-gpu=driver_version,vbios_version", "--format=csv")
    return result


class Gpu:
    """What torch knows of the GPU; the first case, since it makes a context and no more."""

    name, group, limit, model = "gpu", "once", 30.0, 0.1

    def run(self, target: Target) -> dict:
        import torch

        if target.device != "cuda":
            return {"gpu": "simulator"}
        properties = torch.cuda.get_device_properties(0)
        return {"gpu": properties.name, "cuda": torch.version.cuda,
                "capability": list(torch.cuda.get_device_capability()),
                "multiprocessors": properties.multi_processor_count,
                "bytes": properties.total_memory,
                "l2_bytes": getattr(properties, "L2_cache_size", None)}


def nvidia_smi(*arguments: str) -> str:
    """What it prints, or why there is nothing."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True,
                              timeout=20)
        return done.stdout + done.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"


def find_sanitizer() -> str | None:
    found = shutil.which("compute-sanitizer")
    candidates = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin/compute-sanitizer"]
    return found or next((str(path) for path in candidates if path.exists()), None)


def sanitize(supervisor: Any, report: Any, group: Any, device: str) -> None:
    """Runs some cases under each tool; what it finds is one line, and its log is kept."""
    tool_path = find_sanitizer() if device == "cuda" else None
    if tool_path is None:
        why = "no compute-sanitizer is installed" if device == "cuda" else "needs a GPU"
        report.add(case="compute-sanitizer", group=group.name, problem="", not_run=why)
        return
    for i, tool in enumerate(_TOOLS):
        # Each has its part of what is left.
        left = group.deadline - supervisor.elapsed
        mine = dataclasses.replace(
            group, deadline=supervisor.elapsed + left / (len(_TOOLS) - i))
        log = report.folder / f"{tool}.log"
        prefix = [tool_path, f"--tool={tool}", f"--log-file={log}", "--print-limit=20"]
        # torch's allocator would hide what lies beyond a tensor.
        supervisor.run_group(mine, {"prefix": prefix,
                                    "environment": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}})
        text = log.read_text(errors="replace") if log.exists() else ""
        report.add(case=f"compute-sanitizer {tool}", group=group.name, **read_log(text))


def read_log(text: str) -> dict:
    """The verdict of a log; none where the tool was stopped before it gave one."""
    counts = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", text)
    if not counts:
        return {"problem": "", "not_run": "no summary in its log: stopped before its end"}
    found = sum(map(int, counts))
    first = next((line for line in text.splitlines() if re.search(r"=+ (Invalid|Error|Race)", line)), "")
    return {"problem": f"{found} errors; the first: {first.strip('= ')}" if found else ""}
