#include "planner/compose_features.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "common/clones.hpp"
#include "common/parallel.hpp"
#include "common/random.hpp"

// 16-bit products need AVX-512BW for their full width, which AVX-512F does not imply.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && __GNUC__ >= 12
#define RELIBRA_CLONES_16 __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define RELIBRA_CLONES_16 RELIBRA_CLONES
#endif

namespace relibra {
namespace {

constexpr int kLanes = 32;         // features a block of int16 loops
constexpr int kTile = 4;           // units a side of a tile of inner products
constexpr int kTaskTiles = 16;     // tiles a task, and
constexpr int kChunk = 2048;       // features at a time: 256 KB, inside a second-level cache
constexpr double kLength = 46340;  // floor(sqrt(2^31 - 1)): no inner product leaves int32

int padded(int features) {
  return (features + kLanes - 1) / kLanes * kLanes;
}

RELIBRA_CLONES void add_signed(const int32_t* rows, const int32_t* sign, int count, int32_t* out) {
  for (int i = 0; i < count; ++i) out[i] += rows[i] * sign[i];
}

RELIBRA_CLONES void add_to(const int32_t* rows, int count, int64_t* sum) {
  for (int i = 0; i < count; ++i) sum[i] += rows[i];
}

// Distance from the mean, squared; 16 sums in fixed order, so that the bits do not depend on the
// width of the machine's vectors.
RELIBRA_CLONES double squared_distance(const int32_t* rows, const double* mean, int count) {
  std::array<double, 16> sum{};
  int i = 0;
  for (; i + 16 <= count; i += 16)
    for (int k = 0; k < 16; ++k) {
      const double d = double(rows[i + k]) - mean[i + k];
      sum[k] += d * d;
    }
  for (; i < count; ++i) {
    const double d = double(rows[i]) - mean[i];
    sum[0] += d * d;
  }
  double total = 0;
  for (const double part : sum) total += part;
  return total;
}

RELIBRA_CLONES void quantise(const int32_t* rows, const double* mean, double scale, int count,
                             int16_t* out) {
  for (int i = 0; i < count; ++i) {
    const double x = scale * (double(rows[i]) - mean[i]);
    out[i] = int16_t(int32_t(x + (x < 0 ? -0.5 : 0.5)));
  }
}

// Inner products of four vectors with four others: all sums stay in registers.
RELIBRA_CLONES_16 void tile(const int16_t* const* a, const int16_t* const* b, int width,
                            int32_t* out) {
  const int16_t *a0 = a[0], *a1 = a[1], *a2 = a[2], *a3 = a[3];
  const int16_t *b0 = b[0], *b1 = b[1], *b2 = b[2], *b3 = b[3];
  int32_t s00 = 0, s01 = 0, s02 = 0, s03 = 0, s10 = 0, s11 = 0, s12 = 0, s13 = 0;
  int32_t s20 = 0, s21 = 0, s22 = 0, s23 = 0, s30 = 0, s31 = 0, s32 = 0, s33 = 0;
  for (int k = 0; k < width; ++k) {
    const int32_t x0 = a0[k], x1 = a1[k], x2 = a2[k], x3 = a3[k];
    const int32_t y0 = b0[k], y1 = b1[k], y2 = b2[k], y3 = b3[k];
    s00 += x0 * y0, s01 += x0 * y1, s02 += x0 * y2, s03 += x0 * y3;
    s10 += x1 * y0, s11 += x1 * y1, s12 += x1 * y2, s13 += x1 * y3;
    s20 += x2 * y0, s21 += x2 * y1, s22 += x2 * y2, s23 += x2 * y3;
    s30 += x3 * y0, s31 += x3 * y1, s32 += x3 * y2, s33 += x3 * y3;
  }
  const int32_t sums[kTile * kTile] = {s00, s01, s02, s03, s10, s11, s12, s13,
                                       s20, s21, s22, s23, s30, s31, s32, s33};
  std::copy(sums, sums + kTile * kTile, out);
}

RELIBRA_CLONES int64_t dot_sum(const int16_t* vector, const int32_t* sum, int width) {
  int64_t total = 0;
  for (int k = 0; k < width; ++k) total += int64_t(vector[k]) * sum[k];
  return total;
}

// Rows of units by feature, int32 [U][features]; empty where the input has them in place.
std::vector<int32_t> map_rows(const FeatureMap& map, const int32_t* rows, const UnitList& units,
                              int num_threads) {
  const int cells = map.num_cells, features = map.num_features, num_units = units.size();
  const bool same = !map.feature_of_cell && features == cells;
  if (same && std::is_sorted(units.sample.begin(), units.sample.end()) &&
      num_units == int(units.sample.size()))
    return {};
  std::vector<int32_t> sign(cells, 1);
  if (!map.feature_of_cell && !same)
    for (int i = 0; i < cells; ++i)
      sign[i] = random_bits(mix64(map.seed), uint64_t(i)) & 1 ? 1 : -1;
  std::vector<int32_t> mapped(size_t(num_units) * features, 0);
  parallel_for(num_units, num_threads, [&](int64_t unit) {
    int32_t* out = mapped.data() + size_t(unit) * features;
    for (int i = units.first[unit]; i < units.first[unit + 1]; ++i) {
      const int32_t* row = rows + size_t(units.sample[i]) * cells;
      if (map.feature_of_cell) {
        for (int cell = 0; cell < cells; ++cell) out[map.feature_of_cell[cell]] += row[cell];
      } else {
        for (int begin = 0; begin < cells; begin += features)
          add_signed(row + begin, sign.data() + begin, std::min(features, cells - begin), out);
      }
    }
  });
  return mapped;
}

}  // namespace

Features make_features(const FeatureMap& map, const int32_t* rows, const UnitList& units,
                       int num_threads) {
  const int count = map.num_features, num_units = units.size();
  const std::vector<int32_t> mapped = map_rows(map, rows, units, num_threads);
  const int32_t* values = mapped.empty() ? rows : mapped.data();
  const auto row = [&](int64_t unit) { return values + size_t(unit) * count; };

  std::vector<double> mean(count);
  constexpr int kStrip = 512;  // features a task
  parallel_for((count + kStrip - 1) / kStrip, num_threads, [&](int64_t strip) {
    const int begin = int(strip) * kStrip, size = std::min(kStrip, count - begin);
    std::array<int64_t, kStrip> sum{};
    for (int unit = 0; unit < num_units; ++unit) add_to(row(unit) + begin, size, sum.data());
    for (int i = 0; i < size; ++i) mean[begin + i] = double(sum[i]) / num_units;
  });
  std::vector<double> square(num_units);
  parallel_for(num_units, num_threads, [&](int64_t unit) {
    square[unit] = squared_distance(row(unit), mean.data(), count);
  });
  double mean_square = 0;
  for (const double x : mean) mean_square += x * x;
  const double longest = std::sqrt(*std::max_element(square.begin(), square.end()));
  // int16; int32 inner products with room for rounding; sums of up to U means in int64.
  double scale = (32767 - 1) / std::max(longest, 1.0);
  scale = std::min(scale, (kLength - 1 - 0.5 * std::sqrt(double(count))) / std::max(longest, 1.0));
  scale = std::min(scale, std::sqrt(0x1p60 / num_units) / std::max(std::sqrt(mean_square), 1.0));

  Features out;
  out.num_units = num_units;
  out.width = padded(count);
  out.centred.assign(size_t(num_units) * out.width, 0);
  out.mean.assign(out.width, 0);
  out.mean_dot.assign(num_units, 0);
  for (int i = 0; i < count; ++i) {
    out.mean[i] = int64_t(std::floor(scale * mean[i] + 0.5));
    out.mean_square += out.mean[i] * out.mean[i];
  }
  parallel_for(num_units, num_threads, [&](int64_t unit) {
    int16_t* centred = out.centred.data() + size_t(unit) * out.width;
    quantise(row(unit), mean.data(), scale, count, centred);
    int64_t sum = 0;
    for (int i = 0; i < count; ++i) sum += centred[i] * out.mean[i];
    out.mean_dot[unit] = sum;
  });
  return out;
}

void inner_products(const Features& features, const std::vector<int32_t>& units, int num_threads,
                    int32_t* gram) {
  const int n = int(units.size()), tiles = (n + kTile - 1) / kTile;
  const auto rows_of = [&](int t, int begin) {
    std::array<const int16_t*, kTile> rows;
    for (int i = 0; i < kTile; ++i)
      rows[i] = features.row(units[std::min(t * kTile + i, n - 1)]) + begin;
    return rows;
  };
  const auto add = [&](int ta, int tb, const int32_t* sums, bool is_first, bool is_last) {
    const int p = ta * kTile, q = tb * kTile;
    const int rows = std::min(kTile, n - p), columns = std::min(kTile, n - q);
    for (int i = 0; i < rows; ++i) {
      int32_t* to = gram + size_t(p + i) * n + q;
      for (int j = 0; j < columns; ++j) to[j] = (is_first ? 0 : to[j]) + sums[i * kTile + j];
    }
    for (int j = 0; j < columns && is_last && ta != tb; ++j)
      for (int i = 0; i < rows; ++i)
        gram[size_t(q + j) * n + p + i] = gram[size_t(p + i) * n + q + j];
  };
  // A task writes its rows of the upper triangle, a chunk of features after the other, and last
  // their mirror image.
  parallel_for((tiles + kTaskTiles - 1) / kTaskTiles, num_threads, [&](int64_t task) {
    const int first = int(task) * kTaskTiles, end = std::min(first + kTaskTiles, tiles);
    std::array<int32_t, kTile * kTile> sums;
    for (int begin = 0; begin < features.width; begin += kChunk) {
      const int size = std::min(kChunk, features.width - begin);
      for (int tb = first; tb < tiles; ++tb) {
        const auto b = rows_of(tb, begin);
        for (int ta = first; ta < std::min(end, tb + 1); ++ta) {
          tile(rows_of(ta, begin).data(), b.data(), size, sums.data());
          add(ta, tb, sums.data(), begin == 0, begin + size == features.width);
        }
      }
    }
  });
}

int64_t dot(const int16_t* vector, const int32_t* sum, int width) {
  return dot_sum(vector, sum, width);
}

}  // namespace relibra
