// Rows times the weights of their experts, which are codes with a scale for each group (`packing.py`, in strips), for
// tiles of up to 8 TILES pairs of one expert (`Routing.tiles`): bound by reading the weights of the experts that are hit.
//
// A block of threads takes some strips of 16 outputs of a tile at a time (`Work`), one or two for each of its consumer
// warps. One producer warp copies their codes and scales, for one block of the depth after the other, to a ring in
// shared memory, another one the rows of the tile. Consumers widen codes to bfloat16 in registers, which are the A
// operand of the tensor cores, the rows are the B operand. Sums are those of `codes_linear.py`, to the bit: over
// the depth in one order, sixteen at a time. Codes of MXFP4 are multiplied with the powers of two of their groups before,
// the sums of groups of other formats with their scales after.
//
// Macros: FORMAT (0: MXFP4, 1: int4, 2: fp8), GROUP (weights of a scale, 32 to 128), SCALE_BYTES (1: an exponent, 2:
// bfloat16, 4: float32), DEPTH (of the weight, a multiple of 64), TILES.

#include "pipeline.cu"

enum { MXFP4, INT4, FP8 };
constexpr int WORDS = 32, PARTS = FORMAT == FP8 ? 4 : 8;  // of a block of an output
constexpr int BLOCK = WORDS * PARTS;                      // weights
constexpr int OF_GROUP = GROUP / WORDS;                   // parts
constexpr int SCALE_WORDS = PARTS / OF_GROUP * SCALE_BYTES / 4;  // of a block of an output
constexpr int HELD = SCALE_WORDS < 2 ? 1 : 2;                    // of them in registers
constexpr int HELD_PARTS = PARTS * HELD / SCALE_WORDS;           // that they are for
constexpr int FULL = DEPTH / BLOCK, REST = DEPTH % BLOCK / WORDS;  // whole blocks, parts of the one after them
constexpr int BLOCKS = FULL + (REST > 0);
constexpr int CONSUMERS = TILES == 1 ? 12 : TILES == 2 ? 24 : 20, MOST = TILES == 1 ? 2 : 1;  // warps, strips of each
constexpr int SLOTS = CONSUMERS * MOST;
constexpr int FEW = TILES == 1 ? 1 : TILES / 2, KINDS = TILES == 1 ? 1 : 2;  // of tiles: up to 8 FEW rows, or more
constexpr int STRIP_BYTES = 16 * WORDS * 4, SCALES_BYTES = 16 * SCALE_WORDS * 4;
constexpr int ROW_BYTES = BLOCK * 2 + 16;  // of x, such that eight rows are in different banks
constexpr int SCALES_AT = SLOTS * STRIP_BYTES, ROWS_AT = SCALES_AT + SLOTS * SCALES_BYTES;  // of a stage
constexpr int STAGE_BYTES = ROWS_AT + TILES * 8 * ROW_BYTES;
struct Tile {
    int expert;  // -1: there are no more tiles
    u32 start_and_rows;  // of its pairs
    __device__ __forceinline__ Tile(int expert, int start, int end)
        : expert(expert), start_and_rows(start * 64 + end - start) {}
    __device__ __forceinline__ int start() const { return start_and_rows / 64; }
    __device__ __forceinline__ int rows() const { return start_and_rows % 64; }
};
constexpr int MAX_TILES = 672;
constexpr int STAGES = (226 * 1024 - MAX_TILES * sizeof(Tile)) / STAGE_BYTES;
constexpr int TILES_AT = RING_AT + STAGES * STAGE_BYTES;
constexpr int ITEMS = STAGES + 1;
static_assert(DEPTH % 64 == 0 && FULL > 0 && STAGES >= 2 && STAGES <= MAX_STAGES, "there is a ring");
static_assert(OF_GROUP * WORDS == GROUP && PARTS % OF_GROUP == 0 && SCALE_WORDS > 0, "a block has whole groups");

struct Params {
    const u32 *words, *group_scales;
    const float* scales;  // of outputs, of MXFP4
    const bf16 *bias, *x;
    void* y;
    const int *order, *tiles;
    long long x_stride;
    int num_tiles, halves;         // halves: 2 if tiles have up to twice as many rows, which are cut in two
    int repeats, experts, strips;  // repeats: pairs of a row of x; strips: of one expert
    int gated, float32;                       // whether outputs alternate gate and up; whether y is float32
    int settled;                              // whether `tiles` were there before the last kernel let this one begin
    float slope, limit, shift;
};

