// Latent attention of few queries over paged KV: one KV head of 576 numbers, whose values are the first 512. Bound by
// reading KV. Arithmetic is that of `_attention_kernel` (latent.py), to the bit.
//
// A cluster of CLUSTER blocks computes an item (`attention._plan_kernel`): groups of 8 pieces of 128 positions. As long
// as there is a group for each block, each computes one on its own; the pieces of a group that is left are shared by
// the blocks. Then each block folds a part of the columns (a slice), in the order of the pieces, from the workspace.
//
// In a block, one warp copies keys to a ring of tiles in shared memory, 64 positions of 64 columns each, and one the
// queries. Two groups of four warps compute: scores of a piece's two steps of 64 positions at the same time, one each,
// then the sums of values, half of the columns each. Products are transposed, as in Triton.
//
// Macros: CLUSTER, ROWS (of a tile, a multiple of 8), GROUP (query heads of a part), TILES (of the ring).

#include "pipeline.cu"

constexpr int STEP = 64, SPLIT = 128, FOLDED = 8;  // positions, positions, pieces: the definition's (attention.py)
constexpr int VALUE = 512, PARTS = 9;              // of 64 columns: those of a value, then the rotated ones
constexpr int ITEM = 16;                           // integers of an item
constexpr int TILE_BYTES = STEP * 128, Q_BYTES = PARTS * ROWS * 128, P_BYTES = ROWS * 128;
constexpr int CONSUMERS = 8;       // warps
constexpr int OWN = ROWS / 2;      // of a thread: numbers of a product's 64 x ROWS
constexpr int PAIRS = ROWS / 2;    // of rows
constexpr int COLUMNS = ROWS / 4;  // of a thread: rows of the tile
constexpr int SLICE = VALUE / CLUSTER, UNITS = PAIRS * SLICE / (32 * CONSUMERS);  // a unit: a pair of rows, a column
constexpr int SCRATCH = CLUSTER > 1 ? FOLDED : 1;  // places of a cluster
constexpr int UNITS_AT_ONCE = UNITS % 3 == 0 ? 3 : UNITS % 2 == 0 ? 2 : 1;
static_assert(UNITS * 32 * CONSUMERS == PAIRS * SLICE, "clusters of 1, 2, 4 or 8 blocks");

struct Shared {
    u64 full[TILES], empty[TILES], q_full, q_empty, written, read;
};
constexpr int Q_AT = RING_AT, P_AT = Q_AT + Q_BYTES;
constexpr int TOPS_AT = P_AT + 2 * P_BYTES;                       // largest scores: by rows, of each warp
constexpr int FACTORS_AT = TOPS_AT + ROWS * CONSUMERS * 4;        // of folding: by pieces and rows, two of each
constexpr int SUMS_AT = FACTORS_AT + (FOLDED + 1) * ROWS * 8;     // of weights, by rows; then a flag
constexpr int TILES_AT = (SUMS_AT + ROWS * 4 + 4 + 1023) / 1024 * 1024;
static_assert(sizeof(Shared) <= RING_AT && TILES >= 2 * PARTS, "a piece is in the ring as a whole");

#define MINUS_INF __uint_as_float(0xFF800000u)

struct Params {
    bf16* out;
    float *partial, *stats;
    int* count;
    const int *items, *tables;
    long long table_stride;
    float scale;
    int num_items, parts, block_size, scratch, planned, lets_next;
};

struct Item {
    int first_row, tokens, first_position, table, first, last, num_items, place, before, part;
    __device__ __forceinline__ Item(const Params& p, int unit) {
        const int* from = p.items + unit / p.parts * ITEM;
        first_row = from[0], tokens = from[1], first_position = from[2], table = from[3];
        first = from[4], last = from[5], num_items = from[7], place = from[8], before = from[9], part = unit % p.parts;
        groups = (from[6] + FOLDED - 1) / FOLDED;
    }
    int groups;  // of the tile
    __device__ __forceinline__ int stop() const { return min(first_position + tokens, last * SPLIT); }
};

