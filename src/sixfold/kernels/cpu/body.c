/* CPU kernels of a transformer's body without attention, and the body made of them. Each output row
   is computed in an order that depends on that row only. So its bits do not depend on the other
   rows or on the number of threads. */

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif
/* AMX. Linux lets a process use the tile registers on request (ARCH_REQ_XCOMP_PERM of
   XFEATURE_XTILEDATA). Tests replace the instructions: they define these macros first. */
#if defined(__AMX_BF16__) && defined(__linux__) && !defined(LOAD_TILE)
#include <sys/syscall.h>
#include <unistd.h>
#define ALLOW_TILES() (!syscall(SYS_arch_prctl, 0x1023, 18))
#define SHAPE_TILES _tile_loadconfig
#define LOAD_TILE _tile_loadd
#define STORE_TILE _tile_stored
#define MULTIPLY_TILES _tile_dpbf16ps
#define FREE_TILES _tile_release
#endif

/* WIDE: floats per vector register. A `wide` may have any alignment. TALL: rows of a tile, chosen
   so that their sums, two registers per row, fill the registers. */
#ifdef __AVX512F__
enum { WIDE = 16, TALL = 12 };
#else
enum { WIDE = 8, TALL = 6 };
#endif
typedef float wide __attribute__((vector_size(4 * WIDE), aligned(4), may_alias));
typedef uint32_t pairs __attribute__((vector_size(4 * WIDE), aligned(4), may_alias));
#define WIDE_AT(p) (*(wide *)(p))
#define PAIRS_AT(p) (*(pairs *)(p))
enum { PANEL = 2 * WIDE, CHUNK = 264 };

/* Inputs of a bfloat16 product are padded with zeros to a multiple of DEEP. */
enum { DEEP = 32 };
LINE i64 deep(i64 K) { return (K + DEEP - 1) / DEEP * DEEP; }

i64 panel_width(void) { return PANEL; }

/* Copy a matrix [N, K] into rows [first, first + N) of the panels. */
void pack(const float *weight, i64 N, i64 K, i64 first, float *panels, int threads) {
    /* A piece of a panel this deep stays in cache until all its rows are copied. */
    const i64 block = 64;
#pragma omp parallel for num_threads(threads) if (N * K > 65536)
    for (i64 p = first / PANEL; p <= (first + N - 1) / PANEL; p++)
        for (i64 from = 0; from < K; from += block)
            for (i64 n = p * PANEL < first ? first : p * PANEL;
                 n < (p + 1) * PANEL && n < first + N; n++)
                for (i64 k = from; k < K && k < from + block; k++)
                    panels[(p * K + k) * PANEL + n % PANEL] = weight[(n - first) * K + k];
}

/* Round M rows of K floats to rows of deep(K) bfloat16, with zeros at the end. */
void narrow(const float *x, i64 x_stride, i64 M, i64 K, half *out, int threads) {
    const i64 D = deep(K);
#pragma omp parallel for num_threads(threads) if (M * K > 16384)
    for (i64 r = 0; r < M; r++) {
        const float *in = x + r * x_stride;
        half *to = out + r * D;
#pragma omp simd
        for (i64 k = 0; k < K; k++) to[k] = narrowed(in[k]);
        memset(to + K, 0, sizeof(half) * (D - K));
    }
}

/* As `pack`, rounded to bfloat16: [panels, deep(K) / 2, PANEL, 2], two neighbouring inputs of an
   output side by side. Numbers beyond N and K are not written: they must be zeros. */
void pack_half(const float *weight, i64 N, i64 K, i64 first, half *panels, int threads) {
    const i64 block = 64, D = deep(K);
#pragma omp parallel for num_threads(threads) if (N * K > 65536)
    for (i64 p = first / PANEL; p <= (first + N - 1) / PANEL; p++)
        for (i64 from = 0; from < K; from += block)
            for (i64 n = p * PANEL < first ? first : p * PANEL;
                 n < (p + 1) * PANEL && n < first + N; n++)
                for (i64 k = from; k < K && k < from + block; k++)
                    panels[(p * D + k / 2 * 2) * PANEL + n % PANEL * 2 + k % 2] =
                        narrowed(weight[(n - first) * K + k]);
}

/* Set the sums of R rows of one panel to their initial values: the output or 0, plus the bias. */
LINE void start(int R, wide s[][2], const float *bias, const float *out, i64 o_stride, int add) {
    for (int r = 0; r < R; r++)
        for (int c = 0; c < 2; c++) {
            s[r][c] = add ? WIDE_AT(out + r * o_stride + c * WIDE) : (wide){0};
            if (bias) s[r][c] += WIDE_AT(bias + c * WIDE);
        }
}

