/* Products with matrices in block formats or in fp32, and conversion of these formats to fp32.

   A row of a matrix is a sequence of blocks of 32 to 256 weights. The weights of a group of 32 are scale · code + offset.
   A format has two functions: `read_scales_<format>` reads the scales and offsets of the groups of a block, and
   `codes_<format>` returns the codes of a group: integers, or for NF4 and FP8 numbers in fp32.

   For few rows, x is rounded to 16 bits with a scale per 32 numbers, so that products of integers, of which processors
   compute more at a time, replace the conversion of each weight. The rounding error is at most 2⁻¹⁶ of the largest of the
   32 numbers. */

#include "vectors.h"

enum { PREFETCH_BYTES = 2048 }; /* how far ahead weights are loaded into the cache */
typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef uint8_t UnalignedBytes __attribute__((vector_size(16), aligned(1)));
typedef uint64_t Words __attribute__((vector_size(16)));
typedef uint8_t Group __attribute__((vector_size(32))); /* 32 integers of 8 bits */
typedef uint8_t UnalignedGroup __attribute__((vector_size(32), aligned(1)));

INLINE Group load_group(const uint8_t *data) { return *(const UnalignedGroup *)data; }

/* Unsigned integers of a group. With VNNI, they are multiplied by the high and by the low bytes of x at once, and a vector
   contains them twice. Integers of 4 bits: 0–15 are in the low halves of 16 bytes, 16–31 in the high ones. */
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
typedef uint8_t Codes __attribute__((vector_size(64)));

INLINE Codes load_codes(const uint8_t *data) {
    return (Codes)_mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)data));
}
INLINE Group first_copy(Codes codes) { return (Group)_mm512_castsi512_si256((__m512i)codes); }
INLINE Codes nibbles(const uint8_t *data) {
    const __m512i q = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)data));
    return (Codes)_mm512_srlv_epi64(q, _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4)) & 15;
}
#else
typedef Group Codes;

INLINE Codes load_codes(const uint8_t *data) { return load_group(data); }
INLINE Group first_copy(Codes codes) { return codes; }
INLINE Group join(Bytes low, Bytes high) {
#if defined(__AVX2__)
    return (Group)_mm256_inserti128_si256(_mm256_castsi128_si256((__m128i)low), (__m128i)high, 1);
#else
    Group group;
    memcpy(&group, &low, 16);
    memcpy((uint8_t *)&group + 16, &high, 16);
    return group;
#endif
}
INLINE Codes nibbles(const uint8_t *data) {
    const Bytes q = *(const UnalignedBytes *)data;
    return join(q & 15, q >> 4);
}
#endif

/* 32 integers of 16 bits. */
#if defined(__AVX512BW__)
typedef struct {
    __m512i part;
} Integers;

INLINE Integers widen(Group group, int is_signed) {
    return (Integers){is_signed ? _mm512_cvtepi8_epi16((__m256i)group) : _mm512_cvtepu8_epi16((__m256i)group)};
}

INLINE Integers scale_halves(Integers x, int16_t low, int16_t high) {
    const __m512i factors = _mm512_inserti64x4(_mm512_set1_epi16(low), _mm256_set1_epi16(high), 1);
    return (Integers){_mm512_mullo_epi16(x.part, factors)};
}

/* Sums of products in LANES parts. */
INLINE Vector dot_integers(Integers w, const int16_t *x) {
    const __m512i values = _mm512_loadu_si512(x);
#if defined(__AVX512VNNI__)
    return (Vector)_mm512_cvtepi32_ps(_mm512_dpwssd_epi32(_mm512_setzero_si512(), w.part, values));
#else
    return (Vector)_mm512_cvtepi32_ps(_mm512_madd_epi16(w.part, values));
#endif
}
#elif defined(__AVX2__)
typedef struct {
    __m256i part[2];
} Integers;

INLINE Integers widen(Group group, int is_signed) {
    const __m128i a = _mm256_castsi256_si128((__m256i)group), b = _mm256_extracti128_si256((__m256i)group, 1);
    if (is_signed) return (Integers){{_mm256_cvtepi8_epi16(a), _mm256_cvtepi8_epi16(b)}};
    return (Integers){{_mm256_cvtepu8_epi16(a), _mm256_cvtepu8_epi16(b)}};
}

INLINE Integers scale_halves(Integers x, int16_t low, int16_t high) {
    return (Integers){{_mm256_mullo_epi16(x.part[0], _mm256_set1_epi16(low)),
                       _mm256_mullo_epi16(x.part[1], _mm256_set1_epi16(high))}};
}

