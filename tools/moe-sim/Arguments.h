//===- Arguments.h - Kernel arguments on the command line -------*- C++ -*-===//

#ifndef MOE_TOOLS_MOE_SIM_ARGUMENTS_H
#define MOE_TOOLS_MOE_SIM_ARGUMENTS_H

#include "MoE/Support/Npy.h"

#include "MoE/Simulator/Simulator.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace moe::sim {

/// One --arg:
///
///   buf:f32:1024:iota     a buffer; also zeros, ones, random, @file.npy
///   i32:5  f32:0.5        a scalar
struct Argument {
  std::string type;
  bool isBuffer = false;
  /// A scalar's bytes, or a buffer's, aligned as cudaMalloc does.
  std::vector<uint8_t> storage;
  uint8_t *data = nullptr;
  uint64_t bytes = 0;
  std::vector<uint64_t> shape;

  /// Throws std::invalid_argument.
  static Argument parse(const std::string &text, uint64_t seed);
  /// Elements of a buffer as text, separated by spaces.
  std::string print() const;
  NpyArray toNpy() const;
};

} // namespace moe::sim

#endif // MOE_TOOLS_MOE_SIM_ARGUMENTS_H
