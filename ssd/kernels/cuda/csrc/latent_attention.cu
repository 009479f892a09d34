// Latent attention of few queries over paged KV: one KV head of 576 numbers, whose values are the first 512. Bound by
// reading KV. Arithmetic is that of `_attention_kernel` (latent.py), to the bit.
//
// A block computes items (`attention._plan_kernel`): some pieces of 128 positions of a tile, or groups of 8 of them.
// One warp copies keys to a ring of boxes in shared memory, 64 positions of 192 columns each, and one the queries. Four
// warps compute scores and weights, step by step of 64 positions, and two times four the sums of values, half of the
// columns each, one step behind. Products are transposed, as in Triton.
//
// Where a tile has several items, their results are in the workspace. A block that has computed all of its items waits
// for the others of their tiles, and folds some of the columns. So all blocks must run at the same time.
//
// Macros: ROWS (of a tile, a multiple of 8), GROUP (query heads of a part), BOXES (of the ring), CHUNK (`latent_fold.cu`).

#include "pipeline.cu"
#include "softmax.cu"

constexpr int STEP = 64, SPLIT = 128, FOLDED = 8;  // positions, positions, pieces: the definition's (attention.py)
constexpr int VALUE = 512, PARTS = 9;              // of 64 columns: those of a value, then the rotated ones
constexpr int PART_BYTES = STEP * 128, Q_BYTES = PARTS * ROWS * 128, P_BYTES = ROWS * 128;
constexpr int BOX = 3, BOX_BYTES = BOX * PART_BYTES;  // parts; three boxes are a step
constexpr int SCORERS = 128, ADDERS = 256;  // threads, behind those that copy
constexpr int OWN = ROWS / 2;               // of a thread: numbers of a product's 64 x ROWS
constexpr int COLUMNS = ROWS / 4;           // of a thread: rows of the tile
constexpr int COPY_REGISTERS = 40, SCORE_REGISTERS = 88, ADD_REGISTERS = 192;  // of a thread, for 128 in all

struct Shared {
    u64 full[BOXES], empty[BOXES], q_full, q_empty, p_full[2], p_empty[2];
};
constexpr int STATS_AT = 256;  // of two steps, by rows: the largest score, the factor of earlier sums
constexpr int Q_AT = RING_AT, P_AT = Q_AT + Q_BYTES;  // weights, likewise
constexpr int TOPS_AT = P_AT + 2 * P_BYTES;           // largest scores, likewise, of each warp
constexpr int BOXES_AT = (TOPS_AT + 2 * ROWS * 16 + 1023) / 1024 * 1024;
static_assert(sizeof(Shared) <= STATS_AT && STATS_AT + 2 * ROWS * 8 <= RING_AT, "they are before the queries");
static_assert(BOXES >= 2 * BOX, "a step is in the ring while the next one comes");

struct Params {
    bf16* out;
    float *partial, *stats;
    int* count;
    const int *items, *tables;
    long long table_stride;
    float scale;
    int num_items, parts, block_size, planned, lets_next;
};

