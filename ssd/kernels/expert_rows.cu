// Rows times the MXFP4 weights of their experts (`packing.py`, in strips), for tiles of up to 8 TILES pairs of one
// expert (`Routing.tiles`): bound by reading the weights of the experts that are hit.
//
// A block of threads takes some strips of 16 outputs of a tile at a time (`Work`), one for each of its consumer warps.
// Its producer copies their codes and exponents, one block of the depth after the other, to a ring in shared memory;
// the rows of the tile are behind that. Consumers widen codes to bfloat16 in registers, which are the A operand of the
// tensor cores, the rows are the B operand. Sums are those of `quantized_linear.py`, to the bit: over the depth in one
// order, sixteen at a time.
//
// Macros: DEPTH (of the weight, a multiple of 64), TILES.

#include "pipeline.cu"

constexpr int WORDS = 32, PARTS = 8;  // of a block of an output: a part is a group, with one exponent
constexpr int BLOCK = WORDS * PARTS;  // weights
constexpr int FULL = DEPTH / BLOCK, REST = DEPTH % BLOCK / WORDS;  // whole blocks, parts of the one after them
constexpr int BLOCKS = FULL + (REST > 0);
constexpr int STRIP_BYTES = 16 * WORDS * 4, EXPONENT_BYTES = 16 * PARTS;
constexpr int CONSUMERS = 20;
constexpr int STAGE_BYTES = CONSUMERS * (STRIP_BYTES + EXPONENT_BYTES);
constexpr int ROW_BYTES = DEPTH * 2 + 16;  // of x, such that eight rows are in different banks
constexpr int X_BYTES = (TILES * 8 * ROW_BYTES + 127) / 128 * 128;
constexpr int STAGES = (226 * 1024 - X_BYTES) / STAGE_BYTES;
static_assert(DEPTH % 64 == 0 && FULL > 0 && STAGES >= 2, "the rows and a ring fit into shared memory");
static_assert(STAGES <= MAX_STAGES, "there are barriers for them");

struct Params {
    const u32 *words, *exponents;
    const float* scales;  // of outputs
    const bf16 *bias, *x;
    void* y;
    const int *order, *tiles;
    long long x_stride;
    int num_tiles, repeats, experts, strips;  // repeats: pairs of a row of x; strips: of one expert
    int gated, float32;                       // whether outputs alternate gate and up; whether y is float32
    float slope, limit, shift;
};

extern "C" __constant__ const u32 threads = 32 * (CONSUMERS + 1);  // for the host
extern "C" __constant__ const u32 shared_bytes = RING_AT + STAGES * STAGE_BYTES + X_BYTES;

// Tiles are cut into items of equally many strips, and blocks of threads take items that follow each other. An item
// takes about as long as its strips and START more: their number is the one with which all items end first.
constexpr int START = 5;
struct Work {
    int strips, share, items;  // of a tile, of an item, of a tile
    int at, end, tile, first, count;
    __device__ __forceinline__ Work(const Params& p) : strips(p.strips) {
        const int lane = threadIdx.x % 32, grid = gridDim.x;
        int used = 0;
        for (int i = lane; i < p.num_tiles; i += 32) used += p.tiles[3 * i] >= 0;
        for (int distance = 16; distance; distance /= 2) used += __shfl_xor_sync(~0u, used, distance);
        const int own = min(lane, CONSUMERS - 1) + 1, turns = (used * ((strips + own - 1) / own) + grid - 1) / grid;
        int best = turns * (own + START) * 32 + lane;
        for (int distance = 16; distance; distance /= 2) best = min(best, __shfl_xor_sync(~0u, best, distance));
        share = min(best % 32, CONSUMERS - 1) + 1, items = (strips + share - 1) / share;
        at = (int)((long long)used * items * blockIdx.x / grid);
        end = (int)((long long)used * items * (blockIdx.x + 1) / grid);
    }
    __device__ __forceinline__ bool next() {
        if (at == end) return false;
        tile = at / items, first = at++ % items * share, count = min(share, strips - first);
        return true;
    }
};

// Numbers `part` of two words of neighbouring weights, as a pair of bfloat16 (`packing.FP4_PLACES`), times a power of
// two.
struct Words {
    u32 first, second, both;
};
template <int part>
__device__ __forceinline__ u32 widened(const Words& w, u32 power) {
    constexpr int turns[PARTS] = {0, 6, 26, 4, 2, 28, 24, 30}, turn = turns[part];
    const u32 v = part % 4 == 3 ? w.both : part < 4 ? w.first : w.second;
    return fma2((v << turn | (turn ? v >> (32 - turn) % 32 : 0)) & 0x81C081C0u, power, 0x80008000u);
}

