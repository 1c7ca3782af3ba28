//===- MoEParallel.cpp - Threads of compiled CPU kernels ------------------===//
//
// OpenMP, because torch's CPU wheel runs its own operators on libgomp: with the
// same SONAME the dynamic linker maps one copy, and our loops reuse torch's
// warm threads instead of competing with them.
//
//===----------------------------------------------------------------------===//

#include "MoE/Runtime/Parallel.h"

#include "Guard.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <omp.h>
#include <pthread.h>

static std::atomic<int32_t> threadLimit{0};

/// The threads of OpenMP's pool do not survive a fork, but the child's OpenMP
/// would wait for them. So a forked process works on one thread.
static std::atomic<bool> isForked{false};
[[maybe_unused]] static const int registered = pthread_atfork(
    nullptr, nullptr, [] { isForked.store(true, std::memory_order_relaxed); });

void moe_set_num_threads(int32_t threads) {
  threadLimit.store(std::max(threads, 0), std::memory_order_relaxed);
}

int32_t moe_get_num_threads() {
  if (isForked.load(std::memory_order_relaxed))
    return 1;
  int32_t limit = threadLimit.load(std::memory_order_relaxed);
  return limit ? limit : std::max(omp_get_max_threads(), 1);
}

namespace {
struct Loop {
  int64_t count;
  MoEParallelBody body;
  void *context;
  /// Of the first iterations that failed, so that no result depends on which
  /// thread came first.
  std::mutex mutex;
  moe::runtime::Failure failure;
  int64_t failed = INT64_MAX;
};
struct Chunk {
  const Loop *loop;
  int64_t begin, end;
};
} // namespace

/// Chunk `number` of `chunks`. The first ones are one longer; written so that
/// no product can overflow. A body that fails may not leave the team: the loop
/// fails when all threads are done.
static void runChunk(Loop &loop, int64_t number, int64_t chunks) {
  int64_t size = loop.count / chunks, extra = loop.count % chunks;
  int64_t begin = number * size + std::min(number, extra);
  int64_t end = begin + size + (number < extra ? 1 : 0);
  if (begin >= end)
    return;
  Chunk chunk{&loop, begin, end};
  moe::runtime::Failure failure;
  moe::runtime::guard(
      [](void *context) {
        auto *chunk = static_cast<Chunk *>(context);
        chunk->loop->body(chunk->begin, chunk->end, chunk->loop->context);
      },
      &chunk, failure);
  if (!failure.status)
    return;
  std::scoped_lock lock(loop.mutex);
  if (begin < loop.failed) {
    loop.failed = begin;
    loop.failure = failure;
  }
}

void moe_parallel_for(int64_t count, MoEParallelBody body, void *context) {
  if (count <= 0)
    return;
  int64_t threads = std::min<int64_t>(moe_get_num_threads(), count);
  if (threads == 1 || omp_in_parallel())
    return body(0, count, context);

  Loop loop{count, body, context, {}, {}, INT64_MAX};
#pragma omp parallel num_threads(static_cast<int>(threads))
  {
    // OpenMP may grant fewer threads than asked for. Iterations of causal loops
    // take longer and longer, so that a thread takes a chunk from the front and
    // its mirror image from the back.
    int64_t team = omp_get_num_threads(), id = omp_get_thread_num();
    bool inPairs = count / 2 >= team;
    int64_t chunks = inPairs ? 2 * team : team;
    runChunk(loop, id, chunks);
    if (inPairs)
      runChunk(loop, chunks - 1 - id, chunks);
  }
  // Nothing here has a destructor that does more than none: a jump is next.
  if (loop.failure.status)
    moe::runtime::fail(loop.failure);
}
