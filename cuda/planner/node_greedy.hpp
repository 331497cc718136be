// Greedy replica sites for a target load: fast starts for the node solver.
#pragma once

#include <cstdint>

#include "planner/limits.hpp"
#include "planner/site_flow.hpp"

namespace relibra {

// How a greedy pass chooses. Every combination wins on some instances.
struct GreedyStyle {
  // A rank above the target may also receive, and a donor may be drained below the target and be
  // refilled from its own slot ("chained" transfers). Without it donors only give.
  bool chained = true;
  bool smallest_gap_first = false;
  bool relay_first = false;    // hand the surplus on before draining a donor too far
  bool hottest_first = false;  // take the expert with most rows, not the smallest that is enough
  double noise = 0;            // relative jitter of every choice
  uint64_t seed = 0;
  ReplicaLimits limits = {};  // every replica that a pass makes keeps them
};

// Moves rows from the home state of `flow` until every rank is at most `target` or nothing helps.
// Returns whether the target was reached.
bool greedy_sites(SiteFlow& flow, int64_t target, const GreedyStyle& style);

// With S >= H slots every rank can be filled from the experts of a single donor (alias method), so
// any target of at least the mean is reached.
void alias_sites(SiteFlow& flow, int64_t target);

}  // namespace relibra
