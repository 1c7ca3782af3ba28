"""moe_mlir.save_decoder of models that can have no cache of fixed size: their own grows."""

import copy
import importlib.util
import json

import pytest
import torch
from support import run_tool

# Fixtures, by their names.
from test_decoder import ROOT, damage, ids, in_cpp, numbers, require_close  # noqa: F401

import moe_mlir
from moe_mlir._transformers.growing_cache import empty_cache
from moe_mlir._transformers.names import cache_call
from moe_mlir._transformers.static_cache import unfit_for_fixed_size
from moe_mlir_bench.models import tiny_models
from moe_mlir_bench.models.families import spread_weights

# Past a window of 8 tokens.
ROOM = 14
CALLS = [[5, 1, 1, 1, 1, 1, 1], [9, 1, 2, 1], [1, 1, 1]]


def build(folder):
    """Of DeepSeek-V4 one layer alone, which has all that another one keeps: its programs take minutes
    to compile."""
    model = tiny_models.build(folder)
    if folder == "deepseek_v4":
        config = copy.deepcopy(model.config)
        config.num_hidden_layers, config.layer_types = 1, ["compressed_sparse_attention"]
        config.mlp_layer_types = config.mlp_layer_types[:1]
        torch.manual_seed(0)
        model = type(model)._from_config(config).eval()
        spread_weights(model, 0)
    return model.requires_grad_(False)


