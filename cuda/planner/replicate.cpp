#include "planner/replicate.hpp"

#include <algorithm>
#include <numeric>

namespace relibra {

NodeRanks::NodeRanks(const int32_t* rank_to_node, int num_ranks) {
  const int num_nodes = 1 + *std::max_element(rank_to_node, rank_to_node + num_ranks);
  first_.assign(num_nodes + 1, 0);
  for (int g = 0; g < num_ranks; ++g) ++first_[rank_to_node[g] + 1];
  std::partial_sum(first_.begin(), first_.end(), first_.begin());
  std::vector<int32_t> next(first_.begin(), first_.end() - 1);
  ranks_.resize(num_ranks);
  for (int g = 0; g < num_ranks; ++g) ranks_[next[rank_to_node[g]]++] = g;
}

NodeInstance Replicator::instance(int node) const {
  const int64_t first = first_row_[node];
  return {nodes_.size(node), shape_.home_slots, shape_.replica_slots, &rows_[first],
          fixed_.empty() ? nullptr : &fixed_[first / shape_.home_slots]};
}

void Replicator::respect_limits_of(int node, int64_t goal, NodeResult& result) {
  if (!shape_.limits.active() || result.replicas.empty()) return;
  const NodeInstance one = instance(node);
  flow_.reset(one);
  for (const Replica& replica : result.replicas)
    flow_.add(replica.expert, replica.rank, replica.rows);
  respect_limits(shape_.limits, flow_);
  if (flow_.largest() > goal) solve_limited(shape_.limits, goal, flow_);
  result.largest = flow_.largest();
  result.replicas = flow_.replicas();
}

void Replicator::solve_node(int node, int64_t goal) {
  solver_.solve(instance(node), goal, results_[node]);
  respect_limits_of(node, std::max(goal, bound_[node]), results_[node]);
}

void Replicator::use_fewer(int node, int64_t target) {
  NodeResult fewer = results_[node];
  solver_.use_fewer(instance(node), target, fewer);
  respect_limits_of(node, target, fewer);
  if (fewer.largest <= target) results_[node] = std::move(fewer);
}

// Rows of every base slot, nodes one after the other.
template <typename RowsOf>
void Replicator::load_rows(const RowsOf& rows_of) {
  const int N = nodes_.num_nodes(), H = shape_.home_slots;
  rows_.resize(int64_t(nodes_.num_ranks()) * H);
  first_row_.resize(N);
  int64_t at = 0;
  for (int node = 0; node < N; ++node) {
    first_row_[node] = at;
    for (int i = 0; i < nodes_.size(node); ++i)
      for (int h = 0; h < H; ++h) rows_[at++] = rows_of(int64_t(nodes_.rank(node, i)) * H + h);
  }
}

// Fills results_; returns what every node may use: C*, or the bound with the tolerance if larger.
int64_t Replicator::solve_nodes() {
  const int N = nodes_.num_nodes();
  bound_.resize(N);
  results_.resize(N);
  if (shape_.donor_only) {
    int64_t largest = 0;
    for (int node = 0; node < N; ++node) {
      solver_.solve_donor_only(instance(node), results_[node]);
      largest = std::max(largest, results_[node].largest);
    }
    return largest;
  }
  for (int node = 0; node < N; ++node) bound_[node] = node_lower_bound(instance(node));
  order_.resize(N);
  std::iota(order_.begin(), order_.end(), 0);
  std::stable_sort(order_.begin(), order_.end(),
                   [this](int a, int b) { return bound_[a] > bound_[b]; });
  // The fullest node first: the others only have to stay below what it reaches.
  auto largest = int64_t(double(bound_[order_[0]]) * (1 + shape_.tolerance));
  for (const int node : order_) {
    solve_node(node, largest);
    largest = std::max(largest, results_[node].largest);
  }
  return largest;
}

int64_t Replicator::plan(const int64_t* totals, const int32_t* home_slot_expert,
                         int32_t* replica_slot_expert, int64_t* slot_rows) {
  fixed_.clear();
  load_rows([=](int64_t slot) {
    return home_slot_expert[slot] < 0 ? 0 : totals[home_slot_expert[slot]];
  });
  return plan_loaded(home_slot_expert, replica_slot_expert, slot_rows);
}

int64_t Replicator::plan_slots(const int64_t* base_rows, const int32_t* base_slot_expert,
                               int32_t* replica_slot_expert, int64_t* slot_rows,
                               const int64_t* fixed) {
  fixed_.clear();
  for (int node = 0; fixed && node < nodes_.num_nodes(); ++node)
    for (int i = 0; i < nodes_.size(node); ++i) fixed_.push_back(fixed[nodes_.rank(node, i)]);
  load_rows([=](int64_t slot) { return base_rows[slot]; });
  return plan_loaded(base_slot_expert, replica_slot_expert, slot_rows);
}

int64_t Replicator::plan_loaded(const int32_t* home_slot_expert, int32_t* replica_slot_expert,
                                int64_t* slot_rows) {
  const int64_t target = solve_nodes();
  const int H = shape_.home_slots, S = shape_.replica_slots, n = H + S;
  std::fill(replica_slot_expert, replica_slot_expert + int64_t(nodes_.num_ranks()) * S, -1);
  std::fill(slot_rows, slot_rows + int64_t(nodes_.num_ranks()) * n, 0);
  int64_t largest = 0;
  for (int node = 0; node < nodes_.num_nodes(); ++node) {
    if (!shape_.donor_only) use_fewer(node, target);
    const NodeInstance one = instance(node);
    NodeResult& result = results_[node];
    largest = std::max(largest, result.largest);
    for (int i = 0; i < one.num_ranks; ++i)
      for (int h = 0; h < H; ++h)
        slot_rows[int64_t(nodes_.rank(node, i)) * n + h] = one.rows[i * H + h];
    const auto expert_of = [&](const Replica& replica) {
      return home_slot_expert[int64_t(nodes_.rank(node, one.home(replica.expert))) * H +
                              replica.expert % H];
    };
    std::sort(result.replicas.begin(), result.replicas.end(),
              [&](const Replica& a, const Replica& b) { return expert_of(a) < expert_of(b); });
    for (const Replica& replica : result.replicas) {
      const int64_t home = nodes_.rank(node, one.home(replica.expert));
      const int64_t rank = nodes_.rank(node, replica.rank);
      int slot = 0;
      while (replica_slot_expert[rank * S + slot] >= 0) ++slot;
      replica_slot_expert[rank * S + slot] = expert_of(replica);
      slot_rows[rank * n + H + slot] = replica.rows;
      slot_rows[home * n + replica.expert % H] -= replica.rows;
    }
  }
  return largest;
}

}  // namespace relibra
