"""moe_mlir.compile packs a model by itself, and gives its weights back to whoever trains it."""

import copy
import logging
import pickle
import warnings

import pytest
import torch
import transformers

import moe_mlir
from moe_mlir.experts.packed_weight import PackedWeight
from moe_mlir.nn import MoELayer, SMoE
from moe_mlir.packing import PackedLinear
from moe_mlir_bench.models import FAMILIES

IDS = torch.arange(3, 14)[None]
X = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))


class Net(torch.nn.Module):
    """Experts between linear layers: small enough to be compiled in a second."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(64, 64), torch.nn.Linear(64, 96)
        self.layer = MoELayer(SMoE(64, 4, 2), 64)

    def forward(self, x):
        return self.last(self.layer(self.first(x).tanh())[0])


WEIGHTS = ["first.weight", "last.weight", "layer.w_in", "layer.w_out"]


def net():
    torch.manual_seed(0)
    return Net().eval()


def whole_model(implementation="grouped_mm", **options):
    torch.manual_seed(0)
    model = FAMILIES["Granite-MoE"].build(torch.float32, layers=1, attn_implementation="sdpa",
                                          hidden_size=128, **options).eval()
    model.set_experts_implementation(implementation)
    return model


def packed(model):
    return [name for name, weight in model.named_parameters() if isinstance(weight, PackedWeight)]


def train_step(model, x=X):
    model(x).square().sum().backward()


def same_gradients(model, reference):
    train_step(reference)
    for (name, weight), other in zip(model.named_parameters(), reference.parameters()):
        assert weight.grad is not None, name
        torch.testing.assert_close(weight.grad, other.grad, rtol=1e-4, atol=1e-4, msg=name)


# ---- what is packed ----------------------------------------------------------------


def test_packed_or_not_compiled_code_gives_the_same_bits():
    model = net()
    identities = [id(weight) for weight in model.parameters()]
    plain = moe_mlir.compile(model, (X,), pack=False)
    assert packed(model) == [] and type(model.first) is torch.nn.Linear
    expected = plain(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        compiled = moe_mlir.compile(model, (X,))
    assert sorted(packed(model)) == WEIGHTS
    assert torch.equal(compiled(X), expected)
    # Traced again for the panels.
    assert torch.equal(plain(X), expected)
    assert all(weight.requires_grad for weight in model.parameters())
    assert [id(weight) for weight in model.parameters()] == identities
    with torch.no_grad():
        torch.testing.assert_close(model(X), expected, rtol=1e-4, atol=1e-5)
    assert sorted(packed(model)) == WEIGHTS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_same_bits_in_a_lower_precision(dtype):
    model = net()
    for layer in (model.first, model.last):
        layer.to(dtype)
        x = X.to(dtype)
        expected = moe_mlir.compile(layer, (x,), pack=False)(x)
        assert torch.equal(moe_mlir.compile(layer, (x,))(x), expected) and packed(layer)


def unpackable(model):
    model.first.weight = model.last.weight = torch.nn.Parameter(model.first.weight.detach())
    model.last = torch.nn.Linear(64, 8)
    model.other = torch.nn.Linear(64, 64)
    model.other.weight = model.first.weight
    return model


def test_what_cannot_be_packed_is_said_in_the_log_alone(caplog):
    model = unpackable(net())
    with warnings.catch_warnings(), caplog.at_level(logging.INFO, "moe_mlir.compile"):
        warnings.simplefilter("error", UserWarning)
        compiled = moe_mlir.compile(model, (X,))
    assert packed(model) == ["layer.w_in", "layer.w_out"]
    assert "'first' (Linear) is not packed: its weights belong to other modules" in caplog.text
    assert "'last' (Linear) is not packed: expected as many outputs" in caplog.text
    with torch.no_grad():
        torch.testing.assert_close(compiled(X), model(X), rtol=1e-4, atol=1e-5)


def test_a_model_in_training_mode_and_programs_stay_as_they_are():
    model = net().train()
    moe_mlir.compile(model, (X,))
    assert packed(model) == []
    model.eval()
    program = torch.export.export(model, (X,))
    moe_mlir.compile(program)
    moe_mlir.compile(moe_mlir.export(model, (X,)))
    assert packed(model) == []


def test_wrong_arguments_leave_the_model_as_it_is():
    model = net()
    with pytest.raises(TypeError, match="expected 'args' to be a tuple"):
        moe_mlir.compile(model, X)
    with pytest.raises(RuntimeError):
        moe_mlir.compile(model, (torch.randn(5, 63),))
    assert packed(model) == [] and type(model.first) is torch.nn.Linear
    # Nor does a call that the model refuses unpack it.
    compiled = moe_mlir.compile(model, (X,))
    with pytest.raises(ValueError, match="expected shape"):
        compiled(torch.randn(5, 63))
    assert sorted(packed(model)) == WEIGHTS


class ReadsWeights(torch.nn.Module):
    """Gives the weight of a layer to another function than the layer's own."""

    def __init__(self, read):
        super().__init__()
        self.first, self.last = torch.nn.Linear(64, 64), torch.nn.Linear(64, 70)
        self.read = read

    def forward(self, x):
        return self.read(self.first(x), self.last)


