//===- TokenStream.h - The tokens of a PTX text -----------------*- C++ -*-===//

#ifndef MOE_LIB_SIMULATOR_TOKENSTREAM_H
#define MOE_LIB_SIMULATOR_TOKENSTREAM_H

#include "Lexer.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

namespace moe::sim {

using TokenKind = Token::Kind;

/// Takes one token after the other; complaints name the one that was found.
class TokenStream {
protected:
  explicit TokenStream(std::string_view text) : tokens(tokenize(text)) {}

  const Token &peek(size_t ahead = 0) const {
    return tokens[std::min(pos + ahead, tokens.size() - 1)];
  }

  const Token &take() {
    const Token &token = peek();
    if (pos + 1 < tokens.size())
      ++pos;
    return token;
  }

  bool takeIf(char c) {
    if (!peek().is(c))
      return false;
    take();
    return true;
  }

  [[noreturn]] void fail(const std::string &expected) const {
    const Token &found = peek();
    throw std::invalid_argument("line " + std::to_string(found.line) +
                                ": expected " + expected + ", found " +
                                (found.kind == TokenKind::End
                                     ? std::string("the end of the file")
                                     : "'" + std::string(found.text) + "'"));
  }

  void expect(char c) {
    if (!takeIf(c))
      fail(std::string("'") + c + "'");
  }

  std::string takeName(const char *what) {
    if (peek().kind != TokenKind::Name)
      fail(what);
    return std::string(take().text);
  }

  u64 takeInteger() {
    bool negative = takeIf('-');
    if (peek().kind != TokenKind::Number)
      fail("an integer");
    u64 value = std::strtoull(std::string(take().text).c_str(), nullptr, 0);
    return negative ? 0 - value : value;
  }

  void skipLine() {
    u32 line = peek().line;
    while (peek().kind != TokenKind::End && peek().line == line)
      take();
  }

  void skipBraces() {
    expect('{');
    for (int depth = 1; depth > 0;) {
      if (peek().kind == TokenKind::End)
        fail("'}'");
      depth += peek().is('{') - peek().is('}');
      take();
    }
  }

  void skipTo(char c) {
    while (peek().kind != TokenKind::End && !peek().is(c))
      take();
    expect(c);
  }

  std::vector<Token> tokens;
  size_t pos = 0;
};

} // namespace moe::sim

#endif // MOE_LIB_SIMULATOR_TOKENSTREAM_H
