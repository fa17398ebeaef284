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

/* e^x to 1 ulp or so for x <= 88 (0 below -87): 2^n * p(r), written so that a compiler makes vectors of it. Coefficients: Cephes expf. */
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
    int32_t bits = ((int32_t)n + 127) << 23;
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
#pragma omp parallel for simd num_threads(threads) if (count > 16384)
    for (i64 i = 0; i < count; i++) gate[i] = gate[i] / (1.0f + exp_(-gate[i])) * up[i];
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

/* One row's G query heads of one KV head over its keys [from, to), which `table` finds in the pools. scores: room for G * (to - from). */
LINE void attend_row(const float *q, float *out, const float *keys, const float *values, const i64 *table, i64 block, i64 from, i64 to, i64 G, i64 D,
                     float scale, float softcap, float *scores) {
    i64 n = to - from;
    for (i64 t = from; t < to; t++) {
        const float *key = keys + (table[t / block] * block + t % block) * D;
        for (i64 g = 0; g < G; g++) scores[g * n + t - from] = dot(q + g * D, key, D) * scale;
    }
    for (i64 g = 0; g < G; g++) {
        float *s = scores + g * n, top = -INFINITY, sum = 0;
        if (softcap > 0)
            for (i64 t = 0; t < n; t++) s[t] = softcap * tanhf(s[t] / softcap);
#pragma omp simd reduction(max : top)
        for (i64 t = 0; t < n; t++) top = s[t] > top ? s[t] : top;
#pragma omp simd reduction(+ : sum)
        for (i64 t = 0; t < n; t++) sum += s[t] = exp_(s[t] - top);
        float inverse = 1.0f / sum;
#pragma omp simd
        for (i64 t = 0; t < n; t++) s[t] *= inverse;
    }
    memset(out, 0, sizeof(float) * G * D);
    for (i64 t = from; t < to; t++) {
        const float *value = values + (table[t / block] * block + t % block) * D;
        for (i64 g = 0; g < G; g++) {
            float w = scores[g * n + t - from], *o = out + g * D;
#pragma omp simd
            for (i64 i = 0; i < D; i++) o[i] += w * value[i];
        }
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
#define WITH(g, d) attend_row(query, to_row, mine, theirs, own, block, from, to, g, d, scale, softcap, scores)
        if (D == 64 && G == 2) WITH(2, 64);
        else if (D == 64) WITH(G, 64);
        else if (D == 128) WITH(G, 128);
        else if (D == 32) WITH(G, 32);
        else WITH(G, D);
    }
}
