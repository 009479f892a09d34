/* linear: AMX
 * Tile registers: 0 to 5 hold sums, 6 and 7 (of bf16 rows 4 to 7, of coarse rows 5 to 7) what is multiplied.  Row tiles have
 * up to 16 rows; the unused last row of one of those that are smaller is multiplied, too, and not read.
 * bf16: every output element is the sum, first to last, of products of 32 k; its bits differ from those of `tile`, so a
 * machine uses either.  x is [K/32][rows][32].
 * Integers: sums are exact, so these are the numbers of `dot_tile`.  x is [K/step][digits][rows][step]. */
#define AMX_ROWS 16
#define AMX_LEAST 5 /* rows from which on tiles of integers are faster than dot products */

struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16]; /* of a row */
    uint8_t rows[16];
};

static void amx_configure(long rows, long rows_of_5, long rows_of_6, long bytes_of_6, long rows_of_7) {
    struct tile_config c = {.palette = 1};
    for (int i = 0; i < 6; i++) c.rows[i] = (uint8_t)rows, c.bytes[i] = 64;
    c.rows[5] = (uint8_t)rows_of_5;
    c.rows[6] = (uint8_t)rows_of_6, c.bytes[6] = (uint16_t)bytes_of_6;
    c.rows[7] = (uint8_t)rows_of_7, c.bytes[7] = 64;
    COMPILER_BARRIER(); /* the intrinsics do not say what they read */
    tile_configure(&c);
}

/* one or two row tiles of bf16 against a panel; `next`: bytes of a row tile, `ld`: those of a row of sums */
INLINE void amx_bf16_tile(const int both, const char *x, long next, long rows, const char *w, long depth, float *buf,
                          float *buf2) {
    const long ld = TASK_PANELS * NR * 4, wide = 2 * NR * 2;
    tile_zero(0);
    tile_zero(1);
    if (both) {
        tile_zero(2);
        tile_zero(3);
    }
    for (long k = 0; k < depth; k += BF16_DEPTH, x += rows * 64, w += BF16_DEPTH * NR * 2) {
        tile_load(6, w, wide);
        tile_load(4, x, 64);
        tile_dot_bf16(0, 4, 6);
        tile_load(7, w + 64, wide);
        tile_dot_bf16(1, 4, 7);
        if (!both) continue;
        tile_load(5, x + next, 64);
        tile_dot_bf16(2, 5, 6);
        tile_dot_bf16(3, 5, 7);
    }
    tile_store(0, buf, ld);
    tile_store(1, buf + VL, ld);
    if (!both) return;
    tile_store(2, buf2, ld);
    tile_store(3, buf2 + VL, ld);
}

#define AMX_DIGIT(sums, d)                       \
    if (digits > (d))                            \
    {                                            \
        tile_load(6, x + (d)*rows * step, step); \
        tile_dot_bytes(sums, 6, 7);              \
    }

/* a row tile of digits against a panel of bytes; `rows` and `step` are those of the packed tile */
INLINE void amx_dot_tile(const int digits, long mr, long rows, long step, const char *x, const char *w,
                         const void *scales, long kq, const struct groups *given, float *buf) {
    int32_t sums[6][AMX_ROWS][VL] __attribute__((aligned(64)));
    const struct groups g = *given;
    vf units[8];
    for (long m = 0; m < mr; m++) memset(buf + m * TASK_PANELS * NR, 0, NR * 4);
    for (long group = 0, n = 0, used = 0, own = 0; group < kq; group += g.gq, n++) {
        tile_zero(0);
        tile_zero(1);
        tile_zero(2);
        tile_zero(3);
        if (digits == 3) {
            tile_zero(4);
            tile_zero(5);
        }
        for (long q = group; q < min_l(kq, group + g.gq); q += step / 4) {
            tile_load(7, w, 4 * NR);
            AMX_DIGIT(0, 0)
            AMX_DIGIT(2, 1)
            AMX_DIGIT(4, 2)
            tile_load(7, w + 4 * VL, 4 * NR);
            AMX_DIGIT(1, 0)
            AMX_DIGIT(3, 1)
            AMX_DIGIT(5, 2)
            x += digits * rows * step;
            w += step * NR;
        }
        tile_store(0, sums[0], 64);
        tile_store(1, sums[1], 64);
        tile_store(2, sums[2], 64);
        tile_store(3, sums[3], 64);
        if (digits == 3) {
            tile_store(4, sums[4], 64);
            tile_store(5, sums[5], 64);
        }
        vf qparams[4];
        load_qparams(qparams, units, scales, own, g.per, &g, g.stored);
        for (long m = 0; m < mr; m++)
            UNROLL for (int half = 0; half < 2; half++) {
                vi of_row[3];
                float *acc = buf + m * TASK_PANELS * NR + half * VL;
                UNROLL for (int d = 0; d < digits; d++) of_row[d] = (vi)*(const vu_mem *)sums[2 * d + half][m];
                vf sum = add_group(vload(acc), of_row, INT8, half, digits, qparams[half], &g, m * g.stride + n);
                vstore(acc, g.offsets ? add_offsets(sum, qparams[2 + half], &g, m * g.stride + n) : sum);
            }
        if (++used == g.shared) own++, used = 0;
    }
}

