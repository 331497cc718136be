// Experts onto bins (nodes, or ranks) of fixed cardinality: the inter-batch stage.
//
// Minimises sum over columns (micro-batches) of the largest bin. Exact integer arithmetic, so the
// delta of a swap equals a full rescoring bit for bit, and results are the same on every machine
// and for every number of threads.
#pragma once

#include <cstdint>
#include <vector>

namespace relibra {

struct BinProblem {
  int num_experts;                 // E
  int num_bins;                    // B
  int num_columns;                 // C
  const int64_t* load;             // [E][C], weighted rows; owned by the caller
  std::vector<int32_t> capacity;   // [B], experts of each bin, in all E
  std::vector<int32_t> bin_scale;  // [B], a bin of load x counts as scale * x (uneven nodes)
  // Price of moves: every expert outside its base bin adds move_cost to the objective.
  const int32_t* base_bin = nullptr;  // [E], owned by the caller; may be null when move_cost is 0
  int64_t move_cost = 0;
};

struct AnnealOptions {
  int64_t proposals = 100000;
  // Temperatures in units of the mean rise of the objective over random swaps; geometric in
  // between. Measured on the GPT-OSS trace (32 experts, 11 columns), synthetic loads (128, 32) and
  // small problems with a known optimum (16, 4), where a colder start stays 0.2 % above the
  // optimum.
  double begin_temperature = 0.2;
  double end_temperature = 0.002;
  uint64_t seed = 0;
  // Stop when the last fifth of the proposals gained less than this part of the objective.
  double stall_gain = 5e-4;
  // Rescore everything after each accepted swap and at the end; throw std::logic_error on a
  // difference.
  bool check = false;
};

struct AnnealResult {
  int64_t objective;      // exact, of the assignment returned
  int64_t num_proposals;  // swaps that were evaluated
};

// Sum over columns of the largest scaled bin, and the price of moves. bin_of: [E].
int64_t bin_objective(const BinProblem& problem, const int32_t* bin_of);

// No assignment is better: per column the larger of the even share and the largest expert in the
// company of the smallest.
int64_t bin_lower_bound(const BinProblem& problem);

// Largest expert (summed over columns) first, onto the lightest bin with room; ties go to the lower
// index. bin_of: [E], out.
void lpt_assign(const BinProblem& problem, int32_t* bin_of);

// Swap annealing from bin_of [E] (in and out). Returns the best assignment that was met.
AnnealResult anneal(const BinProblem& problem, const AnnealOptions& options, int32_t* bin_of);

// Takes improving swaps, pair by pair in fixed order, until none is left. Idempotent.
AnnealResult descend(const BinProblem& problem, int32_t* bin_of);

// The better of LPT and experts in order, then anneal() and descend(). bin_of: [E], out.
AnnealResult cold_assign(const BinProblem& problem, const AnnealOptions& options, int32_t* bin_of);

// descend() from start [E], whose cardinalities stay. bin_of: [E], out.
AnnealResult warm_assign(const BinProblem& problem, const int32_t* start, int32_t* bin_of);

// With a price of moves from start [E]: the better of descend() and of anneal() and descend().
// bin_of: [E], out.
AnnealResult priced_assign(BinProblem problem, AnnealOptions options, const int32_t* start,
                           int64_t move_cost, int32_t* bin_of);

}  // namespace relibra
