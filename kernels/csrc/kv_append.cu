// Quantizes new tokens into the pages of the cache: k (after R3) and v, (B, heads, T, HEAD_DIM) fp16 or bf16.
//
// One warp makes one row: one token and head of K or of V. In fp32, as convert/quantize/activations.py says:
//     lo = clip * min(x, 0), hi = clip * max(x, 0)    s = max(fp16(min((hi - lo) / n, largest)), 2^-14)
//     z = clamp(rint(-lo / s), 0, n)                  code = clamp(rint(x / s) + z, 0, n)        n = 2^bits - 1
// Quotients are those of IEEE division, and no other product is fused into a sum: codes are those of the reference but for
// ties of R3's sums. With a guide (fp32 [offset, direction][heads][HEAD_DIM]) keys lose the offset first, and MOVES codes
// of each are moved for the sake of the direction: which ones may be decided by the order of a sum, too.
// Bound by bytes: 2 in, bits / 8 out for each value. Rows of slots or pages that do not exist are left alone.
// Tested by tests/gpu/test_kv.py.
#include "kv_cache.cuh"

constexpr int WARPS = 8;
typedef Vector<HEAD_DIM> Row;

constexpr int MOVES = 2;  // as convert/quantize/activations.py has them

struct Quantized {
  float steps[Row::EACH];  // x / s
  int codes[Row::EACH], zero;
  u32 parameters;  // scale in the low half, zero in the high one
};

// The largest of each half's value in one lane's pair: lanes 0 to 15 end with that of `a`, 16 to 31 with that of `b`.
DEVICE float2 warp_max_of_two(float a, float b, int lane) {
  const bool second = lane & 16;
  const float other = __shfl_xor_sync(WHOLE, second ? a : b, 16);
  float most = fmaxf(second ? b : a, other);
#pragma unroll
  for (int step = 8; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(WHOLE, most, step));
  const float far = __shfl_xor_sync(WHOLE, most, 16);
  return second ? make_float2(far, most) : make_float2(most, far);
}

// x / s, rounded once: with r the rounded 1 / s, one correction makes the quotient exact (s is no subnormal). Past the
// codes it is not needed, and for an infinite x it would be no number.
DEVICE float quotient(float x, float s, float r) {
  const float q = x * r;
  return fabsf(q) < 2048.0f ? fmaf(fmaf(-q, s, x), r, q) : q;
}
// The nearest integer, ties to even, of a number below 2^22.
DEVICE int nearest(float v) { return static_cast<int>(__float_as_uint(v + 12582912.0f)) - 0x4B400000; }

DEVICE Quantized quantize(const Row &row, float clip, int bits, int lane) {
  float low = 0, high = 0;
#pragma unroll
  for (int i = 0; i < Row::EACH; i++) low = fminf(low, row.x[i]), high = fmaxf(high, row.x[i]);
  const float2 ends = warp_max_of_two(high, -low, lane);
  high = __fmul_rn(ends.x, clip), low = __fmul_rn(-ends.y, clip);
  const float levels = bits == 4 ? 15.0f : 255.0f, largest = bits == 4 ? 4364.0f : 256.75f;
  const float wanted = fminf(__fdiv_rn(__fsub_rn(high, low), levels), largest);
  const u32 half = Number<FP16>::pack(fmaxf(wanted, 6.103515625e-05f), 0.0f);
  const float s = Number<FP16>::to_float(half), r = __frcp_rn(s);
  const int top = bits == 4 ? 15 : 255, z = min(nearest(fminf(quotient(-low, s, r), 1024.0f)), top);
  Quantized made;
#pragma unroll
  for (int i = 0; i < Row::EACH; i++) {
    const float steps = fmaxf(fminf(quotient(row.x[i], s, r), 1024.0f), -1024.0f);
    made.steps[i] = steps, made.codes[i] = max(0, min(nearest(steps) + z, top));
  }
  made.zero = z;
  made.parameters = half | Number<FP16>::pack(0.0f, static_cast<float>(z));
  return made;
}

