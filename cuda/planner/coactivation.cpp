#include "planner/coactivation.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "common/random.hpp"
#include "planner/bin_state.hpp"

namespace relibra {
namespace {

constexpr int kWordsPerLine = 8;
constexpr int64_t kProposalsPerTemperature = 256;
constexpr uint64_t kSampledSwaps = 256;
// Temperatures in units of the mean rise over random swaps, as in anneal().
constexpr double kBeginTemperature = 0.2, kEndTemperature = 0.002;
// Loads above the limit by some part cost as many copies as this multiple of that part of all.
constexpr double kOverweight = 20;

// Copies to a bin when `gone` leaves it and `come` joins. one, two: tokens with at least one, two
// experts in the bin.
RELIBRA_CLONES int64_t copies_after(const uint64_t* one, const uint64_t* two, const uint64_t* gone,
                                    const uint64_t* come, const uint64_t* away, int words) {
  int64_t count = 0;
  for (int i = 0; i < words; ++i)
    count += __builtin_popcountll(((one[i] & ~(gone[i] & ~two[i])) | come[i]) & away[i]);
  return count;
}

RELIBRA_CLONES void join(const uint64_t* tokens, uint64_t* one, uint64_t* two, int words) {
  for (int i = 0; i < words; ++i) {
    two[i] |= one[i] & tokens[i];
    one[i] |= tokens[i];
  }
}

RELIBRA_CLONES int64_t count_common(const uint64_t* a, const uint64_t* b, int words) {
  int64_t count = 0;
  for (int i = 0; i < words; ++i) count += __builtin_popcountll(a[i] & b[i]);
  return count;
}

// Tokens by the number of their experts in each bin.
class BinTokens {
 public:
  BinTokens(const TokenSets& tokens, int num_bins)
      : tokens_(tokens),
        one_(size_t(num_bins) * tokens.num_words()),
        two_(one_.size()),
        copies_(num_bins) {}

  int64_t copies() const { return total_; }

  // Recounts a bin from its experts, the places of the state.
  template <typename State>
  void recount(const State& state, int bin) {
    uint64_t *one = row(one_, bin), *two = row(two_, bin);
    std::fill(one, one + words(), 0);
    std::fill(two, two + words(), 0);
    const int first = state.first_place(bin);
    for (int i = 0; i < state.num_places(bin); ++i)
      join(tokens_.of_expert(state.expert_at(first + i)), one, two, words());
    total_ -= copies_[bin];
    copies_[bin] = count_common(one, tokens_.away(bin), words());
    total_ += copies_[bin];
  }

  template <typename State>
  int64_t score(const State& state, const Swap& swap) const {
    const uint64_t* a = tokens_.of_expert(state.expert_at(swap.place_a));
    const uint64_t* b = tokens_.of_expert(state.expert_at(swap.place_b));
    return total_ - copies_[swap.bin_a] - copies_[swap.bin_b] + with(swap.bin_a, a, b) +
           with(swap.bin_b, b, a);
  }

 private:
  int words() const { return tokens_.num_words(); }
  uint64_t* row(std::vector<uint64_t>& table, int bin) { return &table[size_t(bin) * words()]; }
  int64_t with(int bin, const uint64_t* gone, const uint64_t* come) const {
    const size_t at = size_t(bin) * words();
    return copies_after(&one_[at], &two_[at], gone, come, tokens_.away(bin), words());
  }

  const TokenSets& tokens_;
  std::vector<uint64_t> one_, two_;  // [B][words]
  std::vector<int64_t> copies_;      // [B]
  int64_t total_ = 0;
};

// The search; energy = copies, and what the loads have above their limit in the same unit.
template <typename State>
class Grouping {
 public:
  Grouping(const BinProblem& problem, const TokenSets& tokens, const GroupOptions& options,
           const int32_t* bin_of)
      : problem_(problem),
        tokens_(tokens),
        options_(options),
        state_(problem, bin_of),
        counts_(tokens, problem.num_bins) {
    for (int bin = 0; bin < problem.num_bins; ++bin) counts_.recount(state_, bin);
    price_ = kOverweight * double(std::max<int64_t>(1, counts_.copies())) /
             double(std::max<int64_t>(1, options.load_limit));
  }

