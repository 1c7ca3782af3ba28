//===- KernelFacts.h - What kernels say of the ops they lower ---*- C++ -*-===//
//
// Which ops have a kernel is read off the patterns. What a pattern does not
// show, its family of kernels says here: which forms of its op it lowers, how
// many rows of it a block should take, and with how many threads. The passes
// that prepare ops for kernels ask these facts and know no op.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_KERNELFACTS_H
#define MOE_LIB_CONVERSION_MOETOGPU_KERNELFACTS_H

#include "ThreadLowerings.h"

#include "llvm/ADT/DenseMap.h"
#include "llvm/ADT/DenseSet.h"

#include <functional>

namespace mlir::moe {

class KernelFacts {
public:
  explicit KernelFacts(MLIRContext *context);

  /// The kernel of `OpTy` lowers the forms for which `hasKernel` holds, those
  /// with what `requirement` says.
  template <typename OpTy>
  void addForms(bool (*hasKernel)(OpTy), StringRef requirement) {
    forms[TypeID::get<OpTy>()] = {
        [=](Operation *op) { return hasKernel(cast<OpTy>(op)); }, requirement};
  }
  /// A block should take `getTileRows` rows of `OpTy`; with nullopt as many as
  /// its other ops do.
  template <typename OpTy>
  void addTileRows(std::optional<int64_t> (*getTileRows)(OpTy, BlockShape)) {
    tileRows[TypeID::get<OpTy>()] = [=](Operation *op, BlockShape block) {
      return getTileRows(cast<OpTy>(op), block);
    };
  }
  /// The same for an op that shares the rows of its block with other ops: the
  /// one that wants the most decides.
  template <typename OpTy>
  void addSharedTileRows(std::optional<int64_t> (*getTileRows)(OpTy,
                                                               BlockShape)) {
    sharedTileRows[TypeID::get<OpTy>()] = [=](Operation *op, BlockShape block) {
      return getTileRows(cast<OpTy>(op), block);
    };
  }
  /// The kernel of `OpTy` wants blocks of `getThreads` threads; the kernels of
  /// other ops take what they get.
  template <typename OpTy>
  void addThreads(int64_t (*getThreads)(OpTy, BlockShape)) {
    threads[TypeID::get<OpTy>()] = [=](Operation *op, BlockShape block) {
      return getThreads(cast<OpTy>(op), block);
    };
  }

  /// Whether a kernel lowers `op`.
  bool hasKernel(Operation *op) const {
    return kinds.contains(op->getName()) && !isFormWithoutKernel(op);
  }
  /// Whether ops of the kind have a kernel, but not `op`.
  bool isFormWithoutKernel(Operation *op) const;
  /// What the kernel of such an op expects.
  StringRef getRequirement(Operation *op) const;
  std::optional<int64_t> getTileRows(Operation *op, BlockShape block) const {
    return askForRows(tileRows, op, block);
  }
  std::optional<int64_t> getSharedTileRows(Operation *op,
                                           BlockShape block) const {
    return askForRows(sharedTileRows, op, block);
  }
  std::optional<int64_t> getThreads(Operation *op, BlockShape block) const;

private:
  /// The ops that patterns lower.
  llvm::DenseSet<OperationName> kinds;
  struct Forms {
    std::function<bool(Operation *)> hasKernel;
    StringRef requirement;
  };
  llvm::DenseMap<TypeID, Forms> forms;
  using RowsOfKind = llvm::DenseMap<
      TypeID, std::function<std::optional<int64_t>(Operation *, BlockShape)>>;
  static std::optional<int64_t> askForRows(const RowsOfKind &rows,
                                           Operation *op, BlockShape block);
  RowsOfKind tileRows, sharedTileRows;
  llvm::DenseMap<TypeID, std::function<int64_t(Operation *, BlockShape)>>
      threads;
};

// One function a family, beside its patterns.
void addAdjacencyFacts(KernelFacts &facts);
void addDispersionFacts(KernelFacts &facts);
void addRouterLogitsFacts(KernelFacts &facts);
void addSoftmaxMixBackwardFacts(KernelFacts &facts);
void addSoftmaxMixFacts(KernelFacts &facts);
void addTopKRenormFacts(KernelFacts &facts);

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_KERNELFACTS_H
