/* CPU kernels of the output head: statistics and gradients of one tile of logits. */

/* Statistics of a row after some of its tiles. Both sums are over the logits z of these tiles. */
typedef struct {
    float max, sum, weighted, chosen; /* sum: of e^(z - max); weighted: of (z - max) e^(z - max) */
} Row;

LINE float largest(const float *z, i64 columns) {
    float most = z[0];
#pragma omp simd reduction(max : most)
    for (i64 i = 0; i < columns; i++) most = z[i] > most ? z[i] : most;
    return most;
}

/* Add a tile of logits to the statistics of its rows.

   z: [rows, columns] at a distance of `stride`: logits of tokens [first, first + columns).
   targets: [rows] tokens whose logits are `chosen`.
   factors: [rows], or NULL. Receives e^(old maximum - new maximum), the factor for older sums. The
   tile is then overwritten by e^(z - max). */
void fold(float *z, i64 stride, i64 rows, i64 columns, i64 first, const i64 *targets, Row *stats,
          float *factors, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * columns > 16384)
    for (i64 r = 0; r < rows; r++) {
        float *x = z + r * stride, sum = 0, weighted = 0;
        Row *row = stats + r;
        i64 at = targets[r] - first;
        if (at >= 0 && at < columns) row->chosen = x[at];
        float most = largest(x, columns), max = most > row->max ? most : row->max;
        float shift = row->max - max, factor = exp_(shift);
        if (factors) {
            factors[r] = factor;
#pragma omp simd reduction(+ : sum, weighted)
            for (i64 i = 0; i < columns; i++) {
                float d = x[i] - max, e = exp_(d);
                sum += e, weighted += e * d, x[i] = e;
            }
        } else {
#pragma omp simd reduction(+ : sum, weighted)
            for (i64 i = 0; i < columns; i++) {
                float d = x[i] - max, e = exp_(d);
                sum += e, weighted += e * d;
            }
        }
        if (row->sum > 0)
            weighted += factor * (row->weighted + row->sum * shift), sum += factor * row->sum;
        row->max = max, row->sum = sum, row->weighted = weighted;
    }
}

/* Replace a tile of logits by its gradient: gains[r] ([i = target] - e^(z_i - norms[r])).

   norms: [rows] log of the sum of e^z over the whole vocabulary.
   gains: [rows] gradients of the targets' log-probs. */
void logit_gradient(float *z, i64 stride, i64 rows, i64 columns, i64 first, const i64 *targets,
                    const float *norms, const float *gains, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * columns > 16384)
    for (i64 r = 0; r < rows; r++) {
        float *x = z + r * stride, norm = norms[r], gain = gains[r];
#pragma omp simd
        for (i64 i = 0; i < columns; i++) x[i] = -gain * exp_(x[i] - norm);
        i64 at = targets[r] - first;
        if (at >= 0 && at < columns) x[at] += gain;
    }
}
