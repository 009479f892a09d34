/* Products with quantised weights: tiles of fp8 and of integer codes. */

/* The same with fp8 weights: codes [K][NR]; scales [groups][NR] of `gq` quads of k each.  A group's sums are multiplied by
 * the row's scale of that group, if rows have scales, then by the weight's, and added to those of the groups before it. */
enum { FP8 = 1, INT8, INT4, UINT4 };
/* flags of a weight: its scales have offsets beside them; they are fp16, or int8 times an fp16 for each block of BLOCK
 * weights, else fp32; rows are rounded to integers of 8 bits */
enum { OFFSETS = 1, HALF = 2, FACTORED = 4, COARSE = 8 };
enum { SINGLES, HALVES, FACTORS }; /* how scales are stored */
#define BLOCK 256
INLINE int is_4_bits(int form) { return form >= INT4; }

INLINE vf from_fp8(const char *w) {
#if VL == 16
    vi code = (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)w));
#elif VL == 8
    vi code = (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)w));
#else
    vi code = __builtin_convertvector(*(const vb_mem *)w, vi);
#endif
    return (vf)((code & 0x80) << 24 | (code & 0x7f) << 20) * 0x1p120f; /* e4m3, widened */
}

#define CODE_STEP(lane)                                                          \
    {                                                                            \
        vf lo = from_fp8(w + (lane)*NR), hi = from_fp8(w + (lane)*NR + VL);      \
        UNROLL for (int m = 0; m < mr; m++) {                                    \
            left[m] = FMA_LANE(left[m], lo, xq[m], lane);                        \
            right[m] = FMA_LANE(right[m], hi, xq[m], lane);                      \
        }                                                                        \
    }

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