extern "C" __constant__ const u32 threads = 32 * (CONSUMERS + 2);  // for the host
extern "C" __constant__ const u32 shared_bytes = TILES_AT + MAX_TILES * sizeof(Tile);

// An item: some strips of a tile, which a block of threads takes at a time. The producer of weights announces an item
// to the consumers together with its first block of the depth. ITEMS places suffice: when one is written again, all
// consumers have finished the item that was in it.
struct Item {
    int expert, start, rows;  // of its tile
    int first, count;         // strips; none: there are no more items
};
struct Shared : Barriers {
    Item items[ITEMS];
};
static_assert(sizeof(Shared) <= RING_AT, "the ring is behind them");
__device__ __forceinline__ int summed(int v) {
    for (int distance = 16; distance; distance /= 2) v += __shfl_xor_sync(~0u, v, distance);
    return v;
}
#if TILES == 1
// Work distribution for few rows: tiles are cut into items of equally many strips, and each block of threads takes
// equally many consecutive items. The cost of an item is its strips plus START; the number of strips of an item is
// the one that minimises the largest cost of a block of threads.
constexpr int START = 5;
struct Work : Item {
    const Tile* tiles;
    int strips, of_tile;   // items of a tile
    int tile, item, left;  // the next item, and how many of them this block of threads has left
    __device__ __forceinline__ Work(const Params& p, const Tile* tiles) : tiles(tiles), strips(p.strips) {
        const int lane = threadIdx.x % 32, grid = gridDim.x;
        int used = 0;  // tiles
        for (int i = lane; i < p.num_tiles * p.halves; i += 32) used += tiles[i].expert >= 0;
        used = summed(used);
        const int share = min(lane, SLOTS - 1) + 1, turns = (used * cut(share) + grid - 1) / grid;
        int best = turns * (share + START) * 32 + lane;
        for (int distance = 16; distance; distance /= 2) best = min(best, __shfl_xor_sync(~0u, best, distance));
        of_tile = cut(min(best % 32, SLOTS - 1) + 1);
        const int begin = (int)((long long)used * of_tile * blockIdx.x / grid);
        left = (int)((long long)used * of_tile * (blockIdx.x + 1) / grid) - begin;
        tile = begin / of_tile, item = begin % of_tile;
    }
    __device__ __forceinline__ int cut(int share) const { return (strips + share - 1) / share; }
    __device__ __forceinline__ bool next() {
        if (left-- == 0) return false;
        expert = tiles[tile].expert, start = tiles[tile].start(), rows = tiles[tile].rows();
        first = strips * item / of_tile, count = strips * (item + 1) / of_tile - first;
        if (++item == of_tile) item = 0, ++tile;
        return true;
    }
};

#else
constexpr int COST = TILES == 2 ? 3 : 2;  // of a unit of a tile with few rows; one with many costs one more
// Each block of threads takes a range of units: 4 strips, one for each scheduler of warps. All ranges cost the same,
// and a unit of a tile with many rows costs more than one with few. A range is cut at tiles, and then into items.
struct Work : Item {
    const Tile* tiles;
    int strips, units;       // of a tile
    int begin, end;          // of the range; in costs of all tiles' units, one after the other
    int tile, before, cost;  // the current tile, cost of those before it, of a unit of it
    int unit, last;          // of the current tile: the next one, behind the last one
    __device__ __forceinline__ Work(const Params& p, const Tile* tiles) : tiles(tiles), strips(p.strips) {
        const int lane = threadIdx.x % 32, grid = gridDim.x;
        int used = 0, all = 0;  // tiles, cost of them
        for (int i = lane; i < p.num_tiles * p.halves && tiles[i].expert >= 0; i += 32) ++used, all += cost_of(i);
        used = summed(used), units = (strips + 3) / 4, all = units * summed(all);
        begin = (int)((long long)all * blockIdx.x / grid), end = (int)((long long)all * (blockIdx.x + 1) / grid);
        tile = before = 0;
        for (int i = lane;; i += 32) {  // finds the tile where the range begins, 32 at a time
            int sum = i < used ? units * cost_of(i) : 0;
            for (int distance = 1; distance < 32; distance *= 2) {
                const int other = __shfl_sync(~0u, sum, max(lane - distance, 0));
                sum += lane < distance ? 0 : other;
            }
            const int passed = 32 - __clz(__ballot_sync(~0u, sum <= begin - before));  // tiles
            before += passed ? __shfl_sync(~0u, sum, passed - 1) : 0, tile += passed;
            if (passed < 32 || tile >= used) break;
        }
        enter();
    }
    __device__ __forceinline__ int cost_of(int tile) const {
        const int rows = tiles[tile].rows();
        return rows == 0 ? 0 : rows <= 8 * FEW ? COST : COST + 1;
    }
    __device__ __forceinline__ void enter() {
        cost = cost_of(tile), unit = up_to(begin), last = up_to(end);
        expert = tiles[tile].expert, start = tiles[tile].start(), rows = tiles[tile].rows();
    }
    // Units of the current tile that begin before a place in the range of all.
    __device__ __forceinline__ int up_to(int place) const {
        return cost ? min(max((place - before + cost - 1) / cost, 0), units) : 0;
    }
    __device__ __forceinline__ bool next() {
        for (; unit == last; enter()) {
            ++tile, before += units * cost;
            if (before >= end) return false;
        }
        const int left = last - unit, items = (left + SLOTS / 4 - 1) / (SLOTS / 4);
        first = unit * 4, unit += (left + items - 1) / items, count = min(unit * 4, strips) - first;
        return true;
    }
};
#endif

