#include "planner/place.hpp"

#include <algorithm>

#include "common/random.hpp"

namespace relibra {

std::vector<int32_t> rank_capacities(const NodeRanks& nodes, int num_experts, int home_slots) {
  const int G = nodes.num_ranks(), N = nodes.num_nodes();
  const int64_t fillers = int64_t(G) * home_slots - num_experts;
  std::vector<int32_t> capacity(G, home_slots);
  // Node shares of the fillers by cumulative rounding: each gets its part to within one.
  int64_t ranks_before = 0, placed = 0;
  for (int node = 0; node < N; ++node) {
    ranks_before += nodes.size(node);
    const int64_t until_here = fillers * ranks_before / G;
    for (int i = 0; placed < until_here; ++placed, ++i)
      --capacity[nodes.rank(node, nodes.size(node) - 1 - i % nodes.size(node))];
  }
  return capacity;
}

void place_in_nodes(const LayerLoads& loads, const int32_t* node_of, const NodeRanks& nodes,
                    int home_slots, const AnnealOptions& options, int32_t* home_slot_expert) {
  const int C = loads.num_columns;
  std::fill(home_slot_expert, home_slot_expert + int64_t(nodes.num_ranks()) * home_slots, -1);
  std::vector<int32_t> members, rank_of;
  std::vector<int64_t> node_load;
  for (int node = 0; node < nodes.num_nodes(); ++node) {
    const int P = nodes.size(node);
    members.clear();
    for (int e = 0; e < loads.num_experts; ++e)
      if (node_of[e] == node) members.push_back(e);
    const int count = int(members.size());
    node_load.resize(size_t(count) * C);
    for (int i = 0; i < count; ++i)
      std::copy_n(loads.load + int64_t(members[i]) * C, C, &node_load[size_t(i) * C]);
    // Filler slots of the node lie on its last ranks.
    std::vector<int32_t> capacity(P, home_slots);
    for (int i = 0; i < P * home_slots - count; ++i) --capacity[P - 1 - i % P];
    const BinProblem problem{count, P, C, node_load.data(), capacity, std::vector<int32_t>(P, 1)};
    rank_of.resize(count);
    lpt_assign(problem, rank_of.data());
    if (home_slots > 1) {
      AnnealOptions share = options;
      share.proposals = options.proposals * count / std::max(1, loads.num_experts);
      share.seed = mix64(options.seed + uint64_t(node));
      anneal(problem, share, rank_of.data());
      descend(problem, rank_of.data());
    }
    std::vector<int32_t> next(P, 0);
    for (int i = 0; i < count; ++i) {
      const int rank = rank_of[i];
      home_slot_expert[int64_t(nodes.rank(node, rank)) * home_slots + next[rank]++] = members[i];
    }
  }
}

}  // namespace relibra