INLINE void code_tile(const int mr, const float *x, const char *w, const float *scales, long kq, const struct groups *g,
                      float *buf) {
    for (int m = 0; m < mr; m++)
        for (int j = 0; j < NR; j += VL) vstore(buf + m * GROUP * NR + j, vset(0.0f));
    for (long group = 0, i = 0; group < kq; group += g->gq, i++, scales += NR) {
        vf left[8], right[8];
        UNROLL for (int m = 0; m < mr; m++) left[m] = right[m] = vset(0.0f);
        for (long q = group; q < min_l(kq, group + g->gq); q++) {
            quad xq[8];
            UNROLL for (int m = 0; m < mr; m++) xq[m] = quad_load(x + 4 * m);
            CODE_STEP(0) CODE_STEP(1) CODE_STEP(2) CODE_STEP(3)
            x += 4 * mr;
            w += 4 * NR;
        }
        UNROLL for (int m = 0; m < mr; m++) {
            float *sum = buf + m * GROUP * NR;
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
#define CODE_TILE(mr)                                                                                             \
    static void code_tile_##mr(const void *x, const char *w, const void *s, long kq, const struct groups *g,      \
                               float *b) {                                                                        \
        code_tile(mr, x, w, s, kq, g, b);                                                                         \
    }
CODE_TILE(1) CODE_TILE(2) CODE_TILE(3) CODE_TILE(4) CODE_TILE(5) CODE_TILE(6) CODE_TILE(7) CODE_TILE(8)
static code_tile_fn *const CODE_TILES[9] = {
    0, code_tile_1, code_tile_2, code_tile_3, code_tile_4, code_tile_5, code_tile_6, code_tile_7, code_tile_8,
};

/* Integer codes.  In each group (of 128 k at most) a row's x is rounded to unit * v, with a power of two as the unit and
 * |v| <= 2^22 (2^14 if the row is bf16), and v is written in signed digits: 3 (2) of 8 bits where the machine has dot
 * products of four bytes, else a high one of 16 bits, after a low one of 8 (none).  Coarse rows have one digit: the unit is
 * a 127th of the group's largest |x|.  Sums of digits times codes are exact; one of a group is converted to fp32, and
 * multiplied and added as in code_tile.  With offsets, scales are [groups][2][NR]: scales and offsets (a weight is
 * scale * code + offset).  FACTORS are, for each block, fp16 [1 or 2][NR] and then int8 [groups][1 or 2][NR].
 * Codes are [K/4][NR][4], or of 4 bits [K/4][VL][4] (column j in the low half of a byte, column VL + j in the high one);
 * x is [K/16][MR][digits][16].  Codes are unsigned: `excess_of` is added to them, and its part of the sums subtracted.
 * NEON has no dot product of unsigned with signed bytes: there bytes are signed, also those with two codes of 4 bits, whose
 * high bit is inverted.  Such a byte is multiplied as it is, and so are its high four bits alone: 16 times the high code
 * minus 128.  The difference of the sums is that of the low codes, so a byte takes one operation to unpack, not two. */
#define DOT_MOST 128 /* k of a group: sums fit into 32 bits */
#if defined(NEON) && defined(__ARM_FEATURE_DOTPROD)
#define SIGNED_CODES 1
#define DIGIT_BITS 8
#define DOT(acc, codes, x, lane) \
    ((vi)vdotq_laneq_s32((int32x4_t)(acc), (int8x16_t)(codes), vld1q_s8(x), (lane)))
#else
#define SIGNED_CODES 0
#if (VL == 16 && defined(__AVX512VNNI__)) || (VL == 8 && defined(__AVXVNNI__))
#define DIGIT_BITS 8
#else
#define DIGIT_BITS 16
#endif
#define DOT(acc, codes, x, lane) dot((acc), (codes), (x) + 4 * (lane))
#endif
#if VL == 8 || !(defined(NEON) || VL == 16)
#define DOT_ROWS 2 /* 16 registers */
#else
#define DOT_ROWS 4
#endif
#if defined(__ARM_FEATURE_DOTPROD) || VL == 16
#define COARSE_ROWS 8 /* of a tile with unpacked panels */
#define FEW_ROWS 4    /* of one with panels as they are */
#else
#define COARSE_ROWS 2
#define FEW_ROWS 2
#endif
#if VL == 16 && DIGIT_BITS == 8
#define MORE_ROWS 8 /* the same, where codes are of 4 bits: so many sums fit into the registers */
#else
#define MORE_ROWS FEW_ROWS
#endif
/* Codes that are read later: processors prefetch too little by themselves.  FETCH_GROUP: those of a whole group, which costs
 * fewer instructions; FETCH_LATER: one line beside each that is read, so that requests never wait for each other. */
#ifdef NEON
#define FETCH_GROUP(at, bytes) \
    for (long line = 0; line < (bytes); line += 64) __builtin_prefetch((at) + 640 + line, 0, 0)
#define FETCH_LATER(at)
#else
#define FETCH_GROUP(at, bytes)
#define FETCH_LATER(at) __builtin_prefetch((at) + 8192, 0, 2)
#endif
#if DIGIT_BITS == 8
typedef int8_t digit;
#else
typedef int16_t digit;
#endif
INLINE int digits_of(int bf16, int coarse) { return coarse ? 1 : (bf16 ? 2 : 3) - (DIGIT_BITS == 16); }
INLINE int excess_of(int form) {
    if (SIGNED_CODES) return form == INT4 ? 8 : form == UINT4 ? -128 : 0; /* of the low codes; of the high ones times 16 */
    return form == INT8 ? 128 : form == INT4 ? 8 : 0;
}

#if !SIGNED_CODES
INLINE vi word_at(const digit *x) {
    int32_t word;
    memcpy(&word, x, 4);
    return (vi){0} + word;
}

#if DIGIT_BITS == 8
/* sums of four products of an unsigned code and a digit */
INLINE vi dot(vi acc, vi codes, const digit *x) {
#if VL == 16
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, (__m512i)word_at(x));
#else
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)codes, (__m256i)word_at(x));
#endif
}
#else
/* sums of two products of 16-bit numbers */
INLINE vi dot_pairs(vi a, vi b) {
#if VL == 16
    return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif VL == 8
    return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    return ((vi)((vu)a << 16) >> 16) * ((vi)((vu)b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

/* The same with digits of 16 bits; the four of a word of codes are in the order 0, 2, 1, 3. */
INLINE vi dot(vi acc, vi codes, const digit *x) {
    vi even = codes & 0x00ff00ff, odd = (vi)((vu)codes >> 8) & 0x00ff00ff;
    return acc + dot_pairs(even, word_at(x)) + dot_pairs(odd, word_at(x + 2));
}
#endif
#endif

/* codes of the two halves of a panel; of 4 bits with SIGNED_CODES: of both halves, and of the second */
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

/* whether sums of the second half of a panel are 16 times as large, and part of those of the first half */
INLINE int is_joint(const int form) { return SIGNED_CODES && is_4_bits(form); }

/* Sums of digits as one of numbers.  excess: what the sums of the high digits, and of the low one, have too much, or 0. */
INLINE vf from_digits(const vi *sums, const int digits, const int32_t *excess) {
#if DIGIT_BITS == 8
    vi high = (vi)((vu)sums[digits - 1] << 8) + sums[digits - 2];
    const int low = digits == 3;
#else
    vi high = sums[digits - 1];
    const int low = digits == 2;
#endif
    if (excess) high -= excess[0];
    vf value = __builtin_convertvector(high, vf);
    if (!low) return value;
    return vfma(__builtin_convertvector(excess ? sums[0] - excess[1] : sums[0], vf), value, vset(256.0f));
}

/* Scales of a group (count 2: of both halves of a panel), or scales and offsets (4), that are int8 times units of their block.
 * NEON converts integers at a quarter of the speed of other operations: there bytes become the low bits of a float of 2^23.
 * Of scales with offsets none is negative, so 2^23 times the unit can be subtracted in the operation that multiplies by it,
 * which is exact, too; it is loaded from behind the units, since loads cost least. */
INLINE void load_factors(vf *numbers, const vf *units, const int8_t *p, const int count) {
#ifdef NEON
    const uint16x8_t top = vdupq_n_u16(0x4b00);
    if (count == 4) {
        uint8x16_t bytes = vld1q_u8((const uint8_t *)p);
        __asm__ volatile("" : "+w"(bytes)); /* not before the products that precede this in the source */
        UNROLL for (int i = 0; i < 4; i += 2) {
            const uint8x16_t zero = vdupq_n_u8(0);
            const uint16x8_t words = vreinterpretq_u16_u8(i ? vzip2q_u8(bytes, zero) : vzip1q_u8(bytes, zero));
            __asm__ volatile("ldr %q0, %1" : "=w"(numbers[i]) : "m"(units[4 + i]));
            __asm__ volatile("ldr %q0, %1" : "=w"(numbers[i + 1]) : "m"(units[5 + i]));
            numbers[i] = vfma(numbers[i], (vf)vzip1q_u16(words, top), units[i]);
            numbers[i + 1] = vfma(numbers[i + 1], (vf)vzip2q_u16(words, top), units[i + 1]);
        }
        return;
    }
    uint8x16_t bytes = veorq_u8(vreinterpretq_u8_u64(vld1q_dup_u64((const uint64_t *)p)), vdupq_n_u8(128));
    uint16x8_t words = vreinterpretq_u16_u8(vzip1q_u8(bytes, vdupq_n_u8(0)));
    numbers[0] = ((vf)vzip1q_u16(words, top) - 8388736.0f) * units[0];
    numbers[1] = ((vf)vzip2q_u16(words, top) - 8388736.0f) * units[1];
#else
    UNROLL for (int i = 0; i < 4; i++) {
        if (i >= count) break;
#if VL == 16
        vi wide = (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(p + i * VL)));
#elif VL == 8
        vi wide = (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)(p + i * VL)));
#else
        vi wide = __builtin_convertvector(*(const vc_mem *)(p + i * VL), vi);
#endif
        numbers[i] = __builtin_convertvector(wide, vf) * units[i];
    }
#endif
}

