"""moe_mlir.compile beside a model that changes: weights, buffers, inputs, modes, calls."""

import copy
import pickle
import threading

import pytest
import torch

import moe_mlir


class Net(torch.nn.Module):
    """Tied layers, a buffer, a plain tensor."""

    def __init__(self, tied=True):
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.register_buffer("shift", torch.randn(6))
        self.scale = torch.tensor(2.0)
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x).tanh()) * self.scale + self.shift


class Counts(torch.nn.Module):
    """Updates its input and a buffer in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x, y):
        x.mul_(2.0)
        self.total.add_(x.sum(0))
        return x + y


def replace_data(net):
    net.first.weight.data = torch.randn(6, 6)


def load_by_assignment(net):
    net.load_state_dict(Net().state_dict(), assign=True)


def load_into(net):
    net.load_state_dict(Net().state_dict())


def replace_buffer(net):
    net.shift = torch.randn(6)


def replace_plain_tensor(net):
    net.scale = torch.tensor(5.0)


def replace_parameter(net):
    net.first.weight = torch.nn.Parameter(torch.randn(6, 6))  # no longer tied


def replace_layer(net):
    net.second = torch.nn.Linear(6, 6)


def step(net):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(torch.randn(3, 6)).sum().backward()
    optimizer.step()


def to_double_and_back(net):
    net.double()
    net.first.weight.data.mul_(3.0)
    net.float()


@pytest.fixture(scope="module")
def compiled_net():
    """One compilation; each test changes a copy of it."""
    return moe_mlir.compile(Net().eval(), (torch.randn(2, 6),))


@pytest.mark.parametrize("change", [
    replace_data, load_by_assignment, load_into, replace_buffer, replace_plain_tensor,
    replace_parameter, replace_layer, step, to_double_and_back])
def test_changes_of_weights_are_seen(compiled_net, change):
    compiled, x = copy.deepcopy(compiled_net), torch.randn(5, 6)
    before = compiled(x)
    torch.testing.assert_close(before, compiled.model(x))
    change(compiled.model)
    torch.testing.assert_close(compiled(x), compiled.model(x), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(compiled(x), before)
    torch.testing.assert_close(compiled_net(x), before)  # the original's weights are its own


def test_weights_that_are_tied_later_are_one():
    net, x = Net(tied=False), torch.randn(5, 6)
    compiled = moe_mlir.compile(net, (x,))
    net.second.weight = net.first.weight
    torch.testing.assert_close(compiled(x), net(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_another_dtype_of_the_weights_is_compiled_anew(compiled_net, dtype):
    compiled, x = copy.deepcopy(compiled_net), torch.randn(5, 6)
    assert compiled.to(dtype) is compiled
    found, expected = compiled(x.to(dtype)), compiled.model(x.to(dtype))
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=3e-3, atol=3e-3)
    with pytest.raises(TypeError, match=f"input 'x': expected {dtype}, found torch.float32"):
        compiled(x)


def test_weights_without_memory_are_refused(compiled_net):
    compiled = copy.deepcopy(compiled_net)
    assert compiled.to(device="meta") is compiled
    for device in ("cpu", "meta"):
        with pytest.raises((TypeError, ValueError), match="expected (weights in memory|a CPU tensor), "
                                                          "found .*meta"):
            compiled(torch.randn(5, 6, device=device))


def test_an_exported_program_refuses_another_dtype():
    net, x = Net(), torch.randn(5, 6)
    compiled = moe_mlir.compile(moe_mlir.export(net, (x,)))
    net.half()
    with pytest.raises(TypeError, match=r"weight 'first.weight': expected torch.float32 \[6, 6\], "
                                        r"as at export, found torch.float16 \[6, 6\]; export the"):
        compiled(x)


def test_a_weight_that_is_gone_is_an_error(compiled_net):
    compiled = copy.deepcopy(compiled_net)
    compiled.model.shift = None
    with pytest.raises((ValueError, TypeError)):
        compiled(torch.randn(5, 6))


def test_updates_of_strided_inputs_and_of_buffers_arrive():
    model, y = Counts(), torch.ones(3, 4)
    eager = copy.deepcopy(model)
    compiled = moe_mlir.compile(model, (torch.randn(3, 4), y))
    for x in (torch.randn(3, 4), torch.randn(4, 3).t(), torch.randn(3, 8)[:, ::2],
              torch.randn(6, 4)[::2]):
        wanted = x.clone()
        torch.testing.assert_close(compiled(x, y), eager(wanted, y))
        torch.testing.assert_close(x, wanted)
        torch.testing.assert_close(model.total, eager.total)
    model.total = torch.zeros(4)  # another buffer under its name
    compiled(torch.ones(3, 4), y)
    torch.testing.assert_close(model.total, torch.full((4,), 6.0))


class Exchanges(torch.nn.Module):
    """Updates that read what other updates write."""

    def forward(self, x, y, rows, places):
        old = x.clone()
        x.copy_(y)
        y.copy_(old)
        total = x.sum() + 2 * y.sum()
        y[1:] = y[:-1].clone()
        return total, x.index_copy_(0, places, rows), old


def test_updates_read_what_was_there_before():
    def inputs():
        return (torch.arange(12.).reshape(4, 3), -torch.arange(12.).reshape(4, 3),
                torch.full((2, 3), 7.0), torch.tensor([3, 1]))
    compiled = moe_mlir.compile(Exchanges(), inputs())
    ours, theirs = inputs(), inputs()
    for found, expected in zip(compiled(*ours), Exchanges()(*theirs)):
        torch.testing.assert_close(found, expected)
    for found, expected in zip(ours, theirs):
        torch.testing.assert_close(found, expected)


def test_inputs_with_other_strides_are_updated():
    compiled = moe_mlir.compile(Counts(), (torch.randn(3, 4), torch.ones(3, 4)))
    x = torch.randn(4, 3).t()
    wanted = 2 * x
    compiled(x, torch.ones(3, 4))
    torch.testing.assert_close(x, wanted)


@pytest.mark.parametrize("make", [lambda x: x, lambda x: x[:], lambda x: x.t().t()])
def test_an_input_that_is_updated_under_two_names_is_refused(make):
    compiled = moe_mlir.compile(Counts(), (torch.randn(3, 4), torch.ones(3, 4)))
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match="expected 'x', which the model updates in place, in "
                                         "memory of its own, found it shared with 'y'"):
        compiled(x, make(x))


def test_the_mode_of_the_model_is_followed():
    class Norm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            if self.training:
                self.mean.lerp_(x.mean(0), 0.1)
                return x - x.mean(0)
            return x - self.mean
    model, x = Norm().eval(), torch.randn(5, 4)
    eager = copy.deepcopy(model)
    compiled = moe_mlir.compile(model, (x,))
    for training in (False, True, True, False):
        assert compiled.train(training) is compiled
        eager.train(training)
        torch.testing.assert_close(compiled(x), eager(x))
        assert compiled.state_dict().keys() == eager.state_dict().keys()
        for name, tensor in eager.state_dict().items():
            torch.testing.assert_close(compiled.state_dict()[name], tensor)


# ---- the call -----------------------------------------------------------------


class Choosing(torch.nn.Module):
    def forward(self, x, gate=None, *more, scale=1.0, **named):
        y = x * scale
        for other in (gate, *more, *(named[n] for n in sorted(named))):
            y = y if other is None else y + other
        return y


def test_calls_may_have_other_inputs_than_the_example():
    model, x = Choosing(), torch.randn(2, 4)
    compiled = moe_mlir.compile(model, (x,), kwargs=dict(scale=2.0))
    for args, kwargs in [((x,), {}), ((), dict(x=x)), ((x,), dict(gate=x)), ((x, x), {}),
                         ((x, None), {}), ((x, x, x), {}), ((x,), dict(b=x, a=2 * x)),
                         ((x,), dict(a=2 * x, b=x)), ((x,), dict(scale=2.0))]:
        wanted = model(*args, **{"scale": 2.0, **kwargs})
        torch.testing.assert_close(compiled(*args, **kwargs), wanted)
    assert len(compiled._programs) == 4
    g = torch.randn(2, 4)
    torch.testing.assert_close(compiled(gate=g, x=x), model(x, g, scale=2.0))
    for scale in (1.0, 3.0, True, None):
        with pytest.raises(ValueError, match=f"'scale': expected 2.0, the value at export, found {scale}"):
            compiled(x, scale=scale)


@pytest.mark.parametrize("args, kwargs", [
    ((None,), {}), ((), {"gate": None}), ((None,), {"scale": 1.0}), ((None, 3 * torch.ones(4)), {})])
def test_defaults_may_be_given_to_a_model_that_changed(args, kwargs):
    model, x = Choosing(), torch.randn(2, 4)
    compiled = moe_mlir.compile(model, (x,))
    model.changed = True  # the next call is traced again
    for _ in range(2):
        torch.testing.assert_close(compiled(x, *args, **kwargs), model(x, *args, **kwargs))
    assert len(compiled._programs) == 2


def test_keywords_of_the_example_may_be_in_any_order():
    x, gate = torch.randn(2, 4), torch.randn(2, 4)
    compiled = moe_mlir.compile(Scaled(), (), kwargs=dict(gate=gate, x=x))
    for call in (lambda f: f(x, gate), lambda f: f(gate=gate, x=x), lambda f: f(x=x, gate=gate)):
        torch.testing.assert_close(call(compiled), call(Scaled()))
    assert len(compiled._programs) == 1


def test_an_example_with_one_tensor_twice_serves_two():
    x, gate = torch.randn(2, 4), torch.randn(2, 4)
    for one, other in ((x, x), (x, x[:]), (x, x.t()[:2, :2].repeat(1, 2))):
        compiled = moe_mlir.compile(Scaled(), (one, other))
        torch.testing.assert_close(compiled(x, gate), Scaled()(x, gate))
    layer = torch.nn.Linear(4, 4)
    compiled = moe_mlir.compile(layer, (layer.weight,))
    torch.testing.assert_close(compiled(x), layer(x))


class Scaled(torch.nn.Module):
    def forward(self, x, gate):
        return x * gate.exp()


class BranchesByData(torch.nn.Module):
    """Rows of another number than the example's take a way that no program can follow."""

    def forward(self, x):
        if x.shape[0] == 3 or x.sum() > 0:
            return x + 1
        return x


