/* linear: register tiles of quantised weights.
 * A weight is scale * code (+ offset).  A group is consecutive k whose weights have one scale; a quad is four consecutive k. */
enum { FP8 = 1, INT8, INT4, UINT4 }; /* forms of codes */
/* flags of a weight: its scales have offsets beside them; they are fp16, or int8 times an fp16 for each block of BLOCK
 * weights, else fp32; rows are rounded to integers of 8 bits */
enum { OFFSETS = 1, HALF = 2, FACTORED = 4, COARSE = 8 };
enum { SINGLES, HALVES, FACTORS }; /* how scales are stored */
#define BLOCK 256
INLINE int is_4_bits(int form) { return form >= INT4; }

/* a group of a row that is in digits */
struct digit_group {
    float unit, sum;   /* of the integers; of x */
    int32_t excess[2]; /* see from_digits */
};

struct groups {
    long gq;                 /* quads of k in a group */
    long count;              /* groups */
    int offsets;             /* the weight has offsets, too */
    int stored;              /* how its scales and offsets are */
    long per;                /* groups of a block, if they are FACTORS */
    const float *row_scales; /* of the tile's first row, or 0 */
    long ld;                 /* scales of a row: 1, or one for each group */
    long shared;             /* groups with the same scale of the weight: more than one with digits only */
    struct digit_group *of_rows; /* those of a row side by side: different threads write those of different rows */
    long stride;                 /* from one row's to the next, in whole cache lines */
    int32_t (*starts)[2][VL];    /* of the same groups, or 0; see start_sum */
};

/* fp8 weights: codes [K][NR], scales fp32 [groups][NR].  A group's sums are multiplied by the row's scale of that group, if
 * rows have scales, then by the weight's, and added to those of the groups before it. */
INLINE void fp8_tile(const int mr, const float *x, const char *w, const float *scales, long kq, const struct groups *g,
                     float *buf) {
    enum { type = E4M3, step = NR };
    for (int m = 0; m < mr; m++)
        for (int j = 0; j < NR; j += VL) vstore(buf + m * TASK_PANELS * NR + j, vset(0.0f));
    for (long done = 0, i = 0; done < kq; done += g->gq, i++, scales += NR) {
        vf left[8], right[8];
        UNROLL for (int m = 0; m < mr; m++) left[m] = right[m] = vset(0.0f);
        for (long q = done; q < min_l(kq, done + g->gq); q++, x += 4 * mr, w += 4 * step) {
            quad xq[8];
            UNROLL for (int m = 0; m < mr; m++) xq[m] = quad_load(x + 4 * m);
            STEP(0) STEP(1) STEP(2) STEP(3)
        }
        UNROLL for (int m = 0; m < mr; m++) {
            float *sum = buf + m * TASK_PANELS * NR;
            if (g->row_scales) {
                vf scale = vset(g->row_scales[m * g->ld + (g->ld > 1 ? i : 0)]);
                left[m] *= scale;
                right[m] *= scale;
            }
            vstore(sum, vfma(vload(sum), left[m], vload(scales)));
            vstore(sum + VL, vfma(vload(sum + VL), right[m], vload(scales + VL)));
        }
    }
}

typedef void code_tile_fn(const void *x, const char *w, const void *scales, long kq, const struct groups *g,
                          float *buf);
#define FP8_TILE(mr, name)                                                                                            \
    static void name##_##mr(const void *x, const char *w, const void *s, long kq, const struct groups *g, float *b) { \
        fp8_tile(mr, x, w, s, kq, g, b);                                                                              \
    }
FOR_ROWS(FP8_TILE, fp8_tile)
static code_tile_fn *const FP8_TILES[9] = BY_ROWS(MR_MAX, fp8_tile);

