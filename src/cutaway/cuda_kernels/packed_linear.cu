/* Products with packed weights for up to 64 rows of x, on tensor cores: y = act(norm(x)·Wᵀ + bias) + residual.

   Weights are read once, packed, and unpacked in registers. The layout in memory is that of the operand of the
   instruction mma.m16n8k16, so that a word of 32 bits holds the weights of one thread and needs no exchange between
   threads. W is divided into tiles of 16 rows, and their columns into chunks of 64, which are four steps of 16. In a step
   a lane has eight weights in four registers a0 … a3, two in each: those of the rows lane / 4 (a0, a2) and lane / 4 + 8
   (a1, a3), of the columns 4c, 4c + 1 (a0, a1) and 4c + 2, 4c + 3 (a2, a3) for c = lane % 4.

   bits 4: a word per step. Integer i of the low half is the first weight of a_i, integer i of the high half the second.
   bits 8: two words per step, for (a0, a1) and (a2, a3): bytes 0 and 2 are the first register, 1 and 3 the second.
   bits 6: four bits as above, and for each two steps a word with the two high bits.

   An integer q of 4 bits becomes the bf16 number 128 + q by one logical operation; 128 · Σx is subtracted from the sum,
   for which a product with ones computes Σx. An integer of 8 or 6 bits is 16 · high + low, in two products. Products of
   groups of weights with a common scale are summed in fp32 and multiplied by the scale. The columns of the other operand
   are rows of x; a row in fp32 takes three columns, the sum of three bf16 numbers.

   Macros: BITS; CODE (0: integers, 1: FP4, 2: NF4, 3: FP8); GROUP: weights per scale, 0 for one scale per row; OFFSET:
   whether groups have an offset; X_TYPE, Y_TYPE, PARAM_TYPE (0: bf16, 1: fp16, 2: fp32); ROWS: maximum number of rows of
   x; TILES: tiles of W per program; WARPS; RING: stages of a warp in shared memory; NORM (0: none, 1: RMSNorm, 2: LayerNorm), for one row; ACT; GATED; PDL. */

#include "device.cuh"

#define PARTS (X_TYPE + 1) /* bf16 numbers per number of x */
#define COLS ((ROWS * PARTS + 7) / 8)
#define STAGED (ROWS == 1) /* x is in shared memory */
#define IS_INTEGER (CODE == 0)
#define TWO_PLANES (IS_INTEGER && BITS > 4)
#define CHUNK 64
#define CHUNK_VECTORS (BITS == 8 ? 2 : 1) /* of 16 bytes per lane */
#define GROUPS_PER_CHUNK (GROUP == 0 || GROUP >= CHUNK ? 1 : CHUNK / GROUP)
#define STEPS_PER_GROUP (4 / GROUPS_PER_CHUNK)
#define USED(j) (ROWS * PARTS > 1 || (j) % 2 == 0) /* with one column of x, the second column of a lane is unused */

struct Weight {
    const uint4 *codes; /* (tiles, chunks, CHUNK_VECTORS, 32) */
    const uint2 *high;  /* (tiles, chunks, 32), for 6 bits */
    /* Two fp16 numbers, of rows r and r + 8: (tiles, chunks, 8, GROUPS_PER_CHUNK), or (tiles, groups, 8) if a group has more
       columns than a chunk. */
    const u32 *scales, *offsets;
    const void *bias;     /* (N,) or NULL */
    float zero;           /* the integer that stands for 0 */
    int n, k, chunks, groups;
};

struct Input {
    const void *x, *norm_weight, *norm_bias;
    float eps, norm_offset;
    int rows, y_rows, y_columns; /* y has y_rows · y_columns numbers per split, of which this launch computes a part */
};

/* Two bf16 numbers: `first` in the low half. */
INLINE u32 pack_bf16(float first, float second) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(second), "f"(first));
    return y;
}
INLINE float low_bf16(u32 x) { return __uint_as_float(x << 16); }
INLINE float high_bf16(u32 x) { return __uint_as_float(x & 0xffff0000u); }
INLINE u32 multiply_bf16(u32 x, u32 factors) {
    u32 y;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(factors), "r"(0x80008000u));
    return y;
}

