"""Programs of traces in the disk cache: when they are found again, and when they must not be."""

import functools
import importlib
import logging
import os
import re
import subprocess
import sys
import textwrap

import numpy
import pytest
import torch
import transformers

import moe_mlir
from moe_mlir._transformers import first_tokens
from moe_mlir._transformers.cache_state import CacheTensors
from moe_mlir.compiler import cache
from moe_mlir.guards.trace_key import NoKey, trace_key
from moe_mlir_bench.models import FAMILIES

# A model in a file of its own, which a test edits.
SOURCE = '''
import torch

SCALE = 2.0
REGISTRY = {"act": torch.nn.functional.relu}


def helper(x):
    return x * SCALE


class Gate(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.flag, self.settings = True, {"power": 2, "names": ["a", "b"]}

    def forward(self, x):
        if x.shape[0] > 8:  # a program of its own
            x = x + 1
        return getattr(self, "_by" + "_name")(REGISTRY["act"](helper(x)) * self.weight)

    def _by_name(self, x):
        return x + 1
'''


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A folder of its own for the disk cache, with programs of traces."""
    monkeypatch.setenv("MOE_MLIR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("MOE_MLIR_CACHE_TRACES", "1")
    for name in ("MOE_MLIR_CACHE", "MOE_MLIR_CACHE_READONLY"):
        monkeypatch.delenv(name, raising=False)
    return cache.Cache(tmp_path / "cache")


@pytest.fixture
def gate(tmp_path, monkeypatch):
    """The module of a file as `SOURCE`."""
    (tmp_path / "gate_of_a_test.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("gate_of_a_test")
    del sys.modules["gate_of_a_test"]


# ---- what is in the key ------------------------------------------------------------------


def _edit_file(gate):
    path = gate.__file__
    with open(path) as file:
        text = file.read()
    with open(path, "w") as file:
        file.write(text.replace("return x + 1\n", "return x + 22\n"))


def _replace(owner, name, value):
    def change(gate, model, monkeypatch):
        monkeypatch.setattr(owner(gate, model), name, value)
    return change


def _other(*args, **kwargs):
    return args[0]


def _held(x):
    return x


CHANGES = {
    "the file": lambda gate, model, patch: _edit_file(gate),
    "a global": _replace(lambda gate, model: gate, "SCALE", 3.0),
    "a function": _replace(lambda gate, model: gate, "helper", _other),
    "its code": lambda gate, model, patch: patch.setattr(gate.helper, "__code__", _other.__code__),
    "a method": _replace(lambda gate, model: gate.Gate, "forward", _other),
    "an entry of a registry": lambda gate, model, patch: patch.setitem(
        gate.REGISTRY, "act", torch.nn.functional.silu),
    "a flag": _replace(lambda gate, model: model, "flag", False),
    "a new attribute": lambda gate, model, patch: setattr(model, "further", 1),
    "an entry of an attribute": lambda gate, model, patch: model.settings.update(power=3),
    "a nested entry": lambda gate, model, patch: model.settings["names"].append("c"),
    "-0.0 for 0.0": lambda gate, model, patch: setattr(model, "flag", -0.0),
    "a constant's values": lambda gate, model, patch: setattr(model, "table", torch.tensor([1., 3.])),
    "a hook": lambda gate, model, patch: model.register_forward_hook(_other),
    "the mode of training": lambda gate, model, patch: model.train(),
    "the dtype": lambda gate, model, patch: model.double(),
    "a weight's size": lambda gate, model, patch: setattr(
        model, "weight", torch.nn.Parameter(torch.ones(8))),
    "two weights as one": lambda gate, model, patch: setattr(model, "second", model.weight),
    "a function of torch": _replace(lambda gate, model: torch.nn.functional, "relu", _other),
    "a method of torch": _replace(lambda gate, model: torch.Tensor, "relu", _other),
    "a method of torch's modules": _replace(lambda gate, model: torch.nn.Module, "__call__", _other),
    "a function of torch by another": _replace(
        lambda gate, model: torch.nn.functional, "relu", torch.nn.functional.silu),
    "a built-in of torch by another": _replace(lambda gate, model: torch, "relu", torch.sigmoid),
    "a method of torch by another": _replace(
        lambda gate, model: torch.Tensor, "relu", torch.Tensor.sigmoid),
    "a class of torch by another": _replace(
        lambda gate, model: torch.nn, "Linear", torch.nn.Bilinear),
    "a function of an installed package": _replace(
        lambda gate, model: torch.nn.functional, "relu", numpy.squeeze),
    "the end of a long pattern": lambda gate, model, patch: setattr(
        model, "pattern", re.compile("a" * 300 + "c")),
    "a function in a set": lambda gate, model, patch: patch.setattr(
        _held, "__kwdefaults__", {"more": 1}),
    "a function of torch.linalg": _replace(lambda gate, model: torch.linalg, "norm", _other),
    "the default dtype": lambda gate, model, patch: torch.set_default_dtype(torch.float64),
    "deterministic algorithms": lambda gate, model, patch: torch.use_deterministic_algorithms(True),
    "a variable of ours": lambda gate, model, patch: patch.setenv("MOE_MLIR_CPU", "x86-64-v3"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_trace_may_read_changes_the_key(gate, monkeypatch, name):
    model = gate.Gate().eval()
    model.table = torch.tensor([1., 2.])
    model.pattern, model.functions = re.compile("a" * 300 + "b"), {_held}
    model.flag = 0.0 if name == "-0.0 for 0.0" else True
    before = trace_key(model)
    try:
        CHANGES[name](gate, model, monkeypatch)
        assert trace_key(model) != before
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


def test_lambdas_of_one_installed_file_have_keys_of_their_own(gate):
    """Their names are equal; on one line their places are not."""
    code = compile("first, second = lambda x: x.exp(), lambda x: x.abs()\nthird = lambda x: x.sin()",
                   torch.nn.functional.__file__, "exec")
    lambdas = {"__name__": "torch.nn.functional"}
    exec(code, lambdas)
    keys = []
    for name in ("first", "second", "third"):
        model = gate.Gate().eval()
        model.function = lambdas[name]
        keys.append(trace_key(model))
    assert len(set(keys)) == 3


def test_numbers_of_weights_and_what_tells_nothing_leave_the_key(gate, monkeypatch):
    model = gate.Gate().eval()
    model.register_buffer("counts", torch.zeros(3))
    before = trace_key(model)
    with torch.no_grad():
        model.weight += 1
        model.counts += 1
    monkeypatch.setenv("MOE_MLIR_LOGS", "cache")
    monkeypatch.setattr(gate, "UNREAD", 5, raising=False)
    assert trace_key(model) == before
    assert trace_key(gate.Gate().eval().requires_grad_(False)) != before


def test_settings_of_transformers_change_the_key():
    def key():
        return trace_key(model)
    model = FAMILIES["Mixtral"].build(layers=1)
    before = key()
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    name = model.config._attn_implementation
    if name == "eager":
        name = "sdpa"
    kept = functions[name]
    functions[name] = functools.partial(kept)
    try:
        assert key() != before
    finally:
        functions[name] = kept
    model.config.rms_norm_eps *= 2
    assert key() != before


def test_a_copy_has_the_key_of_its_model():
    import copy

    model = FAMILIES["Mixtral"].build(layers=2)
    assert trace_key(copy.deepcopy(model)) == trace_key(model)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ["Mixtral", "DeepSeek-V3", "gpt-oss", "Jamba"])
def test_another_process_finds_the_key(name):
    """Whatever the order of its sets."""
    program = (f"from moe_mlir_bench.models import FAMILIES\n"
               f"from moe_mlir.guards.trace_key import trace_key\n"
               f"print(trace_key(FAMILIES[{name!r}].build(layers=2)))")
    keys = {run_python(program, PYTHONHASHSEED=seed)[0] for seed in ("1", "2")}
    assert len(keys) == 1, keys


class _Unknown(torch.nn.Module):
    def __init__(self, held):
        super().__init__()
        self.held = held

    def forward(self, x):
        return x + 1


@pytest.mark.parametrize("held", [iter([1]), memoryview(b"ab"), {object()}, torch.ones(1 << 19).to_sparse(),
                                  torch.ones(1 << 19)], ids=lambda x: type(x).__name__)
def test_what_is_not_known_has_no_key(held):
    with pytest.raises(NoKey, match=": .* of _Unknown"):
        trace_key(_Unknown(held))


def test_modes_have_no_key():
    with torch.device("cpu"), pytest.raises(NoKey, match="a mode of torch"):
        trace_key(_Unknown(1))


# ---- programs --------------------------------------------------------------------------------


def run_python(program, **environment):
    environment = {**os.environ, "MOE_MLIR_CACHE_TRACES": "1", "PYTHONPATH": os.pathsep.join(sys.path),
                   **environment}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=environment, text=True,
                          capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_programs_of_other_sizes_are_in_one_entry(gate, store, caplog):
    model = gate.Gate().eval()
    with caplog.at_level(logging.DEBUG, logger="moe_mlir.cache"):
        found = []
        for tokens in (5, 3, 12, 20, 6):
            caplog.clear()
            with torch.no_grad():
                compiled = moe_mlir.compile(model, (torch.ones(tokens, 4),), pack=False)
                x = torch.randn(tokens, 4)
                assert torch.equal(compiled(x), model(x))
            found.append("found the program of" in caplog.text)
    assert found == [False, True, False, True, True]


def test_a_program_reads_the_weights_of_its_model(gate, store):
    moe_mlir.compile(gate.Gate().eval(), (torch.ones(5, 4),), pack=False)
    model = gate.Gate().eval()
    with torch.no_grad():
        model.weight.fill_(7)
        compiled = moe_mlir.compile(model, (torch.ones(5, 4),), pack=False)
        x = torch.randn(5, 4)
        assert torch.equal(compiled(x), model(x))
        model.weight.fill_(-3)
        assert torch.equal(compiled(x), model(x))


def test_an_edit_is_traced(gate, store):
    x = torch.randn(5, 4)
    with torch.no_grad():
        moe_mlir.compile(gate.Gate().eval(), (x,), pack=False)
        _edit_file(gate)
        edited = importlib.reload(gate)
        model = edited.Gate().eval()
        assert torch.equal(moe_mlir.compile(model, (x,), pack=False)(x), model(x))


class _WithConstant(torch.nn.Module):
    def forward(self, x):
        return x + torch.tensor([1., 2., 3., 4.])


class _WithPlainTensor(torch.nn.Module):
    def __init__(self, value):
        super().__init__()
        self.tables = [torch.full((4,), value)]

    def forward(self, x):
        return x * self.tables[0]


def test_constants_are_those_of_the_code_and_of_the_model(store):
    x = torch.randn(3, 4)
    for make in (_WithConstant, lambda: _WithPlainTensor(2.), lambda: _WithPlainTensor(5.)):
        for _ in range(2):
            model = make()
            assert torch.equal(moe_mlir.compile(model, (x,))(x), model(x))


@pytest.mark.parametrize("payload", [b"", b"no pickle", b"cmoe_mlir_gone\nGone\n."])
def test_a_program_that_cannot_be_read_is_traced_again(store, gate, payload):
    model, x = gate.Gate().eval(), torch.randn(5, 4)
    compiled = moe_mlir.compile(model, (x,), pack=False)
    for key, *_ in store.entries():
        if b"TracedModule" in store.load(key):
            store.store(key, payload)
    again = moe_mlir.compile(model, (x,), pack=False)
    assert torch.equal(again(x), compiled(x))
    assert sum(b"TracedModule" in store.load(key) for key, *_ in store.entries()) == 1


@pytest.mark.parametrize("variable, value", [("MOE_MLIR_CACHE_TRACES", "0"), ("MOE_MLIR_CACHE", "0"),
                                             ("MOE_MLIR_CACHE_READONLY", "1")])
def test_nothing_is_stored_where_it_is_off(store, gate, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    x = torch.randn(5, 4)
    compiled = moe_mlir.compile(gate.Gate().eval(), (x,), pack=False)
    assert torch.equal(compiled(x), compiled.model(x))
    assert not any(b"TracedModule" in store.load(key) for key, *_ in store.entries())


def test_growing_caches_are_not_stored(store):
    model = FAMILIES["Mixtral"].build(layers=1)
    tokens = torch.tensor([[5, 17, 3]])
    compiled = moe_mlir.compile(model, (tokens,), kwargs=dict(use_cache=True))
    with torch.no_grad():
        compiled(tokens, past_key_values=transformers.DynamicCache())
    assert not any(b"TracedModule" in store.load(key) for key, *_ in store.entries())


@pytest.mark.parametrize("value, is_stored", [(1, True), (torch.ones(2), False)])
def test_a_tensor_that_a_model_makes_in_a_cache_is_not_stored(store, monkeypatch, value, is_stored):
    """It may be made of weights, which are no part of the key."""
    model, tokens = FAMILIES["Mixtral"].build(layers=1), torch.tensor([[5, 17, 3]])
    parts = CacheTensors.of(transformers.StaticCache(config=model.config, max_cache_len=8),
                            first_tokens.is_counter)
    monkeypatch.setattr(first_tokens, "_ask", lambda *args: first_tokens._Asked(
        first_tokens.FirstTokens([(("layers", 0, "further"), value)]), {}, []))
    first_tokens._load_or_ask(model, {0: tokens}, parts)
    assert bool(store.entries()) == is_stored


GENERATES = '''
import torch, transformers, moe_mlir
from moe_mlir_bench.models import FAMILIES
if {forbid}:
    def refuse(*args, **kwargs):
        raise AssertionError("traced, or run for two tokens")
    import moe_mlir.frontends.export, moe_mlir._transformers.first_tokens
    moe_mlir.frontends.export._trace = refuse
    moe_mlir._transformers.first_tokens._run_two_tokens = refuse
torch.set_num_threads(1)
model = FAMILIES[{name!r}].build(layers=2)
ids = torch.tensor([[5, 17, 3, 9, 11]])
compiled = moe_mlir.compile(model, (ids,), kwargs=dict(use_cache=False))
with torch.no_grad():
    tokens = compiled.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    cache = transformers.StaticCache(config=model.config, max_cache_len=16)
    logits = [compiled(ids[:, :n], past_key_values=cache).logits for n in (4, 1, 1)]
print(tokens.tolist(), [x.double().sum().item().hex() for x in logits])
'''


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ["Mixtral", "DeepSeek-V3", "gpt-oss", "Jamba"])
def test_another_process_generates_without_a_trace(tmp_path, name):
    """Prompts, steps, packed weights, caches with windows and of two widths: the same bits.

    transformers makes the masks of gpt-oss in the order of a set, which is an input in another order.
    """
    first, again = (run_python(GENERATES.format(name=name, forbid=forbid), PYTHONHASHSEED="0",
                               MOE_MLIR_CACHE_DIR=str(tmp_path / "cache"))[0]
                    for forbid in (False, True))
    assert first == again and "[[5, 17, 3, 9, 11, " in first