/* Integer codes are multiplied by integers.
 * Rows: the x of each group (here at most 128 k) are rounded to unit * v, where v is an integer.  The unit is a power of two
 * such that |v| <= 2^22 (rows of bf16: 2^14).  v is written in signed digits of base 256, the lowest first: 3 (bf16: 2) of 8
 * bits where the machine has dot products of four bytes; else 2 (bf16: 1), of which the highest has 16 bits.  Coarse rows have
 * one digit: their unit is a 127th of the group's largest |x|.  x is packed as [K/16][MR][digits][16].
 * Sums of products of a digit and a code are exact; those of a group are converted to fp32, and multiplied and added as in
 * fp8_tile.
 * Scales are [groups][NR], with offsets [groups][2][NR].  FACTORS are, for each block, fp16 [1 or 2][NR] and then
 * int8 [groups of the block][1 or 2][NR].
 * Codes are bytes [K/4][NR][4]; of 4 bits [K/4][VL][4]: column j in the low half of a byte, column VL + j in the high half.
 * They are stored unsigned: `excess_of` is what was added to them, and its share of the sums is subtracted.
 * With SIGNED_CODES bytes are signed, also those of two codes of 4 bits, whose highest bit is inverted.  The sums of such bytes
 * as they are, and of their high halves alone (16 times the high code, minus 128), are computed; the difference of both is the
 * sum of the low codes.  So a byte takes one operation to unpack, not two. */
#define DOT_MOST 128 /* k of a group: sums fit into 32 bits */
#define DIGIT_BITS (8 * (int)sizeof(digit))

/* Codes that are read later: processors prefetch too little by themselves. */
INLINE void fetch_group(const char *at, long bytes) {
    for (long line = 0; FETCH_GROUPS && line < bytes; line += 64) __builtin_prefetch(at + 640 + line, 0, 0);
}
INLINE void fetch_later(const char *at) {
    if (!FETCH_GROUPS) __builtin_prefetch(at + 8192, 0, 2);
}

INLINE int digits_of(int bf16, int coarse) { return coarse ? 1 : (bf16 ? 2 : 3) - (DIGIT_BITS == 16); }
INLINE int excess_of(int form) {
    if (SIGNED_CODES) return form == INT4 ? 8 : form == UINT4 ? -128 : 0; /* of the low codes; of the high ones times 16 */
    return form == INT8 ? 128 : form == INT4 ? 8 : 0;
}

/* bytes to be multiplied for the two halves of a panel; where they are joint: for both together, and for the second */
INLINE void load_codes(vi *lo, vi *hi, const char *w, const int form) {
    vi both = (vi)*(const vu_mem *)w;
    if (form == INT8) {
        *lo = both;
        *hi = (vi)*(const vu_mem *)(w + 4 * VL);
    } else {
        *lo = SIGNED_CODES ? both : both & 0x0f0f0f0f;
        *hi = SIGNED_CODES ? both & (int32_t)0xf0f0f0f0 : (vi)((vu)both >> 4) & 0x0f0f0f0f;
    }
}

/* whether bytes hold codes of both halves of a panel (see above): sums of the second half are 16 times as large, and are to be
 * subtracted from those of the first */
INLINE int is_joint(const int form) { return SIGNED_CODES && is_4_bits(form); }

/* Sums of v * code, from those of its digits.  Of rows in fp32 the sum of the lowest digits is converted by itself.
 * excess: what is to be subtracted from the sum of the other digits, and from that of the lowest ones; or 0 */
INLINE vf from_digits(const vi *sums, const int digits, const int32_t *excess) {
    const int low = digits == (DIGIT_BITS == 8 ? 3 : 2);
    vi high = sums[digits - 1];
    if (DIGIT_BITS == 8) high = (vi)((vu)high << 8) + sums[digits - 2];
    if (excess) high -= excess[0];
    vf value = __builtin_convertvector(high, vf);
    if (!low) return value;
    return vfma(__builtin_convertvector(excess ? sums[0] - excess[1] : sums[0], vf), value, vset(256.0f));
}

