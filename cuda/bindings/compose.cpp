// Composition of micro-batches. Signature with shapes: relibra_kernels/_planner.pyi.
#include "planner/compose.hpp"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <stdexcept>

#include "bindings/arrays.hpp"
#include "common/clones.hpp"
#include "common/parallel.hpp"

namespace relibra {
namespace {

constexpr int64_t kMaxUnits = 1 << 16;          // sums of int16 features stay in int32
constexpr int64_t kMaxWork = int64_t(1) << 45;  // tokens or attention of a sample; sums in int64

UnitList unit_list(const py::array& unit_J) {
  const int32_t* unit = values<int32_t>(unit_J, "unit_J", {-1});
  const auto J = unit_J.shape(0);
  if (J < 1) throw py::value_error("unit_J: need at least one sample, got none");
  check_range("unit_J", unit, J, 0, std::min<int64_t>(J, kMaxUnits) - 1);
  UnitList units;
  units.first.assign(*std::max_element(unit, unit + J) + 2, 0);
  for (int64_t i = 0; i < J; ++i) ++units.first[unit[i] + 1];
  for (int u = 0; u < units.size(); ++u) {
    if (units.first[u + 1] == 0) throw py::value_error("unit_J: need samples in every unit");
    units.first[u + 1] += units.first[u];
  }
  std::vector<int32_t> next(units.first.begin(), units.first.end() - 1);
  units.sample.resize(J);
  for (int64_t i = 0; i < J; ++i) units.sample[next[unit[i]]++] = int32_t(i);
  return units;
}

std::vector<int32_t> group_list(const py::array& group_C) {
  const int32_t* group = values<int32_t>(group_C, "group_C", {-1});
  const auto C = group_C.shape(0);
  if (C < 1) throw py::value_error("group_C: need at least one cell, got none");
  check_range("group_C", group, C, 0, C - 1);
  std::vector<int32_t> groups(group, group + C);
  const int32_t most = *std::max_element(groups.begin(), groups.end());
  for (int32_t g = 0; g <= most; ++g)
    if (std::find(groups.begin(), groups.end(), g) == groups.end())
      throw py::value_error("group_C: need a cell in every group");
  return groups;
}

std::vector<CellBudget> budget_list(const py::array& budget_C4, int64_t num_cells) {
  const int64_t* limit = values<int64_t>(budget_C4, "budget_C4", {num_cells, 4});
  check_range("budget_C4", limit, num_cells * 4, 0, int64_t(1) << 62);
  std::vector<CellBudget> budgets;
  for (int64_t i = 0; i < num_cells; ++i, limit += 4)
    budgets.push_back({limit[0], limit[1], limit[2], limit[3]});
  return budgets;
}

// Sum of a row; `bits` collects the sign bits.
RELIBRA_CLONES int64_t row_sum(const int32_t* row, int64_t count, int32_t& bits) {
  int64_t sum = 0;
  int32_t seen = 0;
  for (int64_t k = 0; k < count; ++k) sum += row[k], seen |= row[k];
  bits |= seen;
  return sum;
}

// Counts of every unit: none negative, and in all at most 2^31 - 1.
void check_rows(const int32_t* rows, const UnitList& units, int64_t width, int num_threads) {
  parallel_for(units.size(), num_threads, [&](int64_t u) {
    int64_t sum = 0;
    int32_t bits = 0;
    for (int i = units.first[u]; i < units.first[u + 1]; ++i)
      sum += row_sum(rows + units.sample[i] * width, width, bits);
    if (bits < 0) throw std::invalid_argument("rows_JW: need counts, got a negative number");
    if (sum > INT32_MAX)
      throw std::invalid_argument("rows_JW: need at most 2^31 - 1 rows in a sample or group, got " +
                                  std::to_string(sum));
  });
}

py::tuple py_compose(const py::array& rows_JW, const py::array& tokens_J,
                     const py::array& attention_J, const py::array& unit_J,
                     const py::array& group_C, const py::array& budget_C4, int num_micro_batches,
                     const std::optional<py::array>& start_J, int num_features,
                     const std::optional<py::array>& feature_W, int max_passes, double least_gain,
                     int block, uint64_t seed, bool check, int num_threads) {
  ComposeProblem problem;
  problem.units = unit_list(unit_J);
  const auto J = unit_J.shape(0);
  problem.num_samples = int(J);
  problem.rows = values<int32_t>(rows_JW, "rows_JW", {J, -1});
  problem.tokens = values<int64_t>(tokens_J, "tokens_J", {J});
  problem.attention = values<int64_t>(attention_J, "attention_J", {J});
  check_range("tokens_J", problem.tokens, J, 0, kMaxWork);
  check_range("attention_J", problem.attention, J, 0, kMaxWork);
  problem.group_of_cell = group_list(group_C);
  problem.budget = budget_list(budget_C4, group_C.shape(0));
  check_range("num_micro_batches", &num_micro_batches, 1, 1, 1 << 20);
  problem.num_micro_batches = num_micro_batches;
  const int W = int(rows_JW.shape(1));
  if (W < 1) throw py::value_error("rows_JW: need at least one cell, got none");
  check_range("num_features", &num_features, 1, 1, W);
  FeatureMap map{W, num_features, nullptr, seed};
  if (feature_W) {
    map.feature_of_cell = values<int32_t>(*feature_W, "feature_W", {W});
    check_range("feature_W", map.feature_of_cell, W, 0, num_features - 1);
  }
  const int32_t* start = start_J ? values<int32_t>(*start_J, "start_J", {J}) : nullptr;
  if (start) check_range("start_J", start, J, 0, problem.num_bins() - 1);
  check_range("block", &block, 1, 2, 1 << 15);
  const ComposeOptions options{max_passes, least_gain, block, seed, num_threads, check};
  ComposeResult result;
  {
    py::gil_scoped_release release;
    check_rows(problem.rows, problem.units, W, num_threads);
    result = compose(problem, map, start, options);
  }
  const Misfit& misfit = result.misfit;
  auto bin_of = empty<int32_t>({py::ssize_t(result.bin_of.size())});
  std::copy(result.bin_of.begin(), result.bin_of.end(), bin_of.mutable_data());
  return py::make_tuple(
      bin_of, py::make_tuple(int64_t(misfit.limit), misfit.sample, misfit.bin, misfit.excess),
      py::make_tuple(result.spread_before, result.spread_after, result.num_swaps, result.num_moves,
                     result.num_passes));
}

}  // namespace

void bind_compose(py::module_& m) {
  m.def("compose", &py_compose, py::arg("rows_JW"), py::arg("tokens_J"), py::arg("attention_J"),
        py::arg("unit_J"), py::arg("group_C"), py::arg("budget_C4"), py::arg("num_micro_batches"),
        py::arg("start_J"), py::arg("num_features"), py::arg("feature_W"), py::arg("max_passes"),
        py::arg("least_gain"), py::arg("block"), py::arg("seed"), py::arg("check") = false,
        py::arg("num_threads") = 0);
}

}  // namespace relibra
