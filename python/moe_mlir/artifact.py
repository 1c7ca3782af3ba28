"""Artifacts of moe-compile: folders with a manifest and code."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import _files, _weights_file
from ._host_cpu import missing_features, recommended
from ._native import native
from ._program_state import ProgramState
from ._updated_memory import shared_pair
from .sizes import (
    describe_condition,
    evaluate_expression,
    evaluate_text,
    expression_sources,
    unmet_condition,
)

if TYPE_CHECKING:
    import numpy
    import torch

    from .launch import LaunchPlan

_FORMAT = "moe-mlir-artifact"
_FORMAT_VERSION = 2
# Weights of up to this size are read and checked whenever they are loaded.
_MAX_VERIFIED_BYTES = 64 << 20
_DTYPES = {"i1": "bool", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64",
           "index": "int64", "f16": "float16", "bf16": "bfloat16", "f32": "float32",
           "f64": "float64"}


@dataclass
class Artifact:
    """A checked artifact. Calling it calls its only function.

    Attributes:
        manifest: the content of manifest.json.
        files: file name to content, verified against the manifest; weights are
            mapped, and verified as `load` says.
        functions: name to `ArtifactFunction` or `ArtifactProgram`.
    """

    manifest: dict
    files: dict
    functions: dict = field(default_factory=dict)

    @property
    def target(self) -> str:
        return self.manifest["target"]["name"]

    @property
    def ptx(self) -> str:
        """The kernels of an artifact for a chip."""
        if "kernel.ptx" not in self.files:
            raise ValueError(f"expected an artifact for a chip, found target '{self.target}'")
        return self.files["kernel.ptx"].decode()

    def __call__(self, *arguments: Any, out: Any = None, **named: Any) -> Any:
        if len(self.functions) != 1:
            raise ValueError(
                f"expected an artifact with one function to call, found {sorted(self.functions)}; "
                "use .functions[name]"
            )
        return next(iter(self.functions.values()))(*arguments, out=out, **named)

    def reset(self) -> None:
        """Puts the state of its functions, if they keep any, back to what it was at loading."""
        for function in self.functions.values():
            if isinstance(function, ArtifactProgram):
                function.reset()

    def __repr__(self):
        return f"<artifact for {self.target}: {', '.join(map(repr, self.functions.values()))}>"


class ArtifactFunction:
    """A function of an artifact: tensors in, new tensors out."""

    def __init__(self, function: Any, description: Mapping[str, Any]):
        self.name = description["name"]
        self._function = function
        self.arguments = description["arguments"]
        self._num_arguments = len(self.arguments)
        self._results = description["results"]
        self._relations = description["relations"]
        self._updated = [i for i, a in enumerate(self.arguments) if a.get("updated")]

    def __call__(self, *arguments: Any, out: Any = None) -> Any:
        """Runs on tensors of torch or on numpy arrays.

        An artifact for a chip takes CUDA tensors, and CPU tensors inside of
        `moe_mlir.simulate`.

        Args:
            out: the result buffers, for results whose size depends on data, or
                to avoid an allocation.

        Returns:
            The result, or a tuple of results; torch tensors if an argument is one.

        Raises:
            TypeError: an argument or a result buffer is no tensor of the right dtype.
            ValueError: it has another shape than the function takes, or than follows from the
                sizes of other arguments; or it cannot be written where it has to be, or a result
                buffer shares memory with an argument or another one.
        """
        if len(arguments) != self._num_arguments:
            raise TypeError(f"expected {self._num_arguments} arguments for '{self.name}', found "
                            f"{len(arguments)}")
        for i, (value, expected) in enumerate(zip(arguments, self.arguments)):
            if "shape" in expected:
                _require_kind(f"argument {i} of '{self.name}'", value, expected)
        self.require_relations(arguments)
        sizes = self._sizes(arguments)
        if out is None:
            out = [self.allocate(i, self._known(i, shape), arguments)
                   for i, shape in enumerate(sizes)]
        else:
            out = list(out) if isinstance(out, (tuple, list)) else [out]
            self._require_places(out, sizes)
            _require_one_device(self.name, (*arguments, *out))
            _require_apart(self.name, arguments, out)
        for i in self._updated:
            _require_writable(f"argument {i} of '{self.name}', which it updates in place,",
                              arguments[i])
        self.run(arguments, out)
        return out[0] if len(out) == 1 else tuple(out)

    def run(self, arguments: Sequence[Any], out: Sequence[Any]) -> None:
        """A call whose sizes and types have been checked."""
        self._function(*map(_contiguous, arguments), *out)

    def require_relations(self, arguments: Sequence[Any]) -> None:
        """Raises ValueError where sizes of arguments, whose types are right, do not agree."""
        for found, relation, expected in self._relations:
            a, b = (evaluate_expression(size, arguments) for size in (found, expected))
            if a is None or b is None or (a == b if relation == "==" else a <= b):
                continue
            sources = " and ".join(expression_sources(found, self._num_arguments))
            computed = "" if found[0] == "arg" else "what is computed from "
            reason = " and ".join(expression_sources(expected, self._num_arguments))
            raise ValueError(f"'{self.name}': expected {computed}{sources} to be "
                             f"{'' if relation == '==' else 'at most '}{b}"
                             f"{reason and ', by ' + reason}, found {a}")

    def _require_places(self, out, sizes) -> None:
        if len(out) != len(self._results):
            raise ValueError(f"expected {len(self._results)} buffers as out= for '{self.name}', "
                             f"found {len(out)}")
        for i, (value, shape) in enumerate(zip(out, sizes)):
            self.require_place(i, value, shape)

    def require_place(self, index: int, value: Any, sizes: Sequence[int | None]) -> None:
        """Raises where result `index` of these sizes cannot be written into `value`."""
        what = f"result {index} of '{self.name}'"
        dtype = self._results[index]["dtype"]
        _require_kind(what, value, {"dtype": dtype, "shape": [-1 if s is None else s for s in sizes]})
        _require_writable(what, value)

    def __repr__(self):
        return f"<compiled {self._function.signature}>"

    def allocate(
        self,
        index: int,
        sizes: Sequence[int],
        arguments: Sequence[Any],
    ) -> torch.Tensor | numpy.ndarray:
        """A buffer for result `index`, of the kind that the arguments are."""
        name = _DTYPES[self._results[index]["dtype"]]
        torch: Any = sys.modules.get("torch")
        device = next((a.device for a in arguments if torch and isinstance(a, torch.Tensor)), None)
        if device is not None:
            return torch.empty(sizes, dtype=getattr(torch, name), device=device)
        import numpy

        if name == "bfloat16":
            raise ValueError(f"expected torch tensors for '{self.name}', found numpy arrays, "
                             "which have no bfloat16")
        return numpy.empty(sizes, dtype=name)

    def _sizes(self, arguments) -> list[list[int | None]]:
        """The shapes of the results; None for a size that depends on data."""
        return [[evaluate_expression(size, arguments) for size in result.get("sizes", ())]
                for result in self._results]

    def _known(self, index, sizes):
        if None in sizes:
            raise ValueError(
                f"expected out= for '{self.name}': the size of result {index} depends on data"
            )
        return sizes


class KernelFunction:
    """The kernels of a function, on the device that the buffers are on."""

    def __init__(self, ptx: str, plan: LaunchPlan, chip: str):
        self.signature = f"{plan.name} for {chip}"
        self._ptx = ptx
        self._plan = plan
        self._chip = chip

    def __call__(self, *buffers: Any) -> None:
        from . import gpu
        from .sim.simulation import active_simulation, device_function

        torch = sys.modules.get("torch")
        device = next((b.device for b in buffers if torch and isinstance(b, torch.Tensor)), None)
        _require_one_device(self._plan.name, buffers)
        if device is not None and device.type == "cuda":
            gpu.run_kernels(self._ptx, self._plan, buffers)
        elif (simulation := active_simulation()) is not None:
            simulation.run_function(device_function(self._ptx, self._plan), buffers)
        else:
            raise ValueError(
                f"expected CUDA tensors for '{self._plan.name}', which was compiled for "
                f"{self._chip}, found none; `with moe_mlir.simulate():` runs it on CPU tensors"
            )


class ArtifactProgram:
    """The function of a torch program, with its weights bound.

    Buffers that the model updates in place are the state of this object: calls
    go on from where the last one ended, one at a time.
    """

    def __init__(self, artifact: Artifact):
        description = json.loads(artifact.files["program.json"])
        self.name = description["function"]
        self.function = artifact.functions[self.name]
        self._arguments = description["arguments"]
        self._require_known_state(len(description["results"]), description["outputs"])
        # Code for a CPU writes the next values of state into the arguments, and has no results
        # for them.
        updates = {i: a["updated_by"] for i, a in enumerate(self._arguments) if "updated_by" in a}
        in_place = any(a.get("updated") for a in self.function.arguments)
        rest = [i for i in range(len(description["results"]))
                if not in_place or i not in updates.values()]
        self._results = [description["results"][i] for i in rest]
        self._outputs = [rest.index(i) for i in description["outputs"]]
        self._symbols = description["symbols"]
        self._conditions = description["conditions"]
        stored = _weights_file.tensors_of(artifact.files[_weights_file.NAME])
        self._weights = {"cpu": {a["name"]: _stored(stored, a) for a in self._arguments
                                 if a["kind"] != "input" and "updated_by" not in a}}
        self._require_weights()
        self._state = ProgramState(
            self.name, {i: None if in_place else result for i, result in updates.items()})
        for i in updates:
            self._state.add(i, _first_value(stored, self._arguments[i], self.function.arguments[i]))
        self.inputs = [a["name"] for a in self._arguments if a["kind"] == "input"]

    def _require_weights(self) -> None:
        """Kernels read as many weights as they were compiled for."""
        for argument, expected in zip(self._arguments, self.function.arguments, strict=True):
            if (weight := self._weights["cpu"].get(argument["name"])) is not None:
                _require_kind(f"{_weights_file.NAME}: '{argument['name']}'", weight, expected)

    def _require_known_state(self, results, outputs) -> None:
        """What the code writes must be state: weights cannot be written, inputs are the caller's."""
        in_place = any(a.get("updated") for a in self.function.arguments)
        for argument, compiled in zip(self._arguments, self.function.arguments, strict=True):
            name, update = argument["name"], argument.get("updated_by")
            if compiled.get("updated") and update is None:
                raise ValueError(f"program.json: expected '{name}' to be state, as '{self.name}' "
                                 "updates it")
            if update is not None and (
                    argument["kind"] == "input" or in_place != bool(compiled.get("updated"))
                    or update not in range(results) or update in outputs):
                raise ValueError(f"program.json: expected the next value of '{name}' to be a result "
                                 f"of its own, found result {update}")

    @property
    def has_state(self) -> bool:
        """Whether calls update buffers of the model, which `reset` puts back."""
        return bool(self._state)

    def reset(self) -> None:
        """Puts the buffers that calls update back to what they were when the artifact was loaded."""
        with self._state.acquired():
            self._state.reset()

    def __call__(self, *inputs: Any, out: Any = None, **named: Any) -> Any:
        """Runs the model on its tensor inputs, in the order of `inputs` or by name."""
        given = self._in_order(inputs, named)
        if not self._state:
            return self._run(given, out)
        with self._state.acquired():
            return self._run(given, out)

    def _run(self, given, out):
        arguments = self._bind(given)
        for argument, value, expected in zip(self._arguments, arguments, self.function.arguments):
            if argument["kind"] == "input":
                _require_kind(f"input '{argument['name']}'", value, expected)
        sizes = self._check_sizes(arguments)
        results = self._places(arguments, sizes, out)
        with self._state.updated() if self._state else nullcontext():
            self.function.run(arguments, results)
        chosen = tuple(results[i] for i in self._outputs)
        return chosen[0] if len(chosen) == 1 else chosen

    def _bind(self, given) -> list:
        """The arguments of the function: inputs, weights and state."""
        device = _device_of(given)
        rest, weights, state = iter(given), self._weights_on(device), self._state.values(device)
        return [next(rest) if a["kind"] == "input"
                else state[i] if i in state else weights[a["name"]]
                for i, a in enumerate(self._arguments)]

    def _places(self, arguments, sizes, out) -> list:
        """Where the results of the function go; the caller may give places for those it gets."""
        taken = self._state.places()
        shapes = [[evaluate_text(size, sizes) for size in shape] for shape in self._results]
        rest = [i for i in range(len(shapes)) if i not in taken]
        if out is not None:
            out = list(out) if isinstance(out, (tuple, list)) else [out]
            if len(out) != len(rest):
                raise ValueError(f"expected {len(rest)} buffers as out= for '{self.name}', found "
                                 f"{len(out)}")
            for i, place in zip(rest, out):
                self.function.require_place(i, place, shapes[i])
            _require_apart(self.name, arguments, out)
            taken.update(zip(rest, out))
        return [taken[i] if i in taken else self.function.allocate(i, shape, arguments)
                for i, shape in enumerate(shapes)]

    def _in_order(self, inputs, named) -> list:
        """The inputs in the order of the program."""
        by_name = {**dict(zip(self.inputs, inputs)), **named}
        if len(inputs) + len(named) != len(self.inputs) or by_name.keys() != set(self.inputs):
            raise TypeError(f"expected the inputs {self.inputs}, found {len(inputs)} positional and "
                            f"{sorted(named)}")
        return [by_name[name] for name in self.inputs]

    def _weights_on(self, device):
        """The weights on a device, copied there at the first call."""
        if device not in self._weights:
            self._weights[device] = {
                name: weight.to(device) for name, weight in self._weights["cpu"].items()}
        return self._weights[device]

    def __repr__(self):
        return f"<compiled torch program {self.name}({', '.join(self.inputs)})>"

    def _check_sizes(self, arguments) -> dict:
        """The sizes that the inputs have by their names in the program, if it was compiled for them."""
        sizes = {name: int(arguments[position].shape[dim])
                 for name, (position, dim) in self._symbols.items()}
        if unmet := unmet_condition(self._conditions, sizes):
            places = {name: (self._arguments[position]["name"], dim)
                      for name, (position, dim) in self._symbols.items()}
            described = describe_condition(unmet, sizes, places, "the program was exported")
            raise ValueError(f"{described}; export it with sizes that include this one, and compile "
                             "that")
        for argument, value in zip(self._arguments, arguments):
            for dim, size in enumerate(argument["shape"]):
                expected = evaluate_text(size, sizes)
                if expected != value.shape[dim]:
                    raise ValueError(
                        f"input '{argument['name']}': expected dim {dim} to be {expected}, which is "
                        f"'{size}' for the sizes of the inputs before, found {value.shape[dim]}")
        self.function.require_relations(arguments)
        return sizes