// The wait for earlier kernels: once, and late where items, tables and older keys are there before (`launch.py`).
struct Earlier {
    bool running = true;
    __device__ __forceinline__ explicit Earlier(bool planned) {
        if (!planned) wait();
    }
    __device__ __forceinline__ void wait() {
        if (running) wait_for_earlier_kernels();
        running = false;
    }
};

// What the blocks of a cluster do together: the pieces that this one computes from `first` on, `by` apart.
struct Round {
    int group, first, end, by, last, rank;
    __device__ __forceinline__ Round(const Item& item, int rank) : last(item.last), rank(rank) { at(item.first / FOLDED); }
    __device__ __forceinline__ bool ends() const { return group * FOLDED >= last; }
    __device__ __forceinline__ bool whole() const { return by == 1; }  // a group for each block
    __device__ __forceinline__ int groups() const { return whole() ? CLUSTER : 1; }
    __device__ __forceinline__ void next() { at(group + groups()); }
    __device__ __forceinline__ void at(int g) {
        group = g;
        const bool each = (last + FOLDED - 1) / FOLDED - g >= CLUSTER;
        by = each ? 1 : CLUSTER;
        first = each ? (g + rank) * FOLDED : g * FOLDED + rank;
        end = min(last, (each ? g + rank + 1 : g + 1) * FOLDED);
    }
    __device__ __forceinline__ int pieces() const { return max(0, (end - first + by - 1) / by); }
};

// A place in the ring.
struct Place {
    int tile = 0;
    u32 parity = 0;
    __device__ __forceinline__ Place after(int tiles) const {
        const bool wraps = tile + tiles >= TILES;
        Place there;
        there.tile = tile + tiles - (wraps ? TILES : 0), there.parity = parity ^ wraps;
        return there;
    }
};

__device__ __forceinline__ float safe_of(float m) { return m == MINUS_INF ? 0.0f : m; }
// `fold` of one row's statistics: the factors of its earlier results and of those that are added.
__device__ __forceinline__ float2 fold(float& m, float& l, float m_piece, float l_piece, float scale) {
    const float top = fmaxf(m, m_piece), safe = safe_of(top);
    const float old = exp2_(__fmul_rn(__fsub_rn(m, safe), scale));
    const float more = exp2_(__fmul_rn(__fsub_rn(m_piece, safe), scale));
    m = top, l = __fmaf_rn(l, old, __fmul_rn(l_piece, more));
    return make_float2(old, more);
}
__device__ __forceinline__ float folded(float sum, float piece, float old, float more) {
    return __fmaf_rn(sum, old, __fmul_rn(piece, more));
}

// Softmax sums of a thread: of rows 8 (i / 2) + lane % 4 * 2 + i % 2, and of four times 64 columns as a product has
// them.
struct Sums {
    float m[COLUMNS], l[COLUMNS], acc[4][OWN];
    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) m[i] = MINUS_INF, l[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < 4 * OWN; ++i) acc[i / OWN][i % OWN] = 0.0f;
    }
    __device__ __forceinline__ void scale(float (&total)[OWN], const float (&factors)[COLUMNS]) {
#pragma unroll
        for (int e = 0; e < OWN; ++e) {
            const float factor = factors[e / 4 * 2 + e % 2];
            total[e] = __fmul_rn(total[e], factor);
#pragma unroll
            for (int t = 0; t < 4; ++t) acc[t][e] = __fmul_rn(acc[t][e], factor);
        }
    }
    __device__ __forceinline__ void add(const Sums& piece, float scale) {
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            const float2 factors = fold(m[i], l[i], piece.m[i], piece.l[i], scale);
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                const int e = i / 2 * 4 + k % 2 * 2 + i % 2;
                acc[k / 2][e] = folded(acc[k / 2][e], piece.acc[k / 2][e], factors.x, factors.y);
            }
        }
    }
};

