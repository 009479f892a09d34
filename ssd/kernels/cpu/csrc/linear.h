/* linear: how a product is planned, cut into tasks, and computed from tiles. */

/* row m of a tile that has mr rows */
static void pack_x(float *dst, const void *x, long ldx, long row, long m, long mr, long k, int bf16) {
    float *d = dst + 4 * m;
    long offset = row * ldx;
    for (long i = 0; i < k; i += 4, d += 4 * mr) {
        if (i + 4 <= k && !bf16) {
            memcpy(d, (const float *)x + offset + i, 16);
            continue;
        }
        for (long j = 0; j < 4; j++)
            d[j] = i + j >= k ? 0.0f
                   : bf16     ? from_bf16(((const uint16_t *)x)[offset + i + j])
                              : ((const float *)x)[offset + i + j];
    }
}

struct linear_args {
    struct linear; /* the call */
    long kq;
    struct groups groups;
    long qparams, qparams_bytes; /* scales of a column, and bytes of those of a panel (offsets included) */
    int digits, coarse;  /* of packed rows; 0: they are fp32 (bf16 for AMX) */
    int unpack;          /* panels are unpacked for several row tiles */
    int amx;             /* whether tile registers are used */
    long tiles;          /* row tiles, of m / tiles rows or one more */
    long rows, row_size; /* room for rows in a packed row tile; bytes of a packed row */
    long step;           /* AMX: bytes of a row in a tile register */
    const void *xp;      /* packed rows */
    long panels, task_panels, task_tiles; /* panels in all, and in one task; row tiles of one task */
    int slot, nthreads;        /* slot: which scratch memory it has */
    _Atomic int *ready; /* [m][groups]: columns of a group that are computed, from this row on, as far as they are counted */
    const struct linear_args *next; /* product that takes y as its x: what computes columns of y packs them for it; or NULL */
    void (*run)(const struct linear_args *a, long t0, long t1, long panel0, long panels);
};

#define ROWS_MAX (HAS_AMX ? AMX_ROWS : MR_MAX) /* of a row tile */

INLINE int uses_amx(const struct linear_args *a) { return HAS_AMX && a->amx; }

INLINE long tile_row(const struct linear_args *a, long t) { return t * (a->m / a->tiles) + min_l(t, a->m % a->tiles); }

/* the tile of a row: the first m % tiles of them have one row more */
INLINE long tile_of(const struct linear_args *a, long row) {
    long least = a->m / a->tiles, larger = a->m % a->tiles, in_larger = larger * (least + 1);
    return row < in_larger ? row / (least + 1) : larger + (row - in_larger) / least;
}

INLINE const void *packed_tile(const struct linear_args *a, long t) {
    return (const char *)a->xp + (uses_amx(a) ? t * a->rows : tile_row(a, t)) * a->row_size;
}

INLINE float bias_at(const struct linear_args *a, long i) {
    return a->bf16 ? from_bf16(((const uint16_t *)a->bias)[i]) : ((const float *)a->bias)[i];
}

/* panel pairs of a row, each left in its gate; bf16 rounds where PyTorch would */
INLINE void gate_panels(float *row, const int panels, int bf16, const struct glu *glu) {
    vf most = vset(glu->limit), g[4], u[4];
    UNROLL for (int i = 0; i < 2 * panels; i++) { /* several chains of operations side by side */
        g[i] = vload(row + i / 2 * 2 * NR + i % 2 * VL), u[i] = vload(row + i / 2 * 2 * NR + NR + i % 2 * VL);
        if (bf16) g[i] = vround_bf16(g[i]), u[i] = vround_bf16(u[i]);
        g[i] = vselect(g[i] > most, most, g[i]); /* NaN stays NaN */
        u[i] = vselect(u[i] > most, most, vselect(u[i] < -most, -most, u[i]));
    }
    UNROLL for (int i = 0; i < 2 * panels; i++) g[i] = vsilu(g[i], glu->slope);
    UNROLL for (int i = 0; i < 2 * panels; i++)
        vstore(row + i / 2 * 2 * NR + i % 2 * VL, (bf16 ? vround_bf16(g[i]) : g[i]) * (u[i] + glu->shift));
}

