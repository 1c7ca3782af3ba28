"""`python -m moe_mlir._import_program IN.pt2 FOLDER`: what moe-compile runs for
torch programs.

Writes into FOLDER:
    program.mlir          one function; parameters and buffers are its first arguments
    program.json          what its arguments and results are, for `moe_mlir.load`
    weights.safetensors   the parameters and buffers by name
"""

import importlib
import importlib.util
import json
import logging
import os
import sys
import zipfile


def main(arguments) -> int:
    if len(arguments) != 2:
        print("expected IN.pt2 and FOLDER", file=sys.stderr)
        return 2
    source, folder = arguments
    from .frontends.export import export

    try:
        module = export(_load(source), None)
        description = _describe(module)
    except ValueError as error:
        print(f"{source}: error: {error}", file=sys.stderr)
        return 1
    _write(module, description, folder)
    return 0


def _load(source):
    """The program in a file of torch.export.save; ValueError with what torch says if there is none."""
    import torch

    _import_transformers(source)
    said = _Said()
    # It logs the reason, and a stack, and raises "check the warnings above". Its
    # logger has a handler of torch's own, which would print both.
    log = logging.getLogger("torch.export")
    log.handlers[:] = [said]
    log.propagate = False
    try:
        return torch.export.load(source)
    except Exception as error:
        # torch raises whatever the zip and JSON readers below it raise.
        reason = said.reasons[-1] if said.reasons else error
        raise ValueError(f"expected a program of torch.export.save, found none that can be read: "
                         f"{reason}") from None


class _Said(logging.Handler):
    """Keeps the exceptions that a logger reports."""

    def __init__(self):
        super().__init__()
        self.reasons = []

    def emit(self, record):
        if record.exc_info and record.exc_info[1] is not None:
            self.reasons.append(record.exc_info[1])


def _import_transformers(source) -> None:
    """What a program of a transformers model names: output classes and operators of its own."""
    if not _mentions(source, b"transformers."):
        return
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("expected transformers beside a program of one of its models, found none "
                         "installed; pip install transformers")
    for name in ("transformers.modeling_outputs", "transformers.integrations.moe"):
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)


def _mentions(source, text) -> bool:
    """Whether a graph in the archive contains `text`."""
    try:
        with zipfile.ZipFile(source) as archive:
            return any(text in archive.read(name) for name in archive.namelist()
                       if name.endswith(".json"))
    except (OSError, zipfile.BadZipFile):
        return False  # torch says what is wrong with the file


def _describe(module) -> dict:
    program = module.program
    updated = [r.name for r in program.results if r.kind != "output"]
    if updated:
        raise ValueError(f"expected a model whose forward updates nothing, found updates of "
                         f"{updated}; export it in eval() mode")
    constants = [value for kind, value in program.outputs if kind != "result"]
    if constants:
        raise ValueError(f"expected a model that returns tensors, found {constants} among its "
                         "results")
    return {
        "function": program.function,
        "arguments": [{"kind": a.kind, "name": a.name, "shape": list(a.shape)}
                      for a in program.arguments],
        "results": [list(r.shape) for r in program.results],
        "outputs": [value for _, value in program.outputs],
        "symbols": {name: list(place) for name, place in program.symbols.items()},
        "conditions": [list(c) for c in module.conditions if c[0] in program.symbols],
    }


def _write(module, description, folder):
    from safetensors.torch import save_file

    names = [a["name"] for a in description["arguments"] if a["kind"] == "state"]
    # Clones, because tied weights share memory, which the format refuses.
    weights = {n: module.state[n].detach().clone().contiguous() for n in names}
    save_file(weights, os.path.join(folder, "weights.safetensors"))
    with open(os.path.join(folder, "program.json"), "w") as file:
        json.dump(description, file, indent=2)
    with open(os.path.join(folder, "program.mlir"), "w") as file:
        file.write(module.text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
