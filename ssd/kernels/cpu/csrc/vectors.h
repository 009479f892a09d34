/* vectors of the target machine */
#if defined(__AVX512F__)
#include <immintrin.h>
#define VL 16
#define MR_MAX 8 /* rows of the largest register tile */
#define AQ 4     /* queries of an attention tile */
#if defined(__AVX512VNNI__) && defined(__AMX_INT8__) && defined(__AMX_BF16__)
#define AMX
#endif
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define VL 8
#define MR_MAX 6
#define AQ 2
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#define NEON
#define VL 4
#define MR_MAX 8
#define AQ 4
#else
#ifdef __SSE2__
#include <emmintrin.h>
#endif
#define VL 4
#define MR_MAX 4
#define AQ 2
#endif
#define NR (2 * VL) /* columns of a weight panel */
#define GROUP 4     /* most panels one task computes for a row tile */
#define CH 64       /* attention: absolute positions per softmax chunk */
#define AP 4        /* attention: key positions of a score tile */
#define AV 4        /* attention: value vectors of an output tile */
#define KV_AHEAD 4 /* attention: positions that are prefetched */
#define QUERIES 24  /* attention: (row, head) pairs that share one pass over the keys, where there are so many */
#define MANY_TASKS 4 /* attention: so many tasks for each thread are not cut into parts */
#define PARTS_MOST (2L << 20) /* attention: floats of the results of chunks */

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint8_t vb_mem __attribute__((vector_size(VL), aligned(1), may_alias));
typedef int8_t vc_mem __attribute__((vector_size(VL), aligned(1), may_alias));
typedef float vf_mem __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint32_t vu_mem __attribute__((vector_size(VL * 4), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define COMPILER_BARRIER() __asm__ __volatile__("" ::: "memory")
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

INLINE vf vload(const float *p) { return *(const vf_mem *)p; }
INLINE void vstore(float *p, vf v) { *(vf_mem *)p = v; }
INLINE vf vset(float s) { return s - (vf){0}; } /* exact, where 0 + s is not */
INLINE vf vselect(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
INLINE vf vmax(vf a, vf b) { return vselect(a > b, a, b); }

/* acc + a * b, rounded once where the machine can */
INLINE vf vfma(vf acc, vf a, vf b) {
#if VL == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)acc);
#elif VL == 8
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)acc);
#elif defined(NEON)
    return (vf)vfmaq_f32((float32x4_t)acc, (float32x4_t)a, (float32x4_t)b);
#else
    return acc + a * b;
#endif
}

/* Four consecutive scalars to be broadcast one by one: NEON keeps them in a register and multiplies by lane, x86
 * broadcasts from memory for free. */
#ifdef NEON
typedef float32x4_t quad;
INLINE quad quad_load(const float *p) { return vld1q_f32(p); }
#define FMA_LANE(acc, v, q, lane) ((vf)vfmaq_laneq_f32((float32x4_t)(acc), (float32x4_t)(v), (q), (lane)))
#else
typedef const float *quad;
INLINE quad quad_load(const float *p) { return p; }
#define FMA_LANE(acc, v, q, lane) vfma((acc), (v), vset((q)[lane]))
#endif

/* lanes added in one fixed tree: halves onto halves on x86, neighbours on NEON; the same for every caller */
INLINE float vsum(vf v) {
#ifdef NEON
    return vaddvq_f32((float32x4_t)v);
#else
    float a[VL];
    memcpy(a, &v, sizeof a);
    UNROLL for (int w = VL / 2; w > 0; w /= 2)
        for (int i = 0; i < w; i++) a[i] += a[i + w];
    return a[0];
#endif
}

/* vsum of four vectors */
INLINE void vsum_4(float *out, const vf *v) {
#if defined(NEON)
    float32x4_t lo = vpaddq_f32((float32x4_t)v[0], (float32x4_t)v[1]);
    vst1q_f32(out, vpaddq_f32(lo, vpaddq_f32((float32x4_t)v[2], (float32x4_t)v[3])));
#elif VL >= 8
    __m128 half[4];
    UNROLL for (int i = 0; i < 4; i++) {
#if VL == 16
        __m256 wide = _mm512_castps512_ps256((__m512)v[i]) + _mm512_extractf32x8_ps((__m512)v[i], 1);
#else
        __m256 wide = (__m256)v[i];
#endif
        half[i] = _mm256_castps256_ps128(wide) + _mm256_extractf128_ps(wide, 1);
    }
    __m128 a = _mm_unpacklo_ps(half[0], half[1]) + _mm_unpackhi_ps(half[0], half[1]);
    __m128 b = _mm_unpacklo_ps(half[2], half[3]) + _mm_unpackhi_ps(half[2], half[3]);
    _mm_storeu_ps(out, _mm_movelh_ps(a, b) + _mm_movehl_ps(b, a));
#else
    UNROLL for (int i = 0; i < 4; i++) out[i] = vsum(v[i]);
#endif
}

/* of numbers; what NaN gives is not said */
INLINE float vmax_lanes(vf v) {
#ifdef NEON
    return vmaxvq_f32((float32x4_t)v);
#else
    float a[VL];
    memcpy(a, &v, sizeof a);
    UNROLL for (int w = VL / 2; w > 0; w /= 2)
        for (int i = 0; i < w; i++) a[i] = a[i] > a[i + w] ? a[i] : a[i + w];
    return a[0];
#endif
}

/* exp, 1-2 ulp: 2^n * P(r) with |r| <= ln2/2; exactly 0 far below the range, inf above it, NaN stays NaN */
INLINE vf vexp(vf x) {
    x = vselect(x > vset(100.0f), vset(100.0f), x);
    x = vselect(x < vset(-110.0f), vset(-110.0f), x);
    const vf magic = vset(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vf shifted = vfma(magic, x, vset(1.44269504088896341f));
    vf n = shifted - magic;
    vf r = vfma(x, n, vset(-0.693359375f));
    r = vfma(r, n, vset(2.12194440e-4f));
    vf p = vset(1.9875691500e-4f);
    p = vfma(vset(1.3981999507e-3f), p, r);
    p = vfma(vset(8.3334519073e-3f), p, r);
    p = vfma(vset(4.1665795894e-2f), p, r);
    p = vfma(vset(1.6666665459e-1f), p, r);
    p = vfma(vset(5.0000001201e-1f), p, r);
    p = vfma(r, p, r * r) + 1.0f;
    vi e = (vi)shifted - (vi)magic;
    vi half = e >> 1;
    return p * (vf)((half + 127) << 23) * (vf)((e - half + 127) << 23);
}

/* x * sigmoid(slope * x) */
INLINE vf vsilu(vf x, float slope) { return x / (1.0f + vexp(-slope * x)); }