INLINE Vector dot_integers(Integers w, const int16_t *x) {
    const __m256i low = _mm256_madd_epi16(w.part[0], _mm256_loadu_si256((const __m256i *)x));
    const __m256i high = _mm256_madd_epi16(w.part[1], _mm256_loadu_si256((const __m256i *)(x + 16)));
#if defined(__AVX512F__)
    return (Vector)_mm512_cvtepi32_ps(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
#else
    return (Vector)_mm256_cvtepi32_ps(_mm256_add_epi32(low, high));
#endif
}
#elif defined(__ARM_NEON)
typedef struct {
    int16x8_t part[4];
} Integers;

INLINE Integers widen(Group group, int is_signed) {
    Integers x;
    uint8x16_t halves[2];
    memcpy(halves, &group, 32);
    for (int i = 0; i < 2; i++) {
        const uint8x16_t bytes = halves[i];
        const int8x16_t signed_bytes = vreinterpretq_s8_u8(bytes);
        x.part[2 * i] = is_signed ? vmovl_s8(vget_low_s8(signed_bytes))
                                  : vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(bytes)));
        x.part[2 * i + 1] = is_signed ? vmovl_s8(vget_high_s8(signed_bytes))
                                      : vreinterpretq_s16_u16(vmovl_u8(vget_high_u8(bytes)));
    }
    return x;
}

INLINE Integers scale_halves(Integers x, int16_t low, int16_t high) {
    for (int i = 0; i < 4; i++) x.part[i] = vmulq_n_s16(x.part[i], i < 2 ? low : high);
    return x;
}

INLINE Vector dot_integers(Integers w, const int16_t *x) {
    int32x4_t sum = vdupq_n_s32(0);
    for (int i = 0; i < 4; i++) {
        const int16x8_t values = vld1q_s16(x + 8 * i);
        sum = vmlal_s16(sum, vget_low_s16(w.part[i]), vget_low_s16(values));
        sum = vmlal_s16(sum, vget_high_s16(w.part[i]), vget_high_s16(values));
    }
    return (Vector)vcvtq_f32_s32(sum);
}
#else
typedef struct {
    int16_t part[32];
} Integers;

INLINE Integers widen(Group group, int is_signed) {
    Integers x;
    for (int i = 0; i < 32; i++) x.part[i] = is_signed ? (int16_t)(int8_t)group[i] : (int16_t)group[i];
    return x;
}

INLINE Integers scale_halves(Integers x, int16_t low, int16_t high) {
    for (int i = 0; i < 32; i++) x.part[i] = (int16_t)(x.part[i] * (i < 16 ? low : high));
    return x;
}

INLINE Vector dot_integers(Integers w, const int16_t *x) {
    int32_t sums[LANES] = {0};
    for (int i = 0; i < 32; i++) sums[i % LANES] += w.part[i] * x[i];
    Vector result;
    for (int i = 0; i < LANES; i++) result[i] = (float)sums[i];
    return result;
}
#endif

/* 32 codes in fp32. */
typedef struct {
    Vector part[32 / LANES];
} Floats;

/* Sums of products of the codes of a group, of one of three kinds, and group i of x, in LANES parts; `scale_of_x_<kind>` is
   a factor of the result. With VNNI, parts 0–7 are products of unsigned integers and the high bytes of x, the others those
   with the low bytes. `sum_<kind>` adds the parts. `to_floats_<kind>` converts codes. */
