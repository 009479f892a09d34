/* experts */
int ssd_route(const void *given, int threads) {
    const struct route *call = given;
    const long rows = call->rows, experts = call->experts, count = call->count;
    const float *logits = call->logits;
    int32_t *ids = call->ids, *order = call->order, *starts = call->starts;
    float *weights = call->weights;
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
        if (call->chosen)
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
    return 0;
}

int ssd_expert_linear(const void *given, int threads) {
    const struct expert_linear *call = given;
    const struct linear *all = &call->linear;
    const int32_t *order = call->order, *starts = call->starts;
    const long k = all->k, n = all->n, row_groups = all->row_groups;
    size_t size = all->bf16 ? 2 : 4, in = (size_t)k * size, out = (size_t)n * (all->wide ? 4 : size), part = (size_t)n * size;
    for (long e = 0; e < call->experts; e++, order += starts[e] - starts[e - 1]) {
        struct linear own = *all;
        long m = own.m = starts[e + 1] - starts[e];
        if (!m) continue;
        size_t row = ceil_div(in, 4) * 4 + ceil_div(out, 4) * 4 + (size_t)row_groups * 4;
        char *rows = (char *)scratch(EXPERT, ((size_t)m * row + 2 * part) / 4 + 1);
        char *found = rows + (size_t)m * ceil_div(in, 4) * 4, *biases = found + (size_t)m * ceil_div(out, 4) * 4;
        float *row_scales = (float *)(biases + ceil_div(2 * part, 4) * 4);
        for (long i = 0; i < m; i++) {
            long from = order[i] / call->repeats;
            memcpy(rows + (size_t)i * in, (const char *)all->x + (size_t)(from * all->ldx) * size, in);
            if (all->row_scales)
                memcpy(row_scales + i * row_groups, all->row_scales + from * row_groups, (size_t)row_groups * 4);
        }
        for (long half = 0; all->bias && half < (all->gated ? 2 : 1); half++)
            memcpy(biases + (size_t)half * part, (const char *)all->bias + (size_t)(half * call->experts + e) * part, part);
        own.w = (const char *)call->weights[e], own.scales = call->all_scales ? (const void *)call->all_scales[e] : 0;
        own.x = rows, own.ldx = k, own.bias = all->bias ? biases : 0, own.y = found;
        own.row_scales = all->row_scales ? row_scales : 0;
        ssd_linear(&own, threads);
        for (long i = 0; i < m; i++) memcpy((char *)all->y + (size_t)order[i] * out, found + (size_t)i * out, out);
    }
    return 0;
}

static void combine_rows(void *given, long begin, long end) {
    const struct combine *a = given;
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

int ssd_combine(const void *given, int threads) {
    const struct combine *call = given;
    parallel(call->rows, call->rows * call->count * call->n > 65536 ? threads : 1, combine_rows, (void *)given);
    return 0;
}