// The workspace: by places and pairs of rows, 512 times two results; by places and rows m and l, for each block of a
// cluster.
__device__ __forceinline__ float* results_at(const Params& p, u64 place, int pair, int column) {
    return p.partial + ((place * PAIRS + pair) * VALUE + column) * 2;
}
__device__ __forceinline__ float* stats_at(const Params& p, u64 place, int rank, int row) {
    return p.stats + ((place * CLUSTER + rank) * ROWS + row) * 2;
}
__device__ __forceinline__ uint2 bits_of(float a, float b) { return make_uint2(__float_as_uint(a), __float_as_uint(b)); }
__device__ __forceinline__ void store(const Params& p, u64 place, const Sums& sums, int warp, int lane) {
#pragma unroll
    for (int t = 0; t < 4; ++t)
#pragma unroll
        for (int e = 0; e < OWN; e += 2) {
            const int column = (warp / 4 * 4 + t) * 64 + warp % 4 * 16 + e % 4 / 2 * 8 + lane / 4;
            store8(results_at(p, place, e / 4 * 4 + lane % 4, column), bits_of(sums.acc[t][e], sums.acc[t][e + 1]));
        }
    if (warp < CLUSTER && lane < 4)
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i)
            store8(stats_at(p, place, warp, i / 2 * 8 + lane * 2 + i % 2), bits_of(sums.m[i], sums.l[i]));
}

// Scores of one step as this group's product: rope first, then the other columns.
__device__ __forceinline__ void multiply_keys(Shared& shared, Place at, float (&scores)[OWN]) {
    const u32 ring = shared_address(memory) + TILES_AT, q = shared_address(memory) + Q_AT;
#pragma unroll
    for (int i = 0; i < OWN; ++i) scores[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
        wait(&shared.full[at.tile], at.parity);
        __syncwarp();
        const u64 keys = rows_descriptor(ring + at.tile * TILE_BYTES);
        const u64 queries = rows_descriptor(q + (i ? i - 1 : PARTS - 1) * ROWS * 128);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) wgmma(scores, keys + k * 2, queries + k * 2);
        wgmma_commit();
        at = at.after(1);
    }
    wgmma_wait<0>(scores);
}
// Each warp's largest scores of each row.
__device__ __forceinline__ void store_tops(const float (&scores)[OWN], int warp, int lane) {
    const u32 to = shared_address(memory) + TOPS_AT + warp * 4;
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
        const int e = i / 2 * 4 + i % 2;
        float top = fmaxf(scores[e], scores[e + 2]);
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
        if (lane < 4) shared_store4(to + (i / 2 * 8 + lane * 2 + i % 2) * CONSUMERS * 4, __float_as_uint(top));
    }
}
__device__ __forceinline__ float largest(uint4 v) {
    return fmaxf(fmaxf(__uint_as_float(v.x), __uint_as_float(v.y)), fmaxf(__uint_as_float(v.z), __uint_as_float(v.w)));
}
// Weights of this group's step, to shared memory by rows of the tile.
__device__ __forceinline__ void store_weights(const float (&scores)[OWN], const float (&shift)[COLUMNS], float scale,
                                              u32 to, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < PAIRS / 2; ++i) {
        const int tile = i / 2, e = tile * 4 + i % 2 * 2;
        const u32 pair = pack(exp2_(__fmaf_rn(scores[e], scale, shift[tile * 2])),
                              exp2_(__fmaf_rn(scores[e + 1], scale, shift[tile * 2 + 1])));
        const u32 swizzled = (warp % 4 * 2 + i % 2 ^ lane / 4) << 4;
        shared_store4(to + (tile * 8 + lane / 4) * 128 + swizzled + lane % 4 * 4, transposed(pair));
    }
}
// Values of one step, half of the columns each, times its weights; and sums of the weights.
__device__ __forceinline__ void multiply_values(Shared& shared, Place first, u32 weights, Sums& sums,
                                                float (&total)[OWN], int group) {
    const u32 ring = shared_address(memory) + TILES_AT, ones[4] = {0x3F803F80u, 0x3F803F80u, 0x3F803F80u, 0x3F803F80u};
    const u64 p = rows_descriptor(weights);
    wgmma_fence();
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        const u64 values = rows_descriptor(ring + first.after(1 + group * 4 + t).tile * TILE_BYTES);
#pragma unroll
        for (int k = 0; k < 4; ++k) wgmma_turned(sums.acc[t], values + k * 128, p + k * 2);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma(total, ones, p + k * 2);
    wgmma_commit();
    wgmma_wait<0>(total);
#pragma unroll
    for (int t = 0; t < 4; ++t) wgmma_wait<0>(sums.acc[t]);
#pragma unroll
    for (int t = 0; t < 4; ++t) release(true, &shared.empty[first.after(1 + group * 4 + t).tile]);
}