INLINE Vector dot_signed(Integers w, const Rows *x, int64_t i) { return dot_integers(w, x->integers + 32 * i); }
INLINE float scale_of_x_signed(const Rows *x, int64_t i) { return x->scales[i]; }
INLINE float sum_signed(Vector x) { return sum_lanes(x); }
INLINE void to_floats_signed(Integers w, float *values) {
    int16_t integers[32];
    memcpy(integers, &w, sizeof integers);
    for (int i = 0; i < 32; i++) values[i] = integers[i];
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
INLINE Vector dot_unsigned(Codes w, const Rows *x, int64_t i) {
    const __m512i bytes = _mm512_loadu_si512(x->bytes + 64 * i);
    return (Vector)_mm512_cvtepi32_ps(_mm512_dpbusd_epi32(_mm512_setzero_si512(), (__m512i)w, bytes));
}
INLINE float sum_unsigned(Vector x) {
    const Vector factors = {256, 256, 256, 256, 256, 256, 256, 256, 1, 1, 1, 1, 1, 1, 1, 1};
    return sum_lanes(x * factors);
}
#else
INLINE Vector dot_unsigned(Codes w, const Rows *x, int64_t i) { return dot_signed(widen(w, 0), x, i); }
INLINE float sum_unsigned(Vector x) { return sum_lanes(x); }
#endif
#define scale_of_x_unsigned scale_of_x_signed
INLINE void to_floats_unsigned(Codes w, float *values) { to_floats_signed(widen(first_copy(w), 0), values); }

INLINE Vector dot_float(Floats w, const Rows *x, int64_t i) {
    Vector sum = {0};
    UNROLL for (int j = 0; j < 32 / LANES; j++) sum += w.part[j] * load(x->values + 32 * i + LANES * j);
    return sum;
}
INLINE float scale_of_x_float(const Rows *x, int64_t i) {
    (void)x, (void)i;
    return 1;
}
INLINE float sum_float(Vector x) { return sum_lanes(x); }
INLINE void to_floats_float(Floats w, float *values) { memcpy(values, &w, sizeof w); }

typedef float Eight __attribute__((vector_size(32)));
typedef float UnalignedEight __attribute__((vector_size(32), aligned(4)));
typedef struct {
    Eight scale, offset; /* per group */
    uint32_t high_bits;
} Scales;

INLINE Eight load_eight(const float *x) { return *(const UnalignedEight *)x; }
INLINE float sum_eight(Eight x) {
    return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}
INLINE Eight to_eight(uint64_t bytes) {
#if defined(__AVX2__)
    return (Eight)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)bytes)));
#else
    Eight values;
    for (int i = 0; i < 8; i++) values[i] = (float)(bytes >> 8 * i & 255);
    return values;
#endif
}

/* All numbers of 16 bits as fp32: a load takes less time than a conversion. */
static float half_values[1 << 16];

__attribute__((constructor)) static void fill_half_values(void) {
    for (uint32_t half = 0; half < 1 << 16; half++) {
        /* Sign, exponent and mantissa at their place in fp32. The product corrects the bias of the exponent. */
        const uint32_t bits = (half & 0x8000) << 16 | (half & 0x7fff) << 13;
        float value;
        memcpy(&value, &bits, 4);
        half_values[half] = (half & 0x7c00) == 0x7c00 ? value * INFINITY : value * 0x1p112f; /* infinity or NaN */
    }
}

INLINE float half_to_float(const uint8_t *data) {
    uint16_t half;
    memcpy(&half, data, 2);
    return half_values[half];
}

INLINE void read_scales_q8_0(const uint8_t *block, Scales *s) {
    s->scale[0] = half_to_float(block);
}
INLINE Integers codes_q8_0(const uint8_t *block, const Scales *s, int group) {
    (void)s, (void)group;
    return widen(load_group(block + 2), 1);
}

INLINE void read_scales_q4_0(const uint8_t *block, Scales *s) {
    s->scale[0] = half_to_float(block);
    s->offset[0] = -8 * s->scale[0];
}
INLINE Codes codes_q4_0(const uint8_t *block, const Scales *s, int group) {
    (void)s, (void)group;
    return nibbles(block + 2);
}

INLINE void read_scales_q4_1(const uint8_t *block, Scales *s) {
    s->scale[0] = half_to_float(block);
    s->offset[0] = half_to_float(block + 2);
}
INLINE Codes codes_q4_1(const uint8_t *block, const Scales *s, int group) {
    (void)s, (void)group;
    return nibbles(block + 4);
}

/* The fifth bits of 32 integers are in four bytes, in their order. */
INLINE Codes fifth_bits(uint32_t bits) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    return (Codes)_mm512_maskz_mov_epi8(bits | (uint64_t)bits << 32, _mm512_set1_epi8(16));
#else
    const Bytes bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint64_t repeat = 0x0101010101010101;
    const Words low = {(bits & 255) * repeat, (bits >> 8 & 255) * repeat};
    const Words high = {(bits >> 16 & 255) * repeat, (bits >> 24) * repeat};
    return join((Bytes)(((Bytes)low & bit) != 0) & 16, (Bytes)(((Bytes)high & bit) != 0) & 16);
#endif
}

INLINE void read_scales_q5_0(const uint8_t *block, Scales *s) {
    s->scale[0] = half_to_float(block);
    s->offset[0] = -16 * s->scale[0];
    memcpy(&s->high_bits, block + 2, 4);
}
INLINE Codes codes_q5_0(const uint8_t *block, const Scales *s, int group) {
    (void)group;
    return nibbles(block + 6) | fifth_bits(s->high_bits);
}

