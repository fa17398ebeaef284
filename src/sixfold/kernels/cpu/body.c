/* CPU kernels of a transformer's body without attention, and the body made of them. Each output row
   is computed in an order that depends on that row only. So its bits do not depend on the other
   rows or on the number of threads. */

/* WIDE: floats per vector register. A `wide` may have any alignment. TALL: rows of a tile, chosen
   so that their sums, two registers per row, fill the registers. */
#ifdef __AVX512F__
enum { WIDE = 16, TALL = 12 };
#else
enum { WIDE = 8, TALL = 6 };
#endif
typedef float wide __attribute__((vector_size(4 * WIDE), aligned(4), may_alias));
#define WIDE_AT(p) (*(wide *)(p))
enum { PANEL = 2 * WIDE, CHUNK = 264 };

i64 panel_width(void) { return PANEL; }

/* Copy a matrix [N, K] into rows [first, first + N) of the panels. */
void pack(const float *weight, i64 N, i64 K, i64 first, float *panels, int threads) {
    /* A piece of a panel this deep stays in cache until all its rows are copied. */
    const i64 deep = 64;
#pragma omp parallel for num_threads(threads) if (N * K > 65536)
    for (i64 p = first / PANEL; p <= (first + N - 1) / PANEL; p++)
        for (i64 from = 0; from < K; from += deep)
            for (i64 n = p * PANEL < first ? first : p * PANEL; n < (p + 1) * PANEL && n < first + N; n++)
                for (i64 k = from; k < K && k < from + deep; k++) panels[(p * K + k) * PANEL + n % PANEL] = weight[(n - first) * K + k];
}

/* R output rows of one panel. Each sum starts from the output (if `add`) or 0, plus the bias, and
   then adds x[k] w[k] in the order of k. Each row has at least two sums: for a single sum GCC may
   use separate multiplications and additions where it fuses them for several, and the last bit
   would depend on R. */
LINE void tile(int R, const float *x, i64 x_stride, const float *panel, i64 K, const float *bias, float *out, i64 o_stride, int add) {
    wide s[TALL][2];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < 2; c++) {
            s[r][c] = add ? WIDE_AT(out + r * o_stride + c * WIDE) : (wide){0};
            if (bias) s[r][c] += WIDE_AT(bias + c * WIDE);
        }
    for (i64 k = 0; k < K; k++) {
        wide a = WIDE_AT(panel + k * PANEL), b = WIDE_AT(panel + k * PANEL + WIDE);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) s[r][0] += x[r * x_stride + k] * a, s[r][1] += x[r * x_stride + k] * b;
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < 2; c++) WIDE_AT(out + r * o_stride + c * WIDE) = s[r][c];
}

/* out = x W^T + bias for M rows, or out += x W^T + bias with `add`. panels: [panels, K, PANEL], the
   transposed rows of W, PANEL at a time. Rows after N are zeros, and bias is padded likewise.
   Threads share the rows evenly, in chunks that fit their caches. If that would leave few rows to
   each thread, they share the panels instead. */
void product(const float *x, i64 x_stride, const float *panels, const float *bias, float *out, i64 o_stride, i64 M, i64 N, i64 K, int add,
             int threads) {
    i64 parts = M < 64 * threads ? 1 : (M + CHUNK * threads - 1) / (CHUNK * threads) * threads;
    i64 count = (N + PANEL - 1) / PANEL, chunk = (M + parts * TALL - 1) / (parts * TALL) * TALL, chunks = (M + chunk - 1) / chunk;
#pragma omp parallel for num_threads(threads) schedule(static) if (M * N * K > 65536)
    for (i64 item = 0; item < count * chunks; item++) {
        i64 p = item % count, n = p * PANEL, m = item / count * chunk, end = m + chunk < M ? m + chunk : M, columns = N - n < PANEL ? N - n : PANEL;
        float edge[TALL * PANEL] = {0};
#define TAKE(R) \
    for (; m + R <= end; m += R) { \
        float *to = out + m * o_stride + n; \
        if (columns == PANEL) \
            tile(R, x + m * x_stride, x_stride, panels + n * K, K, bias ? bias + n : 0, to, o_stride, add); \
        else { /* the last panel is partly filled: a full write would overrun the row */ \
            for (i64 r = 0; r < R && add; r++) memcpy(edge + r * PANEL, to + r * o_stride, sizeof(float) * columns); \
            tile(R, x + m * x_stride, x_stride, panels + n * K, K, bias ? bias + n : 0, edge, PANEL, add); \
            for (i64 r = 0; r < R; r++) memcpy(to + r * o_stride, edge + r * PANEL, sizeof(float) * columns); \
        } \
    }
        TAKE(TALL) TAKE(4) TAKE(2) TAKE(1)
    }
}

LINE float inverse_rms(const float *x, i64 n, float epsilon) {
    float s = 0;
#pragma omp simd reduction(+ : s)
    for (i64 i = 0; i < n; i++) s += x[i] * x[i];
    return 1.0f / sqrtf(s / n + epsilon);
}

