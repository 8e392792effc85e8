// Prefill attention over the quantized cache with mma.sync: 64 query tokens of one head a block, every architecture; on
// sm_90a where one block of queries alone reads a KV head's cache (kv_tiles.unpacks; else kv_flash_sm90a.cu).
//
//     S = q K^T (fp16, fp32 sums)     P = exp2(S unit - max), online     Y = P V / sum of P
//
// Bound by operations. A tile of TOKENS slots comes as codes by cp.async, one tile ahead, and is turned into fp16 once
// for all 64 queries: (code - z) exactly, then times s, one rounding. Values of the cache stay below fp16's largest
// (kv_layout.largest_scale), so fp16 serves bf16 models too; q goes in scaled by a power of two, row by row.
// At 4 bit a word's eight codes come out in the order 0 4 1 5 2 6 3 7: so lie K's and V's columns in shared memory, q is
// written to match, and Y's columns are put back when they are stored.
//
// Query i stands at slot p = lengths - T + i and sees j with first <= j <= p, and j > p - window where there is one.
// Tested by tests/gpu/test_kv.py.
#include "kv_tile.cuh"

constexpr int QUERIES = 64, WARPS = 4, THREADS = 32 * WARPS;
constexpr int RESIDENT = HEAD_DIM <= 64 ? 4 : HEAD_DIM <= 128 ? 3 : 2;  // left to the assembler, 80 channels spill
constexpr int TOKENS = HEAD_DIM < 256 ? 64 : BITS == 4 ? 32 : 16;
constexpr int PITCH = HEAD_DIM + 8;                 // halves: eight rows of 16 bytes meet eight different bank groups
constexpr int CODE_BYTES = TOKENS * ROW, RAW = 2 * CODE_BYTES + 2 * 4 * TOKENS;
constexpr int STEPS = HEAD_DIM / 16, TILES = TOKENS / 8, CHANNEL_TILES = HEAD_DIM / 8;
constexpr int K_AT = 2 * QUERIES * PITCH, V_AT = K_AT + 2 * TOKENS * PITCH, RAW_AT = V_AT + 2 * TOKENS * PITCH;
static_assert(RAW_AT + 2 * RAW == SHARED_BYTES, "the launch gives what the kernel uses");

// Asks for the codes and parameters of TOKENS slots from `tile * TOKENS` on.
DEVICE void fetch(u32 to, const Cache &cache, int tile) {
  const int slot = tile * TOKENS, page = cache.pages[slot / PAGE];
#pragma unroll
  for (int which = 0; which < 2; which++) {
    const i64 row = cache.row(page, which) + slot % PAGE;
    for (int i = threadIdx.x; i < CODE_BYTES / 16; i += THREADS)
      ptx::copy_async_16(to + which * CODE_BYTES + 16 * i, cache.codes + row * ROW + 16 * i);
    for (int i = threadIdx.x; i < TOKENS / 4; i += THREADS)
      ptx::copy_async_16(to + 2 * CODE_BYTES + which * 4 * TOKENS + 16 * i, cache.params + row + 4 * i);
  }
  ptx::copy_async_commit();
}

// Codes to values: rows of PITCH halves. Rows outside of [begin, end) become zeros: what was never written may be NaN.
DEVICE void expand(u32 to, u32 codes, u32 params, int begin, int end) {
  constexpr int CHUNKS = HEAD_DIM / 8;  // of eight channels, of a row
  for (int i = threadIdx.x; i < TOKENS * CHUNKS; i += THREADS) {
    const int row = i / CHUNKS, chunk = i % CHUNKS;
    const Affine affine(row >= begin && row < end ? ptx::load_shared_4(params + 4 * row) : 0);
    uint4 values;
    if constexpr (BITS == 4) {
      values = affine.eight(ptx::load_shared_4(codes + row * ROW + chunk * 4));
    } else {
      const uint2 words = ptx::load_shared_8(codes + row * ROW + chunk * 8);
      values = affine.eight(words.x, words.y);
    }
    ptx::store_shared_16(to + 2 * (row * PITCH + 8 * chunk), values);
  }
}

