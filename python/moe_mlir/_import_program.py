"""`python -m moe_mlir._import_program IN.pt2 FOLDER`: what moe-compile runs for
torch programs.

Writes into FOLDER:
    program.mlir          one function; parameters and buffers are its first arguments
    program.json          what its arguments and results are, for `moe_mlir.load`
    weights.safetensors   the parameters and buffers by name
"""

import json
import logging
import os
import sys


def main(arguments) -> int:
    if len(arguments) != 2:
        print("expected IN.pt2 and FOLDER", file=sys.stderr)
        return 2
    source, folder = arguments
    import torch

    from . import export

    # It would log a stack of its own beside the exception.
    logging.getLogger("torch.export").setLevel(logging.CRITICAL)
    try:
        program = torch.export.load(source)
    except Exception as error:
        # torch raises whatever the zip and JSON readers below it raise.
        print(f"{source}: error: expected a program of torch.export.save, found none that "
              f"can be read: {error}", file=sys.stderr)
        return 1
    try:
        module = export(program, None)
        description = _describe(module)
    except ValueError as error:
        print(f"{source}: error: {error}", file=sys.stderr)
        return 1
    _write(module, description, folder)
    return 0


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
        "arguments": [{"kind": a.kind, "name": a.name} for a in program.arguments],
        "results": [list(r.shape) for r in program.results],
        "outputs": [value for _, value in program.outputs],
        "symbols": {name: list(place) for name, place in program.symbols.items()},
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