def test_a_call_that_cannot_be_traced_has_its_own_reason():
    compiled = moe_mlir.compile(BranchesByData(), (torch.randn(3, 4),))
    with pytest.raises(ValueError, match="control flow that depends on data"):
        compiled(torch.randn(5, 4))


def test_many_programs_drop_the_oldest():
    model, x = Choosing(), torch.randn(2, 4)
    compiled = moe_mlir.compile(model, (x,))
    with pytest.warns(UserWarning, match="Choosing was called in more than 8 ways"):
        for i in range(9):
            torch.testing.assert_close(compiled(x, scale=float(i + 2)), x * float(i + 2))
    torch.testing.assert_close(compiled(x), x)
    assert len(compiled._programs) == 8


def test_what_an_exported_program_fixed_is_checked():
    class Scaled(torch.nn.Module):
        def forward(self, factor, x):
            return x * factor
    x = torch.randn(2, 4)
    compiled = moe_mlir.compile(torch.export.export(Scaled(), (2.0, x)))
    torch.testing.assert_close(compiled(2.0, x), 2 * x)
    with pytest.raises(ValueError, match="expected 2.0, the value at export, found 3.0"):
        compiled(3.0, x)


def test_views_with_a_pending_negation_are_read_right():
    compiled = moe_mlir.compile(torch.nn.ReLU(), (torch.randn(2, 4),))
    x = torch.randn(3, 4, 2).view(3, 4, 2)
    negated = torch.view_as_complex(x).conj().imag
    assert negated.is_neg()
    torch.testing.assert_close(compiled(negated), negated.relu())


