// Seeded protocol bugs of protocol_test.cpp: one is switched on by name for a run of the same
// binary.
#pragma once

#include <cstring>

namespace relibra::replica_sync {

enum class Mutant {
  kNone,
  kRelaxedStore,
  kRelaxedLoad,
  kMissingBlockSync,
  kIgnoredGeneration,
  kAbortPerThread,
  kMissingWeightWait,
  kMissingWeightCredit,
  kMissingGradWait,
  kMissingGradCredit,
  kMissingRetire,
  kMissingGradRetire,
  kRetireBeforeRead,
  kEarlyRetire,
  kGradRetireBeforeReduce,
  kDoubleUse,
  kStaleHash,
  kGradSlotByUse,
  kWordBeforeLastField,
  kGradWordBeforeLastField,
  kUnorderedMainGrad,
};

struct NamedMutant {
  Mutant mutant;
  const char* name;
};

constexpr NamedMutant kMutants[] = {
    {Mutant::kRelaxedStore, "relaxed_store"},                 // words stored without release
    {Mutant::kRelaxedLoad, "relaxed_load"},                   // words loaded without acquire
    {Mutant::kMissingBlockSync, "missing_block_sync"},        // a block arrives before its copies
    {Mutant::kIgnoredGeneration, "ignored_generation"},       // old words read as new ones
    {Mutant::kAbortPerThread, "abort_per_thread"},            // threads of a block part ways
    {Mutant::kMissingWeightWait, "missing_weight_wait"},      // weights read before they arrive
    {Mutant::kMissingWeightCredit, "missing_weight_credit"},  // push into a buffer in use
    {Mutant::kMissingGradWait, "missing_grad_wait"},          // gradients read before they arrive
    {Mutant::kMissingGradCredit, "missing_grad_credit"},      // gradient slot overwritten too early
    {Mutant::kMissingRetire, "missing_retire"},               // weight credit never given
    {Mutant::kMissingGradRetire, "missing_grad_retire"},      // gradient credit never given
    {Mutant::kRetireBeforeRead, "retire_before_read"},        // credit given, then weights read
    {Mutant::kEarlyRetire, "early_retire"},                   // credit of the next use, too
    {Mutant::kGradRetireBeforeReduce, "grad_retire_before_reduce"},
    {Mutant::kDoubleUse, "double_use"},            // all uses in one weight buffer
    {Mutant::kStaleHash, "stale_hash"},            // hash of the use before
    {Mutant::kGradSlotByUse, "grad_slot_by_use"},  // slot n mod G2 in place of q mod G2
    {Mutant::kWordBeforeLastField, "word_before_last_field"},
    {Mutant::kGradWordBeforeLastField, "grad_word_before_last_field"},
    {Mutant::kUnorderedMainGrad, "unordered_main_grad"},  // wgrad beside home_reduce
};

inline Mutant mutant = Mutant::kNone;

inline bool is(Mutant which) {
  return mutant == which;
}

inline bool choose_mutant(const char* name) {
  for (const NamedMutant& entry : kMutants)
    if (std::strcmp(entry.name, name) == 0) mutant = entry.mutant;
  return mutant != Mutant::kNone;
}

}  // namespace relibra::replica_sync
