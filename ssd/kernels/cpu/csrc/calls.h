/* repeating recorded calls
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

/* the process
 * To be called once, before anything else; 0, or 1 if the system does not let the process use what was compiled for. */
int ssd_enable(void) {
#if defined(__AMX_TILE__) && defined(SYS_arch_prctl)
    const int request_permission = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    return syscall(SYS_arch_prctl, request_permission, tile_data) != 0;
#else
    return 0;
#endif
}
