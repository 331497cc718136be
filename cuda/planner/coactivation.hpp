// Experts that tokens choose together onto the same node: grouping from a subsample of tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "planner/anneal.hpp"

namespace relibra {

// Sampled tokens of one layer, as a set of tokens for each expert.
class TokenSets {
 public:
  // ids: [T][K], -1 = none. source_bin: [T], bin that the token comes from, -1 = unknown; null =
  // all unknown. T is padded with empty tokens to whole cache lines.
  TokenSets(const int32_t* ids, int64_t num_tokens, int top_k, const int32_t* source_bin,
            int num_experts, int num_bins);

  int num_words() const { return words_; }
  const uint64_t* of_expert(int expert) const { return &chosen_[size_t(expert) * words_]; }
  // Tokens that do not come from the bin: a copy of them must travel there.
  const uint64_t* away(int bin) const { return &away_[size_t(bin) * words_]; }

 private:
  int words_;
  std::vector<uint64_t> chosen_, away_;  // [E][words], [B][words]
};

// Copies that travel: pairs of a token and a bin with at least one of its experts, its source left
// out. bin_of: [E].
int64_t count_node_copies(const TokenSets& tokens, int num_experts, int num_bins,
                          const int32_t* bin_of);

struct GroupOptions {
  int64_t proposals = 100000;
  // Sum over columns of the largest bin, as bin_objective(); more than that is paid for dearly.
  int64_t load_limit = 0;
  uint64_t seed = 0;
  bool check = false;  // count everything again after each accepted swap
};

struct GroupResult {
  int64_t objective;  // of loads
  int64_t copies;
  int64_t num_proposals;
};

// Swap annealing from bin_of [E] (in and out): few copies with loads under the limit. Returns the
// best assignment that was met; never worse than the start in the measure `group_energy`.
GroupResult group_experts(const BinProblem& problem, const TokenSets& tokens,
                          const GroupOptions& options, int32_t* bin_of);

}  // namespace relibra
