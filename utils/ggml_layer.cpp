// Times a layer of experts by ggml, the library of llama.cpp, with weights of
// one of its types, for utils/quantized_times.py:
//
//   g++ -O2 -std=c++17 utils/ggml_layer.cpp -I GGML/include -L LIB -lggml
//   -lggml-cpu -lggml-base -Wl,-rpath,LIB -o ggml-layer
//   ./ggml-layer q4_K 1 128 2048 1024 64 8
//
// It gets type, threads, tokens, features, hidden features, experts and experts
// of a token, and prints milliseconds.
// With -DIK_LLAMA it is built against ik_llama.cpp, which has one library and
// an op of its own for the first layer. Weights lie in the buffers that
// llama.cpp would choose. Sizes, sets of tokens and the number printed are
// those of quantized_times.py.

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"
#ifndef IK_LLAMA
#include "ggml-cpu.h"
#endif

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

static int theWidth, theHidden, theExperts, theChosen;
static std::mt19937 generator(0);

static ggml_context *makeContext() {
  return ggml_init({ggml_tensor_overhead() * 64 + ggml_graph_overhead(),
                    nullptr, /*no_alloc=*/true});
}

static ggml_type findType(const std::string &name) {
  for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
    auto type = static_cast<ggml_type>(i);
    const char *known = ggml_type_name(type);
    if (known && name == known)
      return type;
  }
  fprintf(stderr, "expected a type of ggml, found %s\n", name.c_str());
  exit(1);
}

/// Buffers in which weights may lie, the preferred ones first.
static std::vector<ggml_backend_buffer_type_t>
getBufferTypes([[maybe_unused]] ggml_backend_t backend) {
  std::vector<ggml_backend_buffer_type_t> types;
#ifndef IK_LLAMA
  ggml_backend_dev_t device = ggml_backend_get_device(backend);
  auto get = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
      ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device),
                                        "ggml_backend_dev_get_extra_bufts"));
  for (auto *type = get ? get(device) : nullptr; type && *type; ++type)
    types.push_back(*type);
#endif
  types.push_back(ggml_backend_cpu_buffer_type());
  return types;
}

/// Whether a product with `weight`, in its buffer, is one that buffer is for.
static bool isTaken([[maybe_unused]] ggml_backend_t backend,
                    [[maybe_unused]] ggml_tensor *weight) {
#ifdef IK_LLAMA
  return true;
#else
  ggml_context *context = makeContext();
  auto *x = ggml_new_tensor_3d(context, GGML_TYPE_F32, weight->ne[0], 1, 1);
  auto *chosen = ggml_new_tensor_2d(context, GGML_TYPE_I32, theChosen, 1);
  auto *product = ggml_mul_mat_id(context, weight, x, chosen);
  return weight->extra && ggml_backend_dev_supports_op(
                              ggml_backend_get_device(backend), product);
#endif
}

/// A weight [experts, out, in] of normal numbers, the same for all experts.
static ggml_tensor *makeWeight(ggml_backend_t backend, ggml_type type, int in,
                               int out) {
  ggml_tensor *weight = nullptr;
  auto types = getBufferTypes(backend);
  for (auto *bufferType : types) {
    weight = ggml_new_tensor_3d(makeContext(), type, in, out, theExperts);
    auto *buffer = ggml_backend_buft_alloc_buffer(
        bufferType,
        ggml_backend_buft_get_alloc_size(bufferType, weight) + 4096);
    ggml_backend_tensor_alloc(buffer, weight,
                              ggml_backend_buffer_get_base(buffer));
    if (bufferType == types.back() || isTaken(backend, weight))
      break;
    ggml_backend_buffer_free(buffer);
  }
  std::vector<float> floats(size_t(in) * out);
  std::normal_distribution<float> normal(0.0f, 0.02f);
  for (float &value : floats)
    value = normal(generator);
  std::vector<char> data(ggml_nbytes(weight));
  size_t size = data.size() / theExperts;
  ggml_quantize_chunk(type, floats.data(), data.data(), 0, out, in, nullptr);
  for (int expert = 1; expert < theExperts; ++expert)
    memcpy(data.data() + expert * size, data.data(), size);
  ggml_backend_tensor_set(weight, data.data(), 0, data.size());
  return weight;
}

namespace {
struct Layer {
  ggml_tensor *gate, *up, *down;
};
struct Call {
  ggml_tensor *x, *chosen, *gates;
  ggml_cgraph *graph;
};
} // namespace

