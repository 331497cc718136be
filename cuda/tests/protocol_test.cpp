// The whole protocol under load: processing elements (PEs) with a push, a compute and a reduce
// queue each, random plans, forward, recompute and backward uses, random delays. Built with
// ThreadSanitizer.
//
//   protocol_test [--mutant NAME] [--fault diverge|stop] [--slow-home 1] [--seed N]
//                 [--timeout-ms N] | --list
//
// Oracles: every replica weight when it is used, main_grad bit for bit at the end, error records.
// Exit: 0 clean; 1 with lines "caught by oracle: ..." or "caught by record: ..."; 66
// ThreadSanitizer.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>

#include "replica_sync/host_context.hpp"
#include "tests/protocol_model.hpp"
#include "tests/protocol_mutants.hpp"
#include "tests/protocol_queue.hpp"

namespace relibra::replica_sync {
namespace {

constexpr int kBlocks = 2, kThreads = 2;  // of a push and of a reduction
constexpr int kBrokenUse = 7;             // where a fault strikes

// --- contexts ------------------------------------------------------------------------------------

struct TestContext : HostContext {
  using HostContext::HostContext;

  uint64_t load_word(uint64_t* word) const {
    if (is(Mutant::kRelaxedLoad))
      return std::atomic_ref<uint64_t>(*word).load(std::memory_order_relaxed);
    const uint64_t value = HostContext::load_word(word);
    if (!is(Mutant::kIgnoredGeneration) || value >> kGenerationShift != kGeneration - 1)
      return value;
    return value + (uint64_t{1} << kGenerationShift);
  }
  void store_word(uint64_t* word, uint64_t value) const {
    if (is(Mutant::kRelaxedStore))
      return std::atomic_ref<uint64_t>(*word).store(value, std::memory_order_relaxed);
    HostContext::store_word(word, value);
  }
  void sync() const {
    if (!is(Mutant::kMissingBlockSync)) HostContext::sync();
  }
};

// A block whose threads see different abort words: an abort comes between their loads.
struct SplitContext : HostContext {
  using HostContext::HostContext;
  static inline std::atomic<bool> has_loaded{false};