// Where channel c of eight lies: at 4 bit two codes of a word's halves come out of it together.
DEVICE constexpr int position_of(int c) { return BITS == 8 ? c : c % 4 * 2 + c / 4; }

// A warp's 16 query rows, `stride` values apart, after R3, in the cache's order of columns, each times a power of two:
// value by value to `put(row, position, fp16)`, and that power's inverse to `power(row, value)`. Rows from `count` on
// become zeros. They come to shared memory first, 16 bytes to `raw(row, byte)`, all at once; a row is then made in place.
template <class Raw, class Put, class Power>
DEVICE void load_queries(const u8 *from, i64 stride, int count, bool bf16, const Turn &turn, float *scratch, int lane,
                         Raw raw, Put put, Power power) {
  typedef Vector<HEAD_DIM> Row;
  constexpr int CHUNKS = HEAD_DIM / 8;
  for (int i = lane; i < 16 * CHUNKS; i += 32) {
    const int row = i / CHUNKS, byte = i % CHUNKS * 16;
    ptx::copy_async_16_or_zero(ptx::shared_address(raw(row, byte)), from + 2 * row * stride + byte, row < count ? 16 : 0);
  }
  ptx::copy_async_commit();
  ptx::copy_async_wait<0>();
  __syncwarp();
#pragma unroll 1
  for (int row = 0; row < 16; row++) {
    Row v;
    v.load(raw(row, min(lane, Row::ACTIVE - 1) * Row::EACH * 2), lane < Row::ACTIVE, bf16);
    __syncwarp();
    v.turn(turn, scratch, lane);
    const int exponent = fp16_exponent(warp_max<32>(v.magnitude()));
    if (lane < Row::ACTIVE) {
#pragma unroll
      for (int i = 0; i < Row::EACH; i++) {
        const int channel = lane * Row::EACH + i;
        put(row, channel / 8 * 8 + position_of(channel % 8), to_half(v.x[i] * power_of_two(exponent), false));
      }
    }
    if (lane == 0) power(row, power_of_two(-exponent));
  }
}

// What row g of a warp sees (row g + 8: a slot of 8 more).
struct Sight {
  int padded, window, slot;

  DEVICE bool sees(int j, int second) const {
    const int p = slot + 8 * second;
    return j <= p && j >= padded && (window <= 0 || j > p - window);
  }
  // Whether all 16 rows, the first at slot `low`, see all of `count` slots from j on.
  DEVICE bool all(int j, int count, int low) const {
    return j + count - 1 <= low && j >= padded && (window <= 0 || j > low + 15 - window);
  }
};

// Scores of 16 rows and 8 TILES slots from `begin` on to weights, in place; older sums must be multiplied by `factor`.
// `total` is a lane's own part of the sums. `low`: slot of the warp's first row.
template <int TILES>
DEVICE void soften(float (&x)[TILES][4], const float (&unit)[2], const Cap &cap, const Sight &sight, int begin, int t,
                   int low, float (&largest)[2], float (&total)[2], float (&factor)[2]) {
  const bool whole = sight.all(begin, 8 * TILES, low);
  float top[2] = {largest[0], largest[1]};
  if (cap.outer > 0 || !whole) {
#pragma unroll
    for (int i = 0; i < TILES; i++) {
#pragma unroll
      for (int c = 0; c < 4; c++) x[i][c] *= unit[c / 2];
    }
    if (cap.outer > 0) {
#pragma unroll
      for (int i = 0; i < TILES; i++) {
#pragma unroll
        for (int c = 0; c < 4; c++) x[i][c] = cap.outer * tanh_fast(x[i][c] * cap.inner);
      }
    }
    if (!whole) {
#pragma unroll
      for (int i = 0; i < TILES; i++) {
#pragma unroll
        for (int c = 0; c < 4; c++)
          if (!sight.sees(begin + 8 * i + 2 * t + c % 2, c / 2)) x[i][c] = -infinity();
      }
    }
#pragma unroll
    for (int i = 0; i < TILES; i++) {
#pragma unroll
      for (int c = 0; c < 4; c++) top[c / 2] = fmaxf(top[c / 2], x[i][c]);
    }
    top[0] = quad_max(top[0]), top[1] = quad_max(top[1]);
#pragma unroll
    for (int i = 0; i < TILES; i++) {
#pragma unroll
      for (int c = 0; c < 4; c++) x[i][c] = ptx::exp2(x[i][c] - top[c / 2]);
    }
  } else {  // the usual tile: the unit, which is positive, goes into the exponent's sum
    float most[2] = {x[0][0], x[0][2]};
#pragma unroll
    for (int i = 0; i < TILES; i++) {
#pragma unroll
      for (int c = 0; c < 4; c++) most[c / 2] = fmaxf(most[c / 2], x[i][c]);
    }
    top[0] = fmaxf(top[0], quad_max(most[0]) * unit[0]), top[1] = fmaxf(top[1], quad_max(most[1]) * unit[1]);
#pragma unroll
    for (int i = 0; i < TILES; i++) {
#pragma unroll
      for (int c = 0; c < 4; c++) x[i][c] = ptx::exp2(fmaf(x[i][c], unit[c / 2], -top[c / 2]));
    }
  }
  factor[0] = ptx::exp2(largest[0] - top[0]), factor[1] = ptx::exp2(largest[1] - top[1]);
  largest[0] = top[0], largest[1] = top[1];
  total[0] *= factor[0], total[1] *= factor[1];
#pragma unroll
  for (int i = 0; i < TILES; i++) total[0] += x[i][0] + x[i][1], total[1] += x[i][2] + x[i][3];
}

