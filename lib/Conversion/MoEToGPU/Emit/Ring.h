//===- Ring.h - Where producers and consumers meet --------------*- C++ -*-===//
//
// A ring of slots in shared memory that some warps of a block fill and others
// empty, in turn, with two barriers a slot: `full`, where what fills it
// arrives, and `empty`, where the warps that have used it do. Both sides count
// their uses: use n of a ring is in slot n mod slots, in a phase of parity
// n / slots mod 2.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_CONVERSION_MOETOGPU_EMIT_RING_H
#define MOE_LIB_CONVERSION_MOETOGPU_EMIT_RING_H

#include "Emit/WarpgroupBuilder.h"

namespace mlir::moe {

struct Ring {
  /// A power of two, and the bytes of each.
  int64_t slots, slotBytes;
  /// Where its barriers and its slots begin.
  Value barriers, memory;
  /// Arrivals by which a slot is full.
  int64_t numFilling;

  static int64_t getBarrierBytes(int64_t slots) {
    return 2 * kBarrierBytes * slots;
  }

  Value getSlot(WarpBuilder &b, Value use) const { return b.rem(use, slots); }
  Value getPlace(WarpBuilder &b, Value use) const {
    return b.at(memory, b.mul(getSlot(b, use), b.i32(slotBytes)));
  }
  Value getParity(WarpBuilder &b, Value use) const {
    return b.rem(b.div(use, slots), 2);
  }
  Value getFull(WarpBuilder &b, Value use) const {
    return b.at(barriers, b.mul(getSlot(b, use), b.i32(2 * kBarrierBytes)));
  }
  Value getEmpty(WarpBuilder &b, Value use) const {
    return b.at(getFull(b, use), kBarrierBytes);
  }

  /// By one thread; a barrier of the block comes after it. `numEmptying` warps
  /// use a slot.
  void initBarriers(WarpgroupBuilder &b, int64_t numEmptying) const;
  /// A producer waits until the slot of `use` may be filled.
  void waitForEmpty(WarpgroupBuilder &b, Value use) const;
  /// A consumer waits for what fills it; its products may read it.
  void waitForFull(WarpgroupBuilder &b, Value use) const;
  /// A warp has read what is in the slot; `lane` is the number of the lane.
  void release(WarpgroupBuilder &b, Value use, Value lane) const;
};

/// Sums of the products of chunks, which the slots of a ring bring one after
/// the other.
struct RingProducts {
  /// The products of the chunk that `use` brings, the number `i` of a group.
  using GetProducts = function_ref<SmallVector<WarpgroupBuilder::Product>(
      Value use, int64_t i)>;

  /// Adds the products of `count` chunks from `use` on to `totals`, or begins
  /// with them if there are none. While one chunk is added, or its slot is
  /// given back, the next is multiplied.
  SmallVector<Value> multiply(Value use, int64_t count, ValueRange totals,
                              GetProducts getProducts) const;

  WarpgroupBuilder &b;
  const Ring &ring;
  Value lane;
  /// Columns and type of the right operands.
  int64_t columns;
  Type element;
  /// Whether a chunk is summed from 0 and then added in f32, because tensor
  /// cores truncate; else they add all chunks themselves.
  bool isExact;
};

} // namespace mlir::moe

#endif // MOE_LIB_CONVERSION_MOETOGPU_EMIT_RING_H
