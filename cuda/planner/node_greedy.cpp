#include "planner/node_greedy.hpp"

#include <algorithm>
#include <vector>

#include "common/random.hpp"

namespace relibra {
namespace {

class Greedy {
 public:
  Greedy(SiteFlow& flow, int64_t target, const GreedyStyle& style)
      : flow_(flow), instance_(flow.instance()), target_(target), style_(style) {
    stuck_.assign(instance_.num_ranks, 0);
    if (style.limits.active()) {
      pushes_.assign(instance_.num_ranks, 0);
      fan_out_.assign(instance_.num_experts(), 0);
    }
    hottest_.resize(instance_.num_ranks);
    for (int i = 0; i < instance_.num_ranks; ++i) find_hottest(i);
  }

  bool run() {
    // Every step fills a slot or gives a rank up, so the loop ends.
    while (true) {
      const int donor = fullest_donor();
      if (donor < 0) return flow_.largest() <= target_;
      if (!relieve(donor)) stuck_[donor] = 1;
    }
  }

 private:
  int64_t gap(int rank) const { return target_ - flow_.load(rank); }

  void find_hottest(int rank) {
    const int first = rank * instance_.home_slots, last = first + instance_.home_slots;
    int best = first;
    for (int e = first + 1; e < last; ++e)
      if (flow_.rest(e) > flow_.rest(best)) best = e;
    hottest_[rank] = best;
  }

  void move(int expert, int rank, int64_t rows) {
    flow_.add(expert, rank, rows);
    find_hottest(instance_.home(expert));
    if (!fan_out_.empty()) ++pushes_[instance_.home(expert)], ++fan_out_[expert];
  }

  double jitter() {
    if (style_.noise == 0) return 1;
    const double uniform = double(random_bits(style_.seed, counter_++) >> 11) * 0x1p-53;
    return 1 + style_.noise * (uniform - 0.5);
  }

  // Whether a choice of this value loses before jitter is drawn, which saves looking closer at it.
  bool loses(int best, double value, double best_value) const {
    return style_.noise == 0 && best >= 0 && value <= best_value;
  }

  int fullest_donor() {
    int donor = -1;
    double most = 0;
    for (int i = 0; i < instance_.num_ranks; ++i) {
      if (stuck_[i] || gap(i) >= 0) continue;
      const double value = double(-gap(i)) * jitter();
      if (donor < 0 || value > most) most = value, donor = i;
    }
    return donor;
  }

  bool can_receive(int donor, int rank) const {
    return rank != donor && flow_.free_slots(rank) > 0 &&
           (pushes_.empty() || pushes_[donor] < style_.limits.max_pushes);
  }

  bool can_copy(int expert, int rank) const {
    return (fan_out_.empty() || fan_out_[expert] < style_.limits.max_fan_out) &&
           !flow_.hosts(expert, rank);
  }

  // One transfer out of a rank above the target; false when there is none.
  bool relieve(int donor) {
    const int64_t surplus = -gap(donor);
    if (close_gap(donor, surplus)) return true;
    if (style_.chained) {
      if (style_.relay_first && relay(donor, surplus)) return true;
      if (overdrain(donor, surplus)) return true;
      if (!style_.relay_first && relay(donor, surplus)) return true;
    }
    return fill_part(donor, surplus);
  }

  // Fills a gap to the brim that is no larger than the surplus.
  bool close_gap(int donor, int64_t surplus) {
    const int64_t can_move = std::min(surplus, most_rows(donor));
    int best = -1;
    double best_value = 0;
    for (int i = 0; i < instance_.num_ranks; ++i) {
      if (!can_receive(donor, i) || gap(i) < style_.limits.min_rows || gap(i) > can_move) continue;
      const auto plain = double(style_.smallest_gap_first ? -gap(i) : gap(i));
      if (loses(best, plain, best_value) || !has_expert(donor, i, gap(i))) continue;
      const double value = plain * jitter();
      if (best < 0 || value > best_value) best_value = value, best = i;
    }
    if (best < 0) return false;
    move(pick_expert(donor, best, gap(best)), best, gap(best));
    return true;
  }

  // Fills the smallest gap that exceeds the surplus: the donor falls below the target and waits
  // for another donor.
  bool overdrain(int donor, int64_t surplus) {
    if (flow_.free_slots(donor) == 0) return false;
    int best = -1;
    double best_value = 0;
    for (int i = 0; i < instance_.num_ranks; ++i) {
      if (!can_receive(donor, i) || gap(i) <= surplus || gap(i) < style_.limits.min_rows) continue;
      const auto plain = double(gap(i));
      if (loses(best, -plain, -best_value) || !has_expert(donor, i, gap(i))) continue;
      const double value = plain * jitter();
      if (best < 0 || value < best_value) best_value = value, best = i;
    }
    if (best < 0) return false;
    move(pick_expert(donor, best, gap(best)), best, gap(best));
    return true;
  }

