// Which block does what where every expert has pairs of its own: worked out on the device, from where the pairs begin.
//
// A tile is one expert's: TILE_N of its columns, at most TOKENS of its pairs. Tiles lie end to end, expert after
// expert, and are cut into runs as scheduler.cuh cuts those of one weight; an expert without pairs has no tile. The
// grid is what the card holds at once, so blocks that would have too little are left without work.
// tests/kernels/test_moe_schedule.py has the same arithmetic in Python.
#pragma once
#include "epilogue.cuh"

// A tile of one expert's pairs.
template <class T_> struct Grouped : T_ {};

// The arguments of a grouped product: those of every expert's product, and who the pairs are.
struct MoeProblem : Problem {  // x (T, K), y and p.m: R pairs; weight, scales, zeros: expert after expert
  const int *rows;             // (R): the row of x that a pair reads
  const int *offsets;          // (E + 1): where an expert's pairs begin
  int experts;

  // Set by schedule(), the first two in shared memory.
  const u32 *first;   // (E + 1): the token blocks of all experts before
  const u32 *border;  // (E + 1): offsets
  u32 total, blocks;  // units of K of all tiles, blocks that share them
  u32 piece;          // units that are not cut: 1, or all of a tile
};

DEVICE const MoeProblem &grouped(const Problem &p) { return static_cast<const MoeProblem &>(p); }

template <class T> struct Grid<Grouped<T>> {
  DEVICE static u32 column_tiles(const Problem &p) { return (p.n + T::TILE_N - 1) / T::TILE_N; }
  DEVICE static int units(const Problem &p) { return Grid<T>::units(p); }
  DEVICE static u32 whole(const Problem &) { return 0; }  // grouped tiles are all cut, or in pieces of a tile

  // Tokens change faster than columns, so that blocks at work at the same time read the same weights.
  DEVICE static Place place(const Problem &p, const Segment &s) {
    const MoeProblem &g = grouped(p);
    const u32 first = g.first[s.expert], token_blocks = g.first[s.expert + 1] - first;
    const u32 local = s.tile - first * column_tiles(p);
    return {static_cast<int>(local / token_blocks), static_cast<int>(g.border[s.expert] + local % token_blocks * T::TOKENS)};
  }
  DEVICE static int token_end(const Problem &p, const Segment &s) { return grouped(p).border[s.expert + 1]; }

  // The first unit of a block; of one without work, the end of all.
  DEVICE static u32 begin(const Problem &p, u32 block) {
    const MoeProblem &g = grouped(p);
    if (block >= g.blocks) return g.total;
    const u32 pieces = g.total / g.piece, each = pieces / g.blocks, more = pieces % g.blocks;
    return (block * each + min(block, more)) * g.piece;
  }
};

template <class T> struct Run<Grouped<T>> {
  using G = Grid<Grouped<T>>;
  u32 next, end;
  int expert;  // of the tile before, or of the first one

  DEVICE explicit Run(const Problem &p) : next(G::begin(p, blockIdx.x)), end(G::begin(p, blockIdx.x + 1)), expert(0) {
    if (!more()) return;
    const MoeProblem &g = grouped(p);
    const u32 token_block = next / G::units(p) / G::column_tiles(p);
    int past = g.experts;  // first[expert] <= token_block < first[past]
    while (past - expert > 1) {
      const int middle = (expert + past) / 2;
      (g.first[middle] <= token_block ? expert : past) = middle;
    }
  }
  DEVICE bool more() const { return next < end; }
  DEVICE Segment take(const Problem &p) {
    const u32 units = G::units(p), tile = next / units, columns = G::column_tiles(p);
    while (tile >= grouped(p).first[expert + 1] * columns) expert++;
    return cut(next, end, units, expert);
  }
};

// Blocks that share the units: as many as cut every tile alike, where that is most of the card, else all; none without
// a unit for each slot. As kernels/tiles.py, `grid`, but a smaller part of the card will do: products are smaller here,
// so an exchange between blocks costs more of them.
template <class T> DEVICE u32 blocks_for(u32 tiles, u32 units) {
  const u32 room = gridDim.x, even = tiles == 0 ? 0 : room / tiles * tiles;
  const u32 wanted = even * 10 >= room * 7 ? even : room;
  return max(1u, min(wanted, tiles * units / T::SLOTS));
}

// Where whole tiles keep the blocks nearly as busy as cut ones, none is cut: nothing is exchanged.
DEVICE bool whole_tiles(u32 tiles) {
  const u32 room = gridDim.x, rounds = (tiles + room - 1) / room;
  return tiles >= room && rounds * room * 14 <= tiles * 15;
}

// The sum of a warp's values up to each lane's, its own included.
DEVICE u32 sum_up_to(u32 value, u32 lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const u32 other = __shfl_up_sync(0xFFFFFFFFu, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

// Fills what MoeProblem says; the whole block calls it. `table` holds 2 (E + 1) words and one for each warp.
template <class T> DEVICE void schedule(MoeProblem &p, u32 *table) {
  constexpr u32 WARPS = T::THREADS / 32;
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  u32 *first = table, *border = table + p.experts + 1, *sums = border + p.experts + 1;
  if (threadIdx.x == 0) first[0] = 0, border[0] = p.offsets[0];
  u32 before = 0;  // token blocks of the experts of earlier rounds
#pragma unroll 1
  for (int round = 0; round < p.experts; round += T::THREADS) {
    const int expert = round + threadIdx.x;
    int begin = 0, end = 0;
    if (expert < p.experts) begin = p.offsets[expert], end = p.offsets[expert + 1];
    const u32 inclusive = sum_up_to((max(end - begin, 0) + T::TOKENS - 1) / T::TOKENS, lane);
    if (lane == 31) sums[warp] = inclusive;
    __syncthreads();
    u32 start = before;
#pragma unroll
    for (u32 i = 0; i < WARPS; i++) {
      const u32 sum = sums[i];
      if (i < warp) start += sum;
      before += sum;
    }
    if (expert < p.experts) first[expert + 1] = start + inclusive, border[expert + 1] = end;
    __syncthreads();
  }
  p.first = first, p.border = border;
  const u32 tiles = before * Grid<Grouped<T>>::column_tiles(p), units = Grid<Grouped<T>>::units(p);
  p.total = tiles * units;
  p.blocks = blocks_for<T>(tiles, units);
  p.piece = whole_tiles(tiles) ? units : 1;
}

// Pairs past the last expert's belong to nobody: their rows are zeros.
DEVICE void clear_tail(const MoeProblem &p, u32 threads) {
  const u64 row_vectors = p.n / 8, begin = p.border[p.experts] * row_vectors, end = p.m * row_vectors;
  for (u64 at = begin + blockIdx.x * threads + threadIdx.x; at < end; at += gridDim.x * threads)
    reinterpret_cast<uint4 *>(p.y)[at] = make_uint4(0, 0, 0, 0);
}
