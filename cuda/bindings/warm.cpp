#include "planner/warm.hpp"

#include <pybind11/pybind11.h>

#include <algorithm>

#include "bindings/arrays.hpp"
#include "bindings/nodes.hpp"
#include "common/parallel.hpp"
#include "common/random.hpp"

namespace relibra {
namespace {

py::array_t<int32_t> py_warm_layouts(const py::array& load_LEC, const py::array& base_LGH,
                                     const py::array& rank_to_node_G, const py::array& move_cost_L,
                                     int replica_slots, int64_t proposals, int64_t solver_calls,
                                     uint64_t seed, int num_threads) {
  const int64_t* load = values<int64_t>(load_LEC, "load_LEC", {-1, -1, -1});
  const auto L = load_LEC.shape(0), E = load_LEC.shape(1), C = load_LEC.shape(2);
  check_range("load_LEC", load, L * E * C, 0, kMaxLoad);
  const NodeRanks nodes = node_ranks(rank_to_node_G);
  const py::ssize_t G = nodes.num_ranks();
  const int32_t* base = values<int32_t>(base_LGH, "base_LGH", {L, G, -1});
  const auto H = base_LGH.shape(2);
  check_range("base_LGH", base, L * G * H, -1, E - 1);
  for (py::ssize_t l = 0; l < L; ++l) {
    std::vector<char> seen(E, 0);
    for (py::ssize_t i = l * G * H; i < (l + 1) * G * H; ++i)
      if (base[i] >= 0) ++seen[base[i]];
    if (std::count(seen.begin(), seen.end(), 1) != E)
      throw py::value_error("base_LGH: need every expert once in every layer");
  }
  const int64_t* move_cost = values<int64_t>(move_cost_L, "move_cost_L", {L});
  check_range("move_cost_L", move_cost, L, 0, kMaxLoad);
  double sum = 0;
  for (py::ssize_t i = 0; i < L * E * C; ++i) sum += double(load[i]);
  for (py::ssize_t l = 0; l < L; ++l) sum += double(move_cost[l]) * double(E);
  double common = 1;  // at least the least common multiple of the node sizes
  for (int node = 0; node < nodes.num_nodes(); ++node)
    if (nodes.size(node) != nodes.size(0)) common = double(1 << 20);
  if (sum * std::max(common, double(nodes.size(0))) > 0x1p62)
    throw py::value_error("load_LEC, move_cost_L: need a scaled sum of at most 2^62");
  auto layouts = empty<int32_t>({L, G, H});
  int32_t* out = layouts.mutable_data();
  {
    py::gil_scoped_release release;
    parallel_for(L, num_threads, [&](int64_t l) {
      const LayerLoads loads{int(E), int(C), load + l * E * C};
      const WarmProblem problem{loads, int(H), replica_slots, move_cost[l], solver_calls};
      AnnealOptions options;
      options.proposals = proposals;
      options.seed = hash_values(loads.load, E * C, seed);
      warm_layout(problem, nodes, options, base + l * G * H, out + l * G * H);
    });
  }
  return layouts;
}

}  // namespace

void bind_warm(py::module_& m) {
  m.def("warm_layouts", &py_warm_layouts, py::arg("load_LEC"), py::arg("base_LGH"),
        py::arg("rank_to_node_G"), py::arg("move_cost_L"), py::arg("replica_slots"),
        py::arg("proposals"), py::arg("solver_calls"), py::arg("seed") = 0,
        py::arg("num_threads") = 0);
}

}  // namespace relibra
