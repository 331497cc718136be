// Samples as short vectors of integers, whose inner products the search over compositions needs.
//
// A unit (a sample, or the samples of a prompt group) has rows by cell (layer, expert). Three maps
// make features of them: the cells themselves; cells folded onto fewer features with random signs
// (a sparse random projection: inner products keep their expectation, with a relative error near
// 1 / sqrt(features)); sums over given sets of cells (experts of a node).
// Features are centred at their mean over the units, scaled and rounded to int16 such that every
// inner product fits int32: the largest vector has a length just below 2^15.5, so with f features
// the rounding is below sqrt(f / 12) / 2^15.5 of it (0.05 % for 6,144).
#pragma once

#include <cstdint>
#include <vector>

namespace relibra {

// Samples that move together.
struct UnitList {
  std::vector<int32_t> first;   // [U+1], into sample
  std::vector<int32_t> sample;  // unit after unit

  int size() const { return int(first.size()) - 1; }
  int size_of(int unit) const { return first[unit + 1] - first[unit]; }
};

struct FeatureMap {
  int num_cells;                             // L * E
  int num_features;                          // num_cells: the cells themselves
  const int32_t* feature_of_cell = nullptr;  // [cells], sums without signs; owned by the caller
  uint64_t seed = 0;                         // of the signs of a fold
};

struct Features {
  int num_units = 0;
  int width = 0;                  // features, padded with zeros to a multiple of 32
  std::vector<int16_t> centred;   // [U][width]
  std::vector<int64_t> mean;      // [width], in the same scale
  std::vector<int64_t> mean_dot;  // [U], centred . mean
  int64_t mean_square = 0;        // mean . mean

  const int16_t* row(int unit) const { return centred.data() + int64_t(unit) * width; }
};

// rows: [samples][cells], at most 2^31 - 1 in all for a unit.
Features make_features(const FeatureMap& map, const int32_t* rows, const UnitList& units,
                       int num_threads);

// Inner products of some units with each other. gram: [n][n], n = units.size(), out.
void inner_products(const Features& features, const std::vector<int32_t>& units, int num_threads,
                    int32_t* gram);

// sum over features of a centred vector times a sum of such vectors.
int64_t dot(const int16_t* vector, const int32_t* sum, int width);

}  // namespace relibra
