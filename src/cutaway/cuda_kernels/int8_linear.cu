/* Products with packed integer weights for up to 64 rows of x, on int8 tensor cores: y = act(norm(x)·Wᵀ + bias) + residual.

   x is quantized to integers of 16 bits (bf16, fp16) or 32 bits (fp32), with a power of two as scale per 256 columns of a
   row. An integer is 2 or 4 digits of 8 bits, and each digit is a column of the product, so that the error is that of 15 or
   31 bits although the products are of int8. Weights of 8 bits need no conversion, weights of 4 bits one or two operations
   per 4 weights.

   W is divided into tiles of 16 rows, and these into records of 128 columns: codes, high bits, scales and offsets. The
   columns of a record are two chunks of 64. In a chunk, a lane has the columns 16t + 4c … 16t + 4c + 3 for t = 0 … 3 and
   c = lane % 4, of the rows g and g + 8 for g = lane / 4: eight operands of four bytes, of which one instruction
   mma.m16n8k32 takes four: those of t = 2s (a0, a1) and t = 2s + 1 (a2, a3).

   Codes of 8 bits (2 chunks, 2, 32 lanes) of 16 bytes: vector s holds a0 … a3 of step s.
   Codes of 4 bits (2 chunks, 32 lanes) of 16 bytes. Word t: the low halves of its bytes are the operand of row g, the high
   halves that of row g + 8.
   Codes of 6 bits: four bits as above, and the high bits (2 chunks, 32 lanes) of 8 bytes: those of a_i of step s are the
   bits 2i, 2i + 1 of the bytes of word s.
   FP4: as 4 bits, but word t has the codes of row g in the low 16 bits, those of row g + 8 in the high 16 bits.
   Scales, offsets (8 g, groups of a record): two fp16 numbers, of rows g and g + 8.

   A program reads several units of TILES tiles, one after the other. Its warps divide the columns, and each keeps its part of
   x. Copies to shared memory run ahead, also over the end of a unit.

   Macros: BITS; CODE (0: integers, 1: FP4); SIGNED: integers are in two's complement; GROUP: weights per scale, 0 for one
   scale per row; OFFSET: whether groups have an offset; X_TYPE, Y_TYPE, PARAM_TYPE (0: bf16, 1: fp16, 2: fp32); ROWS:
   maximum number of rows of x; TILES; WARPS; STAGE: 1 or 2 records that are copied together; RING: stages of a warp in shared
   memory; PARTIAL: whether the last stage of a tile can have one record; FLUSH: units whose sums are kept until
   the warps meet; NORM (0: none, 1: RMSNorm, 2: LayerNorm), for one row; ACT; GATED; PDL.

   EXPERTS: matrices of experts, one after the other, of which a row of x uses those that it selected. A pair is a row and
   one of its experts. 1: first product, y is (pairs, N). 2: second product, whose input x is (pairs, K); the result is
   multiplied by the weight of the pair, and y is (experts of a row, rows, N). With one row, a program multiplies for one pair,
   otherwise for one expert and all pairs that selected it, ROWS at a time. */

#include "device.cuh"

#define CHUNK 64
#define RECORD_COLUMNS (2 * CHUNK)
#define BLOCK 2 /* records that have a scale of x; warps divide blocks */
#define BLOCK_COLUMNS (BLOCK * RECORD_COLUMNS)
#define DIGITS (X_TYPE == 2 ? 4 : 2)
#define PAIRS (DIGITS / 2) /* of digits, per row of x */
#define COLS ((ROWS * DIGITS + 7) / 8)
#define STAGED (ROWS == 1) /* x is quantized by the warp that reads it, in shared memory */
#define CODE_VECTORS (BITS == 8 ? 2 : 1) /* of 16 bytes per lane and chunk */
#define GROUPS (GROUP ? 128 / GROUP : 1) /* of a record */
#define GROUP_COLUMNS (128 / GROUPS)     /* of an integer sum */
#define HAS_SUMS (OFFSET || CODE == 1)
#define GROUPS_PER_BLOCK (BLOCK * GROUPS)
#define FP4_BIAS 64 /* is subtracted from twice the number, so that all bytes of the tables are negative */
/* The operands are integers times 16 (4 bits in the high half of a byte), 4 (6 bits) or 2 (FP4). */
#define UNIT (CODE == 1 ? 0.5f : BITS == 4 && SIGNED ? 0.0625f : BITS == 6 ? 0.25f : 1.0f)