def test_tensors_without_memory_are_refused(compiled_net):
    from torch._subclasses import FakeTensorMode
    x = torch.randn(3, 6)
    with pytest.raises(TypeError, match="expected a tensor with memory of its own"):
        torch.func.vmap(compiled_net)(x[None])
    with FakeTensorMode() as mode, pytest.raises(TypeError, match="with memory of its own"):
        compiled_net(mode.from_tensor(x))
    with pytest.raises(TypeError, match="'x': expected a dense tensor, found torch.sparse_coo"):
        compiled_net(x.to_sparse())


# ---- copies, processes, threads -------------------------------------------------


def test_pickled_models_run_and_own_their_weights(compiled_net):
    x = torch.randn(4, 6)
    loaded = pickle.loads(pickle.dumps(compiled_net))
    assert torch.equal(loaded(x), compiled_net(x))
    loaded.model.shift += 1
    torch.testing.assert_close(loaded(x), compiled_net(x) + 1)


def test_the_model_is_reached_through_the_callable(compiled_net):
    model = compiled_net.model
    assert [n for n, _ in compiled_net.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert compiled_net.scale is model.scale and not compiled_net.training
    with pytest.raises(AttributeError, match="a compiled model has no 'forward', which would run "
                                             "Net itself, not compiled; use .model.forward"):
        _ = compiled_net.forward
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = compiled_net.nothing


def test_threads_share_programs():
    model = Choosing()
    compiled = moe_mlir.compile(model, (torch.randn(2, 4),))
    wrong = []

    def call(seed):
        generator = torch.Generator().manual_seed(seed)
        for rows in range(1, 6):
            x = torch.randn(rows, 4, generator=generator)
            inputs = (x, x) if seed % 2 else (x,)
            if not torch.equal(compiled(*inputs), model(*inputs)):
                wrong.append((seed, rows))
    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(compiled._programs) == 2


def test_inference_mode():
    model = Counts()
    compiled = moe_mlir.compile(model, (torch.randn(3, 4), torch.ones(3, 4)))
    with torch.inference_mode():
        x = torch.randn(3, 4)
        wanted = 2 * x
        torch.testing.assert_close(compiled(x, torch.ones(3, 4)), wanted + 1)
        torch.testing.assert_close(model.total, wanted.sum(0))
