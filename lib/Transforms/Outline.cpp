//===- Outline.cpp - Loops as functions of their own ----------------------===//

#include "Outline.h"

#include "mlir/Conversion/LLVMCommon/MemRefBuilder.h"
#include "mlir/IR/IRMapping.h"
#include "mlir/Transforms/RegionUtils.h"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// Captured values
//===----------------------------------------------------------------------===//

static bool isConstant(Value value) {
  Operation *definition = value.getDefiningOp();
  return definition && definition->hasTrait<OpTrait::ConstantLike>();
}

/// The values that `loop` uses from outside but for constants, which are cloned
/// into its regions.
static SetVector<Value> captureValues(Operation *loop) {
  SetVector<Value> captured;
  for (Region &region : loop->getRegions()) {
    DenseMap<Value, Value> clones;
    auto builder = OpBuilder::atBlockBegin(&region.front());
    // By the operands of the region: a constant may have users everywhere.
    visitUsedValuesDefinedAbove(region, [&](OpOperand *use) {
      if (!isConstant(use->get())) {
        captured.insert(use->get());
        return;
      }
      Value &clone = clones[use->get()];
      if (!clone)
        clone = builder.clone(*use->get().getDefiningOp())->getResult(0);
      use->set(clone);
    });
  }
  // The function computes the bounds too.
  for (Value operand : loop->getOperands())
    if (!isConstant(operand))
      captured.insert(operand);
  return captured;
}

Value mlir::moe::castTo(ImplicitLocOpBuilder &builder, Type type, Value value) {
  if (value.getType() == type)
    return value;
  return UnrealizedConversionCastOp::create(builder, type, value).getResult(0);
}

Capture::Capture(Value value, const LLVMTypeConverter &converter)
    : value(value), type(converter.convertType(value.getType())) {
  MemRefType buffer = getBuffer();
  if (!buffer || !type)
    return;
  std::tie(strides, offset) = buffer.getStridesAndOffset();
}

SmallVector<Type> Capture::getFields() const {
  if (!getBuffer())
    return {type};
  ArrayRef<Type> parts = cast<LLVM::LLVMStructType>(type).getBody();
  Type pointer = parts[0], index = parts[2]; // As a descriptor has them.
  SmallVector<Type> fields = {pointer};
  unsigned numSizes = hasOwnOffset();
  for (unsigned dim = 0, rank = getBuffer().getRank(); dim < rank; ++dim)
    numSizes += getBuffer().isDynamicDim(dim) + hasOwnStride(dim);
  fields.append(numSizes, index);
  return fields;
}

SmallVector<Value> Capture::split(ImplicitLocOpBuilder &builder) const {
  Value converted = castTo(builder, type, value);
  if (!getBuffer())
    return {converted};
  MemRefDescriptor descriptor(converted);
  Location loc = builder.getLoc();
  SmallVector<Value> fields{descriptor.alignedPtr(builder, loc)};
  if (hasOwnOffset())
    fields.push_back(descriptor.offset(builder, loc));
  for (unsigned dim = 0, rank = getBuffer().getRank(); dim < rank; ++dim) {
    if (getBuffer().isDynamicDim(dim))
      fields.push_back(descriptor.size(builder, loc, dim));
    if (hasOwnStride(dim))
      fields.push_back(descriptor.stride(builder, loc, dim));
  }
  return fields;
}

Value Capture::join(ImplicitLocOpBuilder &builder, ValueRange fields) const {
  MemRefType buffer = getBuffer();
  if (!buffer)
    return castTo(builder, value.getType(), fields.front());
  Location loc = builder.getLoc();
  auto next = fields.begin();
  auto descriptor = MemRefDescriptor::poison(builder, loc, type);
  // A loop frees none of the buffers that it is given.
  descriptor.setAllocatedPtr(builder, loc, *next);
  descriptor.setAlignedPtr(builder, loc, *next++);
  if (hasOwnOffset())
    descriptor.setOffset(builder, loc, *next++);
  else
    descriptor.setConstantOffset(builder, loc, offset);
  int64_t rank = buffer.getRank();
  for (int64_t dim = 0; dim < rank; ++dim) {
    if (buffer.isDynamicDim(dim))
      descriptor.setSize(builder, loc, dim, *next++);
    else
      descriptor.setConstantSize(builder, loc, dim, buffer.getDimSize(dim));
    if (hasOwnStride(dim))
      descriptor.setStride(builder, loc, dim, *next++);
  }
  for (int64_t dim = rank; dim-- > 0;) {
    if (!ShapedType::isDynamic(strides[dim]))
      descriptor.setConstantStride(builder, loc, dim, strides[dim]);
    else if (!hasOwnStride(dim)) // Rows lie one after another.
      descriptor.setStride(
          builder, loc, dim,
          LLVM::MulOp::create(builder, descriptor.stride(builder, loc, dim + 1),
                              descriptor.size(builder, loc, dim + 1)));
  }
  return castTo(builder, buffer, descriptor);
}