@pytest.mark.parametrize(("read", "left"), [
    # Panels have another mean, with zeros in them.
    (lambda x, layer: layer(x) + layer.weight.mean(), ["first.weight"]),
    (lambda x, layer: torch.nn.functional.linear(x, layer.weight), []),
])
def test_weights_that_the_model_reads_itself_stay_as_they_are(read, left):
    model = ReadsWeights(read).eval()
    with torch.no_grad():
        expected = model(X)
    compiled = moe_mlir.compile(model, (X,))
    torch.testing.assert_close(compiled(X), expected, rtol=1e-4, atol=1e-5)
    assert packed(model) == left


# ---- training afterwards -----------------------------------------------------------


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_model_is_trained_after_it_was_compiled(mode, before):
    model, reference = net(), net().train(mode)
    make = lambda: torch.optim.Adam(  # noqa: E731
        [weight for weight in model.parameters() if weight.requires_grad], 1e-2)
    optimizer = make() if before else None
    compiled = moe_mlir.compile(model, (X,))
    optimizer = optimizer or make()
    model.train(mode)
    assert sorted(packed(model)) == WEIGHTS
    train_step(model)
    assert packed(model) == []
    same_gradients(model, reference)
    optimizer.step()
    other = torch.optim.Adam(reference.parameters(), 1e-2)
    other.step()
    for weight, wanted in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(weight, wanted)
    # Compiled again for the weights as they are now, which stay so.
    with torch.no_grad():
        torch.testing.assert_close(compiled(X), reference(X), rtol=1e-4, atol=1e-4)
    assert packed(model) == []


def test_gradients_from_before_are_kept():
    model, reference = net(), net()
    train_step(model)
    train_step(reference)
    moe_mlir.compile(model, (X,))
    train_step(model)
    same_gradients(model, reference)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "moe"])
def test_torch_compile_trains_it(backend):
    torch._dynamo.reset()
    model = net()
    moe_mlir.compile(model, (X,))
    options = {"options": {"rest": "eager"}} if backend == "moe" else {}
    compiled = torch.compile(model, backend=backend, **options)
    with torch.no_grad():
        torch.testing.assert_close(compiled(X), net()(X), rtol=1e-4, atol=1e-5)
    assert sorted(packed(model)) == WEIGHTS
    train_step(compiled)
    assert packed(model) == []
    same_gradients(model, net())


def test_a_weight_that_is_read_elsewhere_has_a_gradient():
    model, reference = net(), net()
    moe_mlir.compile(model, (X,))
    for each in (model, reference):
        torch.nn.functional.linear(X, each.last.weight).square().sum().backward()
    assert packed(model) == []
    assert torch.equal(model.last.weight.grad, reference.last.weight.grad)


def test_looking_at_weights_leaves_them_packed():
    model = net()
    moe_mlir.compile(model, (X,))
    weight = model.last.weight
    assert "tensor" in repr(weight) and weight.dtype == torch.float32 and weight.is_leaf
    assert torch.equal(weight, net().last.weight)
    assert sorted(packed(model)) == WEIGHTS


def test_frozen_weights_stay_packed():
    model, reference = net(), net()
    for each in (model, reference):
        each.layer.requires_grad_(False)
        each.last.requires_grad_(False)
    compiled = moe_mlir.compile(model, (X,))
    train_step(model)
    train_step(reference)
    # The gradient of the first layer goes through the panels.
    assert sorted(packed(model)) == WEIGHTS[1:]
    torch.testing.assert_close(model.first.weight.grad, reference.first.weight.grad)
    # Also where a call is refused, for whose trace they are unpacked.
    with pytest.raises(RuntimeError):
        compiled(torch.randn(5, 63))
    assert sorted(packed(model)) == WEIGHTS[1:]
    model.requires_grad_(True)
    model.zero_grad()
    train_step(model)
    assert packed(model) == []
    same_gradients(model, net())