/* bytes of the scales and offsets of a panel */
INLINE long qparams_bytes(long groups, const struct groups *g) {
    long each = NR * (g->offsets ? 2 : 1);
    if (g->stored == FACTORS) return groups / g->per * each * 2 + groups * each;
    return groups * each * (g->stored == HALVES ? 2 : 4);
}

/* Scales of group n for the two halves of a panel, then (if there are) offsets.  Groups are read one after the other: units,
 * which are those of vload_scaled, stay the same in a block. */
INLINE void load_qparams(vf *qparams, vf *units, const void *of_panel, long n, const long per, const struct groups *g,
                         const int stored) {
    const int count = g->offsets ? 4 : 2;
    const char *at = (const char *)of_panel;
    if (stored == FACTORS) {
        const char *own = at + count * VL * (n + 2 * (n / per)); /* behind n groups and the units of the blocks before */
        if (n % per == 0)
            UNROLL for (int i = 0; i < 4; i++)
                if (i < count) {
                    units[i] = vload_half((const uint16_t *)own + i * VL);
                    units[4 + i] = units[i] * -8388608.0f;
                }
        vload_scaled(qparams, units, (const int8_t *)own + 2 * count * VL, count);
        return;
    }
    UNROLL for (int i = 0; i < 4; i++) {
        if (i >= count) break;
        long place = (n * count + i) * VL;
        qparams[i] = stored == HALVES ? vload_half((const uint16_t *)at + place) : vload((const float *)at + place);
    }
}

/* acc + what the sums of a group contribute to one half of a panel; at: index in of_rows */
INLINE vf add_group(vf acc, const vi *sums, const int form, const int half, const int digits, vf scales,
                    const struct groups *g, long at) {
    const struct digit_group *own = g->of_rows + at;
    const int exceeds = SIGNED_CODES ? form == (half ? UINT4 : INT4) : 1;
    const float unit = is_joint(form) && half ? own->unit / 16 : own->unit;
    return vfma(acc, from_digits(sums, digits, exceeds ? own->excess : 0) * vset(unit), scales);
}

/* The same with coarse rows.  Where integers are slow to convert, a sum (which is below 2^22) does not begin at 0 but at the bits
 * of the float START = 1.5 * 2^23: it is then the bits of START + sum.  Where bytes are joint, sums of the second half begin at
 * HIGH_START, whose last bit is worth 1/16, less their excess; those of both halves at what is START after the difference. */
#define START 12582912.0f
#define HIGH_START (START / 16)
#define START_BITS 0x4b400000 /* of START as a float, and of HIGH_START */
#define HIGH_START_BITS 0x49400000
INLINE vi start_sum(const int form, const int half, const struct groups *g, long at) {
    static const float start[] __attribute__((aligned(16))) = {START, START, START, START};
    if (!SIGNED_CODES) return (vi){0};
    return vload_here(is_4_bits(form) ? (const void *)g->starts[at][half] : (const void *)start);
}

/* start_sum of joint bytes, for a row whose integers have the sum `total` in the group */
INLINE void set_starts(int32_t (*starts)[VL], int form, int32_t total) {
    int32_t high = HIGH_START_BITS - (form == UINT4 ? excess_of(form) * total : 0);
    int32_t both = (int32_t)((uint32_t)high + START_BITS) - (form == INT4 ? excess_of(form) * total : 0);
    for (int i = 0; i < VL; i++) starts[0][i] = both, starts[1][i] = high;
}

INLINE vf add_sums(vf acc, vi sums, const int form, const int half, vf scales, const struct groups *g, long at) {
    const struct digit_group *own = g->of_rows + at;
    const float start = is_4_bits(form) && half ? HIGH_START : START;
    vf value = SIGNED_CODES ? (vf)sums - start : __builtin_convertvector(sums - own->excess[0], vf);
    return vfma(acc, MUL_LANE(value, quad_load(&own->unit), 0), scales);
}

INLINE vf add_offsets(vf acc, vf offsets, const struct groups *g, long at) {
    return FMA_LANE(acc, offsets, quad_load(&g->of_rows[at].unit), 1); /* the sum is behind the unit */
}

