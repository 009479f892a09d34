/* CPU kernels of ssd: plain C with GCC/Clang vector extensions, called through ctypes by cpu.py.
 *
 * The rule every kernel keeps: the bits of a row's result are a function of that row's own inputs.  They never depend
 * on how many rows are computed together, on the row's place among them, on the threads, or on chunking.  So each
 * output element has one fixed order of operations, the same in every instance of a kernel; multiplies and adds are
 * fused only where vfma() says so (compile with -ffp-contract=off and without -ffast-math).
 *
 * Storage is fp32 or bf16 (flag `bf16`); a KV cache may be in e4m3 instead (`kv`, a storage type).  Arithmetic is fp32,
 * or integers where that is said.  "ld*" arguments are row strides in elements.
 *
 * Numbers in tensors that are used as indices (token ids, positions, slots, blocks, rows) are checked: a function that
 * returns an int returns 0, or 1 if it was given one that is out of range.  Shapes are the caller's business.
 */
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#if defined(__linux__)
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* ---------------------------------------------------------------- vectors of the target machine */
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

/* ---------------------------------------------------------------- bf16 */
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

/* ---------------------------------------------------------------- fp16: finite numbers, widened exactly */

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

/* ---------------------------------------------------------------- e4m3: floats of 8 bits */
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

/* ---------------------------------------------------------------- rows as fp32 */
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

/* ---------------------------------------------------------------- scratch memory: blocks per thread, kept until it ends */
enum { ROWS, PANELS, SUMS, EXPERT, PACKED, GROUPS = PACKED + 2, SCRATCHES = GROUPS + 2 }; /* two PACKED and GROUPS */
struct pool {
    float *data[SCRATCHES];
    size_t size[SCRATCHES];
};
static pthread_key_t pool_key;

static void free_pool(void *given) {
    struct pool *pool = given;
    for (int i = 0; i < SCRATCHES; i++) free(pool->data[i]);
    free(pool);
}

__attribute__((constructor)) static void make_pool_key(void) {
    if (pthread_key_create(&pool_key, free_pool)) abort();
}

static float *scratch(int which, size_t floats) {
    struct pool *pool = pthread_getspecific(pool_key);
    if (!pool) {
        pool = calloc(1, sizeof *pool);
        if (!pool || pthread_setspecific(pool_key, pool)) abort();
    }
    if (floats > pool->size[which]) {
        free(pool->data[which]);
        pool->size[which] = (floats + 4095) / 4096 * 4096;
        pool->data[which] = aligned_alloc(64, pool->size[which] * 4);
        if (!pool->data[which]) abort();
    }
    return pool->data[which];
}

INLINE void fetch(const char *at, long bytes) {
    for (long line = 0; line < bytes; line += 64) __builtin_prefetch(at + line);
}

INLINE long ceil_div(long a, long b) { return (a + b - 1) / b; }
INLINE long min_l(long a, long b) { return a < b ? a : b; }
INLINE long max_l(long a, long b) { return a > b ? a : b; }
INLINE int outside(long index, long size) { return index < 0 || index >= size; }
INLINE long int_at(const void *p, long i, int is64) {
    return is64 ? (long)((const int64_t *)p)[i] : ((const int32_t *)p)[i];
}

/* ---------------------------------------------------------------- threads
 * Every calling thread has workers of its own.  A loop is cut into chunks, of which each thread has a range.  It claims
 * them one by one, and a little later those that others have not begun: the loop ends with its last chunk, and a worker
 * that has no core just then delays nothing.  After a loop the workers look for the next one for a while (kernels follow
 * each other within microseconds), then they sleep.  Workers beyond the number of the last loop sleep until a loop wants
 * more: their cores are another process's.  A thread writes to cache lines of its own, which others read when it is done
 * with them: threads that change one line in turn wait for each other.  While a worker looks for work, it fetches its share
 * of the weights that are multiplied next, if they are known. */
#define MAX_THREADS 256
#define CHUNKS 16                /* of a loop, per thread, at most */
#define ALONE (512 * VL)         /* numbers of several rows below which one thread rounds or normalises them all */
#if defined(__x86_64__) || defined(__i386__)
#define HELP_AFTER 16 /* pauses of a thread, a microsecond, before it takes chunks of others */
#else
#define HELP_AFTER 64
#endif
#define FETCHED (256 << 10) /* most bytes of the next weights that a worker fetches: they stay in its L2 cache */
#define LOOKING_NS (300 * 1000L) /* how long a worker looks for work before it sleeps: longer than Python between two steps */

typedef void loop_fn(void *arg, long begin, long end);

struct team;
struct worker {
    struct team *team;
    int number;
    pthread_t thread;
};
struct range {
    _Alignas(64) _Atomic uint64_t next; /* number of the last loop in which a chunk was claimed << 32 | chunks claimed */
    _Alignas(64) _Atomic uint64_t done; /* number of a loop << 32 | chunks, of any range, that its owner has computed */
};
struct team {
    _Alignas(64) _Atomic uint64_t ticket; /* the current loop: number << 32 | chunks << 16 | threads */
    loop_fn *body;                        /* valid for whoever has claimed a chunk that is not done */
    void *arg;
    long items, chunk;
    _Alignas(64) _Atomic int asleep, stopping;
    _Atomic int limit; /* threads of the last loop */
    _Atomic(const char *) weights; /* that are multiplied next, or 0 */
    _Atomic long weight_bytes;
    struct range ranges[MAX_THREADS];
    int count; /* workers */
    pthread_mutex_t lock;
    pthread_cond_t wake, more; /* for the next loop; for a higher limit */
    struct worker workers[MAX_THREADS - 1];
};
static pthread_key_t team_key;

INLINE void pause_core(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory"); /* about 10 ns; `yield` is nothing at all */
#endif
}

static long now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}

/* the next chunk of a range, or -1; also for a thread that is late, when the loop has ended */
static long claim(struct range *range, uint32_t loop, long chunks) {
    uint64_t seen = atomic_load(&range->next);
    for (;;) {
        int32_t ahead = (int32_t)((uint32_t)(seen >> 32) - loop);
        long next = ahead ? 0 : (long)(uint32_t)seen;
        if (ahead > 0 || next >= chunks) return -1;
        if (atomic_compare_exchange_weak(&range->next, &seen, (uint64_t)loop << 32 | (uint64_t)(next + 1))) return next;
    }
}

/* computes what is left of a range in the loop that `ticket` shows; `number`: of the thread, 0 is the caller */
static void compute(struct team *team, uint64_t ticket, long owner, long number) {
    long chunks = ticket >> 16 & 0xffff, threads = ticket & 0xffff, first = owner * chunks / threads, count = 0, next;
    uint32_t loop = (uint32_t)(ticket >> 32);
    while ((next = claim(&team->ranges[owner], loop, (owner + 1) * chunks / threads - first)) >= 0) {
        long begin = (first + next) * team->chunk;
        team->body(team->arg, begin, min_l(team->items, begin + team->chunk));
        count++;
    }
    if (!count) return;
    _Atomic uint64_t *done = &team->ranges[number].done;
    uint64_t before = atomic_load(done);
    uint64_t now = (before >> 32 == loop ? before : (uint64_t)loop << 32) + (uint64_t)count;
    atomic_store_explicit(done, now, memory_order_release);
}

/* the same of all other ranges */
static void help(struct team *team, uint64_t ticket, long number) {
    long threads = ticket & 0xffff;
    for (long i = 1; i < threads; i++) compute(team, ticket, (number + i) % threads, number);
}

static int all_done(struct team *team, uint64_t ticket) {
    uint64_t chunks = ticket >> 16 & 0xffff, count = 0;
    for (uint64_t i = 0; i < (ticket & 0xffff); i++) {
        uint64_t done = atomic_load(&team->ranges[i].done);
        if (done >> 32 == ticket >> 32) count += done & 0xffffffff;
    }
    return count == chunks;
}

static void await_limit(struct worker *self) {
    struct team *team = self->team;
    pthread_mutex_lock(&team->lock);
    while (self->number >= atomic_load(&team->limit) && !atomic_load(&team->stopping))
        pthread_cond_wait(&team->more, &team->lock);
    pthread_mutex_unlock(&team->lock);
}

static void set_limit(struct team *team, int limit) {
    if (limit <= atomic_load(&team->limit)) {
        atomic_store(&team->limit, limit);
        return;
    }
    pthread_mutex_lock(&team->lock);
    atomic_store(&team->limit, limit);
    pthread_cond_broadcast(&team->more);
    pthread_mutex_unlock(&team->lock);
}

static void *work(void *given) {
    struct worker *self = given;
    struct team *team = self->team;
    uint64_t last = 0, seen = 0; /* ticket of the last loop that it took part in, number of the last one that it has seen */
    const char *weights = 0;     /* its share of the next ones, as far as it is not fetched yet */
    long left = 0;
    for (;;) {
        uint64_t ticket = atomic_load(&team->ticket);
        for (long began = 0, spins = 0; ticket >> 32 == seen; ticket = atomic_load(&team->ticket)) {
            if (atomic_load(&team->stopping)) return 0;
            if (left > 0) {
                UNROLL for (int i = 0; i < 4; i++) __builtin_prefetch(weights + 64 * i, 0, 2); /* to the L2 cache */
                weights += 256, left -= 256;
            } else {
                pause_core();
            }
            if (++spins == HELP_AFTER) help(team, last, self->number);
            if (spins % 64) continue;
            if (!began) began = now_ns();
            if (now_ns() - began < LOOKING_NS) continue;
            pthread_mutex_lock(&team->lock);
            atomic_fetch_add(&team->asleep, 1);
            while (atomic_load(&team->ticket) >> 32 == seen && !atomic_load(&team->stopping))
                pthread_cond_wait(&team->wake, &team->lock);
            atomic_fetch_sub(&team->asleep, 1);
            pthread_mutex_unlock(&team->lock);
        }
        seen = ticket >> 32;
        left = 0;
        if (self->number < (long)(ticket & 0xffff)) {
            compute(team, last = ticket, self->number, self->number);
            long share = atomic_load(&team->weight_bytes) / (long)(ticket & 0xffff);
            weights = atomic_load(&team->weights) + self->number * share;
            left = min_l(share, FETCHED);
        } else {
            await_limit(self);
        }
    }
}

static void wake_all(struct team *team) {
    if (!atomic_load(&team->asleep)) return;
    pthread_mutex_lock(&team->lock);
    pthread_cond_broadcast(&team->wake);
    pthread_mutex_unlock(&team->lock);
}

static void end_team(void *given) {
    struct team *team = given;
    pthread_mutex_lock(&team->lock);
    atomic_store(&team->stopping, 1);
    pthread_cond_broadcast(&team->wake);
    pthread_cond_broadcast(&team->more);
    pthread_mutex_unlock(&team->lock);
    for (int i = 0; i < team->count; i++) pthread_join(team->workers[i].thread, 0);
    pthread_mutex_destroy(&team->lock);
    pthread_cond_destroy(&team->wake);
    pthread_cond_destroy(&team->more);
    free(team);
}

__attribute__((constructor)) static void make_team_key(void) {
    if (pthread_key_create(&team_key, end_team)) abort();
}

/* the calling thread's team, with that many workers at least, or as many as can be started */
static struct team *team_of(int workers) {
    struct team *team = pthread_getspecific(team_key);
    if (!team) {
        team = aligned_alloc(64, sizeof *team);
        if (team) memset(team, 0, sizeof *team);
        if (!team || pthread_mutex_init(&team->lock, 0) || pthread_cond_init(&team->wake, 0) ||
            pthread_cond_init(&team->more, 0) || pthread_setspecific(team_key, team))
            abort();
    }
    if (team->count >= workers) return team;
    sigset_t all, before;
    sigfillset(&all); /* signals are for the threads of the program */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (team->count < workers) {
        struct worker *next = &team->workers[team->count];
        *next = (struct worker){.team = team, .number = team->count + 1};
        if (pthread_create(&next->thread, 0, work, next)) break;
        team->count++;
    }
    pthread_sigmask(SIG_SETMASK, &before, 0);
    return team;
}

/* body(arg, begin, end) over all of [0, items), by up to nthreads threads */
static void parallel(long items, int nthreads, loop_fn *body, void *arg) {
    if (nthreads > MAX_THREADS) nthreads = MAX_THREADS;
    if (nthreads <= 1 || items <= 1) {
        if (items > 0) body(arg, 0, items);
        return;
    }
    struct team *team = team_of(nthreads - 1);
    long chunk = ceil_div(items, (long)CHUNKS * nthreads), chunks = ceil_div(items, chunk);
    team->body = body, team->arg = arg, team->items = items, team->chunk = chunk;
    set_limit(team, nthreads);
    uint64_t ticket = ((atomic_load(&team->ticket) >> 32) + 1) << 32 | (uint64_t)chunks << 16 | (uint64_t)nthreads;
    atomic_store(&team->ticket, ticket);
    wake_all(team);
    compute(team, ticket, 0, 0);
    for (long spins = 0; !all_done(team, ticket); spins++) {
        if (spins == HELP_AFTER) help(team, ticket, 0);
        if (spins < 4096)
            pause_core();
        else
            sched_yield(); /* a worker has lost its core in the middle of a chunk */
    }
}

/* ---------------------------------------------------------------- packing of weights
 * Panels [ceil(N/NR)][K rounded up to 4][NR], zero padded.  bf16 panels hold VL 32-bit words per k: word j has column j
 * in its low half and column VL + j in its high half, so that a shift and a mask widen them.  With AMX they are [K rounded
 * up to 32, / 2][NR][2].  A gated weight ([2I, K]: gate rows, then up rows) alternates gate and up panels. */
#ifdef AMX
#define BF16_DEPTH 32 /* k of a product of tiles */
INLINE long bf16_place(long k, long j) { return k / 2 * 2 * NR + 2 * j + k % 2; }
#else
#define BF16_DEPTH 4
INLINE long bf16_place(long k, long j) { return k * NR + j % VL * 2 + j / VL; }
#endif

INLINE long padded_depth(long k, int bf16) {
    long unit = bf16 ? BF16_DEPTH : 4;
    return ceil_div(k, unit) * unit;
}

long ssd_packed_bytes(long n, long k, int bf16, int gated) {
    long panels = gated ? 2 * ceil_div(n / 2, NR) : ceil_div(n, NR);
    return panels * NR * padded_depth(k, bf16) * (bf16 ? 2 : 4);
}

INLINE long packed_row(long panel, long j, long n, int gated) {
    if (!gated) return panel * NR + j < n ? panel * NR + j : -1;
    long row = panel / 2 * NR + j;
    return row < n / 2 ? row + (panel % 2) * (n / 2) : -1;
}

struct pack_args {
    const void *w;
    void *out;
    long ldw, n, k;
    int bf16, gated;
};

static void pack_panels(void *given, long begin, long end) {
    const struct pack_args *a = given;
    long kp = padded_depth(a->k, a->bf16);
    size_t bytes = (size_t)(NR * kp * (a->bf16 ? 2 : 4));
    for (long p = begin; p < end; p++) {
        memset((char *)a->out + (size_t)p * bytes, 0, bytes);
        for (long j = 0; j < NR; j++) {
            long row = packed_row(p, j, a->n, a->gated);
            if (row < 0) continue;
            if (a->bf16) {
                const uint16_t *src = (const uint16_t *)a->w + row * a->ldw;
                uint16_t *dst = (uint16_t *)a->out + p * NR * kp;
                for (long i = 0; i < a->k; i++) dst[bf16_place(i, j)] = src[i];
            } else {
                const float *src = (const float *)a->w + row * a->ldw;
                float *dst = (float *)a->out + p * NR * kp + j;
                for (long i = 0; i < a->k; i++) dst[i * NR] = src[i];
            }
        }
    }
}

/* to be called before a large weight is written: fewer TLB misses when it is read */
void ssd_use_huge_pages(void *memory, long bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    uintptr_t page = 4095, lo = ((uintptr_t)memory + page) & ~page, hi = ((uintptr_t)memory + (uintptr_t)bytes) & ~page;
    if (hi > lo + (2u << 20)) madvise((void *)lo, hi - lo, MADV_HUGEPAGE);
#endif
}

void ssd_pack(const void *w, long ldw, void *out, long n, long k, int bf16, int gated, int nthreads) {
    long bytes = ssd_packed_bytes(n, k, bf16, gated);
    ssd_use_huge_pages(out, bytes);
    struct pack_args a = {w, out, ldw, n, k, bf16, gated};
    parallel(bytes / (NR * padded_depth(k, bf16) * (bf16 ? 2 : 4)), nthreads, pack_panels, &a);
}

long ssd_panel_columns(void) { return NR; }

/* rows of a packed (not gated) weight [n, k]: out[t] = W[ids[t]]; spares a tied embedding its second copy */
int ssd_embedding(const void *w, const void *ids, int ids64, void *out, long tokens, long n, long k, int bf16) {
    long kp = padded_depth(k, bf16);
    for (long t = 0; t < tokens; t++) {
        long row = int_at(ids, t, ids64), j = row % NR;
        if (outside(row, n)) return 1;
        if (bf16) {
            const uint16_t *src = (const uint16_t *)w + row / NR * NR * kp;
            for (long i = 0; i < k; i++) ((uint16_t *)out)[t * k + i] = src[bf16_place(i, j)];
        } else {
            const float *src = (const float *)w + row / NR * NR * kp + j;
            for (long i = 0; i < k; i++) ((float *)out)[t * k + i] = src[i * NR];
        }
    }
    return 0;
}

/* ---------------------------------------------------------------- linear: the register tile
 * buf[m][NR] = x tile @ panel^T.  Every output element is one chain of FMAs over k, whatever the number of rows.
 * x is packed as [K/4][MR][4]. */
INLINE void widen(vf *lo, vf *hi, const char *w, int bf16) {
    if (bf16) {
        vu word = *(const vu_mem *)w;
#ifdef NEON
        uint16x8_t halves = (uint16x8_t)word, zero = {0}; /* shifts have one pipe on Neoverse N1, permutes have two */
        *lo = (vf)vtrn1q_u16(zero, halves);
        *hi = (vf)vtrn2q_u16(zero, halves);
#else
        *lo = (vf)(word << 16);
        *hi = (vf)(word & 0xffff0000u);
#endif
    } else {
        *lo = vload((const float *)w);
        *hi = vload((const float *)w + VL);
    }
}

#define STEP(lane)                                                  \
    {                                                               \
        vf lo, hi;                                                  \
        widen(&lo, &hi, w + (lane)*step, bf16);                     \
        UNROLL for (int m = 0; m < mr; m++) {                       \
            left[m] = FMA_LANE(left[m], lo, xq[m], lane);           \
            right[m] = FMA_LANE(right[m], hi, xq[m], lane);         \
        }                                                           \
    }

INLINE void tile(const int mr, const int bf16, const float *x, const char *w, long kq, float *buf) {
    const long step = NR * (bf16 ? 2 : 4);
    vf left[8], right[8]; /* mr of each live in registers */
    UNROLL for (int m = 0; m < mr; m++) left[m] = right[m] = vset(0.0f);
    for (long q = 0; q < kq; q++) {
        quad xq[8];
        UNROLL for (int m = 0; m < mr; m++) xq[m] = quad_load(x + 4 * m);
        STEP(0) STEP(1) STEP(2) STEP(3)
        x += 4 * mr;
        w += 4 * step;
    }
    UNROLL for (int m = 0; m < mr; m++) {
        vstore(buf + m * GROUP * NR, left[m]);
        vstore(buf + m * GROUP * NR + VL, right[m]);
    }
}

typedef void tile_fn(const float *x, const char *w, long kq, float *buf);
#define TILE(mr)                                                                                          \
    static void tile_##mr##_f(const float *x, const char *w, long kq, float *b) { tile(mr, 0, x, w, kq, b); } \
    static void tile_##mr##_h(const float *x, const char *w, long kq, float *b) { tile(mr, 1, x, w, kq, b); }
TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) TILE(7) TILE(8)
static tile_fn *const TILES[2][9] = {
    {0, tile_1_f, tile_2_f, tile_3_f, tile_4_f, tile_5_f, tile_6_f, tile_7_f, tile_8_f},
    {0, tile_1_h, tile_2_h, tile_3_h, tile_4_h, tile_5_h, tile_6_h, tile_7_h, tile_8_h},
};

/* The same with fp8 weights: codes [K][NR]; scales [groups][NR] of `gq` quads of k each.  A group's sums are multiplied by
 * the row's scale of that group, if rows have scales, then by the weight's, and added to those of the groups before it. */
enum { FP8 = 1, INT8, INT4, UINT4 };
/* flags of a weight: its scales have offsets beside them; they are fp16, or int8 times an fp16 for each block of BLOCK
 * weights, else fp32; rows are rounded to integers of 8 bits */
enum { OFFSETS = 1, HALF = 2, FACTORED = 4, COARSE = 8 };
enum { SINGLES, HALVES, FACTORS }; /* how scales are stored */
#define BLOCK 256
INLINE int is_4_bits(int form) { return form >= INT4; }

INLINE vf from_fp8(const char *w) {
#if VL == 16
    vi code = (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)w));
#elif VL == 8
    vi code = (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)w));
#else
    vi code = __builtin_convertvector(*(const vb_mem *)w, vi);
#endif
    return (vf)((code & 0x80) << 24 | (code & 0x7f) << 20) * 0x1p120f; /* e4m3, widened */
}

