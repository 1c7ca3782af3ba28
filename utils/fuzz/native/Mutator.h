//===- Mutator.h - Changes texts and files ----------------------*- C++ -*-===//

#ifndef MOE_UTILS_FUZZ_MUTATOR_H
#define MOE_UTILS_FUZZ_MUTATOR_H

#include <cstdint>
#include <string>
#include <vector>

namespace moe::fuzz {

/// splitmix64
class Random {
public:
  explicit Random(uint64_t seed) : state(seed) {}

  uint64_t next() {
    uint64_t x = state += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  }
  /// In [0, bound); 0 for a bound of 0.
  size_t below(size_t bound) { return bound ? next() % bound : 0; }
  template <typename T>
  const T &pick(const std::vector<T> &values) {
    return values[below(values.size())];
  }

private:
  uint64_t state;
};

/// Changes bytes, words, numbers and lines: structure enough for PTX, JSON and
/// the headers of NumPy, so that most changes pass the lexers.
class Mutator {
public:
  Mutator(std::vector<std::string> seeds, std::vector<std::string> words)
      : seeds(std::move(seeds)), words(std::move(words)) {}

  /// One to six changes.
  void mutate(std::string &text, Random &random) const;
  const std::string &pickSeed(Random &random) const {
    return random.pick(seeds);
  }

private:
  void changeBytes(std::string &text, Random &random) const;
  void changeWord(std::string &text, Random &random) const;
  void changeLine(std::string &text, Random &random) const;
  std::string pickWord(const std::string &text, Random &random) const;

  std::vector<std::string> seeds, words;
};

} // namespace moe::fuzz

#endif // MOE_UTILS_FUZZ_MUTATOR_H
