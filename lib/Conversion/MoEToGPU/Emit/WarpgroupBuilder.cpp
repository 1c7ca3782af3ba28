//===- WarpgroupBuilder.cpp - Code of a warpgroup of sm_90a ---------------===//

#include "WarpgroupBuilder.h"

#include "mlir/Dialect/LLVMIR/LLVMDialect.h"
#include "llvm/ADT/Sequence.h"
#include "llvm/ADT/StringExtras.h"

using namespace mlir;
using namespace mlir::moe;

//===----------------------------------------------------------------------===//
// Inline assembly
//===----------------------------------------------------------------------===//

SmallVector<Value> WarpgroupBuilder::assemble(StringRef text,
                                              StringRef constraints,
                                              TypeRange results,
                                              ValueRange operands) {
  SmallVector<Type> types(results);
  if (types.size() > 1)
    types = {LLVM::LLVMStructType::getLiteral(getContext(), types)};
  std::string clobbered = constraints.str();
  clobbered += clobbered.empty() ? "~{memory}" : ",~{memory}";
  auto assembly = LLVM::InlineAsmOp::create(
      *this, types, operands, text, clobbered, /*has_side_effects=*/true,
      /*is_align_stack=*/false, LLVM::TailCallKind::None,
      LLVM::AsmDialectAttr::get(getContext(), LLVM::AsmDialect::AD_ATT),
      /*operand_attrs=*/ArrayAttr());
  if (results.size() <= 1)
    return SmallVector<Value>(assembly.getResults());
  SmallVector<Value> values;
  for (int64_t i = 0, n = results.size(); i < n; ++i)
    values.push_back(
        LLVM::ExtractValueOp::create(*this, assembly.getResult(0), i));
  return values;
}

Value WarpgroupBuilder::sharedAddress(Value pointer) {
  return LLVM::PtrToIntOp::create(*this, getI32Type(), pointer);
}

//===----------------------------------------------------------------------===//
// Barriers in shared memory
//===----------------------------------------------------------------------===//

void WarpgroupBuilder::initBarrier(Value barrier, int64_t arrivals) {
  assemble("mbarrier.init.shared::cta.b64 [$0], $1;", "r,r", {},
           {sharedAddress(barrier), i32(arrivals)});
}

// A predicate rather than a branch: what follows is for the whole warp, and no
// optimization may take it for the code of some lanes.
void WarpgroupBuilder::arrive(Value barrier, Value condition) {
  Value flag = arith::ExtUIOp::create(*this, getI32Type(), condition);
  assemble("{\n"
           ".reg .pred arrives;\n"
           "setp.ne.u32 arrives, $1, 0;\n"
           "@arrives mbarrier.arrive.shared::cta.b64 _, [$0];\n"
           "}",
           "r,r", {}, {sharedAddress(barrier), flag});
}

void WarpgroupBuilder::arriveAfterCopies(Value barrier) {
  assemble("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", "r", {},
           {sharedAddress(barrier)});
}

void WarpgroupBuilder::waitFor(Value barrier, Value parity) {
  assemble("{\n"
           ".reg .pred done;\n"
           "again:\n"
           "mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;\n"
           "@!done bra again;\n"
           "}",
           "r,r", {}, {sharedAddress(barrier), parity});
}

void WarpgroupBuilder::fenceProducts() {
  assemble("fence.proxy.async.shared::cta;", "", {}, {});
}

//===----------------------------------------------------------------------===//
// Registers
//===----------------------------------------------------------------------===//

void WarpgroupBuilder::takeRegisters(int64_t registers) {
  assemble("setmaxnreg.inc.sync.aligned.u32 " + std::to_string(registers) + ";",
           "", {}, {});
}

void WarpgroupBuilder::giveRegisters(int64_t registers) {
  assemble("setmaxnreg.dec.sync.aligned.u32 " + std::to_string(registers) + ";",
           "", {}, {});
}

//===----------------------------------------------------------------------===//
// Matrices
//===----------------------------------------------------------------------===//

/// The low field of a descriptor, as i64: an address in units of 16 bytes.
static Value getAddressField(WarpgroupBuilder &b, Value bytes) {
  Value units = b.rem(b.div(bytes, kUnitBytes), 1 << 14);
  return arith::ExtUIOp::create(b, b.getI64Type(), units);
}

WarpgroupBuilder::Matrix WarpgroupBuilder::describe(Value shared,
                                                    int64_t rowBytes,
                                                    bool isTransposed,
                                                    int64_t blockBytes) {
  assert((rowBytes == 32 || rowBytes == 64 || rowBytes == 128) &&
         "expected rows of a swizzle");
  // Fields in units of 16 bytes: from block to block of columns (16), from 8
  // rows to the next (32); and the swizzle (62).
  uint64_t swizzle = rowBytes == 128 ? 1 : rowBytes == 64 ? 2 : 3;
  uint64_t fields = swizzle << 62 | uint64_t(8 * rowBytes / kUnitBytes) << 32 |
                    uint64_t(blockBytes / kUnitBytes) << 16;
  Value constant = arith::ConstantOp::create(
      *this, getI64IntegerAttr(static_cast<int64_t>(fields)));
  Value address = getAddressField(*this, sharedAddress(shared));
  return {either(address, constant), isTransposed};
}

