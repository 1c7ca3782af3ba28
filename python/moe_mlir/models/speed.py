"""`python -m moe_mlir.models --speed [NAME ..]`: models of real widths, beside eager and Inductor.

Random weights, attention as users run it, a cache of keys and values of fixed
size: the tokens/s of a prompt and of greedy steps after it, the seconds from a
model in memory to its first token, and what a way to run it adds to the resident
memory. All ways run in one process, in turns, on the same weights, and their
times are CPU times of the calling thread.
"""

import argparse
import contextlib
import gc
import json
import logging
import os
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

import moe_mlir

from ..bench.machine import cpu_model
from ..frontends.dynamo import register
from . import page

# (class of the configuration, class of the model, sizes); OLMoE and Qwen3-MoE with two layers.
SIZES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Granite-1B": ("GraniteMoeConfig", "GraniteMoeForCausalLM", dict(
        vocab_size=49155, hidden_size=1024, intermediate_size=512, num_hidden_layers=24,
        num_attention_heads=16, num_key_value_heads=8, num_local_experts=32,
        num_experts_per_tok=8, max_position_embeddings=4096, attention_multiplier=0.015625,
        embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=6.0,
        tie_word_embeddings=True)),
    "OLMoE": ("OlmoeConfig", "OlmoeForCausalLM", dict(
        vocab_size=50304, hidden_size=2048, intermediate_size=1024, num_hidden_layers=2,
        num_attention_heads=16, num_key_value_heads=16, num_experts=64, num_experts_per_tok=8)),
    "Qwen3-MoE": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", dict(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
        num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        num_experts=128, num_experts_per_tok=8, norm_topk_prob=True)),
}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
# transformers' own ways to run experts. "batched_mm" copies the weights for each token: the
# prompt before its steps runs on the first.
EXPERTS = ("grouped_mm", "batched_mm", "eager")
WAYS = (*(f"eager, {experts}" for experts in EXPERTS), "Inductor", 'backend="moe"',
        "moe_mlir.compile")


@dataclass
class Row:
    """One way to run one model; a number that could not be had is None, and `reason` says why."""

    model: str
    dtype: str
    way: str
    prompt: float | None = None         # tokens/s
    steps: float | None = None          # tokens/s
    first_token: float | None = None    # seconds
    memory: float | None = None         # resident bytes that it adds, over the model's
    agrees: bool | None = None          # greedy tokens are eager's
    reason: str = ""
    arguments: str = ""                 # of the command that measured it


class Way:
    """A model's forward in one way, with a cache of its own."""

    def __init__(self, name: str, model: torch.nn.Module, make: Callable[..., Any],
                 experts: str = EXPERTS[0]):
        self.name, self.model, self.make, self.experts = name, model, make, experts
        self.seconds: dict[str, list[float]] = {"prompt": [], "steps": []}
        self.tokens: list[int] = []
        self.forward: Any = None
        self.cache: Any = None

    def start(self, ids: torch.Tensor, room: int) -> None:
        import transformers

        self.cache = transformers.StaticCache(config=self.model.config, max_cache_len=room)
        self._choose_experts(self.experts)
        self.forward = self.make(self.model, ids, self.cache)
        self.run(ids, 0)

    def _choose_experts(self, implementation: str) -> None:
        self.model.set_experts_implementation(implementation)

    def run(self, ids: torch.Tensor, steps: int) -> None:
        """A prompt and greedy steps; keeps the times and the tokens."""
        self._choose_experts(EXPERTS[0] if self.experts == "batched_mm" else self.experts)
        self.cache.reset()
        begin = time.thread_time()
        logits = self.forward(ids, past_key_values=self.cache, logits_to_keep=1).logits
        self.seconds["prompt"].append(time.thread_time() - begin)
        self.tokens = [int(logits[0, -1].argmax())]
        self._choose_experts(self.experts)
        begin = time.thread_time()
        for _ in range(steps):
            token = torch.tensor([[self.tokens[-1]]])
            logits = self.forward(token, past_key_values=self.cache, logits_to_keep=1).logits
            self.tokens.append(int(logits[0, -1].argmax()))
        if steps:
            self.seconds["steps"].append((time.thread_time() - begin) / steps)


def _ways(model) -> list[Way]:
    def backend(name):
        return lambda model, ids, cache: torch.compile(model, backend=name, dynamic=True)

    def compiled(model, ids, cache):
        return moe_mlir.compile(model, (ids,), kwargs=dict(past_key_values=cache,
                                                           logits_to_keep=1))
    runs = [*[lambda model, *_: model] * len(EXPERTS), backend("inductor"), backend("moe"),
            compiled]
    experts = [*EXPERTS, *[EXPERTS[0]] * (len(WAYS) - len(EXPERTS))]
    return [Way(name, model, run, choice) for name, run, choice in zip(WAYS, runs, experts)]


