/* CPU kernels that round weights to int8 or fp8 (e4m3) and back to float32.

   A scale has the 8 significant bits of bfloat16, so number * scale is exact in float32. */

#define LEAST_SCALE 0x1p-100f

/* Bits of the largest |x|. As integers, the bits of NaN are larger than those of every number. */
LINE uint32_t largest_bits(const float *x, i64 n) {
    uint32_t most = 0;
#pragma omp simd reduction(max : most)
    for (i64 i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    return most;
}

/* The scale for which the largest |x| is near `most`. NaN if it is NaN. */
LINE float scale_for(uint32_t bits, float most) {
    float largest;
    memcpy(&largest, &bits, 4);
    float scale = widened(narrowed(largest / most));
    return scale < LEAST_SCALE ? LEAST_SCALE : scale;
}

LINE float clamped(float x, float most) { return x > most ? most : x < -most ? -most : x; }

/* Round to the nearest e4m3 number, ties to even: 3 bits of mantissa, multiples of 2^-9 below 2^-6.
   |x| must be at most 448, or NaN. */
LINE float to_e4m3(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits = (bits + 0x7ffff + (bits >> 20 & 1)) & 0xfff00000;
    float normal;
    memcpy(&normal, &bits, 4);
    float subnormal = rintf(x * 512) * 0x1p-9f;
    return x != x ? x : fabsf(x) < 0x1p-6f ? subnormal : normal;
}

/* int8 from -127 to 127, one scale per row. x, out: [rows, columns]. */
void round_int8(const float *x, float *out, i64 rows, i64 columns, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * columns > 16384)
    for (i64 r = 0; r < rows; r++) {
        const float *in = x + r * columns;
        float *to = out + r * columns, scale = scale_for(largest_bits(in, columns), 127);
        /* + 0: int8 has no negative zero. */
#pragma omp simd
        for (i64 i = 0; i < columns; i++)
            to[i] = (clamped(rintf(in[i] / scale), 127) + 0.0f) * scale;
    }
}

/* e4m3, one scale for all. x, out: [rows, columns]. */
void round_fp8(const float *x, float *out, i64 rows, i64 columns, int threads) {
    uint32_t most = 0;
#pragma omp parallel for num_threads(threads) reduction(max : most) if (rows * columns > 16384)
    for (i64 r = 0; r < rows; r++) {
        uint32_t bits = largest_bits(x + r * columns, columns);
        most = bits > most ? bits : most;
    }
    float scale = scale_for(most, 448);
#pragma omp parallel for num_threads(threads) if (rows * columns > 16384)
    for (i64 r = 0; r < rows; r++) {
        const float *in = x + r * columns;
        float *to = out + r * columns;
#pragma omp simd
        for (i64 i = 0; i < columns; i++) to[i] = to_e4m3(clamped(in[i] / scale, 448)) * scale;
    }
}
