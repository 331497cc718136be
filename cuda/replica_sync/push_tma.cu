// Push by bulk copies (TMA): one thread a block moves 32 KB chunks through a ring in shared memory,
// so few blocks fill a link and no registers hold data. sm_90 and newer.
#include "replica_sync/device_context.cuh"

namespace relibra::replica_sync {

constexpr int kStages = 4;
constexpr uint32_t kChunkBytes = 32768;

// The only working thread of a block.
struct SingleThread : DeviceContext {
  __device__ int tid() const { return 0; }
  __device__ int nthr() const { return 1; }
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

namespace {

// A block's ring: load number i lies in stage i mod kStages.
struct Ring {
  char* memory;
  uint64_t* loaded;      // [kStages] mbarriers
  uint32_t started = 0;  // loads, over all items
  uint32_t stored = 0;

  __device__ char* stage(uint32_t i) const { return memory + i % kStages * kChunkBytes; }

  __device__ void load(const char* src, uint32_t bytes) {
    uint64_t* barrier = loaded + started % kStages;
    ptx::mbarrier_arrive_expect_tx(barrier, bytes);
    ptx::bulk_load(stage(started), src, bytes, barrier);
    ++started;
  }
  __device__ void store(char* dst, uint32_t bytes) {
    while (!ptx::mbarrier_try_wait_parity(loaded + stored % kStages, stored / kStages & 1)) {
    }
    ptx::bulk_store(dst, stage(stored), bytes);
    ptx::bulk_commit_group();
    ++stored;
  }
};

// The chunks bid, bid + nblk, ... of the first `bytes` (a multiple of 16) of an item.
__device__ void copy_chunks(const RsPushItem& item, uint64_t bytes, Ring& ring) {
  const uint64_t num_chunks = (bytes + kChunkBytes - 1) / kChunkBytes;
  const auto* src = static_cast<const char*>(item.src);
  auto* dst = static_cast<char*>(item.dst);
  const auto size_of = [&](uint64_t chunk) {
    return static_cast<uint32_t>(min(uint64_t{kChunkBytes}, bytes - chunk * kChunkBytes));
  };
  uint64_t next = blockIdx.x;  // chunk to load
  const auto load_next = [&] {
    if (next >= num_chunks) return;
    ring.load(src + next * kChunkBytes, size_of(next));
    next += gridDim.x;
  };
  ptx::bulk_wait_group_read<0>();  // stages still being read for the item before
  RS_NO_UNROLL
  for (int i = 0; i < kStages - 1; ++i) load_next();
  RS_NO_UNROLL
  for (uint64_t chunk = blockIdx.x; chunk < num_chunks; chunk += gridDim.x) {
    ring.store(dst + chunk * kChunkBytes, size_of(chunk));
    ptx::bulk_wait_group_read<1>();  // the stage of the store before this one is free
    load_next();
  }
}

}  // namespace

#endif

// grid: any number of blocks, each with a share of the chunks of every item.
// block: one warp, of which one thread works; it alone decides on an abort.
// Dynamic shared memory: the ring.
extern "C" __global__ void __launch_bounds__(32)
    rs_push_tma_kernel(const RsPushItem* items, int n, RsFault fault) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char memory[];
  __shared__ __align__(8) uint64_t loaded[kStages];
  if (threadIdx.x != 0) return;
  SingleThread context;
  if (is_aborted(context, fault)) return;
  for (int s = 0; s < kStages; ++s) ptx::mbarrier_init(loaded + s, 1);
  ptx::fence_proxy_async_shared();  // bulk copies see the mbarriers
  Ring ring{memory, loaded};
  RS_NO_UNROLL
  for (int k = 0; k < n; ++k) {
    RsPushItem item = items[k];
    if (is_aligned(item.src) && is_aligned(item.dst)) {
      const uint64_t bytes = item.bytes / kVectorBytes * kVectorBytes;
      copy_chunks(item, bytes, ring);
      item.src = static_cast<const char*>(item.src) + bytes;
      item.dst = static_cast<char*>(item.dst) + bytes;
      item.bytes -= bytes;
    }
    copy_share(context, item);  // the last bytes, or all of an item that bulk copies cannot take
    if (item.full == nullptr) continue;
    ptx::bulk_wait_group<0>();        // written, not only read from the ring
    ptx::fence_proxy_async_global();  // bulk copies come before the release below
    if (arrives_last(context, item.arrivals)) context.store_word(item.full, item.word);
  }
  ptx::bulk_wait_group<0>();  // shared memory outlives its readers
#endif
}

}  // namespace relibra::replica_sync

#if !defined(RS_KERNELS_ONLY)

int rs_push_tma(const RsPushItem* items, int n, const RsFault* fault, int blocks, void* stream) {
  using namespace relibra::replica_sync;
  constexpr uint32_t kRingBytes = kStages * kChunkBytes;
  if (n < 0 || fault == nullptr || blocks < 1) return RS_BAD_ARGUMENT;
  if (n == 0) return RS_OK;
  int device = 0, major = 0;
  if (const cudaError_t status = cudaGetDevice(&device)) return status;
  if (const cudaError_t status =
          cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device))
    return status;
  if (major < 9) return cudaErrorNotSupported;
  if (const cudaError_t status = cudaFuncSetAttribute(
          rs_push_tma_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kRingBytes))
    return status;
  rs_push_tma_kernel<<<blocks, 32, kRingBytes, static_cast<cudaStream_t>(stream)>>>(items, n,
                                                                                    *fault);
  return cudaGetLastError();
}

#endif