/* Four consecutive numbers of x. */
INLINE void load_x(const void *x, long long i, float *v) {
    if (X_TYPE == 2) {
        const float4 a = *(const float4 *)((const float *)x + i);
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    } else {
        const uint2 a = *(const uint2 *)((const u16 *)x + i);
        if (X_TYPE == 0) {
            v[0] = low_bf16(a.x), v[1] = high_bf16(a.x), v[2] = low_bf16(a.y), v[3] = high_bf16(a.y);
        } else {
            v[0] = half_to_float((u16)a.x), v[1] = half_to_float((u16)(a.x >> 16));
            v[2] = half_to_float((u16)a.y), v[3] = half_to_float((u16)(a.y >> 16));
        }
    }
}

/* The next bf16 part of four numbers, which is subtracted from them. */
INLINE uint2 take_part(float *v) {
    const uint2 part = make_uint2(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]));
    v[0] -= low_bf16(part.x), v[1] -= high_bf16(part.x), v[2] -= low_bf16(part.y), v[3] -= high_bf16(part.y);
    return part;
}

/* c += a·b */
INLINE void mma(float *c, const u32 *a, const u32 *b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Two integers, which are the bits of the mask, as bf16 numbers 128 + integer: one operation, (x & mask) | 0x43004300. */
INLINE u32 biased(u32 x, u32 mask) {
    u32 y;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "r"(mask), "r"(0x43004300u));
    return y;
}
/* c = a·b */
INLINE void mma_first(float *c, const u32 *a, const u32 *b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
                 : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
}

#if GROUP == 0 || GROUP >= CHUNK
typedef u32 Scales;
#elif GROUP == CHUNK / 2
typedef uint2 Scales;
#else
typedef uint4 Scales;
#endif
INLINE u32 scale_of(const u32 &s, int) { return s; }
INLINE u32 scale_of(const uint2 &s, int i) { return i ? s.y : s.x; }
INLINE u32 scale_of(const uint4 &s, int i) { return i == 0 ? s.x : i == 1 ? s.y : i == 2 ? s.z : s.w; }

struct Codes { /* of one lane: a chunk of a tile */
    uint4 vectors[CHUNK_VECTORS];
    uint2 high;
    Scales scales, offsets;
};

