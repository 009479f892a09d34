/* The calls of these kernels: each function ssd_NAME(const struct NAME *call, int threads) returns 0, or 1 if a number in a
 * tensor that is used as an index is out of range.  The number of threads never changes a result's bits.
 * calls.py reads this file: a field is a number, an address, or another structure of this file.  An unnamed structure's fields
 * are fields of the one that has it. */
typedef int call_fn(const void *call, int threads);

/* A packed weight [n, k].  form: of a quantised one, else 0; its scales are [panels][groups][NR], with offsets
 * [panels][groups][2][NR], in fp32 or fp16, one for every `scaled` weights of a row; flags: see codes.h.
 * gated: of gate and up rows, n of each. */
struct weight {
    const char *w;
    const void *scales;
    long n, k, scaled;
    int bf16, gated, form, flags;
};

/* how the rows of a gated weight become one: silu(min(gate, limit)) * (up within +-limit, plus shift) */
struct glu {
    float slope, limit, shift;
};

struct pack { /* w: as it is; out: panels */
    const void *w;
    long ldw;
    void *out;
    long n, k;
    int bf16, gated;
};

/* rows of a weight that is not gated: out[t] = W[ids[t]], of a quantised one scale * code (+ offset), each rounded to fp32;
 * spares a tied embedding its second copy */
struct embedding {
    struct weight;
    const void *ids;
    int ids64;
    void *out;
    long tokens;
};

/* y[m, n] = x[m, k] @ W^T (+ bias), or what `glu` makes of a gated weight's rows.  wide: y is fp32 although the storage is
 * bf16.  row_scales: fp32 [m][row_groups], or NULL. */
struct linear {
    struct weight;
    const void *x;
    long ldx;
    const void *bias;
    void *y;
    long m;
    struct glu glu;
    int wide;
    const float *row_scales;
    long row_groups;
};

/* The `count` experts of each row and the `shared` ones behind them, and their weights, by a RoutingRule
 * (ssd/kernels/weights.py).  A pair is (row, place among its experts); `order` has the pairs by expert, those of expert e
 * from starts[e] on. */
struct route {
    const float *logits, *correction;
    long rows, experts, count, shared, groups, kept_groups;
    int normalized, sigmoid;
    float scale;
    int32_t *ids;
    float *weights;
    int32_t *order, *starts;
};

/* A product for the pairs of each expert that has any: y[p] = x[p / repeats] @ W_e^T.  `weights` and `all_scales` have an
 * address for each expert; the bias is [experts][n], of gated weights [2][experts][n]. */
struct expert_linear {
    struct linear linear; /* its weight is that of any expert; m is not used */
    const int32_t *order, *starts;
    long experts, repeats;
    const int64_t *weights, *all_scales;
};

/* y[r][h] = x[r][h] @ W_h^T of each head h.  The strides of heads are in elements, too. */
struct head_linear {
    struct linear linear; /* its weight is that of any head */
    long heads, x_head, y_head, ldy;
    const int64_t *weights;
};

/* y[r] = sum over i of weights[r][i] * x[r * count + i], one after the other, plus shared[r] if it is there; wide: y is fp32
 * although x is bf16 */
struct combine {
    const void *x;
    const float *weights, *shared;
    void *y;
    long rows, count, n;
    int bf16, wide;
};

/* out[m, d] = norm(x) * w; with a residual[m, d]: residual += x, and its norm */
struct rms_norm {
    const void *x;
    long ldx;
    void *residual;
    const void *w;
    void *out;
    long m, d;
    float eps;
    int bf16, w_bf16; /* types of the rows and of the weights */
};

/* keys and values [cache_blocks][block_size][kv_heads][d], of the storage type `kv`; those in e4m3 are divided by the scales.
 * Latent attention: both are the same cache, of which a value has the first value_d columns; else value_d is d. */
struct cache {
    void *k_cache, *v_cache;
    long cache_blocks, block_size, kv_heads, d, value_d;
    int kv;
    float k_scale, v_scale;
};

struct rope_and_store {
    struct cache;
    const void *qkv;
    long ldqkv;
    const void *positions, *slots;
    int positions64, slots64;
    const float *cos, *sin;
    const void *q_weight, *k_weight;
    float eps;
    void *q_out;
    long tokens, heads, max_position; /* max_position: rows of cos and sin */
    int bf16;
};

/* Keys [tokens][d] of latent attention to their cache: norms of the first value_d columns, and the others rotated.  As many
 * last ones of each of q's heads [tokens][heads][q_d] are rotated to the last columns of q_out [tokens][heads][d]. */
struct latent_rope_and_store {
    struct cache;
    const void *q, *keys;
    long ldq, ldkeys, q_d;
    const int32_t *positions, *slots;
    const float *cos, *sin;
    const void *norm;
    float eps;
    void *q_out;
    long tokens, heads, max_position;
    int bf16;
};

struct paged_attention { /* see attention.h */
    struct cache;
    const void *q;
    long ldq;
    void *out;
    const int32_t *query_start, *context_len, *block_tables, *table_rows;
    long tokens, sequences, tables, columns, table_stride, heads; /* tables, columns: of the block tables */
    float scale;        /* of the scores, with that of the keys */
    const float *sinks; /* of the heads: scores that have no value; NULL: none */
    const int32_t *positions, *slots; /* slots of trees: [path_rows]; NULL: neither branches nor trees */
    long depth;                       /* of branches */
    const int32_t *depths;            /* of each row's branch, in place of `depth`; NULL: that */
    const int32_t *paths, *decided;   /* of trees: [tokens][path_columns], [tokens]; NULL: no trees */
    long path_columns, path_rows;     /* rows: that paths name */
    long first;  /* positions before it are not seen */
    long window; /* positions that a row sees, its own included; 0: all */
    int bf16;
};

