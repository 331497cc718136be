#include "planner/limits.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "common/random.hpp"
#include "planner/node_greedy.hpp"

namespace relibra {
namespace {

// The smallest replica of those that break a limit, or -1.
int smallest_offender(const ReplicaLimits& limits, const SiteFlow& flow) {
  const NodeInstance& instance = flow.instance();
  std::vector<int64_t> fan_out(instance.num_experts(), 0), pushes(instance.num_ranks, 0);
  for (const Replica& one : flow.replicas()) {
    ++fan_out[one.expert];
    ++pushes[instance.home(one.expert)];
  }
  int worst = -1;
  for (int k = 0; k < int(flow.replicas().size()); ++k) {
    const Replica& one = flow.replicas()[k];
    if (one.rows >= limits.min_rows && fan_out[one.expert] <= limits.max_fan_out &&
        pushes[instance.home(one.expert)] <= limits.max_pushes)
      continue;
    if (worst >= 0) {
      const Replica& other = flow.replicas()[worst];
      if (other.rows < one.rows) continue;
      if (other.rows == one.rows && other.rank < one.rank) continue;
      if (other.rows == one.rows && other.rank == one.rank && other.expert < one.expert) continue;
    }
    worst = k;
  }
  return worst;
}

constexpr int kPlainStyles = 8, kNoisyStyles = 4;
constexpr int64_t kPrecision = 500;

// Greedy passes that start without replicas, until one stays at or below the target.
bool reach(const ReplicaLimits& limits, int64_t target, const NodeInstance& instance,
           SiteFlow& trial) {
  GreedyStyle style;
  style.limits = limits;
  for (int i = -1; i < kPlainStyles + kNoisyStyles; ++i) {
    const uint64_t bits = i < kPlainStyles ? uint64_t(i) : mix64(uint64_t(target) + uint64_t(i));
    style.chained = i >= 0;
    style.relay_first = (bits & 1) != 0;
    style.smallest_gap_first = (bits & 2) != 0;
    style.hottest_first = (bits & 4) != 0;
    style.noise = i < kPlainStyles ? 0 : 0.5;
    style.seed = bits;
    trial.reset(instance);
    if (greedy_sites(trial, target, style)) return true;
  }
  return false;
}

}  // namespace

void solve_limited(const ReplicaLimits& limits, int64_t goal, SiteFlow& flow) {
  SiteFlow trial;
  int64_t low = goal, high = flow.largest();
  while (high - low > low / kPrecision) {
    const int64_t target = low + (high - low) / 2;
    if (reach(limits, target, flow.instance(), trial)) {
      std::swap(flow, trial);
      high = flow.largest();
    } else {
      low = target + 1;
    }
  }
}

void respect_limits(const ReplicaLimits& limits, SiteFlow& flow) {
  for (int k = smallest_offender(limits, flow); k >= 0; k = smallest_offender(limits, flow)) {
    flow.remove(k);
    flow.balance(0, std::numeric_limits<int64_t>::max());
  }
}

}  // namespace relibra
