// The grouped integer product's own parts: copies from an expert's weight and the tokens of its pairs, and the end of a
// segment.
#pragma once
#include "int_unit.cuh"
#include "moe_schedule.cuh"

template <int... P> struct Loader<Grouped<IntTile<P...>>> : Loader<IntTile<P...>> {
  using One = Loader<IntTile<P...>>;
  using T = IntTile<P...>;
  using G = Grouped<T>;
  const u8 *words, *scale_rows;  // of the expert
  u32 row[Share<T>::X_COPIES];   // of the codes, in pieces of 16 bytes; One::x is this thread's place in row 0
  int token0;                    // of the rows in `row`

  DEVICE Loader(const Problem &problem, int thread_) : One(problem, thread_), token0(-1) {}

  DEVICE void seek(const Segment &segment, int unit) {
    const MoeProblem &g = grouped(this->p);
    const Place place = Grid<G>::place(g, segment);
    if (place.token0 != token0) seek_rows(g, segment, place.token0);
    this->x = g.x + unit * T::ROW + this->thread % 8 * 16;
    const u64 expert = segment.expert;
    words = g.weight + expert * (g.k / 16) * this->row_bytes();
    scale_rows = g.scales + expert * scale_bytes(g);
    this->seek_weights(place.column_tile * T::CHUNKS, unit);
  }
  // Of one expert.
  DEVICE static u64 scale_bytes(const Problem &p) {
    const u64 groups = T::GROUPED ? ((p.k - 1) >> p.group_shift) + 1 : 1;
    return groups * p.n * 2;
  }

  DEVICE void seek_rows(const MoeProblem &g, const Segment &segment, int token) {
    token0 = token;
    this->token_limit = Grid<G>::token_end(g, segment) - token - this->thread / 8;
#pragma unroll
    for (int i = 0; i < Share<T>::X_COPIES; i++) {
      const int pair = i * Share<T>::TOKENS_AT_ONCE;
      row[i] = pair < this->token_limit ? g.rows[token + this->thread / 8 + pair] * (g.ldx / 16) : 0;
    }
  }

  DEVICE void weights(u32 stage, int unit) const { this->copy_weights(stage, unit, words, scale_rows); }
  DEVICE void activations(u32 stage, int unit) const {
    this->copy_activations(stage, unit, [&](int i) { return this->x + static_cast<u64>(row[i]) * 16; });
  }
};

// Values of a tile of one expert's pairs: a pair has its token's scale.
template <class T> struct PairScaling : Scaling<T> {
  using Scaling<T>::Scaling;

  DEVICE void operator()(Sums<T> &sums, const int *rows, int token_end) const {
#pragma unroll
    for (int tile = 0; tile < T::TOKEN_TILES; tile++) {
      float by[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int pair = this->token0 + 8 * tile + i;
        by[i] = pair < token_end ? __ldcg(this->p.act_scales + rows[pair]) * T::FOLD : 0.0f;
      }
#pragma unroll
      for (int pair = 0; pair < T::PAIRS; pair++) {
        float *const sum = &sums[pair / 2][tile][pair % 2 * 2];
        sum[0] = this->value(sum[0], by[0], pair), sum[1] = this->value(sum[1], by[1], pair);
      }
    }
  }
};

template <class T>
DEVICE void finish_int_moe(const IntProblem &one, const MoeProblem &p, Sums<T> &sums, const Segment &segment,
                           u32 shared_sums) {
  finish_segment<T>(p, sums, segment, shared_sums, [&](const Epilogue<T> &epilogue) {
    const Place place = Grid<T>::place(p, segment);
    const int column0 = place.column_tile * T::TILE_N + epilogue.warp * T::WARP_N;
    if (column0 >= p.n) return;  // the same for the whole warp
    IntProblem of_expert = one;
    of_expert.scales += static_cast<u64>(segment.expert) * Loader<T>::scale_bytes(p);
    const PairScaling<T> scaling(of_expert, column0, place.token0, epilogue.lane);
    scaling(sums, p.rows, Grid<T>::token_end(p, segment));
    epilogue.store(sums, segment);
  });
}