// Moves the code to its other neighbour that lowers |e|^2 + (w e)^2 most, MOVES times; `w` is this lane's part.
DEVICE void move(Quantized &made, const float *w, int bits, int lane) {
  const int top = bits == 4 ? 15 : 255;
#pragma unroll
  for (int turn = 0; turn < MOVES; turn++) {
    float errors[Row::EACH], along = 0;
#pragma unroll
    for (int i = 0; i < Row::EACH; i++) {
      errors[i] = __fsub_rn(static_cast<float>(made.codes[i] - made.zero), made.steps[i]);
      along = fmaf(errors[i], w[i], along);
    }
    along = 2.0f * warp_sum(along);
    float best = 0;
    int place = -1, code = 0;
#pragma unroll
    for (int i = 0; i < Row::EACH; i++) {
      const bool down = errors[i] > 0;
      const int wanted = made.codes[i] + (down ? -1 : 1);
      const float pull = __fmul_rn(w[i], __fadd_rn(down ? -along : along, w[i]));
      const float gain = __fsub_rn(__fsub_rn(2.0f * fabsf(errors[i]), 1.0f), pull);
      if (gain > best && wanted >= 0 && wanted <= top) best = gain, place = i, code = wanted;
    }
    // Gains above 0 are in the order of their bits; of equals, the first channel's.
    const u32 most = __reduce_max_sync(WHOLE, __float_as_uint(best));
    const u32 holders = __ballot_sync(WHOLE, place >= 0 && __float_as_uint(best) == most);
    if (lane != __ffs(holders) - 1) place = -1;
#pragma unroll
    for (int i = 0; i < Row::EACH; i++)
      if (i == place) made.codes[i] = code;
  }
}

// Writes a lane's codes, a power of two of bytes at once.
DEVICE void store(u8 *row, const Quantized &made, int bits, int lane) {
  u32 words[2] = {};
#pragma unroll
  for (int i = 0; i < Row::EACH; i++) {
    if (bits == 4)
      words[0] |= static_cast<u32>(made.codes[i]) << 4 * i;
    else
      words[i / 4] |= static_cast<u32>(made.codes[i]) << i % 4 * 8;
  }
  const int bytes = Row::EACH * bits / 8;
  u8 *at = row + lane * bytes;
  if (bytes == 1) *at = words[0];
  if (bytes == 2) *reinterpret_cast<u16 *>(at) = words[0];
  if (bytes == 4) *reinterpret_cast<u32 *>(at) = words[0];
  if (bytes == 8) *reinterpret_cast<uint2 *>(at) = make_uint2(words[0], words[1]);
}

// Blocks of a multiprocessor: more of them would make the compiler spill.
constexpr int BLOCKS = HEAD_DIM == 256 ? 4 : 6;

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
    ENTRY(const u8 *k, const u8 *v, u8 *codes, u32 *params, const int *block_table, const int *start, const float *guide,
          TURN_PARAMETERS, i64 k_batch, i64 k_head, i64 k_token, i64 v_batch, i64 v_head, i64 v_token, int heads, int tokens,
          int table_width, int pages, int bits, int bf16, float clip_k, float clip_v) {
  __shared__ float scratch[Row::POWER ? 1 : WARPS][HEAD_DIM];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, sequence = blockIdx.y;
  const u32 each = 2 * heads, rows = tokens * each;  // (token, K or V, head)
  ptx::launch_dependents();
  ptx::wait_for_previous_kernel();
  const int first = start[sequence];
  for (u32 row = blockIdx.x * WARPS + warp; row < rows; row += gridDim.x * WARPS) {
    const u32 token = row / each, in_token = row - token * each;
    const bool value = in_token >= heads;
    const int head = value ? in_token - heads : in_token, slot = first + static_cast<int>(token);
    if (slot < 0 || slot / PAGE >= table_width) continue;
    const int page = block_table[static_cast<i64>(sequence) * table_width + slot / PAGE];
    if (page < 0 || page >= pages) continue;

    const Strides strides = value ? Strides{v_batch, v_head, v_token} : Strides{k_batch, k_head, k_token};
    Row x;
    const i64 offset = sequence * strides.batch + head * strides.head + token * strides.token;
    x.load_row((value ? v : k) + 2 * offset, true, bf16, lane);
    if (!value) x.turn(TURN_ARGUMENTS, scratch[Row::POWER ? 0 : warp], lane);
    const bool guided = guide != nullptr && !value;
    const float *own = guide + head * HEAD_DIM + lane * Row::EACH;  // this lane's part of the offset
    float w[Row::EACH] = {};
    if (guided && lane < Row::ACTIVE) {
#pragma unroll
      for (int i = 0; i < Row::EACH; i++) x.x[i] = __fsub_rn(x.x[i], own[i]), w[i] = own[heads * HEAD_DIM + i];
    }
    Quantized made = quantize(x, value ? clip_v : clip_k, bits, lane);
    if (guided) move(made, w, bits, lane);
    const i64 at = ((static_cast<i64>(page) * 2 + value) * heads + head) * PAGE + slot % PAGE;
    if (lane < Row::ACTIVE) store(codes + at * (HEAD_DIM * bits / 8), made, bits, lane);
    if (lane == 0) params[at] = made.parameters;
  }
}
