#include "planner/refine.hpp"

#include <algorithm>

#include "common/random.hpp"

namespace relibra {
namespace {

// Relative excess over the bound at which a column is as good as flat.
constexpr double kFlat = 2e-4;

class Refiner {
 public:
  Refiner(const LayerLoads& loads, const NodeRanks& nodes, int home_slots, int replica_slots,
          int64_t solver_calls, uint64_t seed, int32_t* home, const int32_t* base_rank,
          int64_t move_cost)
      : loads_(loads),
        nodes_(nodes),
        H_(home_slots),
        S_(replica_slots),
        seed_(seed),
        home_(home),
        base_rank_(base_rank),
        move_cost_(move_cost),
        budget_(solver_calls) {}

  int64_t run() {
    const int N = nodes_.num_nodes(), C = loads_.num_columns;
    goal_.assign(C, 0);
    for (int c = 0; c < C; ++c)
      for (int node = 0; node < N; ++node)
        goal_[c] = std::max(goal_[c], node_lower_bound(instance(node, c)));
    largest_.resize(size_t(N) * C);
    for (int node = 0; node < N; ++node)
      for (int c = 0; c < C; ++c) largest_[size_t(node) * C + c] = solve(node, c);
    while (calls_ < budget_ + int64_t(N) * C) {
      list_bad_columns();
      if (bad_columns_.empty()) break;
      // In turn, so that a column that cannot be mended does not take the whole budget.
      const int column = bad_columns_[counter_ % bad_columns_.size()];
      try_exchange(fullest_node(column), column);
    }
    return calls_;
  }

 private:
  NodeInstance instance(int node, int column) {
    const int P = nodes_.size(node);
    rows_.resize(size_t(P) * H_);
    for (int i = 0; i < P; ++i)
      for (int h = 0; h < H_; ++h) {
        const int32_t expert = home_[int64_t(nodes_.rank(node, i)) * H_ + h];
        rows_[size_t(i) * H_ + h] =
            expert < 0 ? 0 : loads_.load[int64_t(expert) * loads_.num_columns + column];
      }
    return {P, H_, S_, rows_.data()};
  }

  int64_t solve(int node, int column) {
    ++calls_;
    solver_.solve(instance(node, column), goal_[column], result_);
    return result_.largest;
  }

  int fullest_node(int column) const {
    int fullest = 0;
    for (int node = 1; node < nodes_.num_nodes(); ++node)
      if (largest_[size_t(node) * loads_.num_columns + column] >
          largest_[size_t(fullest) * loads_.num_columns + column])
        fullest = node;
    return fullest;
  }

  // Rows of the fullest rank above what the fullest node allows.
  int64_t excess(int column) const {
    const size_t at = size_t(fullest_node(column)) * loads_.num_columns + column;
    return std::max<int64_t>(0, largest_[at] - goal_[column]);
  }

  void list_bad_columns() {
    bad_columns_.clear();
    for (int c = 0; c < loads_.num_columns; ++c)
      if (double(excess(c)) > kFlat * double(goal_[c])) bad_columns_.push_back(c);
  }

  // What it costs more to have an expert on one rank than on another.
  int64_t price(int32_t expert, int32_t on, int32_t than_on) const {
    if (move_cost_ == 0) return 0;
    return move_cost_ * ((base_rank_[expert] == than_on) - (base_rank_[expert] == on));
  }

  // One random exchange of two experts of the node; kept when the sum of excesses and of prices
  // falls.
  void try_exchange(int node, int column) {
    const int C = loads_.num_columns, P = nodes_.size(node);
    const uint64_t bits = random_bits(seed_, counter_++);
    const int a = int(below(bits, 16, uint32_t(P)));
    const int b = (a + 1 + int(below(bits >> 16, 16, uint32_t(P - 1)))) % P;
    const int32_t rank_a = nodes_.rank(node, a), rank_b = nodes_.rank(node, b);
    int32_t& first = home_[int64_t(rank_a) * H_ + below(bits >> 32, 16, uint32_t(H_))];
    int32_t& second = home_[int64_t(rank_b) * H_ + below(bits >> 48, 16, uint32_t(H_))];
    if (first < 0 || second < 0) {
      ++calls_;  // filler slots stay; counted, so that the loop ends
      return;
    }
    int64_t before = 0, after = price(first, rank_b, rank_a) + price(second, rank_a, rank_b);
    for (int c = 0; c < C; ++c) before += excess(c);
    old_.assign(largest_.begin() + size_t(node) * C, largest_.begin() + size_t(node + 1) * C);
    std::swap(first, second);
    if (after >= before) ++calls_;  // dearer than any gain; counted, so that the loop ends
    for (int i = 0; i < C && after < before; ++i) {
      const int c = i == 0 ? column : i - (i <= column);  // the column to mend comes first
      largest_[size_t(node) * C + c] = solve(node, c);
      after += excess(c);
    }
    if (after < before) return;
    std::swap(first, second);
    std::copy(old_.begin(), old_.end(), largest_.begin() + size_t(node) * C);
  }

  const LayerLoads& loads_;
  const NodeRanks& nodes_;
  const int H_, S_;
  const uint64_t seed_;
  int32_t* home_;
  const int32_t* base_rank_;
  const int64_t move_cost_;
  const int64_t budget_;
  int64_t calls_ = 0;
  uint64_t counter_ = 0;
  NodeSolver solver_;
  NodeResult result_;
  std::vector<int> bad_columns_;
  std::vector<int64_t> rows_, goal_, largest_, old_;  // goal_: [C]; largest_: [N][C]
};

}  // namespace

int64_t refine_places(const LayerLoads& loads, const NodeRanks& nodes, int home_slots,
                      int replica_slots, int64_t solver_calls, uint64_t seed,
                      int32_t* home_slot_expert, const int32_t* base_rank, int64_t move_cost) {
  int widest = 0;
  for (int node = 0; node < nodes.num_nodes(); ++node) widest = std::max(widest, nodes.size(node));
  // With S >= H every node becomes flat whatever the placement, and one rank has no exchanges.
  if (replica_slots == 0 || replica_slots >= home_slots || widest < 2) return 0;
  // A call takes longer on a wide node; the budget is meant for 8 ranks.
  const int64_t calls = solver_calls * 8 / std::max(8, widest);
  return Refiner(loads, nodes, home_slots, replica_slots, calls, seed, home_slot_expert, base_rank,
                 move_cost)
      .run();
}

}  // namespace relibra
