#include "planner/anneal.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "common/random.hpp"
#include "planner/bin_state.hpp"

namespace relibra {
namespace {

constexpr int64_t kProposalsPerTemperature = 256;
constexpr uint64_t kSampledSwaps = 512;
constexpr double kPricedTemperature = 0.02;  // as AnnealOptions::begin_temperature
constexpr int kBlock = 64;                   // swaps that are drawn ahead
static_assert(kProposalsPerTemperature % kBlock == 0);
static_assert(2 * kPlaceBits + kExponentialBits == 64);

// Mean rise of the objective over random swaps that raise it: the unit of temperature.
template <typename State>
RELIBRA_INLINE double mean_rise(const State& state, int num_experts, uint64_t seed) {
  double sum = 0;
  int count = 0;
  for (uint64_t i = 0; i < kSampledSwaps; ++i) {
    const Swap swap = propose(state, num_experts, random_bits(mix64(seed), i));
    const int64_t rise = state.score(swap) - state.objective();
    if (rise > 0) sum += double(rise), ++count;
  }
  return count > 0 ? sum / count : 0;
}

template <typename State>
RELIBRA_INLINE AnnealResult anneal_body(State& state, const BinProblem& problem,
                                        const AnnealOptions& options, int32_t* bin_of) {
  const int num_experts = problem.num_experts;
  const std::vector<double>& exponential = exponential_table();
  const int64_t bound = bin_lower_bound(problem);
  const int64_t stages = std::max<int64_t>(1, (options.proposals - 1) / kProposalsPerTemperature);
  const double decay = portable_exp(
      portable_log(options.end_temperature / options.begin_temperature) / double(stages));
  double temperature = mean_rise(state, num_experts, options.seed) * options.begin_temperature;

  int64_t current = state.objective(), best = current;
  std::vector<int32_t> best_bin_of(bin_of, bin_of + num_experts);
  bool at_best = true;           // the best assignment is the current one and not yet copied
  std::vector<int64_t> best_at;  // best objective at the start of each fiftieth of the proposals
  const int64_t watch = std::max<int64_t>(1, options.proposals / 50);
  // Places and their bins do not change, so swaps are drawn before it is known which are made.
  std::array<Swap, kBlock> swaps;
  std::array<double, kBlock> limits;  // rise of the objective that is not accepted any more
  int64_t i = 0;
  for (; i < options.proposals && best > bound; ++i) {
    if (i % kProposalsPerTemperature == 0 && i > 0) temperature *= decay;
    if (i % watch == 0) {
      const size_t now = best_at.size();
      best_at.push_back(best);
      if (now >= 20 && double(best_at[now - 10] - best) < options.stall_gain * double(best)) break;
    }
    const int at = int(i % kBlock);
    if (at == 0) {
      for (int k = 0; k < kBlock; ++k) {
        const uint64_t bits = random_bits(options.seed, uint64_t(i + k));
        swaps[k] = propose(state, num_experts, bits);
        limits[k] = temperature * exponential[bits >> (2 * kPlaceBits)];
      }
    }
    const Swap swap = swaps[at];
    const int64_t score = state.score(swap);
    if (score > current) {
      if (double(score - current) >= limits[at]) continue;
      if (at_best) state.assignment(best_bin_of.data());
      at_best = false;
    }
    state.apply(swap, score);
    current = score;
    if (options.check && state.rescore() != score)
      throw std::logic_error("anneal: the delta of a swap differs from the full rescoring");
    if (current < best) {
      best = current;
      at_best = true;
    }
  }
  if (at_best) state.assignment(best_bin_of.data());
  std::copy(best_bin_of.begin(), best_bin_of.end(), bin_of);
  if (options.check && bin_objective(problem, bin_of) != best)
    throw std::logic_error("anneal: the assignment returned is not the best that was met");
  return {best, i};
}

template <typename State>
RELIBRA_INLINE AnnealResult descend_body(State& state, const BinProblem& problem, int32_t* bin_of) {
  const int64_t bound = bin_lower_bound(problem);
  int64_t current = state.objective(), tried = 0;
  bool improved = true;
  while (improved && current > bound) {
    improved = false;
    for (int a = 0; a < problem.num_experts; ++a) {
      const int bin_a = state.bin_of_place(a);
      for (int b = state.first_place(bin_a + 1); b < problem.num_experts; ++b) {
        const Swap swap{a, b, bin_a, state.bin_of_place(b)};
        const int64_t score = state.score(swap);
        ++tried;
        if (score >= current) continue;
        state.apply(swap, score);
        current = score;
        improved = true;
      }
    }
  }
  state.assignment(bin_of);
  return {current, tried};
}

template <typename State>
RELIBRA_INLINE AnnealResult search_body(const BinProblem& problem, const AnnealOptions* options,
                                        int32_t* bin_of) {
  State state(problem, bin_of);
  return options ? anneal_body(state, problem, *options, bin_of)
                 : descend_body(state, problem, bin_of);
}

using Search = AnnealResult(const BinProblem&, const AnnealOptions*, int32_t*);

// One function a combination, since templates cannot be versioned.
RELIBRA_CLONES AnnealResult search_i32_4(const BinProblem& problem, const AnnealOptions* options,
                                         int32_t* bin_of) {
  return search_body<BinState<int32_t, 2, false>>(problem, options, bin_of);
}
RELIBRA_CLONES AnnealResult search_i32_8(const BinProblem& problem, const AnnealOptions* options,
                                         int32_t* bin_of) {
  return search_body<BinState<int32_t, 6, false>>(problem, options, bin_of);
}
RELIBRA_CLONES AnnealResult search_i32(const BinProblem& problem, const AnnealOptions* options,
                                       int32_t* bin_of) {
  return search_body<BinState<int32_t, 0, false>>(problem, options, bin_of);
}
RELIBRA_CLONES AnnealResult search_i64(const BinProblem& problem, const AnnealOptions* options,
                                       int32_t* bin_of) {
  return search_body<BinState<int64_t, 0, false>>(problem, options, bin_of);
}
AnnealResult search_scaled(const BinProblem& problem, const AnnealOptions* options,
                           int32_t* bin_of) {
  return search_body<BinState<int64_t, 0, true>>(problem, options, bin_of);
}

Search* choose(const BinProblem& problem) {
  for (const int32_t scale : problem.bin_scale)
    if (scale != 1) return search_scaled;
  int64_t sum = 0;  // bounds every bin load and the objective
  for (int64_t i = 0; i < int64_t(problem.num_experts) * problem.num_columns; ++i)
    sum += problem.load[i];
  if (sum > std::numeric_limits<int32_t>::max()) return search_i64;
  if (problem.num_bins <= 4) return search_i32_4;
  return problem.num_bins <= 8 ? search_i32_8 : search_i32;
}

AnnealResult search(const BinProblem& problem, const AnnealOptions* options, int32_t* bin_of) {
  // No experts, or all in one bin: nothing to swap.
  if (problem.num_experts == 0) return {0, 0};
  if (std::count(bin_of, bin_of + problem.num_experts, bin_of[0]) == problem.num_experts)
    return {bin_objective(problem, bin_of), 0};
  return choose(problem)(problem, options, bin_of);
}

}  // namespace

AnnealResult anneal(const BinProblem& problem, const AnnealOptions& options, int32_t* bin_of) {
  return search(problem, &options, bin_of);
}

AnnealResult descend(const BinProblem& problem, int32_t* bin_of) {
  return search(problem, nullptr, bin_of);
}

int64_t bin_objective(const BinProblem& problem, const int32_t* bin_of) {
  const int C = problem.num_columns;
  std::vector<int64_t> bin_load(size_t(problem.num_bins) * C, 0);
  for (int e = 0; e < problem.num_experts; ++e)
    for (int c = 0; c < C; ++c)
      bin_load[size_t(bin_of[e]) * C + c] += problem.load[int64_t(e) * C + c];
  int64_t sum = 0;
  for (int c = 0; c < C; ++c) {
    int64_t largest = 0;
    for (int b = 0; b < problem.num_bins; ++b)
      largest = std::max(largest, bin_load[size_t(b) * C + c] * problem.bin_scale[b]);
    sum += largest;
  }
  for (int e = 0; problem.move_cost != 0 && e < problem.num_experts; ++e)
    if (bin_of[e] != problem.base_bin[e]) sum += problem.move_cost;
  return sum;
}

int64_t bin_lower_bound(const BinProblem& problem) {
  const int E = problem.num_experts, C = problem.num_columns;
  // sum over bins of load = total, so the largest scaled bin is >= total / (sum of 1 / scale).
  int64_t common = 1;
  for (const int64_t scale : problem.bin_scale) common = std::lcm(common, scale);
  int64_t shares = 0;
  for (const int64_t scale : problem.bin_scale) shares += common / scale;
  std::vector<int64_t> column(E);
  int64_t sum = 0;
  for (int c = 0; c < C; ++c) {
    int64_t total = 0;
    for (int e = 0; e < E; ++e) total += column[e] = problem.load[int64_t(e) * C + c];
    std::sort(column.begin(), column.end());
    std::partial_sum(column.begin(), column.end() - 1, column.begin());
    int64_t crowded = std::numeric_limits<int64_t>::max();
    for (int b = 0; b < problem.num_bins; ++b) {
      const int company = problem.capacity[b] - 1;
      if (company < 0) continue;
      const int64_t rows = column[E - 1] + (company > 0 ? column[company - 1] : 0);
      crowded = std::min(crowded, rows * problem.bin_scale[b]);
    }
    // ceil(total * common / shares) in 128 bits is not needed: loads are below 2^53.
    const int64_t even = total / shares * common + (total % shares * common + shares - 1) / shares;
    sum += std::max(even, crowded);
  }
  return sum;
}

void lpt_assign(const BinProblem& problem, int32_t* bin_of) {
  const int E = problem.num_experts, C = problem.num_columns;
  std::vector<int64_t> total(E, 0), bin_load(problem.num_bins, 0);
  for (int e = 0; e < E; ++e)
    total[e] = std::accumulate(problem.load + int64_t(e) * C, problem.load + int64_t(e + 1) * C,
                               int64_t(0));
  std::vector<int32_t> order(E), room = problem.capacity;
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return total[a] > total[b]; });
  for (const int e : order) {
    int lightest = -1;
    for (int b = 0; b < problem.num_bins; ++b)
      if (room[b] > 0 && (lightest < 0 || bin_load[b] * problem.bin_scale[b] <
                                              bin_load[lightest] * problem.bin_scale[lightest]))
        lightest = b;
    bin_of[e] = lightest;
    bin_load[lightest] += total[e];
    --room[lightest];
  }
}

