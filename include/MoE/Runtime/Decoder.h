//===- Decoder.h - Language models with their caches ------------*- C++ -*-===//
//
// Loads a folder that `moe_mlir.save_decoder` wrote: a language model, and what
// it keeps of the tokens that it has seen.
//
//   moe::runtime::Decoder decoder("decoder.artifact");
//   moe::runtime::Array logits = decoder.run(prompt);
//   logits = decoder.run({&token, 1});
//
// The code of an artifact runs in this process: trust its source.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_RUNTIME_DECODER_H
#define MOE_RUNTIME_DECODER_H

#include "MoE/Runtime/Artifact.h"

#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace moe::runtime {

/// A language model and its cache, which calls of `run` extend.
class MOE_RUNTIME_EXPORT Decoder {
public:
  /// Reads and checks the folder, as `Artifact` does. Each decoder has a cache
  /// of its own; all of one folder share the memory of the weights. Throws
  /// std::runtime_error where the folder is damaged, of another format version,
  /// for another CPU, or no decoder.
  explicit Decoder(const std::string &folder,
                   Verification verification = Verification::Quick);
  ~Decoder();
  Decoder(Decoder &&) noexcept;
  Decoder &operator=(Decoder &&) noexcept;

  /// The logits f32[sequences, words] of the token that follows after `ids`,
  /// which are those of the first sequence, then of the next: as many of each.
  /// They come after the tokens of earlier calls. Where there is no code for so
  /// many at once, as many as there is code for run first, and then one after
  /// the other. Throws std::runtime_error where the ids are not in the
  /// vocabulary and where there is no room left for them; such a call changes
  /// nothing. After a call that failed within the code, call `reset`.
  Array run(std::span<const int64_t> ids);
  /// Forgets all tokens. Throws std::runtime_error during a call.
  void reset();

  /// How many tokens of each sequence it holds.
  int64_t getPosition() const;
  /// How many it holds at most.
  int64_t getRoom() const;
  /// How many sequences a call extends.
  int64_t getSequences() const;
  /// Ids are below it.
  int64_t getVocabularySize() const;

private:
  struct Contents;
  std::unique_ptr<Contents> contents;
};

} // namespace moe::runtime

#endif // MOE_RUNTIME_DECODER_H