/* bytes of the scales and offsets of a panel */
INLINE long numbers_bytes(long groups, const struct groups *g) {
    long each = NR * (g->offsets ? 2 : 1);
    if (g->stored == FACTORS) return groups / g->per * each * 2 + groups * each;
    return groups * each * (g->stored == HALVES ? 2 : 4);
}

/* numbers of group n of a panel, whose groups are read one after the other: scales of its two halves, then (if there are)
 * offsets; units: those of its block, and then -2^23 times each of them (see load_factors) */
INLINE void load_numbers(vf *numbers, vf *units, const void *of_panel, long n, const long per, const struct groups *g,
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
        load_factors(numbers, units, (const int8_t *)own + 2 * count * VL, count);
        return;
    }
    UNROLL for (int i = 0; i < 4; i++) {
        if (i >= count) break;
        long place = (n * count + i) * VL;
        numbers[i] = stored == HALVES ? vload_half((const uint16_t *)at + place) : vload((const float *)at + place);
    }
}

/* acc + the sums of a group of one half of a panel; `at`: which row and group it is */
INLINE vf add_group(vf acc, const vi *sums, const int form, const int half, const int digits, vf scales,
                    const struct groups *g, long at) {
    const struct digit_group *own = g->of_rows + at;
    const int exceeds = SIGNED_CODES ? form == (half ? UINT4 : INT4) : 1;
    const float unit = is_joint(form) && half ? own->unit / 16 : own->unit;
    return vfma(acc, from_digits(sums, digits, exceeds ? own->excess : 0) * vset(unit), scales);
}

