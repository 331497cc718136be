// Bindings of planner/copies.hpp.
#include "planner/copies.hpp"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>

#include "bindings/arrays.hpp"
#include "common/parallel.hpp"

namespace relibra {
namespace {

// All uses [M, L] of one pass with the tables of the ranks.
struct CopyPass {
  SplitShape shape;
  int64_t num_micro_batches, num_layers;
  const int32_t* rows;
  const int32_t* slot_expert;
  const int64_t* slot_rows;
  SplitRanks ranks;
  CopyRoutes routes;

  CopyPass(const py::array& rows_MLGE, const py::array& slot_expert_MLGn,
           const py::array& slot_rows_MLGn, const py::array& rank_to_node_G,
           const py::array& rank_to_rail_G, const std::optional<py::array>& gateway_GN) {
    rows = values<int32_t>(rows_MLGE, "rows_MLGE", {-1, -1, -1, -1});
    const auto M = rows_MLGE.shape(0), L = rows_MLGE.shape(1), G = rows_MLGE.shape(2);
    slot_expert = values<int32_t>(slot_expert_MLGn, "slot_expert_MLGn", {M, L, G, -1});
    const auto n = slot_expert_MLGn.shape(3);
    slot_rows = values<int64_t>(slot_rows_MLGn, "slot_rows_MLGn", {M, L, G, n});
    shape = {int(G), int(rows_MLGE.shape(3)), int(n)};
    num_micro_batches = M, num_layers = L;
    check_range("slot_expert_MLGn", slot_expert, M * L * G * n, -1, shape.num_experts - 1);
    const int32_t* node = values<int32_t>(rank_to_node_G, "rank_to_node_G", {G});
    check_range("rank_to_node_G", node, G, 0, G - 1);
    const int32_t* rail = values<int32_t>(rank_to_rail_G, "rank_to_rail_G", {G});
    check_range("rank_to_rail_G", rail, G, 0, (1 << 16) - 1);
    int num_nodes = 0;
    for (int g = 0; g < G; ++g) num_nodes = std::max(num_nodes, node[g] + 1);
    const int32_t* gateway = nullptr;
    if (gateway_GN) {
      gateway = values<int32_t>(*gateway_GN, "gateway_GN", {G, num_nodes});
      check_range("gateway_GN", gateway, G * num_nodes, 0, G - 1);
    }
    ranks = {rail, node};
    routes = {num_nodes, gateway != nullptr, node, gateway};
  }

  SplitUse use(int64_t i) const {
    const int64_t slots = int64_t(shape.num_ranks) * shape.slots_per_rank;
    return {rows + i * shape.num_ranks * shape.num_experts, slot_expert + i * slots,
            slot_rows + i * slots};
  }

  int64_t num_uses() const { return num_micro_batches * num_layers; }

  py::array_t<double> result() const {
    return empty<double>({num_micro_batches, num_layers, kNumCopyLinks, shape.num_ranks});
  }
};

py::array_t<double> py_expected_copies(
    const py::array& rows_MLGE, const py::array& slot_expert_MLGn, const py::array& slot_rows_MLGn,
    const py::array& rank_to_node_G, const py::array& rank_to_rail_G,
    const std::optional<py::array>& gateway_GN, int top_k, bool distinct, int num_threads) {
  const CopyPass pass(rows_MLGE, slot_expert_MLGn, slot_rows_MLGn, rank_to_node_G, rank_to_rail_G,
                      gateway_GN);
  if (top_k < 1) throw py::value_error("top_k: need at least 1, got " + std::to_string(top_k));
  auto copies = pass.result();
  double* out = copies.mutable_data();
  py::gil_scoped_release release;
  parallel_for(pass.num_uses(), num_threads, [&](int64_t i) {
    expected_copies(pass.shape, pass.use(i), pass.ranks, pass.routes, top_k, distinct,
                    out + i * kNumCopyLinks * pass.shape.num_ranks);
  });
  return copies;
}

py::array_t<double> py_count_copies(const py::array& ids_TLK, const py::array& first_MG,
                                    const py::array& rows_MLGE, const py::array& slot_expert_MLGn,
                                    const py::array& slot_rows_MLGn,
                                    const py::array& rank_to_node_G,
                                    const py::array& rank_to_rail_G,
                                    const std::optional<py::array>& gateway_GN, int64_t repeat,
                                    int num_threads) {
  const CopyPass pass(rows_MLGE, slot_expert_MLGn, slot_rows_MLGn, rank_to_node_G, rank_to_rail_G,
                      gateway_GN);
  check_range("repeat", &repeat, 1, 1, 1 << 20);
  const auto G = pass.shape.num_ranks;
  const int16_t* ids = values<int16_t>(ids_TLK, "ids_TLK", {-1, pass.num_layers, -1});
  const auto T = ids_TLK.shape(0), L = ids_TLK.shape(1), K = ids_TLK.shape(2);
  check_range("ids_TLK", ids, T * L * K, -1, pass.shape.num_experts - 1);
  const int64_t* first = values<int64_t>(first_MG, "first_MG", {pass.num_micro_batches, G + 1});
  check_range("first_MG", first, pass.num_micro_batches * (G + 1), 0, T);
  auto copies = pass.result();
  double* out = copies.mutable_data();
  py::gil_scoped_release release;
  parallel_for(pass.num_uses(), num_threads, [&](int64_t i) {
    const int64_t m = i / pass.num_layers, l = i % pass.num_layers;
    const TokenIds tokens{ids + l * K, L * K, first + m * (G + 1), int(K), repeat};
    count_copies(pass.shape, pass.use(i), pass.ranks, pass.routes, tokens,
                 out + i * kNumCopyLinks * G);
  });
  return copies;
}

}  // namespace

void bind_copies(py::module_& m) {
  m.def("expected_copies", &py_expected_copies, py::arg("rows_MLGE"), py::arg("slot_expert_MLGn"),
        py::arg("slot_rows_MLGn"), py::arg("rank_to_node_G"), py::arg("rank_to_rail_G"),
        py::arg("gateway_GN") = py::none(), py::arg("top_k") = 1, py::arg("distinct") = true,
        py::arg("num_threads") = 0);
  m.def("count_copies", &py_count_copies, py::arg("ids_TLK"), py::arg("first_MG"),
        py::arg("rows_MLGE"), py::arg("slot_expert_MLGn"), py::arg("slot_rows_MLGn"),
        py::arg("rank_to_node_G"), py::arg("rank_to_rail_G"), py::arg("gateway_GN") = py::none(),
        py::arg("repeat") = 1, py::arg("num_threads") = 0);
}

}  // namespace relibra
