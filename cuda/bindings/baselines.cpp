#include <pybind11/pybind11.h>

#include "bindings/arrays.hpp"
#include "bindings/nodes.hpp"
#include "common/parallel.hpp"
#include "planner/fixed_sites.hpp"

namespace relibra {
namespace {

py::tuple py_split_sites(const py::array& totals_CLE, const py::array& slot_expert_CLGn,
                         int num_threads) {
  const int64_t* totals = values<int64_t>(totals_CLE, "totals_CLE", {-1, -1, -1});
  const auto C = totals_CLE.shape(0), L = totals_CLE.shape(1), E = totals_CLE.shape(2);
  check_range("totals_CLE", totals, C * L * E, 0, kMaxLoad);
  const int32_t* experts = values<int32_t>(slot_expert_CLGn, "slot_expert_CLGn", {C, L, -1, -1});
  const auto G = slot_expert_CLGn.shape(2), n = slot_expert_CLGn.shape(3);
  if (G < 1 || n < 1) throw py::value_error("slot_expert_CLGn: need at least one rank and slot");
  check_range("slot_expert_CLGn", experts, C * L * G * n, -1, E - 1);
  auto rows = empty<int64_t>({C, L, G, n});
  auto largest = empty<int64_t>({C, L});
  int64_t *out_rows = rows.mutable_data(), *out_largest = largest.mutable_data();
  {
    py::gil_scoped_release release;
    const SiteShape shape{int(E), int(G), int(n)};
    parallel_for(L, num_threads, [&](int64_t l) {
      SiteSplitter splitter(shape);
      for (int64_t c = 0; c < C; ++c) {
        const int64_t i = c * L + l;
        out_largest[i] = splitter.split(totals + i * E, experts + i * G * n, out_rows + i * G * n);
      }
    });
  }
  return py::make_tuple(rows, largest);
}

}  // namespace

void bind_baselines(py::module_& m) {
  m.def("split_sites", &py_split_sites, py::arg("totals_CLE"), py::arg("slot_expert_CLGn"),
        py::arg("num_threads") = 0);
}

}  // namespace relibra
