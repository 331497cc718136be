// Exact split of rows between nodes, for experts that have static copies on other nodes.
//
//   min C  s.t.  an expert's rows lie on nodes that have it; a node has at most C rows a rank
#pragma once

#include <cstdint>
#include <vector>

namespace relibra {

// A copy of an expert on a node that is not its home.
struct StaticCopy {
  int32_t expert;
  int32_t node;
};

// Splits one column after another; keeps its buffers. Not for use by two threads at a time.
class StaticSplit {
 public:
  // node_size: [N], ranks of each node.
  explicit StaticSplit(std::vector<int32_t> node_size);

  // The copies of a layer; no expert twice on a node. home_node: [E].
  void set_copies(const int32_t* home_node, int num_experts, const std::vector<StaticCopy>& copies);

  // The smallest C, exactly, by augmenting paths between nodes.
  //
  // Without a path out of a set of nodes its average a rank is a lower bound on C, so each failure
  // raises the bound to it and the search goes on from the same flow. Since that holds for any
  // flow, the search may start from the split that is wanted for other reasons.
  //
  // totals: [E] rows. wanted: [K] rows that each copy starts with, at most those of its expert in
  // all; null = none. Copies keep as many of them as the search happens to leave.
  int64_t solve(const int64_t* totals, const int64_t* wanted);

  int num_copies() const { return int(copies_.size()); }
  const StaticCopy& copy(int k) const { return copies_[k]; }
  int64_t copy_rows(int k) const { return rows_[k]; }
  int64_t node_rows(int node) const { return load_[node]; }
  int num_nodes() const { return int(size_.size()); }

  // After solve(): flags [N] of a set of nodes whose rows cannot leave it and whose average a rank,
  // rounded up, is C; empty when C is the average of all nodes.
  const std::vector<char>& bottleneck() const { return bottleneck_; }

 private:
  // A move of rows of an expert with copies: holder -1 is its home, else a copy.
  struct Step {
    int from_node, expert, from_holder, to_holder;
  };

  int64_t room(int node, int64_t level) const { return level * size_[node] - load_[node]; }
  int find_room(int start, int64_t level);
  int visit(int node, int next, const Step& step, int64_t level);
  int64_t& holder_rows(int expert, int holder) {
    return holder < 0 ? rest_[expert] : rows_[holder];
  }
  void push(int start, int end, int64_t level);

  std::vector<int32_t> size_;       // [N]
  std::vector<int32_t> home_node_;  // [E]
  std::vector<StaticCopy> copies_;  // [K]
  // Experts with copies, by an index of their own: logical id, home, first and later copies.
  std::vector<int32_t> expert_id_, index_of_copy_;
  std::vector<std::vector<int32_t>> copies_of_;           // expert index -> copies
  std::vector<std::vector<int32_t>> homed_at_, held_at_;  // node -> expert indices, copies
  std::vector<int64_t> rest_, rows_, load_;               // by expert index, copy, node
  // Breadth-first search over nodes.
  std::vector<char> seen_, bottleneck_;
  std::vector<int32_t> queue_;
  std::vector<Step> via_;
};

}  // namespace relibra