struct Weight {
    const char *codes[2];     /* (tiles, records); with GATED those of gate and up */
    const u32 *row_scales[2]; /* (tiles, 8), without groups */
    const void *bias[2];      /* (N,) or NULL */
    int n, k, records;
};

struct Input {
    const void *x, *norm_weight, *norm_bias;
    /* With several rows: the digits (chunks, x_columns, 4) of 16 bytes, the scales (blocks, x_columns / 2), and the sums of
       two digits (records, x_columns / 2, GROUPS), as integers for FP4 and as fp32 for offsets. */
    const uint4 *digits;
    const float *x_scales;
    const u32 *x_sums;
    float eps, norm_offset;
    int rows, y_rows, y_columns; /* y has y_rows · y_columns numbers per split, of which this launch computes a part */
    int x_columns;               /* columns of digits, a multiple of 8 */
    const int *experts;          /* (rows, top_k): the selected experts */
    const float *pair_weights;   /* (rows, top_k) */
    int num_pairs, top_k;
    float limit, alpha; /* of the clamped SwiGLU */
};

#ifndef EMULATED
#if CODE == 0 && !SIGNED
#define A_TYPE "u8"
#else
#define A_TYPE "s8"
#endif
#define MMA_32 "mma.sync.aligned.m16n8k32.row.col.s32." A_TYPE ".s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
#define MMA_16 "mma.sync.aligned.m16n8k16.row.col.s32." A_TYPE ".s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "

/* c += a·b, or c = a·b */
INLINE void mma(int *c, const u32 *a, u32 b0, u32 b1, bool is_first) {
    if (is_first)
        asm volatile(MMA_32 "{%10,%10,%10,%10};"
                     : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(0));
    else
        asm volatile(MMA_32 "{%0,%1,%2,%3};"
                     : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
/* c = a·b with 16 columns */
INLINE void mma_16(int *c, const u32 *a, u32 b) {
    asm volatile(MMA_16 "{%7,%7,%7,%7};"
                 : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(b), "r"(0));
}
#endif

template <int COUNT> struct Words {
    u32 words[COUNT];
};
/* COUNT consecutive words, a power of two, in as few loads as possible. */
template <int COUNT> INLINE Words<COUNT> load_words(const u32 *source) {
    Words<COUNT> y;
    if (COUNT == 1) y.words[0] = source[0];
    if (COUNT == 2) {
        const uint2 v = *(const uint2 *)source;
        y.words[0] = v.x, y.words[COUNT - 1] = v.y;
    }
    for (int i = 0; i + 3 < COUNT; i += 4) {
        const uint4 v = ((const uint4 *)source)[i / 4];
        for (int j = 0; j < 4; j++) y.words[i + j] = word_of(v, j);
    }
    return y;
}

struct Codes { /* of one lane: a chunk of a tile */
    uint4 vectors[CODE_VECTORS];
    uint2 high;
};

/* Operands a0 … a3 of step s. */
INLINE void unpack(const Codes &codes, int s, u32 *a) {
    if (BITS == 8) {
        const uint4 v = codes.vectors[s * (CODE_VECTORS - 1)];
        a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
        return;
    }
    for (int i = 0; i < 2; i++) {
        const u32 w = word_of(codes.vectors[0], 2 * s + i);
        if (CODE == 1) {
            /* A selector of 4 bits takes a byte of a table, or with the high bit eight copies of the byte's sign, which are
               ones. One table has the positive numbers, the other one the negative ones, for the inverted high bit. */
            const u32 inverted = w ^ 0x88888888u;
            for (int half = 0; half < 2; half++)
                a[2 * i + half] = __byte_perm(0xc3c2c1c0u, 0xccc8c6c4u, w >> (16 * half)) &
                                  __byte_perm(0xbdbebfc0u, 0xb4b8babcu, inverted >> (16 * half));
        } else if (BITS == 6) {
            const u32 h = s ? codes.high.y : codes.high.x;
            a[2 * i] = (w << 2 & 0x3c3c3c3cu) | (h << (6 - 4 * i) & 0xc0c0c0c0u);
            a[2 * i + 1] = (w >> 2 & 0x3c3c3c3cu) | (h << (4 - 4 * i) & 0xc0c0c0c0u);
        } else if (SIGNED) {
            a[2 * i] = w << 4 & 0xf0f0f0f0u, a[2 * i + 1] = w & 0xf0f0f0f0u;
        } else {
            a[2 * i] = w & 0x0f0f0f0fu, a[2 * i + 1] = w >> 4 & 0x0f0f0f0fu;
        }
    }
}

/* Parts of a record, in bytes. */
#define HIGH_AT (2 * CODE_VECTORS * 512)
#define SCALES_AT (HIGH_AT + (BITS == 6 ? 512 : 0))
#define SCALE_BYTES (GROUP ? 32 * GROUPS : 0)
#define OFFSETS_AT (SCALES_AT + SCALE_BYTES)
#define RECORD_BYTES (OFFSETS_AT + (OFFSET ? SCALE_BYTES : 0))
#define STAGE_BYTES (STAGE * RECORD_BYTES)

INLINE Codes load_codes(const char *record, int chunk, int lane) {
    Codes codes;
    for (int i = 0; i < CODE_VECTORS; i++) codes.vectors[i] = ((const uint4 *)record)[(chunk * CODE_VECTORS + i) * 32 + lane];
    if (BITS == 6) codes.high = ((const uint2 *)(record + HIGH_AT))[chunk * 32 + lane];
    return codes;
}

/* Quantize 256 columns, eight per lane. `digits` has `stride` vectors per chunk; `scales` and `sums` are of the first pair of
   a row, and there are `num_pairs` pairs per block and record. */
INLINE void quantize(const float *v, int lane, uint4 *digits, int stride, float *scales, u32 *sums, int num_pairs) {
    float largest = 0;
    bool is_finite = true;
    for (int j = 0; j < 8; j++) {
        largest = fmaxf(largest, fabsf(v[j]));
        is_finite = is_finite && fabsf(v[j]) <= 3.402823466e38f;
    }
    for (int i = 16; i; i /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, i));
    is_finite = __all_sync(~0u, is_finite);
    /* The largest power of two with which no digit overflows: the digits of the largest integer are 127. */
    const float limit = DIGITS == 2 ? 32639.0f : 2139062143.0f;
    int exponent = (int)(__float_as_uint(largest) >> 23) - 127; /* largest < 2^(exponent + 1) */
    exponent = exponent < -90 ? -90 : exponent;
    int shift = 8 * DIGITS - 2 - exponent;
    /* Two factors, each of which is a normal number. */
    const float half_factor = __uint_as_float((u32)(shift / 2 + 127) << 23);
    const float rest_factor = __uint_as_float((u32)(shift - shift / 2 + 127) << 23);
    if (largest * half_factor * rest_factor > limit) shift--;
    const float first = __uint_as_float((u32)(shift / 2 + 127) << 23);
    const float second = __uint_as_float((u32)(shift - shift / 2 + 127) << 23);
    u32 words[DIGITS][2] = {};
    int pair_sums[PAIRS] = {};
    for (int j = 0; j < 8; j++) {
        int q = is_finite ? __float2int_rn(v[j] * first * second) : 0;
        int digit[DIGITS];
        for (int i = DIGITS - 1; i; i--) {
            digit[i] = (int)(signed char)(q & 255);
            q = (q - digit[i]) >> 8; /* the largest q is smaller than 2^31 by more than a digit */
        }
        digit[0] = q;
        for (int i = 0; i < DIGITS; i++) words[i][j / 4] |= (u32)(digit[i] & 255) << (j % 4 * 8);
        for (int pair = 0; pair < PAIRS; pair++) pair_sums[pair] += digit[2 * pair] * 256 + digit[2 * pair + 1];
    }
    /* Columns 8i … 8i + 7 of a chunk: the words t = i / 2 of the lanes c = 2 (i % 2) and c + 1. */
    const int chunk = lane / 8, i = lane % 8;
    for (int digit = 0; digit < DIGITS; digit++) {
        u32 *const target = (u32 *)(digits + chunk * stride + digit * 4 + i % 2 * 2) + i / 2;
        target[0] = words[digit][0], target[4] = words[digit][1];
    }
    if (lane < PAIRS) {
        const float pair_unit = PAIRS == 2 && lane == 0 ? 65536.0f : 1.0f;
        const int half = shift / 2, rest = shift - half;
        const float scale = __uint_as_float((u32)(127 - half) << 23) * __uint_as_float((u32)(127 - rest) << 23) * pair_unit * UNIT;
        scales[lane] = is_finite ? scale : __uint_as_float(0x7fc00000u); /* NaN and infinity become NaN */
    }
    if (HAS_SUMS) {
        const int group = lane * 8 / GROUP_COLUMNS, record = group / GROUPS;
        for (int pair = 0; pair < PAIRS; pair++) {
            int sum = pair_sums[pair];
            for (int j = 1; j < GROUP_COLUMNS / 8; j *= 2) sum += __shfl_xor_sync(~0u, sum, j);
            if (lane * 8 % GROUP_COLUMNS == 0)
                sums[(record * num_pairs + pair) * GROUPS + group % GROUPS] =
                    CODE == 1 ? (u32)sum : __float_as_uint((float)sum * (1 / UNIT));
        }
    }
}

/* Eight columns of x, normalized except for the factor of RMSNorm; `sum` gets their squares. Columns ≥ k are 0. */
INLINE void load_normalized(const Input &in, long long row, int column, int k, float mean, float factor, float *v, float &sum) {
    for (int j = 0; j < 8; j++) v[j] = 0;
    if (column >= k) return;
    load_vector<X_TYPE>(in.x, row * k + column, v);
    if (NORM == 0) return;
    float gain[8];
    load_vector<PARAM_TYPE>(in.norm_weight, column, gain);
    for (int j = 0; j < 8; j++) {
        if (NORM == 1) sum += v[j] * v[j];
        v[j] = (v[j] - mean) * factor * (gain[j] + in.norm_offset);
        if (NORM == 2 && in.norm_bias) v[j] += load_number<PARAM_TYPE>(in.norm_bias, column + j);
    }
}

/* Grid: (blocks, rows); 32 threads. */
KERNEL(32) quantize_rows(const Input in, uint4 *digits, float *scales, u32 *sums, int k) {
    const int lane = threadIdx.x, block = blockIdx.x, row = blockIdx.y;
#if PDL
    start_next_kernel();
    wait_for_previous_kernel();
#endif
    float v[8] = {};
    const int column = block * BLOCK_COLUMNS + lane * 8;
    if (column < k) load_vector<X_TYPE>(in.x, (long long)row * k + column, v);
    const int num_pairs = in.x_columns / 2;
    quantize(v, lane, digits + ((long long)block * 2 * BLOCK * in.x_columns + row * DIGITS) * 4, in.x_columns * 4,
             scales + block * num_pairs + row * PAIRS, sums + (block * BLOCK * num_pairs + row * PAIRS) * GROUPS, num_pairs);
}

/* Grid: (programs, splits of the columns), y: (splits, rows, N); for experts (programs, pairs) with one row, otherwise
   (programs, experts). With GATED, a unit has a tile of gate and one of up. */
KERNEL(WARPS * 32) int8_linear(const Weight w, const Input in, void *y, const void *residual) {
    SHARED_MEMORY;
    __shared__ unsigned long long barriers[WARPS * RING];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = lane % 4;
    const int row_tiles = (w.n + 15) / 16, units = GATED ? row_tiles : (row_tiles + TILES - 1) / TILES;
    /* The blocks of this warp: those of the split are divided among the warps. */
    const int splits = EXPERTS ? 1 : (int)gridDim.y, split = EXPERTS ? 0 : (int)blockIdx.y;
    const int blocks = (w.records + BLOCK - 1) / BLOCK, per_split = (blocks + splits - 1) / splits;
    const int split_start = min(blocks, per_split * split), split_end = min(blocks, split_start + per_split);
    const int per_warp = (split_end - split_start + WARPS - 1) / WARPS;
    const int first_block = min(split_end, split_start + warp * per_warp), last_block = min(split_end, first_block + per_warp);
    const int start = first_block * (BLOCK / STAGE), end = min(last_block * (BLOCK / STAGE), (w.records + STAGE - 1) / STAGE);
    /* Shared memory: digits, scales and sums of one row of x, the rings, the sums of the products. */
    uint4 *const digits = shared;
    float *const x_scales = (float *)(digits + (STAGED ? blocks * 2 * BLOCK * DIGITS * 4 : 0));
    u32 *const x_sums = (u32 *)(x_scales + (STAGED ? (blocks * PAIRS + 3) / 4 * 4 : 0));
    char *const rings = (char *)(x_sums + (STAGED && HAS_SUMS ? (blocks * GROUPS_PER_BLOCK * PAIRS + 3) / 4 * 4 : 0));
    char *const ring = rings + warp * RING * TILES * STAGE_BYTES;
    float *const sums = (float *)(rings + WARPS * RING * TILES * STAGE_BYTES); /* (FLUSH, WARPS, TILES, 16, ROWS · PAIRS) */
    unsigned long long *const barrier = barriers + warp * RING;

    int expert = 0;
    auto tile_of = [&](int unit, int t) {
        return expert * row_tiles + (GATED ? unit : min(unit * TILES + t, row_tiles - 1));
    };
    int copy_unit = blockIdx.x, copied_stage = start, copy_slot = 0;
    auto copy_next = [&]() {
        if (copy_unit < units && start < end) {
            const int first = copied_stage * STAGE, num_records = PARTIAL ? min(STAGE, w.records - first) : STAGE;
            expect_bytes(barrier + copy_slot, TILES * num_records * RECORD_BYTES, lane);
            for (int t = 0; t < TILES; t++)
                copy_async(ring + (copy_slot * TILES + t) * STAGE_BYTES,
                           w.codes[GATED * t] + ((long long)tile_of(copy_unit, t) * w.records + first) * RECORD_BYTES,
                           num_records * RECORD_BYTES, lane, barrier + copy_slot);
            if (++copied_stage == end) copied_stage = start, copy_unit += gridDim.x;
            if (++copy_slot == RING) copy_slot = 0;
        }
        commit_copies();
    };
    if (lane < RING) init_barrier(barrier + lane);
    fence_barriers();
    __syncwarp();
    if (!EXPERTS)
        for (int i = 0; i < RING; i++) copy_next();
#if PDL
    start_next_kernel();
    wait_for_previous_kernel();
#endif

    /* The pairs of the expert. */
    int count = in.rows;
    int *const pairs = (int *)(sums + FLUSH * WARPS * TILES * 16 * ROWS * PAIRS);
    if (EXPERTS && STAGED) expert = in.experts[blockIdx.y];
    if (EXPERTS && !STAGED) {
        expert = blockIdx.y;
        count = 0;
        for (int first = 0; first < in.num_pairs; first += 32) {
            const bool selected = first + lane < in.num_pairs && in.experts[first + lane] == expert;
            const u32 lanes = __ballot_sync(~0u, selected);
            if (warp == 0 && selected) pairs[count + __popc(lanes & ((1u << lane) - 1))] = first + lane;
            count += __popc(lanes);
        }
        if (count == 0) return;
        __syncthreads();
    }
    if (EXPERTS && STAGED)
        for (int i = 0; i < RING; i++) copy_next();
    const long long x_row = EXPERTS == 2 ? (int)blockIdx.y : 0; /* with one row */

    /* Each warp quantizes the columns of x that it reads. */
    float norm_factor = 1;
    if (STAGED) {
        float mean = 0, factor = 1, sum = 0, v[8];
        for (int pass = 0; NORM == 2 && pass < 2; pass++) {
            sum = 0;
            for (int i = threadIdx.x * 8; i < w.k; i += WARPS * 256) {
                load_vector<X_TYPE>(in.x, x_row * w.k + i, v);
                for (int j = 0; j < 8; j++) sum += pass ? (v[j] - mean) * (v[j] - mean) : v[j];
            }
            sum = block_sum(sum) / w.k;
            if (pass) factor = rsqrtf(sum + in.eps);
            else mean = sum;
        }
        sum = 0;
        for (int block = first_block; block < last_block; block++) {
            load_normalized(in, x_row, block * BLOCK_COLUMNS + lane * 8, w.k, mean, factor, v, sum);
            quantize(v, lane, digits + block * 2 * BLOCK * DIGITS * 4, DIGITS * 4, x_scales + block * PAIRS,
                     x_sums + block * GROUPS_PER_BLOCK * PAIRS, PAIRS);
        }
        __syncwarp();
        if (NORM == 1) norm_factor = rsqrtf(block_sum(sum) / w.k + in.eps);
    }

    const int chunk_stride = STAGED ? DIGITS * 4 : EXPERTS ? in.x_columns * 4 : COLS * 32;
    const int pair_stride = STAGED ? PAIRS : EXPERTS ? in.x_columns / 2 : COLS * 4;
    const uint4 *const x_digits = STAGED ? digits : in.digits;
    const float *const scales_of_x = STAGED ? x_scales : in.x_scales;
    const u32 *const sums_of_x = STAGED ? x_sums : in.x_sums;

    int slot = 0, kept = 0;
    u32 parity = 0;
    for (int first_row = 0; first_row < (EXPERTS && !STAGED ? count : 1); first_row += ROWS) {
        if (EXPERTS && !STAGED) {
            copy_unit = blockIdx.x;
            for (int i = 0; i < RING; i++) copy_next();
        }
        /* Where this lane's columns of x are. Columns that no row uses repeat others, and their sums are not used. */
        auto row_of = [&](int i) {
            if (!EXPERTS) return i;
            const int pair = pairs[min(first_row + i, count - 1)];
            return EXPERTS == 1 ? pair / in.top_k : pair;
        };
        int digits_at[COLS], pair_at[COLS];
#pragma unroll
        for (int col = 0; col < COLS; col++) {
            const int n = lane / 4;
            digits_at[col] = STAGED ? (n & (DIGITS - 1)) * 4 + c : (row_of((col * 8 + n) / DIGITS) * DIGITS + n % DIGITS) * 4 + c;
            pair_at[col] = STAGED ? c & (PAIRS - 1) : row_of((col * 4 + c) / PAIRS) * PAIRS + c % PAIRS;
        }
        for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
            float total[TILES][COLS][2] = {};
            for (int stage = start; stage < end; stage++) {
                wait_for_copies(barrier + slot, parity);
                const char *const base = ring + slot * TILES * STAGE_BYTES;
                const int num_records = PARTIAL ? min(STAGE, w.records - stage * STAGE) : STAGE;
                float part[TILES][COLS][2] = {};
#pragma unroll
                for (int r = 0; r < STAGE; r++) {
                    if (r >= num_records) break;
                    const int record = stage * STAGE + r;
                    Words<GROUPS> x_sum[COLS], scales[TILES], offsets[TILES];
                    int acc[TILES][COLS][4];
#pragma unroll
                    for (int col = 0; HAS_SUMS && col < COLS; col++)
                        x_sum[col] = load_words<GROUPS>(sums_of_x + (record * pair_stride + pair_at[col]) * GROUPS);
#pragma unroll
                    for (int t = 0; t < TILES; t++) {
                        const char *const at = base + t * STAGE_BYTES + r * RECORD_BYTES;
                        if (GROUP) scales[t] = load_words<GROUPS>((const u32 *)(at + SCALES_AT) + lane / 4 * GROUPS);
                        if (OFFSET) offsets[t] = load_words<GROUPS>((const u32 *)(at + OFFSETS_AT) + lane / 4 * GROUPS);
                    }
                    /* Multiply the integer sums of a group of the record by its scale. */
                    auto add_group = [&](int t, int group) {
                        const u32 s = scales[t].words[group], o = offsets[t].words[group];
                        const float scale[2] = {half_to_float((u16)s), half_to_float((u16)(s >> 16))};
                        const float offset[2] = {half_to_float((u16)o), half_to_float((u16)(o >> 16))};
#pragma unroll
                        for (int col = 0; col < COLS; col++) {
#pragma unroll
                            for (int half = 0; half < 2; half++) {
                                int value = acc[t][col][2 * half] * 256 + acc[t][col][2 * half + 1];
                                if (CODE == 1) value += FP4_BIAS * (int)x_sum[col].words[group];
                                if (GROUP) part[t][col][half] += scale[half] * (float)value;
                                else part[t][col][half] += (float)value;
                                if (OFFSET) part[t][col][half] += offset[half] * __uint_as_float(x_sum[col].words[group]);
                            }
                        }
                    };
#pragma unroll
                    for (int chunk = 0; chunk < 2; chunk++) {
                        uint4 x[COLS];
#pragma unroll
                        for (int col = 0; col < COLS; col++)
                            x[col] = x_digits[(record * 2 + chunk) * chunk_stride + digits_at[col]];
#pragma unroll
                        for (int t = 0; t < TILES; t++) {
                            const Codes codes = load_codes(base + t * STAGE_BYTES + r * RECORD_BYTES, chunk, lane);
#pragma unroll
                            for (int s = 0; s < 2; s++) {
                                u32 a[4];
                                unpack(codes, s, a);
                                const int column = chunk * CHUNK + s * 32;
#pragma unroll
                                for (int half = 0; GROUP == 16 && half < 2; half++) {
#pragma unroll
                                    for (int col = 0; col < COLS; col++)
                                        mma_16(acc[t][col], a + 2 * half, word_of(x[col], 2 * s + half));
                                    add_group(t, column / 16 + half);
                                }
                                if (GROUP == 16) continue;
#pragma unroll
                                for (int col = 0; col < COLS; col++)
                                    mma(acc[t][col], a, word_of(x[col], 2 * s), word_of(x[col], 2 * s + 1), column % GROUP_COLUMNS == 0);
                                if ((column + 32) % GROUP_COLUMNS == 0) add_group(t, column / GROUP_COLUMNS);
                            }
                        }
                    }
                }
#pragma unroll
                for (int col = 0; col < COLS; col++) {
                    const float scale = scales_of_x[stage * STAGE / BLOCK * pair_stride + pair_at[col]];
#pragma unroll
                    for (int t = 0; t < TILES; t++)
                        total[t][col][0] += scale * part[t][col][0], total[t][col][1] += scale * part[t][col][1];
                }
                __syncwarp();
                copy_next();
                if (++slot == RING) slot = 0, parity ^= 1;
            }

            /* Sums of this warp: of the rows g and g + 8, and a pair of digits of a row of x per lane and column. */
            float *const target = sums + (kept * WARPS + warp) * TILES * 16 * ROWS * PAIRS;
            for (int t = 0; t < TILES; t++) {
                float scale[2] = {1, 1};
                if (GROUP == 0) {
                    const u32 s = w.row_scales[GATED * t][(long long)tile_of(unit, t) * 8 + lane / 4];
                    scale[0] = half_to_float((u16)s), scale[1] = half_to_float((u16)(s >> 16));
                }
                for (int col = 0; col < COLS; col++) {
                    if (col * 4 + c >= ROWS * PAIRS) continue;
                    for (int half = 0; half < 2; half++)
                        target[(t * 16 + lane / 4 + half * 8) * ROWS * PAIRS + col * 4 + c] = total[t][col][half] * scale[half];
                }
            }
            kept++;
            if (kept < FLUSH && unit + (int)gridDim.x < units) continue;

            /* Sums over the warps and over the pairs of a row of x. */
            __syncthreads();
            const int tile_count = GATED ? 1 : TILES, outputs = kept * tile_count * 16;
            const int used_warps = per_warp ? (split_end - split_start + per_warp - 1) / per_warp : 0;
            const int first_unit = unit - (kept - 1) * (int)gridDim.x;
            const int rows = STAGED ? 1 : min(ROWS, count - first_row);
            for (int i = threadIdx.x; i < outputs * rows; i += WARPS * 32) {
                const int r = i % 16, t = i / 16 % tile_count, each = i / 16 / tile_count % kept, row = i / outputs;
                const int this_unit = first_unit + each * (int)gridDim.x;
                const int n = (GATED ? this_unit : this_unit * TILES + t) * 16 + r;
                if (n >= w.n) continue;
                float results[GATED ? 2 : 1];
                for (int g = 0; g < (GATED ? 2 : 1); g++) {
                    float sum = 0;
                    for (int from = 0; from < used_warps; from++)
                        for (int pair = 0; pair < PAIRS; pair++)
                            sum += sums[(((each * WARPS + from) * TILES + (GATED ? g : t)) * 16 + r) * ROWS * PAIRS + row * PAIRS + pair];
                    sum *= norm_factor;
                    if (w.bias[g] && split == 0) sum += load_number<PARAM_TYPE>(w.bias[g], (long long)expert * w.n + n);
                    results[g] = sum;
                }
                float result = apply_activation(results[0]);
                if (ACT == 6) {
                    const float gate = fminf(result, in.limit), up = fminf(fmaxf(results[GATED], -in.limit), in.limit);
                    result = gate / (1 + __expf(-in.alpha * gate)) * (up + 1);
                    if (results[0] != results[0] || results[GATED] != results[GATED]) result = results[0] + results[GATED]; /* NaN */
                } else if (GATED) {
                    result *= results[GATED];
                }
                if (residual) result += load_number<X_TYPE>(residual, n);
                long long y_row = (long long)split * in.y_rows + row;
                if (EXPERTS) {
                    const int pair = STAGED ? (int)blockIdx.y : pairs[first_row + row];
                    if (EXPERTS == 2) result *= in.pair_weights[pair];
                    y_row = EXPERTS == 2 ? pair % in.top_k * in.rows + pair / in.top_k : pair;
                }
                store_y(y, y_row * in.y_columns + n, result);
            }
            __syncthreads();
            kept = 0;
        }
    }
}