#define CODE_STEP(lane)                                                          \
    {                                                                            \
        vf lo = from_fp8(w + (lane)*NR), hi = from_fp8(w + (lane)*NR + VL);      \
        UNROLL for (int m = 0; m < mr; m++) {                                    \
            left[m] = FMA_LANE(left[m], lo, xq[m], lane);                        \
            right[m] = FMA_LANE(right[m], hi, xq[m], lane);                      \
        }                                                                        \
    }

/* a group of a row that is in digits */
struct digit_group {
    float unit, sum;   /* of the integers; of x */
    int32_t excess[2]; /* see from_digits */
};

struct groups {
    long gq;                 /* quads of k in a group */
    long count;              /* groups */
    int offsets;             /* the weight has offsets, too */
    int stored;              /* how its scales and offsets are */
    long per;                /* groups of a block, if they are FACTORS */
    const float *row_scales; /* of the tile's first row, or 0 */
    long ld;                 /* scales of a row: 1, or one for each group */
    long shared;             /* groups with the same scale of the weight: more than one with digits only */
    struct digit_group *of_rows; /* those of a row side by side: different threads write those of different rows */
    long stride;                 /* from one row's to the next, in whole cache lines */
    int32_t (*starts)[2][VL];    /* of the same groups, or 0; see start_sum */
};

INLINE void code_tile(const int mr, const float *x, const char *w, const float *scales, long kq, const struct groups *g,
                      float *buf) {
    for (int m = 0; m < mr; m++)
        for (int j = 0; j < NR; j += VL) vstore(buf + m * GROUP * NR + j, vset(0.0f));
    for (long group = 0, i = 0; group < kq; group += g->gq, i++, scales += NR) {
        vf left[8], right[8];
        UNROLL for (int m = 0; m < mr; m++) left[m] = right[m] = vset(0.0f);
        for (long q = group; q < min_l(kq, group + g->gq); q++) {
            quad xq[8];
            UNROLL for (int m = 0; m < mr; m++) xq[m] = quad_load(x + 4 * m);
            CODE_STEP(0) CODE_STEP(1) CODE_STEP(2) CODE_STEP(3)
            x += 4 * mr;
            w += 4 * NR;
        }
        UNROLL for (int m = 0; m < mr; m++) {
            float *sum = buf + m * GROUP * NR;
            if (g->row_scales) {
                vf scale = vset(g->row_scales[m * g->ld + (g->ld > 1 ? i : 0)]);
                left[m] *= scale;
                right[m] *= scale;
            }
            vstore(sum, vfma(vload(sum), left[m], vload(scales)));
            vstore(sum + VL, vfma(vload(sum + VL), right[m], vload(scales + VL)));
        }
    }
}

typedef void code_tile_fn(const void *x, const char *w, const void *scales, long kq, const struct groups *g,
                          float *buf);
#define CODE_TILE(mr)                                                                                             \
    static void code_tile_##mr(const void *x, const char *w, const void *s, long kq, const struct groups *g,      \
                               float *b) {                                                                        \
        code_tile(mr, x, w, s, kq, g, b);                                                                         \
    }
CODE_TILE(1) CODE_TILE(2) CODE_TILE(3) CODE_TILE(4) CODE_TILE(5) CODE_TILE(6) CODE_TILE(7) CODE_TILE(8)
static code_tile_fn *const CODE_TILES[9] = {
    0, code_tile_1, code_tile_2, code_tile_3, code_tile_4, code_tile_5, code_tile_6, code_tile_7, code_tile_8,
};

/* Integer codes.  In each group (of 128 k at most) a row's x is rounded to unit * v, with a power of two as the unit and
 * |v| <= 2^22 (2^14 if the row is bf16), and v is written in signed digits: 3 (2) of 8 bits where the machine has dot
 * products of four bytes, else a high one of 16 bits, after a low one of 8 (none).  Coarse rows have one digit: the unit is
 * a 127th of the group's largest |x|.  Sums of digits times codes are exact; one of a group is converted to fp32, and
 * multiplied and added as in code_tile.  With offsets, scales are [groups][2][NR]: scales and offsets (a weight is
 * scale * code + offset).  FACTORS are, for each block, fp16 [1 or 2][NR] and then int8 [groups][1 or 2][NR].
 * Codes are [K/4][NR][4], or of 4 bits [K/4][VL][4] (column j in the low half of a byte, column VL + j in the high one);
 * x is [K/16][MR][digits][16].  Codes are unsigned: `excess_of` is added to them, and its part of the sums subtracted.
 * NEON has no dot product of unsigned with signed bytes: there bytes are signed, also those with two codes of 4 bits, whose
 * high bit is inverted.  Such a byte is multiplied as it is, and so are its high four bits alone: 16 times the high code
 * minus 128.  The difference of the sums is that of the low codes, so a byte takes one operation to unpack, not two. */
#define DOT_MOST 128 /* k of a group: sums fit into 32 bits */
#if defined(NEON) && defined(__ARM_FEATURE_DOTPROD)
#define SIGNED_CODES 1
#define DIGIT_BITS 8
#define DOT(acc, codes, x, lane) \
    ((vi)vdotq_laneq_s32((int32x4_t)(acc), (int8x16_t)(codes), vld1q_s8(x), (lane)))
#else
#define SIGNED_CODES 0
#if (VL == 16 && defined(__AVX512VNNI__)) || (VL == 8 && defined(__AVXVNNI__))
#define DIGIT_BITS 8
#else
#define DIGIT_BITS 16
#endif
#define DOT(acc, codes, x, lane) dot((acc), (codes), (x) + 4 * (lane))
#endif
#if VL == 8 || !(defined(NEON) || VL == 16)
#define DOT_ROWS 2 /* 16 registers */
#else
#define DOT_ROWS 4
#endif
#if defined(__ARM_FEATURE_DOTPROD) || VL == 16
#define COARSE_ROWS 8 /* of a tile with unpacked panels */
#define FEW_ROWS 4    /* of one with panels as they are */
#else
#define COARSE_ROWS 2
#define FEW_ROWS 2
#endif
#if VL == 16 && DIGIT_BITS == 8
#define MORE_ROWS 8 /* the same, where codes are of 4 bits: so many sums fit into the registers */
#else
#define MORE_ROWS FEW_ROWS
#endif
/* Codes that are read later: processors prefetch too little by themselves.  FETCH_GROUP: those of a whole group, which costs
 * fewer instructions; FETCH_LATER: one line beside each that is read, so that requests never wait for each other. */
#ifdef NEON
#define FETCH_GROUP(at, bytes) \
    for (long line = 0; line < (bytes); line += 64) __builtin_prefetch((at) + 640 + line, 0, 0)
#define FETCH_LATER(at)
#else
#define FETCH_GROUP(at, bytes)
#define FETCH_LATER(at) __builtin_prefetch((at) + 8192, 0, 2)
#endif
#if DIGIT_BITS == 8
typedef int8_t digit;
#else
typedef int16_t digit;
#endif
INLINE int digits_of(int bf16, int coarse) { return coarse ? 1 : (bf16 ? 2 : 3) - (DIGIT_BITS == 16); }
INLINE int excess_of(int form) {
    if (SIGNED_CODES) return form == INT4 ? 8 : form == UINT4 ? -128 : 0; /* of the low codes; of the high ones times 16 */
    return form == INT8 ? 128 : form == INT4 ? 8 : 0;
}

#if !SIGNED_CODES
INLINE vi word_at(const digit *x) {
    int32_t word;
    memcpy(&word, x, 4);
    return (vi){0} + word;
}

#if DIGIT_BITS == 8
/* sums of four products of an unsigned code and a digit */
INLINE vi dot(vi acc, vi codes, const digit *x) {
#if VL == 16
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, (__m512i)word_at(x));
#else
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)codes, (__m256i)word_at(x));
#endif
}
#else
/* sums of two products of 16-bit numbers */
INLINE vi dot_pairs(vi a, vi b) {
#if VL == 16
    return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif VL == 8
    return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    return ((vi)((vu)a << 16) >> 16) * ((vi)((vu)b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

/* The same with digits of 16 bits; the four of a word of codes are in the order 0, 2, 1, 3. */
INLINE vi dot(vi acc, vi codes, const digit *x) {
    vi even = codes & 0x00ff00ff, odd = (vi)((vu)codes >> 8) & 0x00ff00ff;
    return acc + dot_pairs(even, word_at(x)) + dot_pairs(odd, word_at(x + 2));
}
#endif
#endif

/* codes of the two halves of a panel; of 4 bits with SIGNED_CODES: of both halves, and of the second */
INLINE void load_codes(vi *lo, vi *hi, const char *w, const int form) {
    vi both = (vi)*(const vu_mem *)w;
    if (form == INT8) {
        *lo = both;
        *hi = (vi)*(const vu_mem *)(w + 4 * VL);
    } else {
        *lo = SIGNED_CODES ? both : both & 0x0f0f0f0f;
        *hi = SIGNED_CODES ? both & (int32_t)0xf0f0f0f0 : (vi)((vu)both >> 4) & 0x0f0f0f0f;
    }
}

/* whether sums of the second half of a panel are 16 times as large, and part of those of the first half */
INLINE int is_joint(const int form) { return SIGNED_CODES && is_4_bits(form); }

/* Sums of digits as one of numbers.  excess: what the sums of the high digits, and of the low one, have too much, or 0. */
INLINE vf from_digits(const vi *sums, const int digits, const int32_t *excess) {
#if DIGIT_BITS == 8
    vi high = (vi)((vu)sums[digits - 1] << 8) + sums[digits - 2];
    const int low = digits == 3;
#else
    vi high = sums[digits - 1];
    const int low = digits == 2;
#endif
    if (excess) high -= excess[0];
    vf value = __builtin_convertvector(high, vf);
    if (!low) return value;
    return vfma(__builtin_convertvector(excess ? sums[0] - excess[1] : sums[0], vf), value, vset(256.0f));
}

/* Scales of a group (count 2: of both halves of a panel), or scales and offsets (4), that are int8 times units of their block.
 * NEON converts integers at a quarter of the speed of other operations: there bytes become the low bits of a float of 2^23.
 * Of scales with offsets none is negative, so 2^23 times the unit can be subtracted in the operation that multiplies by it,
 * which is exact, too; it is loaded from behind the units, since loads cost least. */
INLINE void load_factors(vf *numbers, const vf *units, const int8_t *p, const int count) {
#ifdef NEON
    const uint16x8_t top = vdupq_n_u16(0x4b00);
    if (count == 4) {
        uint8x16_t bytes = vld1q_u8((const uint8_t *)p);
        __asm__ volatile("" : "+w"(bytes)); /* not before the products that precede this in the source */
        UNROLL for (int i = 0; i < 4; i += 2) {
            const uint8x16_t zero = vdupq_n_u8(0);
            const uint16x8_t words = vreinterpretq_u16_u8(i ? vzip2q_u8(bytes, zero) : vzip1q_u8(bytes, zero));
            __asm__ volatile("ldr %q0, %1" : "=w"(numbers[i]) : "m"(units[4 + i]));
            __asm__ volatile("ldr %q0, %1" : "=w"(numbers[i + 1]) : "m"(units[5 + i]));
            numbers[i] = vfma(numbers[i], (vf)vzip1q_u16(words, top), units[i]);
            numbers[i + 1] = vfma(numbers[i + 1], (vf)vzip2q_u16(words, top), units[i + 1]);
        }
        return;
    }
    uint8x16_t bytes = veorq_u8(vreinterpretq_u8_u64(vld1q_dup_u64((const uint64_t *)p)), vdupq_n_u8(128));
    uint16x8_t words = vreinterpretq_u16_u8(vzip1q_u8(bytes, vdupq_n_u8(0)));
    numbers[0] = ((vf)vzip1q_u16(words, top) - 8388736.0f) * units[0];
    numbers[1] = ((vf)vzip2q_u16(words, top) - 8388736.0f) * units[1];
#else
    UNROLL for (int i = 0; i < 4; i++) {
        if (i >= count) break;
#if VL == 16
        vi wide = (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(p + i * VL)));
#elif VL == 8
        vi wide = (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)(p + i * VL)));
#else
        vi wide = __builtin_convertvector(*(const vc_mem *)(p + i * VL), vi);
#endif
        numbers[i] = __builtin_convertvector(wide, vf) * units[i];
    }
#endif
}

/* bytes of the scales and offsets of a panel */
INLINE long numbers_bytes(long groups, const struct groups *g) {
    long each = NR * (g->offsets ? 2 : 1);
    if (g->stored == FACTORS) return groups / g->per * each * 2 + groups * each;
    return groups * each * (g->stored == HALVES ? 2 : 4);
}

/* numbers of group n of a panel, whose groups are read one after the other: scales of its two halves, then (if there are)
 * offsets; units: those of its block, and then -2^23 times each of them (see load_factors) */
INLINE void load_numbers(vf *numbers, vf *units, const void *of_panel, long n, const long per, const struct groups *g,
                         const int stored) {
    const int count = g->offsets ? 4 : 2;
    const char *at = (const char *)of_panel;
    if (stored == FACTORS) {
        const char *own = at + count * VL * (n + 2 * (n / per)); /* behind n groups and the units of the blocks before */
        if (n % per == 0)
            UNROLL for (int i = 0; i < 4; i++)
                if (i < count) {
                    units[i] = vload_half((const uint16_t *)own + i * VL);
                    units[4 + i] = units[i] * -8388608.0f;
                }
        load_factors(numbers, units, (const int8_t *)own + 2 * count * VL, count);
        return;
    }
    UNROLL for (int i = 0; i < 4; i++) {
        if (i >= count) break;
        long place = (n * count + i) * VL;
        numbers[i] = stored == HALVES ? vload_half((const uint16_t *)at + place) : vload((const float *)at + place);
    }
}

/* acc + the sums of a group of one half of a panel; `at`: which row and group it is */
INLINE vf add_group(vf acc, const vi *sums, const int form, const int half, const int digits, vf scales,
                    const struct groups *g, long at) {
    const struct digit_group *own = g->of_rows + at;
    const int exceeds = SIGNED_CODES ? form == (half ? UINT4 : INT4) : 1;
    const float unit = is_joint(form) && half ? own->unit / 16 : own->unit;
    return vfma(acc, from_digits(sums, digits, exceeds ? own->excess : 0) * vset(unit), scales);
}

/* The same of coarse rows.  NEON converts integers at a quarter of the speed of other operations, so that there a sum (which
 * is below 2^22) begins as the bits of a float that is 1.5 * 2^23 too large: START.  It is loaded, since loads cost least.
 * Of codes of 4 bits, sums of the second half begin at HIGH_START, whose last bit is worth 1/16, without their excess; those
 * of the first half become a difference of both. */
#if SIGNED_CODES
#define START 12582912.0f
#define HIGH_START (START / 16)
#define START_BITS 0x4b400000 /* of START as a float, and of HIGH_START */
#define HIGH_START_BITS 0x49400000
INLINE vi start_sum(const int form, const int half, const struct groups *g, long at) {
    static const float start[VL] = {START, START, START, START};
    const void *from = is_4_bits(form) ? (const void *)g->starts[at][half] : (const void *)start;
    vi sum;
    __asm__ volatile("ldr %q0, %1" : "=w"(sum) : "m"(*(const vi *)from));
    return sum;
}
INLINE vf add_sums(vf acc, vi sums, const int form, const int half, vf scales, const struct groups *g, long at) {
    const float start = is_4_bits(form) && half ? HIGH_START : START;
    const float32x4_t own = vld1q_f32(&g->of_rows[at].unit);
    return vfma(acc, (vf)vmulq_laneq_f32((float32x4_t)((vf)sums - start), own, 0), scales);
}
/* where the sums of both halves begin, for a row of that sum */
INLINE void set_starts(int32_t (*starts)[VL], int form, int32_t total) {
    int32_t high = HIGH_START_BITS - (form == UINT4 ? excess_of(form) * total : 0);
    int32_t both = (int32_t)((uint32_t)high + START_BITS) - (form == INT4 ? excess_of(form) * total : 0);
    for (int i = 0; i < VL; i++) starts[0][i] = both, starts[1][i] = high;
}
#else
INLINE vi start_sum(const int form, const int half, const struct groups *g, long at) { return (vi){0}; }
INLINE vf add_sums(vf acc, vi sums, const int form, const int half, vf scales, const struct groups *g, long at) {
    const struct digit_group *own = g->of_rows + at;
    return vfma(acc, __builtin_convertvector(sums - own->excess[0], vf) * vset(own->unit), scales);
}
#endif

INLINE vf add_offsets(vf acc, vf offsets, const struct groups *g, long at) {
#ifdef NEON
    return (vf)vfmaq_laneq_f32((float32x4_t)acc, (float32x4_t)offsets, vld1q_f32(&g->of_rows[at].unit), 1);
#else
    return vfma(acc, vset(g->of_rows[at].sum), offsets);
#endif
}

#define DOT_STEP(lane)                                                                               \
    {                                                                                                \
        vi first, second;                                                                            \
        load_codes(&first, &second, w + (lane)*step, form);                                          \
        UNROLL for (int i = 0; i < mr * digits; i++) {                                               \
            left[i] = DOT(left[i], first, x + 16 * i, lane);                                         \
            right[i] = DOT(right[i], second, x + 16 * i, lane);                                      \
        }                                                                                            \
    }

INLINE void dot_tile(const int mr, const int form, const int digits, const int stored, const void *rows, const char *w,
                     const void *scales, long kq, const struct groups *given, float *buf) {
    const long step = is_4_bits(form) ? 4 * VL : 4 * NR;
    const struct groups g = *given;
    const digit *x = rows;
    vf lo[DOT_ROWS], hi[DOT_ROWS];
    UNROLL for (int m = 0; m < mr; m++) lo[m] = hi[m] = vset(0.0f);
    for (long group = 0, n = 0, used = 0, own = 0; group < kq; group += g.gq, n++) {
        vi left[DOT_ROWS * 3], right[DOT_ROWS * 3];
        UNROLL for (int i = 0; i < mr * digits; i++) left[i] = right[i] = (vi){0};
        for (long q = group; q < min_l(kq, group + g.gq); q += 4) {
            DOT_STEP(0) DOT_STEP(1) DOT_STEP(2) DOT_STEP(3)
            x += 16 * mr * digits;
            w += 4 * step;
        }
        if (is_joint(form)) UNROLL for (int i = 0; i < mr * digits; i++) left[i] -= right[i];
        vf numbers[4];
        load_numbers(numbers, 0, scales, own, 0, &g, stored);
        UNROLL for (int m = 0; m < mr; m++) {
            lo[m] = add_group(lo[m], left + m * digits, form, 0, digits, numbers[0], &g, m * g.stride + n);
            hi[m] = add_group(hi[m], right + m * digits, form, 1, digits, numbers[1], &g, m * g.stride + n);
        }
        if (g.offsets) UNROLL for (int m = 0; m < mr; m++) {
            lo[m] = add_offsets(lo[m], numbers[2], &g, m * g.stride + n);
            hi[m] = add_offsets(hi[m], numbers[3], &g, m * g.stride + n);
        }
        if (++used == g.shared) own++, used = 0;
    }
    UNROLL for (int m = 0; m < mr; m++) {
        vstore(buf + m * GROUP * NR, lo[m]);
        vstore(buf + m * GROUP * NR + VL, hi[m]);
    }
}

#define DOT_TILE(mr, form, digits)                                                                                \
    static void dot_tile_##mr##_##form##_##digits(const void *x, const char *w, const void *s, long kq,           \
                                                  const struct groups *g, float *b) {                             \
        if (g->stored == HALVES)                                                                                  \
            dot_tile(mr, form, digits - (DIGIT_BITS == 16), HALVES, x, w, s, kq, g, b);                           \
        else                                                                                                      \
            dot_tile(mr, form, digits - (DIGIT_BITS == 16), SINGLES, x, w, s, kq, g, b);                          \
    }
#if DOT_ROWS == 4
#define DOT_TILES(form, digits)                                                                                   \
    DOT_TILE(1, form, digits) DOT_TILE(2, form, digits) DOT_TILE(3, form, digits) DOT_TILE(4, form, digits)       \
    static code_tile_fn *const DOTS_##form##_##digits[5] = {                                                      \
        0, dot_tile_1_##form##_##digits, dot_tile_2_##form##_##digits, dot_tile_3_##form##_##digits,              \
        dot_tile_4_##form##_##digits,                                                                             \
    };
#else
#define DOT_TILES(form, digits)                                                                                   \
    DOT_TILE(1, form, digits) DOT_TILE(2, form, digits)                                                           \
    static code_tile_fn *const DOTS_##form##_##digits[3] = {                                                      \
        0, dot_tile_1_##form##_##digits, dot_tile_2_##form##_##digits,                                            \
    };
#endif
DOT_TILES(INT8, 2) DOT_TILES(INT4, 2) DOT_TILES(UINT4, 2) DOT_TILES(INT8, 3) DOT_TILES(INT4, 3) DOT_TILES(UINT4, 3)
static code_tile_fn *const *const DOTS[2][5] = { /* of fp32 rows, of bf16 rows */
    {0, 0, DOTS_INT8_3, DOTS_INT4_3, DOTS_UINT4_3},
    {0, 0, DOTS_INT8_2, DOTS_INT4_2, DOTS_UINT4_2},
};

/* The same with coarse rows.  Many rows in two halves or in pairs: the conversions of one part go along with the products of
 * the next, and codes are read again, which costs less than registers.  x is [groups][mr][k of a group].
 * quads: of each group, if that is known, else 0. */