// Numbers `part` of two words of neighbouring weights, as a pair of bfloat16: of MXFP4 (`packing.FP4_PLACES`) times a
// power of two.
template <int part>
__device__ __forceinline__ u32 widened_fp4(uint2 w, u32 power) {
    constexpr int turns[8] = {0, 6, 26, 4, 2, 28, 24, 30}, turn = turns[part];
    const u32 v = part % 4 == 3 ? selected(w.x, w.y, 0x0C180C18u) : part < 4 ? w.x : w.y;
    return times2((v << turn | (turn ? v >> (32 - turn) % 32 : 0)) & 0x81C081C0u, power);
}
// Of int4: set as the last bits of 128, from which 136 is subtracted.
template <int part>
__device__ __forceinline__ u32 widened_int4(uint2 w) {
    const u32 v = (part < 4 ? w.x : w.y) >> part % 4 * 4;
    return fma2(masked(v, 0x000F000Fu, 0x43004300u), 0x3F803F80u, 0xC308C308u);
}
template <int part>
__device__ __forceinline__ u32 widened(uint2 w, u32 power) {
    if constexpr (FORMAT == MXFP4) return widened_fp4<part>(w, power);
    if constexpr (FORMAT == INT4) return widened_int4<part>(w);
    return widened_fp8<part % 4>(w);
}

