// Which block does what: the tiles' units, laid end to end, are cut into equal runs, one for each block.
//
// A run may begin inside a tile (the block then hands that tile's sum over) and may end inside one (the block then
// collects the rest from the blocks after it). Every block handles the tile it hands over first, so the block that
// waits is at the end of its work when the others are at the beginning of theirs. The cut depends on the shape and
// the grid only: results do not change from run to run.
//
// A block that waits needs the others on the card. The grid is no larger than what fits at once (tiles.py), so they are
// there, or come when an earlier kernel's blocks end. Nothing promises that under MPS, where a client may get fewer
// multiprocessors than it is told of and two clients may fill the card by halves ("Shared cards", docs/guides/run.md).
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
  DEVICE static int token_blocks(const Problem &p) { return (p.m + T::TOKENS - 1) / T::TOKENS; }
  DEVICE static int units(const Problem &p) { return p.k / T::UNIT_K; }
  DEVICE static Place place(const Problem &p, const Segment &s) {
    return {s.tile / token_blocks(p), s.tile % token_blocks(p) * T::TOKENS};
  }
  // Where the tokens of the tile's weight end: inside the tile or past it.
  DEVICE static int token_end(const Problem &p, const Segment &) { return p.m; }
  DEVICE static u32 total(const Problem &p) {
    const u32 column_tiles = (p.n + T::TILE_N - 1) / T::TILE_N;
    return column_tiles * token_blocks(p) * units(p);
  }
  // The first unit of a block, counted over all tiles: the first blocks take one more where it does not divide.
  DEVICE static u32 begin(const Problem &p, u32 block) {
    const u32 each = total(p) / gridDim.x, more = total(p) % gridDim.x;
    return block * each + min(block, more);
  }
};

template <class T> struct Run {
  u32 next, end;

  DEVICE explicit Run(const Problem &p) : next(Grid<T>::begin(p, blockIdx.x)), end(Grid<T>::begin(p, blockIdx.x + 1)) {}
  DEVICE bool more() const { return next < end; }
  DEVICE Segment take(const Problem &p) { return cut(next, end, Grid<T>::units(p), 0); }
};
