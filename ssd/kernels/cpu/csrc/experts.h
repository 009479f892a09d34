/* experts */
/* Scores that a row's experts are chosen by, and their numbers that make the weights: -inf in the groups that are not kept. */
static void route_scores(const struct route *a, const float *logits, float *scores, float *numbers) {
    const long size = a->experts / a->groups;
    for (long e = 0; e < a->experts; e++) {
        scores[e] = numbers[e] = a->sigmoid ? 1.0f / (1.0f + expf(-logits[e])) : logits[e];
        if (a->correction) scores[e] += a->correction[e];
    }
    for (long left = a->groups; left > a->kept_groups; left--) { /* without the worst one, the last where they are equal */
        long worst = -1;
        float least = INFINITY;
        for (long g = 0; g < a->groups; g++) {
            const float *own = scores + g * size;
            float first = -INFINITY, second = -INFINITY;
            for (long e = 0; e < size; e++) {
                if (own[e] > first)
                    second = first, first = own[e];
                else if (own[e] > second)
                    second = own[e];
            }
            if (first == -INFINITY) continue; /* dropped before */
            if (first + second <= least) worst = g, least = first + second;
        }
        for (long e = 0; worst >= 0 && e < size; e++) scores[worst * size + e] = -INFINITY;
    }
}

int ssd_route(const void *given, int threads) {
    const struct route *call = given;
    const long rows = call->rows, experts = call->experts, count = call->count, shared = call->shared;
    const long all = experts + shared, pairs = rows * (count + shared);
    const float *logits = call->logits;
    int32_t *ids = call->ids, *order = call->order, *starts = call->starts;
    float *weights = call->weights, *scores = scratch(ROWS, (size_t)(2 * experts)), *numbers = scores + experts;
    memset(starts, 0, (size_t)(all + 1) * 4);
    for (long r = 0; r < rows; r++, logits += experts, ids += count + shared, weights += count + shared) {
        route_scores(call, logits, scores, numbers);
        float sum = call->sigmoid ? 1e-20f : 0.0f;
        for (long i = 0; i < count; i++) {
            long best = -1;
            for (long e = 0; e < experts; e++) {
                int taken = 0;
                for (long j = 0; j < i; j++) taken |= ids[j] == e;
                if (!taken && (best < 0 || scores[e] > scores[best])) best = e;
            }
            ids[i] = (int32_t)best;
            weights[i] = call->sigmoid ? numbers[best] : expf(numbers[best] - numbers[ids[0]]);
            starts[best + 1]++;
        }
        for (long i = 0; call->normalized && i < count; i++) sum += weights[i];
        for (long e = 0; !call->normalized && !call->sigmoid && e < experts; e++) sum += expf(numbers[e] - numbers[ids[0]]);
        if (call->sigmoid && !call->normalized) sum = 1.0f;
        for (long i = 0; i < count; i++) weights[i] = weights[i] / sum * call->scale;
        for (long i = 0; i < shared; i++) ids[count + i] = (int32_t)(experts + i), weights[count + i] = 1.0f, starts[experts + i + 1]++;
    }
    for (long e = 0; e < all; e++) starts[e + 1] += starts[e];
    ids -= pairs;
    for (long p = 0; p < pairs; p++) order[starts[ids[p]]++] = (int32_t)p;
    for (long e = all; e > 0; e--) starts[e] = starts[e - 1];
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

static void head_products(void *given, long begin, long end) {
    const struct head_linear *call = given;
    struct linear own = call->linear;
    const size_t size = own.bf16 ? 2 : 4, row = (size_t)own.n * size;
    char *y = own.y;
    own.y = scratch(EXPERT, ((size_t)own.m * row + 3) / 4);
    for (long h = begin; h < end; h++) {
        own.w = (const char *)call->weights[h];
        own.x = (const char *)call->linear.x + (size_t)(h * call->x_head) * size;
        ssd_linear(&own, 1);
        for (long r = 0; r < own.m; r++)
            memcpy(y + (size_t)(r * call->ldy + h * call->y_head) * size, (char *)own.y + (size_t)r * row, row);
    }
}

int ssd_head_linear(const void *given, int threads) {
    const struct head_linear *call = given;
    const struct linear *one = &call->linear;
    int few = (double)one->m * (double)one->n * (double)one->k * (double)call->heads < 65536.0;
    parallel(call->heads, few ? 1 : threads, head_products, (void *)given);
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
        for (long j = 0; a->shared && j < a->n; j++) sum[j] += a->shared[r * a->n + j];
        store_row(a->y, r * a->n, sum, a->n, a->bf16 && !a->wide);
    }
}

int ssd_combine(const void *given, int threads) {
    const struct combine *call = given;
    parallel(call->rows, call->rows * call->count * call->n > 65536 ? threads : 1, combine_rows, (void *)given);
    return 0;
}
