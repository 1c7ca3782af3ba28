"""Imports, compiles and runs a trained model, and measures it against eager torch and Inductor."""

import json
import pathlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

import moe_mlir
from moe_mlir import nn
from moe_mlir._native import native
from moe_mlir._support import files

from .data import Corpus
from .gpu import KernelReport, compile_kernels
from .inductor import compile_inductor
from .model import LanguageModel
from .train import Trained

# (sequences, tokens): the compiled model takes any; all are checked.
SHAPES = ((16, 128), (1, 1), (3, 37), (2, 64))
TOLERANCE = 1e-5
# Two experts whose scores differ by less may swap places between two correct
# evaluations; a sequence with such a token is left out of the comparison.
_NEAR_TIE = 2e-6
_ROUNDS = 15


@dataclass
class Comparison:
    method: str
    max_error: float
    sequences: int
    near_ties: int
    eager_ms: float
    inductor_ms: float | None
    compiled_ms: float
    routing_ir: str
    kernels: list[KernelReport]
    load: list = field(default_factory=list)
    entropy: list = field(default_factory=list)
    # Why there are no kernels for the chip, where there are none.
    chip_reason: str = ""
    # Why there is no time of Inductor, where there is none.
    inductor_reason: str = ""

    @property
    def speed_up(self) -> float:
        return self.eager_ms / self.compiled_ms


class RoutingFunction(torch.nn.Module):
    """A router alone, as a function from tokens to gates and experts."""

    def __init__(self, router: nn.Router) -> None:
        super().__init__()
        self.router = router

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        routing = self.router(tokens)
        return routing.gates, routing.indices


def compare(trained: Trained, corpus: Corpus, chip: str, folder: pathlib.Path) -> Comparison:
    """Leaves the IR of every phase, the PTX and the routing IR in `folder`."""
    model, config = trained.model, trained.model.config
    folder.mkdir(parents=True, exist_ok=True)
    example, _ = corpus.validation_batch(*SHAPES[0])
    module = moe_mlir.export(model, (example,))
    module.save(folder / "model.mlir")
    native().compile_object(module.text, "moe-to-cpu", str(folder / "phases"))
    hidden = torch.randn(2, 16, config.width)
    routing = moe_mlir.export(RoutingFunction(model.blocks[0].moe.router), (hidden,))
    routing.save(folder / "routing.mlir")
    routing_ir = native().Module.parse(routing.text).text()
    kernels, chip_reason = [], ""
    try:
        kernels = compile_kernels(routing.text, chip, folder / "routing.ptx")
    except native().MoeError as refused:
        # Not every router has a GPU lowering yet; the report says which and why.
        chip_reason = str(refused).splitlines()[0]

    compiled = moe_mlir.compile(module)
    error, sequences, ties = 0.0, 0, 0
    for batch, tokens in SHAPES:
        inputs, _ = corpus.validation_batch(batch, tokens)
        worst, clear = max_relative_error(model, compiled, inputs)
        error, sequences, ties = max(error, worst), sequences + clear, ties + batch - clear
    inductor, inductor_reason = compile_inductor(model, example, config.method)
    times = time_in_turns({"eager": model, "compiled": compiled, **inductor}, example)
    load, entropy = routing_statistics(model, example)
    return Comparison(config.method, error, sequences, ties, times["eager"], times.get("inductor"),
                      times["compiled"], routing_ir, kernels, load, entropy, chip_reason,
                      inductor_reason)


@torch.no_grad()
def max_relative_error(model: LanguageModel, compiled: Callable[..., torch.Tensor],
                       inputs: torch.Tensor) -> tuple[float, int]:
    """max |ours - eager| / max |eager| over sequences without near ties; how many those are."""
    expected, routings = model.route(inputs)
    clear = torch.stack([_margins(r) for r in routings]).amin(dim=0) > _NEAR_TIE
    found = compiled(inputs)
    if found.shape != expected.shape:
        raise AssertionError(f"expected logits of shape {tuple(expected.shape)}, found "
                             f"{tuple(found.shape)}")
    if not clear.any():
        return 0.0, 0
    gap = (found[clear] - expected[clear]).abs().max() / expected[clear].abs().max()
    return gap.item(), int(clear.sum())


def _margins(routing) -> torch.Tensor:
    """For each sequence the least gap between a selected and the best other expert."""
    scores = routing.probs if routing.probs is not None else routing.logits
    k = routing.indices.shape[-1]
    top = scores.topk(k + 1, dim=-1).values
    return (top[..., k - 1] - top[..., k]).amin(dim=-1)


def time_in_turns(calls: dict[str, Callable[..., torch.Tensor]],
                  inputs: torch.Tensor) -> dict[str, float]:
    """Median milliseconds of each call, measured in turns."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    with torch.inference_mode():
        for _ in range(_ROUNDS + 2):
            for name, call in calls.items():
                start = time.perf_counter()
                call(inputs)
                taken[name].append(time.perf_counter() - start)
    # The first two rounds touch memory for the first time.
    return {name: 1e3 * statistics.median(times[2:]) for name, times in taken.items()}


@torch.no_grad()
def routing_statistics(model: LanguageModel,
                       inputs: torch.Tensor) -> tuple[list[list[float]], list[float]]:
    """Each layer's share of assignments per expert, and mean routing entropy."""
    load, entropy = [], []
    for routing in model.route(inputs)[1]:
        counts = moe_mlir.metrics.selection_counts(routing.indices, model.config.experts)
        load.append((counts.float() / counts.sum()).tolist())
        p = routing.probs
        if p is None:
            assert routing.logits is not None
            p = routing.logits.softmax(dim=-1)
        entropy.append(float(moe_mlir.metrics.routing_entropy(p)))
    return load, entropy


def write_metrics(path: pathlib.Path, trained: dict, comparisons: list[Comparison]) -> None:
    record = {}
    for c in comparisons:
        t = trained[c.method]
        record[c.method] = {
            "validation_loss": t.validation_loss, "training_seconds": t.seconds,
            "max_relative_error": c.max_error, "sequences_compared": c.sequences,
            "sequences_with_near_ties": c.near_ties, "eager_ms": c.eager_ms,
            "inductor_ms": c.inductor_ms, "compiled_ms": c.compiled_ms, "speed_up": c.speed_up,
            "expert_load": c.load,
            "routing_entropy": c.entropy,
            "kernels": [vars(k) for k in c.kernels],
        }
    files.write(path, json.dumps(record, indent=2) + "\n")
