// CUDA's threads on a CPU: each is a fiber, which runs until it meets a barrier or an operation of its whole warp.
//
// Blocks of a grid run one after another. Within a block the schedule says whose turn it is; results must not depend on it. Shared memory is
// allocated anew for each block, exactly as large as the launch asked for, and is full of NaN.

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace shim {

struct Dim3 {
    unsigned x, y, z;
};

// Who goes on: see `next_fiber`.
enum Schedule { WARPS_AHEAD = 0, WARPS_AHEAD_BACKWARDS = 1, IN_TURN = 2, SHUFFLED = 3 };

enum class State { READY, AT_WARP, AT_BLOCK, DONE };

enum class Kind { NONE, SYNC, EXCHANGE, FROM_LANE, MULTIPLY, LOAD, LOAD_TRANSPOSED };

constexpr std::size_t STACK_BYTES = 128 * 1024;
constexpr std::size_t SLOT_BYTES = 64;

// A copy that was started and has not arrived.
struct PendingCopy {
    void* to;
    const void* from;
    bool any;
    unsigned group;
};

struct Warp;

struct Fiber {
    Dim3 thread;
    State state = State::READY;
    Warp* warp = nullptr;
    unsigned lane = 0;
    unsigned char* stack = nullptr;
    std::vector<PendingCopy> copies;
    unsigned groups_ended = 0;
#if defined(__x86_64__)
    void* stack_pointer = nullptr;
#else
    ucontext_t context;
#endif
    void* fake_stack = nullptr;
};

struct Warp {
    std::vector<Fiber*> lanes;
    // Two sets in turn: a lane can be one operation ahead of those that still read the one before.
    unsigned char in[2][32][SLOT_BYTES], out[2][32][SLOT_BYTES];
    unsigned arrived = 0, turn = 0, ready = 0;
    Kind kind = Kind::NONE;
};

inline void set_state(Fiber* fiber, State state) {
    fiber->warp->ready += (state == State::READY) - (fiber->state == State::READY);
    fiber->state = state;
}

[[noreturn]] inline void fault(const char* what);

struct Block {
    Dim3 block_index, block_dim, grid_dim;
    unsigned char* shared = nullptr;
    const char* kernel = "";
    void (*body)(void*) = nullptr;
    void* argument = nullptr;
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<Warp> warps;
    std::vector<unsigned char*> stacks;
    Fiber* now = nullptr;
    int schedule = WARPS_AHEAD;
    std::uint32_t random = 1;
#if defined(__x86_64__)
    void* scheduler_stack_pointer = nullptr;
#else
    ucontext_t scheduler_context;
#endif
    void* scheduler_fake_stack = nullptr;
    const void* scheduler_bottom = nullptr;
    std::size_t scheduler_size = 0;
};

inline Block g;
inline std::mutex one_launch;

inline void fault(const char* what) {
    std::fprintf(stderr, "shim: %s: %s (block %u %u %u, thread %u)\n", g.kernel, what, g.block_index.x, g.block_index.y, g.block_index.z,
                 g.now ? g.now->thread.x : 0);
    std::fflush(stderr);
    std::abort();
}

#if defined(__x86_64__)
extern "C" void baton_shim_switch(void** save, void* load);
__asm__(
    ".text\n.hidden baton_shim_switch\n.globl baton_shim_switch\n.type baton_shim_switch,@function\nbaton_shim_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n.size baton_shim_switch,.-baton_shim_switch\n");
#endif

inline void leaving_for([[maybe_unused]] void** fake_stack, [[maybe_unused]] const void* bottom, [[maybe_unused]] std::size_t size) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(fake_stack, bottom, size);
#endif
}

inline void arrived_from([[maybe_unused]] void* fake_stack, [[maybe_unused]] const void** bottom, [[maybe_unused]] std::size_t* size) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack, bottom, size);
#endif
}

