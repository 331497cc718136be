#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>

#include "bindings/arrays.hpp"
#include "bindings/nodes.hpp"
#include "common/parallel.hpp"
#include "common/random.hpp"
#include "planner/fixed_sites.hpp"
#include "planner/static_choice.hpp"
#include "planner/static_split.hpp"

namespace relibra {
namespace {

std::vector<int32_t> node_sizes(const NodeRanks& nodes) {
  std::vector<int32_t> sizes(nodes.num_nodes());
  for (int node = 0; node < nodes.num_nodes(); ++node) sizes[node] = nodes.size(node);
  return sizes;
}

// Node of every rank, and of the home of every expert of a layer.
struct Homes {
  std::vector<int32_t> node_of_rank, slot, node;  // [G], [E], [E]

  Homes(const NodeRanks& nodes, const int32_t* home_GH, int64_t H, int64_t E)
      : node_of_rank(nodes.num_ranks()), slot(E, -1), node(E) {
    for (int n = 0; n < nodes.num_nodes(); ++n)
      for (int i = 0; i < nodes.size(n); ++i) node_of_rank[nodes.rank(n, i)] = n;
    for (int64_t j = 0; j < nodes.num_ranks() * H; ++j)
      if (home_GH[j] >= 0) slot[home_GH[j]] = int32_t(j);
    for (int64_t e = 0; e < E; ++e) {
      if (slot[e] < 0) throw py::value_error("home_LGH: need every expert in every layer");
      node[e] = node_of_rank[slot[e] / H];
    }
  }
};

void check_copies(const Homes& homes, const std::vector<StaticCopy>& copies) {
  for (size_t k = 0; k < copies.size(); ++k) {
    if (homes.node[copies[k].expert] == copies[k].node)
      throw py::value_error("an expert on the node of its home has a static copy there");
    for (size_t other = 0; other < k; ++other)
      if (copies[other].expert == copies[k].expert && copies[other].node == copies[k].node)
        throw py::value_error("an expert has two static copies on a node");
  }
}

py::array_t<int32_t> py_choose_static(const py::array& load_LEC, const py::array& home_LGH,
                                      const py::array& rank_to_node_G, int copies_per_node,
                                      int static_slots, int64_t min_gain, int64_t proposals,
                                      uint64_t seed, int num_threads) {
  const int64_t* load = values<int64_t>(load_LEC, "load_LEC", {-1, -1, -1});
  const auto L = load_LEC.shape(0), E = load_LEC.shape(1), C = load_LEC.shape(2);
  check_range("load_LEC", load, L * E * C, 0, kMaxLoad);
  const NodeRanks nodes = node_ranks(rank_to_node_G);
  const py::ssize_t G = nodes.num_ranks();
  const int32_t* home = values<int32_t>(home_LGH, "home_LGH", {L, G, -1});
  const auto H = home_LGH.shape(2);
  check_range("home_LGH", home, L * G * H, -1, E - 1);
  check_range("copies_per_node", &copies_per_node, 1, 0, 1 << 10);
  check_range("static_slots", &static_slots, 1, 0, 1 << 10);
  if (nodes.num_nodes() > kMaxStaticNodes)
    throw py::value_error("rank_to_node_G: static copies need at most " +
                          std::to_string(kMaxStaticNodes) + " nodes, got " +
                          std::to_string(nodes.num_nodes()));
  const std::vector<int32_t> sizes = node_sizes(nodes);
  if (int64_t(*std::min_element(sizes.begin(), sizes.end())) * static_slots < copies_per_node)
    throw py::value_error("static_slots: too few for the copies of a node");
  auto slots = empty<int32_t>({L, G, static_slots});
  int32_t* out = slots.mutable_data();
  {
    py::gil_scoped_release release;
    parallel_for(L, num_threads, [&](int64_t l) {
      const LayerLoads loads{int(E), int(C), load + l * E * C};
      const int32_t* layout = home + l * G * H;
      const Homes homes(nodes, layout, H, E);
      StaticOptions options;
      options.copies_per_node = copies_per_node;
      options.proposals = proposals;
      options.min_gain = min_gain;
      options.seed = hash_values(loads.load, E * C, seed);
      const auto copies = choose_copies(loads, homes.node.data(), sizes, options);
      place_copies(loads, layout, int(H), nodes, copies, static_slots, out + l * G * static_slots);
    });
  }
  return slots;
}

py::array_t<int32_t> py_place_static(const py::array& load_LEC, const py::array& home_LGH,
                                     const py::array& rank_to_node_G, const py::array& copies_LNX,
                                     int static_slots, int num_threads) {
  const int64_t* load = values<int64_t>(load_LEC, "load_LEC", {-1, -1, -1});
  const auto L = load_LEC.shape(0), E = load_LEC.shape(1), C = load_LEC.shape(2);
  check_range("load_LEC", load, L * E * C, 0, kMaxLoad);
  const NodeRanks nodes = node_ranks(rank_to_node_G);
  const py::ssize_t G = nodes.num_ranks(), N = nodes.num_nodes();
  const int32_t* home = values<int32_t>(home_LGH, "home_LGH", {L, G, -1});
  const auto H = home_LGH.shape(2);
  check_range("home_LGH", home, L * G * H, -1, E - 1);
  const int32_t* given = values<int32_t>(copies_LNX, "copies_LNX", {L, N, -1});
  const auto X = copies_LNX.shape(2);
  check_range("copies_LNX", given, L * N * X, -1, E - 1);
  check_range("static_slots", &static_slots, 1, 0, 1 << 10);
  const std::vector<int32_t> sizes = node_sizes(nodes);
  if (int64_t(*std::min_element(sizes.begin(), sizes.end())) * static_slots < X)
    throw py::value_error("static_slots: too few for the copies of a node");
  auto slots = empty<int32_t>({L, G, static_slots});
  int32_t* out = slots.mutable_data();
  {
    py::gil_scoped_release release;
    parallel_for(L, num_threads, [&](int64_t l) {
      const LayerLoads loads{int(E), int(C), load + l * E * C};
      const Homes homes(nodes, home + l * G * H, H, E);
      std::vector<StaticCopy> copies;
      for (int64_t i = 0; i < N * X; ++i)
        if (const int32_t e = given[l * N * X + i]; e >= 0) copies.push_back({e, int32_t(i / X)});
      check_copies(homes, copies);
      place_copies(loads, home + l * G * H, int(H), nodes, copies, static_slots,
                   out + l * G * static_slots);
    });
  }
  return slots;
}

// Rows of every home and static slot when every column is split exactly between nodes.
py::tuple py_split_static(const py::array& totals_CLE, const py::array& home_LGH,
                          const py::array& static_LGX, const py::array& rank_to_node_G,
                          const std::optional<py::array>& near_CLNE, int num_threads) {
  const int64_t* totals = values<int64_t>(totals_CLE, "totals_CLE", {-1, -1, -1});
  const auto C = totals_CLE.shape(0), L = totals_CLE.shape(1), E = totals_CLE.shape(2);
  check_range("totals_CLE", totals, C * L * E, 0, kMaxLoad);
  const NodeRanks nodes = node_ranks(rank_to_node_G);
  const py::ssize_t G = nodes.num_ranks(), N = nodes.num_nodes();
  const int32_t* home = values<int32_t>(home_LGH, "home_LGH", {L, G, -1});
  const int32_t* copied = values<int32_t>(static_LGX, "static_LGX", {L, G, -1});
  const auto H = home_LGH.shape(2), X = static_LGX.shape(2), b = H + X;
  check_range("home_LGH", home, L * G * H, -1, E - 1);
  check_range("static_LGX", copied, L * G * X, -1, E - 1);
  const int64_t* near =
      near_CLNE ? values<int64_t>(*near_CLNE, "near_CLNE", {C, L, N, E}) : nullptr;
  auto rows = empty<int64_t>({C, L, G, b});
  auto largest = empty<int64_t>({C, L});
  int64_t *out_rows = rows.mutable_data(), *out_largest = largest.mutable_data();
  std::fill(out_rows, out_rows + C * L * G * b, 0);
  {
    py::gil_scoped_release release;
    parallel_for(L, num_threads, [&](int64_t l) {
      const Homes homes(nodes, home + l * G * H, H, E);
      std::vector<StaticCopy> copies;
      std::vector<int64_t> slot_of_copy;
      for (int64_t j = 0; j < G * X; ++j) {
        const int32_t e = copied[l * G * X + j];
        if (e < 0) continue;
        const int32_t node = homes.node_of_rank[j / X];
        copies.push_back({e, node});
        slot_of_copy.push_back(j / X * b + H + j % X);
      }
      check_copies(homes, copies);
      StaticSplit split(node_sizes(nodes));
      split.set_copies(homes.node.data(), int(E), copies);
      std::vector<int64_t> wanted(copies.size());
      for (int64_t c = 0; c < C; ++c) {
        const int64_t use = c * L + l;
        for (size_t k = 0; near && k < copies.size(); ++k)
          wanted[k] = near[(use * N + copies[k].node) * E + copies[k].expert];
        out_largest[use] = split.solve(totals + use * E, near ? wanted.data() : nullptr);
        int64_t* slot_rows = out_rows + use * G * b;
        const auto home_slot = [&](int32_t e) { return homes.slot[e] / H * b + homes.slot[e] % H; };
        for (int64_t e = 0; e < E; ++e) slot_rows[home_slot(int32_t(e))] = totals[use * E + e];
        for (size_t k = 0; k < copies.size(); ++k) {
          slot_rows[home_slot(copies[k].expert)] -= split.copy_rows(int(k));
          slot_rows[slot_of_copy[k]] = split.copy_rows(int(k));
        }
      }
    });
  }
  return py::make_tuple(rows, largest);
}

// Replicas inside nodes when every base slot (home or static) has rows of its own; where that stays
// above the average, the rows are split once more over all copies of all nodes together.
py::tuple py_replicate_slots(const py::array& rows_CLGb, const py::array& slot_expert_LGb,
                             const py::array& rank_to_node_G, int replica_slots, double tolerance,
                             int num_threads) {
  const int64_t* base = values<int64_t>(rows_CLGb, "rows_CLGb", {-1, -1, -1, -1});
  const auto C = rows_CLGb.shape(0), L = rows_CLGb.shape(1), G = rows_CLGb.shape(2),
             b = rows_CLGb.shape(3);
  check_range("rows_CLGb", base, C * L * G * b, 0, kMaxLoad);
  const int32_t* experts = values<int32_t>(slot_expert_LGb, "slot_expert_LGb", {L, G, b});
  const NodeRanks nodes = node_ranks(rank_to_node_G);
  if (nodes.num_ranks() != G) throw py::value_error("rank_to_node_G: need one node a rank");
  check_range("replica_slots", &replica_slots, 1, 0, 1 << 10);
  const py::ssize_t S = replica_slots, n = b + S;
  auto replicas = empty<int32_t>({C, L, G, S});
  auto rows = empty<int64_t>({C, L, G, n});
  auto largest = empty<int64_t>({C, L});
  int32_t* out_replicas = replicas.mutable_data();
  int64_t *out_rows = rows.mutable_data(), *out_largest = largest.mutable_data();
  {
    py::gil_scoped_release release;
    const int E = 1 + *std::max_element(experts, experts + L * G * b);
    const ReplicateShape shape{E, int(b), int(S), tolerance};
    parallel_for(L, num_threads, [&](int64_t l) {
      Replicator replicator(shape, nodes);
      SiteSplitter splitter({E, int(G), int(n)});
      std::vector<int64_t> totals(E), split(G * n);
      std::vector<int32_t> slots(G * n);
      for (int64_t c = 0; c < C; ++c) {
        const int64_t i = c * L + l;
        const int64_t* base_rows = base + i * G * b;
        const int32_t* base_experts = experts + l * G * b;
        int32_t* use_replicas = out_replicas + i * G * S;
        int64_t* use_rows = out_rows + i * G * n;
        out_largest[i] = replicator.plan_slots(base_rows, base_experts, use_replicas, use_rows);
        int64_t sum = 0;
        std::fill(totals.begin(), totals.end(), 0);
        for (int64_t j = 0; j < G * b; ++j) {
          if (base_experts[j] < 0) continue;
          totals[base_experts[j]] += base_rows[j];
          sum += base_rows[j];
        }
        if (double(out_largest[i]) <= double((sum + G - 1) / G) * (1 + tolerance)) continue;
        for (int64_t g = 0; g < G; ++g) {
          std::copy_n(base_experts + g * b, b, &slots[g * n]);
          std::copy_n(use_replicas + g * S, S, &slots[g * n + b]);
        }
        const int64_t largest = splitter.split(totals.data(), slots.data(), split.data());
        if (largest >= out_largest[i]) continue;
        out_largest[i] = largest;
        std::copy(split.begin(), split.end(), use_rows);
      }
    });
  }
  return py::make_tuple(replicas, rows, largest);
}

}  // namespace

void bind_static_copies(py::module_& m) {
  m.def("choose_static", &py_choose_static, py::arg("load_LEC"), py::arg("home_LGH"),
        py::arg("rank_to_node_G"), py::arg("copies_per_node"), py::arg("static_slots"),
        py::arg("min_gain") = 0, py::arg("proposals") = 2000, py::arg("seed") = 0,
        py::arg("num_threads") = 0);
  m.def("place_static", &py_place_static, py::arg("load_LEC"), py::arg("home_LGH"),
        py::arg("rank_to_node_G"), py::arg("copies_LNX"), py::arg("static_slots"),
        py::arg("num_threads") = 0);
  m.def("split_static", &py_split_static, py::arg("totals_CLE"), py::arg("home_LGH"),
        py::arg("static_LGX"), py::arg("rank_to_node_G"), py::arg("near_CLNE") = py::none(),
        py::arg("num_threads") = 0);
  m.def("replicate_slots", &py_replicate_slots, py::arg("rows_CLGb"), py::arg("slot_expert_LGb"),
        py::arg("rank_to_node_G"), py::arg("replica_slots"), py::arg("tolerance") = 0.0,
        py::arg("num_threads") = 0);
}

}  // namespace relibra
