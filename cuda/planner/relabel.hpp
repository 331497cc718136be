// Free renaming of nodes and ranks, so that few experts move.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/replicate.hpp"

namespace relibra {

// Maximum-weight perfect matching of n rows to n columns (Hungarian method, O(n^3), exact).
// weight: [n][n]. Returns the column of each row; ties are broken by position, so the result is a
// function of the weights.
std::vector<int32_t> match(const std::vector<int64_t>& weight, int n);

// Renames nodes (of equal size) and ranks inside nodes of `layout` so that as many experts as
// possible keep their home rank of `base`; then experts that stay keep their slot. Loads do not
// change. across_nodes: any rank may take any rank's name (there are no replicas).
//
// base, layout: [G][H], -1 = filler; layout in and out.
void relabel(const NodeRanks& nodes, int home_slots, int num_experts, bool across_nodes,
             const int32_t* base, int32_t* layout);

}  // namespace relibra
