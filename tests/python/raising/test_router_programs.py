"""Generated programs of routers: what is raised equals eager, ids and all."""

import pytest
import torch
from router_programs import Program, check, draw, run, trace
from seeds import run_seed

# What a pattern must not overlook. The lines between the logits `z` and the results.
OVERLOOKED = {
    "a scaled bias": "p = z.sigmoid(); c = torch.add(p, B, alpha=-2)\n"
                     "v, i = c.topk(2); w = p.gather(1, i)",
    "a bias for each token": "p = z.sigmoid(); c = p + BT\nv, i = c.topk(2); w = p.gather(1, i)",
    "an integer bias": "p = z.sigmoid(); c = p + BI\nv, i = c.topk(2); w = p.gather(1, i)",
    "a rounded sum": "v, i = F.softmax(z, -1).topk(3)\n"
                     "w = v / v.sum(-1, keepdim=True, dtype=torch.bfloat16)",
    "a sum in another half type": "v, i = z.half().topk(2); v = v.sigmoid()\n"
                                  "w = v / v.sum(-1, keepdim=True, dtype=torch.bfloat16)",
    "an argmax in float64": "w, i = F.softmax(z, -1, dtype=torch.float64).max(-1)",
    "a scaled eps": "v, i = F.softmax(z, -1).topk(2)\n"
                    "w = v / torch.add(v.sum(-1, True), 0.125, alpha=3)",
    "a softmax of rounded values": "v, i = z.topk(3); w = F.softmax(v, -1, dtype=torch.bfloat16)",
    "a softmax in float64": "v, i = z.topk(3); w = F.softmax(v, -1, dtype=torch.float64)",
    "a softmax over half of the experts": "v, i = z.view(2 * N, -1).softmax(-1).view(N, E).topk(2)\n"
                                          "w = v",
    "a scaled distance": "s = torch.sub(z, z.amax(-1, True), alpha=2).exp()\n"
                         "p = s / s.sum(-1, True); w, i = p.topk(2)",
    "scores written before the gather": "p = z.sigmoid(); c = p + B; v, i = c.topk(2); p.mul_(2)\n"
                                        "w = p.gather(1, i)",
    "scores written through a view": "p = F.softmax(z, -1); u = p.view(-1); c = p + B\n"
                                     "v, i = c.topk(2); u.mul_(2); w = p.gather(1, i)",
    "logits written after the softmax": "p = F.softmax(z, -1); z.neg_(); v, i = p.topk(2); w = v",
    "a second look at spread values": "b = torch.full_like(z, -INF); u = b.view(-1)\n"
                                      "v, i = z.topk(2); d = b.scatter_(1, i, v)\n"
                                      "w = torch.sigmoid(d); also = u",
    "values in an order of torch's own": "p = z.sigmoid(); v, i = (p + B).topk(3, sorted=False)\n"
                                         "w = p.gather(1, i); also = v",
    "marks that take turns": "c = F.softmax(z, -1); best = c.view(N, GROUPS, -1).amax(-1)\n"
                             "m = torch.zeros_like(best).scatter(1, best.topk(2)[1], 1)\n"
                             "m = m.view(N, 1, GROUPS).expand(N, E // GROUPS, GROUPS)\n"
                             "c = c.masked_fill(m.reshape(N, E) == 0, 0.0); w, i = c.topk(2)",
    "an argmax of equal probabilities": "p = F.softmax(z * 1e-9, -1)\nw, i = p.max(-1)",
    "two rounded scores in more bits": "z = z.bfloat16(); v, i = z.topk(3)\n"
                                       "w = F.softplus(v).sqrt()\n"
                                       "w = w / w.sum(-1, True, dtype=torch.float64)",
    "a triangle of another shape": "L2 = torch.ones(2 * N, N // 2, dtype=torch.bool).triu(1)\n"
                                   "s = (z @ z.t()).masked_fill(L2.view(N, N), -INF)\n"
                                   "p = F.softmax(s, -1) @ F.softmax(z, -1); w, i = p.topk(2)",
}


def program(lines):
    body = "\n    ".join(lines.splitlines())
    return Program(f"def program(z):\n    also = z.new_zeros(())\n    {body}\n"
                   "    return w, i, also\n", torch.float32)


@pytest.mark.parametrize("name", OVERLOOKED)
def test_what_a_pattern_must_not_overlook(name):
    outcome = check(program(OVERLOOKED[name]), seed=1)
    assert not outcome.difference, outcome.difference


@pytest.mark.parametrize("lines", [
    "w, i = F.softmax(z, -1).topk(2)", "v, i = z.topk(2); w = F.softmax(v, -1)",
    "p = z.sigmoid(); i = (p + B).topk(2)[1]; w = p.gather(1, i); w = w / w.sum(-1, True)"])
def test_rows_without_a_number_are_those_that_explain_tells(lines):
    """Spec E3 and E6: a NaN shows in all gates, and a row of -inf has gates 0."""
    function = program(lines).function()
    z = torch.randn(8, 8)
    z[0, 3], z[1] = torch.nan, -torch.inf
    _, traced = trace(function, z)
    gates, ids, _ = traced(z)
    assert gates[0].isnan().all() and (gates[1] == 0).all()
    assert torch.equal(gates[2:].sum(-1) > 0, torch.ones(6, dtype=torch.bool))
    assert ((0 <= ids) & (ids < 8)).all() and (ids[:, 0] != ids[:, 1]).all()


def report(differences):
    return "\n\n".join(f"seed {number}, {program.dtype}:\n{program.text}  {text}"
                       for number, program, text in differences[:5])


def test_generated_programs():
    """As many as 8 seconds hold; `python tests/python/raising/router_programs.py` runs more."""
    count, raised, differences = run(2000, run_seed(), seconds=8)
    assert not differences, report(differences)
    assert raised > count // 4


@pytest.mark.parametrize("way, most", [("trace", 30), ("export", 30), ("backend", 12),
                                       ("compile", 4)])
def test_generated_programs_on_compiled_kernels(way, most):
    count, raised, differences = run(most, run_seed(), way, kernels=True, seconds=6)
    assert not differences, report(differences)


def test_an_order_that_torch_leaves_open_may_be_ours_or_its_own():
    lines = "v, i = F.softmax(z, -1).topk(3, sorted=False); w = z.gather(1, i.flip(1))"
    for way in ("trace", "backend"):
        outcome = check(program(lines), seed=1, way=way)
        assert outcome.raised and not outcome.difference, outcome.difference


@pytest.mark.long
def test_many_generated_programs():
    count, raised, differences = run(10000, run_seed())
    assert not differences, report(differences)
    assert raised > count // 4


def test_a_seed_draws_the_same_program_again():
    assert draw(3) == draw(3)