INLINE void read_scales_q5_1(const uint8_t *block, Scales *s) {
    s->scale[0] = half_to_float(block);
    s->offset[0] = half_to_float(block + 2);
    memcpy(&s->high_bits, block + 4, 4);
}
INLINE Codes codes_q5_1(const uint8_t *block, const Scales *s, int group) {
    (void)group;
    return nibbles(block + 8) | fifth_bits(s->high_bits);
}

/* Scales and minima of 8 groups have 6 bits: those of groups 0–3 in bytes 0–3 and 4–7, those of groups 4–7 in the halves
   of bytes 8–11 and the high two bits of bytes 0–7. */
INLINE void read_scales_q4_k(const uint8_t *block, Scales *s) {
    uint64_t low, last = 0;
    memcpy(&low, block + 4, 8);
    memcpy(&last, block + 12, 4);
    const uint64_t high = ((last | last << 28) & 0x0f0f0f0f0f0f0f0f) | (low >> 2 & 0x3030303030303030);
    low &= 0x3f3f3f3f3f3f3f3f; /* scales 0–3 and minima 0–3; `high` has scales 4–7 and minima 4–7 */
    const uint64_t scales = (uint32_t)low | high << 32, minima = low >> 32 | (high >> 32) << 32;
    s->scale = half_to_float(block) * to_eight(scales);
    s->offset = -half_to_float(block + 2) * to_eight(minima);
}
/* Two groups share 32 bytes: the first has their low four bits, the second the high ones. */
INLINE Codes group_nibbles(const uint8_t *data, int group) {
    const Codes q = load_codes(data + group / 2 * 32);
    return group % 2 ? q >> 4 : q & 15;
}
INLINE Codes codes_q4_k(const uint8_t *block, const Scales *s, int group) {
    (void)s;
    return group_nibbles(block + 16, group);
}

#define read_scales_q5_k read_scales_q4_k
INLINE Codes codes_q5_k(const uint8_t *block, const Scales *s, int group) {
    (void)s;
    return group_nibbles(block + 48, group) | (load_codes(block + 16) >> group & 1) << 4;
}

INLINE void read_scales_q6_k(const uint8_t *block, Scales *s) {
    s->scale = (Eight){0} + half_to_float(block + 208);
}
/* Per 128 weights: four bits each in 64 bytes, and the two high bits in 32 bytes. Each 16 weights have a scale of 8 bits,
   which is a factor of the integers here. */
INLINE Integers codes_q6_k(const uint8_t *block, const Scales *s, int group) {
    (void)s;
    const int quarter = group % 4;
    const Group q = load_group(block + group / 4 * 64 + quarter % 2 * 32);
    const Group high = load_group(block + 128 + group / 4 * 32) >> 2 * quarter & 3;
    const int8_t *factors = (const int8_t *)block + 192 + 2 * group;
    return scale_halves(widen(((quarter < 2 ? q & 15 : q >> 4) | high << 4) - 32, 1), factors[0], factors[1]);
}

/* The number of each 4-bit code in a table. */
INLINE Group look_up(Group codes, const int8_t *table) {
#if defined(__AVX2__)
    const __m256i values = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
    return (Group)_mm256_shuffle_epi8(values, (__m256i)codes);
#else
    Group values;
    for (int i = 0; i < 32; i++) values[i] = (uint8_t)table[codes[i]];
    return values;
#endif
}

/* FP4 E2M1: twice the numbers are integers. The scale is 2^(byte − 127), half of which is used here. */
INLINE void read_scales_mxfp4(const uint8_t *block, Scales *s) {
    const uint32_t bits = block[0] ? (uint32_t)block[0] << 23 : 1 << 22; /* 2⁻¹²⁷ has no exponent bits */
    float scale;
    memcpy(&scale, &bits, 4);
    s->scale[0] = scale * 0.5f;
}
INLINE Integers codes_mxfp4(const uint8_t *block, const Scales *s, int group) {
    static const int8_t doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    (void)s, (void)group;
    return widen(look_up(first_copy(nibbles(block + 1)), doubled), 1);
}

INLINE void read_scales_int4_g128(const uint8_t *block, Scales *s) {
    for (int i = 0; i < 4; i++) s->scale[i] = half_to_float(block), s->offset[i] = half_to_float(block + 2);
}
INLINE Codes codes_int4_g128(const uint8_t *block, const Scales *s, int group) {
    (void)s;
    return group_nibbles(block + 4, group);
}

