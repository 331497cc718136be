// The exact split of rows over copies whose places are given: what baselines need that choose the
// places in another way.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/site_flow.hpp"

namespace relibra {

struct SiteShape {
  int num_experts;     // E
  int num_ranks;       // G
  int slots_per_rank;  // n
};

// Splits one use after another; keeps its buffers. Not for use by two threads at a time.
class SiteSplitter {
 public:
  explicit SiteSplitter(const SiteShape& shape) : shape_(shape) {}

  // The smallest maximum over all ranks. Every copy of an expert may take any of its rows; a second
  // copy on the same rank gets none.
  //
  // totals: [E]. slot_expert: [G][n], -1 = none; every expert with rows has a slot. slot_rows:
  // [G][n] out. Returns the rows of the fullest rank; throws std::invalid_argument when an expert
  // with rows has no slot.
  int64_t split(const int64_t* totals, const int32_t* slot_expert, int64_t* slot_rows);

 private:
  SiteShape shape_;
  SiteFlow flow_;
  std::vector<int32_t> first_slot_;  // [E], the lowest slot of each expert, -1 = none
  std::vector<int64_t> rows_;        // [G][n], all rows of an expert in its first slot
};

}  // namespace relibra
