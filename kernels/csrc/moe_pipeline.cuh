// The ring's copies where the weight is the expert's and every pair names the row of x it reads.
#pragma once
#include "moe_schedule.cuh"
#include "pipeline.cuh"

template <class T> struct Loader<Grouped<T>> : Loader<T> {
  using One = Loader<T>;
  const u8 *words, *scale_rows, *zero_rows;  // of the expert
  u32 row[One::X_COPIES];                    // of x, in pieces of 16 bytes; One::x is this thread's place in row 0
  int token0;                                // of the rows in `row`

  DEVICE Loader(const Problem &problem, int thread_) : One(problem, thread_), token0(-1) {}

  DEVICE void seek(const Segment &segment, int unit) {
    const MoeProblem &g = grouped(this->p);
    const Place place = Grid<Grouped<T>>::place(g, segment);
    if (place.token0 != token0) seek_rows(g, segment, place.token0);
    this->x = g.x + (unit * T::UNIT_K + this->thread % 8 * 8) * 2;
    const u64 expert = segment.expert;
    const u32 groups = ((g.k - 1) >> g.group_shift) + 1, k_tiles = g.k / 16;
    words = g.weight + expert * k_tiles * this->row_bytes();
    scale_rows = g.scales + expert * groups * this->group_bytes();
    if constexpr (T::ZEROS) zero_rows = g.zeros + expert * groups * (this->group_bytes() / 16 * T::BITS);
    this->seek_weights(place.column_tile * T::CHUNKS, unit);
  }

  DEVICE void seek_rows(const MoeProblem &g, const Segment &segment, int token) {
    token0 = token;
    this->token_limit = Grid<Grouped<T>>::token_end(g, segment) - token - this->thread / 8;
#pragma unroll
    for (int i = 0; i < One::X_COPIES; i++) {
      const int pair = i * One::TOKENS_AT_ONCE;
      row[i] = pair < this->token_limit ? g.rows[token + this->thread / 8 + pair] * (g.ldx / 8) : 0;
    }
  }

  DEVICE void weights(u32 stage, int unit) const { this->copy_weights(stage, unit, words, scale_rows, zero_rows); }
  DEVICE void activations(u32 stage, int) const {
    this->copy_activations(stage, [&](int i) { return this->x + static_cast<u64>(row[i]) * 16; });
  }
};
