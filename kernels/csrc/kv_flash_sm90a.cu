// Prefill attention on sm_90a over the fp16 tiles that kv_unpack.cu made of the quantized cache: wgmma, a persistent block
// on every multiprocessor.
//
//     S = q K^T (fp16, fp32 sums)     P = exp2(S unit - max), online     Y = P V / sum of P
//
// A work item is 64 CONSUMERS query tokens of one head. Warpgroup 0 asks the copy engine for tiles: one thread for K, one
// for V, two stages each, across items. The others take 64 queries each:
//     S(i) = Q K(i)^T and Y += P(i-1) V(i-1) are issued together; softmax of S(i) runs while the second is on its way,
//     and while the other warpgroups' products run: they take turns at issuing (named barriers).
// R3 turns an item's queries on the tensor cores too (kv_rotate.cuh); the next item's are asked for before this one's last
// product. A tile costs 4 TOKENS HEAD_DIM QUERIES operations; beside them 2^x of TOKENS QUERIES scores, half of the
// products' time at HEAD_DIM 128, as much at 64.
//
// Which items a block takes: kv_items.cuh. What queries see: kv_prefill.cu. Tested by tests/gpu/test_kv.py.
#include "kv_items.cuh"
#include "kv_rotate.cuh"

// Queries in registers take the shared memory's bandwidth off the products; with other sizes they win nothing or do not fit.
constexpr bool QUERIES_IN_REGISTERS = HEAD_DIM == 128;
constexpr int K_AT = QUERIES * HEAD_DIM * 2, V_AT = K_AT + 2 * TILE_BYTES, MATRIX_AT = V_AT + 2 * TILE_BYTES,
              BARRIERS_AT = MATRIX_AT + MATRIX_BYTES;
static_assert(BARRIERS_AT + 64 == SHARED_BYTES, "the launch gives what the kernel uses");
static_assert(K_AT % 1024 == 0 && MATRIX_AT % 1024 == 0 && BARRIERS_AT % 8 == 0, "swizzles repeat every 1024 bytes");
constexpr int STEPS = HEAD_DIM / 16, TILES = TOKENS / 8;
// Registers of a thread: finding items takes some. Both together are what a block starts with.
constexpr int FEWER = CONSUMERS == 3 ? 32 : 24, MORE = CONSUMERS == 3 ? 160 : 240;

// Eight barriers of 8 bytes, one for each stage: K full, K free, V full, V free.
constexpr int V_BARRIERS = 32, FREE = 16;
// Named barriers: one for each consumer's own warps, one for its turn.
constexpr int OWN = 1, TURNS = OWN + CONSUMERS;

// Asks for the tiles of K (which = 0) or V, item by item.
DEVICE void produce(const Work &work, u32 to, u32 barriers, int which) {
  Item item;
  int n = 0;
  for (int turn = 0; item.find(work, turn); turn++) {
    const u8 *from = work.tiles + ((static_cast<i64>(item.pair) * work.tiles_of_pair + item.tile0) * 2 + which) * TILE_BYTES;
    for (int i = 0; i < item.tiles; i++, n++, from += 2 * TILE_BYTES) {
      const u32 full = barriers + 8 * (n & 1);
      if (n >= 2) ptx::barrier_wait(full + FREE, (n >> 1) - 1 & 1);
      ptx::barrier_arrive_expect(full, TILE_BYTES);
      ptx::copy_bulk(to + (n & 1) * TILE_BYTES, from, TILE_BYTES, full);
    }
  }
}

// This warp no longer reads what a barrier's stage holds.
DEVICE void release(u32 barrier, int lane) {
  if (lane == 0) ptx::barrier_arrive(barrier);
}

// What one warpgroup holds: its scores, weights and sums.
struct Consumer {
  float x[TILES][4], y[CHUNKS][4], unit[2], largest[2], total[2];
  u32 p[TILES / 2][4], q[QUERIES_IN_REGISTERS ? STEPS : 1][4];
  u64 queries, keys, values;  // descriptors

  DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) y[i][0] = y[i][1] = y[i][2] = y[i][3] = 0;
    largest[0] = largest[1] = NOTHING;
    total[0] = total[1] = 0;
  }
  DEVICE void start_scores(int stage) {
    const u64 k = keys + stage * (TILE_BYTES >> 4);
    wgmma::hold(x);
    wgmma::fence();
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      if constexpr (QUERIES_IN_REGISTERS)
        wgmma::Attention<TILES>::scores(x, q[step], k + columns_on(step, TOKENS), step > 0);
      else
        wgmma::Attention<TILES>::scores(x, queries + columns_on(step, QUERIES), k + columns_on(step, TOKENS), step > 0);
    }
    wgmma::commit();
  }
  DEVICE void start_values(int stage) {
    const u64 v = values + stage * (TILE_BYTES >> 4);
    wgmma::hold(y);
    wgmma::fence();
#pragma unroll
    for (int step = 0; step < TOKENS / 16; step++) wgmma::Attention<CHUNKS>::values(y, p[step], v + step * rows_on(16));
    wgmma::commit();
  }

  // Turned queries, y, to fp16: each row times a power of two, to its place in the tile at `to`.
  DEVICE void put_queries(u8 *to, int row, int t, float norm, float scale) {
#pragma unroll
    for (int second = 0; second < 2; second++) {
      float most = 0;
#pragma unroll
      for (int i = 0; i < CHUNKS; i++) {
        y[i][2 * second] *= norm, y[i][2 * second + 1] *= norm;
        most = fmaxf(most, fmaxf(fabsf(y[i][2 * second]), fabsf(y[i][2 * second + 1])));
      }
      const int exponent = fp16_exponent(quad_max(most));
      const float power = power_of_two(exponent);
      unit[second] = scale * LOG2E * power_of_two(-exponent);
#pragma unroll
      for (int i = 0; i < CHUNKS; i++) {
        const u32 pair = Number<FP16>::pack(y[i][2 * second] * power, y[i][2 * second + 1] * power);
        if constexpr (QUERIES_IN_REGISTERS)
          q[i / 2][i % 2 * 2 + second] = pair;
        else
          *reinterpret_cast<u32 *>(to + image(row + 8 * second, i, QUERIES) + 4 * t) = pair;
      }
    }
  }

  // Scores to weights, in place; older sums must be multiplied by `factor`. Row g sees the tile's slots from `low` to
  // `high`, less 2t, row g + 8 from low + rise to high + 8; all of them where `whole`.
  DEVICE void soften(const Cap &cap, bool whole, int low, int rise, int high, float (&factor)[2]) {
    float u[2] = {unit[0], unit[1]};
    if (cap.outer > 0) {
#pragma unroll
      for (int i = 0; i < TILES; i++) {
#pragma unroll
        for (int c = 0; c < 4; c++) x[i][c] = cap.outer * tanh_fast(x[i][c] * u[c / 2] * cap.inner);
      }
      u[0] = u[1] = 1;
    }
    if (!whole) {
#pragma unroll
      for (int i = 0; i < TILES; i++) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
          const int at = 8 * i + c % 2, second = c / 2;
          if (at < low + second * rise || at > high + 8 * second) x[i][c] = -infinity();
        }
      }
    }
    float most[4] = {x[0][0], x[0][1], x[0][2], x[0][3]};
#pragma unroll
    for (int i = 1; i < TILES; i++) {
#pragma unroll
      for (int c = 0; c < 4; c++) most[c] = fmaxf(most[c], x[i][c]);
    }
#pragma unroll
    for (int second = 0; second < 2; second++) {
      const float top = fmaxf(largest[second], quad_max(fmaxf(most[2 * second], most[2 * second + 1])) * u[second]);
      factor[second] = ptx::exp2(largest[second] - top);
      largest[second] = top;
      total[second] *= factor[second];
    }
