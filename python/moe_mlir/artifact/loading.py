"""Artifacts of moe-compile: folders with a manifest and code."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._native import native
from .._support.files import read_regular
from ..compiler.host_cpu import missing_features, recommended
from . import decoder, weights_file
from .decoder import ArtifactDecoder
from .functions import ArtifactFunction, KernelFunction
from .program import ArtifactProgram

_FORMAT = "moe-mlir-artifact"
# Decoders are of the version after that of all other artifacts.
_FORMAT_VERSIONS = (2, 3)
# Weights of up to this size are read and checked whenever they are loaded.
_MAX_VERIFIED_BYTES = 64 << 20


@dataclass
class Artifact:
    """A checked artifact. Calling it calls its only function.

    Attributes:
        manifest: the content of manifest.json.
        files: file name to content, verified against the manifest; weights are
            mapped, and verified as `load` says.
        functions: name to `ArtifactFunction`, `ArtifactProgram` or `ArtifactDecoder`.
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

    @property
    def decoder(self) -> ArtifactDecoder:
        """The language model of an artifact of `moe_mlir.save_decoder`."""
        found = self.functions.get(ArtifactDecoder.name)
        if not isinstance(found, ArtifactDecoder):
            raise ValueError("expected an artifact of moe_mlir.save_decoder, found one of the functions "
                             f"{sorted(self.functions)}; call these")
        return found

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
            if isinstance(function, (ArtifactProgram, ArtifactDecoder)):
                function.reset()

    def __repr__(self):
        return f"<artifact for {self.target}: {', '.join(map(repr, self.functions.values()))}>"


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
    files = {name: _map_verified(folder, expected, verify) if name == weights_file.NAME
             else _read_verified(folder, name, expected)
             for name, expected in manifest["files"].items()}
    artifact = Artifact(manifest, files)
    find = _host_functions(artifact, folder) if artifact.target == "cpu" else _kernels(artifact)
    artifact.functions = {d["name"]: ArtifactFunction(find(d), d) for d in manifest["functions"]}
    if "program.json" in files:
        program = ArtifactProgram(files, artifact.functions)
        artifact.functions[program.name] = program
    if decoder.NAME in files:
        artifact.functions = {ArtifactDecoder.name: ArtifactDecoder(files, artifact.functions)}
    return artifact


def _host_functions(artifact, folder):
    _require_this_cpu(folder, artifact.manifest["target"])
    executable = native().Executable(artifact.files["kernel.o"])
    return lambda description: executable.function(description["name"])


def _kernels(artifact):
    from ..gpu.launch import LaunchPlan

    return lambda description: KernelFunction(
        artifact.ptx, LaunchPlan(description), artifact.target)


def _read_manifest(folder: Path) -> dict:
    path = folder / "manifest.json"
    try:
        text = read_regular(path)
        manifest = json.loads(text)
    except OSError as error:
        raise ValueError(f"expected an artifact folder at {folder}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected JSON in {path}: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise ValueError(f"expected {path} to be a manifest of moe-compile, found another file")
    if manifest.get("format_version") not in _FORMAT_VERSIONS:
        raise ValueError(
            f"expected artifact format {' or '.join(map(str, _FORMAT_VERSIONS))} in {path}, found "
            f"{manifest.get('format_version')}; compile again with this version"
        )
    # A line as sha256sum writes it. Sizes and grids that a flipped bit has changed would give
    # wrong results, not errors.
    _verify_digest(text, path, _read(folder, path.name + ".sha256")[:64].decode("latin-1"))
    return manifest


def _read(folder: Path, name: str) -> bytes:
    try:
        return read_regular(folder / name)
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
    path = folder / weights_file.NAME
    try:
        data = weights_file.map_file(path)
    except OSError as error:
        raise ValueError(f"expected '{path.name}' in the artifact {folder}: {error}") from None
    if len(data) != expected["size"]:
        raise ValueError(f"expected {path} to have {expected['size']} bytes, found {len(data)}; the "
                         "artifact is damaged, compile it again")
    if verify or "header_sha256" not in expected or len(data) <= _MAX_VERIFIED_BYTES:
        _verify_digest(data, path, expected["sha256"])
    else:
        _verify_digest(weights_file.header_of(data), f"the header of {path}",
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