/* The same of coarse rows.  NEON converts integers at a quarter of the speed of other operations, so that there a sum (which
 * is below 2^22) begins as the bits of a float that is 1.5 * 2^23 too large: START.  It is loaded, since loads cost least.
 * Of codes of 4 bits, sums of the second half begin at HIGH_START, whose last bit is worth 1/16, without their excess; those
 * of the first half become a difference of both. */
#if SIGNED_CODES
#define START 12582912.0f
#define HIGH_START (START / 16)
#define START_BITS 0x4b400000 /* of START as a float, and of HIGH_START */
#define HIGH_START_BITS 0x49400000
INLINE vi start_sum(const int form, const int half, const struct groups *g, long at) {
    static const float start[VL] = {START, START, START, START};
    const void *from = is_4_bits(form) ? (const void *)g->starts[at][half] : (const void *)start;
    vi sum;
    __asm__ volatile("ldr %q0, %1" : "=w"(sum) : "m"(*(const vi *)from));
    return sum;
}
INLINE vf add_sums(vf acc, vi sums, const int form, const int half, vf scales, const struct groups *g, long at) {
    const float start = is_4_bits(form) && half ? HIGH_START : START;
    const float32x4_t own = vld1q_f32(&g->of_rows[at].unit);
    return vfma(acc, (vf)vmulq_laneq_f32((float32x4_t)((vf)sums - start), own, 0), scales);
}
/* where the sums of both halves begin, for a row of that sum */
INLINE void set_starts(int32_t (*starts)[VL], int form, int32_t total) {
    int32_t high = HIGH_START_BITS - (form == UINT4 ? excess_of(form) * total : 0);
    int32_t both = (int32_t)((uint32_t)high + START_BITS) - (form == INT4 ? excess_of(form) * total : 0);
    for (int i = 0; i < VL; i++) starts[0][i] = both, starts[1][i] = high;
}
#else
INLINE vi start_sum(const int form, const int half, const struct groups *g, long at) { return (vi){0}; }
INLINE vf add_sums(vf acc, vi sums, const int form, const int half, vf scales, const struct groups *g, long at) {
    const struct digit_group *own = g->of_rows + at;
    return vfma(acc, __builtin_convertvector(sums - own->excess[0], vf) * vset(own->unit), scales);
}
#endif

INLINE vf add_offsets(vf acc, vf offsets, const struct groups *g, long at) {
#ifdef NEON
    return (vf)vfmaq_laneq_f32((float32x4_t)acc, (float32x4_t)offsets, vld1q_f32(&g->of_rows[at].unit), 1);
#else
    return vfma(acc, vset(g->of_rows[at].sum), offsets);
#endif
}

