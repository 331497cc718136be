#include "planner/fixed_sites.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace relibra {

int64_t SiteSplitter::split(const int64_t* totals, const int32_t* slot_expert, int64_t* slot_rows) {
  const int E = shape_.num_experts, n = shape_.slots_per_rank;
  const int num_slots = shape_.num_ranks * n;
  // The lowest slot of an expert plays the home of SiteFlow, the others its replicas.
  first_slot_.assign(E, -1);
  rows_.assign(num_slots, 0);
  for (int slot = num_slots - 1; slot >= 0; --slot)
    if (slot_expert[slot] >= 0) first_slot_[slot_expert[slot]] = slot;
  int64_t sum = 0;
  for (int e = 0; e < E; ++e) {
    sum += totals[e];
    if (first_slot_[e] >= 0) {
      rows_[first_slot_[e]] = totals[e];
    } else if (totals[e] > 0) {
      throw std::invalid_argument("slot_expert: need a slot for expert " + std::to_string(e) +
                                  ", which has rows");
    }
  }
  const NodeInstance instance{shape_.num_ranks, n, n, rows_.data()};
  flow_.reset(instance);
  for (int slot = 0; slot < num_slots; ++slot) {
    const int32_t expert = slot_expert[slot];
    if (expert < 0 || slot == first_slot_[expert]) continue;
    if (!flow_.hosts(first_slot_[expert], slot / n)) flow_.add(first_slot_[expert], slot / n, 0);
  }
  const int64_t bound = (sum + shape_.num_ranks - 1) / shape_.num_ranks;
  const int64_t largest = flow_.balance(bound, std::numeric_limits<int64_t>::max());
  std::fill(slot_rows, slot_rows + num_slots, 0);
  for (int e = 0; e < E; ++e)
    if (first_slot_[e] >= 0) slot_rows[first_slot_[e]] = flow_.rest(first_slot_[e]);
  for (const Replica& one : flow_.replicas()) {
    const int32_t expert = slot_expert[one.expert];
    int slot = one.rank * n;
    while (slot_expert[slot] != expert) ++slot;
    slot_rows[slot] = one.rows;
  }
  return largest;
}

}  // namespace relibra