#define DOT_STEP(lane)                                          \
    {                                                           \
        vi first, second;                                       \
        load_codes(&first, &second, w + (lane)*step, form);     \
        UNROLL for (int i = 0; i < mr * digits; i++) {          \
            left[i] = DOT(left[i], first, x + 16 * i, lane);    \
            right[i] = DOT(right[i], second, x + 16 * i, lane); \
        }                                                       \
    }

INLINE void dot_tile(const int mr, const int form, const int digits, const int stored, const void *rows, const char *w,
                     const void *scales, long kq, const struct groups *given, float *buf) {
    const long step = is_4_bits(form) ? 4 * VL : 4 * NR;
    const struct groups g = *given;
    const digit *x = rows;
    vf lo[DOT_ROWS], hi[DOT_ROWS];
    UNROLL for (int m = 0; m < mr; m++) lo[m] = hi[m] = vset(0.0f);
    for (long group = 0, n = 0, used = 0, own = 0; group < kq; group += g.gq, n++) {
        vi left[DOT_ROWS * 3], right[DOT_ROWS * 3];
        UNROLL for (int i = 0; i < mr * digits; i++) left[i] = right[i] = (vi){0};
        for (long q = group; q < min_l(kq, group + g.gq); q += 4) {
            DOT_STEP(0) DOT_STEP(1) DOT_STEP(2) DOT_STEP(3)
            x += 16 * mr * digits;
            w += 4 * step;
        }
        if (is_joint(form)) UNROLL for (int i = 0; i < mr * digits; i++) left[i] -= right[i];
        vf qparams[4];
        load_qparams(qparams, 0, scales, own, 0, &g, stored);
        UNROLL for (int m = 0; m < mr; m++) {
            lo[m] = add_group(lo[m], left + m * digits, form, 0, digits, qparams[0], &g, m * g.stride + n);
            hi[m] = add_group(hi[m], right + m * digits, form, 1, digits, qparams[1], &g, m * g.stride + n);
        }
        if (g.offsets) UNROLL for (int m = 0; m < mr; m++) {
            lo[m] = add_offsets(lo[m], qparams[2], &g, m * g.stride + n);
            hi[m] = add_offsets(hi[m], qparams[3], &g, m * g.stride + n);
        }
        if (++used == g.shared) own++, used = 0;
    }
    store_tile(mr, buf, lo, hi);
}

#define DOT_TILE(mr, name, form, digits)                                                                              \
    static void name##_##mr(const void *x, const char *w, const void *s, long kq, const struct groups *g, float *b) { \
        if (g->stored == HALVES)                                                                                      \
            dot_tile(mr, form, digits - (DIGIT_BITS == 16), HALVES, x, w, s, kq, g, b);                               \
        else                                                                                                          \
            dot_tile(mr, form, digits - (DIGIT_BITS == 16), SINGLES, x, w, s, kq, g, b);                              \
    }
FOR_ROWS(DOT_TILE, dot_fp32_int8, INT8, 3) FOR_ROWS(DOT_TILE, dot_bf16_int8, INT8, 2)
FOR_ROWS(DOT_TILE, dot_fp32_int4, INT4, 3) FOR_ROWS(DOT_TILE, dot_bf16_int4, INT4, 2)
FOR_ROWS(DOT_TILE, dot_fp32_uint4, UINT4, 3) FOR_ROWS(DOT_TILE, dot_bf16_uint4, UINT4, 2)
static code_tile_fn *const DOT_TILES[2][3][9] = { /* by the type of rows, by form from INT8 on, by rows */
    {BY_ROWS(DOT_ROWS, dot_fp32_int8), BY_ROWS(DOT_ROWS, dot_fp32_int4), BY_ROWS(DOT_ROWS, dot_fp32_uint4)},
    {BY_ROWS(DOT_ROWS, dot_bf16_int8), BY_ROWS(DOT_ROWS, dot_bf16_int4), BY_ROWS(DOT_ROWS, dot_bf16_uint4)},
};

