"""The installed tools, and routers whose results torch.export can return."""

import subprocess
from pathlib import Path

import torch

import moe_mlir

PACKAGE = Path(moe_mlir.__file__).absolute().parent
BUILD = PACKAGE.parents[1]


def run_tool(name, *arguments, cwd=None):
    return subprocess.run([BUILD / "bin" / name, *map(str, arguments)], capture_output=True,
                          text=True, cwd=cwd, timeout=120)


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
