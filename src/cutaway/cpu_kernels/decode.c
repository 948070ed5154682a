/* Transformer blocks in decode steps: one new token per row, all numbers in fp32, keys and values in the paged cache. */

#include "vectors.h"

INLINE float dot(const float *a, const float *b, int64_t n) {
    Vector sums[2] = {{0}, {0}};
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        sums[0] += load(a + i) * load(b + i);
        sums[1] += load(a + i + LANES) * load(b + i + LANES);
    }
    float sum = sum_lanes(sums[0] + sums[1]);
    for (; i < n; i++) sum += a[i] * b[i];
    return sum;
}

INLINE Vector clamp_lanes(Ints condition, float value, Vector otherwise) {
    return (Vector)((condition & (Ints)((Vector){0} + value)) | (~condition & (Ints)otherwise));
}

/* eˣ = 2ᵏ · eʳ with r in ±ln(2)/2, for which a polynomial of degree 6 is exact to rounding. */
INLINE Vector exp_vector(Vector x) {
    x = clamp_lanes(x < -87.0f, -87.0f, x);
    x = clamp_lanes(x > 88.0f, 88.0f, x);
    const Vector shifted = x * 1.44269504f + 12582912.0f; /* 1.5 · 2²³: adding it rounds to an integer */
    const Vector k = shifted - 12582912.0f;
    const Vector r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
    Vector y = r * (1.0f / 720) + 1.0f / 120;
    y = y * r + 1.0f / 24;
    y = y * r + 1.0f / 6;
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    return y * (Vector)(((Ints)shifted << 23) + 0x3f800000); /* the low bits of `shifted` are k */
}

enum { NO_NORM, RMS_NORM, LAYER_NORM };
typedef struct {
    const float *weight, *bias;
    int64_t kind;
    float eps, offset; /* `offset` is added to the weight */
} Norm;

/* y = x / sqrt(mean(x²) + eps) · weight + bias, for LayerNorm with x − mean(x) instead of x. y may be x. */
static void normalize(const Norm *norm, const float *x, int64_t n, float *y) {
    const float *weight = norm->weight, *bias = norm->bias;
    float mean = 0, sum = 0;
    if (norm->kind == LAYER_NORM) {
        for (int64_t i = 0; i < n; i++) mean += x[i];
        mean /= (float)n;
    }
    int64_t i = 0;
    Vector sums = {0};
    for (; i + LANES <= n; i += LANES) sums += (load(x + i) - mean) * (load(x + i) - mean);
    sum = sum_lanes(sums);
    for (; i < n; i++) sum += (x[i] - mean) * (x[i] - mean);
    const float factor = 1 / sqrtf(sum / (float)n + norm->eps);
    for (i = 0; i < n; i++) y[i] = (x[i] - mean) * factor * ((weight ? weight[i] : 1) + norm->offset) + (bias ? bias[i] : 0);
}

