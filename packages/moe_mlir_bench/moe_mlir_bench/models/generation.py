"""`python -m moe_mlir_bench.models generate [NAME ..]`: transformers' `model.generate`, eager and compiled.

Greedy tokens of a batch of two, with a cache that grows (dynamic) and one of
fixed size (static): tokens/s of the whole call, prompt and transformers' own
Python with it, by eager (`grouped_mm`), `hf.patch` with the experts "moe",
`model.compile()` and `model.compile(backend="moe")`, all `dynamic=True`. They
run in turns on the same weights; times are the least CPU times of the calling
thread.
"""

import argparse
import gc
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_mlir._torch import dynamo
from moe_mlir.frontends.dynamo import register
from moe_mlir.hf import patch, unpatch

from .real_widths import DTYPES, SIZES, build

WAYS = ("eager", "hf.patch", "Inductor", 'backend="moe"')
CACHES = ("dynamic", "static")
_BATCH = 2


@dataclass
class Row:
    """One model with one cache: tokens/s, and whether the tokens are eager's, by way."""

    model: str
    dtype: str
    cache: str
    speed: dict[str, float] = field(default_factory=dict)
    agrees: dict[str, bool] = field(default_factory=dict)


def measure(name: str, dtype: str, model: Any, cache: str, prompt: int, steps: int, rounds: int,
            ways: Sequence[str] = WAYS,
            log: Callable[[str], object] = lambda text: None) -> Row:
    """The row of a model, whose name and dtype are for the table."""
    ids = torch.randint(3, 1000, (_BATCH, prompt), generator=torch.Generator().manual_seed(0))
    ids %= model.config.vocab_size
    row, calls = Row(name, dtype, cache), {way: _compiled(model, way) for way in ways}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    tokens = {}
    # A graph for the prompt, one for the first step and one for those that follow, by backend.
    with dynamo.config.patch(recompile_limit=64):
        for turn in range(rounds + 1):
            for way in ways:
                log(f"{name} {dtype}, {cache} cache: {way}, round {turn}")
                with _running(model, way, calls[way]):
                    begin = time.thread_time()
                    tokens[way] = _generate(model, ids, steps, cache)
                    if turn:  # the first compiles
                        seconds[way].append(time.thread_time() - begin)
    for way in ways:
        row.speed[way] = _BATCH * steps / min(seconds[way])
        row.agrees[way] = torch.equal(tokens[way], tokens[ways[0]])
    return row


def _generate(model, ids, steps, cache):
    options = {} if cache == "dynamic" else {"cache_implementation": cache}
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=steps,
                          min_new_tokens=steps, do_sample=False, eos_token_id=None,
                          pad_token_id=0, **options)


def _compiled(model, way) -> Any:
    """What `model.compile(..)` makes of the model; None where nothing is compiled."""
    backend = {"Inductor": "inductor", 'backend="moe"': "moe"}.get(way)
    return backend and torch.compile(model._call_impl, backend=backend, dynamic=True)


@contextmanager
def _running(model, way, call) -> Iterator[None]:
    """Inside, the model runs in this way; all ways have one model."""
    experts = model.get_experts_implementation()
    model._compiled_call_impl = call
    if way == "hf.patch":
        patch(model)
        model.set_experts_implementation("moe")
    try:
        yield
    finally:
        model._compiled_call_impl = None
        unpatch(model)
        model.set_experts_implementation(experts)


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown."""
    ways = list(dict.fromkeys(way for row in rows for way in row.speed))
    lines = [f"| model | dtype | cache | {', tokens/s | '.join(ways)}, tokens/s | tokens |",
             "|" + "---|" * (len(ways) + 4)]
    for row in rows:
        others = ", ".join(way for way, agrees in row.agrees.items() if not agrees)
        tokens = f"others with {others}" if others else "eager's"
        speeds = " | ".join(f"{row.speed[way]:.1f}" for way in ways)
        lines.append(f"| {row.model} | {row.dtype} | {row.cache} | {speeds} | {tokens} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="moe models generate", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--dtype", choices=[*DTYPES], action="append", help="default: all")
    parser.add_argument("--cache", choices=CACHES, action="append", help="default: all")
    parser.add_argument("--prompt", type=int, default=16, help="tokens (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in SIZES]
    if unknown:
        parser.error(f"expected names of {', '.join(SIZES)}, found {', '.join(unknown)}")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning)
    register()
    torch.set_num_threads(1)
    sizes = {} if options.layers is None else {"num_hidden_layers": options.layers}
    rows = []
    for name in options.names or SIZES:
        for dtype in options.dtype or DTYPES:
            dynamo.reset()
            gc.collect()
            model = build(name, dtype, sizes)
            rows += [measure(name, dtype, model, cache, options.prompt, options.steps,
                             options.rounds, log=lambda text: print(text, file=sys.stderr, flush=True))
                     for cache in options.cache or CACHES]
    print(table(rows), end="")
    return 0
