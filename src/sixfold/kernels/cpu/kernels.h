/* Shared by the CPU kernels: the compiler includes it before each C file. Numbers are float32 where
   no other type is named, and strides are in numbers. */

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

/* A bfloat16: the upper half of a float32. The product of two is exact in float32. */
typedef uint16_t half;

/* Round to the nearest bfloat16, ties to even. */
LINE half narrowed(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

LINE float widened(half x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

/* Paged attention of one layer, for all rows of a forward pass: see `paged_attention`. sinks: one
   per head, or NULL. bfloat16: 1 if keys and values are bfloat16, 0 if float32. */
typedef struct {
    void *keys, *values;
    const float *sinks;
    const i64 *slots, *table, *positions;
    i64 *scratch, pool, columns, block, heads, kv_heads, D, window, bfloat16;
    float scale, softcap;
} Attention;

typedef void Attend(const Attention *a, i64 first, i64 rows, const float *q, const float *k,
                    const float *v, i64 q_stride, i64 kv_stride, float *out, i64 part, int threads);

/* e^x = 2^n * p(r), to about 1 ulp, for x <= 88: above, the exponent would overflow into the sign
   bit. 0 below -87.3; NaN for NaN. Written so that compilers vectorise it. Coefficients: Cephes
   expf. */
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
