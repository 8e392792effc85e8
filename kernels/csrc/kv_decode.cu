// Decode attention over the quantized cache: one query token a sequence, up to eight query heads of one KV head a block.
//
//     x[j, h] = scale * s_j (sum_d code[j, d] q[h, d] - z_j sum_d q[h, d])      p = softmax over j (fp32)
//     y[h, d] = sum_j p[j, h] s'_j (code'[j, d] - z'_j) / sum_j p[j, h]
//
// Bound by bytes: 2 (HEAD_DIM BITS / 8 + 4) a slot, while the codes are 2 HEAD_DIM values. So a value may cost at most
// some three instructions, and it costs under one: a code c put alone into the low bits of an fp16 number *is* the
// number c * 2^-24 (subnormal), which the tensor cores take as it is. Two codes are one AND away; a nibble in bits 4 to 7
// is 16 times as large, and what it meets is 16 times smaller (q), or its sum is divided at the end (V).
// Both products have the cache as operand A (16 x 16) and the heads as the 8 columns of B:
//     S (tokens x heads) = K q^T           Y (channels x heads) = V^T P
// For V a register needs two tokens of one channel: `prmt` pairs the words of two rows, two bytes of each at a time.
// q is scaled by a power of two into fp16's range, so bf16 models lose nothing. Scales of V vary, P is 16 bit: p takes
// the mantissa of s' only, and its exponent e goes into the softmax, which then runs on x + e; sums of p get 2^-e.
//
// A block is WARPS warps of one (sequence, KV head, group of 8 heads, part of the context). Warps take tiles of TILE
// slots in turn, each with its own ring of cp.async copies and its own sums: no barrier until the end. Then the warps'
// sums are joined in order, and the last block of a row to arrive joins the parts, also in order: one result always.
// Requires: lengths >= 1 where something is to be seen; a row without visible slots gives zeros.
// Tested by tests/gpu/test_kv.py.
#include "kv_cache.cuh"

constexpr int HEADS = 8;
constexpr int ROW = HEAD_DIM * BITS / 8;                    // bytes
constexpr int TILE = ROW <= 96 ? 32 : 16, TOKEN_TILES = TILE / 16;
constexpr int STAGES = ROW <= 128 ? 3 : 2;
constexpr int CODE_BYTES = TILE * ROW, STAGE = 2 * CODE_BYTES + 2 * 4 * TILE;
constexpr int RING = STAGES * STAGE;                        // of a warp
constexpr int WORDS = ROW / 16;                             // of a lane, of a row of K
constexpr bool TAIL = ROW % 16 != 0;                        // 8 bytes more, two of a lane
constexpr int STEPS = HEAD_DIM / 16;                        // of 16 channels
constexpr int UNITS = ROW / 16;                             // pairs of bytes of a lane, of a row of V; TAIL: and a byte
constexpr u32 LOW = BITS == 4 ? 0x000F000Fu : 0x00FF00FFu, HIGH = 0x00F000F0u;
constexpr bool SWIZZLED = ROW == 64;
constexpr float NOTHING = -1e30f;
constexpr int PITCH = HEAD_DIM + 4;                         // floats of a row of queries or results: other banks
constexpr int BLOCKS_PER_SM = (HEAD_DIM <= 128 ? 16 : 8) / WARPS;

// Where byte `at` of a row lies. With rows of 64 bytes, lanes t = 2, 3 of V's reads would meet the banks of t = 0, 1.
DEVICE int place(int row, int at) {
  return row * ROW + (SWIZZLED ? at ^ ((row & 4) << 3) : at);
}

struct Problem {
  const u8 *codes;
  const u32 *params;
  const int *pages;      // of this sequence
  int kv_head, kv_heads;

