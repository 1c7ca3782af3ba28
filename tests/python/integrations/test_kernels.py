"""`kernels.kernelize` with our routers: transformers' own results, bit for bit, and gradients."""

import copy
import doctest
import gc
import types
import weakref

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.laguna import modeling_laguna
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.utils import is_kernels_available

import moe_mlir
import moe_mlir.hf
from moe_mlir.patching import kernel_layers

kernels = pytest.importorskip(
    "kernels", reason="kernels is not installed; requirements.txt pins it")

# transformers 5.24 names its layers for kernels 0.18.2 and newer alone. The name is all that its
# decorator adds to a class.
ROUTERS = {
    "Qwen3.5-MoE": modeling_qwen3_5_moe.Qwen3_5MoeTopKRouter,
    "Laguna": modeling_laguna.LagunaTopKRouter,
    "Mixtral": modeling_mixtral.MixtralTopKRouter,
}


class Config:
    hidden_size, num_experts, num_experts_per_tok = 16, 8, 2
    num_local_experts, moe_router_logit_softcapping, router_jitter_noise = 8, 2.0, 0.0


@pytest.fixture(params=ROUTERS)
def router(request, monkeypatch):
    kind = ROUTERS[request.param]
    for name in ("kernel_layer_name", "kernel_condition"):
        monkeypatch.setattr(kind, name, None, raising=False)
    kernels.replace_kernel_forward_from_hub(kind, "SoftmaxTopKRouter")
    torch.manual_seed(0)
    router = kind(Config())
    for weight in router.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return router


def kernelized(model, mode=kernels.Mode.INFERENCE):
    with kernels.use_kernel_mapping(moe_mlir.hf.kernel_mapping()):
        return kernels.kernelize(model, mode=mode, device="cpu", use_fallback=False)


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


def test_results_and_ops(router):
    h = torch.randn(10, 16)
    with torch.no_grad():
        expected = router(h)
        with Ops() as ops:
            results = kernelized(router.eval())(h)
    assert any(name.startswith("moe.") for name in ops.names), ops.names
    assert "aten.topk.default" not in ops.names
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-6, atol=1e-7)


def test_gradients(router):
    h, eager = torch.randn(10, 16), copy.deepcopy(router)
    for model in (router, eager):
        if model is router:
            kernelized(model.train(), kernels.Mode.TRAINING)
        (model(h)[1] * torch.arange(2.0)).sum().backward()
    torch.testing.assert_close(router.weight.grad, eager.weight.grad)


def test_torch_compile(router):
    h = torch.randn(10, 16)
    with torch.no_grad():
        expected = router(h)
        compiled = torch.compile(kernelized(
            router.eval(), kernels.Mode.INFERENCE | kernels.Mode.TORCH_COMPILE), backend="moe")
        torch.testing.assert_close(compiled(h), expected)


@pytest.mark.skipif(not is_kernels_available(), reason="this version of transformers does not take "
                    "the installed kernels: pip install transformers==5.22.0 (kernels 0.17.2)")
def test_use_kernels(tmp_path):
    """The name is that of transformers' own decorator, and nothing is downloaded."""
    torch.manual_seed(0)
    kind = transformers.models.qwen3_5_moe.Qwen3_5MoeForCausalLM
    config = transformers.models.qwen3_5_moe.Qwen3_5MoeTextConfig(
        vocab_size=97, hidden_size=64, moe_intermediate_size=32, shared_expert_intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=16, num_experts=8, num_experts_per_tok=2,
        layer_types=["linear_attention", "full_attention"])
    kind(config).save_pretrained(tmp_path)
    ids = torch.tensor([[5, 17, 3]])
    with torch.no_grad(), kernels.use_kernel_mapping(moe_mlir.hf.kernel_mapping()):
        expected = kind.from_pretrained(tmp_path).eval()(ids).logits
        model = kind.from_pretrained(tmp_path, use_kernels=True).eval()
        with Ops() as ops:
            logits = model(ids).logits
    assert any(name.startswith("moe.topk_renorm") for name in ops.names), ops.names
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_a_copy_runs_on_its_own_weights(router):
    h = torch.randn(3, 16)
    with torch.no_grad():
        before = kernelized(router)(h)[0]
        copied = kernelized(copy.deepcopy(router))
        router.weight.zero_()
        torch.testing.assert_close(copied(h)[0], before)


def test_memory_is_freed_with_the_module():
    router = modeling_mixtral.MixtralTopKRouter(Config())
    router.forward = types.MethodType(kernel_layers.Router.forward, router)
    router(torch.randn(3, 16))
    alive = weakref.ref(router)
    del router
    gc.collect()
    assert alive() is None


def test_the_example(router):
    names = dict(kernels=kernels, moe_mlir=moe_mlir, model=router)
    with kernels.use_kernel_mapping({}):
        for test in doctest.DocTestFinder().find(moe_mlir.hf.kernel_mapping, "mapping", globs=names):
            assert doctest.DocTestRunner().run(test).failed == 0
    assert router.forward.__func__ is kernel_layers.Router.forward
