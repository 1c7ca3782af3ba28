//===- Chips.h - What is known of NVIDIA's chips ----------------*- C++ -*-===//
//
// The one place that names a chip. The compiler, the simulator, Python
// (moe_mlir/compiler/chips.py), the help texts and the tests read this table: a
// new chip is a new row, in the order of the chips' numbers. No LLVM, no torch.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_SUPPORT_CHIPS_H
#define MOE_SUPPORT_CHIPS_H

#include <cstdint>
#include <string>
#include <string_view>

namespace moe {

/// The most shared memory that a kernel may have on every chip without a
/// launch that asks for it.
inline constexpr int64_t kMaxStaticSharedBytes = 48 * 1024;

/// As constructed: what every chip has.
struct Chip {
  std::string_view name = {};
  /// The lowest PTX version that has all instructions of the chip, in tenths
  /// (80 is PTX 8.0): old drivers load the result too, and LLVM's own default
  /// can be a version that no assembler knows yet. 0: kernels of others run in
  /// the simulator, and none are compiled for it.
  unsigned ptxVersion = 0;
  /// The most shared memory that a block may have.
  int64_t sharedBytes = kMaxStaticSharedBytes;
  /// Blocks of a cluster that every launch may have, and those that a launch
  /// may ask for (NON_PORTABLE_CLUSTER_SIZE_ALLOWED); 1 if there are none.
  int64_t clusterBlocks = 1;
  int64_t mostClusterBlocks = 1;
  /// Whether it has wgmma: no chip before sm_90a, and none after it.
  bool hasWgmma = false;
  /// Whether kernels that keep queries in its shared memory fill the registers
  /// sooner than elsewhere, as ptxas numbers them for sm_120.
  bool fillsRegistersSooner = false;

  /// "+ptx80", the form that nvvm.target takes.
  std::string features() const { return "+ptx" + std::to_string(ptxVersion); }
  constexpr bool isTarget() const { return ptxVersion != 0; }
  /// 90 of sm_90 and of sm_90a.
  constexpr unsigned getNumber() const { return parseNumber(name); }

  static constexpr unsigned parseNumber(std::string_view name) {
    unsigned number = 0;
    for (char c : name.substr(name.find('_') + 1))
      if (c >= '0' && c <= '9')
        number = 10 * number + static_cast<unsigned>(c - '0');
    return number;
  }
};

// clang-format off
inline constexpr Chip kChips[] = {
    {.name = "sm_70", .sharedBytes = 96 * 1024},
    {.name = "sm_75", .sharedBytes = 64 * 1024},
    {.name = "sm_80", .ptxVersion = 70, .sharedBytes = 163 * 1024},
    {.name = "sm_86", .ptxVersion = 71, .sharedBytes = 99 * 1024,
     .fillsRegistersSooner = true},
    {.name = "sm_87", .sharedBytes = 163 * 1024},
    {.name = "sm_89", .ptxVersion = 78, .sharedBytes = 99 * 1024,
     .fillsRegistersSooner = true},
    {.name = "sm_90", .ptxVersion = 78, .sharedBytes = 227 * 1024,
     .clusterBlocks = 8, .mostClusterBlocks = 16},
    {.name = "sm_90a", .ptxVersion = 80, .sharedBytes = 227 * 1024,
     .clusterBlocks = 8, .mostClusterBlocks = 16, .hasWgmma = true},
    {.name = "sm_100", .ptxVersion = 86, .sharedBytes = 227 * 1024,
     .clusterBlocks = 8, .mostClusterBlocks = 16},
    {.name = "sm_120", .ptxVersion = 87, .sharedBytes = 99 * 1024,
     .clusterBlocks = 8, .mostClusterBlocks = 8, .fillsRegistersSooner = true},
};
// clang-format on

/// What PTX for `target`, `sm_90a` say, may rely on: the newest chip of the
/// table that is not newer.
constexpr const Chip &getNewestChipUpTo(std::string_view target) {
  const Chip *newest = kChips;
  for (const Chip &chip : kChips)
    if (chip.getNumber() <= Chip::parseNumber(target))
      newest = &chip;
  return *newest;
}

} // namespace moe

#endif // MOE_SUPPORT_CHIPS_H
