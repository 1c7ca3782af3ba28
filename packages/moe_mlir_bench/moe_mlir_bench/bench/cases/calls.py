"""Call overhead and compile time of ops."""

import functools
import importlib
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

import moe_mlir
from moe_mlir.compiler.jit import load_or_compile

from .. import timing
from ..rows import Context, Goal, assert_within, make_record, make_title, normal


@dataclass
class Call:
    """An op on one token: the whole call, kernel and all, beside the same in torch."""

    kernel: str
    sizes: dict
    inputs: tuple
    ours: Callable
    eager: Callable
    dtype: torch.dtype = torch.float32
    op: str = "call"
    quick: bool = True
    # No machine is asked for less than what leaves a call of torch itself no time.
    goals: tuple = (Goal("floors", 3, at_most=True),)
    why: str = (
        "A twelfth of it is the kernel, a fifth asks torch whether anything observes the call, and "
        "a quarter makes tensors of the results; the rest is Python and a look at the arguments."
    )

    @property
    def shape(self) -> dict[str, Any]:
        return dict(kernel=self.kernel, n=1, **self.sizes)

    @property
    def title(self) -> str:
        return make_title(self.op, self.shape, self.dtype)

    def measure(self, context: Context) -> dict[str, Any]:
        self._check()
        thunks = {
            "ours": [functools.partial(self.ours, *self.inputs)],
            "eager": [functools.partial(self.eager, *self.inputs)],
            "floor": [functools.partial(_nothing()[0], self.inputs[0])],
        }
        samples = timing.Turns(thunks, context.threads).samples(context.rounds)
        best = {name: min(times) for name, times in samples.items()}
        return make_record(
            self,
            context,
            ours_us=best["ours"],
            ours_median_us=statistics.median(samples["ours"]),
            eager_us=best["eager"],
            ratio=best["eager"] / best["ours"],
            floor_us=best["floor"],
            floors=best["ours"] / max(best["floor"], 1.0),
        )

    def _check(self):
        found, expected = self.ours(*self.inputs), self.eager(*self.inputs)
        pairs = zip(found, expected) if isinstance(found, tuple) else [(found, expected)]
        for mine, reference in pairs:
            assert_within(mine, reference, 1e-5, self.kernel)


@functools.cache
def _nothing():
    """An op of torch.library that returns its argument, and the library, as long as which it lives."""
    library = torch.library.Library("moe_bench", "DEF")
    library.define("nothing(Tensor(a) x) -> Tensor(a)")
    library.impl("nothing", lambda x: x, "CPU")
    return torch.ops.moe_bench.nothing.default, library


def _renormalised(gates, indices):
    return gates / gates.sum(-1, keepdim=True), indices


_CALLS = (
    Call(
        "topk_renorm", dict(e=8, k=1), (normal(1, 8, seed=0),),
        ours=lambda z: moe_mlir.topk_renorm(z, 1),
        eager=lambda z: _renormalised(*torch.topk(z.softmax(-1), 1)),
    ),
    Call(
        "grouped_topk", dict(e=16, k=4), (normal(1, 16, seed=0), normal(16, seed=1)),
        ours=lambda z, bias: moe_mlir.grouped_topk(z, 4, bias=bias),
        eager=lambda z, bias: _biased(z.sigmoid(), bias, 4),
    ),
    Call(
        "router_logits", dict(d=64, e=8), (normal(1, 64, seed=0), normal(8, 64, seed=1)),
        ours=moe_mlir.router_logits,
        eager=lambda h, weight: h @ weight.T,
    ),
    Call(
        "adjacency_gate", dict(e=16), (normal(1, 16, seed=0).softmax(-1), torch.eye(16)),
        ours=moe_mlir.adjacency_gate,
        eager=lambda p, a: p @ a.T,
    ),
)  # fmt: skip


def _biased(scores, bias, k):
    indices = torch.topk(scores + bias, k).indices
    return _renormalised(scores.gather(-1, indices), indices)


def _kernel_of(op, *form):
    """One specialisation of an op: the module of an op is named after it."""
    return importlib.import_module(f"moe_mlir.ops.{op}").kernel(*form)


_F32 = torch.float32
_SIMILARITY = (_F32, _F32, 352, 16, 352, False, False, False, 1.0, True, None, "all", "ieee")
_KERNELS = (
    ("topk_renorm", _F32, 64, 8, "logits", True, 1.0, False, torch.int64),
    ("similarity_inform", *_SIMILARITY),
    ("mad_dispersion", _F32, torch.int64, 16, 512, "mad", False),
    ("adjacency_update", 64, 8, torch.int64, 0.9, "row", True, False),
)


@dataclass
class Compilation:
    """A kernel's text to a callable function, from nothing or from the disk cache."""

    form: tuple
    cached: bool
    dtype: torch.dtype = torch.float32
    op: str = "compile"
    quick: bool = False
    why: str = "Two thirds of it are LLVM's, with the assertions of the pinned wheels on (a sixth)."
    shape: dict = field(init=False)
    goals: tuple = field(init=False)

    def __post_init__(self):
        self.shape = dict(kernel=self.form[0], cache="disk" if self.cached else "none")
        self.goals = (Goal("ours_us", 10_000 if self.cached else 150_000, at_most=True),)

    @property
    def title(self) -> str:
        return make_title(self.op, self.shape, self.dtype)

    def measure(self, context: Context) -> dict[str, Any]:
        text = _kernel_of(*self.form).text()
        with tempfile.TemporaryDirectory() as folder:
            settings = {"MOE_MLIR_CACHE_DIR": folder, "MOE_MLIR_CACHE": str(int(self.cached))}
            with mock.patch.dict(os.environ, settings):
                if self.cached:
                    load_or_compile(text)
                times = [timing.thread_us(lambda: load_or_compile(text), 1) for _ in range(5)]
        return make_record(
            self, context, ours_us=min(times), ours_median_us=statistics.median(times)
        )


ROWS = [
    *_CALLS,
    *(Compilation(form, cached=False) for form in _KERNELS),
    *(Compilation(form, cached=True) for form in _KERNELS),
]
