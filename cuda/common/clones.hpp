// Function multiversioning: one portable binary that uses AVX-512 or AVX2 where the CPU has them.
//
// Only integer code and element-wise floating point (no sums over elements) is versioned, so every
// version gives the same bits. Elsewhere (other compilers, CPUs or C libraries) the macro is empty
// and the plain version is used.
#pragma once

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define RELIBRA_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define RELIBRA_CLONES
#endif

// Bodies of versioned functions must be inlined to be compiled for each version.
#define RELIBRA_INLINE inline __attribute__((always_inline))