struct Item {
    int first_row, tokens, first_position, table, first, last, pieces, num_items, place, before, unit, part;
    __device__ __forceinline__ Item(const Params& p, int at) {
        const int* from = p.items + at / p.parts * ITEM;
        first_row = from[0], tokens = from[1], first_position = from[2], table = from[3], first = from[4], last = from[5];
        pieces = from[6], num_items = from[7], place = from[8], before = from[9], part = at % p.parts;
        unit = num_items > 1 ? from[10] : FOLDED;  // pieces of a place
    }
    __device__ __forceinline__ int stop() const { return min(first_position + tokens, last * SPLIT); }
    __device__ __forceinline__ bool shared() const { return num_items > 1; }
    // Of the tile's items.
    __device__ __forceinline__ int number() const { return last == pieces ? num_items - 1 : first / (last - first); }
    __device__ __forceinline__ u64 at(const Params& p, int i) const { return (u64)(place + i) * p.parts + part; }
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

// A place in the ring.
struct Place {
    int box = 0;
    u32 parity = 0;
    __device__ __forceinline__ Place after(int boxes) const {
        const bool wraps = box + boxes >= BOXES;
        Place there;
        there.box = box + boxes - (wraps ? BOXES : 0), there.parity = parity ^ wraps;
        return there;
    }
    // Of the step that begins here: where a part is. The first box has the last parts, as scores begin with the rotated
    // columns.
    __device__ __forceinline__ u32 of(int part) const {
        const int number = (part / BOX + 1) % BOX;
        return shared_address(memory) + BOXES_AT + after(number).box * BOX_BYTES + part % BOX * PART_BYTES;
    }
};

__device__ __forceinline__ uint2 bits_of(float a, float b) {
    return make_uint2(__float_as_uint(a), __float_as_uint(b));
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
    __device__ __forceinline__ void add(const Sums& other, float scale) {
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            const float2 factors = fold(m[i], l[i], other.m[i], other.l[i], scale);
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                const int e = i / 2 * 4 + k % 2 * 2 + i % 2;
                acc[k / 2][e] = folded(acc[k / 2][e], other.acc[k / 2][e], factors.x, factors.y);
            }
        }
    }
};

// Scores of a step's positions (that the group of warps holds as `wgmma` has them) and the rows of the tile.
__device__ __forceinline__ void multiply_keys(Shared& shared, Place at, float (&scores)[OWN]) {
    const u32 q = shared_address(memory) + Q_AT;
#pragma unroll
    for (int i = 0; i < OWN; ++i) scores[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
        const int part = i ? i - 1 : PARTS - 1;
        if (i == 0 || part < PARTS - BOX && part % BOX == 0) {
            const Place box = at.after(i ? part / BOX + 1 : 0);
            wait(&shared.full[box.box], box.parity);
            __syncwarp();
        }
        const u64 keys = rows_descriptor(at.of(part)), queries = rows_descriptor(q + part * ROWS * 128);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) wgmma(scores, keys + k * 2, queries + k * 2);
        wgmma_commit();
    }
    wgmma_wait<0>(scores);
}
__device__ __forceinline__ float largest(uint4 v) {
    return fmaxf(fmaxf(__uint_as_float(v.x), __uint_as_float(v.y)), fmaxf(__uint_as_float(v.z), __uint_as_float(v.w)));
}
// The largest score of each of the thread's rows, of all four warps.
__device__ __forceinline__ void find_tops(const float (&scores)[OWN], float (&tops)[COLUMNS], u32 at, int warp,
                                          int lane) {
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
        const int e = i / 2 * 4 + i % 2;
        float top = fmaxf(scores[e], scores[e + 2]);
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
        if (lane < 4) shared_store4(at + (i / 2 * 8 + lane * 2 + i % 2) * 16 + warp * 4, __float_as_uint(top));
    }
    meet<SCORERS, 2>();
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) tops[i] = largest(shared16(at + (i / 2 * 8 + lane % 4 * 2 + i % 2) * 16));
}
// Weights of a step, to shared memory by rows of the tile.
__device__ __forceinline__ void store_weights(const float (&scores)[OWN], const float (&shift)[COLUMNS], float scale,
                                              u32 to, int warp, int lane) {
#pragma unroll
    for (int i = 0; i < OWN / 2; ++i) {
        const int tile = i / 2, e = tile * 4 + i % 2 * 2;
        const u32 pair = pack(exp2_(__fmaf_rn(scores[e], scale, shift[tile * 2])),
                              exp2_(__fmaf_rn(scores[e + 1], scale, shift[tile * 2 + 1])));
        const u32 swizzled = (warp * 2 + i % 2 ^ lane / 4) << 4;
        shared_store4(to + (tile * 8 + lane / 4) * 128 + swizzled + lane % 4 * 4, transposed(pair));
    }
}