// The sums of a piece that begins at `from` and of which positions before `stop` are there.
__device__ __forceinline__ void compute(const Params& p, Shared& shared, const Item& item, Place& at, int from,
                                        int stop, bool last, Sums& sums, int warp, int lane) {
    const int group = warp / 4, steps = stop - from > STEP ? 2 : 1, start = from + group * STEP;
    float scores[OWN];
    if (group < steps) {
        const Place own = at.after(group * PARTS);
        multiply_keys(shared, own, scores);
        release(true, &shared.empty[own.tile]);
        if (start >= (item.first_position + 1) / STEP * STEP) {
#pragma unroll
            for (int e = 0; e < OWN; ++e) {
                const int n = start + warp % 4 * 16 + lane / 4 + e % 4 / 2 * 8;
                if (n > item.first_position + (e / 4 * 8 + lane % 4 * 2 + e % 2) / GROUP) scores[e] = MINUS_INF;
            }
        }
    } else {
#pragma unroll
        for (int e = 0; e < OWN; ++e) scores[e] = MINUS_INF;
    }
    release(last, &shared.q_empty);
    store_tops(scores, warp, lane);
    meet<32 * CONSUMERS>();
    float shift[COLUMNS], keep[COLUMNS];
    const u32 tops = shared_address(memory) + TOPS_AT, weights = shared_address(memory) + P_AT;
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
        const u32 row = tops + (i / 2 * 8 + lane % 4 * 2 + i % 2) * CONSUMERS * 4;
        const float first = largest(shared16(row)), both = fmaxf(first, largest(shared16(row + 16)));
        shift[i] = __fmul_rn(safe_of(group ? both : first), -p.scale);
        keep[i] = exp2_(__fmul_rn(__fsub_rn(first, safe_of(both)), p.scale));
        sums.m[i] = both;
    }
    if (group < steps) store_weights(scores, shift, p.scale, weights + group * P_BYTES, warp, lane);
    wgmma_sees();
    meet<32 * CONSUMERS>();
    float total[OWN];
#pragma unroll
    for (int e = 0; e < 4 * OWN; ++e) sums.acc[e / OWN][e % OWN] = 0.0f, total[e % OWN] = 0.0f;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        if (step > 0) sums.scale(total, keep);
        multiply_values(shared, at.after(step * PARTS), weights + step * P_BYTES, sums, total, group);
    }
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) sums.l[i] = total[i / 2 * 4 + i % 2];
    at = at.after(steps * PARTS);
}