INLINE float activate_one(int64_t act, float x) {
    switch (act) {
        case 1: return x / (1 + expf(-x));
        case 2: return x / (1 + expf(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
        case 3: return 0.5f * x * (1 + erff(x * 0.7071067811865476f));
        case 4: return x > 0 ? x : 0;
        case 5: return x > 0 ? x * x : 0;
        default: return x;
    }
}

/* y = act(x) · up, or act(x) without `up`. */
static void activate(int64_t act, const float *x, const float *up, int64_t n, float *y) {
    int64_t i = 0;
    if (act == 1 || act == 2)
        for (; i + LANES <= n; i += LANES) {
            const Vector v = load(x + i);
            const Vector z = act == 1 ? v : 1.5957691216057308f * (v + 0.044715f * v * v * v);
            const Vector result = v / (1.0f + exp_vector(-z));
            store(y + i, up ? result * load(up + i) : result);
        }
    for (; i < n; i++) y[i] = activate_one(act, x[i]) * (up ? up[i] : 1);
}

typedef struct {
    const float *cos, *sin, *slopes, *sinks; /* cos, sin (rows, rotary_pairs); ALiBi slopes and sinks (heads) or NULL */
    float *keys, *values;                    /* (pages, page_size, kv_heads, d_head) */
    const int64_t *page_table, *slots, *positions;
    int64_t heads, kv_heads, d_head, rotary_pairs, window, num_slots, page_size, pages_per_row, interleaved;
    Norm q_norm, k_norm;
    float scale, softcap;
} Attention;

/* QK-norm and RoPE of one head. */
static void rotate(const Attention *a, const float *x, const Norm *norm, int64_t row, float *y) {
    if (norm->kind)
        normalize(norm, x, a->d_head, y);
    else
        memcpy(y, x, sizeof(float) * (size_t)a->d_head);
    const int64_t pairs = a->rotary_pairs;
    const float *cos = a->cos + row * pairs, *sin = a->sin + row * pairs;
    for (int64_t i = 0; i < pairs; i++) {
        float *first = a->interleaved ? y + 2 * i : y + i, *second = a->interleaved ? y + 2 * i + 1 : y + i + pairs;
        const float p = *first, q = *second;
        *first = p * cos[i] - q * sin[i];
        *second = q * cos[i] + p * sin[i];
    }
}

/* Consecutive positions of a row that follow each other in a page, from `position` on: their number, at most `count`.
   `offset` is that of the first key or value in the cache. Divisions per position take longer than a short product. */
INLINE int64_t cache_run(const Attention *a, int64_t row, int64_t position, int64_t count, int64_t kv_head, int64_t *offset) {
    const int64_t slot = position % a->num_slots, in_page = slot % a->page_size;
    const int64_t page = a->page_table[row * a->pages_per_row + slot / a->page_size];
    *offset = ((page * a->page_size + in_page) * a->kv_heads + kv_head) * a->d_head;
    const int64_t limit = a->page_size - in_page < a->num_slots - slot ? a->page_size - in_page : a->num_slots - slot;
    return count < limit ? count : limit;
}

/* z of one row and head. `rotated` and `scores` are buffers. */
static void attend(const Attention *a, int64_t row, int64_t head, const float *q, float *z, float *rotated, float *scores) {
    const int64_t d_head = a->d_head, kv_head = head / (a->heads / a->kv_heads), position = a->positions[row];
    const int64_t stride = a->kv_heads * d_head;
    int64_t first = a->window && position >= a->window ? position - a->window + 1 : 0;
    if (position - first >= a->num_slots) first = position - a->num_slots + 1;
    const int64_t count = position - first + 1;
    memset(z, 0, sizeof(float) * (size_t)d_head);
    if (count <= 0) return; /* a row of padding */
    rotate(a, q, &a->q_norm, row, rotated);
    float max = a->sinks ? a->sinks[head] : -INFINITY;
    int64_t offset;
    for (int64_t j = 0; j < count;) {
        const int64_t end = j + cache_run(a, row, first + j, count - j, kv_head, &offset);
        for (const float *key = a->keys + offset; j < end; j++, key += stride) {
            float score = dot(rotated, key, d_head) * a->scale;
            if (a->softcap > 0) score = a->softcap * tanhf(score / a->softcap);
            if (a->slopes) score -= a->slopes[head] * (float)(position - first - j);
            scores[j] = score;
            if (!(score <= max)) max = score; /* also NaN, which must not be lost */
        }
    }
    for (int64_t j = count; j % LANES; j++) scores[j] = -INFINITY;
    Vector sums = {0};
    for (int64_t j = 0; j < count; j += LANES) {
        const Vector probs = exp_vector(load(scores + j) - max);
        store(scores + j, probs);
        if (j + LANES <= count) sums += probs;
    }
    float sum = sum_lanes(sums) + (a->sinks ? expf(a->sinks[head] - max) : 0);
    for (int64_t j = count / LANES * LANES; j < count; j++) sum += scores[j];
    for (int64_t j = 0; j < count;) {
        const int64_t end = j + cache_run(a, row, first + j, count - j, kv_head, &offset);
        for (const float *value = a->values + offset; j < end; j++, value += stride) {
            int64_t i = 0;
            for (; i + LANES <= d_head; i += LANES) store(z + i, load(z + i) + scores[j] * load(value + i));
            for (; i < d_head; i++) z[i] += scores[j] * value[i];
        }
    }
    for (int64_t i = 0; i < d_head; i++) z[i] /= sum;
}

/* Write the new keys and values to the cache, then compute z for all rows and heads. */
static void attention(const Attention *a, const float *q, const float *k, const float *v, int64_t rows, float *z,
                      int num_threads) {
    const int64_t d_head = a->d_head, size = a->kv_heads * d_head;
    int64_t longest = 0;
    for (int64_t row = 0; row < rows; row++) {
        float *key = a->keys + a->slots[row] * size;
        for (int64_t g = 0; g < a->kv_heads; g++)
            rotate(a, k + row * size + g * d_head, &a->k_norm, row, key + g * d_head);
        memcpy(a->values + a->slots[row] * size, v + row * size, sizeof(float) * (size_t)size);
        if (a->positions[row] >= longest) longest = a->positions[row] + 1;
    }
#pragma omp parallel num_threads(num_threads)
    {
        float *buffer = malloc(sizeof(float) * (size_t)(longest + LANES + d_head));
#pragma omp for schedule(dynamic, 2)
        for (int64_t i = 0; i < rows * a->heads; i++)
            attend(a, i / a->heads, i % a->heads, q + i * d_head, z + i * d_head, buffer, buffer + d_head);
        free(buffer);
    }
}

typedef struct {
    Norm in, out, after; /* y = after(x + out(f(in(x))) · scale) */
    float scale;
} Branch;

typedef struct {
    Branch attn, ffn;
    Linear q, k, v, o, gate, up, down;
    Attention attention;
    int64_t d_model, activation, is_gated, is_parallel; /* parallel: both branches read x, before either is added */
} Block;

static void normalize_rows(const Norm *norm, const float *x, int64_t rows, int64_t n, float *y) {
    for (int64_t row = 0; row < rows; row++) {
        if (norm->kind) normalize(norm, x + row * n, n, y + row * n);
        else if (x != y) memcpy(y + row * n, x + row * n, sizeof(float) * (size_t)n);
    }
}

/* Several products with the same x, in one loop over chunks of rows. */
static void linears(const Linear *const *w, const int num, const float *x, int64_t count, float *const *y, int num_threads) {
    const int64_t chunk = 16;
    int64_t ends[3], total = 0;
    int any_packed = 0, same_order[3]; /* the first matrix with the column order of matrix i */
    Rows rows[3];
    for (int i = 0; i < num; i++) {
        ends[i] = total += (w[i]->rows + chunk - 1) / chunk;
        any_packed |= is_packed(w[i]);
    }
    for (int i = 0; i < num; i++) {
        same_order[i] = 0;
        while (w[same_order[i]]->column_order != w[i]->column_order) same_order[i]++;
        if (same_order[i] == i) rows[i] = make_rows(x, count, w[i], any_packed);
    }
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 2)
    for (int64_t c = 0; c < total; c++) {
        int i = 0;
        while (c >= ends[i]) i++;
        const int64_t first = (c - (i ? ends[i - 1] : 0)) * chunk;
        const int64_t last = first + chunk < w[i]->rows ? first + chunk : w[i]->rows;
        linear_rows(w[i], first, last, rows + same_order[i], y[i]);
    }
    for (int i = 0; i < num; i++)
        if (same_order[i] == i) free_rows(rows + i);
}

static void add_branch(const Branch *branch, float *x, float *y, int64_t rows, int64_t n) {
    normalize_rows(&branch->out, y, rows, n, y);
    for (int64_t i = 0; i < rows * n; i++) x[i] += y[i] * branch->scale;
    normalize_rows(&branch->after, x, rows, n, x);
}

static int64_t scratch_size(const Block *b) { /* number of floats per row */
    return 3 * b->d_model + 2 * b->q.rows + 2 * b->k.rows + 2 * b->up.rows;
}

/* x (rows, d_model) = block(x). */
static void decode_block(const Block *b, float *x, int64_t rows, float *scratch, int num_threads) {
    const int64_t n = b->d_model;
    float *h = scratch, *y = h + rows * n, *y_ffn = y + rows * n, *q = y_ffn + rows * n, *z = q + rows * b->q.rows;
    float *k = z + rows * b->q.rows, *v = k + rows * b->k.rows, *up = v + rows * b->k.rows, *gate = up + rows * b->up.rows;
    normalize_rows(&b->attn.in, x, rows, n, h);
    linears((const Linear *const[]){&b->q, &b->k, &b->v}, 3, h, rows, (float *const[]){q, k, v}, num_threads);
    attention(&b->attention, q, k, v, rows, z, num_threads);
    linears((const Linear *const[]){&b->o}, 1, z, rows, (float *const[]){y}, num_threads);
    if (!b->is_parallel) add_branch(&b->attn, x, y, rows, n);
    /* With a shared norm of parallel branches, ffn.in is attn.in. */
    normalize_rows(&b->ffn.in, x, rows, n, h);
    linears((const Linear *const[]){&b->up, &b->gate}, 1 + (int)b->is_gated, h, rows, (float *const[]){up, gate}, num_threads);
    activate(b->activation, b->is_gated ? gate : up, b->is_gated ? up : NULL, rows * b->up.rows, up);
    linears((const Linear *const[]){&b->down}, 1, up, rows, (float *const[]){y_ffn}, num_threads);
    if (b->is_parallel) add_branch(&b->attn, x, y, rows, n);
    add_branch(&b->ffn, x, y_ffn, rows, n);
}

/* Consecutive blocks of a stack. */
void decode_blocks(const Block *blocks, int64_t num_blocks, float *x, int64_t rows, int num_threads) {
    int64_t size = 0;
    for (int64_t i = 0; i < num_blocks; i++)
        if (scratch_size(blocks + i) > size) size = scratch_size(blocks + i);
    float *scratch = malloc(sizeof(float) * (size_t)(size * rows));
    for (int64_t i = 0; i < num_blocks; i++) decode_block(blocks + i, x, rows, scratch, num_threads);
    free(scratch);
}
