/* linear: the register tile
 * buf[m][NR] = x tile @ panel^T.  Every output element is one chain of FMAs over k, whatever the number of rows.
 * x is packed as [K/4][MR][4]. */
INLINE void widen(vf *lo, vf *hi, const char *w, int bf16) {
    if (bf16) {
        vu word = *(const vu_mem *)w;
#ifdef NEON
        uint16x8_t halves = (uint16x8_t)word, zero = {0}; /* shifts have one pipe on Neoverse N1, permutes have two */
        *lo = (vf)vtrn1q_u16(zero, halves);
        *hi = (vf)vtrn2q_u16(zero, halves);
#else
        *lo = (vf)(word << 16);
        *hi = (vf)(word & 0xffff0000u);
#endif
    } else {
        *lo = vload((const float *)w);
        *hi = vload((const float *)w + VL);
    }
}

#define STEP(lane)                                                  \
    {                                                               \
        vf lo, hi;                                                  \
        widen(&lo, &hi, w + (lane)*step, bf16);                     \
        UNROLL for (int m = 0; m < mr; m++) {                       \
            left[m] = FMA_LANE(left[m], lo, xq[m], lane);           \
            right[m] = FMA_LANE(right[m], hi, xq[m], lane);         \
        }                                                           \
    }

INLINE void tile(const int mr, const int bf16, const float *x, const char *w, long kq, float *buf) {
    const long step = NR * (bf16 ? 2 : 4);
    vf left[8], right[8]; /* mr of each live in registers */
    UNROLL for (int m = 0; m < mr; m++) left[m] = right[m] = vset(0.0f);
    for (long q = 0; q < kq; q++) {
        quad xq[8];
        UNROLL for (int m = 0; m < mr; m++) xq[m] = quad_load(x + 4 * m);
        STEP(0) STEP(1) STEP(2) STEP(3)
        x += 4 * mr;
        w += 4 * step;
    }
    UNROLL for (int m = 0; m < mr; m++) {
        vstore(buf + m * GROUP * NR, left[m]);
        vstore(buf + m * GROUP * NR + VL, right[m]);
    }
}

typedef void tile_fn(const float *x, const char *w, long kq, float *buf);
#define TILE(mr)                                                                                          \
    static void tile_##mr##_f(const float *x, const char *w, long kq, float *b) { tile(mr, 0, x, w, kq, b); } \
    static void tile_##mr##_h(const float *x, const char *w, long kq, float *b) { tile(mr, 1, x, w, kq, b); }
TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) TILE(7) TILE(8)
static tile_fn *const TILES[2][9] = {
    {0, tile_1_f, tile_2_f, tile_3_f, tile_4_f, tile_5_f, tile_6_f, tile_7_f, tile_8_f},
    {0, tile_1_h, tile_2_h, tile_3_h, tile_4_h, tile_5_h, tile_6_h, tile_7_h, tile_8_h},
};