  uint64_t load_word(uint64_t* word) const {
    if (thread == 1) {
      const uint64_t value = HostContext::load_word(word);
      has_loaded = true;
      return value;
    }
    while (!has_loaded) std::this_thread::yield();
    HostContext::store_word(word, kGeneration << kGenerationShift | 1);
    return HostContext::load_word(word);
  }
  void sync() const {
    if (!is(Mutant::kAbortPerThread)) HostContext::sync();
  }
  bool sync_or(bool vote) {
    return is(Mutant::kAbortPerThread) ? vote : HostContext::sync_or(vote);
  }
};

// --- memory of a PE ------------------------------------------------------------------------------

struct alignas(128) Line {  // starts as the last use of an older Runtime left it
  uint64_t word = (kGeneration - 1) << kGenerationShift | 0xffffffffull << kUseShift;
};

struct Pe {
  alignas(16) float weight_slots[kWeightBuffers][kSlots][kSlotFloats] = {};
  alignas(16) float grad_slots[kGradBuffers][kSlots][kSlotFloats] = {};
  alignas(16) float weights[kLayers][kHomeExperts][kSlotFloats] = {};
  alignas(16) float main_grad[kLayers][kHomeExperts][kSlotFloats] = {};
  Line full[kWeightBuffers][kSlots];              // written by the home of the slot's expert
  Line grad_ready[kGradBuffers][kPes][kSlots];    // on the home, written by the PE of the replica
  Line retired[kPes], grad_retired[kPes], abort;  // credits, written by PE p
  uint32_t arrivals[kPes * kSlots] = {};
  uint64_t* peer_aborts[kPes - 1] = {};
  RsErrorRecord record{};
  RsFault fault{};
  std::atomic<int> written_q{-1};  // last backward use whose gradients are in their slots
  std::vector<Event> has_wgrad{schedule.size()}, has_reduced{schedule.size()};  // by q
};

std::array<Pe, kPes> pes;
std::atomic<int> oracle_failures{0};

void fail_oracle(const char* what, int n, int pe) {
  if (oracle_failures++ == 0) std::printf("caught by oracle: %s, use %d, PE %d\n", what, n, pe);
}

void set_up() {
  for (int p = 0; p < kPes; ++p) {
    for (int l = 0; l < kLayers; ++l)
      for (int e = 0; e < kHomeExperts; ++e)
        for_each_element(
            [&](int i) { pes[p].weights[l][e][i] = weight(l, p * kHomeExperts + e, i); });
    int count = 0;
    for (int other = 0; other < kPes; ++other)
      if (other != p) pes[p].peer_aborts[count++] = &pes[other].abort.word;
    pes[p].fault = {&pes[p].record, &pes[p].abort.word, pes[p].peer_aborts, count, p, kGeneration};
  }
}

// --- calls ---------------------------------------------------------------------------------------

// Whether all words came.
bool wait(int pe, RsOp op, int n, const std::vector<RsWaitItem>& items) {
  std::atomic<uint32_t> code{RS_OK};
  launch<TestContext>(1, kThreads, [&](TestContext& context) {
    const uint32_t found = wait_body(context, items.data(), static_cast<int>(items.size()), n, op,
                                     options.timeout_ns, pes[pe].fault);
    if (found != RS_OK) code = found;
  });
  return code == RS_OK;
}

void publish(int pe, const std::vector<RsPublishItem>& items) {
  launch<TestContext>(1, 1, [&](TestContext& context) {
    publish_body(context, items.data(), static_cast<int>(items.size()), pes[pe].fault);
  });
}

int weight_buffer(int n) {
  return is(Mutant::kDoubleUse) ? 0 : n % kWeightBuffers;
}
int grad_buffer(const Use& use) {
  return (is(Mutant::kGradSlotByUse) ? use.n : use.q) % kGradBuffers;
}

// Comm queue: waits for the buffers of the destinations, copies all fields, stores the words.
void push(int me, const Use& use) {
  if (options.fault == "stop" && me == 1 && use.n >= kBrokenUse) return;
  Pe& my = pes[me];
  std::vector<RsWaitItem> credits;
  std::vector<RsPushItem> items;
  for (const Replica& r : plan(use.n)) {
    if (r.home != me) continue;
    if (use.n >= kWeightBuffers)
      credits.push_back(
          {&my.retired[r.pe].word, credit_of(use.n - kWeightBuffers + 1), 0, r.pe, -1});
    const int buffer = weight_buffer(use.n);
    const bool diverges = options.fault == "diverge" && me == 1 && use.n == kBrokenUse;
    const int expert = diverges ? (r.expert + 1) % kExperts : r.expert;
    const int hashed_use = is(Mutant::kStaleHash) ? use.n - 1 : use.n;
    for (size_t field = 0; field < kFieldAt.size(); ++field) {
      const bool stores_word = field == (is(Mutant::kWordBeforeLastField) ? 0 : 1);
      items.push_back({my.weights[use.layer][r.expert % kHomeExperts] + kFieldAt[field],
                       pes[r.pe].weight_slots[buffer][r.slot] + kFieldAt[field],
                       sizeof(float) * kFieldSize[field],
                       stores_word ? &pes[r.pe].full[buffer][r.slot].word : nullptr,
                       word_of(use.n, hash_of(hashed_use, expert)),
                       &my.arrivals[r.pe * kSlots + r.slot]});
    }
  }
  if (!is(Mutant::kMissingWeightCredit) && !wait(me, RS_OP_WEIGHT_CREDIT, use.n, credits)) return;
  pause();
  launch<TestContext>(kBlocks, kThreads, [&](TestContext& context) {
    push_body(context, items.data(), static_cast<int>(items.size()), my.fault);
  });
}

void retire(int me, const Use& use) {
  if (is(Mutant::kMissingRetire)) return;
  std::vector<RsPublishItem> items;
  for (Pe& pe : pes)
    items.push_back({&pe.retired[me].word, credit_of(use.n + (is(Mutant::kEarlyRetire) ? 2 : 1))});
  publish(me, items);
}

bool use_weights(int me, const Use& use, const std::vector<Replica>& replicas) {
  Pe& my = pes[me];
  const int buffer = weight_buffer(use.n);
  std::vector<RsWaitItem> items;
  for (const Replica& r : replicas)
    if (r.pe == me)
      items.push_back({&my.full[buffer][r.slot].word, word_of(use.n, 0),
                       word_of(use.n, hash_of(use.n, r.expert)), r.home, r.slot});
  if (!is(Mutant::kMissingWeightWait) && !wait(me, RS_OP_WEIGHTS, use.n, items)) return false;
  if (is(Mutant::kRetireBeforeRead)) retire(me, use);
  pause();
  for (const Replica& r : replicas)
    if (r.pe == me)
      for_each_element([&](int i) {
        if (my.weight_slots[buffer][r.slot][i] != weight(use.layer, r.expert, i))
          fail_oracle("weights of another use", use.n, me);
      });
  if (!is(Mutant::kRetireBeforeRead)) retire(me, use);
  return true;
}

void add_home_gradients(int me, const Use& use) {
  Pe& my = pes[me];
  if (use.earlier_q >= 0 && !is(Mutant::kUnorderedMainGrad)) my.has_reduced[use.earlier_q].wait();
  for (int e = 0; e < kHomeExperts; ++e)
    for_each_element([&](int i) {
      my.main_grad[use.layer][e][i] += gradient(use.n, me * kHomeExperts + e, me, i);
    });
}

// Waits for the gradient slots, overwrites them, publishes each to its home.
void send_gradients(int me, const Use& use, const std::vector<Replica>& replicas) {
  Pe& my = pes[me];
  const int buffer = grad_buffer(use);
  std::vector<RsWaitItem> credits;
  for (int p = 0; p < kPes && use.q >= kGradBuffers; ++p)
    credits.push_back({&my.grad_retired[p].word, credit_of(use.q - kGradBuffers + 1), 0, p, -1});
  if (!is(Mutant::kMissingGradCredit) && !wait(me, RS_OP_GRAD_CREDIT, use.n, credits)) return;
  for (const Replica& r : replicas) {
    if (r.pe != me) continue;
    const RsPublishItem item{&pes[r.home].grad_ready[buffer][me][r.slot].word,
                             word_of(use.q, hash_of(use.n, r.expert))};
    for_each_element([&](int i) {
      if (i == kFieldAt[1] && is(Mutant::kGradWordBeforeLastField)) publish(me, {item});
      my.grad_slots[buffer][r.slot][i] = gradient(use.n, r.expert, me, i);
    });
    if (!is(Mutant::kGradWordBeforeLastField)) publish(me, {item});
  }
  my.written_q.store(use.q, std::memory_order_relaxed);
}

// Compute queue.
void compute(int me, const Use& use) {
  const std::vector<Replica> replicas = plan(use.n);
  const bool has_weights = use_weights(me, use, replicas);
  if (use.q < 0) return;
  if (has_weights) {
    add_home_gradients(me, use);
    pes[me].has_wgrad[use.q].set();  // its home part; replicas tell their homes by words
    send_gradients(me, use, replicas);
  }
  pes[me].has_wgrad[use.q].set();
}

void give_gradient_credit(int me, const Use& use) {
  if (is(Mutant::kMissingGradRetire)) return;
  std::vector<RsPublishItem> items;
  for (Pe& pe : pes) items.push_back({&pe.grad_retired[me].word, credit_of(use.q + 1)});
  publish(me, items);
}

// A slow home: it lets the others run ahead of it, at most to backward use q. No order comes from
// this.
void run_behind(int q) {
  for (int tries = 0; tries < 50; ++tries) {
    bool is_ahead = true;
    for (int p = 1; p < kPes; ++p)
      is_ahead = is_ahead && pes[p].written_q.load(std::memory_order_relaxed) >= q;
    if (is_ahead) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

// Reduce queue: adds replica gradients in ascending (PE, slot) order, gives the slots back.
void reduce(int me, const Use& use) {
  Pe& my = pes[me];
  my.has_wgrad[use.q].wait();
  const int buffer = grad_buffer(use);
  std::vector<RsWaitItem> ready;
  std::array<std::array<std::vector<const void*>, 2>, kHomeExperts> grads;
  for (const Replica& r : plan(use.n)) {
    if (r.home != me) continue;
    ready.push_back({&my.grad_ready[buffer][r.pe][r.slot].word, word_of(use.q, 0),
                     word_of(use.q, hash_of(use.n, r.expert)), r.pe, r.slot});
    for (size_t field = 0; field < kFieldAt.size(); ++field)
      grads[r.expert % kHomeExperts][field].push_back(pes[r.pe].grad_slots[buffer][r.slot] +
                                                      kFieldAt[field]);
  }
  if (is(Mutant::kMissingGradWait) || wait(me, RS_OP_GRADS, use.n, ready)) {
    std::vector<RsReduceItem> items;
    for (int e = 0; e < kHomeExperts; ++e)
      for (size_t field = 0; field < kFieldAt.size(); ++field)
        items.push_back({my.main_grad[use.layer][e] + kFieldAt[field], grads[e][field].data(),
                         static_cast<int32_t>(grads[e][field].size()), RS_FP32_FROM_FP32,
                         static_cast<uint64_t>(kFieldSize[field])});
    if (is(Mutant::kGradRetireBeforeReduce)) give_gradient_credit(me, use);
    pause();
    if (options.slow_home && me == 0) run_behind(use.q + kGradBuffers);
    launch<TestContext>(kBlocks, kThreads, [&](TestContext& context) {
      reduce_body(context, items.data(), static_cast<int>(items.size()), my.fault);
    });
    if (!is(Mutant::kGradRetireBeforeReduce)) give_gradient_credit(me, use);
  }
  my.has_reduced[use.q].set();
}

void run_pe(int me) {
  Queue comm, computing, reducing;
  constexpr int kAhead = kWeightBuffers - 1;
  const int num_uses = static_cast<int>(schedule.size());
  for (int n = 0; n < kAhead; ++n) comm.add([=] { push(me, schedule[n]); });
  for (int n = 0; n < num_uses; ++n) {
    if (n + kAhead < num_uses) comm.add([=] { push(me, schedule[n + kAhead]); });
    computing.add([=] { compute(me, schedule[n]); });
    if (schedule[n].q >= 0) reducing.add([=] { reduce(me, schedule[n]); });
  }
}

// --- checks --------------------------------------------------------------------------------------

void check_block_abort() {
  alignas(16) char source[64], target[64] = {};
  std::memset(source, 1, sizeof source);
  uint64_t abort = 0, full = 0;
  uint32_t arrivals = 0;
  RsErrorRecord record{};
  const RsFault fault{&record, &abort, nullptr, 0, 0, kGeneration};
  const RsPushItem item{source, target, sizeof source, &full, 1, &arrivals};
  launch<SplitContext>(1, 2, [&](SplitContext& context) { push_body(context, &item, 1, fault); });
  for (char byte : target)
    if (byte != 0) return fail_oracle("part of a block went on after an abort", -1, 0);
}

void check_gradients() {
  for (int p = 0; p < kPes; ++p) {
    static float expected[kLayers][kHomeExperts][kSlotFloats];
    std::memset(expected, 0, sizeof expected);
    for (const Use& use : schedule) {
      if (use.q < 0) continue;
      for (int e = 0; e < kHomeExperts; ++e)
        for_each_element([&](int i) {
          expected[use.layer][e][i] += gradient(use.n, p * kHomeExperts + e, p, i);
        });
      for (const Replica& r : plan(use.n))
        if (r.home == p)
          for_each_element([&](int i) {
            expected[use.layer][r.expert % kHomeExperts][i] += gradient(use.n, r.expert, r.pe, i);
          });
    }
    if (std::memcmp(expected, pes[p].main_grad, sizeof expected) != 0)
      fail_oracle("main_grad differs", -1, p);
  }
}

int run() {
  set_up();
  check_block_abort();
  std::vector<std::thread> threads;
  for (int p = 0; p < kPes; ++p) threads.emplace_back(run_pe, p);
  for (std::thread& thread : threads) thread.join();
  int records = 0;
  for (const Pe& pe : pes) {
    const RsErrorRecord& r = pe.record;
    if (r.code == RS_OK) continue;
    ++records;
    std::printf(
        "caught by record: code %u rank %d op %d peer %d slot %d use %d expected %#llx "
        "observed %#llx\n",
        r.code, r.rank, r.op, r.peer, r.slot, static_cast<int>(r.use),
        static_cast<unsigned long long>(r.expected), static_cast<unsigned long long>(r.observed));
  }
  if (records == 0) check_gradients();
  std::printf("%zu uses, %d PEs, %d records, %d oracle failures\n", schedule.size(), kPes, records,
              oracle_failures.load());
  return records + oracle_failures == 0 ? 0 : 1;
}

int main_of(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "--list") == 0) {
    for (const NamedMutant& entry : kMutants) std::printf("%s\n", entry.name);
    return 0;
  }
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string option = argv[i];
    const char* value = argv[i + 1];
    if (option == "--mutant" && !choose_mutant(value)) return 2;
    if (option == "--fault") options.fault = value;
    if (option == "--slow-home") options.slow_home = std::atoi(value) != 0;
    if (option == "--seed") options.seed = static_cast<unsigned>(std::atoi(value));
    if (option == "--timeout-ms") options.timeout_ns = std::atoi(value) * uint64_t{1'000'000};
  }
  return run();
}

}  // namespace
}  // namespace relibra::replica_sync

int main(int argc, char** argv) {
  return relibra::replica_sync::main_of(argc, argv);
}
