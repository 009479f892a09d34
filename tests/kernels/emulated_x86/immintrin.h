/* The x86 intrinsics of `ssd/kernels/cpu/csrc` in plain C, so that its AVX-512 and AMX kernels run on any machine.  They follow the
 * pseudo-code of Intel's manual, with the order of AMX's bf16 sums, which flush denormal numbers. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef float __m512 __attribute__((vector_size(64), may_alias));
typedef int64_t __m512i __attribute__((vector_size(64), may_alias));
typedef float __m256 __attribute__((vector_size(32), may_alias));
typedef float __m128 __attribute__((vector_size(16), may_alias));
typedef int64_t __m256i __attribute__((vector_size(32), may_alias));
typedef int64_t __m128i __attribute__((vector_size(16), may_alias));

#define EMULATED static __attribute__((noinline, unused)) /* compiles in a tenth of the time */

EMULATED void _mm_pause(void) {}

EMULATED __m128i _mm_loadu_si128(const void *p) {
    __m128i v;
    memcpy(&v, p, 16);
    return v;
}

EMULATED __m128i _mm_loadl_epi64(const void *p) {
    __m128i v = {0};
    memcpy(&v, p, 8);
    return v;
}

EMULATED void _mm_storeu_si128(void *p, __m128i v) { memcpy(p, &v, 16); }

EMULATED __m512i _mm512_cvtepu16_epi32(__m256i v) {
    uint16_t in[16];
    uint32_t out[16];
    memcpy(in, &v, sizeof in);
    for (int i = 0; i < 16; i++) out[i] = in[i];
    __m512i result;
    memcpy(&result, out, sizeof result);
    return result;
}
EMULATED __m128i _mm512_cvtepi32_epi8(__m512i v) {
    int32_t in[16];
    int8_t out[16];
    __m128i result;
    memcpy(in, &v, 64);
    for (int i = 0; i < 16; i++) out[i] = (int8_t)in[i];
    memcpy(&result, out, 16);
    return result;
}

EMULATED int _mm512_reduce_add_epi32(__m512i v) {
    int32_t in[16], sum = 0;
    memcpy(in, &v, 64);
    for (int i = 0; i < 16; i++) sum += in[i];
    return sum;
}

EMULATED int _mm512_reduce_max_epi32(__m512i v) {
    int32_t in[16];
    memcpy(in, &v, 64);
    for (int i = 1; i < 16; i++) in[0] = in[i] > in[0] ? in[i] : in[0];
    return in[0];
}

EMULATED __m512 _mm512_permutex2var_ps(__m512 a, __m512i index, __m512 b) {
    int32_t from[16];
    __m512 out;
    memcpy(from, &index, 64);
    for (int i = 0; i < 16; i++) out[i] = from[i] & 16 ? b[from[i] & 15] : a[from[i] & 15];
    return out;
}

EMULATED __m512 _mm512_i32gather_ps(__m512i index, const void *p, int scale) {
    int32_t at[16];
    __m512 out;
    memcpy(at, &index, 64);
    for (int i = 0; i < 16; i++) memcpy((char *)&out + 4 * i, (const char *)p + (long)at[i] * scale, 4);
    return out;
}

EMULATED void _mm_storeu_ps(float *p, __m128 v) { memcpy(p, &v, 16); }
EMULATED __m128 _mm_unpacklo_ps(__m128 a, __m128 b) { return (__m128){a[0], b[0], a[1], b[1]}; }
EMULATED __m128 _mm_unpackhi_ps(__m128 a, __m128 b) { return (__m128){a[2], b[2], a[3], b[3]}; }
EMULATED __m128 _mm_movelh_ps(__m128 a, __m128 b) { return (__m128){a[0], a[1], b[0], b[1]}; }
EMULATED __m128 _mm_movehl_ps(__m128 a, __m128 b) { return (__m128){b[2], b[3], a[2], a[3]}; }