#if SIGNED_CODES /* in the order of the source: four chains side by side, not one after the other as GCC likes it */
#define NEXT_DOT(acc, codes, x, lane)                                                                             \
    ({                                                                                                            \
        vi sum = (acc);                                                                                           \
        __asm__ volatile("sdot %0.4s, %1.16b, %2.4b[" #lane "]" : "+w"(sum) : "w"(codes), "w"(vld1q_s8(x)));      \
        sum;                                                                                                      \
    })
#else
#define NEXT_DOT DOT
#endif
#define PAIR_STEP(lane)                                                                                           \
    {                                                                                                             \
        vi first, second;                                                                                         \
        load_codes(&first, &second, w + (q + (lane)) * step, form);                                               \
        for (long line = 0; ahead && line < step; line += 64) FETCH_LATER(w + (q + (lane)) * step + line);        \
        UNROLL for (int i = 0; i < rows; i++) {                                                                   \
            left[i] = NEXT_DOT(left[i], first, own + i * 4 * gq + 4 * q, lane);                                   \
            right[i] = NEXT_DOT(right[i], second, own + i * 4 * gq + 4 * q, lane);                                \
        }                                                                                                         \
    }

/* where the numbers of a group are; see load_numbers */
struct numbers_at {
    const void *of_panel;
    long n, per;
    int stored;
    vf *units;
};

INLINE void few_rows(const int rows, const int form, const int ahead, const long quads, long gq, long last, const digit *own,
                     const char *w, const struct numbers_at *numbers_at, const struct groups *g, const int offsets, long at,
                     vf *lo, vf *hi) {
    const long step = is_4_bits(form) ? 4 * VL : 4 * NR;
    vi left[MORE_ROWS], right[MORE_ROWS];
    vf numbers[4];
    UNROLL for (int i = 0; i < rows; i++) {
        left[i] = start_sum(form, 0, g, at + i * g->stride);
        right[i] = start_sum(form, 1, g, at + i * g->stride);
    }
    if (quads)
        UNROLL for (long q = 0; q < quads; q += 4) { PAIR_STEP(0) PAIR_STEP(1) PAIR_STEP(2) PAIR_STEP(3) }
    else
        for (long q = 0; q < last; q += 4) { PAIR_STEP(0) PAIR_STEP(1) PAIR_STEP(2) PAIR_STEP(3) }
    load_numbers(numbers, numbers_at->units, numbers_at->of_panel, numbers_at->n, numbers_at->per, g, numbers_at->stored);
    UNROLL for (int i = 0; i < rows; i++, at += g->stride) {
        if (is_joint(form)) left[i] = (vi)((vu)left[i] - (vu)right[i]);
        lo[i] = add_sums(lo[i], left[i], form, 0, numbers[0], g, at);
        hi[i] = add_sums(hi[i], right[i], form, 1, numbers[1], g, at);
        if (offsets) lo[i] = add_offsets(lo[i], numbers[2], g, at), hi[i] = add_offsets(hi[i], numbers[3], g, at);
    }
    COMPILER_BARRIER(); /* else codes are kept */
}

INLINE void pairs_tile(const int mr, const int form, const int stored, const long quads, const int offsets, const void *x,
                       const char *w, const void *scales, long kq, const struct groups *given, float *buf) {
    struct groups g = *given;
    const long gq = quads ? quads : g.gq;
    const digit *own = x;
    vf lo[COARSE_ROWS], hi[COARSE_ROWS], units[8];
    g.offsets = offsets;
    UNROLL for (int m = 0; m < mr; m++) lo[m] = hi[m] = vset(0.0f);
    const long bytes = gq * (is_4_bits(form) ? 4 * VL : 4 * NR);
    for (long n = 0; n < g.count; n++, w += bytes, own += mr * 4 * gq) {
        const struct numbers_at numbers = {scales, quads ? n : n / g.shared, quads ? 64 / quads : g.per, stored, units};
        const long last = min_l(gq, kq - n * gq); /* the last group may be shorter */
        const int ahead = is_4_bits(form) || mr <= FEW_ROWS; /* else a panel was unpacked */
        if (ahead) FETCH_GROUP(w, bytes);
        const int most = is_4_bits(form) ? MORE_ROWS : FEW_ROWS;
        const int together = mr <= most ? mr : DIGIT_BITS == 8 ? (mr + 1) / 2 : 2; /* digits of 16 bits take registers */
        UNROLL for (int m = 0; m < mr; m += together)
            if (m + together <= mr)
                few_rows(together, form, ahead, quads, gq, last, own + m * 4 * gq, w, &numbers, &g, offsets,
                         m * g.stride + n, lo + m, hi + m);
            else
                few_rows(mr % together, form, ahead, quads, gq, last, own + m * 4 * gq, w, &numbers, &g, offsets,
                         m * g.stride + n, lo + m, hi + m);
    }
    UNROLL for (int m = 0; m < mr; m++) {
        vstore(buf + m * GROUP * NR, lo[m]);
        vstore(buf + m * GROUP * NR + VL, hi[m]);
    }
}

/* Of groups of so many quads, with offsets or without, as GGUF's types have them; all others are computed more slowly
 * (and all of them by old ARM processors, for which GCC takes long to compile this). */
#if defined(NEON) && !SIGNED_CODES
#define GROUPS_OF(mr, form, stored, quads, has_offsets)
#else
#define GROUPS_OF(mr, form, stored, quads, has_offsets)                         \
    if (g->gq == (quads) && kq % (quads) == 0 && !g->offsets == !(has_offsets)) \
        pairs_tile(mr, form, stored, quads, has_offsets, x, w, s, kq, g, b);    \
    else
#endif
#define PAIRS_TILE(mr, form, stored, SPECIAL)                                                        \
    static void pairs_##mr##_##form##_##stored(const void *x, const char *w, const void *s, long kq, \
                                               const struct groups *g, float *b) {                   \
        SPECIAL(mr, form, stored) pairs_tile(mr, form, stored, 0, g->offsets, x, w, s, kq, g, b);    \
    }
#define NONE(mr, form, stored)
#define PLAIN(mr, form, stored) GROUPS_OF(mr, form, stored, 8, 0)
#define WITH_OFFSETS(mr, form, stored) GROUPS_OF(mr, form, stored, 8, 1)
#define SMALL(mr, form, stored) GROUPS_OF(mr, form, stored, 4, 0)
#define BOTH(mr, form, stored) PLAIN(mr, form, stored) WITH_OFFSETS(mr, form, stored)
#define OF_K_TYPES(mr, form, stored) SMALL(mr, form, stored) WITH_OFFSETS(mr, form, stored)
#define ALL(mr, form, stored) BOTH(mr, form, stored) SMALL(mr, form, stored)
#if FEW_ROWS == 4
#define PAIRS_FEW(form, stored, SPECIAL)                                                                           \
    PAIRS_TILE(1, form, stored, SPECIAL) PAIRS_TILE(2, form, stored, SPECIAL)                                      \
    PAIRS_TILE(3, form, stored, SPECIAL) PAIRS_TILE(4, form, stored, SPECIAL)                                      \
    static code_tile_fn *const PAIRS_##form##_##stored[4] = {pairs_1_##form##_##stored, pairs_2_##form##_##stored, \
                                                             pairs_3_##form##_##stored, pairs_4_##form##_##stored};
#else
#define PAIRS_FEW(form, stored, SPECIAL)                                                                          \
    PAIRS_TILE(1, form, stored, SPECIAL) PAIRS_TILE(2, form, stored, SPECIAL)                                     \
    static code_tile_fn *const PAIRS_##form##_##stored[2] = {pairs_1_##form##_##stored, pairs_2_##form##_##stored};
#endif
PAIRS_FEW(INT8, SINGLES, ALL) PAIRS_FEW(INT8, HALVES, BOTH) PAIRS_FEW(INT8, FACTORS, OF_K_TYPES)
PAIRS_FEW(INT4, SINGLES, NONE) PAIRS_FEW(INT4, HALVES, PLAIN) PAIRS_FEW(INT4, FACTORS, NONE)
PAIRS_FEW(UINT4, SINGLES, NONE) PAIRS_FEW(UINT4, HALVES, WITH_OFFSETS) PAIRS_FEW(UINT4, FACTORS, WITH_OFFSETS)
#if MORE_ROWS == 8
#define PAIRS_MORE(form, stored, SPECIAL)                                                                          \
    PAIRS_TILE(5, form, stored, SPECIAL) PAIRS_TILE(6, form, stored, SPECIAL)                                      \
    PAIRS_TILE(7, form, stored, SPECIAL) PAIRS_TILE(8, form, stored, SPECIAL)                                      \
    static code_tile_fn *const MORE_##form##_##stored[4] = {pairs_5_##form##_##stored, pairs_6_##form##_##stored,  \
                                                            pairs_7_##form##_##stored, pairs_8_##form##_##stored};
PAIRS_MORE(INT4, SINGLES, NONE) PAIRS_MORE(INT4, HALVES, PLAIN) PAIRS_MORE(INT4, FACTORS, NONE)
PAIRS_MORE(UINT4, SINGLES, NONE) PAIRS_MORE(UINT4, HALVES, WITH_OFFSETS) PAIRS_MORE(UINT4, FACTORS, WITH_OFFSETS)
static code_tile_fn *const *const MORE_PAIRS[2][3] = { /* by form and how scales are stored; of those by rows, from 5 on */
    {MORE_INT4_SINGLES, MORE_INT4_HALVES, MORE_INT4_FACTORS},
    {MORE_UINT4_SINGLES, MORE_UINT4_HALVES, MORE_UINT4_FACTORS},
};
#endif
static code_tile_fn *const *const FEW_PAIRS[3][3] = { /* by form and how scales are stored; of those by rows, from 1 on */
    {PAIRS_INT8_SINGLES, PAIRS_INT8_HALVES, PAIRS_INT8_FACTORS},
    {PAIRS_INT4_SINGLES, PAIRS_INT4_HALVES, PAIRS_INT4_FACTORS},
    {PAIRS_UINT4_SINGLES, PAIRS_UINT4_HALVES, PAIRS_UINT4_FACTORS},
};
#if COARSE_ROWS == 8
PAIRS_TILE(5, INT8, SINGLES, ALL) PAIRS_TILE(6, INT8, SINGLES, ALL)
PAIRS_TILE(7, INT8, SINGLES, ALL) PAIRS_TILE(8, INT8, SINGLES, ALL)
static code_tile_fn *const PAIRS[9] = { /* of bytes and fp32 scales, by rows */
    0, pairs_1_INT8_SINGLES, pairs_2_INT8_SINGLES, pairs_3_INT8_SINGLES, pairs_4_INT8_SINGLES, pairs_5_INT8_SINGLES,
    pairs_6_INT8_SINGLES, pairs_7_INT8_SINGLES, pairs_8_INT8_SINGLES,
};
#else
static code_tile_fn *const PAIRS[3] = {0, pairs_1_INT8_SINGLES, pairs_2_INT8_SINGLES};
#endif

/* bits of a byte of codes that are stored inverted, so that it is unsigned (signed) */
long ssd_flipped_bits(int form) { return (SIGNED_CODES ? is_4_bits(form) : form == INT8) ? 128 : 0; }

/* a scale or an offset (kind 1) of a panel */
static float number_at(const void *of_panel, long group, long kind, long column, const struct groups *g) {
    long kinds = g->offsets ? 2 : 1, at = (group * kinds + kind) * NR + column;
    if (g->stored == FACTORS) {
        const char *block = (const char *)of_panel + group / g->per * kinds * NR * (2 + g->per);
        const int8_t *own = (const int8_t *)block + (2 + group % g->per) * kinds * NR;
        return (float)own[kind * NR + column] * from_half(((const uint16_t *)block)[kind * NR + column]);
    }
    return g->stored == HALVES ? from_half(((const uint16_t *)of_panel)[at]) : ((const float *)of_panel)[at];
}

/* how the scales of a weight are stored, with one for every `scaled` weights */
static struct groups stored_groups(long scaled, int flags) {
    return (struct groups){.offsets = flags & OFFSETS, .per = BLOCK / scaled, .shared = 1,
                           .stored = flags & FACTORED ? FACTORS : flags & HALF ? HALVES : SINGLES};
}

/* rows of a quantised (not gated) weight [n, k], widened: out[t] = scale * code (+ offset), each rounded to fp32 */
int ssd_codes_embedding(const void *w, const void *scales, const void *ids, int ids64, void *out, long tokens, long n,
                        long k, int form, long scaled, int flags, int bf16) {
    long depth = ceil_div(k, form == FP8 ? 4 : 16) * (form == FP8 ? 4 : 16);
    long width = is_4_bits(form) ? VL : NR, together = form == FP8 ? 1 : 4, flipped = ssd_flipped_bits(form);
    struct groups g = stored_groups(scaled, flags);
    float *row = scratch(ROWS, (size_t)k);
    for (long t = 0; t < tokens; t++) {
        long id = int_at(ids, t, ids64), j = id % NR;
        if (outside(id, n)) return 1;
        const uint8_t *codes = (const uint8_t *)w + id / NR * depth * width + j % width * together;
        const char *numbers = (const char *)scales + id / NR * numbers_bytes(ceil_div(k, scaled), &g);
        for (long i = 0; i < k; i++) {
            int code = codes[i / together * together * width + i % together] ^ (int)flipped;
            if (is_4_bits(form)) code = code >> j / width * 4 & 15;
            float value = form == INT8 ? (float)(int8_t)code : (float)(form == INT4 ? code - 8 : code);
            if (form == FP8) load_e4m3(&value, &(int8_t){(int8_t)code}, 1);
            row[i] = value * number_at(numbers, i / scaled, 0, j, &g);
            if (g.offsets) row[i] += number_at(numbers, i / scaled, 1, j, &g);
        }
        store_row(out, t * k, row, k, bf16);
    }
    return 0;
}

INLINE vi vmax_int(vi a, vi b) {
    vi mask = a > b;
    return (mask & a) | (~mask & b);
}

INLINE int32_t vsum_int(vi v) {
#if VL == 16
    return _mm512_reduce_add_epi32((__m512i)v);
#elif defined(NEON)
    return vaddvq_s32((int32x4_t)v);
#else
    int32_t sum = 0;
    for (int i = 0; i < VL; i++) sum += v[i];
    return sum;
#endif
}

INLINE int32_t vmax_int_lanes(vi v) {
#if VL == 16
    return _mm512_reduce_max_epi32((__m512i)v);
#elif defined(NEON)
    return vmaxvq_s32((int32x4_t)v);
#else
    int32_t largest = v[0];
    for (int i = 1; i < VL; i++) largest = v[i] > largest ? v[i] : largest;
    return largest;
#endif
}

/* 16 integers as bytes */
INLINE void store_bytes(int8_t *out, const vi *v) {
#if VL == 16
    _mm_storeu_si128((__m128i *)out, _mm512_cvtepi32_epi8((__m512i)v[0]));
#elif defined(NEON)
    int16x8_t low = vuzp1q_s16((int16x8_t)v[0], (int16x8_t)v[1]), high = vuzp1q_s16((int16x8_t)v[2], (int16x8_t)v[3]);
    vst1q_s8(out, vuzp1q_s8((int8x16_t)low, (int8x16_t)high));
#else
    for (int i = 0; i < 16; i++) out[i] = (int8_t)v[i / VL][i % VL];
#endif
}

/* 16 numbers, times `up`, rounded to integers and written in digits, those of one place `stride` after those of the place
 * before; adds them to `sum`, and their low digits to `low` */
INLINE void to_digits(digit *out, long stride, const float *x, float up, int digits, vi *sum, vi *low) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    vi rounded[16 / VL];
    UNROLL for (int i = 0; i < 16 / VL; i++) {
        rounded[i] = (vi)(vload(x + i * VL) * up + magic) - (vi)vset(magic);
        *sum += rounded[i];
        if (digits > 1) *low += (vi)((vu)rounded[i] << 24) >> 24;
    }
#if DIGIT_BITS == 8
    for (int d = 0; d < digits; d++, out += stride) {
        store_bytes(out, rounded);
        UNROLL for (int i = 0; i < 16 / VL; i++) rounded[i] = (rounded[i] + 128) >> 8; /* without that signed digit */
    }
#else
    int32_t v[16];
    memcpy(v, rounded, sizeof v);
    for (int d = 0; d < digits; d++, out += stride) {
        int last = d == digits - 1;
        for (int i = 0; i < 16; i++) {
            int from = (i & 12) | (i & 1) << 1 | (i >> 1 & 1);
            out[i] = last ? (int16_t)v[from] : (int8_t)v[from];
        }
        for (int i = 0; i < 16; i++) v[i] = (v[i] + 128) >> 8;
    }
#endif
}

/* A row in digits and its groups.  A group with NaN or infinity in it gets NaN as its unit. */
struct digit_layout {
    long stride;    /* between the digits of a number */
    long run, jump; /* numbers that lie side by side, and from one such run to the next */
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
#if SIGNED_CODES
        if (g->starts) set_starts(g->starts[out + i - g->of_rows], form, total);
#endif
    }
}

static void pack_digits(digit *dst, const struct digit_layout *layout, const float *x, long kq, int bf16, int coarse,
                        int form, const struct groups *g, const float *row_scales, struct digit_group *out) {
    if (coarse)
        pack_groups(dst, layout, x, kq, bf16, 1, form, g, row_scales, out);
    else
        pack_groups(dst, layout, x, kq, bf16, 0, form, g, row_scales, out);
}

/* ---------------------------------------------------------------- linear: AMX
 * Tile registers: 0 to 5 hold sums, 6 and 7 (of bf16 rows 4 to 7, of coarse rows 5 to 7) what is multiplied.  Row tiles have up to 16 rows; the
 * unused last row of one of those that are smaller is multiplied, too, and not read.
 * bf16: every output element is the sum, first to last, of products of 32 k; its bits differ from those of `tile`, so a
 * machine uses either.  x is [K/32][rows][32].
 * Integers: sums are exact, so these are the numbers of `dot_tile`.  x is [K/step][digits][rows][step]. */
#ifdef AMX
#define AMX_ROWS 16
#define AMX_LEAST 5 /* rows from which on tiles of integers are faster than dot products */

struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16]; /* of a row */
    uint8_t rows[16];
};

static void amx_configure(long rows, long rows_of_5, long rows_of_6, long bytes_of_6, long rows_of_7) {
    struct tile_config c = {.palette = 1};
    for (int i = 0; i < 6; i++) c.rows[i] = (uint8_t)rows, c.bytes[i] = 64;
    c.rows[5] = (uint8_t)rows_of_5;
    c.rows[6] = (uint8_t)rows_of_6, c.bytes[6] = (uint16_t)bytes_of_6;
    c.rows[7] = (uint8_t)rows_of_7, c.bytes[7] = 64;
    COMPILER_BARRIER(); /* the intrinsics do not say what they read */
    _tile_loadconfig(&c);
}

/* one or two row tiles of bf16 against a panel; `next`: bytes of a row tile, `ld`: those of a row of sums */
INLINE void amx_bf16_tile(const int both, const char *x, long next, long rows, const char *w, long depth, float *buf,
                          float *buf2) {
    const long ld = GROUP * NR * 4, wide = 2 * NR * 2;
    _tile_zero(0);
    _tile_zero(1);
    if (both) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (long k = 0; k < depth; k += BF16_DEPTH, x += rows * 64, w += BF16_DEPTH * NR * 2) {
        _tile_loadd(6, w, wide);
        _tile_loadd(4, x, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + 64, wide);
        _tile_dpbf16ps(1, 4, 7);
        if (!both) continue;
        _tile_loadd(5, x + next, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, buf, ld);
    _tile_stored(1, buf + VL, ld);
    if (!both) return;
    _tile_stored(2, buf2, ld);
    _tile_stored(3, buf2 + VL, ld);
}

#define AMX_DIGIT(sums, d)                     \
    if (digits > (d))                          \
    {                                          \
        _tile_loadd(6, x + (d)*rows * step, step); \
        _tile_dpbsud(sums, 6, 7);              \
    }

/* a row tile of digits against a panel of bytes; `rows` and `step` are those of the packed tile */
INLINE void amx_dot_tile(const int digits, long mr, long rows, long step, const char *x, const char *w,
                         const void *scales, long kq, const struct groups *given, float *buf) {
    int32_t sums[6][AMX_ROWS][VL] __attribute__((aligned(64)));
    const struct groups g = *given;
    vf units[8];
    for (long m = 0; m < mr; m++) memset(buf + m * GROUP * NR, 0, NR * 4);
    for (long group = 0, n = 0, used = 0, own = 0; group < kq; group += g.gq, n++) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        if (digits == 3) {
            _tile_zero(4);
            _tile_zero(5);
        }
        for (long q = group; q < min_l(kq, group + g.gq); q += step / 4) {
            _tile_loadd(7, w, 4 * NR);
            AMX_DIGIT(0, 0)
            AMX_DIGIT(2, 1)
            AMX_DIGIT(4, 2)
            _tile_loadd(7, w + 4 * VL, 4 * NR);
            AMX_DIGIT(1, 0)
            AMX_DIGIT(3, 1)
            AMX_DIGIT(5, 2)
            x += digits * rows * step;
            w += step * NR;
        }
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
        _tile_stored(2, sums[2], 64);
        _tile_stored(3, sums[3], 64);
        if (digits == 3) {
            _tile_stored(4, sums[4], 64);
            _tile_stored(5, sums[5], 64);
        }
        vf numbers[4];
        load_numbers(numbers, units, scales, own, g.per, &g, g.stored);
        for (long m = 0; m < mr; m++)
            UNROLL for (int half = 0; half < 2; half++) {
                vi of_row[3];
                float *acc = buf + m * GROUP * NR + half * VL;
                UNROLL for (int d = 0; d < digits; d++) of_row[d] = (vi)*(const vu_mem *)sums[2 * d + half][m];
                vf sum = add_group(vload(acc), of_row, INT8, half, digits, numbers[half], &g, m * g.stride + n);
                vstore(acc, g.offsets ? add_offsets(sum, numbers[2 + half], &g, m * g.stride + n) : sum);
            }
        if (++used == g.shared) own++, used = 0;
    }
}
#endif