INLINE void read_scales_int8_g32(const uint8_t *block, Scales *s) {
    s->scale[0] = half_to_float(block);
    s->offset[0] = half_to_float(block + 2) - 128 * s->scale[0];
}
INLINE Codes codes_int8_g32(const uint8_t *block, const Scales *s, int group) {
    (void)s, (void)group;
    return load_codes(block + 4);
}

/* LANES bytes as integers of 32 bits. */
INLINE Ints widen_bytes(const uint8_t *data) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)data));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)data));
#else
    Ints values;
    for (int i = 0; i < LANES; i++) values[i] = data[i];
    return values;
#endif
}

/* The number of each 4-bit code in a table in fp32. */
INLINE Vector look_up_floats(Ints codes, const float *table) {
#if defined(__AVX512F__)
    return (Vector)_mm512_permutexvar_ps((__m512i)codes, _mm512_loadu_ps(table));
#elif defined(__AVX2__)
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)codes); /* reads three bits of a code */
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), (__m256i)codes);
    return (Vector)_mm256_blendv_ps(low, high, (__m256)(codes << 28)); /* by the sign bit, here the fourth bit */
#else
    Vector values;
    for (int i = 0; i < LANES; i++) values[i] = table[codes[i]];
    return values;
#endif
}

INLINE void read_scales_nf4(const uint8_t *block, Scales *s) {
    for (int i = 0; i < 2; i++) s->scale[i] = half_to_float(block);
}
INLINE Floats codes_nf4(const uint8_t *block, const Scales *s, int group) {
    static const float table[16] = {
        -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
        -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
        0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
    Floats values;
    (void)s;
    UNROLL for (int i = 0; i < 32 / LANES; i++) {
        const Ints codes = widen_bytes(block + 2 + LANES * i);
        values.part[i] = look_up_floats(group ? codes >> 4 : codes & 15, table);
    }
    return values;
}

INLINE void read_scales_fp8_g128(const uint8_t *block, Scales *s) {
    float scale;
    memcpy(&scale, block, 4);
    for (int i = 0; i < 4; i++) s->scale[i] = scale;
}
INLINE Floats codes_fp8_g128(const uint8_t *block, const Scales *s, int group) {
    const uint8_t *data = block + 4 + 32 * group;
    Floats values;
    (void)s;
    UNROLL for (int i = 0; i < 32 / LANES; i++) {
        /* Exponent and mantissa at their place in fp32, with the difference of the exponents' biases, 120. An exponent
           of 0 means m · 2⁻⁹ for the mantissa m, here (1 + m / 8) · 2⁻⁶ − 2⁻⁶. */
        const Ints code = widen_bytes(data + LANES * i), magnitude = code & 0x7f;
        const Ints is_small = magnitude < 8, is_nan = magnitude == 0x7f;
        const Ints bits = (magnitude << 20) + (120 << 23) + (is_small & 1 << 23);
        const Vector number = (Vector)bits - (Vector)(is_small & 121 << 23);
        values.part[i] = (Vector)((Ints)number | code >> 7 << 31 | (is_nan & 0x7fc00000));
    }
    return values;
}

/* Only unsigned integers have offsets. */
enum { HAS_OFFSETS_signed = 0, HAS_OFFSETS_unsigned = 1, HAS_OFFSETS_float = 0 };
/* Instructions read single numbers of a vector in memory without the shuffles that those in a register need. */
#define IN_MEMORY(vector) __asm__("" : "+m"(vector))

/* `product_<format>`: rows of y for up to 4 rows of x, where `count` is a constant. Blocks of 256 weights multiply and add
   scales and offsets of eight groups at a time. `dequantize_<format>`: conversion of consecutive blocks. */
#define DEFINE_FORMAT(FORMAT, BLOCK, BYTES, KIND)                                                                      \
    INLINE void product_##FORMAT(const Linear *w, int64_t first, int64_t last, const Rows *x, int64_t first_x,         \
                                 const int count, float *y) {                                                          \
        const int64_t num_blocks = w->columns / BLOCK, num_groups = w->columns / 32;                                   \
        const uint8_t *block = w->data + first * num_blocks * BYTES;                                                   \
        y += first_x * w->rows;                                                                                        \
        for (int64_t row = first; row < last; row++) {                                                                 \
            Vector sums[4][2];                                                                                         \
            float offsets[4];                                                                                          \
            Eight offsets_of_8[4];                                                                                     \
            UNROLL for (int m = 0; m < count; m++) {                                                                   \
                sums[m][0] = sums[m][1] = (Vector){0};                                                                 \
                offsets[m] = 0;                                                                                        \
                offsets_of_8[m] = (Eight){0};                                                                          \
            }                                                                                                          \
            _Pragma("GCC unroll 2") for (int64_t b = 0; b < num_blocks; b++, block += BYTES) {                         \
                UNROLL for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(block + PREFETCH_BYTES + i);             \
                Scales s;                                                                                              \
                read_scales_##FORMAT(block, &s);                                                                       \
                Eight factors[4];                                                                                      \
                UNROLL for (int m = 0; BLOCK == 256 && m < count; m++) {                                               \
                    const int64_t i = (first_x + m) * num_groups + b * 8;                                              \
                    factors[m] = s.scale * load_eight(x->scales + i);                                                  \
                    if (HAS_OFFSETS_##KIND) offsets_of_8[m] += s.offset * load_eight(x->sums + i);                     \
                    IN_MEMORY(factors[m]);                                                                             \
                }                                                                                                      \
                UNROLL for (int g = 0; g < BLOCK / 32; g++) {                                                          \
                    const __auto_type codes = codes_##FORMAT(block, &s, g);                                            \
                    UNROLL for (int m = 0; m < count; m++) {                                                           \
                        const int64_t i = (first_x + m) * num_groups + b * (BLOCK / 32) + g;                           \
                        if (BLOCK == 256) {                                                                            \
                            sums[m][g % 2] += dot_##KIND(codes, x, i) * ((const float *)(factors + m))[g];             \
                        } else {                                                                                       \
                            sums[m][g % 2] += dot_##KIND(codes, x, i) * scale_of_x_##KIND(x, i) * s.scale[g];          \
                            if (HAS_OFFSETS_##KIND) offsets[m] += s.offset[g] * x->sums[i];                            \
                        }                                                                                              \
                    }                                                                                                  \
                }                                                                                                      \
            }                                                                                                          \
            UNROLL for (int m = 0; m < count; m++) {                                                                   \
                const float offset = offsets[m] + (BLOCK == 256 ? sum_eight(offsets_of_8[m]) : 0);                     \
                y[m * w->rows + row] = sum_##KIND(sums[m][0] + sums[m][1]) + offset + (w->bias ? w->bias[row] : 0);    \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    static void product_1_##FORMAT(const Linear *w, int64_t a, int64_t b, const Rows *x, int64_t first_x, float *y) {  \
        product_##FORMAT(w, a, b, x, first_x, 1, y);                                                                   \
    }                                                                                                                  \
    static void product_4_##FORMAT(const Linear *w, int64_t a, int64_t b, const Rows *x, int64_t first_x, float *y) {  \
        product_##FORMAT(w, a, b, x, first_x, 4, y);                                                                   \
    }                                                                                                                  \
    static void dequantize_##FORMAT(const uint8_t *data, int64_t num_blocks, float *w) {                               \
        for (int64_t b = 0; b < num_blocks; b++, data += BYTES) {                                                      \
            Scales s;                                                                                                  \
            read_scales_##FORMAT(data, &s);                                                                            \
            for (int g = 0; g < BLOCK / 32; g++, w += 32) {                                                            \
                to_floats_##KIND(codes_##FORMAT(data, &s, g), w);                                                      \
                for (int i = 0; i < 32; i++)                                                                           \
                    w[i] = w[i] * s.scale[g] + (HAS_OFFSETS_##KIND ? s.offset[g] : 0);                                 \
            }                                                                                                          \
        }                                                                                                              \
    }

DEFINE_FORMAT(q4_0, 32, 18, unsigned)
DEFINE_FORMAT(q4_1, 32, 20, unsigned)
DEFINE_FORMAT(q5_0, 32, 22, unsigned)
DEFINE_FORMAT(q5_1, 32, 24, unsigned)
DEFINE_FORMAT(q8_0, 32, 34, signed)
DEFINE_FORMAT(q4_k, 256, 144, unsigned)
DEFINE_FORMAT(q5_k, 256, 176, unsigned)
DEFINE_FORMAT(q6_k, 256, 210, signed)
DEFINE_FORMAT(mxfp4, 32, 17, signed)
DEFINE_FORMAT(int4_g128, 128, 68, unsigned)
DEFINE_FORMAT(nf4, 64, 34, float)
DEFINE_FORMAT(fp8_g128, 128, 132, float)
DEFINE_FORMAT(int8_g32, 32, 36, unsigned)

typedef void Product(const Linear *, int64_t, int64_t, const Rows *, int64_t, float *);
static const struct {
    int block_size, num_bytes;
    Product *product_1, *product_4;
    void (*dequantize)(const uint8_t *, int64_t, float *);
} FORMATS[] = {
#define FORMAT(NAME, BLOCK, BYTES) {BLOCK, BYTES, product_1_##NAME, product_4_##NAME, dequantize_##NAME}
    FORMAT(q4_0, 32, 18), FORMAT(q4_1, 32, 20),   FORMAT(q5_0, 32, 22),   FORMAT(q5_1, 32, 24),
    FORMAT(q8_0, 32, 34), FORMAT(q4_k, 256, 144), FORMAT(q5_k, 256, 176), FORMAT(q6_k, 256, 210),
    FORMAT(mxfp4, 32, 17), FORMAT(int4_g128, 128, 68), FORMAT(nf4, 64, 34), FORMAT(fp8_g128, 128, 132),
    FORMAT(int8_g32, 32, 36),
};
enum {
    FP32 = sizeof FORMATS / sizeof FORMATS[0], /* Linear.format of plain matrices */
    MAX_INTEGER = 32639,                       /* of x: 127 · 256 + 127 */
    MAX_INTEGER_ROWS = 8,                      /* with more rows of x, the weights are converted to fp32 */
};

int is_packed(const Linear *w) { return w->format != FP32; }

typedef int16_t Shorts __attribute__((vector_size(2 * LANES)));
typedef int8_t Chars __attribute__((vector_size(LANES)));

/* 32 numbers as integers · scale. */
INLINE void quantize_group(const float *values, int16_t *integers, int8_t *high_bytes, int8_t *low_bytes, float *scale,
                           float *sum) {
    Ints largest = {0}, sums = {0};
    for (int i = 0; i < 32; i += LANES) { /* without their signs, floats are ordered as integers, and NaN is the largest */
        const Ints bits = (Ints)load(values + i) & 0x7fffffff, is_larger = bits > largest;
        largest = (bits & is_larger) | (largest & ~is_larger);
    }
    int32_t lanes[LANES], max_bits = 0, total = 0;
    memcpy(lanes, &largest, sizeof lanes);
    for (int i = 0; i < LANES; i++) max_bits = lanes[i] > max_bits ? lanes[i] : max_bits;
    float max;
    memcpy(&max, &max_bits, 4);
    const float inverse = max > 0 ? MAX_INTEGER / max : 0;
    for (int i = 0; i < 32; i += LANES) {
        const Ints rounded = (Ints)(load(values + i) * inverse + 12582912.0f) - 0x4b400000; /* 1.5 · 2²³: see exp_vector */
        const Ints low = rounded << 24 >> 24, high = (rounded - low) >> 8;
        *(Shorts *)(integers + i) = __builtin_convertvector(rounded, Shorts);
        *(Chars *)(high_bytes + i) = __builtin_convertvector(high, Chars);
        *(Chars *)(low_bytes + i) = __builtin_convertvector(low, Chars);
        sums += rounded;
    }
    memcpy(lanes, &sums, sizeof lanes);
    for (int i = 0; i < LANES; i++) total += lanes[i];
    *scale = max * (1.0f / MAX_INTEGER);
    *sum = *scale * (float)total;
}

Rows make_rows(const float *x, int64_t count, const Linear *w, int quantize) {
    const int64_t columns = w->columns;
    Rows rows = {x, count, columns, NULL, NULL, NULL, NULL, NULL};
    if (w->column_order) {
        rows.values = rows.reordered = malloc(sizeof(float) * (size_t)(count * columns));
        for (int64_t m = 0; m < count; m++)
            for (int64_t i = 0; i < columns; i++)
                rows.reordered[m * columns + i] = x[m * columns + w->column_order[i]];
        x = rows.values;
    }
    if (!quantize || count > MAX_INTEGER_ROWS) return rows;
    const size_t num_groups = (size_t)(count * columns / 32);
    const size_t size = num_groups * (32 * sizeof(int16_t) + 64 + 2 * sizeof(float));
    rows.integers = aligned_alloc(64, (size + 63) / 64 * 64); /* loads of 64 bytes from one cache line take less time */
    rows.bytes = (int8_t *)(rows.integers + num_groups * 32);
    rows.scales = (float *)(rows.bytes + num_groups * 64);
    rows.sums = rows.scales + num_groups;
    for (size_t i = 0; i < num_groups; i++)
        quantize_group(x + i * 32, rows.integers + i * 32, rows.bytes + i * 64, rows.bytes + i * 64 + 32, rows.scales + i,
                       rows.sums + i);
    return rows;
}

void free_rows(Rows *x) {
    free(x->integers);
    free(x->reordered);
}

/* `num_w` × `num_x` dot products of rows of w and x, which are fp32, for constants up to 4. */
INLINE void dot_tile(const float *w, const float *x, int64_t columns, const int num_w, const int num_x, const float *bias,
                     float *y, int64_t stride) {
    Vector sums[4][4];
    UNROLL for (int n = 0; n < num_w; n++)
        UNROLL for (int m = 0; m < num_x; m++) sums[n][m] = (Vector){0};
    int64_t i = 0;
    for (; i + LANES <= columns; i += LANES)
        UNROLL for (int n = 0; n < num_w; n++) {
            const Vector weights = load(w + n * columns + i);
            UNROLL for (int m = 0; m < num_x; m++) sums[n][m] += weights * load(x + m * columns + i);
        }
    UNROLL for (int n = 0; n < num_w; n++)
        UNROLL for (int m = 0; m < num_x; m++) {
            float sum = sum_lanes(sums[n][m]) + (bias ? bias[n] : 0);
            for (int64_t j = i; j < columns; j++) sum += w[n * columns + j] * x[m * columns + j];
            y[m * stride + n] = sum;
        }
}

static void dot_rows(const float *w, int64_t num_w, const Rows *x, const float *bias, float *y, int64_t stride) {
    const int64_t columns = x->columns;
    for (int64_t n = 0; n < num_w;) {
        const int64_t step = num_w - n >= 4 ? 4 : 1;
        const float *row = w + n * columns, *row_bias = bias ? bias + n : NULL;
        int64_t m = 0;
        for (; m + 4 <= x->count; m += 4)
            if (step == 4) dot_tile(row, x->values + m * columns, columns, 4, 4, row_bias, y + m * stride + n, stride);
            else dot_tile(row, x->values + m * columns, columns, 1, 4, row_bias, y + m * stride + n, stride);
        for (; m < x->count; m++)
            if (step == 4) dot_tile(row, x->values + m * columns, columns, 4, 1, row_bias, y + m * stride + n, stride);
            else dot_tile(row, x->values + m * columns, columns, 1, 1, row_bias, y + m * stride + n, stride);
        n += step;
    }
}

void linear_rows(const Linear *w, int64_t first, int64_t last, const Rows *x, float *y) {
    const int64_t columns = w->columns;
    if (!is_packed(w)) {
        const float *bias = w->bias ? w->bias + first : NULL;
        dot_rows((const float *)w->data + first * columns, last - first, x, bias, y + first, w->rows);
    } else if (x->integers) {
        int64_t m = 0;
        for (; m + 4 <= x->count; m += 4) FORMATS[w->format].product_4(w, first, last, x, m, y);
        for (; m < x->count; m++) FORMATS[w->format].product_1(w, first, last, x, m, y);
    } else { /* four rows of W at a time are converted to a buffer that stays in the cache */
        const int64_t num_blocks = columns / FORMATS[w->format].block_size;
        const int64_t row_bytes = num_blocks * FORMATS[w->format].num_bytes;
        float *buffer = malloc(sizeof(float) * (size_t)(4 * columns));
        for (int64_t row = first; row < last; row += 4) {
            const int64_t num = last - row < 4 ? last - row : 4;
            FORMATS[w->format].dequantize(w->data + row * row_bytes, num * num_blocks, buffer);
            dot_rows(buffer, num, x, w->bias ? w->bias + row : NULL, y + row, w->rows);
        }
        free(buffer);
    }
}

/* y (count, rows) = x (count, columns) · Wᵀ + bias. */
void linear(const Linear *w, const float *x, int64_t count, float *y, int num_threads) {
    const int64_t chunk = 16, num_chunks = (w->rows + chunk - 1) / chunk;
    Rows rows = make_rows(x, count, w, is_packed(w));
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 2)
    for (int64_t c = 0; c < num_chunks; c++)
        linear_rows(w, c * chunk, (c + 1) * chunk < w->rows ? (c + 1) * chunk : w->rows, &rows, y);
    free_rows(&rows);
}

/* w = the weights of num_blocks blocks. */
void dequantize(int64_t format, const uint8_t *data, int64_t num_blocks, float *w, int num_threads) {
    const int64_t block_size = FORMATS[format].block_size, num_bytes = FORMATS[format].num_bytes;
    const int64_t chunk = 8192 / block_size, num_chunks = (num_blocks + chunk - 1) / chunk;
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 2)
    for (int64_t c = 0; c < num_chunks; c++) {
        const int64_t first = c * chunk, count = num_blocks - first < chunk ? num_blocks - first : chunk;
        FORMATS[format].dequantize(data + first * num_bytes, count, w + first * block_size);
    }
}
