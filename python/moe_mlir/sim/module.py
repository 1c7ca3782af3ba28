"""PTX, parsed and decoded, and the launch of a kernel."""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from .arguments import Arguments
from .library import Launch, library, take_string
from .report import Report

#: Every check that `launch` knows. Deadlock detection is always on.
CHECKS = ("race", "bounds", "uninit", "align")
#: What the race check lets pass if asked to.
ALLOWANCES = ("equal-stores", "unfenced-init", "equal-shared-stores", "repeated-setmaxnreg")
_DECLARED_ALIGNMENT = 1 << len(CHECKS + ALLOWANCES)
_NO_SMEM_OPT_IN = 2 * _DECLARED_ALIGNMENT
_NONPORTABLE_CLUSTER = 2 * _NO_SMEM_OPT_IN
_TRACE_SHARED = 2 * _NONPORTABLE_CLUSTER

_NUMERICS = ("exact", "tensor_core", "perturbed")


class PtxError(ValueError):
    """The PTX text cannot be loaded; the message lists every reason."""


def _flags(what: str, names: Sequence[str], known: Sequence[str]) -> int:
    """A bit for each of `known` that is named."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"expected {what} out of {known}, found {unknown}")
    return sum(1 << known.index(name) for name in set(names))


def extent(value: Any, what: str) -> tuple[int, int, int]:
    extents = (value,) if isinstance(value, int) else tuple(value)
    if not 1 <= len(extents) <= 3 or any(int(e) < 1 for e in extents):
        raise ValueError(
            f"expected {what} to be one to three positive integers, "
            f"found {value!r}"
        )
    x, y, z, *_ = (*map(int, extents), 1, 1)
    return x, y, z


def _read_ptx(ptx: Any) -> str:
    if isinstance(ptx, os.PathLike):
        return pathlib.Path(ptx).read_text()
    if "\n" not in ptx and not ptx.lstrip().startswith("."):
        return pathlib.Path(ptx).read_text()
    return ptx


class Module:
    """Parsed and decoded PTX: load once, launch often."""

    def __init__(self, ptx: str | os.PathLike[str]):
        text = _read_ptx(ptx).encode()
        self._library = library()
        error = ctypes.c_void_p()
        self._handle = self._library.moe_sim_load(
            text, len(text), ctypes.byref(error)
        )
        if not self._handle:
            raise PtxError(take_string(error.value))
        description = json.loads(
            take_string(self._library.moe_sim_describe(self._handle))
        )
        self.kernels: dict[str, dict[str, Any]] = {
            k["name"]: k for k in description["kernels"]
        }

    def __del__(self):
        # Late, the interpreter has taken the names of modules away.
        if getattr(self, "_handle", None):
            self._library.moe_sim_unload(self._handle)

    def launch(
        self,
        kernel: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any],
        *,
        dynamic_smem: int = 0,
        cluster: int | Sequence[int] | None = None,
        checks: Sequence[str] = CHECKS,
        allow: Sequence[str] = (),
        smem_alignment: str = "hardware",
        smem_opt_in: bool = True,
        nonportable_cluster: bool = False,
        seed: int = 0,
        policy: int = 0,
        numerics: str = "exact",
        threads: int = 0,
        trace_shared: bool = False,
        names: Sequence[str] | None = None,
    ) -> Report:
        """See `launch`; `names` are what errors and findings call the arguments."""
        if kernel not in self.kernels:
            raise ValueError(
                f"expected a kernel of this module "
                f"({', '.join(sorted(self.kernels))}), found {kernel!r}"
            )
        flags = _flags("checks", checks, CHECKS)
        flags |= _flags("allow", allow, ALLOWANCES) << len(CHECKS)
        if smem_alignment not in ("hardware", "declared"):
            raise ValueError(
                "expected smem_alignment to be 'hardware' or 'declared', "
                f"found {smem_alignment!r}"
            )
        if smem_alignment == "declared":
            flags |= _DECLARED_ALIGNMENT
        if not smem_opt_in:
            flags |= _NO_SMEM_OPT_IN
        if nonportable_cluster:
            flags |= _NONPORTABLE_CLUSTER
        if trace_shared:
            flags |= _TRACE_SHARED
        if numerics not in _NUMERICS:
            raise ValueError(
                f"expected numerics to be one of {_NUMERICS}, "
                f"found {numerics!r}"
            )
        if policy not in (0, 1):
            raise ValueError(f"expected policy to be 0 or 1, found {policy!r}")
        arguments = Arguments(self.kernels[kernel], args, names)
        descriptor = Launch(
            struct_size=ctypes.sizeof(Launch),
            grid=extent(grid, "grid"),
            block=extent(block, "block"),
            cluster=(0, 0, 0) if cluster is None else extent(cluster, "cluster"),
            dynamic_smem=dynamic_smem,
            checks=flags,
            policy=policy,
            seed=seed,
            numerics=_NUMERICS.index(numerics),
            threads=threads,
            params=ctypes.addressof(arguments.params),
            params_size=len(arguments.params),
            buffers=arguments.buffers,
            num_buffers=len(arguments.regions),
        )
        error = ctypes.c_void_p()
        result = self._library.moe_sim_launch(
            self._handle,
            kernel.encode(),
            ctypes.byref(descriptor),
            ctypes.byref(error),
        )
        if not result:
            raise ValueError(take_string(error.value))
        for region in arguments.regions:
            region.write_back()
        return Report(json.loads(take_string(result)))


def launch(
    ptx: str | os.PathLike[str] | Module,
    kernel: str,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Sequence[Any],
    *,
    dynamic_smem: int = 0,
    cluster: int | Sequence[int] | None = None,
    checks: Sequence[str] = CHECKS,
    allow: Sequence[str] = (),
    smem_alignment: str = "hardware",
    smem_opt_in: bool = True,
    nonportable_cluster: bool = False,
    seed: int = 0,
    policy: int = 0,
    numerics: str = "exact",
    threads: int = 0,
    trace_shared: bool = False,
) -> Report:
    """Runs `kernel` of `ptx` (text, a path, or a loaded `Module`).

    `seed` fixes the order of blocks, warps, lanes and asynchronous
    completions: equal seeds give equal runs. `policy` 0 reconverges diverged
    lanes as early as it can, 1 as late as independent thread scheduling
    allows. `numerics` is "exact" (products exact, sums in f32), "tensor_core"
    (the sums of an H100, bit for bit, of f16, bf16 and tf32) or "perturbed" (approximate instructions off by up
    to two ulp, sums in random order). `threads` 0 uses every core where blocks do
    not communicate, and one otherwise. With `trace_shared` the report lists every
    access to shared memory (`shared_trace`).

    `allow` names what the race check is to let pass: "equal-stores", two warps
    that store the same value to one place; "equal-shared-stores", the same of
    shared memory alone; "unfenced-init", an asynchronous copy that uses an
    mbarrier without a proxy fence after its initialisation; and
    "repeated-setmaxnreg", a setmaxnreg that asks for as many registers as the
    one before, where the warps of the warpgroup have not met in between.
    Dynamic shared memory starts at a multiple of 1024, as on hardware where a
    kernel has no static one; with `smem_alignment="declared"` only where the
    kernel's declarations put it, which finds code that hopes for more.

    A launch that the chip of the PTX's `.target` would refuse is a ValueError:
    grids, blocks and clusters, the kernel's own bounds, more shared memory than
    the chip has, more than 48 KB of static shared memory, or, with
    `smem_opt_in=False`, more than 48 KB in all, which a host must opt in to
    (MAX_DYNAMIC_SHARED_SIZE_BYTES). Clusters of more than 8 blocks need
    `nonportable_cluster=True` (NON_PORTABLE_CLUSTER_SIZE_ALLOWED).

    `setmaxnreg` moves registers between the warps of a block, which starts with
    the kernel's registers a thread: as `.maxnreg` says, or what an SM's 65536
    give each thread of `.minnctapersm` blocks. With neither, ptxas ignores
    setmaxnreg, and so does the simulator. A warp waits for registers that other
    warps have not given back; if they never do, that is a "deadlock".
    """
    module = ptx if isinstance(ptx, Module) else Module(ptx)
    return module.launch(
        kernel,
        grid,
        block,
        args,
        dynamic_smem=dynamic_smem,
        cluster=cluster,
        checks=checks,
        allow=allow,
        smem_alignment=smem_alignment,
        smem_opt_in=smem_opt_in,
        nonportable_cluster=nonportable_cluster,
        seed=seed,
        policy=policy,
        numerics=numerics,
        threads=threads,
        trace_shared=trace_shared,
    )
