// A parallel loop whose result does not depend on the number of threads, and whose errors arrive at
// the caller.
#pragma once

#include <omp.h>

#include <cstdint>
#include <exception>

namespace relibra {

inline int thread_count(int num_threads) {
  return num_threads > 0 ? num_threads : omp_get_max_threads();
}

// Calls body(i) for i in 0..count-1 on num_threads threads (0 = all). Iterations must be
// independent. The first exception of the lowest iteration that threw is thrown again here.
template <typename Body>
void parallel_for(int64_t count, int num_threads, const Body& body) {
  std::exception_ptr error;
  int64_t error_at = count;
#pragma omp parallel for schedule(dynamic, 1) num_threads(thread_count(num_threads))
  for (int64_t i = 0; i < count; ++i) {
    try {
      body(i);
    } catch (...) {
#pragma omp critical(relibra_parallel_for)
      if (i < error_at) {
        error_at = i;
        error = std::current_exception();
      }
    }
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace relibra
