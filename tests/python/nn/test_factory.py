"""`device=` and `dtype=` of modules, and what fills one that was made without memory."""

import inspect

import pytest
import torch
from methods import METHODS, D, E, K, normal

from moe_mlir import nn

H = normal(2, 9, D)
PUBLIC = [getattr(nn, name) for name in nn.__all__ if inspect.isclass(getattr(nn, name))]
MODULES = [cls for cls in PUBLIC if issubclass(cls, torch.nn.Module)]


def make(name, **factory):
    """A router; its base, if any, is made in the same way."""
    cls, options, _ = METHODS[name]
    torch.manual_seed(0)
    with_base = callable(options)
    options = options("torch") if with_base else dict(options)
    if with_base and factory:
        options["base"].to(factory["device"], factory.get("dtype"))
    return cls(D, E, options.pop("k", 1 if cls is nn.Switch else K), impl="torch",
               **options, **factory)


def tensors(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def forms(module):
    return {name: (t.dtype, t.device.type, t.shape) for name, t in tensors(module).items()}


@pytest.mark.parametrize("cls", MODULES, ids=lambda cls: cls.__name__)
def test_a_module_names_device_and_dtype_as_torch_does(cls):
    parameters = inspect.signature(cls).parameters
    for name in ("device", "dtype"):
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", METHODS)
def test_a_dtype_is_what_a_later_cast_gives(name, dtype):
    assert forms(make(name, device="cpu", dtype=dtype)) == forms(make(name).to(dtype))


@pytest.mark.parametrize("name", METHODS)
def test_a_device_is_that_of_all_parameters_and_buffers(name):
    router = make(name, device="meta")
    assert {t.device.type for t in tensors(router).values()} <= {"meta"}
    layer = nn.MoELayer(router, 6, shared=1, device="meta", dtype=torch.bfloat16)
    assert {t.device.type for t in tensors(layer).values()} == {"meta"}
    assert {w.dtype for w in (layer.w_in, layer.w_out, layer.shared_in, layer.shared_out)} == {
        torch.bfloat16}


@pytest.mark.parametrize("name", METHODS)
def test_a_module_without_memory_is_filled_by_reset_parameters(name):
    router = make(name, device="meta").to_empty(device="cpu")
    for tensor in tensors(router).values():
        tensor.detach().fill_(7)
    torch.manual_seed(0)
    # A base first, as it is made first.
    for module in reversed(list(router.modules())):
        module.reset_parameters()
    expected = tensors(make(name))
    for path, tensor in tensors(router).items():
        torch.testing.assert_close(tensor, expected[path], msg=path, rtol=0, atol=0)


def test_a_layer_is_filled_by_reset_parameters():
    layer = nn.MoELayer(nn.SMoE(D, E, K), 6, shared=1, device="meta").to_empty(device="cpu")
    torch.manual_seed(3)
    layer.reset_parameters()
    layer.router.reset_parameters()
    torch.manual_seed(3)
    expected = nn.MoELayer(layer.router, 6, shared=1)
    assert torch.equal(layer.w_in, expected.w_in)
    assert torch.equal(layer.shared_out, expected.shared_out)
    assert bool(layer(H)[0].isfinite().all())


def test_a_reset_ends_what_was_learnt():
    router = nn.TwoStageStableMoE(D, E, vocabulary=20)
    router.freeze()
    router.reset_parameters()
    assert router.stage == 1 and router.token_embedding.requires_grad
    dropout = nn.SMoEDropout(D, E, K, k_max=E, total_steps=10)
    dropout.set_step(10)
    dropout.reset_parameters()
    assert dropout.k == K and int(dropout.step) == 0


def test_initialisation_can_be_skipped():
    layer = torch.nn.utils.skip_init(nn.MoELayer, nn.SMoE(D, E, K), 6, dtype=torch.float64)
    assert layer.w_in.dtype == torch.float64 and layer.w_in.device.type == "cpu"
    assert torch.nn.utils.skip_init(nn.XMoE, D, E, K, learn_tau=True).tau.shape == ()


@pytest.mark.parametrize("make_one", [
    lambda dtype: nn.SMoE(D, E, K, dtype=dtype),
    lambda dtype: nn.MoELayer(nn.SMoE(D, E, K), 6, dtype=dtype),
])
def test_a_dtype_that_is_not_floating_is_refused(make_one):
    with pytest.raises(TypeError, match="expected 'dtype' to be a floating-point type or None, "
                                        "found torch.int64"):
        make_one(torch.int64)
