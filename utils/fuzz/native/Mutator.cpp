//===- Mutator.cpp - Changes texts and files ------------------------------===//

#include "Mutator.h"

#include <algorithm>
#include <cctype>

namespace moe::fuzz {
namespace {

/// Longer inputs are cut: they would only be slower.
constexpr size_t kMaxBytes = 1 << 17;

struct Span {
  size_t begin, end;
  size_t size() const { return end - begin; }
};

bool isWord(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.' ||
         c == '%' || c == '$';
}

/// The word around a random place, or one other character.
Span findWord(const std::string &text, Random &random) {
  if (text.empty())
    return {0, 0};
  size_t at = random.below(text.size());
  // Separators are many and change little.
  for (int i = 0; i < 8 && std::isspace(static_cast<unsigned char>(text[at]));
       ++i)
    at = random.below(text.size());
  Span span = {at, at + 1};
  if (!isWord(text[at]))
    return span;
  while (span.begin > 0 && isWord(text[span.begin - 1]))
    --span.begin;
  while (span.end < text.size() && isWord(text[span.end]))
    ++span.end;
  return span;
}

Span findLine(const std::string &text, Random &random) {
  if (text.empty())
    return {0, 0};
  size_t at = random.below(text.size());
  size_t begin = text.rfind('\n', at), end = text.find('\n', at);
  return {begin == text.npos || begin == at ? at : begin + 1,
          end == text.npos ? text.size() : end + 1};
}

std::string pickNumber(Random &random) {
  static const std::vector<std::string> edges = {"0",
                                                 "1",
                                                 "-1",
                                                 "2",
                                                 "3",
                                                 "7",
                                                 "16",
                                                 "31",
                                                 "32",
                                                 "33",
                                                 "63",
                                                 "64",
                                                 "65",
                                                 "127",
                                                 "128",
                                                 "255",
                                                 "256",
                                                 "1023",
                                                 "1024",
                                                 "1025",
                                                 "4096",
                                                 "65535",
                                                 "65536",
                                                 "1000000",
                                                 "2147483647",
                                                 "-2147483648",
                                                 "2147483648",
                                                 "4294967295",
                                                 "4294967296",
                                                 "4611686018427387904",
                                                 "9223372036854775807",
                                                 "-9223372036854775808",
                                                 "9223372036854775808",
                                                 "18446744073709551615",
                                                 "18446744073709551616",
                                                 "1e308",
                                                 "1e400",
                                                 "-0",
                                                 "0.5",
                                                 "0x7fffffffffffffff",
                                                 "0f7F800000",
                                                 "0fFFC00000",
                                                 "0d7FF0000000000000",
                                                 "1e-320",
                                                 "00",
                                                 "nan"};
  return random.below(4) ? random.pick(edges)
                         : std::to_string(random.below(300));
}

} // namespace

std::string Mutator::pickWord(const std::string &text, Random &random) const {
  switch (random.below(4)) {
  case 0:
    return pickNumber(random);
  case 1:
    if (!words.empty())
      return random.pick(words);
    [[fallthrough]];
  case 2: {
    Span span = findWord(text, random);
    return text.substr(span.begin, span.size());
  }
  default: {
    const std::string &other = pickSeed(random);
    Span span = findWord(other, random);
    return other.substr(span.begin, span.size());
  }
  }
}

void Mutator::changeBytes(std::string &text, Random &random) const {
  size_t at = random.below(text.size());
  size_t length = 1 + random.below(random.below(4) ? 4 : 64);
  switch (random.below(7)) {
  case 0:
    text[at] = static_cast<char>(text[at] ^ (1 << random.below(8)));
    break;
  case 1:
    text[at] = static_cast<char>(random.below(256));
    break;
  case 2:
    text.insert(at, 1, static_cast<char>(random.below(256)));
    break;
  case 3:
    text.erase(at, length);
    break;
  case 4:
    text.insert(at, text.substr(random.below(text.size()), length));
    break;
  case 5:
    text.resize(at);
    break;
  default: // Binary headers: a number of any width.
    for (size_t i = 0, width = size_t(1) << random.below(4);
         i < width && at + i < text.size(); ++i)
      text[at + i] = random.below(2) ? '\xff' : '\0';
  }
}

void Mutator::changeWord(std::string &text, Random &random) const {
  Span span = findWord(text, random);
  switch (random.below(6)) {
  case 0:
    text.erase(span.begin, span.size());
    break;
  case 1: {
    std::string word = text.substr(span.begin, span.size());
    // Rarely very often: what recurses must stop.
    size_t times = random.below(40) ? 1 : 2000;
    for (std::string repeated; times--;)
      if (repeated += word; times == 0 || repeated.size() > kMaxBytes) {
        text.insert(span.begin, repeated);
        break;
      }
    break;
  }
  case 2: {
    Span other = findWord(text, random);
    if (other.begin < span.begin)
      std::swap(other, span);
    if (other.begin >= span.end) {
      std::string a = text.substr(span.begin, span.size());
      std::string b = text.substr(other.begin, other.size());
      text.replace(other.begin, other.size(), a);
      text.replace(span.begin, span.size(), b);
    }
    break;
  }
  default:
    text.replace(span.begin, span.size(), pickWord(text, random));
  }
}

void Mutator::changeLine(std::string &text, Random &random) const {
  Span span = findLine(text, random);
  std::string line = text.substr(span.begin, span.size());
  switch (random.below(4)) {
  case 0:
    text.erase(span.begin, span.size());
    break;
  case 1:
    text.insert(findLine(text, random).begin, line);
    break;
  case 2: {
    text.erase(span.begin, span.size());
    text.insert(findLine(text, random).begin, line);
    break;
  }
  default: {
    const std::string &other = pickSeed(random);
    Span theirs = findLine(other, random);
    text.insert(span.begin, other.substr(theirs.begin, theirs.size()));
  }
  }
}

void Mutator::mutate(std::string &text, Random &random) const {
  for (size_t changes = 1 + random.below(6); changes--;) {
    if (text.empty())
      text = pickSeed(random);
    if (text.empty())
      return;
    switch (random.below(8)) {
    case 0:
    case 1:
      changeBytes(text, random);
      break;
    case 2:
    case 3:
      changeLine(text, random);
      break;
    default:
      changeWord(text, random);
    }
  }
  if (text.size() > kMaxBytes)
    text.resize(kMaxBytes);
}

} // namespace moe::fuzz