  DEVICE void fetch(u32 stage, int tile, int page, int lane) const {
    const int slot = tile * TILE % PAGE;
#pragma unroll
    for (int which = 0; which < 2; which++) {
      const i64 row = ((static_cast<i64>(page) * 2 + which) * kv_heads + kv_head) * PAGE + slot;
      const u8 *from = codes + row * ROW;
      const u32 to = stage + which * CODE_BYTES;
const u32 place_here = SWIZZLED ? lane * 16 ^ (lane & 16) << 1 : lane * 16;  // of 16 bytes; bit 4 of lane: row & 4
#pragma unroll
      for (int i = 0; i < (CODE_BYTES + 511) / 512; i++)
        if (CODE_BYTES % 512 == 0 || i < CODE_BYTES / 512 || lane < CODE_BYTES % 512 / 16)
          ptx::copy_async_16(to + place_here + 512 * i, from + lane * 16 + 512 * i);
      if (lane < TILE / 4)
        ptx::copy_async_16(stage + 2 * CODE_BYTES + which * 4 * TILE + lane * 16, params + row + lane * 4);
    }
  }
};

// A lane's words of row `row` of K: bytes t * 4 WORDS and on; the tail's two bytes one to a half.
DEVICE void load_keys(u32 (&words)[WORDS + TAIL], u32 codes, int row, int t) {
  const int from = t * 4 * WORDS;
  if constexpr (WORDS % 4 == 0) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 4) {
      const uint4 v = ptx::load_shared_16(codes + place(row, from + 4 * i));
      words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
    }
  } else if constexpr (WORDS % 2 == 0) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 2) {
      const uint2 v = ptx::load_shared_8(codes + place(row, from + 4 * i));
      words[i] = v.x, words[i + 1] = v.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < WORDS; i++) words[i] = ptx::load_shared_4(codes + place(row, from + 4 * i));
  }
  if constexpr (TAIL) {
    const u32 v = ptx::load_shared_2(codes + row * ROW + 16 * WORDS + 2 * t);
    words[WORDS] = ptx::permute_bytes(v, 0, 0x4140);
  }
}

// The channel of code `n` of word `word` of a lane.
DEVICE int key_channel(int word, int n, int t) {
  if (TAIL && word == WORDS) return 32 * WORDS + 4 * t + n;
  return (t * 4 * WORDS + 4 * word) * (8 / BITS) + n;
}

// q as operand B: two registers a step of 16 channels, in the order in which K's words give them.
struct Queries {
  u32 b[STEPS][2];

  DEVICE void make(const float *q, int g, int t) {
    const float *row = q + g * PITCH;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      int c[4];  // low pair, high pair
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int second = i % 2, high = i / 2;
        if (BITS == 8)
          c[i] = key_channel(step, 2 * second + high, t);
        else if (TAIL && step == STEPS - 1)
          c[i] = key_channel(WORDS, 2 * second + high, t);
        else
          c[i] = key_channel(step / 2, 2 * (step % 2) + high + 4 * second, t);
      }
      constexpr float SHARE = BITS == 4 ? 0.0625f : 1.0f;
      b[step][0] = Number<FP16>::pack(row[c[0]], row[c[1]]);
      b[step][1] = Number<FP16>::pack(row[c[2]] * SHARE, row[c[3]] * SHARE);
    }
  }
};

// S of a tile: s[i][0], s[i][1] row 16 i + g, heads 2t and 2t + 1; s[i][2], s[i][3] row g + 8. In units of 2^-24.
DEVICE void score(float (&s)[TOKEN_TILES][4], u32 codes, const Queries &q, int g, int t) {
  u32 words[TOKEN_TILES][2][WORDS + TAIL];
#pragma unroll
  for (int i = 0; i < TOKEN_TILES; i++) {
    load_keys(words[i][0], codes, 16 * i + g, t);
    load_keys(words[i][1], codes, 16 * i + g + 8, t);
    s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0;
  }
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    const bool tail = TAIL && step == STEPS - 1;
    const int word = BITS == 8 ? step : tail ? WORDS : step / 2;
#pragma unroll
    for (int i = 0; i < TOKEN_TILES; i++) {
      u32 x = words[i][0][word], y = words[i][1][word];
      if (BITS == 4 && !tail && step % 2) x >>= 8, y >>= 8;
      const u32 a[4] = {x & LOW, y & LOW, BITS == 4 ? x & HIGH : x >> 8 & LOW, BITS == 4 ? y & HIGH : y >> 8 & LOW};
      Number<FP16>::product(s[i], a, q.b[step][0], q.b[step][1], s[i]);
    }
  }
}

