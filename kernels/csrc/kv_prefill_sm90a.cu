// Prefill attention over the quantized cache on sm_90a: 128 query tokens of one head a block, wgmma.
//
// Three warpgroups. The first makes values: it keeps the next tile's codes in registers, turns them into fp16 (as
// kv_prefill.cu does) in a ring of two tiles of K and two of V, and so hides the codes behind the products. The other two
// take 64 queries each:
//     S(i) = Q K(i)^T and Y += P(i-1) V(i-1) are issued together; softmax of S(i) runs while the second is on its way.
// A tile of K and V serves 128 queries: 2 TOKENS HEAD_DIM values to make against 4 TOKENS HEAD_DIM 128 operations.
//
//     shared memory, in blocks of 64 columns with the 128-byte swizzle:  Q 128 rows | K 2 x TOKENS rows | V 2 x TOKENS
//
// The last queries, whose tiles are most, start first. Requires HEAD_DIM 64 or 128; what queries see: kv_prefill.cu.
// Tested by tests/gpu/test_kv.py.
#include "kv_tile.cuh"
#include "kv_wgmma.cuh"

constexpr int QUERIES = 128, GROUPS = 3, THREADS = 128 * GROUPS;
constexpr int TOKENS = BITS == 4 ? 128 : 64;
constexpr int TILE_BYTES = TOKENS * HEAD_DIM * 2;
constexpr int K_AT = QUERIES * HEAD_DIM * 2, V_AT = K_AT + 2 * TILE_BYTES, UNITS_AT = V_AT + 2 * TILE_BYTES,
              BARRIERS_AT = UNITS_AT + 4 * QUERIES;
static_assert(BARRIERS_AT + 64 == SHARED_BYTES, "the launch gives what the kernel uses");
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "whole blocks of columns");
constexpr int QUADS = ROW / 16;                       // 16 bytes of codes, of a row
constexpr int LOADS = TOKENS * QUADS / 128;           // of a thread, of a tile
constexpr int CHUNKS = 128 / (8 * BITS);              // of eight values, of 16 bytes of codes
constexpr int STEPS = HEAD_DIM / 16, TILES = TOKENS / 8, CHANNEL_TILES = HEAD_DIM / 8;

// Where chunk `chunk` (16 bytes) of a row lies in a tile of `rows` rows.
DEVICE u32 place(int row, int chunk, int rows) {
  return chunk / 8 * rows * 128 + row * 128 + ((chunk % 8 ^ row % 8) << 4);
}

// Eight barriers of 8 bytes: K full, V full, K free, V free, one for each stage.
constexpr int V_FULL = 16, K_FREE = 32, V_FREE = 48;

// A thread's share of a tile of codes.
struct Codes {
  uint4 words[LOADS];
  u32 parameters[LOADS];

  // Slots outside of [begin, end) get parameters of 0: what was never written may be NaN.
  DEVICE void load(const Cache &cache, int which, int tile, int begin, int end, int thread) {
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      const int at = thread + 128 * i, slot = tile * TOKENS + at / QUADS;
      const bool exists = slot >= begin && slot < end;
      const i64 row = cache.row(exists ? cache.pages[slot / PAGE] : 0, which) + slot % PAGE;
      words[i] = exists ? *reinterpret_cast<const uint4 *>(cache.codes + row * ROW + at % QUADS * 16) : make_uint4(0, 0, 0, 0);
      parameters[i] = exists ? cache.params[row] : 0;
    }
  }

  // To fp16 in a tile at `to`. Lanes whose columns are in the second block take their chunks in another order, so that
  // eight lanes meet all banks.
  DEVICE void expand(u32 to, int thread) const {
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      const int at = thread + 128 * i, row = at / QUADS, quad = at % QUADS;
      const bool turned = quad * CHUNKS / 8;
      const Affine affine(parameters[i]);
      const uint4 w = turned ? make_uint4(words[i].z, words[i].w, words[i].x, words[i].y) : words[i];
      const u32 four[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
      for (int j = 0; j < CHUNKS; j++) {
        const uint4 values = BITS == 4 ? affine.eight(four[j]) : affine.eight(four[2 * j % 4], four[(2 * j + 1) % 4]);
        ptx::store_shared_16(to + place(row, quad * CHUNKS + (turned ? j ^ CHUNKS / 2 : j), TOKENS), values);
      }
    }
    ptx::fence_async_proxy();
  }
};