#pragma unroll
    for (int i = 0; i < TILES; i++) {
#pragma unroll
      for (int c = 0; c < 4; c++) x[i][c] = ptx::exp2(fmaf(x[i][c], u[c / 2], -largest[c / 2]));
      total[0] += x[i][0] + x[i][1], total[1] += x[i][2] + x[i][3];
    }
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
    for (int i = 0; i < CHUNKS; i++)
      y[i][0] *= factor[0], y[i][1] *= factor[0], y[i][2] *= factor[1], y[i][3] *= factor[1];
  }

  // Rows to the output, `to` this thread's row g; four lanes exchange their pairs, so that each writes 16 bytes.
  DEVICE void store(u16 *to, i64 stride, int count, bool bf16, int t) {
#pragma unroll
    for (int second = 0; second < 2; second++) {
      const float sum = quad_sum(total[second]), inverse = sum > 0 ? 1.0f / sum : 0.0f;
#pragma unroll
      for (int i = 0; i < CHUNKS; i++) {
        const float a = y[i][2 * second] * inverse, b = y[i][2 * second + 1] * inverse;
        y[i][2 * second] = __uint_as_float(bf16 ? Number<BF16>::pack(a, b) : Number<FP16>::pack(a, b));
      }
#pragma unroll
      for (int i = 0; i < CHUNKS; i += 4) {
        u32 v[4];
#pragma unroll
        for (int j = 0; j < 4; j++) v[j] = i + j < CHUNKS ? __float_as_uint(y[i + j < CHUNKS ? i + j : i][2 * second]) : 0;
        swap(v[0], v[1], t & 1, 1), swap(v[2], v[3], t & 1, 1);
        swap(v[0], v[2], t & 2, 2), swap(v[1], v[3], t & 2, 2);
        if (8 * second < count && i + t < CHUNKS)
          *reinterpret_cast<uint4 *>(to + 8 * second * stride + 8 * (i + t)) = make_uint4(v[0], v[1], v[2], v[3]);
      }
    }
  }
  // Lanes `distance` apart change b of the lower one for a of the upper one.
  DEVICE static void swap(u32 &a, u32 &b, bool upper, int distance) {
    const u32 got = __shfl_xor_sync(WHOLE, upper ? a : b, distance);
    (upper ? a : b) = got;
  }
};

