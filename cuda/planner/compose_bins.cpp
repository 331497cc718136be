#include "planner/compose_bins.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

namespace relibra {
namespace {

constexpr int64_t kSizeUnit = int64_t(1) << 20;  // size of the largest sample, see size_of()

// Whether x says more than y: lacking tokens or attention says more than being full by count.
bool closer(const Misfit& x, const Misfit& y) {
  if (y.limit == Limit::kNone) return true;
  if ((x.limit == Limit::kCount) != (y.limit == Limit::kCount)) return y.limit == Limit::kCount;
  return x.excess < y.excess;
}

}  // namespace

Bins::Bins(const ComposeProblem& problem)
    : problem_(problem),
      num_groups_(1 +
                  *std::max_element(problem.group_of_cell.begin(), problem.group_of_cell.end())),
      column_of_bin_(problem.num_bins()),
      bins_of_column_(size_t(problem.num_micro_batches) * num_groups_),
      bin_of_(problem.num_samples, -1),
      load_(problem.num_bins()) {
  for (int bin = 0; bin < problem.num_bins(); ++bin) {
    const int cell = bin % problem.num_cells();
    const int column = bin / problem.num_cells() * num_groups_ + problem.group_of_cell[cell];
    column_of_bin_[bin] = column;
    bins_of_column_[column].push_back(bin);
  }
  for (int i = 0; i < problem.num_samples; ++i) {
    most_tokens_ = std::max(most_tokens_, problem.tokens[i]);
    most_attention_ = std::max(most_attention_, problem.attention[i]);
  }
}

// Work of a sample: its tokens and its attention, each relative to the largest.
int64_t Bins::size_of(int sample) const {
  const double tokens = double(problem_.tokens[sample]) / double(most_tokens_);
  const double attention = double(problem_.attention[sample]) / double(most_attention_);
  return int64_t(tokens * kSizeUnit) + int64_t(attention * kSizeUnit);
}

std::vector<int32_t> Bins::by_size(int unit) const {
  const auto begin = problem_.units.sample.begin();
  std::vector<int32_t> samples(begin + problem_.units.first[unit],
                               begin + problem_.units.first[unit + 1]);
  std::stable_sort(samples.begin(), samples.end(),
                   [&](int a, int b) { return size_of(a) > size_of(b); });
  return samples;
}

int64_t Bins::column_tokens(int column) const {
  int64_t sum = 0;
  for (const int bin : bins_of_column_[column]) sum += load_[bin].tokens;
  return sum;
}

Misfit Bins::misfit_of(int bin, int sample) const {
  Load load = load_[bin];
  if (sample >= 0) {
    load.tokens += problem_.tokens[sample];
    load.attention += problem_.attention[sample];
    load.count += 1;
  }
  const CellBudget& most = budget(bin);
  if (load.count > most.count) return {Limit::kCount, sample, bin, load.count - most.count};
  if (load.tokens > most.tokens) return {Limit::kTokens, sample, bin, load.tokens - most.tokens};
  if (load.attention > most.attention)
    return {Limit::kAttention, sample, bin, load.attention - most.attention};
  return {};
}

bool Bins::fits(int bin, int sample) const {
  return misfit_of(bin, sample).limit == Limit::kNone;
}

void Bins::put(int sample, int bin) {
  bin_of_[sample] = bin;
  load_[bin].tokens += problem_.tokens[sample];
  load_[bin].attention += problem_.attention[sample];
  ++load_[bin].count;
}

void Bins::take(int sample) {
  Load& load = load_[bin_of_[sample]];
  load.tokens -= problem_.tokens[sample];
  load.attention -= problem_.attention[sample];
  --load.count;
  bin_of_[sample] = -1;
}

Misfit Bins::least_count_misfit() const {
  for (int bin = 0; bin < problem_.num_bins(); ++bin)
    if (load_[bin].count < budget(bin).least_count)
      return {Limit::kLeastCount, -1, bin, budget(bin).least_count - load_[bin].count};
  return {};
}

Misfit Bins::assign(const int32_t* bin_of) {
  for (int sample = 0; sample < problem_.num_samples; ++sample) put(sample, bin_of[sample]);
  for (int bin = 0; bin < problem_.num_bins(); ++bin) {
    const Misfit misfit = misfit_of(bin, -1);
    if (misfit.limit != Limit::kNone) return misfit;
  }
  return least_count_misfit();
}

// Puts samples into bins of a column: first into bins that have too few, then into the emptiest, or
// with `tightest` into the fullest that still has room. All or nothing.
bool Bins::place(const std::vector<int32_t>& samples, int column, bool tightest) {
  for (size_t i = 0; i < samples.size(); ++i) {
    int best = -1;
    bool best_needs = false;
    for (const int bin : bins_of_column_[column]) {
      if (!fits(bin, samples[i])) continue;
      const bool needs = load_[bin].count < budget(bin).least_count;
      const int64_t room = budget(bin).tokens - load_[bin].tokens;
      const int64_t best_room = best < 0 ? 0 : budget(best).tokens - load_[best].tokens;
      const bool better = tightest ? room < best_room : room > best_room;
      if (best < 0 || (needs != best_needs ? needs : better)) best = bin, best_needs = needs;
    }
    if (best < 0) {
      while (i-- > 0) take(samples[i]);
      return false;
    }
    put(samples[i], best);
  }
  return true;
}

// In the column that takes most of the unit's samples, the sample that is left over and the bin
// that comes nearest to having room for it.
Misfit Bins::nearest_misfit(int unit) {
  const std::vector<int32_t> samples = by_size(unit);
  Misfit best;
  size_t most_placed = 0;
  for (const auto& bins : bins_of_column_) {
    Misfit nearest;
    size_t placed = 0;
    for (; placed < samples.size(); ++placed) {
      nearest = {};
      int roomy = -1;
      for (const int bin : bins) {
        const Misfit misfit = misfit_of(bin, samples[placed]);
        if (misfit.limit == Limit::kNone) {
          if (roomy < 0 || load_[bin].tokens < load_[roomy].tokens) roomy = bin;
        } else if (closer(misfit, nearest)) {
          nearest = misfit;
        }
      }
      if (roomy < 0) break;
      put(samples[placed], roomy);
    }
    for (size_t i = 0; i < placed; ++i) take(samples[i]);
    const bool more = placed > most_placed;
    if (more || (placed == most_placed && closer(nearest, best))) best = nearest;
    most_placed = std::max(most_placed, placed);
  }
  return best;
}

bool Bins::pack_units(bool tightest, Misfit& misfit) {
  const int num_units = problem_.units.size();
  std::fill(bin_of_.begin(), bin_of_.end(), -1);
  std::fill(load_.begin(), load_.end(), Load{});
  std::vector<int64_t> size(num_units, 0);
  for (int unit = 0; unit < num_units; ++unit)
    for (const int sample : by_size(unit)) size[unit] += size_of(sample);
  std::vector<int32_t> order(num_units);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return size[a] > size[b]; });

  std::vector<int64_t> needs(num_columns(), 0), filled(num_columns(), 0);
  for (int bin = 0; bin < problem_.num_bins(); ++bin)
    needs[column_of_bin_[bin]] += budget(bin).least_count;
  std::vector<int32_t> columns(num_columns());
  for (const int unit : order) {
    const std::vector<int32_t> samples = by_size(unit);
    std::iota(columns.begin(), columns.end(), 0);
    std::stable_sort(columns.begin(), columns.end(), [&](int a, int b) {
      if ((needs[a] > 0) != (needs[b] > 0)) return needs[a] > 0;
      // Per cell, so that groups of different size fill alike.
      const int64_t fa = filled[a] * int64_t(bins_of_column_[b].size());
      const int64_t fb = filled[b] * int64_t(bins_of_column_[a].size());
      return tightest ? fa > fb : fa < fb;
    });
    int found = -1;
    for (size_t i = 0; i < columns.size() && found < 0; ++i)
      if (place(samples, columns[i], tightest)) found = columns[i];
    if (found < 0) {
      misfit = nearest_misfit(unit);
      return false;
    }
    filled[found] += size[unit];
    needs[found] -= int64_t(samples.size());
  }
  misfit = least_count_misfit();
  return misfit.limit == Limit::kNone;
}

