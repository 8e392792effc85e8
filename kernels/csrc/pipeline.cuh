// The ring of stages of one slot: which bytes a unit needs, and the copies that bring them.
//
// Every thread of the slot copies its share of each unit's bytes; one named barrier a unit tells the slot that the
// bytes are there and that the stage used before is free. Weights, scales and zeros can be asked for before the
// previous kernel has finished; activations cannot.
#pragma once
#include "scheduler.cuh"

// The units of one slot in the order it uses them: every SLOTS-th of each segment.
template <class T> struct UnitCursor {
  Run run;
  Segment segment;
  int slot, unit;

  DEVICE UnitCursor(const Run &whole, int slot_) : run(whole), slot(slot_) {
    segment.tile = 0;
    segment.begin = segment.end = 0;
    unit = 0;
    skip_empty();
  }
  DEVICE bool valid() const { return unit < segment.end; }
  DEVICE void advance() {
    unit += T::SLOTS;
    skip_empty();
  }
  DEVICE void skip_empty() {
    while (unit >= segment.end && run.more()) {
      segment = run.take();
      unit = segment.begin + slot;
    }
  }
};

template <class T> struct Loader {
  const Problem &p;
  const int thread;      // within the slot
  const int chunks;      // of the whole matrix
  const int token_blocks;

  DEVICE Loader(const Problem &problem, int thread_, int token_blocks_)
      : p(problem), thread(thread_), chunks(problem.n / CHUNK_N), token_blocks(token_blocks_) {}

  // Weights, scales and zeros of a unit. The last tile may reach past N: its chunks are read again, not used.
  DEVICE void weights(u32 stage, int tile, int unit) const {
    constexpr int ROW_VECTORS = T::CHUNKS * T::CHUNK_BYTES / 16;
    const int chunk0 = tile / token_blocks * T::CHUNKS;
    const u64 row_bytes = static_cast<u64>(chunks) * T::CHUNK_BYTES;
#pragma unroll
    for (int i = 0; i < T::W_BYTES / 16 / T::SLOT_THREADS; i++) {
      const int vector = i * T::SLOT_THREADS + thread;
      const int row = vector / ROW_VECTORS, in_row = vector % ROW_VECTORS;
      const int chunk = min(chunk0 + in_row * 16 / T::CHUNK_BYTES, chunks - 1);
      const u64 from = (unit * UNIT_TILES + row) * row_bytes + static_cast<u64>(chunk) * T::CHUNK_BYTES +
                       in_row * 16 % T::CHUNK_BYTES;
      ptx::copy_async_16(stage + T::W_AT + vector * 16, p.weight + from);
    }
    const int first_group = (unit * UNIT_K) >> p.group_shift;
    const int rows = p.group_shift == 5 ? 2 : 1;
    rows_of<T::SCALE_ROW_BYTES, 128>(stage + T::SCALES_AT, p.scales, first_group, rows, chunk0);
    if constexpr (T::ZEROS) {
      rows_of<T::ZERO_ROW_BYTES, 8 * T::BITS>(stage + T::ZEROS_AT, p.zeros, first_group, rows, chunk0);
    }
  }

  // `rows` rows of a per-group array from `first` on, PER_CHUNK bytes for each chunk.
  template <int ROW_BYTES, int PER_CHUNK>
  DEVICE void rows_of(u32 to, const u8 *from, int first, int rows, int chunk0) const {
    constexpr int ROW_VECTORS = ROW_BYTES / 16;
    static_assert(2 * ROW_VECTORS <= T::SLOT_THREADS, "one copy a thread");
    if (thread < rows * ROW_VECTORS) {
      const int row = thread / ROW_VECTORS, in_row = thread % ROW_VECTORS;
      const int chunk = min(chunk0 + in_row * 16 / PER_CHUNK, chunks - 1);
      const u64 at = (static_cast<u64>(first + row) * chunks + chunk) * PER_CHUNK + in_row * 16 % PER_CHUNK;
      ptx::copy_async_16(to + thread * 16, from + at);
    }
  }

  // Activations of a unit: a row of 128 bytes a token, its eight 16-byte pieces XOR-ed with token % 8, so that
  // ldmatrix meets no bank twice and wgmma finds its 128-byte swizzle. Rows past M are zeros.
  DEVICE void activations(u32 stage, int tile, int unit) const {
    const int token0 = tile % token_blocks * T::TOKENS;
    constexpr int PIECES = T::TOKENS * 8;
#pragma unroll
    for (int i = 0; i < (PIECES + T::SLOT_THREADS - 1) / T::SLOT_THREADS; i++) {
      const int piece = i * T::SLOT_THREADS + thread;
      if (PIECES % T::SLOT_THREADS == 0 || piece < PIECES) {
        const int token = piece / 8, at = piece % 8;
        const bool inside = token0 + token < p.m;
        const u64 from = (static_cast<u64>(inside ? token0 + token : 0) * p.ldx + unit * UNIT_K + at * 8) * 2;
        ptx::copy_async_16_or_zero(stage + token * X_ROW_BYTES + ((at ^ (token & 7)) * 16), p.x + from,
                                   inside ? 16 : 0);
      }
    }
  }
};