struct generator { /* constants of the noise generator */
    uint64_t golden, mix1, mix2;
};

struct gumbel { /* a row of noise for each key */
    const int64_t *keys;
    float *out;
    long rows, vocab;
    struct generator g;
};

/* The `count` largest scores of each row, in order, the lower token first where they are equal; `excluded` (or NULL): a
 * token of each row that does not count, -1: none.  -inf comes with token 0, and the first token is -1 if the row has no
 * choice: all are -inf, or some are NaN or +inf.  `ids` (or NULL): those of the tokens; without them they are numbered.
 * With `slots` (-1: padding), rows whose temperature is above 0 have the scores logit / temperature + noise: the seed's key
 * and the temperature are words 0 and 2 of the slot's `columns`, the position is that of the token to choose. */
struct best {
    const float *scores;
    long ld;
    const int32_t *ids, *excluded;
    int32_t *tokens;
    float *values;
    long rows, vocab, count;
    const int32_t *slots, *positions, *columns;
    long words; /* of a slot's columns */
    struct generator g;
};

/* Functions of rounds and draft runs, as triton/rounds.py and runs.py describe them.  -1 is padding: as a row's work, as
 * a work's slot, as a logit row, as a work's first row. */
struct state { /* a row of each for every slot */
    int32_t *length, *token_ids, *drafts;
    float *confidence;
    int32_t *origin, *num_accepted;
    long num_slots, columns, width; /* columns: of token_ids; width: tokens of a draft */
};

struct prepare_rows {
    struct state;
    const int32_t *row_work, *slots, *starts, *query_start, *logit_rows, *tables;
    int32_t *tokens, *positions, *slot_mapping, *context_len;
    int64_t *gather;
    int32_t *decided_slot, *decided, *num_drafted;
    long rows, works, logits, table_columns, block_size;
};

struct accept {
    struct state;
    const int32_t *chosen, *slots, *first_row, *num_logits;
    int32_t *out;
    long rows, works, vocab_size;
};

/* Trees: parents and path are [num_slots][width], path has the nodes that were accepted last. */
struct place_nodes {
    struct state;
    const int32_t *parents, *row_work, *slots, *starts, *query_start, *slot_mapping, *logit_rows;
    int32_t *positions, *paths, *shared, *before;                     /* of rows */
    int32_t *decided_slot, *decided, *num_drafted, *path_tokens;      /* of logit rows */
    long rows, works, logits, depth;
};

struct accept_node {
    struct state;
    const int32_t *parents;
    int32_t *path;
    const int32_t *chosen, *slots, *first_row, *num_logits, *decided_slot;
    int32_t *out;
    long rows, works, vocab_size;
};

struct move_accepted { /* caches: of each tensor its address, and the bytes of a token */
    struct state;
    const int32_t *path, *slots, *first_row, *tables;
    const int64_t *caches;
    long works, table_columns, block_size, num_caches;
};

struct follow_rows { /* above: [sequences * beams]; caches as before, KV slots as in `extend_rows` */
    const int64_t *above, *caches;
    char *states; /* NULL: none; state_size: bytes of a row */
    long sequences, beams, depth, first_slot, slots_per_branch, num_caches, state_size;
};

struct stage {
    struct state;
    const int32_t *slots, *num_drafted;
    int32_t *computed, *first, *count, *tokens;
    float *verified_confidence;
    int32_t *hit;
    long sequences, reads, hit_origin, vocab_size; /* reads: tokens of a sequence that are staged, less one */
    int fork;
};

struct read_rows { /* given: [sequences][ld_given]; beams: [depths][4][sequences * width], or NULL */
    const int32_t *slots, *first, *count, *given, *tables, *table_rows;
    int32_t *tokens, *positions, *slot_mapping, *context_len, *decided, *beams;
    int64_t *last;
    long sequences, reads, ld_given, ld_tables, table_columns, padding_slot, block_size;
    long width, depths, first_slot, slots_per_branch;
};

struct look_up {
    struct state;
    const int32_t *slots, *after, *chain;
    const float *chain_confidence;
    int32_t *rows;
    long sequences, branches, ld_after, ld; /* branches: of a sequence, whose chains have ld numbers each */
    long depth, hit, miss;                  /* depth: tokens of a branch behind its first */
};

struct store {
    struct state;
    const int32_t *slots, *chain;
    const float *chain_confidence;
    long sequences, ld, count, value;
};

struct extend_rows {
    const int32_t *slots, *first, *count, *after, *chain; /* after: [sequences][branches], or NULL: one row for each sequence */
    int32_t *tokens, *positions, *slot_mapping, *decided, *row_slots;
    long rows, branches, ld_after, ld, depth, reads, first_slot, slots_per_branch, vocab_size;
};

struct block_rows {
    struct state;
    const int32_t *slots, *tables;
    int32_t *tokens, *positions, *slot_mapping, *context_len, *row_slots; /* of rows */
    int32_t *decided, *decided_slot; /* of token `place` of a sequence at sequence * ld_sequence + place * ld_place */
    long sequences, queries, count, ld_sequence, ld_place, mask_token, table_columns, block_size;
};

struct keep_best {
    const int32_t *best;
    const float *scores;
    int32_t *chain;
    float *confidence;
    long rows, found, ld, column, each; /* found: tokens of a row of `best`; each: rows of it for one of the chain */
    float max_confidence;
};

struct call {
    call_fn *function;
    const void *arguments;
};

struct repeat { /* recorded calls, one after the other */
    const struct call *calls;
    long count;
};
