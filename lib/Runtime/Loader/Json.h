//===- Json.h - Reading the manifests of artifacts --------------*- C++ -*-===//
//
// The runtime links nothing but libc, so it reads JSON itself: whole documents,
// strict (RFC 8259, UTF-8 only, no name twice in an object), with a bound on
// nesting. Numbers are integers or doubles. `utils/fuzz json` holds it against
// LLVM's reader.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_LIB_RUNTIME_LOADER_JSON_H
#define MOE_LIB_RUNTIME_LOADER_JSON_H

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace moe::runtime {

class Json {
public:
  using Array = std::vector<Json>;
  using Object = std::map<std::string, Json, std::less<>>;

  Json() = default;
  template <typename T>
  explicit Json(T value) : value(std::move(value)) {}

  /// Throws std::runtime_error that names `source` and the line.
  static Json parse(std::string_view text, const std::string &source);

  bool isNull() const { return std::holds_alternative<std::monostate>(value); }
  bool isArray() const { return std::holds_alternative<Array>(value); }
  bool isInteger() const { return std::holds_alternative<int64_t>(value); }
  bool isString() const { return std::holds_alternative<std::string>(value); }

  bool operator==(const Json &other) const = default;

  // Throw std::runtime_error where the value is of another kind.
  int64_t integer() const;
  const std::string &string() const;
  const Array &array() const;
  const Object &object() const;
  /// A list of that length.
  const Array &array(size_t length) const;
  /// A member that must be there.
  const Json &at(std::string_view key) const;
  /// A member, or null.
  const Json *find(std::string_view key) const;

private:
  std::variant<std::monostate, bool, int64_t, double, std::string, Array,
               Object>
      value;
};

} // namespace moe::runtime

#endif // MOE_LIB_RUNTIME_LOADER_JSON_H
