/* paged_attention: its tasks, and how chunks of few tasks are shared out. */

/* the number-th task: of a few rows of a sequence and a KV head */
static struct task find_task(const struct attention_args *a, long number) {
    struct task t = {.a = a, .heads = a->heads / a->kv_heads / a->parts, .begin = LONG_MAX, .place = 2};
    const long columns = a->kv_heads * a->parts, column = number % columns;
    t.kv_head = column / a->parts, t.head = column * t.heads;
    number /= columns;
    for (long begin, count, tasks;; t.seq++, number -= tasks) {
        begin = a->query_start[t.seq], count = a->query_start[t.seq + 1] - begin, tasks = ceil_div(count, a->rows);
        if (number >= tasks) continue;
        t.row = begin + number * a->rows, t.rows = min_l(a->rows, count - number * a->rows);
        break;
    }
    t.queries = t.rows * t.heads;
    for (long r = t.row; r < t.row + t.rows; r++) {
        t.begin = min_l(t.begin, first_seen(a, t.seq, r)), t.end = max_l(t.end, shared_positions(a, t.seq, r));
        t.own = max_l(t.own, own_slots(a, r));
    }
    t.first = t.begin - (t.begin - a->first) % CH;
    t.shared = t.common = t.first < t.end ? ceil_div(t.end - t.first, CH) : 0;
    if (a->paths) t.common = max_l(0, min_l(t.common, (a->decided[t.row] - t.first) / CH));
    t.chunks = t.shared + ceil_div(t.own, CH);
    while (amx_attends(a) && t.place < min_l(t.own, CH)) t.place *= 2;
    if (amx_attends(a)) t.chunks = t.shared + ceil_div(t.own, CH) * ceil_div(t.rows, CH / t.place);
    if (amx_attends(a) && a->paths) t.chunks = t.common + (t.shared - t.common) * t.rows;
    return t;
}

static void store_attention(const struct task *t) {
    const struct attention_args *a = t->a;
    const struct partial sums = partial_at(t, 0);
    if (!t->chunks) begin_partial(t, 0);
    for (long number = 1; a->partials && number < t->chunks; number++) add_partial(t, number);
    for (long q = 0; q < t->queries; q++) {
        long head = t->head + q % t->heads, at = ((t->row + q / t->heads) * a->heads + head) * a->value_d;
        float *acc = sums.acc + q * a->vp, sum = sums.sum[q];
        if (sum == 0.0f) { /* padding */
            memset((char *)a->out + at * (a->bf16 ? 2 : 4), 0, (size_t)a->value_d * (a->bf16 ? 2 : 4));
            continue;
        }
        if (a->sinks) sum += vexp(vset(a->sinks[head] - sums.max[q]))[0];
        for (long e = 0; e < a->value_d; e++) acc[e] = acc[e] / sum * a->v_scale + 0.0f; /* for the sign of zeros */
        for (long e = 0; amx_attends(a) && e < a->d; e += 32)
            *(vu_mem *)((uint16_t *)a->out + at + e) =
                (vu)vround_bf16(vload(acc + e)) >> 16 | (vu)vround_bf16(vload(acc + e + VL));
        if (!amx_attends(a)) store_row(a->out, at, acc, a->value_d, a->bf16);
    }
    if (a->next) columns_done(a->next, t->row, t->rows, t->head * a->value_d, t->heads * a->value_d);
}

/* Pieces of tasks, those with the longest rows first.  Whoever computes a task's last piece adds up all partial results. */
static void attention_cuts(void *given, long begin, long end) {
    const struct attention_args *a = given;
    const size_t working = amx_attends(a) ? amx_floats(a) : vector_floats(a);
    float *memory = scratch(ROWS, (size_t)(2 * a->partial_floats) + working);
    for (long i = begin; i < end; i++) {
        long number = i / a->cuts, from = i % a->cuts * a->per;
        struct task t = find_task(a, a->tasks - 1 - number);
        t.partials = a->partials ? a->partials + number * a->most * a->partial_floats : memory;
        long to = min_l(t.chunks, from + a->per);
        if (from < to) (amx_attends(a) ? amx_chunks : vector_chunks)(&t, from, to, memory + 2 * a->partial_floats);
        if (a->cuts == 1 || atomic_fetch_add(&a->ready[number], 1) + 1 == a->cuts) store_attention(&t);
    }
}

