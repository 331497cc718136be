// Waits with a time-out, and publication of words: one block each, so that a wait holds one SM at
// most.
#include "replica_sync/device_context.cuh"

namespace relibra::replica_sync {

constexpr int kWaitThreads = 128;

// grid: one block. block: kWaitThreads, thread t polls items t, t + kWaitThreads, ...
extern "C" __global__ void __launch_bounds__(kWaitThreads)
    rs_wait_kernel(const RsWaitItem* items, int n, uint64_t use, int op, uint64_t timeout_ns,
                   RsFault fault) {
  DeviceContext context;
  wait_body(context, items, n, use, op, timeout_ns, fault);
}

// grid: one block. block: kWaitThreads, thread t stores items t, t + kWaitThreads, ...
extern "C" __global__ void __launch_bounds__(kWaitThreads)
    rs_publish_kernel(const RsPublishItem* items, int n, RsFault fault) {
  DeviceContext context;
  publish_body(context, items, n, fault);
}

}  // namespace relibra::replica_sync

#if !defined(RS_KERNELS_ONLY)

int rs_abi_version() {
  return RS_ABI_VERSION;
}

int rs_wait(const RsWaitItem* items, int n, uint64_t use, int op, uint64_t timeout_ns,
            const RsFault* fault, void* stream) {
  using namespace relibra::replica_sync;
  if (n < 0 || fault == nullptr) return RS_BAD_ARGUMENT;
  if (n == 0) return RS_OK;
  rs_wait_kernel<<<1, kWaitThreads, 0, static_cast<cudaStream_t>(stream)>>>(items, n, use, op,
                                                                            timeout_ns, *fault);
  return cudaGetLastError();
}

int rs_publish(const RsPublishItem* items, int n, const RsFault* fault, void* stream) {
  using namespace relibra::replica_sync;
  if (n < 0 || fault == nullptr) return RS_BAD_ARGUMENT;
  if (n == 0) return RS_OK;
  rs_publish_kernel<<<1, kWaitThreads, 0, static_cast<cudaStream_t>(stream)>>>(items, n, *fault);
  return cudaGetLastError();
}

#endif
