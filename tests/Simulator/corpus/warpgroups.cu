// Warpgroups with roles: registers that move between them.
#include "ptx.cuh"

// One warpgroup reads tiles, the other one adds them up in reverse. The reader
// gives most of its registers away, and has them back in the end to look at the
// last tile.
extern "C" __global__ void __launch_bounds__(256, 2)
    shared_registers(const int *x, int *sums, int *last, int tiles) {
  __shared__ int tile[128];
  int thread = threadIdx.x % 128, block = blockIdx.x;
  bool reads = threadIdx.x < 128;
  if (reads)
    tile[thread] = 0;
  if (reads) {
    ptx::giveRegisters<40>();
#pragma unroll 1
    for (int i = 0; i < tiles; ++i) {
      tile[thread] = x[(block * tiles + i) * 128 + thread];
      ptx::namedSync(1, 256); // the tile is there
      ptx::namedSync(2, 256); // and is no more needed
    }
  } else {
    ptx::takeRegisters<216>();
    int sum = 0;
#pragma unroll 1
    for (int i = 0; i < tiles; ++i) {
      ptx::namedSync(1, 256);
      sum += (i + 1) * tile[127 - thread];
      ptx::namedSync(2, 256);
    }
    sums[block * 128 + thread] = sum;
  }
  __syncthreads();
  if (reads) {
    ptx::takeRegisters<128>();
    last[block * 128 + thread] = tile[127 - thread];
  } else {
    ptx::giveRegisters<128>();
  }
}

// Each block builds the map of its own rows of a matrix and loads one box of
// them, which hangs over the matrix at the right.
extern "C" __global__ void built_map(const int *x, int *out,
                                     unsigned char *maps, int rows, int cols) {
  __shared__ __align__(128) int box[8 * 32];
  __shared__ __align__(128) unsigned map[32];
  __shared__ uint64_t bar;
  unsigned char *published = maps + 128 * blockIdx.x;
  const int *first = x + blockIdx.x * rows * cols;
  if (threadIdx.x < 32) {
    map[threadIdx.x] = 0;
    __syncwarp();
    if (threadIdx.x == 0) {
      ptx::setMap64<ptx::GlobalAddress>(map, 0, (uint64_t)first);
      ptx::setMap32<ptx::Rank>(map, 0, 1);
      ptx::setMap32<ptx::BoxDim>(map, 0, 32);
      ptx::setMap32<ptx::BoxDim>(map, 1, 15); // every second one
      ptx::setMap32<ptx::GlobalDim>(map, 0, cols);
      ptx::setMap32<ptx::GlobalDim>(map, 1, rows);
      ptx::setMap64<ptx::GlobalStride>(map, 0, 4ull * cols);
      ptx::setMap32<ptx::ElementStride>(map, 0, 1);
      ptx::setMap32<ptx::ElementStride>(map, 1, 2);
      ptx::setMapType(map);
    }
    __syncwarp();
    ptx::publishMap(published, map);
    ptx::acquireMap(published);
  }
  if (threadIdx.x == 32) {
    ptx::barrierInit(&bar, 1);
    ptx::fenceProxyAsync();
  }
  __syncthreads();
  if (threadIdx.x == 64) {
    ptx::barrierArriveExpect(&bar, sizeof box);
    ptx::loadBox(box, published, 16, 1, &bar);
  }
  ptx::barrierWait(&bar, 0);
  for (int i = 0; i < 2; ++i) {
    int at = threadIdx.x + 128 * i;
    out[blockIdx.x * 8 * 32 + at] = box[8 * 32 - 1 - at];
  }
  // Addresses differ from run to run: none stays behind.
  __syncthreads();
  if (threadIdx.x < 32)
    reinterpret_cast<unsigned *>(published)[threadIdx.x] = 0;
}
