"""The installed tools, routers whose results torch.export can return, changed artifacts."""

import atexit
import contextlib
import functools
import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import costs
import python_client
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import moe_mlir

PACKAGE = Path(moe_mlir.__file__).absolute().parent
BUILD = PACKAGE.parents[1]
# What processes of tests import, in about four seconds of CPU.
_PRELOADED = ("torch._dynamo", "torch.export", "torch.distributed.fsdp",
              "transformers.models.mixtral.modeling_mixtral", "transformers.generation.utils",
              "moe_mlir.nn", "moe_mlir.frontends.export", "moe_mlir_bench.models")
_ENVIRONMENT = dict(os.environ)  # of the whole run, whatever a test sets


@contextlib.contextmanager
def serve_python(modules, environment):
    """A `python3` whose processes are forks of one that has these loaded: `python_server.py`.

    Beside it is a `python`.
    """
    folder = Path(tempfile.mkdtemp(prefix="moe-python-"))
    with open(folder / "errors", "w") as errors:
        server = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("python_server.py"), folder, *modules], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, cwd=folder, env=environment)
    with costs.server(server.pid):
        try:
            if server.stdout.readline() != "ready\n":
                raise RuntimeError("expected a server of Python processes, found: "
                                   + (folder / "errors").read_text())
            yield folder / "python3"
        finally:
            server.communicate()  # it ends when its stdin is closed


@functools.cache
def forked_python() -> Path:
    """The `python3` of `run_python`; beside it is a moe-compile, which takes that of its own folder."""
    until_the_end = contextlib.ExitStack()
    python = until_the_end.enter_context(serve_python(_PRELOADED, _ENVIRONMENT))
    atexit.register(until_the_end.close)
    shutil.copy2(BUILD / "bin" / "moe-compile", python.parent)
    return python


# What libraries set as they are imported, in the process of a worker: no user has it.
_SET_BY_IMPORTS = ("PYTORCH_NVML_BASED_CUDA_CHECK", "TRITON_DEFAULT_FP_FUSION")


def _environment(given) -> dict:
    """The variables of a process, without those that a library set that another test imported."""
    variables = dict(os.environ if given is None else given)
    for name in _SET_BY_IMPORTS:
        if variables.get(name) == os.environ.get(name) and name not in _ENVIRONMENT:
            variables.pop(name, None)
    return variables


def _can_fork(environment) -> bool:
    """Whether a fork has these variables as an interpreter has them; asserts those that a test gives."""
    differs = python_client.changed_at_start(environment, _ENVIRONMENT)
    given = [name for name in differs if environment.get(name) != os.environ.get(name)]
    assert not given, f"expected fresh=True, as these are read at the start: {given}"
    return not differs


def run_python(*arguments, fresh=False, env=None, **options):
    """`python ARGUMENTS` in a process of its own: what it printed, and how it ended.

    It has torch, transformers and moe_mlir loaded, which takes seconds, unless it is `fresh`: for
    tests of what an import does, of the package that is found, and of variables that are read at
    the start.
    """
    env = _environment(env)
    is_fork = not fresh and _can_fork(env)
    options = {"capture_output": True, "text": True, **options}
    return subprocess.run([forked_python() if is_fork else sys.executable, *map(str, arguments)],
                          env=env, **options)


def tool_of(name, *arguments, fresh=False) -> Path:
    """The build tree's tool. The Python in which moe-compile reads a torch program is a fork, as in
    `run_python`, unless it is `fresh`."""
    tool = BUILD / "bin" / name
    if fresh or name != "moe-compile" or not any(str(a).endswith(".pt2") for a in arguments):
        return tool
    return forked_python().with_name(name)


def run_tool(name, *arguments, fresh=False, **options):
    tool, env = tool_of(name, *arguments, fresh=fresh), _environment(options.get("env"))
    if tool.parent != BUILD / "bin" and not _can_fork(env):
        tool = BUILD / "bin" / name
    options = {"capture_output": True, "text": True, "timeout": 120, **options, "env": env}
    return subprocess.run([tool, *map(str, arguments)], **options)


def run_ranks(work, arguments, ranks):
    """Runs `work(rank, *arguments)` in processes of its own, forked of one that has torch loaded."""
    multiprocessing.set_forkserver_preload(["torch.distributed.fsdp", "torch._dynamo", "moe_mlir.nn"])
    torch.multiprocessing.start_processes(work, arguments, ranks, start_method="forkserver")


def rewrite_manifest(folder, change):
    """Changes a manifest's dictionary, and its digest, so that a loader meets the change itself."""
    path = Path(folder) / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    (Path(folder) / "manifest.json.sha256").write_text(f"{digest}  manifest.json\n")


