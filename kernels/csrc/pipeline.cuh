// The ring of stages of one slot: which bytes a unit needs, and the copies that bring them.
//
// Every thread of the slot copies its share of each unit's bytes; one named barrier a unit tells the slot that the
// bytes are there and that the stage used before is free. Weights, scales and zeros can be asked for before the
// previous kernel has finished; activations cannot.
#pragma once
#include "scheduler.cuh"

// One thread's share of the copies of a unit: how many, and where its words lie. What depends on the tile is worked out
// when the tile changes; from unit to unit only pointers move.
template <class T> struct Share {
  static constexpr int ROW_VECTORS = T::CHUNKS * T::CHUNK_BYTES / 16;  // 16-byte vectors of one k-tile
  static constexpr int COPIES = T::W_BYTES / 16 / T::SLOT_THREADS;
  static constexpr int PER_ROW = ROW_VECTORS > T::SLOT_THREADS ? ROW_VECTORS / T::SLOT_THREADS : 1;
  static constexpr int ROWS_AT_ONCE = ROW_VECTORS > T::SLOT_THREADS ? 1 : T::SLOT_THREADS / ROW_VECTORS;
  static constexpr int TOKENS_AT_ONCE = T::SLOT_THREADS / 8;  // a token's 128 bytes are eight pieces
  static constexpr int X_COPIES = (T::TOKENS + TOKENS_AT_ONCE - 1) / TOKENS_AT_ONCE;
  static_assert(T::W_BYTES % (16 * T::SLOT_THREADS) == 0, "every thread copies as many vectors of the weight");
  static_assert(ROW_VECTORS % T::SLOT_THREADS == 0 || T::SLOT_THREADS % ROW_VECTORS == 0, "rows in whole steps");

  const Problem &p;
  const int thread;
  const u8 *x;
  u32 w[PER_ROW];  // offsets: a weight has less than 4 GiB

  DEVICE Share(const Problem &problem, int thread_) : p(problem), thread(thread_) {}
  DEVICE int chunks() const { return p.n / CHUNK_N; }
  DEVICE u32 row_bytes() const { return chunks() * T::CHUNK_BYTES; }  // of the packed weight

  DEVICE void seek_words(int chunk0, int unit) {
#pragma unroll
    for (int i = 0; i < PER_ROW; i++) {
      const int at = (i * T::SLOT_THREADS + thread % ROW_VECTORS) * 16;
      const int chunk = min(chunk0 + at / T::CHUNK_BYTES, chunks() - 1);
      w[i] = (unit * T::UNIT_TILES + thread / ROW_VECTORS) * row_bytes() + chunk * T::CHUNK_BYTES + at % T::CHUNK_BYTES;
    }
  }
  DEVICE void step_words() {
#pragma unroll
    for (int i = 0; i < PER_ROW; i++) w[i] += T::SLOTS * T::UNIT_TILES * row_bytes();
  }
};