static void gate_row(float *row, long panels, int bf16, const struct glu *glu) {
    for (; panels >= 2; panels -= 2, row += 4 * NR) gate_panels(row, 2, bf16, glu);
    if (panels) gate_panels(row, 1, bf16, glu);
}

/* 4 * quads columns of a row, from `first` on, where a group begins, in digits */
static void pack_columns(const struct linear_args *a, long row, const float *x, long first, long quads) {
    const struct groups *g = &a->groups;
    long run = uses_amx(a) ? a->step : a->coarse ? 4 * g->gq : 16, t = tile_of(a, row);
    long m = row - tile_row(a, t), mr = tile_row(a, t + 1) - tile_row(a, t);
    struct digit_layout layout = {16, run, mr * a->digits * run};
    if (uses_amx(a)) layout = (struct digit_layout){a->rows * run, run, a->rows * run * a->digits};
    digit *dst = (digit *)packed_tile(a, t) + m * (uses_amx(a) ? run : a->digits * run) + first / run * layout.jump;
    const float *row_scales = g->row_scales ? g->row_scales + row * g->ld : 0;
    pack_digits(dst, &layout, x, quads, a->bf16, a->coarse, a->form, g, row_scales,
                g->of_rows + row * g->stride + first / (4 * g->gq));
}

/* Columns [first, first + count) of some rows of x are computed: packs the groups that are complete now. */
static void columns_done(const struct linear_args *a, long row, long rows, long first, long count) {
    const long size = 4 * a->groups.gq;
    for (long k = first, stop; k < first + count; k = stop) {
        long group = k / size, begin = group * size, end = min_l(a->k, begin + size);
        long quads = min_l(size / 4, a->kq - begin / 4);
        stop = min_l(end, first + count);
        if (stop - k < end - begin &&
            atomic_fetch_add(&a->ready[row * a->groups.count + group], (int)(stop - k)) + stop - k < end - begin)
            continue;
        for (long r = row; r < row + rows; r++) {
            float x[DOT_MOST];
            load_row(x, a->x, r * a->ldx + begin, end - begin, a->bf16);
            for (long i = end - begin; i < 4 * quads; i++) x[i] = 0.0f;
            pack_columns(a, r, x, begin, quads);
        }
    }
}

static void finish_tile(const struct linear_args *a, float *buf, long row, long mr, long panel0, long panels) {
    long span = a->gated ? 2 : 1, first = panel0 * NR, width = min_l(NR * panels, a->n - first); /* columns */
    for (long m = 0; m < mr; m++, buf += TASK_PANELS * NR) {
        for (long s = 0; a->bias && s < span; s++)
            for (long j = 0; j < width; j++) buf[(j / NR * span + s) * NR + j % NR] += bias_at(a, s * a->n + first + j);
        if (a->gated) gate_row(buf, panels, a->bf16, &a->glu);
        for (long j = 0; j < width; j += NR)
            store_row(a->y, (row + m) * a->n + first + j, buf + j * span, min_l(NR, width - j), a->bf16 && !a->wide);
    }
    if (a->next) columns_done(a->next, row, mr, first, width);
}

/* fp32 copy of bf16 panels, `depth` rows of NR in all */
static const char *widen_panels(const char *w, long depth) {
    float *out = scratch(PANELS, (size_t)(depth * NR));
    for (long i = 0; i < depth; i++) {
        vf lo, hi;
        widen(&lo, &hi, w + i * NR * 2, BF16);
        vstore(out + i * NR, lo);
        vstore(out + i * NR + VL, hi);
    }
    return (const char *)out;
}

/* row tiles [t0, t1) of bf16 against output panels [panel0, panel0 + panels) */
static void amx_bf16_block(const struct linear_args *a, long t0, long t1, long panel0, long panels) {
    float buf[2][AMX_ROWS * TASK_PANELS * NR] __attribute__((aligned(64)));
    long span = a->gated ? 2 : 1, depth = a->kq * 4, next = a->rows * a->row_size;
    amx_configure(a->rows, a->rows, 16, 64, 16);
    for (long t = t0; t < t1; t += 2) {
        const char *x = packed_tile(a, t), *w = a->w + panel0 * span * depth * NR * 2;
        for (long p = 0; p < panels * span; p++, w += depth * NR * 2)
            if (t + 1 < t1)
                amx_bf16_tile(1, x, next, a->rows, w, depth, buf[0] + p * NR, buf[1] + p * NR);
            else
                amx_bf16_tile(0, x, next, a->rows, w, depth, buf[0] + p * NR, 0);
        for (long i = t; i < min_l(t + 2, t1); i++)
            finish_tile(a, buf[i - t], tile_row(a, i), tile_row(a, i + 1) - tile_row(a, i), panel0, panels);
    }
    tile_release();
}