Misfit Bins::pack() {
  Misfit even, tight;
  if (pack_units(false, even)) return {};
  if (pack_units(true, tight)) return {};
  return even;
}

bool Bins::can_exchange(int sample_a, int sample_b) const {
  const int bin_a = bin_of_[sample_a], bin_b = bin_of_[sample_b];
  const int64_t tokens = problem_.tokens[sample_b] - problem_.tokens[sample_a];
  const int64_t attention = problem_.attention[sample_b] - problem_.attention[sample_a];
  return load_[bin_a].tokens + tokens <= budget(bin_a).tokens &&
         load_[bin_b].tokens - tokens <= budget(bin_b).tokens &&
         load_[bin_a].attention + attention <= budget(bin_a).attention &&
         load_[bin_b].attention - attention <= budget(bin_b).attention;
}

void Bins::exchange(int sample_a, int sample_b) {
  const int bin_a = bin_of_[sample_a], bin_b = bin_of_[sample_b];
  take(sample_a), take(sample_b);
  put(sample_a, bin_b), put(sample_b, bin_a);
}

// After a rearrangement of samples that lay in old_bins: true where no bin was left with too few,
// else everything is put back.
bool Bins::refill(const std::vector<int32_t>& samples, const std::vector<int32_t>& old_bins) {
  bool enough = true;
  for (size_t i = 0; i < samples.size(); ++i) {
    enough = enough && bin_of_[samples[i]] >= 0;
    enough = enough && load_[old_bins[i]].count >= budget(old_bins[i]).least_count;
  }
  if (enough) return true;
  for (const int sample : samples)
    if (bin_of_[sample] >= 0) take(sample);
  for (size_t i = 0; i < samples.size(); ++i) put(samples[i], old_bins[i]);
  return false;
}

