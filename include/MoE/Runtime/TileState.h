//===- TileState.h - Whether a process may use AMX's tiles ------*- C++ -*-===//
//
// The state of tiles is 8 KB of each thread, which Linux keeps for processes
// that asked for it. Where it refuses, the first instruction on tiles ends the
// process.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_RUNTIME_TILESTATE_H
#define MOE_RUNTIME_TILESTATE_H

#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace moe::runtime {

/// Asks for the state of tiles; false where the system has none to give.
inline bool requestTileState() {
#if defined(__linux__) && defined(__x86_64__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool isGranted =
      syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return isGranted;
#else
  return false;
#endif
}

} // namespace moe::runtime

#endif // MOE_RUNTIME_TILESTATE_H
