// The warp that fills the ring of an integer product (sm_90a); ring, cursor and maps are those of producer.cuh.
//
// The last unit may reach past K: weights and activations past it are the zeros that a box has outside its matrix.
#pragma once
#include "int_tile.cuh"
#include "producer.cuh"

template <class T> struct IntProducer : RingFiller<T, IntProducer<T>> {
  const IntProblem &p;
  const Maps &maps;
  const int lane;
  int chunk0 = 0, token0 = 0, tile = -1;

  DEVICE IntProducer(const IntProblem &problem, const Maps &maps_, int lane_)
      : p(problem), maps(maps_), lane(lane_) {}

  DEVICE void seek(int to_tile) {
    if (to_tile == tile) return;
    tile = to_tile;
    const Place place = Grid<T>::place(p, Segment{tile, 0, 0, 0});
    chunk0 = place.column_tile * T::CHUNKS;
    token0 = place.token0;
  }

  // Says how many bytes will come and asks for all but the activations.
  DEVICE void weights(u32 stage, u32 full, int unit) const {
    if (lane != 0) return;
    constexpr int GROUPS = T::GROUPED ? T::UNIT_GROUPS : 0;
    ptx::barrier_arrive_expect(full, T::X_BYTES + T::W_BYTES + GROUPS * T::SCALE_ROW_BYTES);
    ptx::copy_box(stage + T::W_AT, &maps.weight, 0, chunk0, unit * T::UNIT_TILES, full);
    if constexpr (T::GROUPED) ptx::copy_box(stage + T::SCALES_AT, &maps.scales, 0, chunk0, unit * GROUPS, full);
  }

  // The map counts pairs of bytes: 64 are a row of 128.
  DEVICE void activations(u32 stage, u32 full, int unit) const {
    if (lane < T::HALVES)
      ptx::copy_box(stage + lane * T::TOKENS * X_ROW_BYTES, &maps.x, unit * (T::ROW / 2) + lane * 64, token0, full);
  }
};