/* codes of 4 bits as bytes */
static void unpack_codes(char *out, const char *w, long kq, int form) {
    for (long q = 0; q < kq; q++, w += 4 * VL, out += 4 * NR) {
        vi lo, hi;
        FETCH_LATER(w);
#if SIGNED_CODES
        int8x16_t both = vld1q_s8((const int8_t *)w), low = vandq_s8(both, vdupq_n_s8(15)), high = vshrq_n_s8(both, 4);
        lo = (vi)(form == INT4 ? vsubq_s8(low, vdupq_n_s8(8)) : low);
        hi = (vi)(form == INT4 ? high : vaddq_s8(high, vdupq_n_s8(8)));
#else
        load_codes(&lo, &hi, w, form);
#endif
        *(vu_mem *)out = (vu)lo;
        *(vu_mem *)(out + 4 * VL) = (vu)hi;
    }
    COMPILER_BARRIER();
}

#ifdef AMX
#define AMX_COARSE(left, right, out)                       \
    _tile_zero(left);                                      \
    _tile_zero(right);                                     \
    for (long q = 0; q < quads; q += step / 4) {           \
        _tile_loadd(6, x, step);                           \
        _tile_loadd(7, own, 4 * NR);                       \
        _tile_dpbsud(left, 6, 7);                          \
        _tile_loadd(5, own + 4 * VL, 4 * NR);              \
        _tile_dpbsud(right, 6, 5);                         \
        x += rows * step, own += step * NR;                \
    }                                                      \
    _tile_stored(left, (out)[0], 64);                      \
    _tile_stored(right, (out)[1], 64);

/* A tile of coarse rows against a panel.  Beside the products of a group, the codes of the next one are unpacked, if they
 * are of 4 bits, and the sums of the one before are added: each of these has to wait for what was written last. */
INLINE void amx_coarse_tile(const int form, long mr, long rows, long step, const char *x, const char *w, const void *scales,
                            long kq, const struct groups *given, float *buf) {
    char codes[2][DOT_MOST * NR] __attribute__((aligned(64)));
    int32_t sums[2][2][AMX_ROWS][VL] __attribute__((aligned(64)));
    const struct groups g = *given;
    const long bytes = g.gq * (is_4_bits(form) ? 4 * VL : 4 * NR), later = 2 * g.gq * 4 * rows; /* of rows: two groups */
    vf numbers[4], units[8];
    for (long m = 0; m < mr; m++) memset(buf + m * GROUP * NR, 0, NR * 4);
    if (is_4_bits(form)) unpack_codes(codes[0], w, min_l(g.gq, kq), form);
    for (long n = 0; n <= g.count; n++) {
        const long quads = min_l(g.gq, kq - n * g.gq), next = min_l(g.gq, kq - (n + 1) * g.gq);
        const char *own = is_4_bits(form) ? codes[n % 2] : w + n * bytes;
        if (quads > 0 && n % 2) {
            AMX_COARSE(2, 3, sums[1])
        } else if (quads > 0) {
            AMX_COARSE(0, 1, sums[0])
        }
        if (is_4_bits(form) && next > 0) unpack_codes(codes[(n + 1) % 2], w + (n + 1) * bytes, next, form);
        if (!n) continue;
        load_numbers(numbers, units, scales, g.shared == 1 ? n - 1 : (n - 1) / g.shared, g.per, &g, g.stored);
        for (long m = 0, at = n - 1; m < mr; m++, at += g.stride) {
            for (long line = m * 64; line < g.gq * 4 * rows; line += mr * 64) __builtin_prefetch(x + later + line);
            UNROLL for (int half = 0; half < 2; half++) {
                float *acc = buf + m * GROUP * NR + half * VL;
                vi of_row = (vi)*(const vu_mem *)sums[(n - 1) % 2][half][m];
                vf sum = add_sums(vload(acc), of_row, form, half, numbers[half], &g, at);
                vstore(acc, g.offsets ? add_offsets(sum, numbers[2 + half], &g, at) : sum);
            }
        }
    }
}
#endif

/* One row tile against consecutive panels, one after the other: a single stream of weights is what the hardware
 * prefetcher likes best, and two chains per row hide enough latency even at one row. */
static void run_tile(long mr, long panels, int bf16, const float *x, const char *w, long kq, float *buf) {
    for (long p = 0; p < panels; p++) TILES[bf16][mr](x, w + p * kq * 4 * NR * (bf16 ? 2 : 4), kq, buf + p * NR);
}

/* row m of a tile that has mr rows */
static void pack_x(float *dst, const void *x, long ldx, long row, long m, long mr, long k, int bf16) {
    float *d = dst + 4 * m;
    long offset = row * ldx;
    for (long i = 0; i < k; i += 4, d += 4 * mr) {
        if (i + 4 <= k && !bf16) {
            memcpy(d, (const float *)x + offset + i, 16);
            continue;
        }
        for (long j = 0; j < 4; j++)
            d[j] = i + j >= k ? 0.0f
                   : bf16     ? from_bf16(((const uint16_t *)x)[offset + i + j])
                              : ((const float *)x)[offset + i + j];
    }
}

/* how the rows of a gated weight become one: silu(min(gate, limit)) * (up within +-limit, plus shift) */
struct glu {
    float slope, limit, shift;
};

struct linear_args {
    const void *x;
    const char *w;
    const void *bias;
    void *y;
    long ldx, m, n, k, kq;
    int bf16, gated, wide;
    struct glu glu;
    int form;            /* of a quantised weight, else 0 */
    const void *scales; /* [panels][groups][NR], with offsets [panels][groups][2][NR]; fp32 or fp16 */
    struct groups groups;
    long numbers, numbers_bytes; /* scales of an output, and bytes of those of a panel (offsets included) */
    int digits, coarse;  /* of packed rows; 0: they are fp32 (bf16 for AMX) */
    int unpack;          /* panels are unpacked for several row tiles */
    int amx;             /* whether tile registers are used */
    long tiles;          /* row tiles, of m / tiles rows or one more */
    long rows, row_size; /* room for rows in a packed row tile; bytes of a packed row */
    long step;           /* AMX: bytes of a row in a tile register */
    const void *xp;      /* packed rows */
    long panels, group, block; /* panels in all, and in one task; row tiles of one task */
    int slot, nthreads;        /* slot: which scratch memory it has */
    _Atomic int *ready; /* [m][groups]: columns of a group that are computed, from this row on, as far as they are counted */
    const struct linear_args *next; /* product that takes y as its x: what computes columns of y packs them for it; or NULL */
    void (*run)(const struct linear_args *a, long t0, long t1, long panel0, long panels);
};

#ifdef AMX
#define ROWS_MAX AMX_ROWS
#else
#define ROWS_MAX MR_MAX
#endif

INLINE long tile_row(const struct linear_args *a, long t) { return t * (a->m / a->tiles) + min_l(t, a->m % a->tiles); }

/* the tile of a row: the first m % tiles of them have one row more */
INLINE long tile_of(const struct linear_args *a, long row) {
    long least = a->m / a->tiles, larger = a->m % a->tiles, in_larger = larger * (least + 1);
    return row < in_larger ? row / (least + 1) : larger + (row - in_larger) / least;
}

INLINE const void *packed_tile(const struct linear_args *a, long t) {
    return (const char *)a->xp + (a->amx ? t * a->rows : tile_row(a, t)) * a->row_size;
}

INLINE float bias_at(const struct linear_args *a, long i) {
    return a->bf16 ? from_bf16(((const uint16_t *)a->bias)[i]) : ((const float *)a->bias)[i];
}

/* panel pairs of a row, each left in its gate; bf16 rounds where PyTorch would */
INLINE void gate_panels(float *row, const int panels, int bf16, const struct glu *glu) {
    vf most = vset(glu->limit), g[4], u[4];
    UNROLL for (int i = 0; i < 2 * panels; i++) { /* several chains of operations side by side */
        g[i] = vload(row + i / 2 * 2 * NR + i % 2 * VL), u[i] = vload(row + i / 2 * 2 * NR + NR + i % 2 * VL);
        if (bf16) g[i] = vround_bf16(g[i]), u[i] = vround_bf16(u[i]);
        g[i] = vselect(g[i] > most, most, g[i]); /* NaN stays NaN */
        u[i] = vselect(u[i] > most, most, vselect(u[i] < -most, -most, u[i]));
    }
    UNROLL for (int i = 0; i < 2 * panels; i++) g[i] = vsilu(g[i], glu->slope);
    UNROLL for (int i = 0; i < 2 * panels; i++)
        vstore(row + i / 2 * 2 * NR + i % 2 * VL, (bf16 ? vround_bf16(g[i]) : g[i]) * (u[i] + glu->shift));
}

static void gate_row(float *row, long panels, int bf16, const struct glu *glu) {
    for (; panels >= 2; panels -= 2, row += 4 * NR) gate_panels(row, 2, bf16, glu);
    if (panels) gate_panels(row, 1, bf16, glu);
}

/* 4 * quads columns of a row, from `first` on, where a group begins, in digits */
static void pack_columns(const struct linear_args *a, long row, const float *x, long first, long quads) {
    const struct groups *g = &a->groups;
    long run = a->amx ? a->step : a->coarse ? 4 * g->gq : 16, t = tile_of(a, row);
    long m = row - tile_row(a, t), mr = tile_row(a, t + 1) - tile_row(a, t);
    struct digit_layout layout = {16, run, mr * a->digits * run};
    if (a->amx) layout = (struct digit_layout){a->rows * run, run, a->rows * run * a->digits};
    digit *dst = (digit *)packed_tile(a, t) + m * (a->amx ? run : a->digits * run) + first / run * layout.jump;
    const float *row_scales = g->row_scales ? g->row_scales + row * g->ld : 0;
    pack_digits(dst, &layout, x, quads, a->bf16, a->coarse, a->form, g, row_scales,
                g->of_rows + row * g->stride + first / (4 * g->gq));
}

/* Columns [first, first + count) of some rows of x are computed: packs the groups that are complete now. */
static void columns_done(const struct linear_args *a, long row, long rows, long first, long count) {
    const long size = 4 * a->groups.gq;
    for (long k = first, stop; k < first + count; k = stop) {
        long group = k / size, begin = group * size, end = min_l(a->k, begin + size);
        long quads = min_l(size / 4, a->kq - begin / 4);
        stop = min_l(end, first + count);
        if (stop - k < end - begin &&
            atomic_fetch_add(&a->ready[row * a->groups.count + group], (int)(stop - k)) + stop - k < end - begin)
            continue;
        for (long r = row; r < row + rows; r++) {
            float x[DOT_MOST];
            load_row(x, a->x, r * a->ldx + begin, end - begin, a->bf16);
            for (long i = end - begin; i < 4 * quads; i++) x[i] = 0.0f;
            pack_columns(a, r, x, begin, quads);
        }
    }
}

static void finish_tile(const struct linear_args *a, float *buf, long row, long mr, long panel0, long panels) {
    long span = a->gated ? 2 : 1, first = panel0 * NR, width = min_l(NR * panels, a->n - first); /* columns */
    for (long m = 0; m < mr; m++, buf += GROUP * NR) {
        for (long s = 0; a->bias && s < span; s++)
            for (long j = 0; j < width; j++) buf[(j / NR * span + s) * NR + j % NR] += bias_at(a, s * a->n + first + j);
        if (a->gated) gate_row(buf, panels, a->bf16, &a->glu);
        for (long j = 0; j < width; j += NR)
            store_row(a->y, (row + m) * a->n + first + j, buf + j * span, min_l(NR, width - j), a->bf16 && !a->wide);
    }
    if (a->next) columns_done(a->next, row, mr, first, width);
}

/* fp32 copy of bf16 panels, `depth` rows of NR in all */
static const char *widen_panels(const char *w, long depth) {
    float *out = scratch(PANELS, (size_t)(depth * NR));
    for (long i = 0; i < depth; i++) {
        vf lo, hi;
        widen(&lo, &hi, w + i * NR * 2, 1);
        vstore(out + i * NR, lo);
        vstore(out + i * NR + VL, hi);
    }
    return (const char *)out;
}

#ifdef AMX
/* row tiles [t0, t1) of bf16 against output panels [panel0, panel0 + panels) */
static void amx_bf16_block(const struct linear_args *a, long t0, long t1, long panel0, long panels) {
    float buf[2][AMX_ROWS * GROUP * NR] __attribute__((aligned(64)));
    long span = a->gated ? 2 : 1, depth = a->kq * 4, next = a->rows * a->row_size;
    amx_configure(a->rows, a->rows, 16, 64, 16);
    for (long t = t0; t < t1; t += 2) {
        const char *x = packed_tile(a, t), *w = a->w + panel0 * span * depth * NR * 2;
        for (long p = 0; p < panels * span; p++, w += depth * NR * 2)
            if (t + 1 < t1)
                amx_bf16_tile(1, x, next, a->rows, w, depth, buf[0] + p * NR, buf[1] + p * NR);
            else
                amx_bf16_tile(0, x, next, a->rows, w, depth, buf[0] + p * NR, 0);
        for (long i = t; i < min_l(t + 2, t1); i++)
            finish_tile(a, buf[i - t], tile_row(a, i), tile_row(a, i + 1) - tile_row(a, i), panel0, panels);
    }
    _tile_release();
}
#endif

/* the groups of rows from `row` on */
INLINE struct groups groups_from(const struct linear_args *a, long row) {
    struct groups g = a->groups;
    if (g.row_scales) g.row_scales += row * g.ld;
    if (a->digits) g.of_rows += row * g.stride;
    if (g.starts) g.starts += row * g.stride;
    return g;
}

/* A panel for several rows: codes of 4 bits as bytes, where tiles take bytes, and scales of coarse rows in fp32. */
struct panel {
    const char *w;
    const void *scales;
};

static struct panel unpacked(const struct linear_args *a, struct panel given, float *memory) {
    const struct groups *g = &a->groups;
    if (is_4_bits(a->form) && (a->amx || a->coarse)) {
        unpack_codes((char *)memory, given.w, a->kq, a->form);
        given.w = (char *)memory;
        memory += a->kq * NR;
    }
    if (!a->coarse || g->stored == SINGLES) return given;
    vf numbers[4], units[8];
    long kinds = g->offsets ? 2 : 1;
    for (long n = 0; n < a->numbers; n++) {
        load_numbers(numbers, units, given.scales, n, g->per, g, g->stored);
        for (long i = 0; i < 2 * kinds; i++) vstore(memory + n * kinds * NR + i * VL, numbers[i]);
    }
    given.scales = memory;
    return given;
}

static code_tile_fn *code_tile_of(const struct linear_args *a, long mr, int stored) {
    if (!a->digits) return CODE_TILES[mr];
    if (!a->coarse) return DOTS[a->bf16][a->form][mr];
    if (a->unpack) return PAIRS[mr];
#if MORE_ROWS == 8
    if (mr > FEW_ROWS) return MORE_PAIRS[a->form - INT4][stored][mr - FEW_ROWS - 1];
#endif
    return FEW_PAIRS[a->form - INT8][stored][mr - 1];
}

/* row tiles [t0, t1) against output panels [panel0, panel0 + panels) of a quantised weight */
static void codes_block(const struct linear_args *a, long t0, long t1, long panel0, long panels) {
    float buf[ROWS_MAX * GROUP * NR] __attribute__((aligned(64)));
    long span = a->gated ? 2 : 1, first = panel0 * span, bytes = a->kq * NR * (is_4_bits(a->form) ? 2 : 4);
    long room = (a->kq + 2 * a->numbers) * NR;
    float *memory = a->unpack ? scratch(PANELS, (size_t)(panels * span * room)) : 0;
    struct panel found[GROUP];
#ifdef AMX
    if (a->amx) amx_configure(a->rows, a->coarse ? a->step / 4 : a->rows, a->rows, a->step, a->step / 4);
#endif
    for (long t = t0; t < t1; t++) {
        long row = tile_row(a, t), mr = tile_row(a, t + 1) - row;
        struct groups g = groups_from(a, row);
        if (a->coarse && a->unpack) g.stored = SINGLES;
        const void *x = packed_tile(a, t);
        code_tile_fn *tile = a->amx ? 0 : code_tile_of(a, mr, g.stored);
        if (mr > 1) fetch(x, min_l(mr * a->row_size, 8 << 10)); /* other threads have packed it */
        for (long p = 0; p < panels * span; p++) {
            struct panel own = {a->w + (first + p) * bytes, (const char *)a->scales + (first + p) * a->numbers_bytes};
            if (t == t0) found[p] = a->unpack ? unpacked(a, own, memory + p * room) : own;
            const void *s = found[p].scales;
            const char *w = found[p].w;
            float *out = buf + p * NR;
#ifdef AMX
            if (a->amx) {
                if (a->coarse && (a->unpack || a->form == INT8))
                    amx_coarse_tile(INT8, mr, a->rows, a->step, x, w, s, a->kq, &g, out);
                else if (a->coarse)
                    amx_coarse_tile(UINT4, mr, a->rows, a->step, x, w, s, a->kq, &g, out);
                else if (a->digits == 2)
                    amx_dot_tile(2, mr, a->rows, a->step, x, w, s, a->kq, &g, out);
                else
                    amx_dot_tile(3, mr, a->rows, a->step, x, w, s, a->kq, &g, out);
                continue;
            }
#endif
            tile(x, w, s, a->kq, &g, out);
        }
        finish_tile(a, buf, row, mr, panel0, panels);
    }
#ifdef AMX
    if (a->amx) _tile_release();
#endif
}

/* the same with a weight that is not */
static void linear_block(const struct linear_args *a, long t0, long t1, long panel0, long panels) {
    float buf[MR_MAX * GROUP * NR] __attribute__((aligned(64)));
    long span = a->gated ? 2 : 1;
    const char *w = a->w + panel0 * span * a->kq * 4 * NR * (a->bf16 ? 2 : 4);
    int narrow = a->bf16;
    if (narrow && t1 - t0 > 1) { /* several row tiles share the work of widening; the numbers are the same */
        w = widen_panels(w, panels * span * a->kq * 4);
        narrow = 0;
    }
    for (long t = t0; t < t1; t++) {
        long row = tile_row(a, t), mr = tile_row(a, t + 1) - row;
        run_tile(mr, panels * span, narrow, packed_tile(a, t), w, a->kq, buf);
        finish_tile(a, buf, row, mr, panel0, panels);
    }
}

static void pack_digit_row(const struct linear_args *a, long row) {
    float *x = scratch(PANELS, (size_t)(a->kq * 4));
    load_row(x, a->x, row * a->ldx, a->k, a->bf16);
    for (long i = a->k; i < a->kq * 4; i++) x[i] = 0.0f;
    pack_columns(a, row, x, 0, a->kq);
}

#ifdef AMX
static void pack_bf16_row(const struct linear_args *a, uint16_t *dst, long row, long m) {
    const uint16_t *src = (const uint16_t *)a->x + row * a->ldx;
    dst += m * BF16_DEPTH;
    for (long k = 0; k < a->kq * 4; k += BF16_DEPTH) {
        long n = min_l(BF16_DEPTH, a->k - k);
        memset(dst + k * a->rows + n, 0, (size_t)(BF16_DEPTH - n) * 2);
        memcpy(dst + k * a->rows, src + k, (size_t)n * 2);
    }
}
#endif

/* rows [begin, end), each to its place in its tile */
static void pack_rows(void *given, long begin, long end) {
    const struct linear_args *a = given;
    for (long row = begin; row < end; row++) {
        long t = tile_of(a, row), m = row - tile_row(a, t), mr = tile_row(a, t + 1) - tile_row(a, t);
        void *dst = (void *)packed_tile(a, t);
        if (a->digits)
            pack_digit_row(a, row);
#ifdef AMX
        else if (a->amx)
            pack_bf16_row(a, dst, row, m);
#endif
        else
            pack_x(dst, a->x, a->ldx, row, m, mr, a->k, a->bf16);
    }
}

static void linear_blocks(void *given, long begin, long end) {
    const struct linear_args *a = given;
    long groups = ceil_div(a->panels, a->group);
    for (long i = begin; i < end; i++) {
        long b = i / groups * a->block, p = i % groups * a->group;
        a->run(a, b, min_l(a->tiles, b + a->block), p, min_l(a->group, a->panels - p));
    }
}