// The sums of a warp: Y as operand D, tile i: rows g and g + 8, heads 2t and 2t + 1.
struct Sums {
  float y[STEPS][4], z[4], largest[2], total[2];  // z: row 0 has the sums of p z

  DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < STEPS; i++) y[i][0] = y[i][1] = y[i][2] = y[i][3] = 0;
    z[0] = z[1] = z[2] = z[3] = 0;
    largest[0] = largest[1] = NOTHING;
    total[0] = total[1] = 0;
  }

  DEVICE void rescale(float first, float second) {
#pragma unroll
    for (int i = 0; i < STEPS; i++) y[i][0] *= first, y[i][1] *= second, y[i][2] *= first, y[i][3] *= second;
    z[0] *= first, z[1] *= second;
    total[0] *= first, total[1] *= second;
  }

  // Adds 16 tokens of V, rows `row` and on, with their weights as operand B.
  DEVICE void add(u32 codes, u32 params, int row, const u32 (&p)[2], int g, int t) {
    const int odd = SWIZZLED ? t & 1 : 0;  // lanes of odd t read the second row of a pair first: other banks
    const int first = row + 2 * t + odd, second = row + 2 * t + 1 - odd;
    const u32 low = odd ? 0x1054u : 0x5410u, high = odd ? 0x3276u : 0x7632u;
    u32 words[4][(UNITS + 1) / 2];
    load_values(words[0], codes, first, g);
    load_values(words[1], codes, second, g);
    load_values(words[2], codes, first + 8, g);
    load_values(words[3], codes, second + 8, g);
#pragma unroll
    for (int unit = 0; unit < UNITS; unit++) {
      const u32 pick = unit % 2 ? high : low;
      u32 x = ptx::permute_bytes(words[0][unit / 2], words[1][unit / 2], pick);
      u32 y = ptx::permute_bytes(words[2][unit / 2], words[3][unit / 2], pick);
      if constexpr (BITS == 8) {
        multiply(unit, x & LOW, x >> 8 & LOW, y & LOW, y >> 8 & LOW, p);
      } else {
        multiply(2 * unit, x & LOW, x & HIGH, y & LOW, y & HIGH, p);
        x >>= 8, y >>= 8;
        multiply(2 * unit + 1, x & LOW, x & HIGH, y & LOW, y & HIGH, p);
      }
    }
    if constexpr (TAIL) {
      u32 bytes[4];
#pragma unroll
      for (int i = 0; i < 4; i++)
        bytes[i] = ptx::load_shared_1(codes + (row + 2 * t + (i & 1) + (i & 2) * 4) * ROW + 16 * UNITS + g);
      const u32 x = bytes[0] | bytes[1] << 16, y = bytes[2] | bytes[3] << 16;
      multiply(STEPS - 1, x & LOW, x & HIGH, y & LOW, y & HIGH, p);
    }
    const uint2 pair = ptx::load_shared_8(params + 4 * (row + 2 * t)), next = ptx::load_shared_8(params + 4 * (row + 2 * t + 8));
    const u32 zeros[4] = {g ? 0 : ptx::permute_bytes(pair.x, pair.y, 0x7632), 0,
                          g ? 0 : ptx::permute_bytes(next.x, next.y, 0x7632), 0};
    Number<FP16>::product(z, zeros, p[0], p[1], z);
  }

  DEVICE void multiply(int tile, u32 a0, u32 a1, u32 a2, u32 a3, const u32 (&p)[2]) {
    const u32 a[4] = {a0, a1, a2, a3};
    Number<FP16>::product(y[tile], a, p[0], p[1], y[tile]);
  }

  // A lane's bytes of a row of V: 2 UNITS from g * 2 UNITS on.
  DEVICE static void load_values(u32 (&words)[(UNITS + 1) / 2], u32 codes, int row, int g) {
    const int at = g * 2 * UNITS;
    if constexpr (UNITS % 8 == 0) {
#pragma unroll
      for (int i = 0; i < UNITS / 2; i += 4) {
        const uint4 v = ptx::load_shared_16(codes + place(row, at + 4 * i));
        words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
      }
    } else if constexpr (UNITS % 4 == 0) {
      const uint2 v = ptx::load_shared_8(codes + place(row, at));
      words[0] = v.x, words[1] = v.y;
    } else if constexpr (UNITS % 2 == 0) {
#pragma unroll
      for (int i = 0; i < UNITS / 2; i++) words[i] = ptx::load_shared_4(codes + place(row, at + 4 * i));
    } else {
#pragma unroll
      for (int i = 0; i < UNITS; i += 2) {
        words[i / 2] = ptx::load_shared_2(codes + place(row, at + 2 * i));
        if (i + 1 < UNITS) words[i / 2] |= ptx::load_shared_2(codes + place(row, at + 2 * i + 2)) << 16;
      }
    }
  }
};