DEVICE void produce(const Cache &cache, u32 base, u32 barriers, int tile0, int tiles, int begin, int end) {
  const int thread = threadIdx.x;
  Codes k, v;
  k.load(cache, 0, tile0, begin, end, thread);
  v.load(cache, 1, tile0, begin, end, thread);
  for (int i = 0; i < tiles; i++) {
    const int stage = i & 1, phase = (i >> 1) - 1 & 1;
    if (i >= 2) ptx::barrier_wait(barriers + K_FREE + 8 * stage, phase);
    k.expand(base + K_AT + stage * TILE_BYTES, thread);
    ptx::barrier_arrive(barriers + 8 * stage);
    if (i + 1 < tiles) k.load(cache, 0, tile0 + i + 1, begin, end, thread);
    if (i >= 2) ptx::barrier_wait(barriers + V_FREE + 8 * stage, phase);
    v.expand(base + V_AT + stage * TILE_BYTES, thread);
    ptx::barrier_arrive(barriers + V_FULL + 8 * stage);
    if (i + 1 < tiles) v.load(cache, 1, tile0 + i + 1, begin, end, thread);
  }
}

// What one warpgroup holds: its scores, weights and sums.
struct Consumer {
  float x[TILES][4], y[CHANNEL_TILES][4], largest[2], total[2];
  u32 p[TILES / 2][4];
  u64 queries, keys, values;  // descriptors

  DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < CHANNEL_TILES; i++) y[i][0] = y[i][1] = y[i][2] = y[i][3] = 0;
    largest[0] = largest[1] = NOTHING;
    total[0] = total[1] = 0;
  }
  DEVICE void start_scores(int stage) {
    const u64 k = keys + stage * (TILE_BYTES >> 4);
    wgmma::hold(x);
    wgmma::fence();
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      const int block = step / 4, in_block = step % 4 * 2;
      wgmma::Attention<TILES>::scores(x, queries + block * (QUERIES * 128 >> 4) + in_block,
                                      k + block * (TOKENS * 128 >> 4) + in_block, step > 0);
    }
    wgmma::commit();
  }
  DEVICE void start_values(int stage) {
    const u64 v = values + stage * (TILE_BYTES >> 4);
    wgmma::hold(y);
    wgmma::fence();
#pragma unroll
    for (int step = 0; step < TOKENS / 16; step++) wgmma::Attention<CHANNEL_TILES>::values(y, p[step], v + step * (2048 >> 4));
    wgmma::commit();
  }
  DEVICE void pack() {
#pragma unroll
    for (int i = 0; i < TILES / 2; i++) {
      p[i][0] = Number<FP16>::pack(x[2 * i][0], x[2 * i][1]), p[i][1] = Number<FP16>::pack(x[2 * i][2], x[2 * i][3]);
      p[i][2] = Number<FP16>::pack(x[2 * i + 1][0], x[2 * i + 1][1]);
      p[i][3] = Number<FP16>::pack(x[2 * i + 1][2], x[2 * i + 1][3]);
    }
  }
  DEVICE void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < CHANNEL_TILES; i++)
      y[i][0] *= factor[0], y[i][1] *= factor[0], y[i][2] *= factor[1], y[i][3] *= factor[1];
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    ENTRY(const u8 *query, const u8 *codes, const u32 *params, const int *block_table, const int *lengths,
          const int *padding, u8 *out, TURN_PARAMETERS, i64 q_batch, i64 q_head, i64 q_token, int heads, int kv_heads,
          int table_width, int tokens, int window, int bf16, float scale, float softcap) {
  extern __shared__ __align__(1024) u8 shared[];
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int sequence = blockIdx.x / heads, head = blockIdx.x % heads;
  const int first_query = (gridDim.y - 1 - blockIdx.y) * QUERIES, here = min(QUERIES, tokens - first_query);
  const u32 base = ptx::shared_address(shared), barriers = base + BARRIERS_AT;

  ptx::launch_dependents();
  ptx::wait_for_previous_kernel();
  const int end = min(lengths[sequence], table_width * PAGE), first_slot = end - tokens + first_query;
  const int padded = padding == nullptr ? 0 : max(0, padding[sequence]);
  const int from = max(padded, window > 0 ? first_slot - window + 1 : 0), until = first_slot + here;
  const int tile0 = max(from, 0) / TOKENS, tiles = max(0, (until + TOKENS - 1) / TOKENS - tile0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 4; i++) {
      ptx::barrier_init(barriers + 8 * i, 128);         // full: the makers' threads
      ptx::barrier_init(barriers + K_FREE + 8 * i, 8);  // free: the users' warps
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();

  if (group == 0) {  // registers: 120 + 2 x 192 are what three groups start with
    ptx::fewer_registers<120>();
    const Cache cache{codes, params, block_table + static_cast<i64>(sequence) * table_width, head / (heads / kv_heads),
                      kv_heads};
    produce(cache, base, barriers, tile0, tiles, padded, until);
    return;
  }
  ptx::more_registers<192>();
  const int rows0 = 16 * (warp - 4);  // of this warp's 16 queries
  float *units = reinterpret_cast<float *>(shared + UNITS_AT);
  const u8 *q = query + 2 * (sequence * q_batch + head * q_head + first_query * q_token);
  load_queries(
      q + 2 * rows0 * q_token, q_token, here - rows0, bf16, TURN_ARGUMENTS, nullptr, lane,
      [&](int row, int byte) { return shared + byte / 128 * QUERIES * 128 + (rows0 + row) * 128 + byte % 128; },
      [&](int row, int position, u16 v) {
        *reinterpret_cast<u16 *>(shared + place(rows0 + row, position / 8, QUERIES) + position % 8 * 2) = v;
      },
      [&](int row, float power) { units[rows0 + row] = scale * LOG2E * power; });
  ptx::fence_async_proxy();
  ptx::barrier(group, 128);
  const float unit[2] = {units[rows0 + g], units[rows0 + g + 8]};
  const Sight sight{padded, window, first_slot + rows0 + g};
  const Cap cap(softcap);

  Consumer c;
  c.clear();
  c.queries = wgmma::descriptor(base + (group - 1) * 64 * 128);
  c.keys = wgmma::descriptor(base + K_AT);
  c.values = wgmma::descriptor_across(base + V_AT, TOKENS * 128);
  auto soft = [&](int i, float (&factor)[2]) {
    soften<TILES>(c.x, unit, cap, sight, (tile0 + i) * TOKENS, t, first_slot + rows0, c.largest, c.total, factor);
  };
  float factor[2];
  if (tiles > 0) {
    ptx::barrier_wait(barriers, 0);
    c.start_scores(0);
    wgmma::wait<0>();
    wgmma::hold(c.x);
    if (lane == 0) ptx::barrier_arrive(barriers + K_FREE);
    soft(0, factor);
    c.pack();
  }
  for (int i = 1; i < tiles; i++) {
    const int stage = i & 1, before = stage ^ 1;
    ptx::barrier_wait(barriers + 8 * stage, i >> 1 & 1);
    c.start_scores(stage);
    ptx::barrier_wait(barriers + V_FULL + 8 * before, i - 1 >> 1 & 1);
    c.start_values(before);
    wgmma::wait<1>();
    wgmma::hold(c.x);
    if (lane == 0) ptx::barrier_arrive(barriers + K_FREE + 8 * stage);
    soft(i, factor);
    wgmma::wait<0>();
    wgmma::hold(c.y);
    if (lane == 0) ptx::barrier_arrive(barriers + V_FREE + 8 * before);
    c.rescale(factor);
    c.pack();
  }
  if (tiles > 0) {
    ptx::barrier_wait(barriers + V_FULL + 8 * (tiles - 1 & 1), tiles - 1 >> 1 & 1);
    c.start_values(tiles - 1 & 1);
    wgmma::wait<0>();
    wgmma::hold(c.y);
  }
  store_rows<CHANNEL_TILES>(out, c.y, c.total, (static_cast<i64>(sequence) * tokens + first_query) * heads + head, heads,
                            rows0, here, bf16, lane);
}