bool Bins::trade(int unit_p, int unit_q) {
  const std::vector<int32_t> p = by_size(unit_p), q = by_size(unit_q);
  const int column_p = column_of_bin_[bin_of_[p[0]]], column_q = column_of_bin_[bin_of_[q[0]]];
  std::vector<int32_t> samples = p, old_bins;
  samples.insert(samples.end(), q.begin(), q.end());
  for (const int sample : samples) old_bins.push_back(bin_of_[sample]);
  for (const int sample : samples) take(sample);
  if (!place(p, column_q, true)) place(p, column_q, false);
  if (bin_of_[p[0]] >= 0 && !place(q, column_p, true)) place(q, column_p, false);
  return refill(samples, old_bins);
}

bool Bins::move(int unit, int column) {
  const std::vector<int32_t> samples = by_size(unit);
  std::vector<int32_t> old_bins;
  for (const int sample : samples) old_bins.push_back(bin_of_[sample]);
  for (const int sample : samples) take(sample);
  if (!place(samples, column, true)) place(samples, column, false);
  return refill(samples, old_bins);
}

void Bins::even_out_cells() {
  std::vector<std::vector<int32_t>> samples_of(num_columns());
  for (int i = 0; i < problem_.num_samples; ++i)
    samples_of[column_of_bin_[bin_of_[i]]].push_back(i);
  std::vector<int64_t> size(problem_.num_bins(), 0);
  const auto fullest = [&](int column) {
    int64_t most = 0;
    for (const int bin : bins_of_column_[column]) size[bin] = 0;
    for (const int i : samples_of[column]) size[bin_of_[i]] += size_of(i);
    for (const int bin : bins_of_column_[column]) most = std::max(most, size[bin]);
    return most;
  };
  for (int column = 0; column < num_columns(); ++column) {
    std::vector<int32_t>& samples = samples_of[column];
    const int64_t before = fullest(column);
    std::stable_sort(samples.begin(), samples.end(),
                     [&](int a, int b) { return size_of(a) > size_of(b); });
    std::vector<int32_t> old_bins;
    for (const int i : samples) old_bins.push_back(bin_of_[i]);
    for (const int i : samples) take(i);
    for (const int bin : bins_of_column_[column]) size[bin] = 0;
    for (const int i : samples) {  // largest first, onto the cell with the least work
      int best = -1;
      for (const int bin : bins_of_column_[column]) {
        const bool needs = load_[bin].count < budget(bin).least_count;
        const bool best_needs = best >= 0 && load_[best].count < budget(best).least_count;
        if (!fits(bin, i)) continue;
        if (best < 0 || (needs != best_needs ? needs : size[bin] < size[best])) best = bin;
      }
      if (best < 0) break;
      put(i, best);
      size[best] += size_of(i);
    }
    const bool placed = refill(samples, old_bins);
    if (placed && fullest(column) >= before) {
      for (const int i : samples) take(i);
      for (size_t i = 0; i < samples.size(); ++i) put(samples[i], old_bins[i]);
    }
  }
}

}  // namespace relibra