// A strip of a warp, for T times 8 rows: a thread has outputs lane / 4 and 8 more, rows lane % 4 * 2 and the next.
template <int T>
struct Strip {
    float sums[T][4], of_group[T][4];
    uint2 words[2][2][2];  // by run of 16 weights, halves of it, and outputs
    u32 group_scales[2][HELD];
    float scales[2], biases[2];

    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int i = 0; i < T * 4; ++i) sums[i / 4][i % 4] = 0.0f;
    }
    __device__ __forceinline__ void begin_group() {
#pragma unroll
        for (int i = 0; i < T * 4; ++i) of_group[i / 4][i % 4] = 0.0f;
    }
    __device__ __forceinline__ void load_scales(const Params& p, const Item& work, int first) {
        const int columns = p.strips * 16, all = p.experts * columns;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int output = work.expert * columns + first + i * 8;
            const int place = p.gated ? output % 2 * (all / 2) + output / 2 : output;
            scales[i] = FORMAT == MXFP4 ? __ldg(p.scales + output) : 1.0f;
            biases[i] = p.bias ? wide(__ldg(p.bias + place)) : -0.0f;  // x - 0.0 is x, also where that is -0.0
        }
    }
    // This thread's codes of a block.
    __device__ __forceinline__ void load(u32 codes) {
#pragma unroll
        for (int i = 0; i < 8; ++i) words[i / 4][i / 2 % 2][i % 2] = shared8(codes + (i / 2 * 16 + i % 2 * 8) * 32);
    }
    // Scales of the HELD_PARTS parts from `part` on.
    template <int part>
    __device__ __forceinline__ void load_group_scales(u32 scales) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const u32 at = scales + row * (SCALES_BYTES / 2) + part / HELD_PARTS * (HELD * 4);
            if constexpr (HELD == 1)
                group_scales[row][0] = shared4(at);
            else {
                const uint2 both = shared8(at);
                group_scales[row][0] = both.x, group_scales[row][1] = both.y;
            }
        }
    }
    template <int part>
    __device__ __forceinline__ void widen(u32 (&a)[2][4]) const {
        u32 powers[2] = {};
#pragma unroll
        for (int row = 0; row < 2 && FORMAT == MXFP4; ++row) {
            const u32 four = group_scales[row][part / 4 % HELD];  // two of them at a time, as bfloat16
            powers[row] = twice<part % 4 / 2>((part % 2 ? four >> 1 : four << 7) & 0x7F807F80u);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = widened<part>(words[i / 4][i % 4 / 2][i % 2], powers[i % 2]);
    }
    // The scale of a part's group for one of the two outputs.
    template <int part>
    __device__ __forceinline__ float scale_of(int row) const {
        constexpr int group = part / OF_GROUP;
        const u32 bits = group_scales[row][group * SCALE_BYTES / 4 % HELD];
        return __uint_as_float(SCALE_BYTES == 4 ? bits : group % 2 ? bits & 0xFFFF0000u : bits << 16);
    }
    // Adds the sums of a group.
    __device__ __forceinline__ void add(const float (&scale)[2]) {
#pragma unroll
        for (int i = 0; i < T * 4; ++i)
            sums[i / 4][i % 4] = __fmaf_rn(of_group[i / 4][i % 4], scale[i % 4 / 2], sums[i / 4][i % 4]);
    }
    // Scales, bias and activation, as `experts._expert_kernel` has them. `pairs`: of the row whose outputs this thread
    // gets (`Pair`), -1: there is none. `first`: the thread's first output.
    __device__ __forceinline__ void finish(const Params& p, const int (&pairs)[T], int first) const {
        const int columns = p.strips * 16, column = first & ~1;
        float low[2 * T], high[2 * T];
#pragma unroll
        for (int i = 0; i < 2 * T; ++i) {
            const float scale = scales[i % 2], bias = biases[i % 2], *sum = sums[i / 2] + i % 2 * 2;
            const Pair pair({__fmaf_rn(sum[0], scale, bias), __fmaf_rn(sum[1], scale, bias)}, threadIdx.x % 32);
            low[i] = pair.low, high[i] = pair.high;
        }
        if (p.gated) {
#pragma unroll
            for (int i = 0; i < 2 * T; ++i) {
                const float gate = low[i] > p.limit ? p.limit : low[i];
                const float up = high[i] > p.limit ? p.limit : high[i] < -p.limit ? -p.limit : high[i];
                const float below = __fadd_rn(1.0f, exp2_(__fmul_rn(__fmul_rn(-p.slope, gate), 1.4426950408889634f)));
                const float both = __fmul_rn(divided(gate, below), __fadd_rn(up, p.shift));
                const u64 at = ((u64)pairs[i / 2] * columns + column) / 2 + i % 2 * 4;
                if (pairs[i / 2] >= 0) store(p.y, p.float32, at, both);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 2 * T; ++i) {
                const u64 at = ((u64)pairs[i / 2] * columns + column) / 2 + i % 2 * 4;  // columns are even
                if (pairs[i / 2] < 0) continue;
                if (p.float32)
                    ((float2*)p.y)[at] = make_float2(low[i], high[i]);
                else
                    ((u32*)p.y)[at] = pack(low[i], high[i]);
            }
        }
    }
};

// Products of a block's parts. `x`, `scales`: where this thread reads the rows' numbers, and the first strip's scales,
// `next`: is called when all that the block has in shared memory was read.
template <int part, int parts, int N, int T, typename Next>
__device__ __forceinline__ void multiply(Strip<T> (&strips)[N], u32 x, u32 scales, Next next) {
    if constexpr (part < parts) {
        constexpr bool summed_up = FORMAT != MXFP4 && ((part + 1) % OF_GROUP == 0 || part + 1 == parts);  // a group
        u32 a[N][2][4];
        uint4 b[T];
        float scale[N][2];
#pragma unroll
        for (int t = 0; t < T; ++t) b[t] = shared_matrices(x + part * (WORDS * 2) + t * (8 * ROW_BYTES));
#pragma unroll
        for (int n = 0; n < N; ++n) {
            strips[n].template widen<part>(a[n]);
            if (summed_up) scale[n][0] = strips[n].template scale_of<part>(0), scale[n][1] = strips[n].template scale_of<part>(1);
            if (FORMAT != MXFP4 && part % OF_GROUP == 0) strips[n].begin_group();
        }
        if constexpr (part + 1 == parts)
            next();
        else if constexpr ((part + 1) % HELD_PARTS == 0) {
#pragma unroll
            for (int n = 0; n < N; ++n)
                strips[n].template load_group_scales<part + 1>(scales + n * (CONSUMERS * SCALES_BYTES));
        }
#pragma unroll
        for (int i = 0; i < 2 * N * T; ++i) {
            const int run = i / (N * T), n = i / T % N, t = i % T;
            const u32(&w)[4] = a[n][run];
            float(&sums)[4] = FORMAT == MXFP4 ? strips[n].sums[t] : strips[n].of_group[t];
            mma(sums, w[0], w[1], w[2], w[3], run ? b[t].z : b[t].x, run ? b[t].w : b[t].y);
        }
#pragma unroll
        for (int n = 0; n < N && summed_up; ++n) strips[n].add(scale[n]);
        if (FORMAT != MXFP4 && OF_GROUP == 1) __syncwarp();  // or the compiler widens far ahead, and spills
        multiply<part + 1, parts>(strips, x, scales, next);
    }
}

