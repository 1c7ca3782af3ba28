"""What torch does around an op: torch.func, tracing, the profiler. Every op, one rule each."""

import copy
import pickle

import pytest
import torch
from op_calls import ALL_CALLS, FORWARD_CALLS, normal, run
from torch.autograd import forward_ad

import moe_mlir
from moe_mlir import nn

DIFFERENTIABLE = [
    name for name, call in FORWARD_CALLS.items() if any(x.requires_grad for x in run(name, call))
]


def test_every_op_has_a_call():
    names = torch._C._dispatch_get_all_op_names()
    # Marks in traced graphs, which exist once a model was imported and are not for callers.
    marks = {"layer_begin", "layer_end", "folded_layer", "forward_substitution"}
    ops = {n.removeprefix("moe::") for n in names if n.startswith("moe::")}
    assert ops - marks == set(ALL_CALLS)


def places(call, wanted):
    return [n for n, x in enumerate(call) if isinstance(x, torch.Tensor) and wanted(x)]


def with_tensors(call, where, tensors):
    call = list(call)
    for n, x in zip(where, tensors, strict=True):
        call[n] = x
    return call


def detached(call):
    return [x.detach() if isinstance(x, torch.Tensor) else x for x in call]


def assert_equal(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


# ------------------------------------------------------------------- gradients


def leaves_of(name):
    call = FORWARD_CALLS[name]
    where = places(call, lambda x: x.requires_grad)
    outputs = [x.requires_grad for x in run(name, call)]

    def function(*leaves):
        results = run(name, with_tensors(detached(call), where, leaves))
        return tuple(x for x, kept in zip(results, outputs, strict=True) if kept)

    leaves = [call[n].detach() for n in where]
    grads = [normal(*x.shape, seed=6) for x in function(*leaves)]

    def loss(*leaves):
        return sum((x * g).sum() for x, g in zip(function(*leaves), grads, strict=True))

    return function, loss, leaves


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_vjp_is_the_gradient(name):
    function, _, leaves = leaves_of(name)
    outputs, pull = torch.func.vjp(function, *leaves)
    grads = tuple(normal(*x.shape, seed=5) for x in outputs)
    again = [x.clone().requires_grad_() for x in leaves]
    wanted = torch.autograd.grad(
        function(*again), again, grads, allow_unused=True, materialize_grads=True
    )
    assert_equal(outputs, function(*leaves))
    assert_equal(pull(grads), wanted)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_batch_of_gradients_is_the_gradients_of_a_batch(name):
    _, loss, leaves = leaves_of(name)
    gradient = torch.func.grad(loss, argnums=tuple(range(len(leaves))))
    batch = [torch.stack([x, 0.5 * x, x]) for x in leaves]
    wanted = [gradient(*(x[n] for x in batch)) for n in range(3)]
    found = torch.func.vmap(gradient)(*batch)
    for a, b in zip(found, map(torch.stack, zip(*wanted, strict=True)), strict=True):
        # Products of torch that are summed in another order.
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ALL_CALLS)
def test_forward_mode_is_refused(name):
    call = detached(ALL_CALLS[name])
    where = places(call, torch.is_floating_point)
    if not where:
        return
    leaves = [call[n] for n in where]
    with pytest.raises(NotImplementedError, match=f"{name}: expected no tangents, found forward"):
        torch.func.jvp(lambda *x: run(name, with_tensors(call, where, x)), (*leaves,), (*leaves,))
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, x) for x in leaves]
        with pytest.raises(NotImplementedError, match=f"{name}: expected no tangents, found forw"):
            run(name, with_tensors(call, where, duals))
        # What has no tangent is a constant.
        run(name, call)