/* how rows are multiplied by a quantised weight: rows in digits unless it is fp8 */
static void plan_codes(struct linear_args *a, long scaled, int flags, const float *row_scales, long row_groups) {
    struct groups *g = &a->groups;
    *g = stored_groups(scaled, flags);
    g->gq = ceil_div(scaled, 4), g->count = ceil_div(a->k, scaled), g->row_scales = row_scales, g->ld = row_groups;
    a->run = codes_block;
    a->kq = ceil_div(a->k, 4);
    a->row_size = a->kq * 16;
    a->numbers = g->count, a->numbers_bytes = numbers_bytes(g->count, g);
    if (a->form == FP8) return;
    long group = min_l(ceil_div(scaled, 16) * 16, DOT_MOST);
    g->gq = group / 4;
    g->count = ceil_div(a->k, group);
    g->shared = ceil_div(scaled, group);
    g->stride = ceil_div(g->count, 4) * 4;
    a->coarse = flags & COARSE;
    a->digits = digits_of(a->bf16, a->coarse);
    long few = is_4_bits(a->form) ? MORE_ROWS : FEW_ROWS; /* in a tile with panels as they are */
    a->unpack = a->coarse && a->m > (is_4_bits(a->form) || g->stored == FACTORS ? 2 * few : few);
    a->rows = !a->coarse ? DOT_ROWS : !a->unpack ? few : g->offsets ? FEW_ROWS : COARSE_ROWS; /* offsets take registers */
    int joint = is_joint(a->form) && a->coarse && !a->unpack;
    size_t groups = (size_t)(a->m * g->stride);
    size_t each = sizeof *g->of_rows + (joint ? sizeof *g->starts : 0);
    g->of_rows = (void *)scratch(GROUPS + a->slot, groups * (each / 4 + 1));
    if (joint) g->starts = (void *)(g->of_rows + groups);
    a->ready = (void *)((char *)g->of_rows + groups * each);
    a->kq = ceil_div(a->k, 16) * 4;
    a->row_size = (a->coarse ? g->count * g->gq : a->kq) * 4 * a->digits * (long)sizeof(digit);
#ifdef AMX
    if (a->m < AMX_LEAST || (a->coarse && is_4_bits(a->form) && a->m <= MORE_ROWS)) return;
    a->amx = 1, a->rows = AMX_ROWS, a->step = 64;
    a->unpack = !a->coarse || a->m > AMX_ROWS;
    while (group % a->step || a->kq * 4 % a->step) a->step /= 2;
#endif
}

/* how it is computed, from the arguments of ssd_linear; a plan is valid until the next one of its slot */
static struct linear_args plan_linear(const void *x, long ldx, const void *w, const void *bias, void *y, long m, long n, long k,
                                      int bf16, int gated, float slope, float limit, float shift, int wide, int form,
                                      const void *scales, long scaled, int flags, const float *row_scales, long row_groups,
                                      int nthreads, int slot) {
    struct linear_args a = {.x = x, .w = w, .bias = bias, .y = y, .ldx = ldx, .m = m, .n = n, .k = k,
                            .kq = padded_depth(k, bf16) / 4, .bf16 = bf16, .gated = gated, .glu = {slope, limit, shift},
                            .wide = wide, .form = form, .scales = scales, .rows = MR_MAX, .xp = x, .slot = slot,
                            .run = linear_block};
    a.row_size = a.kq * 16;
    if (form) plan_codes(&a, scaled, flags, row_scales, row_groups);
#ifdef AMX
    if (!form && bf16) {
        a.amx = 1, a.rows = AMX_ROWS, a.row_size = a.kq * 8, a.run = amx_bf16_block;
    }
#endif
    a.tiles = ceil_div(m, a.rows);
    if (a.amx) a.rows = ceil_div(m, a.tiles);
    int as_it_is = m == 1 && !a.digits && k == a.kq * 4 && (a.amx || !bf16);
    if (!as_it_is) a.xp = scratch(PACKED + slot, (size_t)(a.tiles * a.rows * a.row_size / 4));
    long span = gated ? 2 : 1;
    a.panels = ceil_div(n, NR);
    a.group = (a.tiles == 1 || a.coarse ? GROUP : 2) / span; /* one row tile: wide tasks; more: keep the panels in L1 */
    while (a.group > 1 && ceil_div(a.panels, a.group) < 4 * nthreads) a.group /= 2;
    a.block = max_l(2, (384 << 10) / (a.rows * a.row_size)); /* row tiles that stay in L2 with a stream of panels */
    a.block = ceil_div(a.tiles, ceil_div(a.tiles, a.block)); /* equal ones: threads share them */
    a.nthreads = (double)m * (double)n * (double)k * span < 65536.0 ? 1 : nthreads;
    return a;
}

static void pack_all(struct linear_args *a, int nthreads) {
    if (a->xp != a->x) parallel(a->m, a->m * a->k >= ALONE ? nthreads : 1, pack_rows, a);
}

/* the product itself; the rows are packed */
static void multiply(struct linear_args *a) {
    parallel(ceil_div(a->tiles, a->block) * ceil_div(a->panels, a->group), a->nthreads, linear_blocks, a);
}

/* y[m, n] = x[m, k] @ W^T (+ bias), or what `glu` makes of a gated weight's rows; n counts the columns of y.
 * wide: y is fp32 although the storage is bf16.  form: that of a quantised W, with a scale (and an offset, if
 * `flags` says so) for every `scaled` weights of a row; else 0.  row_scales: fp32 [m][row_groups], or 0. */
void ssd_linear(const void *x, long ldx, const void *w, const void *bias, void *y, long m, long n, long k, int bf16,
                int gated, float slope, float limit, float shift, int wide, int form, const void *scales, long scaled,
                int flags, const float *row_scales, long row_groups, int nthreads) {
    if (m <= 0 || n <= 0) return;
    struct linear_args a = plan_linear(x, ldx, w, bias, y, m, n, k, bf16, gated, slope, limit, shift, wide, form, scales,
                                       scaled, flags, row_scales, row_groups, nthreads, 0);
    pack_all(&a, nthreads);
    multiply(&a);
}

/* ---------------------------------------------------------------- experts
 * The `count` largest logits of each row, the lower expert first where they are equal, and their weights: the softmax
 * over the chosen ones (`chosen`) or over all.  A pair is (row, place among its experts); `order` has the pairs by
 * expert, those of expert e from starts[e] on. */
void ssd_route(const float *logits, long rows, long experts, long count, int chosen, int32_t *ids, float *weights,
               int32_t *order, int32_t *starts) {
    memset(starts, 0, (size_t)(experts + 1) * 4);
    for (long r = 0; r < rows; r++, logits += experts, ids += count, weights += count) {
        for (long i = 0; i < count; i++) {
            long best = -1;
            for (long e = 0; e < experts; e++) {
                int taken = 0;
                for (long j = 0; j < i; j++) taken |= ids[j] == e;
                if (!taken && (best < 0 || logits[e] > logits[best])) best = e;
            }
            ids[i] = (int32_t)best;
            weights[i] = expf(logits[best] - logits[ids[0]]);
            starts[best + 1]++;
        }
        float sum = 0.0f;
        if (chosen)
            for (long i = 0; i < count; i++) sum += weights[i];
        else
            for (long e = 0; e < experts; e++) sum += expf(logits[e] - logits[ids[0]]);
        for (long i = 0; i < count; i++) weights[i] /= sum;
    }
    for (long e = 0; e < experts; e++) starts[e + 1] += starts[e];
    ids -= rows * count;
    for (long p = 0; p < rows * count; p++) order[starts[ids[p]]++] = (int32_t)p;
    for (long e = experts; e > 0; e--) starts[e] = starts[e - 1];
    starts[0] = 0;
}

/* ssd_linear for the pairs of each expert that has any: y[p] = x[p / repeats] @ W_e^T.  `weights` and `scales` have an
 * address for each expert; `bias` is [experts][n], of gated weights [2][experts][n]. */
void ssd_expert_linear(const void *x, long ldx, const int32_t *order, const int32_t *starts, long experts, long repeats,
                       const int64_t *weights, const int64_t *scales, const void *bias, void *y, long n, long k,
                       int bf16, int gated, float slope, float limit, float shift, int wide, int form, long scaled,
                       int flags, const float *row_scales, long row_groups, int nthreads) {
    size_t size = bf16 ? 2 : 4, in = (size_t)k * size, out = (size_t)n * (wide ? 4 : size), part = (size_t)n * size;
    for (long e = 0; e < experts; e++, order += starts[e] - starts[e - 1]) {
        long m = starts[e + 1] - starts[e];
        if (!m) continue;
        size_t row = ceil_div(in, 4) * 4 + ceil_div(out, 4) * 4 + (size_t)row_groups * 4;
        char *rows = (char *)scratch(EXPERT, ((size_t)m * row + 2 * part) / 4 + 1);
        char *found = rows + (size_t)m * ceil_div(in, 4) * 4, *biases = found + (size_t)m * ceil_div(out, 4) * 4;
        float *own = (float *)(biases + ceil_div(2 * part, 4) * 4);
        for (long i = 0; i < m; i++) {
            long from = order[i] / repeats;
            memcpy(rows + (size_t)i * in, (const char *)x + (size_t)(from * ldx) * size, in);
            if (row_scales) memcpy(own + i * row_groups, row_scales + from * row_groups, (size_t)row_groups * 4);
        }
        for (long half = 0; bias && half < (gated ? 2 : 1); half++)
            memcpy(biases + (size_t)half * part, (const char *)bias + (size_t)(half * experts + e) * part, part);
        ssd_linear(rows, k, (const void *)weights[e], bias ? biases : 0, found, m, n, k, bf16, gated, slope, limit, shift,
                   wide, form, scales ? (const void *)scales[e] : 0, scaled, flags, row_scales ? own : 0, row_groups,
                   nthreads);
        for (long i = 0; i < m; i++) memcpy((char *)y + (size_t)order[i] * out, found + (size_t)i * out, out);
    }
}

struct combine_args {
    const void *x;
    const float *weights;
    void *y;
    long count, n;
    int bf16, wide;
};

static void combine_rows(void *given, long begin, long end) {
    const struct combine_args *a = given;
    float *sum = scratch(ROWS, (size_t)(2 * a->n)), *x = sum + a->n;
    for (long r = begin; r < end; r++) {
        for (long i = 0; i < a->count; i++) {
            float weight = a->weights[r * a->count + i];
            load_row(x, a->x, (r * a->count + i) * a->n, a->n, a->bf16);
            for (long j = 0; j < a->n; j++) sum[j] = i ? sum[j] + weight * x[j] : weight * x[j];
        }
        store_row(a->y, r * a->n, sum, a->n, a->bf16 && !a->wide);
    }
}

/* y[r] = sum over i of weights[r][i] * x[r * count + i], one after the other; wide: y is fp32 although x is bf16 */
void ssd_combine(const void *x, const float *weights, void *y, long rows, long count, long n, int bf16, int wide,
                 int nthreads) {
    struct combine_args a = {x, weights, y, count, n, bf16, wide};
    parallel(rows, rows * count * n > 65536 ? nthreads : 1, combine_rows, &a);
}

/* ---------------------------------------------------------------- rms_norm */
static float inverse_rms(const float *x, long d, float eps) {
    vf acc[4] = {{0}, {0}, {0}, {0}};
    long i = 0;
    for (; i + 4 * VL <= d; i += 4 * VL)
        UNROLL for (int j = 0; j < 4; j++) {
            vf v = vload(x + i + j * VL);
            acc[j] = vfma(acc[j], v, v);
        }
    float sum = vsum((acc[0] + acc[1]) + (acc[2] + acc[3]));
    for (; i < d; i++) sum += x[i] * x[i];
    return 1.0f / sqrtf(sum / (float)d + eps);
}

/* x = x / rms(x) * w in place; weights in bf16 round the normalised value before and after the product */
static void norm_row(float *x, const void *w, long d, float eps, int bf16) {
    float scale = inverse_rms(x, d, eps);
    if (bf16) {
        const uint16_t *wh = w;
        long i = 0;
        for (vf lo, hi; i + 2 * VL <= d; i += 2 * VL) {
            vload_bf16(&lo, &hi, wh + i);
            vstore(x + i, vround_bf16(vround_bf16(vload(x + i) * scale) * lo));
            vstore(x + i + VL, vround_bf16(vround_bf16(vload(x + i + VL) * scale) * hi));
        }
        for (; i < d; i++) x[i] = round_bf16(round_bf16(x[i] * scale) * from_bf16(wh[i]));
    } else {
        const float *wf = w;
        for (long i = 0; i < d; i++) x[i] = x[i] * scale * wf[i];
    }
}

/* x += residual, and residual = x */
static void add_residual(float *x, void *residual, long at, long d, int bf16) {
    long i = 0;
    for (vf lo, hi; bf16 && i + 2 * VL <= d; i += 2 * VL) {
        vload_bf16(&lo, &hi, (const uint16_t *)residual + at + i);
        vstore(x + i, vround_bf16(vload(x + i) + lo));
        vstore(x + i + VL, vround_bf16(vload(x + i + VL) + hi));
    }
    for (; i < d; i++)
        x[i] = bf16 ? round_bf16(x[i] + from_bf16(((const uint16_t *)residual)[at + i]))
                    : x[i] + ((const float *)residual)[at + i];
    store_exact(residual, at, x, d, bf16);
}

struct norm_args {
    const void *x;
    void *residual;
    const void *w;
    void *out;
    long ldx, d;
    float eps;
    int bf16, w_bf16; /* types of the rows and of the weights */
    const struct linear_args *next; /* as in linear_args */
};

/* product that takes the result of the current call as its rows, or NULL; see ssd_repeat */
static _Thread_local const struct linear_args *following;

static void norm_rows(void *given, long begin, long end) {
    const struct norm_args *a = given;
    float *v = scratch(ROWS, (size_t)a->d);
    for (long row = begin; row < end; row++) {
        load_row(v, a->x, row * a->ldx, a->d, a->bf16);
        if (a->residual) add_residual(v, a->residual, row * a->d, a->d, a->bf16);
        norm_row(v, a->w, a->d, a->eps, a->w_bf16);
        if (a->w_bf16)
            store_exact(a->out, row * a->d, v, a->d, a->bf16);
        else
            store_row(a->out, row * a->d, v, a->d, a->bf16);
        if (a->next) columns_done(a->next, row, 1, 0, a->d);
    }
}

/* out[m, d] = norm(x) * w; with a residual[m, d]: residual += x, and its norm */
void ssd_rms_norm(const void *x, long ldx, void *residual, const void *w, void *out, long m, long d, float eps,
                  int bf16, int w_bf16, int nthreads) {
    struct norm_args a = {x, residual, w, out, ldx, d, eps, bf16, w_bf16, following};
    parallel(m, m * d < ALONE / 2 ? 1 : nthreads, norm_rows, &a);
}

/* ---------------------------------------------------------------- rope_and_store */
struct rope_args {
    const void *qkv;
    long ldqkv;
    const void *positions, *slots;
    int positions64, slots64;
    const float *cos, *sin;
    const void *q_weight, *k_weight;
    float eps;
    void *q_out, *k_cache, *v_cache;
    long heads, kv_heads, d;
    int bf16, kv;
    float k_scale, v_scale;
};

static void rotate(float *restrict out, const float *restrict x, const float *cos, const float *sin, long half) {
    for (long i = 0; i < half; i++) {
        out[i] = x[i] * cos[i] - x[i + half] * sin[i];
        out[i + half] = x[i + half] * cos[i] + x[i] * sin[i];
    }
}

/* n numbers of the model's type to a cache; to one in e4m3 divided by their scale */
static void store_kv(const struct rope_args *a, void *cache, long at, float *x, long n, float scale) {
    if (a->kv == E4M3)
        for (long i = 0; i < n; i++) x[i] = (a->bf16 ? round_bf16(x[i]) : x[i]) / scale;
    store_row(cache, at, x, n, a->kv);
}

static void rope_token(const struct rope_args *a, long t) {
    long d = a->d, half = d / 2;
    float *x = scratch(ROWS, (size_t)(2 * d)), *rotated = x + d;
    long position = int_at(a->positions, t, a->positions64), slot = int_at(a->slots, t, a->slots64);
    const float *cos = a->cos + position * half, *sin = a->sin + position * half;
    const long size = a->bf16 ? 2 : 4; /* other threads have written the row */
    fetch((const char *)a->qkv + t * a->ldqkv * size, (a->heads + 2 * a->kv_heads) * d * size);
    for (long h = 0; h < a->heads + a->kv_heads; h++) {
        int is_key = h >= a->heads;
        if (is_key && slot < 0) break;
        const void *weight = is_key ? a->k_weight : a->q_weight;
        load_row(x, a->qkv, t * a->ldqkv + h * d, d, a->bf16);
        if (weight) norm_row(x, weight, d, a->eps, a->bf16);
        rotate(rotated, x, cos, sin, half);
        if (is_key)
            store_kv(a, a->k_cache, (slot * a->kv_heads + h - a->heads) * d, rotated, d, a->k_scale);
        else
            store_row(a->q_out, (t * a->heads + h) * d, rotated, d, a->bf16);
    }
    if (slot < 0) return;
    for (long h = 0; h < a->kv_heads; h++) {
        load_row(x, a->qkv, t * a->ldqkv + (a->heads + a->kv_heads + h) * d, d, a->bf16);
        store_kv(a, a->v_cache, (slot * a->kv_heads + h) * d, x, d, a->v_scale);
    }
}

static void rope_tokens(void *given, long begin, long end) {
    for (long t = begin; t < end; t++) rope_token(given, t);
}

/* max_position: rows of cos and sin; cache_slots: those of a cache */
int ssd_rope_and_store(const void *qkv, long ldqkv, const void *positions, int positions64, const void *slots,
                       int slots64, const float *cos, const float *sin, const void *q_weight, const void *k_weight,
                       float eps, void *q_out, void *k_cache, void *v_cache, long tokens, long heads, long kv_heads,
                       long d, long max_position, long cache_slots, int bf16, int kv, float k_scale, float v_scale,
                       int nthreads) {
    for (long t = 0; t < tokens; t++)
        if (outside(int_at(positions, t, positions64), max_position) || int_at(slots, t, slots64) >= cache_slots) return 1;
    struct rope_args a = {qkv,     ldqkv,   positions, slots,    positions64, slots64, cos, sin,     q_weight, k_weight, eps,
                          q_out,   k_cache, v_cache,   heads,    kv_heads,    d,       bf16, kv,     k_scale,  v_scale};
    parallel(tokens, tokens * (heads + 2 * kv_heads) * d < 2 * ALONE ? 1 : nthreads, rope_tokens, &a);
    return 0;
}

/* ---------------------------------------------------------------- paged_attention
 * A task is a few consecutive rows of one sequence and one KV head: all its (row, head) queries share each chunk of CH
 * absolute positions.  Every chunk has a result of its own (a softmax over it).  Results are added up in the order of the
 * chunks: by the one thread that computes them, after each of them, or, where there are too few tasks for all threads, by
 * the last of several; the numbers are the same.  A row sees exactly its n visible positions of a chunk, padded up to a full
 * vector with score -inf and with its own first position's value, so its result has the same bits whatever the other rows
 * are.
 * With a window, chunks before it are skipped.
 * With `slots`, every row is the newest token of a branch: it sees the positions that its sequence's branches share, then `depth`
 * + 1 slots of its own, the last of them slots[row] (-1: padding, sees nothing), in chunks counted from the first. */
struct attention_args {
    const void *q;
    long ldq;
    const void *k_cache, *v_cache;
    void *out;
    const int32_t *query_start, *context_len, *block_tables, *table_rows;
    long table_stride, block_size, heads, kv_heads, d, dp; /* dp: d rounded up to full vectors */
    float scale, v_scale; /* of the scores, with that of the keys; of the result */
    const float *sinks;   /* of the heads: scores that have no value; NULL: none */
    int bf16, kv;
    const int32_t *positions, *slots; /* NULL: no branches */
    long depth;
    long first;                                 /* positions before it are not seen */
    long window;                                /* positions that a row sees, its own included; 0: all */
    long tokens, tables, columns, cache_blocks; /* sizes: of q, of the block tables, of a cache */
    long rows;                                  /* rows per task at most */
    long tasks;                                 /* of all KV heads */
    long lanes, part;   /* queries of a result, in whole vectors (of AMX: tiles), and its floats */
    long cuts, per;     /* parts that threads take of a task, and chunks of one */
    long most;          /* if there are several: chunks of the longest task */
    float *parts;       /* then: results of all chunks; else NULL */
    _Atomic int *ready; /* then: parts of each task that are computed */
    const struct linear_args *next; /* as in linear_args */
};

struct chunk {
    const char *k[CH + AP], *v[CH + AP]; /* rows: of the cache, or fp32 rows of dp in the copies */
    float *copy_k, *copy_v;
    int in_place, narrow; /* rows are those of the cache; they are bf16 */
    long bytes;           /* of a row of the cache */
};

/* result of a chunk, or of several: of each query the largest score, the sum of the weights, and the sum of the weighted
 * values [dp], which is not set if the query sees nothing: then the sum of its weights is 0 */
struct part {
    float *max, *sum, *acc;
};

struct softmax { /* of the queries of a task */
    float *q, *scores;
    struct part to;
};

/* Positions [from, n) of the chunk at `start`, which without a table is a slot.  The rows of a head are far apart: a
 * machine does not foresee the next one. */
static void load_chunk(const struct attention_args *a, struct chunk *c, const int32_t *table, long kv_head, long start,
                       long from, long n) {
    const long bytes = c->bytes;
    long block = (start + from) / a->block_size, in_block = (start + from) % a->block_size, offsets[CH];
    for (long i = from; i < n; i++) {
        long slot = (table ? table[block] : block) * a->block_size + in_block;
        offsets[i] = slot * a->kv_heads + kv_head;
        if (++in_block == a->block_size) in_block = 0, block++;
    }
    for (long i = from, ahead = from; i < n; i++) {
        c->k[i] = (const char *)a->k_cache + offsets[i] * bytes;
        c->v[i] = (const char *)a->v_cache + offsets[i] * bytes;
        if (c->in_place) {
            fetch(c->k[i], bytes);
            continue;
        }
        for (; ahead < min_l(n, i + KV_AHEAD); ahead++) {
            fetch((const char *)a->k_cache + offsets[ahead] * bytes, bytes);
            fetch((const char *)a->v_cache + offsets[ahead] * bytes, bytes);
        }
        load_row(c->copy_k + i * a->dp, a->k_cache, offsets[i] * a->d, a->d, a->kv);
        load_row(c->copy_v + i * a->dp, a->v_cache, offsets[i] * a->d, a->d, a->kv);
        c->k[i] = (const char *)(c->copy_k + i * a->dp);
        c->v[i] = (const char *)(c->copy_v + i * a->dp);
    }
}