// What a thread needs of its outputs (lane / 4 and 8 more) and rows (lane % 4 * 2 and the next, of each 8) in the end.
struct Outputs {
    float scales[2], biases[2];
    int pairs[TILES][2];  // -1: there is no such row
    __device__ __forceinline__ Outputs(const Params& p, const int* tile, int first, int lane) {
        const int columns = p.strips * 16, all = p.experts * columns, start = tile[1], end = tile[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int output = tile[0] * columns + first + i * 8;
            const int place = p.gated ? output % 2 * (all / 2) + output / 2 : output;
            scales[i] = __ldg(p.scales + output);
            biases[i] = p.bias ? wide(__ldg(p.bias + place)) : 0.0f;
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                const int at = start + t * 8 + lane % 4 * 2 + i;
                pairs[t][i] = at < end ? p.order[at] : -1;
            }
        }
    }
};

struct Consumer {
    float sums[TILES][4];
    Words words[2][2][2];  // by run of 16 weights, halves of it, and outputs
    uint2 exponents[2];

    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int i = 0; i < TILES * 4; ++i) sums[i / 4][i % 4] = 0.0f;
    }
    // The codes of a strip at `strip`, with its exponents at `powers`.
    __device__ __forceinline__ void load(u32 strip, u32 powers, int lane) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            exponents[row] = shared8(powers + (row * 8 + lane / 4) * 8);
#pragma unroll
            for (int run = 0; run < 2; ++run)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint2 w = shared8(strip + ((run * 2 + half) * 16 + row * 8 + lane / 4) * 32 + lane % 4 * 8);
                    words[run][half][row] = {w.x, w.y, (w.x & 0x0C180C18u) | (w.y & ~0x0C180C18u)};
                }
        }
    }
    // Products of a block's parts. `x`: where this thread reads the rows' numbers for the block, `next`: loads the
    // block after it.
    template <int part, int parts, typename Next>
    __device__ __forceinline__ void multiply(u32 x, Next next) {
        if constexpr (part < parts) {
            u32 a[2][4], powers[2];
            uint4 b[TILES];
#pragma unroll
            for (int t = 0; t < TILES; ++t) b[t] = shared_matrices(x + part * (WORDS * 2) + t * (8 * ROW_BYTES));
#pragma unroll
            for (int row = 0; row < 2; ++row)
                powers[row] = bytes<0x0404 + part % 4 * 0x1010>(part < 4 ? exponents[row].x : exponents[row].y, 0) >> 1;
#pragma unroll
            for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = widened<part>(words[i / 4][i % 4 / 2][i % 2], powers[i % 2]);
            if (part + 1 == parts) next();
#pragma unroll
            for (int i = 0; i < 2 * TILES; ++i) {
                const int run = i / TILES, t = i % TILES;
                mma(sums[t], a[run][0], a[run][1], a[run][2], a[run][3], run ? b[t].z : b[t].x, run ? b[t].w : b[t].y);
            }
            multiply<part + 1, parts>(x, next);
        }
    }
};

// Scales, bias and activation of outputs `first` and 8 more of an expert, as `experts._expert_kernel` has them.
__device__ __forceinline__ void finish(const Params& p, const float (&sums)[TILES][4], const Outputs& of, int first) {
    const int columns = p.strips * 16;
#pragma unroll
    for (int i = 0; i < TILES * 4; ++i) {
        const int half = i % 4 / 2, column = first + half * 8, pair = of.pairs[i / 4][i % 2];
        const float sum = sums[i / 4][i % 4], scale = of.scales[half];
        const float v = p.bias ? __fmaf_rn(sum, scale, of.biases[half]) : __fmul_rn(sum, scale);
        if (!p.gated) {
            if (pair >= 0) store(p.y, p.float32, (u64)pair * columns + column, v);
            continue;
        }
        const float other = __shfl_xor_sync(~0u, v, 4);  // of the next output
        if (pair >= 0 && column % 2 == 0) {
            const float gate = v > p.limit ? p.limit : v;
            const float up = other > p.limit ? p.limit : other < -p.limit ? -p.limit : other;
            const float below = __fadd_rn(1.0f, exp2_(__fmul_rn(__fmul_rn(-p.slope, gate), 1.4426950408889634f)));
            const float both = __fmul_rn(divided(gate, below), __fadd_rn(up, p.shift));
            store(p.y, p.float32, (u64)pair * (columns / 2) + column / 2, both);
        }
    }
}

