//===- Json.cpp - Reading the manifests of artifacts ----------------------===//

#include "Json.h"

#include <algorithm>
#include <charconv>
#include <stdexcept>

namespace moe::runtime {
namespace {

/// Deeper documents are refused: the parser recurses.
constexpr int kMaxDepth = 64;

class Parser {
public:
  Parser(std::string_view text, const std::string &source)
      : text(text), source(source) {}

  Json parseDocument() {
    Json value = parseValue(0);
    skipSpace();
    if (at != text.size())
      refuse("expected the end of the document");
    return value;
  }

private:
  [[noreturn]] void refuse(const std::string &what) const {
    auto line = 1 + std::count(text.begin(), text.begin() + at, '\n');
    throw std::runtime_error(source + ":" + std::to_string(line) +
                             ": error: " + what);
  }

  void skipSpace() {
    while (at < text.size() && (text[at] == ' ' || text[at] == '\t' ||
                                text[at] == '\n' || text[at] == '\r'))
      ++at;
  }

  bool consume(char c) {
    skipSpace();
    if (at == text.size() || text[at] != c)
      return false;
    ++at;
    return true;
  }

  void expect(char c) {
    if (!consume(c))
      refuse(std::string("expected '") + c + "'");
  }

  bool consumeWord(std::string_view word) {
    if (text.substr(at, word.size()) != word)
      return false;
    at += word.size();
    return true;
  }

  Json parseValue(int depth) {
    if (depth > kMaxDepth)
      refuse("expected at most " + std::to_string(kMaxDepth) +
             " levels of nesting");
    skipSpace();
    if (at == text.size())
      refuse("expected a value, found the end of the document");
    switch (text[at]) {
    case '{':
      return Json(parseObject(depth));
    case '[':
      return Json(parseArray(depth));
    case '"':
      return Json(parseString());
    default:
      break;
    }
    if (consumeWord("null"))
      return Json();
    if (consumeWord("true"))
      return Json(true);
    if (consumeWord("false"))
      return Json(false);
    return parseNumber();
  }

  Json::Object parseObject(int depth) {
    Json::Object object;
    expect('{');
    if (consume('}'))
      return object;
    do {
      skipSpace();
      std::string key = parseString();
      expect(':');
      if (!object.emplace(key, parseValue(depth + 1)).second)
        refuse("expected each name once in an object, found '" + key +
               "' again");
    } while (consume(','));
    expect('}');
    return object;
  }

  Json::Array parseArray(int depth) {
    Json::Array array;
    expect('[');
    if (consume(']'))
      return array;
    do
      array.push_back(parseValue(depth + 1));
    while (consume(','));
    expect(']');
    return array;
  }

  size_t skipDigits() {
    size_t start = at;
    while (at < text.size() && text[at] >= '0' && text[at] <= '9')
      ++at;
    return at - start;
  }

  /// Moves behind a number of JSON's grammar, which std::from_chars does not
  /// know: it takes 01, 1. and inf. Returns whether it is written as an
  /// integer.
  bool skipNumber() {
    consumeWord("-");
    bool isZero = text.substr(at, 1) == "0";
    size_t digits = skipDigits();
    if (digits == 0 || (isZero && digits > 1))
      refuse("expected a value");
    bool isInteger = true;
    if (consumeWord(".")) {
      isInteger = false;
      if (skipDigits() == 0)
        refuse("expected digits after the point of a number");
    }
    if (consumeWord("e") || consumeWord("E")) {
      isInteger = false;
      if (!consumeWord("+"))
        consumeWord("-");
      if (skipDigits() == 0)
        refuse("expected digits in the exponent of a number");
    }
    return isInteger;
  }

  Json parseNumber() {
    size_t start = at;
    bool isInteger = skipNumber();
    const char *first = text.data() + start, *last = text.data() + at;
    int64_t integer;
    // One beyond 64 bits stays a double, which no size may be.
    if (isInteger && std::from_chars(first, last, integer).ec == std::errc())
      return Json(integer);
    double number;
    if (std::from_chars(first, last, number).ec != std::errc())
      refuse("expected a number in the range of a double");
    return Json(number);
  }

  uint32_t parseHex() {
    uint32_t code = 0;
    std::string_view digits = text.substr(at, 4);
    auto [end, error] =
        std::from_chars(digits.data(), digits.data() + digits.size(), code, 16);
    if (error != std::errc() || end != digits.data() + 4)
      refuse("expected four hexadecimal digits");
    at += 4;
    return code;
  }