// Results lie by position: 8 (2 tile + second) + g is Y's tile, row g (second = 0) or g + 8 (1). Their channel:
DEVICE int channel_of(int position) {
  const int g = position % 8, second = position / 8 % 2, tile = position / 16;
  if (BITS == 8) return g * 2 * UNITS + 2 * tile + second;
  if (TAIL && tile == STEPS - 1) return 32 * UNITS + 2 * g + second;
  return (g * 2 * UNITS + 2 * (tile / 2)) * 2 + 2 * (tile % 2) + second;
}

struct View {
  int begin, end;         // visible slots
  float unit;             // of scores: scale, log2(e), the power of two of q and 2^24
  Cap cap;
  float sums[2];          // of q, in S's units, heads 2t and 2t + 1

  DEVICE bool sees(int slot) const { return slot >= begin && slot < end; }
};

// One tile: scores, softmax, values. PLAIN: all slots are seen and there is no soft cap.
template <bool PLAIN> DEVICE void attend(Sums &sums, u32 stage, int tile, const View &view, const Queries &q, int lane) {
  const int g = lane / 4, t = lane % 4;
  const u32 key_params = stage + 2 * CODE_BYTES, value_params = key_params + 4 * TILE;
  if (!PLAIN) {  // what was never written may be NaN, and 0 times that is no 0
    if (lane < TILE && !view.sees(tile * TILE + lane)) ptx::store_shared_word(value_params + 4 * lane, 0);
    __syncwarp();
  }
  float x[TOKEN_TILES][4], mantissa[TOKEN_TILES][2], share[TOKEN_TILES][2];
  score(x, stage, q, g, t);
  float largest[2] = {sums.largest[0], sums.largest[1]};
#pragma unroll
  for (int i = 0; i < TOKEN_TILES; i++) {
#pragma unroll
    for (int second = 0; second < 2; second++) {
      const int row = 16 * i + g + 8 * second;
      const u32 key = ptx::load_shared_4(key_params + 4 * row), value = ptx::load_shared_4(value_params + 4 * row);
      const float s = Number<FP16>::to_float(key & 0xFFFF) * view.unit, z = Number<FP16>::to_float(key >> 16);
      const int exponent = static_cast<int>(value >> 10 & 31) - 15;
      mantissa[i][second] = Number<FP16>::to_float((value & 0x3FF) | 0x3C00);
      share[i][second] = power_of_two(-exponent);
#pragma unroll
      for (int head = 0; head < 2; head++) {
        float &v = x[i][2 * second + head];
        v = fmaf(-z, view.sums[head], v);
        if constexpr (PLAIN) {
          v = fmaf(v, s, static_cast<float>(exponent));
        } else {
          v *= s;
          if (view.cap.outer > 0) v = view.cap.outer * tanh_fast(v * view.cap.inner);
          v = view.sees(tile * TILE + row) ? v + exponent : -infinity();
        }
        largest[head] = fmaxf(largest[head], v);
      }
    }
  }
#pragma unroll
  for (int step = 4; step < 32; step *= 2) {
#pragma unroll
    for (int head = 0; head < 2; head++) largest[head] = fmaxf(largest[head], __shfl_xor_sync(WHOLE, largest[head], step));
  }
  if (__any_sync(WHOLE, largest[0] > sums.largest[0] || largest[1] > sums.largest[1]))
    sums.rescale(ptx::exp2(sums.largest[0] - largest[0]), ptx::exp2(sums.largest[1] - largest[1]));
  sums.largest[0] = largest[0], sums.largest[1] = largest[1];
  u32 p[TOKEN_TILES][2];
#pragma unroll
  for (int i = 0; i < TOKEN_TILES; i++) {
#pragma unroll
    for (int second = 0; second < 2; second++) {
      const float a = ptx::exp2(x[i][2 * second] - largest[0]), b = ptx::exp2(x[i][2 * second + 1] - largest[1]);
      sums.total[0] = fmaf(a, share[i][second], sums.total[0]);
      sums.total[1] = fmaf(b, share[i][second], sums.total[1]);
      p[i][second] = ptx::transpose_matrix(Number<FP16>::pack(a * mantissa[i][second], b * mantissa[i][second]));
    }
  }
#pragma unroll
  for (int i = 0; i < TOKEN_TILES; i++) sums.add(stage + CODE_BYTES, value_params, 16 * i, p[i], g, t);
}

