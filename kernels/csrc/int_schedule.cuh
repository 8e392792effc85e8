// Which block does what in an integer product: whole tiles in turns, then an equal share of the rest.
//
// While there are many more tiles than blocks, block b takes tiles b, b + grid, b + 2 grid, ... whole. At any time
// the blocks then work on neighbouring tiles and on the same rows of K, so that each byte comes from memory once and
// for all others from the L2. The last round, and the tiles that do not fill one, are cut into equal runs of units as
// scheduler.cuh cuts everything: a run is longer than a tile, so no tile has more than three blocks. Where there are
// fewer tiles than blocks all of them are cut. Bands of BAND token blocks keep a round's tiles nearly square.
#pragma once
#include "int_tile.cuh"
#include "scheduler.cuh"

constexpr int BAND = 4;
constexpr int EXCHANGE = 7;  // units that handing sums over costs a block

template <int... P> struct Grid<IntTile<P...>> {
  using T = IntTile<P...>;
  DEVICE static int token_blocks(const Problem &p) { return (p.m + T::TOKENS - 1) / T::TOKENS; }
  DEVICE static int column_tiles(const Problem &p) { return (p.n + T::TILE_N - 1) / T::TILE_N; }
  DEVICE static int units(const Problem &p) { return (p.k + T::UNIT_K - 1) / T::UNIT_K; }
  DEVICE static Place place(const Problem &p, const Segment &s) {
    const int per_band = BAND * column_tiles(p), band = s.tile / per_band, at = s.tile - band * per_band;
    const int wide = min(BAND, token_blocks(p) - band * BAND);
    return {at / wide, (band * BAND + at % wide) * T::TOKENS};
  }
  DEVICE static int token_end(const Problem &p, const Segment &) { return p.m; }
  DEVICE static u32 tiles(const Problem &p) { return column_tiles(p) * token_blocks(p); }
  // Tiles that blocks take whole: all where some blocks being idle in the last round costs less than the exchange.
  DEVICE static u32 whole(const Problem &p) {
    const u32 rounds = tiles(p) / gridDim.x, more = tiles(p) % gridDim.x;
    if (more == 0 || (gridDim.x - more) * units(p) <= EXCHANGE * gridDim.x) return tiles(p);
    return (rounds > 1 ? rounds - 1 : 0) * gridDim.x;
  }
  // The first unit of a block, counted over the tiles that are cut.
  DEVICE static u32 begin(const Problem &p, u32 block) {
    const u32 total = (tiles(p) - whole(p)) * units(p), each = total / gridDim.x, more = total % gridDim.x;
    return block * each + min(block, more);
  }
  // The first block after this one that has nothing of a tile which is cut.
  DEVICE static u32 end_of_tile(const Problem &p, int tile) {
    const u32 end = (tile - whole(p) + 1) * units(p);
    u32 block = blockIdx.x + 1;
    while (block < gridDim.x && begin(p, block) < end) block++;
    return block;
  }
};

template <int... P> struct Run<IntTile<P...>> {
  using G = Grid<IntTile<P...>>;
  u32 tile, whole;  // the next whole tile, their number
  u32 next, end;    // units of this block's run

  DEVICE explicit Run(const Problem &p)
      : tile(blockIdx.x), whole(G::whole(p)), next(G::begin(p, blockIdx.x)), end(G::begin(p, blockIdx.x + 1)) {}
  DEVICE bool more() const { return tile < whole || next < end; }
  DEVICE Segment take(const Problem &p) {
    const int units = G::units(p);
    if (tile < whole) {
      const Segment s{static_cast<int>(tile), 0, units, 0};
      tile += gridDim.x;
      return s;
    }
    const int in_tile = static_cast<int>(next % units);
    const int last = min(units, in_tile + static_cast<int>(end - next));
    const Segment s{static_cast<int>(whole + next / units), in_tile, last, 0};
    next += last - in_tile;
    return s;
  }
};