// Where a thread reads in the first stage; of strips: the warp's first one.
struct Places {
    u32 codes, scales, rows;
    __device__ __forceinline__ Places(u32 ring, int warp, int lane)
        : codes(kept(ring + warp * STRIP_BYTES + lane * 8)),
          scales(kept(ring + SCALES_AT + warp * SCALES_BYTES + lane / 4 * (SCALES_BYTES / 16))),
          rows(kept(ring + ROWS_AT + lane % 8 * ROW_BYTES + lane / 8 * 16)) {}
};

// N strips of an item by a warp: strip `warp`, and CONSUMERS after it.
template <int N, int T>
__device__ __forceinline__ void multiply(const Params& p, const Item& work, Barriers& barriers, const Places& places,
                                         Ring& at, int warp) {
    Strip<T> strips[N];
    int first, pairs[T];
#pragma unroll
    for (int n = 0; n < N; ++n) strips[n].begin();
    // Scales and biases: loaded early with few rows, where latency counts, else late, since registers are short.
    const auto load_ends = [&] {
        const int lane = thread() % 32;
        first = (work.first + warp) * 16 + lane / 4;
#pragma unroll
        for (int n = 0; n < N; ++n) strips[n].load_scales(p, work, first + n * (CONSUMERS * 16));
#pragma unroll
        for (int i = 0; i < T; ++i) {
            const int row = i * 8 + lane % 4 * 2 + lane / 4 % 2;
            pairs[i] = row < work.rows ? p.order[work.start + row] : -1;
        }
    };
    if (TILES == 1) load_ends();
    const auto rows = [&] { return places.rows + at.stage * STAGE_BYTES; };
    const auto scales = [&] { return places.scales + at.stage * STAGE_BYTES; };
    const auto load = [&] {
        wait(&barriers.full[at.stage], at.parity);
        const u32 codes = places.codes + at.stage * STAGE_BYTES;
#pragma unroll
        for (int n = 0; n < N; ++n) {
            strips[n].template load_group_scales<0>(scales() + n * (CONSUMERS * SCALES_BYTES));
            strips[n].load(codes + n * (CONSUMERS * STRIP_BYTES));
        }
    };
    const auto done = [&] {
        release(true, &barriers.empty[at.stage]);
        at.next(STAGES);
    };
    load();
    for (int block = 0; block + 1 < BLOCKS; ++block)
        multiply<0, PARTS>(strips, rows(), scales(), [&] {
            done();
            load();
        });
    if (TILES > 1) load_ends();
    multiply<0, REST ? REST : PARTS>(strips, rows(), scales(), done);
#pragma unroll
    for (int n = 0; n < N; ++n) strips[n].finish(p, pairs, first + n * (CONSUMERS * 16));
}

template <int N>
__device__ __forceinline__ void multiply(const Params& p, const Item& work, Barriers& barriers, const Places& places,
                                         Ring& at, int warp) {
    if (KINDS == 1 || work.rows <= 8 * FEW)
        multiply<N, FEW>(p, work, barriers, places, at, warp);
    else
        multiply<N, TILES>(p, work, barriers, places, at, warp);
}

__device__ __forceinline__ void consume(const Params& p, Shared& shared, u32 ring, int warp) {
    const Places places(ring, warp, threadIdx.x % 32);
    Ring at, item;
    for (;; item.next(ITEMS)) {
        wait(&shared.full[at.stage], at.parity);
        const Item& work = shared.items[item.stage];
        const int count = work.count;
        if (count == 0) return;
        if (warp >= count)
            for (int block = 0; block < BLOCKS; ++block, at.next(STAGES)) {
                wait(&shared.full[at.stage], at.parity);
                release(true, &shared.empty[at.stage]);
            }
        else if (MOST == 1 || warp + CONSUMERS >= count)
            multiply<1>(p, work, shared, places, at, warp);
        else
            multiply<MOST>(p, work, shared, places, at, warp);
    }
}

