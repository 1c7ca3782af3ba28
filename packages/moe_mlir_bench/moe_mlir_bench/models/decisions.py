"""`python -m moe_mlir_bench.models decisions`: does every target choose the same experts?

Draws scores of real-shaped routers, half of them with ties and near ties, and
compares the expert ids of every target with eager torch, bit for bit. Where the
choice is by the scores themselves, or by sums of them, any other id is an error.
Where it is by a function of the scores that rounds (sigmoid + bias), targets may
order two experts otherwise whose values differ by no more than that function's
rounding: such decisions are counted apart, and everything else is an error.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch

from .decision_routers import DTYPES, ROUTERS, Router, choice_scores, draw_scores, eager_choice
from .decision_targets import NAMES, make_targets

_CHUNK = 1 << 22  # scores
# Of a choice score, whose parts are at most 2 or so: some units in the last place of f32.
_ROUNDING = 2e-6


@dataclass
class Tally:
    """Decisions of one router by one target."""

    decisions: int = 0
    different: int = 0  # from equal scores: an error
    near_ties: int = 0  # of computed scores that equal each other but for rounding
    unlike: int = 0  # of these, decided otherwise than by the first target

    def add(self, router: Router, x: torch.Tensor, expected: torch.Tensor, found: torch.Tensor,
            first: torch.Tensor) -> None:
        self.decisions += len(x)
        self.unlike += int((found != first).any(-1).sum())
        rows = (found != expected).any(-1).nonzero()[:, 0]
        if router.is_computed and len(rows):
            legal = is_near_tie(router, x[rows], found[rows])
            legal &= keeps_order_of_twins(router, x[rows], found[rows])
            self.near_ties += int(legal.sum())
            rows = rows[~legal]
        self.different += len(rows)


def is_near_tie(router: Router, x: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """bool [tokens]: other ids whose float64 choice scores are the k largest, up to rounding."""
    if router.n_group > 1:
        return _is_near_tie_of_groups(router, x, found)
    scores, _ = choice_scores(router, x.double())
    return _is_legal(scores, found, router.k)


def keeps_order_of_twins(router: Router, x: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """bool [tokens]: of experts of one group with equal scores and biases, the first come first.

    Whatever a target's arithmetic, it gives them equal values.
    """
    bias = router.make_bias()
    bias = torch.zeros(router.experts) if bias is None else bias
    expert = torch.arange(router.experts)
    group = expert // (router.experts // router.n_group)
    position = torch.full(x.shape, router.k).scatter(
        -1, found, torch.arange(router.k).expand(found.shape))
    keeps = torch.ones(len(x), dtype=torch.bool)
    for place in range(router.k):
        own = found[:, place : place + 1]
        is_twin = ((x == x.gather(-1, own)) & (bias == bias[own]) & (group == group[own])
                   & (expert < own))
        keeps &= ~(is_twin & (position > place)).any(-1)
    return keeps


def _is_legal(scores, found, k):
    chosen = scores.gather(-1, found)
    best = scores.topk(k, dim=-1).values
    distinct = (found.sort(-1).values.diff(dim=-1) != 0).all(-1) if k > 1 else torch.tensor(True)
    # Equal infinities have no difference.
    close = ((chosen - best).abs() <= _ROUNDING) | (chosen == best)
    return close.all(-1) & distinct


def _is_near_tie_of_groups(router, x, found):
    """Another group may have been kept whose value is as large; within those kept, as above."""
    whole = choice_scores(replace(router, n_group=1), x.double())[0] if router.bias else \
        torch.softmax(x.double(), -1)
    groups = whole.unflatten(-1, (router.n_group, -1))
    count = 1 if router.group_score == "max" else 2
    value = groups.topk(count, dim=-1).values.sum(-1)
    edge = value.topk(router.topk_group, dim=-1).values[:, -1:]
    surely = value > edge + 2 * _ROUNDING
    surely_not = value < edge - 2 * _ROUNDING
    size = router.experts // router.n_group
    used = torch.zeros_like(surely).scatter(-1, found // size, True)
    allowed = used | surely
    legal = ~(used & surely_not).any(-1) & (allowed.sum(-1) <= router.topk_group)
    # Fill up with the best of those at the edge: which of them does not matter here.
    rank = torch.where(allowed, 10.0, 0.0) + value
    kept = torch.zeros_like(surely).scatter(
        -1, rank.topk(router.topk_group, dim=-1).indices, True)
    masked = groups.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    return legal & _is_legal(masked, found, router.k)


def decide(count: int, targets: Iterable[str], *, routers: Sequence[Router] = ROUTERS,
           sample: int = 100_000, seed: int = 0, plain: bool = False,
           progress: Callable[[str], None] | None = None) -> dict[tuple[str, str], Tally]:
    """{(router name, target name): Tally} of `count` scores in all, by each target.

    The simulator is slow: it gets `sample` of them. An interruption ends it early.
    """
    processes = list(make_targets(targets))
    tallies = {(r.name, t.name): Tally() for r in routers for t in processes}
    # One chunk of each router after the other: an early end leaves some of all.
    rounds = zip_longest(*(_chunks(r, -(-count // len(routers)), seed, plain) for r in routers))
    try:
        for number, chunks in enumerate(rounds):
            for router, x in zip(routers, chunks, strict=True):
                if x is not None:
                    expected = eager_choice(router, x)
                    _ask(router, x, expected, processes, tallies, -(-sample // len(routers)))
            if progress is not None:
                progress(f"{number + 1} chunks of each router: "
                         f"{sum(tally.decisions for tally in tallies.values()):,} decisions")
    except KeyboardInterrupt:
        pass
    finally:
        for process in processes:
            process.close()
    return tallies


def _ask(router, x, expected, processes, tallies, sample):
    parts = []
    for process in processes:
        tally = tallies[router.name, process.name]
        tokens = len(x)
        if process.name == "simulator":
            tokens = max(0, min(tokens, sample - tally.decisions))
        if process.layers and router.n_group > 1 and router.score == "none":
            tokens = 0  # a form that models do not write
        if tokens:
            process.submit(router, x[:tokens])
        parts.append(tokens)
    first = None
    for process, tokens in zip(processes, parts, strict=True):
        if tokens:
            # Runs of one target (thread counts) count as decisions each.
            for ids in process.result():
                found = torch.from_numpy(ids).long()
                first = found if first is None else first
                tallies[router.name, process.name].add(
                    router, x[:tokens], expected[:tokens], found, first[:tokens])


def _chunks(router, tokens, seed, plain):
    """Score tensors of all dtypes in turn."""
    size = max(64, min(_CHUNK // router.experts, -(-tokens // 3)) // 2 * 2)
    generator = torch.Generator().manual_seed(seed * 1000 + ROUTERS.index(router))
    for number in range(-(-tokens // size)):
        dtype = list(DTYPES.values())[number % 3]
        yield draw_scores(router, size, dtype, generator, plain)


def table(tallies: Mapping[tuple[str, str], Tally]) -> str:
    """A row for each router: decisions, ids that differ, and near ties of computed scores."""
    targets = list(dict.fromkeys(target for _, target in tallies))
    names = list(dict.fromkeys(name for name, _ in tallies))
    head = ["router", *targets]
    rows = [[name, *(_cell(tallies[name, t]) for t in targets)] for name in names]
    sums = [Tally(*(sum(getattr(tallies[n, t], f) for n in names)
                    for f in ("decisions", "different", "near_ties", "unlike")))
            for t in targets]
    rows.append(["all", *map(_cell, sums)])
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
             for row in [head, ["-" * width for width in widths], *rows]]
    return "\n".join(lines)


def _cell(tally):
    text = f"{tally.different} of {tally.decisions:,}"
    near, unlike = tally.near_ties, tally.unlike
    return text + (f" ({near} near, {unlike} unlike the first)" if near or unlike else "")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="moe models decisions",
                                     description=__doc__.split("\n\n", 1)[1],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000_000,
                        help="decisions of each run of a target (default: 10 million)")
    parser.add_argument("--sample", type=int, default=100_000, help="decisions in the simulator")
    parser.add_argument("--targets", default=",".join(NAMES), help=f"of {', '.join(NAMES)}")
    parser.add_argument("--routers", default="", help="names by commas; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", action="store_true",
                        help="logits as models have them alone, to count how often ties happen")
    options = parser.parse_args(arguments)
    targets = options.targets.split(",")
    wanted = options.routers.split(",") if options.routers else [r.name for r in ROUTERS]
    for kind, given, known in (("targets", targets, NAMES),
                               ("routers", wanted, [r.name for r in ROUTERS])):
        unknown = [name for name in given if name not in known]
        if unknown:
            parser.error(f"expected {kind} of {', '.join(known)}, found {', '.join(unknown)}")
    start = time.time()
    tallies = decide(options.count, targets, routers=[r for r in ROUTERS if r.name in wanted],
                     sample=options.sample, seed=options.seed, plain=options.plain,
                     progress=lambda text: print(text, file=sys.stderr, flush=True))
    print(table(tallies))
    different = sum(tally.different for tally in tallies.values())
    print(f"{sum(t.decisions for t in tallies.values()):,} decisions, {different} different from "
          f"equal scores; {sum(t.near_ties for t in tallies.values())} near ties of computed "
          f"scores decided otherwise; {time.time() - start:.0f} s")
    return 1 if different else 0
