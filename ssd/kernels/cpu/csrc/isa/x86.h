/* What all x86-64 processors have, and what AVX2 and AVX-512 share. */
#include <immintrin.h>

#define HELP_AFTER 16
#define pause_core _mm_pause

#if VL == 4
#define dot_pairs dot_pairs
INLINE vi dot_pairs(vi a, vi b) { return (vi)_mm_madd_epi16((__m128i)a, (__m128i)b); }
#else
/* vsum_4 of vectors of 8 lanes */
INLINE void sum_4_of_8(float *out, const __m256 *v) {
    __m128 half[4];
    UNROLL for (int i = 0; i < 4; i++) half[i] = _mm256_castps256_ps128(v[i]) + _mm256_extractf128_ps(v[i], 1);
    __m128 a = _mm_unpacklo_ps(half[0], half[1]) + _mm_unpackhi_ps(half[0], half[1]);
    __m128 b = _mm_unpacklo_ps(half[2], half[3]) + _mm_unpackhi_ps(half[2], half[3]);
    _mm_storeu_ps(out, _mm_movelh_ps(a, b) + _mm_movehl_ps(b, a));
}
#endif
