"""MLIR text of kernels that several ops become together: routers, and experts' products."""

from collections.abc import Sequence

import torch

from moe_mlir.ops._kernel import ELEMENT_TYPES

from .target import Module


def _tensor(shape, element) -> str:
    return f"tensor<{''.join(f'{size}x' for size in shape)}{element}>"


def router_text(experts: int, width: int, k: int, *, dtype: torch.dtype, bias: bool = False,
                batch: Sequence[int | str] = (), choice: str = "", is_biased: bool = False) -> str:
    """@route: projection and selection, which become one kernel.

    `choice` are attributes of moe.topk_renorm; with `is_biased` the last argument, f32, is added
    to the scores for the choice alone.
    """
    element = ELEMENT_TYPES[dtype]
    h, w = _tensor((*batch, "?", width), element), _tensor((experts, width), element)
    b = _tensor((experts,), element)
    z, gates = _tensor((*batch, "?", experts), "f32"), _tensor((*batch, "?", k), "f32")
    indices = _tensor((*batch, "?", k), "i32")
    parameter = f", %b: {b}" if bias else ""
    clause = f" bias(%b : {b})" if bias else ""
    scores = _tensor((experts,), "f32")
    parameter += f", %c: {scores}" if is_biased else ""
    added = f" bias(%c : {scores})" if is_biased else ""
    return f"""
func.func @route(%h: {h}, %w: {w}{parameter}) -> ({gates}, {indices}) {{
  %c0 = arith.constant {len(batch)} : index
  %n = tensor.dim %h, %c0 : {h}
  %z0 = tensor.empty(%n) : {z}
  %z = moe.router_logits ins(%h, %w : {h}, {w}){clause}
      outs(%z0 : {z}) -> {z}
  %g0 = tensor.empty(%n) : {gates}
  %i0 = tensor.empty(%n) : {indices}
  %r:2 = moe.topk_renorm ins(%z : {z}){added}
      outs(%g0, %i0 : {gates}, {indices}){f" {{{choice}}}" if choice else ""}
      -> {gates}, {indices}
  return %r#0, %r#1 : {gates}, {indices}
}}"""


def experts_text(experts: int, width: int, hidden: int, dtype: torch.dtype,
                 transposed: bool = False) -> str:
    """@layer: each expert's weights times its run of rows, added to what was there.

    Weights are [experts, hidden, width], or with `transposed` [experts, width, hidden].
    """
    element = ELEMENT_TYPES[dtype]
    x, y = _tensor(("?", width), element), _tensor(("?", hidden), "f32")
    matrix = (width, hidden) if transposed else (hidden, width)
    widened = "      %2 = arith.mulf %left, %right : f32" if dtype == torch.float32 else f"""\
      %0 = arith.extf %left : {element} to f32
      %1 = arith.extf %right : {element} to f32
      %2 = arith.mulf %0, %1 : f32"""
    w, one = _tensor((experts, *matrix), element), _tensor(matrix, element)
    offsets = _tensor((experts + 1,), "i64")
    return f"""
func.func @layer(%x: {x}, %w: {w}, %offsets: {offsets}, %old: {y}) -> {y} {{
  %c1 = arith.constant 1 : index
  %y = scf.forall (%e) in ({experts}) shared_outs(%out = %old) -> ({y}) {{
    %next = arith.addi %e, %c1 : index
    %b = tensor.extract %offsets[%e] : {offsets}
    %t = tensor.extract %offsets[%next] : {offsets}
    %begin = arith.index_cast %b : i64 to index
    %end = arith.index_cast %t : i64 to index
    %rows = arith.subi %end, %begin : index
    %run = tensor.extract_slice %x[%begin, 0] [%rows, {width}] [1, 1] : {x} to {x}
    %place = tensor.extract_slice %out[%begin, 0] [%rows, {hidden}] [1, 1] : {y} to {y}
    %weight = tensor.extract_slice %w[%e, 0, 0] [1, {matrix[0]}, {matrix[1]}] [1, 1, 1]
        : {w} to {one}
    %product = linalg.generic {{
        indexing_maps = [affine_map<(r, n, d) -> (r, d)>,
                         affine_map<(r, n, d) -> ({'d, n' if transposed else 'n, d'})>,
                         affine_map<(r, n, d) -> (r, n)>],
        iterator_types = ["parallel", "parallel", "reduction"]}}
        ins(%run, %weight : {x}, {one}) outs(%place : {y}) {{
    ^bb0(%left: {element}, %right: {element}, %sum: f32):
{widened}
      %3 = arith.addf %sum, %2 : f32
      linalg.yield %3 : f32
    }} -> {y}
    scf.forall.in_parallel {{
      tensor.parallel_insert_slice %product into %out[%begin, 0] [%rows, {hidden}] [1, 1]
          : {y} into {y}
    }}
  }}
  return %y : {y}
}}"""


# DeepSeek-V3's: the experts of 4 of 8 groups, by sigmoids.
DEEPSEEK = ("score = #moe.score_function<sigmoid>, n_group = 8 : i64, topk_group = 4 : i64, "
            "eps = 1.0e-20 : f64, route_scale = 2.5 : f64")


def route(module: Module, k: int, h: torch.Tensor,
          *weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gates and indices of `router_text`."""
    gates = torch.empty(*h.shape[:-1], k, device=h.device)
    indices = torch.empty(*h.shape[:-1], k, dtype=torch.int32, device=h.device)
    module(h, *weights, gates, indices)
    return gates, indices


def multiply_experts(module: Module, x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor,
                     old: torch.Tensor) -> torch.Tensor:
    """The result of `experts_text`."""
    y = torch.empty_like(old)
    module(x, w, offsets, old, y)
    return y
