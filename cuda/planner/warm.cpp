#include "planner/warm.hpp"

#include <algorithm>
#include <numeric>

#include "planner/refine.hpp"

namespace relibra {
namespace {

// More than any objective can gain: experts that stay in their node keep their rank.
constexpr int64_t kNever = int64_t(1) << 50;

class WarmSearch {
 public:
  WarmSearch(const WarmProblem& problem, const NodeRanks& nodes, const int32_t* base)
      : problem_(problem), nodes_(nodes) {
    const int E = problem.loads.num_experts, H = problem.home_slots;
    node_of_rank_.resize(nodes.num_ranks());
    for (int node = 0; node < nodes.num_nodes(); ++node)
      for (int i = 0; i < nodes.size(node); ++i) node_of_rank_[nodes.rank(node, i)] = node;
    base_rank_.assign(E, 0);
    for (int g = 0; g < nodes.num_ranks(); ++g)
      for (int h = 0; h < H; ++h)
        if (base[int64_t(g) * H + h] >= 0) base_rank_[base[int64_t(g) * H + h]] = g;
  }

  const std::vector<int32_t>& base_rank() const { return base_rank_; }

  // Exchanges experts between nodes; who arrives takes the place of one who left.
  void between_nodes(const AnnealOptions& options, int32_t* layout) const {
    const int E = problem_.loads.num_experts, N = nodes_.num_nodes();
    std::vector<int32_t> before(E), after(E);
    for (int e = 0; e < E; ++e) before[e] = node_of_rank_[base_rank_[e]];
    BinProblem bins{E, N, problem_.loads.num_columns, problem_.loads.load, {}, {}};
    bins.capacity.assign(N, 0);
    for (const int32_t node : before) ++bins.capacity[node];
    int64_t common = 1;
    for (int node = 0; node < N; ++node) common = std::lcm(common, int64_t(nodes_.size(node)));
    for (int node = 0; node < N; ++node)
      bins.bin_scale.push_back(int32_t(common / nodes_.size(node)));
    priced_assign(bins, options, before.data(), problem_.move_cost * common, after.data());
    std::vector<std::vector<int32_t>> newcomers(N);
    for (int e = E - 1; e >= 0; --e)
      if (before[e] != after[e]) newcomers[after[e]].push_back(e);
    const int64_t places = int64_t(nodes_.num_ranks()) * problem_.home_slots;
    for (int64_t i = 0; i < places; ++i) {
      const int32_t expert = layout[i];
      if (expert < 0 || before[expert] == after[expert]) continue;
      layout[i] = newcomers[before[expert]].back();
      newcomers[before[expert]].pop_back();
    }
  }

  // Swaps newcomers of a node among each other for the smallest sum of the fullest ranks.
  void place_newcomers(int32_t* layout) {
    const int C = problem_.loads.num_columns, H = problem_.home_slots;
    for (int node = 0; node < nodes_.num_nodes(); ++node) {
      const int P = nodes_.size(node);
      std::vector<int32_t> member, rank_of, base_bin;
      std::vector<int64_t> load;
      BinProblem bins{0, P, C, nullptr, std::vector<int32_t>(P, 0), std::vector<int32_t>(P, 1)};
      for (int i = 0; i < P; ++i)
        for (int h = 0; h < H; ++h) {
          const int32_t expert = layout[int64_t(nodes_.rank(node, i)) * H + h];
          if (expert < 0) continue;
          member.push_back(expert);
          rank_of.push_back(i);
          base_bin.push_back(node_of_rank_[base_rank_[expert]] == node ? i : -1);
          load.insert(load.end(), problem_.loads.load + int64_t(expert) * C,
                      problem_.loads.load + int64_t(expert + 1) * C);
          ++bins.capacity[i];
        }
      if (std::count(base_bin.begin(), base_bin.end(), -1) < 2) continue;
      bins.num_experts = int(member.size());
      bins.load = load.data();
      bins.base_bin = base_bin.data();
      bins.move_cost = kNever;
      const std::vector<int32_t> start = rank_of;
      warm_assign(bins, start.data(), rank_of.data());
      put_back(node, member, start, rank_of, layout);
    }
  }

 private:
  // Members that changed their rank take the places of those that left it.
  void put_back(int node, const std::vector<int32_t>& member, const std::vector<int32_t>& start,
                const std::vector<int32_t>& rank_of, int32_t* layout) const {
    const int H = problem_.home_slots;
    std::vector<std::vector<int32_t>> arriving(nodes_.size(node));
    for (size_t k = member.size(); k-- > 0;)
      if (start[k] != rank_of[k]) arriving[rank_of[k]].push_back(member[k]);
    for (size_t k = 0; k < member.size(); ++k) {
      if (start[k] == rank_of[k]) continue;
      int32_t* place = layout + int64_t(nodes_.rank(node, start[k])) * H;
      while (*place != member[k]) ++place;
      // Not yet met experts of the other ranks are found by their old place, so none is lost.
      *place = -2 - arriving[start[k]].back();
      arriving[start[k]].pop_back();
    }
    for (int i = 0; i < nodes_.size(node); ++i)
      for (int h = 0; h < H; ++h) {
        int32_t& place = layout[int64_t(nodes_.rank(node, i)) * H + h];
        if (place <= -2) place = -2 - place;
      }
  }

  const WarmProblem& problem_;
  const NodeRanks& nodes_;
  std::vector<int32_t> node_of_rank_;  // [G]
  std::vector<int32_t> base_rank_;     // [E]
};

}  // namespace

void warm_layout(const WarmProblem& problem, const NodeRanks& nodes, const AnnealOptions& options,
                 const int32_t* base, int32_t* layout) {
  std::copy(base, base + int64_t(nodes.num_ranks()) * problem.home_slots, layout);
  WarmSearch search(problem, nodes, base);
  search.between_nodes(options, layout);
  search.place_newcomers(layout);
  refine_places(problem.loads, nodes, problem.home_slots, problem.replica_slots,
                problem.solver_calls, options.seed, layout, search.base_rank().data(),
                problem.move_cost);
}

}  // namespace relibra
