// What the kernels of replica synchronisation do: wait, push, publish, reduce. One source for nvcc
// (real kernels) and g++ (ranks as threads or processes).
//
// A body is a template over a context, which stands for one thread of a grid:
//   bid(), nblk(), tid(), nthr()       its place
//   sync(), sync_or(vote)              barrier of its block; the second tells whether anyone voted
//   relax(round), now_ns()             back-off of a poll, and the time
//   load_word(p), store_word(p, v)     acquire load and release store of a signal word
//   load16(p), store16(p, v)           16 bytes of data, aligned
// Every access to a signal word is a call of load_word or store_word; a test counts them in the
// PTX.
//
// A body that stops on an abort decides for the whole block: threads that leave alone would hang
// the others in the next barrier.
#pragma once

#if !defined(__CUDACC_RTC__)
#include <cstring>
#endif

#include "common/atomics.hpp"
#include "replica_sync/c_api.h"

namespace relibra::replica_sync {

constexpr int kMaxThreads = 512;  // a block
constexpr int kGenerationShift = 48;
constexpr int kUseShift = 16;
constexpr int kVectorBytes = 16;
constexpr uint32_t kPollsPerCheck = 16;  // polls between looks at the clock and at the abort word

struct alignas(kVectorBytes) Vector {
  uint32_t words[4];
};

// Atomic part of a context, the same on a GPU and on the host.
struct SystemWords {
  RS_FN uint64_t load_word(uint64_t* word) const { return load_acquire(word); }
  RS_FN void store_word(uint64_t* word, uint64_t value) const { store_release(word, value); }
};

RS_FN bool is_aligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % kVectorBytes == 0;
}

RS_FN uint64_t abort_word(const RsFault& fault, uint32_t code) {
  return fault.generation << kGenerationShift | static_cast<uint64_t>(fault.rank + 1) << kUseShift |
         code;
}

template <class Context>
RS_FN bool is_aborted(Context& context, const RsFault& fault) {
  return context.load_word(fault.abort) >> kGenerationShift == fault.generation;
}

// --- errors
// ---------------------------------------------------------------------------------------

// Facts of an error as found by one thread; code RS_OK: none.
struct Failure {
  uint32_t code = RS_OK;
  int32_t peer = -1;
  int32_t slot = -1;
  uint64_t expected = 0;
  uint64_t observed = 0;
};

// Writes the record unless somebody did, then tells every rank, this one last: whoever sees the
// abort word of this rank also sees the record.
template <class Context>
RS_FN void report(Context& context, const RsFault& fault, int op, uint64_t use,
                  const Failure& failure) {
  RsErrorRecord& record = *fault.record;
  constexpr uint32_t kFree = RS_OK, kClaimed = static_cast<uint32_t>(RS_BEING_WRITTEN);
  if (exchange_if(&record.code, kFree, kClaimed)) {
    record.rank = fault.rank;
    record.op = op;
    record.peer = failure.peer;
    record.slot = failure.slot;
    record.use = use;
    record.expected = failure.expected;
    record.observed = failure.observed;
    store_release(&record.code, failure.code);
  }
  if (failure.code == RS_PEER_ABORTED) return;  // every rank has been told
  const uint64_t word = abort_word(fault, failure.code);
  RS_NO_UNROLL
  for (int i = 0; i <= fault.num_peers; ++i)
    context.store_word(i < fault.num_peers ? fault.peer_aborts[i] : fault.abort, word);
}

// --- wait
// -----------------------------------------------------------------------------------------

// Whether `value` is of the generation of `at_least` and not older.
RS_FN bool has_arrived(uint64_t value, uint64_t at_least) {
  return value >> kGenerationShift == at_least >> kGenerationShift && value >= at_least;
}

