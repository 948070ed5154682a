/* Parts that the kernels share: numbers, activations, sums of a block, and copies to shared memory, by the copy engine of
   sm_90 where there is one. With EMULATED, the operations of the hardware are defined elsewhere.

   Macros: those of the kernel that includes this file (WARPS, RING, ACT, Y_TYPE). */

typedef unsigned int u32;
typedef unsigned short u16;

#ifndef EMULATED
#define INLINE __device__ __forceinline__
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
#define SHARED_MEMORY extern __shared__ uint4 shared[]

INLINE float half_to_float(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
INLINE u16 float_to_half(float x) {
    u16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
INLINE u16 float_to_bf16(float x) {
    u16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

INLINE u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

#define BULK (__CUDA_ARCH__ >= 900) /* copies by the copy engine of sm_90 */

INLINE void init_barrier(unsigned long long *barrier) {
    if (BULK) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}
INLINE void fence_barriers() {
#if BULK
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
/* The barrier's phase ends after this number of bytes was copied. */
INLINE void expect_bytes(unsigned long long *barrier, u32 bytes, int lane) {
#if BULK
    if (lane == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
#endif
}
/* Start to copy `bytes`, a multiple of 16, to shared memory. */
INLINE void copy_async(char *target, const void *source, u32 bytes, int lane, unsigned long long *barrier) {
#if BULK
    if (lane == 0)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         shared_address(target)),
                     "l"(source), "r"(bytes), "r"(shared_address(barrier))
                     : "memory");
#else
    for (u32 i = lane * 16; i < bytes; i += 512)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(target + i)), "l"((const char *)source + i)
                     : "memory");
#endif
}
INLINE void commit_copies() {
    if (!BULK) asm volatile("cp.async.commit_group;" ::: "memory");
}
INLINE void wait_for_copies(unsigned long long *barrier, u32 parity) {
#if BULK
    asm volatile("{ .reg .pred done; wait: mbarrier.try_wait.parity.shared.b64 done, [%0], %1; @!done bra wait; }" ::"r"(
                     shared_address(barrier)),
                 "r"(parity)
                 : "memory");
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(RING - 1) : "memory");
    __syncwarp();
#endif
}
INLINE void start_next_kernel() { asm volatile("griddepcontrol.launch_dependents;"); }
INLINE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#endif

template <int TYPE> INLINE float load_number(const void *data, long long i) {
    if (TYPE == 0) return __uint_as_float((u32)((const u16 *)data)[i] << 16);
    if (TYPE == 1) return half_to_float(((const u16 *)data)[i]);
    return ((const float *)data)[i];
}
INLINE void store_y(void *y, long long i, float value) {
    if (Y_TYPE == 0) ((u16 *)y)[i] = float_to_bf16(value);
    if (Y_TYPE == 1) ((u16 *)y)[i] = float_to_half(value);
    if (Y_TYPE == 2) ((float *)y)[i] = value;
}
/* Eight consecutive numbers. */
template <int TYPE> INLINE void load_vector(const void *data, long long i, float *v) {
    const uint4 *vectors = (const uint4 *)((const char *)data + i * (TYPE == 2 ? 4 : 2));
    const uint4 a = vectors[0];
    const u32 words[4] = {a.x, a.y, a.z, a.w};
    if (TYPE == 2) {
        const uint4 b = vectors[1];
        v[0] = __uint_as_float(a.x), v[1] = __uint_as_float(a.y), v[2] = __uint_as_float(a.z), v[3] = __uint_as_float(a.w);
        v[4] = __uint_as_float(b.x), v[5] = __uint_as_float(b.y), v[6] = __uint_as_float(b.z), v[7] = __uint_as_float(b.w);
        return;
    }
    for (int j = 0; j < 4; j++) {
        v[2 * j] = TYPE == 0 ? __uint_as_float(words[j] << 16) : half_to_float((u16)words[j]);
        v[2 * j + 1] = TYPE == 0 ? __uint_as_float(words[j] & 0xffff0000u) : half_to_float((u16)(words[j] >> 16));
    }
}
INLINE u32 word_of(const uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

INLINE float apply_activation(float y) {
    switch (ACT) {
        case 1: return y / (1 + __expf(-y));
        case 2: return y / (1 + __expf(-1.5957691216057308f * (y + 0.044715f * y * y * y)));
        case 3: return 0.5f * y * (1 + erff(y * 0.7071067811865476f));
        case 4: return y > 0 || y != y ? y : 0;
        case 5: return y > 0 || y != y ? y * y : 0;
    }
    return y;
}

INLINE float block_sum(float value) {
    __shared__ float sums[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int i = 16; i; i /= 2) value += __shfl_xor_sync(~0u, value, i);
    __syncthreads();
    if (lane == 0) sums[warp] = value;
    __syncthreads();
    value = 0;
    for (int i = 0; i < WARPS; i++) value += sums[i];
    return value;
}
