/* Runs a CUDA kernel on a CPU: each thread is a context of its own, and operations of a warp or block wait for each other.

   A thread runs until it waits, so that the threads of a block are at different places, as on a GPU. Copies to shared memory
   take effect when their barrier is waited for, and overwrite their target with other bytes when they start. */

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <ucontext.h>
#include <vector>

#define EMULATED
#define INLINE inline
#define KERNEL(threads) extern "C" void
#define __shared__ static
#define SHARED_MEMORY uint4 *const shared = (uint4 *)emulator_shared

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct Index { int x, y; };
static Index threadIdx, blockIdx, gridDim;
static char *emulator_shared;

namespace emulator {
constexpr size_t STACK_BYTES = 128 * 1024;
struct Group { int size = 0, arrived = 0; unsigned generation = 0; };
struct Copy { char *target; const void *source; unsigned bytes; };
struct Barrier { unsigned expected = 0, phase = 0; std::vector<Copy> copies; };
struct Operand { int c[4]; unsigned a[4], b[2]; float f; };

static ucontext_t scheduler;
static std::vector<ucontext_t> threads;
static std::vector<char> done;
static std::vector<Group> warps;
static Group block;
static std::vector<Operand> operands;
static std::map<void *, Barrier> barriers;
static int current;
static bool progress;
static const char *failure;

static void yield() {
    swapcontext(&threads[current], &scheduler);
    threadIdx.x = current;
}
static void fail(const char *message) {
    if (!failure) failure = message;
    setcontext(&scheduler);
}
static void meet(Group &group) {
    const unsigned generation = group.generation;
    progress = true;
    if (++group.arrived == group.size) {
        group.arrived = 0;
        group.generation++;
        return;
    }
    while (group.generation == generation) yield();
}
static void meet_warp() { meet(warps[current / 32]); }
static Operand *lanes() { return operands.data() + current / 32 * 32; }
} // namespace emulator

inline void __syncthreads() { emulator::meet(emulator::block); }
inline void __syncwarp() { emulator::meet_warp(); }
inline float __shfl_xor_sync(unsigned, float value, int mask) {
    emulator::operands[emulator::current].f = value;
    emulator::meet_warp();
    const float result = emulator::lanes()[emulator::current % 32 ^ mask].f;
    emulator::meet_warp();
    return result;
}
inline int __shfl_xor_sync(unsigned, int value, int mask) {
    emulator::operands[emulator::current].c[0] = value;
    emulator::meet_warp();
    const int result = emulator::lanes()[emulator::current % 32 ^ mask].c[0];
    emulator::meet_warp();
    return result;
}
inline bool __all_sync(unsigned, bool value) {
    emulator::operands[emulator::current].c[0] = value;
    emulator::meet_warp();
    bool result = true;
    for (int i = 0; i < 32; i++) result = result && emulator::lanes()[i].c[0];
    emulator::meet_warp();
    return result;
}
inline unsigned __ballot_sync(unsigned, bool value) {
    emulator::operands[emulator::current].c[0] = value;
    emulator::meet_warp();
    unsigned result = 0;
    for (int i = 0; i < 32; i++) result |= (unsigned)emulator::lanes()[i].c[0] << i;
    emulator::meet_warp();
    return result;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
inline float __expf(float x) { return expf(x); }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline int __float2int_rn(float x) { return (int)nearbyintf(x); }
inline int min(int a, int b) { return a < b ? a : b; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t bytes = (uint64_t)b << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned nibble = selector >> (4 * i) & 15, byte = bytes >> (8 * (nibble & 7)) & 255;
        result |= (nibble & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * i);
    }
    return result;
}
inline float half_to_float(unsigned short x) { _Float16 y; memcpy(&y, &x, 2); return (float)y; }
inline unsigned short float_to_half(float x) { _Float16 y = (_Float16)x; unsigned short z; memcpy(&z, &y, 2); return z; }
inline unsigned short float_to_bf16(float x) {
    unsigned y = __float_as_uint(x);
    if (x != x) return 0x7fff;
    return (y + 0x7fff + (y >> 16 & 1)) >> 16;
}

