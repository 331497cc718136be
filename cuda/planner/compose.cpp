#include "planner/compose.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <stdexcept>

#include "common/clones.hpp"
#include "common/parallel.hpp"
#include "common/random.hpp"

namespace relibra {
namespace {

constexpr int kTries = 8;  // partners that are tried for a unit of several samples

// Half the change, without the part that is the same for all q, of swapping p (column a) with every
// q. in_a[q] = S[a][q], own[q] = |y_q|^2 - S[column of q][q], of_p[m] = S[m][p]. Returns the least.
RELIBRA_CLONES int64_t score_swaps(const int64_t* in_a, const int64_t* own, const int32_t* gram_p,
                                   const int64_t* of_p, const int32_t* column_of, int count,
                                   int64_t* score) {
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int q = 0; q < count; ++q) {
    const int64_t x = in_a[q] + own[q] + of_p[column_of[q]] - 2 * int64_t(gram_p[q]);
    score[q] = x;
    least = x < least ? x : least;
  }
  return least;
}

RELIBRA_CLONES void add_difference(const int32_t* plus, const int32_t* minus, int count,
                                   int64_t* to, int64_t* from) {
  for (int i = 0; i < count; ++i) {
    const int64_t d = int64_t(plus[i]) - minus[i];
    to[i] += d;
    from[i] -= d;
  }
}

// own[i] = square[i] - S[column of i][i] for the units of columns a and b.
RELIBRA_CLONES void update_two(const int64_t* square, const int64_t* in_a, const int64_t* in_b,
                               const int32_t* column_of, int a, int b, int count, int64_t* own) {
  for (int i = 0; i < count; ++i) {
    const int64_t x = column_of[i] == a ? square[i] - in_a[i] : own[i];
    own[i] = column_of[i] == b ? square[i] - in_b[i] : x;
  }
}

RELIBRA_CLONES void add_unit(const int16_t* row, int sign, int count, int32_t* to) {
  for (int i = 0; i < count; ++i) to[i] += sign * row[i];
}

RELIBRA_CLONES void add_row(const int32_t* row, int count, int64_t* to) {
  for (int i = 0; i < count; ++i) to[i] += row[i];
}

class Search {
 public:
  Search(const ComposeProblem& problem, const Features& features, const ComposeOptions& options,
         Bins& bins, ComposeResult& result)
      : problem_(problem),
        features_(features),
        options_(options),
        bins_(bins),
        result_(result),
        num_columns_(bins.num_columns()),
        column_of_unit_(features.num_units),
        units_in_(num_columns_, 0),
        mean_dot_in_(num_columns_, 0),
        sum_(size_t(num_columns_) * features.width, 0) {
    for (int unit = 0; unit < features.num_units; ++unit) {
      const int sample = problem.units.sample[problem.units.first[unit]];
      const int column = column_of_unit_[unit] = bins.column_of_bin(bins.bin_of(sample));
      count_unit(unit, column, 1);
      add_unit(features.row(unit), 1, features.width, sum_of(column));
    }
  }

  // Squared distance of the columns from equal ones.
  double spread() const {
    const double units = double(features_.num_units) / num_columns_;
    double total = 0;
    for (int k = 0; k < features_.width; ++k) {
      double mean = 0;
      for (int m = 0; m < num_columns_; ++m) mean += sum_[size_t(m) * features_.width + k];
      mean /= num_columns_;
      for (int m = 0; m < num_columns_; ++m) {
        const double d = sum_[size_t(m) * features_.width + k] - mean +
                         (units_in_[m] - units) * double(features_.mean[k]);
        total += d * d;
      }
    }
    return total;
  }

  double relative(double spread) const {
    const double units = double(features_.num_units) / num_columns_;
    const double mean = units * units * double(features_.mean_square) * num_columns_;
    return mean > 0 ? std::sqrt(spread / mean) : 0;
  }

  void run() {
    double left = spread();
    result_.spread_before = relative(left);
    const int num_units = features_.num_units;
    const int num_blocks = (num_units + options_.block - 1) / options_.block;
    std::vector<int32_t> order(num_units);
    std::iota(order.begin(), order.end(), 0);
    // Several blocks: passes inside a block are few, since blocks are dealt anew each time.
    const int passes_a_block = num_blocks > 1 ? 4 : options_.max_passes;
    for (int pass = 0; pass < options_.max_passes; pass += passes_a_block) {
      if (num_blocks > 1) shuffle(order, pass);
      double gain = 0;
      for (int block = 0; block < num_blocks; ++block) {
        const auto begin = order.begin() + int64_t(num_units) * block / num_blocks;
        const auto end = order.begin() + int64_t(num_units) * (block + 1) / num_blocks;
        block_.assign(begin, end);
        std::sort(block_.begin(), block_.end());
        gain += search_block(passes_a_block, left - gain, num_blocks == 1);
      }
      left -= gain;
      if (gain < options_.least_gain * left) break;
    }
    result_.spread_after = relative(spread());
  }

