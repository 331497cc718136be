// Copies of tokens that cross each link in one use of a layer, de-duplicated as dispatch does it.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/split.hpp"

namespace relibra {

// Where copies may go. Arrays belong to the caller.
struct CopyRoutes {
  int num_nodes;                // N
  bool two_hop;                 // once to every other node, else once to every rank
  const int32_t* rank_to_node;  // [G]
  const int32_t* gateway;       // [G][N], rank where copies of a source enter a node (two_hop)
};

// Links of a rank, in the order of the output rows.
enum CopyLink { kRdmaOut, kRdmaIn, kNvlinkOut, kNvlinkIn, kReceived, kNumCopyLinks };

// Expected copies when the choices of a token are independent given its source; every row of its
// own when distinct is false. top_k: rows of a token. out: [kNumCopyLinks][G], overwritten.
void expected_copies(const SplitShape& shape, const SplitUse& use, const SplitRanks& ranks,
                     const CopyRoutes& routes, int top_k, bool distinct, double* out);

// Ids of one use. Source g has the tokens first[g]..first[g+1]-1, each `repeat` times in a row;
// those of token t start at ids + t * stride. -1 takes no part.
struct TokenIds {
  const int16_t* ids;
  int64_t stride;
  const int64_t* first;  // [G+1]
  int top_k;             // K
  int64_t repeat;        // at least 1
};

// Exact copies. Throws std::invalid_argument when the ids are not those of the use's rows.
void count_copies(const SplitShape& shape, const SplitUse& use, const SplitRanks& ranks,
                  const CopyRoutes& routes, const TokenIds& tokens, double* out);

}  // namespace relibra
