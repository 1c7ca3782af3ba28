"""A decoder as `moe_mlir.save_decoder` leaves it for moe-compile, so small that it needs no model."""

import hashlib
import json
import struct
from pathlib import Path

# Keeps a sum of rows, and gives logits of it and of a counter; for one token, or any number. Rows of
# zeros, one for each call, are made anew; there are none before the first.
_PROGRAM = """
#kept = affine_map<(d0, d1) -> (d0, d1)>
func.func @main(%table: tensor<5x4xf32>, %ids: tensor<1xTOKENSxi64>, %kept: tensor<1x4xf32>,
                %counted: tensor<?x0xf32>, %grown: tensor<?x4xf32>)
    -> (tensor<1x5xf32>, tensor<?x4xf32>, tensor<1x4xf32> {moe.updates = 2 : i64}) {
  %zero = arith.constant 0 : index
  %count = tensor.dim %counted, %zero : tensor<?x0xf32>
  %id = tensor.extract %ids[%zero, %zero] : tensor<1xTOKENSxi64>
  %at = arith.index_cast %id : i64 to index
  %rows = arith.constant 5 : index
  %inside = arith.cmpi ult, %at, %rows : index
  moe.assert <index> %inside, "expected an id less than {1}, found {0}" (%at, %rows : index, index)
  %row = tensor.extract_slice %table[%at, 0] [1, 4] [1, 1] : tensor<5x4xf32> to tensor<1x4xf32>
  %sums = tensor.empty() : tensor<1x4xf32>
  %sum = linalg.add ins(%row, %kept : tensor<1x4xf32>, tensor<1x4xf32>)
      outs(%sums : tensor<1x4xf32>) -> tensor<1x4xf32>
  %whole = arith.index_cast %count : index to i64
  %number = arith.sitofp %whole : i64 to f32
  %empty = tensor.empty() : tensor<1x5xf32>
  %logits = linalg.generic {indexing_maps = [#kept], iterator_types = ["parallel", "parallel"]}
      outs(%empty : tensor<1x5xf32>) {
  ^bb0(%unused: f32):
    %value = tensor.extract %sum[%zero, %zero] : tensor<1x4xf32>
    %logit = arith.addf %value, %number : f32
    linalg.yield %logit : f32
  } -> tensor<1x5xf32>
  %calls = tensor.dim %grown, %zero : tensor<?x4xf32>
  %one = arith.constant 1 : index
  %more = arith.addi %calls, %one : index
  %nothing = arith.constant 0.0 : f32
  %place = tensor.empty(%more) : tensor<?x4xf32>
  %made = linalg.fill ins(%nothing : f32) outs(%place : tensor<?x4xf32>) -> tensor<?x4xf32>
  return %logits, %made, %sum : tensor<1x5xf32>, tensor<?x4xf32>, tensor<1x4xf32>
}
"""


def save(folder: Path) -> Path:
    """Writes it into a folder, which moe-compile takes."""
    folder.mkdir()
    programs = []
    for number, tokens in enumerate((1, "s0")):
        name = f"program_{number}"
        text = _PROGRAM.replace("TOKENS", "1" if tokens == 1 else "?")
        (folder / f"{name}.mlir").write_text(text)
        programs.append(_describe(name, number, tokens))
    entry = _write_weights(folder / "weights.safetensors")
    (folder / "files.json").write_text(json.dumps({"weights.safetensors": entry}))
    kept = {"name": "kept", "dtype": "f32", "shape": [1, 4], "stored_as": "kept.initial"}
    grown = {"name": "grown", "dtype": "f32", "shape": [0, 4], "stored_as": None}
    (folder / "decoder.json").write_text(json.dumps({
        "room": 9, "sequences": 1, "vocabulary": 5, "form": 0, "counters": [0], "state": [kept, grown],
        "programs": programs}, indent=1))
    return folder


def _describe(name, number, tokens) -> dict:
    symbols = {"s1": [3, 0], "s2": [4, 0], **({} if tokens == 1 else {"s0": [1, 1]})}
    return {
        "function": name, "form": 0, "next_form": 0,
        "arguments": [
            {"name": "table", "shape": [5, 4], "kind": "weight", "stored_as": "table"},
            {"name": "ids", "shape": [1, tokens], "kind": "ids"},
            {"name": "kept", "shape": [1, 4], "kind": "state"},
            {"name": "counted", "shape": ["s1", 0], "kind": "counter", "counters": [0]},
            {"name": "grown", "shape": ["s2", 4], "kind": "state"}],
        "symbols": symbols,
        "conditions": [["s1", ">=", 2], *([["s0 + s1 - 2", "<=", 9]] if number else [])],
        "changes": [[0, f"s1 - 2 + {tokens}"]],
        "makes": [{"name": "grown", "shape": ["s2 + 1", 4]}]}


def _write_weights(path) -> dict:
    """Twenty numbers, and four, each from a multiple of 64 bytes on."""
    header = json.dumps({
        "table": {"dtype": "F32", "shape": [5, 4], "data_offsets": [0, 80]},
        "__padding__/0": {"dtype": "I8", "shape": [48], "data_offsets": [80, 128]},
        "kept.initial": {"dtype": "F32", "shape": [1, 4], "data_offsets": [128, 144]}}).encode()
    header += b" " * (-(len(header) + 8) % 64)
    header = struct.pack("<Q", len(header)) + header
    data = header + struct.pack("<20f", *range(20)) + bytes(48) + struct.pack("<4f", 1, 2, 3, 4)
    path.write_bytes(data)
    return {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data),
            "header_sha256": hashlib.sha256(header).hexdigest()}