// Softmax sums of a block's slice of columns: of each thread UNITS units. m, l: of warp 0, row `lane`.
struct Slice {
    float m = MINUS_INF, l = 0.0f;
    float2 of[UNITS];
    __device__ __forceinline__ void begin() {
        m = MINUS_INF, l = 0.0f;
#pragma unroll
        for (int i = 0; i < UNITS; ++i) of[i] = make_float2(0.0f, 0.0f);
    }
};
__device__ __forceinline__ int pair_of(int unit) { return (unit * 32 * CONSUMERS + (int)threadIdx.x) / SLICE; }
// Numbers from the thread's first unit on, where it is of the first pair of rows.
__device__ __forceinline__ int offset_of(int unit) {
    return pair_of(unit) * (VALUE - SLICE) * 2 + unit * 32 * CONSUMERS * 2;
}
__device__ __forceinline__ float2 folded(float2 sum, uint2 piece, uint4 factors) {
    return make_float2(
        folded(sum.x, __uint_as_float(piece.x), __uint_as_float(factors.x), __uint_as_float(factors.y)),
        folded(sum.y, __uint_as_float(piece.y), __uint_as_float(factors.z), __uint_as_float(factors.w)));
}
// The factors of `fold_results` of one row, and its m and l.
__device__ __forceinline__ void fold_stats(const Params& p, Slice& all, int count, const float* from, int stride,
                                           bool apart) {
    const u32 to = shared_address(memory) + FACTORS_AT + threadIdx.x * 8;
    float m = apart ? MINUS_INF : all.m, l = apart ? 0.0f : all.l;
    uint2 stats[FOLDED];
#pragma unroll
    for (int k = 0; k < FOLDED; ++k)
        if (k < count) stats[k] = load8(from + (u64)k * stride * (CLUSTER * ROWS * 2));
#pragma unroll
    for (int k = 0; k < FOLDED; ++k)
        if (k < count) {
            const float2 f = fold(m, l, __uint_as_float(stats[k].x), __uint_as_float(stats[k].y), p.scale);
            shared_store8(to + k * ROWS * 8, bits_of(f.x, f.y));
        }
    if (apart) {
        const float2 f = fold(all.m, all.l, m, l, p.scale);
        shared_store8(to + FOLDED * ROWS * 8, bits_of(f.x, f.y));
    } else {
        all.m = m, all.l = l;
    }
}
__device__ __forceinline__ int column_of(int unit, int rank) {
    return rank * SLICE + (unit * 32 * CONSUMERS + (int)threadIdx.x) % SLICE;
}
// Folds `count` results, up to 8 of them, that are `stride` places apart, in order: to `all`, or (`apart`) together first
// and then to `all`.
__device__ __forceinline__ void fold_results(const Params& p, Slice& all, int count, u64 place, int stride, bool apart,
                                             int rank) {
    const u32 factors = shared_address(memory) + FACTORS_AT;
    const float* from = results_at(p, place, 0, rank * SLICE) + threadIdx.x * 2;
    const int step = stride * PAIRS * VALUE * 2;
#pragma unroll
    for (int begin = 0; begin < UNITS; begin += UNITS_AT_ONCE) {
        uint2 of[FOLDED][UNITS_AT_ONCE];
#pragma unroll
        for (int k = 0; k < FOLDED; ++k)
#pragma unroll
            for (int i = 0; i < UNITS_AT_ONCE; ++i)
                if (k < count) of[k][i] = load8(from + (u64)k * step + offset_of(begin + i));
        if (begin == 0) {
            if (threadIdx.x < ROWS) fold_stats(p, all, count, stats_at(p, place, rank, threadIdx.x), stride, apart);
            meet<32 * CONSUMERS>();
        }
#pragma unroll
        for (int i = 0; i < UNITS_AT_ONCE; ++i) {
            float2& to = all.of[begin + i];
            const u32 row = factors + pair_of(begin + i) * 16;  // factors of a pair of rows
            float2 sum = apart ? make_float2(0.0f, 0.0f) : to;
#pragma unroll
            for (int k = 0; k < FOLDED; ++k)
                if (k < count) sum = folded(sum, of[k][i], shared16(row + k * ROWS * 8));
            if (apart) sum = folded(to, bits_of(sum.x, sum.y), shared16(row + FOLDED * ROWS * 8));
            to = sum;
        }
    }
    meet<32 * CONSUMERS>();
}
__device__ __forceinline__ void store(const Params& p, u64 place, const Slice& slice, int rank) {
#pragma unroll
    for (int i = 0; i < UNITS; ++i)
        store8(results_at(p, place, pair_of(i), column_of(i, rank)), bits_of(slice.of[i].x, slice.of[i].y));
    if (threadIdx.x < ROWS) store8(stats_at(p, place, rank, threadIdx.x), bits_of(slice.m, slice.l));
}
__device__ __forceinline__ void write(const Params& p, const Item& item, const Slice& slice, int rank) {
    const u32 sums = shared_address(memory) + SUMS_AT;
    if (threadIdx.x < ROWS) shared_store4(sums + threadIdx.x * 4, __float_as_uint(slice.l));
    meet<32 * CONSUMERS>();
    const int rows = item.tokens * GROUP;
    bf16* out = p.out + ((u64)item.first_row * p.parts + item.part) * GROUP * VALUE;
#pragma unroll
    for (int i = 0; i < UNITS; ++i) {
        const int row = pair_of(i) * 2, column = column_of(i, rank);
        const float low = divided(slice.of[i].x, shared_float(sums + row * 4));
        const float high = divided(slice.of[i].y, shared_float(sums + row * 4 + 4));
        if (row < rows) out[row * VALUE + column] = narrow(low);
        if (row + 1 < rows) out[(row + 1) * VALUE + column] = narrow(high);
    }
    meet<32 * CONSUMERS>();
}

