// Replica sites of one node and the exact split of rows over them.
#pragma once

#include <cstdint>
#include <vector>

namespace relibra {

// One node in one micro-batch and layer. Experts are numbered rank * home_slots + slot.
struct NodeInstance {
  int num_ranks;        // P
  int home_slots;       // H
  int replica_slots;    // S
  const int64_t* rows;  // [P][H], 0 in filler slots; owned by the caller
  // [P], rows beside those that no replica can take; owned by the caller, null for none.
  const int64_t* fixed = nullptr;

  int home(int expert) const { return expert / home_slots; }
  int num_experts() const { return num_ranks * home_slots; }
};

// A copy of an expert on another rank of its node.
struct Replica {
  int32_t expert;
  int32_t rank;
  int64_t rows;
};

// Rows of every expert at home and in its replicas. Rows are conserved by every operation.
class SiteFlow {
 public:
  // All rows at home, no replicas.
  void reset(const NodeInstance& instance);

  // The rows and replicas of another state; what balance() left is not copied.
  void copy_rows(const SiteFlow& other);

  // A replica with some rows of the expert's home; the slot must be free and the rank no host.
  void add(int expert, int rank, int64_t rows) {
    replicas_.push_back({expert, rank, rows});
    rest_[expert] -= rows;
    load_[instance_->home(expert)] -= rows;
    load_[rank] += rows;
    --free_slots_[rank];
  }

  // Takes replica k away; its rows go home. The last replica takes its number.
  void remove(int k);

  // Exact minimum of the largest rank for these sites, by augmenting paths; the rows are left in
  // that state. lower_bound: of any split, to start from. Returns early, with some value >= give_up
  // that bounds the minimum, when the minimum is not below give_up.
  //
  // Without a path out of a set of ranks its average is a lower bound, so each failure raises the
  // bound to it and the search goes on from the same flow.
  int64_t balance(int64_t lower_bound, int64_t give_up);

  // After balance(): flags [P] of a set of ranks whose rows cannot leave it and whose average,
  // rounded up, is the minimum; empty when the lower bound was reached. Only a new site on a rank
  // outside, of an expert with rows inside, can help.
  const std::vector<char>& bottleneck() const { return bottleneck_; }

  int64_t largest() const;
  int64_t load(int rank) const { return load_[rank]; }
  int64_t rest(int expert) const { return rest_[expert]; }  // rows at home
  int free_slots(int rank) const { return free_slots_[rank]; }

  // Whether the expert has its home or a replica there.
  bool hosts(int expert, int rank) const {
    if (instance_->home(expert) == rank) return true;
    for (const Replica& one : replicas_)
      if (one.expert == expert && one.rank == rank) return true;
    return false;
  }
  const std::vector<Replica>& replicas() const { return replicas_; }
  const NodeInstance& instance() const { return *instance_; }

 private:
  // A move of rows of one expert between two holders: -1 is the home, else a replica's number.
  struct Step {
    int from_rank, expert, from_holder, to_holder;
  };

  void index();
  int find_room(int start, int64_t level);
  int visit(int rank, int next, const Step& step, int64_t level);
  int64_t step_room(const Step& step) const;
  void push(int start, int end, int64_t level);

  const NodeInstance* instance_ = nullptr;
  std::vector<int64_t> load_, rest_;  // by rank, by expert
  std::vector<int32_t> free_slots_;   // by rank
  std::vector<Replica> replicas_;
  // Linked lists of replicas: by home rank of the expert, and by the rank that holds them.
  std::vector<int32_t> first_homed_, next_homed_, first_held_, next_held_;
  // Breadth-first search over ranks.
  std::vector<char> seen_, bottleneck_;
  std::vector<int32_t> queue_;
  std::vector<Step> via_;
};

}  // namespace relibra