WarpgroupBuilder::Matrix WarpgroupBuilder::offset(Matrix matrix,
                                                  int64_t bytes) {
  matrix.offset += bytes;
  return matrix;
}

WarpgroupBuilder::Matrix WarpgroupBuilder::offset(Matrix matrix, Value bytes) {
  matrix.descriptor = add(matrix.descriptor, getAddressField(*this, bytes));
  return matrix;
}

//===----------------------------------------------------------------------===//
// Products
//===----------------------------------------------------------------------===//

/// "$first, $first+1, ..." in braces.
static std::string getRegisters(int64_t first, int64_t count) {
  auto names = llvm::map_range(llvm::seq(first, first + count), [](int64_t i) {
    return "$" + std::to_string(i);
  });
  return "{" + llvm::join(names, ", ") + "}";
}

/// `count` times "=f", and each again as an operand if `isTied`.
static std::string getSumConstraints(int64_t count, bool isTied) {
  SmallVector<std::string> constraints(count, "=f");
  if (isTied)
    for (int64_t i = 0; i < count; ++i)
      constraints.push_back(std::to_string(i));
  return llvm::join(constraints, ",");
}

namespace {
/// The text of a group of products, and what it reads beside its sums.
class ProductGroup {
public:
  ProductGroup(int64_t numSums, bool isTied)
      : numSums(numSums), isTied(isTied) {}

  void add(const WarpgroupBuilder::Product &product, StringRef instruction) {
    bool isLeftShared = product.registers.empty();
    if (isLeftShared)
      text += "add.s64 left, " + describe(product.left);
    text += "add.s64 right, " + describe(product.right);
    text += instruction.str() + " " + getRegisters(0, numSums) + ", ";
    if (isLeftShared) {
      text += "left";
    } else {
      text += getRegisters(getNumber(), product.registers.size());
      for (Value value : product.registers)
        pass(value, "r");
    }
    // Whether to add to the sums, and the signs of the operands.
    text += isFirst && !isTied ? ", right, 0, 1, 1" : ", right, 1, 1, 1";
    if (isLeftShared)
      text += product.left.isTransposed ? ", 1" : ", 0";
    text += product.right.isTransposed ? ", 1;\n" : ", 0;\n";
    isFirst = false;
  }

  std::string text, constraints;
  SmallVector<Value> operands;

private:
  /// The number that the next operand will have in the text.
  int64_t getNumber() const {
    return numSums * (isTied ? 2 : 1) + operands.size();
  }

  std::string pass(Value value, const char *constraint) {
    std::string name = "$" + std::to_string(getNumber());
    operands.push_back(value);
    constraints += std::string(",") + constraint;
    return name;
  }

  /// A descriptor and its offset, as operands of an addition.
  std::string describe(const WarpgroupBuilder::Matrix &matrix) {
    std::string &name = names[matrix.descriptor];
    if (name.empty())
      name = pass(matrix.descriptor, "l");
    return name + ", " + std::to_string(matrix.offset / kUnitBytes) + ";\n";
  }

  const int64_t numSums;
  const bool isTied;
  bool isFirst = true;
  llvm::SmallDenseMap<Value, std::string> names;
};
} // namespace

SmallVector<Value> WarpgroupBuilder::startProducts(ArrayRef<Product> products,
                                                   ValueRange sums,
                                                   int64_t columns,
                                                   Type element) {
  int64_t numSums = columns / 2;
  assert((sums.empty() || numSums == int64_t(sums.size())) &&
         "expected a sum for every result");
  std::string type = element.isBF16() ? "bf16" : "f16";
  std::string instruction = "wgmma.mma_async.sync.aligned.m64n" +
                            std::to_string(columns) + "k16.f32." + type + "." +
                            type;
  ProductGroup group(numSums, /*isTied=*/!sums.empty());
  for (const Product &product : products)
    group.add(product, instruction);
  std::string text = "{\n.reg .b64 left, right;\nwgmma.fence.sync.aligned;\n" +
                     group.text + "wgmma.commit_group.sync.aligned;\n}";
  SmallVector<Value> operands(sums);
  operands.append(group.operands);
  return assemble(text,
                  getSumConstraints(numSums, !sums.empty()) + group.constraints,
                  SmallVector<Type>(numSums, getF32Type()), operands);
}

SmallVector<Value> WarpgroupBuilder::waitForProducts(ValueRange sums,
                                                     int64_t pending) {
  return assemble(
      "wgmma.wait_group.sync.aligned " + std::to_string(pending) + ";",
      getSumConstraints(sums.size(), /*isTied=*/true), sums.getTypes(), sums);
}
