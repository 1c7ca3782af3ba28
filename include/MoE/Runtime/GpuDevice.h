//===- GpuDevice.h - What host code needs of a GPU --------------*- C++ -*-===//
//
// One interface, two libraries: moe_sim_runtime runs kernels in the PTX
// simulator, moe_cuda_runtime on the CUDA driver, which it finds at run time.
// Both export the mgpu* functions that MLIR's lowered host code calls
// (lib/Runtime/Gpu/Mgpu.cpp), and the functions below.
//
//===----------------------------------------------------------------------===//

#ifndef MOE_RUNTIME_GPUDEVICE_H
#define MOE_RUNTIME_GPUDEVICE_H

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace moe::runtime {

/// A launch of a kernel.
struct GpuLaunch {
  /// As a host computes them: whether a grid may have them is checked.
  uint64_t grid[3];
  uint32_t block[3];
  /// All zero: no cluster.
  uint32_t cluster[3];
  uint32_t dynamicSmem;
  void *stream;
  /// One pointer to the value of each parameter.
  void **params;
  /// How many parameters, of at most eight bytes each; -1 where the caller does
  /// not know, as lowered host code.
  int32_t numParams = -1;
};

/// What cuTensorMapEncodeTiled takes.
struct GpuTensorMap {
  uint32_t dataType; // CUtensorMapDataType
  uint32_t rank;
  void *address;
  const uint64_t *dims;    // innermost first
  const uint64_t *strides; // bytes, of all but the innermost dimension
  const uint32_t *box;
  const uint32_t *elementStrides;
  uint32_t interleave;
  uint32_t swizzle;
  uint32_t l2Promotion;
  uint32_t oobFill;
};

/// Functions that fail throw std::runtime_error. The mgpu* functions print it
/// and abort instead: lowered host code has no way to hear of errors.
///
/// Functions may be called from any thread. A null stream is the device's
/// default one. What a function makes, its counterpart frees, and nothing else
/// does: modules, memory, streams, events.
class GpuDevice {
public:
  virtual ~GpuDevice() = default;

  /// Ten times the compute capability, as in sm_90; zero where every chip's PTX
  /// runs.
  virtual int32_t getChip() = 0;

  /// Of the grids of all chips, along x, y and z.
  static constexpr uint64_t kMaxBlocks[3] = {0x7fffffff, 0xffff, 0xffff};

  /// The driver's highest level of optimisation for PTX.
  static constexpr int kMaxOptLevel = 4;

  // These are virtual, although all devices share them: users of a device open
  // its library at run time. Their errors name the module and the kernel.

  /// Zero-terminated PTX, or with `isText` false a cubin or fatbin.
  virtual void *loadModule(const void *data, bool isText, int optLevel);
  /// Its functions are gone with it.
  virtual void unloadModule(void *module);
  /// A kernel of a module, which owns it.
  virtual void *getFunction(void *module, const char *name);
  /// Puts the kernel on the launch's stream and does not wait for it. Checks
  /// the extents of the grid, and allows the function as much dynamic shared
  /// memory as it gets.
  virtual void launch(void *function, const GpuLaunch &launch);
  /// The kernel that was launched last; empty before the first one.
  std::string getLastKernel();

  /// Memory on the device; with `hostShared` the host may access it too.
  virtual void *allocate(uint64_t bytes, void *stream, bool hostShared) = 0;
  /// Frees what `allocate` gave; null is ignored.
  virtual void free(void *pointer, void *stream) = 0;
  /// What reports call an allocation.
  virtual void setName(void *pointer, const std::string &name) = 0;
  /// In any direction. Without a stream the copy is done on return; with one
  /// it is ordered by the stream, and `from` has to live until it is done.
  virtual void copy(void *to, const void *from, uint64_t bytes,
                    void *stream) = 0;
  /// `count` elements of `width` 2 or 4 bytes.
  virtual void fill(void *to, uint32_t value, uint32_t width, uint64_t count,
                    void *stream) = 0;
  /// Lets kernels access memory of this process, until `unregisterHost`.
  virtual void registerHost(void *pointer, uint64_t bytes) = 0;
  /// Ends what `registerHost` began, of the same pointer.
  virtual void unregisterHost(void *pointer) = 0;

  /// A stream that does not wait for the default one.
  virtual void *createStream() = 0;
  /// Work that is on the stream is still done.
  virtual void destroyStream(void *stream) = 0;
  /// Waits for all that is on the stream. Errors of its kernels come here.
  virtual void synchronizeStream(void *stream) = 0;
  /// Lets later work on the stream wait for the event.
  virtual void waitEvent(void *stream, void *event) = 0;
  /// An event that was not recorded yet; it keeps no time.
  virtual void *createEvent() = 0;
  /// Frees an event.
  virtual void destroyEvent(void *event) = 0;
  /// Waits until the work before the event is done.
  virtual void synchronizeEvent(void *event) = 0;
  /// The event is what is on the stream now.
  virtual void recordEvent(void *event, void *stream) = 0;

  /// The number of the GPU that this thread uses from now on.
  virtual void setDefault(int32_t device) = 0;
  /// Fills the 128 bytes at `map`.
  virtual void encodeTensorMap(void *map, const GpuTensorMap &description) = 0;

  /// What the simulator has found so far; zero and empty on hardware.
  virtual uint64_t numFindings() = 0;
  /// The text of these findings.
  virtual std::string report() = 0;

protected:
  virtual void *load(const void *data, bool isText, int optLevel) = 0;
  virtual void unload(void *module) = 0;
  virtual void *find(void *module, const char *name) = 0;
  /// Sets MAX_DYNAMIC_SHARED_SIZE_BYTES of a function.
  virtual void allowDynamicShared(void *function, uint32_t bytes) = 0;
  virtual void launchKernel(void *function, const GpuLaunch &launch) = 0;

private:
  struct Function {
    void *module = nullptr;
    std::string name;
    /// The dynamic shared memory that it has been allowed.
    uint32_t allowedShared = 0;
  };
  std::string prepare(void *function, const GpuLaunch &launch);

  std::map<void *, Function> functions;
  std::mutex mutex;
  std::string lastKernel;
  // Of its own: calls that fail while the other one is held ask for the name.
  std::mutex lastKernelMutex;
};

/// The device of this library.
GpuDevice &gpuDevice();

} // namespace moe::runtime

extern "C" {
/// The device of the library, for callers that open it at run time.
moe::runtime::GpuDevice *moe_gpu_device();
/// Null if kernels can run, else why not. The caller must not free it.
const char *moe_gpu_unavailable();
/// Loads PTX; for callers of C, as those below. Each returns null, or why it
/// failed, valid until the next call of this thread.
const char *moe_gpu_load(const char *ptx, void **module);
/// A kernel of a module.
const char *moe_gpu_find(void *module, const char *name, void **function);
/// Launches a kernel of a grid of three extents. `params` has one pointer to
/// the value of each parameter.
const char *moe_gpu_launch(void *function, const uint64_t *grid,
                           uint32_t blockSize, uint32_t dynamicSmem,
                           void *stream, void **params);
/// Findings of all launches so far.
uint64_t moe_gpu_num_findings();
/// Their text; valid until the next call.
const char *moe_gpu_report();
}

#endif // MOE_RUNTIME_GPUDEVICE_H
