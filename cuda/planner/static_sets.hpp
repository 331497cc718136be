// Sets of nodes, what the choice of static copies knows of them, and how choices are compared.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/bin_state.hpp"
#include "planner/static_choice.hpp"

namespace relibra {

using Set = uint64_t;

inline Set one_node(int node) {
  return Set(1) << node;
}

// Sum over columns of the largest level (rows a rank), then of what all sets have above the
// average: the second tells apart changes that do not yet lower a maximum.
struct Score {
  double level, excess;

  bool operator<(const Score& other) const {
    return level != other.level ? level < other.level : excess < other.excess;
  }
};

// Sets of nodes with the rows that cannot leave them.
struct Cuts {
  Cuts(int num_sets, int num_columns) : rows(num_sets, num_columns), level(num_sets, num_columns) {}

  std::vector<Set> set;
  std::vector<float> share;  // 1 / ranks of the set
  ColumnRows<int64_t> rows;  // rows that cannot leave the set
  ColumnRows<float> level;   // share * rows
};

// A change: rows of an expert that may no longer leave the sets in `closed`, and of one that may
// leave those in `opened`.
struct Change {
  const float *lost, *won;      // rows by column
  const char *closed, *opened;  // flags by set
};

struct Candidate {
  double gain;
  StaticCopy copy;
  int age;  // copies there were when the gain was computed

  bool operator<(const Candidate& other) const {
    if (gain != other.gain) return gain < other.gain;
    if (copy.expert != other.copy.expert) return copy.expert > other.copy.expert;
    return copy.node > other.copy.node;
  }
};

}  // namespace relibra
