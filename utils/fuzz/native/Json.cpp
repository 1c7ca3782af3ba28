//===- Json.cpp - The manifest's JSON beside LLVM's -----------------------===//

#include "Target.h"

#include "Loader/Json.h"

#include <algorithm>

#ifdef MOE_FUZZ_HAS_LLVM
#include "llvm/Support/JSON.h"
#endif

using namespace moe;
using runtime::Json;

#ifdef MOE_FUZZ_HAS_LLVM
namespace {

/// LLVM reads surrogate pairs for characters from U+20000 on as others: it
/// joins the halves by an or where the standard has a sum.
bool isPastSecondPlane(const std::string &text) {
  for (size_t i = 0; i + 1 < text.size(); ++i) {
    auto lead = static_cast<uint8_t>(text[i]);
    if (lead > 0xf0 ||
        (lead == 0xf0 && static_cast<uint8_t>(text[i + 1]) >= 0xa0))
      return true;
  }
  return false;
}

bool isEqual(const Json &ours, const llvm::json::Value &theirs) {
  if (ours.isNull())
    return theirs.getAsNull().has_value();
  if (ours.isInteger())
    return theirs.getAsInteger() == ours.integer();
  if (ours.isString())
    return theirs.getAsString() == llvm::StringRef(ours.string()) ||
           isPastSecondPlane(ours.string());
  if (ours.isArray()) {
    const llvm::json::Array *array = theirs.getAsArray();
    if (!array || array->size() != ours.array().size())
      return false;
    for (size_t i = 0; i < array->size(); ++i)
      if (!isEqual(ours.array()[i], (*array)[i]))
        return false;
    return true;
  }
  if (const llvm::json::Object *object = theirs.getAsObject()) {
    if (object->size() != ours.object().size())
      return false;
    for (const auto &[key, value] : ours.object())
      if (!object->get(key) || !isEqual(value, *object->get(key)))
        return false;
    return true;
  }
  // Booleans, and doubles, which nothing in an artifact has.
  return theirs.getAsBoolean() || theirs.getAsNumber();
}

/// Where ours is stricter: LLVM takes 01 and 1., lone surrogates, the last of
/// two equal names, and any depth.
bool isKnownDifference(const std::string &refusal) {
  for (const char *known :
       {"levels of nesting", "expected each name once", "surrogates in pairs",
        "expected a value", "digits after the point", "range of a double"})
    if (refusal.find(known) != refusal.npos)
      return true;
  return false;
}

} // namespace
#endif

void fuzz::runJson(const std::string &input) {
#ifdef MOE_FUZZ_HAS_LLVM
  // Theirs recurses without a bound.
  bool isDeep = std::count_if(input.begin(), input.end(), [](char c) {
                  return c == '[' || c == '{';
                }) > 2000;
  llvm::Expected<llvm::json::Value> theirs =
      isDeep ? llvm::createStringError("too deep") : llvm::json::parse(input);
  std::string reason;
  if (!theirs)
    reason = llvm::toString(theirs.takeError());
  try {
    Json ours = Json::parse(input, "input");
    if (isDeep)
      return;
    if (!reason.empty())
      fail("accepted, but LLVM says: " + reason);
    if (!isEqual(ours, *theirs))
      fail("read other values than LLVM");
  } catch (const std::exception &error) {
    if (reason.empty() && !isKnownDifference(error.what()))
      fail(std::string("LLVM reads it, refused: ") + error.what());
    throw;
  }
#else
  Json::parse(input, "input");
#endif
}
