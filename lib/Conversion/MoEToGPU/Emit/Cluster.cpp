//===- Cluster.cpp - Blocks that share workgroup memory -------------------===//

#include "Cluster.h"
#include "ThreadBuilder.h"

#include "MoE/Support/ElementBytes.h"
#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/LLVMIR/NVVMDialect.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "mlir/Dialect/SCF/IR/SCF.h"

using namespace mlir;
using namespace mlir::moe;

static constexpr unsigned kSharedSpace = 3, kClusterSpace = 7;

void mlir::moe::setBlockThreads(ThreadBuilder &b, int64_t numThreads) {
  auto loop = cast<scf::ForallOp>(b.getInsertionBlock()->getParentOp());
  loop->setAttr(kBlockThreadsAttrName, b.getI32IntegerAttr(numThreads));
}

Cluster::Cluster(ThreadBuilder &b, BlockShape block,
                 ArrayRef<OpFoldResult> numClusters)
    : b(b), block(block), size(block.clusterBlocks) {
  SmallVector<OpFoldResult> numBlocks(numClusters);
  numBlocks.push_back(b.getIndexAttr(size));
  ids = createGrid(b, numBlocks);
  auto loop = cast<scf::ForallOp>(b.getInsertionBlock()->getParentOp());
  if (size > 1)
    loop->setAttr(kClusterBlocksAttrName, b.getI32IntegerAttr(size));
}

Workers Cluster::getWorkers() {
  return Workers::ofGrid(b, block, getRank(), size);
}

std::pair<Value, Value> Cluster::getPart(Value count, unsigned dim,
                                         Value numParts) {
  auto cut = [&](Value first, Value end, Value number, Value parts) {
    Value length = b.sub(end, first);
    length =
        b.op<arith::DivUIOp>(b.add(length, b.sub(parts, b.index(1))), parts);
    Value begin =
        b.op<arith::MinUIOp>(b.add(first, b.mul(number, length)), end);
    return std::pair(begin, b.op<arith::MinUIOp>(b.add(begin, length), end));
  };
  auto [begin, end] = cut(b.index(0), count, getId(dim), numParts);
  return cut(begin, end, getRank(), b.index(size));
}

void Cluster::barrier() {
  if (size == 1) {
    gpu::BarrierOp::create(b);
    return;
  }
  NVVM::ClusterArriveOp::create(b, /*aligned=*/b.getUnitAttr());
  NVVM::ClusterWaitOp::create(b, /*aligned=*/b.getUnitAttr());
}

/// The place of an element in the memory of block `rank`.
Value Cluster::getPointer(Value buffer, Value position, int64_t rank) {
  MLIRContext *context = b.getContext();
  auto pointerTo = [&](unsigned space) {
    return LLVM::LLVMPointerType::get(context, space);
  };
  int64_t bytes = getElementBytes(getElementTypeOrSelf(buffer.getType()));
  Value address = memref::ExtractAlignedPointerAsIndexOp::create(b, buffer);
  address = b.add(address, b.mul(b.toIndex(position), b.index(bytes)));
  Value pointer = LLVM::IntToPtrOp::create(b, pointerTo(0),
                                           b.castInt(address, b.getI64Type()));
  if (size == 1)
    return pointer;
  pointer = LLVM::AddrSpaceCastOp::create(b, pointerTo(kSharedSpace), pointer);
  return NVVM::MapaOp::create(b, pointerTo(kClusterSpace), pointer,
                              b.i32(rank));
}

Value Cluster::load(Value buffer, Value position, int64_t rank) {
  Type type = getElementTypeOrSelf(buffer.getType());
  return LLVM::LoadOp::create(b, type, getPointer(buffer, position, rank),
                              getElementBytes(type));
}

Value Cluster::sum(Value buffer, Value position) {
  Value total;
  for (int64_t rank = 0; rank < size; ++rank) {
    Value part = load(buffer, position, rank);
    total = total ? b.add(total, part) : part;
  }
  return total;
}

void Cluster::storeToAll(Value value, Value buffer, Value position) {
  for (int64_t rank = 0; rank < size; ++rank)
    LLVM::StoreOp::create(b, value, getPointer(buffer, position, rank),
                          getElementBytes(value.getType()));
}
