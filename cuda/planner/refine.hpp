// Last touch of the in-node placement: exchanges judged by what replication reaches.
#pragma once

#include <cstdint>

#include "planner/place.hpp"

namespace relibra {

// Exchanges home experts inside nodes while the sum over columns of the largest rank after
// replication falls. Only columns above their bound are worked on, so nothing is done where
// replication already makes every node flat.
//
// solver_calls: budget. home_slot_expert: [G][H], in and out. base_rank: [E], where experts are
// before the batch, null when moves are free; an expert elsewhere then costs move_cost rows of the
// sum above. Returns the calls used.
int64_t refine_places(const LayerLoads& loads, const NodeRanks& nodes, int home_slots,
                      int replica_slots, int64_t solver_calls, uint64_t seed,
                      int32_t* home_slot_expert, const int32_t* base_rank = nullptr,
                      int64_t move_cost = 0);

}  // namespace relibra
