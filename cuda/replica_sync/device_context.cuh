// The context of bodies.hpp on a GPU: one thread of a grid.
#pragma once

#include "common/ptx.cuh"
#include "replica_sync/bodies.hpp"

namespace relibra::replica_sync {

struct DeviceContext : SystemWords {
  static constexpr uint32_t kShortestNap = 32, kLongestNap = 1024;  // ns

  __device__ int bid() const { return blockIdx.x; }
  __device__ int nblk() const { return gridDim.x; }
  __device__ int tid() const { return threadIdx.x; }
  __device__ int nthr() const { return blockDim.x; }
  __device__ void sync() const { __syncthreads(); }
  __device__ bool sync_or(bool vote) const { return __syncthreads_or(vote); }
  __device__ void relax(uint32_t round) const {
    __nanosleep(round < 6 ? kShortestNap << (round - 1) : kLongestNap);
  }
  __device__ uint64_t now_ns() const { return ptx::globaltimer(); }

  __device__ Vector load16(const void* address) const {
    const uint4 value = *static_cast<const uint4*>(address);
    return {{value.x, value.y, value.z, value.w}};
  }
  __device__ void store16(void* address, const Vector& value) const {
    *static_cast<uint4*>(address) =
        make_uint4(value.words[0], value.words[1], value.words[2], value.words[3]);
  }
};

}  // namespace relibra::replica_sync