#define DOT_STEP(lane)                                                                               \
    {                                                                                                \
        vi first, second;                                                                            \
        load_codes(&first, &second, w + (lane)*step, form);                                          \
        UNROLL for (int i = 0; i < mr * digits; i++) {                                               \
            left[i] = DOT(left[i], first, x + 16 * i, lane);                                         \
            right[i] = DOT(right[i], second, x + 16 * i, lane);                                      \
        }                                                                                            \
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
        vf numbers[4];
        load_numbers(numbers, 0, scales, own, 0, &g, stored);
        UNROLL for (int m = 0; m < mr; m++) {
            lo[m] = add_group(lo[m], left + m * digits, form, 0, digits, numbers[0], &g, m * g.stride + n);
            hi[m] = add_group(hi[m], right + m * digits, form, 1, digits, numbers[1], &g, m * g.stride + n);
        }
        if (g.offsets) UNROLL for (int m = 0; m < mr; m++) {
            lo[m] = add_offsets(lo[m], numbers[2], &g, m * g.stride + n);
            hi[m] = add_offsets(hi[m], numbers[3], &g, m * g.stride + n);
        }
        if (++used == g.shared) own++, used = 0;
    }
    UNROLL for (int m = 0; m < mr; m++) {
        vstore(buf + m * GROUP * NR, lo[m]);
        vstore(buf + m * GROUP * NR + VL, hi[m]);
    }
}

#define DOT_TILE(mr, form, digits)                                                                                \
    static void dot_tile_##mr##_##form##_##digits(const void *x, const char *w, const void *s, long kq,           \
                                                  const struct groups *g, float *b) {                             \
        if (g->stored == HALVES)                                                                                  \
            dot_tile(mr, form, digits - (DIGIT_BITS == 16), HALVES, x, w, s, kq, g, b);                           \
        else                                                                                                      \
            dot_tile(mr, form, digits - (DIGIT_BITS == 16), SINGLES, x, w, s, kq, g, b);                          \
    }
#if DOT_ROWS == 4
#define DOT_TILES(form, digits)                                                                                   \
    DOT_TILE(1, form, digits) DOT_TILE(2, form, digits) DOT_TILE(3, form, digits) DOT_TILE(4, form, digits)       \
    static code_tile_fn *const DOTS_##form##_##digits[5] = {                                                      \
        0, dot_tile_1_##form##_##digits, dot_tile_2_##form##_##digits, dot_tile_3_##form##_##digits,              \
        dot_tile_4_##form##_##digits,                                                                             \
    };
#else
#define DOT_TILES(form, digits)                                                                                   \
    DOT_TILE(1, form, digits) DOT_TILE(2, form, digits)                                                           \
    static code_tile_fn *const DOTS_##form##_##digits[3] = {                                                      \
        0, dot_tile_1_##form##_##digits, dot_tile_2_##form##_##digits,                                            \
    };
#endif
DOT_TILES(INT8, 2) DOT_TILES(INT4, 2) DOT_TILES(UINT4, 2) DOT_TILES(INT8, 3) DOT_TILES(INT4, 3) DOT_TILES(UINT4, 3)
static code_tile_fn *const *const DOTS[2][5] = { /* of fp32 rows, of bf16 rows */
    {0, 0, DOTS_INT8_3, DOTS_INT4_3, DOTS_UINT4_3},
    {0, 0, DOTS_INT8_2, DOTS_INT4_2, DOTS_UINT4_2},
};

/* The same with coarse rows.  Many rows in two halves or in pairs: the conversions of one part go along with the products of
 * the next, and codes are read again, which costs less than registers.  x is [groups][mr][k of a group].
 * quads: of each group, if that is known, else 0. */
