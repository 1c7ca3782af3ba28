"""MoELayer with other activations, gates and biases, against experts one by one in float64."""

import copy
import doctest

import pytest
import torch
from methods import D, E, K, normal
from op_judge import assert_close, largest

import moe_mlir
from moe_mlir import distributed, nn
from moe_mlir.experts import ExpertActivation
from moe_mlir.ops._expert_activation import ACTIVATIONS, GLUS

HIDDEN = 10
CLAMPED = ExpertActivation("silu", 1.702, "interleaved", limit=1.0, up_offset=1.0)
# In plain torch, on the features of one row, and those that the first layer has.
PLAIN = {
    "none": lambda z: z,
    "relu": torch.relu,
    "relu2": lambda z: torch.relu(z) ** 2,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda z: torch.nn.functional.gelu(z, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}


def id_of(activation):
    return activation if isinstance(activation, str) else "clamped"


def function_of(activation):
    if isinstance(activation, ExpertActivation):
        return activation
    if activation not in GLUS:
        return PLAIN[activation]
    gated = PLAIN[GLUS[activation]]
    return lambda z: gated(z[..., : z.shape[-1] // 2]) * z[..., z.shape[-1] // 2 :]


def layer_of(activation="swiglu", bias=True, shared=1, router=None, **options):
    torch.manual_seed(2)
    return nn.MoELayer(router or nn.SMoE(D, E, K), HIDDEN, activation=activation, bias=bias,
                       shared=shared, **options)


def expected(layer, h, routing, activation):
    """Token by token; `layer` and h are float64."""
    act, rows = function_of(activation), []
    linear = torch.nn.functional.linear

    def bias(name, e):
        value = getattr(layer, name)
        return None if value is None else value[e]
    gates, indices = (x.reshape(-1, x.shape[-1]) for x in (routing.gates, routing.indices))
    for token, row in enumerate(h.reshape(-1, D)):
        y = torch.zeros(D, dtype=h.dtype)
        for gate, e in zip(gates[token].double(), indices[token].tolist()):
            hidden = act(linear(row, layer.w_in[e], bias("b_in", e)))
            y = y + gate * linear(hidden, layer.w_out[e], bias("b_out", e))
        if layer.shared_in is not None:
            hidden = act(linear(row, layer.shared_in, layer.shared_b_in))
            y = y + linear(hidden, layer.shared_out, layer.shared_b_out)
        rows.append(y)
    return torch.stack(rows).view_as(h)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [*ACTIVATIONS, *GLUS, CLAMPED], ids=id_of)
def test_every_activation_with_gradients(activation, bias):
    h = normal(2, 9, D)
    layer = layer_of(activation, bias, shared=2)
    wide = copy.deepcopy(layer).double()
    wide.router.impl = "torch"
    x, wide_x = h.clone().requires_grad_(), h.double().requires_grad_()
    y, routing = layer(x)
    wanted = expected(wide, wide_x, wide.router(wide_x), activation)
    assert_close(y, wanted, 1e-5 * max(1.0, largest(wanted)))
    with torch.no_grad():
        assert torch.allclose(layer(h)[0], y, atol=1e-6)
    dy = normal(*y.shape, seed=9)
    y.backward(dy)
    wanted.backward(dy.double())
    assert_close(x.grad, wide_x.grad, 1e-4 * largest(wide_x.grad), "h")
    pairs = zip(layer.named_parameters(), wide.parameters(), strict=True)
    for (name, mine), theirs in pairs:
        assert_close(mine.grad, theirs.grad, 1e-4 * max(1.0, largest(theirs.grad)), name)
    biases = {name for name, _ in layer.named_parameters() if name.rpartition(".")[2].startswith(
        ("b_", "shared_b_"))}
    assert biases == ({"b_in", "b_out", "shared_b_in", "shared_b_out"} if bias else set())


def test_names_shapes_dtypes_and_a_state_dict():
    layer = layer_of(shared=2, dtype=torch.bfloat16)
    shapes = {name: tuple(w.shape) for name, w in layer.named_parameters(recurse=False)}
    assert shapes == {
        "w_in": (E, 2 * HIDDEN, D), "w_out": (E, D, HIDDEN), "b_in": (E, 2 * HIDDEN),
        "b_out": (E, D), "shared_in": (4 * HIDDEN, D), "shared_out": (D, 2 * HIDDEN),
        "shared_b_in": (4 * HIDDEN,), "shared_b_out": (D,)}
    assert all(w.dtype == torch.bfloat16 for w in layer.parameters(recurse=False))
    other = layer_of(shared=2, dtype=torch.bfloat16, device="meta").to_empty(device="cpu")
    other.router.reset_parameters()
    other.reset_parameters()
    assert all(bool(w.isfinite().all()) for w in other.parameters())
    other.load_state_dict(layer.state_dict())
    h = normal(3, D).to(torch.bfloat16)
    assert torch.equal(other.eval()(h)[0], layer.eval()(h)[0])
    # What had no biases before has the same names.
    plain = nn.MoELayer(nn.SMoE(D, E, K), HIDDEN, shared=1)
    assert list(plain.state_dict())[:4] == ["w_in", "w_out", "shared_in", "shared_out"]


def test_gates_are_the_first_half_as_in_transformers():
    layer = layer_of(bias=False, shared=0, router=nn.SMoE(D, 1, 1))
    h = normal(5, D)
    gate, up = (h @ layer.w_in[0].T).chunk(2, dim=-1)
    wanted = (torch.nn.functional.silu(gate) * up) @ layer.w_out[0].T
    torch.testing.assert_close(layer(h)[0], wanted, rtol=0, atol=1e-5)


def test_a_soft_router_has_them_too():
    layer = layer_of(shared=0, router=nn.SoftMoE(D, E, slots=2))
    h = normal(2, 9, D)
    y, routing = layer(h)
    slots = torch.einsum("bnep,bnd->bepd", routing.dispatch, h)
    act, outputs = function_of("swiglu"), torch.zeros(2, E, 2, D)
    for e in range(E):
        hidden = act(torch.nn.functional.linear(slots[:, e], layer.w_in[e], layer.b_in[e]))
        outputs[:, e] = torch.nn.functional.linear(hidden, layer.w_out[e], layer.b_out[e])
    wanted = torch.einsum("bnep,bepd->bnd", routing.combine, outputs)
    torch.testing.assert_close(y, wanted, rtol=0, atol=1e-5)


def test_dropped_choices_add_no_bias():
    layer = layer_of(shared=0, router=nn.Switch(D, E), capacity_factor=0.01)
    h = normal(64, D)
    y, _ = layer(h)
    # An expert takes one token, so at least 64 - E tokens reach none.
    assert int((y == 0).all(dim=-1).sum()) >= 64 - E


class Outputs(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, h):
        return h + self.layer(h)[0]


@pytest.mark.parametrize("backend", ["moe", "inductor"])
def test_torch_compile(backend):
    model, h = Outputs(layer_of()), normal(2, 9, D)
    compiled = torch.compile(copy.deepcopy(model), backend=backend, fullgraph=True)
    for run in (model, compiled):
        run(h).square().sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(compiled(h), model(h), rtol=0, atol=1e-5)
    for mine, theirs in zip(compiled.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ["swiglu", CLAMPED, "relu2"], ids=id_of)
def test_compile(activation):
    model = Outputs(layer_of(activation)).eval()
    compiled = moe_mlir.compile(model, (normal(2, 9, D),))
    for h in (normal(2, 9, D, seed=1), normal(3, 4, D, seed=2)):
        with torch.no_grad():
            torch.testing.assert_close(compiled(h), model(h), rtol=0, atol=1e-5)


@pytest.mark.parametrize("activation", ["swiglu", CLAMPED, "gelu"], ids=id_of)
def test_packed_and_quantized(activation):
    torch.manual_seed(0)
    layer = nn.MoELayer(nn.SMoE(64, 8, 2), 64, activation=activation, bias=True).eval()
    h = normal(9, 64)
    with torch.no_grad():
        before = layer(h)[0]
        assert moe_mlir.pack_experts(layer) == 1
        assert torch.equal(layer(h)[0], before)
        assert moe_mlir.unpack_experts(layer) == 1
        assert moe_mlir.quantize(layer, "int8") == 1
        torch.testing.assert_close(layer(h)[0], before, rtol=0, atol=0.02)


def test_expert_parallel_takes_them():
    layer, h = layer_of(), normal(2, 9, D)
    spread = distributed.ExpertParallel(layer)
    torch.testing.assert_close(spread(h)[0], layer(h)[0], rtol=0, atol=1e-5)
    assert set(spread.parameters_to_ignore) <= {name for name, _ in spread.named_parameters()}


@pytest.mark.parametrize(("activation", "error", "message"), [
    ("swish", ValueError, "MoELayer: expected 'activation' to be one of 'none', .*found 'swish'"),
    (torch.relu, TypeError, "expected 'activation' to be a name or an ExpertActivation, found "
                            "builtin_function_or_method"),
    (ExpertActivation("silu", limit=1.0), ValueError, "expected 'bound', 'limit'.* only with a"),
])
def test_what_is_no_activation_is_refused(activation, error, message):
    with pytest.raises(error, match=message):
        layer_of(activation)


def test_the_examples_of_experts_run():
    names = dict(torch=torch, moe_mlir=moe_mlir, ExpertActivation=ExpertActivation)
    tests = [test for thing in (ExpertActivation, moe_mlir.experts.run_experts)
             for test in doctest.DocTestFinder().find(thing, globs=dict(names))]
    results = [doctest.DocTestRunner().run(test) for test in tests]
    assert sum(result.attempted for result in results) > 3
    assert not any(result.failed for result in results)


def test_run_experts_takes_names():
    layer, h = layer_of(shared=0), normal(4, D)
    y, routing = layer(h)
    for run, options in ((moe_mlir.experts.run_experts, {}),
                         (distributed.run_experts, dict(num_experts=E))):
        found = run(h, routing.gates, routing.indices, layer.w_in, layer.w_out, b_in=layer.b_in,
                    b_out=layer.b_out, activation="swiglu", **options)
        torch.testing.assert_close(found, y, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="one of 'none', .*'reglu', found 'swish'"):
        moe_mlir.experts.run_experts(h, routing.gates, routing.indices, layer.w_in, layer.w_out,
                                     activation="swish")