/* the groups of rows from `row` on */
INLINE struct groups groups_from(const struct linear_args *a, long row) {
    struct groups g = a->groups;
    if (g.row_scales) g.row_scales += row * g.ld;
    if (a->digits) g.of_rows += row * g.stride;
    if (g.starts) g.starts += row * g.stride;
    return g;
}

/* A panel for several rows: codes of 4 bits as bytes, where tiles take bytes, and scales of coarse rows in fp32. */
struct panel {
    const char *w;
    const void *scales;
};

static struct panel unpacked(const struct linear_args *a, struct panel given, float *memory) {
    const struct groups *g = &a->groups;
    if (is_4_bits(a->form) && (uses_amx(a) || a->coarse)) {
        unpack_codes((char *)memory, given.w, a->kq, a->form);
        given.w = (char *)memory;
        memory += a->kq * NR;
    }
    if (!a->coarse || g->stored == SINGLES) return given;
    vf qparams[4], units[8];
    long kinds = g->offsets ? 2 : 1;
    for (long n = 0; n < a->qparams; n++) {
        load_qparams(qparams, units, given.scales, n, g->per, g, g->stored);
        for (long i = 0; i < 2 * kinds; i++) vstore(memory + n * kinds * NR + i * VL, qparams[i]);
    }
    given.scales = memory;
    return given;
}

static code_tile_fn *code_tile_of(const struct linear_args *a, long mr, int stored) {
    if (!a->digits) return FP8_TILES[mr];
    if (!a->coarse) return DOT_TILES[a->bf16][a->form - INT8][mr];
    return COARSE_TILES[a->unpack ? 0 : a->form - INT8][stored][mr];
}

/* row tiles [t0, t1) against output panels [panel0, panel0 + panels) of a quantised weight */
static void codes_block(const struct linear_args *a, long t0, long t1, long panel0, long panels) {
    float buf[ROWS_MAX * TASK_PANELS * NR] __attribute__((aligned(64)));
    long span = a->gated ? 2 : 1, first = panel0 * span, bytes = a->kq * NR * (is_4_bits(a->form) ? 2 : 4);
    long room = (a->kq + 2 * a->qparams) * NR;
    float *memory = a->unpack ? scratch(PANELS, (size_t)(panels * span * room)) : 0;
    struct panel found[TASK_PANELS];
    if (uses_amx(a)) amx_configure(a->rows, a->coarse ? a->step / 4 : a->rows, a->rows, a->step, a->step / 4);
    for (long t = t0; t < t1; t++) {
        long row = tile_row(a, t), mr = tile_row(a, t + 1) - row;
        struct groups g = groups_from(a, row);
        if (a->coarse && a->unpack) g.stored = SINGLES;
        const void *x = packed_tile(a, t);
        code_tile_fn *tile = uses_amx(a) ? 0 : code_tile_of(a, mr, g.stored);
        if (mr > 1) fetch(x, min_l(mr * a->row_size, 8 << 10)); /* other threads have packed it */
        for (long p = 0; p < panels * span; p++) {
            struct panel own = {a->w + (first + p) * bytes, (const char *)a->scales + (first + p) * a->qparams_bytes};
            if (t == t0) found[p] = a->unpack ? unpacked(a, own, memory + p * room) : own;
            const void *s = found[p].scales;
            const char *w = found[p].w;
            float *out = buf + p * NR;
            if (uses_amx(a)) {
                if (a->coarse && (a->unpack || a->form == INT8))
                    amx_coarse_tile(INT8, mr, a->rows, a->step, x, w, s, a->kq, &g, out);
                else if (a->coarse)
                    amx_coarse_tile(UINT4, mr, a->rows, a->step, x, w, s, a->kq, &g, out);
                else if (a->digits == 2)
                    amx_dot_tile(2, mr, a->rows, a->step, x, w, s, a->kq, &g, out);
                else
                    amx_dot_tile(3, mr, a->rows, a->step, x, w, s, a->kq, &g, out);
                continue;
            }
            tile(x, w, s, a->kq, &g, out);
        }
        finish_tile(a, buf, row, mr, panel0, panels);
    }
    if (uses_amx(a)) tile_release();
}

