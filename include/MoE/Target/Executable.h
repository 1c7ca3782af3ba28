//===- Executable.h - Objects loaded into this process ----------*- C++ -*-===//

#ifndef MOE_TARGET_EXECUTABLE_H
#define MOE_TARGET_EXECUTABLE_H

#include "MoE/Target/Signature.h"
#include <memory>

namespace llvm::orc {
class LLJIT;
}

namespace mlir::moe {

/// Object code that was compiled with signatures, linked into this process by
/// libLLVM's JITLink. No IR is involved. Calls are thread-safe; the code lives
/// as long as the object.
class Executable {
public:
  using PackedFunction = void (*)(void **arguments);

  struct Function {
    FunctionSignature signature;
    PackedFunction entry;
  };

  static llvm::Expected<std::unique_ptr<Executable>> load(StringRef object);
  ~Executable();

  ArrayRef<Function> getFunctions() const { return functions; }
  /// Null when there is none.
  const Function *lookup(StringRef name) const;

private:
  Executable();

  std::unique_ptr<llvm::orc::LLJIT> jit;
  std::vector<Function> functions;
};

} // namespace mlir::moe

#endif // MOE_TARGET_EXECUTABLE_H
