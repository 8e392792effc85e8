// In the place of csrc/ptx.cuh: what each instruction does, by the PTX manual.
#pragma once
#include "machine.h"

namespace ptx {

inline u32 shared_address(const void *pointer) { return machine::shared_address(pointer); }

inline void copy_async_16(u32 to, const void *from) { machine::copy_async({to, from, 16}); }
inline void copy_async_16_or_zero(u32 to, const void *from, u32 bytes) { machine::copy_async({to, from, bytes}); }
inline void copy_async_commit() { machine::commit(); }
template <int PENDING> void copy_async_wait() { machine::wait_for_copies(PENDING); }
inline void barrier(u32 id, u32 threads) { machine::meet(machine::current->block->barriers[id], threads); }
inline void barrier_pass(u32 id, u32 threads) { machine::arrive(machine::current->block->barriers[id], threads); }
inline void launch_dependents() {}
inline void wait_for_previous_kernel() {}
inline void fence_async_proxy() {}

// The rows of matrices are 16 bytes.
inline u32 row_at(u32 address) {
  machine::shared_at(address, 16);
  return address;
}
// Lane L gives the address of row L % 8 of matrix L / 8 and gets row L / 4, columns 2 (L % 4) and the next, of each.
inline void load_matrix_x4(u32 (&to)[4], u32 address) {
  const auto given = machine::together(machine::MATRIX, &address, 1);
  const u32 lane = machine::lane();
  for (u32 i = 0; i < 4; i++) to[i] = machine::load_shared<u32>(row_at(given[8 * i + lane / 4][0]) + 4 * (lane % 4));
}

// Element (row, column) of an 8 x 8 matrix of which every lane gave a pair as word `at`: rows of four lanes.
inline u32 element(const u32 (*given)[16], u32 at, u32 row, u32 column) {
  return given[4 * row + column / 2][at] >> 16 * (column % 2) & 0xFFFF;
}
inline u32 transpose_matrix(u32 value) {
  const auto given = machine::together(machine::MATRIX, &value, 1);
  const u32 row = machine::lane() / 4, column = machine::lane() % 4 * 2;
  return element(given, 0, column, row) | element(given, 0, column + 1, row) << 16;
}
// Row r of matrix i, transposed, to the address that lane 8 i + r gives.
inline void store_matrix_x4_transposed(u32 address, const u32 (&v)[4]) {
  const auto given = machine::together(machine::MATRIX, v, 4);
  const u32 i = machine::lane() / 8, row = machine::lane() % 8;
  for (u32 c = 0; c < 8; c += 2)
    machine::store_shared(row_at(address) + 2 * c, element(given, i, c, row) | element(given, i, c + 1, row) << 16);
}

template <u32 AT = 0> uint4 load_shared_16(u32 address) { return machine::load_shared<uint4>(address + AT); }
inline uint2 load_shared_8(u32 address) { return machine::load_shared<uint2>(address); }
inline u32 load_shared_4(u32 address) { return machine::load_shared<u32>(address); }
inline float2 load_shared_float2(u32 address) { return machine::load_shared<float2>(address); }
inline void store_shared_4(u32 address, float v) { machine::store_shared(address, v); }
inline void store_shared_8(u32 address, float2 v) { machine::store_shared(address, v); }
template <u32 AT = 0> void store_shared_16(u32 address, uint4 v) { machine::store_shared(address + AT, v); }

// Goes on when something has happened since the last look.
inline void look_again() {
  if (machine::current->looked == machine::events) machine::wait_while(machine::events, machine::events);
  machine::current->looked = machine::events;
}
inline u32 load_acquire(const u32 *flag) {
  look_again();
  return *flag;
}
inline void store_release(u32 *flag, u32 v) { *flag = v, machine::events++; }
inline void add_release(u32 *count, u32 v) { *count += v, machine::events++; }
inline u32 fetch_add(u32 *count, u32 v) {
  const u32 old = *count;
  *count += v, machine::events++;
  return old;
}
inline u32 count_arrival(u32 *count, u32 last) {
  const u32 old = *count;
  *count = old >= last ? 0 : old + 1, machine::events++;
  return old;
}
inline void load_8_if(u32 there, const void *from, int &a, int &b) {
  if (there) a = static_cast<const int *>(from)[0], b = static_cast<const int *>(from)[1];
}
inline void store_16_relaxed(void *to, const float *v) { std::memcpy(to, v, 16), machine::events++; }
inline void store_8_relaxed(void *to, const float *v) { std::memcpy(to, v, 8), machine::events++; }
inline void load_16_if(u32 (&v)[4], const void *from, bool there) {
  std::memset(v, 0, 16);
  if (there) std::memcpy(v, from, 16);
}
inline void load_8_if(u32 (&v)[2], const void *from, bool there) {
  std::memset(v, 0, 8);
  if (there) std::memcpy(v, from, 8);
}

inline void load_matrix_x4_transposed(u32 (&to)[4], u32 address) {
  const auto given = machine::together(machine::MATRIX, &address, 1);
  const u32 row = machine::lane() / 4, column = machine::lane() % 4 * 2;
  for (u32 i = 0; i < 4; i++) {
    const auto at = [&](u32 r) { return u32(machine::load_shared<u16>(row_at(given[8 * i + r][0]) + 2 * row)); };
    to[i] = at(column) | at(column + 1) << 16;
  }
}
inline float exp2(float v) {
  const float found = std::exp2(v);
  return std::fabs(found) < 1.17549435e-38f ? 0.0f : found;
}

inline u32 opaque(u32 value) { return value; }
template <u32 MASK, u32 SET> u32 and_or(u32 a) { return (a & MASK) | SET; }
inline u32 permute_bytes(u32 a, u32 b, u32 selector) {
  const u64 both = u64(b) << 32 | a;
  u32 out = 0;
  for (u32 i = 0; i < 4; i++) {
    const u32 s = selector >> 4 * i, byte = both >> 8 * (s & 7) & 0xFF;
    out |= (s & 8 ? (byte & 0x80 ? 0xFFu : 0u) : byte) << 8 * i;
  }
  return out;
}

// The element of A (16 x K) or B (K x 8) that lane 4 g + t holds at place i of register r, K in bytes or nibbles of 32 a
// row: rows g and g + 8, K in two halves.
template <u32 WIDTH> int code(u32 word, u32 i) {
  const int v = static_cast<int>(word << (32 - WIDTH * (i + 1))) >> (32 - WIDTH);
  return v;
}
template <u32 WIDTH> void multiply_codes(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const u32 words[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const auto given = machine::together(machine::PRODUCT, words, 6);
  const u32 g = machine::lane() / 4, t = machine::lane() % 4;
  for (u32 i = 0; i < 4; i++)
    for (u32 k = 0; k < 4; k++)
      for (u32 half = 0; half < 2; half++)
        for (u32 e = 0; e < 32 / WIDTH; e++)
          d[i] += code<WIDTH>(given[4 * g + k][2 * half + i / 2], e) * code<WIDTH>(given[4 * (2 * t + i % 2) + k][4 + half], e);
}
inline void multiply_s8(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { multiply_codes<8>(d, a, b0, b1); }
inline void multiply_s4(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { multiply_codes<4>(d, a, b0, b1); }

}  // namespace ptx