  RELIBRA_INLINE GroupResult run(int32_t* bin_of) {
    const int E = problem_.num_experts;
    const std::vector<double>& exponential = exponential_table();
    const int64_t stages =
        std::max<int64_t>(1, (options_.proposals - 1) / kProposalsPerTemperature);
    const double decay =
        portable_exp(portable_log(kEndTemperature / kBeginTemperature) / double(stages));
    double temperature = mean_rise() * kBeginTemperature;
    double current = energy(state_.objective(), counts_.copies());
    GroupResult best{state_.objective(), counts_.copies(), options_.proposals};
    double best_energy = current;
    for (int64_t i = 0; i < options_.proposals; ++i) {
      if (i % kProposalsPerTemperature == 0 && i > 0) temperature *= decay;
      const uint64_t bits = random_bits(options_.seed, uint64_t(i));
      const Swap swap = propose(state_, E, bits);
      const double allowed = temperature * exponential[bits >> (2 * kPlaceBits)];
      const int64_t copies = counts_.score(state_, swap);
      // Loads under the limit cannot make up for copies.
      if (is_under_limit() && double(copies) - current >= allowed && double(copies) > current)
        continue;
      const int64_t load = state_.score(swap);
      const double next = energy(load, copies);
      if (next > current && next - current >= allowed) continue;
      state_.apply(swap, load);
      counts_.recount(state_, swap.bin_a);
      counts_.recount(state_, swap.bin_b);
      if (options_.check) check(load, copies);
      current = next;
      if (current >= best_energy) continue;
      best_energy = current;
      best.objective = load;
      best.copies = copies;
      state_.assignment(bin_of);
    }
    return best;
  }

 private:
  double energy(int64_t load, int64_t copies) const {
    const int64_t over = std::max<int64_t>(0, load - options_.load_limit);
    return double(copies) + price_ * double(over);
  }

  bool is_under_limit() const { return state_.objective() <= options_.load_limit; }

  RELIBRA_INLINE double mean_rise() const {
    const double now = energy(state_.objective(), counts_.copies());
    double sum = 0;
    int count = 0;
    for (uint64_t i = 0; i < kSampledSwaps; ++i) {
      const Swap swap = propose(state_, problem_.num_experts, random_bits(mix64(options_.seed), i));
      const double rise = energy(state_.score(swap), counts_.score(state_, swap)) - now;
      if (rise > 0) sum += rise, ++count;
    }
    return count > 0 ? sum / count : 0;
  }

  void check(int64_t load, int64_t copies) {
    std::vector<int32_t> bin_of(problem_.num_experts);
    state_.assignment(bin_of.data());
    if (bin_objective(problem_, bin_of.data()) != load)
      throw std::logic_error("group_experts: the load of a swap differs from the full count");
    if (counts_.copies() != copies || count_node_copies(tokens_, problem_.num_experts,
                                                        problem_.num_bins, bin_of.data()) != copies)
      throw std::logic_error("group_experts: the copies of a swap differ from the full count");
  }

