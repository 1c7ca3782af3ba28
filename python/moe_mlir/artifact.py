"""Artifacts of moe-compile: folders with a manifest and code."""

import hashlib
import importlib.util
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from ._native import native

_FORMAT = "moe-mlir-artifact"
_FORMAT_VERSION = 1
_DTYPES = {"i1": "bool", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64",
           "index": "int64", "f16": "float16", "bf16": "bfloat16", "f32": "float32",
           "f64": "float64"}


@dataclass
class Artifact:
    """A checked artifact. Calling it calls its only function.

    Attributes:
        manifest: the content of manifest.json.
        files: file name to content, verified against the manifest.
        functions: name to `ArtifactFunction`; empty unless the target is the CPU.
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

    def __call__(self, *arguments, out=None):
        if len(self.functions) != 1:
            raise ValueError(
                "expected an artifact with one function to call, found "
                f"{sorted(self.functions) or f'GPU kernels for {self.target}'}; "
                "use .functions[name]" + ("" if self.functions else " of a CPU artifact")
            )
        return next(iter(self.functions.values()))(*arguments, out=out)


class ArtifactFunction:
    """A function of a CPU artifact: tensors in, new tensors out."""

    def __init__(self, function, description):
        self.name = description["name"]
        self.signature = function.signature
        self._function = function
        self._results = description["results"]

    def __call__(self, *arguments, out=None):
        """Runs on CPU tensors of torch or on numpy arrays.

        Args:
            out: the result buffers, for results whose size depends on data, or
                to avoid an allocation.

        Returns:
            The result, or a tuple of results; torch tensors if an argument is one.
        """
        if out is None:
            out = [self.allocate(i, self._sizes(i, arguments), arguments)
                   for i in range(len(self._results))]
        elif not isinstance(out, (tuple, list)):
            out = [out]
        self._function(*arguments, *out)
        return out[0] if len(out) == 1 else tuple(out)

    def __repr__(self):
        return f"<compiled {self.signature}>"

    def allocate(self, index, sizes, arguments):
        """A buffer for result `index`, of the kind that the arguments are."""
        name = _DTYPES[self._results[index]["dtype"]]
        torch = sys.modules.get("torch")
        if torch is not None and any(isinstance(a, torch.Tensor) for a in arguments):
            return torch.empty(sizes, dtype=getattr(torch, name))
        import numpy

        if name == "bfloat16":
            raise ValueError(f"expected torch tensors for '{self.name}', found numpy arrays, "
                             "which have no bfloat16")
        return numpy.empty(sizes, dtype=name)

    def _sizes(self, index, arguments):
        sizes = [evaluate_size(size, arguments) for size in self._results[index]["sizes"]]
        if None in sizes:
            raise ValueError(
                f"expected out= for '{self.name}': the size of result {index} depends on data"
            )
        return sizes


class ArtifactProgram:
    """The function of a torch program, with its weights bound."""

    def __init__(self, artifact):
        description = json.loads(artifact.files["program.json"])
        self.name = description["function"]
        self.function = artifact.functions[self.name]
        self._arguments = description["arguments"]
        self._results = description["results"]
        self._outputs = description["outputs"]
        self._symbols = description["symbols"]
        self._weights = _read_weights(artifact.files["weights.safetensors"])
        self.inputs = [a["name"] for a in self._arguments if a["kind"] == "input"]

    def __call__(self, *inputs, out=None):
        """Runs the model on its tensor inputs, in the order of `inputs`."""
        if len(inputs) != len(self.inputs):
            raise TypeError(f"expected the inputs {self.inputs}, found {len(inputs)} inputs")
        rest = iter(inputs)
        arguments = [next(rest) if a["kind"] == "input" else self._weights[a["name"]]
                     for a in self._arguments]
        if out is None:
            out = self._allocate(arguments)
        results = self.function(*arguments, out=out)
        results = results if isinstance(results, tuple) else (results,)
        chosen = tuple(results[i] for i in self._outputs)
        return chosen[0] if len(chosen) == 1 else chosen

    def __repr__(self):
        return f"<compiled torch program {self.name}({', '.join(self.inputs)})>"

    def _allocate(self, arguments):
        from .sizes import evaluate_size as evaluate_text

        symbols = {name: int(arguments[position].shape[dim])
                   for name, (position, dim) in self._symbols.items()}
        return [self.function.allocate(i, [evaluate_text(size, symbols) for size in shape],
                                       arguments)
                for i, shape in enumerate(self._results)]


def _read_weights(data: bytes) -> dict:
    if importlib.util.find_spec("torch"):
        from safetensors.torch import load as read
    else:
        from safetensors.numpy import load as read
    return read(data)


def evaluate_size(size, arguments):
    """A size expression of the manifest for these arguments; None if it has no value."""
    if size is None or isinstance(size, int):
        return size
    operation, *operands = size
    if operation == "arg":
        position, *dim = operands
        if position >= len(arguments):
            return None
        return int(arguments[position].shape[dim[0]] if dim else arguments[position])
    a, b = (evaluate_size(operand, arguments) for operand in operands)
    return {"+": lambda: a + b, "*": lambda: a * b, "//": lambda: a // b, "%": lambda: a % b,
            "ceildiv": lambda: -(-a // b)}[operation]()


def load(path) -> Artifact:
    """Loads an artifact folder. Its code runs in this process: trust its source.

    Raises:
        ValueError: the folder is damaged, of another format version, or for
            another CPU.
    """
    folder = Path(path)
    manifest = _read_manifest(folder)
    files = {name: _read_verified(folder, name, expected)
             for name, expected in manifest["files"].items()}
    artifact = Artifact(manifest, files)
    if artifact.target == "cpu":
        _require_this_cpu(folder, manifest["target"])
        executable = native().Executable(files["kernel.o"])
        artifact.functions = {d["name"]: ArtifactFunction(executable.function(d["name"]), d)
                              for d in manifest["functions"]}
        if "program.json" in files:
            program = ArtifactProgram(artifact)
            artifact.functions[program.name] = program
    return artifact


def _read_manifest(folder: Path) -> dict:
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"expected an artifact folder at {folder}: {error}") from None
    except ValueError as error:
        raise ValueError(f"expected JSON in {path}: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise ValueError(f"expected {path} to be a manifest of moe-compile, found another file")
    if manifest.get("format_version") != _FORMAT_VERSION:
        raise ValueError(
            f"expected artifact format {_FORMAT_VERSION} in {path}, found "
            f"{manifest.get('format_version')}; compile again with this version"
        )
    return manifest


def _read_verified(folder: Path, name: str, expected: dict) -> bytes:
    if os.path.basename(name) != name:
        raise ValueError(f"expected plain file names in the manifest, found '{name}'")
    try:
        data = (folder / name).read_bytes()
    except OSError as error:
        raise ValueError(f"expected '{name}' in the artifact {folder}: {error}") from None
    found = hashlib.sha256(data).hexdigest()
    if found != expected["sha256"]:
        raise ValueError(
            f"expected {folder / name} to have SHA-256 {expected['sha256']}, found {found}; the "
            "artifact is damaged, compile it again"
        )
    return data


def _require_this_cpu(folder: Path, target: dict) -> None:
    """Code with instructions that this CPU lacks would end the process."""
    absent = {f[1:] for f in native().host_cpu()[1].split(",") if f.startswith("-")}
    needed = {f[1:] for f in target["features"].split(",") if f.startswith("+")}
    missing = sorted(needed & absent)
    if missing:
        raise ValueError(
            f"expected {folder} to be compiled for this CPU, found code for {target['cpu']}, "
            f"which has {', '.join(missing)}; compile it here, or with --cpu=x86-64-v3"
        )
