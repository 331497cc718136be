#include "planner/static_split.hpp"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

namespace relibra {

StaticSplit::StaticSplit(std::vector<int32_t> node_size) : size_(std::move(node_size)) {
  const size_t N = size_.size();
  homed_at_.resize(N);
  held_at_.resize(N);
  via_.resize(N);
}

void StaticSplit::set_copies(const int32_t* home_node, int num_experts,
                             const std::vector<StaticCopy>& copies) {
  home_node_.assign(home_node, home_node + num_experts);
  copies_ = copies;
  expert_id_.clear();
  index_of_copy_.resize(copies.size());
  copies_of_.clear();
  for (auto& list : homed_at_) list.clear();
  for (auto& list : held_at_) list.clear();
  std::vector<int32_t> index_of_expert(num_experts, -1);
  for (size_t k = 0; k < copies.size(); ++k) {
    const StaticCopy& one = copies[k];
    int32_t& index = index_of_expert[one.expert];
    if (index < 0) {
      index = int32_t(expert_id_.size());
      expert_id_.push_back(one.expert);
      copies_of_.emplace_back();
      homed_at_[home_node[one.expert]].push_back(index);
    }
    index_of_copy_[k] = index;
    copies_of_[index].push_back(int32_t(k));
    held_at_[one.node].push_back(int32_t(k));
  }
}

// Adds `next` to the search; returns it when it has room below the level, else -1.
int StaticSplit::visit(int node, int next, const Step& step, int64_t level) {
  if (next == node || seen_[next]) return -1;
  seen_[next] = 1;
  via_[next] = step;
  if (room(next, level) > 0) return next;
  queue_.push_back(next);
  return -1;
}

// Breadth first over nodes: an edge is an expert with rows here and a host there. Returns a node
// with room below the level, or -1; then the queue is a set that no row can leave.
int StaticSplit::find_room(int start, int64_t level) {
  seen_.assign(size_.size(), 0);
  queue_.assign(1, start);
  seen_[start] = 1;
  for (size_t head = 0; head < queue_.size(); ++head) {
    const int node = queue_[head];
    for (const int x : homed_at_[node]) {
      if (rest_[x] == 0) continue;
      for (const int k : copies_of_[x]) {
        const int end = visit(node, copies_[k].node, {node, x, -1, k}, level);
        if (end >= 0) return end;
      }
    }
    for (const int k : held_at_[node]) {
      if (rows_[k] == 0) continue;
      const int x = index_of_copy_[k];
      int end = visit(node, home_node_[expert_id_[x]], {node, x, k, -1}, level);
      if (end >= 0) return end;
      for (const int other : copies_of_[x]) {
        end = visit(node, copies_[other].node, {node, x, k, other}, level);
        if (end >= 0) return end;
      }
    }
  }
  return -1;
}

// Moves as many rows as fit along the path that the search found.
void StaticSplit::push(int start, int end, int64_t level) {
  int64_t rows = std::min(-room(start, level), room(end, level));
  for (int node = end; node != start; node = via_[node].from_node)
    rows = std::min(rows, holder_rows(via_[node].expert, via_[node].from_holder));
  for (int node = end; node != start; node = via_[node].from_node) {
    const Step& step = via_[node];
    holder_rows(step.expert, step.from_holder) -= rows;
    holder_rows(step.expert, step.to_holder) += rows;
  }
  load_[start] -= rows;
  load_[end] += rows;
}

int64_t StaticSplit::solve(const int64_t* totals, const int64_t* wanted) {
  const int N = num_nodes();
  load_.assign(N, 0);
  for (size_t e = 0; e < home_node_.size(); ++e) load_[home_node_[e]] += totals[e];
  rest_.resize(expert_id_.size());
  for (size_t x = 0; x < expert_id_.size(); ++x) rest_[x] = totals[expert_id_[x]];
  rows_.assign(copies_.size(), 0);
  for (size_t k = 0; wanted && k < copies_.size(); ++k) {
    const int x = index_of_copy_[k];
    if (wanted[k] < 0 || wanted[k] > rest_[x])
      throw std::invalid_argument("wanted: need 0.." + std::to_string(rest_[x]) + " rows of copy " +
                                  std::to_string(k) + ", got " + std::to_string(wanted[k]));
    rows_[k] = wanted[k];
    rest_[x] -= wanted[k];
    load_[home_node_[copies_[k].expert]] -= wanted[k];
    load_[copies_[k].node] += wanted[k];
  }
  const int64_t ranks = std::accumulate(size_.begin(), size_.end(), int64_t(0));
  const int64_t total = std::accumulate(load_.begin(), load_.end(), int64_t(0));
  int64_t level = (total + ranks - 1) / ranks;
  bottleneck_.clear();
  while (true) {
    int start = 0;
    for (int node = 1; node < N; ++node)
      if (room(node, level) < room(start, level)) start = node;
    if (room(start, level) >= 0) return level;
    const int end = find_room(start, level);
    if (end >= 0) {
      push(start, end, level);
      continue;
    }
    int64_t rows = 0, width = 0;
    for (const int node : queue_) rows += load_[node], width += size_[node];
    level = (rows + width - 1) / width;
    bottleneck_ = seen_;
  }
}

}  // namespace relibra
