/* rope_and_store */
static void rotate(float *restrict out, const float *restrict x, const float *cos, const float *sin, long half) {
    for (long i = 0; i < half; i++) {
        out[i] = x[i] * cos[i] - x[i + half] * sin[i];
        out[i + half] = x[i + half] * cos[i] + x[i] * sin[i];
    }
}

/* n numbers of the model's type to a cache; to one in e4m3 divided by their scale */
static void store_kv(const struct rope_and_store *a, void *cache, long at, float *x, long n, float scale) {
    if (a->kv == E4M3)
        for (long i = 0; i < n; i++) x[i] = (a->bf16 ? round_bf16(x[i]) : x[i]) / scale;
    store_row(cache, at, x, n, a->kv);
}

static void rope_token(const struct rope_and_store *a, long t) {
    long d = a->d, half = d / 2;
    float *x = scratch(ROWS, (size_t)(2 * d)), *rotated = x + d;
    long position = int_at(a->positions, t, a->positions64), slot = int_at(a->slots, t, a->slots64);
    const float *cos = a->cos + position * half, *sin = a->sin + position * half;
    const long size = a->bf16 ? 2 : 4; /* other threads have written the row */
    fetch((const char *)a->qkv + t * a->ldqkv * size, (a->heads + 2 * a->kv_heads) * d * size);
    for (long h = 0; h < a->heads + a->kv_heads; h++) {
        int is_key = h >= a->heads;
        if (is_key && slot < 0) break;
        const void *weight = is_key ? a->k_weight : a->q_weight;
        load_row(x, a->qkv, t * a->ldqkv + h * d, d, a->bf16);
        if (weight) norm_row(x, weight, d, a->eps, a->bf16);
        rotate(rotated, x, cos, sin, half);
        if (is_key)
            store_kv(a, a->k_cache, (slot * a->kv_heads + h - a->heads) * d, rotated, d, a->k_scale);
        else
            store_row(a->q_out, (t * a->heads + h) * d, rotated, d, a->bf16);
    }
    if (slot < 0) return;
    for (long h = 0; h < a->kv_heads; h++) {
        load_row(x, a->qkv, t * a->ldqkv + (a->heads + a->kv_heads + h) * d, d, a->bf16);
        store_kv(a, a->v_cache, (slot * a->kv_heads + h) * d, x, d, a->v_scale);
    }
}

/* pairs of neighbours */
static void rotate_pairs(float *restrict out, const float *restrict x, const float *cos, const float *sin, long half) {
    for (long i = 0; i < half; i++) {
        out[2 * i] = x[2 * i] * cos[i] - x[2 * i + 1] * sin[i];
        out[2 * i + 1] = x[2 * i + 1] * cos[i] + x[2 * i] * sin[i];
    }
}

static void latent_tokens(void *given, long begin, long end) {
    const struct latent_rope_and_store *a = given;
    const long d = a->d, value_d = a->value_d, turned = d - value_d, half = turned / 2;
    float *x = scratch(ROWS, (size_t)(d + turned)), *rotated = x + d;
    for (long t = begin; t < end; t++) {
        const float *cos = a->cos + a->positions[t] * half, *sin = a->sin + a->positions[t] * half;
        for (long h = 0; h < a->heads; h++) {
            load_row(x, a->q, t * a->ldq + h * a->q_d + a->q_d - turned, turned, a->bf16);
            rotate_pairs(rotated, x, cos, sin, half);
            store_row(a->q_out, (t * a->heads + h) * d + value_d, rotated, turned, a->bf16);
        }
        if (a->slots[t] < 0) continue;
        load_row(x, a->keys, t * a->ldkeys, d, a->bf16);
        norm_row(x, a->norm, value_d, a->eps, a->bf16);
        rotate_pairs(rotated, x + value_d, cos, sin, half);
        store_row(a->k_cache, a->slots[t] * d, x, value_d, a->kv);
        store_row(a->k_cache, a->slots[t] * d + value_d, rotated, turned, a->kv);
    }
}

int ssd_latent_rope_and_store(const void *given, int threads) {
    const struct latent_rope_and_store *a = given;
    for (long t = 0; t < a->tokens; t++)
        if (outside(a->positions[t], a->max_position) || a->slots[t] >= a->cache_blocks * a->block_size) return 1;
    int few = a->tokens * (a->d + a->heads * (a->d - a->value_d)) < 2 * ALONE;
    parallel(a->tokens, few ? 1 : threads, latent_tokens, (void *)given);
    return 0;
}

static void rope_tokens(void *given, long begin, long end) {
    for (long t = begin; t < end; t++) rope_token(given, t);
}

int ssd_rope_and_store(const void *given, int threads) {
    const struct rope_and_store *a = given;
    for (long t = 0; t < a->tokens; t++)
        if (outside(int_at(a->positions, t, a->positions64), a->max_position) ||
            int_at(a->slots, t, a->slots64) >= a->cache_blocks * a->block_size)
            return 1;
    int few = a->tokens * (a->heads + 2 * a->kv_heads) * a->d < 2 * ALONE;
    parallel(a->tokens, few ? 1 : threads, rope_tokens, (void *)given);
    return 0;
}