 private:
  int size() const { return int(block_.size()); }
  int64_t* in_column(int m) { return in_column_.data() + size_t(m) * size(); }
  const int32_t* gram_row(int i) const { return gram_.get() + size_t(i) * size(); }

  void shuffle(std::vector<int32_t>& order, int pass) const {
    const uint64_t key = mix64(options_.seed ^ (uint64_t(pass) << 32));
    for (size_t i = order.size(); i > 1; --i) {
      const size_t j = size_t(random_bits(key, i) % i);
      std::swap(order[i - 1], order[j]);
    }
  }

  void count_unit(int unit, int column, int sign) {
    units_in_[column] += sign;
    mean_dot_in_[column] += sign * (features_.mean_dot[unit] + features_.mean_square);
  }

  int32_t* sum_of(int column) { return sum_.data() + size_t(column) * features_.width; }

  // S of the block, from inner products inside the block and from the sums of the rest.
  void load_block(bool is_all) {
    const size_t side = size_t(std::min(options_.block, features_.num_units));
    if (!gram_) gram_.reset(new int32_t[side * side]);
    inner_products(features_, block_, options_.num_threads, gram_.get());
    column_of_.resize(size());
    score_.resize(size());
    own_.resize(size());
    of_unit_.resize(num_columns_);
    for (int i = 0; i < size(); ++i) column_of_[i] = column_of_unit_[block_[i]];
    in_column_.assign(size_t(num_columns_) * size(), 0);
    if (is_all) {
      for (int i = 0; i < size(); ++i) add_row(gram_row(i), size(), in_column(column_of_[i]));
    } else {
      parallel_for(size(), options_.num_threads, [&](int64_t i) {
        for (int m = 0; m < num_columns_; ++m)
          in_column(m)[i] = dot(features_.row(block_[i]), sum_of(m), features_.width);
      });
    }
    for (int m = 0; m < num_columns_; ++m)
      for (int i = 0; i < size(); ++i)
        in_column(m)[i] += units_in_[m] * features_.mean_dot[block_[i]];
    square_.resize(size());
    for (int i = 0; i < size(); ++i) {
      square_[i] = gram_row(i)[i];
      own_[i] = square_[i] - in_column(column_of_[i])[i];
    }
  }

  // Returns the gain.
  double search_block(int max_passes, double left, bool is_all) {
    load_block(is_all);
    const std::vector<int32_t> before = column_of_;
    double gain = 0;
    for (int pass = 0; pass < max_passes; ++pass) {
      double pass_gain = 0;
      for (int p = 0; p < size(); ++p) pass_gain -= 2 * double(improve(p));
      gain += pass_gain;
      ++result_.num_passes;
      if (options_.check) check();
      if (pass_gain < options_.least_gain * (left - gain)) break;
    }
    for (int i = 0; i < size(); ++i) {
      if (before[i] == column_of_[i]) continue;
      add_unit(features_.row(block_[i]), -1, features_.width, sum_of(before[i]));
      add_unit(features_.row(block_[i]), 1, features_.width, sum_of(column_of_[i]));
    }
    return gain;
  }

  // The best swap or move of p. Returns half the change of the objective, 0 for none.
  int64_t improve(int p) {
    const int a = column_of_[p];
    for (int m = 0; m < num_columns_; ++m) of_unit_[m] = in_column(m)[p];
    const int64_t common = square_[p] - of_unit_[a];
    const int64_t least = score_swaps(in_column(a), own_.data(), gram_row(p), of_unit_.data(),
                                      column_of_.data(), size(), score_.data()) +
                          common;
    int64_t moved = 0;
    const int column = best_move(p, moved);
    if (least >= 0 && column < 0) return 0;
    if (column >= 0 && moved <= least && bins_.move(block_[p], column)) {
      apply_move(p, column);
      return moved;
    }
    const int q = least < 0 ? swap_partner(p, least - common, -common) : -1;
    if (q < 0) return 0;
    const int64_t change = score_[q] + common;
    apply_swap(p, q);
    return change;
  }

  bool is_single(int i) const { return problem_.units.size_of(block_[i]) == 1; }
  int sample_of(int i) const { return problem_.units.sample[problem_.units.first[block_[i]]]; }

  // Best partner with a score below `limit` with whom the budgets hold; the bins have traded when
  // it is found. least: of all scores.
  int swap_partner(int p, int64_t least, int64_t limit) {
    int best = -1;
    if (is_single(p)) {
      const int q = int(std::find(score_.begin(), score_.end(), least) - score_.begin());
      if (is_single(q) && bins_.can_exchange(sample_of(p), sample_of(q))) {
        bins_.exchange(sample_of(p), sample_of(q));
        return q;
      }
      least = limit;
      for (int q = 0; q < size(); ++q)
        if (score_[q] < least && is_single(q) && bins_.can_exchange(sample_of(p), sample_of(q)))
          best = q, least = score_[q];
      if (best >= 0) limit = least;
    }
    // Others need a search for bins: the most promising are tried.
    candidates_.clear();
    for (int q = 0; q < size(); ++q)
      if (score_[q] < limit) candidates_.push_back(q);
    const size_t tries = std::min<size_t>(kTries, candidates_.size());
    std::partial_sort(
        candidates_.begin(), candidates_.begin() + tries, candidates_.end(),
        [&](int x, int y) { return score_[x] != score_[y] ? score_[x] < score_[y] : x < y; });
    for (size_t i = 0; i < tries; ++i)
      if (bins_.trade(block_[p], block_[candidates_[i]])) return candidates_[i];
    if (best >= 0) bins_.exchange(sample_of(p), sample_of(best));
    return best;
  }

