// The ring of stages of one slot where a warp of its own fills it (sm_90a).
//
// A stage has two barriers: `full` ends its phase when the stage's bytes have arrived, `empty` when every warp of the
// slot has read them. The copy engine does the rest, so the warps that multiply spend nothing on addresses. Weights,
// scales and zeros can be asked for before the previous kernel has finished; activations cannot. All but zeros come by
// tensor map, activations in boxes of 64 rows of K by TOKENS with the 128-byte swizzle of wgmma.
#pragma once
#include "scheduler.cuh"

template <class T> struct Ring {
  const u32 stages, barriers;  // of this slot
  int at = 0;
  u32 phase = 0;

  DEVICE Ring(u32 base, int slot)
      : stages(base + slot * T::STAGES * T::STAGE_BYTES), barriers(base + T::BARRIERS_AT + slot * T::STAGES * 16) {}
  DEVICE u32 stage() const { return stages + at * T::STAGE_BYTES; }
  DEVICE u32 full() const { return barriers + at * 16; }
  DEVICE u32 empty() const { return barriers + at * 16 + 8; }
  DEVICE void advance() {
    if (++at == T::STAGES) at = 0, phase ^= 1;
  }
  DEVICE void init() const {
    for (int i = 0; i < T::STAGES; i++) {
      ptx::barrier_init(barriers + i * 16, 1);
      ptx::barrier_init(barriers + i * 16 + 8, T::WARPS);
    }
  }
};

// The units of one slot in the order it uses them: every SLOTS-th of each segment.
template <class T> struct Cursor {
  const Problem &p;
  Run<T> run;
  int tile, unit, end;
  const int slot;

  DEVICE Cursor(const Problem &problem, int slot_) : p(problem), run(problem), tile(0), unit(0), end(0), slot(slot_) {
    seek();
  }
  DEVICE bool valid() const { return unit < end; }
  DEVICE void advance() {
    unit += T::SLOTS;
    if (unit >= end) seek();
  }
  DEVICE void seek() {
    while (unit >= end && run.more()) {
      const Segment segment = run.take(p);
      tile = segment.tile, unit = segment.begin + slot, end = segment.end;
    }
  }
};

// The order of events of a warp that fills a ring; WARP has `seek`, `weights` and `activations`: a unit's bytes.
template <class T, class WARP> struct RingFiller {
  // Brings every unit of the slot.
  DEVICE void run(Ring<T> ring, int slot) {
    WARP &warp = static_cast<WARP &>(*this);
    Cursor<T> cursor(warp.p, slot);
    {
      Cursor<T> first = cursor;
      for (int i = 0; i < T::STAGES && first.valid(); i++) {
        warp.seek(first.tile);
        warp.weights(ring.stages + i * T::STAGE_BYTES, ring.barriers + i * 16, first.unit);
        first.advance();
      }
    }
    ptx::wait_for_previous_kernel();
    for (int i = 0; i < T::STAGES && cursor.valid(); i++) {
      warp.seek(cursor.tile);
      warp.activations(ring.stage(), ring.full(), cursor.unit);
      ring.advance();
      cursor.advance();
    }
    while (cursor.valid()) {
      warp.seek(cursor.tile);
      ptx::barrier_wait(ring.empty(), ring.phase ^ 1);
      warp.weights(ring.stage(), ring.full(), cursor.unit);
      warp.activations(ring.stage(), ring.full(), cursor.unit);
      ring.advance();
      cursor.advance();
    }
  }
};

// What the copy engine knows of the operands. As eight runs of 2 KB (`copy_bulk`) a unit's weights took so much of the
// shared memory's time that products, which read activations there, lost up to a fifth.
struct Maps {
  const TensorMap &x;       // boxes of 64 values x TOKENS
  const TensorMap &weight;  // boxes of a unit's tiles: (K / 16, N / 64) runs of CHUNK_BYTES
  const TensorMap &scales;  // boxes of a unit's groups: (groups, N / 64) runs of 128 bytes
};