// Polls one word to its arrival or a failure. `start` is when the thread's waiting began, 0 = not
// yet.
template <class Context>
RS_FN Failure poll(Context& context, const RsWaitItem& item, uint64_t timeout_ns,
                   const RsFault& fault, uint64_t& start) {
  uint64_t value;
  uint32_t polls = 0;
  RS_NO_UNROLL
  while (!has_arrived(value = context.load_word(item.word), item.at_least)) {
    if (++polls % kPollsPerCheck != 0) continue;
    const uint64_t now = context.now_ns();
    if (start == 0) start = now;
    const uint64_t abort = context.load_word(fault.abort);
    if (abort >> kGenerationShift == fault.generation) {
      const int32_t origin = static_cast<int32_t>(abort >> kUseShift & 0xffffffffu) - 1;
      return {RS_PEER_ABORTED, origin, item.slot, item.at_least, value};
    }
    if (now - start > timeout_ns)
      return {RS_TIMEOUT, item.peer, item.slot, item.exact ? item.exact : item.at_least, value};
    context.relax(polls / kPollsPerCheck);
  }
  if (item.exact == 0 || value == item.exact) return {};
  return {RS_MISMATCH, item.peer, item.slot, item.exact, value};
}

// grid: one block. block: thread t polls items t, t + nthr, ...; any number of threads.
// Returns what this thread found.
template <class Context>
RS_FN uint32_t wait_body(Context& context, const RsWaitItem* items, int n, uint64_t use, int op,
                         uint64_t timeout_ns, const RsFault& fault) {
  Failure failure;
  uint64_t start = 0;
  RS_NO_UNROLL
  for (int i = context.tid(); i < n && failure.code == RS_OK; i += context.nthr())
    failure = poll(context, items[i], timeout_ns, fault, start);
  if (failure.code != RS_OK) report(context, fault, op, use, failure);
  context.sync();  // what the words guard is read only after all of them
  return failure.code;
}

// --- push
// -----------------------------------------------------------------------------------------

// The grid's share of a copy: 16-byte vectors, and single bytes for the rest or if not aligned.
template <class Context>
RS_FN void copy_share(Context& context, const RsPushItem& item) {
  constexpr int kBatch = 4;  // loads in flight a thread
  const auto* src = static_cast<const char*>(item.src);
  auto* dst = static_cast<char*>(item.dst);
  const uint64_t first = static_cast<uint64_t>(context.bid()) * context.nthr() + context.tid();
  const uint64_t stride = static_cast<uint64_t>(context.nblk()) * context.nthr();
  const uint64_t vectors =
      is_aligned(item.src) && is_aligned(item.dst) ? item.bytes / kVectorBytes : 0;
  uint64_t i = first;
  RS_NO_UNROLL
  for (; i + (kBatch - 1) * stride < vectors; i += kBatch * stride) {
    Vector batch[kBatch];
    for (int j = 0; j < kBatch; ++j)
      batch[j] = context.load16(src + (i + j * stride) * kVectorBytes);
    for (int j = 0; j < kBatch; ++j)
      context.store16(dst + (i + j * stride) * kVectorBytes, batch[j]);
  }
  RS_NO_UNROLL
  for (; i < vectors; i += stride)
    context.store16(dst + i * kVectorBytes, context.load16(src + i * kVectorBytes));
  RS_NO_UNROLL
  for (i = vectors * kVectorBytes + first; i < item.bytes; i += stride) dst[i] = src[i];
}

// True for one thread of the grid: the one whose block arrives last, when all blocks' work is
// visible.
template <class Context>
RS_FN bool arrives_last(Context& context, uint32_t* arrivals) {
  if (context.tid() != 0) return false;
  const uint32_t before = fetch_add_acq_rel(arrivals, 1u);
  if (before + 1 != static_cast<uint32_t>(context.nblk())) return false;
  store_relaxed(arrivals, 0u);  // the next launch comes after this one in stream order
  return true;
}

// grid: any number of blocks, each with a share of every item. block: any number of threads.
template <class Context>
RS_FN void push_body(Context& context, const RsPushItem* items, int n, const RsFault& fault) {
  if (context.sync_or(is_aborted(context, fault))) return;
  RS_NO_UNROLL
  for (int k = 0; k < n; ++k) {
    const RsPushItem item = items[k];
    copy_share(context, item);
    if (item.full == nullptr) continue;
    context.sync();  // all stores of this block come before its arrival
    if (arrives_last(context, item.arrivals)) context.store_word(item.full, item.word);
  }
}

// --- publish
// --------------------------------------------------------------------------------------

