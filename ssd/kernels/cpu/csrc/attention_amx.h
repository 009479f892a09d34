/* paged_attention: AMX
 * The same over bf16 keys and values, all queries of a task in one tile.  Scores are sums of products of bf16 numbers, which
 * are multiplied by the scale; weights of values are rounded to bf16 before they are added up.  What a query does not see has
 * the weight 0: that changes none of its sums while values are finite, but may change the sign of one that is 0.  These bits
 * differ from those of the vectors above, so what decides between both is the same for all rows of a model. */
INLINE int amx_attends(const struct attention_args *a) {
    return HAS_AMX && a->bf16 && a->kv == BF16 && a->d % 32 == 0 && a->value_d == a->d && a->heads / a->kv_heads <= AMX_ROWS;
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
    const vi lanes = vlanes();
    UNROLL for (int w = 1; w < VL; w *= 2) {
        vi upper = (lanes & w) != 0, even = lanes + (upper & (VL - w)), odd = lanes + ((upper & VL) | (~upper & w));
        UNROLL for (int i = 0; i < VL; i++) {
            if (i & w) continue;
            vf a = r[i], b = r[i + w];
            r[i] = vpermute(a, even, b);
            r[i + w] = vpermute(a, odd, b);
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
    const int32_t *table = a->block_tables + a->table_rows[t->seq] * a->table_stride;
    if (a->paths && number >= t->common) { /* of one row of a tree */
        long r = (number - t->common) % t->rows, row = t->row + r;
        long start = t->first + (t->common + (number - t->common) / t->rows) * CH;
        long from = max_l(0, first_seen(a, t->seq, row) - start), n = min_l(CH, shared_positions(a, t->seq, row) - start);
        for (long i = 0; i < t->rows; i++) c->from[i] = c->stop[i] = 0;
        c->from[r] = (int)from, c->stop[r] = (int)n, c->n = n <= 0 ? 0 : ceil_div(n, 32) * 32;
        for (long i = from; i < n; i++) {
            long position = start + i, in_block = position % a->block_size;
            long slot = position >= a->decided[row] ? path_slot(a, row, position)
                                                    : table[position / a->block_size] * a->block_size + in_block;
            c->at[i] = slot * a->kv_heads + t->kv_head;
        }
        return;
    }
    if (number < t->shared) {
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
    long per_row = ceil_div(t->own, CH), own = number - t->shared, beside = CH / t->place;
    long begin = own / per_row * beside, end = min_l(t->rows, begin + beside), start = own % per_row * CH;
    for (long r = 0; r < t->rows; r++) c->from[r] = c->stop[r] = 0;
    for (long r = begin; r < end; r++) {
        long n = min_l(CH, own_slots(a, t->row + r) - start), slot = a->slots[t->row + r] - own_slots(a, t->row + r) + 1 + start;
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
        tile_zero(0);
        tile_zero(1);
        for (long e = 0; e < d; e += 32) {
            tile_load(4, m->q + e / 2 * VL, 64);
            tile_load(2, left + e, step);
            tile_dot_bf16(0, 2, 4);
            tile_load(3, right + e, other);
            tile_dot_bf16(1, 3, 4);
        }
        tile_store(0, scores + at * VL, 64);
        tile_store(1, scores + (at + VL) * VL, 64);
    }
    COMPILER_BARRIER();
}

/* Scores to weights[query][position], and to the largest and the sum in `to`.  few: there are at most 4 queries, whose scores
 * are gathered, and whose lanes are added and compared one query after the other, to the same numbers; otherwise all that is
 * transposed. */
INLINE void amx_softmax(const struct task *t, const struct amx_chunk *c, const float *scores, uint16_t *weights,
                        const struct partial *to, const int few) {
    float of_query[AMX_ROWS][CH] __attribute__((aligned(64))), shifts[VL], found[VL] = {0};
    vf r[VL], none = vset(-INFINITY), top = none;
    const vi lanes = vlanes();
    UNROLL for (int i = 0; i < VL; i++) r[i] = none;
    for (long at = 0; !few && at < c->n; at += VL) {
        vf tile[VL];
        UNROLL for (int i = 0; i < VL; i++) tile[i] = vload(scores + (at + i) * VL);
        transpose(tile);
        UNROLL for (int i = 0; i < VL; i++) vstore(of_query[i] + at, tile[i]);
    }
    for (long q = 0; q < t->queries; q++) {
        int row = (int)q / (int)t->heads;
        for (long at = 0; at < c->n; at += VL) {
            vi position = lanes + (int)at, seen = (position >= c->from[row]) & (position < c->stop[row]);
            vf own = few ? vgather(scores + at * VL + q, lanes * VL) : vload(of_query[q] + at);
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
        tile_zero(5);
        tile_zero(6);
        for (long at = 0; at < c->n; at += 32) {
            tile_load(7, weights + at, CH * 2);
            tile_load(2, v + at * VL, 128);
            tile_dot_bf16(5, 7, 2);
            tile_load(3, v + at * VL + VL, 128);
            tile_dot_bf16(6, 7, 3);
        }
        tile_store(5, acc + e, d * 4);
        tile_store(6, acc + e + VL, d * 4);
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
            long q = i < t->queries ? i : 0, head = t->head + q % t->heads;
            r[i] = vload((const void *)((const uint16_t *)a->q + (t->row + q / t->heads) * a->ldq + head * a->d + e));
        }
        transpose(r);
        UNROLL for (int i = 0; i < VL; i++) vstore((float *)m.q + (e / 2 + i) * VL, r[i]);
    }
    amx_configure(16, t->queries, t->queries, 64, t->queries);
    for (long number = from; number < to; number++, last = c, c = next, next = last) {
        const struct partial own = begin_partial(t, number);
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
        if (!a->partials && number) add_partial(t, 1);
    }
    tile_release();
}
