"""Hooks on a base router alone: what offloads, shards or computes its weights is run by a method, too."""

import copy

import accelerate
import pytest
import torch
import torch.distributed as dist
from methods import D, E, K, normal
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import prune

from moe_mlir import metrics, nn

CASES = {
    "similarity_smoe": lambda: nn.SimilaritySMoE(D, E, K, causal=True, base=nn.SMoE(D, E, K)),
    "symphony_over_two": lambda: nn.SymphonySMoE(
        D, E, K, init="uniform", base=nn.SimilaritySMoE(D, E, K, causal=True, base=nn.XMoE(D, E, K))
    ),
    "top_p_deepseek": lambda: nn.DynamicTopP(
        D, E, E, theta=0.1, base=nn.DeepSeekV3Router(D, E, E, n_group=4, topk_group=4)
    ),
}


def same(found, expected):
    assert torch.equal(found.indices, expected.indices)
    torch.testing.assert_close(found.gates, expected.gates)


@pytest.fixture(params=CASES)
def router(request):
    torch.manual_seed(0)
    return CASES[request.param]().eval()


def test_an_offloaded_base_brings_its_weights(router):
    h = normal(2, 9, D)
    expected = router(h)
    accelerate.cpu_offload(router, execution_device="cpu")
    base = router.base if getattr(router.base, "base", None) is None else router.base.base
    assert all(p.is_meta for p in base.parameters())
    with torch.no_grad():
        same(router(h), expected)
    assert all(p.is_meta for p in base.parameters())


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    store = tmp_path_factory.mktemp("ranks") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_base_that_is_sharded_alone_trains(router, one_rank):
    h, plain = normal(2, 9, D), copy.deepcopy(router)
    fully_shard(router.base, mesh=one_rank)
    found, expected = router(h), plain(h)
    same(found, expected)
    for routing in (found, expected):
        routing.gates.square().sum().backward()
    for (name, a), b in zip(router.named_parameters(), plain.parameters(), strict=True):
        grad = a.grad.full_tensor() if hasattr(a.grad, "full_tensor") else a.grad
        torch.testing.assert_close(grad, b.grad, msg=name)


def test_a_weight_that_a_hook_computes_follows_its_parameters(router):
    base = router.base if hasattr(router.base, "weight") else router.base.base
    name = "weight" if hasattr(base, "weight") else "emb"
    prune.identity(base, name)
    with torch.no_grad():
        weight = getattr(base, name + "_orig")
        weight.copy_(weight.flip(0))
    h = normal(2, 9, D)
    found = router(h)
    prune.remove(base, name)
    same(found, router(h))


def test_a_hook_may_change_the_scores(router):
    def reversed_scores(base, args, routing):
        routing.probs, routing.logits = routing.probs.flip(-1), routing.logits.flip(-1)
        return routing

    h = normal(2, 9, D)
    before = router(h)
    handle = router.base.register_forward_hook(reversed_scores)
    assert not torch.equal(router(h).logits, before.logits)
    handle.remove()
    same(router(h), before)


def test_a_monitor_sees_choices_alone(router):
    monitor = metrics.RoutingMonitor(router)
    router(normal(2, 9, D))
    monitor.end_window()
    assert len(monitor.history()["load"]) == 1


def test_an_offloaded_bias_of_the_choice_is_an_error(router):
    h = normal(2, 9, D)
    expected = router(h)
    accelerate.cpu_offload(router, execution_device="cpu", offload_buffers=True)
    with torch.no_grad():
        if router.choice_bias is None:
            same(router(h), expected)
        else:
            with pytest.raises(ValueError, match="expected 'bias' on cpu as 'scores', found meta"):
                router(h)