def test_public_functions_refuse_forward_mode_after_a_plain_call():
    z = normal(6, 8)
    for function in (moe_mlir.z_loss, lambda z: moe_mlir.topk_renorm(z, 2)[0]):
        function(z)
        with pytest.raises(NotImplementedError, match="use reverse mode"):
            torch.func.jvp(function, (z,), (z,))
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="reverse mode"):
            function(forward_ad.make_dual(z, z))
    with pytest.raises(NotImplementedError, match="use reverse mode"):
        torch.func.jacfwd(moe_mlir.router_logits)(z, normal(3, 8))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_second_gradients_are_right_or_refused(name):
    """Against the difference of two first gradients, along one direction."""
    _, loss, leaves = leaves_of(name)
    steps = [normal(*x.shape, seed=7) for x in leaves]

    def first(*leaves):
        grads = torch.autograd.grad(loss(*leaves), leaves, create_graph=True, allow_unused=True,
                                    materialize_grads=True)
        return sum((g * s).sum() for g, s in zip(grads, steps, strict=True))

    def moved(step):
        return [(x + step * s).requires_grad_() for x, s in zip(leaves, steps, strict=True)]

    at = moved(0.0)
    try:
        slope = first(*at)
        second = torch.autograd.grad(slope, at, allow_unused=True, materialize_grads=True) \
            if slope.requires_grad else [torch.zeros_like(x) for x in at]
    except NotImplementedError as error:
        assert "expected gradients of first order" in str(error)
        return
    found = sum((g * s).sum() for g, s in zip(second, steps, strict=True))
    width = 2e-4
    wanted = (first(*moved(width)) - first(*moved(-width))).detach() / (2 * width)
    # Differences of float32 gradients: 1e-7 of their size over the width.
    scale = max(float(first(*at).detach().abs()), 1.0)
    assert abs(float(found - wanted)) <= 2e-2 * max(abs(float(wanted)), scale), (found, wanted)


# ------------------------------------------------------------------------ vmap


@pytest.mark.parametrize("name", ALL_CALLS)
def test_vmap_is_a_loop(name):
    call = detached(ALL_CALLS[name])
    tensors = places(call, lambda x: True)

    def batched(where, dim):
        # Any order of numbers is a batch that is not the same thrice.
        stacks = [torch.stack([call[n], call[n].flip(0) if call[n].dim() else call[n], call[n]], dim)
                  for n in where]
        one = lambda *x: run(name, with_tensors(call, where, x))  # noqa: E731
        found = torch.func.vmap(one, in_dims=dim)(*stacks)
        wanted = [one(*(x.select(dim, n) for x in stacks)) for n in range(3)]
        assert_equal(found, map(torch.stack, zip(*wanted, strict=True)))

    batched(tensors, 0)
    for n in tensors:
        batched([n], -1)


def test_vmap_over_rows_is_one_call(monkeypatch):
    from moe_mlir.ops._kernel import Kernel

    calls, run_kernel = [], Kernel.__call__
    monkeypatch.setattr(Kernel, "__call__", lambda *a, **options: calls.append(a) or run_kernel(*a, **options))
    z = normal(5, 3, 8)
    mask = torch.tensor([True, False, True])
    found = torch.func.vmap(lambda z: moe_mlir.topk_renorm(z, 2, mask=mask))(z)
    assert len(calls) == 1
    assert_equal(found, moe_mlir.topk_renorm(z, 2, mask=mask.expand(5, 3)))


def test_nested_transforms():
    z = normal(4, 3, 8)
    loss = lambda z: moe_mlir.topk_renorm(z, 2)[0].square().sum()  # noqa: E731
    wanted = torch.func.grad(loss)(z)
    one = torch.func.vmap(torch.func.vmap(torch.func.grad(loss)))(z)
    outside = torch.func.grad(lambda z: torch.func.vmap(loss)(z).sum())(z)
    jacobian = torch.func.jacrev(lambda z: moe_mlir.topk_renorm(z, 2)[0].square().sum(-1))(z[0])
    assert_equal((one, outside), (wanted, wanted))
    assert_equal((jacobian.diagonal(dim1=0, dim2=1).mT,), (wanted[0],))
    leaf = z.clone().requires_grad_()
    torch.func.vmap(loss)(leaf).sum().backward()
    assert_equal((leaf.grad,), (wanted,))


def test_gradients_of_a_layer_for_each_sample():
    torch.manual_seed(0)
    layer = nn.MoELayer(nn.SMoE(8, 4, 2), 16, shared=1)
    parameters, h = dict(layer.named_parameters()), normal(3, 5, 8)

    def loss(parameters, h):
        return torch.func.functional_call(layer, parameters, (h,))[0].square().sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, h)
    for n in range(3):
        wanted = torch.autograd.grad(loss(parameters, h[n]), list(parameters.values()))
        for (key, grads), grad in zip(found.items(), wanted, strict=True):
            torch.testing.assert_close(grads[n], grad, rtol=1e-5, atol=1e-6, msg=key)


# --------------------------------------------------------- tracing, the profiler