AnnealResult cold_assign(const BinProblem& problem, const AnnealOptions& options, int32_t* bin_of) {
  std::vector<int32_t> in_order(problem.num_experts);
  int expert = 0;
  for (int b = 0; b < problem.num_bins; ++b)
    for (int i = 0; i < problem.capacity[b]; ++i) in_order[expert++] = b;
  lpt_assign(problem, bin_of);
  if (bin_objective(problem, in_order.data()) <= bin_objective(problem, bin_of))
    std::copy(in_order.begin(), in_order.end(), bin_of);
  const AnnealResult annealed = anneal(problem, options, bin_of);
  const AnnealResult descended = descend(problem, bin_of);
  return {descended.objective, annealed.num_proposals + descended.num_proposals};
}

AnnealResult warm_assign(const BinProblem& problem, const int32_t* start, int32_t* bin_of) {
  std::copy(start, start + problem.num_experts, bin_of);
  return descend(problem, bin_of);
}

AnnealResult priced_assign(BinProblem problem, AnnealOptions options, const int32_t* start,
                           int64_t move_cost, int32_t* bin_of) {
  problem.base_bin = start;
  problem.move_cost = move_cost;
  // Near a good start: a hot search would leave it, and find its way back only by the price. It
  // gains nothing before it is cold, so it must not stop early.
  options.begin_temperature = kPricedTemperature;
  options.stall_gain = -1;
  const AnnealResult direct = warm_assign(problem, start, bin_of);
  std::vector<int32_t> other(start, start + problem.num_experts);
  AnnealResult result = anneal(problem, options, other.data());
  const AnnealResult descended = descend(problem, other.data());
  if (descended.objective < direct.objective) std::copy(other.begin(), other.end(), bin_of);
  return {std::min(direct.objective, descended.objective),
          direct.num_proposals + result.num_proposals + descended.num_proposals};
}

}  // namespace relibra
