// One kernel and its launch on the machine of machine.h; compiled with the kernel's own defines and -DSOURCE.
#include "machine.h"

namespace machine {

constexpr u32 STACK_BYTES = 64 << 10;
constexpr u32 STILL = 200;  // rounds of all fibers without an event

template <class... A, std::size_t... I> void call(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::decay_t<A> *>(arguments[I])...);
}
template <class... A> void call(void (*kernel)(A...), void **arguments) {
  call(kernel, arguments, std::index_sequence_for<A...>());
}

inline void **given;
inline void (*kernel)(void **);

void body() {
  try {
    kernel(given);
    wait_for_copies(0);
  } catch (const Failure &found) {
    failure = "block " + std::to_string(current->block->index.x) + ", thread " + std::to_string(current->thread) + ": " + found.text;
  }
  current->done = true, events++;
  swapcontext(&current->context, &scheduler);
}

void resume(Fiber &fiber) {
  current = &fiber;
  threadIdx.x = fiber.thread, blockIdx = fiber.block->index;
  swapcontext(&scheduler, &fiber.context);
}

// Blocks from `first` on, `count` of them, at the same time.
void run(u32 first, u32 count, u32 threads, u32 shared_bytes, u32 seed) {
  std::vector<Block> blocks(count);
  std::vector<Fiber> fibers(count * threads);
  for (u32 b = 0; b < count; b++) {
    blocks[b].index = {(first + b) % gridDim.x, (first + b) / gridDim.x, 0};
    blocks[b].memory.assign(shared_bytes, 0xFF);
    blocks[b].warps.resize(threads / 32);
  }
  for (u32 i = 0; i < count * threads; i++) {
    Fiber &fiber = fibers[i];
    fiber.block = &blocks[i / threads], fiber.thread = i % threads;
    fiber.stack.reset(new u8[STACK_BYTES]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get(), fiber.context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&fiber.context, body, 0);
  }
  std::vector<u32> order(fibers.size());
  for (u32 i = 0; i < order.size(); i++) order[i] = i;
  std::mt19937 random(seed);
  u32 still = 0;
  for (bool left = true; left && failure.empty();) {
    left = false;
    const u64 before = events;
    std::shuffle(order.begin(), order.end(), random);
    for (u32 i : order)
      if (!fibers[i].done && failure.empty()) resume(fibers[i]), left |= !fibers[i].done;
    still = events == before ? still + 1 : 0;
    if (left && still > STILL) failure = "threads wait for what does not come";
  }
}

}  // namespace machine

#include SOURCE  // the names of its arrays are macros from here on

// Runs the kernel; `arguments` are pointers to its parameters. Returns nullptr, or what went wrong.
extern "C" const char *emulate(u32 grid_x, u32 grid_y, u32 threads, u32 shared_bytes, int late, u32 seed, void **arguments) {
  machine::failure.clear();
  machine::late = late != 0, machine::given = arguments;
  machine::kernel = [](void **given) { machine::call(EMULATED, given); };
  gridDim = {grid_x, grid_y, 1}, blockDim = {threads, 1, 1};
  const u32 blocks = grid_x * grid_y, at_once = EMULATED_ALONE ? 1 : blocks;
  for (u32 first = 0; first < blocks && machine::failure.empty(); first += at_once)
    machine::run(first, std::min(at_once, blocks - first), threads, shared_bytes, seed);
  return machine::failure.empty() ? nullptr : machine::failure.c_str();
}
