"""Models with the weights of their linear layers in panels."""

import copy
import pickle

import pytest
import torch
from test_packing import IDS, check_artifact

import moe_mlir
import moe_mlir.hf
from moe_mlir.ops.packed_linear import packed_linear
from moe_mlir.packing import PackedGroupedLinear, PackedLinear
from moe_mlir.weights.model_layers import _READERS
from moe_mlir_bench.models import FAMILIES

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def whole_model(dtype=torch.float32, name="Granite-MoE"):
    model = FAMILIES[name].build(dtype, layers=2, attn_implementation="sdpa", hidden_size=128,
                                 tie_word_embeddings=False)
    return model.eval()


@pytest.mark.drawn(5)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("rows", "width", "out", "bias"), [
    ((1,), 512, 256, True), ((2,), 1280, 192, False), ((7,), 70, 100, True),
    ((3, 5), 256, 64, False), ((0,), 64, 64, True), ((40,), 2, 129, False), ((), 258, 80, True),
])
def test_a_layer_is_within_rounding_of_float64(dtype, rows, width, out, bias):
    torch.manual_seed(0)
    layer = torch.nn.Linear(width, out, bias, dtype=dtype)
    x = torch.randn(*rows, width, dtype=dtype)
    with torch.no_grad():
        expected = copy.deepcopy(layer).double()(x.double())
        assert moe_mlir.pack_linears(layer) == 1 and type(layer) is PackedLinear
        found = layer(x)
        assert found.dtype == dtype and found.shape == expected.shape
        torch.testing.assert_close(found.double(), expected, rtol=TOLERANCES[dtype],
                                   atol=TOLERANCES[dtype])
        # A row's result depends on nothing else, nor on strides.
        if rows and rows[0] > 1:
            assert torch.equal(layer(x[1]), found[1])
            assert torch.equal(layer(torch.stack([x, x], -1)[..., 0]), found)


@torch.no_grad()
def test_a_model_is_packed_saved_and_copied(tmp_path):
    model = whole_model()
    expected, state = model(IDS).logits, copy.deepcopy(model.state_dict())
    count = moe_mlir.pack_linears(model)
    # Attention and the head, not the routers.
    assert count == 2 * 4 + 1
    assert type(model.lm_head) is PackedLinear
    packed = model(IDS).logits
    torch.testing.assert_close(packed, expected, rtol=1e-4, atol=1e-4)
    assert list(model.state_dict()) == list(state)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(IDS).logits, packed)
        assert moe_mlir.unpack_linears(other) == count
        assert torch.equal(other(IDS).logits, expected)
        assert all(p.requires_grad for p in other.parameters())
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="sdpa")
    assert all(torch.equal(w, state[n]) for n, w in loaded.state_dict().items())
    model.load_state_dict({n: 2 * w for n, w in state.items()})
    assert moe_mlir.pack_linears(model) == 0
    assert moe_mlir.unpack_linears(model) == count and moe_mlir.unpack_linears(model) == 0
    assert torch.equal(model.lm_head.weight, 2 * state["lm_head.weight"])


@torch.no_grad()
def test_experts_and_linear_layers_are_packed_apart():
    model = whole_model()
    model.set_experts_implementation("moe")
    expected = model(IDS).logits
    assert moe_mlir.pack_linears(model) == 9 and moe_mlir.pack_experts(model) == 2
    torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-4, atol=1e-4)
    assert moe_mlir.unpack_experts(model) == 2 and moe_mlir.unpack_linears(model) == 9
    assert torch.equal(model(IDS).logits, expected)


