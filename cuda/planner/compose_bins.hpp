// Samples in the cells of micro-batches, within hard budgets.
//
// A bin is one cell in one micro-batch: bin = micro-batch * cells + cell. A column is one expert
// parallel group in one micro-batch, the set of bins whose samples meet at the same experts:
// column = micro-batch * groups + group.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/compose_features.hpp"

namespace relibra {

struct CellBudget {
  int64_t tokens, attention, count;  // at most, in every micro-batch
  int64_t least_count;               // samples, at least
};

struct ComposeProblem {
  int num_samples;
  const int64_t* tokens;     // [samples]; owned by the caller, as the next two
  const int64_t* attention;  // [samples]
  const int32_t* rows;       // [samples][cells of the feature map]
  UnitList units;
  int num_micro_batches;
  std::vector<int32_t> group_of_cell;  // [cells], 0..groups-1, every group has a cell
  std::vector<CellBudget> budget;      // [cells]

  int num_cells() const { return int(budget.size()); }
  int num_bins() const { return num_micro_batches * num_cells(); }
};

enum class Limit : int64_t { kNone = 0, kTokens, kAttention, kCount, kLeastCount };

// Why samples do not fit: the bin that comes nearest, and by how much it misses its budget.
struct Misfit {
  Limit limit = Limit::kNone;
  int32_t sample = -1;  // -1: the bin as a whole
  int32_t bin = -1;
  int64_t excess = 0;
};

class Bins {
 public:
  explicit Bins(const ComposeProblem& problem);

  int num_columns() const { return int(bins_of_column_.size()); }
  int column_of_bin(int bin) const { return column_of_bin_[bin]; }
  int bin_of(int sample) const { return bin_of_[sample]; }
  const std::vector<int32_t>& bins_of_column(int column) const { return bins_of_column_[column]; }
  int64_t column_tokens(int column) const;

  // Loads the bins from bin_of [samples]; says which bin exceeds a budget.
  Misfit assign(const int32_t* bin_of);
  // Finds bins for everything, largest first.
  Misfit pack();

  // Whether two samples can take each other's bins.
  bool can_exchange(int sample_a, int sample_b) const;
  void exchange(int sample_a, int sample_b);
  // Units p and q trade columns, or p goes to a column. False and nothing changed when no way
  // within the budgets was found.
  bool trade(int unit_p, int unit_q);
  bool move(int unit, int column);

  // Evens out tokens and attention over the cells of each column.
  void even_out_cells();

 private:
  struct Load {
    int64_t tokens = 0, attention = 0, count = 0;
  };

  const CellBudget& budget(int bin) const { return problem_.budget[bin % problem_.num_cells()]; }
  bool fits(int bin, int sample) const;
  Misfit misfit_of(int bin, int sample) const;
  void put(int sample, int bin);
  void take(int sample);
  bool place(const std::vector<int32_t>& samples, int column, bool tightest);
  bool pack_units(bool tightest, Misfit& misfit);
  Misfit nearest_misfit(int unit);
  Misfit least_count_misfit() const;
  bool refill(const std::vector<int32_t>& samples, const std::vector<int32_t>& old_bins);
  std::vector<int32_t> by_size(int unit) const;
  int64_t size_of(int sample) const;

  const ComposeProblem& problem_;
  int num_groups_;
  int64_t most_tokens_ = 1, most_attention_ = 1;
  std::vector<int32_t> column_of_bin_;                // [bins]
  std::vector<std::vector<int32_t>> bins_of_column_;  // [columns]
  std::vector<int32_t> bin_of_;                       // [samples], -1 = nowhere
  std::vector<Load> load_;                            // [bins]
};

}  // namespace relibra
