//===- MoEDialect.cpp - The moe dialect -----------------------------------===//

#include "MoE/Dialect/MoE/IR/KernelConfig.h"
#include "MoE/Dialect/MoE/IR/MoE.h"
#include "MoE/Dialect/MoE/IR/MoEStructured.h"

#include "mlir/Conversion/ConvertToLLVM/ToLLVMInterface.h"
#include "mlir/Dialect/Affine/IR/AffineOps.h"
#include "mlir/Dialect/Arith/IR/Arith.h"
#include "mlir/Dialect/Bufferization/IR/BufferizableOpInterface.h"
#include "mlir/Dialect/Linalg/IR/Linalg.h"
#include "mlir/Dialect/Math/IR/Math.h"
#include "mlir/Dialect/SCF/IR/SCF.h"
#include "mlir/Dialect/Tensor/IR/Tensor.h"
#include "mlir/IR/DialectImplementation.h"
#include "mlir/Interfaces/RuntimeVerifiableOpInterface.h"
#include "mlir/Interfaces/TilingInterface.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/ADT/TypeSwitch.h"

using namespace mlir;
using namespace mlir::moe;

#include "MoE/Dialect/MoE/IR/MoEDialect.cpp.inc"
#include "MoE/Dialect/MoE/IR/MoEEnums.cpp.inc"
#include "MoE/Dialect/MoE/IR/MoEKernelEnums.cpp.inc"

#define GET_ATTRDEF_CLASSES
#include "MoE/Dialect/MoE/IR/MoEAttrs.cpp.inc"

#include "MoE/Dialect/MoE/IR/MoEInterfaces.cpp.inc"

#define GET_OP_CLASSES
#include "MoE/Dialect/MoE/IR/MoEAssertOp.cpp.inc"
#define GET_OP_CLASSES
#include "MoE/Dialect/MoE/IR/MoEOps.cpp.inc"

//===----------------------------------------------------------------------===//
// VisibilityAttr
//===----------------------------------------------------------------------===//

std::optional<int64_t> VisibilityAttr::getReach() const {
  if (!getWindow())
    return std::nullopt;
  // Without itself a query still sees `window` keys.
  int64_t longest = std::numeric_limits<int64_t>::max() - 1;
  return std::min(*getWindow(), longest) + (getExcludeSelf() ? 1 : 0);
}

LogicalResult
VisibilityAttr::verify(function_ref<InFlightDiagnostic()> emitError, bool,
                       std::optional<int64_t> window, bool) {
  // similarity_inform_c4, attention_posterior_c4
  if (!window || *window >= 1)
    return success();
  return emitError() << "expected window to be at least 1, found " << *window;
}

Attribute VisibilityAttr::parse(AsmParser &parser, Type) {
  bool causal = false, excludeSelf = false;
  std::optional<int64_t> window;
  auto parsePart = [&]() -> ParseResult {
    SMLoc loc = parser.getCurrentLocation();
    StringRef part;
    if (parser.parseKeyword(&part))
      return failure();
    if (part == "causal" && !causal) {
      causal = true;
      return success();
    }
    if (part == "exclude_self" && !excludeSelf) {
      excludeSelf = true;
      return success();
    }
    if (part == "window" && !window)
      return failure(parser.parseEqual() ||
                     parser.parseInteger(window.emplace()));
    return parser.emitError(loc)
           << "expected causal, window = <keys> and exclude_self, each at most "
              "once, found '"
           << part << "'";
  };
  SMLoc loc = parser.getCurrentLocation();
  if (parser.parseLess())
    return {};
  if (failed(parser.parseOptionalGreater()) &&
      (parser.parseCommaSeparatedList(parsePart) || parser.parseGreater()))
    return {};
  return parser.getChecked<VisibilityAttr>(loc, parser.getContext(), causal,
                                           window, excludeSelf);
}

void VisibilityAttr::print(AsmPrinter &printer) const {
  SmallVector<std::string> parts;
  if (getCausal())
    parts.push_back("causal");
  if (getWindow())
    parts.push_back("window = " + std::to_string(*getWindow()));
  if (getExcludeSelf())
    parts.push_back("exclude_self");
  printer << '<' << llvm::join(parts, ", ") << '>';
}

//===----------------------------------------------------------------------===//
// MoEDialect
//===----------------------------------------------------------------------===//

void MoEDialect::initialize() {
  addAttributes<
#define GET_ATTRDEF_LIST
#include "MoE/Dialect/MoE/IR/MoEAttrs.cpp.inc"
      >();
  addOperations<
#define GET_OP_LIST
#include "MoE/Dialect/MoE/IR/MoEAssertOp.cpp.inc"
      >();
  addOperations<
#define GET_OP_LIST
#include "MoE/Dialect/MoE/IR/MoEOps.cpp.inc"
      >();
  // A tool that forgets to link Dialect/MoE/Interfaces gets an error that says
  // so instead of a driver that quietly does nothing.
  declarePromisedInterfaces<TilingInterface,
#define GET_OP_LIST
#include "MoE/Dialect/MoE/IR/MoEOps.cpp.inc"
                            >();
  declarePromisedInterface<ConvertToLLVMPatternInterface, MoEDialect>();
  declarePromisedInterface<PartialReductionOpInterface, AdjacencyUpdateOp>();
  declarePromisedInterface<SplitReductionOpInterface, AdjacencyUpdateOp>();
  declarePromisedInterfaces<linalg::AggregatedOpInterface,
#define GET_OP_LIST
#include "MoE/Dialect/MoE/IR/MoEOps.cpp.inc"
                            >();
  declarePromisedInterfaces<MixingOpInterface, SimilarityInformOp,
                            SimilarityInformBackwardOp, AttentionPosteriorOp,
                            AttentionPosteriorBackwardOp, AttentionEntropyOp>();
  declarePromisedInterfaces<bufferization::BufferizableOpInterface,
#define GET_OP_LIST
#include "MoE/Dialect/MoE/IR/MoEOps.cpp.inc"
                            >();
  declarePromisedInterfaces<RuntimeVerifiableOpInterface,
#define GET_OP_LIST
#include "MoE/Dialect/MoE/IR/MoEOps.cpp.inc"
                            >();
}
