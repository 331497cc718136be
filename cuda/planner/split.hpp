// Split of each expert's rows by source rank: part of the plan file format.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace relibra {

// Sizes shared by every use of a layer in a plan.
struct SplitShape {
  int num_ranks;       // G
  int num_experts;     // E
  int slots_per_rank;  // n
};

// One (micro-batch, layer). Arrays belong to the caller.
struct SplitUse {
  const int32_t* rows;         // [G][E], rows that source rank g has for expert e
  const int32_t* slot_expert;  // [G*n], -1 = none
  const int64_t* slot_rows;    // [G*n], rows executed in each slot
};

// Where the ranks are. Arrays belong to the caller.
struct SplitRanks {
  const int32_t* rail;  // [G]
  const int32_t* node;  // [G]; null when no expert has copies on several nodes
};

// One entry of the quota list: only experts with a copy, only positive rows.
struct SplitEntry {
  int32_t source;
  int32_t slot;
  int32_t rows;
};

// Rows by the distance between source and executing rank.
struct Traffic {
  int64_t local = 0;   // same rank
  int64_t nvlink = 0;  // same node
  int64_t rdma = 0;    // another node
};

// Entries of one use; owned by the splitter, until its next call.
struct SplitEntries {
  const SplitEntry* data;
  std::size_t count;
};

// Splits one use after another; keeps its buffers. Not for use by two threads at a time.
//
// Throws std::invalid_argument when the slots of an expert do not execute exactly its rows.
class Splitter {
 public:
  Splitter(const SplitShape& shape, const SplitRanks& ranks);

  // quota: [G][G*n], every entry is written.
  void split_use(const SplitUse& use, int32_t* quota);

  // Entries ordered by (source, slot).
  SplitEntries split_copied(const SplitUse& use);

  // node: [G], of every rank.
  Traffic count_traffic(const SplitUse& use, const int32_t* node);

 private:
  // Sources by place (rail or node), ascending inside each.
  struct Places {
    Places(const int32_t* rank_to_place, int num_ranks);

    std::vector<int32_t> place;     // [G]
    std::vector<int> first, ranks;  // place -> its ranks
  };

  int num_copies(int expert) const { return first_slot_[expert + 1] - first_slot_[expert]; }
  int slot(int expert, int copy) const { return slots_[first_slot_[expert] + copy]; }
  int rank_of(int expert, int copy) const { return slot(expert, copy) / shape_.slots_per_rank; }
  bool on_several_nodes(int expert) const;
  void load(const SplitUse& use);
  void gather(const std::vector<int>& experts);
  void place_copies(int copies);
  void split(int expert, int32_t* count);
  void deal_near(int expert, const Places& places);
  void move(int copy, int source, int32_t rows);
  void deal(int copy, const int* sources, int num_sources);
  int64_t share_exactly(int64_t rows, int64_t weight, const int* sources, int num_sources);
  double level_of(int64_t count, double above) const;
  int64_t share_widely(int64_t rows, int64_t weight, const int* sources, int num_sources);

  const SplitShape shape_;
  const Places rail_, node_;
  std::vector<int> all_;  // every rank
  // Of one use.
  SplitUse use_{};
  std::vector<int> first_slot_, slots_;       // expert -> its slots
  std::vector<int> next_, experts_, copied_;  // slot -> its number among the copied ones
  std::vector<int32_t> counts_;               // rows of experts by source
  std::vector<int32_t> cells_;                // rows of copies by source
  std::vector<SplitEntry> entries_;
  // Of one expert.
  int32_t* count_ = nullptr;     // [G], rows left at the sources
  std::vector<int32_t*> dealt_;  // of each copy [G], rows that it got
  std::vector<int64_t> room_;    // of each copy, rows that it still takes
  std::vector<int32_t> share_;   // of one deal, by source
  std::vector<int64_t> keys_;
  std::vector<double> exact_keys_;
  std::vector<int> order_;
};

}  // namespace relibra