/* R output rows of one panel. Each sum starts from the output (if `add`) or 0, plus the bias, and
   then adds x[k] w[k] in the order of k. Each row has at least two sums: for a single sum GCC may
   use separate multiplications and additions where it fuses them for several, and the last bit
   would depend on R. */
LINE void tile(int R, const float *x, i64 x_stride, const float *panel, i64 K, const float *bias,
               float *out, i64 o_stride, int add) {
    wide s[TALL][2];
    start(R, s, bias, out, o_stride, add);
    for (i64 k = 0; k < K; k++) {
        wide a = WIDE_AT(panel + k * PANEL), b = WIDE_AT(panel + k * PANEL + WIDE);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++)
            s[r][0] += x[r * x_stride + k] * a, s[r][1] += x[r * x_stride + k] * b;
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < 2; c++) WIDE_AT(out + r * o_stride + c * WIDE) = s[r][c];
}

/* As `tile`, for bfloat16 inputs and weights, two inputs at a time, with float32 sums. The order in
   which the processor adds both products to a sum does not depend on other rows. */
LINE void tile_half(int R, const half *x, i64 x_stride, const half *panel, i64 K, const float *bias,
                    float *out, i64 o_stride, int add) {
    wide s[TALL][2];
    start(R, s, bias, out, o_stride, add);
    for (i64 k = 0; k < K; k += 2) {
#ifdef __AVX512BF16__
        __m512bh a = (__m512bh)_mm512_loadu_si512(panel + k * PANEL),
                 b = (__m512bh)_mm512_loadu_si512(panel + k * PANEL + 2 * WIDE);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            int32_t pair;
            memcpy(&pair, x + r * x_stride + k, 4);
            __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            s[r][0] = (wide)_mm512_dpbf16_ps((__m512)s[r][0], both, a),
            s[r][1] = (wide)_mm512_dpbf16_ps((__m512)s[r][1], both, b);
        }
#else
        for (int i = 0; i < 2; i++) { /* odd inputs are the upper halves of words */
            pairs low = PAIRS_AT(panel + k * PANEL), high = PAIRS_AT(panel + k * PANEL + 2 * WIDE);
            wide a = (wide)((i ? low : low << 16) & 0xffff0000u),
                 b = (wide)((i ? high : high << 16) & 0xffff0000u);
#pragma GCC unroll 12
            for (int r = 0; r < R; r++)
                s[r][0] += widened(x[r * x_stride + k + i]) * a,
                    s[r][1] += widened(x[r * x_stride + k + i]) * b;
        }
#endif
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < 2; c++) WIDE_AT(out + r * o_stride + c * WIDE) = s[r][c];
}

#ifdef LOAD_TILE
/* A tile register holds 16 rows of 64 bytes. One instruction adds the products of 16 rows of 32
   inputs with 16 outputs to 16 x 16 sums. All tiles are full. So rows of x beyond the last one are
   read too (see `spare_rows`), but their sums are not used. */
enum { TILE_ROWS = 16, SQUARE = 32 };
static int with_tiles;

/* Returns 1 if the process may use the tile registers. */
static int allow_tiles(void) { return with_tiles = ALLOW_TILES(); }