static Call makeCall(ggml_backend_t backend, const Layer &layer, int tokens) {
  ggml_context *c = makeContext();
  Call call;
  call.x = ggml_new_tensor_3d(c, GGML_TYPE_F32, theWidth, 1, tokens);
  call.chosen = ggml_new_tensor_2d(c, GGML_TYPE_I32, theChosen, tokens);
  call.gates = ggml_new_tensor_3d(c, GGML_TYPE_F32, 1, theChosen, tokens);
  for (auto *input : {call.x, call.chosen, call.gates})
    ggml_set_input(input);
#ifdef IK_LLAMA
  auto *hidden = ggml_moe_up_gate(c, layer.up, layer.gate, call.x, call.chosen,
                                  GGML_UNARY_OP_SILU);
#else
  auto *hidden =
      ggml_swiglu_split(c, ggml_mul_mat_id(c, layer.gate, call.x, call.chosen),
                        ggml_mul_mat_id(c, layer.up, call.x, call.chosen));
#endif
  auto *rows = ggml_mul_mat_id(c, layer.down, hidden, call.chosen);
  rows = ggml_mul(c, rows, call.gates);
  ggml_tensor *y = nullptr;
  for (int k = 0; k < theChosen; ++k) {
    auto *part =
        ggml_view_2d(c, rows, theWidth, tokens, rows->nb[2], k * rows->nb[1]);
    y = y ? ggml_add(c, y, part) : part;
  }
  ggml_set_output(y);
  call.graph = ggml_new_graph(c);
  ggml_build_forward_expand(call.graph, y);
  auto *allocator =
      ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend));
  ggml_gallocr_alloc_graph(allocator, call.graph);
  return call;
}

/// The experts of each set; sets of one token choose all experts in turn.
static std::vector<std::vector<int>> chooseExperts(int tokens) {
  std::vector<int> order(theExperts);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), generator);
  std::vector<std::vector<int>> sets(std::max(8, theExperts / theChosen));
  for (size_t set = 0; set < sets.size(); ++set)
    for (int token = 0; token < tokens; ++token) {
      auto first = order.begin();
      if (tokens == 1)
        first += set * theChosen % theExperts;
      else
        std::shuffle(order.begin(), order.end(), generator);
      sets[set].insert(sets[set].end(), first, first + theChosen);
    }
  return sets;
}

static double timeOnce(ggml_backend_t backend, const Call &call,
                       const std::vector<int> &chosen) {
  std::vector<float> x(ggml_nelements(call.x), 0.5f);
  std::vector<float> gates(ggml_nelements(call.gates), 1.0f / theChosen);
  ggml_backend_tensor_set(call.x, x.data(), 0, ggml_nbytes(call.x));
  ggml_backend_tensor_set(call.gates, gates.data(), 0, ggml_nbytes(call.gates));
  ggml_backend_tensor_set(call.chosen, chosen.data(), 0,
                          ggml_nbytes(call.chosen));
  auto start = std::chrono::steady_clock::now();
  ggml_backend_graph_compute(backend, call.graph);
  std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
  return time.count();
}

int main(int argc, char **argv) {
  if (argc != 8) {
    fprintf(stderr, "usage: %s TYPE THREADS TOKENS D HIDDEN EXPERTS K\n",
            argv[0]);
    return 1;
  }
  theWidth = atoi(argv[4]), theHidden = atoi(argv[5]);
  theExperts = atoi(argv[6]), theChosen = atoi(argv[7]);
  ggml_type type = findType(argv[1]);
  int tokens = atoi(argv[3]);
  ggml_backend_t backend = ggml_backend_cpu_init();
  ggml_backend_cpu_set_n_threads(backend, atoi(argv[2]));
  Layer layer{makeWeight(backend, type, theWidth, theHidden),
              makeWeight(backend, type, theWidth, theHidden),
              makeWeight(backend, type, theHidden, theWidth)};
  Call call = makeCall(backend, layer, tokens);
  auto sets = chooseExperts(tokens);
  std::vector<double> least(sets.size(), 1e9);
  for (int round = 0; round < std::max(5, 60 / tokens); ++round)
    for (size_t set = 0; set < sets.size(); ++set)
      least[set] = std::min(least[set], timeOnce(backend, call, sets[set]));
  printf("%.4f\n",
         1e3 * std::accumulate(least.begin(), least.end(), 0.0) / sets.size());
}