/* out = x / rms(x) * weight, for rows of `width` floats. */
void rms_norm(const float *x, const float *weight, float epsilon, float *out, i64 rows, i64 width, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > 16384)
    for (i64 r = 0; r < rows; r++) {
        const float *in = x + r * width;
        float *to = out + r * width, scale = inverse_rms(in, width, epsilon);
#pragma omp simd
        for (i64 i = 0; i < width; i++) to[i] = in[i] * scale * weight[i];
    }
}

/* Replace the first half of each row (gate) by silu(gate) * second half (up). */
void silu_mul(float *gate_up, i64 rows, i64 width, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > 16384)
    for (i64 r = 0; r < rows; r++) {
        float *gate = gate_up + r * 2 * width, *up = gate + width;
#pragma omp simd
        for (i64 i = 0; i < width; i++) gate[i] = gate[i] / (1.0f + exp_(gate[i] < -88.0f ? 88.0f : -gate[i])) * up[i];
    }
}

/* Norm and rotary embedding of the queries and keys of each row, in place: RMSNorm of each head if
   it has a weight, then rotation of its halves (Su et al. 2021) by the row's position. qkv: rows at
   a distance of `stride`, with query heads first, then key heads. cosine, sine:
   [positions, D / 2]. */
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

/* A matrix [N, K] in the panels that `product` reads. */
typedef struct {
    const float *panels, *bias;
    i64 N, K;
} Linear;

typedef struct {
    const float *weight;
    float epsilon;
} Norm;

typedef struct {
    Linear qkv, output, gate_up, down;
    /* The weight of q_norm and k_norm is NULL if the model has none. */
    Norm before_attention, before_mlp, q_norm, k_norm;
} Layer;

/* A forward pass. cosine, sine: see `rotate`. attention: arguments of each layer. x: embedding of
   each row, overwritten by the residual stream. normed: in the end the output. qkv, attended,
   gate_up: scratch. */
typedef struct {
    const Layer *layers;
    i64 depth, hidden, heads, kv_heads, D;
    Norm last;
    const float *cosine, *sine;
    Attend *attend;
    const Attention *attention;
    const i64 *positions;
    float *x, *normed, *qkv, *attended, *gate_up;
} Body;

LINE void apply(const Linear *l, const float *x, i64 stride, float *out, i64 M, int add, int threads) {
    product(x, stride, l->panels, l->bias, out, l->N, M, l->N, l->K, add, threads);
}

/* Run all layers for rows [first, first + rows). */
static void run_layers(const Body *b, i64 first, i64 rows, i64 part, int threads) {
    const i64 H = b->hidden, W = b->heads * b->D, KV = b->kv_heads * b->D, Q = W + 2 * KV, G = b->layers->gate_up.N, *positions = b->positions + first;
    float *x = b->x + first * H, *normed = b->normed + first * H, *qkv = b->qkv + first * Q, *attended = b->attended + first * W;
    float *gate_up = b->gate_up + first * G;
    for (i64 i = 0; i < b->depth; i++) {
        const Layer *l = b->layers + i;
        rms_norm(x, l->before_attention.weight, l->before_attention.epsilon, normed, rows, H, threads);
        apply(&l->qkv, normed, H, qkv, rows, 0, threads);
        rotate(qkv, Q, rows, b->heads, b->kv_heads, b->D, l->q_norm.weight, l->k_norm.weight, l->q_norm.epsilon, b->cosine, b->sine, positions, threads);
        b->attend(b->attention + i, first, rows, qkv, qkv + W, qkv + W + KV, Q, Q, attended, part, threads);
        apply(&l->output, attended, W, x, rows, 1, threads);
        rms_norm(x, l->before_mlp.weight, l->before_mlp.epsilon, normed, rows, H, threads);
        apply(&l->gate_up, normed, H, gate_up, rows, 0, threads);
        silu_mul(gate_up, rows, G / 2, threads);
        apply(&l->down, gate_up, G, x, rows, 1, threads);
    }
    rms_norm(x, b->last.weight, b->last.epsilon, normed, rows, H, threads);
}

/* Run all layers for all rows. Rows are `apart` if no row reads what another row writes. If many
   rows are apart, each thread runs its share of the rows through all layers. Then no thread waits
   for another, and one can multiply while the attention of another waits for memory. Otherwise the
   threads share every operation. */
void body(const Body *b, i64 rows, int apart, int threads) {
    if (!apart || threads < 2 || rows < 64 * threads)
        run_layers(b, 0, rows, 0, threads);
    else {
        /* Do not use an `if` clause of the pragma: inside a parallel region, even of one thread,
           GCC's OpenMP creates new threads for every inner region. */
        const i64 share = (rows + threads * TALL - 1) / (threads * TALL) * TALL;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
        for (i64 part = 0; part < threads; part++)
            if (part * share < rows) run_layers(b, part * share, rows - part * share < share ? rows - part * share : share, part, 1);
    }
}