// Shared memory: the warps' rings, and behind them queries and R3's scratch; then the warps' results over the rings.
struct Result {
  float y[HEADS][PITCH], largest[HEADS], total[HEADS];
};
constexpr int RESULT = sizeof(Result) / 4;  // floats
constexpr int QUERY_FLOATS = HEADS * PITCH + (Vector<HEAD_DIM>::POWER ? 0 : WARPS * HEAD_DIM);
constexpr int SHARED_NEEDED = WARPS * RING + 4 * QUERY_FLOATS;
static_assert(SHARED_NEEDED == SHARED_BYTES, "the launch gives what the kernel uses");
static_assert(WARPS * RESULT * 4 <= SHARED_NEEDED && 8 * MOST_SPLITS * HEADS <= WARPS * RING, "results fit");

// R3, then q's power of two; leaves fp16-rounded rows in `rows` and returns the exponent; heads past the last are zeros.
DEVICE int prepare_queries(float *rows, float *sums, float *maxima, const u8 *q, i64 stride, int heads, bool bf16,
                           const Turn &turn, int warp, int lane) {
  constexpr int EACH = HEADS / WARPS;
  Vector<HEAD_DIM> v[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int head = i * WARPS + warp;
    v[i].load_row(q + 2 * head * stride, head < heads, bf16, lane);
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    v[i].turn(turn, rows + HEADS * PITCH + warp * HEAD_DIM, lane);
    const float largest = warp_max<32>(v[i].magnitude());
    if (lane == 0) maxima[i * WARPS + warp] = largest;
  }
  __syncthreads();
  float largest = 0;
#pragma unroll
  for (int head = 0; head < HEADS; head++) largest = fmaxf(largest, maxima[head]);
  const int exponent = fp16_exponent(largest);
  const float power = power_of_two(exponent);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < v[i].EACH; j++) {
      v[i].x[j] = Number<FP16>::to_float(Number<FP16>::pack(v[i].x[j] * power, 0.0f));
      sum += v[i].x[j];
    }
    v[i].store(rows + (i * WARPS + warp) * PITCH, lane);
    sum = warp_sum(sum);
    if (lane == 0) sums[i * WARPS + warp] = sum;
  }
  __syncthreads();
  return exponent;
}

// A warp's sums to shared memory: y with its scale, relative to the warp's largest score.
DEVICE void leave(Result &to, Sums &sums, int g, int t) {
#pragma unroll
  for (int head = 0; head < 2; head++) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) sums.total[head] += __shfl_xor_sync(WHOLE, sums.total[head], step);
    const float z = __shfl_sync(WHOLE, sums.z[head], t);
    constexpr float UNIT = 16777216.0f, SECOND = BITS == 4 ? UNIT / 16 : UNIT;
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
      to.y[2 * t + head][16 * i + g] = fmaf(sums.y[i][head], UNIT, -z);
      to.y[2 * t + head][16 * i + 8 + g] = fmaf(sums.y[i][2 + head], SECOND, -z);
    }
    if (g == 0) to.largest[2 * t + head] = sums.largest[head], to.total[2 * t + head] = sums.total[head];
  }
}

// From `count` largest scores and sums of one head, HEADS apart, one warp makes weights in place of the first; returns
// the common largest score and the joined sum.
DEVICE float2 weigh(float *largest, const float *total, int count, int lane) {
  float most = NOTHING, sum = 0;
  for (int i = lane; i < count; i += 32) most = fmaxf(most, largest[i * HEADS]);
  most = warp_max<32>(most);
  for (int i = lane; i < count; i += 32) {
    const float weight = ptx::exp2(largest[i * HEADS] - most);
    sum = fmaf(total[i * HEADS], weight, sum);
    largest[i * HEADS] = weight;
  }
  return make_float2(most, warp_sum(sum));
}