// A warp, of which one lane copies.
__device__ __forceinline__ void copy_weights(const Params& p, const Tile* tiles, Shared& shared, unsigned char* ring) {
    const u64 policy = evict_first(), strips = (u64)p.experts * p.strips;
    const bool leader = threadIdx.x % 32 == 0;
    Ring at, item;
    for (Work work(p, tiles);; item.next(ITEMS)) {
        const bool more = work.next();
        wait(&shared.empty[at.stage], at.parity ^ 1);
        if (!more) work.count = 0;
        if (leader) shared.items[item.stage] = work;
        if (!more) break;
        const u64 first = (u64)work.expert * p.strips + work.first;
        for (int block = 0; block < BLOCKS; ++block, at.next(STAGES)) {
            const u64 from = block * strips + first;
            unsigned char* codes = ring + at.stage * STAGE_BYTES;
            u64* full = &shared.full[at.stage];
            wait(&shared.empty[at.stage], at.parity ^ 1);
            mbarrier_expect_if(leader, full, work.count * (STRIP_BYTES + SCALES_BYTES));
            copy_to_shared_if(leader, codes, p.words + from * (STRIP_BYTES / 4), work.count * STRIP_BYTES, full,
                              policy);
            copy_to_shared_if(leader, codes + SCALES_AT, p.group_scales + from * (SCALES_BYTES / 4),
                              work.count * SCALES_BYTES, full, policy);
        }
    }
    mbarrier_arrive_if(leader, &shared.full[at.stage]);
}

// The producer warp of x: each lane copies 16 bytes of a row. Slots of rows beyond the tile's keep old numbers: they do
// not enter the sums of other rows, and are not stored.
__device__ __forceinline__ void copy_rows(const Params& p, const Tile* tiles, Shared& shared, u32 ring) {
    constexpr int OF_ROW = BLOCK / 8;  // lanes
    const int lane = threadIdx.x % 32, place = lane % OF_ROW;
    Ring at;
    for (Work work(p, tiles); work.next();) {
        const int own = lane < work.rows ? p.order[work.start + lane] / p.repeats : 0;
        for (int block = 0; block < BLOCKS; ++block, at.next(STAGES)) {
            const bool there = block < FULL || place < REST * (WORDS / 8);
            wait(&shared.empty[at.stage], at.parity ^ 1);
            for (int first = 0; first < work.rows; first += 32 / OF_ROW) {
                const int row = first + lane / OF_ROW;
                const bf16* from = p.x + __shfl_sync(~0u, own, row) * p.x_stride + block * BLOCK + place * 8;
                copy16_if(there && (OF_ROW == 32 || row < work.rows),
                          ring + at.stage * STAGE_BYTES + ROWS_AT + row * ROW_BYTES + place * 16, from);
            }
            arrive_when_copied(&shared.full[at.stage]);
        }
    }
    wait(&shared.empty[at.stage], at.parity ^ 1);
    mbarrier_arrive(&shared.full[at.stage]);
}

extern "C" __global__ void __launch_bounds__(32 * (CONSUMERS + 2), 1) product(const __grid_constant__ Params p) {
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    Tile* tiles = reinterpret_cast<Tile*>(memory + TILES_AT);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    prepare(shared, STAGES, CONSUMERS, 1 + 32);
    if (!p.settled) wait_for_earlier_kernels();
    for (int i = threadIdx.x; i < p.num_tiles * p.halves; i += 32 * (CONSUMERS + 2)) {
        const int* tile = p.tiles + i / p.halves * 3;
        const int start = load4(tile + 1), end = load4(tile + 2), half = min(start + 8 * TILES, end);
        tiles[i] = Tile(load4(tile), i % p.halves ? half : start, i % p.halves == p.halves - 1 ? end : half);
    }
    __syncthreads();
    let_later_kernels_begin();
    if (warp == CONSUMERS) {
        copy_weights(p, tiles, shared, memory + RING_AT);
        return;
    }
    wait_for_earlier_kernels();
    if (warp < CONSUMERS)
        consume(p, shared, shared_address(memory + RING_AT), warp);
    else
        copy_rows(p, tiles, shared, shared_address(memory + RING_AT));
}
