// Python module relibra_kernels._planner. Signatures with shapes: relibra_kernels/_planner.pyi.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include "bindings/arrays.hpp"
#include "bindings/nodes.hpp"
#include "common/parallel.hpp"
#include "common/random.hpp"
#include "planner/place.hpp"
#include "planner/refine.hpp"
#include "planner/relabel.hpp"
#include "planner/replicate.hpp"
#include "planner/split.hpp"

namespace relibra {
namespace {

constexpr int64_t kMaxRail = (1 << 16) - 1;
constexpr int64_t kUsesPerBlock = 8;   // of a pass, split with the same buffers
constexpr int64_t kBlocksPerWave = 8;  // results that wait for their place in the list

// All uses [M, L] of one pass.
struct PassArrays {
  SplitShape shape;
  int64_t num_uses, num_layers;
  const int32_t* rows;
  const int32_t* slot_expert;
  const int64_t* slot_rows;

  PassArrays(const py::array& rows_MLGE, const py::array& slot_expert_MLGn,
             const py::array& slot_rows_MLGn) {
    rows = values<int32_t>(rows_MLGE, "rows_MLGE", {-1, -1, -1, -1});
    const auto M = rows_MLGE.shape(0), L = rows_MLGE.shape(1), G = rows_MLGE.shape(2);
    slot_expert = values<int32_t>(slot_expert_MLGn, "slot_expert_MLGn", {M, L, G, -1});
    const auto n = slot_expert_MLGn.shape(3);
    slot_rows = values<int64_t>(slot_rows_MLGn, "slot_rows_MLGn", {M, L, G, n});
    shape = {int(G), int(rows_MLGE.shape(3)), int(n)};
    num_uses = M * L;
    num_layers = L;
    check_range("slot_expert_MLGn", slot_expert, num_uses * G * n, -1, shape.num_experts - 1);
  }

