"""A pass that replaces routers in Inductor's graphs with moe ops, for inference.

    with moe_mlir.inductor_pass():
        compiled = torch.compile(model)
        compiled(x)

The graphs that the pass sees are behind autograd, so a training step would run
the original chain as well, whose results its backward reads: use
`torch.compile(model, backend="moe")` to train. The pass has an id, which enters
Inductor's cache keys: compiled graphs are found again in later processes, and
graphs of another version of the matcher are not.
"""

import contextlib
import os
from collections.abc import Iterator

import torch

from .. import raising
from .._torch.inductor import CustomGraphPass, config, get_hash_for_files
from ..raising.raise_routing import raise_graph


class RoutingPass(CustomGraphPass):
    """Replaces the routers of one of Inductor's graphs with moe ops."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        raise_graph(graph)
        # Behind its decompositions Inductor knows no other cast.
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.to.dtype):
            node.target = torch.ops.prims.convert_element_type.default

    def uuid(self) -> bytes:
        folder = os.path.dirname(raising.__file__)
        files = sorted(os.path.join(folder, name) for name in os.listdir(folder)
                       if name.endswith(".py"))
        return get_hash_for_files((__file__, *files))


@contextlib.contextmanager
def inductor_pass() -> Iterator[None]:
    """Inside the context, torch.compile's default backend replaces routers with moe ops."""
    if config.post_grad_custom_post_pass is not None:
        raise RuntimeError("expected no custom post-grad pass of Inductor, found "
                           f"{config.post_grad_custom_post_pass!r}; call "
                           "moe_mlir.frontends.inductor.RoutingPass from it")
    with config.patch(post_grad_custom_post_pass=RoutingPass()):
        yield
