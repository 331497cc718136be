// Intra-batch replication inside one node: the smallest largest rank, then the fewest replicas.
//
//   min C  s.t.  every expert's rows are at home or in its replicas; no rank executes more than C;
//                at most S replicas a rank, never at home, never twice on a rank
#pragma once

#include <cstdint>
#include <vector>

#include "planner/node_greedy.hpp"
#include "planner/site_flow.hpp"

namespace relibra {

// How long the solver looks; it stops earlier at the goal.
struct SolverEffort {
  int noisy_starts = 12;  // greedy passes with noise after the plain ones
  int sites_tried = 48;   // changes of one site that are evaluated at each bottleneck
};

struct NodeResult {
  int64_t largest = 0;  // rows of the fullest rank
  std::vector<Replica> replicas;
};

// ceil(sum of rows / P), or the most fixed rows: no split has a smaller maximum.
int64_t node_lower_bound(const NodeInstance& instance);

// Keeps its buffers between instances. Not for use by two threads at a time.
class NodeSolver {
 public:
  explicit NodeSolver(const SolverEffort& effort = {}) : effort_(effort) {}

  // Sites and exact split with a small maximum; stops when it is at most `goal` (raised to the
  // lower bound). With S >= H the goal is always reached. Deterministic in (instance, goal).
  void solve(const NodeInstance& instance, int64_t goal, NodeResult& result);

  // The smallest target, by bisection, for which ranks above it can give what they have too much to
  // ranks below it, none of which gives on: what published planners do with one slot a rank.
  void solve_donor_only(const NodeInstance& instance, NodeResult& result);

  // Makes do with fewer replicas while every rank stays at most `target` >= result.largest.
  void use_fewer(const NodeInstance& instance, int64_t target, NodeResult& result);

 private:
  bool keep_better(SiteFlow& flow, int64_t largest, int64_t goal, NodeResult& result);
  bool change_one_site(SiteFlow& flow, int64_t goal, int64_t& largest);
  void prune(SiteFlow& flow, int64_t target);
  void list_changes(const SiteFlow& flow, int64_t largest);

  // A new replica of an expert on a rank, in a free slot (replaced = -1) or in place of another.
  struct Change {
    int64_t promise;
    int32_t expert, rank, replaced;
  };

  SolverEffort effort_;
  SiteFlow flow_, trial_;
  std::vector<Change> changes_;
  std::vector<int64_t> inside_;  // rows of each expert inside the bottleneck
  std::vector<int64_t> could_;   // rows that each rank could execute at most
};

}  // namespace relibra
