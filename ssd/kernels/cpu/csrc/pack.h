/* packing of weights
 * Panels [ceil(N/NR)][K rounded up to 4][NR], zero padded.  bf16 panels hold VL 32-bit words per k: word j has column j
 * in its low half and column VL + j in its high half, so that a shift and a mask widen them.  With AMX they are [K rounded
 * up to 32, / 2][NR][2].  A gated weight ([2I, K]: gate rows, then up rows) alternates gate and up panels. */
#define NR (2 * VL)                   /* columns of a panel */
#define BF16_DEPTH (HAS_AMX ? 32 : 4) /* k of a product of tiles, of a quad */
INLINE long bf16_place(long k, long j) {
    return HAS_AMX ? k / 2 * 2 * NR + 2 * j + k % 2 : k * NR + j % VL * 2 + j / VL;
}

INLINE long padded_depth(long k, int bf16) {
    long unit = bf16 ? BF16_DEPTH : 4;
    return ceil_div(k, unit) * unit;
}

long ssd_packed_bytes(long n, long k, int bf16, int gated) {
    long panels = gated ? 2 * ceil_div(n / 2, NR) : ceil_div(n, NR);
    return panels * NR * padded_depth(k, bf16) * (bf16 ? 2 : 4);
}

INLINE long packed_row(long panel, long j, long n, int gated) {
    if (!gated) return panel * NR + j < n ? panel * NR + j : -1;
    long row = panel / 2 * NR + j;
    return row < n / 2 ? row + (panel % 2) * (n / 2) : -1;
}

static void pack_panels(void *given, long begin, long end) {
    const struct pack *a = given;
    long kp = padded_depth(a->k, a->bf16);
    size_t bytes = (size_t)(NR * kp * (a->bf16 ? 2 : 4));
    for (long p = begin; p < end; p++) {
        memset((char *)a->out + (size_t)p * bytes, 0, bytes);
        for (long j = 0; j < NR; j++) {
            long row = packed_row(p, j, a->n, a->gated);
            if (row < 0) continue;
            if (a->bf16) {
                const uint16_t *src = (const uint16_t *)a->w + row * a->ldw;
                uint16_t *dst = (uint16_t *)a->out + p * NR * kp;
                for (long i = 0; i < a->k; i++) dst[bf16_place(i, j)] = src[i];
            } else {
                const float *src = (const float *)a->w + row * a->ldw;
                float *dst = (float *)a->out + p * NR * kp + j;
                for (long i = 0; i < a->k; i++) dst[i * NR] = src[i];
            }
        }
    }
}

/* to be called before a large weight is written: fewer TLB misses when it is read */
void ssd_use_huge_pages(void *memory, long bytes) {
    uintptr_t page = 4095, lo = ((uintptr_t)memory + page) & ~page, hi = ((uintptr_t)memory + (uintptr_t)bytes) & ~page;
    if (hi > lo + (2u << 20)) advise_huge_pages((void *)lo, hi - lo);
}

int ssd_pack(const void *given, int threads) {
    const struct pack *call = given;
    long bytes = ssd_packed_bytes(call->n, call->k, call->bf16, call->gated);
    ssd_use_huge_pages(call->out, bytes);
    long panel = NR * padded_depth(call->k, call->bf16) * (call->bf16 ? 2 : 4);
    parallel(bytes / panel, threads, pack_panels, (void *)given);
    return 0;
}

long ssd_panel_columns(void) { return NR; }

static int dense_embedding(const struct embedding *a) {
    long kp = padded_depth(a->k, a->bf16), k = a->k;
    for (long t = 0; t < a->tokens; t++) {
        long row = int_at(a->ids, t, a->ids64), j = row % NR;
        if (outside(row, a->n)) return 1;
        if (a->bf16) {
            const uint16_t *src = (const uint16_t *)a->w + row / NR * NR * kp;
            for (long i = 0; i < k; i++) ((uint16_t *)a->out)[t * k + i] = src[bf16_place(i, j)];
        } else {
            const float *src = (const float *)a->w + row / NR * NR * kp + j;
            for (long i = 0; i < k; i++) ((float *)a->out)[t * k + i] = src[i * NR];
        }
    }
    return 0;
}
