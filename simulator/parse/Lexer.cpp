//===- Lexer.cpp - PTX tokens ---------------------------------------------===//

#include "Lexer.h"

#include <cctype>
#include <stdexcept>
#include <string>

namespace moe::sim {
namespace {

bool isNameStart(char c) {
  return std::isalpha(static_cast<unsigned char>(c)) || c == '_' || c == '$' ||
         c == '%';
}

bool isNamePart(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$';
}

class Lexer {
public:
  explicit Lexer(std::string_view text) : text(text) {}

  std::vector<Token> run() {
    std::vector<Token> tokens;
    while (true) {
      size_t before = pos;
      skipSpace();
      if (pos >= text.size())
        break;
      Token token = next();
      token.adjacent = before == pos - token.text.size() && !tokens.empty();
      tokens.push_back(token);
    }
    tokens.push_back({Token::Kind::End, {}, line, false});
    return tokens;
  }

private:
  char at(size_t offset) const {
    return pos + offset < text.size() ? text[pos + offset] : '\0';
  }

  void skipSpace() {
    while (pos < text.size()) {
      if (at(0) == '\n') {
        ++line;
        ++pos;
      } else if (std::isspace(static_cast<unsigned char>(at(0))) ||
                 at(0) == '\0') {
        ++pos;
      } else if (at(0) == '/' && at(1) == '/') {
        while (pos < text.size() && at(0) != '\n')
          ++pos;
      } else if (at(0) == '/' && at(1) == '*') {
        skipBlockComment();
      } else {
        return;
      }
    }
  }

  void skipBlockComment() {
    size_t end = text.find("*/", pos + 2);
    if (end == std::string_view::npos)
      throw std::invalid_argument("line " + std::to_string(line) +
                                  ": expected the comment to end with '*/'");
    for (; pos < end + 2; ++pos)
      line += text[pos] == '\n';
  }

  Token take(Token::Kind kind, size_t length) {
    Token token{kind, text.substr(pos, length), line, false};
    pos += length;
    return token;
  }

  Token next() {
    char c = at(0);
    size_t n = 1;
    if (isNameStart(c)) {
      while (isNamePart(at(n)))
        ++n;
      return take(Token::Kind::Name, n);
    }
    if (std::isdigit(static_cast<unsigned char>(c)))
      return take(Token::Kind::Number, numberLength());
    if (c == '.' && isNamePart(at(1))) {
      // "::" belongs to the word: .shared::cta, .mbarrier::complete_tx::bytes
      while (isNamePart(at(n)) ||
             (at(n) == ':' && at(n + 1) == ':' && isNamePart(at(n + 2))) ||
             (at(n) == ':' && at(n - 1) == ':'))
        ++n;
      return take(Token::Kind::Dot, n);
    }
    if (c == '"') {
      while (at(n) != '"' && pos + n < text.size())
        ++n;
      return take(Token::Kind::String, n + 1);
    }
    return take(Token::Kind::Punctuation, 1);
  }

  size_t numberLength() const {
    size_t n = 0;
    bool hex = at(0) == '0' && (at(1) == 'x' || at(1) == 'X');
    while (true) {
      char c = at(n);
      bool exponentSign = !hex && (c == '+' || c == '-') && n > 0 &&
                          (at(n - 1) == 'e' || at(n - 1) == 'E') &&
                          isDecimal(n);
      bool fraction =
          c == '.' && std::isdigit(static_cast<unsigned char>(at(n + 1)));
      if (!isNamePart(c) && !exponentSign && !fraction)
        return n;
      ++n;
    }
  }

  /// The first n characters are a decimal number, not 0f/0d/0x bits.
  bool isDecimal(size_t n) const {
    for (size_t i = 0; i + 1 < n; ++i)
      if (!std::isdigit(static_cast<unsigned char>(at(i))) && at(i) != '.')
        return false;
    return true;
  }

  std::string_view text;
  size_t pos = 0;
  u32 line = 1;
};

} // namespace

std::vector<Token> tokenize(std::string_view text) { return Lexer(text).run(); }

} // namespace moe::sim