// Scores and weights of all items, by four warps.
__device__ __forceinline__ void score(const Params& p, Shared& shared, int warp, int lane) {
    const u32 base = shared_address(memory);
    Earlier earlier(p.planned);
    Place at;
    u32 items = 0, steps = 0;
    for (int unit = blockIdx.x; unit < p.num_items * p.parts; unit += gridDim.x, ++items) {
        const Item item(p, unit);
        if (item.first_row < 0) break;
        const int stop = item.stop(), unmasked = (item.first_position + 1) / STEP * STEP;
        wait(&shared.q_full, items & 1);
        __syncwarp();
        float m[COLUMNS];
#pragma unroll 1
        for (int start = item.first * SPLIT; start < stop; start += STEP, ++steps, at = at.after(BOX)) {
            float scores[OWN], tops[COLUMNS], shift[COLUMNS], keep[COLUMNS];
            multiply_keys(shared, at, scores);
            release(start + STEP >= stop, &shared.q_empty);
            if (start >= unmasked) {
#pragma unroll
                for (int e = 0; e < OWN; ++e) {
                    const int n = start + warp * 16 + lane / 4 + e % 4 / 2 * 8;
                    if (n > item.first_position + (e / 4 * 8 + lane % 4 * 2 + e % 2) / GROUP) scores[e] = MINUS_INF;
                }
            }
            const u32 slot = steps & 1, stats = base + STATS_AT + slot * ROWS * 8;
            find_tops(scores, tops, base + TOPS_AT + slot * ROWS * 16, warp, lane);
#pragma unroll
            for (int i = 0; i < COLUMNS; ++i) {
                const float before = start % SPLIT ? m[i] : MINUS_INF, safe = safe_of(fmaxf(before, tops[i]));
                m[i] = fmaxf(before, tops[i]);
                shift[i] = __fmul_rn(safe, -p.scale);
                keep[i] = exp2_(__fmul_rn(__fsub_rn(before, safe), p.scale));
            }
            if (steps >= 2) wait(&shared.p_empty[slot], steps / 2 - 1 & 1);
            __syncwarp();
            store_weights(scores, shift, p.scale, base + P_AT + slot * P_BYTES, warp, lane);
            if (warp == 0 && lane < 4)
#pragma unroll
                for (int i = 0; i < COLUMNS; ++i)
                    shared_store8(stats + (i / 2 * 8 + lane * 2 + i % 2) * 8, bits_of(m[i], keep[i]));
            wgmma_sees();
            release(true, &shared.p_full[slot]);
        }
    }
}

// Values of one step, half of the columns each, times its weights; and sums of the weights.
__device__ __forceinline__ void multiply_values(Shared& shared, Place first, u32 weights, Sums& sums,
                                                float (&total)[OWN], int half) {
    const u32 ones[4] = {0x3F803F80u, 0x3F803F80u, 0x3F803F80u, 0x3F803F80u};
    const u64 p = rows_descriptor(weights);
    wgmma_fence();
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        const u64 values = rows_descriptor(first.of(half * 4 + t));
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
    for (int i = 0; i < BOX; ++i) release(true, &shared.empty[first.after(i).box]);
}
// Adds a step to the sums of a piece, or begins them.
__device__ __forceinline__ void add_step(Shared& shared, Place at, u32 steps, bool begins, Sums& sums,
                                         float (&total)[OWN], int half, int lane) {
    const u32 slot = steps & 1, base = shared_address(memory);
    wait(&shared.p_full[slot], steps / 2 & 1);
    __syncwarp();
    float keep[COLUMNS];
#pragma unroll
    for (int i = 0; i < COLUMNS; i += 2) {
        const uint4 v = shared16(base + STATS_AT + (slot * ROWS + i * 4 + lane % 4 * 2) * 8);
        sums.m[i] = __uint_as_float(v.x), keep[i] = __uint_as_float(v.y);
        sums.m[i + 1] = __uint_as_float(v.z), keep[i + 1] = __uint_as_float(v.w);
    }
#pragma unroll
    for (int e = 0; e < OWN; ++e) {
        const float factor = keep[e / 4 * 2 + e % 2];
        total[e] = begins ? 0.0f : __fmul_rn(total[e], factor);
#pragma unroll
        for (int t = 0; t < 4; ++t) sums.acc[t][e] = begins ? 0.0f : __fmul_rn(sums.acc[t][e], factor);
    }
    multiply_values(shared, at, base + P_AT + slot * P_BYTES, sums, total, half);
    release(true, &shared.p_empty[slot]);
}

