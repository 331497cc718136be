#include "planner/split.hpp"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

namespace relibra {
namespace {

__extension__ typedef unsigned __int128 Wide;

// Splits the rows of one expert after another; keeps its buffers between experts.
class Splitter {
 public:
  Splitter(const SplitShape& shape, const SplitUse& use, const SplitRanks& ranks)
      : shape_(shape),
        use_(use),
        rail_(ranks.rail, shape.num_ranks),
        node_(ranks.node, ranks.node ? shape.num_ranks : 0),
        first_slot_(shape.num_experts + 1, 0) {
    index_slots();
    all_.resize(shape.num_ranks);
    std::iota(all_.begin(), all_.end(), 0);
  }

  int num_copies(int expert) const { return first_slot_[expert + 1] - first_slot_[expert]; }
  int slot(int expert, int copy) const { return slots_[first_slot_[expert] + copy]; }

  // Rows by (copy, source) of one expert: dealt()[copy * G + source].
  const std::vector<int64_t>& split(int expert) {
    const int G = shape_.num_ranks, copies = num_copies(expert);
    count_.resize(G);
    int64_t total = 0, planned = 0;
    for (int g = 0; g < G; ++g) {
      count_[g] = use_.rows[int64_t(g) * shape_.num_experts + expert];
      total += count_[g];
    }
    room_.resize(copies);
    for (int i = 0; i < copies; ++i) {
      room_[i] = use_.slot_rows[slot(expert, i)];
      planned += room_[i];
    }
    if (planned != total)
      throw std::invalid_argument("slot_rows: need " + std::to_string(total) + " rows of expert " +
                                  std::to_string(expert) + ", got " + std::to_string(planned));
    dealt_.assign(size_t(copies) * G, 0);
    if (copies == 0) return dealt_;
    for (int i = 0; i < copies; ++i) give(i, rank_of(expert, i));
    if (on_several_nodes(expert)) deal_near(expert, node_);
    deal_near(expert, rail_);
    for (int i = 0; i < copies; ++i) deal(i, all_.data(), G);
    return dealt_;
  }

 private:
  int rank_of(int expert, int copy) const { return slot(expert, copy) / shape_.slots_per_rank; }

  // Slots of each expert, ascending.
  void index_slots() {
    const int num_slots = shape_.num_ranks * shape_.slots_per_rank;
    for (int s = 0; s < num_slots; ++s)
      if (use_.slot_expert[s] >= 0) ++first_slot_[use_.slot_expert[s] + 1];
    std::partial_sum(first_slot_.begin(), first_slot_.end(), first_slot_.begin());
    slots_.resize(first_slot_.back());
    std::vector<int> next(first_slot_.begin(), first_slot_.end() - 1);
    for (int s = 0; s < num_slots; ++s)
      if (use_.slot_expert[s] >= 0) slots_[next[use_.slot_expert[s]]++] = s;
  }

  // Sources by place (rail or node), ascending inside each.
  struct Places {
    Places(const int32_t* rank_to_place, int num_ranks)
        : place(rank_to_place, rank_to_place + num_ranks), ranks(num_ranks) {
      if (num_ranks == 0) return;
      first.assign(2 + *std::max_element(place.begin(), place.end()), 0);
      for (const int32_t one : place) ++first[one + 1];
      std::partial_sum(first.begin(), first.end(), first.begin());
      std::vector<int> next(first.begin(), first.end() - 1);
      for (int g = 0; g < num_ranks; ++g) ranks[next[place[g]]++] = g;
    }

    std::vector<int32_t> place;     // [G]
    std::vector<int> first, ranks;  // place -> its ranks
  };

  bool on_several_nodes(int expert) const {
    if (node_.place.empty()) return false;
    for (int i = 1; i < num_copies(expert); ++i)
      if (node_.place[rank_of(expert, i)] != node_.place[rank_of(expert, 0)]) return true;
    return false;
  }

  // Deals the rows of each copy to the sources in the place of the copy.
  void deal_near(int expert, const Places& places) {
    for (int i = 0; i < num_copies(expert); ++i) {
      const int at = places.place[rank_of(expert, i)];
      deal(i, &places.ranks[places.first[at]], places.first[at + 1] - places.first[at]);
    }
  }

  void move(int copy, int source, int64_t rows) {
    dealt_[size_t(copy) * shape_.num_ranks + source] += rows;
    count_[source] -= rows;
    room_[copy] -= rows;
  }

  void give(int copy, int source) { move(copy, source, std::min(count_[source], room_[copy])); }

