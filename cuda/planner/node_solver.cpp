#include "planner/node_solver.hpp"

#include <algorithm>
#include <limits>

#include "common/random.hpp"

namespace relibra {
namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
constexpr int64_t kManyRows = 4096;
constexpr int kNumPlainStyles = 8;  // combinations of the flags of a chained GreedyStyle

// With one slot a rank and no slack, donors that only give need gaps that add up to each surplus to
// the row. With many rows that does not happen by chance.
bool donors_need_luck(const NodeInstance& instance, int64_t goal) {
  return instance.replica_slots == 1 && goal == node_lower_bound(instance) && goal >= kManyRows;
}

void load_result(const NodeInstance& instance, const NodeResult& result, SiteFlow& flow) {
  flow.reset(instance);
  for (const Replica& one : result.replicas) flow.add(one.expert, one.rank, one.rows);
}

}  // namespace

int64_t node_lower_bound(const NodeInstance& instance) {
  int64_t sum = 0;
  for (int e = 0; e < instance.num_experts(); ++e) sum += instance.rows[e];
  if (!instance.fixed) return (sum + instance.num_ranks - 1) / instance.num_ranks;
  int64_t most = 0;
  for (int i = 0; i < instance.num_ranks; ++i) {
    sum += instance.fixed[i];
    most = std::max(most, instance.fixed[i]);
  }
  return std::max(most, (sum + instance.num_ranks - 1) / instance.num_ranks);
}

// Stores a better state; returns whether the search is over.
bool NodeSolver::keep_better(SiteFlow& flow, int64_t largest, int64_t goal, NodeResult& result) {
  if (largest < result.largest) {
    result.largest = largest;
    result.replicas = flow.replicas();
  }
  return result.largest <= goal;
}

void NodeSolver::solve(const NodeInstance& instance, int64_t goal, NodeResult& result) {
  goal = std::max(goal, node_lower_bound(instance));
  flow_.reset(instance);
  result.replicas.clear();
  result.largest = flow_.largest();
  if (result.largest <= goal || instance.replica_slots == 0) return;

  GreedyStyle style;
  style.chained = false;  // fewest pushes when it is enough
  if (!donors_need_luck(instance, goal)) {
    greedy_sites(flow_, goal, style);
    if (keep_better(flow_, flow_.largest(), goal, result)) return;
  }

  style.chained = true;
  const int num_starts = kNumPlainStyles + effort_.noisy_starts;
  for (int i = 0; i < num_starts; ++i) {
    const bool noisy = i >= kNumPlainStyles;
    const uint64_t bits = noisy ? mix64(uint64_t(goal) + uint64_t(i)) : uint64_t(i);
    style.relay_first = (bits & 1) != 0;
    style.smallest_gap_first = (bits & 2) != 0;
    style.hottest_first = (bits & 4) != 0;
    style.noise = noisy ? 0.3 + 0.1 * double(bits >> 3 & 7) : 0;
    style.seed = bits;
    flow_.reset(instance);
    greedy_sites(flow_, goal, style);
    if (keep_better(flow_, flow_.largest(), goal, result)) return;
    // The exact split of these sites may be better than what the greedy pass made of them.
    if (keep_better(flow_, flow_.balance(goal, result.largest), goal, result)) return;
  }
  if (instance.replica_slots >= instance.home_slots) {
    flow_.reset(instance);
    alias_sites(flow_, goal);
    keep_better(flow_, flow_.largest(), goal, result);
    return;
  }
  load_result(instance, result, flow_);
  int64_t largest = flow_.balance(goal, kNever);
  while (largest > goal && change_one_site(flow_, goal, largest)) {
  }
  keep_better(flow_, largest, goal, result);
}

void NodeSolver::solve_donor_only(const NodeInstance& instance, NodeResult& result) {
  flow_.reset(instance);
  result.replicas.clear();
  result.largest = flow_.largest();
  if (instance.replica_slots == 0) return;
  GreedyStyle style;
  style.chained = false;
  int64_t low = node_lower_bound(instance);
  while (low < result.largest) {
    const int64_t target = low + (result.largest - low) / 2;
    flow_.reset(instance);
    if (greedy_sites(flow_, target, style)) {
      result.largest = flow_.largest();
      result.replicas = flow_.replicas();
    } else {
      low = target + 1;
    }
  }
}

