/* bf16 */
INLINE float from_bf16(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

/* round to nearest even; NaN stays NaN (quiet) */
INLINE uint16_t to_bf16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40u : rounded);
}

INLINE float round_bf16(float f) { return from_bf16(to_bf16(f)); }

/* fp16 */
INLINE float from_half(uint16_t h) {
    uint32_t bits = (uint32_t)(h & 0x7fff) << 13;
    float size;
    memcpy(&size, &bits, 4);
    return (h & 0x8000 ? -size : size) * 0x1p112f;
}

/* e4m3: floats of 8 bits */
static void load_e4m3(float *dst, const int8_t *src, long n) {
    uint8_t nan = 0;
    for (long i = 0; i < n; i++) {
        uint32_t u = (uint32_t)(int32_t)src[i] << 20 & 0x87f00000u; /* the exponent of another bias */
        float f;
        memcpy(&f, &u, 4);
        dst[i] = f * 0x1p120f;
    }
    for (long i = 0; i < n; i++) nan |= (uint8_t)((src[i] & 0x7f) == 0x7f);
    for (long i = 0; nan && i < n; i++)
        if ((src[i] & 0x7f) == 0x7f) dst[i] = NAN;
}

/* round to nearest even; the largest beyond +-448, NaN stays NaN */
INLINE uint8_t to_e4m3(float f) {
    uint32_t u, small;
    memcpy(&u, &f, 4);
    uint32_t sign = (u >> 24) & 0x80u, size = u & 0x7fffffffu;
    float shifted = fabsf(f) + 16384.0f; /* below 2^-6: rounds to multiples of 2^-9 */
    memcpy(&small, &shifted, 4);
    uint32_t code = ((size + 0x7ffffu + ((size >> 20) & 1u)) >> 20) - (120u << 3);
    code = size < 0x3c800000u ? small - 0x46800000u : code;
    code = size >= 0x43e00000u ? 0x7eu : code;
    code = size > 0x7f800000u ? 0x7fu : code;
    return (uint8_t)(sign | code);
}

/* rows as fp32 */
enum { FP32, BF16, E4M3 }; /* storage types */
INLINE long bytes_of(int type) { return type == FP32 ? 4 : type == BF16 ? 2 : 1; }

static void load_row(float *dst, const void *src, long offset, long n, int type) {
    if (type == FP32) {
        memcpy(dst, (const float *)src + offset, (size_t)n * 4);
    } else if (type == BF16) {
        const uint16_t *s = (const uint16_t *)src + offset;
        long i = 0;
        for (vf lo, hi; i + 2 * VL <= n; i += 2 * VL) {
            vload_bf16(&lo, &hi, s + i);
            vstore(dst + i, lo), vstore(dst + i + VL, hi);
        }
        for (; i < n; i++) dst[i] = from_bf16(s[i]);
    } else {
        load_e4m3(dst, (const int8_t *)src + offset, n);
    }
}

INLINE void store_row(void *dst, long offset, const float *src, long n, int type) {
    if (type == FP32) {
        memcpy((float *)dst + offset, src, (size_t)n * 4);
    } else if (type == BF16) {
        uint16_t *d = (uint16_t *)dst + offset;
        long i = 0;
        for (; i + VL <= n; i += VL) vstore_bf16(d + i, vload(src + i));
        for (; i < n; i++) d[i] = to_bf16(src[i]);
    } else {
        uint8_t *d = (uint8_t *)dst + offset;
        for (long i = 0; i < n; i++) d[i] = to_e4m3(src[i]);
    }
}

/* store_row of numbers that the type has: bf16 or fp32 */
static void store_exact(void *dst, long offset, const float *src, long n, int bf16) {
    if (!bf16) {
        memcpy((float *)dst + offset, src, (size_t)n * 4);
        return;
    }
    const uint32_t *bits = (const void *)src;
    uint16_t *d = (uint16_t *)dst + offset;
    for (long i = 0; i < n; i++) d[i] = (uint16_t)(bits[i] >> 16);
}
