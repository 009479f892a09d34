/* rms_norm */
static float inverse_rms(const float *x, long d, float eps) {
    vf acc[4] = {{0}, {0}, {0}, {0}};
    long i = 0;
    for (; i + 4 * VL <= d; i += 4 * VL)
        UNROLL for (int j = 0; j < 4; j++) {
            vf v = vload(x + i + j * VL);
            acc[j] = vfma(acc[j], v, v);
        }
    float sum = vsum((acc[0] + acc[1]) + (acc[2] + acc[3]));
    for (; i < d; i++) sum += x[i] * x[i];
    return 1.0f / sqrtf(sum / (float)d + eps);
}

/* x = x / rms(x) * w in place; weights in bf16 round the normalised value before and after the product */
static void norm_row(float *x, const void *w, long d, float eps, int bf16) {
    float scale = inverse_rms(x, d, eps);
    if (bf16) {
        const uint16_t *wh = w;
        long i = 0;
        for (vf lo, hi; i + 2 * VL <= d; i += 2 * VL) {
            vload_bf16(&lo, &hi, wh + i);
            vstore(x + i, vround_bf16(vround_bf16(vload(x + i) * scale) * lo));
            vstore(x + i + VL, vround_bf16(vround_bf16(vload(x + i + VL) * scale) * hi));
        }
        for (; i < d; i++) x[i] = round_bf16(round_bf16(x[i] * scale) * from_bf16(wh[i]));
    } else {
        const float *wf = w;
        for (long i = 0; i < d; i++) x[i] = x[i] * scale * wf[i];
    }
}

/* x += residual, and residual = x */
static void add_residual(float *x, void *residual, long at, long d, int bf16) {
    long i = 0;
    for (vf lo, hi; bf16 && i + 2 * VL <= d; i += 2 * VL) {
        vload_bf16(&lo, &hi, (const uint16_t *)residual + at + i);
        vstore(x + i, vround_bf16(vload(x + i) + lo));
        vstore(x + i + VL, vround_bf16(vload(x + i + VL) + hi));
    }
    for (; i < d; i++)
        x[i] = bf16 ? round_bf16(x[i] + from_bf16(((const uint16_t *)residual)[at + i]))
                    : x[i] + ((const float *)residual)[at + i];
    store_exact(residual, at, x, d, bf16);
}

struct norm_args {
    struct rms_norm; /* the call */
    const struct linear_args *next; /* as in linear_args */
};

/* product that takes the result of the current call as its rows, or NULL; see ssd_repeat */
static _Thread_local const struct linear_args *following;

static void norm_rows(void *given, long begin, long end) {
    const struct norm_args *a = given;
    float *v = scratch(ROWS, (size_t)a->d);
    for (long row = begin; row < end; row++) {
        load_row(v, a->x, row * a->ldx, a->d, a->bf16);
        if (a->residual) add_residual(v, a->residual, row * a->d, a->d, a->bf16);
        norm_row(v, a->w, a->d, a->eps, a->w_bf16);
        if (a->w_bf16)
            store_exact(a->out, row * a->d, v, a->d, a->bf16);
        else
            store_row(a->out, row * a->d, v, a->d, a->bf16);
        if (a->next) columns_done(a->next, row, 1, 0, a->d);
    }
}

int ssd_rms_norm(const void *given, int threads) {
    struct norm_args a = {.next = following};
    memcpy(&a, given, sizeof(struct rms_norm));
    parallel(a.m, a.m * a.d < ALONE / 2 ? 1 : threads, norm_rows, &a);
    return 0;
}
