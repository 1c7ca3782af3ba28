"""Calls like an earlier one that update the model's buffers, or a cache that they are given."""

import itertools
import random

import pytest
import torch

import moe_mlir
from moe_mlir._transformers.names import cache_call, cache_name

STEPS = 4


class Averaged(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3, 8))
        self.weight = torch.nn.Parameter(torch.randn(8))

    def forward(self, x):
        self.mean.mul_(0.5).add_(x)
        return (self.mean * self.weight).sum(-1)


@pytest.fixture
def pair():
    """The same model twice, the second one compiled."""
    torch.manual_seed(0)
    expected, model = Averaged(), Averaged()
    model.load_state_dict(expected.state_dict())
    return expected, moe_mlir.compile(model, (torch.randn(3, 8),))


def check(pair, x):
    expected, compiled = pair
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), expected(x))
    torch.testing.assert_close(compiled.model.mean, expected.mean)


def test_a_buffer_is_updated_once_a_call(pair, searches):
    for _ in range(STEPS):
        check(pair, torch.randn(3, 8))
    assert len(searches) == 1


def test_another_buffer_is_updated(pair):
    check(pair, torch.randn(3, 8))
    for model in (pair[0], pair[1].model):
        model.mean = torch.ones(3, 8)
    for _ in range(STEPS):
        check(pair, torch.randn(3, 8))


def test_an_input_in_the_buffers_memory_is_an_error(pair):
    compiled = pair[1]
    memory = torch.zeros(6, 8)
    compiled.model.mean = memory[2:5]
    for first in (memory[:3], memory[2:5], memory[3:]):
        compiled(torch.randn(3, 8))
        before = memory.clone()
        with pytest.raises(ValueError, match="'mean', which the model updates.*found it shared"):
            compiled(first)
        assert torch.equal(memory, before)


def test_a_buffer_with_other_strides_is_an_error(pair):
    compiled, x = pair[1], torch.randn(3, 8)
    compiled(x)
    compiled.model.mean = torch.zeros(8, 3).T
    with pytest.raises(ValueError, match="contiguous"):
        compiled(x)
    assert not compiled.model.mean.any()


class Updating(torch.nn.Module):
    """Two buffers that are updated, one that is read, and two inputs, each of 8 numbers."""

    def __init__(self):
        super().__init__()
        for name in ("first", "second", "read"):
            self.register_buffer(name, torch.zeros(8))

    def forward(self, x, y):
        self.first.add_(x)
        self.second.mul_(0.5).add_(y)
        return x * self.read - y


@pytest.fixture(scope="module")
def updating():
    return moe_mlir.compile(Updating(), (torch.randn(8), torch.randn(8)))


@pytest.mark.parametrize("seed", range(20))
def test_memory_is_refused_where_any_two_meet_of_which_one_is_updated(updating, seed):
    rng = random.Random(seed)
    memory, model = torch.randn(96), updating.model
    outcomes = set()
    for _ in range(10):
        begins = [rng.randrange(88) for _ in range(5)]
        if rng.random() < 0.5:
            # Apart, but maybe for one that is read, which inputs may share.
            begins = rng.sample(range(0, 96, 8), 5)
            begins[4] = begins[rng.choice((3, 4))]
        model.first, model.second, model.read, x, y = (memory[i:i + 8] for i in begins)
        meet = any((a < 2 or b < 2) and abs(begins[a] - begins[b]) < 8
                   for a, b in itertools.combinations(range(5), 2))
        outcomes.add(meet)
        # Twice: what was found out for the operands that stay is used again.
        for _ in range(2):
            before = memory.clone()
            if meet:
                with pytest.raises(ValueError, match="found it shared"):
                    updating(x, y)
                assert torch.equal(memory, before)
                continue
            expected = [before[i:i + 8] for i in begins]
            torch.testing.assert_close(updating(x, y), expected[3] * expected[2] - expected[4])
            torch.testing.assert_close(model.first, expected[0] + expected[3])
            torch.testing.assert_close(model.second, 0.5 * expected[1] + expected[4])
    assert outcomes == {True, False}


# ---- caches of keys and values -------------------------------------------------


ROOM = 12


@pytest.fixture(scope="module")
def generator():
    pytest.importorskip("transformers")
    from moe_mlir_bench.models import FAMILIES

    model = FAMILIES["Granite-MoE"].build(torch.float32, layers=2, attn_implementation="sdpa")
    return moe_mlir.compile(model, (token(0),), kwargs=dict(cache=cache_of(model)))


def token(seed):
    return torch.randint(3, 64, (1, 1), generator=torch.Generator().manual_seed(seed))


def cache_of(model):
    import transformers

    return transformers.StaticCache(config=model.config, max_cache_len=ROOM)


def step(compiled, ours, theirs, seed):
    with torch.no_grad():
        found = compiled(token(seed), cache=ours)
        expected = compiled.model(token(seed), **cache_call(compiled.model, theirs))
    assert getattr(found, cache_name(compiled.model)) is ours and type(found) is type(expected)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
    # Quick outputs are as the model's own constructor makes them.
    assert list(found) == list(expected) and vars(found).keys() == vars(expected).keys()
    assert found[0] is found.logits and found.to_tuple()[0] is found.logits


def test_steps_are_not_searched(generator, searches):
    ours, theirs = cache_of(generator.model), cache_of(generator.model)
    for seed in range(STEPS):
        step(generator, ours, theirs, seed)
    # The first makes the tensors of the cache.
    assert len(searches) <= 2


def test_two_sequences_take_turns(generator, searches):
    pairs = [(cache_of(generator.model), cache_of(generator.model)) for _ in range(2)]
    for seed in range(STEPS):
        for ours, theirs in pairs:
            step(generator, ours, theirs, seed)
    assert len(searches) <= 3
    for ours, theirs in pairs:
        assert int(ours.layers[0].cumulative_length) == STEPS
        torch.testing.assert_close(ours.layers[1].values, theirs.layers[1].values)


def test_a_cache_that_is_full_is_an_error_each_time(generator):
    ours, theirs = cache_of(generator.model), cache_of(generator.model)
    for seed in range(ROOM):
        step(generator, ours, theirs, seed)
    kept = ours.layers[0].keys.clone()
    for _ in range(2):
        with pytest.raises(ValueError, match="expected at most 0 tokens"):
            generator(token(0), cache=ours)
    assert torch.equal(ours.layers[0].keys, kept)
    ours.reset(), theirs.reset()
    step(generator, ours, theirs, 1)


def test_a_cache_whose_layers_share_memory_is_an_error(generator):
    ours, theirs = cache_of(generator.model), cache_of(generator.model)
    for seed in range(2):
        step(generator, ours, theirs, seed)
    ours.layers[0].values = ours.layers[0].keys.view_as(ours.layers[0].keys)
    with pytest.raises(ValueError, match="found it shared"):
        generator(token(0), cache=ours)
