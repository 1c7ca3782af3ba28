"""`python -m moe_mlir.frontends.import_program IN.pt2 FOLDER`: what moe-compile runs for
torch programs.

Writes into FOLDER:
    program.mlir          one function; parameters and buffers are its first arguments
    program.json          what its arguments and results are, for `moe_mlir.load`
    weights.safetensors   the parameters and buffers by name
    files.json            what the manifest says of the weights
With --without-weights it writes program.mlir alone. With --pack-for=CPU weights are packed for a
CPU (`raising/pack_weights.py`).
"""

import argparse
import importlib
import importlib.util
import json
import logging
import os
import sys
import zipfile

from ..artifact import weights_file


def main(arguments) -> int:
    parser = argparse.ArgumentParser(prog="python -m moe_mlir.frontends.import_program")
    parser.add_argument("source", metavar="IN.pt2")
    parser.add_argument("folder", metavar="FOLDER")
    parser.add_argument("--without-weights", action="store_true")
    parser.add_argument("--pack-for", metavar="CPU", default="")
    options = parser.parse_args(arguments)
    source = options.source
    from .export import export, export_packed

    try:
        program = _load(source)
        module = export_packed(program, options.pack_for) if options.pack_for else export(program)
        description = _describe(module)
        _write(module.text, options.folder, "program.mlir")
        if not options.without_weights:
            _write_program(module, description, options.folder)
    except (ValueError, OSError) as error:
        print(f"{source}: error: {error}", file=sys.stderr)
        return 1
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
    if module.cache_changes:
        raise ValueError("expected a model whose forward takes and returns no cache, found one; "
                         "moe_mlir.save_decoder saves a model with its cache")
    inputs = [r.name for r in program.results if r.kind == "input"]
    if inputs:
        raise ValueError(f"expected a model whose forward updates none of its inputs, found updates "
                         f"of {inputs}; register what it updates as buffers of the model")
    updates = {r.name: i for i, r in enumerate(program.results) if r.kind == "state"}
    _require_no_alias(module, updates)
    _require_signs(program)
    constants = [value for kind, value in program.outputs if kind != "result"]
    if constants:
        raise ValueError(f"expected a model that returns tensors, found {constants} among its "
                         "results")
    return {
        "function": program.function,
        "arguments": [
            {"kind": a.kind, "name": a.name, "shape": list(a.shape),
             **({"updated_by": updates[a.name]} if a.kind == "state" and a.name in updates else {})}
            for a in program.arguments],
        "results": [list(r.shape) for r in program.results],
        "outputs": [value for _, value in program.outputs],
        "symbols": {name: list(place) for name, place in program.symbols.items()},
        "conditions": [list(c) for c in module.conditions],
    }


def _require_signs(program) -> None:
    """A manifest has the types of MLIR, of which uint8 would be int8."""
    names = [x.name for x in (*program.arguments, *program.results)
             if str(x.dtype) == "torch.uint8"]
    if names:
        raise ValueError(f"expected arguments and results of types that an artifact has, found uint8 "
                         f"of {names}; convert them, such as by .to(torch.int16)")


def _require_no_alias(module, updates) -> None:
    """What the model updates must not be seen under another name: the trace did not."""
    owners: dict[int, str] = {}
    for argument in module.program.arguments:
        if argument.kind != "state" or not module.state[argument.name].numel():
            continue
        storage = module.state[argument.name].untyped_storage().data_ptr()
        other = owners.setdefault(storage, argument.name)
        if other != argument.name and (other in updates or argument.name in updates):
            raise ValueError(f"expected what the model updates in memory of its own, found that of "
                             f"'{other}' shared with '{argument.name}'; register a clone")


def _write_program(module, description, folder) -> None:
    """The weights, and what the artifact says of them."""
    weights = _name_stored(module, description)
    entry = weights_file.write(os.path.join(folder, weights_file.NAME), weights)
    _write(json.dumps({weights_file.NAME: entry}), folder, "files.json")
    _write(json.dumps(description, indent=2), folder, "program.json")


def _name_stored(module, description) -> dict:
    """The tensors to write by name: of tied ones the first, whose name the others get; of what
    the model updates its first value, unless that is zeros."""
    names: dict[tuple, str] = {}
    stored = {}
    for argument in description["arguments"]:
        if argument["kind"] != "state":
            continue
        name = argument["name"]
        tensor = module.state[name]
        if "updated_by" in argument:
            # Under another name, so that a loader that knows no state finds no weight.
            argument["stored_as"] = f"{name}.initial" if _has_bits(tensor) else None
            if argument["stored_as"]:
                stored[argument["stored_as"]] = tensor
            continue
        # Tensors without elements may have one address and be of several sizes.
        first = names.setdefault(_key(tensor), name)
        if first == name and not weights_file.is_reserved(name):
            stored[name] = tensor
        elif first == name:
            argument["stored_as"] = names[_key(tensor)] = _free_name(module, name)
            stored[argument["stored_as"]] = tensor
        else:
            argument["stored_as"] = first
    return stored


def _key(tensor) -> tuple:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _free_name(module, name) -> str:
    """Under which a tensor is stored whose own name the format reserves."""
    name = f"weight.{name}"
    while name in module.state:
        name = f"weight.{name}"
    return name


def _has_bits(tensor) -> bool:
    """Whether the tensor is other than zeros, to the sign."""
    import torch

    return bool(tensor.detach().contiguous().reshape(-1).view(torch.uint8).any())


def _write(text, folder, name) -> None:
    with open(os.path.join(folder, name), "w") as file:
        file.write(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
