// Sums of a tile that several blocks share: every block hands all of them over, and each makes a share of the results.
//
// With one collector (epilogue.cuh) the others are idle while it reads what they left, one block after another. Here each
// adds up 1/S of the tile, in the blocks' order, and stores it. A block collects for the last tile of its run only: the
// tail of another one is then handed over long before, and its owners are the blocks that end inside it. So a block never
// waits before it has handed everything over. Warps meet the same warps of the other blocks, and no others: an arrival
// count for each first block of a tile and warp, which the last owner to leave clears.
//
// Nothing is counted where places are marked (epilogue.cuh): an owner reads its share until all of it has come.
//
// An item is what a lane holds of a product: four sums (16 columns x 8 tokens a warp), or, where slots have shared out the
// pairs, two.
//
// Requires PLACES partial tiles and WARPS x SLOTS flags for each block (tiles.py, `fits_workspace`).
// Tested by tests/gpu/test_w4a16.py; places, owners and orders of events by tests/kernels/test_scatter.py.
#pragma once
#include "epilogue.cuh"

constexpr int PLACES = SHARING == 1 ? 2 : 1;  // partial tiles of a block: an even cut leaves it with one

// Who shares a segment's tile: blocks `from` to `to` - 1, of which those before `owners` collect.
template <class T> struct Sharers {
  u32 from, to, owners;
  bool from_began_before;  // another tile, so this one is its second

  DEVICE Sharers(const Problem &p, const Segment &s) {
    const u32 tile_begin = (s.tile - Grid<T>::whole(p)) * Grid<T>::units(p), tile_end = tile_begin + Grid<T>::units(p);
    from = blockIdx.x, to = from + 1;
    while (Grid<T>::begin(p, from) > tile_begin) from--;
    while (to < gridDim.x && Grid<T>::begin(p, to) < tile_end) to++;
    owners = Grid<T>::begin(p, to) > tile_end ? to - 1 : to;
    from_began_before = Grid<T>::begin(p, from) < tile_begin;
  }
};

