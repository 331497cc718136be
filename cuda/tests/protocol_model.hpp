// What protocol_test.cpp runs: sizes, the order of uses, plans, and the values that oracles expect.
#pragma once

#include <array>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "replica_sync/bodies.hpp"

namespace relibra::replica_sync {

constexpr int kPes = 4, kSlots = 2, kWeightBuffers = 2, kGradBuffers = 2;
constexpr int kLayers = 2, kHomeExperts = 3, kExperts = kPes * kHomeExperts;
constexpr std::array<int, 2> kFieldAt = {0, 24}, kFieldSize = {24, 13};  // floats; 52 bytes: a tail
constexpr int kSlotFloats = 40;
constexpr uint64_t kGeneration = 3;

struct Options {
  std::string fault;
  bool slow_home = false;
  unsigned seed = 1;
  uint64_t timeout_ns = 20'000'000'000;
};

inline Options options;

struct Use {
  int n, layer;
  int q = -1;          // number among the backward uses; -1: forward
  int earlier_q = -1;  // the backward use of this layer before
};

// Five micro-batches, all but the first with a recompute of every layer before its backward.
inline std::vector<Use> make_schedule() {
  std::vector<Use> uses;
  std::array<int, kLayers> last_q;
  last_q.fill(-1);
  int num_backward = 0;
  const auto add = [&](int layer, bool backward) {
    Use use{static_cast<int>(uses.size()), layer};
    if (backward) {
      use.q = num_backward++;
      use.earlier_q = std::exchange(last_q[layer], use.q);
    }
    uses.push_back(use);
  };
  for (int micro_batch = 0; micro_batch < 5; ++micro_batch) {
    for (int layer = 0; layer < kLayers; ++layer) add(layer, false);
    for (int layer = kLayers - 1; layer >= 0; --layer) {
      if (micro_batch > 0) add(layer, false);
      add(layer, true);
    }
  }
  return uses;
}

inline const std::vector<Use> schedule = make_schedule();

struct Replica {
  int expert, home, pe, slot;
};

// The plan of a use: a pure function, as every PE evaluates it.
inline std::vector<Replica> plan(int n) {
  std::mt19937 random(1000 * options.seed + n);
  std::vector<Replica> replicas;
  if (random() % 8 == 0) return replicas;  // a use without replicas
  for (int pe = 0; pe < kPes; ++pe)
    for (int slot = 0, first = -1; slot < kSlots; ++slot) {
      const int expert = random() % kExperts;
      if (random() % 4 == 0 || expert / kHomeExperts == pe || expert == first) continue;
      replicas.push_back({first = expert, expert / kHomeExperts, pe, slot});
    }
  return replicas;
}

inline uint64_t word_of(int number, uint64_t hash) {
  return kGeneration << kGenerationShift | static_cast<uint64_t>(number + 1) << kUseShift |
         (hash & 0xffff);
}
inline uint64_t credit_of(int count) {
  return kGeneration << kGenerationShift | static_cast<uint64_t>(count);
}
inline uint64_t hash_of(int n, int expert) {
  return n * 40503u + expert * 40503u * 3u + 17;
}

inline float weight(int layer, int expert, int i) {
  return layer * 1000.0f + expert * 10.0f + i % 7;
}
inline float gradient(int n, int expert, int pe, int i) {
  return 1.0f / static_cast<float>(3 + (n * 31 + expert * 7 + pe * 5 + i) % 97);
}
template <class Body>
void for_each_element(const Body& body) {
  for (size_t field = 0; field < kFieldAt.size(); ++field)
    for (int i = kFieldAt[field]; i < kFieldAt[field] + kFieldSize[field]; ++i) body(i);
}

}  // namespace relibra::replica_sync
