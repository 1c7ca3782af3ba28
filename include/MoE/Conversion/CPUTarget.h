//===- CPUTarget.h - What kernels ask of a CPU ------------------*- C++ -*-===//
//
// The vectors and caches of a CPU, and the numbers of kernels that follow from
// them. The numbers say how work is cut, not in which order sums are formed: no
// bit of a result depends on them, so that they may be measured where code runs
// (`python -m moe_mlir.tune`).
//
//===----------------------------------------------------------------------===//

#ifndef MOE_CONVERSION_CPUTARGET_H
#define MOE_CONVERSION_CPUTARGET_H

#include "llvm/Support/Error.h"

namespace mlir::moe {

struct CPUTarget {
  /// Lanes of every f32 vector: 16 is one register of AVX-512.
  int64_t vectorWidth = 16;
  /// Register tiles fill them: AVX-512 has 32, AVX2 16.
  int64_t vectorRegisters = 32;
  /// Whether pairs of bf16 products are summed in f32 by one instruction, that
  /// of AVX512_BF16 on 16 lanes.
  bool bf16Dot = false;
  /// Whether tiles of pairs of bf16 are multiplied by one instruction,
  /// tdpbf16ps of AMX.
  bool bf16Tiles = false;
  /// Whether four products of bytes are summed by one instruction, vpdpbusd.
  bool int8Dot = false;
  /// Whether products of bytes are summed in pairs of 16 bits by vpmaddubsw.
  bool bytePairs = false;
  /// Whether one instruction, vpermi2b of AVX512_VBMI, looks bytes up in a
  /// table of 128.
  bool byteTable = false;
  /// Whether the hardware asks for memory that is read in order early enough,
  /// and slows down where code asks for the same lines: Zen 4 reads codes of 8
  /// bits at 28 GB/s by itself, and at 19 with requests to the first cache.
  bool streamPrefetcher = false;
  /// Bytes of the second cache, that of one core.
  int64_t l2Bytes = 1 << 20;

  // Measured numbers, each 0 where the one that follows from the above is
  // meant.
  /// Vectors of a panel of columns, and rows that are multiplied with it at
  /// once: a register tile of products.
  int64_t productVectors = 0, productRows = 0;
  /// Panels that a product packs at a time and that share each copy of rows.
  int64_t productPanels = 0;
  /// Rows of a layer of experts whose sums lie in cache together.
  int64_t expertRows = 0;
  /// Queries that share one packing of keys.
  int64_t mixQueries = 0;
  /// How many bytes before their use the scores of a selection are fetched.
  int64_t fetchBytes = 0;

  /// An eighth of the registers.
  int64_t getProductVectors() const;
  /// As many as registers hold the sums of, beside the columns of one k and
  /// a number of one row: 6 x 4 of 32 registers, 6 x 2 of 16.
  int64_t getProductRows() const;
  /// So many that what is packed of a chain of 256 ks is a quarter of the
  /// second cache; the rest is for rows, sums, and what is packed next.
  int64_t getProductPanels() const;
  int64_t getExpertRows() const { return expertRows ? expertRows : 128; }
  int64_t getMixQueries() const { return mixQueries ? mixQueries : 192; }
  int64_t getFetchBytes() const { return fetchBytes ? fetchBytes : 4096; }

  // What kernels take to be alike on all CPUs.
  /// Bytes of a line of memory.
  static constexpr int64_t kLineBytes = 64;
  /// Bytes of the first cache.
  static constexpr int64_t kL1Bytes = 32 * 1024;
  /// Lines that are a multiple of so many bytes apart share few places of it.
  static constexpr int64_t kL1AliasBytes = 4096;
  /// How many lines before their use memory is asked for them.
  static constexpr int64_t kLinesAhead = 64;
  /// Those of codes of 4 and 8 bits, of which a line takes longer to multiply.
  static constexpr int64_t kCodeLinesAhead = 32;
  /// Those of the scales of codes: a row of panels begins a page of them, which
  /// nothing foresees. On Zen 4 reads are slower with 9 and more than without.
  static constexpr int64_t kScaleLinesAhead = 4;
  /// With vectors of as many lanes memory, not the latency of multiply-adds, is
  /// what a single row waits for.
  static constexpr int64_t kLanesThatHideLatency = 16;

  /// Bounds of what may be asked for: buffers stay small.
  static constexpr int64_t kMostRows = 1024, kMostPanels = 64,
                           kMostNumber = 1 << 20;
  /// Rows of a register tile of the mixing kernels.
  static constexpr int64_t kMixRows = 6;
  /// Rows of a parallel tile: a multiple of both the 16 tokens of a selection's
  /// vector and those, so that neither has a partial block.
  static constexpr int64_t kTileSize = 96;

  /// Says what no code can be written for.
  llvm::Error verify() const;
};

} // namespace mlir::moe

#endif // MOE_CONVERSION_CPUTARGET_H