@torch.no_grad()
def eager_logits(model, calls):
    """The last logits of each call, on one cache."""
    cache = empty_cache(model, calls[0])
    return [model(tokens, **cache_call(model, cache)).logits[:, -1].float() for tokens in calls]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A model, and the artifact for two of its sequences that go together."""
    model = build("minimax")
    path = tmp_path_factory.mktemp("decoder") / "two"
    moe_mlir.save_decoder(model, path, room=4, sequences=2, later_prompts=False)
    return model, path


@pytest.mark.drawn(1)
@pytest.mark.parametrize("folder", ["minimax", "inkling",
                                    pytest.param("deepseek_v4", marks=pytest.mark.long)])
@pytest.mark.filterwarnings("ignore:.*saved with code for prompts of up to")
def test_logits_are_eagers_in_python_and_cpp(tmp_path, in_cpp, folder):  # noqa: F811
    """A list of states that comes with the first tokens, windows, and compressed keys in a buffer."""
    model, path = build(folder), tmp_path / "artifact"
    moe_mlir.save_decoder(model, path, room=ROOM, later_prompts=False)
    assert unfit_for_fixed_size(model) is not None
    decoder = moe_mlir.load(path).decoder
    every, texts = [], []
    for lengths in CALLS:
        calls = [ids(tokens, seed) for seed, tokens in enumerate(lengths)]
        decoder.reset()
        found = [decoder(tokens) for tokens in calls]
        require_close(found, eager_logits(model, calls))
        assert decoder.position == sum(lengths)
        every += found
        texts += [*calls, "reset"]
    *lines, last = in_cpp(path, *texts)
    for line, logits in zip(lines, every, strict=True):
        assert torch.equal(numbers(line), logits)
    assert last.startswith(f"0 of {ROOM}, 0 of {ROOM}")


def test_what_an_artifact_says_of_tensors_that_calls_make(two):
    _, path = two
    described = json.loads((path / "decoder.json").read_text())
    assert all(0 in tensor["shape"] for tensor in described["state"])
    first, later = described["programs"][0], described["programs"][-1]
    # Nothing is read of a cache that is empty.
    assert {a["kind"] for a in first["arguments"]} == {"weight", "ids"}
    keys = "cache.layers.0.keys"
    (shape,) = (made["shape"] for made in later["makes"] if made["name"] == keys)
    (argument,) = (a for a in later["arguments"] if a["name"] == keys)
    assert argument["kind"] == "state" and shape[2] == f"(1 + {argument['shape'][2]})"


def test_sequences_that_go_together(two, in_cpp):  # noqa: F811
    model, path = two
    decoder = moe_mlir.load(path).decoder
    calls = [ids(tokens, seed, sequences=2) for seed, tokens in enumerate((2, 1, 1))]
    found = [decoder(tokens) for tokens in calls]
    require_close(found, eager_logits(model, calls))
    lines = in_cpp(path, *calls)
    for line, logits in zip(lines, found, strict=False):
        assert torch.equal(numbers(line).view(2, -1), logits)


# ---- damaged descriptions ----------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The decoder of the fuzzers, one tensor of which each call makes anew: it needs no model."""
    spec = importlib.util.spec_from_file_location("small_decoder", ROOT / "utils/fuzz/decoder.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("small")
    done = run_tool("moe-compile", module.save(folder / "in"), "-o", folder / "artifact", "--target=cpu")
    assert done.returncode == 0, done.stderr
    return folder / "artifact"


def in_made(**entries):
    return lambda decoder: decoder["programs"][0]["makes"][0].update(entries)


def in_state(**entries):
    return lambda decoder: decoder["state"][1].update(entries)


DAMAGES = {
    "nothing made": lambda decoder: decoder["programs"][0].pop("makes"),
    "an empty list": lambda decoder: decoder["programs"][0].update(makes=[]),
    "no list": lambda decoder: decoder["programs"][0].update(makes=5),
    "a list of texts": lambda decoder: decoder["programs"][0].update(makes=["grown"]),
    "more than the results": lambda decoder: decoder["programs"][0]["makes"].append(
        dict(name="kept", shape=[1, 4])),
    "a tensor of no name": in_made(name="other"),
    "no name": in_made(name=None),
    "another rank of state": in_state(shape=[0, 4, 1]),
    "another type of state": in_state(dtype="i64"),
    "elements without a value": in_state(shape=[3, 4]),
    "very many of them": in_state(shape=[2**40, 4]),
    "more dims": in_made(shape=["s2 + 1", 4, 1]),
    "no shape": in_made(shape=None),
    "a size by unknown names": in_made(shape=["other + 1", 4]),
    "a size that is none": in_made(shape=[None, 4]),
    "no such state among arguments": lambda decoder: decoder["programs"][0]["arguments"][4].update(
        name="other"),
}
# What a call finds, before it runs.
IN_CALLS = {
    "another size": in_made(shape=["s2 + 2", 4]),
    "a smaller one": in_made(shape=["s2", 4]),
    "another closed size": in_made(shape=["s2 + 1", 5]),
    "a size below 0": in_made(shape=["s2 - 1", 4]),
    "a huge size": in_made(shape=[2**60, 4]),
    "a size that overflows": in_made(shape=["9999999999 * 9999999999", 4]),
}


@torch.no_grad()
def test_a_decoder_without_a_model(small, in_cpp):  # noqa: F811
    decoder = moe_mlir.load(small).decoder
    calls = [torch.ones(1, tokens, dtype=torch.int64) for tokens in (1, 3, 1, 1)]
    for _ in range(2):
        found = [decoder(tokens) for tokens in calls]
        assert decoder._values["grown"].shape == (4, 4)
        decoder.reset()
    lines = in_cpp(small, *calls, "reset", *calls)
    for line, logits in zip(lines, [*found, *found], strict=False):
        assert torch.equal(numbers(line), logits)


def test_damaged_descriptions_are_refused(small, in_cpp, tmp_path):  # noqa: F811
    token = torch.ones(1, 1, dtype=torch.int64)
    for case, change in DAMAGES.items():
        copy = damage(small, tmp_path / "copy", change)
        with pytest.raises(ValueError, match="expected"):
            moe_mlir.load(copy)
            pytest.fail(f"{case} was loaded")
        (line,) = in_cpp(copy, token)
        assert line.startswith("error: ") and "expected" in line, (case, line)
    for case, change in IN_CALLS.items():
        copy = damage(small, tmp_path / "copy", change)
        decoder = moe_mlir.load(copy).decoder
        with pytest.raises(ValueError, match="expected"):
            decoder(token)
            pytest.fail(f"{case} was run")
        line = in_cpp(copy, token)[0]
        assert line.startswith("error: ") and "expected" in line, (case, line)


def test_a_tensor_that_moves_is_refused():
    """A program's results have a place in the cache each; nothing else may change places."""
    from moe_mlir.decoding.traced import _require_tensor

    with pytest.raises(TypeError, match="found one that moves to 'layers.0.keys'; no artifact"):
        _require_tensor(("layers", 0, "keys"), [("layers", 0, "values")])