  SplitUse use(int64_t i) const {
    const int64_t slots = int64_t(shape.num_ranks) * shape.slots_per_rank;
    return {rows + i * shape.num_ranks * shape.num_experts, slot_expert + i * slots,
            slot_rows + i * slots};
  }
};

const int32_t* rank_table(const py::array& table, const char* name, int64_t num_ranks) {
  const int32_t* entries = values<int32_t>(table, name, {py::ssize_t(num_ranks)});
  check_range(name, entries, num_ranks, 0, kMaxRail);
  return entries;
}

// Nodes are needed only for experts with copies on several of them.
SplitRanks split_ranks(const py::array& rank_to_rail_G,
                       const std::optional<py::array>& rank_to_node_G, int num_ranks) {
  return {rank_table(rank_to_rail_G, "rank_to_rail_G", num_ranks),
          rank_to_node_G ? rank_table(*rank_to_node_G, "rank_to_node_G", num_ranks) : nullptr};
}

py::array_t<int32_t> py_split_rows(const py::array& rows_GE, const py::array& slot_expert_Gn,
                                   const py::array& slot_rows_Gn, const py::array& rank_to_rail_G,
                                   const std::optional<py::array>& rank_to_node_G) {
  const int32_t* rows = values<int32_t>(rows_GE, "rows_GE", {-1, -1});
  const auto G = rows_GE.shape(0);
  const int32_t* experts = values<int32_t>(slot_expert_Gn, "slot_expert_Gn", {G, -1});
  const auto n = slot_expert_Gn.shape(1);
  const int64_t* slot_rows = values<int64_t>(slot_rows_Gn, "slot_rows_Gn", {G, n});
  const SplitShape shape{int(G), int(rows_GE.shape(1)), int(n)};
  check_range("slot_expert_Gn", experts, G * n, -1, shape.num_experts - 1);
  const SplitRanks ranks = split_ranks(rank_to_rail_G, rank_to_node_G, shape.num_ranks);
  auto quota = empty<int32_t>({G, G * n});
  int32_t* out = quota.mutable_data();
  py::gil_scoped_release release;
  Splitter(shape, ranks).split_use({rows, experts, slot_rows}, out);
  return quota;
}

// A row of the list of quotas.
struct QuotaRow {
  int32_t micro_batch, layer, source, slot, rows;
};
static_assert(sizeof(QuotaRow) == 5 * sizeof(int32_t));

// No list is longer: all sources of all slots of experts with copies.
int64_t most_quota_rows(const PassArrays& pass) {
  const int64_t slots = int64_t(pass.shape.num_ranks) * pass.shape.slots_per_rank;
  std::vector<int32_t> copies(pass.shape.num_experts);
  int64_t copied = 0;
  for (int64_t i = 0; i < pass.num_uses; ++i) {
    const int32_t* expert = pass.use(i).slot_expert;
    std::fill(copies.begin(), copies.end(), 0);
    for (int64_t s = 0; s < slots; ++s)
      if (expert[s] >= 0) ++copies[expert[s]];
    for (const int32_t count : copies) copied += count > 1 ? count : 0;
  }
  return copied * pass.shape.num_ranks;
}

void append_rows(const SplitEntries& entries, int32_t micro_batch, int32_t layer,
                 std::vector<QuotaRow>& rows) {
  const size_t before = rows.size();
  rows.resize(before + entries.count);
  for (size_t i = 0; i < entries.count; ++i) {
    const SplitEntry& one = entries.data[i];
    rows[before + i] = {micro_batch, layer, one.source, one.slot, one.rows};
  }
}

py::array_t<int32_t> py_split_copied(const py::array& rows_MLGE, const py::array& slot_expert_MLGn,
                                     const py::array& slot_rows_MLGn,
                                     const py::array& rank_to_rail_G, int num_threads,
                                     const std::optional<py::array>& rank_to_node_G) {
  const PassArrays pass(rows_MLGE, slot_expert_MLGn, slot_rows_MLGn);
  const SplitRanks ranks = split_ranks(rank_to_rail_G, rank_to_node_G, pass.shape.num_ranks);
  // Memory that is never written costs nothing, so the list is made too long and then cut.
  auto quota = empty<int32_t>({py::ssize_t(most_quota_rows(pass)), 5});
  auto* const list = reinterpret_cast<QuotaRow*>(quota.mutable_data());
  QuotaRow* end = list;
  {
    py::gil_scoped_release release;
    const int64_t blocks = (pass.num_uses + kUsesPerBlock - 1) / kUsesPerBlock;
    std::vector<std::vector<QuotaRow>> parts(std::min(blocks, kBlocksPerWave));
    for (int64_t begin = 0; begin < blocks; begin += kBlocksPerWave) {
      const int64_t count = std::min(blocks - begin, kBlocksPerWave);
      parallel_for(count, num_threads, [&](int64_t k) {
        parts[k].clear();
        Splitter splitter(pass.shape, ranks);
        const int64_t first = (begin + k) * kUsesPerBlock;
        for (int64_t i = first; i < std::min(pass.num_uses, first + kUsesPerBlock); ++i)
          append_rows(splitter.split_copied(pass.use(i)), int32_t(i / pass.num_layers),
                      int32_t(i % pass.num_layers), parts[k]);
      });
      for (int64_t k = 0; k < count; ++k) end = std::copy(parts[k].begin(), parts[k].end(), end);
    }
  }
  quota.resize({py::ssize_t(end - list), py::ssize_t(5)}, false);
  return quota;
}

py::array_t<int64_t> py_count_traffic(const py::array& rows_MLGE, const py::array& slot_expert_MLGn,
                                      const py::array& slot_rows_MLGn,
                                      const py::array& rank_to_node_G,
                                      const py::array& rank_to_rail_G, int num_threads) {
  const PassArrays pass(rows_MLGE, slot_expert_MLGn, slot_rows_MLGn);
  const SplitRanks ranks = split_ranks(rank_to_rail_G, rank_to_node_G, pass.shape.num_ranks);
  std::vector<Traffic> by_use(pass.num_uses);
  {
    py::gil_scoped_release release;
    const int64_t blocks = (pass.num_uses + kUsesPerBlock - 1) / kUsesPerBlock;
    parallel_for(blocks, num_threads, [&](int64_t k) {
      Splitter splitter(pass.shape, ranks);
      const int64_t first = k * kUsesPerBlock;
      for (int64_t i = first; i < std::min(pass.num_uses, first + kUsesPerBlock); ++i)
        by_use[i] = splitter.count_traffic(pass.use(i), ranks.node);
    });
  }
  auto sums = empty<int64_t>({3});
  int64_t* out = sums.mutable_data();
  std::fill(out, out + 3, 0);
  for (const Traffic& one : by_use) out[0] += one.local, out[1] += one.nvlink, out[2] += one.rdma;
  return sums;
}

// Experts onto bins, layer by layer. start: improve that assignment instead of a cold search.
py::tuple py_assign_bins(const py::array& load_LEC, const py::array& capacity_B,
                         const py::array& scale_B, const std::optional<py::array>& start_LE,
                         int64_t proposals, uint64_t seed, bool check, int num_threads) {
  const int64_t* load = values<int64_t>(load_LEC, "load_LEC", {-1, -1, -1});
  const auto L = load_LEC.shape(0), E = load_LEC.shape(1), C = load_LEC.shape(2);
  check_range("load_LEC", load, L * E * C, 0, kMaxLoad);
  const int32_t* capacity = values<int32_t>(capacity_B, "capacity_B", {-1});
  const auto B = capacity_B.shape(0);
  if (B < 1) throw py::value_error("capacity_B: need at least one bin, got none");
  const int32_t* scale = values<int32_t>(scale_B, "scale_B", {B});
  check_range("capacity_B", capacity, B, 0, E);
  check_range("scale_B", scale, B, 1, 1 << 20);
  if (std::accumulate(capacity, capacity + B, int64_t(0)) != E)
    throw py::value_error("capacity_B: need a sum of " + std::to_string(E) + " experts");
  double sum = 0;
  for (int64_t i = 0; i < L * E * C; ++i) sum += double(load[i]);
  if (sum * *std::max_element(scale, scale + B) > 0x1p62)
    throw py::value_error("load_LEC: need a scaled sum of at most 2^62");
  const int32_t* start = start_LE ? values<int32_t>(*start_LE, "start_LE", {L, E}) : nullptr;
  if (start) check_range("start_LE", start, L * E, 0, B - 1);
  auto bin_of = empty<int32_t>({L, E});
  auto objective = empty<int64_t>({L}), tried = empty<int64_t>({L});
  int32_t* out = bin_of.mutable_data();
  int64_t *out_objective = objective.mutable_data(), *out_tried = tried.mutable_data();
  {
    py::gil_scoped_release release;
    parallel_for(L, num_threads, [&](int64_t l) {
      BinProblem problem{int(E), int(B), int(C), load + l * E * C, {}, {}};
      problem.capacity.assign(capacity, capacity + B);
      problem.bin_scale.assign(scale, scale + B);
      AnnealOptions options;
      options.proposals = proposals;
      options.seed = hash_values(problem.load, E * C, seed);
      options.check = check;
      const AnnealResult result = start ? warm_assign(problem, start + l * E, out + l * E)
                                        : cold_assign(problem, options, out + l * E);
      out_objective[l] = result.objective;
      out_tried[l] = result.num_proposals;
    });
  }
  return py::make_tuple(bin_of, objective, tried);
}

py::array_t<int32_t> py_place_in_nodes(const py::array& load_LEC, const py::array& node_of_LE,
                                       const py::array& rank_to_node_G, int home_slots,
                                       int replica_slots, int64_t proposals, int64_t solver_calls,
                                       uint64_t seed, int num_threads) {
  const int64_t* load = values<int64_t>(load_LEC, "load_LEC", {-1, -1, -1});
  const auto L = load_LEC.shape(0), E = load_LEC.shape(1), C = load_LEC.shape(2);
  check_range("load_LEC", load, L * E * C, 0, kMaxLoad);
  const int32_t* node_of = values<int32_t>(node_of_LE, "node_of_LE", {L, E});
  const NodeRanks nodes = node_ranks(rank_to_node_G);
  check_range("node_of_LE", node_of, L * E, 0, nodes.num_nodes() - 1);
  for (int64_t l = 0; l < L; ++l)
    for (int node = 0; node < nodes.num_nodes(); ++node)
      if (std::count(node_of + l * E, node_of + (l + 1) * E, node) >
          int64_t(nodes.size(node)) * home_slots)
        throw py::value_error("node_of_LE: more experts on a node than it has home slots");
  const py::ssize_t G = nodes.num_ranks();
  auto home = empty<int32_t>({L, G, home_slots});
  int32_t* out = home.mutable_data();
  {
    py::gil_scoped_release release;
    parallel_for(L, num_threads, [&](int64_t l) {
      const LayerLoads loads{int(E), int(C), load + l * E * C};
      AnnealOptions options;
      options.proposals = proposals;
      options.seed = hash_values(loads.load, E * C, seed);
      int32_t* layout = out + l * G * home_slots;
      place_in_nodes(loads, node_of + l * E, nodes, home_slots, options, layout);
      refine_places(loads, nodes, home_slots, replica_slots, solver_calls, options.seed, layout);
    });
  }
  return home;
}

py::array_t<int32_t> py_rank_capacities(const py::array& rank_to_node_G, int num_experts,
                                        int home_slots) {
  const NodeRanks nodes = node_ranks(rank_to_node_G);
  const int64_t slots = int64_t(nodes.num_ranks()) * home_slots;
  if (num_experts < 1 || num_experts > slots)
    throw py::value_error("num_experts: need 1.." + std::to_string(slots) + ", got " +
                          std::to_string(num_experts));
  const std::vector<int32_t> capacity = rank_capacities(nodes, num_experts, home_slots);
  auto result = empty<int32_t>({nodes.num_ranks()});
  std::copy(capacity.begin(), capacity.end(), result.mutable_data());
  return result;
}

py::array_t<int32_t> py_relabel(const py::array& home_LGH, const py::array& base_LGH,
                                const py::array& rank_to_node_G, int num_experts, bool across_nodes,
                                int num_threads) {
  const NodeRanks nodes = node_ranks(rank_to_node_G);
  const int32_t* home = values<int32_t>(home_LGH, "home_LGH", {-1, nodes.num_ranks(), -1});
  const auto L = home_LGH.shape(0), G = home_LGH.shape(1), H = home_LGH.shape(2);
  const int32_t* base = values<int32_t>(base_LGH, "base_LGH", {L, G, H});
  check_range("home_LGH", home, L * G * H, -1, num_experts - 1);
  check_range("base_LGH", base, L * G * H, -1, num_experts - 1);
  auto renamed = empty<int32_t>({L, G, H});
  int32_t* out = renamed.mutable_data();
  std::copy(home, home + L * G * H, out);
  py::gil_scoped_release release;
  parallel_for(L, num_threads, [&](int64_t l) {
    relabel(nodes, int(H), num_experts, across_nodes, base + l * G * H, out + l * G * H);
  });
  return renamed;
}

py::array_t<int32_t> py_match(const py::array& weight_nn) {
  const int64_t* weight = values<int64_t>(weight_nn, "weight_nn", {-1, -1});
  const auto n = weight_nn.shape(0);
  if (weight_nn.shape(1) != n) throw py::value_error("weight_nn: need a square matrix");
  check_range("weight_nn", weight, n * n, -kMaxLoad, kMaxLoad);
  const std::vector<int32_t> column = match(std::vector<int64_t>(weight, weight + n * n), int(n));
  auto result = empty<int32_t>({n});
  std::copy(column.begin(), column.end(), result.mutable_data());
  return result;
}

py::tuple py_replicate(const py::array& totals_CLE, const py::array& home_LGH,
                       const py::array& rank_to_node_G, int replica_slots, double tolerance,
                       int num_threads, bool donor_only) {
  const int64_t* totals = values<int64_t>(totals_CLE, "totals_CLE", {-1, -1, -1});
  const auto C = totals_CLE.shape(0), L = totals_CLE.shape(1), E = totals_CLE.shape(2);
  check_range("totals_CLE", totals, C * L * E, 0, kMaxLoad);
  const NodeRanks nodes = node_ranks(rank_to_node_G);
  const py::ssize_t G = nodes.num_ranks();
  const int32_t* home = values<int32_t>(home_LGH, "home_LGH", {L, G, -1});
  const auto H = home_LGH.shape(2);
  const py::ssize_t S = replica_slots, n = H + S;
  check_range("home_LGH", home, L * G * H, -1, E - 1);
  check_range("replica_slots", &replica_slots, 1, 0, 1 << 10);
  auto replicas = empty<int32_t>({C, L, G, S});
  auto rows = empty<int64_t>({C, L, G, n});
  auto largest = empty<int64_t>({C, L});
  int32_t* out_replicas = replicas.mutable_data();
  int64_t *out_rows = rows.mutable_data(), *out_largest = largest.mutable_data();
  {
    py::gil_scoped_release release;
    const ReplicateShape shape{int(E), int(H), int(S), tolerance, donor_only};
    parallel_for(L, num_threads, [&](int64_t l) {
      Replicator replicator(shape, nodes);
      for (int64_t c = 0; c < C; ++c) {
        const int64_t i = c * L + l;
        out_largest[i] = replicator.plan(totals + i * E, home + l * G * H, out_replicas + i * G * S,
                                         out_rows + i * G * n);
      }
    });
  }
  return py::make_tuple(replicas, rows, largest);
}

}  // namespace

void bind_baselines(py::module_& m);      // bindings/baselines.cpp
void bind_compose(py::module_& m);        // bindings/compose.cpp
void bind_copies(py::module_& m);         // bindings/copies.cpp
void bind_coactivation(py::module_& m);   // bindings/coactivation.cpp
void bind_static_copies(py::module_& m);  // bindings/static_copies.cpp
void bind_limits(py::module_& m);         // bindings/limits.cpp
void bind_warm(py::module_& m);           // bindings/warm.cpp

}  // namespace relibra