inline void to_scheduler(bool for_good) {
    Fiber* fiber = g.now;
    leaving_for(for_good ? nullptr : &fiber->fake_stack, g.scheduler_bottom, g.scheduler_size);
#if defined(__x86_64__)
    baton_shim_switch(&fiber->stack_pointer, g.scheduler_stack_pointer);
#else
    swapcontext(&fiber->context, &g.scheduler_context);
#endif
    arrived_from(fiber->fake_stack, &g.scheduler_bottom, &g.scheduler_size);
}

inline void fiber_main() {
    arrived_from(nullptr, &g.scheduler_bottom, &g.scheduler_size);
    g.body(g.argument);
    if (!g.now->copies.empty()) fault("a thread ends with copies under way");
    set_state(g.now, State::DONE);
    to_scheduler(true);
    std::abort();
}

inline void to_fiber(Fiber* fiber) {
    g.now = fiber;
    leaving_for(&g.scheduler_fake_stack, fiber->stack, STACK_BYTES);
#if defined(__x86_64__)
    baton_shim_switch(&g.scheduler_stack_pointer, fiber->stack_pointer);
#else
    swapcontext(&g.scheduler_context, &fiber->context);
#endif
    arrived_from(g.scheduler_fake_stack, nullptr, nullptr);
}

inline void start(Fiber* fiber) {
#if defined(__SANITIZE_ADDRESS__)
    // The fiber before ended in the middle of its last frames.
    __asan_unpoison_memory_region(fiber->stack, STACK_BYTES);
#endif
#if defined(__x86_64__)
    // What `baton_shim_switch` pops: six registers and where it returns to; then the place of a return address, so that the stack is aligned as at a call.
    void** top = reinterpret_cast<void**>(fiber->stack + STACK_BYTES) - 8;
    std::memset(top, 0, 8 * sizeof(void*));
    top[6] = reinterpret_cast<void*>(&fiber_main);
    fiber->stack_pointer = top;
#else
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack;
    fiber->context.uc_stack.ss_size = STACK_BYTES;
    fiber->context.uc_link = nullptr;
    makecontext(&fiber->context, reinterpret_cast<void (*)()>(&fiber_main), 0);
#endif
}

// An operation that all lanes of a warp meet in. The last one to arrive does it for all of them.
template <class In, class Out, class Do>
Out with_warp(Kind kind, const In& in, const Do& act) {
    static_assert(sizeof(In) <= SLOT_BYTES && sizeof(Out) <= SLOT_BYTES);
    Fiber* fiber = g.now;
    Warp& warp = *fiber->warp;
    if (warp.arrived > 0 && warp.kind != kind) fault("lanes of a warp meet in different operations");
    warp.kind = kind;
    const unsigned turn = warp.turn;
    std::memcpy(warp.in[turn][fiber->lane], &in, sizeof(In));
    warp.arrived++;
    if (warp.arrived == warp.lanes.size()) {
        if (warp.lanes.size() != 32) fault("a warp of fewer than 32 lanes");
        act(warp.in[turn], warp.out[turn]);
        warp.arrived = 0;
        warp.turn = 1 - turn;
        for (Fiber* lane : warp.lanes) set_state(lane, State::READY);
        // Somebody else may go first.
        to_scheduler(false);
    } else {
        set_state(fiber, State::AT_WARP);
        to_scheduler(false);
    }
    Out out;
    std::memcpy(&out, warp.out[turn][fiber->lane], sizeof(Out));
    return out;
}

inline void wait_for_block() {
    set_state(g.now, State::AT_BLOCK);
    to_scheduler(false);
}

inline std::uint32_t draw() {
    g.random = g.random * 1664525u + 1013904223u;
    return g.random >> 8;
}

inline Fiber* ready_lane(Warp& warp) {
    if (warp.ready == 0) return nullptr;
    const std::size_t n = warp.lanes.size(), first = g.schedule == SHUFFLED ? draw() % n : 0;
    for (std::size_t i = 0; i < n; i++) {
        Fiber* lane = warp.lanes[g.schedule == WARPS_AHEAD_BACKWARDS ? n - 1 - i : (first + i) % n];
        if (lane->state == State::READY) return lane;
    }
    return nullptr;
}

