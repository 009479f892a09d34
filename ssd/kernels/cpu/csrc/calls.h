/* repeating recorded calls, with the threads of now */
#define FOLLOWED 64 /* most rows that are packed by what computes them: of more, each thread has some to pack */

static const struct linear *as_product(const struct call *call) {
    return call->function == ssd_linear ? call->arguments : 0;
}

/* bytes of the panels of a product */
static long panel_bytes(const struct linear *a) {
    long rows = a->n * (a->gated ? 2 : 1);
    if (!a->form) return ssd_packed_bytes(rows, a->k, a->bf16, a->gated);
    return ceil_div(rows, NR) * NR * (is_4_bits(a->form) ? ceil_div(a->k, 16) * 8 : ceil_div(a->k, 16) * 16);
}

/* the result of a call whose rows can be packed by it: address, rows, columns and type; no rows if it has none */
struct result {
    const void *at;
    long rows, columns;
    int bf16;
};

static struct result result_of(const struct call *call) {
    if (call->function == ssd_rms_norm) {
        const struct rms_norm *a = call->arguments;
        return (struct result){a->out, a->m, a->d, a->bf16};
    }
    if (call->function == ssd_paged_attention) {
        const struct paged_attention *a = call->arguments;
        return (struct result){a->out, a->tokens, a->heads * a->value_d, a->bf16};
    }
    const struct linear *a = as_product(call);
    return a && !a->wide ? (struct result){a->y, a->m, a->n, a->bf16} : (struct result){0};
}

/* whether the rows of a product are the result of the call before it, and are to be packed by that */
static int follows(const struct linear *a, const struct call *before) {
    struct result found = result_of(before);
    return found.rows > 0 && found.rows <= FOLLOWED && a->x == found.at && a->ldx == found.columns && a->m == found.rows &&
           a->k == found.columns && a->n > 0 && a->bf16 == found.bf16 && a->form && a->form != FP8 && !a->row_scales;
}

int ssd_repeat(const void *given, int nthreads) {
    const struct call *calls = ((const struct repeat *)given)->calls;
    const long count = ((const struct repeat *)given)->count;
    struct team *team = nthreads > 1 ? team_of(nthreads - 1) : 0;
    struct linear_args plans[2];
    int status = 0, followed = 0;
    for (long i = 0, next = 0; i < count && !status; i++) {
        const struct linear *product = as_product(calls + i), *after = i + 1 < count ? as_product(calls + i + 1) : 0;
        struct linear_args *own = plans + i % 2, *plan = plans + (i + 1) % 2;
        if (team && next <= i) { /* the next product */
            for (next = i + 1; next < count && !as_product(calls + next);) next++;
            const struct linear *a = next < count ? as_product(calls + next) : 0;
            atomic_store(&team->weights, a ? a->w : 0);
            atomic_store(&team->weight_bytes, a ? panel_bytes(a) : 0);
        }
        if (product && (product->m <= 0 || product->n <= 0)) continue; /* of no rows or columns */
        if (product && !followed) {
            *own = plan_linear(product, nthreads, i % 2);
            pack_all(own, nthreads);
        }
        following = 0, followed = after && follows(after, calls + i);
        if (followed) {
            *plan = plan_linear(after, nthreads, (i + 1) % 2);
            memset(plan->ready, 0, (size_t)(plan->m * plan->groups.count) * 4);
            following = plan;
        }
        if (product) {
            own->next = following;
            multiply(own);
        } else {
            status = calls[i].function(calls[i].arguments, nthreads);
        }
    }
    following = 0;
    if (team) atomic_store(&team->weight_bytes, 0);
    return status;
}

/* the process
 * To be called once, before anything else; 0, or 1 if the system does not let the process use what was compiled for. */
int ssd_enable(void) { return enable_amx(); }
