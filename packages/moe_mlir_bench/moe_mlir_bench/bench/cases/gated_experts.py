"""The experts of a layer as users run them: gated (SwiGLU), of the sizes that models have.

Ours is what `set_experts_implementation("moe")` gives a transformers model, with its
weights packed once by `pack_experts` and, apart, where they lie. All rivals get the
same weights, ids and gates, and may pack theirs, too. Which experts a call needs changes
from call to call, and the weights are more than the last cache holds, so that
they are read from memory as in a model of many layers.
"""

import functools
import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moe_mlir._support.timing import cache_bytes
from moe_mlir._torch import dynamo

from .. import peers, timing
from ..peers import Layer, Unavailable
from ..rows import Context, Goal, Skipped, assert_within, make_record, make_title, normal

# Of one copy of the weights; the largest layer alone is beyond it.
_MOST_WEIGHTS = 1 << 30
_MOST_LAYERS = 16
_CHECKED_TOKENS = 16
# Of the largest value: sums of a thousand products in float32; values that are
# rounded to bfloat16 between the layers, and by some rivals after each expert.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


# Why goals are missed, for the page.
_WHY_ONE_TOKEN = (
    "The token reads each chosen expert's weights once, and nothing else takes time. The bandwidth "
    "is measured in each run and differs by a quarter between runs of a shared machine; the same "
    "row reached 67 to 108 % of it.")
_WHY_FEW_TOKENS = (
    "Nearly all of the time is reading weights, at 95 to 142 % of the bandwidth measured in that "
    "run; a peer that reads the same bytes at 0.8 of it leaves no more than the ratio at the limit.")
_WHY_MANY_TOKENS = (
    "The limit is the longer of reading all weights and of the multiply-adds. An expert with 32 to "
    "128 rows, on average, does both in turns: its first tile of rows waits for memory. The two "
    "together are 85 to 100 % of the time measured.")


@dataclass(frozen=True)
class Tokens:
    x: torch.Tensor
    gates: torch.Tensor
    ids: torch.Tensor

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.x, self.gates, self.ids


