"""Router classes of transformers that no family of ours has: raised and equal, or kept and why."""

import pytest
from router_classes import judge, router_classes

CLASSES = {router_class.name: router_class for router_class in router_classes()}
# One of each way to write a router that the families do not show.
SAMPLE = ("Dots1TopkRouter", "Lfm2MoeTopKRouter", "LongcatFlashTopkRouter", "Mistral4TopkRouter",
          "HYV3TopKRouter", "NllbMoeTop2Router")


def check(name):
    verdict = judge(CLASSES[name])
    assert verdict.state != "differs", verdict.why
    assert verdict.state != "kept" or verdict.why
    return verdict


@pytest.mark.parametrize("name", SAMPLE)
def test_a_router_class_is_equal_or_kept_with_a_reason(name):
    assert check(name).state in ("equal", "kept")


@pytest.mark.long
def test_every_router_class():
    states = [check(name).state for name in CLASSES]
    assert states.count("equal") >= len(states) // 2