FailureOr<Context> Outliner::capture(Operation *loop) {
  Context context;
  SmallVector<Type> fields;
  for (Value value : captureValues(loop)) {
    Capture &capture = context.captured.emplace_back(value, converter);
    if (!capture.getType())
      return loop->emitOpError()
             << "expected values that can be stored, found a use of "
             << value.getType();
    llvm::append_range(fields, capture.getFields());
  }
  context.type = LLVM::LLVMStructType::getLiteral(module.getContext(), fields);
  return context;
}

/// The address of a field of a context.
static Value getField(ImplicitLocOpBuilder &builder, const Context &context,
                      Value pointer, int32_t position) {
  return LLVM::GEPOp::create(builder, pointer.getType(), context.type, pointer,
                             ArrayRef<LLVM::GEPArg>{0, position});
}

Value Outliner::storeContext(ImplicitLocOpBuilder &builder, Operation *loop,
                             const Context &context) {
  auto parent = loop->getParentOfType<func::FuncOp>();
  builder.setInsertionPointToStart(&parent.getBody().front());
  Value one = LLVM::ConstantOp::create(builder, builder.getI64Type(),
                                       builder.getI64IntegerAttr(1));
  Value pointer = LLVM::AllocaOp::create(
      builder, LLVM::LLVMPointerType::get(module.getContext()), context.type,
      one);
  builder.setInsertionPoint(loop);
  int32_t position = 0;
  for (const Capture &capture : context.captured)
    for (Value value : capture.split(builder))
      LLVM::StoreOp::create(builder, value,
                            getField(builder, context, pointer, position++));
  return pointer;
}

//===----------------------------------------------------------------------===//
// Functions
//===----------------------------------------------------------------------===//

/// Equal for functions whose bodies are equal.
static llvm::hash_code hashBody(func::FuncOp function) {
  llvm::hash_code hash(0);
  function.getBody().walk([&](Operation *op) {
    hash =
        llvm::hash_combine(hash, OperationEquivalence::computeHash(
                                     op, OperationEquivalence::ignoreHashValue,
                                     OperationEquivalence::ignoreHashValue,
                                     OperationEquivalence::IgnoreLocations));
  });
  return hash;
}

static bool haveEqualBodies(func::FuncOp a, func::FuncOp b) {
  return OperationEquivalence::isRegionEquivalentTo(
      &a.getBody(), &b.getBody(), OperationEquivalence::IgnoreLocations);
}

/// An earlier function that is equal to `body`, which is erased then; else
/// `body` itself.
func::FuncOp Outliner::shareEqual(func::FuncOp body) {
  SmallVector<func::FuncOp, 1> &candidates = bodies[hashBody(body)];
  for (func::FuncOp other : candidates)
    if (haveEqualBodies(other, body)) {
      symbols.erase(body);
      ++numShared;
      return other;
    }
  candidates.push_back(body);
  return body;
}

func::FuncOp
Outliner::makeFunction(Operation *loop, StringRef suffix,
                       ArrayRef<Type> arguments, const Context &context,
                       function_ref<void(func::FuncOp, Operation *)> finish) {
  auto parent = loop->getParentOfType<func::FuncOp>();
  OpBuilder moduleBuilder(parent);
  SmallVector<Type> types(arguments);
  types.push_back(LLVM::LLVMPointerType::get(module.getContext()));
  auto function = func::FuncOp::create(
      moduleBuilder, loop->getLoc(), (parent.getName() + suffix).str(),
      moduleBuilder.getFunctionType(types, {}));
  function.setPrivate();
  symbols.insert(function);

  Block *entry = function.addEntryBlock();
  auto builder = ImplicitLocOpBuilder::atBlockEnd(loop->getLoc(), entry);
  SmallVector<Value> loaded;
  for (auto [position, type] : llvm::enumerate(context.type.getBody()))
    loaded.push_back(LLVM::LoadOp::create(
        builder, type,
        getField(builder, context, entry->getArguments().back(), position)));
  IRMapping mapping;
  ValueRange rest = loaded;
  for (const Capture &capture : context.captured) {
    size_t numFields = capture.getFields().size();
    mapping.map(capture.getValue(),
                capture.join(builder, rest.take_front(numFields)));
    rest = rest.drop_front(numFields);
  }
  for (Value operand : loop->getOperands())
    if (isConstant(operand) && !mapping.contains(operand))
      mapping.map(operand,
                  builder.clone(*operand.getDefiningOp())->getResult(0));
  Operation *isolated = builder.clone(*loop, mapping);
  func::ReturnOp::create(builder);
  finish(function, isolated);
  return shareEqual(function);
}

func::FuncOp Outliner::declare(StringRef name, ArrayRef<Type> arguments) {
  if (auto function = symbols.lookup<func::FuncOp>(name))
    return function;
  OpBuilder builder = OpBuilder::atBlockEnd(module.getBody());
  auto function = func::FuncOp::create(builder, module.getLoc(), name,
                                       builder.getFunctionType(arguments, {}));
  function.setPrivate();
  symbols.insert(function);
  return function;
}