def _require_kind(what, value, expected) -> None:
    """Raises if a value is no tensor of the type and sizes that the manifest describes."""
    shape = getattr(value, "shape", None)
    if shape is None or not hasattr(value, "dtype"):
        raise TypeError(f"{what}: expected a tensor, found {type(value).__name__}")
    wanted, found = _DTYPES[expected["dtype"]], str(value.dtype).removeprefix("torch.")
    if found != wanted:
        raise TypeError(f"{what}: expected {wanted}, found {found}")
    sizes = expected.get("shape", [])
    if len(shape) != len(sizes) or any(e not in (-1, s) for e, s in zip(sizes, shape)):
        raise ValueError(f"{what}: expected shape ["
                         f"{', '.join('?' if e < 0 else str(e) for e in sizes)}], found "
                         f"{list(shape)}")


def _require_writable(what, value) -> None:
    """Raises if kernels cannot write a value where it lies."""
    if _contiguous(value) is not value:
        raise ValueError(f"expected {what} to be contiguous, found strides; pass .contiguous()")
    if hasattr(value, "flags") and not value.flags.writeable:
        raise ValueError(f"expected {what} to be writable, found a read-only array; pass a copy")


def _require_one_device(name, buffers) -> None:
    """Kernels read all buffers by their addresses on one device."""
    places = {str(getattr(b, "device", "cpu")) for b in buffers if hasattr(b, "shape")}
    if len(places) > 1:
        raise ValueError(f"expected all tensors of '{name}' on one device, found them on "
                         f"{' and '.join(sorted(places))}")