/* two vectors of a row from element e on */
INLINE void load_pair(vf *lo, vf *hi, const char *row, long e, const int narrow) {
    if (narrow)
        vload_bf16(lo, hi, (const uint16_t *)row + e);
    else
        *lo = vload((const float *)row + e), *hi = vload((const float *)row + e + VL);
}

/* scores of nq queries against AP positions: lanes run over d, then are added in vsum's order */
INLINE void score_tile(const int nq, const int narrow, const float *q, long dp, const char *const *k, float *scores) {
    vf acc[AQ][AP], kv[AP], next[AP];
    UNROLL for (int i = 0; i < nq; i++) UNROLL for (int j = 0; j < AP; j++) acc[i][j] = vset(0.0f);
    const char *rows[AP] = {k[0], k[1], k[2], k[3]};
    long e = 0;
    for (; e + 2 * VL <= dp; e += 2 * VL) {
        UNROLL for (int j = 0; j < AP; j++) load_pair(&kv[j], &next[j], rows[j], e, narrow);
        UNROLL for (int i = 0; i < nq; i++) {
            vf qv = vload(q + i * dp + e), qn = vload(q + i * dp + e + VL);
            UNROLL for (int j = 0; j < AP; j++) acc[i][j] = vfma(vfma(acc[i][j], qv, kv[j]), qn, next[j]);
        }
    }
    if (e < dp) { /* of copies only */
        UNROLL for (int i = 0; i < nq; i++) UNROLL for (int j = 0; j < AP; j++)
            acc[i][j] = vfma(acc[i][j], vload(q + i * dp + e), vload((const float *)rows[j] + e));
    }
    UNROLL for (int i = 0; i < nq; i++) vsum_4(scores + i * CH, acc[i]);
}

#define VALUE_STEP(lane)                                                                               \
    {                                                                                                  \
        vf x[AV];                                                                                      \
        if (nv == 1)                                                                                   \
            x[0] = vload((const float *)v[t + (lane)] + e);                                            \
        else                                                                                           \
            UNROLL for (int j = 0; j < nv; j += 2) load_pair(&x[j], &x[j + 1], v[t + (lane)], e + j * VL, narrow); \
        UNROLL for (int i = 0; i < nq; i++)                                                            \
            UNROLL for (int j = 0; j < nv; j++) acc[i][j] = FMA_LANE(acc[i][j], x[j], pq[i], lane);     \
    }

/* acc = p @ v for nq queries and nv vectors of d: one FMA chain over the positions per element */
INLINE void value_tile(const int nq, const int nv, const int narrow, const struct softmax *s, long q0, long dp, long e,
                       const char *const *v, long n) {
    vf acc[AQ][AV];
    float *out = s->to.acc + q0 * dp + e;
    const float *p = s->scores + q0 * CH;
    UNROLL for (int i = 0; i < nq; i++) UNROLL for (int j = 0; j < nv; j++) acc[i][j] = vset(0.0f);
    for (long t = 0; t < n; t += 4) {
        quad pq[AQ];
        UNROLL for (int i = 0; i < nq; i++) pq[i] = quad_load(p + i * CH + t);
        VALUE_STEP(0) VALUE_STEP(1) VALUE_STEP(2) VALUE_STEP(3)
    }
    UNROLL for (int i = 0; i < nq; i++)
        UNROLL for (int j = 0; j < nv; j++) vstore(out + i * dp + j * VL, acc[i][j]);
}

/* scores -> weights of one query over n positions (padded to full vectors), their largest and their sum */
static void softmax_query(const struct softmax *s, long q, long n) {
    float *p = s->scores + q * CH;
    long padded = ceil_div(n, VL) * VL;
    if (n < padded) {
        vi lanes;
        UNROLL for (int i = 0; i < VL; i++) lanes[i] = i;
        vstore(p + padded - VL, vselect(lanes < (vi){0} + (int)(n - padded + VL), vload(p + padded - VL), vset(-INFINITY)));
    }
    vf best = vset(-INFINITY);
    for (long i = 0; i < padded; i += VL) best = vmax(vload(p + i), best);
    float top = vmax_lanes(best);
    vf total = vset(0.0f), shift = vset(top);
    for (long i = 0; i < padded; i += VL) {
        vf e = vexp(vload(p + i) - shift);
        total = total + e;
        vstore(p + i, e);
    }
    s->to.max[q] = top, s->to.sum[q] = vsum(total);
}

/* scores of all n positions; values, which are read next, are fetched if they are still in the cache of KV */
INLINE void score_queries(const int nq, const int narrow, const struct softmax *s, long q0, long dp, const struct chunk *c,
                          long at, long n) {
    for (long t = 0; t < n; t += AP) {
        for (long i = t; c->in_place && i < min_l(n, t + AP); i++) fetch(c->v[at + i], c->bytes);
        score_tile(nq, narrow, s->q + q0 * dp, dp, c->k + at + t, s->scores + q0 * CH + t);
    }
}

#define SCORES(nq)                                                                                             \
    static void scores_##nq(const struct softmax *s, long q0, long dp, const struct chunk *c, long at, long n) { \
        if (c->narrow)                                                                                         \
            score_queries(nq, 1, s, q0, dp, c, at, n);                                                         \
        else                                                                                                   \
            score_queries(nq, 0, s, q0, dp, c, at, n);                                                         \
    }
#define VALUES(nq)                                                                                                      \
    static void values_##nq(const struct softmax *s, long q0, long dp, const struct chunk *c, long at, long e, long n) { \
        if (e + AV * VL > dp)                                                                                            \
            value_tile(nq, 1, 0, s, q0, dp, e, c->v + at, n);                                                            \
        else if (c->narrow)                                                                                              \
            value_tile(nq, AV, 1, s, q0, dp, e, c->v + at, n);                                                           \
        else                                                                                                             \
            value_tile(nq, AV, 0, s, q0, dp, e, c->v + at, n);                                                           \
    }
SCORES(1) SCORES(2) VALUES(1) VALUES(2)
typedef void scores_fn(const struct softmax *s, long q0, long dp, const struct chunk *c, long at, long n);
typedef void values_fn(const struct softmax *s, long q0, long dp, const struct chunk *c, long at, long e, long n);
#if AQ == 4
SCORES(3) SCORES(4) VALUES(3) VALUES(4)
static scores_fn *const SCORES_OF[] = {0, scores_1, scores_2, scores_3, scores_4};
static values_fn *const VALUES_OF[] = {0, values_1, values_2, values_3, values_4};
#else
static scores_fn *const SCORES_OF[] = {0, scores_1, scores_2};
static values_fn *const VALUES_OF[] = {0, values_1, values_2};
#endif

/* Queries [q0, q1) against n positions of a chunk, from its position `at` on.  All of them read a few columns of the values,
 * which stay in the L1 cache. */
static void attend_chunk(const struct softmax *s, long q0, long q1, long dp, struct chunk *c, long at, long n) {
    const char *kept[2][AP]; /* of the positions behind the last one: those of the first are read in their place */
    for (long i = 0; i < AP - 1; i++) {
        kept[0][i] = c->k[at + n + i], kept[1][i] = c->v[at + n + i];
        c->k[at + n + i] = c->k[at], c->v[at + n + i] = c->v[at];
    }
    for (long q = q0; q < q1; q += AQ) SCORES_OF[min_l(AQ, q1 - q)](s, q, dp, c, at, n);
    for (long q = q0; q < q1; q++) softmax_query(s, q, n);
    for (long e = 0; e < dp; e += e + AV * VL > dp ? VL : AV * VL)
        for (long q = q0; q < q1; q += AQ) VALUES_OF[min_l(AQ, q1 - q)](s, q, dp, c, at, e, n);
    for (long i = 0; i < AP - 1; i++) c->k[at + n + i] = kept[0][i], c->v[at + n + i] = kept[1][i];
}

/* how many positions of its sequence a row sees */
static long shared_positions(const struct attention_args *a, long seq, long row) {
    if (!a->slots) return a->context_len[seq] - (a->query_start[seq + 1] - row) + 1;
    return a->slots[row] < 0 ? 0 : a->positions[row] - a->depth;
}

/* the first position that a row sees; LONG_MAX for padding */
static long first_seen(const struct attention_args *a, long seq, long row) {
    if (!a->window) return a->first;
    if (a->slots && a->slots[row] < 0) return LONG_MAX;
    long next = a->slots ? a->positions[row] + 1 : shared_positions(a, seq, row);
    return max_l(a->first, next - a->window);
}

/* how many slots of its branch a row sees */
static long own_slots(const struct attention_args *a, long row) {
    if (!a->slots || a->slots[row] < 0) return 0;
    return a->window ? min_l(a->depth + 1, a->window) : a->depth + 1;
}

/* Rows [row, row + rows) of sequence seq, query heads of kv_head. */
struct task {
    const struct attention_args *a;
    long seq, row, rows, kv_head, group, queries;
    long begin, end;    /* positions of its sequence that any row sees */
    long first, shared; /* where the first chunk begins, and the chunks of its sequence; then come those of the branches */
    long own, chunks;   /* slots of a branch at most; chunks in all */
    long place;         /* AMX: how far the slots of two rows are apart in a chunk */
    float *parts;       /* results of its chunks; if threads do not share it: of all, and of the last one */
};

static struct part part_at(const struct task *t, long number) {
    float *memory = t->parts + number * t->a->part;
    return (struct part){memory, memory + t->a->lanes, memory + 2 * t->a->lanes};
}

/* the result of the number-th chunk, in which no query has seen anything yet */
static struct part begin_part(const struct task *t, long number) {
    struct part to = part_at(t, t->a->parts ? number : number > 0);
    for (long q = 0; q < t->a->lanes; q += VL) vstore(to.max + q, vset(-INFINITY)), vstore(to.sum + q, vset(0.0f));
    return to;
}

/* adds the number-th of a task's results to the first one */
static void add_part(const struct task *t, long number) {
    const struct part to = part_at(t, 0), from = part_at(t, number);
    const long dp = t->a->dp;
    for (long first = 0; first < t->queries; first += VL) {
        float alpha[VL], beta[VL];
        vf before = vload(to.max + first), own = vload(from.max + first), top = vmax(own, before);
        vf shift = vselect(top == vset(-INFINITY), vset(0.0f), top), old = vexp(before - shift), new = vexp(own - shift);
        vf sum = vload(to.sum + first), sum_here = vload(from.sum + first);
        vstore(alpha, old), vstore(beta, new);
        for (long q = first; q < min_l(t->queries, first + VL); q++) {
            float *acc = to.acc + q * dp;
            const float *here = from.acc + q * dp;
            if (from.sum[q] == 0.0f) continue;
            if (to.sum[q] == 0.0f)
                memcpy(acc, here, (size_t)dp * 4);
            else
                for (long e = 0; e < dp; e += VL)
                    vstore(acc + e, vfma(vload(here + e) * beta[q - first], vload(acc + e), vset(alpha[q - first])));
        }
        vstore(to.max + first, top), vstore(to.sum + first, sum * old + sum_here * new);
    }
}

static void load_queries(const struct task *t, float *q) {
    const struct attention_args *a = t->a;
    if (a->dp != a->d) memset(q, 0, (size_t)(t->queries * a->dp) * 4);
    for (long i = 0; i < t->queries; i++, q += a->dp) {
        load_row(q, a->q, (t->row + i / t->group) * a->ldq + (t->kv_head * t->group + i % t->group) * a->d, a->d, a->bf16);
        for (long e = 0; e < a->d; e++) q[e] *= a->scale;
    }
}

static size_t vector_floats(const struct attention_args *a) {
    return (size_t)(a->lanes * (a->dp + CH) + 2 * CH * a->dp);
}

/* chunks [from, to) of a task; `memory` holds vector_floats() */
static void vector_chunks(const struct task *t, long from, long to, float *memory) {
    const struct attention_args *a = t->a;
    const long group = t->group, dp = a->dp;
    struct softmax s = {.q = memory, .scores = memory + a->lanes * dp};
    struct chunk c = {.bytes = a->d * (a->kv == FP32 ? 4 : a->kv == BF16 ? 2 : 1)};
    c.in_place = t->queries <= AQ && a->kv != E4M3 && a->d % (AV * VL) == 0; /* else keys and values are widened once */
    c.narrow = c.in_place && a->kv == BF16;
    c.copy_k = s.scores + a->lanes * CH, c.copy_v = c.copy_k + CH * dp;
    if (dp != a->d) memset(c.copy_k, 0, (size_t)(2 * CH * dp) * 4);
    load_queries(t, s.q);
    for (long number = from; number < to; number++) {
        long start = t->first + number * CH, after = (number - t->shared) * CH;
        s.to = begin_part(t, number);
        if (number < t->shared) {
            const int32_t *table = a->block_tables + a->table_rows[t->seq] * a->table_stride;
            load_chunk(a, &c, table, t->kv_head, start, max_l(0, t->begin - start), min_l(CH, t->end - start));
        }
        for (long r = 0, next; r < t->rows; r = next) { /* neighbours that see the same of the chunk go together */
            long row = t->row + r, own = own_slots(a, row);
            long begin = max_l(0, first_seen(a, t->seq, row) - start);
            long stop = min_l(CH, shared_positions(a, t->seq, row) - start);
            next = r + 1;
            if (number >= t->shared) {
                begin = 0, stop = min_l(CH, own - after);
                if (stop > 0) load_chunk(a, &c, NULL, t->kv_head, a->slots[row] - own + 1 + after, 0, stop);
            }
            for (; number < t->shared && next < t->rows; next++)
                if (max_l(0, first_seen(a, t->seq, t->row + next) - start) != begin ||
                    min_l(CH, shared_positions(a, t->seq, t->row + next) - start) != stop)
                    break;
            if (stop > begin) attend_chunk(&s, r * group, next * group, dp, &c, begin, stop - begin);
        }
        if (!a->parts && number) add_part(t, 1);
    }
}

#ifdef AMX
/* ---------------------------------------------------------------- paged_attention: AMX
 * The same over bf16 keys and values, all queries of a task in one tile.  Scores are sums of products of bf16 numbers, which
 * are multiplied by the scale; weights of values are rounded to bf16 before they are added up.  What a query does not see has
 * the weight 0: that changes none of its sums while values are finite, but may change the sign of one that is 0.  These bits
 * differ from those of the vectors above, so what decides between both is the same for all rows of a model. */
INLINE int amx_attends(const struct attention_args *a) {
    return a->bf16 && a->kv == BF16 && a->d % 32 == 0 && a->heads / a->kv_heads <= AMX_ROWS;
}

#define FEW_QUERIES 4

struct amx {
    const struct task *t;
    uint32_t *q;         /* [d / 2][16]: pairs of numbers of each query */
    uint32_t *v;         /* [d / 32][CH / 2][2][16]: pairs of positions, of even columns, then of odd ones */
    uint16_t *k, *zeros; /* [CH][d]: copies; [d] */
};

struct amx_chunk {
    long n;                             /* positions, a multiple of 32 */
    long at[CH];                        /* where they are in the caches; -1: nowhere */
    const uint16_t *k[CH / VL];         /* tiles of keys that are in the cache as they are; NULL: to be copied */
    int from[AMX_ROWS], stop[AMX_ROWS]; /* what each row sees of them */
};

/* the rows of a tile become its columns */
INLINE void transpose(vf *r) {
    vi lanes;
    UNROLL for (int i = 0; i < VL; i++) lanes[i] = i;
    UNROLL for (int w = 1; w < VL; w *= 2) {
        vi upper = (lanes & w) != 0, even = lanes + (upper & (VL - w)), odd = lanes + ((upper & VL) | (~upper & w));
        UNROLL for (int i = 0; i < VL; i++) {
            if (i & w) continue;
            vf a = r[i], b = r[i + w];
            r[i] = (vf)_mm512_permutex2var_ps((__m512)a, (__m512i)even, (__m512)b);
            r[i + w] = (vf)_mm512_permutex2var_ps((__m512)a, (__m512i)odd, (__m512)b);
        }
    }
}

INLINE const uint16_t *row_at(const struct amx *m, const void *cache, long at) {
    return at < 0 ? m->zeros : (const uint16_t *)cache + at * m->t->a->d;
}

INLINE void fetch_row(const uint16_t *row, long d) {
    for (long e = 0; e < d; e += 32) __builtin_prefetch(row + e, 0, 2); /* to the L2 cache */
}

/* The number-th chunk of a task.  First those of its sequence, then the rows' own slots: of several rows beside each other, in
 * places of which a vector or a product of tiles has a whole number, or which have one of these. */
static void find_chunk(const struct amx *m, long number, struct amx_chunk *c) {
    const struct task *t = m->t;
    const struct attention_args *a = t->a;
    for (long i = 0; i < CH; i++) c->at[i] = -1;
    memset(c->k, 0, sizeof c->k);
    if (number < t->shared) {
        const int32_t *table = a->block_tables + a->table_rows[t->seq] * a->table_stride;
        const int in_place = a->first % VL == 0 && a->block_size % VL == 0;
        long start = t->first + number * CH, from = max_l(0, t->begin - start), n = min_l(CH, t->end - start);
        long block = (start + from) / a->block_size, in_block = (start + from) % a->block_size;
        for (long i = from; i < n; i++) {
            c->at[i] = (table[block] * a->block_size + in_block) * a->kv_heads + t->kv_head;
            if (in_place) c->k[i / VL] = row_at(m, a->k_cache, c->at[i] - i % VL * a->kv_heads);
            if (++in_block == a->block_size) in_block = 0, block++;
        }
        for (long r = 0; r < t->rows; r++) {
            c->from[r] = (int)min_l(CH, first_seen(a, t->seq, t->row + r) - start);
            c->stop[r] = (int)(shared_positions(a, t->seq, t->row + r) - start);
        }
        c->n = ceil_div(n, 32) * 32;
        return;
    }
    long parts = ceil_div(t->own, CH), part = number - t->shared, beside = CH / t->place;
    long begin = part / parts * beside, end = min_l(t->rows, begin + beside), start = part % parts * CH;
    for (long r = 0; r < t->rows; r++) c->from[r] = c->stop[r] = 0;
    for (long r = begin; r < end; r++) {
        long n = min_l(CH, own_slots(a, t->row + r) - start), slot = a->slots[t->row + r] - t->own + 1 + start;
        c->from[r] = (int)((r - begin) * t->place), c->stop[r] = c->from[r] + (int)n;
        for (long i = 0; i < n; i++) c->at[c->from[r] + i] = (slot + i) * a->kv_heads + t->kv_head;
    }
    c->n = ceil_div((end - begin) * t->place, 32) * 32;
}

/* Keys that are not in place are copied, values go to m->v.  What the next chunk needs is fetched to the L2 cache, line by
 * line beside those that are read: the rows of a head are far apart, a machine does not foresee the next one. */
static void load_tiles(const struct amx *m, const struct amx_chunk *c, const struct amx_chunk *next) {
    const struct attention_args *a = m->t->a;
    const void *keys = a->k_cache, *values = a->v_cache;
    for (long i = 0; i < c->n; i++)
        if (!c->k[i / VL]) memcpy(m->k + i * a->d, row_at(m, keys, c->at[i]), (size_t)a->d * 2);
    for (long i = 0; i < c->n; i += 2) {
        const uint16_t *rows[] = {row_at(m, values, c->at[i]), row_at(m, values, c->at[i + 1])};
        const uint16_t *later[] = {row_at(m, keys, next->at[i]), row_at(m, keys, next->at[i + 1]),
                                   row_at(m, values, next->at[i]), row_at(m, values, next->at[i + 1])};
        uint32_t *out = m->v + i * VL;
        for (long e = 0; e < a->d; e += 32, out += CH * VL) {
            vu low = *(const vu_mem *)(rows[0] + e), high = *(const vu_mem *)(rows[1] + e);
            *(vu_mem *)out = (low & 0xffffu) | high << 16;
            *(vu_mem *)(out + VL) = low >> 16 | (high & 0xffff0000u);
            UNROLL for (int j = 0; j < 4; j++) __builtin_prefetch(later[j] + e, 0, 2);
        }
    }
    COMPILER_BARRIER(); /* the intrinsics do not say what they read */
}

/* scores[position][query] of a chunk: sums over d in its order */
static void amx_scores(const struct amx *m, const struct amx_chunk *c, float *scores) {
    const long d = m->t->a->d, in_cache = m->t->a->kv_heads * d * 2;
    for (long at = 0; at < c->n; at += 2 * VL) {
        const uint16_t *left = c->k[at / VL], *right = c->k[at / VL + 1];
        const long step = left ? in_cache : d * 2, other = right ? in_cache : d * 2;
        if (!left) left = m->k + at * d;
        if (!right) right = m->k + (at + VL) * d;
        _tile_zero(0);
        _tile_zero(1);
        for (long e = 0; e < d; e += 32) {
            _tile_loadd(4, m->q + e / 2 * VL, 64);
            _tile_loadd(2, left + e, step);
            _tile_dpbf16ps(0, 2, 4);
            _tile_loadd(3, right + e, other);
            _tile_dpbf16ps(1, 3, 4);
        }
        _tile_stored(0, scores + at * VL, 64);
        _tile_stored(1, scores + (at + VL) * VL, 64);
    }
    COMPILER_BARRIER();
}

/* Scores to weights[query][position], and to the largest and the sum in `to`.  few: there are at most 4 queries, whose scores
 * are gathered, and whose lanes are added and compared one query after the other, to the same numbers; otherwise all that is
 * transposed. */
