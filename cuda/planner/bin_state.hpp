// State of the swap search: loads of experts and bins by column.
//
// Rows of columns are padded with zeros to whole cache lines, so that the loops below become vector
// code without a remainder. They are plain loops: vector extensions would be taken apart for the
// baseline CPU before they reach a versioned function.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "common/clones.hpp"
#include "common/random.hpp"
#include "planner/anneal.hpp"

namespace relibra {

// Zeroed rows of columns, each starting on a cache line.
template <typename T>
class ColumnRows {
 public:
  static constexpr int kPerLine = 64 / int(sizeof(T));

  ColumnRows(int num_rows, int num_columns)
      : width_((num_columns + kPerLine - 1) / kPerLine * kPerLine),
        lines_(size_t(num_rows) * (width_ / kPerLine), Line{}) {}

  int width() const { return width_; }  // padded columns
  RELIBRA_INLINE T* row(int i) { return lines_.data()->values + size_t(i) * width_; }
  RELIBRA_INLINE const T* row(int i) const { return lines_.data()->values + size_t(i) * width_; }

 private:
  struct alignas(64) Line {
    T values[kPerLine];
  };
  int width_;
  std::vector<Line> lines_;
};

// A swap of the experts in two places. Places of a bin are contiguous.
struct Swap {
  int place_a, place_b;
  int bin_a, bin_b;
};

constexpr int kPlaceBits = 24;  // random bits for each place of a swap

// Two experts in different bins, from the low bits of a random word.
template <typename State>
RELIBRA_INLINE Swap propose(const State& state, int num_experts, uint64_t bits) {
  Swap swap;
  swap.place_a = int(below(bits, kPlaceBits, uint32_t(num_experts)));
  swap.bin_a = state.bin_of_place(swap.place_a);
  const int others = num_experts - state.num_places(swap.bin_a);
  swap.place_b = int(below(bits >> kPlaceBits, kPlaceBits, uint32_t(others)));
  if (swap.place_b >= state.first_place(swap.bin_a)) swap.place_b += num_experts - others;
  swap.bin_b = state.bin_of_place(swap.place_b);
  return swap;
}

// T holds every bin load and the objective. kOthers: how many bins beside the two that swap are
// looked at; 0 keeps the three largest bins of each column instead, so that the largest of the
// others costs O(1) for any number of bins. kScaled: bins of different scale.
template <typename T, int kOthers, bool kScaled>
class BinState {
 public:
  BinState(const BinProblem& problem, const int32_t* bin_of)
      : bins_(problem.num_bins),
        scale_(problem.bin_scale.begin(), problem.bin_scale.end()),
        load_(problem.num_experts, problem.num_columns),
        bin_load_(bins_ + 1, problem.num_columns),
        top_(kOthers == 0 ? 5 : 0, problem.num_columns),
        move_cost_(problem.move_cost) {
    if (move_cost_ != 0) base_bin_.assign(problem.base_bin, problem.base_bin + problem.num_experts);
    for (int e = 0; e < problem.num_experts; ++e) {
      const int64_t* column = problem.load + int64_t(e) * problem.num_columns;
      std::transform(column, column + problem.num_columns, load_.row(e),
                     [](int64_t rows) { return T(rows); });
      T* bin = bin_load_.row(bin_of[e]);
      for (int m = 0; m < problem.num_columns; ++m) bin[m] += load_.row(e)[m] * scale_[bin_of[e]];
    }
    place(problem, bin_of);
    moved_ = count_moved();
    update_top();
    objective_ = rescore();
  }

  int64_t objective() const { return objective_; }
  int first_place(int bin) const { return first_place_[bin]; }
  int num_places(int bin) const { return first_place_[bin + 1] - first_place_[bin]; }
  int bin_of_place(int place) const { return bin_of_place_[place]; }
  int expert_at(int place) const { return expert_[place]; }

  // Objective after a swap, exact.
  RELIBRA_INLINE int64_t score(const Swap& swap) const {
    const T* wa = load_.row(expert_[swap.place_a]);
    const T* wb = load_.row(expert_[swap.place_b]);
    const T* la = bin_load_.row(swap.bin_a);
    const T* lb = bin_load_.row(swap.bin_b);
    const T scale_a = kScaled ? scale_[swap.bin_a] : T(1);
    const T scale_b = kScaled ? scale_[swap.bin_b] : T(1);
    const int width = load_.width();
    T sum = 0;
    if constexpr (kOthers > 0) {
      const std::array<const T*, kOthers> others = rows_of_others(swap);
#pragma omp simd reduction(+ : sum)
      for (int m = 0; m < width; ++m) {
        const T d = wb[m] - wa[m];
        T x = larger(la[m] + d * scale_a, lb[m] - d * scale_b);
        for (int i = 0; i < kOthers; ++i) x = larger(x, others[i][m]);
        sum += x;
      }
    } else {
      const T *v1 = top_.row(0), *v2 = top_.row(1), *v3 = top_.row(2);
      const T *i1 = top_.row(3), *i2 = top_.row(4);
      const T a = T(swap.bin_a), b = T(swap.bin_b);
#pragma omp simd reduction(+ : sum)
      for (int m = 0; m < width; ++m) {
        const T d = wb[m] - wa[m];
        const T x = larger(la[m] + d * scale_a, lb[m] - d * scale_b);
        const T behind = (i2[m] == a) | (i2[m] == b) ? v3[m] : v2[m];
        const T other = (i1[m] == a) | (i1[m] == b) ? behind : v1[m];
        sum += larger(x, other);
      }
    }
    return move_cost_ == 0 ? sum : sum + move_cost_ * (moved_ + more_moved(swap));
  }

