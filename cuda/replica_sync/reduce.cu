// Home reduction by the SMs: pulls the gradients of replicas from peers and adds them in a fixed
// order.
#include "replica_sync/device_context.cuh"

namespace relibra::replica_sync {

// grid: any number of blocks, each with a share of every item. block: up to kMaxThreads.
extern "C" __global__ void __launch_bounds__(kMaxThreads, 2)
    rs_reduce_kernel(const RsReduceItem* items, int n, RsFault fault) {
  DeviceContext context;
  reduce_body(context, items, n, fault);
}

}  // namespace relibra::replica_sync

#if !defined(RS_KERNELS_ONLY)

int rs_reduce(const RsReduceItem* items, int n, const RsFault* fault, int blocks, int threads,
              void* stream) {
  using namespace relibra::replica_sync;
  if (n < 0 || fault == nullptr || blocks < 1 || threads < 1 || threads > kMaxThreads)
    return RS_BAD_ARGUMENT;
  if (n == 0) return RS_OK;
  rs_reduce_kernel<<<blocks, threads, 0, static_cast<cudaStream_t>(stream)>>>(items, n, *fault);
  return cudaGetLastError();
}

#endif
