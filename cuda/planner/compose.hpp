// Composition of micro-batches: which samples of one optimizer step share a micro-batch.
//
// Minimises the sum over columns (expert parallel groups in micro-batches) and features (see
// compose_features.hpp) of the squared rows, whose least value makes all columns alike, by the best
// swap or move of each unit in turn. The scores of all swaps of a unit come from inner products, at
// O(1) each: with y centred vectors, c their mean, L_m the sum of column m and S[m][i] = y_i . L_m,
//   half the change of the swap p <-> q = S[a][q] - S[b][q] - S[a][p] + S[b][p] + |y_p - y_q|^2
// for p in column a and q in column b. Integers throughout: the same result on every machine and
// for every number of threads.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/compose_bins.hpp"

namespace relibra {

struct ComposeOptions {
  int max_passes = 16;
  // Stop after a pass that gained less than this part of what is left above equal columns.
  double least_gain = 0.01;
  // Units searched together; inner products take 4 bytes a pair.
  int block = 2048;
  uint64_t seed = 0;  // of the blocks
  int num_threads = 0;
  // Rescore everything after each pass; throw std::logic_error on a difference.
  bool check = false;
};

struct ComposeResult {
  Misfit misfit;                // limit kNone: composed
  std::vector<int32_t> bin_of;  // [samples]
  int64_t num_swaps = 0, num_moves = 0, num_passes = 0;
  // How far columns are from equal ones: root mean square of the difference, relative to that of
  // the mean column.
  double spread_before = 0, spread_after = 0;
};

// start: [samples], a bin each, or null to pack from scratch. A start must fit the budgets.
ComposeResult compose(const ComposeProblem& problem, const FeatureMap& map, const int32_t* start,
                      const ComposeOptions& options);

}  // namespace relibra