#define HALVES_OF(name, wide, narrow, at)          \
    EMULATED narrow name(wide v) {                 \
        narrow half;                               \
        memcpy(&half, (char *)&v + (at), sizeof half); \
        return half;                               \
    }
HALVES_OF(_mm512_castps512_ps256, __m512, __m256, 0)
HALVES_OF(emulated_upper_8, __m512, __m256, 32)
HALVES_OF(_mm256_castps256_ps128, __m256, __m128, 0)
HALVES_OF(emulated_upper_4, __m256, __m128, 16)
#define _mm512_extractf32x8_ps(v, upper) emulated_upper_8(v)
#define _mm256_extractf128_ps(v, upper) emulated_upper_4(v)

#define CVTPH(bits, lanes, half)                                                                  \
    EMULATED __m##bits _mm##bits##_cvtph_ps(half v) {                                             \
        _Float16 in[lanes];                                                                       \
        __m##bits out;                                                                            \
        memcpy(in, &v, sizeof in);                                                                \
        for (int i = 0; i < lanes; i++) out[i] = (float)in[i];                                    \
        return out;                                                                               \
    }
CVTPH(512, 16, __m256i)
CVTPH(256, 8, __m128i)

#define WIDENED(bits, lanes, name, type)                                                          \
    EMULATED __m##bits##i _mm##bits##_##name(__m128i v) {                                         \
        type in[16];                                                                              \
        int32_t out[lanes];                                                                       \
        memcpy(in, &v, 16);                                                                       \
        for (int i = 0; i < lanes; i++) out[i] = in[i];                                           \
        __m##bits##i result;                                                                      \
        memcpy(&result, out, sizeof result);                                                      \
        return result;                                                                            \
    }
#define FOR_WIDTH(bits, lanes, dpbusd)                                                            \
    EMULATED __m##bits _mm##bits##_fmadd_ps(__m##bits a, __m##bits b, __m##bits c) {              \
        for (int i = 0; i < lanes; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);                  \
        return c;                                                                                 \
    }                                                                                             \
    WIDENED(bits, lanes, cvtepu8_epi32, uint8_t)                                                  \
    WIDENED(bits, lanes, cvtepi8_epi32, int8_t)                                                   \
    EMULATED __m##bits##i _mm##bits##_madd_epi16(__m##bits##i a, __m##bits##i b) {                \
        int16_t x[2 * lanes], y[2 * lanes];                                                       \
        int32_t out[lanes];                                                                       \
        memcpy(x, &a, sizeof x);                                                                  \
        memcpy(y, &b, sizeof y);                                                                  \
        for (int i = 0; i < lanes; i++) out[i] = x[2 * i] * y[2 * i] + x[2 * i + 1] * y[2 * i + 1]; \
        __m##bits##i result;                                                                      \
        memcpy(&result, out, sizeof result);                                                      \
        return result;                                                                            \
    }                                                                                             \
    EMULATED __m##bits##i dpbusd(__m##bits##i acc, __m##bits##i a, __m##bits##i b) {              \
        uint8_t x[4 * lanes];                                                                     \
        int8_t y[4 * lanes];                                                                      \
        int32_t out[lanes];                                                                       \
        memcpy(x, &a, sizeof x);                                                                  \
        memcpy(y, &b, sizeof y);                                                                  \
        memcpy(out, &acc, sizeof out);                                                            \
        for (int i = 0; i < 4 * lanes; i++) out[i / 4] += x[i] * y[i];                            \
        __m##bits##i result;                                                                      \
        memcpy(&result, out, sizeof result);                                                      \
        return result;                                                                            \
    }
FOR_WIDTH(512, 16, _mm512_dpbusd_epi32)
FOR_WIDTH(256, 8, _mm256_dpbusd_avx_epi32)

/* ---------------------------------------------------------------- AMX: what the hardware would refuse ends the process */
struct emulated_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};
static __thread struct emulated_config tile_shape;
static __thread uint8_t tile_data[8][16][64];