__device__ __forceinline__ void wait_for_cluster(u64* barrier, u32 parity) {
    u32 polls = 0;
    while (!mbarrier_passed_by_cluster(barrier, parity)) {
        if (++polls > MAX_POLLS) give_up();
        pause();
    }
}
// All consumers of the cluster arrive at a barrier of each of its blocks.
__device__ __forceinline__ void tell_cluster(u64* barrier, int lane) {
    __threadfence();
    __syncwarp();
    if (lane < CLUSTER) mbarrier_arrive_at(barrier, lane);
}
// Whether this block is the last one to come to its slice of a tile that several clusters compute.
__device__ __forceinline__ bool is_last(const Params& p, const Item& item, int rank) {
    const u32 flag = shared_address(memory) + SUMS_AT + ROWS * 4;
    __threadfence();
    meet<32 * CONSUMERS>();
    if (threadIdx.x == 0) {
        int* counter = p.count + ((u64)item.place * p.parts + item.part) * CLUSTER + rank;
        const bool last = atomicAdd(counter, 1) == item.num_items - 1;
        if (last) *counter = 0;
        shared_store4(flag, last);
        __threadfence();
    }
    meet<32 * CONSUMERS>();
    return shared4(flag);
}

// Computes this block's pieces of a round: one result in the workspace, at `place` and its rank, or one of each piece.
__device__ __forceinline__ void compute(const Params& p, Shared& shared, const Item& item, const Round& round, Place& at,
                                        u64 place, int& left, int warp, int lane) {
    Sums group, piece;
    group.begin();
#pragma unroll 1
    for (int i = round.first; i < round.end; i += round.by) {
        compute(p, shared, item, at, i * SPLIT, item.stop(), --left == 0, piece, warp, lane);
        if (round.whole())
            group.add(piece, p.scale);
        else
            store(p, place + i % FOLDED, piece, warp, lane);
    }
    if (round.whole()) store(p, place, group, warp, lane);
}

__device__ __forceinline__ void consume(const Params& p, Shared& shared, int rank, int warp) {
    const int lane = threadIdx.x % 32, cluster = blockIdx.x / CLUSTER;
    const u64 scratch = p.scratch + cluster * SCRATCH;
    Earlier earlier(p.planned);
    Place at;
    u32 rounds = 0, items = 0;
    for (int unit = cluster; unit < p.num_items * p.parts; unit += gridDim.x / CLUSTER, ++items) {
        const Item item(p, unit);
        earlier.wait();
        if (item.first_row < 0) break;
        const bool shares = item.num_items > 1;  // all groups are folded in the end
        const u64 groups = (u64)item.place * p.parts + item.part;
        int left = 0;
        for (Round round(item, rank); !round.ends(); round.next()) left += round.pieces();
        wait(&shared.q_full, items & 1);
        __syncwarp();
        release(left == 0, &shared.q_empty);
        Slice all;
        all.begin();
#pragma unroll 1
        for (Round round(item, rank); !round.ends(); round.next(), ++rounds) {
            if (rounds > 0) wait_for_cluster(&shared.read, rounds - 1 & 1);
            const bool direct = shares && round.whole();
            const u64 to = direct ? groups + (round.group + rank) * p.parts : scratch + (round.whole() ? rank : 0);
            compute(p, shared, item, round, at, to, left, warp, lane);
            tell_cluster(&shared.written, lane);
            wait_for_cluster(&shared.written, rounds & 1);
            __threadfence();
            if (!direct) {
                const int count = round.whole() ? CLUSTER : min(round.last - round.group * FOLDED, FOLDED);
                if (shares) all.begin();
                fold_results(p, all, count, scratch, 1, !shares && !round.whole(), rank);
                if (shares) store(p, groups + round.group * p.parts, all, rank);
            }
            tell_cluster(&shared.read, lane);
        }
        if (shares) {
            if (!is_last(p, item, rank)) continue;
            all.begin();
#pragma unroll 1
            for (int g = 0; g < item.groups; g += FOLDED)
                fold_results(p, all, min(item.groups - g, FOLDED), groups + g * p.parts, p.parts, false, rank);
        }
        write(p, item, all, rank);
    }
}

