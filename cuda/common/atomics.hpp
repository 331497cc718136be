// Atomic accesses to memory that other ranks see, spelled once for nvcc and g++.
//
// Order comes from release and acquire operations, never from fences: ThreadSanitizer does not
// model fences. The scope is always the system, since words lie on peers and in host memory; on a
// GPU each function is one instruction (`.sys`).
#pragma once

#if defined(__CUDACC__)
#include <cuda/atomic>
#define RS_FN __host__ __device__ __forceinline__
#define RS_NO_UNROLL _Pragma("unroll 1")
#else
#include <atomic>
#define RS_FN inline
#define RS_NO_UNROLL
#endif

namespace relibra {

#if defined(__CUDACC__)
template <typename T>
using SystemAtomic = cuda::atomic_ref<T, cuda::thread_scope_system>;
namespace order = cuda;
#else
template <typename T>
using SystemAtomic = std::atomic_ref<T>;
namespace order = std;
#endif

template <typename T>
RS_FN T load_acquire(T* address) {
  return SystemAtomic<T>(*address).load(order::memory_order_acquire);
}

template <typename T>
RS_FN void store_release(T* address, T value) {
  SystemAtomic<T>(*address).store(value, order::memory_order_release);
}

template <typename T>
RS_FN void store_relaxed(T* address, T value) {
  SystemAtomic<T>(*address).store(value, order::memory_order_relaxed);
}

// Returns the value before the addition.
template <typename T>
RS_FN T fetch_add_acq_rel(T* address, T value) {
  return SystemAtomic<T>(*address).fetch_add(value, order::memory_order_acq_rel);
}

// Stores `next` where `expected` was; whether it did.
template <typename T>
RS_FN bool exchange_if(T* address, T expected, T next) {
  return SystemAtomic<T>(*address).compare_exchange_strong(expected, next,
                                                           order::memory_order_acq_rel);
}

}  // namespace relibra