  static void appendUtf8(std::string &out, uint32_t code) {
    if (code < 0x80) {
      out += static_cast<char>(code);
      return;
    }
    int continuations = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    static constexpr uint8_t leads[] = {0, 0xc0, 0xe0, 0xf0};
    out += static_cast<char>(leads[continuations] | code >> 6 * continuations);
    while (continuations--)
      out += static_cast<char>(0x80 | (code >> 6 * continuations & 0x3f));
  }

  void parseEscape(std::string &out) {
    static constexpr std::string_view names = "\"\\/bfnrt",
                                      values = "\"\\/\b\f\n\r\t";
    char c = at < text.size() ? text[at++] : '\0';
    if (size_t i = names.find(c); i != names.npos) {
      out += values[i];
      return;
    }
    if (c != 'u')
      refuse("expected an escape sequence");
    uint32_t code = parseHex();
    // A character outside of the basic plane is written as a surrogate pair.
    if (code >= 0xd800 && code < 0xe000) {
      uint32_t low = code < 0xdc00 && consumeWord("\\u") ? parseHex() : 0;
      if (low < 0xdc00 || low >= 0xe000)
        refuse("expected surrogates in pairs");
      code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    }
    appendUtf8(out, code);
  }

  /// Appends the character at `at`. Refuses what is not UTF-8: encodings that
  /// are longer than needed, surrogates, and codes past the last character.
  void parseCharacter(std::string &out) {
    auto byte = [&](size_t offset) {
      return at + offset < text.size() ? static_cast<uint8_t>(text[at + offset])
                                       : uint8_t(0);
    };
    if (byte(0) < 0x20)
      refuse("expected control characters to be escaped in a string");
    if (byte(0) < 0x80) {
      out += text[at++];
      return;
    }
    size_t length = byte(0) < 0xe0 ? 2 : byte(0) < 0xf0 ? 3 : 4;
    static constexpr uint32_t smallest[] = {0, 0, 0x80, 0x800, 0x10000};
    uint32_t code = byte(0) & (0x7f >> length);
    bool isValid = byte(0) >= 0xc2 && byte(0) < 0xf5;
    for (size_t i = 1; i < length; ++i) {
      isValid &= (byte(i) & 0xc0) == 0x80;
      code = code << 6 | (byte(i) & 0x3f);
    }
    if (!isValid || code < smallest[length] || code > 0x10ffff ||
        (code >= 0xd800 && code < 0xe000))
      refuse("expected UTF-8 in a string");
    out += text.substr(at, length);
    at += length;
  }

  std::string parseString() {
    if (at == text.size() || text[at] != '"')
      refuse("expected a string");
    std::string out;
    for (++at; at < text.size() && text[at] != '"';) {
      if (consumeWord("\\"))
        parseEscape(out);
      else
        parseCharacter(out);
    }
    if (at == text.size())
      refuse("expected the end of a string");
    ++at;
    return out;
  }

  std::string_view text;
  const std::string &source;
  size_t at = 0;
};

template <typename T, typename Variant>
const T &get(const Variant &value, const char *kind) {
  if (const T *held = std::get_if<T>(&value))
    return *held;
  throw std::runtime_error(std::string("expected ") + kind +
                           " in the manifest, found another value; the "
                           "artifact is damaged, compile it again");
}

} // namespace

Json Json::parse(std::string_view text, const std::string &source) {
  return Parser(text, source).parseDocument();
}

int64_t Json::integer() const { return get<int64_t>(value, "an integer"); }
const std::string &Json::string() const {
  return get<std::string>(value, "a string");
}
const Json::Array &Json::array() const { return get<Array>(value, "a list"); }
const Json::Object &Json::object() const {
  return get<Object>(value, "a dictionary");
}

const Json::Array &Json::array(size_t length) const {
  if (array().size() != length)
    throw std::runtime_error("expected a list of " + std::to_string(length) +
                             " in the manifest, found " +
                             std::to_string(array().size()) +
                             "; the artifact is damaged, compile it again");
  return array();
}

const Json *Json::find(std::string_view key) const {
  const Object &members = object();
  auto found = members.find(key);
  return found == members.end() ? nullptr : &found->second;
}

const Json &Json::at(std::string_view key) const {
  if (const Json *member = find(key))
    return *member;
  throw std::runtime_error("expected '" + std::string(key) +
                           "' in the manifest, found none; the artifact is "
                           "damaged, compile it again");
}

} // namespace moe::runtime
