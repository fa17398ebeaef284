/* CPU kernels of the engine. Each output row is computed by one thread, in an order that depends on
   that row only. So its bits do not depend on the other rows or on the number of threads. */

/* Eight floats with any alignment. The compiler splits them into the machine's vectors. */
typedef float lanes __attribute__((vector_size(32), aligned(4), may_alias));
#define AT(p) (*(lanes *)(p))
#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) \
    __builtin_shuffle(a, b, (int32_t __attribute__((vector_size(32)))){__VA_ARGS__})
#endif

/* Eight numbers of a pool, from number `at` on. */
typedef uint16_t eight __attribute__((vector_size(16), aligned(2), may_alias));
typedef uint32_t words __attribute__((vector_size(32)));
LINE lanes numbers(int narrow, const void *pool, i64 at) {
    return narrow ? (lanes)(__builtin_convertvector(*(eight *)((half *)pool + at), words) << 16)
                  : AT((float *)pool + at);
}
#define FETCH(pool, at) \
    __builtin_prefetch((const char *)(pool) + (at) * (narrow ? sizeof(half) : sizeof(float)))

/* Sums of eight vectors, one lane each: add upper half to lower half, repeatedly. */
LINE lanes sums(const lanes *v) {
    lanes half[4], quarter[2];
    for (int i = 0; i < 4; i++)
        half[i] = PICK(v[i], v[i + 4], 0, 1, 2, 3, 8, 9, 10, 11) +
                  PICK(v[i], v[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    for (int i = 0; i < 4; i += 2)
        quarter[i / 2] = PICK(half[i], half[i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
                         PICK(half[i], half[i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
    return PICK(quarter[0], quarter[1], 0, 2, 8, 10, 4, 6, 12, 14) +
           PICK(quarter[0], quarter[1], 1, 3, 9, 11, 5, 7, 13, 15);
}

enum { TOGETHER = 8, AHEAD = 16, SPARE = 8 + AHEAD };

/* scores[g][t] = x[g] . key t for Q queries; key t begins at number at[t] of the pool, which holds
   bfloat16 if `narrow`, else float32. Computes eight sums at a time, so up to 7 extra scores are
   written. The order of each sum does not depend on Q. */
LINE void score(int Q, int narrow, const float *x, const void *pool, const i64 *at, i64 n, i64 D,
                float *scores, i64 stride) {
    const int T = 8 / Q;
    for (i64 t = 0; t < n; t += T) {
        lanes s[8] = {{0}};
        for (int j = 0; j < T; j++)
            for (i64 d = 0; d < D; d += 16) FETCH(pool, at[t + j + AHEAD] + d);
        for (i64 d = 0; d < D; d += 8)
#pragma GCC unroll 8
            for (int g = 0; g < Q; g++)
#pragma GCC unroll 8
                for (int j = 0; j < T; j++)
                    s[g * T + j] += AT(x + g * D + d) * numbers(narrow, pool, at[t + j] + d);
        lanes total = sums(s);
        for (int g = 0; g < Q; g++)
            memcpy(scores + g * stride + t, (float *)&total + g * T, sizeof(float) * T);
    }
}

/* x[g] += sum over t of scores[g][t] * value t, for C * 8 numbers of Q queries, from number `from`
   of a value on; Q * C <= 8. C must be at least 2: for a single sum GCC may use separate
   multiplications and additions where it fuses them for several, and the last bit would depend on
   Q. */
LINE void mix(int Q, int C, int narrow, float *x, const void *pool, i64 from, const i64 *at, i64 n,
              i64 D, const float *scores, i64 stride) {
    lanes s[8];
    for (int i = 0; i < Q * C; i++) s[i] = AT(x + i / C * D + i % C * 8);
    for (i64 t = 0; t < n; t++) {
        for (int c = 0; c < C; c += 2) FETCH(pool, at[t + AHEAD] + from + c * 8);
#pragma GCC unroll 8
        for (int g = 0; g < Q; g++)
#pragma GCC unroll 8
            for (int c = 0; c < C; c++)
                s[g * C + c] +=
                    scores[g * stride + t] * numbers(narrow, pool, at[t] + from + c * 8);
    }
    for (int i = 0; i < Q * C; i++) AT(x + i / C * D + i % C * 8) = s[i];
}

/* Scores of N queries x over n keys or, if `mixing`, their sums x over n values. Takes four queries
   at a time, then two, then one. */
LINE void look(int mixing, int narrow, float *x, i64 N, const void *pool, const i64 *at, i64 n,
               i64 D, float *scores, i64 stride) {
#define TAKE(Q) \
    for (; N >= Q; N -= Q, x += Q * D, scores += Q * stride) { \
        i64 d = 0; \
        if (!mixing) \
            score(Q, narrow, x, pool, at, n, D, scores, stride); \
        else { \
            for (; d + 64 / Q <= D; d += 64 / Q) \
                mix(Q, 8 / Q, narrow, x + d, pool, d, at, n, D, scores, stride); \
            for (; d < D; d += 16) mix(Q, 2, narrow, x + d, pool, d, at, n, D, scores, stride); \
        } \
    }
    TAKE(4)
    TAKE(2)
    TAKE(1)
}
static void look_wide(int mixing, float *x, i64 N, const void *pool, const i64 *at, i64 n, i64 D,
                      float *scores, i64 stride) {
    look(mixing, 0, x, N, pool, at, n, D, scores, stride);
}
static void look_narrow(int mixing, float *x, i64 N, const void *pool, const i64 *at, i64 n, i64 D,
                        float *scores, i64 stride) {
    look(mixing, 1, x, N, pool, at, n, D, scores, stride);
}

/* Replace scores by unnormalised weights; return 1 / their sum. sink: an extra score that only
   enters the sum, or NULL. */
LINE float softmax(float *s, i64 n, float softcap, const float *sink) {
    float top = sink ? *sink : -INFINITY, total = 0;
    if (softcap > 0)
        for (i64 t = 0; t < n; t++) s[t] = softcap * tanhf(s[t] / softcap);
#pragma omp simd reduction(max : top)
    for (i64 t = 0; t < n; t++) top = s[t] > top ? s[t] : top;
#pragma omp simd reduction(+ : total)
    for (i64 t = 0; t < n; t++) total += s[t] = exp_(s[t] - top);
    return 1.0f / (sink ? total + exp_(*sink - top) : total);
}

/* Up to TOGETHER rows, divided into runs: neighbouring rows that share the first blocks of their
   tables, which saves reads. first, count: first position that each row sees, and number of
   positions. at: offset of each position in a head's pool; for each run the shared positions, then
   the own positions of each row. length: number of rows of the run that begins at a row. shared:
   number of positions that the run shares. */
typedef struct {
    i64 rows, G, D, stride, *at, first[TOGETHER], count[TOGETHER], length[TOGETHER],
        shared[TOGETHER];
} Piece;

LINE i64 *put(i64 *at, const i64 *table, i64 block, i64 from, i64 to, i64 D) {
    for (i64 b = from / block, t = from; t < to; b++)
        for (; t < to && t < (b + 1) * block; t++) *at++ = (table[b] * block + t - b * block) * D;
    return at;
}

/* Fill a piece whose rows, G, D, stride and at are set. A run shares only blocks that are full and
   that all its rows see. */
static void lay_out(Piece *p, const i64 *table, i64 columns, i64 block, const i64 *positions,
                    i64 window) {
    i64 *at = p->at, n;
    for (i64 i = 0; i < p->rows; i++)
        p->first[i] = window > 0 && positions[i] >= window ? positions[i] + 1 - window : 0,
        p->count[i] = positions[i] + 1 - p->first[i];
    for (i64 i = 0; i < p->rows; i += n) {
        i64 depth = columns;
        for (n = 0; i + n < p->rows; n++) {
            i64 c = 0, full = p->first[i + n] ? 0 : p->count[i + n] / block;
            while (c < depth && c < full && table[(i + n) * columns + c] == table[i * columns + c])
                c++;
            /* Joining would not save reads: the run would share less. */
            if (n && n * c <= (n - 1) * depth) break;
            depth = c;
        }
        p->length[i] = n;
        p->shared[i] = n > 1 ? depth * block : 0;
        at = put(at, table + i * columns, block, 0, p->shared[i], p->D);
        for (i64 j = i; j < i + n; j++)
            at = put(at, table + j * columns, block, p->first[j] + p->shared[i], positions[j] + 1,
                     p->D);
    }
    for (int i = 0; i < SPARE; i++) at[i] = at[-1];
}

/* `look` for all rows of a piece: scores over the keys or, if `mixing`, sums over the values. */
static void look_at_all(const Piece *p, int mixing, int narrow, float *x, const void *pool,
                        float *scores) {
    void (*const look)(int, float *, i64, const void *, const i64 *, i64, i64, float *, i64) =
        narrow ? look_narrow : look_wide;
    const i64 *at = p->at, G = p->G, W = G * p->D;
    for (i64 i = 0; i < p->rows; i += p->length[i]) {
        look(mixing, x + i * W, p->length[i] * G, pool, at, p->shared[i], p->D,
             scores + i * G * p->stride, p->stride);
        at += p->shared[i];
        for (i64 j = i, n; j < i + p->length[i]; j++, at += n) {
            n = p->count[j] - p->shared[i];
            look(mixing, x + j * W, G, pool, at, n, p->D, scores + j * G * p->stride + p->shared[i],
                 p->stride);
        }
    }
}

/* Scratch memory per thread in 8-byte words: positions of TOGETHER rows and of their shared part,
   queries, results and scores. */
i64 attention_room(i64 G, i64 D, i64 columns, i64 block) {
    return (TOGETHER + 1 + TOGETHER / 2 * G) * (columns * block + SPARE) + TOGETHER * G * D;
}

/* Write a row's key or value of D floats to number `at` of a pool. */
LINE void keep(int narrow, void *pool, i64 at, const float *from, i64 D) {
    if (narrow)
        for (i64 d = 0; d < D; d++) ((half *)pool)[at + d] = narrowed(from[d]);
    else
        memcpy((float *)pool + at, from, sizeof(float) * D);
}

/* Write each row's new key and value into the pools, then attend. Row r attends over positions
   [max(0, p - window + 1), p] of its own table, with p = positions[r].

   The call handles rows [first, first + rows) of the forward pass; q, k, v and out begin at row
   `first`. All rows are written before any row attends, because rows may be tokens of one sequence.
   If several rows have the same slot, as padding rows do, any one of them is stored. Up to TOGETHER
   rows are computed at a time, and read their shared keys and values once.

   Pools: [kv_heads, blocks, block, D]; D is a multiple of 16. pool: numbers per head of a pool.
   scratch: `attention_room` for each thread. Calls for several parts of a forward pass may run
   concurrently, with one thread each. `part` is the number of the part, and selects its scratch
   memory. */
void paged_attention(const Attention *a, i64 first, i64 rows, const float *q, const float *k,
                     const float *v, i64 q_stride, i64 kv_stride, float *out, i64 part,
                     int threads) {
    const int narrow = a->bfloat16, size = narrow ? sizeof(half) : sizeof(float);
    const i64 heads = a->heads, kv_heads = a->kv_heads, D = a->D, pool = a->pool,
              columns = a->columns, block = a->block;
    const i64 *slots = a->slots + first, *table = a->table + first * columns,
              *positions = a->positions + first;
    const i64 G = heads / kv_heads, W = G * D, stride = columns * block + SPARE,
              room = attention_room(G, D, columns, block);
    /* Fewer rows at a time if there are few: otherwise some threads would get no work. */
    const i64 most = rows * kv_heads / (4 * threads), together = most < 1          ? 1
                                                                 : most < TOGETHER ? most
                                                                                   : TOGETHER;
    const i64 pieces = (rows + together - 1) / together;
#pragma omp parallel for num_threads(threads)
    for (i64 r = 0; r < rows; r++)
        for (i64 h = 0; h < kv_heads; h++) {
            keep(narrow, a->keys, h * pool + slots[r] * D, k + r * kv_stride + h * D, D);
            keep(narrow, a->values, h * pool + slots[r] * D, v + r * kv_stride + h * D, D);
        }
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (i64 item = 0; item < pieces * kv_heads; item++) {
        i64 h = item / pieces, r = item % pieces * together;
        Piece p = {r + together < rows ? together : rows - r, G, D, stride,
                   a->scratch + (part + omp_get_thread_num()) * room};
        float *query = (float *)(p.at + (TOGETHER + 1) * stride), *mine = query + TOGETHER * W,
              *scores = mine + TOGETHER * W;
        lay_out(&p, table + r * columns, columns, block, positions + r, a->window);
        for (i64 i = 0; i < p.rows; i++)
            for (i64 d = 0; d < W; d++)
                query[i * W + d] = q[(r + i) * q_stride + h * W + d] * a->scale,
                              mine[i * W + d] = 0;
        look_at_all(&p, 0, narrow, query, (char *)a->keys + h * pool * size, scores);
        for (i64 i = 0; i < p.rows * G; i++) /* reuses `query`: the queries are no longer needed */
            query[i] = softmax(scores + i * stride, p.count[i / G], a->softcap,
                               a->sinks ? a->sinks + h * G + i % G : 0);
        look_at_all(&p, 1, narrow, mine, (char *)a->values + h * pool * size, scores);
        for (i64 i = 0; i < p.rows; i++)
            for (i64 g = 0; g < G; g++)
                for (i64 d = 0; d < D; d++)
                    out[((r + i) * heads + h * G + g) * D + d] =
                        mine[i * W + g * D + d] * query[i * G + g];
    }
}

LINE double piece_sum(const float *e, i64 n) {
    double s = 0;
#pragma omp simd reduction(+ : s)
    for (i64 i = 0; i < n; i++) s += e[i];
    return s;
}

/* Draw a token of each row from softmax(logits / temperature) by inverse transform sampling: the
   first token where the cumulative probability exceeds noise * total. Temperature 0 takes the most
   probable token.

   logp: log-prob of the token; at temperature 1 where the temperature is 0. If a logit is NaN, or
   all are -inf, the result is some token with logp NaN. scratch: [threads, V]. Sums over the
   vocabulary are in double precision: in single precision they would lose rare tokens. */
void sample(const float *logits, i64 stride, i64 rows, i64 V, const float *temperature,
            const double *noise, i64 *tokens, float *logp, float *scratch, int threads) {
    const i64 piece = 64;
#pragma omp parallel for num_threads(threads) if (rows * V > 16384)
    for (i64 r = 0; r < rows; r++) {
        const float *x = logits + r * stride;
        float *e = scratch + omp_get_thread_num() * V,
              T = temperature[r] > 0 ? temperature[r] : 1.0f, top = -INFINITY;
#pragma omp simd reduction(max : top)
        for (i64 i = 0; i < V; i++) top = x[i] > top ? x[i] : top;
        /* Not x / T - top / T: a small T gives infinities. */
#pragma omp simd
        for (i64 i = 0; i < V; i++) e[i] = exp_((x[i] - top) / T);
        double total = 0, passed = 0;
        i64 token = 0;
        for (i64 from = 0; from < V; from += piece)
            total += piece_sum(e + from, V - from < piece ? V - from : piece);
        double wanted = noise[r] * total;
        if (temperature[r] > 0) {
            i64 from = 0;
            for (double s; from + piece < V && passed + (s = piece_sum(e + from, piece)) <= wanted;
                 from += piece)
                passed += s;
            for (token = from; token < V && (passed += e[token]) <= wanted;) token++;
            /* Rounding left the sum below `wanted`: take the last token with a probability. */
            if (token == V)
                for (token--; token > 0 && e[token] <= 0;) token--;
        } else
            /* Not e < 1: e of a logit just below the top rounds to 1. */
            while (token < V - 1 && x[token] < top) token++;
        tokens[r] = token;
        logp[r] = (x[token] - top) / T - (float)log(total);
    }
}
