//===- MoEMemory.cpp - Memory and errors of compiled CPU kernels ----------===//
//
// Compiled code has neither exceptions nor error codes, so that a failure jumps
// to the guard around the call. Blocks know their neighbours, so that the guard
// can free what the kernel held.
//
// Large blocks that are freed are kept for the kernels that follow. A model's
// layers, and its calls, ask for the same sizes again and again, and a system
// that takes pages back and clears them anew each time takes longer than many a
// layer works on them.
//
//===----------------------------------------------------------------------===//

#include "MoE/Runtime/Memory.h"

#include "Guard.h"

#include <algorithm>
#include <mutex>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

/// The system's large pages, and where a block has to start to have them.
static constexpr size_t kHugePage = size_t(1) << 21;

namespace {
/// In front of the memory of a kernel, which then starts with a line of the
/// cache; a list whose ends meet.
struct alignas(64) Block {
  Block *before, *after;
  /// All of it, this included.
  size_t bytes;
};

/// Blocks that no kernel has, the last one freed first. A thread that would
/// have to wait for it does without.
class KeptBlocks {
public:
  /// A block of at least `bytes`, and at most twice that; null if there is
  /// none.
  Block *take(size_t bytes) {
    std::unique_lock lock(mutex, std::try_to_lock);
    if (!lock || bytes < kFewestBytes)
      return nullptr;
    Block **best = nullptr;
    for (Block **link = &first; *link; link = &(*link)->after)
      if ((*link)->bytes >= bytes && (*link)->bytes / 2 <= bytes &&
          (!best || (*link)->bytes < (*best)->bytes))
        best = link;
    return best ? unlink(*best) : nullptr;
  }

  /// Keeps or frees a block; those that were freed longest ago make room.
  void put(Block *block) {
    std::unique_lock lock(mutex, std::try_to_lock);
    if (!lock || block->bytes < kFewestBytes || block->bytes > kMostBytes) {
      free(block);
      return;
    }
    block->after = first;
    first = block;
    total += block->bytes;
    while (total > kMostBytes) {
      Block **last = &first;
      while ((*last)->after)
        last = &(*last)->after;
      free(unlink(*last));
    }
  }

  void clear() {
    std::scoped_lock lock(mutex);
    while (first)
      free(unlink(first));
  }

private:
  /// Smaller ones are malloc's own, which keeps them without our help.
  static constexpr size_t kFewestBytes = size_t(1) << 17;
  /// More than a prompt of 256 tokens asks a large model for. With less, each
  /// block goes before its size is asked for again, as all are in turns.
  static constexpr size_t kMostBytes = size_t(1) << 29;

  Block *unlink(Block *&link) {
    Block *block = link;
    link = block->after;
    total -= block->bytes;
    return block;
  }

  std::mutex mutex;
  Block *first = nullptr;
  size_t total = 0;
};

struct Guard {
  Guard *outer;
  /// The blocks in use.
  Block blocks;
  moe::runtime::Failure *failure;
  jmp_buf start;
};
} // namespace

static thread_local Guard *innermost = nullptr;
static thread_local moe::runtime::Failure lastFailure;
static KeptBlocks keptBlocks;

void moe::runtime::guard(void (*body)(void *), void *context,
                         Failure &failure) {
  Guard own;
  own.failure = &failure;
  own.outer = innermost;
  own.blocks.before = own.blocks.after = &own.blocks;
  innermost = &own;
  if (!_setjmp(own.start))
    body(context);
  innermost = own.outer;
  while (own.blocks.after != &own.blocks)
    _mlir_memref_to_llvm_free(own.blocks.after + 1);
}

