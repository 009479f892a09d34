/* linear: register tiles of weights that are floats. */
#define TASK_PANELS 4 /* most panels one task computes for a row tile */

/* One function for each number of rows (the first argument of DEFINE), and the table of those that the machine's registers
 * have room for: the others are not referred to, hence not compiled. */
#define FOR_ROWS(DEFINE, ...)                                                                   \
    DEFINE(1, __VA_ARGS__) DEFINE(2, __VA_ARGS__) DEFINE(3, __VA_ARGS__) DEFINE(4, __VA_ARGS__) \
    DEFINE(5, __VA_ARGS__) DEFINE(6, __VA_ARGS__) DEFINE(7, __VA_ARGS__) DEFINE(8, __VA_ARGS__)
#define UP_TO(most, name, rows) ((rows) <= (most) ? name##_##rows : 0)
#define BY_ROWS(most, name)                                                                     \
    {0, UP_TO(most, name, 1), UP_TO(most, name, 2), UP_TO(most, name, 3), UP_TO(most, name, 4), \
     UP_TO(most, name, 5), UP_TO(most, name, 6), UP_TO(most, name, 7), UP_TO(most, name, 8)}

INLINE vf from_e4m3(const char *w) {
    vi code = vload_bytes(w);
    return (vf)((code & 0x80) << 24 | (code & 0x7f) << 20) * 0x1p120f; /* e4m3, widened */
}

/* NR weights of a storage type */
INLINE void widen(vf *lo, vf *hi, const char *w, const int type) {
    if (type == BF16)
        vwiden_words(lo, hi, *(const vu_mem *)w);
    else if (type == FP32)
        *lo = vload((const float *)w), *hi = vload((const float *)w + VL);
    else
        *lo = from_e4m3(w), *hi = from_e4m3(w + VL);
}

/* quad q of k: x of mr rows in xq, a panel at w */
#define STEP(lane)                                          \
    {                                                       \
        vf lo, hi;                                          \
        widen(&lo, &hi, w + (lane)*step, type);             \
        UNROLL for (int m = 0; m < mr; m++) {               \
            left[m] = FMA_LANE(left[m], lo, xq[m], lane);   \
            right[m] = FMA_LANE(right[m], hi, xq[m], lane); \
        }                                                   \
    }

/* the sums of a tile's rows for the two halves of a panel, to buf[m][NR] */
INLINE void store_tile(const int mr, float *buf, const vf *left, const vf *right) {
    UNROLL for (int m = 0; m < mr; m++) {
        vstore(buf + m * TASK_PANELS * NR, left[m]);
        vstore(buf + m * TASK_PANELS * NR + VL, right[m]);
    }
}

/* buf = x tile @ panel^T.  Every output element is one chain of FMAs over k, whatever the number of rows.  x is packed as
 * [K/4][MR][4]. */
INLINE void tile(const int mr, const int type, const float *x, const char *w, long kq, float *buf) {
    const long step = NR * bytes_of(type);
    vf left[8], right[8]; /* mr of each live in registers */
    UNROLL for (int m = 0; m < mr; m++) left[m] = right[m] = vset(0.0f);
    for (long q = 0; q < kq; q++, x += 4 * mr, w += 4 * step) {
        quad xq[8];
        UNROLL for (int m = 0; m < mr; m++) xq[m] = quad_load(x + 4 * m);
        STEP(0) STEP(1) STEP(2) STEP(3)
    }
    store_tile(mr, buf, left, right);
}

typedef void tile_fn(const float *x, const char *w, long kq, float *buf);
#define TILE(mr, name, type) \
    static void name##_##mr(const float *x, const char *w, long kq, float *b) { tile(mr, type, x, w, kq, b); }
FOR_ROWS(TILE, tile_fp32, FP32) FOR_ROWS(TILE, tile_bf16, BF16)
static tile_fn *const TILES[2][9] = {BY_ROWS(MR_MAX, tile_fp32), BY_ROWS(MR_MAX, tile_bf16)};