/* the same with a weight that is not */
static void linear_block(const struct linear_args *a, long t0, long t1, long panel0, long panels) {
    float buf[MR_MAX * TASK_PANELS * NR] __attribute__((aligned(64)));
    long span = a->gated ? 2 : 1;
    const char *w = a->w + panel0 * span * a->kq * 4 * NR * (a->bf16 ? 2 : 4);
    int narrow = a->bf16;
    if (narrow && t1 - t0 > 1) { /* several row tiles share the work of widening; the numbers are the same */
        w = widen_panels(w, panels * span * a->kq * 4);
        narrow = 0;
    }
    for (long t = t0; t < t1; t++) {
        long row = tile_row(a, t), mr = tile_row(a, t + 1) - row;
        for (long p = 0; p < panels * span; p++) /* a single stream of weights is what the hardware prefetches best */
            TILES[narrow][mr](packed_tile(a, t), w + p * a->kq * 4 * NR * (narrow ? 2 : 4), a->kq, buf + p * NR);
        finish_tile(a, buf, row, mr, panel0, panels);
    }
}

static void pack_digit_row(const struct linear_args *a, long row) {
    float *x = scratch(PANELS, (size_t)(a->kq * 4));
    load_row(x, a->x, row * a->ldx, a->k, a->bf16);
    for (long i = a->k; i < a->kq * 4; i++) x[i] = 0.0f;
    pack_columns(a, row, x, 0, a->kq);
}

static void pack_bf16_row(const struct linear_args *a, uint16_t *dst, long row, long m) {
    const uint16_t *src = (const uint16_t *)a->x + row * a->ldx;
    dst += m * BF16_DEPTH;
    for (long k = 0; k < a->kq * 4; k += BF16_DEPTH) {
        long n = min_l(BF16_DEPTH, a->k - k);
        memset(dst + k * a->rows + n, 0, (size_t)(BF16_DEPTH - n) * 2);
        memcpy(dst + k * a->rows, src + k, (size_t)n * 2);
    }
}

/* rows [begin, end), each to its place in its tile */
static void pack_rows(void *given, long begin, long end) {
    const struct linear_args *a = given;
    for (long row = begin; row < end; row++) {
        long t = tile_of(a, row), m = row - tile_row(a, t), mr = tile_row(a, t + 1) - tile_row(a, t);
        void *dst = (void *)packed_tile(a, t);
        if (a->digits)
            pack_digit_row(a, row);
        else if (uses_amx(a))
            pack_bf16_row(a, dst, row, m);
        else
            pack_x(dst, a->x, a->ldx, row, m, mr, a->k, a->bf16);
    }
}

static void linear_blocks(void *given, long begin, long end) {
    const struct linear_args *a = given;
    long groups = ceil_div(a->panels, a->task_panels);
    for (long i = begin; i < end; i++) {
        long b = i / groups * a->task_tiles, p = i % groups * a->task_panels;
        a->run(a, b, min_l(a->tiles, b + a->task_tiles), p, min_l(a->task_panels, a->panels - p));
    }
}

