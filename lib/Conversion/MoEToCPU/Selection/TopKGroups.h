//===- TopKGroups.h - Groups of experts that drop out -----------*- C++ -*-===//

#ifndef MOE_LIB_CONVERSION_MOETOCPU_SELECTION_TOPKGROUPS_H
#define MOE_LIB_CONVERSION_MOETOCPU_SELECTION_TOPKGROUPS_H

#include "Emit/Emitter.h"

namespace mlir::moe {

/// The groups of the experts whose keys are in `stage`, of which the best stay.
class ExpertGroups {
public:
  ExpertGroups(Emitter &e, TopKRenormOp op, Value stage, Value numExperts)
      : e(e), op(op), stage(stage), numExperts(numExperts) {}

  /// Stages the key of an empty place, which enters no list, for the experts
  /// outside of the topk_group best groups. A group stays iff fewer than
  /// topk_group groups come before it: those with a larger value, and lower
  /// groups with an equal one.
  void drop();

private:
  Value getKey(Value group, Value groupSize);

  Emitter &e;
  TopKRenormOp op;
  Value stage, numExperts;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOCPU_SELECTION_TOPKGROUPS_H
