#include "planner/static_choice.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

#include "common/clones.hpp"
#include "common/random.hpp"
#include "planner/static_sets.hpp"

namespace relibra {
namespace {

constexpr int kAllSetsNodes = 8;  // up to here every set of nodes is kept
constexpr int kPairNodes = 24;    // up to here every pair is
constexpr int kHottest = 6;       // experts of a node that the greedy choice looks at
constexpr int kRounds = 3;        // searches with sets that were found missing in between
constexpr float kNoise = 2e-6f;   // relative; levels are in single precision

// Element by element, so every version gives the same bits. average: a little above it.
RELIBRA_CLONES void levels(const Cuts& cuts, const Change& change, const float* average,
                           float* largest, float* excess) {
  const int width = cuts.level.width();
  for (int m = 0; m < width; ++m) largest[m] = 0, excess[m] = 0;
  for (size_t u = 0; u < cuts.set.size(); ++u) {
    const float* level = cuts.level.row(int(u));
    const float lost = change.closed[u] ? cuts.share[u] : 0.0f;
    const float won = change.opened[u] ? cuts.share[u] : 0.0f;
#pragma omp simd
    for (int m = 0; m < width; ++m) {
      const float now = level[m] + lost * change.lost[m] - won * change.won[m];
      const float over = now - average[m];
      largest[m] = largest[m] > now ? largest[m] : now;
      excess[m] += over > 0.0f ? over : 0.0f;
    }
  }
}

class Chooser {
 public:
  Chooser(const LayerLoads& loads, const int32_t* home_node, const std::vector<int32_t>& node_size,
          const StaticOptions& options)
      : loads_(loads),
        home_node_(home_node),
        size_(node_size),
        options_(options),
        row_(loads.num_experts, loads.num_columns),
        float_row_(loads.num_experts + 1, loads.num_columns),  // the last row stays zero
        average_(1, loads.num_columns),
        largest_(1, loads.num_columns),
        excess_(1, loads.num_columns),
        cuts_(0, loads.num_columns),
        hosts_(loads.num_experts) {
    for (int e = 0; e < loads.num_experts; ++e) {
      const int64_t* row = loads.load + int64_t(e) * loads.num_columns;
      std::copy_n(row, loads.num_columns, row_.row(e));
      std::transform(row, row + loads.num_columns, float_row_.row(e),
                     [](int64_t rows) { return float(rows); });
      hosts_[e] = one_node(home_node[e]);
    }
    rank_by_load();
    list_sets();
  }

  std::vector<StaticCopy> choose() {
    load_cuts();
    current_ = score({-1, -1}, {-1, -1});
    add_greedily();
    for (int round = 0; round < kRounds; ++round) {
      improve(round);
      if (size_.size() <= kAllSetsNodes || !add_bottlenecks()) break;
    }
    prune();
    std::sort(copies_.begin(), copies_.end(), [](const StaticCopy& a, const StaticCopy& b) {
      return a.node != b.node ? a.node < b.node : a.expert < b.expert;
    });
    return copies_;
  }

 private:
  int num_nodes() const { return int(size_.size()); }

  void rank_by_load() {
    const int E = loads_.num_experts;
    std::vector<int64_t> total(E);
    for (int e = 0; e < E; ++e)
      total[e] = std::accumulate(row_.row(e), row_.row(e) + loads_.num_columns, int64_t(0));
    std::vector<int32_t> order(E), of_node(num_nodes(), 0);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return total[a] > total[b]; });
    for (const int e : order)
      if (total[e] > 0 && of_node[home_node_[e]]++ < kHottest) hottest_.push_back(e);
  }

  void list_sets() {
    const int N = num_nodes();
    const Set all = N == 64 ? ~Set(0) : one_node(N) - 1;
    if (N <= kAllSetsNodes) {
      for (Set set = 1; set <= all; ++set) sets_.push_back(set);
      return;
    }
    sets_.push_back(all);
    for (int a = 0; a < N; ++a) {
      sets_.push_back(one_node(a));
      sets_.push_back(all & ~one_node(a));
      for (int b = a + 1; b < N && N <= kPairNodes; ++b) {
        sets_.push_back(one_node(a) | one_node(b));
        sets_.push_back(all & ~(one_node(a) | one_node(b)));
      }
    }
  }