  // Deals as many rows of a copy as fit to the sources in proportion to what they have left, by
  // largest remainder; ties go to the lower source.
  void deal(int copy, const int* sources, int num_sources) {
    if (room_[copy] == 0) return;
    int64_t weight = 0;
    for (int i = 0; i < num_sources; ++i) weight += count_[sources[i]];
    const int64_t rows = std::min(room_[copy], weight);
    if (rows == 0) return;
    if (rows == weight) {
      for (int i = 0; i < num_sources; ++i) move(copy, sources[i], count_[sources[i]]);
      return;
    }
    share_.resize(num_sources);
    remainders_.clear();
    int64_t left = rows;
    for (int i = 0; i < num_sources; ++i) {
      const Wide product = Wide(uint64_t(rows)) * uint64_t(count_[sources[i]]);
      if (product >> 63 == 0) {
        share_[i] = int64_t(uint64_t(product) / uint64_t(weight));
      } else {
        share_[i] = int64_t(product / uint64_t(weight));
      }
      left -= share_[i];
      const auto rest = int64_t(product - Wide(uint64_t(share_[i])) * uint64_t(weight));
      if (rest > 0) remainders_.push_back({rest, i});
    }
    if (left > 0) {
      const auto before = [](const Remainder& a, const Remainder& b) {
        return a.rest != b.rest ? a.rest > b.rest : a.index < b.index;
      };
      std::nth_element(remainders_.begin(), remainders_.begin() + (left - 1), remainders_.end(),
                       before);
      for (int64_t i = 0; i < left; ++i) ++share_[remainders_[i].index];
    }
    for (int i = 0; i < num_sources; ++i) move(copy, sources[i], share_[i]);
  }

  struct Remainder {
    int64_t rest;
    int index;
  };

  const SplitShape& shape_;
  const SplitUse& use_;
  const Places rail_, node_;
  std::vector<int> first_slot_, slots_;                // expert -> its slots
  std::vector<int> all_;                               // every rank
  std::vector<int64_t> count_, room_, dealt_, share_;  // rows left at sources and slots
  std::vector<Remainder> remainders_;
};

}  // namespace

void split_use(const SplitShape& shape, const SplitUse& use, const SplitRanks& ranks,
               int32_t* quota) {
  const int G = shape.num_ranks;
  const int64_t num_slots = int64_t(G) * shape.slots_per_rank;
  std::fill(quota, quota + G * num_slots, 0);
  Splitter splitter(shape, use, ranks);
  for (int e = 0; e < shape.num_experts; ++e) {
    const std::vector<int64_t>& dealt = splitter.split(e);
    for (int i = 0; i < splitter.num_copies(e); ++i)
      for (int g = 0; g < G; ++g)
        quota[g * num_slots + splitter.slot(e, i)] = int32_t(dealt[size_t(i) * G + g]);
  }
}

std::vector<SplitEntry> split_copied(const SplitShape& shape, const SplitUse& use,
                                     const SplitRanks& ranks) {
  const int G = shape.num_ranks;
  Splitter splitter(shape, use, ranks);
  std::vector<int> copied;  // slots of experts with copies, ascending
  const int num_slots = G * shape.slots_per_rank;
  std::vector<int> place(num_slots, -1);  // slot -> its number among them
  for (int slot = 0; slot < num_slots; ++slot) {
    const int32_t expert = use.slot_expert[slot];
    if (expert < 0 || splitter.num_copies(expert) < 2) continue;
    place[slot] = int(copied.size());
    copied.push_back(slot);
  }
  std::vector<int32_t> rows(copied.size() * G);
  std::vector<size_t> next(G + 1, 0);  // source -> its next entry
  for (int e = 0; e < shape.num_experts; ++e) {
    const int copies = splitter.num_copies(e);
    if (copies < 2) continue;
    const std::vector<int64_t>& dealt = splitter.split(e);
    for (int i = 0; i < copies; ++i) {
      int32_t* out = &rows[size_t(place[splitter.slot(e, i)]) * G];
      for (int g = 0; g < G; ++g) {
        out[g] = int32_t(dealt[size_t(i) * G + g]);
        next[g + 1] += out[g] > 0;
      }
    }
  }
  std::partial_sum(next.begin(), next.end(), next.begin());
  std::vector<SplitEntry> entries(next[G]);
  for (size_t i = 0; i < copied.size(); ++i)
    for (int g = 0; g < G; ++g)
      if (rows[i * G + g] > 0) entries[next[g]++] = {g, copied[i], rows[i * G + g]};
  return entries;
}

Traffic count_traffic(const SplitShape& shape, const SplitUse& use, const SplitRanks& ranks) {
  const int G = shape.num_ranks, E = shape.num_experts;
  Traffic sum;
  const auto add = [&](int source, int rank, int64_t rows) {
    if (source == rank) {
      sum.local += rows;
    } else if (ranks.node[source] == ranks.node[rank]) {
      sum.nvlink += rows;
    } else {
      sum.rdma += rows;
    }
  };
  Splitter splitter(shape, use, ranks);
  for (int e = 0; e < E; ++e) {
    const int copies = splitter.num_copies(e);
    if (copies == 1) {
      const int rank = splitter.slot(e, 0) / shape.slots_per_rank;
      for (int g = 0; g < G; ++g) add(g, rank, use.rows[int64_t(g) * E + e]);
      continue;
    }
    const std::vector<int64_t>& dealt = splitter.split(e);
    for (int i = 0; i < copies; ++i)
      for (int g = 0; g < G; ++g)
        add(g, splitter.slot(e, i) / shape.slots_per_rank, dealt[size_t(i) * G + g]);
  }
  return sum;
}

}  // namespace relibra
