// Which block does what: the tiles' units, laid end to end, are cut into equal runs, one for each block.
//
// A run may begin inside a tile (the block then hands that tile's sum over) and may end inside one (the block then
// collects the rest from the blocks after it). Every block handles the tile it hands over first, so the block that
// waits is at the end of its work when the others are at the beginning of theirs. The cut depends on the shape and
// the grid only: results do not change from run to run.
#pragma once
#include "tile.cuh"

struct Segment {
  int tile;        // index over token blocks and column tiles
  int begin, end;  // units of K
};

struct Run {
  u32 next, end;  // units, counted over all tiles
  int units;      // units of one tile: K / 64

  DEVICE Run(u32 block, u32 blocks, u32 total, int units_of_tile) : units(units_of_tile) {
    next = static_cast<u32>(static_cast<u64>(total) * block / blocks);
    end = static_cast<u32>(static_cast<u64>(total) * (block + 1) / blocks);
  }
  DEVICE bool more() const { return next < end; }
  DEVICE Segment take() {
    Segment s;
    s.tile = static_cast<int>(next / units);
    s.begin = static_cast<int>(next % units);
    const u32 left = end - next;
    s.end = static_cast<u32>(units - s.begin) < left ? units : s.begin + static_cast<int>(left);
    next += static_cast<u32>(s.end - s.begin);
    return s;
  }
};

// The first unit of block `block`: what another block's run begins with.
DEVICE u32 run_begin(u32 block, u32 blocks, u32 total) {
  return static_cast<u32>(static_cast<u64>(total) * block / blocks);
}
