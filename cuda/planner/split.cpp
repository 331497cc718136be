#include "planner/split.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <string>

namespace relibra {
namespace {

__extension__ typedef unsigned __int128 Wide;

constexpr int kIndexBits = 20;                    // ranks are fewer than 2^20
constexpr int64_t kExactRows = int64_t(1) << 26;  // products of two are exact doubles
constexpr int64_t kIndexMask = (1 << kIndexBits) - 1;

}  // namespace

Splitter::Places::Places(const int32_t* rank_to_place, int num_ranks)
    : place(rank_to_place, rank_to_place + num_ranks), ranks(num_ranks) {
  if (num_ranks == 0) return;
  first.assign(2 + *std::max_element(place.begin(), place.end()), 0);
  for (const int32_t one : place) ++first[one + 1];
  std::partial_sum(first.begin(), first.end(), first.begin());
  std::vector<int> next(first.begin(), first.end() - 1);
  for (int g = 0; g < num_ranks; ++g) ranks[next[place[g]]++] = g;
}

Splitter::Splitter(const SplitShape& shape, const SplitRanks& ranks)
    : shape_(shape),
      rail_(ranks.rail, shape.num_ranks),
      node_(ranks.node, ranks.node ? shape.num_ranks : 0),
      all_(shape.num_ranks) {
  std::iota(all_.begin(), all_.end(), 0);
}

// Slots of each expert, ascending.
void Splitter::load(const SplitUse& use) {
  use_ = use;
  const int num_slots = shape_.num_ranks * shape_.slots_per_rank;
  first_slot_.assign(shape_.num_experts + 1, 0);
  for (int s = 0; s < num_slots; ++s)
    if (use.slot_expert[s] >= 0) ++first_slot_[use.slot_expert[s] + 1];
  std::partial_sum(first_slot_.begin(), first_slot_.end(), first_slot_.begin());
  slots_.resize(first_slot_.back());
  next_.assign(first_slot_.begin(), first_slot_.end() - 1);
  for (int s = 0; s < num_slots; ++s)
    if (use.slot_expert[s] >= 0) slots_[next_[use.slot_expert[s]]++] = s;
}

// Rows of the listed experts by source: source by source, as they lie.
void Splitter::gather(const std::vector<int>& experts) {
  const int G = shape_.num_ranks, count = int(experts.size());
  counts_.resize(size_t(count) * G);
  for (int g = 0; g < G; ++g) {
    const int32_t* rows = use_.rows + int64_t(g) * shape_.num_experts;
    for (int i = 0; i < count; ++i) counts_[size_t(i) * G + g] = rows[experts[i]];
  }
}

// Deals the rows of an expert, `count` [G] by source, to its copies.
void Splitter::split(int expert, int32_t* count) {
  const int G = shape_.num_ranks, copies = num_copies(expert);
  count_ = count;
  int64_t total = 0, planned = 0;
  for (int g = 0; g < G; ++g) total += count[g];
  room_.resize(copies);
  for (int i = 0; i < copies; ++i) planned += room_[i] = use_.slot_rows[slot(expert, i)];
  if (planned != total)
    throw std::invalid_argument("slot_rows: need " + std::to_string(total) + " rows of expert " +
                                std::to_string(expert) + ", got " + std::to_string(planned));
  for (int i = 0; i < copies; ++i) std::fill(dealt_[i], dealt_[i] + G, 0);
  for (int i = 0; i < copies; ++i) {
    const int rank = rank_of(expert, i);
    move(i, rank, int32_t(std::min<int64_t>(count[rank], room_[i])));
  }
  if (on_several_nodes(expert)) deal_near(expert, node_);
  deal_near(expert, rail_);
  for (int i = 0; i < copies; ++i) deal(i, all_.data(), G);
}

bool Splitter::on_several_nodes(int expert) const {
  if (node_.place.empty()) return false;
  for (int i = 1; i < num_copies(expert); ++i)
    if (node_.place[rank_of(expert, i)] != node_.place[rank_of(expert, 0)]) return true;
  return false;
}

// Deals the rows of each copy to the sources in the place of the copy.
void Splitter::deal_near(int expert, const Places& places) {
  for (int i = 0; i < num_copies(expert); ++i) {
    const int at = places.place[rank_of(expert, i)];
    deal(i, &places.ranks[places.first[at]], places.first[at + 1] - places.first[at]);
  }
}

void Splitter::move(int copy, int source, int32_t rows) {
  dealt_[copy][source] += rows;
  count_[source] -= rows;
  room_[copy] -= rows;
}

// Deals as many rows of a copy as fit to the sources in proportion to what they have left, by
// largest remainder; ties go to the lower source.
void Splitter::deal(int copy, const int* sources, int num_sources) {
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
  keys_.resize(num_sources);
  exact_keys_.resize(num_sources);
  const int64_t left = weight < kExactRows ? share_exactly(rows, weight, sources, num_sources)
                                           : share_widely(rows, weight, sources, num_sources);
  if (left > 0 && weight < kExactRows) {
    // The level that as many keys reach as rows are left; keys are all different.
    const double last = level_of(left, double(weight << kIndexBits));
    for (int i = 0; i < num_sources; ++i) share_[i] += exact_keys_[i] >= last;
  } else if (left > 0) {
    order_.resize(num_sources);
    std::iota(order_.begin(), order_.end(), 0);
    std::nth_element(
        order_.begin(), order_.begin() + (left - 1), order_.end(),
        [this](int a, int b) { return keys_[a] != keys_[b] ? keys_[a] > keys_[b] : a < b; });
    for (int64_t i = 0; i < left; ++i) ++share_[order_[i]];
  }
  for (int i = 0; i < num_sources; ++i) move(copy, sources[i], share_[i]);
}

// Shares rounded down, and keys that rise with the remainder and fall with the source. Returns the
// rows that are left. All products are exact in double precision, so a quotient is off by one at
// most and its remainder tells.
int64_t Splitter::share_exactly(int64_t rows, int64_t weight, const int* sources, int num_sources) {
  const double factor = double(rows), divisor = double(weight), inverse = 1 / divisor;
  int32_t* share = share_.data();
  double* keys = exact_keys_.data();
  int64_t sum = 0;
  for (int i = 0; i < num_sources; ++i) {
    const double product = factor * double(count_[sources[i]]);
    double quotient = double(int32_t(product * inverse));
    double rest = product - quotient * divisor;
    const double fix = double(rest >= divisor) - double(rest < 0);
    quotient += fix;
    rest -= fix * divisor;
    share[i] = int32_t(quotient);
    sum += share[i];
    keys[i] = rest * double(kIndexMask + 1) + double(kIndexMask - i);
  }
  return rows - sum;
}

// A level that exactly `count` of the keys reach; all are integers below `above`. The search goes
// by counts, where every step is one pass without branches: between two levels it takes the one
// that would be right if keys were even in between, and every other time the middle.
double Splitter::level_of(int64_t count, double above) const {
  const double* keys = exact_keys_.data();
  const int size = int(exact_keys_.size());
  double low = 0, high = above;
  int64_t at_low = size, at_high = 0;  // keys that reach them
  for (bool middle = false; at_low != count; middle = !middle) {
    const double part = middle ? 0.5 : double(at_low - count) / double(at_low - at_high);
    const double step = std::floor((high - low) * part);
    const double level = std::min(std::max(low + step, low + 1), high - 1);
    int64_t reached = 0;
#pragma omp simd reduction(+ : reached)
    for (int i = 0; i < size; ++i) reached += keys[i] >= level;
    if (reached >= count) {
      low = level, at_low = reached;
    } else {
      high = level, at_high = reached;
    }
  }
  return low;
}

// The same for any numbers; keys are the remainders alone.
int64_t Splitter::share_widely(int64_t rows, int64_t weight, const int* sources, int num_sources) {
  int64_t left = rows;
  for (int i = 0; i < num_sources; ++i) {
    const Wide product = Wide(uint64_t(rows)) * uint64_t(count_[sources[i]]);
    const auto share = int64_t(product / uint64_t(weight));
    keys_[i] = int64_t(product - Wide(uint64_t(share)) * uint64_t(weight));
    share_[i] = int32_t(share);
    left -= share;
  }
  return left;
}

void Splitter::split_use(const SplitUse& use, int32_t* quota) {
  load(use);
  const int G = shape_.num_ranks;
  const int64_t num_slots = int64_t(G) * shape_.slots_per_rank;
  std::fill(quota, quota + G * num_slots, 0);
  experts_.resize(shape_.num_experts);
  std::iota(experts_.begin(), experts_.end(), 0);
  gather(experts_);
  for (const int e : experts_) {
    place_copies(num_copies(e));
    split(e, &counts_[size_t(e) * G]);
    for (int i = 0; i < num_copies(e); ++i)
      for (int g = 0; g < G; ++g) quota[g * num_slots + slot(e, i)] = dealt_[i][g];
  }
}

// Room in cells_ for the copies of one expert.
void Splitter::place_copies(int copies) {
  const int G = shape_.num_ranks;
  cells_.resize(std::max(cells_.size(), size_t(copies) * G));
  dealt_.resize(copies);
  for (int i = 0; i < copies; ++i) dealt_[i] = &cells_[size_t(i) * G];
}

SplitEntries Splitter::split_copied(const SplitUse& use) {
  load(use);
  const int G = shape_.num_ranks, num_slots = G * shape_.slots_per_rank;
  experts_.clear();
  for (int e = 0; e < shape_.num_experts; ++e)
    if (num_copies(e) > 1) experts_.push_back(e);
  gather(experts_);
  copied_.clear();  // slots of experts with copies, ascending
  next_.resize(num_slots);
  for (int s = 0; s < num_slots; ++s) {
    const int32_t expert = use.slot_expert[s];
    if (expert < 0 || num_copies(expert) < 2) continue;
    next_[s] = int(copied_.size());
    copied_.push_back(s);
  }
  const int C = int(copied_.size());
  cells_.resize(size_t(C) * G);
  for (size_t k = 0; k < experts_.size(); ++k) {
    const int e = experts_[k];
    dealt_.resize(num_copies(e));
    for (int i = 0; i < num_copies(e); ++i) dealt_[i] = &cells_[size_t(next_[slot(e, i)]) * G];
    split(e, &counts_[k * G]);
  }
  // Every cell is written; those without rows are written over.
  entries_.resize(std::max(entries_.size(), cells_.size() + 1));
  SplitEntry* out = entries_.data();
  for (int g = 0; g < G; ++g)
    for (int i = 0; i < C; ++i) {
      const int32_t rows = cells_[size_t(i) * G + g];
      *out = {g, copied_[i], rows};
      out += rows > 0;
    }
  return {entries_.data(), size_t(out - entries_.data())};
}

Traffic Splitter::count_traffic(const SplitUse& use, const int32_t* node) {
  load(use);
  const int G = shape_.num_ranks, E = shape_.num_experts;
  Traffic sum;
  const auto add = [&](int source, int rank, int64_t rows) {
    if (source == rank) {
      sum.local += rows;
    } else if (node[source] == node[rank]) {
      sum.nvlink += rows;
    } else {
      sum.rdma += rows;
    }
  };
  experts_.clear();
  for (int e = 0; e < E; ++e)
    if (num_copies(e) != 1) experts_.push_back(e);
  gather(experts_);
  for (size_t k = 0; k < experts_.size(); ++k) {
    const int e = experts_[k];
    place_copies(num_copies(e));
    split(e, &counts_[k * G]);
    for (int i = 0; i < num_copies(e); ++i)
      for (int g = 0; g < G; ++g) add(g, rank_of(e, i), dealt_[i][g]);
  }
  for (int g = 0; g < G; ++g) {
    const int32_t* rows = use.rows + int64_t(g) * E;
    for (int e = 0; e < E; ++e)
      if (num_copies(e) == 1) add(g, rank_of(e, 0), rows[e]);
  }
  return sum;
}

}  // namespace relibra
