#include "planner/copies.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace relibra {
namespace {

// Adds the links of one source.
//
// by_rank: [G] copies that each rank needs; by_node: [N] copies that each node needs.
void add_links(const SplitShape& shape, const CopyRoutes& routes, int source, const double* by_rank,
               const double* by_node, double* out) {
  const int G = shape.num_ranks;
  const auto at = [&](CopyLink link, int rank) -> double& { return out[int64_t(link) * G + rank]; };
  const int own = routes.rank_to_node[source];
  for (int g = 0; g < G; ++g) {
    const double copies = by_rank[g];
    at(kReceived, g) += copies;
    if (g == source) continue;
    const int node = routes.rank_to_node[g];
    if (node == own) {
      at(kNvlinkOut, source) += copies;
      at(kNvlinkIn, g) += copies;
    } else if (!routes.two_hop) {
      at(kRdmaOut, source) += copies;
      at(kRdmaIn, g) += copies;
    } else {
      const int entry = routes.gateway[int64_t(source) * routes.num_nodes + node];
      if (entry == g) continue;
      at(kNvlinkOut, entry) += copies;
      at(kNvlinkIn, g) += copies;
    }
  }
  if (!routes.two_hop) return;
  for (int node = 0; node < routes.num_nodes; ++node) {
    if (node == own) continue;
    at(kRdmaOut, source) += by_node[node];
    at(kRdmaIn, routes.gateway[int64_t(source) * routes.num_nodes + node]) += by_node[node];
  }
}

}  // namespace

void expected_copies(const SplitShape& shape, const SplitUse& use, const SplitRanks& ranks,
                     const CopyRoutes& routes, int top_k, bool distinct, double* out) {
  const int G = shape.num_ranks, E = shape.num_experts, N = routes.num_nodes;
  const int64_t slots = int64_t(G) * shape.slots_per_rank;
  std::vector<int32_t> quota(G * slots);
  Splitter(shape, ranks).split_use(use, quota.data());
  std::fill(out, out + int64_t(kNumCopyLinks) * G, 0.0);
  std::vector<double> by_rank(G), by_node(N), share(int64_t(N) * E);
  for (int source = 0; source < G; ++source) {
    int64_t rows = 0;
    for (int e = 0; e < E; ++e) rows += use.rows[int64_t(source) * E + e];
    if (rows == 0) continue;
    const double tokens = double(rows) / top_k;
    const double start = distinct ? 1.0 : 0.0;
    std::fill(by_rank.begin(), by_rank.end(), start);
    std::fill(by_node.begin(), by_node.end(), start);
    std::fill(share.begin(), share.end(), 0.0);
    const int32_t* sent = quota.data() + source * slots;
    for (int64_t slot = 0; slot < slots; ++slot) {
      if (sent[slot] == 0) continue;
      const int rank = int(slot / shape.slots_per_rank), node = routes.rank_to_node[rank];
      if (!distinct) {
        by_rank[rank] += sent[slot];
        by_node[node] += sent[slot];
        continue;
      }
      const double part = sent[slot] / tokens;
      by_rank[rank] *= 1.0 - std::min(part, 1.0);
      share[int64_t(node) * E + use.slot_expert[slot]] += part;
    }
    if (distinct) {
      for (int node = 0; node < N; ++node)
        for (int e = 0; e < E; ++e)
          by_node[node] *= 1.0 - std::min(share[int64_t(node) * E + e], 1.0);
      for (double& copies : by_rank) copies = tokens * (1.0 - copies);
      for (double& copies : by_node) copies = tokens * (1.0 - copies);
    }
    add_links(shape, routes, source, by_rank.data(), by_node.data(), out);
  }
}

void count_copies(const SplitShape& shape, const SplitUse& use, const SplitRanks& ranks,
                  const CopyRoutes& routes, const TokenIds& tokens, double* out) {
  const int G = shape.num_ranks, E = shape.num_experts, N = routes.num_nodes;
  const int64_t slots = int64_t(G) * shape.slots_per_rank;
  std::vector<int32_t> quota(G * slots);
  Splitter(shape, ranks).split_use(use, quota.data());
  // Slots of each expert, ascending.
  std::vector<int32_t> first(E + 1, 0), slot_of(slots);
  for (int64_t s = 0; s < slots; ++s)
    if (use.slot_expert[s] >= 0) ++first[use.slot_expert[s] + 1];
  for (int e = 0; e < E; ++e) first[e + 1] += first[e];
  std::vector<int32_t> fill(first.begin(), first.end() - 1);
  for (int64_t s = 0; s < slots; ++s)
    if (use.slot_expert[s] >= 0) slot_of[fill[use.slot_expert[s]]++] = int32_t(s);
  std::fill(out, out + int64_t(kNumCopyLinks) * G, 0.0);
  std::vector<double> by_rank(G), by_node(N);
  std::vector<int64_t> rank_seen(G, -1), node_seen(N, -1);
  std::vector<int32_t> at(E);
  int64_t visit = 0;
  for (int source = 0; source < G; ++source) {
    int32_t* sent = quota.data() + source * slots;
    // The slot that takes the next row of expert e.
    const auto next_slot = [&](int e) {
      while (at[e] < first[e + 1] && sent[slot_of[at[e]]] == 0) ++at[e];
      if (at[e] == first[e + 1])
        throw std::invalid_argument(
            "ids: need the ids that the rows were counted from, got more of expert " +
            std::to_string(e) + " from rank " + std::to_string(source));
      return slot_of[at[e]];
    };
    std::fill(by_rank.begin(), by_rank.end(), 0.0);
    std::fill(by_node.begin(), by_node.end(), 0.0);
    std::copy(first.begin(), first.end() - 1, at.begin());
    for (int64_t t = tokens.first[source]; t < tokens.first[source + 1]; ++t) {
      const int16_t* chosen = tokens.ids + t * tokens.stride;
      for (int64_t left = tokens.repeat; left > 0;) {
        // So many in a row find all their experts in the same slots.
        int64_t run = left;
        for (int k = 0; k < tokens.top_k; ++k) {
          const int e = chosen[k];
          if (e < 0) continue;
          run = std::min<int64_t>(run, sent[next_slot(e)]);
          for (int j = 0; j < k; ++j)
            if (chosen[j] == e) run = 1;
        }
        ++visit;
        for (int k = 0; k < tokens.top_k; ++k) {
          const int e = chosen[k];
          if (e < 0) continue;
          const int slot = next_slot(e), rank = slot / shape.slots_per_rank;
          const int node = routes.rank_to_node[rank];
          sent[slot] -= int32_t(run);
          if (rank_seen[rank] != visit) rank_seen[rank] = visit, by_rank[rank] += run;
          if (node_seen[node] != visit) node_seen[node] = visit, by_node[node] += run;
        }
        left -= run;
      }
    }
    add_links(shape, routes, source, by_rank.data(), by_node.data(), out);
  }
}

}  // namespace relibra