__device__ __forceinline__ void produce_keys(const Params& p, Shared& shared, const TensorMap& kv, int rank) {
    const bool leader = threadIdx.x % 32 == 0;
    Earlier earlier(p.planned);
    Place at;
    u32 filled = 0;  // tiles, up to the ring's
    for (int unit = blockIdx.x / CLUSTER; unit < p.num_items * p.parts; unit += gridDim.x / CLUSTER) {
        const Item item(p, unit);
        if (item.first_row < 0) break;
        const int* table = p.tables + item.table * p.table_stride;
        const int stop = item.stop();
        for (Round round(item, rank); !round.ends(); round.next())
            for (int i = 0; i < round.pieces(); ++i) {
                const int from = (round.first + i * round.by) * SPLIT, then = min(from + STEP, stop - 1) / STEP * STEP;
                const int slots[2] = {table[from / p.block_size] * p.block_size + from % p.block_size,
                                      table[then / p.block_size] * p.block_size + then % p.block_size};
#pragma unroll
                for (int k = 0; k < 2 * PARTS; ++k) {
                    const int start = from + k / PARTS * STEP;
                    if (start >= stop) break;
                    if (start + STEP > item.before) earlier.wait();
                    if (filled >= TILES)
                        wait(&shared.empty[at.tile], at.parity ^ 1);
                    else
                        ++filled;
                    __syncwarp();
                    mbarrier_expect_if(leader, &shared.full[at.tile], TILE_BYTES);
                    copy_box_if(leader, memory + TILES_AT + at.tile * TILE_BYTES, kv, slots[k / PARTS],
                                k % PARTS ? k % PARTS - 1 : PARTS - 1, &shared.full[at.tile]);
                    at = at.after(1);
                }
            }
    }
}
__device__ __forceinline__ void produce_queries(const Params& p, Shared& shared, const TensorMap& q) {
    const bool leader = threadIdx.x % 32 == 0;
    Earlier earlier(p.planned);
    u32 items = 0;
    for (int unit = blockIdx.x / CLUSTER; unit < p.num_items * p.parts; unit += gridDim.x / CLUSTER, ++items) {
        const Item item(p, unit);
        earlier.wait();
        if (item.first_row < 0) break;
        if (items > 0) wait(&shared.q_empty, items - 1 & 1);
        __syncwarp();
        mbarrier_expect_if(leader, &shared.q_full, Q_BYTES);
        copy_box_if(leader, memory + Q_AT, q, (item.first_row * p.parts + item.part) * GROUP, 0, &shared.q_full);
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(32 * (CONSUMERS + 4), 1)
    attend(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap kv, const __grid_constant__ Params p) {
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), rank = cluster_rank();
    if (threadIdx.x == 0) {
        for (int i = 0; i < TILES; ++i) mbarrier_init(&shared.full[i], 1), mbarrier_init(&shared.empty[i], 4);
        mbarrier_init(&shared.q_full, 1);
        mbarrier_init(&shared.q_empty, CONSUMERS);
        mbarrier_init(&shared.written, CONSUMERS * CLUSTER);
        mbarrier_init(&shared.read, CONSUMERS * CLUSTER);
        mbarriers_are_ready();
    }
    __syncthreads();
    arrive_at_cluster();
    if (p.lets_next) let_later_kernels_begin();
    if (warp == CONSUMERS && threadIdx.x % 32 == 0) prefetch(kv);
    if (warp == CONSUMERS + 1 && threadIdx.x % 32 == 0) prefetch(q);
    if (warp < CONSUMERS) {
        more_registers<232>();
        meet_cluster();  // barriers of other blocks are ready
        consume(p, shared, rank, warp);
    } else {
        fewer_registers<40>();
        if (warp == CONSUMERS) produce_keys(p, shared, kv, rank);
        if (warp == CONSUMERS + 1) produce_queries(p, shared, q);
        __syncwarp();
        meet_cluster();
    }
    arrive_at_cluster();
    meet_cluster();  // no block ends while others arrive at its barriers
}
