// The ring of stages of an integer product without a producer: each thread copies its share of a unit's bytes.
//
// As Loader of pipeline.cuh, whose Feed follows this one too; but activations are codes, scales come only where they
// change along K, and the last unit may reach past K: the activations there are zeros, so that what the stage holds of
// weights does not matter.
#pragma once
#include "scheduler.cuh"
#include "pipeline.cuh"

template <int... P> struct Loader<IntTile<P...>> {
  using T = IntTile<P...>;
  using S = Share<T>;  // its numbers alone: derived from it, some kernels come out in another order

  const Problem &p;
  const int thread;
  const u8 *x;
  u32 w[S::PER_ROW];
  int chunk0;
  int token_limit;  // tokens of this tile from this thread's first on

  DEVICE Loader(const Problem &problem, int thread_) : p(problem), thread(thread_) {}
  DEVICE int chunks() const { return p.n / CHUNK_N; }
  DEVICE u32 row_bytes() const { return chunks() * T::CHUNK_BYTES; }

  // Goes to a unit of a tile. The last tile may reach past N: its chunks are then the last one, read but not used.
  DEVICE void seek(const Segment &segment, int unit) {
    const Place place = Grid<T>::place(p, segment);
    seek_weights(place.column_tile * T::CHUNKS, unit);
    token_limit = p.m - place.token0 - thread / 8;
    x = p.x + static_cast<u64>(place.token0 + thread / 8) * p.ldx + unit * T::ROW + thread % 8 * 16;
  }

  DEVICE void seek_weights(int first_chunk, int unit) {
    chunk0 = first_chunk;
#pragma unroll
    for (int i = 0; i < S::PER_ROW; i++) {
      const int at = (i * T::SLOT_THREADS + thread % S::ROW_VECTORS) * 16;
      const int chunk = min(chunk0 + at / T::CHUNK_BYTES, chunks() - 1);
      w[i] = (unit * T::UNIT_TILES + thread / S::ROW_VECTORS) * row_bytes() + chunk * T::CHUNK_BYTES +
             at % T::CHUNK_BYTES;
    }
  }

  // Goes to this slot's next unit of the same tile.
  DEVICE void step() {
#pragma unroll
    for (int i = 0; i < S::PER_ROW; i++) w[i] += T::SLOTS * T::UNIT_TILES * row_bytes();
    x += T::SLOTS * T::ROW;
  }

  DEVICE void weights(u32 stage, int unit) const { copy_weights(stage, unit, p.weight, p.scales); }

  // Of the weight and scales at these addresses: an expert's, for moe.
  DEVICE void copy_weights(u32 stage, int unit, const u8 *words, const u8 *scale_rows) const {
    const int rows = p.k / 16 - unit * T::UNIT_TILES - thread / S::ROW_VECTORS;  // of the weight from this thread's on
#pragma unroll
    for (int i = 0; i < S::COPIES; i++)
      if (i / S::PER_ROW * S::ROWS_AT_ONCE < rows)
        ptx::copy_async_16(stage + T::W_AT + (i * T::SLOT_THREADS + thread) * 16,
                           words + (w[i % S::PER_ROW] + i / S::PER_ROW * S::ROWS_AT_ONCE * row_bytes()));
    if constexpr (T::GROUPED) copy_scales(stage, unit, scale_rows);
  }

  DEVICE void copy_scales(u32 stage, int unit, const u8 *scale_rows) const {
    const int first = (unit * T::UNIT_K) >> p.group_shift, last = (p.k - 1) >> p.group_shift;
    const int rows = max(1, T::UNIT_K >> p.group_shift);
    for (int at = thread * 16; at < rows * T::SCALE_ROW_BYTES; at += T::SLOT_THREADS * 16) {
      const int group = min(first + at / T::SCALE_ROW_BYTES, last), inside = at % T::SCALE_ROW_BYTES;
      const int chunk = min(chunk0 + inside / 128, chunks() - 1);
      ptx::copy_async_16(stage + T::SCALES_AT + at,
                         scale_rows + (static_cast<u64>(group) * chunks() + chunk) * 128 + inside % 128);
    }
  }

  // A token's codes of a unit: rows of 128 bytes, their 16-byte pieces XOR-ed with token % 8. Rows past M and bytes past
  // K are zeros, and are not read.
  DEVICE void activations(u32 stage, int unit) const {
    const u64 step_bytes = static_cast<u64>(S::TOKENS_AT_ONCE) * p.ldx;
    copy_activations(stage, unit, [&](int i) { return x + i * step_bytes; });
  }

  // `from(i)`: this thread's piece of its i-th token.
  template <class From> DEVICE void copy_activations(u32 stage, int unit, const From &from) const {
    const int left = (T::KIND == S4_W4 ? p.k / 2 : p.k) - unit * T::ROW - thread % 8 * 16;  // bytes from this piece on
#pragma unroll
    for (int half = 0; half < T::HALVES; half++)
#pragma unroll
      for (int i = 0; i < S::X_COPIES; i++) {
        const int token = i * S::TOKENS_AT_ONCE + thread / 8;
        if (T::TOKENS % S::TOKENS_AT_ONCE == 0 || token < T::TOKENS) {
          const bool there = i * S::TOKENS_AT_ONCE < token_limit && half * X_ROW_BYTES < left;
          ptx::copy_async_16_or_zero(stage + (half * T::TOKENS + token) * X_ROW_BYTES + ((thread % 8 ^ (token & 7)) * 16),
                                     there ? from(i) + half * X_ROW_BYTES : p.x, there ? 16 : 0);
        }
      }
  }
};