// Rows of a tile. What others have been does not matter: a row's sums are its own.
__device__ __forceinline__ void load_rows(const Params& p, const int* tile, u32 x) {
    const int start = tile[1], rows = tile[2] - start;
    meet<32 * CONSUMERS>();  // the rows before them are no longer needed
    for (int i = threadIdx.x; i < rows * (DEPTH / 8); i += 32 * CONSUMERS) {
        const int row = i / (DEPTH / 8), piece = i % (DEPTH / 8);  // of 16 bytes
        const uint4 v = load16(p.x + (u64)(p.order[start + row] / p.repeats) * p.x_stride + piece * 8);
        shared_store16(x + row * ROW_BYTES + piece * 16, v);
    }
    meet<32 * CONSUMERS>();
}

__device__ __forceinline__ void consume(const Params& p, Barriers& barriers, u32 ring, int warp) {
    const int lane = threadIdx.x % 32;
    const u32 x = ring + STAGES * STAGE_BYTES;
    const u32 own_x = x + lane % 8 * ROW_BYTES + lane / 8 * 16;
    Consumer consumer;
    Ring at;
    int tile = -1;
    for (Work work(p); work.next();) {
        const int first = (work.first + warp) * 16 + lane / 4;
        const bool there = warp < work.count;
        const auto load = [&] {
            wait(&barriers.full[at.stage], at.parity);
            const u32 stage = ring + at.stage * STAGE_BYTES;
            const u32 powers = stage + CONSUMERS * STRIP_BYTES + warp * EXPONENT_BYTES;
            if (there) consumer.load(stage + warp * STRIP_BYTES, powers, lane);
            release(true, &barriers.empty[at.stage]);
            at.next(STAGES);
        };
        if (work.tile != tile) load_rows(p, p.tiles + 3 * work.tile, x);
        tile = work.tile;
        if (!there) {
            for (int block = 0; block < BLOCKS; ++block) load();
            continue;
        }
        const Outputs outputs(p, p.tiles + 3 * tile, first, lane);
        consumer.begin();
        load();
        for (int block = 0; block < FULL; ++block)
            consumer.multiply<0, PARTS>(own_x + block * (BLOCK * 2), [&] {
                if (block + 1 < BLOCKS) load();
            });
        consumer.multiply<0, REST>(own_x + FULL * (BLOCK * 2), [] {});
        finish(p, consumer.sums, outputs, first);
    }
}

// A warp, of which one lane copies.
__device__ __forceinline__ void produce(const Params& p, Barriers& barriers, unsigned char* ring) {
    const u64 policy = evict_first(), strips = (u64)p.experts * p.strips;
    const bool leader = threadIdx.x % 32 == 0;
    Ring at;
    for (Work work(p); work.next();) {
        const u64 first = (u64)p.tiles[3 * work.tile] * p.strips + work.first;
        for (int block = 0; block < BLOCKS; ++block, at.next(STAGES)) {
            const u64 from = block * strips + first;
            unsigned char* codes = ring + at.stage * STAGE_BYTES;
            u64* full = &barriers.full[at.stage];
            wait(&barriers.empty[at.stage], at.parity ^ 1);
            mbarrier_expect_if(leader, full, work.count * (STRIP_BYTES + EXPONENT_BYTES));
            copy_to_shared_if(leader, codes, p.words + from * (STRIP_BYTES / 4), work.count * STRIP_BYTES, full,
                              policy);
            copy_to_shared_if(leader, codes + CONSUMERS * STRIP_BYTES, p.exponents + from * (EXPONENT_BYTES / 4),
                              work.count * EXPONENT_BYTES, full, policy);
        }
    }
}

extern "C" __global__ void __launch_bounds__(32 * (CONSUMERS + 1), 1) product(const __grid_constant__ Params p) {
    Barriers& barriers = *reinterpret_cast<Barriers*>(memory);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (threadIdx.x == 0) prepare(barriers, STAGES, CONSUMERS);
    __syncthreads();
    let_later_kernels_begin();
    wait_for_earlier_kernels();
    if (warp == CONSUMERS)
        produce(p, barriers, memory + RING_AT);
    else
        consume(p, barriers, shared_address(memory + RING_AT), warp);
}
