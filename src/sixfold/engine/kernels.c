/* The CPU kernels of the engine. Each row of the output is computed by one thread, in an order that depends on that row alone: its bits are the
   same whatever the other rows are, and however many threads there are. float32 throughout; strides are in floats. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#else
#define omp_get_thread_num() 0
#endif

#define LINE __attribute__((always_inline)) static inline

typedef int64_t i64;

/* e^x to 1 ulp or so for x <= 88 (beyond, the exponent would run into the sign), 0 below -87.3, NaN of NaN: 2^n * p(r), written so that a compiler
   makes vectors of it. Coefficients: Cephes expf. */
LINE float exp_(float x) {
    float y = x < -87.3f ? -87.3f : x;
    float n = floorf(y * 1.44269504088896341f + 0.5f);
    float r = y - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits = ((uint32_t)(int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return x < -87.3f ? 0.0f : p * scale;
}

LINE float dot(const float *a, const float *b, i64 n) {
    float s = 0;
#pragma omp simd reduction(+ : s)
    for (i64 i = 0; i < n; i++) s += a[i] * b[i];
    return s;
}

LINE float inverse_rms(const float *x, i64 n, float epsilon) { return 1.0f / sqrtf(dot(x, x, n) / n + epsilon); }

/* out = x / rms(x) * weight, for rows of `width`. */
void rms_norm(const float *x, const float *weight, float epsilon, float *out, i64 rows, i64 width, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > 16384)
    for (i64 r = 0; r < rows; r++) {
        const float *in = x + r * width;
        float *to = out + r * width, scale = inverse_rms(in, width, epsilon);
#pragma omp simd
        for (i64 i = 0; i < width; i++) to[i] = in[i] * scale * weight[i];
    }
}

/* gate = silu(gate) * up */
void silu_mul(float *gate, const float *up, i64 count, int threads) {
    const i64 piece = 4096;
#pragma omp parallel for num_threads(threads) if (count > 4 * piece)
    for (i64 from = 0; from < count; from += piece) {
        i64 to = from + piece < count ? from + piece : count;
#pragma omp simd
        for (i64 i = from; i < to; i++) gate[i] = gate[i] / (1.0f + exp_(gate[i] < -88.0f ? 88.0f : -gate[i])) * up[i];
    }
}

/* Queries and keys of each row, in place: RMSNorm of each head where there is a weight, then the rotation of halves (Su et al. 2021) by the row's
   position. qkv: rows of `stride`, query heads first, then key heads. cosine, sine: [positions, D / 2]. */
void rotate(float *qkv, i64 stride, i64 rows, i64 heads, i64 kv_heads, i64 D, const float *q_weight, const float *k_weight, float epsilon,
            const float *cosine, const float *sine, const i64 *positions, int threads) {
    i64 half = D / 2;
#pragma omp parallel for num_threads(threads) if (rows * (heads + kv_heads) * D > 16384)
    for (i64 r = 0; r < rows; r++) {
        const float *c = cosine + positions[r] * half, *s = sine + positions[r] * half;
        for (i64 h = 0; h < heads + kv_heads; h++) {
            float *x = qkv + r * stride + h * D;
            const float *weight = h < heads ? q_weight : k_weight;
            if (weight) {
                float scale = inverse_rms(x, D, epsilon);
#pragma omp simd
                for (i64 i = 0; i < D; i++) x[i] = x[i] * scale * weight[i];
            }
#pragma omp simd
            for (i64 i = 0; i < half; i++) {
                float a = x[i], b = x[i + half];
                x[i] = a * c[i] - b * s[i];
                x[i + half] = b * c[i] + a * s[i];
            }
        }
    }
}

/* Sixteen floats at a time; the compiler cuts them to what the machine has. */
typedef float lanes __attribute__((vector_size(64)));

LINE lanes load(const float *p) {
    lanes v;
    memcpy(&v, p, sizeof v);
    return v;
}

LINE float sum(lanes v) {
    typedef float eight __attribute__((vector_size(32)));
    typedef float four __attribute__((vector_size(16)));
    eight halves[2];
    memcpy(halves, &v, sizeof v);
    halves[0] += halves[1];
    four quarters[2];
    memcpy(quarters, halves, sizeof quarters);
    quarters[0] += quarters[1];
    return (quarters[0][0] + quarters[0][2]) + (quarters[0][1] + quarters[0][3]);
}

/* For each position t of [from, to): `row` is its key or value in one head's pool, `next` the one a block further on. */
#define EACH(pool) \
    for (i64 b = from / block; b * block < to; b++) \
        for (i64 t = b * block < from ? from : b * block, stop = (b + 1) * block < to ? (b + 1) * block : to; t < stop; t++) \
            for (const float *row = (pool) + (table[b] * block + t - b * block) * D, \
                             *next = stop < to ? row + (table[b + 1] - table[b]) * block * D : row, *once = row; once; once = 0)

LINE void softmax(float *s, i64 n, float softcap) {
    float top = -INFINITY, total = 0;
    if (softcap > 0)
        for (i64 t = 0; t < n; t++) s[t] = softcap * tanhf(s[t] / softcap);
#pragma omp simd reduction(max : top)
    for (i64 t = 0; t < n; t++) top = s[t] > top ? s[t] : top;
#pragma omp simd reduction(+ : total)
    for (i64 t = 0; t < n; t++) total += s[t] = exp_(s[t] - top);
    float inverse = 1.0f / total;
#pragma omp simd
    for (i64 t = 0; t < n; t++) s[t] *= inverse;
}

/* One query over its keys [from, to), for D = 16 * W: the sums stay in registers. `G` queries read a key together. scores: room for G * (to - from). */
LINE void attend(const float *q, float *out, const float *keys, const float *values, const i64 *table, i64 block, i64 from, i64 to, int G, int W,
                 float scale, float softcap, float *scores) {
    i64 n = to - from, D = 16 * W;
    lanes query[G * W], mine[G * W];
    for (int i = 0; i < G * W; i++) query[i] = load(q + 16 * i) * scale;
    EACH(keys) {
        for (int i = 0; i < W; i++) __builtin_prefetch(next + 16 * i);
#pragma GCC unroll 8
        for (int g = 0; g < G; g++) {
            lanes s = query[g * W] * load(row);
#pragma GCC unroll 16
            for (int i = 1; i < W; i++) s += query[g * W + i] * load(row + 16 * i);
            scores[g * n + t - from] = sum(s);
        }
    }
    for (int g = 0; g < G; g++) softmax(scores + g * n, n, softcap);
    for (int i = 0; i < G * W; i++) mine[i] = (lanes){0};
    EACH(values) {
        for (int i = 0; i < W; i++) __builtin_prefetch(next + 16 * i);
#pragma GCC unroll 8
        for (int g = 0; g < G; g++)
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) mine[g * W + i] += scores[g * n + t - from] * load(row + 16 * i);
    }
    memcpy(out, mine, sizeof(float) * G * D);
}

