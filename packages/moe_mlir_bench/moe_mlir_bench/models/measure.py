"""What the compiler makes of one family: routers, import, errors, times."""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

import moe_mlir
from moe_mlir._torch import dynamo
from moe_mlir.frontends.dynamo import register
from moe_mlir.hf import patch
from moe_mlir.patching.router_modules import is_router

from .families import Family

_SHAPE = (4, 128)
_ROUNDS = 9


@dataclass
class Measurement:
    """One row of the table; a number that could not be had is None, and `reason` says why."""

    name: str
    form: str
    expected: int
    recognised: int = 0
    lines: int | None = None
    compile_seconds: float | None = None
    error: float | None = None
    training_error: float | None = None
    router_speedup: float | None = None
    whole_speedup: float | None = None
    reason: str = ""


def measure(name: str, family: Family,
            log: Callable[[str], object] = lambda text: None) -> Measurement:
    row = Measurement(name, family.form, family.routers(_layers(family)))
    # A step that fails leaves its numbers out; the table tells which and why.
    for step in (_recognise, _import, _train, _time_router, _time_whole):
        log(f"{name}: {step.__name__.strip('_').replace('_', ' ')}")
        try:
            step(row, family)
        except Exception as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            row.reason = row.reason or f"{step.__name__.strip('_')}: {first}"
    return row


def _layers(family) -> int:
    return 2 * family.layers if family.period > 1 else max(2, family.layers)


def _build(family, **sizes):
    return family.build(layers=_layers(family), **sizes)


def _capturable(family, model):
    """Switch's loop over experts is patched away; no compiler captures it."""
    if family.form == "F8":
        model = copy.deepcopy(model)
        patch(model)
    return model


def _relative(found, expected) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


def _recognise(row, family):
    matches = moe_mlir.explain(_build(family), (), kwargs=family.example())
    row.recognised = sum(m.recognised and m.form == family.form for m in matches)


def _import(row, family):
    model = _build(family)
    module = moe_mlir.export(_capturable(family, model), (), kwargs=family.example())
    row.lines = module.text.count("\n")
    start = time.process_time()
    compiled = moe_mlir.compile(module)
    row.compile_seconds = time.process_time() - start
    shapes = ((2, 12), (3, 20)) if family.dynamic else ((2, 12),)
    with torch.no_grad():
        inputs = [family.example(*shape, seed=1) for shape in shapes]
        row.error = max(_relative(compiled(**i).logits, model(**i).logits) for i in inputs)


def _train(row, family):
    """The largest relative error of any gradient under torch.compile(backend="moe")."""
    register()
    dynamo.reset()
    model = family.build()
    trained = _capturable(family, model)
    compiled = torch.compile(trained, backend="moe", fullgraph=True, options={"rest": "eager"})
    inputs, gradients = family.example(), []
    torch.manual_seed(0)
    cotangent = torch.randn(*inputs["input_ids"].shape, 64)
    for run, owner in ((model, model), (compiled, trained)):
        owner.zero_grad()
        run(**inputs).logits.backward(cotangent)
        gradients.append({n: p.grad.clone() for n, p in owner.named_parameters()
                          if p.grad is not None})
    expected, found = gradients
    row.training_error = max(_relative(found[n], g) for n, g in expected.items())


def _times(*runs) -> list[float]:
    """The least CPU seconds of each on one thread, measured in turns on the same machine."""
    seconds: list[list[float]] = [[] for _ in runs]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for turn in range(_ROUNDS + 1):
            for run, kept in zip(runs, seconds):
                start = time.thread_time()
                run()
                if turn:  # the first compiles and warms up
                    kept.append(time.thread_time() - start)
    finally:
        torch.set_num_threads(threads)
    return [min(kept) for kept in seconds]


def _time_router(row, family):
    """The model's router module against the same module on moe ops."""
    model = family.build(**family.wide())
    router = next(m for m in model.modules() if is_router(m))
    arguments = []
    hook = router.register_forward_pre_hook(lambda _, args: arguments.append(args))
    with torch.no_grad():
        model(**family.example(*_SHAPE))
        hook.remove()
        patched = copy.deepcopy(router)
        patch(patched)
        eager, ours = _times(lambda: router(*arguments[0]), lambda: patched(*arguments[0]))
    row.router_speedup = eager / ours


def _time_whole(row, family):
    model = family.build(**family.wide())
    inputs = family.example(*(_SHAPE if family.dynamic else (2, 12)))
    # A copy, since its weights are packed in place.
    compiled = moe_mlir.compile(_capturable(family, copy.deepcopy(model)), (), kwargs=inputs)
    with torch.no_grad():
        eager, ours = _times(lambda: model(**inputs), lambda: compiled(**inputs))
    row.whole_speedup = eager / ours