// The warp that fills a ring: one lane asks for a unit's boxes, others for a group's row of zeros each. What depends on
// the tile is worked out when the tile changes, because the warp competes for issue slots with those that multiply. The
// last tile may reach past N: what lies there of weights and scales arrives as zeros and counts.
template <class T> struct Producer : RingFiller<T, Producer<T>> {
  static constexpr int ZEROS_LANE = 8;  // and the following: those before ask for boxes
  static_assert(ZEROS_LANE + T::CHECKS <= 32, "a lane for every run of bytes");

  const Problem &p;
  const Maps &maps;
  const int lane, groups;        // groups of a unit: at least one
  const u8 *zeros_from = nullptr;  // the tile's in row 0
  u32 zeros_bytes = 0;           // of a row
  int chunk0 = 0, token0 = 0, tile = -1;

  DEVICE Producer(const Problem &problem, const Maps &maps_, int lane_)
      : p(problem), maps(maps_), lane(lane_), groups(max(1, T::UNIT_K >> problem.group_shift)) {}

  DEVICE void seek(int to_tile) {
    if (to_tile == tile) return;
    tile = to_tile;
    const Place place = Grid<T>::place(p, Segment{tile, 0, 0, 0});
    chunk0 = place.column_tile * T::CHUNKS;
    token0 = place.token0;
    if constexpr (T::ZEROS) {
      zeros_from = p.zeros + chunk0 * 8 * T::BITS;
      zeros_bytes = min(T::CHUNKS, p.n / CHUNK_N - chunk0) * 8 * T::BITS;
    }
  }

  // Says how many bytes will come and asks for all but the activations.
  DEVICE void weights(u32 stage, u32 full, int unit) const {
    const int group0 = (unit * T::UNIT_K) >> p.group_shift;
    if (lane == 0) {
      ptx::barrier_arrive_expect(full, T::X_BYTES + T::W_BYTES + groups * (T::SCALE_ROW_BYTES + zeros_bytes));
      ptx::copy_box(stage + T::W_AT, &maps.weight, 0, chunk0, unit * T::UNIT_TILES, full);
      ptx::copy_box(stage + T::SCALES_AT, &maps.scales, 0, chunk0, group0, full);
    }
    if constexpr (T::ZEROS) {
      __syncwarp();
      const int group = lane - ZEROS_LANE;
      if (group >= 0 && group < groups) {
        const u64 row = static_cast<u64>(group0 + group) * (p.n / CHUNK_N * 8 * T::BITS);
        ptx::copy_bulk(stage + T::ZEROS_AT + group * T::ZERO_ROW_BYTES, zeros_from + row, zeros_bytes, full);
      }
    }
  }

  DEVICE void activations(u32 stage, u32 full, int unit) const {
    if (lane < T::HALVES)
      ptx::copy_box(stage + lane * T::TOKENS * X_ROW_BYTES, &maps.x, unit * T::UNIT_K + lane * 64, token0, full);
  }
};

// A block's registers are shared out anew: what the producers can spare goes to those that multiply. The sum may not
// pass what the block was given at its start, or the warps that ask for more wait for ever.
template <class T, int RESIDENT> DEVICE constexpr int multiplier_registers() {
  constexpr int WARPGROUPS = T::THREADS / 128, GIVEN = 65536 / (RESIDENT * T::BLOCK_THREADS) / 8 * 8;
  constexpr int SPARED = ((WARPGROUPS + 1) * GIVEN - T::PRODUCER_REGISTERS) / WARPGROUPS / 8 * 8;
  return SPARED < 240 ? SPARED : 240;
}

// The body of an entry: for each slot a WARP of its own fills the ring, the other warps `multiply`. A macro, because
// the compiler orders the same lines otherwise when they are those of an inlined function.
#define PRODUCE_AND_MULTIPLY(WARP, PROBLEM, MAPS, RESIDENT)                                                            \
  const int warp = threadIdx.x / 32;                                                                                   \
  const bool producer = warp >= T::SLOTS * T::WARPS;                                                                   \
  const int slot = producer ? warp - T::SLOTS * T::WARPS : warp / T::WARPS;                                            \
  if (producer && slot < T::SLOTS && threadIdx.x % 32 == 0) {                                                          \
    ptx::prefetch_map(&MAPS.x);                                                                                        \
    ptx::prefetch_map(&MAPS.weight);                                                                                   \
    Ring<T>(ptx::shared_address(shared), slot).init();                                                                 \
    ptx::barrier_init_fence();                                                                                         \
  }                                                                                                                    \
  __syncthreads();                                                                                                     \
  ptx::launch_dependents();                                                                                            \
  if (producer) {                                                                                                      \
    ptx::fewer_registers<T::PRODUCER_REGISTERS>();                                                                       \
    if (slot < T::SLOTS)                                                                                               \
      WARP(PROBLEM, MAPS, static_cast<int>(threadIdx.x % 32)).run(Ring<T>(ptx::shared_address(shared), slot), slot);   \
  } else {                                                                                                             \
    ptx::more_registers<multiplier_registers<T, RESIDENT>()>();                                                        \
    multiply(PROBLEM, slot);                                                                                           \
  }
