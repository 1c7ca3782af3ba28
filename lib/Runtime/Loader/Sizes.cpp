//===- Sizes.cpp - The sizes of results -----------------------------------===//

#include "Sizes.h"

#include <cctype>
#include <stdexcept>

namespace moe::runtime {
namespace {

int64_t divideFloor(int64_t a, int64_t b) {
  if (b == 0)
    throw std::runtime_error("expected a size that divides by another number "
                             "than 0");
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}

int64_t power(int64_t base, int64_t exponent) {
  if (exponent < 0 || exponent > 8)
    throw std::runtime_error("expected a power in [0, 8] in a size, found " +
                             std::to_string(exponent));
  int64_t result = 1;
  while (exponent--)
    result *= base;
  return result;
}

/// Recursive descent, one function a level of precedence.
class SizeText {
public:
  SizeText(std::string_view text, const std::map<std::string, int64_t> &symbols)
      : text(text), symbols(symbols) {}

  int64_t evaluate() {
    int64_t value = sum();
    if (peek() != '\0')
      refuse();
    return value;
  }

private:
  [[noreturn]] void refuse() const {
    throw std::runtime_error("expected a size made of names, integers and + - "
                             "* // % ** max min, found '" +
                             std::string(text) + "'");
  }

  char peek() {
    while (at < text.size() && text[at] == ' ')
      ++at;
    return at < text.size() ? text[at] : '\0';
  }

  bool consume(std::string_view token) {
    peek();
    if (text.substr(at, token.size()) != token)
      return false;
    at += token.size();
    return true;
  }

  int64_t sum() {
    int64_t value = product();
    for (;;) {
      if (consume("+"))
        value += product();
      else if (consume("-"))
        value -= product();
      else
        return value;
    }
  }

  int64_t product() {
    int64_t value = factor();
    for (;;) {
      if (consume("//"))
        value = divideFloor(value, factor());
      else if (consume("*"))
        value *= factor();
      else if (consume("%")) {
        int64_t divisor = factor();
        value -= divideFloor(value, divisor) * divisor;
      } else
        return value;
    }
  }

  int64_t factor() {
    if (consume("-"))
      return -factor();
    int64_t base = primary();
    return consume("**") ? power(base, factor()) : base;
  }

  int64_t primary() {
    if (consume("(")) {
      // Parentheses nest, and the text may come from a damaged file.
      if (++depth > 64)
        refuse();
      int64_t value = sum();
      --depth;
      if (!consume(")"))
        refuse();
      return value;
    }
    if (std::isdigit(static_cast<unsigned char>(peek())))
      return number();
    std::string name;
    while (
        at < text.size() &&
        (std::isalnum(static_cast<unsigned char>(text[at])) || text[at] == '_'))
      name += text[at++];
    if (name == "max" || name == "min")
      return extremum(name == "max");
    auto found = symbols.find(name);
    if (name.empty() || found == symbols.end())
      refuse();
    return found->second;
  }

  int64_t number() {
    int64_t value = 0;
    for (;
         at < text.size() && std::isdigit(static_cast<unsigned char>(text[at]));
         ++at)
      value = value * 10 + (text[at] - '0');
    return value;
  }

  int64_t extremum(bool wantLargest) {
    if (!consume("(") || ++depth > 64)
      refuse();
    int64_t value = sum();
    while (consume(",")) {
      int64_t next = sum();
      value = wantLargest ? std::max(value, next) : std::min(value, next);
    }
    --depth;
    if (!consume(")"))
      refuse();
    return value;
  }

  std::string_view text;
  const std::map<std::string, int64_t> &symbols;
  size_t at = 0;
  int depth = 0;
};

/// `["arg", i]` is the value of a scalar, `["arg", i, dim]` the size of a dim.
int64_t evaluateArgument(const Json::Array &operands,
                         std::span<const Tensor> arguments) {
  auto position = static_cast<size_t>(operands.at(1).integer());
  const Tensor &argument = arguments[position];
  if (operands.size() == 3)
    return argument.shape.at(static_cast<size_t>(operands[2].integer()));
  if (argument.dtype == "i32")
    return *static_cast<const int32_t *>(argument.data);
  if (argument.dtype == "i64" || argument.dtype == "index")
    return *static_cast<const int64_t *>(argument.data);
  throw std::runtime_error("expected a size that depends on an integer, found "
                           "one that depends on " +
                           argument.dtype);
}

} // namespace

std::optional<int64_t> evaluateSize(const Json &size,
                                    std::span<const Tensor> arguments) {
  if (size.isNull())
    return std::nullopt;
  if (size.isInteger())
    return size.integer();
  const Json::Array &operands = size.array();
  if (operands.size() < 2)
    throw std::runtime_error(
        "expected an operation and its operands as a size");
  const std::string &operation = operands[0].string();
  if (operation == "arg") {
    // A trailing result that tells its own size has no value yet.
    if (static_cast<size_t>(operands[1].integer()) >= arguments.size())
      return std::nullopt;
    return evaluateArgument(operands, arguments);
  }
  std::optional<int64_t> a = evaluateSize(operands[1], arguments);
  std::optional<int64_t> b = evaluateSize(operands.at(2), arguments);
  if (!a || !b)
    return std::nullopt;
  if (operation == "+")
    return *a + *b;
  if (operation == "*")
    return *a * *b;
  if (operation == "//")
    return divideFloor(*a, *b);
  if (operation == "%")
    return *a - divideFloor(*a, *b) * *b;
  if (operation == "ceildiv")
    return -divideFloor(-*a, *b);
  throw std::runtime_error("expected + * // % or ceildiv in a size, found '" +
                           operation + "'");
}

int64_t evaluateSizeText(std::string_view text,
                         const std::map<std::string, int64_t> &symbols) {
  return SizeText(text, symbols).evaluate();
}

} // namespace moe::runtime