  const BinProblem& problem_;
  const TokenSets& tokens_;
  const GroupOptions& options_;
  State state_;
  BinTokens counts_;
  double price_ = 0;  // copies for one row above the limit
};

// One function a combination, since templates cannot be versioned.
RELIBRA_CLONES GroupResult group_i32_4(const BinProblem& problem, const TokenSets& tokens,
                                       const GroupOptions& options, int32_t* bin_of) {
  return Grouping<BinState<int32_t, 2, false>>(problem, tokens, options, bin_of).run(bin_of);
}
RELIBRA_CLONES GroupResult group_i32_8(const BinProblem& problem, const TokenSets& tokens,
                                       const GroupOptions& options, int32_t* bin_of) {
  return Grouping<BinState<int32_t, 6, false>>(problem, tokens, options, bin_of).run(bin_of);
}
RELIBRA_CLONES GroupResult group_i32(const BinProblem& problem, const TokenSets& tokens,
                                     const GroupOptions& options, int32_t* bin_of) {
  return Grouping<BinState<int32_t, 0, false>>(problem, tokens, options, bin_of).run(bin_of);
}
GroupResult group_i64(const BinProblem& problem, const TokenSets& tokens,
                      const GroupOptions& options, int32_t* bin_of) {
  return Grouping<BinState<int64_t, 0, false>>(problem, tokens, options, bin_of).run(bin_of);
}
GroupResult group_scaled(const BinProblem& problem, const TokenSets& tokens,
                         const GroupOptions& options, int32_t* bin_of) {
  return Grouping<BinState<int64_t, 0, true>>(problem, tokens, options, bin_of).run(bin_of);
}

using Group = GroupResult(const BinProblem&, const TokenSets&, const GroupOptions&, int32_t*);

Group* choose(const BinProblem& problem) {
  for (const int32_t scale : problem.bin_scale)
    if (scale != 1) return group_scaled;
  int64_t sum = 0;  // bounds every bin load and the objective
  for (int64_t i = 0; i < int64_t(problem.num_experts) * problem.num_columns; ++i)
    sum += problem.load[i];
  if (sum > std::numeric_limits<int32_t>::max()) return group_i64;
  if (problem.num_bins <= 4) return group_i32_4;
  return problem.num_bins <= 8 ? group_i32_8 : group_i32;
}

}  // namespace

TokenSets::TokenSets(const int32_t* ids, int64_t num_tokens, int top_k, const int32_t* source_bin,
                     int num_experts, int num_bins) {
  words_ = int((num_tokens + 63) / 64);
  words_ = (words_ + kWordsPerLine - 1) / kWordsPerLine * kWordsPerLine;
  chosen_.assign(size_t(num_experts) * words_, 0);
  away_.assign(size_t(num_bins) * words_, ~uint64_t(0));
  for (int64_t t = 0; t < num_tokens; ++t) {
    const uint64_t bit = uint64_t(1) << (t % 64);
    for (int k = 0; k < top_k; ++k)
      if (const int32_t e = ids[t * top_k + k]; e >= 0) chosen_[size_t(e) * words_ + t / 64] |= bit;
    if (source_bin && source_bin[t] >= 0) away_[size_t(source_bin[t]) * words_ + t / 64] &= ~bit;
  }
}

int64_t count_node_copies(const TokenSets& tokens, int num_experts, int num_bins,
                          const int32_t* bin_of) {
  int64_t copies = 0;
  std::vector<uint64_t> seen(tokens.num_words());
  for (int bin = 0; bin < num_bins; ++bin) {
    std::fill(seen.begin(), seen.end(), 0);
    for (int e = 0; e < num_experts; ++e)
      for (int i = 0; bin_of[e] == bin && i < tokens.num_words(); ++i)
        seen[i] |= tokens.of_expert(e)[i];
    copies += count_common(seen.data(), tokens.away(bin), tokens.num_words());
  }
  return copies;
}

GroupResult group_experts(const BinProblem& problem, const TokenSets& tokens,
                          const GroupOptions& options, int32_t* bin_of) {
  if (problem.num_experts == 0) return {0, 0, 0};
  if (std::count(bin_of, bin_of + problem.num_experts, bin_of[0]) == problem.num_experts)
    return {bin_objective(problem, bin_of),
            count_node_copies(tokens, problem.num_experts, problem.num_bins, bin_of), 0};
  return choose(problem)(problem, tokens, options, bin_of);
}

}  // namespace relibra