def test_weights_that_the_user_packed_are_the_users():
    model = net()
    moe_mlir.pack_linears(model)
    moe_mlir.compile(model, (X,))
    assert [weight.requires_grad for weight in (model.last.weight, model.layer.w_in)] == [
        False, True]
    train_step(model)
    assert sorted(packed(model)) == WEIGHTS[:2] and model.layer.w_in.grad is not None


# ---- the model as a whole ----------------------------------------------------------


@torch.no_grad()
def test_checkpoints_know_nothing_of_it():
    model, state = net(), copy.deepcopy(net().state_dict())
    compiled = moe_mlir.compile(model, (X,))
    assert all(torch.equal(weight, state[name]) for name, weight in model.state_dict().items())
    other = {name: weight + 1 for name, weight in state.items()}
    reference = net()
    for assign in (False, True):
        model.load_state_dict(other, assign=assign)
        reference.load_state_dict(other)
        torch.testing.assert_close(compiled(X), reference(X), rtol=1e-4, atol=1e-4)
        assert sorted(packed(model)) == WEIGHTS
    with torch.enable_grad():
        train_step(model)
        assert packed(model) == []
        same_gradients(model, reference)


@pytest.mark.parametrize("make", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
                         ids=["deepcopy", "pickle"])
def test_a_copy_gives_back_its_own(make):
    model = net()
    compiled = make(moe_mlir.compile(model, (X,)))
    other = compiled.model
    assert sorted(packed(other)) == WEIGHTS
    train_step(other)
    assert packed(other) == [] and sorted(packed(model)) == WEIGHTS
    same_gradients(other, net())
    with torch.no_grad():
        torch.testing.assert_close(compiled(X), other(X), rtol=1e-4, atol=1e-5)


def test_other_dtypes_and_codes_need_no_call_to_unpack():
    model, reference = net().last, net().last.double()
    moe_mlir.compile(model, (X,))
    assert packed(model) == ["weight"]
    model.double()
    assert packed(model) == [] and model.weight.requires_grad
    assert torch.equal(model(X.double()), reference(X.double()))
    model = net()
    moe_mlir.compile(model, (X,))
    assert moe_mlir.quantize(model, "int8") == 3
    model = net()
    moe_mlir.compile(model, (X,))
    model.last.reset_parameters()
    assert type(model.last) is torch.nn.Linear and model.last.weight.requires_grad


@pytest.mark.drawn(2)
@pytest.mark.parametrize("implementation", ["grouped_mm", "moe", "eager"])
def test_a_model_of_transformers_decodes_with_panels(implementation):
    model, reference = (whole_model(implementation, tie_word_embeddings=True) for _ in range(2))
    cache = transformers.StaticCache(config=model.config, max_cache_len=24)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        compiled = moe_mlir.compile(model, (IDS,), kwargs=dict(past_key_values=cache))
    names = packed(model)
    assert len(names) == 4 + 2 and "lm_head.weight" not in names  # it is the embedding's
    assert type(model.model.layers[0].self_attn.q_proj) is PackedLinear
    assert model.config._experts_implementation == "moe"
    options = dict(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(compiled.generate(IDS, **options), reference.generate(IDS, **options))
    assert packed(model) == names
    other = copy.deepcopy(model)
    for each in (model, other):
        each(IDS, labels=IDS).loss.backward()
        # It has what it had, in its copy, too.
        assert packed(each) == [] and each.config._experts_implementation == implementation
        assert all(weight.grad is not None for weight in each.parameters())


def test_adapters_train_beside_panels():
    peft = pytest.importorskip("peft")
    model, reference = whole_model(), whole_model()
    moe_mlir.compile(model, (IDS,), kwargs=dict(use_cache=False))
    names = packed(model)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted, wanted = (peft.get_peft_model(each, copy.deepcopy(config))
                       for each in (model, reference))
    wanted.load_state_dict(adapted.state_dict())
    for each in (adapted, wanted):
        each(IDS, labels=IDS).loss.backward()
    assert len(packed(model)) == len(names)
    for (name, weight), other in zip(adapted.named_parameters(), wanted.parameters()):
        assert ("lora_" in name) == (weight.grad is not None)
        if weight.grad is not None:
            torch.testing.assert_close(weight.grad, other.grad, rtol=1e-3, atol=1e-5)