#define AMX_COARSE(left, right, out)             \
    tile_zero(left);                             \
    tile_zero(right);                            \
    for (long q = 0; q < quads; q += step / 4) { \
        tile_load(6, x, step);                   \
        tile_load(7, own, 4 * NR);               \
        tile_dot_bytes(left, 6, 7);              \
        tile_load(5, own + 4 * VL, 4 * NR);      \
        tile_dot_bytes(right, 6, 5);             \
        x += rows * step, own += step * NR;      \
    }                                            \
    tile_store(left, (out)[0], 64);              \
    tile_store(right, (out)[1], 64);

/* A tile of coarse rows against a panel.  Beside the products of a group, the codes of the next one are unpacked, if they
 * are of 4 bits, and the sums of the one before are added: each of these has to wait for what was written last. */
INLINE void amx_coarse_tile(const int form, long mr, long rows, long step, const char *x, const char *w, const void *scales,
                            long kq, const struct groups *given, float *buf) {
    char codes[2][DOT_MOST * NR] __attribute__((aligned(64)));
    int32_t sums[2][2][AMX_ROWS][VL] __attribute__((aligned(64)));
    const struct groups g = *given;
    const long bytes = g.gq * (is_4_bits(form) ? 4 * VL : 4 * NR), later = 2 * g.gq * 4 * rows; /* of rows: two groups */
    vf qparams[4], units[8];
    for (long m = 0; m < mr; m++) memset(buf + m * TASK_PANELS * NR, 0, NR * 4);
    if (is_4_bits(form)) unpack_codes(codes[0], w, min_l(g.gq, kq), form);
    for (long n = 0; n <= g.count; n++) {
        const long quads = min_l(g.gq, kq - n * g.gq), next = min_l(g.gq, kq - (n + 1) * g.gq);
        const char *own = is_4_bits(form) ? codes[n % 2] : w + n * bytes;
        if (quads > 0 && n % 2) {
            AMX_COARSE(2, 3, sums[1])
        } else if (quads > 0) {
            AMX_COARSE(0, 1, sums[0])
        }
        if (is_4_bits(form) && next > 0) unpack_codes(codes[(n + 1) % 2], w + (n + 1) * bytes, next, form);
        if (!n) continue;
        load_qparams(qparams, units, scales, g.shared == 1 ? n - 1 : (n - 1) / g.shared, g.per, &g, g.stored);
        for (long m = 0, at = n - 1; m < mr; m++, at += g.stride) {
            for (long line = m * 64; line < g.gq * 4 * rows; line += mr * 64) __builtin_prefetch(x + later + line);
            UNROLL for (int half = 0; half < 2; half++) {
                float *acc = buf + m * TASK_PANELS * NR + half * VL;
                vi of_row = (vi)*(const vu_mem *)sums[(n - 1) % 2][half][m];
                vf sum = add_sums(vload(acc), of_row, form, half, qparams[half], &g, at);
                vstore(acc, g.offsets ? add_offsets(sum, qparams[2 + half], &g, at) : sum);
            }
        }
    }
}
