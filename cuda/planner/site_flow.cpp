#include "planner/site_flow.hpp"

#include <algorithm>

namespace relibra {

void SiteFlow::reset(const NodeInstance& instance) {
  instance_ = &instance;
  const int P = instance.num_ranks, H = instance.home_slots;
  rest_.assign(instance.rows, instance.rows + int64_t(P) * H);
  load_.assign(P, 0);
  if (instance.fixed) load_.assign(instance.fixed, instance.fixed + P);
  for (int i = 0, e = 0; i < P; ++i)
    for (int h = 0; h < H; ++h, ++e) load_[i] += rest_[e];
  free_slots_.assign(P, instance.replica_slots);
  replicas_.clear();
}

void SiteFlow::copy_rows(const SiteFlow& other) {
  instance_ = other.instance_;
  load_ = other.load_;
  rest_ = other.rest_;
  free_slots_ = other.free_slots_;
  replicas_ = other.replicas_;
}

void SiteFlow::remove(int k) {
  const Replica gone = replicas_[k];
  rest_[gone.expert] += gone.rows;
  load_[instance_->home(gone.expert)] += gone.rows;
  load_[gone.rank] -= gone.rows;
  ++free_slots_[gone.rank];
  replicas_[k] = replicas_.back();
  replicas_.pop_back();
}

int64_t SiteFlow::largest() const {
  return *std::max_element(load_.begin(), load_.end());
}

void SiteFlow::index() {
  const int P = instance_->num_ranks;
  const int count = int(replicas_.size());
  first_homed_.assign(P, -1);
  first_held_.assign(P, -1);
  next_homed_.resize(count);
  next_held_.resize(count);
  for (int k = 0; k < count; ++k) {
    const int home = instance_->home(replicas_[k].expert), rank = replicas_[k].rank;
    next_homed_[k] = first_homed_[home];
    first_homed_[home] = k;
    next_held_[k] = first_held_[rank];
    first_held_[rank] = k;
  }
  via_.resize(P);
}

int64_t SiteFlow::step_room(const Step& step) const {
  return step.from_holder < 0 ? rest_[step.expert] : replicas_[step.from_holder].rows;
}

// Adds `next` to the search; returns it when it has room below the level, else -1.
int SiteFlow::visit(int rank, int next, const Step& step, int64_t level) {
  if (next == rank || seen_[next]) return -1;
  seen_[next] = 1;
  via_[next] = step;
  if (load_[next] < level) return next;
  queue_.push_back(next);
  return -1;
}

// Breadth first over ranks from `start`: an edge is an expert with rows here and a host there.
// Returns a rank with room below the level, or -1; then seen_ is a set that no row can leave.
int SiteFlow::find_room(int start, int64_t level) {
  seen_.assign(instance_->num_ranks, 0);
  queue_.assign(1, start);
  seen_[start] = 1;
  for (size_t head = 0; head < queue_.size(); ++head) {
    const int rank = queue_[head];
    for (int k = first_homed_[rank]; k >= 0; k = next_homed_[k]) {
      const Replica& one = replicas_[k];
      if (rest_[one.expert] == 0) continue;
      const int end = visit(rank, one.rank, {rank, one.expert, -1, k}, level);
      if (end >= 0) return end;
    }
    for (int k = first_held_[rank]; k >= 0; k = next_held_[k]) {
      const Replica& one = replicas_[k];
      if (one.rows == 0) continue;
      const int home = instance_->home(one.expert);
      int end = visit(rank, home, {rank, one.expert, k, -1}, level);
      if (end >= 0) return end;
      for (int other = first_homed_[home]; other >= 0; other = next_homed_[other]) {
        if (replicas_[other].expert != one.expert) continue;
        end = visit(rank, replicas_[other].rank, {rank, one.expert, k, other}, level);
        if (end >= 0) return end;
      }
    }
  }
  return -1;
}

// Moves as many rows as fit along the path that the search found.
void SiteFlow::push(int start, int end, int64_t level) {
  int64_t rows = std::min(load_[start] - level, level - load_[end]);
  for (int rank = end; rank != start; rank = via_[rank].from_rank)
    rows = std::min(rows, step_room(via_[rank]));
  for (int rank = end; rank != start; rank = via_[rank].from_rank) {
    const Step& step = via_[rank];
    (step.from_holder < 0 ? rest_[step.expert] : replicas_[step.from_holder].rows) -= rows;
    (step.to_holder < 0 ? rest_[step.expert] : replicas_[step.to_holder].rows) += rows;
  }
  load_[start] -= rows;
  load_[end] += rows;
}

int64_t SiteFlow::balance(int64_t lower_bound, int64_t give_up) {
  index();
  bottleneck_.clear();
  int64_t level = lower_bound;
  while (true) {
    const int start = int(std::max_element(load_.begin(), load_.end()) - load_.begin());
    if (load_[start] <= level) return load_[start];
    const int end = find_room(start, level);
    if (end >= 0) {
      push(start, end, level);
      continue;
    }
    int64_t sum = 0;
    for (const int rank : queue_) sum += load_[rank];
    const int64_t size = int64_t(queue_.size());
    level = (sum + size - 1) / size;
    bottleneck_ = seen_;
    if (level >= give_up) return level;
  }
}

}  // namespace relibra
