// The contexts of bodies.hpp on the CPU: a launch is blocks x threads std::threads (one thread: the
// caller's own), a block's barrier is a std::barrier. C++20.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "replica_sync/bodies.hpp"

namespace relibra::replica_sync {

// What the threads of one block share.
struct HostBlock {
  explicit HostBlock(int num_threads) : barrier(num_threads) {}
  std::barrier<> barrier;
  std::atomic<int> votes[2] = {0, 0};  // of even and odd rounds of sync_or
};

struct HostContext : SystemWords {
  int block, num_blocks, thread, num_threads;
  HostBlock* shared;  // null if the block has one thread
  int round = 0;      // of sync_or

  HostContext(int block, int num_blocks, int thread, int num_threads, HostBlock* shared)
      : block(block),
        num_blocks(num_blocks),
        thread(thread),
        num_threads(num_threads),
        shared(shared) {}

  int bid() const { return block; }
  int nblk() const { return num_blocks; }
  int tid() const { return thread; }
  int nthr() const { return num_threads; }

  void sync() const {
    if (shared != nullptr) shared->barrier.arrive_and_wait();
  }

  bool sync_or(bool vote) {
    if (shared == nullptr) return vote;
    std::atomic<int>& votes = shared->votes[round++ % 2];
    if (vote) votes.fetch_add(1);
    shared->barrier.arrive_and_wait();
    const bool any = votes.load() != 0;
    shared->barrier.arrive_and_wait();
    if (thread == 0) votes.store(0);  // before the next round but one can vote
    return any;
  }

  // Yields at first, then sleeps: ranks may share one CPU.
  void relax(uint32_t round) const {
    if (round < 64)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(std::min(round, 200u)));
  }

  uint64_t now_ns() const {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
  }

  Vector load16(const void* address) const {
    Vector value;
    memcpy(&value, address, sizeof value);
    return value;
  }
  void store16(void* address, const Vector& value) const { memcpy(address, &value, sizeof value); }
};

// Runs body(context) for every thread of a grid, and returns when all are done.
template <class Context, class Body>
void launch(int num_blocks, int num_threads, const Body& body) {
  std::vector<std::unique_ptr<HostBlock>> blocks(num_threads > 1 ? num_blocks : 0);
  for (auto& block : blocks) block = std::make_unique<HostBlock>(num_threads);
  const auto run = [&](int b, int t) {
    Context context(b, num_blocks, t, num_threads, blocks.empty() ? nullptr : blocks[b].get());
    body(context);
  };
  std::vector<std::thread> others;
  others.reserve(static_cast<size_t>(num_blocks) * num_threads - 1);
  for (int i = 1; i < num_blocks * num_threads; ++i)
    others.emplace_back(run, i / num_threads, i % num_threads);
  run(0, 0);
  for (std::thread& other : others) other.join();
}

}  // namespace relibra::replica_sync
