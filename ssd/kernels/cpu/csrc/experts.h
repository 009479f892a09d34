/* experts
 * The `count` largest logits of each row, the lower expert first where they are equal, and their weights: the softmax
 * over the chosen ones (`chosen`) or over all.  A pair is (row, place among its experts); `order` has the pairs by
 * expert, those of expert e from starts[e] on. */
void ssd_route(const float *logits, long rows, long experts, long count, int chosen, int32_t *ids, float *weights,
               int32_t *order, int32_t *starts) {
    memset(starts, 0, (size_t)(experts + 1) * 4);
    for (long r = 0; r < rows; r++, logits += experts, ids += count, weights += count) {
        for (long i = 0; i < count; i++) {
            long best = -1;
            for (long e = 0; e < experts; e++) {
                int taken = 0;
                for (long j = 0; j < i; j++) taken |= ids[j] == e;
                if (!taken && (best < 0 || logits[e] > logits[best])) best = e;
            }
            ids[i] = (int32_t)best;
            weights[i] = expf(logits[best] - logits[ids[0]]);
            starts[best + 1]++;
        }
        float sum = 0.0f;
        if (chosen)
            for (long i = 0; i < count; i++) sum += weights[i];
        else
            for (long e = 0; e < experts; e++) sum += expf(logits[e] - logits[ids[0]]);
        for (long i = 0; i < count; i++) weights[i] /= sum;
    }
    for (long e = 0; e < experts; e++) starts[e + 1] += starts[e];
    ids -= rows * count;
    for (long p = 0; p < rows * count; p++) order[starts[ids[p]]++] = (int32_t)p;
    for (long e = experts; e > 0; e--) starts[e] = starts[e - 1];
    starts[0] = 0;
}

/* ssd_linear for the pairs of each expert that has any: y[p] = x[p / repeats] @ W_e^T.  `weights` and `scales` have an
 * address for each expert; `bias` is [experts][n], of gated weights [2][experts][n]. */
void ssd_expert_linear(const void *x, long ldx, const int32_t *order, const int32_t *starts, long experts, long repeats,
                       const int64_t *weights, const int64_t *scales, const void *bias, void *y, long n, long k,
                       int bf16, int gated, float slope, float limit, float shift, int wide, int form, long scaled,
                       int flags, const float *row_scales, long row_groups, int nthreads) {
    size_t size = bf16 ? 2 : 4, in = (size_t)k * size, out = (size_t)n * (wide ? 4 : size), part = (size_t)n * size;
    for (long e = 0; e < experts; e++, order += starts[e] - starts[e - 1]) {
        long m = starts[e + 1] - starts[e];
        if (!m) continue;
        size_t row = ceil_div(in, 4) * 4 + ceil_div(out, 4) * 4 + (size_t)row_groups * 4;
        char *rows = (char *)scratch(EXPERT, ((size_t)m * row + 2 * part) / 4 + 1);
        char *found = rows + (size_t)m * ceil_div(in, 4) * 4, *biases = found + (size_t)m * ceil_div(out, 4) * 4;
        float *own = (float *)(biases + ceil_div(2 * part, 4) * 4);
        for (long i = 0; i < m; i++) {
            long from = order[i] / repeats;
            memcpy(rows + (size_t)i * in, (const char *)x + (size_t)(from * ldx) * size, in);
            if (row_scales) memcpy(own + i * row_groups, row_scales + from * row_groups, (size_t)row_groups * 4);
        }
        for (long half = 0; bias && half < (gated ? 2 : 1); half++)
            memcpy(biases + (size_t)half * part, (const char *)bias + (size_t)(half * experts + e) * part, part);
        ssd_linear(rows, k, (const void *)weights[e], bias ? biases : 0, found, m, n, k, bf16, gated, slope, limit, shift,
                   wide, form, scales ? (const void *)scales[e] : 0, scaled, flags, row_scales ? own : 0, row_groups,
                   nthreads);
        for (long i = 0; i < m; i++) memcpy((char *)y + (size_t)order[i] * out, found + (size_t)i * out, out);
    }
}

struct combine_args {
    const void *x;
    const float *weights;
    void *y;
    long count, n;
    int bf16, wide;
};

static void combine_rows(void *given, long begin, long end) {
    const struct combine_args *a = given;
    float *sum = scratch(ROWS, (size_t)(2 * a->n)), *x = sum + a->n;
    for (long r = begin; r < end; r++) {
        for (long i = 0; i < a->count; i++) {
            float weight = a->weights[r * a->count + i];
            load_row(x, a->x, (r * a->count + i) * a->n, a->n, a->bf16);
            for (long j = 0; j < a->n; j++) sum[j] = i ? sum[j] + weight * x[j] : weight * x[j];
        }
        store_row(a->y, r * a->n, sum, a->n, a->bf16 && !a->wide);
    }
}

/* y[r] = sum over i of weights[r][i] * x[r * count + i], one after the other; wide: y is fp32 although x is bf16 */
void ssd_combine(const void *x, const float *weights, void *y, long rows, long count, long n, int bf16, int wide,
                 int nthreads) {
    struct combine_args a = {x, weights, y, count, n, bf16, wide};
    parallel(rows, rows * count * n > 65536 ? nthreads : 1, combine_rows, &a);
}