// To the workspace: [place, ROWS / 8, column, 8] and, by places and rows, m and l.
__device__ __forceinline__ void store(const Params& p, u64 place, const Sums& sums, int half, int warp, int lane) {
    float* to = p.partial + place * VALUE * ROWS + (half * 256 + warp * 16 + lane / 4) * 8 + lane % 4 * 2;
#pragma unroll
    for (int e = 0; e < 4 * OWN; e += 2) {
        const int t = e / OWN, i = e % OWN;
        store8(to + (i / 4 * VALUE + t * 64 + i % 4 / 2 * 8) * 8, bits_of(sums.acc[t][i], sums.acc[t][i + 1]));
    }
    if (half || warp || lane >= 4) return;
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i)
        store8(p.stats + (place * ROWS + i / 2 * 8 + lane * 2 + i % 2) * 2, bits_of(sums.m[i], sums.l[i]));
}
__device__ __forceinline__ bf16* output_of(const Params& p, const Item& item) {
    return p.out + ((u64)item.first_row * p.parts + item.part) * GROUP * VALUE;
}
// The outputs of a tile that this block computes alone.
__device__ __forceinline__ void write(const Params& p, const Item& item, const Sums& sums, int half, int warp,
                                      int lane) {
    bf16* out = output_of(p, item) + half * 256 + warp * 16 + lane % 4 * 2;
#pragma unroll
    for (int e = 0; e < 4 * OWN; e += 2) {
        const int t = e / OWN, i = e % OWN, row = i / 4 * 8 + lane / 4;
        const u32 pair = transposed(pack(divided(sums.acc[t][i], sums.l[i / 4 * 2]),
                                         divided(sums.acc[t][i + 1], sums.l[i / 4 * 2 + 1])));
        if (row < item.tokens * GROUP) *(u32*)(out + row * VALUE + t * 64 + i % 4 / 2 * 8) = pair;
    }
}

// Sums of values of all items, by two times four warps: outputs, or results in the workspace.
__device__ __forceinline__ void add_values(const Params& p, Shared& shared, int half, int warp, int lane) {
    Earlier earlier(p.planned);
    Sums beside;
    Sums& all = in_memory(beside);  // of an item of several groups
    Place at;
    u32 steps = 0;
    for (int unit = blockIdx.x; unit < p.num_items * p.parts; unit += gridDim.x) {
        const Item item(p, unit);
        earlier.wait();
        if (item.first_row < 0) break;
        const int stop = item.stop();
        Sums sums;
#pragma unroll 1
        for (int i = item.first; i < item.last; ++i) {
            Sums piece;
            float total[OWN];
#pragma unroll 1
            for (int start = i * SPLIT; start < min(stop, (i + 1) * SPLIT); start += STEP, at = at.after(BOX))
                add_step(shared, at, steps++, start % SPLIT == 0, piece, total, half, lane);
#pragma unroll
            for (int k = 0; k < COLUMNS; ++k) piece.l[k] = total[k / 2 * 4 + k % 2];
            if (item.unit == 1) {
                store(p, item.at(p, i), piece, half, warp, lane);
                continue;
            }
            if (i % FOLDED == 0) sums.begin();
            sums.add(piece, p.scale);
            if ((i + 1) % FOLDED && i + 1 < item.last) continue;
            if (item.shared())
                store(p, item.at(p, i / FOLDED), sums, half, warp, lane);
            else if (item.last > FOLDED) {
                if (i < FOLDED) all.begin();
                all.add(sums, p.scale);
            }
        }
        if (item.shared()) {
            meet<ADDERS>();
            if (threadIdx.x % ADDERS == 0) add_in_order(p.count + item.at(p, 0), 1);
        } else {
            if (item.last > FOLDED) sums = all;
            write(p, item, sums, half, warp, lane);
        }
    }
}