@dataclass
class GatedExperts:
    """`load`: balanced, hot (four of five tokens choose one expert) or decode."""

    d: int
    hidden: int
    e: int
    k: int
    tokens: int
    load: str
    dtype: torch.dtype
    op: str = "gated_experts"
    quick: bool = False

    @property
    def shape(self) -> dict[str, Any]:
        sizes = dict(d=self.d, hidden=self.hidden, e=self.e, k=self.k)
        return dict(**sizes, tokens=self.tokens, load=self.load)

    @property
    def title(self) -> str:
        return make_title(self.op, self.shape, self.dtype)

    @property
    def goals(self) -> tuple[Goal, ...]:
        if self.tokens == 1:
            return Goal("percent_of_limit", 95), Goal("peer_ratio", 0.98)
        ahead = Goal("peer_ratio", 1.15)
        of_peak = self.tokens == 512 and self.dtype == torch.float32
        return (ahead, Goal("percent_of_limit", 85)) if of_peak else (ahead,)

    @property
    def why(self) -> str:
        if self.tokens == 1:
            return _WHY_ONE_TOKEN
        return _WHY_MANY_TOKENS if self.tokens == 512 else _WHY_FEW_TOKENS

    def measure(self, context: Context) -> dict[str, Any]:
        layers = _STOCK.layers(self.d, self.hidden, self.e, self.dtype)
        sets = self._token_sets()
        calls, missing = self._calls(layers, context)
        self._check(calls, layers[0], sets[0])
        # A call takes milliseconds: many rounds of few tokens cost little, and find a quiet moment.
        samples = timing.Turns(_rotate(calls, sets), context.threads).samples(
            4 * context.rounds, context.seconds
        )
        peaks = {name: timing.peak_mb(functools.partial(calls[name][0], *sets[0].arguments))
                 for name in ("ours", "eager")}
        return self._record(context, layers[0], sets, samples, missing, peaks)

    # ------------------------------------------------------------------- inputs

    def _token_sets(self):
        """As many as it takes until all experts have had their turn, at least 4."""
        generator = torch.Generator().manual_seed(0)
        count = max(4, -(-self.e // (self.tokens * self.k)))
        chosen = _LOADS[self.load](self.e, self.k, self.tokens, count, generator)
        return [self._tokens(seed, ids, generator) for seed, ids in enumerate(chosen)]

    def _tokens(self, seed, ids, generator):
        gates = torch.rand(ids.shape, generator=generator) + 0.1
        gates = (gates / gates.sum(-1, keepdim=True)).to(self.dtype)
        return Tokens(normal(self.tokens, self.d, seed=seed, dtype=self.dtype), gates, ids)

    # ------------------------------------------------------------------- rivals

    def _calls(self, layers, context):
        """name -> its call on each layer, and name -> why there is none."""
        onnxruntime = functools.partial(peers.onnxruntime, k=self.k, threads=context.threads)
        make: dict[str, Callable[[Layer], peers.Call]] = {
            "ours": functools.partial(_STOCK.packed, "ours", peers.ours_packed),
            "unpacked": lambda layer: peers.transformers(layer, "moe"),
            "eager": lambda layer: peers.transformers(layer, "eager"),
            "grouped_mm": lambda layer: peers.transformers(layer, "grouped_mm"),
            "batched_mm": lambda layer: peers.batched_mm(layer, self.tokens, self.k),
            "vllm": functools.partial(_STOCK.packed, "vllm", peers.vllm),
            "onnxruntime": functools.partial(_STOCK.packed, "onnxruntime", onnxruntime),
        }
        missing = {}
        if context.inductor:
            make["inductor"] = peers.compile_inductor()
        else:
            missing["inductor"] = "left out of this run"
        calls = {}
        for name, of_layer in make.items():
            try:
                calls[name] = [of_layer(layer) for layer in layers]
            except Unavailable as reason:
                if name == "ours":
                    raise Skipped(str(reason)) from reason
                missing[name] = str(reason)
        return calls, missing

    def _check(self, calls, layer, tokens):
        few = torch.linspace(0, self.tokens - 1, min(self.tokens, _CHECKED_TOKENS)).long()
        expected = _reference(layer, *(t[few] for t in tokens.arguments))
        bound = _TOLERANCE[self.dtype] * float(expected.abs().max())
        for name, of_layers in calls.items():
            y = of_layers[0](*tokens.arguments)
            assert y.shape == tokens.x.shape, f"{name}: expected {tokens.x.shape}, found {y.shape}"
            assert_within(y[few], expected, bound, name)

    # ------------------------------------------------------------------- record

    def _record(self, context, layer, sets, samples, missing, peaks):
        best = {name: min(times) for name, times in samples.items()}
        ours, unpacked = best.pop("ours"), best.pop("unpacked")
        first = min(best, key=lambda name: best[name])
        touched = statistics.mean(len(s.ids.unique()) for s in sets) * layer.expert_bytes
        flops = 6 * self.tokens * self.k * self.d * self.hidden
        limit = context.machine.limit(flops, touched, dtype=self.dtype)
        return make_record(
            self,
            context,
            ours_us=ours,
            ours_median_us=statistics.median(samples["ours"]),
            unpacked_us=unpacked,
            eager_us=best["eager"],
            inductor_us=best.get("inductor"),
            peer=first,
            peer_us=best[first],
            peer_ratio=best[first] / ours,
            ratio=best[first] / ours,
            ratio_at_limit=best[first] / limit.us,
            eager_ratio=best["eager"] / ours,
            limit_us=limit.us,
            limit_terms=vars(limit),
            bound=limit.bound,
            percent_of_limit=100 * limit.us / ours if context.threads == 1 else None,
            peak_mb=peaks["ours"],
            eager_peak_mb=peaks["eager"],
            rivals_us=best,
            missing=missing,
            read_gbytes=touched / ours * 1e-3,
            gflops=flops / ours * 1e-3,
        )


# ------------------------------------------------------------------------- weights


class _Stock:
    """Layers of the sizes of the last row, and what rivals packed of them; one size at a time."""

    def __init__(self) -> None:
        self._sizes: tuple = ()
        self._layers: list[Layer] = []
        self._packed: dict[tuple[str, int], peers.Call] = {}

    def layers(self, *sizes: Any) -> list[Layer]:
        if sizes != self._sizes:
            self._packed.clear()
            self._layers = []
            dynamo.reset()  # which keeps the modules that it compiled
            gc.collect()
            self._layers, self._sizes = _make_layers(*sizes), sizes
        return self._layers

    def packed(self, name: str, pack: Callable[[Layer], peers.Call], layer: Layer) -> peers.Call:
        key = name, next(i for i, other in enumerate(self._layers) if other is layer)
        if key not in self._packed:
            self._packed[key] = pack(layer)
        return self._packed[key]


_STOCK = _Stock()


def _make_layers(d, hidden, e, dtype):
    """Several, until they are many times what the last cache holds."""
    size = 3 * e * d * hidden * dtype.itemsize
    count = max(1, min(-(-8 * cache_bytes() // size), _MOST_WEIGHTS // size, _MOST_LAYERS))
    generator = torch.Generator().manual_seed(0)

    def uniform(*shape):
        bound = (3 / shape[-1]) ** 0.5
        return torch.empty(shape, dtype=dtype).uniform_(-bound, bound, generator=generator)
    return [Layer(uniform(e, 2 * hidden, d), uniform(e, d, hidden)) for _ in range(count)]


def _rotate(calls, sets):
    """Thunks of each rival, which begins where the one before it has read no weights yet."""
    thunks = {}
    for turn, (name, of_layers) in enumerate(calls.items()):
        each = [functools.partial(call, *s.arguments) for s in sets for call in of_layers]
        first = turn % len(each)
        thunks[name] = each[first:] + each[:first]
    return thunks


def _reference(layer, x, gates, ids):
    y = torch.zeros(x.shape, dtype=torch.float64)
    for expert in ids.unique().tolist():
        token, place = torch.where(ids == expert)
        gate, up = (x[token].double() @ layer.gate_up[expert].double().T).chunk(2, dim=-1)
        rows = torch.nn.functional.silu(gate) * up @ layer.down[expert].double().T
        y.index_add_(0, token, rows * gates[token, place, None].double())
    return y


# --------------------------------------------------------------------------- loads


def _balanced(e, k, tokens, count, generator):
    """All experts in turn, in orders that change: as many rows for each as there can be."""
    assert e % k == 0, f"expected {k} to divide {e}"
    orders = -(-count * tokens * k // e)
    order = torch.cat([torch.randperm(e, generator=generator) for _ in range(orders)])
    return order[: count * tokens * k].view(count, tokens, k).unbind()


def _decode(e, k, tokens, count, generator):
    """One token takes all experts in turn; several choose by chance, as requests in a batch."""
    if tokens == 1:
        return _balanced(e, k, tokens, count, generator)
    return torch.rand(count, tokens, e, generator=generator).topk(k).indices.unbind()


def _hot(e, k, tokens, count, generator):
    """Four of five tokens choose one expert, and the others do not."""
    scores = torch.rand(count, tokens, e, generator=generator)
    hot = torch.randint(e, (count, 1, 1), generator=generator).expand(-1, tokens, 1)
    chooses = (torch.arange(tokens) < round(0.8 * tokens)).view(1, -1, 1).expand(count, -1, 1)
    # Above all scores, or below them.
    scores.scatter_(2, hot, torch.where(chooses, 2.0, -1.0))
    return scores.topk(k).indices.unbind()


_LOADS = dict(balanced=_balanced, decode=_decode, hot=_hot)

_SIZES = ((1024, 512, 32, 8), (2048, 1024, 64, 8), (2048, 768, 128, 8), (4096, 1536, 16, 2))
_COUNTS = ((1, "decode"), (4, "decode"), *(
    (tokens, load) for tokens in (16, 64, 512) for load in ("balanced", "hot")))
_QUICK = ((1, "decode"), (16, "balanced"), (512, "balanced"))

ROWS = [
    GatedExperts(*sizes, tokens, load, dtype, quick=sizes == _SIZES[0] and (tokens, load) in _QUICK)
    for sizes in _SIZES
    for dtype in (torch.float32, torch.bfloat16)
    for tokens, load in _COUNTS
]
