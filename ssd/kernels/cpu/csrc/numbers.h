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

INLINE vf vround_bf16(vf v) {
    vu u = (vu)v;
    vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
    vi nan = v != v;
    return vselect(nan, (vf)((u & 0xffff0000u) | 0x400000u), (vf)rounded);
}

typedef uint16_t vs_mem __attribute__((vector_size(VL * 2), aligned(2), may_alias));
/* 2 * VL numbers; on NEON by permutes, which have two pipes on Neoverse N1, where shifts have one */
INLINE void vload_bf16(vf *lo, vf *hi, const uint16_t *p) {
#ifdef NEON
    uint16x8_t halves = vld1q_u16(p), zero = {0};
    *lo = (vf)vzip1q_u16(zero, halves);
    *hi = (vf)vzip2q_u16(zero, halves);
#elif VL == 16
    *lo = (vf)((vu)_mm512_cvtepu16_epi32((__m256i)*(const vs_mem *)p) << 16);
    *hi = (vf)((vu)_mm512_cvtepu16_epi32((__m256i)*(const vs_mem *)(p + VL)) << 16);
#else
    *lo = (vf)(__builtin_convertvector(*(const vs_mem *)p, vu) << 16);
    *hi = (vf)(__builtin_convertvector(*(const vs_mem *)(p + VL), vu) << 16);
#endif
}

INLINE void vstore_bf16(uint16_t *p, vf v) {
#ifdef NEON /* GCC converts this short vector number by number */
    vst1_u16(p, vshrn_n_u32((uint32x4_t)vround_bf16(v), 16));
#else
    *(vs_mem *)p = __builtin_convertvector((vu)vround_bf16(v) >> 16, vs_mem);
#endif
}

/* fp16: finite numbers, widened exactly */

INLINE vf vload_half(const uint16_t *p) {
#if VL == 16
    return (vf)_mm512_cvtph_ps((__m256i)*(const vs_mem *)p);
#elif VL == 8
    return (vf)_mm256_cvtph_ps((__m128i)*(const vs_mem *)p);
#elif defined(NEON)
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
    vu bits = __builtin_convertvector(*(const vs_mem *)p, vu);
    return (vf)((vu)((vf)((bits & 0x7fffu) << 13) * 0x1p112f) | (bits & 0x8000u) << 16);
#endif
}

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