#if SIGNED_CODES /* in the order of the source: four chains side by side, not one after the other as GCC likes it */
#define NEXT_DOT(acc, codes, x, lane)                                                                             \
    ({                                                                                                            \
        vi sum = (acc);                                                                                           \
        __asm__ volatile("sdot %0.4s, %1.16b, %2.4b[" #lane "]" : "+w"(sum) : "w"(codes), "w"(vld1q_s8(x)));      \
        sum;                                                                                                      \
    })
#else
#define NEXT_DOT DOT
#endif
#define PAIR_STEP(lane)                                                                                           \
    {                                                                                                             \
        vi first, second;                                                                                         \
        load_codes(&first, &second, w + (q + (lane)) * step, form);                                               \
        for (long line = 0; ahead && line < step; line += 64) FETCH_LATER(w + (q + (lane)) * step + line);        \
        UNROLL for (int i = 0; i < rows; i++) {                                                                   \
            left[i] = NEXT_DOT(left[i], first, own + i * 4 * gq + 4 * q, lane);                                   \
            right[i] = NEXT_DOT(right[i], second, own + i * 4 * gq + 4 * q, lane);                                \
        }                                                                                                         \
    }

/* where the numbers of a group are; see load_numbers */
struct numbers_at {
    const void *of_panel;
    long n, per;
    int stored;
    vf *units;
};

INLINE void few_rows(const int rows, const int form, const int ahead, const long quads, long gq, long last, const digit *own,
                     const char *w, const struct numbers_at *numbers_at, const struct groups *g, const int offsets, long at,
                     vf *lo, vf *hi) {
    const long step = is_4_bits(form) ? 4 * VL : 4 * NR;
    vi left[MORE_ROWS], right[MORE_ROWS];
    vf numbers[4];
    UNROLL for (int i = 0; i < rows; i++) {
        left[i] = start_sum(form, 0, g, at + i * g->stride);
        right[i] = start_sum(form, 1, g, at + i * g->stride);
    }
    if (quads)
        UNROLL for (long q = 0; q < quads; q += 4) { PAIR_STEP(0) PAIR_STEP(1) PAIR_STEP(2) PAIR_STEP(3) }
    else
        for (long q = 0; q < last; q += 4) { PAIR_STEP(0) PAIR_STEP(1) PAIR_STEP(2) PAIR_STEP(3) }
    load_numbers(numbers, numbers_at->units, numbers_at->of_panel, numbers_at->n, numbers_at->per, g, numbers_at->stored);
    UNROLL for (int i = 0; i < rows; i++, at += g->stride) {
        if (is_joint(form)) left[i] = (vi)((vu)left[i] - (vu)right[i]);
        lo[i] = add_sums(lo[i], left[i], form, 0, numbers[0], g, at);
        hi[i] = add_sums(hi[i], right[i], form, 1, numbers[1], g, at);
        if (offsets) lo[i] = add_offsets(lo[i], numbers[2], g, at), hi[i] = add_offsets(hi[i], numbers[3], g, at);
    }
    COMPILER_BARRIER(); /* else codes are kept */
}

INLINE void pairs_tile(const int mr, const int form, const int stored, const long quads, const int offsets, const void *x,
                       const char *w, const void *scales, long kq, const struct groups *given, float *buf) {
    struct groups g = *given;
    const long gq = quads ? quads : g.gq;
    const digit *own = x;
    vf lo[COARSE_ROWS], hi[COARSE_ROWS], units[8];
    g.offsets = offsets;
    UNROLL for (int m = 0; m < mr; m++) lo[m] = hi[m] = vset(0.0f);
    const long bytes = gq * (is_4_bits(form) ? 4 * VL : 4 * NR);
    for (long n = 0; n < g.count; n++, w += bytes, own += mr * 4 * gq) {
        const struct numbers_at numbers = {scales, quads ? n : n / g.shared, quads ? 64 / quads : g.per, stored, units};
        const long last = min_l(gq, kq - n * gq); /* the last group may be shorter */
        const int ahead = is_4_bits(form) || mr <= FEW_ROWS; /* else a panel was unpacked */
        if (ahead) FETCH_GROUP(w, bytes);
        const int most = is_4_bits(form) ? MORE_ROWS : FEW_ROWS;
        const int together = mr <= most ? mr : DIGIT_BITS == 8 ? (mr + 1) / 2 : 2; /* digits of 16 bits take registers */
        UNROLL for (int m = 0; m < mr; m += together)
            if (m + together <= mr)
                few_rows(together, form, ahead, quads, gq, last, own + m * 4 * gq, w, &numbers, &g, offsets,
                         m * g.stride + n, lo + m, hi + m);
            else
                few_rows(mr % together, form, ahead, quads, gq, last, own + m * 4 * gq, w, &numbers, &g, offsets,
                         m * g.stride + n, lo + m, hi + m);
    }
    UNROLL for (int m = 0; m < mr; m++) {
        vstore(buf + m * GROUP * NR, lo[m]);
        vstore(buf + m * GROUP * NR + VL, hi[m]);
    }
}

/* Of groups of so many quads, with offsets or without, as GGUF's types have them; all others are computed more slowly
 * (and all of them by old ARM processors, for which GCC takes long to compile this). */
#if defined(NEON) && !SIGNED_CODES
#define GROUPS_OF(mr, form, stored, quads, has_offsets)
#else
#define GROUPS_OF(mr, form, stored, quads, has_offsets)                         \
    if (g->gq == (quads) && kq % (quads) == 0 && !g->offsets == !(has_offsets)) \
        pairs_tile(mr, form, stored, quads, has_offsets, x, w, s, kq, g, b);    \
    else
#endif
#define PAIRS_TILE(mr, form, stored, SPECIAL)                                                        \
    static void pairs_##mr##_##form##_##stored(const void *x, const char *w, const void *s, long kq, \
                                               const struct groups *g, float *b) {                   \
        SPECIAL(mr, form, stored) pairs_tile(mr, form, stored, 0, g->offsets, x, w, s, kq, g, b);    \
    }