INLINE void amx_softmax(const struct task *t, const struct amx_chunk *c, const float *scores, uint16_t *weights,
                        const struct part *to, const int few) {
    float of_query[AMX_ROWS][CH] __attribute__((aligned(64))), shifts[VL], found[VL] = {0};
    vf r[VL], none = vset(-INFINITY), top = none;
    vi lanes;
    UNROLL for (int i = 0; i < VL; i++) lanes[i] = i, r[i] = none;
    for (long at = 0; !few && at < c->n; at += VL) {
        vf tile[VL];
        UNROLL for (int i = 0; i < VL; i++) tile[i] = vload(scores + (at + i) * VL);
        transpose(tile);
        UNROLL for (int i = 0; i < VL; i++) vstore(of_query[i] + at, tile[i]);
    }
    for (long q = 0; q < t->queries; q++) {
        int row = (int)q / (int)t->group;
        for (long at = 0; at < c->n; at += VL) {
            vi position = lanes + (int)at, seen = (position >= c->from[row]) & (position < c->stop[row]);
            vf own = few ? (vf)_mm512_i32gather_ps((__m512i)(lanes * VL), scores + at * VL + q, 4) : vload(of_query[q] + at);
            own = vselect(seen, own * t->a->scale, none);
            vstore(of_query[q] + at, own);
            r[q] = vmax(own, r[q]);
        }
    }
    if (few) {
        for (long q = 0; q < VL; q++) found[q] = q < t->queries ? vmax_lanes(r[q]) : -INFINITY;
        top = vload(found);
    } else {
        transpose(r);
        UNROLL for (int i = 0; i < VL; i++) top = vmax(r[i], top);
    }
    vstore(shifts, vselect(top == none, vset(0.0f), top));
    UNROLL for (int i = 0; i < VL; i++) r[i] = vset(0.0f);
    for (long q = 0; q < t->queries; q++)
        for (long at = 0; at < c->n; at += VL) {
            vf weight = vround_bf16(vexp(vload(of_query[q] + at) - shifts[q]));
            *(vs_mem *)(weights + q * CH + at) = __builtin_convertvector((vu)weight >> 16, vs_mem);
            r[q] = r[q] + weight;
        }
    if (few) {
        vsum_4(found, r);
        for (long q = FEW_QUERIES; q < VL; q++) found[q] = 0.0f;
    } else {
        transpose(r);
        UNROLL for (int w = VL / 2; w > 0; w /= 2)
            UNROLL for (int i = 0; i < w; i++) r[i] = r[i] + r[i + w];
        vstore(found, r[0]);
    }
    vstore(to->max, top), vstore(to->sum, vload(found));
    COMPILER_BARRIER();
}

/* acc [query][d] = weights @ values of a chunk; of each 32 columns first the even ones */
static void amx_values(const struct amx *m, const struct amx_chunk *c, const uint16_t *weights, float *acc) {
    const uint32_t *v = m->v;
    for (long e = 0, d = m->t->a->d; e < d; e += 32, v += CH * VL) {
        _tile_zero(5);
        _tile_zero(6);
        for (long at = 0; at < c->n; at += 32) {
            _tile_loadd(7, weights + at, CH * 2);
            _tile_loadd(2, v + at * VL, 128);
            _tile_dpbf16ps(5, 7, 2);
            _tile_loadd(3, v + at * VL + VL, 128);
            _tile_dpbf16ps(6, 7, 3);
        }
        _tile_stored(5, acc + e, d * 4);
        _tile_stored(6, acc + e + VL, d * 4);
    }
    COMPILER_BARRIER();
}

static size_t amx_floats(const struct attention_args *a) { return (size_t)(a->d * (VL / 2 + CH + 1)); }

/* chunks [from, to) of a task; `memory` holds amx_floats() */
static void amx_chunks(const struct task *t, long from, long to, float *memory) {
    const struct attention_args *a = t->a;
    float scores[CH * VL] __attribute__((aligned(64)));
    uint16_t weights[AMX_ROWS * CH] __attribute__((aligned(64)));
    struct amx m = {.t = t, .q = (uint32_t *)memory};
    struct amx_chunk chunks[2], *c = chunks, *next = chunks + 1, *last;
    m.v = m.q + a->d * VL / 2, m.k = (uint16_t *)(m.v + a->d * CH / 2), m.zeros = m.k + a->d * CH;
    memset(m.zeros, 0, (size_t)a->d * 2);
    find_chunk(&m, from, c);
    for (long i = 0; i < 2 * CH; i++) fetch_row(row_at(&m, i < CH ? a->k_cache : a->v_cache, c->at[i % CH]), a->d);
    for (long e = 0; e < a->d; e += 32) {
        vf r[VL];
        for (long i = 0; i < VL; i++) {
            long q = i < t->queries ? i : 0, head = t->kv_head * t->group + q % t->group;
            r[i] = vload((const void *)((const uint16_t *)a->q + (t->row + q / t->group) * a->ldq + head * a->d + e));
        }
        transpose(r);
        UNROLL for (int i = 0; i < VL; i++) vstore((float *)m.q + (e / 2 + i) * VL, r[i]);
    }
    amx_configure(16, t->queries, t->queries, 64, t->queries);
    for (long number = from; number < to; number++, last = c, c = next, next = last) {
        const struct part own = begin_part(t, number);
        if (number + 1 < to)
            find_chunk(&m, number + 1, next);
        else
            *next = *c;
        load_tiles(&m, c, next);
        amx_scores(&m, c, scores);
        if (t->queries <= FEW_QUERIES)
            amx_softmax(t, c, scores, weights, &own, 1);
        else
            amx_softmax(t, c, scores, weights, &own, 0);
        amx_values(&m, c, weights, own.acc);
        if (!a->parts && number) add_part(t, 1);
    }
    _tile_release();
}
#endif

/* the number-th task: of a few rows of a sequence and a KV head */
static struct task find_task(const struct attention_args *a, long number) {
    struct task t = {.a = a, .kv_head = number % a->kv_heads, .group = a->heads / a->kv_heads, .begin = LONG_MAX, .place = 2};
    number /= a->kv_heads;
    for (long begin, count, tasks;; t.seq++, number -= tasks) {
        begin = a->query_start[t.seq], count = a->query_start[t.seq + 1] - begin, tasks = ceil_div(count, a->rows);
        if (number >= tasks) continue;
        t.row = begin + number * a->rows, t.rows = min_l(a->rows, count - number * a->rows);
        break;
    }
    t.queries = t.rows * t.group;
    for (long r = t.row; r < t.row + t.rows; r++) {
        t.begin = min_l(t.begin, first_seen(a, t.seq, r)), t.end = max_l(t.end, shared_positions(a, t.seq, r));
        t.own = max_l(t.own, own_slots(a, r));
    }
    t.first = t.begin - (t.begin - a->first) % CH;
    t.shared = t.first < t.end ? ceil_div(t.end - t.first, CH) : 0;
    t.chunks = t.shared + ceil_div(t.own, CH);
#ifdef AMX
    while (t.place < min_l(t.own, CH)) t.place *= 2;
    if (amx_attends(a)) t.chunks = t.shared + ceil_div(t.own, CH) * ceil_div(t.rows, CH / t.place);
#endif
    return t;
}

static size_t working_floats(const struct attention_args *a) {
#ifdef AMX
    if (amx_attends(a)) return amx_floats(a);
#endif
    return vector_floats(a);
}

static void compute_chunks(const struct task *t, long from, long to, float *memory) {
    if (from >= to) return;
#ifdef AMX
    if (amx_attends(t->a)) {
        amx_chunks(t, from, to, memory);
        return;
    }
#endif
    vector_chunks(t, from, to, memory);
}

static void store_attention(const struct task *t) {
    const struct attention_args *a = t->a;
    const struct part sums = part_at(t, 0);
    if (!t->chunks) begin_part(t, 0);
    for (long number = 1; a->parts && number < t->chunks; number++) add_part(t, number);
    for (long q = 0; q < t->queries; q++) {
        long head = t->kv_head * t->group + q % t->group, at = ((t->row + q / t->group) * a->heads + head) * a->d;
        float *acc = sums.acc + q * a->dp, sum = sums.sum[q];
        if (sum == 0.0f) { /* padding */
            memset((char *)a->out + at * (a->bf16 ? 2 : 4), 0, (size_t)a->d * (a->bf16 ? 2 : 4));
            continue;
        }
        if (a->sinks) sum += vexp(vset(a->sinks[head] - sums.max[q]))[0];
        for (long e = 0; e < a->d; e++) acc[e] = acc[e] / sum * a->v_scale + 0.0f; /* for the sign of zeros */
#ifdef AMX
        for (long e = 0; amx_attends(a) && e < a->d; e += 32)
            *(vu_mem *)((uint16_t *)a->out + at + e) =
                (vu)vround_bf16(vload(acc + e)) >> 16 | (vu)vround_bf16(vload(acc + e + VL));
        if (amx_attends(a)) continue;
#endif
        store_row(a->out, at, acc, a->d, a->bf16);
    }
    if (a->next) columns_done(a->next, t->row, t->rows, t->kv_head * t->group * a->d, t->group * a->d);
}

/* Parts of tasks, those with the longest rows first.  A task's last part to be computed is followed by the sum of all. */
static void attention_parts(void *given, long begin, long end) {
    const struct attention_args *a = given;
    float *memory = scratch(ROWS, (size_t)(2 * a->part) + working_floats(a));
    for (long i = begin; i < end; i++) {
        long number = i / a->cuts, from = i % a->cuts * a->per;
        struct task t = find_task(a, a->tasks - 1 - number);
        t.parts = a->parts ? a->parts + number * a->most * a->part : memory;
        compute_chunks(&t, from, min_l(t.chunks, from + a->per), memory + 2 * a->part);
        if (a->cuts == 1 || atomic_fetch_add(&a->ready[number], 1) + 1 == a->cuts) store_attention(&t);
    }
}

/* whether all that the queries of a sequence see is in the caches */
static int attention_fits(const struct attention_args *a, long seq) {
    long begin = a->query_start[seq], stop = a->query_start[seq + 1], first = LONG_MAX, end = 0;
    if (begin < 0 || begin > stop || stop > a->tokens) return 0;
    for (long row = begin; row < stop; row++) {
        first = min_l(first, first_seen(a, seq, row));
        end = max_l(end, shared_positions(a, seq, row));
        if (own_slots(a, row) && (a->slots[row] < a->depth || a->slots[row] >= a->cache_blocks * a->block_size)) return 0;
    }
    if (end <= first) return 1;
    if (outside(a->table_rows[seq], a->tables) || ceil_div(end, a->block_size) > a->columns) return 0;
    const int32_t *table = a->block_tables + a->table_rows[seq] * a->table_stride;
    for (long block = first / a->block_size; block < ceil_div(end, a->block_size); block++)
        if (outside(table[block], a->cache_blocks)) return 0;
    return 1;
}

int ssd_paged_attention(const void *q, long ldq, const void *k_cache, const void *v_cache, void *out,
                        const int32_t *query_start, const int32_t *context_len, const int32_t *block_tables,
                        const int32_t *table_rows, long tokens, long sequences, long tables, long columns,
                        long table_stride, long cache_blocks, long block_size, long heads, long kv_heads, long d,
                        float scale, float v_scale, const float *sinks, const int32_t *positions, const int32_t *slots,
                        long depth, long first, long window, int bf16, int kv, int nthreads) {
    struct attention_args a = {q, ldq, k_cache, v_cache, out, query_start, context_len, block_tables, table_rows,
                               table_stride, block_size, heads, kv_heads, d, ceil_div(d, VL) * VL, scale,
                               v_scale, sinks, bf16, kv, positions, slots, depth, first, window, tokens, tables, columns,
                               cache_blocks, .per = LONG_MAX, .cuts = 1, .next = following};
    long longest = 0, work = 0, queries = QUERIES, whole = VL;
    for (long s = 0; s < sequences; s++) {
        if (!attention_fits(&a, s)) return 1;
        longest = max_l(longest, query_start[s + 1] - query_start[s]);
    }
#ifdef AMX
    if (amx_attends(&a)) queries = whole = AMX_ROWS;
#endif
    a.rows = max_l(1, min_l(longest, queries * kv_heads / heads));
    a.rows = max_l(1, ceil_div(longest, ceil_div(longest, a.rows))); /* equal tasks */
    for (long s = 0; s < sequences; s++) {
        a.tasks += ceil_div(query_start[s + 1] - query_start[s], a.rows) * kv_heads;
        for (long row = query_start[s]; row < query_start[s + 1]; row++)
            work += max_l(0, shared_positions(&a, s, row) - first_seen(&a, s, row)) + own_slots(&a, row);
    }
    a.lanes = ceil_div(a.rows * (heads / kv_heads), whole) * whole;
    a.part = a.lanes * (2 + a.dp);
    if (work * heads * d < 32768) nthreads = 1;
    if (a.tasks < MANY_TASKS * nthreads)
        for (long i = 0; i < a.tasks; i += kv_heads) a.most = max_l(a.most, find_task(&a, i).chunks);
    for (long cuts = 2, least = ceil_div(a.tasks, nthreads) * (2 * a.most + 1); cuts <= min_l(a.most, 2 * nthreads); cuts++) {
        long per = ceil_div(a.most, cuts), time = ceil_div(a.tasks * cuts, nthreads) * (2 * per + 1); /* in halves of a chunk */
        if (time >= least) continue;
        a.per = per, a.cuts = cuts, least = time;
    }
    size_t floats = (size_t)(a.tasks * a.most * a.part);
    if (a.cuts > 1 && floats <= PARTS_MOST) {
        a.parts = scratch(SUMS, floats + (size_t)a.tasks);
        a.ready = (_Atomic int *)(a.parts + floats);
        memset(a.parts + floats, 0, (size_t)a.tasks * 4);
    } else {
        a.per = LONG_MAX, a.cuts = 1;
    }
    parallel(a.tasks * a.cuts, nthreads, attention_parts, &a);
    return 0;
}

/* ---------------------------------------------------------------- gumbel
 * out[row][token] = -log(-log(u)) with u = (bits + 1/2) / 2^32, where bits are the upper half of the finaliser of
 * keys[row] + token * golden (see sampling/noise.py).  In double and rounded once; with plain + - * / in one order, so
 * that an element's bits are the same on every machine too. */
#define DL (VL / 2)         /* doubles of a vector */
#define DV 4                /* vectors computed together: a logarithm is one long chain of operations */
#define NOISE_CHUNK 2048    /* tokens of a task */
#define NOISE_ALONE 32768   /* elements below which one thread computes them all (0.3 ms on Neoverse N1) */

typedef double vd __attribute__((vector_size(VL * 4)));
typedef uint64_t vq __attribute__((vector_size(VL * 4)));
typedef float vh __attribute__((vector_size(VL * 2)));
typedef float vh_mem __attribute__((vector_size(VL * 2), aligned(4), may_alias));

struct generator {
    uint64_t golden, mix1, mix2;
};

/* 1 + u of the tokens from one whose counter (key + token * golden) is `first` */
INLINE vd noise_uniform(uint64_t first, const struct generator *g) {
    const uint64_t one = 0x3ff0000000080000u; /* the bits of 1 + 2^-33 */
    vq x;
#ifdef NEON /* it multiplies no 64-bit lanes, and the integer unit has nothing else to do */
    UNROLL for (int j = 0; j < DL; j++) {
        uint64_t y = first + (uint64_t)j * g->golden;
        y = (y ^ (y >> 30)) * g->mix1;
        y = (y ^ (y >> 27)) * g->mix2;
        x[j] = (y ^ (y >> 31)) >> 32 << 20;
    }
#else
    UNROLL for (int j = 0; j < DL; j++) x[j] = (uint64_t)j * g->golden;
    x = x + first;
    x = (x ^ (x >> 30)) * g->mix1;
    x = (x ^ (x >> 27)) * g->mix2;
    x = (x ^ (x >> 31)) >> 32 << 20;
#endif
    return (vd)(x | one);
}

/* -log(x) of a normal x > 0, to a few 1e-16 of itself: n ln2 - 2 atanh((m - 1) / (m + 1)) with x = m / 2^n and m in
 * [sqrt(1/2), sqrt(2)).  Next to x = 1 that is n = 0 and an exact m - 1: small results are as precise as others. */
INLINE vd minus_log(vd x) {
    const uint64_t lowest = 0x3fe6a09e667f3bcdu; /* the bits of sqrt(1/2) */
    vq shifted = (vq)x + (0x3ff0000000000000u - lowest);
    vd n = 0x1p52 + 1023.0 - (vd)((shifted >> 52) | 0x4330000000000000u); /* an integer in the low bits of 2^52 */
    vd m = (vd)((shifted & 0xfffffffffffffu) + lowest);
    vd s = (1.0 - m) / (1.0 + m), z = s * s, w = z * z;
    vd low = 0x1.555555555397ap-1 + z * 0x1.999999a28e93bp-2; /* minimax, relative error 1.9e-16 */
    vd middle = 0x1.2492417a99a86p-2 + z * 0x1.c72276983656cp-3;
    vd high = 0x1.732c52108ab9ep-3 + z * 0x1.587592e5c586fp-3;
    return n * 0x1.62e42fefa39efp-1 + s * (2.0 + z * (low + w * (middle + w * high)));
}

/* a group of tokens of which `next` has 1 + u; leaves that of the next group there, whose counters begin at `first`:
 * its integers are computed beside these logarithms */
INLINE void gumbel_group(float *out, vd *next, uint64_t first, const struct generator *g) {
    vd x[DV];
    UNROLL for (int i = 0; i < DV; i++) x[i] = next[i] - 1.0;
    UNROLL for (int i = 0; i < DV; i++) next[i] = noise_uniform(first + (uint64_t)(i * DL) * g->golden, g);
    UNROLL for (int i = 0; i < DV; i++) x[i] = minus_log(x[i]);
    UNROLL for (int i = 0; i < DV; i++) *(vh_mem *)(out + i * DL) = __builtin_convertvector(minus_log(x[i]), vh);
}

/* n tokens from the one whose counter is `first` */
static void gumbel_span(float *out, uint64_t first, long n, const struct generator *g) {
    const long group = DV * DL;
    vd next[DV];
    UNROLL for (int i = 0; i < DV; i++) next[i] = noise_uniform(first + (uint64_t)(i * DL) * g->golden, g);
    long t = 0;
    for (; t + group <= n; t += group) gumbel_group(out + t, next, first += (uint64_t)group * g->golden, g);
    if (t == n) return;
    float tail[DV * DL];
    gumbel_group(tail, next, first, g);
    memcpy(out + t, tail, (size_t)(n - t) * 4);
}

struct gumbel_args {
    const int64_t *keys;
    float *out;
    long vocab, chunks; /* of a row */
    struct generator g;
};

static void gumbel_chunks(void *given, long begin, long end) {
    const struct gumbel_args *a = given;
    for (long i = begin; i < end; i++) {
        long row = i / a->chunks, t = i % a->chunks * NOISE_CHUNK;
        uint64_t key = (uint64_t)a->keys[row] + (uint64_t)t * a->g.golden;
        gumbel_span(a->out + row * a->vocab + t, key, min_l(NOISE_CHUNK, a->vocab - t), &a->g);
    }
}

void ssd_gumbel(const int64_t *keys, float *out, long rows, long vocab, int64_t golden, int64_t mix1, int64_t mix2,
                int nthreads) {
    struct gumbel_args a = {keys, out, vocab, ceil_div(vocab, NOISE_CHUNK),
                            {(uint64_t)golden, (uint64_t)mix1, (uint64_t)mix2}};
    parallel(rows * a.chunks, rows * vocab < NOISE_ALONE ? 1 : nthreads, gumbel_chunks, &a);
}

/* ---------------------------------------------------------------- best
 * The `count` largest scores of each row, in order, the lower token first where they are equal; `excluded` (or NULL): a
 * token of each row that does not count, -1: none.  -inf comes with token 0, and the first token is -1 if the row has no
 * choice: all are -inf, or some are NaN or +inf.
 * With `slots` (-1: padding), rows whose temperature is above 0 have the scores logit / temperature + noise: the seed's key
 * and the temperature are words 0 and 2 of the slot's `columns`, the position is that of the token to choose.  Noise grows
 * with its random bits, so logarithms are computed only in blocks that have bits which could reach the best so far. */
#define SCAN 256       /* scores of a block */
#define BEST_PART 8192 /* scores of a task */

struct best_args {
    const float *scores;
    const int32_t *excluded;
    long ld, vocab, count, parts; /* parts: of a row */
    const int32_t *slots, *positions, *columns;
    long words; /* of a slot's columns */
    struct generator g;
    int32_t *tokens; /* [rows][parts][count] */
    float *values;
    _Atomic float *least; /* [rows]: a score that is not better is none of the best; for speed only */
};

static uint64_t mixed(uint64_t x, const struct generator *g) {
    x = (x ^ (x >> 30)) * g->mix1;
    x = (x ^ (x >> 27)) * g->mix2;
    return x ^ (x >> 31);
}

INLINE int any_nonzero(vi v) {
    int32_t found = 0;
    UNROLL for (int i = 0; i < VL; i++) found |= v[i];
    return found != 0;
}

/* puts a score at its place among the `count` best, behind those that are equal */
static void insert(float score, long token, long count, int32_t *tokens, float *values) {
    long place = count - 1;
    for (; place > 0 && values[place - 1] < score; place--)
        values[place] = values[place - 1], tokens[place] = tokens[place - 1];
    values[place] = score, tokens[place] = (int32_t)token;
}

