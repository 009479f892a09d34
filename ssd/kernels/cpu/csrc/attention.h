/* paged_attention
 * A task is a few consecutive rows of one sequence and one KV head: all its (row, head) queries share each chunk of CH
 * absolute positions.  Every chunk has a result of its own (a softmax over it).  Results are added up in the order of the
 * chunks: by the one thread that computes them, after each of them, or, where there are too few tasks for all threads, by
 * the last of several; the numbers are the same.  A row sees exactly its n visible positions of a chunk, padded up to a full
 * vector with score -inf and with its own first position's value, so its result has the same bits whatever the other rows
 * are.
 * With a window, chunks before it are skipped.  In latent attention, whose one KV head has many query heads, a task has a part of
 * these.
 * With `slots`, every row is the newest token of a branch: it sees the positions that its sequence's branches share, then `depth`
 * + 1 slots of its own, the last of them slots[row] (-1: padding, sees nothing), in chunks counted from the first.  Rows of several
 * runs have a depth each; a token that is read is a branch of depth 0, whose slot is in its sequence's block.
 * With `paths`, rows may be nodes of trees: position p from decided[row] on is in slots[paths[row][p - decided[row]]].  Chunks
 * with such positions are loaded row by row; all are where they would be in a chain. */
#define CH 64        /* absolute positions of a chunk */
#define AQ ATTENTION_QUERIES /* of a tile */
#define AP 4         /* key positions of a score tile */
#define AV 4         /* value vectors of an output tile */
#define KV_AHEAD 4   /* positions that are prefetched */
#define QUERIES 24   /* (row, head) pairs that share one pass over the keys, where there are so many */
#define MANY_TASKS 4 /* so many tasks for each thread are not cut into pieces */
#define PARTIALS_MOST (2L << 20) /* floats of the results of chunks */

struct attention_args {
    struct paged_attention; /* the call */
    long dp, vp;            /* d and value_d, rounded up to full vectors */
    long rows;              /* rows per task at most */
    long parts;             /* of the query heads of a KV head, which are tasks of their own */
    long tasks;             /* of all KV heads */
    long lanes, partial_floats; /* queries of a partial result, in whole vectors (of AMX: tiles), and its floats */
    long cuts, per;     /* pieces of a task that threads take, and chunks of one */
    long most;          /* if there are several: chunks of the longest task */
    float *partials;    /* then: results of all chunks; else NULL */
    _Atomic int *ready; /* then: pieces of each task that are computed */
    const struct linear_args *next; /* as in linear_args */
};

struct chunk {
    const char *k[CH + AP], *v[CH + AP]; /* rows: of the cache, or fp32 rows of dp in the copies */
    float *copy_k, *copy_v;
    int in_place, narrow; /* rows are those of the cache; they are bf16 */
    long bytes;           /* of a row of the cache */
};

/* Partial result, of a chunk or of several: of each query the largest score, the sum of the weights, and the sum of the weighted
 * values [vp], which is not set if the query sees nothing: then the sum of its weights is 0. */
struct partial {
    float *max, *sum, *acc;
};

struct softmax { /* of the queries of a task */
    float *q, *scores;
    struct partial to;
};

INLINE int is_branch(const struct attention_args *a) { return a->slots && !a->paths; }
INLINE long depth_of(const struct attention_args *a, long row) { return a->depths ? a->depths[row] : a->depth; }

/* where a row's position is that is not decided */
INLINE long path_slot(const struct attention_args *a, long row, long position) {
    return max_l(0, a->slots[a->paths[row * a->path_columns + position - a->decided[row]]]);
}

/* Positions [from, n) of the chunk at `start`, which without a table is a slot, as `row` sees them.  The rows of a head are far
 * apart: a machine does not foresee the next one. */
