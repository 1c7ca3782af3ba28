"""What surrounds a kernel: the call of an op, and its compilation."""

import importlib
import os
import statistics
import tempfile
from dataclasses import dataclass, field
from unittest import mock

import torch

import moe_mlir
from moe_mlir.runtime import compile_cached, load_or_compile

from .. import timing
from ..rows import Goal, make_record, make_title, normal


@dataclass
class Call:
    """An op on one token: the whole call, less the compiled function alone."""

    e: int = 8
    k: int = 1
    dtype: torch.dtype = torch.float32
    op: str = "call"
    quick: bool = True
    goals: tuple = (Goal("ours_us", 3, at_most=True),)
    why: str = "Checking arguments in Python and allocating two results take most of it."

    @property
    def shape(self):
        return dict(kernel="topk_renorm", n=1, e=self.e, k=self.k)

    @property
    def title(self):
        return make_title(self.op, self.shape, self.dtype)

    def measure(self, context):
        z = normal(1, self.e, seed=0)
        gates, indices = moe_mlir.topk_renorm(z, self.k)
        form = (self.dtype, self.e, self.k, "logits", True, 1.0, False, torch.int64)
        text = _kernel_of("topk_renorm", *form).text()
        function = compile_cached(text).function("topk_renorm")
        thunks = {
            "ours": [lambda: moe_mlir.topk_renorm(z, self.k)],
            "function": [lambda: function(z, gates, indices)],
            "eager": [lambda: torch.topk(z.softmax(-1), self.k)],
        }
        samples = timing.Turns(thunks, context.threads).samples(context.rounds)
        best = {name: min(times) for name, times in samples.items()}
        return make_record(
            self,
            context,
            # Beyond the kernel: the function's own call of 8 numbers is part of it.
            ours_us=best["ours"],
            ours_median_us=statistics.median(samples["ours"]),
            function_us=best["function"],
            eager_us=best["eager"],
            ratio=best["eager"] / best["ours"],
        )


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
    why: str = ""
    shape: dict = field(init=False)
    goals: tuple = field(init=False)

    def __post_init__(self):
        self.shape = dict(kernel=self.form[0], cache="disk" if self.cached else "none")
        self.goals = (Goal("ours_us", 10_000 if self.cached else 150_000, at_most=True),)

    @property
    def title(self):
        return make_title(self.op, self.shape, self.dtype)

    def measure(self, context):
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
    Call(),
    *(Compilation(form, cached=False) for form in _KERNELS),
    *(Compilation(form, cached=True) for form in _KERNELS),
]