/* The same for any D and G. */
LINE void attend_any(const float *q, float *out, const float *keys, const float *values, const i64 *table, i64 block, i64 from, i64 to, i64 G, i64 D,
                     float scale, float softcap, float *scores) {
    i64 n = to - from;
    EACH(keys)
        for (i64 g = 0; g < G; g++) scores[g * n + t - from] = dot(q + g * D, row, D) * scale;
    for (i64 g = 0; g < G; g++) softmax(scores + g * n, n, softcap);
    memset(out, 0, sizeof(float) * G * D);
    EACH(values)
        for (i64 g = 0; g < G; g++) {
            float weight = scores[g * n + t - from], *o = out + g * D;
#pragma omp simd
            for (i64 i = 0; i < D; i++) o[i] += weight * row[i];
        }
}

/* Write each row's new key and value into the pools, then attend: row r over positions [max(0, p - window + 1), p] of its own table, p = positions[r].
   All rows are written before any attends: rows may be tokens of one sequence. Pools: [kv_heads, blocks, block, D], pool: floats of one head.
   scratch: [threads, room]. */
void paged_attention(const float *q, i64 q_stride, const float *k, const float *v, i64 kv_stride, float *out, float *keys, float *values, i64 pool,
                     const i64 *slots, const i64 *table, i64 columns, const i64 *positions, i64 rows, i64 heads, i64 kv_heads, i64 D, i64 block,
                     float scale, i64 window, float softcap, float *scratch, i64 room, int threads) {
    i64 G = heads / kv_heads;
    for (i64 r = 0; r < rows; r++)
        for (i64 h = 0; h < kv_heads; h++) {
            memcpy(keys + h * pool + slots[r] * D, k + r * kv_stride + h * D, sizeof(float) * D);
            memcpy(values + h * pool + slots[r] * D, v + r * kv_stride + h * D, sizeof(float) * D);
        }
#pragma omp parallel for num_threads(threads) schedule(dynamic, 4)
    for (i64 item = 0; item < rows * kv_heads; item++) {
        i64 r = item / kv_heads, h = item % kv_heads, to = positions[r] + 1, from = window > 0 && to > window ? to - window : 0;
        const float *query = q + r * q_stride + h * G * D, *mine = keys + h * pool, *theirs = values + h * pool;
        float *to_row = out + (r * heads + h * G) * D, *scores = scratch + omp_get_thread_num() * room;
        const i64 *own = table + r * columns;
#define WITH(fn, g, d) fn(query, to_row, mine, theirs, own, block, from, to, g, d, scale, softcap, scores)
#define GROUPS(w) \
    if (G == 1) WITH(attend, 1, w); \
    else if (G == 2) WITH(attend, 2, w); \
    else if (G == 4) WITH(attend, 4, w); \
    else for (i64 g = 0; g < G; g++, query += D, to_row += D) WITH(attend, 1, w);
        if (D == 128) { GROUPS(8) }
        else if (D == 64) { GROUPS(4) }
        else if (D == 32) { GROUPS(2) }
        else WITH(attend_any, G, D);
    }
}

