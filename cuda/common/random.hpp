// Random numbers that are a pure function of (key, counter), with the same bits on every machine.
#pragma once

#include <cstdint>
#include <vector>

namespace relibra {

// One step of splitmix64: a bijection that mixes all bits.
inline uint64_t mix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// Number i of the stream of a key.
inline uint64_t random_bits(uint64_t key, uint64_t i) {
  return mix64(key + i * 0xD1342543DE82EF95ull);
}

// Hash of integers that seeds a stream; the order counts.
inline uint64_t hash_values(const int64_t* values, int64_t count, uint64_t seed) {
  uint64_t state = mix64(seed ^ uint64_t(count));
  for (int64_t i = 0; i < count; ++i) state = mix64(state ^ uint64_t(values[i]));
  return state;
}

// bits * n / 2^num_bits: a number below n from the low bits of a random word.
inline uint32_t below(uint64_t bits, int num_bits, uint32_t n) {
  return uint32_t(((bits & ((uint64_t(1) << num_bits) - 1)) * n) >> num_bits);
}

// Natural logarithm from IEEE additions, multiplications and divisions only: the library's log may
// differ in the last bit between machines, and then plans would.
inline double portable_log(double x) {
  double exponent = 0;
  while (x > 1.5) x *= 0.5, exponent += 1;
  while (x < 0.75) x *= 2, exponent -= 1;
  const double y = (x - 1) / (x + 1), square = y * y;
  double sum = 0;
  for (int k = 39; k >= 1; k -= 2) sum = sum * square + 1.0 / k;
  return exponent * 0.693147180559945309417 + 2 * y * sum;
}

// exp(x) in the same way, x <= 0.
inline double portable_exp(double x) {
  int halvings = 0;
  while (x < -0.25) x *= 0.5, ++halvings;
  double sum = 1;
  for (int k = 16; k >= 1; --k) sum = 1 + x / k * sum;
  while (halvings-- > 0) sum *= sum;
  return sum;
}

constexpr int kExponentialBits = 16;

// Exponential variates with mean 1, by 16 uniform bits: -log((i + 1/2) / 2^16).
inline const std::vector<double>& exponential_table() {
  static const std::vector<double> table = [] {
    const int size = 1 << kExponentialBits;
    std::vector<double> values(size);
    for (int i = 0; i < size; ++i) values[i] = -portable_log((i + 0.5) / size);
    return values;
  }();
  return table;
}

}  // namespace relibra