/* Row `row` and column `k` of the operand A, column `n` of B; IS_SIGNED: of A. */
inline int operand_a(const unsigned *a, int byte, bool is_signed) {
    const unsigned value = a[byte / 4] >> (byte % 4 * 8) & 255;
    return is_signed ? (int)(signed char)value : (int)value;
}
inline void emulate_mma(int *c, const unsigned *a, unsigned b0, unsigned b1, bool is_first, int columns, bool is_signed) {
    using namespace emulator;
    Operand &own = operands[current];
    memcpy(own.a, a, columns / 2);
    own.b[0] = b0, own.b[1] = b1;
    meet_warp();
    const int g = current % 32 / 4, pair = current % 4;
    for (int i = 0; i < 4; i++) {
        int sum = is_first ? 0 : c[i];
        const int row_half = i / 2, n = 2 * pair + i % 2;
        for (int k = 0; k < columns; k++) {
            const Operand &from_a = lanes()[g * 4 + k % 16 / 4], &from_b = lanes()[n * 4 + k % 16 / 4];
            const unsigned a_word = from_a.a[row_half + k / 16 * 2], b_word = from_b.b[k / 16];
            sum += operand_a(&a_word, k % 4, is_signed) * (int)(signed char)(b_word >> (k % 4 * 8) & 255);
        }
        c[i] = sum;
    }
    meet_warp();
}
#define A_SIGNED (!(CODE == 0 && !SIGNED))
inline void mma(int *c, const unsigned *a, unsigned b0, unsigned b1, bool is_first) {
    emulate_mma(c, a, b0, b1, is_first, 32, A_SIGNED);
}
inline void mma_16(int *c, const unsigned *a, unsigned b) { emulate_mma(c, a, b, 0, true, 16, A_SIGNED); }

inline void init_barrier(unsigned long long *barrier) { emulator::barriers[barrier] = {}; }
inline void fence_barriers() {}
inline void expect_bytes(unsigned long long *barrier, unsigned bytes, int lane) {
    if (lane) return;
    auto &each = emulator::barriers[barrier];
    if (each.expected) emulator::fail("a stage is copied before the previous one was waited for");
    each.expected = bytes;
}
inline void copy_async(char *target, const void *source, unsigned bytes, int lane, unsigned long long *barrier) {
    if (lane) return;
    if ((uintptr_t)target % 16 || (uintptr_t)source % 16 || bytes % 16) emulator::fail("a copy is not aligned to 16 bytes");
    memset(target, 0xa5, bytes);
    emulator::barriers[barrier].copies.push_back({target, source, bytes});
}
inline void commit_copies() {}
inline void wait_for_copies(unsigned long long *barrier, unsigned parity) {
    auto &each = emulator::barriers[barrier];
    while (each.phase % 2 == parity) {
        unsigned bytes = 0;
        for (const auto &copy : each.copies) bytes += copy.bytes;
        if (each.expected && bytes > each.expected) emulator::fail("more bytes were copied than the barrier expects");
        if (each.expected && bytes == each.expected) {
            for (const auto &copy : each.copies) memcpy(copy.target, copy.source, copy.bytes);
            each.copies.clear();
            each.expected = 0;
            each.phase++;
            emulator::progress = true;
        } else {
            emulator::yield();
        }
    }
}
inline void start_next_kernel() {}
inline void wait_for_previous_kernel() {}

namespace emulator {
static void (*run_thread)();
static void entry() {
    threadIdx = {current, 0};
    run_thread();
    done[current] = 1;
    progress = true;
    setcontext(&scheduler);
}
/* Run all blocks, one after the other. Returns NULL, or what is wrong. */
static const char *run_blocks(int grid_x, int grid_y, int num_threads, size_t shared_bytes, void (*function)()) {
    run_thread = function;
    failure = nullptr;
    gridDim = {grid_x, grid_y};
    std::vector<char> stacks(num_threads * STACK_BYTES), memory(shared_bytes + 64);
    emulator_shared = memory.data() + (64 - (uintptr_t)memory.data() % 64) % 64;
    for (int index = 0; index < grid_x * grid_y && !failure; index++) {
        blockIdx = {index % grid_x, index / grid_x};
        memset(memory.data(), 0xa5, memory.size());
        threads.assign(num_threads, {});
        done.assign(num_threads, 0);
        warps.assign(num_threads / 32, Group{32});
        block = Group{num_threads};
        operands.assign(num_threads, {});
        barriers.clear();
        for (int i = 0; i < num_threads; i++) {
            getcontext(&threads[i]);
            threads[i].uc_stack.ss_sp = stacks.data() + i * STACK_BYTES;
            threads[i].uc_stack.ss_size = STACK_BYTES;
            threads[i].uc_link = nullptr;
            makecontext(&threads[i], entry, 0);
        }
        for (bool alive = true; alive && !failure;) {
            alive = progress = false;
            for (int i = 0; i < num_threads && !failure; i++) {
                if (done[i]) continue;
                alive = true;
                current = i;
                threadIdx.x = i;
                swapcontext(&scheduler, &threads[i]);
            }
            if (alive && !progress && !failure) failure = "the threads wait for each other";
        }
        for (const auto &[address, barrier] : barriers)
            if (barrier.expected && !failure) failure = "a copy was not waited for";
    }
    return failure;
}
} // namespace emulator
