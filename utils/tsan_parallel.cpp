//===- tsan_parallel.cpp - moe_parallel_for, from several threads ---------===//
//
// What utils/sanitize.sh builds with ThreadSanitizer: loops of several callers
// at once, nested loops, and the thread limit changed meanwhile. Every index
// must be visited once.
//
//===----------------------------------------------------------------------===//

#include "MoE/Runtime/Parallel.h"

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace {

struct Loop {
  std::vector<int> visits;
  bool isNested;
};

void run(int64_t begin, int64_t end, void *context) {
  auto &loop = *static_cast<Loop *>(context);
  for (int64_t i = begin; i < end; ++i) {
    ++loop.visits[i];
    if (loop.isNested) {
      Loop inner{std::vector<int>(5), false};
      moe_parallel_for(5, run, &inner);
      for (int visits : inner.visits)
        loop.visits[i] += visits - 1;
    }
  }
}

void call(int caller) {
  for (int64_t count : {0, 1, 2, 3, 7, 64, 1000})
    for (bool isNested : {false, true}) {
      Loop loop{std::vector<int>(count), isNested};
      moe_parallel_for(count, run, &loop);
      // Read without a lock: the loop's end is what orders it.
      for (int64_t i = 0; i < count; ++i)
        if (loop.visits[i] != 1) {
          std::fprintf(stderr,
                       "caller %d: expected one visit of %lld, found %d\n",
                       caller, static_cast<long long>(i), loop.visits[i]);
          std::exit(1);
        }
    }
}

} // namespace

int main() {
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller)
    callers.emplace_back([caller] {
      for (int round = 0; round < 20; ++round) {
        moe_set_num_threads(1 + (caller + round) % 4);
        call(caller);
      }
    });
  for (std::thread &caller : callers)
    caller.join();
  std::puts("every index was visited once");
}
