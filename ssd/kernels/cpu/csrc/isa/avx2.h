/* AVX2, FMA and F16C; AVX-VNNI. */
#include "x86.h"

#define TILE_SIZES MR_MAX = 6, DOT_ROWS = 2, COARSE_ROWS = 2, STORED_ROWS = 2, STORED_ROWS_4 = 2, ATTENTION_QUERIES = 2

#define vfma vfma
INLINE vf vfma(vf acc, vf a, vf b) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)acc); }

#define vsum_4 vsum_4
INLINE void vsum_4(float *out, const vf *v) { sum_4_of_8(out, (const __m256 *)v); }

#define vload_bytes vload_bytes
INLINE vi vload_bytes(const void *p) { return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64(p)); }
INLINE vi vload_signed_bytes(const void *p) { return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64(p)); }

#define vload_half vload_half
INLINE vf vload_half(const uint16_t *p) { return (vf)_mm256_cvtph_ps((__m128i) * (const vs_mem *)p); }

#ifdef __AVXVNNI__
typedef int8_t digit;
#define DOT(acc, codes, x, lane) \
    ((vi)_mm256_dpbusd_avx_epi32((__m256i)(acc), (__m256i)(codes), (__m256i)vset_word((x) + 4 * (lane))))
#else
#define dot_pairs dot_pairs
INLINE vi dot_pairs(vi a, vi b) { return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
#endif
