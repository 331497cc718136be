// Split of each expert's rows by source rank: part of the plan file format.
#pragma once

#include <cstdint>
#include <vector>

namespace relibra {

// Sizes shared by every use of a layer in a plan.
struct SplitShape {
  int num_ranks;       // G
  int num_experts;     // E
  int slots_per_rank;  // n
};

// One (micro-batch, layer). Arrays belong to the caller.
struct SplitUse {
  const int32_t* rows;         // [G][E], rows that source rank g has for expert e
  const int32_t* slot_expert;  // [G*n], -1 = none
  const int64_t* slot_rows;    // [G*n], rows executed in each slot
};

// Where the ranks are. Arrays belong to the caller.
struct SplitRanks {
  const int32_t* rail;  // [G]
  const int32_t* node;  // [G]; null when no expert has copies on several nodes
};

// One entry of the quota list: only experts with a copy, only positive rows.
struct SplitEntry {
  int32_t source;
  int32_t slot;
  int32_t rows;
};

// Rows by the distance between source and executing rank.
struct Traffic {
  int64_t local = 0;   // same rank
  int64_t nvlink = 0;  // same node
  int64_t rdma = 0;    // another node
};

// Throws std::invalid_argument when the slots of an expert do not execute exactly its rows.
//
// quota: [G][G*n], every entry is written.
void split_use(const SplitShape& shape, const SplitUse& use, const SplitRanks& ranks,
               int32_t* quota);

// Entries ordered by (source, slot).
std::vector<SplitEntry> split_copied(const SplitShape& shape, const SplitUse& use,
                                     const SplitRanks& ranks);

// ranks.node: not null.
Traffic count_traffic(const SplitShape& shape, const SplitUse& use, const SplitRanks& ranks);

}  // namespace relibra
