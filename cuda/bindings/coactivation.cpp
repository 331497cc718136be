#include "planner/coactivation.hpp"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include "bindings/arrays.hpp"
#include "bindings/nodes.hpp"
#include "common/parallel.hpp"
#include "common/random.hpp"

namespace relibra {
namespace {

constexpr int64_t kMaxTokens = 1 << 20;

// Token samples of all layers.
struct TokenArrays {
  int64_t num_tokens;
  int top_k;
  const int32_t* ids;     // [L][T][K]
  const int32_t* source;  // [T] or null

  TokenArrays(const py::array& ids_LTK, const std::optional<py::array>& source_bin_T, int64_t L,
              int64_t E, int64_t B) {
    ids = values<int32_t>(ids_LTK, "ids_LTK", {L, -1, -1});
    num_tokens = ids_LTK.shape(1);
    top_k = int(ids_LTK.shape(2));
    if (num_tokens > kMaxTokens)
      throw py::value_error("ids_LTK: need at most " + std::to_string(kMaxTokens) +
                            " tokens, got " + std::to_string(num_tokens));
    check_range("ids_LTK", ids, L * num_tokens * top_k, -1, E - 1);
    source = source_bin_T ? values<int32_t>(*source_bin_T, "source_bin_T", {num_tokens}) : nullptr;
    if (source) check_range("source_bin_T", source, num_tokens, -1, B - 1);
  }

  TokenSets sets(int64_t layer, int64_t E, int64_t B) const {
    return TokenSets(ids + layer * num_tokens * top_k, num_tokens, top_k, source, int(E), int(B));
  }
};

py::tuple py_group_bins(const py::array& load_LEC, const py::array& scale_B,
                        const py::array& start_LE, const py::array& limit_L,
                        const py::array& ids_LTK, const std::optional<py::array>& source_bin_T,
                        int64_t proposals, uint64_t seed, bool check, int num_threads) {
  const int64_t* load = values<int64_t>(load_LEC, "load_LEC", {-1, -1, -1});
  const auto L = load_LEC.shape(0), E = load_LEC.shape(1), C = load_LEC.shape(2);
  check_range("load_LEC", load, L * E * C, 0, kMaxLoad);
  const int32_t* scale = values<int32_t>(scale_B, "scale_B", {-1});
  const auto B = scale_B.shape(0);
  check_range("scale_B", scale, B, 1, 1 << 20);
  const int32_t* start = values<int32_t>(start_LE, "start_LE", {L, E});
  check_range("start_LE", start, L * E, 0, B - 1);
  const int64_t* limit = values<int64_t>(limit_L, "limit_L", {L});
  check_range("limit_L", limit, L, 0, int64_t(1) << 62);
  double sum = 0;
  for (int64_t i = 0; i < L * E * C; ++i) sum += double(load[i]);
  if (sum * *std::max_element(scale, scale + B) > 0x1p62)
    throw py::value_error("load_LEC: need a scaled sum of at most 2^62");
  const TokenArrays tokens(ids_LTK, source_bin_T, L, E, B);
  auto bin_of = empty<int32_t>({L, E});
  auto objective = empty<int64_t>({L}), copies = empty<int64_t>({L});
  int32_t* out = bin_of.mutable_data();
  int64_t *out_objective = objective.mutable_data(), *out_copies = copies.mutable_data();
  std::copy(start, start + L * E, out);
  {
    py::gil_scoped_release release;
    parallel_for(L, num_threads, [&](int64_t l) {
      BinProblem problem{int(E), int(B), int(C), load + l * E * C, {}, {}};
      problem.capacity.assign(B, 0);
      for (int64_t e = 0; e < E; ++e) ++problem.capacity[start[l * E + e]];
      problem.bin_scale.assign(scale, scale + B);
      GroupOptions options;
      options.proposals = proposals;
      options.load_limit = limit[l];
      options.seed = hash_values(problem.load, E * C, seed);
      options.check = check;
      const GroupResult result = group_experts(problem, tokens.sets(l, E, B), options, out + l * E);
      out_objective[l] = result.objective;
      out_copies[l] = result.copies;
    });
  }
  return py::make_tuple(bin_of, objective, copies);
}

}  // namespace

void bind_coactivation(py::module_& m) {
  m.def("group_bins", &py_group_bins, py::arg("load_LEC"), py::arg("scale_B"), py::arg("start_LE"),
        py::arg("limit_L"), py::arg("ids_LTK"), py::arg("source_bin_T") = py::none(),
        py::arg("proposals") = 100000, py::arg("seed") = 0, py::arg("check") = false,
        py::arg("num_threads") = 0);
}

}  // namespace relibra