// A warp's 16 rows to the output, from row `rows0` of `here` on; `row` is the block's first row of the output, in heads,
// `stride` heads apart. A lane holds columns 2t and 2t + 1, at 4 bit channels t and t + 4: two lanes' halves make a pair.
template <int TILES>
DEVICE void store_rows(u8 *out, const float (&y)[TILES][4], const float (&total)[2], i64 row, int stride, int rows0,
                       int here, bool bf16, int lane) {
  const int g = lane / 4, t = lane % 4, first = lane - t + 2 * t % 4;
#pragma unroll
  for (int second = 0; second < 2; second++) {
    const int at = rows0 + g + 8 * second;
    const float sum = quad_sum(total[second]), inverse = sum > 0 ? 1.0f / sum : 0.0f;
    u32 *to = reinterpret_cast<u32 *>(out + 2 * ((row + static_cast<i64>(at) * stride) * HEAD_DIM));
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      const float a = y[i][2 * second] * inverse, b = y[i][2 * second + 1] * inverse;
      u32 pair = bf16 ? Number<BF16>::pack(a, b) : Number<FP16>::pack(a, b);
      if (BITS == 4) {
        const u32 low = __shfl_sync(WHOLE, pair, first), high = __shfl_sync(WHOLE, pair, first + 1);
        pair = ptx::permute_bytes(low, high, t < 2 ? 0x5410 : 0x7632);
      }
      if (at < here) to[4 * i + t] = pair;
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    ENTRY(const u8 *query, const u8 *codes, const u32 *params, const int *block_table, const int *lengths,
          const int *padding, u8 *out, TURN_PARAMETERS, i64 q_batch, i64 q_head, i64 q_token, int heads, int kv_heads,
          int table_width, int tokens, int window, int bf16, float scale, float softcap) {
  extern __shared__ __align__(128) u8 shared[];
  __shared__ float units[QUERIES];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int sequence = blockIdx.x / heads, head = blockIdx.x % heads;
  const int first_query = (gridDim.y - 1 - blockIdx.y) * QUERIES, here = min(QUERIES, tokens - first_query);

  ptx::launch_dependents();
  ptx::wait_for_previous_kernel();
  const int end = min(lengths[sequence], table_width * PAGE), first_slot = end - tokens + first_query;
  const int padded = padding == nullptr ? 0 : max(0, padding[sequence]);
  const Sight sight{padded, window, first_slot + 16 * warp + g};
  const int from = max(padded, window > 0 ? first_slot - window + 1 : 0), until = first_slot + here;
  const int tile0 = max(from, 0) / TOKENS, tiles = (until + TOKENS - 1) / TOKENS;

  const u32 base = ptx::shared_address(shared);
  const Cache cache{codes, params, block_table + static_cast<i64>(sequence) * table_width, head / (heads / kv_heads),
                    kv_heads};
  if (tile0 < tiles) fetch(base + RAW_AT, cache, tile0);
  const u8 *q = query + 2 * (sequence * q_batch + head * q_head + first_query * q_token);
  u16 *rows = reinterpret_cast<u16 *>(shared);
  float *scratch = reinterpret_cast<float *>(shared + K_AT) + warp * HEAD_DIM;
  load_queries(
      q + 2 * 16 * warp * q_token, q_token, here - 16 * warp, bf16, TURN_ARGUMENTS, scratch, lane,
      [&](int row, int byte) { return shared + 2 * (16 * warp + row) * PITCH + byte; },
      [&](int row, int position, u16 v) { rows[(16 * warp + row) * PITCH + position] = v; },
      [&](int row, float power) { units[16 * warp + row] = scale * LOG2E * power; });
  __syncthreads();
  const Cap cap(softcap);
  const float unit[2] = {units[16 * warp + g], units[16 * warp + g + 8]};

  float y[CHANNEL_TILES][4] = {}, largest[2] = {NOTHING, NOTHING}, total[2] = {};
  for (int tile = tile0, stage = 0; tile < tiles; tile++, stage ^= 1) {
    const u32 raw = base + RAW_AT + stage * RAW;
    ptx::copy_async_wait<0>();
    __syncthreads();
    if (tile + 1 < tiles) fetch(base + RAW_AT + (stage ^ 1) * RAW, cache, tile + 1);
    const int begin = padded - tile * TOKENS, stop = until - tile * TOKENS;
    expand(base + K_AT, raw, raw + 2 * CODE_BYTES, begin, stop);
    expand(base + V_AT, raw + CODE_BYTES, raw + 2 * CODE_BYTES + 4 * TOKENS, begin, stop);
    __syncthreads();

    float x[TILES][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      u32 a[4];
      ptx::load_matrix_x4(a, base + 2 * ((16 * warp + lane % 16) * PITCH + 16 * step + lane / 16 * 8));
#pragma unroll
      for (int i = 0; i < TILES; i += 2) {
        u32 b[4];
        ptx::load_matrix_x4(b, base + K_AT + 2 * ((8 * i + lane % 8 + lane / 16 * 8) * PITCH + 16 * step + lane / 8 % 2 * 8));
        Number<FP16>::product(x[i], a, b[0], b[1], x[i]);
        Number<FP16>::product(x[i + 1], a, b[2], b[3], x[i + 1]);
      }
    }
    float factor[2];
    soften<TILES>(x, unit, cap, sight, tile * TOKENS, t, first_slot + 16 * warp, largest, total, factor);
#pragma unroll
    for (int i = 0; i < CHANNEL_TILES; i++)
      y[i][0] *= factor[0], y[i][1] *= factor[0], y[i][2] *= factor[1], y[i][3] *= factor[1];
#pragma unroll
    for (int i = 0; i < TILES; i += 2) {
      const u32 p[4] = {Number<FP16>::pack(x[i][0], x[i][1]), Number<FP16>::pack(x[i][2], x[i][3]),
                        Number<FP16>::pack(x[i + 1][0], x[i + 1][1]), Number<FP16>::pack(x[i + 1][2], x[i + 1][3])};
#pragma unroll
      for (int j = 0; j < CHANNEL_TILES; j += 2) {
        u32 b[4];
        ptx::load_matrix_x4_transposed(b, base + V_AT + 2 * ((8 * i + lane % 16) * PITCH + 8 * j + lane / 16 * 8));
        Number<FP16>::product(y[j], p, b[0], b[1], y[j]);
        Number<FP16>::product(y[j + 1], p, b[2], b[3], y[j + 1]);
      }
    }
  }
  ptx::copy_async_wait<0>();
  store_rows<CHANNEL_TILES>(out, y, total, (static_cast<i64>(sequence) * tokens + first_query) * heads + head, heads,
                            16 * warp, here, bf16, lane);
}