  int64_t ranks_of(Set set) const {
    int64_t ranks = 0;
    for (int node = 0; node < num_nodes(); ++node)
      if (set & one_node(node)) ranks += size_[node];
    return ranks;
  }

  // Rows that cannot leave each set, for the hosts as they are.
  void load_cuts() {
    const int C = loads_.num_columns;
    cuts_ = Cuts(int(sets_.size()), C);
    cuts_.set = sets_;
    for (size_t u = 0; u < sets_.size(); ++u) {
      cuts_.share.push_back(1.0f / float(ranks_of(sets_[u])));
      int64_t* rows = cuts_.rows.row(int(u));
      for (int e = 0; e < loads_.num_experts; ++e) {
        if (hosts_[e] & ~sets_[u]) continue;
        for (int m = 0; m < C; ++m) rows[m] += row_.row(e)[m];
      }
      update_level(u);
    }
    for (int m = 0; m < C; ++m) {
      int64_t total = 0;
      for (int e = 0; e < loads_.num_experts; ++e) total += row_.row(e)[m];
      average_.row(0)[m] = float(total) / float(ranks_of(~Set(0))) * (1 + kNoise);
    }
    closed_.assign(sets_.size(), 0);
    opened_.assign(sets_.size(), 0);
  }

  void update_level(size_t u) {
    const int64_t* rows = cuts_.rows.row(int(u));
    float* level = cuts_.level.row(int(u));
    for (int m = 0; m < loads_.num_columns; ++m) level[m] = cuts_.share[u] * float(rows[m]);
  }

  // Marks the sets that an expert with these hosts cannot leave but for `node`.
  void mark(Set hosts, int node, std::vector<char>& flags) const {
    for (size_t u = 0; u < sets_.size(); ++u)
      flags[u] = (hosts & ~sets_[u]) == 0 && (one_node(node) & ~sets_[u]) != 0;
  }

  // Score after taking a copy away and adding another; expert -1 = none.
  Score score(const StaticCopy& gone, const StaticCopy& added) {
    const int none = loads_.num_experts;
    std::fill(closed_.begin(), closed_.end(), 0);
    std::fill(opened_.begin(), opened_.end(), 0);
    if (gone.expert >= 0) mark(hosts_[gone.expert] & ~one_node(gone.node), gone.node, closed_);
    if (added.expert >= 0) {
      Set hosts = hosts_[added.expert];
      if (added.expert == gone.expert) hosts &= ~one_node(gone.node);
      mark(hosts, added.node, opened_);
    }
    const Change change{float_row_.row(gone.expert < 0 ? none : gone.expert),
                        float_row_.row(added.expert < 0 ? none : added.expert), closed_.data(),
                        opened_.data()};
    levels(cuts_, change, average_.row(0), largest_.row(0), excess_.row(0));
    Score sum{0, 0};
    for (int m = 0; m < loads_.num_columns; ++m) {
      sum.level += largest_.row(0)[m];
      sum.excess += excess_.row(0)[m];
    }
    return sum;
  }

  // Moves rows in or out of the sets by a copy.
  void account(const StaticCopy& copy, int sign) {
    const Set hosts = hosts_[copy.expert] & ~one_node(copy.node);
    const int64_t* row = row_.row(copy.expert);
    for (size_t u = 0; u < sets_.size(); ++u) {
      if ((hosts & ~sets_[u]) != 0 || (one_node(copy.node) & ~sets_[u]) == 0) continue;
      int64_t* rows = cuts_.rows.row(int(u));
      for (int m = 0; m < loads_.num_columns; ++m) rows[m] += sign * row[m];
      update_level(u);
    }
  }

  void add(const StaticCopy& copy) {
    account(copy, -1);
    hosts_[copy.expert] |= one_node(copy.node);
    copies_.push_back(copy);
  }

  void remove(size_t k) {
    account(copies_[k], 1);
    hosts_[copies_[k].expert] &= ~one_node(copies_[k].node);
    copies_.erase(copies_.begin() + int64_t(k));
  }