#define NONE(mr, form, stored)
#define PLAIN(mr, form, stored) GROUPS_OF(mr, form, stored, 8, 0)
#define WITH_OFFSETS(mr, form, stored) GROUPS_OF(mr, form, stored, 8, 1)
#define SMALL(mr, form, stored) GROUPS_OF(mr, form, stored, 4, 0)
#define BOTH(mr, form, stored) PLAIN(mr, form, stored) WITH_OFFSETS(mr, form, stored)
#define OF_K_TYPES(mr, form, stored) SMALL(mr, form, stored) WITH_OFFSETS(mr, form, stored)
#define ALL(mr, form, stored) BOTH(mr, form, stored) SMALL(mr, form, stored)
#if FEW_ROWS == 4
#define PAIRS_FEW(form, stored, SPECIAL)                                                                           \
    PAIRS_TILE(1, form, stored, SPECIAL) PAIRS_TILE(2, form, stored, SPECIAL)                                      \
    PAIRS_TILE(3, form, stored, SPECIAL) PAIRS_TILE(4, form, stored, SPECIAL)                                      \
    static code_tile_fn *const PAIRS_##form##_##stored[4] = {pairs_1_##form##_##stored, pairs_2_##form##_##stored, \
                                                             pairs_3_##form##_##stored, pairs_4_##form##_##stored};
#else
#define PAIRS_FEW(form, stored, SPECIAL)                                                                          \
    PAIRS_TILE(1, form, stored, SPECIAL) PAIRS_TILE(2, form, stored, SPECIAL)                                     \
    static code_tile_fn *const PAIRS_##form##_##stored[2] = {pairs_1_##form##_##stored, pairs_2_##form##_##stored};
#endif
PAIRS_FEW(INT8, SINGLES, ALL) PAIRS_FEW(INT8, HALVES, BOTH) PAIRS_FEW(INT8, FACTORS, OF_K_TYPES)
PAIRS_FEW(INT4, SINGLES, NONE) PAIRS_FEW(INT4, HALVES, PLAIN) PAIRS_FEW(INT4, FACTORS, NONE)
PAIRS_FEW(UINT4, SINGLES, NONE) PAIRS_FEW(UINT4, HALVES, WITH_OFFSETS) PAIRS_FEW(UINT4, FACTORS, WITH_OFFSETS)
#if MORE_ROWS == 8
#define PAIRS_MORE(form, stored, SPECIAL)                                                                          \
    PAIRS_TILE(5, form, stored, SPECIAL) PAIRS_TILE(6, form, stored, SPECIAL)                                      \
    PAIRS_TILE(7, form, stored, SPECIAL) PAIRS_TILE(8, form, stored, SPECIAL)                                      \
    static code_tile_fn *const MORE_##form##_##stored[4] = {pairs_5_##form##_##stored, pairs_6_##form##_##stored,  \
                                                            pairs_7_##form##_##stored, pairs_8_##form##_##stored};