@pytest.mark.parametrize("name", ALL_CALLS)
def test_a_traced_op_follows_its_arguments(name):
    call = detached(ALL_CALLS[name])
    where = places(call, lambda x: True)
    tensors = [call[n] for n in where]
    traced = torch.jit.trace(
        lambda *x: run(name, with_tensors(call, where, x)), tensors, check_trace=False
    )
    other = [x.flip(0).contiguous() if x.dim() else x for x in tensors]
    assert_equal(traced(*other), run(name, with_tensors(call, where, other)))


def test_public_functions_are_traced_after_a_plain_call():
    z, other = normal(6, 8), normal(4, 8, seed=1)
    function = lambda z: moe_mlir.topk_renorm(z, 2)  # noqa: E731
    function(z)
    for traced in (torch.jit.trace(function, (z,)), torch.fx.experimental.proxy_tensor.make_fx(
            function, tracing_mode="symbolic")(z)):
        assert_equal(traced(other), function(other))


class Outputs(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, h):
        y, routing = self.layer(h)
        return y, routing.gates, routing.indices


@pytest.mark.parametrize("capacity_factor", [None, 1.0])
@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
def test_a_traced_layer_follows_its_tokens(capacity_factor):
    torch.manual_seed(0)
    layer = Outputs(nn.MoELayer(nn.SMoE(8, 4, 2), 16, shared=1, capacity_factor=capacity_factor))
    traced = torch.jit.trace(layer, (normal(6, 8),))
    for count in (6, 3, 17):
        h = normal(count, 8, seed=count)
        assert_equal(traced(h), layer(h))


def test_the_profiler_sees_a_plain_call():
    z = normal(6, 8)
    moe_mlir.topk_renorm(z, 2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        moe_mlir.topk_renorm(z, 2)
    assert "moe::topk_renorm" in {event.key for event in profile.key_averages()}


class Names(torch.overrides.TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Marked(torch.Tensor):
    """A subclass: results of its ops are of it, too."""


def test_function_modes_and_subclasses_see_the_op():
    z = normal(6, 8)
    wanted = moe_mlir.topk_renorm(z, 2)
    with Names() as names:
        assert_equal(moe_mlir.topk_renorm(z, 2), wanted)
    assert "moe.topk_renorm.default" in names.seen
    gates, _ = moe_mlir.topk_renorm(z.as_subclass(Marked), 2)
    assert type(gates) is Marked and torch.equal(gates.as_subclass(torch.Tensor), wanted[0])


def test_a_lazy_negation_is_seen():
    z = normal(6, 8)
    wanted = moe_mlir.topk_renorm(-z, 2)
    moe_mlir.topk_renorm(z, 2)
    for _ in range(2):
        assert_equal(moe_mlir.topk_renorm(torch._neg_view(z), 2), wanted)


# ------------------------------------------------------------------------ memory


@pytest.mark.parametrize("name", ALL_CALLS)
def test_strides_and_alignment_change_nothing(name):
    call = detached(ALL_CALLS[name])
    where = places(call, lambda x: x.dim() > 0)
    if name.startswith("grouped_linear"):
        # torch's products, whose order of sums follows the strides of the weights.
        where = where[-1:]
    wanted = run(name, call)
    for form in (transposed, behind_one_element, spaced):
        for _ in range(2):
            assert_equal(run(name, with_tensors(call, where, (form(call[n]) for n in where))), wanted)
    same = [call[n][:1].expand(call[n].shape) for n in where]
    assert_equal(run(name, with_tensors(call, where, same)),
                 run(name, with_tensors(call, where, (x.contiguous() for x in same))))


def transposed(x):
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


def behind_one_element(x):
    """At an address that only its own elements are aligned to."""
    y = x.new_empty(x.numel() + 1)[1:].view(x.shape)
    return y.copy_(x)


def spaced(x):
    y = x.new_empty(*x.shape[:-1], 2 * x.shape[-1] + 1)[..., 1::2]
    return y.copy_(x)


@pytest.mark.parametrize("name", ALL_CALLS)
def test_results_are_tensors_like_others(name):
    call = ALL_CALLS[name]
    results = run(name, detached(call))
    assert_equal(copy.deepcopy(results), results)
    assert_equal(pickle.loads(pickle.dumps(results)), results)
    with torch.inference_mode():
        inferred = run(name, detached(call))
        assert all(x.is_inference() for x in inferred)
        assert_equal(inferred, results)