def _require_apart(name, arguments, out) -> None:
    """Raises where a result shares memory with an argument or another result.

    Code that writes the one while it reads the other would take new values for old ones.
    """
    buffers = [value for value in (*arguments, *out) if hasattr(value, "shape")]
    first = len(buffers) - len(out)
    pair = shared_pair(buffers, range(first, len(buffers)))
    if pair is None:
        return
    kinds = [("argument", i) for i, value in enumerate(arguments) if hasattr(value, "shape")]
    kinds += [("result", i) for i in range(len(out))]
    (_, result), (what, position) = (kinds[i] for i in pair)
    raise ValueError(f"expected memory of its own for result {result} of '{name}', found that of "
                     f"{what} {position}")


def _contiguous(value):
    """The same numbers in row-major memory, as kernels read them."""
    if hasattr(value, "is_contiguous"):
        return value if value.is_contiguous() else value.contiguous()
    if hasattr(value, "flags") and not value.flags.c_contiguous:
        return value.copy(order="C")
    return value


def _stored(tensors: Mapping[str, Any], argument: Mapping[str, Any]) -> Any:
    """The weight of an argument; tied ones are stored once, under the first one's name."""
    name = argument.get("stored_as", argument["name"])
    if name not in tensors:
        raise ValueError(f"{_weights_file.NAME}: expected '{name}', found no such tensor")
    return tensors[name]