#include "latent_fold.cu"

__device__ __forceinline__ void copy_keys(const Params& p, Shared& shared, const TensorMap& kv) {
    const bool leader = threadIdx.x % 32 == 0;
    Earlier earlier(p.planned);
    Place at;
    u32 filled = 0;  // boxes, up to the ring's
    for (int unit = blockIdx.x; unit < p.num_items * p.parts; unit += gridDim.x) {
        const Item item(p, unit);
        if (item.first_row < 0) break;
        const int* table = p.tables + item.table * p.table_stride;
        const int begin = item.first * SPLIT, stop = item.stop();
        int slot = 0, next = table[begin / p.block_size] * p.block_size + begin % p.block_size;
        for (int start = begin; start < stop; start += STEP) {
            const int then = min(start + STEP, stop - 1) / STEP * STEP;
            slot = next, next = table[then / p.block_size] * p.block_size + then % p.block_size;
            if (start + STEP > item.before) earlier.wait();
#pragma unroll
            for (int k = 0; k < BOX; ++k, at = at.after(1)) {
                if (filled >= BOXES)
                    wait(&shared.empty[at.box], at.parity ^ 1);
                else
                    ++filled;
                __syncwarp();
                mbarrier_expect_if(leader, &shared.full[at.box], BOX_BYTES);
                copy_box_if(leader, memory + BOXES_AT + at.box * BOX_BYTES, kv, slot, (k + BOX - 1) % BOX * BOX,
                            &shared.full[at.box]);
            }
        }
    }
}
__device__ __forceinline__ void copy_queries(const Params& p, Shared& shared, const TensorMap& q) {
    const bool leader = threadIdx.x % 32 == 0;
    Earlier earlier(p.planned);
    u32 items = 0;
    for (int unit = blockIdx.x; unit < p.num_items * p.parts; unit += gridDim.x, ++items) {
        const Item item(p, unit);
        earlier.wait();
        if (item.first_row < 0) break;
        if (items > 0) wait(&shared.q_empty, items - 1 & 1);
        __syncwarp();
        mbarrier_expect_if(leader, &shared.q_full, Q_BYTES);
        copy_box_if(leader, memory + Q_AT, q, (item.first_row * p.parts + item.part) * GROUP, 0, &shared.q_full);
    }
}

extern "C" __global__ void __launch_bounds__(128 + SCORERS + ADDERS, 1)
    attend(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap kv, const __grid_constant__ Params p) {
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int i = threadIdx.x;
    if (i < BOXES) mbarrier_init(&shared.full[i], 1), mbarrier_init(&shared.empty[i], ADDERS / 32);
    if (i < 2) mbarrier_init(&shared.p_full[i], SCORERS / 32), mbarrier_init(&shared.p_empty[i], ADDERS / 32);
    if (i == 0) mbarrier_init(&shared.q_full, 1), mbarrier_init(&shared.q_empty, SCORERS / 32);
    if (i < BOXES) mbarriers_are_ready();
    __syncthreads();
    if (p.lets_next) let_later_kernels_begin();
    if (warp >= 8) {  // (first, and with returns: else ptxas spills)
        more_registers<ADD_REGISTERS>();
        add_values(p, shared, (warp - 8) / 4, warp % 4, lane);
        fold_tiles(p);
        return;
    }
    if (warp >= 4) {
        fewer_registers<SCORE_REGISTERS>();
        score(p, shared, warp - 4, lane);
        return;
    }
    fewer_registers<COPY_REGISTERS>();
    if (warp == 0) {
        if (lane == 0) prefetch(kv);
        copy_keys(p, shared, kv);
    } else if (warp == 1) {
        if (lane == 0) prefetch(q);
        copy_queries(p, shared, q);
    }
}