// That share with the scales, zeros and activations of W4A16.
template <class T> struct Loader : Share<T> {
  using Base = Share<T>;
  using Base::p, Base::thread, Base::x, Base::w, Base::chunks, Base::row_bytes;
  using Base::PER_ROW, Base::ROWS_AT_ONCE, Base::TOKENS_AT_ONCE, Base::X_COPIES;
  u32 scales, zeros;  // offsets
  int token_limit;    // tokens of this tile from this thread's first on

  DEVICE Loader(const Problem &problem, int thread_) : Share<T>(problem, thread_) {}
  DEVICE u32 group_bytes() const { return chunks() * 128; }  // of a row of scales

  // Goes to a unit of a tile. The last tile may reach past N: its chunks are then the last one, read but not used.
  DEVICE void seek(const Segment &segment, int unit) {
    const Place place = Grid<T>::place(p, segment);
    seek_weights(place.column_tile * T::CHUNKS, unit);
    token_limit = Grid<T>::token_end(p, segment) - place.token0 - thread / 8;
    x = p.x + (static_cast<u64>(place.token0 + thread / 8) * p.ldx + unit * T::UNIT_K + thread % 8 * 8) * 2;
  }

  DEVICE void seek_weights(int chunk0, int unit) {
    this->seek_words(chunk0, unit);
    const int scale_at = thread * 16 % T::SCALE_ROW_BYTES;
    scales = min(chunk0 + scale_at / 128, chunks() - 1) * 128 + scale_at % 128;
    const int zero_at = thread * 16 % T::ZERO_ROW_BYTES;
    zeros = min(chunk0 + zero_at / (8 * T::BITS), chunks() - 1) * (8 * T::BITS) + zero_at % (8 * T::BITS);
  }

  // Goes to this slot's next unit of the same tile.
  DEVICE void step() {
    this->step_words();
    x += T::SLOTS * T::UNIT_K * 2;
  }

  DEVICE void weights(u32 stage, int unit) const { copy_weights(stage, unit, p.weight, p.scales, p.zeros); }

  DEVICE void copy_weights(u32 stage, int unit, const u8 *words, const u8 *scale_rows, const u8 *zero_rows) const {
#pragma unroll
    for (int i = 0; i < Base::COPIES; i++)
      ptx::copy_async_16(stage + T::W_AT + (i * T::SLOT_THREADS + thread) * 16,
                         words + (w[i % PER_ROW] + i / PER_ROW * ROWS_AT_ONCE * row_bytes()));
    const int first = (unit * T::UNIT_K) >> p.group_shift, rows = max(1, T::UNIT_K >> p.group_shift);
    static_assert(T::CHECKS * T::SCALE_ROW_BYTES <= 16 * T::SLOT_THREADS, "one copy a thread");
    if (thread * 16 < rows * T::SCALE_ROW_BYTES) {
      const int group = first + thread * 16 / T::SCALE_ROW_BYTES;
      ptx::copy_async_16(stage + T::SCALES_AT + thread * 16, scale_rows + (scales + group * group_bytes()));
    }
    if constexpr (T::ZEROS) {
      if (thread * 16 < rows * T::ZERO_ROW_BYTES) {
        const int group = first + thread * 16 / T::ZERO_ROW_BYTES;
        ptx::copy_async_16(stage + T::ZEROS_AT + thread * 16,
                           zero_rows + (zeros + group * (group_bytes() / 16 * T::BITS)));
      }
    }
  }

  // Activations of a unit: for each 64 rows of K a row of 128 bytes a token, its eight 16-byte pieces XOR-ed with token % 8, so that
  // ldmatrix meets no bank twice and wgmma finds its 128-byte swizzle. Rows past M are zeros, and are not read.
  DEVICE void activations(u32 stage, int) const {
    const u64 step_bytes = static_cast<u64>(TOKENS_AT_ONCE) * 2 * p.ldx;
    copy_activations(stage, [&](int i) { return x + i * step_bytes; });
  }
  template <class F> DEVICE void copy_activations(u32 stage, const F &row) const {
#pragma unroll
    for (int half = 0; half < T::HALVES; half++)
#pragma unroll
      for (int i = 0; i < X_COPIES; i++) {
        const int token = i * TOKENS_AT_ONCE + thread / 8;
        if (T::TOKENS % TOKENS_AT_ONCE == 0 || token < T::TOKENS)
          ptx::copy_async_16_or_zero(
              stage + (half * T::TOKENS + token) * X_ROW_BYTES + ((thread % 8 ^ (token & 7)) * 16),
              row(i) + half * X_ROW_BYTES, i * TOKENS_AT_ONCE < token_limit ? 16 : 0);
      }
  }
};

// The units of one slot in the order it uses them, every SLOTS-th of each segment, and the loader that follows them.
template <class T> struct Feed {
  Run<T> run;
  Loader<T> loader;
  int unit, end;
  const int slot;

  DEVICE Feed(const Problem &p, int slot_, int thread) : run(p), loader(p, thread), unit(0), end(0), slot(slot_) {
    seek();
  }
  DEVICE bool valid() const { return unit < end; }
  DEVICE void advance() {
    unit += T::SLOTS;
    if (unit < end)
      loader.step();
    else
      seek();
  }
  DEVICE void seek() {
    while (unit >= end && run.more()) {
      const Segment segment = run.take(loader.p);
      unit = segment.begin + slot, end = segment.end;
      if (unit < end) loader.seek(segment, unit);
    }
  }

  // Asks for a unit, and goes on to the next.
  DEVICE void ask(u32 stage) {
    if (valid()) {
      loader.weights(stage, unit);
      loader.activations(stage, unit);
    }
    ptx::copy_async_commit();
    advance();
  }

  // Ask for the first AHEAD units and go on past them: a copy of the feed for weights, then the feed for the rest.
  DEVICE void ask_weights(u32 ring) {
#pragma unroll 1
    for (int i = 0; i < T::AHEAD; i++) {
      if (valid()) loader.weights(ring + i * T::STAGE_BYTES, unit);
      ptx::copy_async_commit();
      advance();
    }
  }
  DEVICE void ask_activations(u32 ring) {
#pragma unroll 1
    for (int i = 0; i < T::AHEAD; i++) {
      if (valid()) loader.activations(ring + i * T::STAGE_BYTES, unit);
      ptx::copy_async_commit();
      advance();
    }
  }
};

// The slot's threads meet: the bytes each waited for are there for all, and the stage used before is free.
template <class T> DEVICE void slot_meets(int slot) {
  if constexpr (T::WARPS == 1)
    __syncwarp();
  else if constexpr (T::SLOTS == 1)
    __syncthreads();
  else
    ptx::barrier(1 + slot, T::SLOT_THREADS);
}
