//===- Panels.cpp - Weights in the order of the kernels -------------------===//
//
// Copies a weight [experts, out, in] of any strides into panels (docs/Spec.md
// 3.14): of each panel its columns side by side, for one `in`, or two of 16
// bits, after the other. A model is packed before its first token, so this runs
// at the speed of memory.
//
//===----------------------------------------------------------------------===//

#include "Panels.h"
#include "MoE/Runtime/Parallel.h"

#include <algorithm>
#include <cstdint>
#include <nanobind/ndarray.h>

namespace nb = nanobind;

namespace {
/// One weight and its panels; strides count elements.
struct Packing {
  const void *source;
  void *target;
  int64_t out, width;
  int64_t expertStride, rowStride, columnStride;
  int64_t panels, depth, columns;
  /// 2 where a panel has columns of the first half of `out`, then of the other.
  int64_t halves;
};

/// Columns of a panel that lie side by side in it, and their rows in the
/// weight; behind `count` there are none.
template <typename Element>
struct Columns {
  const Element *source;
  Element *target;
  int64_t count;
};
} // namespace

/// How many steps of a column are read at once: some cache lines of a row.
constexpr int64_t kBlock = 64;

/// Steps `begin` to `end` of columns whose rows are apart, one row after the
/// other: what is written stays in the first cache meanwhile.
template <typename Element, int64_t Steps>
static void packRows(const Packing &packing, const Columns<Element> &columns,
                     int64_t begin, int64_t end) {
  int64_t whole = std::clamp(packing.width / Steps, begin, end);
  int64_t stride = packing.columnStride;
  for (int64_t c = 0; c < columns.count; ++c) {
    const Element *row = columns.source + c * packing.rowStride;
    Element *target = columns.target + c * Steps;
    // The row after the next; where there is none, nothing is read.
    for (int64_t t = begin; t < whole; t += 64 / (Steps * sizeof(Element)))
      __builtin_prefetch(row + 2 * packing.rowStride + t * Steps * stride);
    for (int64_t t = begin; t < whole; ++t)
      for (int64_t s = 0; s < Steps; ++s)
        target[t * packing.columns * Steps + s] = row[(t * Steps + s) * stride];
    for (int64_t i = whole * Steps; i < end * Steps; ++i)
      target[i / Steps * packing.columns * Steps + i % Steps] =
          i < packing.width ? row[i * stride] : Element(0);
  }
}

/// The same for columns whose rows lie side by side, as of a weight that is
/// stored transposed.
template <typename Element, int64_t Steps>
static void packSideBySide(const Packing &packing,
                           const Columns<Element> &columns, int64_t begin,
                           int64_t end) {
  for (int64_t t = begin; t < end; ++t)
    for (int64_t s = 0; s < Steps; ++s) {
      int64_t i = t * Steps + s;
      const Element *source = columns.source + i * packing.columnStride;
      Element *target = columns.target + t * packing.columns * Steps + s;
      // Rows ahead, of which the hardware sees no order.
      for (int64_t c = 0; c < columns.count; c += 64 / sizeof(Element))
        __builtin_prefetch(source + 8 * packing.columnStride + c);
      for (int64_t c = 0; c < columns.count; ++c)
        target[c * Steps] = i < packing.width ? source[c] : Element(0);
    }
}