/* whether all that the queries of a sequence see is in the caches */
static int attention_fits(const struct attention_args *a, long seq) {
    long begin = a->query_start[seq], stop = a->query_start[seq + 1], first = LONG_MAX, end = 0;
    if (begin < 0 || begin > stop || stop > a->tokens) return 0;
    for (long row = begin; row < stop; row++) {
        long next = shared_positions(a, seq, row), decided = a->paths ? a->decided[row] : next;
        if (next - decided > a->path_columns) return 0;
        for (long position = decided; position < next; position++)
            if (outside(a->paths[row * a->path_columns + position - decided], a->path_rows) ||
                path_slot(a, row, position) >= a->cache_blocks * a->block_size)
                return 0;
        first = min_l(first, first_seen(a, seq, row));
        end = max_l(end, min_l(next, decided));
        const long slot = is_branch(a) ? a->slots[row] : 0, depth = depth_of(a, row);
        if (own_slots(a, row) && (depth < 0 || slot < depth || slot >= a->cache_blocks * a->block_size)) return 0;
    }
    if (end <= first) return 1;
    if (outside(a->table_rows[seq], a->tables) || ceil_div(end, a->block_size) > a->columns) return 0;
    const int32_t *table = a->block_tables + a->table_rows[seq] * a->table_stride;
    for (long block = first / a->block_size; block < ceil_div(end, a->block_size); block++)
        if (outside(table[block], a->cache_blocks)) return 0;
    return 1;
}

int ssd_paged_attention(const void *given, int nthreads) {
    const struct paged_attention *call = given;
    const int32_t *query_start = call->query_start;
    const long sequences = call->sequences, heads = call->heads, kv_heads = call->kv_heads, d = call->d;
    struct attention_args a = {.dp = ceil_div(d, VL) * VL, .per = LONG_MAX, .cuts = 1, .parts = 1, .next = following};
    memcpy(&a, call, sizeof *call);
    a.vp = ceil_div(a.value_d, VL) * VL;
    long longest = 0, work = 0, queries = QUERIES, whole = VL;
    const long group = heads / kv_heads; /* in latent attention: equal parts of QUERIES heads at most */
    while (a.value_d < d && (group > QUERIES * a.parts || group % a.parts)) a.parts++;
    const long columns = kv_heads * a.parts;
    for (long s = 0; s < sequences; s++) {
        if (!attention_fits(&a, s)) return 1;
        longest = max_l(longest, query_start[s + 1] - query_start[s]);
    }
    if (amx_attends(&a)) queries = whole = AMX_ROWS;
    a.rows = max_l(1, min_l(longest, queries * columns / heads));
    a.rows = max_l(1, ceil_div(longest, ceil_div(longest, a.rows))); /* equal tasks */
    for (long s = 0; s < sequences; s++) {
        a.tasks += ceil_div(query_start[s + 1] - query_start[s], a.rows) * columns;
        for (long row = query_start[s]; row < query_start[s + 1]; row++)
            work += max_l(0, shared_positions(&a, s, row) - first_seen(&a, s, row)) + own_slots(&a, row);
    }
    a.lanes = ceil_div(a.rows * (heads / columns), whole) * whole;
    a.partial_floats = a.lanes * (2 + a.vp);
    if (work * heads * d < 32768) nthreads = 1;
    if (a.tasks < MANY_TASKS * nthreads)
        for (long i = 0; i < a.tasks; i += columns) a.most = max_l(a.most, find_task(&a, i).chunks);
    for (long cuts = 2, least = ceil_div(a.tasks, nthreads) * (2 * a.most + 1); cuts <= min_l(a.most, 2 * nthreads); cuts++) {
        long per = ceil_div(a.most, cuts), time = ceil_div(a.tasks * cuts, nthreads) * (2 * per + 1); /* in halves of a chunk */
        if (time >= least) continue;
        a.per = per, a.cuts = cuts, least = time;
    }
    size_t floats = (size_t)(a.tasks * a.most * a.partial_floats);
    if (a.cuts > 1 && floats <= PARTIALS_MOST) {
        a.partials = scratch(SUMS, floats + (size_t)a.tasks);
        a.ready = (_Atomic int *)(a.partials + floats);
        memset(a.partials + floats, 0, (size_t)a.tasks * 4);
    } else {
        a.per = LONG_MAX, a.cuts = 1;
    }
    parallel(a.tasks * a.cuts, nthreads, attention_cuts, &a);
    return 0;
}