/* how rows are multiplied by a quantised weight: rows in digits unless it is fp8 */
static void plan_codes(struct linear_args *a) {
    struct groups *g = &a->groups;
    const long scaled = a->scaled;
    *g = stored_groups(scaled, a->flags);
    g->gq = ceil_div(scaled, 4), g->count = ceil_div(a->k, scaled), g->row_scales = a->row_scales, g->ld = a->row_groups;
    a->run = codes_block;
    a->kq = ceil_div(a->k, 4);
    a->row_size = a->kq * 16;
    a->qparams = g->count, a->qparams_bytes = qparams_bytes(g->count, g);
    if (a->form == FP8) return;
    long group = min_l(ceil_div(scaled, 16) * 16, DOT_MOST);
    g->gq = group / 4;
    g->count = ceil_div(a->k, group);
    g->shared = ceil_div(scaled, group);
    g->stride = ceil_div(g->count, 4) * 4;
    a->coarse = a->flags & COARSE;
    a->digits = digits_of(a->bf16, a->coarse);
    long few = is_4_bits(a->form) ? STORED_ROWS_4 : STORED_ROWS; /* in a tile with panels as they are */
    a->unpack = a->coarse && a->m > (is_4_bits(a->form) || g->stored == FACTORS ? 2 * few : few);
    a->rows = !a->coarse ? DOT_ROWS : !a->unpack ? few : g->offsets ? STORED_ROWS : COARSE_ROWS; /* offsets take registers */
    int joint = is_joint(a->form) && a->coarse && !a->unpack;
    size_t groups = (size_t)(a->m * g->stride);
    size_t each = sizeof *g->of_rows + (joint ? sizeof *g->starts : 0);
    g->of_rows = (void *)scratch(GROUPS + a->slot, groups * (each / 4 + 1));
    if (joint) g->starts = (void *)(g->of_rows + groups);
    a->ready = (void *)((char *)g->of_rows + groups * each);
    a->kq = ceil_div(a->k, 16) * 4;
    a->row_size = (a->coarse ? g->count * g->gq : a->kq) * 4 * a->digits * (long)sizeof(digit);
    if (!HAS_AMX || a->m < AMX_LEAST || (a->coarse && is_4_bits(a->form) && a->m <= STORED_ROWS_4)) return;
    a->amx = 1, a->rows = AMX_ROWS, a->step = 64;
    a->unpack = !a->coarse || a->m > AMX_ROWS;
    while (group % a->step || a->kq * 4 % a->step) a->step /= 2;
}

/* how it is computed; a plan is valid until the next one of its slot */
static struct linear_args plan_linear(const struct linear *call, int nthreads, int slot) {
    struct linear_args a = {.kq = padded_depth(call->k, call->bf16) / 4, .rows = MR_MAX, .xp = call->x, .slot = slot,
                            .run = linear_block};
    memcpy(&a, call, sizeof *call);
    a.row_size = a.kq * 16;
    if (a.form) plan_codes(&a);
    if (HAS_AMX && !a.form && a.bf16) a.amx = 1, a.rows = AMX_ROWS, a.row_size = a.kq * 8, a.run = amx_bf16_block;
    a.tiles = ceil_div(a.m, a.rows);
    if (uses_amx(&a)) a.rows = ceil_div(a.m, a.tiles);
    int as_it_is = a.m == 1 && !a.digits && a.k == a.kq * 4 && (uses_amx(&a) || !a.bf16);
    if (!as_it_is) a.xp = scratch(PACKED + slot, (size_t)(a.tiles * a.rows * a.row_size / 4));
    long span = a.gated ? 2 : 1;
    a.panels = ceil_div(a.n, NR);
    a.task_panels = (a.tiles == 1 || a.coarse ? TASK_PANELS : 2) / span; /* one row tile: wide tasks; more: keep the panels in L1 */
    while (a.task_panels > 1 && ceil_div(a.panels, a.task_panels) < 4 * nthreads) a.task_panels /= 2;
    a.task_tiles = max_l(2, (384 << 10) / (a.rows * a.row_size)); /* row tiles that stay in L2 with a stream of panels */
    a.task_tiles = ceil_div(a.tiles, ceil_div(a.tiles, a.task_tiles)); /* equal ones: threads share them */
    a.nthreads = (double)a.m * (double)a.n * (double)a.k * span < 65536.0 ? 1 : nthreads;
    return a;
}

static void pack_all(struct linear_args *a, int nthreads) {
    if (a->xp != a->x) parallel(a->m, a->m * a->k >= ALONE ? nthreads : 1, pack_rows, a);
}

/* the product itself; the rows are packed */
static void multiply(struct linear_args *a) {
    parallel(ceil_div(a->tiles, a->task_tiles) * ceil_div(a->panels, a->task_panels), a->nthreads, linear_blocks, a);
}

int ssd_linear(const void *given, int threads) {
    const struct linear *call = given;
    if (call->m <= 0 || call->n <= 0) return 0;
    struct linear_args a = plan_linear(call, threads, 0);
    pack_all(&a, threads);
    multiply(&a);
    return 0;
}