// A warp runs on alone to the next barrier of the block (AHEAD: the first, or the last, that can), or each turn is another one's.
inline Fiber* next_fiber(std::size_t turn) {
    const std::size_t n = g.warps.size();
    const std::size_t first = g.schedule == IN_TURN ? turn : g.schedule == SHUFFLED ? draw() % n : 0;
    for (std::size_t i = 0; i < n; i++) {
        Fiber* lane = ready_lane(g.warps[g.schedule == WARPS_AHEAD_BACKWARDS ? n - 1 - i : (first + i) % n]);
        if (lane) return lane;
    }
    return nullptr;
}

// Lets everybody at the barrier go on; false if all have ended.
inline bool open_barrier() {
    std::size_t waiting = 0, done = 0;
    for (auto& fiber : g.fibers) {
        waiting += fiber->state == State::AT_BLOCK;
        done += fiber->state == State::DONE;
    }
    if (done == g.fibers.size()) return false;
    if (waiting + done < g.fibers.size()) fault("some lanes of a warp wait for others that never come");
    if (done > 0) fault("threads wait at a barrier that others have left by ending");
    for (auto& fiber : g.fibers) set_state(fiber.get(), State::READY);
    return true;
}

inline void prepare_fibers(unsigned num_threads) {
    while (g.stacks.size() < num_threads) {
        void* stack = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stack == MAP_FAILED) fault("no memory for stacks");
        g.stacks.push_back(static_cast<unsigned char*>(stack));
    }
    g.warps.clear();
    g.warps.resize((num_threads + 31) / 32);
    while (g.fibers.size() < num_threads) g.fibers.push_back(std::make_unique<Fiber>());
    g.fibers.resize(num_threads);
    for (unsigned i = 0; i < num_threads; i++) {
        Fiber& fiber = *g.fibers[i];
        fiber.thread = Dim3{i, 0, 0};
        fiber.state = State::DONE;
        fiber.warp = &g.warps[i / 32];
        set_state(&fiber, State::READY);
        fiber.lane = i % 32;
        fiber.stack = g.stacks[i];
        fiber.copies.clear();
        fiber.groups_ended = 0;
        fiber.fake_stack = nullptr;
        fiber.warp->lanes.push_back(&fiber);
        start(&fiber);
    }
}

inline void run_block(std::size_t shared_bytes) {
    prepare_fibers(g.block_dim.x);
    // Allocated exactly, so that an address sanitizer sees what goes beyond.
    void* shared = nullptr;
    if (posix_memalign(&shared, 128, shared_bytes ? shared_bytes : 1) != 0) fault("no memory for shared memory");
    g.shared = static_cast<unsigned char*>(shared);
    std::memset(g.shared, 0xff, shared_bytes);
    std::size_t turn = 0;
    do {
        while (Fiber* fiber = next_fiber(turn++)) to_fiber(fiber);
    } while (open_barrier());
    g.now = nullptr;
    std::free(g.shared);
    g.shared = nullptr;
}

inline void run_grid(Dim3 grid, Dim3 block, std::size_t shared_bytes, void (*body)(void*), void* argument) {
    g.grid_dim = grid;
    g.block_dim = block;
    g.body = body;
    g.argument = argument;
    if (block.y != 1 || block.z != 1 || block.x == 0 || block.x > 1024) fault("a block of threads that is not one-dimensional, 1 to 1024");
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535) fault("a grid outside CUDA's limits");
    if (shared_bytes > 232448) fault("more shared memory than any card has");
    const std::uint64_t total = static_cast<std::uint64_t>(grid.x) * grid.y * grid.z;
    for (std::uint64_t i = 0; i < total; i++) {
        const std::uint64_t n = g.schedule == WARPS_AHEAD_BACKWARDS ? total - 1 - i : i;
        g.block_index = Dim3{static_cast<unsigned>(n % grid.x), static_cast<unsigned>(n / grid.x % grid.y),
                             static_cast<unsigned>(n / grid.x / grid.y)};
        run_block(shared_bytes);
    }
}

}  // namespace shim