  // Makes a swap whose score is known.
  RELIBRA_INLINE void apply(const Swap& swap, int64_t score) {
    const T* wa = load_.row(expert_[swap.place_a]);
    const T* wb = load_.row(expert_[swap.place_b]);
    T* la = bin_load_.row(swap.bin_a);
    T* lb = bin_load_.row(swap.bin_b);
    const T scale_a = kScaled ? scale_[swap.bin_a] : T(1);
    const T scale_b = kScaled ? scale_[swap.bin_b] : T(1);
#pragma omp simd
    for (int m = 0; m < load_.width(); ++m) {
      const T d = wb[m] - wa[m];
      la[m] += d * scale_a;
      lb[m] -= d * scale_b;
    }
    if (move_cost_ != 0) moved_ += more_moved(swap);
    std::swap(expert_[swap.place_a], expert_[swap.place_b]);
    update_top();
    objective_ = score;
  }

  // The objective from the bin loads alone.
  int64_t rescore() const {
    int64_t sum = 0;
    for (int m = 0; m < load_.width(); ++m) {
      T largest = 0;
      for (int bin = 0; bin < bins_; ++bin) largest = larger(largest, bin_load_.row(bin)[m]);
      sum += largest;
    }
    return sum + move_cost_ * count_moved();
  }

  void assignment(int32_t* bin_of) const {
    for (size_t i = 0; i < expert_.size(); ++i) bin_of[expert_[i]] = bin_of_place_[i];
  }

 private:
  // How many more experts are outside their base bin after a swap, -2 to 2.
  RELIBRA_INLINE int more_moved(const Swap& swap) const {
    const int32_t base_a = base_bin_[expert_[swap.place_a]];
    const int32_t base_b = base_bin_[expert_[swap.place_b]];
    return (base_a == swap.bin_a) - (base_a == swap.bin_b) + (base_b == swap.bin_b) -
           (base_b == swap.bin_a);
  }

  int64_t count_moved() const {
    int64_t moved = 0;
    for (size_t i = 0; move_cost_ != 0 && i < expert_.size(); ++i)
      moved += base_bin_[expert_[i]] != bin_of_place_[i];
    return moved;
  }

  static RELIBRA_INLINE T larger(T x, T y) { return x > y ? x : y; }

  // Loads of the bins that do not swap; a row of zeros stands in where there are fewer.
  RELIBRA_INLINE std::array<const T*, size_t(kOthers)> rows_of_others(const Swap& swap) const {
    std::array<const T*, size_t(kOthers)> rows;
    const int low = std::min(swap.bin_a, swap.bin_b), high = std::max(swap.bin_a, swap.bin_b);
    for (int i = 0; i < kOthers; ++i) {
      int bin = i + (i >= low);
      bin += bin >= high;
      rows[i] = bin_load_.row(std::min(bin, bins_));
    }
    return rows;
  }

  void place(const BinProblem& problem, const int32_t* bin_of) {
    first_place_.assign(bins_ + 1, 0);
    for (int e = 0; e < problem.num_experts; ++e) ++first_place_[bin_of[e] + 1];
    for (int b = 0; b < bins_; ++b) first_place_[b + 1] += first_place_[b];
    std::vector<int32_t> next(first_place_.begin(), first_place_.end() - 1);
    expert_.resize(problem.num_experts);
    bin_of_place_.resize(problem.num_experts);
    for (int e = 0; e < problem.num_experts; ++e) {
      const int32_t at = next[bin_of[e]]++;
      expert_[at] = e;
      bin_of_place_[at] = bin_of[e];
    }
  }

  // Rows of top_: largest, second and third bin load, and the bins of the first two.
  RELIBRA_INLINE void update_top() {
    if constexpr (kOthers == 0) {
      const int width = load_.width();
      T *v1 = top_.row(0), *v2 = top_.row(1), *v3 = top_.row(2), *i1 = top_.row(3),
        *i2 = top_.row(4);
      std::fill(v1, v1 + size_t(5) * width, T(-1));
      for (int bin = 0; bin < bins_; ++bin) {
        const T* column = bin_load_.row(bin);
#pragma omp simd
        for (int m = 0; m < width; ++m) {
          const T x = column[m];
          v3[m] = x > v2[m] ? v2[m] : larger(x, v3[m]);
          i2[m] = x > v1[m] ? i1[m] : (x > v2[m] ? T(bin) : i2[m]);
          v2[m] = x > v1[m] ? v1[m] : larger(x, v2[m]);
          i1[m] = x > v1[m] ? T(bin) : i1[m];
          v1[m] = larger(x, v1[m]);
        }
      }
    }
  }

  int bins_;
  std::vector<T> scale_;               // [B]
  ColumnRows<T> load_;                 // [E]
  ColumnRows<T> bin_load_;             // [B+1], scaled; the last row stays zero
  ColumnRows<T> top_;                  // [5]
  std::vector<int32_t> expert_;        // place -> expert
  std::vector<int32_t> bin_of_place_;  // place -> bin
  std::vector<int32_t> first_place_;   // [B+1]
  std::vector<int32_t> base_bin_;      // [E], empty when moves are free
  int64_t move_cost_ = 0;
  int64_t moved_ = 0;  // experts outside their base bin
  int64_t objective_ = 0;
};

}  // namespace relibra