#if CODE == 2
__device__ const float NF4_VALUES[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f, -0.18477343022823334f,
    -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
__shared__ u32 nf4_pairs[256]; /* bf16 numbers of the low and the high four bits of a byte */
#endif

/* Registers of a step. `high` are those of the high parts of integers. */
INLINE void unpack(const Codes &codes, int step, u32 *low, u32 *high) {
#if BITS == 8
    const uint4 v = codes.vectors[step / 2];
    const u32 words[2] = {word_of(v, step % 2 * 2), word_of(v, step % 2 * 2 + 1)};
    for (int i = 0; i < 4; i++) {
        const u32 w = words[i / 2] >> (i % 2 * 8);
        if (IS_INTEGER) {
            low[i] = biased(w, 0x000f000fu), high[i] = biased(w >> 4, 0x000f000fu);
        } else { /* the exponent of FP8 is at its place in bf16, but its bias differs by 120 */
            low[i] = multiply_bf16((w & 0x00800080u) << 8 | (w & 0x007f007fu) << 4, 0x7b807b80u);
        }
    }
#else
    const u32 word = word_of(codes.vectors[0], step);
    for (int i = 0; i < 4; i++) {
        const u32 w = word >> (4 * i);
        if (CODE == 0) low[i] = biased(w, 0x000f000fu);
        if (CODE == 1) low[i] = multiply_bf16((w & 0x00080008u) << 12 | (w & 0x00070007u) << 6, 0x7e807e80u);
#if CODE == 2
        low[i] = nf4_pairs[((w & 0x000f000fu) | (w & 0x000f000fu) >> 12) & 255u];
#endif
    }
#endif
    if (BITS == 6) {
        const u32 h = step / 2 ? codes.high.y : codes.high.x;
        for (int i = 0; i < 4; i++) high[i] = biased(h >> (2 * (i + 4 * (step % 2))), 0x00030003u);
    }
}

INLINE void fill_tables(int thread, int num_threads) {
#if CODE == 2
    for (int i = thread; i < 256; i += num_threads) nf4_pairs[i] = pack_bf16(NF4_VALUES[i & 15], NF4_VALUES[i >> 4]);
#endif
}

/* Bytes of the parts of a stage of a tile: STAGE chunks. */
#ifndef STAGE
#define STAGE 4
#endif
#define CODE_BYTES (CHUNK_VECTORS * 512) /* of a chunk */
#define HIGH_BYTES (BITS == 6 ? 256 : 0)
#define SCALE_BYTES (GROUP == 0 ? 0 : GROUP > CHUNK ? 32 * CHUNK / (GROUP ? GROUP : 1) : 32 * GROUPS_PER_CHUNK)
#define OFFSET_BYTES (OFFSET ? SCALE_BYTES : 0)
#define STAGE_BYTES (STAGE * (CODE_BYTES + HIGH_BYTES + SCALE_BYTES + OFFSET_BYTES))

/* Start to copy a stage of a tile, which begins with `chunk` and has up to STAGE chunks. */
INLINE void copy_stage(const Weight &w, int tile, int chunk, int count, char *target, int lane, unsigned long long *barrier) {
    const long long at = (long long)tile * w.chunks + chunk;
    copy_async(target, (const char *)w.codes + at * CODE_BYTES, count * CODE_BYTES, lane, barrier);
    target += STAGE * CODE_BYTES;
    if (HIGH_BYTES) copy_async(target, (const char *)w.high + at * HIGH_BYTES, count * HIGH_BYTES, lane, barrier);
    target += STAGE * HIGH_BYTES;
    if (SCALE_BYTES) copy_async(target, (const char *)w.scales + at * SCALE_BYTES, count * SCALE_BYTES, lane, barrier);
    target += STAGE * SCALE_BYTES;
    if (OFFSET_BYTES) copy_async(target, (const char *)w.offsets + at * SCALE_BYTES, count * SCALE_BYTES, lane, barrier);
}

/* Codes of a lane from the stage in memory; `chunk` is that of the stage. */
INLINE void load_codes(const char *codes, const char *high, const char *scales, const char *offsets, int chunk, int lane,
                       Codes &result) {
#pragma unroll
    for (int i = 0; i < CHUNK_VECTORS; i++) result.vectors[i] = ((const uint4 *)codes)[(chunk * CHUNK_VECTORS + i) * 32 + lane];
    if (BITS == 6) result.high = ((const uint2 *)high)[chunk * 32 + lane];
    const int group = (GROUP > CHUNK ? chunk * CHUNK / (GROUP ? GROUP : 1) : chunk) * 8 + lane / 4;
    if (GROUP) result.scales = ((const Scales *)scales)[group];
    if (OFFSET) result.offsets = ((const Scales *)offsets)[group];
}

/* Copy one row of x to shared memory, normalized, as bf16 parts: (PARTS, columns with padding). Returns the factor by which
   sums of products are multiplied: the root mean square of RMSNorm is known after all of x was read. */
INLINE float stage_x(const Input &in, int k, int padded, uint4 *target) {
    float mean = 0, factor = 1, sum = 0;
    for (int pass = 0; NORM == 2 && pass < 2; pass++) {
        float v[8];
        sum = 0;
        for (int i = threadIdx.x * 8; i < k; i += WARPS * 256) {
            load_vector<X_TYPE>(in.x, i, v);
            for (int j = 0; j < 8; j++) sum += pass ? (v[j] - mean) * (v[j] - mean) : v[j];
        }
        sum = block_sum(sum) / k;
        if (pass) factor = rsqrtf(sum + in.eps);
        else mean = sum;
    }
    for (int i = threadIdx.x * 8; i < padded; i += WARPS * 256) {
        if (NORM == 0 && X_TYPE == 0) {
            target[i / 8] = i < k ? *(const uint4 *)((const u16 *)in.x + i) : make_uint4(0, 0, 0, 0);
            continue;
        }
        float v[8] = {};
        if (i < k) load_vector<X_TYPE>(in.x, i, v);
        if (NORM && i < k) {
            float gain[8];
            load_vector<PARAM_TYPE>(in.norm_weight, i, gain);
            for (int j = 0; j < 8; j++) {
                if (NORM == 1) sum += v[j] * v[j];
                v[j] = (v[j] - mean) * factor * (gain[j] + in.norm_offset);
                if (NORM == 2 && in.norm_bias) v[j] += load_number<PARAM_TYPE>(in.norm_bias, i + j);
            }
        }
        for (int part = 0; part < PARTS; part++) {
            const uint2 low = take_part(v), high = take_part(v + 4);
            target[(part * padded + i) / 8] = make_uint4(low.x, low.y, high.x, high.y);
        }
    }
    if (NORM == 1) factor = rsqrtf(block_sum(sum) / k + in.eps);
    __syncthreads();
    return NORM == 1 ? factor : 1;
}

/* Grid: (programs of TILES tiles, splits of the columns). y: (splits, rows, N). With GATED, W has the rows of gate, then
   those of up, n is the number of each, and a program has a tile of both. */
KERNEL(WARPS * 32) packed_linear(const Weight w, const Input in, void *y, const void *residual) {
    SHARED_MEMORY;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = lane % 4;
    const int row_tiles = (w.n + 15) / 16;
    int tiles[TILES];
    for (int t = 0; t < TILES; t++) {
        const int tile = GATED ? blockIdx.x + t * row_tiles : blockIdx.x * TILES + t;
        tiles[t] = GATED || tile < row_tiles ? tile : row_tiles - 1;
    }
    /* The stages of this warp: those of the split are divided among the warps. */
    const int stages = (w.chunks + STAGE - 1) / STAGE, per_split = (stages + gridDim.y - 1) / gridDim.y;
    const int split_start = min(stages, per_split * (int)blockIdx.y), split_end = min(stages, split_start + per_split);
    const int per_warp = (split_end - split_start + WARPS - 1) / WARPS;
    const int start = min(split_end, split_start + warp * per_warp), end = min(split_end, start + per_warp);
    const int padded = w.chunks * CHUNK;
    char *const ring = (char *)shared + (STAGED ? PARTS * padded * 2 : 0) + warp * RING * TILES * STAGE_BYTES;
    __shared__ unsigned long long barriers[WARPS * RING];
    unsigned long long *const barrier = barriers + warp * RING;
    auto copy = [&](int stage) {
        const int slot = (stage - start) % RING, count = min(STAGE, w.chunks - stage * STAGE);
        if (stage < end) {
            expect_bytes(barrier + slot, TILES * count * (CODE_BYTES + HIGH_BYTES + SCALE_BYTES + OFFSET_BYTES), lane);
            for (int t = 0; t < TILES; t++)
                copy_stage(w, tiles[t], stage * STAGE, count, ring + (slot * TILES + t) * STAGE_BYTES, lane, barrier + slot);
        }
        commit_copies();
    };
    if (lane < RING) init_barrier(barrier + lane);
    fence_barriers();
    __syncwarp();
    for (int i = 0; i < RING; i++) copy(start + i);
    fill_tables(threadIdx.x, WARPS * 32);
#if PDL
    start_next_kernel();
    wait_for_previous_kernel();
#endif
    float norm_factor = 1;
    if (STAGED) norm_factor = stage_x(in, w.k, padded, shared);
    else if (CODE == 2) __syncthreads();

    /* Rows of x of this lane's columns. Columns that no row uses repeat others, and their sums are not used. */
    const char *x_rows[COLS];
    for (int col = 0; col < COLS; col++) {
        const int row = min((col * 8 + lane / 4) / PARTS, in.rows - 1);
        x_rows[col] = (const char *)in.x + ((long long)row * w.k + 4 * c) * (X_TYPE == 2 ? 4 : 2);
    }
    const uint2 *x_part = (const uint2 *)shared + (min(lane / 4, PARTS - 1) * padded + 4 * c) / 4;

    float total[TILES][COLS][4] = {}, low[TILES][COLS][4] = {}, high[TILES][COLS][4] = {}, sum_x[COLS][4] = {};
    const u32 ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
    const float factor = TWO_PLANES ? 16.0f : 0.0f, bias = (TWO_PLANES ? 2176.0f : 128.0f) + w.zero;
    for (int stage = start; stage < end; stage++) {
        const int slot = (stage - start) % RING;
        wait_for_copies(barrier + slot, (stage - start) / RING % 2);
        const char *const base = ring + slot * TILES * STAGE_BYTES;
#pragma unroll
        for (int d = 0; d < STAGE; d++) {
            const int chunk = stage * STAGE + d;
            if (chunk >= w.chunks) break;
            Codes codes[TILES];
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                const char *const part = base + t * STAGE_BYTES, *const high_part = part + STAGE * CODE_BYTES;
                const char *const scale_part = high_part + STAGE * HIGH_BYTES;
                load_codes(part, high_part, scale_part, scale_part + STAGE * SCALE_BYTES, d, lane, codes[t]);
            }
#pragma unroll
            for (int group = 0; group < GROUPS_PER_CHUNK; group++) {
#pragma unroll
                for (int i = 0; i < STEPS_PER_GROUP; i++) {
                    const int step = group * STEPS_PER_GROUP + i, k = chunk * CHUNK + step * 16;
                    const bool is_first = GROUP && i == 0;
                    u32 b[COLS][2];
#pragma unroll
                    for (int col = 0; col < COLS; col++) {
                        uint2 value = make_uint2(0, 0);
                        if (STAGED) {
                            value = x_part[k / 4];
                        } else if (k + 4 * c < w.k) {
                            if (PARTS == 1) {
                                value = *(const uint2 *)(x_rows[col] + k * 2);
                            } else {
                                float v[4];
                                load_x(x_rows[col], k, v);
                                value = take_part(v);
                                for (int part = 1; part < PARTS; part++) {
                                    const uint2 next = take_part(v);
                                    if ((col * 8 + lane / 4) % PARTS >= part) value = next;
                                }
                            }
                        }
                        b[col][0] = value.x, b[col][1] = value.y;
                        if (IS_INTEGER) is_first ? mma_first(sum_x[col], ones, b[col]) : mma(sum_x[col], ones, b[col]);
                    }
#pragma unroll
                    for (int t = 0; t < TILES; t++) {
                        u32 a_low[4], a_high[4];
                        unpack(codes[t], step, a_low, a_high);
#pragma unroll
                        for (int col = 0; col < COLS; col++) {
                            is_first ? mma_first(low[t][col], a_low, b[col]) : mma(low[t][col], a_low, b[col]);
                            if (TWO_PLANES)
                                is_first ? mma_first(high[t][col], a_high, b[col]) : mma(high[t][col], a_high, b[col]);
                        }
                    }
                }
                if (GROUP == 0) continue;
#pragma unroll
                for (int t = 0; t < TILES; t++) {
                    const u32 s = scale_of(codes[t].scales, group), o = scale_of(codes[t].offsets, group);
                    const float scales[2] = {half_to_float((u16)s), half_to_float((u16)(s >> 16))};
                    const float offsets[2] = {half_to_float((u16)o), half_to_float((u16)(o >> 16))};
#pragma unroll
                    for (int col = 0; col < COLS; col++)
#pragma unroll
                        for (int j = 0; j < 4; j++) {
                            if (!USED(j)) continue;
                            float sum = low[t][col][j];
                            if (TWO_PLANES) sum += factor * high[t][col][j];
                            if (IS_INTEGER) sum -= bias * sum_x[col][j % 2];
                            total[t][col][j] += scales[j / 2] * sum;
                            if (OFFSET) total[t][col][j] += offsets[j / 2] * sum_x[col][j % 2];
                        }
                }
            }
        }
        __syncwarp();
        copy(stage + RING);
    }
    if (GROUP == 0)
        for (int t = 0; t < TILES; t++) {
            const u32 s = w.scales[(long long)tiles[t] * 8 + lane / 4];
            for (int col = 0; col < COLS; col++)
                for (int j = 0; j < 4; j++) {
                    float sum = low[t][col][j] + factor * high[t][col][j];
                    if (IS_INTEGER) sum -= bias * sum_x[col][j % 2];
                    total[t][col][j] = half_to_float((u16)(j < 2 ? s : s >> 16)) * sum;
                }
        }

    /* Sums over the warps, then over the parts of a row of x. */
    float *sums = (float *)shared; /* (WARPS, TILES, 16, 8 · COLS) */
    __syncthreads();
    for (int t = 0; t < TILES; t++)
        for (int col = 0; col < COLS; col++)
            for (int j = 0; j < 4; j++)
                sums[((warp * TILES + t) * 16 + lane / 4 + j / 2 * 8) * 8 * COLS + col * 8 + 2 * c + j % 2] = total[t][col][j];
    __syncthreads();
    const int outputs = (GATED ? 1 : TILES) * 16;
    for (int i = threadIdx.x; i < outputs * in.rows; i += WARPS * 32) {
        const int t = i % outputs / 16, r = i % 16, row = i / outputs;
        const int n = (GATED ? (int)blockIdx.x : (int)blockIdx.x * TILES + t) * 16 + r;
        if (n >= w.n) continue;
        float results[GATED ? 2 : 1];
        for (int g = 0; g < (GATED ? 2 : 1); g++) {
            float sum = 0;
            for (int each = 0; each < WARPS; each++)
                for (int part = 0; part < PARTS; part++)
                    sum += sums[((each * TILES + (GATED ? g : t)) * 16 + r) * 8 * COLS + row * PARTS + part];
            sum *= norm_factor;
            if (w.bias && blockIdx.y == 0) sum += load_number<PARAM_TYPE>(w.bias, n + g * w.n);
            results[g] = sum;
        }
        float result = apply_activation(results[0]);
        if (GATED) result *= results[GATED];
        if (residual) result += load_number<X_TYPE>(residual, n);
        store_y(y, ((long long)blockIdx.y * in.y_rows + row) * in.y_columns + n, result);
    }
}