def _first_value(stored, argument, expected) -> Any:
    """The first value of a buffer that calls update; one of zeros is not stored."""
    if argument.get("stored_as", "") is not None:
        first = _stored(stored, argument)
        if [list(first.shape), str(first.dtype).removeprefix("torch.")] != [
                expected["shape"], _DTYPES[expected["dtype"]]]:
            raise ValueError(f"program.json: expected the first value of '{argument['name']}' to be "
                             f"{expected['dtype']} {expected['shape']}, found {first.dtype} "
                             f"{list(first.shape)}")
        return first
    return _weights_file.zeros(expected["shape"], _DTYPES[expected["dtype"]])


def _device_of(inputs) -> str:
    return str(getattr(inputs[0], "device", "cpu")) if inputs else "cpu"


def load(path: str | os.PathLike[str], *, verify: bool = False) -> Artifact:
    """Loads an artifact folder. Its code runs in this process: trust its source.

    Weights are mapped from their file, which all processes share; the file may
    be replaced, and not changed in place, while they are in use.

    Args:
        verify: check the values of weights of any size against their checksum,
            which reads them all. Without it that is done up to 64 MiB; of
            larger weights the number of bytes and the table of where they lie
            are checked. All else is checked always.

    Raises:
        ValueError: the folder is damaged, of another format version, or for
            another CPU.
    """
    folder = Path(path)
    manifest = _read_manifest(folder)
    files = {name: _map_verified(folder, expected, verify) if name == _weights_file.NAME
             else _read_verified(folder, name, expected)
             for name, expected in manifest["files"].items()}
    artifact = Artifact(manifest, files)
    find = _host_functions(artifact, folder) if artifact.target == "cpu" else _kernels(artifact)
    artifact.functions = {d["name"]: ArtifactFunction(find(d), d) for d in manifest["functions"]}
    if "program.json" in files:
        program = ArtifactProgram(artifact)
        artifact.functions[program.name] = program
    return artifact


