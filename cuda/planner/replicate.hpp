// Intra-batch replication of one (micro-batch, layer) over all nodes.
#pragma once

#include <cstdint>
#include <vector>

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

 private:
  int64_t solve_nodes(const int64_t* totals, const int32_t* home_slot_expert);
  NodeInstance instance(int node) const;

  ReplicateShape shape_;
  const NodeRanks& nodes_;
  NodeSolver solver_;
  std::vector<int64_t> rows_;        // [G][H], nodes one after the other
  std::vector<int64_t> first_row_;   // [N]
  std::vector<int64_t> bound_;       // [N]
  std::vector<int32_t> order_;       // nodes by falling bound
  std::vector<NodeResult> results_;  // [N]
};

}  // namespace relibra
