// NVIDIA's libraries on top of the hardware: libcu++ barriers, pipelines and
// atomics, cooperative groups.
#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
#include <cooperative_groups/reduce.h>
#include <cuda/atomic>
#include <cuda/barrier>
#include <cuda/std/utility>
namespace cg = cooperative_groups;

// cuda::barrier, completed by a bulk copy's bytes.
extern "C" __global__ void barrier_bulk_copy(const int *x, int *out) {
  using Barrier = cuda::barrier<cuda::thread_scope_block>;
  __shared__ __align__(128) int tile[128];
#pragma nv_diag_suppress static_var_with_dynamic_init
  __shared__ Barrier barrier;
  if (threadIdx.x == 0) {
    init(&barrier, blockDim.x);
    cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
  }
  __syncthreads();
  Barrier::arrival_token token;
  if (threadIdx.x == 0) {
    cuda::memcpy_async(tile, x + blockIdx.x * 128,
                       cuda::aligned_size_t<16>(sizeof(tile)), barrier);
    token = barrier.arrive();
  } else {
    token = barrier.arrive();
  }
  barrier.wait(cuda::std::move(token));
#pragma unroll 1
  for (int i = threadIdx.x; i < 128; i += blockDim.x)
    out[blockIdx.x * 128 + i] = tile[127 - i] * 2;
}

// A ticket lock of cuda::atomic_ref in global memory, one thread a block.
extern "C" __global__ void ticket_lock(unsigned *next, unsigned *serving,
                                       int *record) {
  cuda::atomic_ref<unsigned, cuda::thread_scope_device> tickets(*next);
  cuda::atomic_ref<unsigned, cuda::thread_scope_device> turn(*serving);
  unsigned mine = tickets.fetch_add(1, cuda::memory_order_relaxed);
  while (turn.load(cuda::memory_order_acquire) != mine) {
  }
  record[0] += 1;
  record[1] = record[1] * 3 + 1;
  turn.store(mine + 1, cuda::memory_order_release);
}

// Groups copy asynchronously and reduce within tiles of eight.
extern "C" __global__ void group_copy_reduce(const int *x, int *out) {
  __shared__ __align__(16) int tile[256];
  cg::thread_block block = cg::this_thread_block();
  cg::memcpy_async(block, tile, x + blockIdx.x * 256, sizeof(tile));
  cg::wait(block);
  auto eight = cg::tiled_partition<8>(block);
  int sum = cg::reduce(eight, tile[255 - block.thread_rank()],
                       cg::plus<int>());
  int top = cg::reduce(eight, tile[block.thread_rank()], cg::greater<int>());
  if (eight.thread_rank() == 0) {
    int group = blockIdx.x * 32 + block.thread_rank() / 8;
    out[group * 2] = sum;
    out[group * 2 + 1] = top;
  }
}