void moe::runtime::fail(const Failure &failure) {
  if (Guard *guard = innermost) {
    *guard->failure = failure;
    _longjmp(guard->start, 1);
  }
  if (failure.status > 0)
    fprintf(stderr,
            "error: expected %lld bytes of memory for a kernel, found none "
            "free; moe_call of libmoe_runtime returns this as a value\n",
            static_cast<long long>(failure.status));
  else
    fprintf(stderr,
            "error: %s; moe_call of libmoe_runtime returns this as a value\n",
            failure.message);
  abort();
}

static void failForMemory(size_t bytes) {
  moe::runtime::Failure failure;
  failure.message[0] = 0;
  failure.status = bytes > INT64_MAX ? INT64_MAX : static_cast<int64_t>(bytes);
  moe::runtime::fail(failure);
}

/// A block from the system; null if there is none.
///
/// Large ones start with a page of the largest size and ask for such pages:
/// the system clears and enters 2 MB at once, where it would take 512 faults.
static Block *newBlock(size_t bytes) {
  bool isLarge = bytes >= kHugePage;
  void *memory = aligned_alloc(isLarge ? kHugePage : alignof(Block), bytes);
  if (!memory)
    return nullptr;
#ifdef MADV_HUGEPAGE
  // Advice: where the system has no such pages, nothing is lost.
  if (isLarge)
    madvise(memory, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
#endif
  auto *block = static_cast<Block *>(memory);
  block->bytes = bytes;
  return block;
}

/// A block with room for `bytes`; null if there is none.
static Block *getBlock(size_t bytes) {
  constexpr size_t kLine = sizeof(Block);
  if (bytes > SIZE_MAX - 2 * kLine)
    return nullptr;
  size_t whole = (bytes + 2 * kLine - 1) / kLine * kLine;
  if (Block *block = keptBlocks.take(whole))
    return block;
  if (Block *block = newBlock(whole))
    return block;
  keptBlocks.clear();
  return newBlock(whole);
}

void *_mlir_memref_to_llvm_alloc(size_t bytes) {
  Block *block = getBlock(bytes);
  if (!block)
    failForMemory(bytes);
  if (Guard *guard = innermost) {
    block->before = &guard->blocks;
    block->after = guard->blocks.after;
    block->after->before = guard->blocks.after = block;
  } else {
    block->before = block->after = block;
  }
  return block + 1;
}

void _mlir_memref_to_llvm_free(void *memory) {
  if (!memory)
    return;
  Block *block = static_cast<Block *>(memory) - 1;
  block->before->after = block->after;
  block->after->before = block->before;
  keptBlocks.put(block);
}

namespace {
struct Call {
  void (*entry)(void **);
  void **values;
};
} // namespace

int64_t moe_call(void (*entry)(void **), void **values) {
  Call call{entry, values};
  lastFailure.status = 0;
  moe::runtime::guard(
      [](void *context) {
        auto *call = static_cast<Call *>(context);
        call->entry(call->values);
      },
      &call, lastFailure);
  return lastFailure.status;
}

const char *moe_error() { return lastFailure.message; }

/// `message` with the values in the places `{0}` to `{7}`, as much as fits.
static void format(moe::runtime::Failure &failure, const char *message,
                   const int64_t *values) {
  size_t length = 0;
  auto append = [&](const char *text, size_t size) {
    size = std::min(size, sizeof(failure.message) - 1 - length);
    memcpy(failure.message + length, text, size);
    failure.message[length += size] = 0;
  };
  while (*message) {
    bool isPlace = message[0] == '{' && message[1] >= '0' &&
                   message[1] <= '7' && message[2] == '}';
    if (!isPlace) {
      append(message++, 1);
      continue;
    }
    char number[24];
    int size = snprintf(number, sizeof(number), "%lld",
                        static_cast<long long>(values[message[1] - '0']));
    append(number, static_cast<size_t>(size));
    message += 3;
  }
}

void moe_fail(int32_t error, const char *message, const int64_t *values) {
  moe::runtime::Failure failure;
  failure.status = -1 - error;
  failure.message[0] = 0;
  format(failure, message, values);
  moe::runtime::fail(failure);
}
