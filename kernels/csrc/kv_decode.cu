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
#include "kv_decode_attend.cuh"
#include "kv_decode_join.cuh"
#include "kv_decode_queries.cuh"

// Shared memory: the warps' rings, and behind them queries and R3's scratch; then the warps' results over the rings.
constexpr int QUERY_FLOATS = HEADS * PITCH + (Vector<HEAD_DIM>::POWER ? 0 : WARPS * HEAD_DIM);
constexpr int SHARED_NEEDED = WARPS * RING + 4 * QUERY_FLOATS;
static_assert(SHARED_NEEDED == SHARED_BYTES, "the launch gives what the kernel uses");
static_assert(WARPS * RESULT * 4 <= SHARED_NEEDED && 8 * MOST_SPLITS * HEADS <= WARPS * RING, "results fit");

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
    (which < HEADS ? largest : total)[from * HEADS + which % HEADS] =
        ptx::load_global_l2(part + from * RESULT + HEADS * PITCH + which);
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