LINE double piece_sum(const float *e, i64 n) {
    double s = 0;
#pragma omp simd reduction(+ : s)
    for (i64 i = 0; i < n; i++) s += e[i];
    return s;
}

/* Draw a token of each row from softmax(logits / temperature) by inverse transform: the first whose running sum of probabilities passes noise * total.
   Temperature 0 takes the most probable one. logp: of the token; at temperature 1 where it is 0. Sums over the vocabulary are in double precision: in
   single precision they would lose the rare tokens. Where a logit is NaN, or all are -inf, some token comes out with logp NaN. scratch: [threads, V]. */
void sample(const float *logits, i64 stride, i64 rows, i64 V, const float *temperature, const double *noise, i64 *tokens, float *logp, float *scratch,
            int threads) {
    const i64 piece = 64;
#pragma omp parallel for num_threads(threads) if (rows * V > 16384)
    for (i64 r = 0; r < rows; r++) {
        const float *x = logits + r * stride;
        float *e = scratch + omp_get_thread_num() * V, T = temperature[r] > 0 ? temperature[r] : 1.0f, top = -INFINITY;
#pragma omp simd reduction(max : top)
        for (i64 i = 0; i < V; i++) top = x[i] > top ? x[i] : top;
#pragma omp simd
        for (i64 i = 0; i < V; i++) e[i] = exp_((x[i] - top) / T); /* not x / T - top / T: a small T would make infinities of them */
        double total = 0, passed = 0;
        i64 token = 0;
        for (i64 from = 0; from < V; from += piece) total += piece_sum(e + from, V - from < piece ? V - from : piece);
        double wanted = noise[r] * total;
        if (temperature[r] > 0) {
            i64 from = 0;
            for (double s; from + piece < V && passed + (s = piece_sum(e + from, piece)) <= wanted; from += piece) passed += s;
            for (token = from; token < V && (passed += e[token]) <= wanted;) token++;
            if (token == V) /* rounding left the sum below the noise: the last token that can be drawn */
                for (token--; token > 0 && e[token] <= 0;) token--;
        } else
            while (token < V - 1 && x[token] < top) token++; /* not e < 1: what is just below the top rounds to 1 */
        tokens[r] = token;
        logp[r] = (x[token] - top) / T - (float)log(total);
    }
}
