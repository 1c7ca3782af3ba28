//===- Passes.td - Passes that leave the moe dialect -------*- tablegen -*-===//
//
// Keep alphabetical.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_CONVERSION_PASSES_TD
#define MOE_CONVERSION_PASSES_TD

include "mlir/Pass/PassBase.td"

def ConvertMoEToCPUPass
    : Pass<"convert-moe-to-cpu", "mlir::func::FuncOp"> {
  let summary = "Turn moe ops and contractions on buffers into vector code";
  let description = [{
    Turns `moe.topk_renorm`, `moe.softmax_mix`, `moe.mad_dispersion`,
    `moe.adjacency_update` and contractions of `linalg`, all on buffers with
    contiguous rows, into `scf` loops over 1-D vectors of `vector-width` lanes.
    Other moe ops must have been decomposed; one that is left is an error.

    The order of every float reduction is fixed and does not depend on the
    position of a row in the buffer or on the number of rows, so that results
    do not change with tiling, threads or batch.
  }];
  let dependentDialects = [
    "::mlir::arith::ArithDialect",
    "::mlir::linalg::LinalgDialect",
    "::mlir::math::MathDialect",
    "::mlir::memref::MemRefDialect",
    "::mlir::scf::SCFDialect",
    "::mlir::vector::VectorDialect",
  ];
  let options = [
    Option<"vectorWidth", "vector-width", "int64_t", /*default=*/"16",
           "lanes of a vector, a power of two; 16 is one AVX-512 register">,
  ];
}

#endif // MOE_CONVERSION_PASSES_TD
