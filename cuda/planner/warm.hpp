// Layouts near the one that a batch starts from, when moving an expert has a price.
#pragma once

#include <cstdint>

#include "planner/place.hpp"

namespace relibra {

struct WarmProblem {
  LayerLoads loads;
  int home_slots;        // H
  int replica_slots;     // S
  int64_t move_cost;     // rows of the fullest rank, summed over columns, that a move must save
  int64_t solver_calls;  // budget of the last touch inside nodes
};

// Searches from a layout: swaps of experts between nodes (annealed and plain), newcomers onto the
// free places of their node, then exchanges inside nodes; every expert away from its rank in `base`
// costs move_cost. With nodes of one rank each this is the search by rank.
//
// base: [G][H], -1 = filler. layout: [G][H], out.
void warm_layout(const WarmProblem& problem, const NodeRanks& nodes, const AnnealOptions& options,
                 const int32_t* base, int32_t* layout);

}  // namespace relibra
