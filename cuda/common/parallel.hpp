// A parallel loop whose result does not depend on the number of threads, and whose errors arrive at
// the caller.
//
// Threads of its own instead of an OpenMP region: a process that forks after a region (test
// launchers and the demo fork their ranks) would hang in the child's first region.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace relibra {

// Calls body(i) for i in 0..count-1 on num_threads threads (0 = one a CPU). Iterations must be
// independent. The exception of the lowest iteration that threw is thrown again here.
template <typename Body>
void parallel_for(int64_t count, int num_threads, const Body& body) {
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  std::exception_ptr error;
  int64_t error_at = count;
  const auto work = [&] {
    for (int64_t i = next++; i < count; i = next++) {
      try {
        body(i);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (i < error_at) {
          error_at = i;
          error = std::current_exception();
        }
      }
    }
  };
  const int64_t wanted =
      num_threads > 0 ? num_threads : std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::thread> helpers;
  try {
    for (int64_t i = 1; i < std::min(wanted, count); ++i) helpers.emplace_back(work);
  } catch (const std::system_error&) {
    // No more threads to be had: those that run do all of it.
  }
  work();
  for (std::thread& helper : helpers) helper.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace relibra