// Takes this warp's 16 query rows of an item to shared memory; zeros for those that do not exist.
DEVICE void fetch_queries(const Work &work, const Item &item, u32 to, int rows0, int lane) {
  const u8 *from = work.query + 2 * (item.sequence * work.q_batch + item.head * work.q_head + item.first_query * work.q_token);
#pragma unroll
  for (int i = 0; i < 16 * CHUNKS / 32; i++) {
    const int at = lane + 32 * i, row = rows0 + at / CHUNKS, chunk = at % CHUNKS;
    ptx::copy_async_16_or_zero(to + image(row, chunk, QUERIES), from + 2 * row * work.q_token + 16 * chunk,
                               row < item.here ? 16 : 0);
  }
  ptx::copy_async_commit();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    ENTRY(const u8 *query, const u8 *tiles, const int *lengths, const int *padding, u8 *out, TURN_PARAMETERS, i64 q_batch,
          i64 q_head, i64 q_token, int heads, int kv_heads, int table_width, int tokens, int window, int bf16, float scale,
          float softcap, int tiles_of_pair, int first_pair, int pairs, int section) {
  extern __shared__ __align__(1024) u8 shared[];
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const u32 base = ptx::shared_address(shared), barriers = base + BARRIERS_AT;
  const Work work{query, tiles, lengths, padding, q_batch, q_head, q_token, heads, kv_heads, table_width, tokens, window,
                  tiles_of_pair, first_pair, pairs, section};
  ptx::launch_dependents();
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) {
      ptx::barrier_init(barriers + 8 * i, 1);
      ptx::barrier_init(barriers + FREE + 8 * i, 4 * CONSUMERS);  // the users' warps
      ptx::barrier_init(barriers + V_BARRIERS + 8 * i, 1);
      ptx::barrier_init(barriers + V_BARRIERS + FREE + 8 * i, 4 * CONSUMERS);
    }
    ptx::barrier_init_fence();
  }
  if (group > 0) {
    make_matrix(shared + MATRIX_AT, TURN_ARGUMENTS, bf16, threadIdx.x - 128, 128 * CONSUMERS);
    ptx::fence_async_proxy();
  }
  __syncthreads();
  ptx::wait_for_previous_kernel();

  if (group == 0) {
    ptx::fewer_registers<FEWER>();
    if (warp < 2 && lane == 0) produce(work, base + (warp ? V_AT : K_AT), barriers + (warp ? V_BARRIERS : 0), warp);
    return;
  }
  ptx::more_registers<MORE>();
  const int consumer = group - 1, rows0 = 16 * (warp - 4);  // of this warp's 16 queries
  const Cap cap(softcap);
  Consumer c;
  c.queries = image_descriptor(base + 64 * consumer * BLOCK_ROW, QUERIES);
  c.keys = image_descriptor(base + K_AT, TOKENS);
  c.values = image_descriptor(base + V_AT, TOKENS);
  const u64 matrix = image_descriptor(base + MATRIX_AT, PIECE);
  const u32 v_barriers = barriers + V_BARRIERS;
  if (consumer == CONSUMERS - 1) ptx::barrier_pass(TURNS, 256);  // the first may go

  Item item;
  bool more = item.find(work, 0);
  if (more) fetch_queries(work, item, base, rows0, lane);
  int n = 0;  // tiles before
  for (int turn = 1; more; turn++) {
    ptx::copy_async_wait<0>();
    ptx::fence_async_proxy();
    ptx::barrier(OWN + consumer, 128);
    rotate<QUERIES>(c.y, c.queries, matrix, TURN_ARGUMENTS, bf16);
    if (!QUERIES_IN_REGISTERS) ptx::barrier(OWN + consumer, 128);  // all have read what is overwritten now
    c.put_queries(shared, rows0 + g, t, turn_norm, scale);
    if (!QUERIES_IN_REGISTERS) {
      ptx::fence_async_proxy();
      ptx::barrier(OWN + consumer, 128);
    }
    c.clear();

    const int slot = item.first_slot + rows0;  // of this warp's first row
    float factor[2];
    auto soft = [&](int i) {
      const int begin = (item.tile0 + i) * TOKENS, p = slot + g - begin;
      const int behind = window > 0 ? p - window + 1 : -1, first = item.padded - begin;
      const bool whole = begin + TOKENS - 1 <= slot && first <= 0 && (window <= 0 || begin > slot + 15 - window);
      const int low = max(behind, first), low8 = max(window > 0 ? behind + 8 : -1, first);
      c.soften(cap, whole, low - 2 * t, low8 - low, p - 2 * t, factor);
    };
    if (item.tiles > 0) {
      ptx::barrier_wait(barriers + 8 * (n & 1), n >> 1 & 1);
      ptx::barrier(TURNS + consumer, 256);
      c.start_scores(n & 1);
      ptx::barrier_pass(TURNS + (consumer + 1) % CONSUMERS, 256);
      wgmma::wait<0>();
      wgmma::hold(c.x);
      release(barriers + FREE + 8 * (n & 1), lane);
      soft(0);
      c.pack();
      if (item.tiles > 1) ptx::barrier_wait(barriers + 8 * (n + 1 & 1), n + 1 >> 1 & 1);
    }
    for (int i = 1; i < item.tiles; i++) {
      const int now = n + i, stage = now & 1, before = stage ^ 1;
      ptx::barrier(TURNS + consumer, 256);
      c.start_scores(stage);
      ptx::barrier_wait(v_barriers + 8 * before, now - 1 >> 1 & 1);
      c.start_values(before);
      ptx::barrier_pass(TURNS + (consumer + 1) % CONSUMERS, 256);
      wgmma::wait<1>();
      wgmma::hold(c.x);
      release(barriers + FREE + 8 * stage, lane);
      soft(i);
      wgmma::hold(c.x);
      if (i + 1 < item.tiles) ptx::barrier_wait(barriers + 8 * before, now + 1 >> 1 & 1);
      wgmma::wait<0>();
      wgmma::hold(c.y);
      release(v_barriers + FREE + 8 * before, lane);
      c.rescale(factor);
      c.pack();
    }
    n += item.tiles;

    const i64 row = (static_cast<i64>(item.sequence) * tokens + item.first_query + rows0 + g) * heads + item.head;
    const int count = item.here - rows0 - g;
    const bool any = item.tiles > 0;
    ptx::barrier(OWN + consumer, 128);  // all have read their queries
    more = item.find(work, turn);
    if (more) fetch_queries(work, item, base, rows0, lane);
    if (any) {
      const int stage = n - 1 & 1;
      ptx::barrier_wait(v_barriers + 8 * stage, n - 1 >> 1 & 1);
      c.start_values(stage);
      wgmma::wait<0>();
      wgmma::hold(c.y);
      release(v_barriers + FREE + 8 * stage, lane);
    }
    c.store(reinterpret_cast<u16 *>(out) + row * HEAD_DIM, static_cast<i64>(heads) * HEAD_DIM, count, bf16, t);
  }
}
