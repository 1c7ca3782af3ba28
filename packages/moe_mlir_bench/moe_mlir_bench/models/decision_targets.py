"""Processes that choose experts, each by one target: the code of a CPU level, a compiler, a GPU.

For `python -m moe_mlir_bench.models decisions`. A process of its own is needed because
MOE_MLIR_CPU holds for all kernels of one.
"""

import functools
import multiprocessing
import os
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .decision_routers import DTYPES, ROUTERS, Router, WrittenOut

LEVELS = ("x86-64-v2", "x86-64-v3", "skylake-avx512", "icelake-server", "native")
THREADS = (1, 3)
LAYERS = 2
CHIP = "sm_90"


class Target:
    """One process; `submit` gives it scores, `result` takes the ids: of several runs, as a list."""

    def __init__(self, name: str, level: str = "native", layers: int = 0) -> None:
        self.name, self.layers = name, layers
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        before = os.environ.get("MOE_MLIR_CPU")
        os.environ["MOE_MLIR_CPU"] = level
        try:
            self._process = context.Process(target=_serve, args=(theirs, name), daemon=True)
            self._process.start()
        finally:
            del os.environ["MOE_MLIR_CPU"]
            if before is not None:
                os.environ["MOE_MLIR_CPU"] = before

    def submit(self, router: Router, x: torch.Tensor) -> None:
        # As bytes: numpy has no bfloat16, and shared memory would be a file for each chunk.
        dtype = next(name for name, dtype in DTYPES.items() if dtype == x.dtype)
        self._pipe.send((ROUTERS.index(router), dtype, x.view(_integer(x.dtype)).numpy()))

    def result(self) -> list[Any]:
        answer = self._pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(f"{self.name}: {answer}")
        return answer

    def close(self) -> None:
        self._pipe.close()
        self._process.join(10)


def make_targets(names: Iterable[str]) -> Iterator[Target]:
    """The targets whose names are given; the levels that this machine does not run are an error."""
    for name in names:
        if name in LEVELS:
            yield Target(name, level=name)
        else:
            yield Target(name, layers=LAYERS if name in ("compile", "backend") else 0)


NAMES = (*LEVELS, "compile", "backend", "simulator")


def _integer(dtype):
    import torch

    return torch.int32 if dtype == torch.float32 else torch.int16


def _serve(pipe, name):
    import torch

    choose = {"compile": _choose_compiled, "backend": _choose_by_backend,
              "simulator": _choose_on_gpu}.get(name, _choose_by_op)
    torch.set_num_threads(1)
    while True:
        try:
            position, dtype, bits = pipe.recv()
        except EOFError:
            return
        x = torch.from_numpy(bits).view(DTYPES[dtype])
        try:
            with torch.no_grad():
                answer: Any = [i.to(torch.int16).numpy() for i in choose(ROUTERS[position], x)]
        except Exception:
            answer = traceback.format_exc()
        pipe.send(answer)


def _choose_by_op(router, x):
    """Ids of the op with each number of threads."""
    import torch

    for threads in THREADS:
        torch.set_num_threads(threads)
        yield _call_op(router, x)


def _call_op(router, x):
    from moe_mlir import ops

    plain = router.bias is False and router.n_group == 1
    if plain and router.score in ("softmax", "none"):
        if router.score == "softmax":
            return ops.topk_renorm(x, router.k, kind="logits")[1]
        return ops.topk_renorm(x, router.k, kind="probs")[1]
    return ops.grouped_topk(x, router.k, **router.options())[1]


def _choose_on_gpu(router, x):
    from moe_mlir import simulate

    with simulate(CHIP):
        yield _call_op(router, x)


_programs: dict[Any, Any] = {}


def _choose_compiled(router, x):
    from moe_mlir import compile

    return _choose_by_layers(router, x, lambda model, layers: compile(model, (layers,)))


def _choose_by_backend(router, x):
    import torch

    from moe_mlir._torch.dynamo import config
    from moe_mlir.frontends.dynamo import register

    register()
    # All routers are calls of one function: more of them than Dynamo expects, and with
    # another number of experts each, which it would make a variable.
    config.recompile_limit = 4 * len(ROUTERS)
    found = list(_choose_by_layers(
        router, x, lambda model, _: torch.compile(model, backend="moe", dynamic=False)))
    return () if _leaves_the_choice_to_torch(router) else found


@functools.cache
def _leaves_the_choice_to_torch(router):
    """The router was not raised: torch.topk decides, as it does in eager, by no rule."""
    import torch

    layers = torch.randn(LAYERS, 8, router.experts)
    _programs[router](layers)  # a compilation traces, with the operations of eager
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        _programs[router](layers)
    return any(event.name == "aten::topk" for event in profile.events())


def _choose_by_layers(router, x, build):
    """Ids of a stack of layers; the scores are those of its layers, one after the other."""
    layers = x.float().view(LAYERS, -1, router.experts)
    if router not in _programs:
        _programs[router] = build(WrittenOut(router), layers)
    yield _programs[router](layers)[1].flatten(0, 1)
