// Experts of each node onto its ranks.
#pragma once

#include <cstdint>

#include "planner/anneal.hpp"
#include "planner/replicate.hpp"

namespace relibra {

// Home slots in use of every rank: H, less one for filler slots, which are spread evenly over the
// nodes and lie on the last ranks of each, at most one a rank while E > (H-1) * G.
std::vector<int32_t> rank_capacities(const NodeRanks& nodes, int num_experts, int home_slots);

struct LayerLoads {
  int num_experts;      // E
  int num_columns;      // C
  const int64_t* load;  // [E][C], weighted rows
};

// Assigns the experts of every node to its ranks, minimising the sum over columns of the fullest
// rank of the node: what is flat at home needs fewer replicas.
//
// node_of: [E]. options.proposals are shared between the nodes. home_slot_expert: [G][H] out,
// experts ascending inside a rank, -1 = filler.
void place_in_nodes(const LayerLoads& loads, const int32_t* node_of, const NodeRanks& nodes,
                    int home_slots, const AnnealOptions& options, int32_t* home_slot_expert);

}  // namespace relibra
