"""The ways to run a model that `--speed` compares, each with a cache of its own."""

import contextlib
import copy
import functools
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import moe_mlir
from moe_mlir._transformers.names import cache_call
from moe_mlir.hf import patch, unpatch


@dataclass(frozen=True)
class Form:
    """What a way makes of a model (model, ids, cache -> forward), and of its experts and routers."""

    make: Callable[..., Any]
    experts: str = "grouped_mm"
    is_patched: bool = False    # routers by hf.patch
    is_packed: bool = False


def _eager(model, ids, cache):
    return model


def _torch_compile(backend):
    return lambda model, ids, cache: torch.compile(model, backend=backend, dynamic=True)


def _compile(model, ids, cache, pack=True):
    return moe_mlir.compile(model, (ids,), pack=pack,
                            kwargs=dict(**cache_call(model, cache), logits_to_keep=1))


FORMS = {
    "eager, grouped_mm": Form(_eager),
    "eager, batched_mm": Form(_eager, "batched_mm"),
    "eager, eager": Form(_eager, "eager"),
    "eager, moe": Form(_eager, "moe", is_patched=True),
    "Inductor": Form(_torch_compile("inductor")),
    'backend="moe"': Form(_torch_compile("moe")),
    'backend="moe", packed': Form(_torch_compile("moe"), "moe", is_packed=True),
    # All ways share the model.
    "moe_mlir.compile": Form(functools.partial(_compile, pack=False)),
    "moe_mlir.compile, packed": Form(_compile, "moe", is_packed=True),
}


class Weights:
    """A model, and a copy with packed weights that is made for the first way which asks.

    Args:
        alone: no other way needs the model: it is packed in place, as users do.
    """

    def __init__(self, model: Any, alone: bool):
        self.model, self._alone = model, alone

    @functools.cached_property
    def packed(self) -> Any:
        model = self.model if self._alone else copy.deepcopy(self.model)
        model.set_experts_implementation("moe")
        if not moe_mlir.pack_experts(model):
            raise ValueError("expected layers of experts that can be packed, found none")
        with warnings.catch_warnings():  # of a head whose weight is the embedding's
            warnings.simplefilter("ignore", UserWarning)
            moe_mlir.pack_linears(model)
        return model


def cache_of(model: Any, room: int) -> Any:
    """A cache of fixed size; one that grows where transformers has no other for the model's layers."""
    import transformers

    try:
        return transformers.StaticCache(config=model.config, max_cache_len=room)
    except KeyError:
        return transformers.DynamicCache(config=model.config)


class Way:
    """A model's forward in one way."""

    def __init__(self, name: str, weights: Weights):
        self.name, self.form, self._weights = name, FORMS[name], weights
        self.seconds: dict[str, list[float]] = {"prompt": [], "steps": []}
        self.tokens: list[int] = []
        self._model: Any = None
        self._forward: Any = None
        self._cache: Any = None

    def start(self, ids: torch.Tensor, room: int) -> float:
        """Makes the forward and runs the prompt; returns the seconds to the first token."""
        begin = time.perf_counter()
        self._model = self._weights.packed if self.form.is_packed else self._weights.model
        self._cache = cache_of(self._model, room)
        with self._experts(self.form.experts):
            self._forward = self.form.make(self._model, ids, self._cache)
        self.run(ids, 0)
        return time.perf_counter() - begin

    @contextlib.contextmanager
    def _experts(self, implementation: str) -> Iterator[None]:
        """Inside, the model is as the way wants it; all ways share it."""
        self._model.set_experts_implementation(implementation)
        if self.form.is_patched:
            patch(self._model)
        try:
            yield
        finally:
            if self.form.is_patched:
                unpatch(self._model)

    @property
    def has_prompt_of_its_own(self) -> bool:
        """"batched_mm" copies the weights for each token: its prompt runs on "grouped_mm"."""
        return self.form.experts != "batched_mm"

    def run(self, ids: torch.Tensor, steps: int) -> None:
        """A prompt and greedy steps; keeps the times and the tokens."""
        self._cache.reset()
        keywords = dict(**cache_call(self._model, self._cache), logits_to_keep=1)
        with self._experts(self.form.experts if self.has_prompt_of_its_own else "grouped_mm"):
            begin = time.thread_time()
            logits = self._forward(ids, **keywords).logits
            self.seconds["prompt"].append(time.thread_time() - begin)
        self.tokens = [int(logits[0, -1].argmax())]
        with self._experts(self.form.experts):
            begin = time.thread_time()
            for _ in range(steps):
                token = torch.tensor([[self.tokens[-1]]])
                logits = self._forward(token, **keywords).logits
                self.tokens.append(int(logits[0, -1].argmax()))
            if steps:
                self.seconds["steps"].append((time.thread_time() - begin) / steps)

    def added(self, before: int, resident: int, size: int) -> float:
        """What it adds to the memory of a process that holds the model, over the model's size."""
        return (resident - before) / size

    @property
    def note(self) -> str:
        """What its row of the table has to say beside its numbers."""
        return ""
