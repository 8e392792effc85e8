// One kernel and its launch on the machine of machine.h; compiled with the kernel's own defines and -DSOURCE.
#include "machine.h"

namespace machine {

constexpr u32 STACK_BYTES = 64 << 10, STACK_END = 1 << 10;  // the end is not to be reached

template <class... A, std::size_t... I> void call(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::decay_t<A> *>(arguments[I])...);
}
template <class... A> void call(void (*kernel)(A...), void **arguments) {
  call(kernel, arguments, std::index_sequence_for<A...>());
}

inline void **parameters;
inline void (*entry)(void **);
inline Block *resident = nullptr;  // whose declared arrays are in place

void body() {
  try {
    entry(parameters);
    wait_for_copies(0);
  } catch (const Failure &found) {
    failure = "block " + std::to_string(current->block->index.x) + ", thread " + std::to_string(current->thread) + ": " + found.text;
  }
  current->done = true, events++;
  swapcontext(&current->context, &scheduler);
}

void resume(Fiber &fiber) {
  const std::size_t size = __stop_declared - __start_declared;
  if (resident != fiber.block && size > 0) {
    if (resident != nullptr) std::memcpy(resident->declared.data(), __start_declared, size);
    std::memcpy(__start_declared, fiber.block->declared.data(), size);
  }
  resident = fiber.block, current = &fiber;
  threadIdx.x = fiber.thread, blockIdx = fiber.block->index;
  swapcontext(&scheduler, &fiber.context);
}

void prepare(Fiber &fiber, Block &block, u32 thread) {
  fiber.block = &block, fiber.thread = thread;
  fiber.stack.reset(new u8[STACK_BYTES]);
  std::memset(fiber.stack.get(), UNTOUCHED, STACK_END);
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get(), fiber.context.uc_stack.ss_size = STACK_BYTES;
  makecontext(&fiber.context, body, 0);
}

// One round: the first warp, by priority, of which some lane can go on. False: none can.
bool step(std::vector<Fiber> &fibers, const std::vector<u32> &warps, std::mt19937 &random) {
  u32 lanes[32];
  for (u32 i = 0; i < 32; i++) lanes[i] = i;
  std::shuffle(lanes, lanes + 32, random);
  bool ran = false;
  for (u32 warp : warps) {
    for (u32 lane : lanes) {
      Fiber &fiber = fibers[32 * warp + lane];
      if (fiber.done || (fiber.watched != nullptr && *fiber.watched == fiber.seen)) continue;
      resume(fiber), ran = true;
      if (!failure.empty()) return true;
    }
    if (ran) return true;
  }
  return false;
}

void run(u32 threads, u32 shared_bytes, u32 seed) {
  std::vector<Block> blocks(gridDim.x * gridDim.y);
  std::vector<Fiber> fibers(blocks.size() * threads);
  for (u32 b = 0; b < blocks.size(); b++) {
    blocks[b].index = {b % gridDim.x, b / gridDim.x, 0};
    blocks[b].memory.assign(shared_bytes + BEHIND, 0xFF);
    std::memset(blocks[b].memory.data() + shared_bytes, UNTOUCHED, BEHIND);
    blocks[b].declared.assign(__stop_declared - __start_declared, 0xFF);
    blocks[b].warps.resize(threads / 32);
  }
  for (u32 i = 0; i < fibers.size(); i++) prepare(fibers[i], blocks[i / threads], i % threads);
  std::mt19937 random(seed);
  std::vector<u32> warps(fibers.size() / 32);
  for (u32 i = 0; i < warps.size(); i++) warps[i] = i;
  std::shuffle(warps.begin(), warps.end(), random);
  resident = nullptr;
  while (failure.empty() && step(fibers, warps, random))
    if (random() % 32 == 0) std::shuffle(warps.begin(), warps.end(), random);
  const auto untouched = [](const u8 *from, u32 bytes) { return std::all_of(from, from + bytes, [](u8 v) { return v == UNTOUCHED; }); };
  for (const Fiber &fiber : fibers) {
    if (failure.empty() && !fiber.done) failure = "threads wait for what does not come";
    if (failure.empty() && !untouched(fiber.stack.get(), STACK_END)) failure = "a stack is too small";
  }
  for (const Block &block : blocks)
    if (failure.empty() && !untouched(block.memory.data() + shared_bytes, BEHIND)) failure = "a write behind shared memory";
}

}  // namespace machine

#include SOURCE  // the names of its arrays are macros from here on

// Runs the kernel; `arguments` are pointers to its parameters, `tensors` what its copies may read. Returns nullptr, or what
// went wrong.
extern "C" const char *emulate(u32 grid_x, u32 grid_y, u32 threads, u32 shared_bytes, int late, u32 seed, void **arguments,
                               const machine::Range *tensors, u32 tensor_count) {
  machine::failure.clear();
  machine::late = late != 0, machine::parameters = arguments;
  machine::tensors = tensors, machine::tensor_count = tensor_count;
  machine::entry = [](void **given) { machine::call(EMULATED, given); };
  gridDim = {grid_x, grid_y, 1}, blockDim = {threads, 1, 1};
  machine::run(threads, shared_bytes, seed);
  return machine::failure.empty() ? nullptr : machine::failure.c_str();
}
