// In the place of csrc/kv_ptx.cuh.
#pragma once
#include "number.cuh"

namespace ptx {

inline u32 load_shared_2(u32 address) { return machine::load_shared<u16>(address); }
inline u32 load_shared_1(u32 address) { return machine::load_shared<u8>(address); }
inline void store_shared_word(u32 address, u32 v) { machine::store_shared(address, v); }
inline float load_global_l2(const float *from) { return *from; }
inline float4 load_global_l2_16(const float *from) {
  float4 v;
  std::memcpy(&v, from, 16);
  return v;
}

}  // namespace ptx