template <class T> struct Scatter {
  static constexpr bool WHOLE = T::SLOTS == 1;  // items of four sums
  static constexpr int SLOT_PAIRS = T::PAIRS / T::SLOTS, LANE_BYTES = WHOLE ? 16 : 8, ITEM_BYTES = 32 * LANE_BYTES;
  static constexpr int ITEMS = (WHOLE ? T::WORDS : SLOT_PAIRS) * T::TOKEN_TILES;  // of a warp
  static constexpr int SUMS = WHOLE ? 4 : 2;                                      // of a lane's item
  static constexpr int ITEMS_AT_ONCE = !WHOLE || T::WARPS <= 8 ? 4 : T::WORDS == 1 ? 2 : 3, BLOCKS_AT_ONCE = 4;
  static_assert(T::PAIRS % T::SLOTS == 0, "slots own as many pairs");

  const Problem &p;
  const Epilogue<T> &epilogue;
  const Sharers<T> of;
  const int token0, token_end, column0;  // of this warp's results
  int first = 0, end = 0;                // items this block collects: none where its run goes on

  // All that takes a division is here, before anything is waited for.
  DEVICE Scatter(const Epilogue<T> &e, const Segment &s, const Place &place)
      : p(e.p), epilogue(e), of(e.p, s), token0(place.token0 + e.lane / 4), token_end(Grid<T>::token_end(e.p, s)),
        column0(place.column_tile * T::TILE_N + e.warp * T::WARP_N + (WHOLE ? 0 : 8 * e.slot * SLOT_PAIRS)) {
    const u32 me = blockIdx.x - of.from, owners = of.owners - of.from;
    if (me < owners) first = me * ITEMS / owners, end = (me + 1) * ITEMS / owners;
  }

  DEVICE u32 all_warp() const { return epilogue.slot * T::WARPS + epilogue.warp; }
  // This lane's first item of what a block has of the tile: a block shares its first tile and its last.
  DEVICE u8 *items(u32 block) const {
    const u32 second = block == of.from && of.from_began_before;
    const u64 at = static_cast<u64>(PLACES * block + second) * (T::PARTIAL_FLOATS * 4);
    return reinterpret_cast<u8 *>(p.partials) + at + (all_warp() * ITEMS * 32 + epilogue.lane) * LANE_BYTES;
  }
  DEVICE u32 *count() const { return p.flags + of.from * (T::WARPS * T::SLOTS) + all_warp(); }

  DEVICE void hand_over(const Sums<T> &sums) const {
    u8 *const to = items(blockIdx.x);
#pragma unroll
    for (int j = 0; j < T::WORDS; j++)
#pragma unroll
      for (int tile = 0; tile < T::TOKEN_TILES; tile++) {
        const float(&v)[4] = sums[j][tile];
        if constexpr (WHOLE) {
          ptx::store_16_relaxed(to + (j * T::TOKEN_TILES + tile) * ITEM_BYTES, v);
        } else {
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int pair = 2 * j + half;
            u8 *const at = to + (pair % SLOT_PAIRS * T::TOKEN_TILES + tile) * ITEM_BYTES;
            if (epilogue.owns(pair)) ptx::store_8_relaxed(at, v + 2 * half);
          }
        }
      }
    if constexpr (MARKED) return;
    __syncwarp();
    if (epilogue.lane == 0) ptx::add_release(count(), 1);
  }

  // Adds up and stores this block's share of the items.
  DEVICE void collect() const {
    if (blockIdx.x >= of.owners) return;
    if constexpr (!MARKED) wait_for_all();
#pragma unroll 1
    for (int item = first; item < end; item += ITEMS_AT_ONCE) some_items(item);
    if constexpr (!MARKED) leave();
  }

  // Arrivals are in the low half of a count, owners that have left in the high half.
  DEVICE void wait_for_all() const {
    if (epilogue.lane == 0)
      while ((ptx::load_acquire(count()) & 0xFFFF) != of.to - of.from) {
      }
    __syncwarp();
  }
  DEVICE void leave() const {
    __syncwarp();
    if (epilogue.lane == 0 && ptx::fetch_add(count(), 1 << 16) >> 16 == of.owners - of.from - 1) *count() = 0;
  }

  DEVICE void some_items(int item) const {
    float sum[ITEMS_AT_ONCE][SUMS];
#pragma unroll
    for (int q = 0; q < ITEMS_AT_ONCE; q++)
#pragma unroll
      for (int i = 0; i < SUMS; i++) sum[q][i] = 0.0f;
#pragma unroll 1
    for (u32 block = of.from; block < of.to; block += BLOCKS_AT_ONCE) add_blocks(sum, block, item);
#pragma unroll
    for (int q = 0; q < ITEMS_AT_ONCE; q++)
      if (item + q < end) store(item + q, sum[q]);
  }

  // All loads are on their way at once; absent ones are zeros.
  DEVICE void add_blocks(float (&sum)[ITEMS_AT_ONCE][SUMS], u32 block, int item) const {
    u32 v[BLOCKS_AT_ONCE][ITEMS_AT_ONCE][SUMS];
    for (;;) {
#pragma unroll
      for (int b = 0; b < BLOCKS_AT_ONCE; b++) {
        const u8 *const from = items(block + b) + item * ITEM_BYTES;
#pragma unroll
        for (int q = 0; q < ITEMS_AT_ONCE; q++) load(v[b][q], from + q * ITEM_BYTES, is(block + b, item + q));
      }
      if (!MARKED || !__any_sync(0xFFFFFFFFu, any_mark(v))) break;
      ptx::look_again();
    }
    if constexpr (MARKED) mark_again(block, item);
#pragma unroll
    for (int b = 0; b < BLOCKS_AT_ONCE; b++)
#pragma unroll
      for (int q = 0; q < ITEMS_AT_ONCE; q++)
#pragma unroll
        for (int i = 0; i < SUMS; i++) sum[q][i] += __uint_as_float(v[b][q][i]);
  }
  DEVICE static bool any_mark(const u32 (&v)[BLOCKS_AT_ONCE][ITEMS_AT_ONCE][SUMS]) {
    bool found = false;
#pragma unroll
    for (int b = 0; b < BLOCKS_AT_ONCE; b++)
#pragma unroll
      for (int q = 0; q < ITEMS_AT_ONCE; q++)
#pragma unroll
        for (int i = 0; i < SUMS; i++) found |= v[b][q][i] == MARK;
    return found;
  }
  DEVICE void mark_again(u32 block, int item) const {
    const float mark = __uint_as_float(MARK), marks[4] = {mark, mark, mark, mark};
#pragma unroll
    for (int b = 0; b < BLOCKS_AT_ONCE; b++)
#pragma unroll
      for (int q = 0; q < ITEMS_AT_ONCE; q++)
        if (is(block + b, item + q)) write(items(block + b) + (item + q) * ITEM_BYTES, marks);
  }
  DEVICE static void write(u8 *to, const float *sums) {
    if constexpr (SUMS == 4)
      ptx::store_16_relaxed(to, sums);
    else
      ptx::store_8_relaxed(to, sums);
  }
  DEVICE bool is(u32 block, int item) const { return block < of.to && item < end; }
  DEVICE static void load(u32 (&v)[SUMS], const u8 *from, bool there) {
    if constexpr (SUMS == 4)
      ptx::load_16_if(v, from, there);
    else
      ptx::load_8_if(v, from, there);
  }

  DEVICE void store(int item, const float (&sum)[SUMS]) const {
    const int row = item / T::TOKEN_TILES, token = token0 + item % T::TOKEN_TILES * 8;
#pragma unroll
    for (int half = 0; half < SUMS / 2; half++) {
      const int column = column0 + 8 * (WHOLE ? 2 * row + half : row);
      const float bias = p.bias == nullptr ? 0.0f : epilogue.bias_at(column + epilogue.lane / 4);
      const u32 v = ptx::transpose_matrix(Number<T::ACT>::pack(sum[2 * half] + bias, sum[2 * half + 1] + bias));
      if (token < token_end) {
        const u64 at = (static_cast<u64>(token) * p.ldy + column + 2 * (epilogue.lane % 4)) * 2;
        *reinterpret_cast<u32 *>(p.y + at) = v;
      }
    }
  }
};

// A segment's sums are complete in the slots: results of a tile that this block has whole, or its share of a shared one.
template <class T> DEVICE void share_segment(const Problem &p, Sums<T> &sums, const Segment &segment, u32 shared_sums) {
  const Epilogue<T> epilogue(p, shared_sums, ptx::opaque(threadIdx.x));
  epilogue.over_slots(sums);
  if (segment.begin == 0 && segment.end == Grid<T>::units(p)) {
    epilogue.store(sums, segment);
    return;
  }
  const Place place = Grid<T>::place(p, segment);
  if (place.column_tile * T::TILE_N + epilogue.warp * T::WARP_N >= p.n) return;
  const Scatter<T> scatter(epilogue, segment, place);
  scatter.hand_over(sums);
  scatter.collect();
}

// A segment's end, by the kernel's way.
template <class T> DEVICE void end_segment(const Problem &p, Sums<T> &sums, const Segment &segment, u32 shared_sums) {
  if constexpr (SHARING != 0 && SHARING != 4)
    share_segment<T>(p, sums, segment, shared_sums);
  else
    finish_segment<T>(p, sums, segment, shared_sums, [&](const Epilogue<T> &end) { end.store(sums, segment); });
}
