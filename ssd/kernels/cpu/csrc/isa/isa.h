/* What an instruction set supplies to the kernels.  This is the one list: each name, what it is, and what it is on a machine
 * that does not supply it.  The header of an instruction set defines the names that it has something better for; beside a
 * function it defines a macro of the same name, which tells the list.  Only files of this folder ask what the code is compiled
 * for: kernels call what is in the list, and have an `if` on its constants where they differ in more. */
#if defined(__AVX512F__)
#define ISA "avx512.h"
#define VL 16 /* 32-bit lanes of a vector */
#elif defined(__AVX2__) && defined(__FMA__)
#define ISA "avx2.h"
#define VL 8
#elif defined(__ARM_NEON) && defined(__aarch64__)
#define ISA "neon.h"
#define VL 4
#elif defined(__SSE2__)
#define ISA "x86.h"
#define VL 4
#else
#define VL 4
#endif
#include "../vectors.h"
#ifdef ISA
#include ISA
#endif

/* Rows of the largest register tiles, and queries of those of attention; the default is for 16 registers.
 * MR_MAX: products with fp32, bf16 and fp8 weights.  With integer codes: DOT_ROWS: rows in several digits; of rows in one
 * digit COARSE_ROWS: by unpacked panels, STORED_ROWS: by panels as they are stored, STORED_ROWS_4: those of 4 bits. */
#ifndef TILE_SIZES
#define TILE_SIZES MR_MAX = 4, DOT_ROWS = 2, COARSE_ROWS = 2, STORED_ROWS = 2, STORED_ROWS_4 = 2, ATTENTION_QUERIES = 2
#endif
enum { TILE_SIZES };

/* FIXED_GROUPS: products with codes are compiled for the usual sizes of groups, too (see codes.h)
 * FETCH_GROUPS: codes are prefetched group by group, which costs fewer instructions; else one line beside each that is read,
 * so that requests never wait for each other
 * MUL_64: vectors of 64-bit integers are multiplied faster than those integers one by one */
#ifndef TRAITS
#define TRAITS FIXED_GROUPS = 1, FETCH_GROUPS = 0, MUL_64 = 1
#endif
enum { TRAITS };

/* pause_core: a thread that waits does nothing for some time; HELP_AFTER: times of it, a microsecond, before it takes the
 * work of others */
#ifndef pause_core
#define HELP_AFTER 64
#define pause_core() ((void)0)
#endif

/* acc + a * b, rounded once where the machine can */
#ifndef vfma
INLINE vf vfma(vf acc, vf a, vf b) { return acc + a * b; }
#endif

/* Four consecutive floats to be broadcast one by one: from a register where an instruction takes a lane of one, else from
 * memory.  FMA_LANE: vfma(acc, v, q[lane]); MUL_LANE: v * q[lane]; lane is a literal. */
#ifndef FMA_LANE
typedef const float *quad;
INLINE quad quad_load(const float *p) { return p; }
#define FMA_LANE(acc, v, q, lane) vfma((acc), (v), vset((q)[lane]))
#define MUL_LANE(v, q, lane) ((v)*vset((q)[lane]))
#endif

/* vsum: lanes added in one fixed tree, the same for every caller: halves onto halves, unless an instruction has another order
 * vmax_lanes: the largest lane, if none is NaN */
#ifndef vsum
INLINE float vsum(vf v) {
    float a[VL];
    memcpy(a, &v, sizeof a);
    UNROLL for (int w = VL / 2; w > 0; w /= 2)
        for (int i = 0; i < w; i++) a[i] += a[i + w];
    return a[0];
}
INLINE float vmax_lanes(vf v) {
    float a[VL];
    memcpy(a, &v, sizeof a);
    UNROLL for (int w = VL / 2; w > 0; w /= 2)
        for (int i = 0; i < w; i++) a[i] = a[i] > a[i + w] ? a[i] : a[i + w];
    return a[0];
}
#endif

/* vsum of four vectors, with its bits */
#ifndef vsum_4
INLINE void vsum_4(float *out, const vf *v) {
    UNROLL for (int i = 0; i < 4; i++) out[i] = vsum(v[i]);
}
#endif

/* sum and maximum of lanes */
#ifndef vsum_int
INLINE int32_t vsum_int(vi v) {
    int32_t sum = 0;
    for (int i = 0; i < VL; i++) sum += v[i];
    return sum;
}
INLINE int32_t vmax_int_lanes(vi v) {
    int32_t largest = v[0];
    for (int i = 1; i < VL; i++) largest = v[i] > largest ? v[i] : largest;
    return largest;
}
#endif

/* vpermute: lane i is lane from[i] of a, or from[i] - VL of b; vgather: it is p[at[i]] */
#ifndef vpermute
INLINE vf vpermute(vf a, vi from, vf b) {
    vf out;
    UNROLL for (int i = 0; i < VL; i++) out[i] = from[i] < VL ? a[from[i]] : b[from[i] - VL];
    return out;
}
INLINE vf vgather(const float *p, vi at) {
    vf out;
    UNROLL for (int i = 0; i < VL; i++) out[i] = p[at[i]];
    return out;
}
#endif