static void enter_tiles(void) {
    struct {
        uint8_t palette, start, zeros[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = TILE_ROWS;
    SHAPE_TILES(&shape);
}

/* Up to SQUARE output rows of one panel of 32 outputs. */
static void square(i64 rows, i64 columns, const char *x, i64 K, const char *panel,
                   const float *bias, float *out, i64 o_stride, int add) {
    float s[SQUARE][PANEL] = {{0}};
    for (i64 r = 0; r < rows; r++)
        for (i64 c = 0; c < columns; c++)
            s[r][c] = (add ? out[r * o_stride + c] : 0) + (bias ? bias[c] : 0);
    const int tall = rows > TILE_ROWS, line = sizeof(s[0]);
    LOAD_TILE(0, s[0], line);
    LOAD_TILE(1, s[0] + 16, line);
    LOAD_TILE(2, s[TILE_ROWS], line);
    LOAD_TILE(3, s[TILE_ROWS] + 16, line);
    for (i64 k = 0; k < K; k += DEEP) {
        LOAD_TILE(6, panel + 2 * k * PANEL, 4 * PANEL);
        LOAD_TILE(7, panel + 2 * k * PANEL + 64, 4 * PANEL);
        LOAD_TILE(4, x + 2 * k, 2 * K);
        MULTIPLY_TILES(0, 4, 6);
        MULTIPLY_TILES(1, 4, 7);
        if (tall) {
            LOAD_TILE(5, x + 2 * (TILE_ROWS * K + k), 2 * K);
            MULTIPLY_TILES(2, 5, 6);
            MULTIPLY_TILES(3, 5, 7);
        }
    }
    STORE_TILE(0, s[0], line);
    STORE_TILE(1, s[0] + 16, line);
    STORE_TILE(2, s[TILE_ROWS], line);
    STORE_TILE(3, s[TILE_ROWS] + 16, line);
    for (i64 r = 0; r < rows; r++) memcpy(out + r * o_stride, s[r], sizeof(float) * columns);
}
#else
enum { with_tiles = 0, SQUARE = 1 };
static int allow_tiles(void) { return 0; }
#define enter_tiles()
#define FREE_TILES()
#define square(...)
#endif

/* Instructions of bfloat16 products: 2 for AMX, 1 for AVX512-BF16, 0 for float32 arithmetic on
   widened numbers. Call it once before any product. */
int prepare_half(void) {
#ifdef __AVX512BF16__
    return allow_tiles() ? 2 : 1;
#else
    return allow_tiles() ? 2 : 0;
#endif
}

/* Rows that `product_half` may read beyond the last one. */
i64 spare_rows(void) { return SQUARE; }

/* Numbers of a row from `narrow` of K floats. */
i64 narrow_width(i64 K) { return deep(K); }

/* out = x W^T + bias for M rows, or out += x W^T + bias with `add`. panels: [panels, K, PANEL], the
   transposed rows of W, PANEL at a time. Rows after N are zeros, and bias is padded likewise.
   Threads share the rows evenly, in chunks that fit their caches. If that would leave few rows to
   each thread, they share the panels instead. */
static void multiply(int narrowed, const char *x, i64 x_stride, const char *panels,
                     const float *bias, float *out, i64 o_stride, i64 M, i64 N, i64 K, int add,
                     int threads) {
    const int tiled = narrowed && with_tiles, size = narrowed ? sizeof(half) : sizeof(float);
    i64 tall = tiled ? SQUARE : TALL,
        parts = M < 64 * threads ? 1 : (M + CHUNK * threads - 1) / (CHUNK * threads) * threads;
    i64 count = (N + PANEL - 1) / PANEL, chunk = (M + parts * tall - 1) / (parts * tall) * tall,
        chunks = (M + chunk - 1) / chunk;
#pragma omp parallel num_threads(threads) if (M * N * K > 65536)
    {
        if (tiled) enter_tiles();
#pragma omp for schedule(static)
        for (i64 item = 0; item < count * chunks; item++) {
            i64 p = item % count, n = p * PANEL, m = item / count * chunk,
                end = m + chunk < M ? m + chunk : M, columns = N - n < PANEL ? N - n : PANEL;
            const char *panel = panels + n * K * size;
            const float *offset = bias ? bias + n : 0;
            float edge[TALL * PANEL] = {0};
            for (; tiled && m < end; m += SQUARE)
                square(end - m < SQUARE ? end - m : SQUARE, columns, x + m * x_stride * size, K,
                       panel, offset, out + m * o_stride + n, o_stride, add);
#define TILE(R, to, stride) \
    if (narrowed) \
        tile_half(R, (const half *)row, x_stride, (const half *)panel, K, offset, to, stride, \
                  add); \
    else \
        tile(R, (const float *)row, x_stride, (const float *)panel, K, offset, to, stride, add);
#define TAKE(R) \
    for (; m + R <= end; m += R) { \
        const char *row = x + m * x_stride * size; \
        float *to = out + m * o_stride + n; \
        if (columns == PANEL) { \
            TILE(R, to, o_stride) \
        } else { /* the last panel is partly filled: a full write would overrun the row */ \
            for (i64 r = 0; r < R && add; r++) \
                memcpy(edge + r * PANEL, to + r * o_stride, sizeof(float) * columns); \
            TILE(R, edge, PANEL) \
            for (i64 r = 0; r < R; r++) \
                memcpy(to + r * o_stride, edge + r * PANEL, sizeof(float) * columns); \
        } \
    }
            TAKE(TALL)
            TAKE(4)
            TAKE(2)
            TAKE(1)
        }
        if (tiled) FREE_TILES();
    }
}

void product(const float *x, i64 x_stride, const float *panels, const float *bias, float *out,
             i64 o_stride, i64 M, i64 N, i64 K, int add, int threads) {
    multiply(0, (const char *)x, x_stride, (const char *)panels, bias, out, o_stride, M, N, K, add,
             threads);
}

/* As `product`, for M rows from `narrow` and panels from `pack_half`. */
void product_half(const half *x, const half *panels, const float *bias, float *out, i64 o_stride,
                  i64 M, i64 N, i64 K, int add, int threads) {
    multiply(1, (const char *)x, deep(K), (const char *)panels, bias, out, o_stride, M, N, deep(K),
             add, threads);
}

LINE float inverse_rms(const float *x, i64 n, float epsilon) {
    float s = 0;
#pragma omp simd reduction(+ : s)
    for (i64 i = 0; i < n; i++) s += x[i] * x[i];
    return 1.0f / sqrtf(s / n + epsilon);
}

/* out = x / rms(x) * weight, for rows of `width` floats. */
void rms_norm(const float *x, const float *weight, float epsilon, float *out, i64 rows, i64 width,
              int threads) {
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
        for (i64 i = 0; i < width; i++)
            gate[i] = gate[i] / (1.0f + exp_(gate[i] < -88.0f ? 88.0f : -gate[i])) * up[i];
    }
}

/* Norm and rotary embedding of the queries and keys of each row, in place: RMSNorm of each head if
   it has a weight, then rotation of its halves (Su et al. 2021) by the row's position. qkv: rows at
   a distance of `stride`, with query heads first, then key heads. cosine, sine:
   [positions, D / 2]. */
void rotate(float *qkv, i64 stride, i64 rows, i64 heads, i64 kv_heads, i64 D, const float *q_weight,
            const float *k_weight, float epsilon, const float *cosine, const float *sine,
            const i64 *positions, int threads) {
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

/* A matrix [N, K] in the panels that `product` or `product_half` reads. */
typedef struct {
    const void *panels;
    const float *bias;
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
   gate_up: scratch. narrow: scratch for the inputs of products, `room` bfloat16 for each row. NULL
   if the weights are float32. */
typedef struct {
    const Layer *layers;
    i64 depth, hidden, heads, kv_heads, D;
    Norm last;
    const float *cosine, *sine;
    Attend *attend;
    const Attention *attention;
    const i64 *positions;
    float *x, *normed, *qkv, *attended, *gate_up;
    half *narrow;
    i64 room;
} Body;

LINE void apply(const Body *b, const Linear *l, const float *x, i64 stride, float *out, i64 first,
                i64 M, int add, int threads) {
    if (b->narrow) {
        half *rows = b->narrow + first * b->room;
        narrow(x, stride, M, l->K, rows, threads);
        product_half(rows, l->panels, l->bias, out, l->N, M, l->N, l->K, add, threads);
    } else
        product(x, stride, l->panels, l->bias, out, l->N, M, l->N, l->K, add, threads);
}

/* Run all layers for rows [first, first + rows). */
static void run_layers(const Body *b, i64 first, i64 rows, i64 part, int threads) {
    const i64 H = b->hidden, W = b->heads * b->D, KV = b->kv_heads * b->D, Q = W + 2 * KV,
              G = b->layers->gate_up.N, *positions = b->positions + first;
    float *x = b->x + first * H, *normed = b->normed + first * H, *qkv = b->qkv + first * Q,
          *attended = b->attended + first * W;
    float *gate_up = b->gate_up + first * G;
    for (i64 i = 0; i < b->depth; i++) {
        const Layer *l = b->layers + i;
        rms_norm(x, l->before_attention.weight, l->before_attention.epsilon, normed, rows, H,
                 threads);
        apply(b, &l->qkv, normed, H, qkv, first, rows, 0, threads);
        rotate(qkv, Q, rows, b->heads, b->kv_heads, b->D, l->q_norm.weight, l->k_norm.weight,
               l->q_norm.epsilon, b->cosine, b->sine, positions, threads);
        b->attend(b->attention + i, first, rows, qkv, qkv + W, qkv + W + KV, Q, Q, attended, part,
                  threads);
        apply(b, &l->output, attended, W, x, first, rows, 1, threads);
        rms_norm(x, l->before_mlp.weight, l->before_mlp.epsilon, normed, rows, H, threads);
        apply(b, &l->gate_up, normed, H, gate_up, first, rows, 0, threads);
        silu_mul(gate_up, rows, G / 2, threads);
        apply(b, &l->down, gate_up, G, x, first, rows, 1, threads);
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
            if (part * share < rows)
                run_layers(b, part * share,
                           rows - part * share < share ? rows - part * share : share, part, 1);
    }
}
