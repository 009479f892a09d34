/* NEON of 64-bit ARM; its dot products. */
#include <arm_neon.h>

#define HELP_AFTER 64
#define pause_core() __asm__ __volatile__("isb" ::: "memory") /* about 10 ns; `yield` is nothing at all */

#define vfma vfma
INLINE vf vfma(vf acc, vf a, vf b) { return (vf)vfmaq_f32((float32x4_t)acc, (float32x4_t)a, (float32x4_t)b); }

typedef float32x4_t quad;
INLINE quad quad_load(const float *p) { return vld1q_f32(p); }
#define FMA_LANE(acc, v, q, lane) ((vf)vfmaq_laneq_f32((float32x4_t)(acc), (float32x4_t)(v), (q), (lane)))
#define MUL_LANE(v, q, lane) ((vf)vmulq_laneq_f32((float32x4_t)(v), (q), (lane)))

#define vsum vsum
INLINE float vsum(vf v) { return vaddvq_f32((float32x4_t)v); } /* neighbours first */
INLINE float vmax_lanes(vf v) { return vmaxvq_f32((float32x4_t)v); }

#define vsum_4 vsum_4
INLINE void vsum_4(float *out, const vf *v) {
    float32x4_t lo = vpaddq_f32((float32x4_t)v[0], (float32x4_t)v[1]);
    vst1q_f32(out, vpaddq_f32(lo, vpaddq_f32((float32x4_t)v[2], (float32x4_t)v[3])));
}

#define vsum_int vsum_int
INLINE int32_t vsum_int(vi v) { return vaddvq_s32((int32x4_t)v); }
INLINE int32_t vmax_int_lanes(vi v) { return vmaxvq_s32((int32x4_t)v); }

/* loads cost least, so constants are loaded, too */
#define vload_here vload_here
INLINE vi vload_here(const void *p) {
    vi v;
    __asm__ volatile("ldr %q0, %1" : "=w"(v) : "m"(*(const vu_mem *)p));
    return v;
}

#define vstore_bytes vstore_bytes
INLINE void vstore_bytes(int8_t *out, const vi *v) {
    int16x8_t low = vuzp1q_s16((int16x8_t)v[0], (int16x8_t)v[1]), high = vuzp1q_s16((int16x8_t)v[2], (int16x8_t)v[3]);
    vst1q_s8(out, vuzp1q_s8((int8x16_t)low, (int8x16_t)high));
}

/* by permutes, which have two pipes on Neoverse N1, where shifts have one */
#define vload_bf16 vload_bf16
INLINE void vload_bf16(vf *lo, vf *hi, const uint16_t *p) {
    uint16x8_t halves = vld1q_u16(p), zero = {0};
    *lo = (vf)vzip1q_u16(zero, halves);
    *hi = (vf)vzip2q_u16(zero, halves);
}

#define vwiden_words vwiden_words
INLINE void vwiden_words(vf *lo, vf *hi, vu words) {
    uint16x8_t halves = (uint16x8_t)words, zero = {0};
    *lo = (vf)vtrn1q_u16(zero, halves);
    *hi = (vf)vtrn2q_u16(zero, halves);
}

/* GCC converts this short vector number by number */
#define vstore_bf16 vstore_bf16
INLINE void vstore_bf16(uint16_t *p, vf v) { vst1_u16(p, vshrn_n_u32((uint32x4_t)vround_bf16(v), 16)); }

#define vload_half vload_half
INLINE vf vload_half(const uint16_t *p) { return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }

/* NEON converts integers at a quarter of the speed of other operations: bytes become the low bits of a float of 2^23.  If
 * none is negative, 2^23 times the unit is subtracted in the operation that multiplies by it, which is exact, too. */
#define vload_scaled vload_scaled
INLINE void vload_scaled(vf *out, const vf *units, const int8_t *p, const int count) {
    const uint16x8_t top = vdupq_n_u16(0x4b00);
    if (count == 4) {
        uint8x16_t bytes = vld1q_u8((const uint8_t *)p);
        __asm__ volatile("" : "+w"(bytes)); /* not before the products that precede this in the source */
        UNROLL for (int i = 0; i < 4; i += 2) {
            const uint8x16_t zero = vdupq_n_u8(0);
            const uint16x8_t words = vreinterpretq_u16_u8(i ? vzip2q_u8(bytes, zero) : vzip1q_u8(bytes, zero));
            vf low = (vf)vload_here(units + 4 + i), high = (vf)vload_here(units + 5 + i);
            out[i] = vfma(low, (vf)vzip1q_u16(words, top), units[i]);
            out[i + 1] = vfma(high, (vf)vzip2q_u16(words, top), units[i + 1]);
        }
        return;
    }
    uint8x16_t bytes = veorq_u8(vreinterpretq_u8_u64(vld1q_dup_u64((const uint64_t *)p)), vdupq_n_u8(128));
    uint16x8_t words = vreinterpretq_u16_u8(vzip1q_u8(bytes, vdupq_n_u8(0)));
    out[0] = ((vf)vzip1q_u16(words, top) - 8388736.0f) * units[0];
    out[1] = ((vf)vzip2q_u16(words, top) - 8388736.0f) * units[1];
}

#ifdef __ARM_FEATURE_DOTPROD
#define TILE_SIZES MR_MAX = 8, DOT_ROWS = 4, COARSE_ROWS = 8, STORED_ROWS = 4, STORED_ROWS_4 = 4, ATTENTION_QUERIES = 4
#define TRAITS FIXED_GROUPS = 1, FETCH_GROUPS = 1, MUL_64 = 0
typedef int8_t digit;
#define SIGNED_CODES 1
#define DOT(acc, codes, x, lane) ((vi)vdotq_laneq_s32((int32x4_t)(acc), (int8x16_t)(codes), vld1q_s8(x), (lane)))
/* four chains side by side, not one after the other as GCC likes it */
#define DOT_HERE(acc, codes, x, lane)                                                                        \
    ({                                                                                                       \
        vi sum = (acc);                                                                                      \
        __asm__ volatile("sdot %0.4s, %1.16b, %2.4b[" #lane "]" : "+w"(sum) : "w"(codes), "w"(vld1q_s8(x))); \
        sum;                                                                                                 \
    })
#else
#define TILE_SIZES MR_MAX = 8, DOT_ROWS = 4, COARSE_ROWS = 2, STORED_ROWS = 2, STORED_ROWS_4 = 2, ATTENTION_QUERIES = 4
#define TRAITS FIXED_GROUPS = 0, FETCH_GROUPS = 1, MUL_64 = 0 /* GCC takes long to compile fixed groups */
#endif