PAIRS_MORE(INT4, SINGLES, NONE) PAIRS_MORE(INT4, HALVES, PLAIN) PAIRS_MORE(INT4, FACTORS, NONE)
PAIRS_MORE(UINT4, SINGLES, NONE) PAIRS_MORE(UINT4, HALVES, WITH_OFFSETS) PAIRS_MORE(UINT4, FACTORS, WITH_OFFSETS)
static code_tile_fn *const *const MORE_PAIRS[2][3] = { /* by form and how scales are stored; of those by rows, from 5 on */
    {MORE_INT4_SINGLES, MORE_INT4_HALVES, MORE_INT4_FACTORS},
    {MORE_UINT4_SINGLES, MORE_UINT4_HALVES, MORE_UINT4_FACTORS},
};
#endif
static code_tile_fn *const *const FEW_PAIRS[3][3] = { /* by form and how scales are stored; of those by rows, from 1 on */
    {PAIRS_INT8_SINGLES, PAIRS_INT8_HALVES, PAIRS_INT8_FACTORS},
    {PAIRS_INT4_SINGLES, PAIRS_INT4_HALVES, PAIRS_INT4_FACTORS},
    {PAIRS_UINT4_SINGLES, PAIRS_UINT4_HALVES, PAIRS_UINT4_FACTORS},
};
#if COARSE_ROWS == 8
PAIRS_TILE(5, INT8, SINGLES, ALL) PAIRS_TILE(6, INT8, SINGLES, ALL)
PAIRS_TILE(7, INT8, SINGLES, ALL) PAIRS_TILE(8, INT8, SINGLES, ALL)
static code_tile_fn *const PAIRS[9] = { /* of bytes and fp32 scales, by rows */
    0, pairs_1_INT8_SINGLES, pairs_2_INT8_SINGLES, pairs_3_INT8_SINGLES, pairs_4_INT8_SINGLES, pairs_5_INT8_SINGLES,
    pairs_6_INT8_SINGLES, pairs_7_INT8_SINGLES, pairs_8_INT8_SINGLES,
};
#else
static code_tile_fn *const PAIRS[3] = {0, pairs_1_INT8_SINGLES, pairs_2_INT8_SINGLES};
#endif

/* bits of a byte of codes that are stored inverted, so that it is unsigned (signed) */
long ssd_flipped_bits(int form) { return (SIGNED_CODES ? is_4_bits(form) : form == INT8) ? 128 : 0; }

/* a scale or an offset (kind 1) of a panel */
static float number_at(const void *of_panel, long group, long kind, long column, const struct groups *g) {
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
        const char *numbers = (const char *)a->scales + id / NR * numbers_bytes(ceil_div(a->k, scaled), &g);
        for (long i = 0; i < a->k; i++) {
            int code = codes[i / together * together * width + i % together] ^ (int)flipped;
            if (is_4_bits(a->form)) code = code >> j / width * 4 & 15;
            float value = form == INT8 ? (float)(int8_t)code : (float)(form == INT4 ? code - 8 : code);
            if (form == FP8) load_e4m3(&value, &(int8_t){(int8_t)code}, 1);
            row[i] = value * number_at(numbers, i / scaled, 0, j, &g);
            if (g.offsets) row[i] += number_at(numbers, i / scaled, 1, j, &g);
        }
        store_row(a->out, t * a->k, row, a->k, a->bf16);
    }
    return 0;
}

int ssd_embedding(const void *given, int threads) {
    const struct embedding *call = given;
    return call->form ? codes_embedding(call) : dense_embedding(call);
}
