"""Under torch.autocast: which arguments an op casts, and training with a layer."""

import pytest
import torch
from op_calls import ALL_CALLS, FORWARD_CALLS, normal, run

import moe_mlir
from moe_mlir import nn

NARROW = torch.bfloat16
# What torch.autocast casts for each op: to its own dtype, to float32, or to the widest given.
CAST = {
    "router_logits": ("h", "weight", "bias"),
    "grouped_linear": ("x", "w", "bias"),
    "run_experts": ("x", "w_in", "b_in", "w_out", "b_out"),
    "attention": ("q", "k", "v"),
    "attention_entropy": ("q", "k"),
    "attention_posterior": ("q", "k", "u", "vp", "v", "wo"),
    "similarity_inform": ("u", "uk", "ws"),
}
SCORES = {
    "ac_logits": ("m", "prev_gates"),
    "attention_posterior": ("head_prior", "row_lse", "row_entropy"),
    "soft_dispatch": ("m",),
    "threshold_renorm": ("p",),
    "densify": ("gates",),
    "dispatch": ("priority", "gates"),
    "combine": ("gates",),
    "run_experts": ("gates",),
    "balance_loss": ("p",),
    "adjacency_gate": ("p", "a"),
    "adjacency_update": ("a",),
    "dispersion_weights": ("s",),
    "bias_update": ("bias",),
}
WIDEST = {"combine": ("expert_out", "shared"), "grouped_outer": ("dy", "x")}


def names(name):
    return [a.name for a in getattr(torch.ops.moe, name).default._schema.arguments]


def rounded(call, which):
    """The call with every second floating tensor in 16 bits, beginning with the first or second."""
    call, count = list(call), which
    for n, x in enumerate(call):
        if isinstance(x, torch.Tensor):
            call[n] = x.detach()
            if x.is_floating_point() and x.dim():
                call[n] = call[n].to(NARROW if count % 2 else torch.float32)
                count += 1
    return call


def cast_by_hand(name, call):
    call, places = list(call), dict(zip(names(name), range(len(call))))
    rules = [(CAST, lambda _: NARROW), (SCORES, lambda _: torch.float32),
             (WIDEST, lambda given: max((x.dtype for x in given), key=lambda d: d.itemsize))]
    for rule, dtype in rules:
        where = [places[n] for n in rule.get(name, ()) if call[places[n]] is not None]
        given = [call[n] for n in where]
        for n in where:
            call[n] = call[n].to(dtype(given))
    return call


@pytest.mark.parametrize("name, which", [
    *((name, 0) for name in FORWARD_CALLS), *((name, 1) for name in CAST | WIDEST),
])
def test_arguments_are_cast_as_the_rule_says(name, which):
    call = rounded(FORWARD_CALLS[name], which)
    wanted = run(name, cast_by_hand(name, call))
    with torch.autocast("cpu", NARROW):
        found = run(name, call)
        with torch.autocast("cpu", enabled=False):
            again = run(name, cast_by_hand(name, call))
    for a, b, c in zip(found, wanted, again, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(c, b, rtol=0, atol=0, equal_nan=True)


def test_other_devices_and_float64_are_not_cast():
    rows, w, offsets = normal(6, 4), normal(3, 5, 4), torch.tensor([0, 2, 2, 6])
    with torch.autocast("cpu", NARROW):
        y = torch.ops.moe.grouped_linear(rows.double(), w.double(), None, offsets)
        assert y.dtype == torch.float64
        meta = torch.ops.moe.grouped_linear(*(x.to("meta") for x in (rows, w)), None,
                                            offsets.to("meta"))
        assert meta.dtype == torch.float32
    with torch.autocast("cuda", NARROW, enabled=torch.cuda.is_available()):
        assert torch.ops.moe.grouped_linear(rows, w, None, offsets).dtype == torch.float32


def test_a_plain_call_before_autocast_changes_nothing():
    h, weight = normal(6, 4), normal(3, 4)
    wanted = moe_mlir.router_logits(h.to(NARROW), weight.to(NARROW))
    plain = moe_mlir.router_logits(h, weight)
    with torch.autocast("cpu", NARROW):
        assert torch.equal(moe_mlir.router_logits(h, weight), wanted)
    assert torch.equal(moe_mlir.router_logits(h, weight), plain)


def layer():
    torch.manual_seed(0)
    return nn.MoELayer(nn.SMoE(8, 4, 2), 16, shared=1)


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_trains_under_autocast(dtype):
    """Gradients as of the same layer in plain torch under autocast, up to the rounding of 16 bits."""
    model, plain, h = layer(), layer(), normal(64, 8)
    plain.router.impl = "torch"
    found = []
    for each in (model, plain):
        with torch.autocast("cpu", dtype):
            y, routing = each(h)
            assert y.dtype == dtype and routing.gates.dtype == torch.float32
        found.append((y, routing.indices, gradients(each, y.float().square().mean())))
    (y, chosen, grads), (wanted, again, others) = found
    # Logits of plain torch are rounded: near ties may be decided otherwise.
    same = (chosen == again).all(-1)
    assert same.float().mean() > 0.9
    torch.testing.assert_close(y[same], wanted[same], rtol=0.05, atol=0.02)
    for a, b in zip(grads, others, strict=True):
        assert a.dtype == torch.float32 and (a - b).norm() <= 0.2 * b.norm()


def test_gradients_inside_and_outside_of_autocast_are_the_same():
    """A backward runs as its forward did, whatever surrounds it."""
    model, h = layer(), normal(16, 8)

    def loss():
        with torch.autocast("cpu", NARROW):
            return model(h)[0].float().square().mean()

    outside = gradients(model, loss())
    with torch.autocast("cpu", NARROW):
        inside = gradients(model, loss())
    for name, a, b in zip(dict(model.named_parameters()), outside, inside, strict=True):
        if "shared" not in name:  # torch's own products
            torch.testing.assert_close(a, b, rtol=0, atol=0, msg=name)


def test_transforms_and_autocast_together():
    model, h = layer(), normal(5, 8)
    parameters = dict(model.named_parameters())

    def loss(parameters):
        with torch.autocast("cpu", NARROW):
            y, _ = torch.func.functional_call(model, parameters, (h,))
        return y.float().square().mean()

    found = torch.func.grad(loss)(parameters)
    wanted = torch.autograd.grad(loss(parameters), list(parameters.values()))
    for (name, a), b in zip(found.items(), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7, msg=name)


def test_a_scaler_unscales_what_it_scaled():
    model, h = layer(), normal(64, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = (model(h)[0].float() - h).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]


def test_compiled_layers_are_cast_too():
    torch._dynamo.reset()
    model, h = layer(), normal(16, 8)
    compiled = torch.compile(lambda h: model(h)[0], backend="aot_eager", fullgraph=True)
    results = []
    for call in (compiled, lambda h: model(h)[0]):
        with torch.autocast("cpu", NARROW):
            y = call(h)
        results.append((y, *gradients(model, y.float().square().mean())))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-4)


def test_every_rule_is_of_an_op():
    for rule in (CAST, SCORES, WIDEST):
        for name, arguments in rule.items():
            assert name in ALL_CALLS and set(arguments) <= set(names(name))
