//===- Passes.td - Passes that stay in the moe dialect -----*- tablegen -*-===//
//
// Keep alphabetical.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_TRANSFORMS_PASSES_TD
#define MOE_TRANSFORMS_PASSES_TD

include "mlir/Pass/PassBase.td"

def MoETileAndFusePass
    : Pass<"moe-tile-and-fuse", "mlir::func::FuncOp"> {
  let summary = "Tile ops over their rows and fuse producers into the tiles";
  let description = [{
    Turns every op with `TilingInterface` that nothing consumes tile by tile
    into one `scf.forall` over tiles of its rows, and computes its producers
    inside the tile where each of their rows is needed exactly once. What is
    tiled follows from the op's maps: the parallel dims that all its results
    span, except the innermost dim of the results, which stays contiguous.

    A producer that is not fused gets a missed remark with the reason
    (`--remarks-filter-missed='moe-.*'`). Bits do not change: each result
    element is computed by the same op from the same operands.
  }];
  let dependentDialects = [
    "::mlir::affine::AffineDialect",
    "::mlir::scf::SCFDialect",
    "::mlir::tensor::TensorDialect",
  ];
  let options = [
    Option<"tileSize", "tile-size", "int64_t", /*default=*/"64",
           "rows of a tile">,
    Option<"gpuBlocks", "gpu-blocks", "bool", /*default=*/"false",
           "map the tiles to the blocks of a GPU grid">,
  ];
  let statistics = [
    Statistic<"numTiled", "num-tiled", "Number of ops tiled">,
    Statistic<"numFused", "num-fused", "Number of producers fused">,
    Statistic<"numNotFused", "num-not-fused",
              "Number of producers that could not be fused">,
  ];
}

#endif // MOE_TRANSFORMS_PASSES_TD