/* Tiles of coarse rows, whose x is packed as [groups][mr][k of a group].  Many rows are computed in two halves or in pairs: one's
 * conversions overlap with the other's products; reading the codes again costs less than the registers for all rows would.
 * quads: those of each group, if they are known when this is compiled, else 0. */
#define COARSE_STEP(lane)                                                                                  \
    {                                                                                                      \
        vi first, second;                                                                                  \
        load_codes(&first, &second, w + (q + (lane)) * step, form);                                        \
        for (long line = 0; ahead && line < step; line += 64) fetch_later(w + (q + (lane)) * step + line); \
        UNROLL for (int i = 0; i < rows; i++) {                                                            \
            left[i] = DOT_HERE(left[i], first, own + i * 4 * gq + 4 * q, lane);                            \
            right[i] = DOT_HERE(right[i], second, own + i * 4 * gq + 4 * q, lane);                         \
        }                                                                                                  \
    }

/* arguments of load_qparams */
struct qparams_at {
    const void *of_panel;
    long n, per;
    int stored;
    vf *units;
};

INLINE void few_rows(const int rows, const int form, const int ahead, const long quads, long gq, long last, const digit *own,
                     const char *w, const struct qparams_at *qparams_at, const struct groups *g, const int offsets, long at,
                     vf *lo, vf *hi) {
    const long step = is_4_bits(form) ? 4 * VL : 4 * NR;
    vi left[STORED_ROWS_4], right[STORED_ROWS_4];
    vf qparams[4];
    UNROLL for (int i = 0; i < rows; i++) {
        left[i] = start_sum(form, 0, g, at + i * g->stride);
        right[i] = start_sum(form, 1, g, at + i * g->stride);
    }
    if (quads)
        UNROLL for (long q = 0; q < quads; q += 4) { COARSE_STEP(0) COARSE_STEP(1) COARSE_STEP(2) COARSE_STEP(3) }
    else
        for (long q = 0; q < last; q += 4) { COARSE_STEP(0) COARSE_STEP(1) COARSE_STEP(2) COARSE_STEP(3) }
    load_qparams(qparams, qparams_at->units, qparams_at->of_panel, qparams_at->n, qparams_at->per, g, qparams_at->stored);
    UNROLL for (int i = 0; i < rows; i++, at += g->stride) {
        if (is_joint(form)) left[i] = (vi)((vu)left[i] - (vu)right[i]);
        lo[i] = add_sums(lo[i], left[i], form, 0, qparams[0], g, at);
        hi[i] = add_sums(hi[i], right[i], form, 1, qparams[1], g, at);
        if (offsets) lo[i] = add_offsets(lo[i], qparams[2], g, at), hi[i] = add_offsets(hi[i], qparams[3], g, at);
    }
    COMPILER_BARRIER(); /* else codes are kept */
}

INLINE void coarse_tile(const int mr, const int form, const int stored, const long quads, const int offsets, const void *x,
                       const char *w, const void *scales, long kq, const struct groups *given, float *buf) {
    struct groups g = *given;
    const long gq = quads ? quads : g.gq;
    const digit *own = x;
    vf lo[COARSE_ROWS], hi[COARSE_ROWS], units[8];
    g.offsets = offsets;
    UNROLL for (int m = 0; m < mr; m++) lo[m] = hi[m] = vset(0.0f);
    const long bytes = gq * (is_4_bits(form) ? 4 * VL : 4 * NR);
    for (long n = 0; n < g.count; n++, w += bytes, own += mr * 4 * gq) {
        const struct qparams_at qparams = {scales, quads ? n : n / g.shared, quads ? 64 / quads : g.per, stored, units};
        const long last = min_l(gq, kq - n * gq); /* the last group may be shorter */
        const int ahead = is_4_bits(form) || mr <= STORED_ROWS; /* else a panel was unpacked */
        if (ahead) fetch_group(w, bytes);
        const int most = is_4_bits(form) ? STORED_ROWS_4 : STORED_ROWS;
        const int together = mr <= most ? mr : DIGIT_BITS == 8 ? (mr + 1) / 2 : 2; /* digits of 16 bits take registers */
        UNROLL for (int m = 0; m < mr; m += together)
            if (m + together <= mr)
                few_rows(together, form, ahead, quads, gq, last, own + m * 4 * gq, w, &qparams, &g, offsets,
                         m * g.stride + n, lo + m, hi + m);
            else
                few_rows(mr % together, form, ahead, quads, gq, last, own + m * 4 * gq, w, &qparams, &g, offsets,
                         m * g.stride + n, lo + m, hi + m);
    }
    store_tile(mr, buf, lo, hi);
}