template <typename Element, int64_t Steps>
static void packPanel(const Packing &packing, int64_t expert, int64_t panel) {
  int64_t all = packing.columns / packing.halves;
  int64_t out = packing.out / packing.halves;
  auto pack = packing.rowStride == 1 && packing.columnStride != 1
                  ? packSideBySide<Element, Steps>
                  : packRows<Element, Steps>;
  auto source = static_cast<const Element *>(packing.source) +
                expert * packing.expertStride + panel * all * packing.rowStride;
  auto target = static_cast<Element *>(packing.target) +
                (expert * packing.panels + panel) * packing.depth *
                    packing.columns * Steps;
  int64_t count = std::clamp<int64_t>(out - panel * all, 0, all);
  for (int64_t begin = 0; begin < packing.depth; begin += kBlock) {
    int64_t end = std::min(begin + kBlock, packing.depth);
    for (int64_t half = 0; half < packing.halves; ++half) {
      Columns<Element> columns{source + half * out * packing.rowStride,
                               target + half * all * Steps, count};
      pack(packing, columns, begin, end);
      for (int64_t t = begin; t < end; ++t)
        std::fill(columns.target + (t * packing.columns + count) * Steps,
                  columns.target + (t * packing.columns + all) * Steps,
                  Element(0));
    }
  }
}

template <typename Element, int64_t Steps>
static void packRange(int64_t begin, int64_t end, void *context) {
  const auto &packing = *static_cast<const Packing *>(context);
  for (int64_t i = begin; i < end; ++i)
    packPanel<Element, Steps>(packing, i / packing.panels, i % packing.panels);
}

/// Two steps of 16 bits that lie side by side are one element of 32.
static bool joinSteps(Packing &packing, int64_t steps) {
  bool isEven = packing.rowStride % 2 == 0 && packing.expertStride % 2 == 0 &&
                packing.width % 2 == 0 &&
                reinterpret_cast<uintptr_t>(packing.source) % 4 == 0;
  if (steps != 2 || packing.columnStride != 1 || !isEven)
    return false;
  packing.rowStride /= 2;
  packing.expertStride /= 2;
  packing.width /= 2;
  return true;
}

static MoEParallelBody selectBody(size_t bytes, int64_t steps) {
  if (bytes == 2)
    return steps == 2 ? packRange<uint16_t, 2> : packRange<uint16_t, 1>;
  if (bytes == 4 && steps == 1)
    return packRange<uint32_t, 1>;
  if (bytes == 8 && steps == 1)
    return packRange<uint64_t, 1>;
  throw nb::value_error("expected elements of 2, 4 or 8 bytes, and two steps "
                        "of those of 2 alone");
}

using Weight = nb::ndarray<nb::ro, nb::ndim<3>, nb::device::cpu>;
using Target = nb::ndarray<nb::c_contig, nb::device::cpu>;

static void packPanels(Weight weight, Target panels, bool halves,
                       int64_t steps) {
  size_t rank = 4 + (halves ? 1 : 0) + (steps == 2 ? 1 : 0);
  if (panels.ndim() != rank || panels.dtype() != weight.dtype() ||
      panels.shape(0) != weight.shape(0))
    throw nb::value_error("expected panels of the weight's experts and dtype");
  auto columns =
      static_cast<int64_t>(panels.shape(3) * (halves ? panels.shape(4) : 1));
  Packing packing{weight.data(),
                  panels.data(),
                  static_cast<int64_t>(weight.shape(1)),
                  static_cast<int64_t>(weight.shape(2)),
                  weight.stride(0),
                  weight.stride(1),
                  weight.stride(2),
                  static_cast<int64_t>(panels.shape(1)),
                  static_cast<int64_t>(panels.shape(2)),
                  columns,
                  halves ? 2 : 1};
  if (packing.panels * columns < packing.out ||
      packing.depth * steps < packing.width)
    throw nb::value_error("expected panels with room for the weight");
  MoEParallelBody body = weight.itemsize() == 2 && joinSteps(packing, steps)
                             ? selectBody(4, 1)
                             : selectBody(weight.itemsize(), steps);
  nb::gil_scoped_release release;
  moe_parallel_for(static_cast<int64_t>(weight.shape(0)) * packing.panels, body,
                   &packing);
}

void moe::bindPanels(nb::module_ &m) {
  m.def("pack_panels", &packPanels, nb::arg("weight"), nb::arg("panels"),
        nb::arg("halves"), nb::arg("steps"),
        "Copies a weight [experts, out, in] of any strides into panels, which "
        "have `steps` of `in` side by side.");
}
