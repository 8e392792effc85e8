// Work items of kv_flash_sm90a.cu: QUERIES query tokens of one head each, and the tiles of K and V that they see.
//
// The longest first within a section of heads whose K and V stay in the L2; blocks take them in turn, there and back, so
// that each has about as many tiles. Tested by tests/kernels/test_kv_tiles.py.
#pragma once
#include "kv_image.cuh"

// Warpgroups of 64 queries. With heads of 64 the softmax takes as long as the products: three share them better (H200).
constexpr int CONSUMERS = HEAD_DIM == 64 ? 3 : 2;
constexpr int QUERIES = 64 * CONSUMERS, THREADS = 128 * (CONSUMERS + 1);

struct Work {
  const u8 *query, *tiles;
  const int *lengths, *padding;
  i64 q_batch, q_head, q_token;
  int heads, kv_heads, table_width, tokens, window, tiles_of_pair, first_pair, pairs, section;
};

// One item: its queries and the tiles they see.
struct Item {
  int head, sequence, pair, first_query, here, first_slot, padded, tile0, tiles;

  // The `turn`th of this block; false: there is none.
  DEVICE bool find(const Work &work, int turn) {
    const int group = work.heads / work.kv_heads, streams = work.pairs * group, section = work.section;
    const int blocks = (work.tokens + QUERIES - 1) / QUERIES, all = gridDim.x, mine = blockIdx.x;
    const int index = turn * all + (turn & 1 ? all - 1 - mine : mine);
    if (index >= streams * blocks) return false;
    const int part = index / (section * blocks), in_part = index - part * section * blocks;
    const int width = min(section, streams - part * section), back = in_part / width;
    const int stream = part * section + in_part - back * width;
    pair = stream / group;
    const int kv = work.first_pair + pair;
    sequence = kv / work.kv_heads;
    head = kv % work.kv_heads * group + stream % group;
    first_query = (blocks - 1 - back) * QUERIES;
    here = min(QUERIES, work.tokens - first_query);
    first_slot = min(work.lengths[sequence], work.table_width * PAGE) - work.tokens + first_query;
    padded = work.padding == nullptr ? 0 : max(0, work.padding[sequence]);
    const int from = max(padded, work.window > 0 ? first_slot - work.window + 1 : 0);
    tile0 = from / TOKENS;
    tiles = max(0, (first_slot + here + TOKENS - 1) / TOKENS - tile0);
    return true;
  }
};
