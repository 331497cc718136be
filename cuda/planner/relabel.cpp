#include "planner/relabel.hpp"

#include <algorithm>
#include <limits>

namespace relibra {

// Shortest augmenting paths with potentials, one row after the other; cost = -weight.
std::vector<int32_t> match(const std::vector<int64_t>& weight, int n) {
  constexpr int64_t kFar = std::numeric_limits<int64_t>::max() / 4;
  std::vector<int64_t> row_price(n + 1, 0), column_price(n + 1, 0);
  std::vector<int32_t> row_of(n + 1, 0), from(n + 1, 0);  // 1-based, 0 = none
  for (int row = 1; row <= n; ++row) {
    row_of[0] = row;
    int column = 0;
    std::vector<int64_t> distance(n + 1, kFar);
    std::vector<char> done(n + 1, 0);
    while (row_of[column] != 0) {
      done[column] = 1;
      const int here = row_of[column];
      int64_t step = kFar;
      int next = 0;
      for (int j = 1; j <= n; ++j) {
        if (done[j]) continue;
        const int64_t cost =
            -weight[size_t(here - 1) * n + (j - 1)] - row_price[here] - column_price[j];
        if (cost < distance[j]) distance[j] = cost, from[j] = column;
        if (distance[j] < step) step = distance[j], next = j;
      }
      for (int j = 0; j <= n; ++j) {
        if (done[j]) {
          row_price[row_of[j]] += step;
          column_price[j] -= step;
        } else {
          distance[j] -= step;
        }
      }
      column = next;
    }
    while (column != 0) {
      row_of[column] = row_of[from[column]];
      column = from[column];
    }
  }
  std::vector<int32_t> column_of(n);
  for (int j = 1; j <= n; ++j) column_of[row_of[j] - 1] = j - 1;
  return column_of;
}

namespace {

class Relabeller {
 public:
  Relabeller(const NodeRanks& nodes, int home_slots, int num_experts, const int32_t* base)
      : nodes_(nodes), G_(nodes.num_ranks()), H_(home_slots), base_rank_(num_experts) {
    for (int s = 0; s < G_ * H_; ++s)
      if (base[s] >= 0) base_rank_[base[s]] = s / H_;
  }

  // new_rank[g]: the name that rank g of the layout gets.
  std::vector<int32_t> rename(const int32_t* layout, bool across_nodes) const {
    // shared[g][r]: experts that rank g of the layout and rank r of the base have in common.
    std::vector<int64_t> shared(size_t(G_) * G_, 0);
    for (int s = 0; s < G_ * H_; ++s)
      if (layout[s] >= 0) ++shared[size_t(s / H_) * G_ + base_rank_[layout[s]]];
    if (across_nodes) return match(shared, G_);
    // Value of giving node a the name of node b: its best renaming of ranks.
    const int N = nodes_.num_nodes();
    std::vector<int64_t> value(size_t(N) * N);
    std::vector<std::vector<int32_t>> best(size_t(N) * N);
    for (int a = 0; a < N; ++a)
      for (int b = 0; b < N; ++b) {
        const int P = nodes_.size(a);
        if (nodes_.size(b) != P) {
          value[size_t(a) * N + b] = -int64_t(G_) * H_ * N;  // never chosen: a itself is possible
          continue;
        }
        std::vector<int64_t> inside(size_t(P) * P);
        for (int i = 0; i < P; ++i)
          for (int j = 0; j < P; ++j)
            inside[size_t(i) * P + j] = shared[size_t(nodes_.rank(a, i)) * G_ + nodes_.rank(b, j)];
        best[size_t(a) * N + b] = match(inside, P);
        int64_t kept = 0;
        for (int i = 0; i < P; ++i) kept += inside[size_t(i) * P + best[size_t(a) * N + b][i]];
        value[size_t(a) * N + b] = kept;
      }
    const std::vector<int32_t> node_name = match(value, N);
    std::vector<int32_t> new_rank(G_);
    for (int a = 0; a < N; ++a)
      for (int i = 0; i < nodes_.size(a); ++i)
        new_rank[nodes_.rank(a, i)] =
            nodes_.rank(node_name[a], best[size_t(a) * N + node_name[a]][i]);
    return new_rank;
  }

 private:
  const NodeRanks& nodes_;
  int G_, H_;
  std::vector<int32_t> base_rank_;  // [E]
};

}  // namespace

void relabel(const NodeRanks& nodes, int home_slots, int num_experts, bool across_nodes,
             const int32_t* base, int32_t* layout) {
  const int G = nodes.num_ranks(), H = home_slots;
  const std::vector<int32_t> new_rank =
      Relabeller(nodes, H, num_experts, base).rename(layout, across_nodes);
  std::vector<int32_t> renamed(size_t(G) * H, -1);
  std::vector<int32_t> arriving;
  for (int g = 0; g < G; ++g) {
    const int r = new_rank[g];
    const int32_t* old_slots = base + int64_t(r) * H;
    int32_t* slots = &renamed[size_t(r) * H];
    arriving.clear();
    for (int h = 0; h < H; ++h) {
      const int32_t expert = layout[int64_t(g) * H + h];
      if (expert < 0) continue;
      const int32_t* kept = std::find(old_slots, old_slots + H, expert);
      if (kept != old_slots + H) {
        slots[kept - old_slots] = expert;
      } else {
        arriving.push_back(expert);
      }
    }
    std::sort(arriving.begin(), arriving.end());
    int slot = 0;
    for (const int32_t expert : arriving) {
      while (slots[slot] >= 0) ++slot;
      slots[slot] = expert;
    }
  }
  std::copy(renamed.begin(), renamed.end(), layout);
}

}  // namespace relibra
