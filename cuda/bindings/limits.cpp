#include "planner/limits.hpp"

#include <pybind11/pybind11.h>

#include <algorithm>

#include "bindings/arrays.hpp"
#include "bindings/nodes.hpp"
#include "common/parallel.hpp"

namespace relibra {
namespace {

py::tuple py_replicate_limited(const py::array& rows_CLGb, const py::array& fixed_CLG,
                               const py::array& slot_expert_LGb, const py::array& rank_to_node_G,
                               int replica_slots, double tolerance, int64_t min_rows,
                               int64_t max_fan_out, int64_t max_pushes, int num_threads) {
  const int64_t* base = values<int64_t>(rows_CLGb, "rows_CLGb", {-1, -1, -1, -1});
  const auto C = rows_CLGb.shape(0), L = rows_CLGb.shape(1), G = rows_CLGb.shape(2),
             b = rows_CLGb.shape(3);
  check_range("rows_CLGb", base, C * L * G * b, 0, kMaxLoad);
  const int64_t* fixed = values<int64_t>(fixed_CLG, "fixed_CLG", {C, L, G});
  check_range("fixed_CLG", fixed, C * L * G, 0, kMaxLoad);
  const int32_t* experts = values<int32_t>(slot_expert_LGb, "slot_expert_LGb", {L, G, b});
  const NodeRanks nodes = node_ranks(rank_to_node_G);
  if (nodes.num_ranks() != G) throw py::value_error("rank_to_node_G: need one node a rank");
  check_range("replica_slots", &replica_slots, 1, 0, 1 << 10);
  check_range("min_rows", &min_rows, 1, 1, kMaxLoad);
  check_range("max_fan_out", &max_fan_out, 1, 0, kMaxLoad);
  check_range("max_pushes", &max_pushes, 1, 0, kMaxLoad);
  const py::ssize_t S = replica_slots, n = b + S;
  auto replicas = empty<int32_t>({C, L, G, S});
  auto rows = empty<int64_t>({C, L, G, n});
  auto largest = empty<int64_t>({C, L});
  int32_t* out_replicas = replicas.mutable_data();
  int64_t *out_rows = rows.mutable_data(), *out_largest = largest.mutable_data();
  {
    py::gil_scoped_release release;
    const int E = 1 + *std::max_element(experts, experts + L * G * b);
    ReplicateShape shape{E, int(b), int(S), tolerance};
    shape.limits = {min_rows, max_fan_out, max_pushes};
    parallel_for(L, num_threads, [&](int64_t l) {
      Replicator replicator(shape, nodes);
      for (int64_t i = l; i < C * L; i += L)
        out_largest[i] =
            replicator.plan_slots(base + i * G * b, experts + l * G * b, out_replicas + i * G * S,
                                  out_rows + i * G * n, fixed + i * G);
    });
  }
  return py::make_tuple(replicas, rows, largest);
}

}  // namespace

void bind_limits(py::module_& m) {
  m.def("replicate_limited", &py_replicate_limited, py::arg("rows_CLGb"), py::arg("fixed_CLG"),
        py::arg("slot_expert_LGb"), py::arg("rank_to_node_G"), py::arg("replica_slots"),
        py::arg("tolerance"), py::arg("min_rows"), py::arg("max_fan_out"), py::arg("max_pushes"),
        py::arg("num_threads") = 0);
}

}  // namespace relibra
