//===- BulkTransfer.h - What a bulk copy moves ------------------*- C++ -*-===//

#ifndef MOE_LIB_SIMULATOR_BULKTRANSFER_H
#define MOE_LIB_SIMULATOR_BULKTRANSFER_H

#include "decode/BulkCopy.h"
#include "execute/Async.h"

#include "MoE/Simulator/TensorMap.h"

#include <optional>
#include <string>

namespace moe::sim {

/// Contiguous bytes of a transfer; no global side where a tile sticks out of
/// its tensor.
struct Piece {
  u64 shared; // from the tile's start
  u8 *global;
  u32 bytes;
};

struct Transfer {
  u64 sharedBytes = 0;
  std::vector<Piece> pieces;
  bool nanFill = false;
  u32 elementBytes = 1;
};

void reportBulkBounds(Warp &warp, const Inst &inst, u32 lane,
                      const std::string &what);

/// The tensor map that s[0] points to; reports what is wrong with it, and with
/// the order of what the kernel itself has written there (TensorMapOps.cpp).
std::optional<TensorMap> loadMap(Warp &warp, const Inst &inst, u32 lane);

NumberType elementType(const TensorMap &map);

/// The rows of the box at `coordinates`, cut at the tensor's edges.
Transfer tileOf(const TensorMap &map, const i32 *coordinates,
                u64 sharedAddress);

/// Bytes on their way into the shared memory of a block of the cluster. They
/// land at a random later time and complete as many bytes on an mbarrier
/// there; whoever waits for that is ordered after them.
struct Incoming {
  /// Shared addresses.
  u64 to = 0;
  u64 mbarrier = 0;
  u32 bytes = 0;
  /// kPending; kAsync for the asynchronous proxy; kStrong if atomic.
  u32 flags = 0;
  std::function<void(u8 *to)> land;
  /// The issuing block may end before they land.
  bool outlivesBlock = false;
};
void startIncoming(Warp &warp, const Inst &inst, u32 lane, Incoming incoming);

/// to[i] = to[i] op from[i] for elements of the shape's type.
void reduceBytes(u8 *to, const u8 *from, u32 bytes, const BulkShape &shape);

} // namespace moe::sim

#endif // MOE_LIB_SIMULATOR_BULKTRANSFER_H
