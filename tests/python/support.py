"""The installed tools, routers whose results torch.export can return, changed artifacts."""

import hashlib
import json
import subprocess
from pathlib import Path

import torch

import moe_mlir

PACKAGE = Path(moe_mlir.__file__).absolute().parent
BUILD = PACKAGE.parents[1]


def run_tool(name, *arguments, cwd=None):
    return subprocess.run([BUILD / "bin" / name, *map(str, arguments)], capture_output=True,
                          text=True, cwd=cwd, timeout=120)


def rewrite_manifest(folder, change):
    """Changes a manifest's dictionary, and its digest, so that a loader meets the change itself."""
    path = Path(folder) / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    (Path(folder) / "manifest.json.sha256").write_text(f"{digest}  manifest.json\n")


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
