// Checked arguments that several bindings share.
#pragma once

#include "bindings/arrays.hpp"
#include "planner/replicate.hpp"

namespace relibra {

// Rows of one column that an expert, a bin or a node may have: sums of them stay exact in int64 and
// in the doubles of the search.
constexpr int64_t kMaxLoad = int64_t(1) << 44;

inline NodeRanks node_ranks(const py::array& rank_to_node_G) {
  const int32_t* node = values<int32_t>(rank_to_node_G, "rank_to_node_G", {-1});
  const auto G = rank_to_node_G.shape(0);
  if (G < 1) throw py::value_error("rank_to_node_G: need at least one rank, got none");
  check_range("rank_to_node_G", node, G, 0, G - 1);
  return NodeRanks(node, int(G));
}

}  // namespace relibra
