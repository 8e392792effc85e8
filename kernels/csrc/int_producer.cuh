// The warp that fills the ring of an integer product (sm_90a); ring and cursor are those of producer.cuh.
//
// Each lane asks for one run of bytes of a unit: a row of tiles of the weight or a group's row of scales; lanes 0 and 1
// also for a box of activations. The last unit may reach past K: what lies there is not brought, and the activations
// that meet the stale words are the zeros that a box has outside its matrix.
#pragma once
#include "int_tile.cuh"
#include "producer.cuh"

template <class T> struct IntProducer : RingFiller<T, IntProducer<T>> {
  static constexpr int SCALES_LANE = T::UNIT_TILES;
  static_assert(SCALES_LANE + T::STEPS <= 32, "a lane for every run of bytes");

  const IntProblem &p;
  const TensorMap &map;
  const int lane;
  const bool weight;
  const u8 *from = nullptr;  // this lane's run in row 0 of its matrix
  u32 to, pitch, valid = 0;  // where in a stage; from row to row; chunks of the tile
  int token0 = 0, tile = -1;

  DEVICE IntProducer(const IntProblem &problem, const TensorMap &map_, int lane_)
      : p(problem), map(map_), lane(lane_), weight(lane_ < SCALES_LANE) {
    to = weight ? T::W_AT + lane * T::CHUNKS * T::CHUNK_BYTES : T::SCALES_AT + (lane - SCALES_LANE) * T::SCALE_ROW_BYTES;
    pitch = p.n / CHUNK_N * chunk_bytes();
  }
  DEVICE u32 chunk_bytes() const { return weight ? T::CHUNK_BYTES : 128; }

  DEVICE void seek(int to_tile) {
    if (to_tile == tile) return;
    tile = to_tile;
    const Place place = Grid<T>::place(p, Segment{tile, 0, 0, 0});
    const int chunk0 = place.column_tile * T::CHUNKS;
    valid = min(T::CHUNKS, p.n / CHUNK_N - chunk0);
    token0 = place.token0;
    from = (weight ? p.weight : p.scales) + static_cast<u64>(chunk0) * chunk_bytes();
  }

  // Says how many bytes will come and asks for all but the activations.
  DEVICE void weights(u32 stage, u32 full, int unit) const {
    const int rows = min(T::UNIT_TILES, p.k / 16 - unit * T::UNIT_TILES);
    const int group0 = (unit * T::UNIT_K) >> p.group_shift;
    const int groups = T::GROUPED ? ((unit * T::UNIT_K + rows * 16 - 1) >> p.group_shift) - group0 + 1 : 0;
    if (lane == 0) ptx::barrier_arrive_expect(full, valid * (rows * T::CHUNK_BYTES + groups * 128) + T::X_BYTES);
    __syncwarp();
    const int at = weight ? lane : lane - SCALES_LANE;
    if (at < (weight ? rows : groups)) {
      const int row = weight ? unit * T::UNIT_TILES + lane : group0 + at;
      ptx::copy_bulk(stage + to, from + static_cast<u64>(row) * pitch, valid * chunk_bytes(), full);
    }
  }

  // The map counts pairs of bytes: 64 are a row of 128.
  DEVICE void activations(u32 stage, u32 full, int unit) const {
    if (lane < T::HALVES)
      ptx::copy_box(stage + lane * T::TOKENS * X_ROW_BYTES, &map, unit * (T::ROW / 2) + lane * 64, token0, full);
  }
};
