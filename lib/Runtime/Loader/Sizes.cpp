//===- Sizes.cpp - The sizes of results -----------------------------------===//

#include "Sizes.h"

#include <algorithm>
#include <cctype>
#include <stdexcept>

namespace moe::runtime {
namespace {

[[noreturn]] void refuseRange() {
  throw std::runtime_error("expected a size whose computation stays within 64 "
                           "bits, found a larger one");
}

int64_t add(int64_t a, int64_t b) {
  int64_t sum;
  if (__builtin_add_overflow(a, b, &sum))
    refuseRange();
  return sum;
}

int64_t subtract(int64_t a, int64_t b) {
  int64_t difference;
  if (__builtin_sub_overflow(a, b, &difference))
    refuseRange();
  return difference;
}

int64_t multiply(int64_t a, int64_t b) {
  int64_t product;
  if (__builtin_mul_overflow(a, b, &product))
    refuseRange();
  return product;
}

void checkDivisor(int64_t b) {
  if (b == 0)
    throw std::runtime_error("expected a size that divides by another number "
                             "than 0");
}

int64_t divideFloor(int64_t a, int64_t b) {
  checkDivisor(b);
  if (b == -1)
    return subtract(0, a);
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}

/// Has the sign of b. The quotient times b may not fit, so it is not used.
int64_t modulo(int64_t a, int64_t b) {
  checkDivisor(b);
  int64_t rest = b == -1 ? 0 : a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

int64_t power(int64_t base, int64_t exponent) {
  if (exponent < 0 || exponent > 8)
    throw std::runtime_error("expected a power in [0, 8] in a size, found " +
                             std::to_string(exponent));
  int64_t result = 1;
  while (exponent--)
    result = multiply(result, base);
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
        value = add(value, product());
      else if (consume("-"))
        value = subtract(value, product());
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
        value = multiply(value, factor());
      else if (consume("%"))
        value = modulo(value, factor());
      else
        return value;
    }
  }

  /// Every recursion passes here, and the text may come from a damaged file.
  int64_t factor() {
    if (++depth > 64)
      refuse();
    int64_t value;
    if (consume("-")) {
      value = subtract(0, factor());
    } else {
      value = primary();
      if (consume("**"))
        value = power(value, factor());
    }
    --depth;
    return value;
  }

  int64_t primary() {
    if (consume("(")) {
      int64_t value = sum();
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
      value = add(multiply(value, 10), text[at] - '0');
    return value;
  }

  int64_t extremum(bool wantLargest) {
    if (!consume("("))
      refuse();
    int64_t value = sum();
    while (consume(",")) {
      int64_t next = sum();
      value = wantLargest ? std::max(value, next) : std::min(value, next);
    }
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
  const Tensor &argument = arguments[operands.at(1).integer()];
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

void verifyArgument(const Json::Array &operands,
                    std::span<const ValueType> arguments) {
  auto position = static_cast<uint64_t>(operands.at(1).integer());
  if (position >= arguments.size() || operands.size() > 3)
    throw std::runtime_error("expected a size to name one of " +
                             std::to_string(arguments.size()) +
                             " arguments and results, found number " +
                             std::to_string(operands[1].integer()));
  const ValueType &argument = arguments[position];
  bool isInteger = !argument.isTensor &&
                   (argument.dtype == "i32" || argument.dtype == "i64" ||
                    argument.dtype == "index");
  if (operands.size() == 2 && !isInteger)
    throw std::runtime_error("expected a size to depend on an integer, found " +
                             argument.toString());
  if (operands.size() == 3 &&
      static_cast<uint64_t>(operands[2].integer()) >= argument.shape.size())
    throw std::runtime_error("expected a dimension of " + argument.toString() +
                             " in a size, found " +
                             std::to_string(operands[2].integer()));
}

} // namespace

void verifySize(const Json &size, std::span<const ValueType> arguments) {
  if (size.isNull() || size.isInteger())
    return;
  const Json::Array &operands = size.array();
  std::string operation = operands.empty() ? "" : operands[0].string();
  if (operation == "arg" && operands.size() > 1)
    return verifyArgument(operands, arguments);
  static constexpr std::string_view known[] = {"+",       "*",   "//", "%",
                                               "ceildiv", "max", "min"};
  if (std::ranges::find(known, operation) == std::end(known) ||
      operands.size() != 3)
    throw std::runtime_error("expected arg, or one of + * // % ceildiv max min "
                             "with two operands in a size, found '" +
                             operation + "'");
  verifySize(operands[1], arguments);
  verifySize(operands[2], arguments);
}

std::optional<int64_t> evaluateSize(const Json &size,
                                    std::span<const Tensor> arguments) {
  if (size.isNull())
    return std::nullopt;
  if (size.isInteger())
    return size.integer();
  const Json::Array &operands = size.array();
  const std::string &operation = operands.at(0).string();
  if (operation == "arg") {
    // A trailing result that tells its own size has no value yet.
    if (static_cast<uint64_t>(operands.at(1).integer()) >= arguments.size())
      return std::nullopt;
    return evaluateArgument(operands, arguments);
  }
  std::optional<int64_t> a = evaluateSize(operands.at(1), arguments);
  std::optional<int64_t> b = evaluateSize(operands.at(2), arguments);
  if (!a || !b)
    return std::nullopt;
  if (operation == "+")
    return add(*a, *b);
  if (operation == "*")
    return multiply(*a, *b);
  if (operation == "//")
    return divideFloor(*a, *b);
  if (operation == "%")
    return modulo(*a, *b);
  if (operation == "ceildiv")
    return subtract(0, divideFloor(subtract(0, *a), *b));
  if (operation == "max" || operation == "min")
    return operation == "max" ? std::max(*a, *b) : std::min(*a, *b);
  throw std::runtime_error("expected + * // % ceildiv max or min in a size, "
                           "found '" +
                           operation + "'");
}

std::string describeSources(const Json &size, size_t numArguments) {
  if (size.isNull() || size.isInteger())
    return "";
  const Json::Array &operands = size.array();
  if (operands.at(0).string() == "arg") {
    auto position = static_cast<size_t>(operands.at(1).integer());
    bool isArgument = position < numArguments;
    std::string value =
        (isArgument ? "argument " : "result ") +
        std::to_string(isArgument ? position : position - numArguments);
    if (operands.size() < 3)
      return value;
    return "size " + std::to_string(operands[2].integer()) + " of " + value;
  }
  std::string a = describeSources(operands.at(1), numArguments);
  std::string b = describeSources(operands.at(2), numArguments);
  return a + (a.empty() || b.empty() ? "" : " and ") + b;
}

int64_t evaluateSizeText(std::string_view text,
                         const std::map<std::string, int64_t> &symbols) {
  return SizeText(text, symbols).evaluate();
}

} // namespace moe::runtime