  // One copy after another, each the one that takes most from what is above the average. The gain
  // of a copy seldom rises when others are added, so it is computed again only for the copy that
  // would be next by what is known.
  void add_greedily() {
    std::vector<int> room(num_nodes(), options_.copies_per_node);
    std::vector<Candidate> heap;
    for (const int32_t e : hottest_)
      for (int node = 0; node < num_nodes(); ++node)
        if (!(hosts_[e] & one_node(node)))
          heap.push_back({std::numeric_limits<double>::infinity(), {e, node}, -1});
    std::make_heap(heap.begin(), heap.end());
    while (!heap.empty() && current_.excess > 0) {
      std::pop_heap(heap.begin(), heap.end());
      Candidate next = heap.back();
      heap.pop_back();
      if (room[next.copy.node] == 0) continue;
      if (next.age != int(copies_.size())) {
        next.gain = current_.excess - score({-1, -1}, next.copy).excess;
        next.age = int(copies_.size());
        if (next.gain <= 0) continue;
        heap.push_back(next);
        std::push_heap(heap.begin(), heap.end());
        continue;
      }
      current_ = score({-1, -1}, next.copy);
      add(next.copy);
      --room[next.copy.node];
    }
  }

  // Random changes of one copy that lower the score.
  void improve(int round) {
    if (hottest_.empty() || num_nodes() < 2) return;
    const uint64_t key = mix64(options_.seed + uint64_t(round));
    for (int64_t i = 0; i < options_.proposals && current_.excess > 0; ++i) {
      const uint64_t bits = random_bits(key, uint64_t(i));
      const int node = int(below(bits, 16, uint32_t(num_nodes())));
      const int slot = int(below(bits >> 16, 16, uint32_t(options_.copies_per_node)));
      const bool hot = (bits >> 62) != 0;  // three of four
      const uint32_t count = uint32_t(hot ? int(hottest_.size()) : loads_.num_experts);
      int32_t expert = int32_t(below(bits >> 32, 24, count));
      if (hot) expert = hottest_[expert];
      if (hosts_[expert] & one_node(node)) continue;
      int at = -1, seen = 0;  // the copy in that slot of the node; none when fewer are there
      for (size_t k = 0; k < copies_.size(); ++k)
        if (copies_[k].node == node && seen++ == slot) at = int(k);
      const StaticCopy gone = at < 0 ? StaticCopy{-1, -1} : copies_[at];
      const Score one = score(gone, {expert, node});
      if (!(one < current_)) continue;
      if (at >= 0) remove(size_t(at));
      add({expert, node});
      current_ = one;
    }
  }

  // Sets that are the bottleneck of a column and were not kept; true when there were any.
  bool add_bottlenecks() {
    StaticSplit split(size_);
    split.set_copies(home_node_, loads_.num_experts, copies_);
    std::vector<int64_t> totals(loads_.num_experts);
    std::vector<Set> found;
    for (int m = 0; m < loads_.num_columns; ++m) {
      for (int e = 0; e < loads_.num_experts; ++e) totals[e] = row_.row(e)[m];
      split.solve(totals.data(), nullptr);
      Set set = 0;
      for (size_t node = 0; node < split.bottleneck().size(); ++node)
        if (split.bottleneck()[node]) set |= one_node(int(node));
      const auto is_new = [&](const std::vector<Set>& list) {
        return std::find(list.begin(), list.end(), set) == list.end();
      };
      if (set && is_new(sets_) && is_new(found)) found.push_back(set);
    }
    if (found.empty()) return false;
    sets_.insert(sets_.end(), found.begin(), found.end());
    load_cuts();
    current_ = score({-1, -1}, {-1, -1});
    return true;
  }

  // Takes away, least loss first, what saves less than a copy must; the last copies go first.
  void prune() {
    const double least_gain = std::max(double(options_.min_gain), current_.level * double(kNoise));
    while (!copies_.empty()) {
      size_t least = 0;
      double least_loss = std::numeric_limits<double>::infinity();
      for (size_t k = 0; k < copies_.size(); ++k) {
        const double loss = score(copies_[k], {-1, -1}).level - current_.level;
        if (loss <= least_loss) least = k, least_loss = loss;
      }
      if (least_loss >= least_gain) return;
      current_ = score(copies_[least], {-1, -1});
      remove(least);
    }
  }