// grid: one block. block: thread t stores items t, t + nthr, ...
template <class Context>
RS_FN void publish_body(Context& context, const RsPublishItem* items, int n, const RsFault& fault) {
  if (context.sync_or(is_aborted(context, fault))) return;
  RS_NO_UNROLL
  for (int i = context.tid(); i < n; i += context.nthr())
    context.store_word(items[i].word, items[i].value);
}

// --- reduce
// ---------------------------------------------------------------------------------------

RS_FN float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Element types of a reduction, and how a 16-byte vector of gradients becomes elements.
template <int kKind>
struct ReduceTypes;

template <>
struct ReduceTypes<RS_FP32_FROM_FP32> {
  using Home = float;
  using Grad = float;
  static RS_FN float widen(float grad) { return grad; }
};

template <>
struct ReduceTypes<RS_FP32_FROM_BF16> {
  using Home = float;
  using Grad = uint16_t;  // bits of a bf16
  static RS_FN float widen(uint16_t bits) {
    return float_of_bits(static_cast<uint32_t>(bits) << 16);
  }
};

template <>
struct ReduceTypes<RS_FP64_FROM_FP64> {
  using Home = double;
  using Grad = double;
  static RS_FN double widen(double grad) { return grad; }
};

// home[i] += grads[0][i], += grads[1][i], ...: one thread an element, so the order is that of the
// list.
template <int kKind, class Context>
RS_FN void reduce_share(Context& context, const RsReduceItem& item) {
  using Types = ReduceTypes<kKind>;
  using Home = typename Types::Home;
  using Grad = typename Types::Grad;
  constexpr int kElements = kVectorBytes / sizeof(Grad);  // of one vector of gradients
  constexpr int kHomeVectors = kElements * sizeof(Home) / kVectorBytes;
  auto* home = static_cast<Home*>(item.home);
  const uint64_t first = static_cast<uint64_t>(context.bid()) * context.nthr() + context.tid();
  const uint64_t stride = static_cast<uint64_t>(context.nblk()) * context.nthr();
  bool aligned = is_aligned(home);
  for (int r = 0; r < item.num_replicas; ++r) aligned = aligned && is_aligned(item.grads[r]);
  const uint64_t vectors = aligned ? item.count / kElements : 0;
  RS_NO_UNROLL
  for (uint64_t i = first; i < vectors; i += stride) {
    Home sums[kElements];
    for (int v = 0; v < kHomeVectors; ++v) {
      const Vector loaded = context.load16(home + i * kElements + v * (kElements / kHomeVectors));
      memcpy(sums + v * (kElements / kHomeVectors), &loaded, kVectorBytes);
    }
    RS_NO_UNROLL
    for (int r = 0; r < item.num_replicas; ++r) {
      const Vector loaded = context.load16(static_cast<const Grad*>(item.grads[r]) + i * kElements);
      Grad grads[kElements];
      memcpy(grads, &loaded, kVectorBytes);
      for (int j = 0; j < kElements; ++j) sums[j] += Types::widen(grads[j]);
    }
    for (int v = 0; v < kHomeVectors; ++v) {
      Vector stored;
      memcpy(&stored, sums + v * (kElements / kHomeVectors), kVectorBytes);
      context.store16(home + i * kElements + v * (kElements / kHomeVectors), stored);
    }
  }
  RS_NO_UNROLL
  for (uint64_t i = vectors * kElements + first; i < item.count; i += stride) {
    Home sum = home[i];
    RS_NO_UNROLL
    for (int r = 0; r < item.num_replicas; ++r)
      sum += Types::widen(static_cast<const Grad*>(item.grads[r])[i]);
    home[i] = sum;
  }
}

// grid: any number of blocks, each with a share of every item. block: any number of threads.
template <class Context>
RS_FN void reduce_body(Context& context, const RsReduceItem* items, int n, const RsFault& fault) {
  if (context.sync_or(is_aborted(context, fault))) return;
  RS_NO_UNROLL
  for (int k = 0; k < n; ++k) {
    const RsReduceItem item = items[k];
    if (item.kind == RS_FP32_FROM_FP32)
      reduce_share<RS_FP32_FROM_FP32>(context, item);
    else if (item.kind == RS_FP32_FROM_BF16)
      reduce_share<RS_FP32_FROM_BF16>(context, item);
    else
      reduce_share<RS_FP64_FROM_FP64>(context, item);
  }
}

}  // namespace relibra::replica_sync