class Function(torch.nn.Module):
    """A function as a model."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


class Gates(torch.nn.Module):
    """A router's gates and indices, as tensors."""

    def __init__(self, router):
        super().__init__()
        self.router = router

    def forward(self, h):
        routing = self.router(h)
        return routing.gates, routing.indices


def save_router(router, path):
    """Writes the program of a router over any number of tokens of width 24."""
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    program = torch.export.export(Gates(router), (torch.randn(8, 24),),
                                  dynamic_shapes=({0: tokens},))
    torch.export.save(program, path)


# ---- ties -----------------------------------------------------------------------------


class Selections(TorchDispatchMode):
    """Records what eager code selects experts from: the scores and ids of every top-k.

    torch.topk chooses among equal scores by no rule, and leaves sorted=False in any
    order. Tests of equality treat exactly these places apart, never by a tolerance.
    With `settle` a top-k has the one of torch's legal results that our ops promise.
    """

    def __init__(self, settle=False):
        super().__init__()
        self.found = []          # (scores, ids)
        self.has_loose_order = False
        self._settle = settle

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is not torch.ops.aten.topk.default:
            return function(*args, **(kwargs or {}))
        bound = _bound(function, args, kwargs or {})
        scores, dim = bound["self"], bound["dim"]
        if self._settle:
            ranked = scores.sort(dim=dim, descending=bound["largest"], stable=True)
            result = tuple(x.narrow(dim, 0, bound["k"]).contiguous() for x in ranked)
        else:
            result = function(*args, **(kwargs or {}))
            self.has_loose_order |= not bound["sorted"]
        if dim in (-1, scores.dim() - 1):
            sign = 1 if bound["largest"] else -1
            self.found.append((sign * scores.detach(), result[1].clone()))
        return result

    def scores(self) -> list:
        return [scores for scores, _ in self.found]

    def same_scores(self, ids, row) -> bool:
        """Whether the ids of a row have eager's scores, counted: another of equal experts."""
        if len(self.found) != 1:
            return True  # groups: which of equal groups is chosen decides about the scores
        scores, eager = (x.reshape(-1, x.shape[-1]) for x in self.found[0])
        if ids.dim() == 0:
            ids = ids.unsqueeze(0)
        if len(set(ids.tolist())) != len(ids):
            return False
        values = [scores[row][chosen].double().sort().values for chosen in (ids, eager[row])]
        return torch.equal(*values)

    def same_choice(self, gates, ids, eager_gates, eager_ids) -> bool:
        """Whether a row chooses the same experts with the same gates, in the same order where
        torch promises one."""
        rounding = max(2 * rounding_of(eager_gates), 4e-6) \
            if eager_gates.is_floating_point() else 0.0
        if ids.dim() and self.has_loose_order:
            order, eager_order = ids.argsort(), eager_ids.argsort()
            if gates.shape == ids.shape:
                gates, eager_gates = gates[order], eager_gates[eager_order]
            ids, eager_ids = ids[order], eager_ids[eager_order]
        return torch.equal(ids, eager_ids) and torch.allclose(
            gates.double(), eager_gates.double(), rtol=rounding, atol=rounding)


def rounding_of(values: torch.Tensor) -> float:
    """The eps of the narrowest float type that holds these values: where they were rounded to it
    and widened again, they differ by its roundings. Whole numbers tell nothing."""
    narrow = () if torch.equal(values, values.round()) else (
        torch.bfloat16, torch.float16, torch.float32)
    for dtype in narrow:
        if torch.equal(values.to(dtype).to(values.dtype), values):
            return torch.finfo(dtype).eps
    return torch.finfo(values.dtype).eps


def _bound(function, args, kwargs) -> dict:
    names = {}
    for position, argument in enumerate(function._schema.arguments):
        given = args[position] if position < len(args) else None
        names[argument.name] = given if position < len(args) else kwargs.get(
            argument.name, argument.default_value)
    return names


def tied_rows(selections, rows, ulps=0):
    """Rows in which equal scores leave open which experts are the best, or their order.

    `ulps` above 0 counts as equal what float32 sums may round to either side, for
    comparisons with a meaning in float64.
    """
    tied = torch.zeros(rows, dtype=torch.bool)
    for scores, ids in selections.found if rows else ():
        ordered = scores.double().sort(dim=-1, descending=True).values[..., :ids.shape[-1] + 1]
        above, below = ordered[..., :-1], ordered[..., 1:]
        near = (above - below).abs() <= ulps * 2.0 ** -24 * above.abs()
        tied |= ((above == below) | near).reshape(rows, -1).any(-1)
    return tied
