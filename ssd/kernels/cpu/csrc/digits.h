/* Rows rounded to integers, in digits of 8 or 16 bits, for products with integer codes. */

/* The integers next to 16 numbers times `up`, in digits: 16 of the lowest at `out`, those of each higher one `stride` behind.
 * Adds the integers to `sum`, and their lowest digits to `low`, if there are several. */
INLINE void to_digits(digit *out, long stride, const float *x, float up, int digits, vi *sum, vi *low) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    vi rounded[16 / VL];
    UNROLL for (int i = 0; i < 16 / VL; i++) {
        rounded[i] = (vi)(vload(x + i * VL) * up + magic) - (vi)vset(magic);
        *sum += rounded[i];
        if (digits > 1) *low += (vi)((vu)rounded[i] << 24) >> 24;
    }
    if (DIGIT_BITS == 8) {
        for (int d = 0; d < digits; d++, out += stride) {
            vstore_bytes((int8_t *)out, rounded);
            UNROLL for (int i = 0; i < 16 / VL; i++) rounded[i] = (rounded[i] + 128) >> 8; /* without that signed digit */
        }
        return;
    }
    int32_t v[16];
    memcpy(v, rounded, sizeof v);
    for (int d = 0; d < digits; d++, out += stride) {
        int last = d == digits - 1;
        for (int i = 0; i < 16; i++) {
            int from = (i & 12) | (i & 1) << 1 | (i >> 1 & 1);
            out[i] = last ? (digit)v[from] : (int8_t)v[from];
        }
        for (int i = 0; i < 16; i++) v[i] = (v[i] + 128) >> 8;
    }
}

/* A row in digits and its groups.  A group with NaN or infinity in it gets NaN as its unit. */
struct digit_layout {
    long stride;    /* from a digit of a number to the next higher one */
    long run, jump; /* numbers whose digits are side by side (a multiple of 16); from one such run to the next */
};

INLINE void pack_groups(digit *dst, const struct digit_layout *layout, const float *x, long kq, int bf16, const int coarse,
                        int form, const struct groups *g, const float *row_scales, struct digit_group *out) {
    const float most = coarse ? 127.0f : bf16 ? 0x1p13f : 0x1p21f;
    const int digits = digits_of(bf16, coarse);
    for (long group = 0, i = 0; group < kq; group += g->gq, i++) {
        long first = group * 4, last = min_l(kq, group + g->gq) * 4;
        vi top = (vi)vset(0x1p-100f), sum = {0}, low = {0};
        for (long k = first; k < last; k += VL) top = vmax_int(top, (vi)vload(x + k) & 0x7fffffff);
        int32_t largest = vmax_int_lanes(top);
        int finite = largest < 0x7f800000;
        if (!coarse) largest &= 0x7f800000;
        float power; /* of two; of coarse rows the largest number */
        memcpy(&power, &largest, 4);
        float unit = finite ? power / most : NAN, up = finite ? most / power : 0.0f;
        for (long k = first, place = 0; k < last; k += 16) {
            to_digits(dst + place, layout->stride, x + k, up, digits, &sum, &low);
            place += 16;
            if (place == layout->run) dst += layout->jump, place = 0;
        }
        if (row_scales) unit *= row_scales[g->ld > 1 ? i / g->shared : 0];
        int32_t total = finite ? vsum_int(sum) : 0, of_low = finite && !coarse ? vsum_int(low) : 0;
        int32_t excess = excess_of(form) * (bf16 || coarse ? total : (total - of_low) / 256);
        out[i] = (struct digit_group){unit, (float)total * unit, {excess, excess_of(form) * of_low}};
        if (SIGNED_CODES && g->starts) set_starts(g->starts[out + i - g->of_rows], form, total);
    }
}

static void pack_digits(digit *dst, const struct digit_layout *layout, const float *x, long kq, int bf16, int coarse,
                        int form, const struct groups *g, const float *row_scales, struct digit_group *out) {
    if (coarse)
        pack_groups(dst, layout, x, kq, bf16, 1, form, g, row_scales, out);
    else
        pack_groups(dst, layout, x, kq, bf16, 0, form, g, row_scales, out);
}