def _host_functions(artifact, folder):
    _require_this_cpu(folder, artifact.manifest["target"])
    executable = native().Executable(artifact.files["kernel.o"])
    return lambda description: executable.function(description["name"])


def _kernels(artifact):
    from .launch import LaunchPlan

    return lambda description: KernelFunction(
        artifact.ptx, LaunchPlan(description), artifact.target)


def _read_manifest(folder: Path) -> dict:
    path = folder / "manifest.json"
    try:
        text = _files.read_regular(path)
        manifest = json.loads(text)
    except OSError as error:
        raise ValueError(f"expected an artifact folder at {folder}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected JSON in {path}: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise ValueError(f"expected {path} to be a manifest of moe-compile, found another file")
    if manifest.get("format_version") != _FORMAT_VERSION:
        raise ValueError(
            f"expected artifact format {_FORMAT_VERSION} in {path}, found "
            f"{manifest.get('format_version')}; compile again with this version"
        )
    # A line as sha256sum writes it. Sizes and grids that a flipped bit has changed would give
    # wrong results, not errors.
    _verify_digest(text, path, _read(folder, path.name + ".sha256")[:64].decode("latin-1"))
    return manifest


def _read(folder: Path, name: str) -> bytes:
    try:
        return _files.read_regular(folder / name)
    except OSError as error:
        raise ValueError(f"expected '{name}' in the artifact {folder}: {error}") from None


def _verify_digest(data: bytes | mmap.mmap, what: Path | str, expected: str) -> None:
    found = hashlib.sha256(data).hexdigest()
    if found != expected:
        raise ValueError(
            f"expected {what} to have SHA-256 {expected}, found {found}; the artifact is damaged, "
            "compile it again"
        )


def _read_verified(folder: Path, name: str, expected: dict) -> bytes:
    if os.path.basename(name) != name:
        raise ValueError(f"expected plain file names in the manifest, found '{name}'")
    data = _read(folder, name)
    _verify_digest(data, folder / name, expected["sha256"])
    return data


def _map_verified(folder: Path, expected: dict, verify: bool) -> bytes | mmap.mmap:
    """Weights, which are not read before a kernel needs them; compilers of before have left no
    digest of their header."""
    path = folder / _weights_file.NAME
    try:
        data = _weights_file.map_file(path)
    except OSError as error:
        raise ValueError(f"expected '{path.name}' in the artifact {folder}: {error}") from None
    if len(data) != expected["size"]:
        raise ValueError(f"expected {path} to have {expected['size']} bytes, found {len(data)}; the "
                         "artifact is damaged, compile it again")
    if verify or "header_sha256" not in expected or len(data) <= _MAX_VERIFIED_BYTES:
        _verify_digest(data, path, expected["sha256"])
    else:
        _verify_digest(_weights_file.header_of(data), f"the header of {path}",
                       expected["header_sha256"])
    return data


def _require_this_cpu(folder: Path, target: dict) -> None:
    """Code with instructions that this CPU lacks would end the process."""
    missing = missing_features(target["features"])
    if missing:
        raise ValueError(
            f"expected {folder} to be compiled for this CPU, found code for {target['cpu']}, "
            f"which has {', '.join(missing)}; compile it here, or with --cpu={recommended()}"
        )
