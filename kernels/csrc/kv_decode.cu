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

constexpr int WARPS = 4, HEADS = 8;
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
constexpr int Q_FLOATS = HEADS * HEAD_DIM;
constexpr int BLOCKS_PER_SM = HEAD_DIM <= 128 ? 4 : 2;

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
#pragma unroll
      for (int i = 0; i < CODE_BYTES / 512; i++) {
        const int at = (i * 32 + lane) * 16;
        ptx::copy_async_16(to + place(at / ROW, at % ROW), from + at);
      }
      if (CODE_BYTES % 512 && lane < CODE_BYTES % 512 / 16) {
        const int at = CODE_BYTES / 512 * 512 + lane * 16;
        ptx::copy_async_16(to + place(at / ROW, at % ROW), from + at);
      }
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
    const float *row = q + g * HEAD_DIM;
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

// S of 16 tokens: s[0], s[1] row g, heads 2t and 2t + 1; s[2], s[3] row g + 8. In units of 2^-24.
DEVICE void score(float (&s)[4], u32 codes, int row, const Queries &q, int t) {
  u32 low[WORDS + TAIL], high[WORDS + TAIL];
  load_keys(low, codes, row, t);
  load_keys(high, codes, row + 8, t);
  s[0] = s[1] = s[2] = s[3] = 0;
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    const bool tail = TAIL && step == STEPS - 1;
    const int word = BITS == 8 ? step : tail ? WORDS : step / 2;
    u32 x = low[word], y = high[word];
    if (BITS == 4 && !tail && step % 2) x >>= 8, y >>= 8;
    const u32 a[4] = {x & LOW, y & LOW, BITS == 4 ? x & HIGH : x >> 8 & LOW, BITS == 4 ? y & HIGH : y >> 8 & LOW};
    Number<FP16>::product(s, a, q.b[step][0], q.b[step][1], s);
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

// The channel of row g (second = 0) or g + 8 (1) of Y's tile i.
DEVICE int value_channel(int tile, int second, int g) {
  if (BITS == 8) return g * 2 * UNITS + 2 * tile + second;
  if (TAIL && tile == STEPS - 1) return 32 * UNITS + 2 * g + second;
  return (g * 2 * UNITS + 2 * (tile / 2)) * 2 + 2 * (tile % 2) + second;
}

struct View {
  int begin, end;         // visible slots
  float unit, softcap;    // of scores: scale, log2(e), the power of two of q and 2^24
  float sums[2];          // of q, in S's units, heads 2t and 2t + 1
};

// One tile: scores, softmax, values.
DEVICE void attend(Sums &sums, u32 stage, int tile, const View &view, const Queries &q, int g, int t) {
  const u32 keys = stage, values = stage + CODE_BYTES, key_params = stage + 2 * CODE_BYTES,
            value_params = key_params + 4 * TILE;
  float x[TOKEN_TILES][4], mantissa[TOKEN_TILES][2], share[TOKEN_TILES][2];
  float largest[2] = {sums.largest[0], sums.largest[1]};
  const bool whole = tile * TILE >= view.begin && tile * TILE + TILE <= view.end;
#pragma unroll
  for (int i = 0; i < TOKEN_TILES; i++) {
    score(x[i], keys, 16 * i + g, q, t);
#pragma unroll
    for (int second = 0; second < 2; second++) {
      const int row = 16 * i + g + 8 * second;
      const u32 key = ptx::load_shared_4(key_params + 4 * row), value = ptx::load_shared_4(value_params + 4 * row);
      const float s = Number<FP16>::to_float(key & 0xFFFF) * view.unit, z = Number<FP16>::to_float(key >> 16);
      const int exponent = static_cast<int>(value >> 10 & 31) - 15;
      mantissa[i][second] = Number<FP16>::to_float((value & 0x3FF) | 0x3C00);
      share[i][second] = power_of_two(-exponent);
      const bool seen = whole || (tile * TILE + row >= view.begin && tile * TILE + row < view.end);
#pragma unroll
      for (int head = 0; head < 2; head++) {
        float &v = x[i][2 * second + head];
        v = fmaf(-z, view.sums[head], v) * s;
        if (view.softcap > 0) v = view.softcap * LOG2E * tanh_fast(v * LN2 / view.softcap);
        v = seen ? v + exponent : -infinity();
        largest[head] = fmaxf(largest[head], v);
      }
    }
  }
#pragma unroll
  for (int head = 0; head < 2; head++) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) largest[head] = fmaxf(largest[head], __shfl_xor_sync(WHOLE, largest[head], step));
  }
  if (__any_sync(WHOLE, largest[0] > sums.largest[0] || largest[1] > sums.largest[1]))
    sums.rescale(ptx::exp2(sums.largest[0] - largest[0]), ptx::exp2(sums.largest[1] - largest[1]));
  sums.largest[0] = largest[0], sums.largest[1] = largest[1];
