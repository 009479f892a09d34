/* gumbel
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


#define MIXED(x, g) (x = (x ^ (x >> 30)) * (g)->mix1, x = (x ^ (x >> 27)) * (g)->mix2, x ^ (x >> 31))

/* 1 + u of the tokens from one whose counter (key + token * golden) is `first`; or of tokens with these ids, whose key it
 * is then */
INLINE vd noise_uniform(uint64_t first, const int32_t *ids, const struct generator *g) {
    const uint64_t one = 0x3ff0000000080000u; /* the bits of 1 + 2^-33 */
    vq x;
    if (MUL_64) {
        UNROLL for (int j = 0; j < DL; j++) x[j] = (uint64_t)(ids ? ids[j] : j) * g->golden;
        x = x + first;
        x = MIXED(x, g) >> 32 << 20;
    } else { /* the integer unit has nothing else to do */
        UNROLL for (int j = 0; j < DL; j++) {
            uint64_t y = first + (uint64_t)(ids ? ids[j] : j) * g->golden;
            x[j] = MIXED(y, g) >> 32 << 20;
        }
    }
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

/* DV vectors of tokens of which `next` has 1 + u; leaves that of the next ones there, whose counters begin at `first`:
 * their integers are computed beside these logarithms */
INLINE void gumbel_vectors(float *out, vd *next, uint64_t first, const struct generator *g) {
    vd x[DV];
    UNROLL for (int i = 0; i < DV; i++) x[i] = next[i] - 1.0;
    UNROLL for (int i = 0; i < DV; i++) next[i] = noise_uniform(first + (uint64_t)(i * DL) * g->golden, NULL, g);
    UNROLL for (int i = 0; i < DV; i++) x[i] = minus_log(x[i]);
    UNROLL for (int i = 0; i < DV; i++) *(vh_mem *)(out + i * DL) = __builtin_convertvector(minus_log(x[i]), vh);
}

/* n tokens from the one whose counter is `first` */
static void gumbel_span(float *out, uint64_t first, long n, const struct generator *g) {
    const long count = DV * DL;
    vd next[DV];
    UNROLL for (int i = 0; i < DV; i++) next[i] = noise_uniform(first + (uint64_t)(i * DL) * g->golden, NULL, g);
    long t = 0;
    for (; t + count <= n; t += count) gumbel_vectors(out + t, next, first += (uint64_t)count * g->golden, g);
    if (t == n) return;
    float tail[DV * DL];
    gumbel_vectors(tail, next, first, g);
    memcpy(out + t, tail, (size_t)(n - t) * 4);
}

struct gumbel_args {
    struct gumbel; /* the call */
    long chunks;   /* of a row */
};

static void gumbel_chunks(void *given, long begin, long end) {
    const struct gumbel_args *a = given;
    for (long i = begin; i < end; i++) {
        long row = i / a->chunks, t = i % a->chunks * NOISE_CHUNK;
        uint64_t key = (uint64_t)a->keys[row] + (uint64_t)t * a->g.golden;
        gumbel_span(a->out + row * a->vocab + t, key, min_l(NOISE_CHUNK, a->vocab - t), &a->g);
    }
}

int ssd_gumbel(const void *given, int threads) {
    const struct gumbel *call = given;
    struct gumbel_args a = {.chunks = ceil_div(call->vocab, NOISE_CHUNK)};
    memcpy(&a, call, sizeof *call);
    parallel(a.rows * a.chunks, a.rows * a.vocab < NOISE_ALONE ? 1 : threads, gumbel_chunks, &a);
    return 0;
}

/* best
 * Noise grows with its random bits, so logarithms are computed only in blocks that have bits which could reach the best so
 * far. */
#define SCAN 256       /* scores of a block */
#define BEST_PART 8192 /* scores of a task */

struct best_args {
    struct best; /* the call */
    long parts;  /* of a row */
    int32_t *part_tokens; /* [rows][parts][count] */
    float *part_values;
    _Atomic float *least; /* [rows]: a score that is not better is none of the best; for speed only */
};

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

/* adds noise to the scores of a block of tokens, from `start` on or with these ids; 0: none could exceed `least` */
static int add_noise(float *z, float top, float least, uint64_t key, long start, const int32_t *ids,
                     const struct generator *g) {
    const uint64_t first = ids ? key : key + (uint64_t)start * g->golden;
    vd noise[SCAN / DL], most = {0};
    for (long i = 0; i < SCAN / DL; i++) {
        noise[i] = ids ? noise_uniform(first, ids + i * DL, g)
                       : noise_uniform(first + (uint64_t)(i * DL) * g->golden, NULL, g);
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
static void best_of_part(const float *x, const int32_t *ids, long begin, long end, long count, long excluded,
                         float temperature, uint64_t key, const struct generator *g, int32_t *tokens, float *values,
                         _Atomic float *least) {
    for (long i = 0; i < count; i++) tokens[i] = 0, values[i] = -INFINITY;
    for (long start = begin; start < end; start += SCAN) {
        float z[SCAN] __attribute__((aligned(64)));
        int32_t own[SCAN]; /* ids */
        long n = min_l(SCAN, end - start);
        memcpy(z, x + start, (size_t)n * 4);
        for (long i = n; i < SCAN; i++) z[i] = -INFINITY, own[i] = 0;
        if (ids) memcpy(own, ids + start, (size_t)n * 4);
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
        if (temperature > 0 && !add_noise(z, largest, known, key, start, ids ? own : NULL, g)) continue;
        if (!(temperature > 0) && !(largest > values[count - 1])) continue;
        for (long i = 0; i < n; i++)
            if (z[i] > values[count - 1] && (ids ? own[i] : start + i) != excluded)
                insert(z[i], start + i, count, tokens, values);
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
            key += (uint64_t)a->positions[row] * a->g.golden;
            key = MIXED(key, &a->g);
        }
        best_of_part(a->scores + row * a->ld, a->ids, first, min_l(a->vocab, first + BEST_PART), a->count,
                     a->excluded ? a->excluded[row] : -1, temperature, key, &a->g, a->part_tokens + i * a->count,
                     a->part_values + i * a->count, a->least + row);
    }
}

int ssd_best(const void *given, int threads) {
    const struct best *call = given;
    const long rows = call->rows, count = call->count;
    if (count < 1 || rows < 1) return 0;
    struct best_args a = {.parts = ceil_div(call->vocab, BEST_PART)};
    memcpy(&a, call, sizeof *call);
    long found = rows * a.parts * count;
    a.part_values = scratch(SUMS, (size_t)(2 * found + rows));
    a.part_tokens = (int32_t *)(a.part_values + found);
    a.least = (_Atomic float *)(a.part_tokens + found);
    for (long row = 0; row < rows; row++) a.least[row] = -INFINITY;
    parallel(rows * a.parts, rows * a.vocab < 32768 ? 1 : threads, best_parts, &a);
    int32_t *tokens = call->tokens;
    float *values = call->values;
    for (long row = 0; row < rows; row++, tokens += count, values += count) {
        int none = 0;
        for (long i = 0; i < count; i++) tokens[i] = 0, values[i] = -INFINITY;
        for (long i = row * a.parts * count; i < (row + 1) * a.parts * count; i++) {
            none |= a.part_tokens[i] < 0;
            if (a.part_values[i] > values[count - 1]) insert(a.part_values[i], a.part_tokens[i], count, tokens, values);
        }
        for (long i = 0; call->ids && !none && i < count && values[i] > -INFINITY; i++) tokens[i] = call->ids[tokens[i]];
        if (none || values[0] == -INFINITY) tokens[0] = -1;
    }
    return 0;
}
