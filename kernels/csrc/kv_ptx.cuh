// Instructions that only the kernels of the quantized cache use; the others are in ptx.cuh.
#pragma once
#include "number.cuh"

namespace ptx {

DEVICE u32 load_shared_2(u32 address) {
  u32 v;
  asm volatile("{ .reg .b16 h; ld.shared.u16 h, [%1]; cvt.u32.u16 %0, h; }" : "=r"(v) : "r"(address) : "memory");
  return v;
}
DEVICE u32 load_shared_1(u32 address) {
  u32 v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
DEVICE void store_shared_word(u32 address, u32 v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

// What another block of this launch wrote: from the L2, since this multiprocessor's L1 may hold an older line. The
// caller's fence orders it; without "memory" several can be on their way.
DEVICE float load_global_l2(const float *from) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(from));
  return v;
}
DEVICE float4 load_global_l2_16(const float *from) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from));
  return v;
}

}  // namespace ptx