/* Dequantize rows. Grid: (records, rows / 16); 32 threads. `rows`: numbers of the rows, or NULL for first, first + 1, …
   y: (count, k). */
KERNEL(32) dequantize_rows(const Weight w, const long long *rows, int first, int count, void *y) {
    const int lane = threadIdx.x, c = lane % 4;
    for (int half = 0; half < 2; half++) {
        const int i = blockIdx.y * 16 + half * 8 + lane / 4;
        if (i >= count) continue;
        const long long row = rows ? rows[i] : first + i;
        const int r = row % 16;
        const char *const record = w.codes[0] + (row / 16 * w.records + blockIdx.x) * RECORD_BYTES;
        for (int chunk = 0; chunk < 2; chunk++) {
            const Codes codes = load_codes(record, chunk, r % 8 * 4 + c);
            for (int t = 0; t < 4; t++) {
                u32 a[4];
                unpack(codes, t / 2, a);
                const u32 bytes = r / 8 ? t % 2 ? a[3] : a[1] : t % 2 ? a[2] : a[0];
                const int at = r % 8 * GROUPS + (chunk * CHUNK + t * 16) / GROUP_COLUMNS;
                const int column = blockIdx.x * RECORD_COLUMNS + chunk * CHUNK + t * 16 + 4 * c;
                if (column >= w.k) continue;
                const u32 scales = GROUP ? ((const u32 *)(record + SCALES_AT))[at] : w.row_scales[0][row / 16 * 8 + r % 8];
                const float scale = half_to_float((u16)(scales >> (r / 8 * 16)));
                for (int j = 0; j < 4; j++) {
                    const u32 byte = bytes >> (8 * j) & 255;
                    const int integer = CODE == 0 && !SIGNED ? (int)byte : (int)(signed char)byte + (CODE == 1 ? FP4_BIAS : 0);
                    float value = (float)integer * UNIT * scale;
                    if (OFFSET) value += half_to_float((u16)(((const u32 *)(record + OFFSETS_AT))[at] >> (r / 8 * 16)));
                    store_y(y, (long long)i * w.k + column + j, value);
                }
            }
        }
    }
}
