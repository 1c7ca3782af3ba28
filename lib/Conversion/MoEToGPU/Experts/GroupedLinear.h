//===- GroupedLinear.h - Which layers of experts have a kernel --*- C++ -*-===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_EXPERTS_GROUPEDLINEAR_H
#define MOE_LIB_CONVERSION_MOETOGPU_EXPERTS_GROUPEDLINEAR_H

#include "MoE/Dialect/MoE/IR/MoE.h"
#include "mlir/Dialect/Func/IR/FuncOps.h"

namespace mlir::moe {

/// Whether the kernel for few rows an expert computes `op`, on tensors or
/// buffers: rows and weights of one 16-bit type without gaps, a static number
/// of features, a multiple of 64, and weights [experts, out, in] as they are.
bool hasKernelOfFewRows(GroupedLinearOp op);

/// Whether the kernel for many rows an expert does, on a chip with wgmma: rows
/// and weights of one 16-bit type without gaps, whose sizes but the number of
/// rows are static, and whose rows are whole units of 16 bytes.
bool hasKernelOfManyRows(GroupedLinearOp op);

/// Gives the ops of `function` on buffers whose rows have gaps between them
/// copies without, and results that are copied: which buffers have gaps is not
/// known before, when the ops got a kernel.
void closeGapsOfGroupedLinear(func::FuncOp function);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_EXPERTS_GROUPEDLINEAR_H