/* what is in memory, loaded at this place of the program, where compilers would compute it or move the load to their cost */
#ifndef vload_here
INLINE vi vload_here(const void *p) { return (vi)*(const vu_mem *)p; }
#endif

/* bytes, widened: unsigned ones, signed ones */
#ifndef vload_bytes
INLINE vi vload_bytes(const void *p) { return __builtin_convertvector(*(const vb_mem *)p, vi); }
INLINE vi vload_signed_bytes(const void *p) { return __builtin_convertvector(*(const vc_mem *)p, vi); }
#endif

/* the low bytes of 16 integers */
#ifndef vstore_bytes
INLINE void vstore_bytes(int8_t *out, const vi *v) {
    for (int i = 0; i < 16; i++) out[i] = (int8_t)v[i / VL][i % VL];
}
#endif

/* vload_bf16: 2 * VL numbers, widened; vwiden_words: those of words with one of `lo` in their low half, one of `hi` in their
 * high half */
#ifndef vload_bf16
INLINE void vload_bf16(vf *lo, vf *hi, const uint16_t *p) {
    *lo = (vf)(__builtin_convertvector(*(const vs_mem *)p, vu) << 16);
    *hi = (vf)(__builtin_convertvector(*(const vs_mem *)(p + VL), vu) << 16);
}
#endif
#ifndef vwiden_words
INLINE void vwiden_words(vf *lo, vf *hi, vu words) {
    *lo = (vf)(words << 16);
    *hi = (vf)(words & 0xffff0000u);
}
#endif
#ifndef vstore_bf16
INLINE void vstore_bf16(uint16_t *p, vf v) {
    *(vs_mem *)p = __builtin_convertvector((vu)vround_bf16(v) >> 16, vs_mem);
}
#endif

/* fp16: finite numbers, widened exactly */
#ifndef vload_half
INLINE vf vload_half(const uint16_t *p) {
    vu bits = __builtin_convertvector(*(const vs_mem *)p, vu);
    return (vf)((vu)((vf)((bits & 0x7fffu) << 13) * 0x1p112f) | (bits & 0x8000u) << 16);
}
#endif

/* `count` (2 or 4) vectors of signed bytes, each times its vector of `units`.  units[4 + i] is -2^23 * units[i], for instruction
 * sets that convert integers slowly; if count is 4, no byte is negative. */
#ifndef vload_scaled
INLINE void vload_scaled(vf *out, const vf *units, const int8_t *p, const int count) {
    UNROLL for (int i = 0; i < 4; i++) {
        if (i >= count) break;
        out[i] = __builtin_convertvector(vload_signed_bytes(p + i * VL), vf) * units[i];
    }
}
#endif

/* Dot products of codes and digits of rows (see codes.h).
 * digit: int8_t if there are dot products of four bytes, else int16_t
 * DOT(acc, codes, x, lane): adds to each lane of acc four products: of the lane's bytes of codes, and of the digits from
 * x + 4 * lane on, which if they have 16 bits are in the order 0, 2, 1, 3.  lane is a literal.
 * DOT_HERE: the same at this place of the program, where compilers would move it at a cost
 * SIGNED_CODES: bytes of codes are signed, else unsigned.  If so, integers are also slow to convert: see start_sum. */
#ifndef DOT
typedef int16_t digit;
#define DOT(acc, codes, x, lane) dot((acc), (codes), (x) + 4 * (lane))

/* sums of two products of 16-bit numbers */
#ifndef dot_pairs
INLINE vi dot_pairs(vi a, vi b) {
    return ((vi)((vu)a << 16) >> 16) * ((vi)((vu)b << 16) >> 16) + (a >> 16) * (b >> 16);
}
#endif
INLINE vi dot(vi acc, vi codes, const digit *x) {
    vi even = codes & 0x00ff00ff, odd = (vi)((vu)codes >> 8) & 0x00ff00ff;
    return acc + dot_pairs(even, vset_word(x)) + dot_pairs(odd, vset_word(x + 2));
}
#endif
#ifndef SIGNED_CODES
#define SIGNED_CODES 0
#endif
#ifndef DOT_HERE
#define DOT_HERE DOT
#endif

/* AMX: tile registers of 16 rows, each of 64 bytes, as a vector of VL = 16 has.  t, a, b: registers, which are literals.
 * tile_dot_bf16, tile_dot_bytes: t += a @ b, where b has [k / 2 or 4][columns][2 or 4]; bytes of `a` are signed, of `b` unsigned
 * enable_amx: 0, or 1 if the system does not let the process use them
 * Without AMX all that is never executed: kernels ask HAS_AMX first. */
#ifndef HAS_AMX
#define HAS_AMX 0
#define tile_configure(config) ((void)(config))
#define tile_zero(t) ((void)0)
#define tile_load(t, p, stride) ((void)(p), (void)(stride))
#define tile_store(t, p, stride) ((void)(p), (void)(stride))
#define tile_dot_bf16(t, a, b) ((void)0)
#define tile_dot_bytes(t, a, b) ((void)0)
#define tile_release() ((void)0)
INLINE int enable_amx(void) { return 0; }
#endif
