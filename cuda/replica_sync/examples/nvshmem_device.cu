// The same push and wait on the NVSHMEM device API, for slots that lie in NVSHMEM's symmetric heap:
// an example that is compiled and linked (RELIBRA_NVSHMEM=ON), not shipped.
//
// Peers on NVLink are written by direct stores; others by NVSHMEM's own put with a signal. Signal
// words are those of c_api.h. NVSHMEM's waits spin for ever, so product code waits with rs_wait.
#include <nvshmem.h>
#include <nvshmemx.h>

#include "replica_sync/device_context.cuh"

namespace relibra::replica_sync {

// Arguments of one push; all but src are symmetric addresses of this rank, valid on every rank.
struct NvshmemPush {
  void* dst;        // [bytes]
  const void* src;  // [bytes]
  uint64_t bytes;
  uint64_t* signal;  // word of the slot on the peer
  uint64_t word;
  uint32_t* arrivals;  // of this rank, zero between launches
  int peer;            // PE
};

// grid: any number of blocks, each with a share of the bytes. block: up to kMaxThreads.
__global__ void __launch_bounds__(kMaxThreads) nvshmem_push_kernel(NvshmemPush push) {
  DeviceContext context;
  void* direct = nvshmem_ptr(push.dst, push.peer);
  if (direct == nullptr) {  // the same for all blocks: one of them sends all
    if (blockIdx.x == 0)
      nvshmemx_putmem_signal_nbi_block(push.dst, push.src, push.bytes, push.signal, push.word,
                                       NVSHMEM_SIGNAL_SET, push.peer);
    return;
  }
  copy_share(context, RsPushItem{push.src, direct, push.bytes, nullptr, 0, nullptr});
  context.sync();  // all stores of this block come before its arrival
  if (!arrives_last(context, push.arrivals)) return;
  nvshmem_fence();
  nvshmemx_signal_op(push.signal, push.word, NVSHMEM_SIGNAL_SET, push.peer);
}

// grid: one block. block: one thread.
__global__ void nvshmem_wait_kernel(uint64_t* signal, uint64_t at_least) {
  nvshmem_signal_wait_until(signal, NVSHMEM_CMP_GE, at_least);
}

}  // namespace relibra::replica_sync

extern "C" RS_API int rs_nvshmem_push(const relibra::replica_sync::NvshmemPush* push, int blocks,
                                      int threads, void* stream) {
  using namespace relibra::replica_sync;
  if (push == nullptr || blocks < 1 || threads < 1 || threads > kMaxThreads) return RS_BAD_ARGUMENT;
  nvshmem_push_kernel<<<blocks, threads, 0, static_cast<cudaStream_t>(stream)>>>(*push);
  return cudaGetLastError();
}

extern "C" RS_API int rs_nvshmem_wait(uint64_t* signal, uint64_t at_least, void* stream) {
  using namespace relibra::replica_sync;
  nvshmem_wait_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(signal, at_least);
  return cudaGetLastError();
}

// Version of the host library: 10000 x major + 100 x minor + patch.
extern "C" RS_API int rs_nvshmem_version() {
  int major = 0, minor = 0, patch = 0;
  nvshmemx_vendor_get_version_info(&major, &minor, &patch);
  return 10000 * major + 100 * minor + patch;
}