bool NodeSolver::change_one_site(SiteFlow& flow, int64_t goal, int64_t& largest) {
  if (flow.bottleneck().empty()) return false;
  list_changes(flow, largest);
  const auto before = [](const Change& a, const Change& b) {
    if (a.promise != b.promise) return a.promise > b.promise;
    if (a.expert != b.expert) return a.expert < b.expert;
    return a.rank != b.rank ? a.rank < b.rank : a.replaced < b.replaced;
  };
  const int tried = std::min(effort_.sites_tried, int(changes_.size()));
  std::partial_sort(changes_.begin(), changes_.begin() + tried, changes_.end(), before);
  for (int i = 0; i < tried; ++i) {
    const Change& change = changes_[i];
    trial_.copy_rows(flow);
    if (change.replaced >= 0) trial_.remove(change.replaced);
    trial_.add(change.expert, change.rank, 0);
    const int64_t found = trial_.balance(goal, largest);
    if (found >= largest) continue;
    std::swap(flow, trial_);
    largest = found;
    return true;
  }
  return false;
}

// New sites on ranks outside the bottleneck for experts with rows inside; most promising is what
// could flow through the site, less what the replaced replica sends back inside.
void NodeSolver::list_changes(const SiteFlow& flow, int64_t largest) {
  const NodeInstance& instance = flow.instance();
  const std::vector<char>& inside = flow.bottleneck();
  inside_.assign(instance.num_experts(), 0);
  for (int e = 0; e < instance.num_experts(); ++e)
    if (inside[instance.home(e)]) inside_[e] = flow.rest(e);
  for (const Replica& one : flow.replicas())
    if (inside[one.rank]) inside_[one.expert] += one.rows;
  changes_.clear();
  for (int rank = 0; rank < instance.num_ranks; ++rank) {
    if (inside[rank]) continue;
    const int64_t room = largest - flow.load(rank);
    for (int e = 0; e < instance.num_experts(); ++e) {
      if (inside_[e] == 0 || flow.hosts(e, rank)) continue;
      if (flow.free_slots(rank) > 0) {
        changes_.push_back({std::min(inside_[e], room), e, rank, -1});
        continue;
      }
      for (int k = 0; k < int(flow.replicas().size()); ++k) {
        const Replica& old = flow.replicas()[k];
        if (old.rank != rank) continue;
        const int64_t back = inside[instance.home(old.expert)] ? old.rows : 0;
        changes_.push_back({std::min(inside_[e], room + old.rows) - back, e, rank, k});
      }
    }
  }
}

void NodeSolver::use_fewer(const NodeInstance& instance, int64_t target, NodeResult& result) {
  if (result.replicas.empty()) return;
  load_result(instance, result, flow_);
  prune(flow_, target);
  NodeResult fewest{flow_.largest(), flow_.replicas()};
  // Where the mean is below the target other sites may need less: donors that only give.
  const bool has_slack = node_lower_bound(instance) < target;
  for (int i = 0; has_slack && i < 4; ++i) {
    GreedyStyle style;
    style.chained = false;
    style.smallest_gap_first = (i & 1) != 0;
    style.hottest_first = (i & 2) != 0;
    flow_.reset(instance);
    if (!greedy_sites(flow_, target, style)) continue;
    prune(flow_, target);
    if (flow_.replicas().size() < fewest.replicas.size())
      fewest = {flow_.largest(), flow_.replicas()};
  }
  result = std::move(fewest);
}

// Takes away replicas that the target does not need, fewest rows first.
void NodeSolver::prune(SiteFlow& flow, int64_t target) {
  std::vector<Replica> candidates = flow.replicas();
  std::sort(candidates.begin(), candidates.end(), [](const Replica& a, const Replica& b) {
    if (a.rows != b.rows) return a.rows < b.rows;
    return a.rank != b.rank ? a.rank < b.rank : a.expert < b.expert;
  });
  // What the ranks could execute at most if every row were theirs to choose, by the target.
  const NodeInstance& instance = flow.instance();
  could_.assign(instance.num_ranks, 0);
  int64_t sum = 0;
  for (int e = 0; e < instance.num_experts(); ++e) could_[instance.home(e)] += instance.rows[e];
  for (const Replica& one : candidates) could_[one.rank] += instance.rows[one.expert];
  for (int e = 0; e < instance.num_experts(); ++e) sum += instance.rows[e];
  int64_t capacity = 0;
  for (const int64_t rows : could_) capacity += std::min(rows, target);
  for (const Replica& candidate : candidates) {
    int64_t& could = could_[candidate.rank];
    const int64_t without = could - instance.rows[candidate.expert];
    const int64_t left = capacity - std::min(could, target) + std::min(without, target);
    if (left < sum) continue;
    int k = 0;  // numbers change as replicas go
    while (flow.replicas()[k].rank != candidate.rank ||
           flow.replicas()[k].expert != candidate.expert)
      ++k;
    if (flow.replicas()[k].rows == 0) {
      flow.remove(k);
    } else {
      trial_.copy_rows(flow);
      trial_.remove(k);
      if (trial_.balance(target, target + 1) > target) continue;
      std::swap(flow, trial_);
    }
    could = without;
    capacity = left;
  }
}

}  // namespace relibra