  // The column that gains most, -1 where none gains. Budgets are not looked at.
  int best_move(int p, int64_t& change) const {
    const int a = column_of_[p];
    const int64_t mean_dot = features_.mean_dot[block_[p]];
    const int64_t own = square_[p] + 2 * mean_dot + features_.mean_square;
    int best = -1;
    change = 0;
    for (int b = 0; b < num_columns_; ++b) {
      if (b == a) continue;
      const int64_t x = of_unit_[b] - of_unit_[a] + mean_dot_in_[b] - mean_dot_in_[a] + own;
      if (x < change) change = x, best = b;
    }
    return best;
  }

  void apply_swap(int p, int q) {
    const int a = column_of_[p], b = column_of_[q];
    add_difference(gram_row(q), gram_row(p), size(), in_column(a), in_column(b));
    recount(p, b), recount(q, a);
    update_two(square_.data(), in_column(a), in_column(b), column_of_.data(), a, b, size(),
               own_.data());
    ++result_.num_swaps;
  }

  void apply_move(int p, int b) {
    const int a = column_of_[p];
    int64_t *from = in_column(a), *to = in_column(b);
    const int32_t* row = gram_row(p);
    for (int i = 0; i < size(); ++i) {
      const int64_t d = row[i] + features_.mean_dot[block_[i]];
      from[i] -= d;
      to[i] += d;
    }
    recount(p, b);
    update_two(square_.data(), in_column(a), in_column(b), column_of_.data(), a, b, size(),
               own_.data());
    ++result_.num_moves;
  }

  void recount(int i, int column) {
    count_unit(block_[i], column_of_[i], -1);
    count_unit(block_[i], column, 1);
    column_of_[i] = column_of_unit_[block_[i]] = column;
  }

  // S from the assignment alone, and every unit in the column of all its samples' bins.
  void check() {
    std::vector<int64_t> sum(features_.width);
    for (int m = 0; m < num_columns_; ++m) {
      std::fill(sum.begin(), sum.end(), int64_t(0));
      for (int unit = 0; unit < features_.num_units; ++unit) {
        if (column_of_unit_[unit] != m) continue;
        for (int k = 0; k < features_.width; ++k)
          sum[k] += features_.row(unit)[k] + features_.mean[k];
      }
      for (int i = 0; i < size(); ++i) {
        int64_t dot = 0;
        for (int k = 0; k < features_.width; ++k) dot += features_.row(block_[i])[k] * sum[k];
        if (dot != in_column(m)[i])
          throw std::logic_error("composition: kept scores differ from a recount");
      }
    }
    for (int unit = 0; unit < features_.num_units; ++unit)
      for (int i = problem_.units.first[unit]; i < problem_.units.first[unit + 1]; ++i)
        if (bins_.column_of_bin(bins_.bin_of(problem_.units.sample[i])) != column_of_unit_[unit])
          throw std::logic_error("composition: bins and columns disagree");
  }

  const ComposeProblem& problem_;
  const Features& features_;
  const ComposeOptions& options_;
  Bins& bins_;
  ComposeResult& result_;
  int num_columns_;
  std::vector<int32_t> column_of_unit_;  // [U]
  std::vector<int64_t> units_in_;        // [columns]
  std::vector<int64_t> mean_dot_in_;     // [columns], c . L_m
  std::vector<int32_t> sum_;             // [columns][width], sums of centred vectors
  // Of the block that is searched, n units:
  std::vector<int32_t> block_;       // [n], units
  std::vector<int32_t> column_of_;   // [n]
  std::unique_ptr<int32_t[]> gram_;  // [n][n]; not filled before use, 16 MB at 2,048 units
  std::vector<int64_t> in_column_;   // [columns][n], S
  std::vector<int64_t> square_, own_, score_;  // [n]
  std::vector<int64_t> of_unit_;               // [columns]
  std::vector<int32_t> candidates_;
};

}  // namespace

ComposeResult compose(const ComposeProblem& problem, const FeatureMap& map, const int32_t* start,
                      const ComposeOptions& options) {
  ComposeResult result;
  Bins bins(problem);
  result.misfit = start ? bins.assign(start) : bins.pack();
  if (result.misfit.limit != Limit::kNone) return result;
  const Features features = make_features(map, problem.rows, problem.units, options.num_threads);
  Search(problem, features, options, bins, result).run();
  bins.even_out_cells();
  for (int i = 0; i < problem.num_samples; ++i) result.bin_of.push_back(bins.bin_of(i));
  return result;
}

}  // namespace relibra