  // Hands the surplus to a rank at or above the target that can pass on more of its own.
  bool relay(int donor, int64_t surplus) {
    surplus = std::max(surplus, style_.limits.min_rows);
    bool any_gap = false;
    int best = -1;
    double best_value = 0;
    for (int i = 0; i < instance_.num_ranks; ++i) {
      any_gap |= gap(i) > 0 && can_receive(donor, i);
      if (!can_receive(donor, i) || gap(i) > 0 || stuck_[i]) continue;
      const auto plain = double(most_rows(i));
      if (loses(best, plain, best_value) || !has_expert(donor, i, surplus)) continue;
      const double value = plain * jitter();
      if (best < 0 || value > best_value) best_value = value, best = i;
    }
    if (best < 0 || !any_gap) return false;
    move(pick_expert(donor, best, surplus), best, surplus);
    return true;
  }

  // As much as possible into the largest gap that an expert of the donor may still go to.
  bool fill_part(int donor, int64_t surplus) {
    int best = -1, best_expert = -1;
    double best_value = 0;
    for (int i = 0; i < instance_.num_ranks; ++i) {
      if (!can_receive(donor, i) || gap(i) <= 0) continue;
      const int expert = hottest(donor, i);
      if (expert < 0) continue;
      const int64_t rows = part(expert, i, surplus);
      if (rows > std::min(flow_.rest(expert), gap(i))) continue;
      const double value = double(rows) * jitter();
      if (best < 0 || value > best_value) best_value = value, best = i, best_expert = expert;
    }
    if (best < 0) return false;
    move(best_expert, best, part(best_expert, best, surplus));
    return true;
  }

  // What fill_part() moves; no less than a replica must have.
  int64_t part(int expert, int rank, int64_t surplus) const {
    return std::max(std::min({flow_.rest(expert), gap(rank), surplus}), style_.limits.min_rows);
  }

  int64_t most_rows(int rank) const { return flow_.rest(hottest_[rank]); }

  // Whether pick_expert() finds one.
  bool has_expert(int donor, int rank, int64_t rows) const {
    if (most_rows(donor) < rows || most_rows(donor) == 0) return false;
    return can_copy(hottest_[donor], rank) || pick_expert(donor, rank, rows) >= 0;
  }

  // The expert at home on `donor` with most rows left that `rank` does not host, or -1.
  int hottest(int donor, int rank) const {
    if (most_rows(donor) == 0) return -1;
    if (can_copy(hottest_[donor], rank)) return hottest_[donor];
    int best = -1;
    for (int e = donor * instance_.home_slots; e < (donor + 1) * instance_.home_slots; ++e)
      if (flow_.rest(e) > 0 && (best < 0 || flow_.rest(e) > flow_.rest(best)) && can_copy(e, rank))
        best = e;
    return best;
  }

  // An expert at home on `donor` with at least `rows` rows left that `rank` does not host, or -1.
  int pick_expert(int donor, int rank, int64_t rows) const {
    int best = -1;
    for (int e = donor * instance_.home_slots; e < (donor + 1) * instance_.home_slots; ++e) {
      if (flow_.rest(e) < rows || flow_.rest(e) == 0) continue;
      const bool better = best < 0 || (style_.hottest_first ? flow_.rest(e) > flow_.rest(best)
                                                            : flow_.rest(e) < flow_.rest(best));
      if (better && can_copy(e, rank)) best = e;
    }
    return best;
  }

  SiteFlow& flow_;
  const NodeInstance& instance_;
  const int64_t target_;
  const GreedyStyle& style_;
  std::vector<char> stuck_;
  std::vector<int64_t> pushes_, fan_out_;  // by rank, by expert; empty without limits
  std::vector<int32_t> hottest_;  // [P], the expert at home with most rows left, lowest of equals
  uint64_t counter_ = 0;
};

}  // namespace

bool greedy_sites(SiteFlow& flow, int64_t target, const GreedyStyle& style) {
  return Greedy(flow, target, style).run();
}

void alias_sites(SiteFlow& flow, int64_t target) {
  const NodeInstance& instance = flow.instance();
  const int P = instance.num_ranks, H = instance.home_slots;
  std::vector<char> filled(P, 0);
  while (true) {
    int donor = -1, receiver = -1;
    for (int i = 0; i < P; ++i) {
      if (donor < 0 || flow.load(i) > flow.load(donor)) donor = i;
      if (!filled[i] && (receiver < 0 || flow.load(i) < flow.load(receiver))) receiver = i;
    }
    // A filled rank is at the target exactly, so a rank above it has all its rows at home.
    if (flow.load(donor) <= target || receiver < 0) return;
    int64_t deficit = target - flow.load(receiver);
    for (int e = donor * H; e < (donor + 1) * H && deficit > 0; ++e) {
      const int64_t rows = std::min(deficit, flow.rest(e));
      if (rows == 0) continue;
      flow.add(e, receiver, rows);
      deficit -= rows;
    }
    filled[receiver] = 1;
  }
}

}  // namespace relibra