DEVICE void add(float4 &to, float4 v, float weight) {
  to.x = fmaf(v.x, weight, to.x), to.y = fmaf(v.y, weight, to.y);
  to.z = fmaf(v.z, weight, to.z), to.w = fmaf(v.w, weight, to.w);
}

// Four values of the output, from position `at` of a head on.
DEVICE void store_output(u16 *head, int at, float4 y, float total, bool bf16) {
  const float inverse = total > 0 ? 1.0f / total : 0.0f;
  head[channel_of(at)] = to_half(y.x * inverse, bf16), head[channel_of(at + 1)] = to_half(y.y * inverse, bf16);
  head[channel_of(at + 2)] = to_half(y.z * inverse, bf16), head[channel_of(at + 3)] = to_half(y.w * inverse, bf16);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS_PER_SM)
    ENTRY(const u8 *query, const u8 *codes, const u32 *params, const int *block_table, const int *lengths,
          const int *padding, u8 *out, float *parts, u32 *arrivals, TURN_PARAMETERS, i64 q_batch, i64 q_head, int heads,
          int kv_heads, int table_width, int splits, int window, int bf16, float scale, float softcap) {
  extern __shared__ __align__(128) u8 shared[];
  __shared__ float head_a[HEADS], head_b[HEADS], weights[2][WARPS][HEADS];
  __shared__ u32 arrived;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int group = heads / kv_heads, tiles_of_heads = (group + HEADS - 1) / HEADS;
  const int split = blockIdx.x % splits, unit = blockIdx.x / splits, sequence = blockIdx.y;
  const int kv_head = unit / tiles_of_heads, head0 = kv_head * group + unit % tiles_of_heads * HEADS;
  const int here = min(HEADS, group - unit % tiles_of_heads * HEADS);

  ptx::launch_dependents();
  ptx::wait_for_previous_kernel();
  View view{0, 0, 0, Cap(softcap), {}};
  view.end = min(lengths[sequence], table_width * PAGE);
  view.begin = padding == nullptr ? 0 : max(0, padding[sequence]);
  if (window > 0) view.begin = max(view.begin, view.end - window);
  const int tile0 = view.begin / TILE, tiles = max(0, (view.end + TILE - 1) / TILE - tile0);
  const int begin = tile0 + static_cast<int>(static_cast<i64>(tiles) * split / splits);
  const int end = tile0 + static_cast<int>(static_cast<i64>(tiles) * (split + 1) / splits);

  const u32 ring = ptx::shared_address(shared) + warp * RING;
  const Problem problem{codes, params, block_table + static_cast<i64>(sequence) * table_width, kv_head, kv_heads};
  int tile = begin + warp, pages[STAGES];
#pragma unroll
  for (int i = 0; i < STAGES; i++) pages[i] = tile + i * WARPS < end ? problem.pages[(tile + i * WARPS) * TILE / PAGE] : 0;
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    if (tile + i * WARPS < end) problem.fetch(ring + i * STAGE, tile + i * WARPS, pages[i], lane);
    ptx::copy_async_commit();
  }

  float *rows = reinterpret_cast<float *>(shared + WARPS * RING);
  const int exponent = prepare_queries(rows, head_a, head_b, query + 2 * (sequence * q_batch + head0 * q_head), q_head,
                                       here, bf16, TURN_ARGUMENTS, warp, lane);
  Queries q;
  q.make(rows, g, t);
  view.unit = scale * LOG2E * 16777216.0f * power_of_two(-exponent);
  view.sums[0] = head_a[2 * t] / 16777216.0f, view.sums[1] = head_a[2 * t + 1] / 16777216.0f;

  Sums sums;
  sums.clear();
  int ahead = tile + (STAGES - 1) * WARPS, page = pages[STAGES - 1];
  for (int at = 0, to = STAGES - 1; tile < end; tile += WARPS) {
    ptx::copy_async_wait<STAGES - 2>();
    __syncwarp();
    if (ahead < end) problem.fetch(ring + to * STAGE, ahead, page, lane);
    ptx::copy_async_commit();
    ahead += WARPS;
    if (ahead < end) page = problem.pages[ahead * TILE / PAGE];
    if (softcap <= 0 && tile * TILE >= view.begin && tile * TILE + TILE <= view.end)
      attend<true>(sums, ring + at * STAGE, tile, view, q, lane);
    else
      attend<false>(sums, ring + at * STAGE, tile, view, q, lane);
    at = at + 1 == STAGES ? 0 : at + 1, to = to + 1 == STAGES ? 0 : to + 1;
  }
  ptx::copy_async_wait<0>();
  __syncthreads();
  Result *results = reinterpret_cast<Result *>(shared);
  leave(results[warp], sums, g, t);
  __syncthreads();
  if (threadIdx.x < WARPS * HEADS) {
    const int of = threadIdx.x / HEADS, head = threadIdx.x % HEADS;
    weights[0][of][head] = results[of].largest[head], weights[1][of][head] = results[of].total[head];
  }
  __syncthreads();
  const i64 row = static_cast<i64>(sequence) * (kv_heads * tiles_of_heads) + unit;
  float *part = parts + (row * splits + split) * RESULT;
  for (int head = warp; head < here; head += WARPS) {
    const float2 joined = weigh(&weights[0][0][head], &weights[1][0][head], WARPS, lane);
    if (lane == 0) {
      head_a[head] = joined.y;
      if (splits > 1) part[HEADS * PITCH + head] = joined.x, part[HEADS * PITCH + HEADS + head] = joined.y;
    }
  }
  __syncthreads();
  constexpr int QUADS = HEAD_DIM / 4;
  u16 *to = reinterpret_cast<u16 *>(out) + (static_cast<i64>(sequence) * heads + head0) * HEAD_DIM;
  for (int i = threadIdx.x; i < here * QUADS; i += 32 * WARPS) {
    const int head = i / QUADS, at = i % QUADS * 4;
    float4 y = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int w = 0; w < WARPS; w++)
      add(y, *reinterpret_cast<const float4 *>(&results[w].y[head][at]), weights[0][w][head]);
    if (splits == 1)
      store_output(to + head * HEAD_DIM, at, y, head_a[head], bf16);
    else
      *reinterpret_cast<float4 *>(part + head * PITCH + at) = y;
  }
  if (splits == 1) return;
  __syncthreads();
  if (threadIdx.x == 0) arrived = ptx::count_arrival(arrivals + row, splits - 1);  // back to 0 with the last
  __syncthreads();
  if (arrived != static_cast<u32>(splits) - 1) return;

  part = parts + row * splits * RESULT;
  float *largest = reinterpret_cast<float *>(shared), *total = largest + splits * HEADS;
  for (int i = threadIdx.x; i < splits * 2 * HEADS; i += 32 * WARPS) {
    const int from = i / (2 * HEADS), which = i % (2 * HEADS);
    (which < HEADS ? largest : total)[from * HEADS + which % HEADS] = ptx::load_global_l2(part + from * RESULT + HEADS * PITCH + which);
  }
  __syncthreads();
  for (int head = warp; head < here; head += WARPS) {
    const float2 joined = weigh(largest + head, total + head, splits, lane);
    if (lane == 0) head_a[head] = joined.y;
  }
  __syncthreads();
  constexpr int EACH = (HEADS * QUADS + 32 * WARPS - 1) / (32 * WARPS);  // fours of values of a thread
  float4 y[EACH];
#pragma unroll
  for (int e = 0; e < EACH; e++) y[e] = make_float4(0, 0, 0, 0);
#pragma unroll 4
  for (int j = 0; j < splits; j++) {
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int i = threadIdx.x + e * 32 * WARPS, head = i / QUADS;
      if (i < here * QUADS)
        add(y[e], ptx::load_global_l2_16(part + j * RESULT + head * PITCH + i % QUADS * 4), largest[j * HEADS + head]);
    }
  }
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int i = threadIdx.x + e * 32 * WARPS, head = i / QUADS;
    if (i < here * QUADS) store_output(to + head * HEAD_DIM, i % QUADS * 4, y[e], head_a[head], bf16);
  }
}