#pragma unroll
  for (int i = 0; i < TOKEN_TILES; i++) {
    u32 p[2];
#pragma unroll
    for (int second = 0; second < 2; second++) {
      const float a = ptx::exp2(x[i][2 * second] - largest[0]), b = ptx::exp2(x[i][2 * second + 1] - largest[1]);
      sums.total[0] = fmaf(a, share[i][second], sums.total[0]);
      sums.total[1] = fmaf(b, share[i][second], sums.total[1]);
      p[second] = ptx::transpose_matrix(Number<FP16>::pack(a * mantissa[i][second], b * mantissa[i][second]));
    }
    sums.add(values, value_params, 16 * i, p, g, t);
  }
}

// Shared memory: the queries' fp32 rows first, then the rings over them, then the warps' results over both.
struct Result {
  float y[HEADS][HEAD_DIM], largest[HEADS], total[HEADS];
};
constexpr int SHARED = WARPS * RING > WARPS * static_cast<int>(sizeof(Result)) ? WARPS * RING : WARPS * sizeof(Result);
static_assert(SHARED == SHARED_BYTES, "the launch gives what the kernel uses");
static_assert(SHARED >= 4 * Q_FLOATS + 4 * WARPS * HEAD_DIM, "queries and the scratch of R3 fit");

// R3, then q's power of two; leaves fp16-rounded rows in `rows` and the exponent; heads past the last are zeros.
DEVICE int prepare_queries(float *rows, float *scratch, float *sums, float *maxima, const u8 *q, i64 stride, int heads,
                           bool bf16, const Turn &turn, int warp, int lane) {
  for (int head = warp; head < HEADS; head += WARPS) {
    Vector<HEAD_DIM> v;
    float largest = 0;
#pragma unroll
    for (int i = 0; i < v.EACH; i++) v.x[i] = 0;
    if (head < heads) {
      v.load(q + 2 * head * stride, bf16, lane);
      v.turn(turn, scratch + warp * HEAD_DIM, lane);
    }
#pragma unroll
    for (int i = 0; i < v.EACH; i++) largest = fmaxf(largest, fabsf(v.x[i]));
    largest = warp_max<32>(largest);
    v.store(rows + head * HEAD_DIM, lane);
    if (lane == 0) maxima[head] = largest;
  }
  __syncthreads();
  float largest = 0;
#pragma unroll
  for (int head = 0; head < HEADS; head++) largest = fmaxf(largest, maxima[head]);
  const int exponent = fp16_exponent(largest);
  const float power = power_of_two(exponent);
  for (int head = warp; head < HEADS; head += WARPS) {
    float sum = 0;
    for (int i = lane; i < HEAD_DIM; i += 32) {
      const float v = Number<FP16>::to_float(Number<FP16>::pack(rows[head * HEAD_DIM + i] * power, 0.0f));
      rows[head * HEAD_DIM + i] = v;
      sum += v;
    }
    sum = warp_sum(sum);
    if (lane == 0) sums[head] = sum;
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
      to.y[2 * t + head][value_channel(i, 0, g)] = fmaf(sums.y[i][head], UNIT, -z);
      to.y[2 * t + head][value_channel(i, 1, g)] = fmaf(sums.y[i][2 + head], SECOND, -z);
    }
    if (g == 0) to.largest[2 * t + head] = sums.largest[head], to.total[2 * t + head] = sums.total[head];
  }
}