/* adds noise to the scores of a block, whose counters begin at `first`; 0: none of them could exceed `least` */
static int add_noise(float *z, float top, float least, uint64_t first, const struct generator *g) {
    vd noise[SCAN / DL], most = {0};
    for (long i = 0; i < SCAN / DL; i++) {
        noise[i] = noise_uniform(first + (uint64_t)(i * DL) * g->golden, g);
        vq above = (vq)(noise[i] > most);
        most = (vd)((above & (vq)noise[i]) | (~above & (vq)most));
    }
    double wanted = (double)least - top - 1e-3 - 1e-6 * fabs((double)least), largest = most[0];
    for (int i = 1; i < DL; i++) largest = most[i] > largest ? most[i] : largest;
    if (largest - 1.0 < exp(-exp(-wanted))) return 0;
    for (long i = 0; i < SCAN / DL; i++) {
        vh_mem *out = (vh_mem *)(z + i * DL);
        *out = *out + __builtin_convertvector(minus_log(minus_log(noise[i] - 1.0)), vh);
    }
    return 1;
}

/* the best of tokens [begin, end) of a row; key: where the counters of its noise begin, if it has a temperature */
static void best_of_part(const float *x, long begin, long end, long count, long excluded, float temperature,
                         uint64_t key, const struct generator *g, int32_t *tokens, float *values, _Atomic float *least) {
    for (long i = 0; i < count; i++) tokens[i] = 0, values[i] = -INFINITY;
    for (long start = begin; start < end; start += SCAN) {
        float z[SCAN] __attribute__((aligned(64)));
        long n = min_l(SCAN, end - start);
        memcpy(z, x + start, (size_t)n * 4);
        for (long i = n; i < SCAN; i++) z[i] = -INFINITY;
        vf top = vset(-INFINITY), limit = vset(INFINITY);
        vi endless = {0};
        for (long i = 0; i < SCAN; i += VL) {
            vf v = vload(z + i);
            if (temperature > 0) v = v / temperature, vstore(z + i, v);
            endless |= ~(v < limit);
            top = vmax(v, top);
        }
        if (any_nonzero(endless)) {
            tokens[0] = -1, values[0] = INFINITY;
            return;
        }
        float largest = vmax_lanes(top);
        float known = atomic_load_explicit(least, memory_order_relaxed);
        if (temperature > 0 && !add_noise(z, largest, known, key + (uint64_t)start * g->golden, g)) continue;
        if (!(temperature > 0) && !(largest > values[count - 1])) continue;
        for (long i = 0; i < n; i++)
            if (z[i] > values[count - 1] && start + i != excluded) insert(z[i], start + i, count, tokens, values);
        if (values[count - 1] > known) atomic_store_explicit(least, values[count - 1], memory_order_relaxed);
    }
}

static void best_parts(void *given, long begin, long end) {
    const struct best_args *a = given;
    for (long i = begin; i < end; i++) {
        long row = i / a->parts, first = i % a->parts * BEST_PART;
        float temperature = 0.0f;
        uint64_t key = 0;
        if (a->slots && a->slots[row] >= 0) {
            const int32_t *own = a->columns + a->slots[row] * a->words;
            memcpy(&key, own, 8);
            memcpy(&temperature, own + 2, 4);
            key = mixed(key + (uint64_t)a->positions[row] * a->g.golden, &a->g);
        }
        best_of_part(a->scores + row * a->ld, first, min_l(a->vocab, first + BEST_PART), a->count,
                     a->excluded ? a->excluded[row] : -1, temperature, key, &a->g, a->tokens + i * a->count,
                     a->values + i * a->count, a->least + row);
    }
}

void ssd_best(const float *scores, long ld, const int32_t *excluded, int32_t *tokens, float *values, long rows,
              long vocab, long count, const int32_t *slots, const int32_t *positions, const int32_t *columns, long words,
              int64_t golden, int64_t mix1, int64_t mix2, int nthreads) {
    if (count < 1 || rows < 1) return;
    struct best_args a = {.scores = scores, .excluded = excluded, .ld = ld, .vocab = vocab, .count = count,
                          .parts = ceil_div(vocab, BEST_PART), .slots = slots, .positions = positions,
                          .columns = columns, .words = words, .g = {(uint64_t)golden, (uint64_t)mix1, (uint64_t)mix2}};
    long found = rows * a.parts * count;
    a.values = scratch(SUMS, (size_t)(2 * found + rows));
    a.tokens = (int32_t *)(a.values + found);
    a.least = (_Atomic float *)(a.tokens + found);
    for (long row = 0; row < rows; row++) a.least[row] = -INFINITY;
    parallel(rows * a.parts, rows * vocab < 32768 ? 1 : nthreads, best_parts, &a);
    for (long row = 0; row < rows; row++, tokens += count, values += count) {
        int none = 0;
        for (long i = 0; i < count; i++) tokens[i] = 0, values[i] = -INFINITY;
        for (long i = row * a.parts * count; i < (row + 1) * a.parts * count; i++) {
            none |= a.tokens[i] < 0;
            if (a.values[i] > values[count - 1]) insert(a.values[i], a.tokens[i], count, tokens, values);
        }
        if (none || values[0] == -INFINITY) tokens[0] = -1;
    }
}

/* ---------------------------------------------------------------- rounds: functions of rounds.py
 * -1 is padding: as a row's work, as a work's slot, as a logit row, as a work's first row. */
/* the token at a position of a sequence: of its text, or of its draft behind that */
INLINE int32_t token_at(const int32_t *text, const int32_t *draft, long length, long position, long columns, long width) {
    if (position < length) return text[max_l(0, min_l(position, columns - 1))];
    return draft[min_l(position - length, width - 1)];
}

int ssd_prepare_rows(const int32_t *row_work, const int32_t *slots, const int32_t *starts, const int32_t *query_start,
                     const int32_t *logit_rows, const int32_t *length, const int32_t *token_ids, const int32_t *drafts,
                     const int32_t *tables, int32_t *tokens, int32_t *positions, int32_t *slot_mapping,
                     int32_t *context_len, int64_t *gather, int32_t *decided_slot, int32_t *decided,
                     int32_t *num_drafted, long rows, long works, long logits, long num_slots, long columns, long width,
                     long table_columns, long block_size) {
    for (long work = 0; work < works; work++) {
        long slot = slots[work];
        context_len[work] = 0;
        if (slot < 0) continue;
        if (slot >= num_slots || length[slot] < 1 || length[slot] > columns) return 1;
        long first = starts[work] < 0 ? length[slot] - 1 : starts[work];
        context_len[work] = (int32_t)(first + query_start[work + 1] - query_start[work]);
    }
    for (long row = 0; row < rows; row++) {
        long work = row_work[row];
        tokens[row] = positions[row] = 0, slot_mapping[row] = -1;
        if (work < 0) continue;
        if (work >= works || slots[work] < 0) return 1;
        long slot = slots[work], position = (long)context_len[work] - query_start[work + 1] + row;
        if (position < 0) return 1;
        long block = position / block_size;
        const int32_t *table = tables + slot * table_columns;
        tokens[row] = token_at(token_ids + slot * columns, drafts + slot * width, length[slot], position, columns, width);
        positions[row] = (int32_t)position;
        if (block < min_l(table[0], table_columns - 1))
            slot_mapping[row] = (int32_t)(table[1 + block] * block_size + position % block_size);
    }
    for (long i = 0; i < logits; i++) {
        long row = max_l(0, logit_rows[i]);
        if (row >= rows) return 1;
        long work = logit_rows[i] < 0 ? -1 : row_work[row];
        gather[i] = row, decided_slot[i] = -1, decided[i] = 1, num_drafted[i] = 0;
        if (work < 0) continue;
        decided_slot[i] = slots[work];
        decided[i] = positions[row] + 1;
        num_drafted[i] = (int32_t)max_l(0, decided[i] - length[slots[work]]);
    }
    return 0;
}

int ssd_accept(const int32_t *chosen, const int32_t *slots, const int32_t *first_row, const int32_t *num_logits,
               int32_t *length, int32_t *token_ids, const int32_t *drafts, int32_t *num_accepted,
               const int32_t *origin, int32_t *out, long rows, long works, long num_slots, long columns, long width,
               long vocab) {
    for (long work = 0; work < works; work++) {
        long slot = slots[work], first = first_row[work], count = num_logits[work], accepted = 0;
        int32_t *row = out + work * (3 + 2 * width), *new_tokens = row + 2;
        memset(row, 0, (size_t)(3 + 2 * width) * 4);
        if (first < 0) continue;
        if (outside(slot, num_slots) || count < 1 || count > width + 1 || first + count > rows) return 1;
        if (length[slot] < 0) return 1;
        const int32_t *draft = drafts + slot * width;
        int32_t *text = token_ids + slot * columns;
        for (long i = 0; i < count; i++) new_tokens[i] = (int32_t)min_l(chosen[first + i], vocab - 1);
        while (accepted < count - 1 && draft[accepted] == new_tokens[accepted]) accepted++;
        for (long i = 0; i <= accepted && length[slot] < columns; i++) text[length[slot]++] = (int32_t)max_l(new_tokens[i], 0);
        num_accepted[slot] = (int32_t)accepted;
        row[0] = (int32_t)accepted + 1;
        row[1] = origin[slot];
        memcpy(row + 3 + width, draft, (size_t)(count - 1) * 4);
    }
    return 0;
}

/* reads: tokens of a sequence that are staged, less one; width: those of a draft */
int ssd_stage(const int32_t *slots, const int32_t *num_drafted, const int32_t *length, const int32_t *token_ids,
              const int32_t *drafts, const float *confidence, const int32_t *origin, int32_t *computed, int32_t *first,
              int32_t *count, int32_t *tokens, float *verified, int32_t *hit, long sequences, long num_slots, long columns,
              long width, long reads, long hit_origin, long vocab, int fork) {
    for (long i = 0; i < sequences; i++) {
        long slot = slots[i], size, begin;
        if (outside(slot, num_slots)) return 1;
        size = length[slot], begin = size - 1;
        if (!fork) begin = max_l(min_l(computed[slot], begin), size - reads);
        first[i] = (int32_t)begin, count[i] = (int32_t)(size - begin + num_drafted[i]);
        for (long j = 0; j <= reads; j++) {
            long token = token_at(token_ids + slot * columns, drafts + slot * width, size, begin + j, columns, width);
            tokens[i * (reads + 1) + j] = (int32_t)min_l(token, vocab - 1);
        }
        computed[slot] = first[i] + count[i];
        if (!fork) continue;
        memcpy(verified + i * width, confidence + slot * width, (size_t)width * 4);
        hit[i] = origin[slot] == hit_origin;
    }
    return 0;
}

/* depth: tokens of a branch behind its first; branches: of a sequence, whose chains have ld numbers each */
int ssd_look_up(const int32_t *slots, const int32_t *after, const int32_t *chain, const float *chain_confidence,
                const int32_t *length, const int32_t *token_ids, const int32_t *num_accepted, int32_t *drafts,
                float *confidence, int32_t *origin, int32_t *rows, long sequences, long branches, long ld_after, long ld,
                long depth, long num_slots, long columns, long width, long hit, long miss) {
    for (long i = 0; i < sequences; i++, after += ld_after) {
        long slot = slots[i], found = -1, exact = 0;
        if (outside(slot, num_slots) || depth > width || depth >= ld) return 1;
        int32_t last = length[slot] < 1 ? -1 : token_ids[slot * columns + min_l(length[slot], columns) - 1];
        for (long b = 0; b < branches && !exact; b++) {
            if (after[b] != num_accepted[slot]) continue;
            exact = chain[(i * branches + b) * ld] == last;
            if (exact || found < 0) found = b;
        }
        long row = i * branches + max_l(found, 0);
        memset(confidence + slot * width, 0, (size_t)width * 4);
        origin[slot] = (int32_t)(exact ? hit : miss), rows[i] = (int32_t)row;
        if (found >= 0) memcpy(drafts + slot * width, chain + row * ld + 1, (size_t)depth * 4);
        if (exact) memcpy(confidence + slot * width, chain_confidence + row * ld + 1, (size_t)depth * 4);
    }
    return 0;
}

int ssd_store(const int32_t *slots, const int32_t *chain, const float *chain_confidence, int32_t *drafts, float *confidence,
              int32_t *origin, long sequences, long ld, long count, long num_slots, long width, long value) {
    for (long i = 0; i < sequences; i++) {
        long slot = slots[i];
        if (outside(slot, num_slots) || count > width || count > ld) return 1;
        memcpy(drafts + slot * width, chain + i * ld, (size_t)count * 4);
        memcpy(confidence + slot * width, chain_confidence + i * ld, (size_t)count * 4);
        origin[slot] = (int32_t)value;
    }
    return 0;
}

/* after: [sequences][branches], or NULL: then every sequence has one row */
void ssd_extend_rows(const int32_t *slots, const int32_t *first, const int32_t *count, const int32_t *after,
                     const int32_t *chain, int32_t *tokens, int32_t *positions, int32_t *mapping, int32_t *decided,
                     int32_t *row_slots, long rows, long branches, long ld_after, long ld, long depth, long reads,
                     long first_slot, long slots_per_branch, long vocab) {
    for (long row = 0; row < rows; row++) {
        long i = row / branches, read = after ? after[i * ld_after + row % branches] + 1 : min_l(count[i], reads);
        tokens[row] = (int32_t)min_l(chain[row * ld + depth], vocab - 1);
        positions[row] = (int32_t)(first[i] + read + depth);
        mapping[row] = (int32_t)(first_slot + row * slots_per_branch + depth);
        decided[row] = positions[row] + 1;
        row_slots[row] = slots[i];
    }
}

/* The first of `found` tokens of each row, and by how much its score is the largest; -inf less -inf, where there is no token
 * at all, is 0. */
void ssd_keep_best(const int32_t *best, const float *scores, int32_t *chain, float *confidence, long rows, long found,
                   long ld, long column, float most) {
    const float lowest = -1e38f;
    for (long row = 0; row < rows; row++, best += found, scores += found) {
        float margin = (scores[0] < lowest ? lowest : scores[0]) - (scores[1] < lowest ? lowest : scores[1]);
        chain[row * ld + column] = (int32_t)max_l(best[0], 0);
        confidence[row * ld + column] = margin > most ? most : margin;
    }
}

/* ---------------------------------------------------------------- repeating recorded calls
 * A call is 32 words: its arguments, and at the end the number of its function.  The threads are those of now. */
#define CALL_WORDS 32
enum { LINEAR = 2, NORM = 6, ATTENTION = 8 }; /* numbers of functions */
#define FOLLOWED 64 /* most rows that are packed by what computes them: of more, each thread has some to pack */
typedef union {
    int64_t i;
    float f;
} word;

#define P(n) ((void *)(intptr_t)a[n].i)
#define L(n) ((long)a[n].i)
#define I(n) ((int)a[n].i)
#define F(n) (a[n].f)

static int repeat_call(const word *a, int threads) {
    switch (a[CALL_WORDS - 1].i) {
    case 0: return ssd_embedding(P(0), P(1), I(2), P(3), L(4), L(5), L(6), I(7));
    case 1: return ssd_codes_embedding(P(0), P(1), P(2), I(3), P(4), L(5), L(6), L(7), I(8), L(9), I(10), I(11));
    case 3:
        ssd_expert_linear(P(0), L(1), P(2), P(3), L(4), L(5), P(6), P(7), P(8), P(9), L(10), L(11), I(12), I(13), F(14),
                          F(15), F(16), I(17), I(18), L(19), I(20), P(21), L(22), threads);
        return 0;
    case 4: ssd_route(P(0), L(1), L(2), L(3), I(4), P(5), P(6), P(7), P(8)); return 0;
    case 5: ssd_combine(P(0), P(1), P(2), L(3), L(4), L(5), I(6), I(7), threads); return 0;
    case NORM: ssd_rms_norm(P(0), L(1), P(2), P(3), P(4), L(5), L(6), F(7), I(8), I(9), threads); return 0;
    case 7:
        return ssd_rope_and_store(P(0), L(1), P(2), I(3), P(4), I(5), P(6), P(7), P(8), P(9), F(10), P(11), P(12), P(13),
                                  L(14), L(15), L(16), L(17), L(18), L(19), I(20), I(21), F(22), F(23), threads);
    case ATTENTION:
        return ssd_paged_attention(P(0), L(1), P(2), P(3), P(4), P(5), P(6), P(7), P(8), L(9), L(10), L(11), L(12), L(13),
                                   L(14), L(15), L(16), L(17), L(18), F(19), F(20), P(21), P(22), P(23), L(24), L(25),
                                   L(26), I(27), I(28), threads);
    case 9:
        ssd_best(P(0), L(1), P(2), P(3), P(4), L(5), L(6), L(7), P(8), P(9), P(10), L(11), a[12].i, a[13].i, a[14].i, threads);
        return 0;
    case 10:
        return ssd_stage(P(0), P(1), P(2), P(3), P(4), P(5), P(6), P(7), P(8), P(9), P(10), P(11), P(12), L(13), L(14), L(15),
                         L(16), L(17), L(18), L(19), I(20));
    case 11:
        return ssd_look_up(P(0), P(1), P(2), P(3), P(4), P(5), P(6), P(7), P(8), P(9), P(10), L(11), L(12), L(13), L(14),
                           L(15), L(16), L(17), L(18), L(19), L(20));
    case 12: return ssd_store(P(0), P(1), P(2), P(3), P(4), P(5), L(6), L(7), L(8), L(9), L(10), L(11));
    case 13:
        ssd_extend_rows(P(0), P(1), P(2), P(3), P(4), P(5), P(6), P(7), P(8), P(9), L(10), L(11), L(12), L(13), L(14), L(15),
                        L(16), L(17), L(18));
        return 0;
    case 14: ssd_keep_best(P(0), P(1), P(2), P(3), L(4), L(5), L(6), L(7), F(8)); return 0;
    case 15:
        return ssd_accept(P(0), P(1), P(2), P(3), P(4), P(5), P(6), P(7), P(8), P(9), L(10), L(11), L(12), L(13), L(14), L(15));
    }
    return 1;
}

/* bytes of the panels of a product, in the words of its call */
static long panel_bytes(const word *a) {
    long rows = L(6) * (I(9) ? 2 : 1), k = L(7);
    if (!I(14)) return ssd_packed_bytes(rows, k, I(8), I(9));
    return ceil_div(rows, NR) * NR * (is_4_bits(I(14)) ? ceil_div(k, 16) * 8 : ceil_div(k, 16) * 16);
}

static struct linear_args plan_call(const word *a, int threads, int slot) {
    return plan_linear(P(0), L(1), P(2), P(3), P(4), L(5), L(6), L(7), I(8), I(9), F(10), F(11), F(12), I(13), I(14), P(15),
                       L(16), I(17), P(18), L(19), threads, slot);
}

/* whether the rows of a product, the next call, are the result of this call, and are to be packed by it */
static int is_followed(const word *a) {
    long call = a[CALL_WORDS - 1].i;
    if (call != NORM && call != ATTENTION && (call != LINEAR || I(13))) return 0;
    long rows = call == ATTENTION ? L(9) : L(5), columns = call == ATTENTION ? L(16) * L(18) : L(6);
    int bf16 = call == ATTENTION ? I(27) : I(8);
    const void *result = P(4);
    a += CALL_WORDS;
    return a[CALL_WORDS - 1].i == LINEAR && P(0) == result && L(1) == columns && L(5) == rows && L(7) == columns &&
           rows > 0 && rows <= FOLLOWED && L(6) > 0 && I(8) == bf16 && I(14) && I(14) != FP8 && !P(18);
}

int ssd_repeat(const word *calls, long count, int nthreads) {
    struct team *team = nthreads > 1 ? team_of(nthreads - 1) : 0;
    struct linear_args plans[2];
    int status = 0, followed = 0;
    for (long i = 0, next = 0; i < count && !status; i++) {
        const word *call = calls + i * CALL_WORDS;
        struct linear_args *own = plans + i % 2;
        if (team && next <= i) { /* the next product */
            for (next = i + 1; next < count && calls[next * CALL_WORDS + CALL_WORDS - 1].i != LINEAR;) next++;
            const word *a = calls + next * CALL_WORDS;
            atomic_store(&team->weights, next < count ? P(2) : 0);
            atomic_store(&team->weight_bytes, next < count ? panel_bytes(a) : 0);
        }
        int is_product = call[CALL_WORDS - 1].i == LINEAR;
        if (is_product && (call[5].i <= 0 || call[6].i <= 0)) continue; /* of no rows or columns */
        if (is_product && !followed) {
            *own = plan_call(call, nthreads, i % 2);
            pack_all(own, nthreads);
        }
        following = 0, followed = i + 1 < count && is_followed(call);
        if (followed) {
            struct linear_args *after = plans + (i + 1) % 2;
            *after = plan_call(call + CALL_WORDS, nthreads, (i + 1) % 2);
            memset(after->ready, 0, (size_t)(after->m * after->groups.count) * 4);
            following = after;
        }
        if (is_product) {
            own->next = following;
            multiply(own);
        } else {
            status = repeat_call(call, nthreads);
        }
    }
    following = 0;
    if (team) atomic_store(&team->weight_bytes, 0);
    return status;
}

/* ---------------------------------------------------------------- the process
 * To be called once, before anything else; 0, or 1 if the system does not let the process use what was compiled for. */
int ssd_enable(void) {
#if defined(__AMX_TILE__) && defined(SYS_arch_prctl)
    const int request_permission = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    return syscall(SYS_arch_prctl, request_permission, tile_data) != 0;
#else
    return 0;
#endif
}