/* Tiles of groups that have a fixed number of quads, with offsets or without, are faster: those of GGUF's types.  `fixed`
 * names the ones that are compiled for a form. */
enum { OF_8 = 1, OF_8_OFFSETS = 2, OF_4 = 4 };

INLINE void coarse_tile_of(const int mr, const int form, const int stored, const int fixed, const void *x, const char *w,
                           const void *scales, long kq, const struct groups *g, float *buf) {
    if (FIXED_GROUPS && fixed & OF_8 && g->gq == 8 && kq % 8 == 0 && !g->offsets)
        coarse_tile(mr, form, stored, 8, 0, x, w, scales, kq, g, buf);
    else if (FIXED_GROUPS && fixed & OF_8_OFFSETS && g->gq == 8 && kq % 8 == 0 && g->offsets)
        coarse_tile(mr, form, stored, 8, 1, x, w, scales, kq, g, buf);
    else if (FIXED_GROUPS && fixed & OF_4 && g->gq == 4 && kq % 4 == 0 && !g->offsets)
        coarse_tile(mr, form, stored, 4, 0, x, w, scales, kq, g, buf);
    else
        coarse_tile(mr, form, stored, 0, g->offsets, x, w, scales, kq, g, buf);
}

#define COARSE_TILE(mr, form, stored, fixed)                                                          \
    static void coarse_##form##_##stored##_##mr(const void *x, const char *w, const void *s, long kq, \
                                                const struct groups *g, float *b) {                   \
        coarse_tile_of(mr, form, stored, fixed, x, w, s, kq, g, b);                                   \
    }
FOR_ROWS(COARSE_TILE, INT8, SINGLES, OF_8 | OF_8_OFFSETS | OF_4)
FOR_ROWS(COARSE_TILE, INT8, HALVES, OF_8 | OF_8_OFFSETS)
FOR_ROWS(COARSE_TILE, INT8, FACTORS, OF_4 | OF_8_OFFSETS)
FOR_ROWS(COARSE_TILE, INT4, SINGLES, 0)
FOR_ROWS(COARSE_TILE, INT4, HALVES, OF_8)
FOR_ROWS(COARSE_TILE, INT4, FACTORS, 0)
FOR_ROWS(COARSE_TILE, UINT4, SINGLES, 0)
FOR_ROWS(COARSE_TILE, UINT4, HALVES, OF_8_OFFSETS)
FOR_ROWS(COARSE_TILE, UINT4, FACTORS, OF_8_OFFSETS)
#define BY_STORED(most, name) {BY_ROWS(most, name##_SINGLES), BY_ROWS(most, name##_HALVES), BY_ROWS(most, name##_FACTORS)}
static code_tile_fn *const COARSE_TILES[3][3][9] = { /* by form from INT8 on, by how scales are stored, by rows */
    {BY_ROWS(COARSE_ROWS, coarse_INT8_SINGLES), BY_ROWS(STORED_ROWS, coarse_INT8_HALVES),
     BY_ROWS(STORED_ROWS, coarse_INT8_FACTORS)},
    BY_STORED(STORED_ROWS_4, coarse_INT4),
    BY_STORED(STORED_ROWS_4, coarse_UINT4),
};