// Joins `count` results, `stride` floats apart, for one head and channel: the value relative to `largest`.
struct Joined {
  float y = 0, largest = NOTHING, total = 0;
};
template <bool SHARED_RESULTS> DEVICE Joined join(const float *results, int count, i64 stride, int head, int channel) {
  constexpr int LARGEST = HEADS * HEAD_DIM, TOTAL = LARGEST + HEADS;
  auto read = [](const float *from) { return SHARED_RESULTS ? *from : ptx::load_global_l2(from); };
  Joined j;
  for (int i = 0; i < count; i++) j.largest = fmaxf(j.largest, read(results + i * stride + LARGEST + head));
  for (int i = 0; i < count; i++) {
    const float *from = results + i * stride;
    const float weight = ptx::exp2(read(from + LARGEST + head) - j.largest);
    j.y = fmaf(read(from + head * HEAD_DIM + channel), weight, j.y);
    j.total = fmaf(read(from + TOTAL + head), weight, j.total);
  }
  return j;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS_PER_SM)
    ENTRY(const u8 *query, const u8 *codes, const u32 *params, const int *block_table, const int *lengths,
          const int *padding, u8 *out, float *parts, u32 *arrivals, TURN_PARAMETERS, i64 q_batch, i64 q_head, int heads,
          int kv_heads, int table_width, int splits, int window, int bf16, float scale, float softcap) {
  extern __shared__ __align__(128) u8 shared[];
  __shared__ float q_sums[HEADS], q_maxima[HEADS];
  __shared__ u32 arrived;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int group = heads / kv_heads, tiles_of_heads = (group + HEADS - 1) / HEADS;
  const int split = blockIdx.x % splits, unit = blockIdx.x / splits, sequence = blockIdx.y;
  const int kv_head = unit / tiles_of_heads, head0 = kv_head * group + unit % tiles_of_heads * HEADS;
  const int here = min(HEADS, group - unit % tiles_of_heads * HEADS);

  ptx::launch_dependents();
  ptx::wait_for_previous_kernel();
  View view;
  view.end = min(lengths[sequence], table_width * PAGE);
  view.begin = padding == nullptr ? 0 : max(0, padding[sequence]);
  if (window > 0) view.begin = max(view.begin, view.end - window);
  const int tile0 = view.begin / TILE, tiles = max(0, (view.end + TILE - 1) / TILE - tile0);
  const int begin = tile0 + static_cast<int>(static_cast<i64>(tiles) * split / splits);
  const int end = tile0 + static_cast<int>(static_cast<i64>(tiles) * (split + 1) / splits);

  float *rows = reinterpret_cast<float *>(shared);
  const int exponent = prepare_queries(rows, rows + Q_FLOATS, q_sums, q_maxima,
                                       query + 2 * (sequence * q_batch + head0 * q_head), q_head, here, bf16,
                                       TURN_ARGUMENTS, warp, lane);
  Queries q;
  q.make(rows, g, t);
  view.softcap = softcap;
  view.unit = scale * LOG2E * 16777216.0f * power_of_two(-exponent);
  view.sums[0] = q_sums[2 * t] / 16777216.0f, view.sums[1] = q_sums[2 * t + 1] / 16777216.0f;
  __syncthreads();

  const u32 ring = ptx::shared_address(shared) + warp * RING;
  const Problem problem{codes, params, block_table + static_cast<i64>(sequence) * table_width, kv_head, kv_heads};
  Sums sums;
  sums.clear();
  int tile = begin + warp;
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    const int ahead = tile + i * WARPS;
    if (ahead < end) problem.fetch(ring + i * STAGE, ahead, problem.pages[ahead * TILE / PAGE], lane);
    ptx::copy_async_commit();
  }
  int ahead = tile + (STAGES - 1) * WARPS, page = ahead < end ? problem.pages[ahead * TILE / PAGE] : 0;
  for (int at = 0, to = STAGES - 1; tile < end; tile += WARPS) {
    ptx::copy_async_wait<STAGES - 2>();
    __syncwarp();
    if (ahead < end) problem.fetch(ring + to * STAGE, ahead, page, lane);
    ptx::copy_async_commit();
    ahead += WARPS;
    if (ahead < end) page = problem.pages[ahead * TILE / PAGE];
    attend(sums, ring + at * STAGE, tile, view, q, g, t);
    at = at + 1 == STAGES ? 0 : at + 1, to = to + 1 == STAGES ? 0 : to + 1;
  }
  ptx::copy_async_wait<0>();
  __syncthreads();
  Result *results = reinterpret_cast<Result *>(shared);
  leave(results[warp], sums, g, t);
  __syncthreads();

  constexpr i64 SIZE = sizeof(Result) / 4;
  const i64 row = static_cast<i64>(sequence) * (kv_heads * tiles_of_heads) + unit;
  u16 *to = reinterpret_cast<u16 *>(out) + (static_cast<i64>(sequence) * heads + head0) * HEAD_DIM;
  float *part = parts + (row * splits + split) * SIZE;
  for (int i = threadIdx.x; i < here * HEAD_DIM; i += 32 * WARPS) {
    const int head = i / HEAD_DIM, channel = i % HEAD_DIM;
    const Joined j = join<true>(&results->y[0][0], WARPS, SIZE, head, channel);
    if (splits == 1) {
      to[i] = to_half(j.total > 0 ? j.y / j.total : 0.0f, bf16);
    } else {
      part[i] = j.y;
      if (channel == 0) part[HEADS * HEAD_DIM + head] = j.largest, part[HEADS * HEAD_DIM + HEADS + head] = j.total;
    }
  }
  if (splits == 1) return;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) arrived = atomicInc(arrivals + row, splits - 1);  // back to 0 with the last
  __syncthreads();
  if (arrived != static_cast<u32>(splits) - 1) return;
  __threadfence();
  for (int i = threadIdx.x; i < here * HEAD_DIM; i += 32 * WARPS) {
    const Joined j = join<false>(parts + row * splits * SIZE, splits, SIZE, i / HEAD_DIM, i % HEAD_DIM);
    to[i] = to_half(j.total > 0 ? j.y / j.total : 0.0f, bf16);
  }
}
