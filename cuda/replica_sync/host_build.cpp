// The C ABI on the CPU: calls run to their end and ignore the stream.
#include <algorithm>

#include "replica_sync/host_context.hpp"

namespace relibra::replica_sync {
namespace {

constexpr int kMaxHostThreads = 256;  // blocks x threads of one call

bool is_grid(int blocks, int threads) {
  return blocks >= 1 && threads >= 1 && blocks <= kMaxHostThreads &&
         threads <= kMaxHostThreads / blocks;
}

bool is_usable(const void* items, int n, const RsFault* fault) {
  return n >= 0 && (n == 0 || items != nullptr) && fault != nullptr && fault->record != nullptr &&
         fault->abort != nullptr && fault->num_peers >= 0 &&
         (fault->num_peers == 0 || fault->peer_aborts != nullptr);
}

bool is_push(const RsPushItem& item) {
  return item.full == nullptr || item.arrivals != nullptr;
}

bool is_reduce(const RsReduceItem& item) {
  return item.kind >= RS_FP32_FROM_FP32 && item.kind <= RS_FP64_FROM_FP64 &&
         item.num_replicas >= 0 && (item.num_replicas == 0 || item.grads != nullptr);
}

}  // namespace
}  // namespace relibra::replica_sync

using namespace relibra::replica_sync;

int rs_abi_version() {
  return RS_ABI_VERSION;
}

int rs_push(const RsPushItem* items, int n, const RsFault* fault, int blocks, int threads, void*) {
  if (!is_usable(items, n, fault) || !is_grid(blocks, threads) ||
      !std::all_of(items, items + n, is_push))
    return RS_BAD_ARGUMENT;
  launch<HostContext>(blocks, threads,
                      [&](HostContext& context) { push_body(context, items, n, *fault); });
  return RS_OK;
}

int rs_wait(const RsWaitItem* items, int n, uint64_t use, int op, uint64_t timeout_ns,
            const RsFault* fault, void*) {
  if (!is_usable(items, n, fault)) return RS_BAD_ARGUMENT;
  uint32_t code = RS_OK;
  launch<HostContext>(1, 1, [&](HostContext& context) {
    code = wait_body(context, items, n, use, op, timeout_ns, *fault);
  });
  if (code == RS_OK) code = relibra::load_acquire(&fault->record->code) & 0xffff;
  return static_cast<int>(code);
}

int rs_publish(const RsPublishItem* items, int n, const RsFault* fault, void*) {
  if (!is_usable(items, n, fault)) return RS_BAD_ARGUMENT;
  launch<HostContext>(1, 1, [&](HostContext& context) { publish_body(context, items, n, *fault); });
  return RS_OK;
}

int rs_reduce(const RsReduceItem* items, int n, const RsFault* fault, int blocks, int threads,
              void*) {
  if (!is_usable(items, n, fault) || !is_grid(blocks, threads) ||
      !std::all_of(items, items + n, is_reduce))
    return RS_BAD_ARGUMENT;
  launch<HostContext>(blocks, threads,
                      [&](HostContext& context) { reduce_body(context, items, n, *fault); });
  return RS_OK;
}

int rs_push_tma(const RsPushItem* items, int n, const RsFault* fault, int blocks, void* stream) {
  return rs_push(items, n, fault, blocks, 1, stream);
}

int rs_push_copy_engine(const RsPushItem* items, int n, const RsFault* fault, void* stream) {
  return rs_push(items, n, fault, 1, 1, stream);
}

int rs_wait_values(const RsWaitItem* items, int n, void*) {
  if (n < 0 || (n > 0 && items == nullptr)) return RS_BAD_ARGUMENT;
  const HostContext context(0, 1, 0, 1, nullptr);
  for (int i = 0; i < n; ++i)
    for (uint32_t round = 0;
         static_cast<int64_t>(context.load_word(items[i].word) - items[i].at_least) < 0; ++round)
      context.relax(round);
  return RS_OK;
}
