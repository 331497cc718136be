// Which experts get a static copy on which other node, for all micro-batches of a layer.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/place.hpp"
#include "planner/static_split.hpp"

namespace relibra {

constexpr int kMaxStaticNodes = 64;  // a set of nodes is one word

struct StaticOptions {
  int copies_per_node = 2;   // at most so many copies on a node
  int64_t proposals = 2000;  // changes of one copy that are tried after the greedy choice
  int64_t min_gain = 0;      // rows of the fullest rank, over all columns, that a copy must save
  uint64_t seed = 0;
};

// Copies that make the sum over columns of C (StaticSplit) small, in order of (node, expert).
//
// C of a column is the largest average a rank over sets of nodes, counting the experts that cannot
// leave the set; a copy takes its expert out of every set that has no node of the copy. All sets
// are kept for up to 8 nodes, else small ones, large ones and those that turn out to be the
// bottleneck of a column.
//
// home_node: [E]. node_size: [N], at most kMaxStaticNodes.
std::vector<StaticCopy> choose_copies(const LayerLoads& loads, const int32_t* home_node,
                                      const std::vector<int32_t>& node_size,
                                      const StaticOptions& options);

// Gives every copy a rank of its node: the one that leaves the fullest rank of the node smallest,
// summed over columns. static_slot_expert: [G][X] out, -1 = free.
void place_copies(const LayerLoads& loads, const int32_t* home_slot_expert, int home_slots,
                  const NodeRanks& nodes, const std::vector<StaticCopy>& copies, int static_slots,
                  int32_t* static_slot_expert);

}  // namespace relibra
