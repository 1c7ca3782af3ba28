//===- MoEMemory.cpp - Memory of compiled CPU kernels ---------------------===//
//
// Compiled code has neither exceptions nor error codes, so that a failure jumps
// to the guard around the call. Blocks know their neighbours, so that the guard
// can free what the kernel held.
//
//===----------------------------------------------------------------------===//

#include "MoE/Runtime/Memory.h"

#include "Guard.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>

namespace {
/// In front of the memory of a kernel; a list whose ends meet.
struct alignas(16) Block {
  Block *before, *after;
};

struct Guard {
  Guard *outer;
  /// The blocks in use.
  Block blocks;
  volatile int64_t missing;
  jmp_buf start;
};
} // namespace

static thread_local Guard *innermost = nullptr;

int64_t moe::runtime::guard(void (*body)(void *), void *context) {
  Guard own;
  own.outer = innermost;
  own.blocks = {&own.blocks, &own.blocks};
  own.missing = 0;
  innermost = &own;
  if (!_setjmp(own.start))
    body(context);
  innermost = own.outer;
  while (own.blocks.after != &own.blocks)
    _mlir_memref_to_llvm_free(own.blocks.after + 1);
  return own.missing;
}

void moe::runtime::fail(int64_t bytes) {
  if (Guard *guard = innermost) {
    guard->missing = bytes;
    _longjmp(guard->start, 1);
  }
  fprintf(stderr,
          "error: expected %lld bytes of memory for a kernel, found none free; "
          "moe_call of libmoe_runtime returns this as a value\n",
          static_cast<long long>(bytes));
  abort();
}

void *_mlir_memref_to_llvm_alloc(size_t bytes) {
  auto *block = bytes < SIZE_MAX - sizeof(Block)
                    ? static_cast<Block *>(malloc(sizeof(Block) + bytes))
                    : nullptr;
  if (!block)
    moe::runtime::fail(bytes > INT64_MAX ? INT64_MAX
                                         : static_cast<int64_t>(bytes));
  if (Guard *guard = innermost) {
    *block = {&guard->blocks, guard->blocks.after};
    block->after->before = guard->blocks.after = block;
  } else {
    *block = {block, block};
  }
  return block + 1;
}

void _mlir_memref_to_llvm_free(void *memory) {
  if (!memory)
    return;
  Block *block = static_cast<Block *>(memory) - 1;
  block->before->after = block->after;
  block->after->before = block->before;
  free(block);
}

namespace {
struct Call {
  void (*entry)(void **);
  void **values;
};
} // namespace

int64_t moe_call(void (*entry)(void **), void **values) {
  Call call{entry, values};
  return moe::runtime::guard(
      [](void *context) {
        auto *call = static_cast<Call *>(context);
        call->entry(call->values);
      },
      &call);
}