/* codes of 4 bits as bytes */
static void unpack_codes(char *out, const char *w, long kq, int form) {
    typedef int8_t bytes __attribute__((vector_size(VL * 4)));
    for (long q = 0; q < kq; q++, w += 4 * VL, out += 4 * NR) {
        vi lo, hi;
        fetch_later(w);
        if (SIGNED_CODES) {
            bytes both = (bytes) * (const vu_mem *)w, low = both & 15, high = both >> 4;
            lo = (vi)(form == INT4 ? low - 8 : low);
            hi = (vi)(form == INT4 ? high : high + 8);
        } else {
            load_codes(&lo, &hi, w, form);
        }
        *(vu_mem *)out = (vu)lo;
        *(vu_mem *)(out + 4 * VL) = (vu)hi;
    }
    COMPILER_BARRIER();
}

/* bits of a byte of codes that are stored inverted, so that it is unsigned (signed) */
long ssd_flipped_bits(int form) { return (SIGNED_CODES ? is_4_bits(form) : form == INT8) ? 128 : 0; }

/* a scale or an offset (kind 1) of a panel */
static float qparam_at(const void *of_panel, long group, long kind, long column, const struct groups *g) {
    long kinds = g->offsets ? 2 : 1, at = (group * kinds + kind) * NR + column;
    if (g->stored == FACTORS) {
        const char *block = (const char *)of_panel + group / g->per * kinds * NR * (2 + g->per);
        const int8_t *own = (const int8_t *)block + (2 + group % g->per) * kinds * NR;
        return (float)own[kind * NR + column] * from_half(((const uint16_t *)block)[kind * NR + column]);
    }
    return g->stored == HALVES ? from_half(((const uint16_t *)of_panel)[at]) : ((const float *)of_panel)[at];
}

/* how the scales of a weight are stored, with one for every `scaled` weights */
static struct groups stored_groups(long scaled, int flags) {
    return (struct groups){.offsets = flags & OFFSETS, .per = BLOCK / scaled, .shared = 1,
                           .stored = flags & FACTORED ? FACTORS : flags & HALF ? HALVES : SINGLES};
}

static int codes_embedding(const struct embedding *a) {
    long depth = ceil_div(a->k, a->form == FP8 ? 4 : 16) * (a->form == FP8 ? 4 : 16), form = a->form, scaled = a->scaled;
    long width = is_4_bits(a->form) ? VL : NR, together = form == FP8 ? 1 : 4, flipped = ssd_flipped_bits(a->form);
    struct groups g = stored_groups(scaled, a->flags);
    float *row = scratch(ROWS, (size_t)a->k);
    for (long t = 0; t < a->tokens; t++) {
        long id = int_at(a->ids, t, a->ids64), j = id % NR;
        if (outside(id, a->n)) return 1;
        const uint8_t *codes = (const uint8_t *)a->w + id / NR * depth * width + j % width * together;
        const char *qparams = (const char *)a->scales + id / NR * qparams_bytes(ceil_div(a->k, scaled), &g);
        for (long i = 0; i < a->k; i++) {
            int code = codes[i / together * together * width + i % together] ^ (int)flipped;
            if (is_4_bits(a->form)) code = code >> j / width * 4 & 15;
            float value = form == INT8 ? (float)(int8_t)code : (float)(form == INT4 ? code - 8 : code);
            if (form == FP8) load_e4m3(&value, &(int8_t){(int8_t)code}, 1);
            row[i] = value * qparam_at(qparams, i / scaled, 0, j, &g);
            if (g.offsets) row[i] += qparam_at(qparams, i / scaled, 1, j, &g);
        }
        store_row(a->out, t * a->k, row, a->k, a->bf16);
    }
    return 0;
}

int ssd_embedding(const void *given, int threads) {
    const struct embedding *call = given;
    return call->form ? codes_embedding(call) : dense_embedding(call);
}
