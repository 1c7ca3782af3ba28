// Times a model of a GGUF file by llama.cpp, for utils/gguf_times.py:
//
//   g++ -O2 -std=c++17 utils/ggml_model.cpp -I LLAMA/include -I GGML/include
//   -L LIB -lllama -lggml -lggml-base -Wl,-rpath,LIB -o ggml-model
//   ./ggml-model model.gguf 1 256 32 3    threads, prompt, steps, rounds
//
// It prints seconds to load, the least of the prompt, the median of a step in
// the best round, the peak of resident MiB, and the greedy tokens. With
// -DIK_LLAMA it is built against ik_llama.cpp.

#include "llama.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <sys/resource.h>
#include <vector>

static double now() {
  auto time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(time).count();
}

static llama_context *load(const char *file, int threads, int room) {
  llama_model_params forModel = llama_model_default_params();
  llama_context_params params = llama_context_default_params();
#ifdef IK_LLAMA
  // Rows of weights in the order of its kernels, as a user asks for by -rtr.
  forModel.repack_tensors = true;
#endif
  params.n_ctx = (room + 255) / 256 * 256;
  params.n_batch = params.n_ctx;
  params.n_threads = params.n_threads_batch = threads;
  llama_model *model = llama_model_load_from_file(file, forModel);
  llama_context *context =
      model ? llama_init_from_model(model, params) : nullptr;
  if (!context) {
    fprintf(stderr, "expected a model that llama.cpp reads, found %s\n", file);
    exit(1);
  }
  return context;
}

static int countTokens(llama_context *context) {
#ifdef IK_LLAMA
  return llama_n_vocab(llama_get_model(context));
#else
  return llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(context)));
#endif
}

static void forget(llama_context *context) {
#ifdef IK_LLAMA
  llama_kv_cache_clear(context);
#else
  llama_memory_clear(llama_get_memory(context), true);
#endif
}

/// Runs tokens at a place of the sequence and returns the most likely next one.
static llama_token runOnce(llama_context *context,
                           std::vector<llama_token> tokens,
                           [[maybe_unused]] int place) {
#ifdef IK_LLAMA
  llama_batch batch =
      llama_batch_get_one(tokens.data(), tokens.size(), place, 0);
#else
  llama_batch batch = llama_batch_get_one(tokens.data(), tokens.size());
#endif
  if (llama_decode(context, batch) != 0) {
    fprintf(stderr, "llama_decode failed\n");
    exit(1);
  }
  const float *logits = llama_get_logits_ith(context, -1);
  return std::max_element(logits, logits + countTokens(context)) - logits;
}

int main(int argc, char **argv) {
  if (argc != 6) {
    fprintf(stderr, "usage: %s FILE THREADS PROMPT STEPS ROUNDS\n", argv[0]);
    return 1;
  }
  int threads = atoi(argv[2]), length = atoi(argv[3]), steps = atoi(argv[4]);
  llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
  llama_backend_init();
  double begin = now();
  llama_context *context = load(argv[1], threads, length + steps + 1);
  double loaded = now() - begin, prompt = 1e9, step = 1e9;
  std::vector<llama_token> ids, found;
  for (int i = 0; i < length; ++i)
    ids.push_back(3 + i * 7919 % 997); // as gguf_times.py does
  for (int round = 0; round < atoi(argv[5]); ++round) {
    forget(context);
    begin = now();
    found = {runOnce(context, ids, 0)};
    prompt = std::min(prompt, now() - begin);
    std::vector<double> times;
    for (int i = 0; i < steps; ++i) {
      begin = now();
      found.push_back(runOnce(context, {found.back()}, length + i));
      times.push_back(now() - begin);
    }
    std::sort(times.begin(), times.end());
    step = std::min(step, times[steps / 2]);
  }
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  printf("%.4f %.5f %.6f %ld", loaded, prompt, step, usage.ru_maxrss / 1024);
  for (llama_token token : found)
    printf(" %d", token);
  printf("\n");
}
