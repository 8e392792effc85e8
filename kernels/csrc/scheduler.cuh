// Which block does what: whole tiles in turns, then equal runs of the rest.
//
// Tiles of EXCHANGE_UNITS > 0 (those of many tokens): while there are many more tiles than blocks, block b takes tiles b,
// b + grid, b + 2 grid, ... whole. At any time the blocks then work on neighbouring tiles and on the same rows of K, so
// that each byte comes from memory once and for all others from the L2. The last round, and the tiles that do not fill
// one, are cut. Bands of BAND token blocks, where there are bands, keep a round's tiles nearly square.
//
// What is cut, and all of other tiles: the tiles' units, laid end to end, in equal runs, one for each block. A run may
// begin inside a tile (the block then hands that tile's sum over) and may end inside one (the block then collects the
// rest from the blocks after it). Every block handles the tile it hands over first, so the block that waits is at the end
// of its work when the others are at the beginning of theirs. The cut depends on the shape and the grid only: results do
// not change from run to run.
//
// A block that waits needs the others on the card. The grid is no larger than what fits at once (tiles.py), so they are
// there, or come when an earlier kernel's blocks end. Nothing promises that under MPS, where a client may get fewer
// multiprocessors than it is told of and two clients may fill the card by halves ("Shared cards", docs/guides/run.md).
// tests/kernels/test_schedule.py has the same arithmetic in Python.
#pragma once
#include "tile.cuh"

struct Segment {
  int tile;        // index over token blocks and column tiles
  int begin, end;  // units of K
  int expert;      // whose tile it is: 0 where there is one weight
};

// Where a tile lies: its column tile and its first token.
struct Place {
  int column_tile, token0;
};

// The next piece of a run from `next` to `end`, counted over all tiles: of one tile, and no further than that.
DEVICE Segment cut(u32 &next, u32 end, u32 units, int expert) {
  Segment s;
  s.tile = static_cast<int>(next / units);
  s.begin = static_cast<int>(next % units);
  s.end = static_cast<int>(min(units, s.begin + (end - next)));
  s.expert = expert;
  next += static_cast<u32>(s.end - s.begin);
  return s;
}

// The shape as the scheduler sees it. Cheap to work out again, so nothing of it stays in a register.
template <class T> struct Grid {
  static constexpr bool IN_TURNS = T::EXCHANGE_UNITS > 0;

  DEVICE static int token_blocks(const Problem &p) { return (p.m + T::TOKENS - 1) / T::TOKENS; }
  DEVICE static int column_tiles(const Problem &p) { return (p.n + T::TILE_N - 1) / T::TILE_N; }
  DEVICE static int units(const Problem &p) { return (p.k + T::UNIT_K - 1) / T::UNIT_K; }
  DEVICE static u32 tiles(const Problem &p) { return column_tiles(p) * token_blocks(p); }
  DEVICE static Place place(const Problem &p, const Segment &s) {
    if constexpr (T::BAND > 0) {
      const int per_band = T::BAND * column_tiles(p), band = s.tile / per_band, at = s.tile - band * per_band;
      const int wide = min(T::BAND, token_blocks(p) - band * T::BAND);
      return {at / wide, (band * T::BAND + at % wide) * T::TOKENS};
    }
    return {s.tile / token_blocks(p), s.tile % token_blocks(p) * T::TOKENS};
  }
  // Where the tokens of the tile's weight end: inside the tile or past it.
  DEVICE static int token_end(const Problem &p, const Segment &) { return p.m; }
  // Tiles that blocks take whole: all where some blocks being idle in the last round costs less than the exchange.
  DEVICE static u32 whole(const Problem &p) {
    if constexpr (!IN_TURNS) return 0;
    const u32 rounds = tiles(p) / gridDim.x, more = tiles(p) % gridDim.x;
    if (more == 0 || (gridDim.x - more) * units(p) <= T::EXCHANGE_UNITS * gridDim.x) return tiles(p);
    return (rounds > 1 ? rounds - 1 : 0) * gridDim.x;
  }
  // The first unit of a block, counted over the tiles that are cut: the first blocks take one more where it does not divide.
  DEVICE static u32 begin(const Problem &p, u32 block) {
    const u32 total = (tiles(p) - whole(p)) * units(p), each = total / gridDim.x, more = total % gridDim.x;
    return block * each + min(block, more);
  }
};

// The first block after this one that has nothing of a tile which is cut.
template <class T> DEVICE u32 end_of_tile(const Problem &p, int tile) {
  const u32 end = (tile - Grid<T>::whole(p) + 1) * Grid<T>::units(p);
  u32 block = blockIdx.x + 1;
  while (block < gridDim.x && Grid<T>::begin(p, block) < end) block++;
  return block;
}

template <class T> struct Run {
  using G = Grid<T>;
  u32 turn, whole;  // the next whole tile, their number
  u32 next, end;    // units of this block's run

  DEVICE explicit Run(const Problem &p)
      : turn(blockIdx.x), whole(G::whole(p)), next(G::begin(p, blockIdx.x)), end(G::begin(p, blockIdx.x + 1)) {}
  DEVICE bool more() const { return (G::IN_TURNS && turn < whole) || next < end; }
  DEVICE Segment take(const Problem &p) {
    if (G::IN_TURNS && turn < whole) {
      const Segment s{static_cast<int>(turn), 0, G::units(p), 0};
      turn += gridDim.x;
      return s;
    }
    Segment s = cut(next, end, G::units(p), 0);
    s.tile += whole;
    return s;
  }
};
