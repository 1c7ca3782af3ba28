"""Wrong arguments of the ops around a router: the argument, what was expected, what was found."""

import re

import pytest
import torch

import moe_mlir

F, Z = torch.float32, torch.zeros
I = Z(4, 2, dtype=torch.int64)
V, T = ValueError, TypeError

CASES = [
    ("grouped_topk", V, "expected 'k' in [1, 8] (the number of experts), found 9", (Z(4, 8), 9), {}),
    ("grouped_topk", V, "expected 'score' to be one of", (Z(4, 8), 2), dict(score="tanh")),
    (
        "grouped_topk", V, "expected 'n_group' to divide the number of experts (8), found 3",
        (Z(4, 8), 2), dict(n_group=3),
    ),
    (
        "grouped_topk", V, "expected 'topk_group' in [1, 4] ('n_group'), found 5",
        (Z(4, 8), 2), dict(n_group=4, topk_group=5),
    ),
    (
        "grouped_topk", V, "expected 'k' to be at most 2 (the experts of the groups kept), found 3",
        (Z(4, 8), 3), dict(n_group=4, topk_group=1),
    ),
    ("grouped_topk", V, "expected 'group_score' to be one of", (Z(4, 8), 2), dict(group_score="top3")),
    ("grouped_topk", V, "expected 'eps' to be at least 0", (Z(4, 8), 2), dict(eps=-1.0)),
    ("grouped_topk", V, "expected 'bias' to have shape", (Z(4, 8), 2), dict(bias=Z(7))),
    ("grouped_topk", V, "expected 'forced' to have shape", (Z(4, 8), 2), dict(forced=I[:3])),
    ("grouped_topk", T, "expected 'forced' to have dtype int32 or int64", (Z(4, 8), 2), dict(forced=Z(4, 2))),
    ("grouped_topk", T, "expected 'scores' to be a tensor, found list", ([1.0], 1), {}),
    ("threshold_renorm", T, "expected 'theta' to be a number, found str", (Z(4, 8), "x"), {}),
    ("threshold_renorm", V, "expected 'theta' to be finite", (Z(4, 8), float("nan")), {}),
    ("threshold_renorm", V, "expected 'theta' to be a number or a 0-d", (Z(4, 8), Z(2)), {}),
    ("threshold_renorm", V, "expected 'probs' to have at least one expert", (Z(4, 0), 0.1), {}),
    ("threshold_renorm", V, "found (5,)", (Z(4, 8), 0.1), dict(mask=Z(5, dtype=torch.bool))),
    ("densify", V, "expected 'num_experts' to be at least k (2), found 1", (Z(4, 2), I, 1), {}),
    ("densify", V, "expected 'indices' to have shape", (Z(4, 3), I, 5), {}),
    ("make_finite", V, "expected 'scope' to be one of 'row', 'tensor'", (Z(4, 8),), dict(scope="all")),
    ("dispatch", V, "expected 'num_experts' to be at least 1, found 0", (I, 0), {}),
    ("dispatch", T, "expected 'indices' to have dtype int32 or int64, found float32", (Z(4, 2), 3), {}),
    ("dispatch", V, "expected 'capacity' to be at least 0, found -1", (I, 3), dict(capacity=-1)),
    (
        "dispatch", V, "expected at most one of 'capacity' and 'capacity_factor', found both",
        (I, 3), dict(capacity=1, capacity_factor=1.0),
    ),
    (
        "dispatch", V, "expected at most one of 'priority' and 'gates', found both",
        (I, 3), dict(priority=Z(4), gates=Z(4, 2)),
    ),
    ("dispatch", V, "expected 'priority' to have shape", (I, 3), dict(priority=Z(3))),
    ("dispatch", V, "expected 'capacity_factor' to be positive", (I, 3), dict(capacity_factor=0.0)),
    ("dispatch", V, "expected 'alignment' to be at least 1, found 0", (I, 3), dict(alignment=0)),
    ("combine", V, "expected 'slots' to have shape", (Z(9, 8), Z(4, 3), I), {}),
    ("combine", V, "expected 'expert_out' to have 2 dims [rows, d]", (Z(9), Z(4, 2), I), {}),
    (
        "combine", T, "expected 'shared' to have the dtype of 'expert_out' (float32), found bfloat16",
        (Z(9, 8), Z(4, 2), I), dict(shared=Z(4, 8, dtype=torch.bfloat16)),
    ),
    (
        "combine", V, "expected 'shared' to have shape",
        (Z(9, 8), Z(4, 2), I), dict(shared=Z(4, 7)),
    ),
    ("soft_dispatch", V, "expected 'h' to have dims [.., n, d]", (Z(8), Z(8, 3, 1)), {}),
    (
        "soft_dispatch", V, "expected dim 0 of 'phi' to be d of 'h' (8), found 7",
        (Z(4, 8), Z(7, 3, 1)), {},
    ),
    ("soft_dispatch", V, "expected 'eps' to be positive", (Z(4, 8), Z(8, 3, 1)), dict(eps=0.0)),
    ("soft_dispatch", V, "expected 'metric' to have shape", (Z(4, 8), Z(8, 3, 1)), dict(metric=Z(8))),
    ("balance_loss", V, "expected 'indices' to have shape", (Z(5, 8), I), {}),
    ("balance_loss", V, "expected 'divide_by' to be one of", (Z(4, 8), I), dict(divide_by="k")),
    ("z_loss", T, "expected 'logits' to have dtype", (I,), {}),
    ("z_loss", V, "found (5,)", (Z(4, 8),), dict(mask=Z(5, dtype=torch.bool))),
    ("bias_update", V, "expected 'counts' to have shape", (Z(8), I[0]), {}),
    ("bias_update", V, "expected 'gamma' to be finite", (Z(2), I[0]), dict(gamma=float("inf"))),
]  # fmt: skip


@pytest.mark.parametrize("op,error,message,args,kwargs", CASES)
def test_wrong_arguments(op, error, message, args, kwargs):
    with pytest.raises(error, match=re.escape(message)) as caught:
        getattr(moe_mlir, op)(*args, **kwargs)
    assert str(caught.value).startswith(f"{op}: ")
