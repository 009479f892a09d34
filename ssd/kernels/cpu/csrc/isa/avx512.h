/* AVX-512 F, BW, DQ and VL; VNNI; with it AMX. */
#include "x86.h"

#define vfma vfma
INLINE vf vfma(vf acc, vf a, vf b) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)acc); }

#define vsum_4 vsum_4
INLINE void vsum_4(float *out, const vf *v) {
    __m256 halves[4];
    UNROLL for (int i = 0; i < 4; i++)
        halves[i] = _mm512_castps512_ps256((__m512)v[i]) + _mm512_extractf32x8_ps((__m512)v[i], 1);
    sum_4_of_8(out, halves);
}

#define vsum_int vsum_int
INLINE int32_t vsum_int(vi v) { return _mm512_reduce_add_epi32((__m512i)v); }
INLINE int32_t vmax_int_lanes(vi v) { return _mm512_reduce_max_epi32((__m512i)v); }

#define vpermute vpermute
INLINE vf vpermute(vf a, vi from, vf b) {
    return (vf)_mm512_permutex2var_ps((__m512)a, (__m512i)from, (__m512)b);
}
INLINE vf vgather(const float *p, vi at) { return (vf)_mm512_i32gather_ps((__m512i)at, p, 4); }

#define vload_bytes vload_bytes
INLINE vi vload_bytes(const void *p) { return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128(p)); }
INLINE vi vload_signed_bytes(const void *p) { return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128(p)); }

#define vstore_bytes vstore_bytes
INLINE void vstore_bytes(int8_t *out, const vi *v) {
    _mm_storeu_si128((__m128i *)out, _mm512_cvtepi32_epi8((__m512i)v[0]));
}

#define vload_bf16 vload_bf16
INLINE void vload_bf16(vf *lo, vf *hi, const uint16_t *p) {
    *lo = (vf)((vu)_mm512_cvtepu16_epi32((__m256i) * (const vs_mem *)p) << 16);
    *hi = (vf)((vu)_mm512_cvtepu16_epi32((__m256i) * (const vs_mem *)(p + VL)) << 16);
}

#define vload_half vload_half
INLINE vf vload_half(const uint16_t *p) { return (vf)_mm512_cvtph_ps((__m256i) * (const vs_mem *)p); }

#ifdef __AVX512VNNI__
#define TILE_SIZES MR_MAX = 8, DOT_ROWS = 4, COARSE_ROWS = 8, STORED_ROWS = 4, STORED_ROWS_4 = 8, ATTENTION_QUERIES = 4
typedef int8_t digit;
#define DOT(acc, codes, x, lane) \
    ((vi)_mm512_dpbusd_epi32((__m512i)(acc), (__m512i)(codes), (__m512i)vset_word((x) + 4 * (lane))))
#if defined(__AMX_INT8__) && defined(__AMX_BF16__)
#include "amx.h"
#endif
#else
#define TILE_SIZES MR_MAX = 8, DOT_ROWS = 4, COARSE_ROWS = 8, STORED_ROWS = 4, STORED_ROWS_4 = 4, ATTENTION_QUERIES = 4
#define dot_pairs dot_pairs
INLINE vi dot_pairs(vi a, vi b) { return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
#endif
