// Intra-batch replication of one (micro-batch, layer) over all nodes.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/limits.hpp"
#include "planner/node_solver.hpp"

namespace relibra {

// Ranks of every node, ascending.
class NodeRanks {
 public:
  NodeRanks(const int32_t* rank_to_node, int num_ranks);

  int num_nodes() const { return int(first_.size()) - 1; }
  int num_ranks() const { return int(ranks_.size()); }
  int size(int node) const { return first_[node + 1] - first_[node]; }
  int rank(int node, int i) const { return ranks_[first_[node] + i]; }

 private:
  std::vector<int32_t> first_, ranks_;
};

struct ReplicateShape {
  int num_experts;    // E
  int home_slots;     // H
  int replica_slots;  // S
  double tolerance;   // relative excess over the reachable maximum, given up for fewer replicas
  bool donor_only = false;  // the baseline: every node by NodeSolver::solve_donor_only
  ReplicaLimits limits = {};
};

// Plans one use after another; keeps its buffers. Not for use by two threads at a time.
class Replicator {
 public:
  Replicator(const ReplicateShape& shape, const NodeRanks& nodes, const SolverEffort& effort = {})
      : shape_(shape), nodes_(nodes), solver_(effort) {}

  // The largest rank over all nodes, C*, is made as small as possible; then every node uses few
  // replicas under it.
  //
  // totals: [E] rows of each expert. home_slot_expert: [G][H], -1 = filler.
  // replica_slot_expert: [G][S] out, -1 = free. slot_rows: [G][H+S] out. Returns C*.
  int64_t plan(const int64_t* totals, const int32_t* home_slot_expert, int32_t* replica_slot_expert,
               int64_t* slot_rows);

  // The same from rows by slot, for experts with static copies: shape.home_slots counts home and
  // static slots, b, and no expert is twice in the base slots of a node.
  //
  // base_rows, base_slot_expert: [G][b], 0 and -1 where free. slot_rows: [G][b+S] out. fixed: [G],
  // rows of every rank beside those; null for none.
  int64_t plan_slots(const int64_t* base_rows, const int32_t* base_slot_expert,
                     int32_t* replica_slot_expert, int64_t* slot_rows,
                     const int64_t* fixed = nullptr);

 private:
  template <typename RowsOf>
  void load_rows(const RowsOf& rows_of);
  int64_t solve_nodes();
  int64_t plan_loaded(const int32_t* home_slot_expert, int32_t* replica_slot_expert,
                      int64_t* slot_rows);
  NodeInstance instance(int node) const;
  void solve_node(int node, int64_t goal);
  void use_fewer(int node, int64_t target);
  void respect_limits_of(int node, int64_t goal, NodeResult& result);

  ReplicateShape shape_;
  const NodeRanks& nodes_;
  NodeSolver solver_;
  SiteFlow flow_;                    // for the limits
  std::vector<int64_t> rows_;        // [G][H], nodes one after the other
  std::vector<int64_t> fixed_;       // [G], likewise, or empty
  std::vector<int64_t> first_row_;   // [N]
  std::vector<int64_t> bound_;       // [N]
  std::vector<int32_t> order_;       // nodes by falling bound
  std::vector<NodeResult> results_;  // [N]
};

}  // namespace relibra
