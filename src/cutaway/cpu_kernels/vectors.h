/* Vectors of fp32 numbers, as types of the compiler, which maps them to the registers of the machine. */

#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX2__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef float UnalignedVector __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

INLINE Vector load(const float *x) { return *(const UnalignedVector *)x; }
INLINE void store(float *x, Vector value) { *(UnalignedVector *)x = value; }

INLINE float sum_lanes(Vector x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
#endif
}

/* A matrix (rows, columns) in one of the formats of linear.c, and a bias or NULL. If `column_order` is not NULL, number i of
   a row is that of column column_order[i]. */
typedef struct {
    const uint8_t *data;
    const float *bias;
    const int64_t *column_order;
    int64_t rows, columns, format;
} Linear;

/* Rows of x (count, columns). For packed matrices also in 16 bits: x ≈ integers · scale with a scale per 32 numbers. */
typedef struct {
    const float *values;
    int64_t count, columns;
    int16_t *integers; /* (count, columns), or NULL */
    int8_t *bytes;     /* (count, columns / 32, 2, 32): integers = 256 · the first 32 + the others */
    float *scales;     /* (count, columns / 32) */
    float *sums;       /* scale · sum of the 32 integers */
    float *reordered;  /* values in the column order of the matrix, or NULL */
} Rows;

/* Rows in the column order of w. `quantize` says whether a packed matrix is among those that are multiplied by x. */
Rows make_rows(const float *x, int64_t count, const Linear *w, int quantize);
void free_rows(Rows *x);

/* Rows first … last − 1 of y = x·Wᵀ + bias, for y (count, rows). */
void linear_rows(const Linear *w, int64_t first, int64_t last, const Rows *x, float *y);
int is_packed(const Linear *w);
