//===- MoEConstants.cpp - Constant operands of the moe ops ----------------===//

#include "MoEConstants.h"

#include "mlir/IR/AsmState.h"
#include "mlir/IR/BuiltinTypes.h"
#include "mlir/IR/DialectResourceBlobManager.h"
#include "mlir/IR/Matchers.h"
#include "llvm/ADT/STLExtras.h"

using namespace mlir;
using namespace mlir::moe;

/// Constants with more elements than this are resources.
static constexpr int64_t kLargestInline = 1024;

static bool isReadable(Type elementType) {
  return elementType.isF32() || elementType.isBF16() || elementType.isF16();
}

static Attribute getConstant(Value value) {
  Attribute attr;
  if (!value || !matchPattern(value, m_Constant(&attr)))
    return {};
  return attr;
}

/// The bytes of a resource, if it is there and holds `count` elements.
static ArrayRef<char> getBytes(DenseResourceElementsAttr attr, int64_t count,
                               unsigned bytesPerElement) {
  AsmResourceBlob *blob = attr.getRawHandle().getBlob();
  if (!blob ||
      blob->getData().size() != static_cast<size_t>(count) * bytesPerElement)
    return {};
  return blob->getData();
}

static std::optional<SmallVector<double>>
readResource(DenseResourceElementsAttr attr) {
  auto elementType = cast<FloatType>(attr.getElementType());
  unsigned bytes = elementType.getWidth() / 8;
  int64_t count = attr.getNumElements();
  ArrayRef<char> data = getBytes(attr, count, bytes);
  if (data.empty())
    return std::nullopt;
  SmallVector<double> values;
  values.reserve(count);
  for (int64_t i = 0; i < count; ++i) {
    // Blobs are little-endian, as are the hosts that the compiler runs on.
    uint64_t bits = 0;
    std::memcpy(&bits, data.data() + i * bytes, bytes);
    APFloat value(elementType.getFloatSemantics(),
                  APInt(elementType.getWidth(), bits));
    values.push_back(value.convertToDouble());
  }
  return values;
}

std::optional<SmallVector<double>> mlir::moe::readFloats(Attribute attr) {
  auto elements = dyn_cast_or_null<ElementsAttr>(attr);
  if (!elements || !isReadable(elements.getElementType()))
    return std::nullopt;
  if (auto resource = dyn_cast<DenseResourceElementsAttr>(attr))
    return readResource(resource);
  auto dense = dyn_cast<DenseFPElementsAttr>(attr);
  if (!dense)
    return std::nullopt;
  return llvm::map_to_vector<0>(
      dense.getValues<APFloat>(),
      [](const APFloat &value) { return value.convertToDouble(); });
}

std::optional<SmallVector<double>> mlir::moe::readFloats(Value value) {
  return readFloats(getConstant(value));
}

ElementsAttr mlir::moe::makeF32Constant(RankedTensorType type,
                                        ArrayRef<double> values,
                                        StringRef name) {
  SmallVector<float> rounded(values.begin(), values.end());
  if (type.getNumElements() <= kLargestInline)
    return DenseElementsAttr::get(type, ArrayRef<float>(rounded));
  return DenseResourceElementsAttr::get(
      type, name,
      HeapAsmResourceBlob::allocateAndCopyInferAlign<float>(rounded));
}

std::optional<double> mlir::moe::getSplatFloat(Value value) {
  auto dense = dyn_cast_or_null<DenseFPElementsAttr>(getConstant(value));
  if (!dense || !dense.isSplat())
    return std::nullopt;
  return dense.getSplatValue<APFloat>().convertToDouble();
}

std::optional<int64_t> mlir::moe::getSplatInteger(Value value) {
  auto dense = dyn_cast_or_null<DenseIntElementsAttr>(getConstant(value));
  if (!dense || !dense.isSplat())
    return std::nullopt;
  APInt element = dense.getSplatValue<APInt>();
  // A true mask is 1, not -1.
  return element.getBitWidth() == 1
             ? static_cast<int64_t>(element.getZExtValue())
             : element.getSExtValue();
}

bool mlir::moe::isIdentityMatrix(Value value) {
  auto type = dyn_cast<RankedTensorType>(value.getType());
  if (!type || !type.hasStaticShape() || type.getRank() != 2 ||
      type.getDimSize(0) != type.getDimSize(1))
    return false;
  std::optional<SmallVector<double>> values = readFloats(value);
  if (!values)
    return false;
  int64_t size = type.getDimSize(0);
  for (auto [i, element] : llvm::enumerate(*values))
    if (element !=
        (static_cast<int64_t>(i) / size == static_cast<int64_t>(i) % size
             ? 1.0
             : 0.0))
      return false;
  return true;
}
