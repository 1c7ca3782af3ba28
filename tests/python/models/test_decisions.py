"""Every target chooses the same experts: a small run of `python -m moe_mlir_bench.models decisions`."""

import pytest
import torch
from seeds import run_seed

from moe_mlir.reference.selection import rank_experts
from moe_mlir_bench.models.decision_routers import ROUTERS, _move, draw_scores, eager_choice
from moe_mlir_bench.models.decisions import Tally, decide, main

BY_NAME = {router.name: router for router in ROUTERS}


def test_no_target_chooses_other_experts_from_equal_scores():
    routers = [BY_NAME[name] for name in ("Qwen3-MoE", "DeepSeek-V3", "given scores, bias")]
    tallies = decide(30_000, ["native", "x86-64-v3", "simulator"], routers=routers, sample=300,
                     seed=run_seed() % 1000)
    for (router, target), tally in tallies.items():
        assert tally.decisions >= (100 if target == "simulator" else 20_000)
        assert tally.different == 0, (router, target)
        # The code of every CPU level computes a sigmoid to the same bits.
        assert target == "simulator" or tally.unlike == 0, (router, target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_eager_decides_as_the_specification_orders(dtype):
    router = BY_NAME["given scores"]
    x = draw_scores(router, 64, dtype, torch.Generator().manual_seed(run_seed()))
    assert torch.equal(eager_choice(router, x), rank_experts(x.float())[:, : router.k])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_near_ties_are_numbers(dtype):
    x = torch.tensor([0.0, -0.0, 1.0, torch.inf], dtype=dtype)
    below, above = _move(x, torch.tensor(-1)), _move(x, torch.tensor(1))
    assert not (below.isnan() | above.isnan()).any()
    assert below[2] < 1 < above[2]


@pytest.mark.parametrize("name", ["Qwen3-MoE", "DeepSeek-V3", "DeepSeek-V2", "Kimi K2"])
def test_a_wrong_choice_is_counted(name):
    router = BY_NAME[name]
    x = draw_scores(router, 64, torch.float32, torch.Generator().manual_seed(0), plain=True)
    expected = eager_choice(router, x)
    worst = (x + (router.make_bias() if router.bias else 0)).argmin(-1)
    found = expected.clone()
    found[7, -1] = worst[7]
    found[9] = expected[9].flip(0)
    tally = Tally()
    tally.add(router, x, expected, found, expected)
    assert (tally.decisions, tally.different, tally.unlike) == (64, 2, 2)


def test_of_equal_experts_the_first_is_right_and_the_second_is_not():
    router = BY_NAME["DeepSeek-V3"]
    x = torch.full((1, router.experts), -1.0)
    expected = eager_choice(router, x)
    bias = router.make_bias()
    first = expected[0, 0]
    twin = next(e for e in range(int(first) + 1, router.experts)
                if bias[e] == bias[first] and e // 32 == first // 32)
    found = expected.clone()
    found[0, 0] = twin
    tally = Tally()
    tally.add(router, x, expected, found, expected)
    assert tally.different == 1


def test_unknown_targets_are_named():
    with pytest.raises(SystemExit):
        main(["--targets", "native,z80"])
