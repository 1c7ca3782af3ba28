//===- Artifact.h - Running compiled artifacts ------------------*- C++ -*-===//
//
// Loads a folder that moe-compile wrote and runs its functions. Needs libc and
// libmoe_runtime: no LLVM, no torch, no linker.
//
//   moe::runtime::Artifact artifact("router.artifact");
//   const Function &route = artifact.getFunction("route");
//   std::vector<moe::runtime::Array> results = route.run({h, weight});
//
// The code of an artifact runs in this process: trust its source.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_RUNTIME_ARTIFACT_H
#define MOE_RUNTIME_ARTIFACT_H

#include "MoE/Runtime/Parallel.h"

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace moe::runtime {

class GpuDevice;

/// Memory that somebody else owns: contiguous and row-major. A scalar is a
/// tensor without dims.
struct Tensor {
  /// i1 (a byte), i8, i16, i32, i64, index, f16, bf16, f32 or f64.
  std::string dtype;
  /// Outermost dim first.
  std::vector<int64_t> shape;
  /// The first element. This does not free it.
  void *data = nullptr;
  /// Where `data` points to: the memory of a function's GPU, or of this
  /// process.
  bool isOnDevice = false;
};

/// What a function takes or gives.
struct MOE_RUNTIME_EXPORT ValueType {
  std::string dtype;
  bool isTensor = false;
  /// -1 where any size is taken.
  std::vector<int64_t> shape;
  /// Of an argument: a call writes the new content of the tensor into it.
  bool isUpdated = false;

  /// As moe-run lists it: `f32[?, 24]`, or `f32` for a scalar.
  std::string toString() const;
};

/// A tensor with its memory, which is of this process.
struct MOE_RUNTIME_EXPORT Array {
  /// Of zeros. Throws std::runtime_error where the type is none of Tensor's, or
  /// where there is less memory.
  explicit Array(std::string dtype, std::vector<int64_t> shape);
  Tensor tensor;
  std::unique_ptr<uint8_t[]> memory;
};

/// Bytes of one element.
MOE_RUNTIME_EXPORT size_t getElementSize(const std::string &dtype);
/// The number of elements.
MOE_RUNTIME_EXPORT int64_t getNumElements(std::span<const int64_t> shape);

/// Bytes of a tensor's elements.
MOE_RUNTIME_EXPORT uint64_t getByteSize(const Tensor &tensor);

/// A function of an artifact, which owns it.
class MOE_RUNTIME_EXPORT Function {
public:
  virtual ~Function() = default;

  /// The name in the IR; `main` for a torch program.
  const std::string &getName() const { return name; }
  /// What the caller gives: the weights of a torch program are the artifact's.
  const std::vector<ValueType> &getArguments() const { return arguments; }
  /// What a call gives.
  const std::vector<ValueType> &getResults() const { return results; }
  /// Names of the arguments; empty where the artifact knows none.
  const std::vector<std::string> &getArgumentNames() const { return names; }

  /// Calls the function; the results have memory of their own. Throws
  /// std::runtime_error where an argument has another type or shape, where
  /// sizes of arguments do not agree, where a tensor has no memory, where the
  /// size of a result depends on data, or where the call ran out of memory;
  /// std::out_of_range where the code of a torch program met an index that is
  /// out of range.
  std::vector<Array> run(std::span<const Tensor> arguments) const;
  /// The shapes of the results for these arguments; the same errors.
  std::vector<std::vector<int64_t>>
  getResultShapes(std::span<const Tensor> arguments) const;
  /// Writes the results into the caller's memory: no allocation. Throws
  /// std::runtime_error as above, and where a result has another type or shape
  /// than the arguments give it, or shares memory with an argument or another
  /// result.
  void run(std::span<const Tensor> arguments,
           std::span<const Tensor> results) const;

  /// Whether the function keeps state from call to call: the buffers that a
  /// torch program updates in place. Such a function takes one call at a time,
  /// and every loaded artifact has a state of its own.
  virtual bool hasState() const { return false; }
  /// Puts the state back to what it was when the artifact was loaded, which a
  /// call that failed makes necessary. Throws std::runtime_error during a call.
  virtual void reset() const {}

protected:
  /// Throws where types do not fit, or where the sizes of `arguments` do not
  /// agree. A size that depends on data is -1.
  std::vector<std::vector<int64_t>>
  verifyArguments(std::span<const Tensor> arguments) const;
  /// Throws where `run` does.
  void verifyCall(std::span<const Tensor> arguments,
                  std::span<const Tensor> results) const;

  /// The shapes of the results for arguments whose types fit; -1 where a size
  /// depends on data. Throws where sizes of arguments do not agree.
  virtual std::vector<std::vector<int64_t>>
  computeResultShapes(std::span<const Tensor> arguments) const = 0;
  virtual void execute(std::span<const Tensor> arguments,
                       std::span<const Tensor> results) const = 0;

  std::string name;
  std::vector<ValueType> arguments, results;
  std::vector<std::string> names;
};

/// A function of kernels. `run` copies tensors to the device and back where
/// they are not on it, and waits; `launch` does neither.
class MOE_RUNTIME_EXPORT DeviceFunction : public Function {
public:
  /// Where its kernels run.
  virtual GpuDevice &getDevice() const = 0;
  /// Bytes of the memory on the device that a launch needs for itself.
  virtual int64_t getWorkspaceSize(std::span<const Tensor> arguments,
                                   std::span<const Tensor> results) const = 0;
  /// Puts the kernels on a stream of the device. All tensors are on the device,
  /// scalars are not. Allocates and waits for nothing on the device: a graph
  /// may capture it. Throws std::runtime_error as `run` does, and
  /// std::invalid_argument where a tensor does not begin at a multiple of 16
  /// bytes, has a size of more than 2^31 - 1, or needs more blocks than a grid
  /// has.
  virtual void launch(std::span<const Tensor> arguments,
                      std::span<const Tensor> results, void *workspace,
                      void *stream) const = 0;
};

/// What of an artifact is checked when it is loaded. All of it is, but for the
/// values of weights.
enum class Verification {
  /// Of weights of more than 64 MiB their number of bytes and the table of
  /// where they lie; smaller ones are checked whole.
  Quick,
  /// Weights of any size, which reads them all.
  All
};

/// A folder that moe-compile wrote, loaded. It owns its functions, their code
/// and their weights, and outlives what its users hold of them.
class MOE_RUNTIME_EXPORT Artifact {
public:
  /// Reads and checks the folder. `device` is "cpu", "cuda", "sim", which runs
  /// kernels in the simulator, or "none", which only describes the functions;
  /// empty for what the artifact was compiled for. Throws std::runtime_error
  /// where the folder is damaged, of another format version, or for a CPU or a
  /// GPU that is not there. Weights are mapped from their file, which may be
  /// replaced and not changed in place while this lives.
  explicit Artifact(const std::string &folder, const std::string &device = "");
  /// The same, with more or less of the weights checked.
  Artifact(const std::string &folder, const std::string &device,
           Verification verification);
  ~Artifact();

  /// "cpu", or a chip.
  const std::string &getTarget() const;
  /// What runs kernels; null where functions have none.
  GpuDevice *getDevice() const;
  /// All functions, in the order of the module.
  std::span<const std::unique_ptr<Function>> getFunctions() const;
  /// The function of that name; with an empty name the only one. Throws
  /// std::runtime_error that lists the functions.
  const Function &getFunction(const std::string &name = "") const;

private:
  struct Contents;
  std::unique_ptr<Contents> contents;
};

} // namespace moe::runtime

#endif // MOE_RUNTIME_ARTIFACT_H
