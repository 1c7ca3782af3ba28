//===- Lexer.h - PTX tokens -------------------------------------*- C++ -*-===//

#ifndef MOE_LIB_SIMULATOR_LEXER_H
#define MOE_LIB_SIMULATOR_LEXER_H

#include "Types.h"

#include <string_view>
#include <vector>

namespace moe::sim {

struct Token {
  enum class Kind : u8 {
    /// An identifier or a register: `foo`, `$L__BB0_1`, `%rd4`.
    Name,
    /// A word with its dot: `.global`, `.2d`, `.shared::cta`.
    Dot,
    Number,
    String,
    Punctuation,
    End,
  };
  Kind kind = Kind::End;
  std::string_view text;
  u32 line = 0;
  /// No white space between the token before and this one.
  bool adjacent = false;

  bool is(char c) const {
    return kind == Kind::Punctuation && text.size() == 1 && text[0] == c;
  }
  bool isDot(std::string_view word) const {
    return kind == Kind::Dot && text.substr(1) == word;
  }
};

/// Splits `text`, which must outlive the tokens. Ends with an End token.
std::vector<Token> tokenize(std::string_view text);

} // namespace moe::sim

#endif // MOE_LIB_SIMULATOR_LEXER_H