/* The number of a weight from its register, without scale. */
INLINE float value_of(u32 low, u32 high, int second, float zero) {
    const float a = second ? high_bf16(low) : low_bf16(low), b = second ? high_bf16(high) : high_bf16(high << 16);
    if (!IS_INTEGER) return a;
    return (TWO_PLANES ? a + 16 * b - 2176 : a - 128) - zero;
}

/* Dequantize rows. Grid: (chunks, rows / 16); 32 threads. `rows`: numbers of the rows, or NULL for first, first + 1, …
   y: (count, k). */
KERNEL(32) dequantize_rows(const Weight w, const long long *rows, int first, int count, void *y) {
    const int lane = threadIdx.x, c = lane % 4, chunk = blockIdx.x;
    fill_tables(lane, 32);
    __syncwarp();
    for (int half = 0; half < 2; half++) {
        const int i = blockIdx.y * 16 + half * 8 + lane / 4;
        if (i >= count) continue;
        const long long row = rows ? rows[i] : first + i;
        const int r = row % 16;
        Codes codes;
        const long long at = row / 16 * w.chunks;
        load_codes((const char *)w.codes + at * CODE_BYTES, (const char *)w.high + at * HIGH_BYTES,
                   (const char *)w.scales + at * SCALE_BYTES, (const char *)w.offsets + at * SCALE_BYTES, chunk, r % 8 * 4 + c, codes);
        if (GROUP == 0) codes.scales = ((const Scales *)w.scales)[row / 16 * 8 + r % 8];
        for (int step = 0; step < 4; step++) {
            u32 low[4], high[4] = {0, 0, 0, 0};
            unpack(codes, step, low, high);
            const int group = step / STEPS_PER_GROUP, k = chunk * CHUNK + step * 16 + 4 * c;
            if (k >= w.k) continue;
            const float scale = half_to_float((u16)(scale_of(codes.scales, group) >> (r / 8 * 16)));
            for (int j = 0; j < 4; j++) {
                const int a = r / 8 + j / 2 * 2;
                float value = value_of(low[a], high[a], j % 2, w.zero) * scale;
                if (OFFSET) value += half_to_float((u16)(scale_of(codes.offsets, group) >> (r / 8 * 16)));
                store_y(y, (long long)i * w.k + k + j, value);
            }
        }
    }
}
