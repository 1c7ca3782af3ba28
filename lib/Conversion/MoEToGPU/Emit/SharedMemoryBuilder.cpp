//===- SharedMemoryBuilder.cpp - Raw shared memory ------------------------===//

#include "SharedMemoryBuilder.h"

#include "MoE/Conversion/MoEToGPU.h"
#include "MoE/Support/Chips.h"
#include "MoE/Support/ElementBytes.h"
#include "mlir/Dialect/GPU/IR/GPUDialect.h"
#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "mlir/Dialect/LLVMIR/NVVMDialect.h"
#include "mlir/Dialect/MemRef/IR/MemRef.h"
#include "llvm/Support/MathExtras.h"

using namespace mlir;
using namespace mlir::moe;

static constexpr unsigned kGlobalSpace = 1, kSharedSpace = 3;

//===----------------------------------------------------------------------===//
// Integers
//===----------------------------------------------------------------------===//

Value SharedMemoryBuilder::div(Value lhs, int64_t powerOfTwo) {
  return op<arith::ShRUIOp>(lhs, i32(llvm::Log2_64(powerOfTwo)));
}

Value SharedMemoryBuilder::rem(Value lhs, int64_t powerOfTwo) {
  return both(lhs, i32(powerOfTwo - 1));
}

Value SharedMemoryBuilder::thread() {
  return toI32(gpu::ThreadIdOp::create(*this, gpu::Dimension::x));
}

//===----------------------------------------------------------------------===//
// Shared memory
//===----------------------------------------------------------------------===//

/// The shared memory that `kernel` has reserved statically.
static int64_t getStaticBytes(gpu::GPUFuncOp kernel) {
  int64_t bytes = 0;
  for (BlockArgument buffer : kernel.getWorkgroupAttributions())
    bytes += cast<MemRefType>(buffer.getType()).getNumElements();
  auto module = kernel->getParentOfType<gpu::GPUModuleOp>();
  DenseSet<Operation *> globals;
  kernel.walk([&](LLVM::AddressOfOp address) {
    auto global = module.lookupSymbol<LLVM::GlobalOp>(address.getGlobalName());
    if (global.getAddrSpace() == kSharedSpace && globals.insert(global).second)
      bytes += cast<LLVM::LLVMArrayType>(global.getType()).getNumElements();
  });
  return bytes;
}

Value SharedMemoryBuilder::reserveShared(int64_t bytes, int64_t alignment) {
  auto kernel =
      getInsertionBlock()->getParentOp()->getParentOfType<gpu::GPUFuncOp>();
  if (!kernel)
    kernel = cast<gpu::GPUFuncOp>(getInsertionBlock()->getParentOp());
  bool isDynamic =
      getStaticBytes(kernel) + bytes > ::moe::kMaxStaticSharedBytes;
  // All dynamic memory of a kernel starts at one place.
  int64_t offset = 0;
  if (auto taken = kernel->getAttrOfType<IntegerAttr>(kDynamicSmemAttrName);
      taken && isDynamic)
    offset = llvm::alignTo(taken.getInt(), alignment);
  auto module = kernel->getParentOfType<gpu::GPUModuleOp>();
  std::string stem = (kernel.getName() + "_shared").str(), name = stem;
  for (int number = 1; module.lookupSymbol(name); ++number)
    name = stem + std::to_string(number);
  LLVM::GlobalOp global;
  {
    InsertionGuard guard(*this);
    setInsertionPointToStart(module.getBody());
    auto type = LLVM::LLVMArrayType::get(getI8Type(), isDynamic ? 0 : bytes);
    global = LLVM::GlobalOp::create(
        *this, type, /*isConstant=*/false,
        isDynamic ? LLVM::Linkage::External : LLVM::Linkage::Internal, name,
        /*value=*/Attribute(), alignment, kSharedSpace);
  }
  if (isDynamic)
    kernel->setAttr(kDynamicSmemAttrName, getI64IntegerAttr(offset + bytes));
  return at(LLVM::AddressOfOp::create(*this, global), offset);
}

Value SharedMemoryBuilder::at(Value base, Value offset) {
  return LLVM::GEPOp::create(*this, base.getType(), getI8Type(), base,
                             ArrayRef<LLVM::GEPArg>{offset});
}

Value SharedMemoryBuilder::load(Type type, Value pointer, int64_t alignment) {
  return LLVM::LoadOp::create(*this, type, pointer, alignment);
}

void SharedMemoryBuilder::store(Value value, Value pointer, int64_t alignment) {
  LLVM::StoreOp::create(*this, value, pointer, alignment);
}

Value SharedMemoryBuilder::swizzle(Value row, Value unit, int64_t rowBytes) {
  int64_t units = std::min<int64_t>(rowBytes / kUnitBytes, 8);
  Value place = op<arith::XOrIOp>(unit, rem(div(row, 8 / units), units));
  return add(mul(row, i32(rowBytes)), mul(place, i32(kUnitBytes)));
}

void SharedMemoryBuilder::barrier() { gpu::BarrierOp::create(*this); }

//===----------------------------------------------------------------------===//
// Global memory
//===----------------------------------------------------------------------===//

Value SharedMemoryBuilder::addressOf(Value memref, ValueRange indices) {
  auto type = cast<MemRefType>(memref.getType());
  auto metadata = memref::ExtractStridedMetadataOp::create(*this, memref);
  Value offset = metadata.getOffset();
  for (auto [position, stride] :
       llvm::zip_equal(indices, metadata.getStrides()))
    offset = add(offset, mul(position, stride));
  int64_t width = getElementBytes(type.getElementType());
  Value address = memref::ExtractAlignedPointerAsIndexOp::create(*this, memref);
  address = add(address, mul(offset, index(width)));
  address = arith::IndexCastOp::create(*this, getI64Type(), address);
  MLIRContext *context = getContext();
  Value generic = LLVM::IntToPtrOp::create(
      *this, LLVM::LLVMPointerType::get(context), address);
  return LLVM::AddrSpaceCastOp::create(
      *this, LLVM::LLVMPointerType::get(context, kGlobalSpace), generic);
}

void SharedMemoryBuilder::copyAsync(Value shared, Value global, Value isReal) {
  Value bytes = select(isReal, i32(kUnitBytes), i32(0));
  NVVM::CpAsyncOp::create(*this, shared, global, kUnitBytes,
                          NVVM::LoadCacheModifierKind::CG, bytes);
}

void SharedMemoryBuilder::commitCopies() {
  NVVM::CpAsyncCommitGroupOp::create(*this);
}

void SharedMemoryBuilder::waitForCopies(int64_t pending) {
  NVVM::CpAsyncWaitGroupOp::create(*this, static_cast<uint32_t>(pending));
}
