// What needs no SM: push by copy engines, one batch of peer copies, then the words as stream memory
// operations; and waits of a stream for words. Driver functions are looked up at run time, so the
// library loads without a driver.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <new>
#include <vector>

#include "replica_sync/c_api.h"

namespace relibra::replica_sync {
namespace {

constexpr int kDriverCode = 10000;  // added to a CUresult
constexpr int kDriverVersion = 12000;
constexpr size_t kMaxOps = 256;  // stream memory operations of one call

using BatchMemOp = CUresult (*)(CUstream, unsigned, CUstreamBatchMemOpParams*, unsigned);

// The driver's cuStreamBatchMemOp. Returns 0 or a code of the runtime.
int find_batch_mem_op(BatchMemOp& function) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t status = cudaGetDriverEntryPointByVersion(
      "cuStreamBatchMemOp", &entry, kDriverVersion, cudaEnableDefault, &found);
  if (status != cudaSuccess) return status;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  function = reinterpret_cast<BatchMemOp>(entry);
  return RS_OK;
}

int copy_all(const RsPushItem* items, int n, cudaStream_t stream) {
  std::vector<void*> targets;
  std::vector<const void*> sources;
  std::vector<size_t> sizes;
  for (int i = 0; i < n; ++i) {
    if (items[i].bytes == 0) continue;
    targets.push_back(items[i].dst);
    sources.push_back(items[i].src);
    sizes.push_back(items[i].bytes);
  }
  if (sizes.empty()) return RS_OK;
#if CUDART_VERSION >= 13000
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
  size_t first = 0;
  return cudaMemcpyBatchAsync(targets.data(), sources.data(), sizes.data(), sizes.size(),
                              &attributes, &first, 1, stream);
#else  // older batched copies take other arguments, or do not exist
  for (size_t i = 0; i < sizes.size(); ++i)
    if (const cudaError_t status =
            cudaMemcpyAsync(targets[i], sources[i], sizes[i], cudaMemcpyDefault, stream))
      return status;
  return RS_OK;
#endif
}

int submit(std::vector<CUstreamBatchMemOpParams>& ops, cudaStream_t stream,
           BatchMemOp batch_mem_op) {
  for (size_t i = 0; i < ops.size(); i += kMaxOps) {
    const auto count = static_cast<unsigned>(std::min(kMaxOps, ops.size() - i));
    if (const CUresult status = batch_mem_op(stream, count, ops.data() + i, 0))
      return kDriverCode + static_cast<int>(status);
  }
  return RS_OK;
}

int store_words(const RsPushItem* items, int n, cudaStream_t stream, BatchMemOp batch_mem_op) {
  std::vector<CUstreamBatchMemOpParams> ops;
  for (int i = 0; i < n; ++i) {
    if (items[i].full == nullptr) continue;
    CUstreamBatchMemOpParams op{};
    op.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
    op.writeValue.address = reinterpret_cast<CUdeviceptr>(items[i].full);
    op.writeValue.value64 = items[i].word;
    op.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;  // after the copies, for every observer
    ops.push_back(op);
  }
  return submit(ops, stream, batch_mem_op);
}

int wait_words(const RsWaitItem* items, int n, cudaStream_t stream, BatchMemOp batch_mem_op) {
  std::vector<CUstreamBatchMemOpParams> ops(n);
  for (int i = 0; i < n; ++i) {
    ops[i].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_64;
    ops[i].waitValue.address = reinterpret_cast<CUdeviceptr>(items[i].word);
    ops[i].waitValue.value64 = items[i].at_least;
    ops[i].waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
  }
  return submit(ops, stream, batch_mem_op);
}

}  // namespace
}  // namespace relibra::replica_sync

int rs_push_copy_engine(const RsPushItem* items, int n, const RsFault* fault, void* stream) {
  using namespace relibra::replica_sync;
  if (n < 0 || fault == nullptr) return RS_BAD_ARGUMENT;
  if (n == 0) return RS_OK;
  const auto handle = static_cast<cudaStream_t>(stream);
  BatchMemOp batch_mem_op = nullptr;
  try {
    if (const int status = find_batch_mem_op(batch_mem_op)) return status;
    if (const int status = copy_all(items, n, handle)) return status;
    return store_words(items, n, handle, batch_mem_op);
  } catch (const std::bad_alloc&) {
    return cudaErrorMemoryAllocation;
  }
}

int rs_wait_values(const RsWaitItem* items, int n, void* stream) {
  using namespace relibra::replica_sync;
  if (n < 0) return RS_BAD_ARGUMENT;
  if (n == 0) return RS_OK;
  BatchMemOp batch_mem_op = nullptr;
  try {
    if (const int status = find_batch_mem_op(batch_mem_op)) return status;
    return wait_words(items, n, static_cast<cudaStream_t>(stream), batch_mem_op);
  } catch (const std::bad_alloc&) {
    return cudaErrorMemoryAllocation;
  }
}