@torch.no_grad()
def test_a_packed_model_is_compiled_with_its_routers():
    model = whole_model()
    expected = model(IDS).logits
    moe_mlir.pack_linears(model)
    compiled = moe_mlir.compile(model, (IDS,), pack=False)
    for ids in (IDS, IDS[:, :1]):
        torch.testing.assert_close(compiled(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(compiled(IDS).logits, expected, rtol=1e-4, atol=1e-4)
    text = compiled.module.text
    assert text.count("moe.topk_renorm ins") == 2 and text.count("packed = ") == 9
    found = torch.compile(model, backend="moe")(IDS).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_an_artifact_holds_the_panels(tmp_path):
    model = whole_model(torch.bfloat16)
    moe_mlir.pack_linears(model)
    check_artifact(model, tmp_path)


@pytest.mark.parametrize("rows", [(3, 2), (), (0,)])
def test_gradients_of_inputs_and_of_the_bias(rows):
    torch.manual_seed(0)
    layer = torch.nn.Linear(96, 80)
    x = torch.randn(*rows, 96, requires_grad=True)
    dy = torch.randn(*rows, 80)
    expected = torch.autograd.grad(layer(x), (x, layer.bias), dy)
    moe_mlir.pack_linears(layer)
    found = torch.autograd.grad(layer(x), (x, layer.bias), dy)
    torch.testing.assert_close(found, expected)
    layer.weight.requires_grad_()
    with pytest.raises(RuntimeError, match="there is no gradient; call moe_mlir.unpack_linears"):
        layer(x).sum().backward()


@pytest.mark.drawn(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_a_packed_layer_changes_its_dtype(dtype, other):
    torch.manual_seed(0)
    layer = torch.nn.Linear(63 if dtype == torch.float32 else 64, 96, dtype=dtype)
    plain = copy.deepcopy(layer).to(other)
    x = torch.randn(3, layer.in_features, dtype=other)
    moe_mlir.pack_linears(layer)
    state = copy.deepcopy(layer.state_dict())
    layer.to(other)
    torch.testing.assert_close(layer(x), plain(x), rtol=2e-2, atol=2e-2)
    assert all(torch.equal(w, plain.state_dict()[n]) for n, w in layer.state_dict().items())
    # A checkpoint of another dtype is cast, as torch does it.
    layer.load_state_dict({n: 2 * w for n, w in state.items()})
    moe_mlir.unpack_linears(layer)
    assert torch.equal(layer.weight, (2 * state["weight"]).to(other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_autocast_of_packed_weights(dtype, lower):
    model = whole_model(dtype)
    model.set_experts_implementation("moe")
    with torch.autocast("cpu", lower):
        expected = model(IDS).logits
        moe_mlir.pack_linears(model)
        moe_mlir.pack_experts(model)
        found = model(IDS).logits
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2)


def test_weights_of_a_state_dict_replace_panels():
    layer, x = torch.nn.Linear(64, 96), torch.randn(3, 64)
    expected = layer(x)
    moe_mlir.pack_linears(layer)
    assert torch.equal(torch.func.functional_call(layer, layer.state_dict(), x), expected)
    with pytest.raises(RuntimeError, match="expected a weight that is not packed, found panels"):
        layer.reset_parameters()


def test_one_layer_of_two_names_is_packed_once():
    layer = torch.nn.Linear(64, 96)
    assert moe_mlir.pack_linears(torch.nn.ModuleList([layer, layer])) == 1


def test_layers_that_patched_modules_read_stay_as_they_are():
    model = FAMILIES["Switch"].build()
    with pytest.warns(UserWarning, match="a module around it reads its weight without calling it"):
        moe_mlir.pack_linears(model)
    assert set(moe_mlir.hf.EXPERTS) <= _READERS


def tied(layer):
    model = torch.nn.Sequential(torch.nn.Embedding(96, 64), layer)
    layer.weight = model[0].weight
    return model


@pytest.mark.parametrize(("change", "message"), [
    (tied, "its weights belong to other modules too"),
    (lambda layer: torch.nn.TransformerEncoderLayer(64, 4, 96),
     "a module around it reads its weight without calling it"),
    (lambda layer: layer.to("meta"), "expected its weights in memory"),
    (lambda layer: layer.to(torch.float64), "expected float32, bfloat16 or float16"),
    (lambda layer: torch.nn.Linear(64, 8), "expected as many outputs as a panel has columns on this"
                                           " CPU, (16|64), found 8"),
    (lambda layer: torch.nn.Linear(63, 96, dtype=torch.bfloat16),
     "expected an even number of features in bfloat16, found 63"),
])
def test_layers_that_stay_as_they_are(change, message):
    with pytest.warns(UserWarning, match=message):
        assert moe_mlir.pack_linears(change(torch.nn.Linear(64, 96))) == 0


def test_layers_of_routers_and_derived_ones_stay_as_they_are():
    class Mine(torch.nn.Linear):
        pass

    model = torch.nn.ModuleDict(dict(mine=Mine(64, 96), shared_expert_gate=torch.nn.Linear(64, 96),
                                     empty=torch.nn.Linear(0, 96)))
    model["router"] = torch.nn.ModuleDict(dict(layer=torch.nn.Linear(64, 96)))
    assert moe_mlir.pack_linears(model) == 0


@pytest.mark.parametrize(("change", "message"), [
    (dict(x=torch.zeros(2, 62)), "of panels for 62 features"),
    (dict(out_features=40), "of panels for 64 features and 40 of y"),
    (dict(w=torch.zeros(96, 64)), "expected x .* and w in the panels of one matrix"),
    (dict(x=torch.zeros(2, 64, dtype=torch.int32)), "int32"),
    (dict(bias=torch.zeros(95)), "bias"),
])
def test_wrong_calls(change, message):
    layer = torch.nn.Linear(64, 96)
    moe_mlir.pack_linears(layer)
    arguments = dict(x=torch.zeros(2, 64), w=layer.weight, bias=None, out_features=96)
    with pytest.raises((ValueError, TypeError), match=message):
        packed_linear(**{**arguments, **change})


# ---- a matrix for each group of features -------------------------------------------

GROUPS = 4


def grouped_layer(width=96, out=256, dtype=torch.float32):
    v4 = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    return v4.DeepseekV4GroupedLinear(width, out, GROUPS).to(dtype)


@torch.no_grad()
@pytest.mark.drawn(6)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("rows", [(), (1,), (7,), (2, 5), (0,), (40,)], ids=str)
def test_groups_are_within_rounding_of_float64(dtype, rows):
    torch.manual_seed(0)
    layer, x = grouped_layer(dtype=dtype), torch.randn(*rows, GROUPS, 96, dtype=dtype)
    matrices = layer.weight.double().view(GROUPS, -1, 96)
    expected = torch.einsum("...gi,goi->...go", x.double(), matrices)
    assert moe_mlir.pack_linears(layer) == 1 and type(layer) is PackedGroupedLinear
    found = layer(x)
    assert found.dtype == dtype and found.shape == expected.shape and found.is_contiguous()
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCES[dtype],
                               atol=TOLERANCES[dtype])
    strided = torch.stack([x, x], -1)[..., 0]
    assert torch.equal(layer(strided), found)
    if rows and rows[0] > 1:
        assert torch.equal(layer(x[1:]), found[1:])


def test_groups_are_compiled_copied_and_given_back():
    model, x = torch.nn.Sequential(grouped_layer()).eval(), torch.randn(5, GROUPS, 96)
    kind, weight = type(model[0]), model[0].weight.detach().clone()
    expected, doubled = model(x), torch.cat([x, x])
    compiled = moe_mlir.compile(model, (x,))
    assert type(model[0]) is PackedGroupedLinear and "packed = " in compiled.module.text
    torch.testing.assert_close(compiled(x), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(compiled(doubled), model(doubled), rtol=0, atol=0)
    # Inductor asks for the strides that the trace had.
    inductor = torch.compile(lambda x: model(x).transpose(1, 2) + 1)
    with torch.no_grad():
        torch.testing.assert_close(inductor(x), expected.detach().transpose(1, 2) + 1, rtol=1e-5, atol=1e-5)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x))
    # What is trained has its weights.
    model(x).sum().backward()
    assert model[0].weight.grad.shape == weight.shape
    moe_mlir.unpack_linears(model)
    assert torch.equal(model[0].weight, weight)
    moe_mlir.pack_linears(model)
    assert moe_mlir.unpack_linears(model) == 1 and type(model[0]) is kind
    assert torch.equal(model[0].weight, weight)


@pytest.mark.parametrize("make", [grouped_layer, lambda: torch.nn.Linear(96, 256)],
                         ids=["groups", "linear"])
def test_packing_that_was_interrupted_is_undone(make, monkeypatch):
    layer = make()
    kind, weight = type(layer), layer.weight.detach().clone()

    def interrupt(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr("moe_mlir.packing._change_class", interrupt)
    with pytest.raises(KeyboardInterrupt):
        moe_mlir.pack_linears(layer)
    assert moe_mlir.unpack_linears(layer) == 1 and type(layer) is kind
    assert torch.equal(layer.weight, weight) and type(layer.weight) is torch.nn.Parameter


def test_the_gradient_of_groups_is_that_of_x():
    layer, x = grouped_layer(), torch.randn(3, GROUPS, 96, requires_grad=True)
    dy = torch.randn(3, GROUPS, 64)
    (expected,) = torch.autograd.grad(layer(x), x, dy)
    moe_mlir.pack_linears(layer)
    (found,) = torch.autograd.grad(layer(x), x, dy)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_groups_narrower_than_a_panel_stay_as_they_are():
    layer = grouped_layer(out=GROUPS * 24)
    with pytest.warns(UserWarning, match="expected a multiple of .* outputs a group"):
        assert moe_mlir.pack_linears(layer) == 0


@pytest.mark.parametrize(("change", "message"), [
    (dict(x=torch.zeros(2, 3, 96)), "expected x .* for 4 groups"),
    (dict(x=torch.zeros(96)), "expected x .* for 4 groups"),
    (dict(bias=torch.zeros(64)), "expected no bias"),
    (dict(groups=0), "expected at least 1 group"),
    (dict(out_features=128), "4 times 128 of y"),
    (dict(x=torch.zeros(2, GROUPS, 94)), "of panels for 94 features"),
])
def test_wrong_calls_of_groups(change, message):
    layer = grouped_layer()
    moe_mlir.pack_linears(layer)
    arguments = dict(x=torch.zeros(2, GROUPS, 96), w=layer.weight, bias=None, out_features=64,
                     groups=GROUPS)
    with pytest.raises(ValueError, match=message):
        packed_linear(**{**arguments, **change})
