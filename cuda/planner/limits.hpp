// What the replicas of a node may be: not too small, not too many of one expert or from one rank.
#pragma once

#include <cstdint>
#include <limits>

#include "planner/site_flow.hpp"

namespace relibra {

struct ReplicaLimits {
  int64_t min_rows = 1;                                       // of a replica
  int64_t max_fan_out = std::numeric_limits<int64_t>::max();  // replicas of an expert
  int64_t max_pushes = std::numeric_limits<int64_t>::max();   // replicas sent by a rank

  bool active() const {
    const auto none = std::numeric_limits<int64_t>::max();
    return min_rows > 1 || max_fan_out < none || max_pushes < none;
  }
};

// Takes away replicas until all limits hold, smallest first, and splits rows exactly over those
// that are left. The flow holds the node's replicas, in and out.
void respect_limits(const ReplicaLimits& limits, SiteFlow& flow);

// Replicas under the limits with a smaller largest rank than that of the flow's, by bisection down
// to `goal` or to one part in 500. The flow holds the node's replicas, in and out.
void solve_limited(const ReplicaLimits& limits, int64_t goal, SiteFlow& flow);

}  // namespace relibra
