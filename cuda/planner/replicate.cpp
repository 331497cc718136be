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
  return {nodes_.size(node), shape_.home_slots, shape_.replica_slots, &rows_[first_row_[node]]};
}

// Fills results_; returns what every node may use: C*, or the bound with the tolerance if larger.
int64_t Replicator::solve_nodes(const int64_t* totals, const int32_t* home_slot_expert) {
  const int N = nodes_.num_nodes(), H = shape_.home_slots;
  rows_.resize(int64_t(nodes_.num_ranks()) * H);
  first_row_.resize(N);
  bound_.resize(N);
  results_.resize(N);
  int64_t at = 0;
  for (int node = 0; node < N; ++node) {
    first_row_[node] = at;
    for (int i = 0; i < nodes_.size(node); ++i)
      for (int h = 0; h < H; ++h) {
        const int32_t expert = home_slot_expert[int64_t(nodes_.rank(node, i)) * H + h];
        rows_[at++] = expert < 0 ? 0 : totals[expert];
      }
  }
  for (int node = 0; node < N; ++node) bound_[node] = node_lower_bound(instance(node));
  order_.resize(N);
  std::iota(order_.begin(), order_.end(), 0);
  std::stable_sort(order_.begin(), order_.end(),
                   [this](int a, int b) { return bound_[a] > bound_[b]; });
  // The fullest node first: the others only have to stay below what it reaches.
  auto largest = int64_t(double(bound_[order_[0]]) * (1 + shape_.tolerance));
  for (const int node : order_) {
    solver_.solve(instance(node), largest, results_[node]);
    largest = std::max(largest, results_[node].largest);
  }
  return largest;
}

int64_t Replicator::plan(const int64_t* totals, const int32_t* home_slot_expert,
                         int32_t* replica_slot_expert, int64_t* slot_rows) {
  const int64_t target = solve_nodes(totals, home_slot_expert);
  const int H = shape_.home_slots, S = shape_.replica_slots, n = H + S;
  std::fill(replica_slot_expert, replica_slot_expert + int64_t(nodes_.num_ranks()) * S, -1);
  std::fill(slot_rows, slot_rows + int64_t(nodes_.num_ranks()) * n, 0);
  int64_t largest = 0;
  for (int node = 0; node < nodes_.num_nodes(); ++node) {
    const NodeInstance one = instance(node);
    NodeResult& result = results_[node];
    solver_.use_fewer(one, target, result);
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