EMULATED void tile_check(int right) {
    if (!right) abort();
}

EMULATED void _tile_loadconfig(const void *config) {
    memcpy(&tile_shape, config, sizeof tile_shape);
    tile_check(tile_shape.palette == 1);
    for (int i = 0; i < 16; i++)
        tile_check(i < 8 ? tile_shape.rows[i] > 0 && tile_shape.rows[i] <= 16 && tile_shape.bytes[i] <= 64
                         : !tile_shape.rows[i]);
    memset(tile_data, 0, sizeof tile_data);
}

EMULATED void _tile_release(void) { memset(&tile_shape, 0, sizeof tile_shape); }

EMULATED void _tile_zero(int tile) {
    tile_check(tile_shape.palette == 1);
    memset(tile_data[tile], 0, sizeof tile_data[tile]);
}

EMULATED void _tile_loadd(int tile, const void *base, long stride) {
    _tile_zero(tile);
    for (int row = 0; row < tile_shape.rows[tile]; row++)
        memcpy(tile_data[tile][row], (const char *)base + row * stride, tile_shape.bytes[tile]);
}

EMULATED void _tile_stored(int tile, void *base, long stride) {
    tile_check(tile_shape.palette == 1);
    for (int row = 0; row < tile_shape.rows[tile]; row++)
        memcpy((char *)base + row * stride, tile_data[tile][row], tile_shape.bytes[tile]);
}

/* rows, columns and depth of sums += a @ b have to be those of the three tiles */
EMULATED void tile_check_shapes(int sums, int a, int b) {
    tile_check(tile_shape.rows[sums] == tile_shape.rows[a] && tile_shape.bytes[sums] == tile_shape.bytes[b] &&
               tile_shape.bytes[a] == 4 * tile_shape.rows[b]);
}

EMULATED void _tile_dpbsud(int sums, int a, int b) {
    tile_check_shapes(sums, a, b);
    for (int m = 0; m < tile_shape.rows[sums]; m++) {
        int32_t row[16];
        memcpy(row, tile_data[sums][m], 64);
        for (int k = 0; k < tile_shape.rows[b]; k++)
            for (int n = 0; n < 16; n++)
                for (int i = 0; i < 4; i++) row[n] += (int8_t)tile_data[a][m][4 * k + i] * tile_data[b][k][4 * n + i];
        memcpy(tile_data[sums][m], row, 64);
    }
}

EMULATED float tile_flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

EMULATED float tile_bf16(const uint8_t *p) {
    uint32_t bits = (uint32_t)p[0] << 16 | (uint32_t)p[1] << 24;
    float f;
    memcpy(&f, &bits, 4);
    return tile_flushed(f);
}

EMULATED float tile_fma(float sum, const uint8_t *a, const uint8_t *b) {
    return tile_flushed(__builtin_fmaf(tile_bf16(a), tile_bf16(b), sum));
}

EMULATED void _tile_dpbf16ps(int sums, int a, int b) {
    tile_check_shapes(sums, a, b);
    for (int m = 0; m < tile_shape.rows[sums]; m++) {
        float row[16], even[16] = {0}, odd[16] = {0};
        memcpy(row, tile_data[sums][m], 64);
        for (int k = 0; k < tile_shape.rows[b]; k++)
            for (int n = 0; n < 16; n++) {
                even[n] = tile_fma(even[n], tile_data[a][m] + 4 * k, tile_data[b][k] + 4 * n);
                odd[n] = tile_fma(odd[n], tile_data[a][m] + 4 * k + 2, tile_data[b][k] + 4 * n + 2);
            }
        for (int n = 0; n < 16; n++) row[n] = tile_flushed(tile_flushed(row[n]) + tile_flushed(even[n] + odd[n]));
        memcpy(tile_data[sums][m], row, 64);
    }
}