  const LayerLoads& loads_;
  const int32_t* home_node_;
  const std::vector<int32_t>& size_;
  const StaticOptions& options_;
  ColumnRows<int64_t> row_;
  ColumnRows<float> float_row_, average_, largest_, excess_;
  std::vector<int32_t> hottest_;
  std::vector<Set> sets_;
  Cuts cuts_;
  std::vector<Set> hosts_;  // [E]
  std::vector<StaticCopy> copies_;
  std::vector<char> closed_, opened_;
  Score current_{0, 0};
};

}  // namespace

std::vector<StaticCopy> choose_copies(const LayerLoads& loads, const int32_t* home_node,
                                      const std::vector<int32_t>& node_size,
                                      const StaticOptions& options) {
  if (node_size.size() < 2 || options.copies_per_node == 0) return {};
  return Chooser(loads, home_node, node_size, options).choose();
}

void place_copies(const LayerLoads& loads, const int32_t* home_slot_expert, int home_slots,
                  const NodeRanks& nodes, const std::vector<StaticCopy>& copies, int static_slots,
                  int32_t* static_slot_expert) {
  const int E = loads.num_experts, C = loads.num_columns, G = nodes.num_ranks();
  std::fill(static_slot_expert, static_slot_expert + int64_t(G) * static_slots, -1);
  std::vector<int32_t> home_node(E, 0), size(nodes.num_nodes()), used(G, 0);
  std::vector<int32_t> home_rank(E, 0);
  for (int node = 0; node < nodes.num_nodes(); ++node) {
    size[node] = nodes.size(node);
    for (int i = 0; i < nodes.size(node); ++i)
      for (int h = 0; h < home_slots; ++h) {
        const int32_t e = home_slot_expert[int64_t(nodes.rank(node, i)) * home_slots + h];
        if (e >= 0) home_node[e] = node, home_rank[e] = nodes.rank(node, i);
      }
  }
  StaticSplit split(size);
  split.set_copies(home_node.data(), E, copies);
  std::vector<int64_t> load(size_t(G) * C, 0), copy_rows(copies.size() * C), totals(E);
  for (int c = 0; c < C; ++c) {
    for (int e = 0; e < E; ++e) totals[e] = loads.load[int64_t(e) * C + c];
    split.solve(totals.data(), nullptr);
    for (size_t k = 0; k < copies.size(); ++k) {
      copy_rows[k * C + c] = split.copy_rows(int(k));
      totals[copies[k].expert] -= split.copy_rows(int(k));
    }
    for (int e = 0; e < E; ++e) load[size_t(home_rank[e]) * C + c] += totals[e];
  }
  std::vector<int64_t> sum(copies.size());
  for (size_t k = 0; k < copies.size(); ++k)
    sum[k] = std::accumulate(&copy_rows[k * C], &copy_rows[k * C] + C, int64_t(0));
  std::vector<int32_t> order(copies.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return sum[a] > sum[b]; });
  for (const int k : order) {
    const int node = copies[k].node;
    int best = -1;
    int64_t best_level = std::numeric_limits<int64_t>::max();
    for (int i = 0; i < nodes.size(node); ++i) {
      const int rank = nodes.rank(node, i);
      if (used[rank] == static_slots) continue;
      int64_t level = 0;
      for (int c = 0; c < C; ++c) {
        int64_t largest = 0;
        for (int j = 0; j < nodes.size(node); ++j) {
          const int other = nodes.rank(node, j);
          const int64_t added = other == rank ? copy_rows[k * C + c] : 0;
          largest = std::max(largest, load[size_t(other) * C + c] + added);
        }
        level += largest;
      }
      if (level < best_level) best = rank, best_level = level;
    }
    for (int c = 0; c < C; ++c) load[size_t(best) * C + c] += copy_rows[k * C + c];
    static_slot_expert[int64_t(best) * static_slots + used[best]++] = copies[k].expert;
  }
}

}  // namespace relibra