PYBIND11_MODULE(_planner, m) {
  namespace py = pybind11;
  m.doc() = "Native core of the planner.";
  m.def("assign_bins", &relibra::py_assign_bins, py::arg("load_LEC"), py::arg("capacity_B"),
        py::arg("scale_B"), py::arg("start_LE") = py::none(), py::arg("proposals") = 100000,
        py::arg("seed") = 0, py::arg("check") = false, py::arg("num_threads") = 0);
  m.def("place_in_nodes", &relibra::py_place_in_nodes, py::arg("load_LEC"), py::arg("node_of_LE"),
        py::arg("rank_to_node_G"), py::arg("home_slots"), py::arg("replica_slots"),
        py::arg("proposals"), py::arg("solver_calls"), py::arg("seed") = 0,
        py::arg("num_threads") = 0);
  m.def("rank_capacities", &relibra::py_rank_capacities, py::arg("rank_to_node_G"),
        py::arg("num_experts"), py::arg("home_slots"));
  m.def("relabel", &relibra::py_relabel, py::arg("home_LGH"), py::arg("base_LGH"),
        py::arg("rank_to_node_G"), py::arg("num_experts"), py::arg("across_nodes") = false,
        py::arg("num_threads") = 0);
  m.def("match", &relibra::py_match, py::arg("weight_nn"));
  m.def("replicate", &relibra::py_replicate, py::arg("totals_CLE"), py::arg("home_LGH"),
        py::arg("rank_to_node_G"), py::arg("replica_slots"), py::arg("tolerance") = 0.0,
        py::arg("num_threads") = 0, py::arg("donor_only") = false);
  m.def("split_rows", &relibra::py_split_rows, py::arg("rows_GE"), py::arg("slot_expert_Gn"),
        py::arg("slot_rows_Gn"), py::arg("rank_to_rail_G"), py::arg("rank_to_node_G") = py::none());
  m.def("split_copied", &relibra::py_split_copied, py::arg("rows_MLGE"),
        py::arg("slot_expert_MLGn"), py::arg("slot_rows_MLGn"), py::arg("rank_to_rail_G"),
        py::arg("num_threads") = 0, py::arg("rank_to_node_G") = py::none());
  m.def("count_traffic", &relibra::py_count_traffic, py::arg("rows_MLGE"),
        py::arg("slot_expert_MLGn"), py::arg("slot_rows_MLGn"), py::arg("rank_to_node_G"),
        py::arg("rank_to_rail_G"), py::arg("num_threads") = 0);
  relibra::bind_baselines(m);
  relibra::bind_compose(m);
  relibra::bind_copies(m);
  relibra::bind_coactivation(m);
  relibra::bind_static_copies(m);
  relibra::bind_limits(m);
  relibra::bind_warm(m);
}
