//===- Tensors.cpp - Tensors of Python as kernels see them ----------------===//

#include "Tensors.h"

#include <array>
#include <nanobind/nanobind.h>
#include <utility>

namespace nb = nanobind;
using namespace moe;

const ElementInfo &moe::infoOf(MoEElementType type) {
  // In the order of MoEElementType.
  static constexpr ElementInfo infos[] = {
      {"i1", dlpack::Bool, 8},    {"i8", dlpack::Int, 8},
      {"i16", dlpack::Int, 16},   {"i32", dlpack::Int, 32},
      {"i64", dlpack::Int, 64},   {"index", dlpack::Int, 64},
      {"f16", dlpack::Float, 16}, {"bf16", dlpack::BFloat, 16},
      {"f32", dlpack::Float, 32}, {"f64", dlpack::Float, 64}};
  return infos[type];
}

bool moe::matches(dlpack::DataType found, const ElementInfo &expected) {
  bool code = found.code == expected.code ||
              (expected.code == dlpack::Int && found.code == dlpack::UInt);
  return code && found.bits == expected.bits && found.lanes == 1;
}

/// Types live as long as the cache, which holds the handful of tensor types of
/// a process; the GIL protects it.
const dlpack::ExchangeAPI *moe::exchangeAPI(PyTypeObject *type) {
  static std::array<std::pair<PyTypeObject *, const dlpack::ExchangeAPI *>, 8>
      cache{};
  static size_t next = 0;
  for (auto &[known, api] : cache)
    if (known == type)
      return api;

  const dlpack::ExchangeAPI *api = nullptr;
  nb::object capsule =
      nb::getattr(nb::handle(reinterpret_cast<PyObject *>(type)),
                  "__dlpack_c_exchange_api__", nb::none());
  if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api"))
    api = static_cast<const dlpack::ExchangeAPI *>(
        PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  while (api && api->major != 1)
    api = api->previous;
  if (api && !api->borrow)
    api = nullptr;

  auto &slot = cache[next++ % cache.size()];
  Py_XDECREF(reinterpret_cast<PyObject *>(slot.first));
  Py_INCREF(reinterpret_cast<PyObject *>(type));
  slot = {type, api};
  return api;
}

PyObject *moe::importTensor(const dlpack::ExchangeAPI *api,
                            dlpack::ManagedTensor *tensor) {
  void *object = nullptr;
  return api->import(tensor, &object) ? nullptr
                                      : static_cast<PyObject *>(object);
}

bool moe::isRowMajor(const dlpack::Tensor &tensor) {
  if (!tensor.strides)
    return true;
  for (int32_t i = 0; i < tensor.rank; ++i)
    if (tensor.shape[i] == 0)
      return true;
  int64_t stride = 1;
  for (int32_t i = tensor.rank; i-- > 0;) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != stride)
      return false;
    stride *= tensor.shape[i];
  }
  return true;
}

void moe::writeDescriptor(void *data, const int64_t *shape, int64_t rank,
                          int64_t *words) {
  *reinterpret_cast<MoETensorHeader *>(words) = {data, data, 0};
  int64_t *sizes = words + 3, *strides = sizes + rank;
  int64_t stride = 1;
  for (int64_t i = rank; i-- > 0;) {
    sizes[i] = shape[i];
    strides[i] = stride;
    stride *= shape[i];
  }
}