def measure(name: str, dtype: str, prompt: int, steps: int, rounds: int,
            sizes: dict[str, Any] | None = None, ways: Sequence[str] = WAYS,
            log: Callable[[str], object] = lambda text: None) -> list[Row]:
    """The rows of one model in these ways; `sizes` replace its own."""
    model = build(name, dtype, sizes or {})
    size = sum(p.numel() * p.element_size() for p in {id(p): p for p in model.parameters()}.values())
    ids = torch.randint(3, 1000, (1, prompt), generator=torch.Generator().manual_seed(0))
    ids %= model.config.vocab_size
    layers = (sizes or {}).get("num_hidden_layers")
    label = name if layers is None else f"{name}, {layers} layers"
    rows, running = [], []
    for way in (way for way in _ways(model) if way.name in ways):
        row = Row(label, dtype, way.name)
        rows.append(row)
        log(f"{name} {dtype}: {way.name}")
        try:
            before, begin = resident(), time.perf_counter()
            way.start(ids, prompt + steps + 1)
            row.first_token = time.perf_counter() - begin
            row.memory = (resident() - before) / size
            running.append((row, way))
        except Exception as error:  # whatever torch or the model raise: the table says it
            row.reason = f"{type(error).__name__}: {error}".splitlines()[0]
    for turn in range(rounds + 1):
        for _, way in running:
            way.run(ids, steps)
            if turn == 0:  # it compiles the step
                way.seconds["steps"].clear()
    for row, way in running:
        if way.experts != "batched_mm":
            row.prompt = prompt / min(way.seconds["prompt"][1:])
        row.steps = 1 / statistics.median(way.seconds["steps"])
        row.agrees = way.tokens == running[0][1].tokens
    return rows


def build(name: str, dtype: str, sizes: dict[str, Any]) -> Any:
    """A model with random weights, made in its own dtype."""
    import transformers

    config, model, own = SIZES[name]
    torch.manual_seed(0)
    return getattr(transformers, model)._from_config(
        getattr(transformers, config)(**{**own, **sizes}), dtype=DTYPES[dtype],
        attn_implementation="sdpa").eval()


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown."""
    lines = ["| model | dtype | way | prompt, tokens/s | steps, tokens/s | first token, s | memory | "
             "tokens |", "|" + "---|" * 8]
    for row in rows:
        def number(value, form):
            return "no" if value is None else format(value, form)
        tokens = {None: "no", True: "eager's", False: "others"}[row.agrees]
        lines.append(f"| {row.model} | {row.dtype} | {row.way} | {number(row.prompt, '.1f')} | "
                     f"{number(row.steps, '.2f')} | {number(row.first_token, '.1f')} | "
                     f"{number(row.memory, '+.2f')} | {tokens} |")
    reasons = [f"- {row.model} {row.dtype}, {row.way}: {row.reason}" for row in rows if row.reason]
    return "\n".join([*lines, *([""] if reasons else []), *reasons]) + "\n"


_SECTION = """\
{heading}
Written by `python -m moe_mlir.models --speed` on {cpu}, with torch {torch} and transformers
{transformers}; do not edit. Random weights, attention as users run it (sdpa), a cache of fixed
size; the ways of a model run in one process, in turns, and their times are CPU times of the
calling thread. Layers, where the name says no other number: {layers}.

{table}
Measured by
{commands}

- **prompt**: the forward of a whole prompt, the best round; **steps**: greedy steps after it, the
  median round. `batched_mm` copies weights for each token, so its prompt runs on `grouped_mm`.
- **first token**: seconds of the wall clock from a model in memory to its first token, with what is
  compiled for it; **memory**: resident bytes that the way adds, over the bytes of the weights.
- **tokens**: whether the greedy tokens are those of the first way.
- **no**: could not be had; a line above says why.
"""


def section(rows: Sequence[Row]) -> str:
    """The rows as a section of docs/Models.md."""
    import transformers

    commands = dict.fromkeys(f"- `--speed {row.arguments}`" for row in rows)
    layers = ", ".join(f"{name} {sizes['num_hidden_layers']}" for name, (*_, sizes) in SIZES.items())
    return _SECTION.format(heading=page.REAL_WIDTHS, table=table(rows), torch=torch.__version__,
                           transformers=transformers.__version__, cpu=cpu_model(),
                           commands="\n".join(commands), layers=layers)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _read(files: Sequence[str]) -> list[Row]:
    rows = []
    for name in files:
        with open(name) as file:
            rows += [Row(**row) for row in json.load(file)]
    return rows


def _measure(options: argparse.Namespace, arguments: str) -> list[Row]:
    """Measures what the options ask for."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning)
    register()
    sizes = {} if options.layers is None else {"num_hidden_layers": options.layers}
    rows: list[Row] = []
    with _threads(options.threads), torch.no_grad():
        for name in options.names or SIZES:
            for dtype in options.dtype or DTYPES:
                torch._dynamo.reset()
                gc.collect()
                found = measure(name, dtype, options.prompt, options.steps, options.rounds, sizes,
                                options.way or WAYS,
                                lambda text: print(text, file=sys.stderr, flush=True))
                rows += [replace(row, arguments=arguments) for row in found]
                if options.json:
                    # After each model, so that an interruption loses one.
                    with open(options.json, "w") as file:
                        json.dump([asdict(row) for row in rows], file, indent=2)
    return rows


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m moe_mlir.models --speed", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--dtype", choices=[*DTYPES], action="append", help="default: all")
    parser.add_argument("--prompt", type=int, default=256, help="tokens (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--way", choices=WAYS, action="append", help="default: all")
    parser.add_argument("--json", metavar="FILE", help="where to write the rows, too")
    parser.add_argument("--read", metavar="FILE", nargs="+",
                        help="measure nothing: the rows of earlier runs with --json")
    parser.add_argument("--output", metavar="FILE", help="the page whose section of models of real "
                        "widths is replaced; default: standard output")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in SIZES]
    if unknown:
        parser.error(f"expected names of {', '.join(SIZES)}, found {', '.join(unknown)}")
    rows = _read(options.read) if options.read else _measure(options, shlex.join(arguments))
    if options.output is None:
        print(table(rows), end="")
    else:
        page.write(options.output, page.read(options.output)[0], section(rows))
    return 0
