"""Random histories of decoding, compiled code beside eager.

    python tests/python/fuzz/cache_states.py SEED STEPS

Two caches take turns, each of fixed size or one that grows. A step is a prompt of a random length, a
single token, either with the mask of a left-padded batch, a reset, a crop, another cache, a copy, or a
change of a weight. Logits and what the caches hold must be eager's; a call for which a cache of fixed
size has no room is an error that leaves it as it was. Prints the numbers of calls and refusals, and
ends with status 1 at the first difference.
"""

import copy
import random
import sys
import warnings

import torch
import transformers

import moe_mlir
from moe_mlir._transformers.names import cache_call
from moe_mlir_bench.models import FAMILIES

_ROOM, _BATCH = 16, 2


class Sequence:
    """Of one batch: a cache for either, how much is held, and which tokens pad it."""

    def __init__(self, model, draw):
        self.grows = draw.random() < 0.5
        self.ours, self.theirs = (
            transformers.DynamicCache(config=model.config) if self.grows else
            transformers.StaticCache(config=model.config, max_cache_len=_ROOM) for _ in range(2))
        self.begin(draw)

    def begin(self, draw):
        self.mask = torch.ones(_BATCH, 0, dtype=torch.long)
        self.padding = draw.choice([0, 0, 1, 3])  # of the first of the batch
        self.is_masked = self.padding > 0 or draw.random() < 0.3

    def reset(self, draw):
        for cache in (self.ours, self.theirs):
            cache.reset()
        self.begin(draw)

    def crop(self, draw):
        """Forgets some of the last tokens, where the cache grows."""
        held = self.mask.shape[1]
        count = draw.randint(1, held - 1) if self.grows and held > self.padding + 1 else 0
        if count and held - count > self.padding:
            self.mask = self.mask[:, :-count]
            for cache in (self.ours, self.theirs):
                cache.crop(-count)

    def copy(self, draw):
        self.ours, self.theirs = copy.deepcopy(self.ours), copy.deepcopy(self.theirs)

    def contents(self, cache):
        """What the first layer holds; the next ones depend on what padding attends to."""
        if not cache.layers[0].is_initialized:
            return []
        layer = cache.layers[0]
        return [layer.keys, layer.values, *([] if self.grows else [layer.cumulative_length])]


class Pair:
    def __init__(self, draw):
        self.draw, self.calls, self.refused = draw, 0, 0
        self.model = FAMILIES["Granite-MoE"].build(
            torch.float32, layers=2, attn_implementation="sdpa").eval()
        self.compiled = moe_mlir.compile(self.model, (torch.ones(_BATCH, 3, dtype=torch.long),),
                                         kwargs={"cache": Sequence(self.model, draw).ours})
        self.sequences = [Sequence(self.model, draw) for _ in range(2)]

    def step(self):
        sequence, kind = self.draw.choice(self.sequences), self.draw.random()
        if kind < 0.85:
            self.call(sequence)
        elif kind < 0.9:
            sequence.crop(self.draw)
        elif kind < 0.95:
            sequence.reset(self.draw)
        elif kind < 0.97:
            self.sequences[self.sequences.index(sequence)] = Sequence(self.model, self.draw)
        elif kind < 0.98:
            sequence.copy(self.draw)
        else:
            weight = self.draw.choice(list(self.model.parameters()))
            weight.data = weight.data * self.draw.choice([0.5, -1.0])

    def call(self, sequence):
        held = sequence.mask.shape[1]
        tokens = self.draw.choice([1, 1, 1, 2, self.draw.randint(1, _ROOM)]) if held else \
            self.draw.randint(2, _ROOM // 2)
        ids = torch.tensor([[self.draw.randrange(3, 64) for _ in range(tokens)]
                            for _ in range(_BATCH)])
        added = torch.ones(_BATCH, tokens, dtype=torch.long)
        added[0, : max(0, min(sequence.padding - held, tokens - 1))] = 0
        mask = torch.cat([sequence.mask, added], 1)
        kwargs = {"attention_mask": mask} if sequence.is_masked else {}
        self.calls += 1
        if held + tokens > 2 * _ROOM:
            sequence.reset(self.draw)
            return
        if held + tokens > _ROOM and not sequence.grows:
            self.expect_refusal(sequence, ids, kwargs)
            return
        sequence.mask = mask
        found = self.compiled(ids, cache=sequence.ours, **kwargs).logits
        wanted = self.model(ids, **kwargs, **cache_call(self.model, sequence.theirs)).logits
        seen = added.bool()
        same(found[seen], wanted[seen])
        for mine, other in zip(sequence.contents(sequence.ours), sequence.contents(sequence.theirs),
                               strict=True):
            same(mine, other)

    def expect_refusal(self, sequence, ids, kwargs):
        before = [tensor.clone() for tensor in sequence.contents(sequence.ours)]
        try:
            self.compiled(ids, cache=sequence.ours, **kwargs)
        except ValueError as error:
            assert "which the cache of 16 has room for" in str(error), error
            self.refused += 1
        else:
            raise AssertionError(f"{ids.shape[1]} tokens are taken by a full cache")
        for tensor, was in zip(sequence.contents(sequence.ours), before, strict=True):
            assert torch.equal(tensor, was)


def same(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)


@torch.no_grad()
def main():
    seed, steps = map(int, sys.argv[1:])
    warnings.simplefilter("ignore")
    pair = Pair(random.Random(seed))
    for step in range(steps):
        try:
            pair.step()
        except Exception:
            print(f"seed {seed}, step {step}", file=sys.stderr)
            raise
    print(f"{steps} steps, {pair.calls} calls, {pair.refused} refused by a full cache")


if __name__ == "__main__":
    main()