static void load_chunk(const struct attention_args *a, struct chunk *c, const int32_t *table, long kv_head, long start,
                       long from, long n, long row) {
    const long bytes = c->bytes, decided = a->paths ? a->decided[row] : LONG_MAX;
    long block = (start + from) / a->block_size, in_block = (start + from) % a->block_size, offsets[CH];
    for (long i = from; i < n; i++) {
        long slot = start + i >= decided ? path_slot(a, row, start + i)
                                         : (table ? table[block] : block) * a->block_size + in_block;
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
        c->k[i] = c->v[i] = (const char *)(c->copy_k + i * a->dp);
        if (a->v_cache == a->k_cache) continue;
        load_row(c->copy_v + i * a->dp, a->v_cache, offsets[i] * a->d, a->d, a->kv);
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

#define VALUE_STEP(lane)                                                                                           \
    {                                                                                                              \
        vf x[AV];                                                                                                  \
        if (nv == 1)                                                                                               \
            x[0] = vload((const float *)v[t + (lane)] + e);                                                        \
        else                                                                                                       \
            UNROLL for (int j = 0; j < nv; j += 2) load_pair(&x[j], &x[j + 1], v[t + (lane)], e + j * VL, narrow); \
        UNROLL for (int i = 0; i < nq; i++)                                                                        \
            UNROLL for (int j = 0; j < nv; j++) acc[i][j] = FMA_LANE(acc[i][j], x[j], pq[i], lane);                \
    }

/* acc = p @ v for nq queries and nv vectors of vp: one FMA chain over the positions per element */
INLINE void value_tile(const int nq, const int nv, const int narrow, const struct softmax *s, long q0, long vp, long e,
                       const char *const *v, long n) {
    vf acc[AQ][AV];
    float *out = s->to.acc + q0 * vp + e;
    const float *p = s->scores + q0 * CH;
    UNROLL for (int i = 0; i < nq; i++) UNROLL for (int j = 0; j < nv; j++) acc[i][j] = vset(0.0f);
    for (long t = 0; t < n; t += 4) {
        quad pq[AQ];
        UNROLL for (int i = 0; i < nq; i++) pq[i] = quad_load(p + i * CH + t);
        VALUE_STEP(0) VALUE_STEP(1) VALUE_STEP(2) VALUE_STEP(3)
    }
    UNROLL for (int i = 0; i < nq; i++)
        UNROLL for (int j = 0; j < nv; j++) vstore(out + i * vp + j * VL, acc[i][j]);
}

/* scores -> weights of one query over n positions (padded to full vectors), their largest and their sum */
static void softmax_query(const struct softmax *s, long q, long n) {
    float *p = s->scores + q * CH;
    long padded = ceil_div(n, VL) * VL;
    if (n < padded) {
        const vi lanes = vlanes();
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

#define SCORES(nq)                                                                                               \
    static void scores_##nq(const struct softmax *s, long q0, long dp, const struct chunk *c, long at, long n) { \
        if (c->narrow)                                                                                           \
            score_queries(nq, 1, s, q0, dp, c, at, n);                                                           \
        else                                                                                                     \
            score_queries(nq, 0, s, q0, dp, c, at, n);                                                           \
    }
#define VALUES(nq)                                                                                                       \
    static void values_##nq(const struct softmax *s, long q0, long vp, const struct chunk *c, long at, long e, long n) { \
        if (e + AV * VL > vp)                                                                                            \
            value_tile(nq, 1, 0, s, q0, vp, e, c->v + at, n);                                                            \
        else if (c->narrow)                                                                                              \
            value_tile(nq, AV, 1, s, q0, vp, e, c->v + at, n);                                                           \
        else                                                                                                             \
            value_tile(nq, AV, 0, s, q0, vp, e, c->v + at, n);                                                           \
    }
SCORES(1) SCORES(2) SCORES(3) SCORES(4) VALUES(1) VALUES(2) VALUES(3) VALUES(4)
typedef void scores_fn(const struct softmax *s, long q0, long dp, const struct chunk *c, long at, long n);
typedef void values_fn(const struct softmax *s, long q0, long vp, const struct chunk *c, long at, long e, long n);
static scores_fn *const SCORES_OF[] = {0, scores_1, scores_2, UP_TO(AQ, scores, 3), UP_TO(AQ, scores, 4)};
static values_fn *const VALUES_OF[] = {0, values_1, values_2, UP_TO(AQ, values, 3), UP_TO(AQ, values, 4)};

/* Queries [q0, q1) against n positions of a chunk, from its position `at` on.  All of them read a few columns of the values,
 * which stay in the L1 cache. */
static void attend_chunk(const struct softmax *s, long q0, long q1, long dp, long vp, struct chunk *c, long at, long n) {
    const char *kept[2][AP]; /* of the positions behind the last one: those of the first are read in their place */
    for (long i = 0; i < AP - 1; i++) {
        kept[0][i] = c->k[at + n + i], kept[1][i] = c->v[at + n + i];
        c->k[at + n + i] = c->k[at], c->v[at + n + i] = c->v[at];
    }
    for (long q = q0; q < q1; q += AQ) SCORES_OF[min_l(AQ, q1 - q)](s, q, dp, c, at, n);
    for (long q = q0; q < q1; q++) softmax_query(s, q, n);
    for (long e = 0; e < vp; e += e + AV * VL > vp ? VL : AV * VL)
        for (long q = q0; q < q1; q += AQ) VALUES_OF[min_l(AQ, q1 - q)](s, q, vp, c, at, e, n);
    for (long i = 0; i < AP - 1; i++) c->k[at + n + i] = kept[0][i], c->v[at + n + i] = kept[1][i];
}

/* how many positions of its sequence a row sees */
static long shared_positions(const struct attention_args *a, long seq, long row) {
    if (a->paths) return a->positions[row] + 1;
    if (!a->slots) return a->context_len[seq] - (a->query_start[seq + 1] - row) + 1;
    return a->slots[row] < 0 ? 0 : a->positions[row] - depth_of(a, row);
}

/* the first position that a row sees; LONG_MAX for padding */
static long first_seen(const struct attention_args *a, long seq, long row) {
    if (!a->window) return a->first;
    if (is_branch(a) && a->slots[row] < 0) return LONG_MAX;
    long next = a->slots ? a->positions[row] + 1 : shared_positions(a, seq, row);
    return max_l(a->first, next - a->window);
}

/* how many slots of its branch a row sees */
static long own_slots(const struct attention_args *a, long row) {
    if (!is_branch(a) || a->slots[row] < 0) return 0;
    const long own = depth_of(a, row) + 1;
    return a->window ? min_l(own, a->window) : own;
}

/* Rows [row, row + rows) of sequence seq, query heads of kv_head. */
struct task {
    const struct attention_args *a;
    long seq, row, rows, kv_head;
    long head, heads, queries; /* the first query head and their number; pairs of a row and one of these */
    long begin, end;    /* positions of its sequence that any row sees */
    long first, shared; /* where the first chunk begins, and the chunks of its sequence; then come those of the branches */
    long common;        /* chunks that are the same for all rows: those of its sequence without nodes of a tree */
    long own, chunks;   /* slots of a branch at most; chunks in all */
    long place;         /* AMX: how far the slots of two rows are apart in a chunk */
    float *partials;    /* results of its chunks; if threads do not share it: of all, and of the last one */
};

static struct partial partial_at(const struct task *t, long number) {
    float *memory = t->partials + number * t->a->partial_floats;
    return (struct partial){memory, memory + t->a->lanes, memory + 2 * t->a->lanes};
}

/* the result of the number-th chunk, in which no query has seen anything yet */
static struct partial begin_partial(const struct task *t, long number) {
    struct partial to = partial_at(t, t->a->partials ? number : number > 0);
    for (long q = 0; q < t->a->lanes; q += VL) vstore(to.max + q, vset(-INFINITY)), vstore(to.sum + q, vset(0.0f));
    return to;
}

/* adds the number-th of a task's results to the first one */
static void add_partial(const struct task *t, long number) {
    const struct partial to = partial_at(t, 0), from = partial_at(t, number);
    const long vp = t->a->vp;
    for (long first = 0; first < t->queries; first += VL) {
        float alpha[VL], beta[VL];
        vf before = vload(to.max + first), own = vload(from.max + first), top = vmax(own, before);
        vf shift = vselect(top == vset(-INFINITY), vset(0.0f), top), old = vexp(before - shift), new = vexp(own - shift);
        vf sum = vload(to.sum + first), sum_here = vload(from.sum + first);
        vstore(alpha, old), vstore(beta, new);
        for (long q = first; q < min_l(t->queries, first + VL); q++) {
            float *acc = to.acc + q * vp;
            const float *here = from.acc + q * vp;
            if (from.sum[q] == 0.0f) continue;
            if (to.sum[q] == 0.0f)
                memcpy(acc, here, (size_t)vp * 4);
            else
                for (long e = 0; e < vp; e += VL)
                    vstore(acc + e, vfma(vload(here + e) * beta[q - first], vload(acc + e), vset(alpha[q - first])));
        }
        vstore(to.max + first, top), vstore(to.sum + first, sum * old + sum_here * new);
    }
}

static void load_queries(const struct task *t, float *q) {
    const struct attention_args *a = t->a;
    if (a->dp != a->d) memset(q, 0, (size_t)(t->queries * a->dp) * 4);
    for (long i = 0; i < t->queries; i++, q += a->dp) {
        long head = t->head + i % t->heads;
        load_row(q, a->q, (t->row + i / t->heads) * a->ldq + head * a->d, a->d, a->bf16);
        for (long e = 0; e < a->d; e++) q[e] *= a->scale;
    }
}

static size_t vector_floats(const struct attention_args *a) {
    return (size_t)(a->lanes * (a->dp + CH) + 2 * CH * a->dp);
}

/* chunks [from, to) of a task; `memory` holds vector_floats() */
static void vector_chunks(const struct task *t, long from, long to, float *memory) {
    const struct attention_args *a = t->a;
    const long dp = a->dp;
    struct softmax s = {.q = memory, .scores = memory + a->lanes * dp};
    struct chunk c = {.bytes = a->d * bytes_of(a->kv)};
    const int whole = a->d % (AV * VL) == 0 && a->value_d % (AV * VL) == 0;
    c.in_place = t->queries <= AQ && a->kv != E4M3 && whole; /* else keys and values are widened once */
    c.narrow = c.in_place && a->kv == BF16;
    c.copy_k = s.scores + a->lanes * CH, c.copy_v = c.copy_k + CH * dp;
    if (dp != a->d) memset(c.copy_k, 0, (size_t)(2 * CH * dp) * 4);
    load_queries(t, s.q);
    for (long number = from; number < to; number++) {
        long start = t->first + number * CH, after = (number - t->shared) * CH;
        const int32_t *table = a->block_tables + a->table_rows[t->seq] * a->table_stride;
        s.to = begin_partial(t, number);
        if (number < t->common)
            load_chunk(a, &c, table, t->kv_head, start, max_l(0, t->begin - start), min_l(CH, t->end - start), t->row);
        for (long r = 0, next; r < t->rows; r = next) { /* neighbours that see the same of the chunk go together */
            long row = t->row + r, own = own_slots(a, row);
            long begin = max_l(0, first_seen(a, t->seq, row) - start);
            long stop = min_l(CH, shared_positions(a, t->seq, row) - start);
            next = r + 1;
            if (number >= t->shared) {
                begin = 0, stop = min_l(CH, own - after);
                if (stop > 0) load_chunk(a, &c, NULL, t->kv_head, a->slots[row] - own + 1 + after, 0, stop, row);
            } else if (number >= t->common && stop > begin) {
                load_chunk(a, &c, table, t->kv_head, start, begin, stop, row);
            }
            for (; number < t->common && next < t->rows; next++)
                if (max_l(0, first_seen(a, t->seq, t->row + next) - start) != begin ||
                    min_l(CH, shared_positions(a, t->seq, t->row + next) - start) != stop)
                    break;
            if (stop > begin) attend_chunk(&s, r * t->heads, next * t->heads, dp, a->vp, &c, begin, stop - begin);
        }
        if (!a->partials && number) add_partial(t, 1);
    }
}
