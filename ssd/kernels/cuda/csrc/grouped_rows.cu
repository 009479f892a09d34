// x [rows, depth] times a packed weight in groups (`packing.py`) transposed, for up to 8 TILES rows: bound by reading
// the weight, or by the instructions that widen it. For more rows, `widen` makes bfloat16 weights of a part of it.
//
// A block of threads takes `share` strips of 16 outputs at a time. Its producer copies, for one block of the depth after
// the other, the strips' codes and the scales of their groups to a ring in shared memory, and the rows of x to another
// one: consumers have what they need of a weight in registers, and give its slot back, before they multiply. Each warp
// of them has one strip: it makes bfloat16 weights of the codes (`packing.py` says which), which are the A operand of the
// tensor cores (`mma`). Sums of a segment of the depth are those of `linear.py`, to the bit: over the depth in one
// order, sixteen at a time. Those of segments are added in their order.
//
// Where there are segments, several blocks of threads take the same strips, and each of them one segment. The last warp
// that has a strip's sums reads those of the others from the L2, and adds them.
//
// Macros: FORMAT (0: fp8, 1: int8, 2: uint4), DEPTH (of a block), GROUP (weights of a scale), NUMBERS (how scales are
// stored, see `GroupNumbers`), OFFSETS (whether groups have offsets), TILES, MAX_WARPS (consumers).

#include "pipeline.cu"

constexpr int BITS = FORMAT == 2 ? 4 : 8;
constexpr int STEPS = DEPTH / 16;                // of the tensor cores
constexpr int LOADS = 16 * DEPTH * BITS / 4096;  // of 16 bytes of codes, of a lane for a block
constexpr int GROUPS = DEPTH / GROUP;            // of a block
constexpr int SUMS = TILES * 4;                  // of a thread
constexpr int STRIP_BYTES = 16 * DEPTH * BITS / 8;
constexpr int X_BYTES = TILES * 8 * DEPTH * 2;  // of a block: 64 numbers of each row, the next 64, and so on
constexpr int ALL = GROUPS * 16;                // scales of a block of a strip
enum { FLOAT32, FLOAT16, FACTORS, ZEROS };
constexpr int COUNT = 1 + OFFSETS;
constexpr int NUMBER_BYTES = NUMBERS == FLOAT32   ? COUNT * ALL * 4
                             : NUMBERS == FLOAT16 ? COUNT * ALL * 2
                             : NUMBERS == FACTORS ? COUNT * (ALL + 32)
                                                  : ALL * 3;
constexpr int ENTRY_BYTES = BITS == 4 ? 4 : 4 * COUNT;  // of a group of an output, see `Scale`
constexpr int TABLE_BYTES = ENTRY_BYTES * ALL;

struct Params {
    const u32* words;
    const unsigned char* numbers;
    const bf16* bias;
    void* y;
    uint4* sums;  // of the segments of each strip, if there are splits
    int* count;   // of each strip, of the segments whose sums are there: zero before and after
    long long y_stride;
    int rows, columns, strips, blocks, share, x_stages, stages;
    int segment;         // blocks of a segment
    int splits;          // segments: blocks of threads that share a tile
    int gated, float32;  // whether rows of the weight alternate gate and up; whether y is float32
};

__device__ __forceinline__ int weight_bytes(const Params& p) {  // of a slot of the ring of weights
    return p.share * (STRIP_BYTES + NUMBER_BYTES);
}
struct Rings {
    Barriers x, weight;
};
static_assert(sizeof(Rings) <= RING_AT, "the rings are behind them");

// A byte without a sign, minus 128: its bits are set as the last ones of 2^23, which is subtracted again.
template <int i>
__device__ __forceinline__ float integer(u32 v) {
    return __fadd_rn(__uint_as_float(bytes<0x7440 + i>(v, 0x4B000000u)), -8388736.0f);
}
// A stored number: an integer of 8 bits, float32, or float16.
template <bool is_integer, bool is_wide>
__device__ __forceinline__ float number(u32 v) {
    return is_integer ? integer<0>(v ^ 0x80) : is_wide ? __uint_as_float(v) : of_half<0>(v);
}

// What the weights of a group of two outputs, r and r + 8, are made of: of 8 bits float32 scales, and offsets if there
// are any; of 4 bits pairs of bfloat16 (scale, offset).
//
// Codes of 4 bits are widened as they are, as the last bits of a bfloat16 number below the normal ones: those of output
// r at bit 4, which divides them by 2^129, those of r + 8 at bit 0, which divides them by 2^133. Scales make up for
// that, but for SMALL: all weights, and so their sums, are that much smaller.
constexpr float SMALL = BITS == 4 ? 0x1p-8f : 1.0f;
struct Scale {
    u32 scale, offset;  // of 4 bits: both are the former
};
// Makes a warp's table of the scales of a block of a strip, [GROUPS, 8, 2] (r and r + 8 are neighbours), from what is
// stored. All of it in shared memory. Half of the lanes have the first groups, the others the rest.
__device__ __forceinline__ void decode(u32 stored, u32 table, int lane) {
    constexpr int EACH = GROUPS > 1 ? GROUPS / 2 : 1;
    __syncwarp();  // all lanes have read what was there
    const int output = lane % 16, first = GROUPS > 1 ? lane / 16 * EACH : 0;
    u32 scales[EACH], offsets[EACH], units[2] = {0, 0};
    if (NUMBERS == FACTORS) units[0] = shared2(stored + COUNT * ALL + output * 2);
    if (NUMBERS == FACTORS && OFFSETS) units[1] = shared2(stored + COUNT * ALL + output * 2 + 32);
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        const int i = (first + j) * 16 + output;
        scales[j] = NUMBERS == FLOAT32   ? shared4(stored + i * 4)
                    : NUMBERS == FACTORS ? shared1(stored + i)
                                         : shared2(stored + i * 2);
        offsets[j] = !OFFSETS             ? 0
                     : NUMBERS == FLOAT32 ? shared4(stored + (ALL + i) * 4)
                     : NUMBERS == FLOAT16 ? shared2(stored + (ALL + i) * 2)
                                          : shared1(stored + (NUMBERS == ZEROS ? 2 : 1) * ALL + i);
    }
    const float large = BITS == 8 ? 1.0f : output < 8 ? 0x1p121f : 0x1p125f;
    const float all = NUMBERS == FACTORS ? __fmul_rn(of_half<0>(units[0]), large) : large;
    const float least = NUMBERS == FACTORS ? __fmul_rn(of_half<0>(units[1]), SMALL) : SMALL;
    const u32 to = table + ENTRY_BYTES * (first * 16 + output % 8 * 2 + output / 8);
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        const float scale = number<NUMBERS == FACTORS, NUMBERS == FLOAT32>(scales[j]);
        float offset = number<NUMBERS == FACTORS || NUMBERS == ZEROS, NUMBERS == FLOAT32>(offsets[j]);
        if (NUMBERS == ZEROS) offset = __fmul_rn(-scale, offset);
        const float one = __fmul_rn(scale, all), other = OFFSETS ? __fmul_rn(offset, least) : 0.0f;
        if (BITS == 4)
            shared_store4(to + j * 16 * ENTRY_BYTES, pack(one, other));
        else if (OFFSETS)
            shared_store8(to + j * 16 * ENTRY_BYTES, make_uint2(__float_as_uint(one), __float_as_uint(other)));
        else
            shared_store4(to + j * 16 * ENTRY_BYTES, __float_as_uint(one));
    }
    __syncwarp();
}

// Weights of codes of 8 bits, `part` and the next one of a word, as a pair of bfloat16.
template <int part>
__device__ __forceinline__ u32 weights_of_bytes(u32 w, const Scale& s) {
    float low, high;
    if (FORMAT == 0) {
        const u32 pair = halves<part / 2>(w);  // as float16
        low = of_half<0>(pair), high = of_half<1>(pair);
    } else {
        low = integer<part>(w), high = integer<part + 1>(w);
    }
    const float scale = __uint_as_float(s.scale), offset = __uint_as_float(s.offset);
    if (OFFSETS) return pack(__fmaf_rn(low, scale, offset), __fmaf_rn(high, scale, offset));
    return pack(__fmul_rn(low, scale), __fmul_rn(high, scale));
}
// Likewise of codes of 4 bits, of output r + `high` 8.
template <bool high>
__device__ __forceinline__ u32 weights_of_nibbles(u32 w, const Scale& s) {
    return fma2(w & (high ? 0x000F000Fu : 0x00F000F0u), twice<0>(s.scale), twice<1>(s.scale));
}
// What a lane needs of half a block of a strip. The other half is loaded while one is multiplied, so that the tensor
// cores, which add to the same sums in each step, do not wait for anything else.
constexpr int HALF = STEPS / 2;
constexpr int HALF_GROUPS = GROUPS > 1 ? GROUPS / 2 : 1;
struct Half {
    u32 words[LOADS / 2][4];       // a step takes one or two
    Scale scales[HALF_GROUPS][2];  // of outputs r and r + 8

    template <int half>
    __device__ __forceinline__ void load_words(u32 codes) {  // address of the lane's first ones
#pragma unroll
        for (int i = 0; i < LOADS / 2; ++i) {
            const uint4 v = shared16(codes + (half * (LOADS / 2) + i) * 512);
            words[i][0] = v.x, words[i][1] = v.y, words[i][2] = v.z, words[i][3] = v.w;
        }
    }
    template <int half>
    __device__ __forceinline__ void load_scales(u32 table) {  // likewise
#pragma unroll
        for (int i = 0; i < HALF_GROUPS; ++i) {
            const u32 at = table + ENTRY_BYTES * 16 * (half * HALF * 16 / GROUP + i);
            if constexpr (ENTRY_BYTES == 8) {
                const uint4 both = shared16(at);
                scales[i][0] = {both.x, both.y}, scales[i][1] = {both.z, both.w};
            } else {
                const uint2 both = shared8(at);
                scales[i][0].scale = both.x, scales[i][1].scale = both.y;
            }
        }
    }
    // The A operand of a step: outputs r and r + 8 of the first half of its depth, then of the second.
    template <int step>
    __device__ __forceinline__ void widen(u32 (&a)[4]) const {
        constexpr int first = step * BITS / 4, second = first + 1;
        const Scale(&s)[2] = scales[HALF_GROUPS > 1 ? step * 16 / GROUP : 0];
        if constexpr (BITS == 4) {
            const u32 word = words[first / 4][first % 4];
            a[0] = weights_of_nibbles<false>(word, s[0]), a[1] = weights_of_nibbles<true>(word, s[1]);
            a[2] = weights_of_nibbles<false>(word >> 8, s[0]), a[3] = weights_of_nibbles<true>(word >> 8, s[1]);
        } else {
            const u32 one = words[first / 4][first % 4], other = words[second / 4][second % 4];
            a[0] = weights_of_bytes<0>(one, s[0]), a[1] = weights_of_bytes<2>(one, s[1]);
            a[2] = weights_of_bytes<0>(other, s[0]), a[3] = weights_of_bytes<2>(other, s[1]);
        }
    }
};

// The B operands of two steps.
struct Rows {
    u32 of[2][TILES][2];
    template <int step>
    __device__ __forceinline__ void load(u32 x) {  // address of the lane's first number of a block's rows
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const uint4 v = shared_matrices((step % 4 ? x ^ 64 : x) + step / 4 * (TILES * 1024) + tile * 1024);
            of[0][tile][0] = v.x, of[0][tile][1] = v.y, of[1][tile][0] = v.z, of[1][tile][1] = v.w;
        }
    }
};
// Those of half a block: loaded at once, where registers are enough.
constexpr bool AT_ONCE = TILES <= 2;
struct HalfRows {
    Rows of[AT_ONCE ? HALF / 2 : 1];
    template <int half, int i = 0>
    __device__ __forceinline__ void load(u32 x) {
        if constexpr (AT_ONCE && i < HALF / 2) {
            of[i].template load<half * HALF + 2 * i>(x);
            load<half, i + 1>(x);
        }
    }
};
template <int half, int step>
__device__ __forceinline__ void multiply(float (&sums)[SUMS], const Half& own, HalfRows& rows, u32 x) {
    if constexpr (step < HALF) {
        if constexpr (!AT_ONCE && step % 2 == 0) rows.of[0].template load<half * HALF + step>(x);
        u32 a[4];
        own.widen<step>(a);
        const auto& b = rows.of[AT_ONCE ? step / 2 : 0].of[step % 2];
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
            mma(*reinterpret_cast<float(*)[4]>(sums + tile * 4), a[0], a[1], a[2], a[3], b[tile][0], b[tile][1]);
        multiply<half, step + 1>(sums, own, rows, x);
    }
}

// Bias and activation of this thread's results (outputs `first` and first + 8), with the roundings of a dense weight's;
// stores them.
__device__ __forceinline__ void finish(const Params& p, const float (&sums)[SUMS], const float (&biases)[2], int first,
                                       int lane) {
#pragma unroll
    for (int i = 0; i < SUMS; i += 2) {
        const int tile = i / 4, output = i % 4 / 2;
        float v[2];
        for (int r = 0; r < 2; ++r) v[r] = p.bias ? __fadd_rn(sums[i + r], biases[output]) : sums[i + r];
        const Pair pair(v, lane);
        const int row = tile * 8 + lane % 4 * 2 + pair.row;
        if (row < p.rows)
            write<true>(pair, p.y, p.float32, p.gated, (u64)row * p.y_stride, first + output * 8, p.columns);
    }
}

// Blocks of the depth of this block of threads.
struct Part {
    int first, blocks;
};
__device__ __forceinline__ Part own_part(const Params& p) {
    const int first = blockIdx.x % p.splits * p.segment;
    return {first, min(p.segment, p.blocks - first)};
}

// Stores the sums of a segment of a strip. The last warp to do so adds those of all segments.
__device__ __forceinline__ bool added(const Params& p, float (&sums)[SUMS], int strip, int lane) {
    uint4* const own = p.sums + (u64)strip * p.splits * SUMS * 8 + lane;
    uint4* const mine = own + blockIdx.x % p.splits * SUMS * 8;
#pragma unroll
    for (int i = 0; i < SUMS; i += 4)
        store16(mine + i * 8, make_uint4(__float_as_uint(sums[i]), __float_as_uint(sums[i + 1]),
                                         __float_as_uint(sums[i + 2]), __float_as_uint(sums[i + 3])));
    __syncwarp();
    int before = 0;
    if (lane == 0) before = add_in_order(p.count + strip, 1);
    if (__shfl_sync(~0u, before, 0) < p.splits - 1) return false;
    __syncwarp();
    if (lane == 0) p.count[strip] = 0;
    for (int split = 0; split < p.splits; ++split)
#pragma unroll
        for (int i = 0; i < SUMS; i += 4) {
            const uint4 v = load16(own + (split * SUMS + i) * 8);
            const u32 each[4] = {v.x, v.y, v.z, v.w};
            for (int j = 0; j < 4; ++j)
                sums[i + j] = split ? __fadd_rn(sums[i + j], __uint_as_float(each[j])) : __uint_as_float(each[j]);
        }
    return true;
}

// `ring`: that of x; that of weights, and tables of the scales of each consumer's groups, are behind it.
__device__ __forceinline__ void consume(const Params& p, Rings& rings, u32 ring, int strip) {
    const int lane = threadIdx.x % 32, size = weight_bytes(p), step = gridDim.x / p.splits * p.share;
    const u32 weights = ring + p.x_stages * X_BYTES, codes = weights + strip * STRIP_BYTES + lane * 16;
    const u32 numbers = weights + p.share * STRIP_BYTES + strip * NUMBER_BYTES;
    const u32 table = weights + p.stages * size + strip * TABLE_BYTES, own_table = table + lane / 4 * 2 * ENTRY_BYTES;
    const u32 own_x = ring + lane % 8 * 128 + (lane / 8 ^ lane % 8) * 16;  // of the swizzled box, see `Rows`
    const int blocks = own_part(p).blocks;
    float sums[SUMS];
    Scales<1> of_outputs(nullptr, 0, lane);
    Ring at, at_x;
    for (int first = blockIdx.x / p.splits * p.share; first < p.strips; first += step) {
        const bool there = first + strip < p.strips;  // if not: what is multiplied is of an earlier tile, or nothing
        const int output = (first + strip) * 16 + lane / 4;
        of_outputs.load_outputs(nullptr, p.bias, output, there ? p.columns : 0);
        Half one, other;
        HalfRows rows;
        wait(&rings.weight.full[at.stage], at.parity);
        __syncwarp();
        one.load_words<0>(codes + at.stage * size);
        decode(numbers + at.stage * size, table, lane);
        one.load_scales<0>(own_table);
#pragma unroll
        for (int i = 0; i < SUMS; ++i) sums[i] = 0.0f;
        for (int i = 0; i < blocks; ++i, at_x.next(p.x_stages)) {
            other.load_words<1>(codes + at.stage * size);
            other.load_scales<1>(own_table);
            const u32 x = own_x + at_x.stage * X_BYTES;
            wait(&rings.x.full[at_x.stage], at_x.parity);
            __syncwarp();
            rows.load<0>(x);
            multiply<0, 0>(sums, one, rows, x);
            release(true, &rings.weight.empty[at.stage]);
            at.next(p.stages);
            // The next block, if there is one. (Else what is read is not used.)
            if (i + 1 < blocks) wait(&rings.weight.full[at.stage], at.parity);
            __syncwarp();
            one.load_words<0>(codes + at.stage * size);
            rows.load<1>(x);
            decode(numbers + at.stage * size, table, lane);
            one.load_scales<0>(own_table);
            multiply<1, 0>(sums, other, rows, x);
            release(true, &rings.x.empty[at_x.stage]);
        }
#pragma unroll
        for (int i = 0; i < SUMS; ++i) sums[i] = __fmul_rn(sums[i], 1 / SMALL);
        if (there && (p.splits == 1 || added(p, sums, first + strip, lane)))
            finish(p, sums, of_outputs.biases, output, lane);
    }
}

// Weights do not depend on earlier kernels, so the first blocks of them are copied before the wait for these kernels.
__device__ __forceinline__ void produce(const TensorMap& x, const Params& p, Rings& rings, unsigned char* ring) {
    const bool leader = threadIdx.x % 32 == 0;
    const int size = weight_bytes(p), tiles = (p.strips + p.share - 1) / p.share, grid = gridDim.x / p.splits;
    const u64 policy = evict_first();
    const Part part = own_part(p);
    const auto copy_weight = [&](int tile, int block, int stage) {
        const int first = tile * p.share, count = min(p.share, p.strips - first);
        const u64 from = (u64)(part.first + block) * p.strips + first;  // strips
        unsigned char* codes = ring + p.x_stages * X_BYTES + stage * size;
        u64* full = &rings.weight.full[stage];
        mbarrier_expect_if(leader, full, count * (STRIP_BYTES + NUMBER_BYTES));
        copy_to_shared_if(leader, codes, p.words + from * (STRIP_BYTES / 4), count * STRIP_BYTES, full, policy);
        copy_to_shared_if(leader, codes + p.share * STRIP_BYTES, p.numbers + from * NUMBER_BYTES, count * NUMBER_BYTES,
                          full, policy);
    };
    const auto copy_x = [&](int block, int stage) {
        mbarrier_expect_if(leader, &rings.x.full[stage], X_BYTES);
        copy_box_if(leader, ring + stage * X_BYTES, x, 0, (part.first + block) * (DEPTH / 64), &rings.x.full[stage]);
    };
    Fill weight{(int)blockIdx.x / p.splits}, rows = weight;
    for (int i = 0; i < p.stages && weight.tile < tiles; ++i, weight.next(part.blocks, grid))
        copy_weight(weight.tile, weight.block, i);
    if (leader) prefetch(x);
    wait_for_earlier_kernels();
    for (int i = 0; i < p.x_stages && rows.tile < tiles; ++i, rows.next(part.blocks, grid)) copy_x(rows.block, i);
    for (Ring at, at_x; rows.tile < tiles || weight.tile < tiles; at.next(p.stages), at_x.next(p.x_stages)) {
        if (weight.tile < tiles) {
            wait(&rings.weight.empty[at.stage], at.parity);
            copy_weight(weight.tile, weight.block, at.stage);
            weight.next(part.blocks, grid);
        }
        if (rows.tile < tiles) {
            wait(&rings.x.empty[at_x.stage], at_x.parity);
            copy_x(rows.block, at_x.stage);
            rows.next(part.blocks, grid);
        }
    }
}

extern "C" __global__ void __launch_bounds__(32 * (MAX_WARPS + 1), 1)
    product(const __grid_constant__ TensorMap x, const __grid_constant__ Params p) {
    Rings& rings = *reinterpret_cast<Rings*>(memory);
    unsigned char* ring = memory + RING_AT;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    prepare(rings.x, p.x_stages, p.share);
    prepare(rings.weight, p.stages, p.share);
    __syncthreads();
    let_later_kernels_begin();
    if (warp == p.share) {
        produce(x, p, rings, ring);
    } else {
        wait_for_earlier_kernels();  // they may read what is written here
        consume(p, rings, shared_address(ring), warp);
    }
}

// Makes bfloat16 weights y [columns, y_stride] of some strips, a warp of each block of a strip. `words` and `numbers` are
// those of the first strip; from block to block, there are `strips` more.
constexpr int ROW_BYTES = DEPTH * 2 + 16;  // of an output in shared memory: stores have no bank conflicts
constexpr int WIDEN_BYTES = NUMBER_BYTES + TABLE_BYTES + STRIP_BYTES + 16 * ROW_BYTES;

constexpr u32 TIMES_256 = 0x43804380;  // bfloat16: 1 / SMALL

template <int step = 0>
__device__ __forceinline__ void write_wide(const Half& half, u32 to) {
    if constexpr (step < HALF) {
        u32 a[4];
        half.widen<step>(a);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            shared_store4(to + i % 2 * 8 * ROW_BYTES + step * 32 + i / 2 * 16, BITS == 4 ? times2(a[i], TIMES_256) : a[i]);
        write_wide<step + 1>(half, to);
    }
}
extern "C" __global__ void widen(const __grid_constant__ Params p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, strips = (p.columns + 15) / 16;
    const int task = blockIdx.x * (blockDim.x / 32) + warp, strip = task % strips, block = task / strips;
    const u32 numbers = shared_address(memory) + warp * WIDEN_BYTES, table = numbers + NUMBER_BYTES;
    const u32 codes = table + TABLE_BYTES, rows = codes + STRIP_BYTES;
    wait_for_earlier_kernels();  // they may read what is written here
    if (block >= p.blocks) return;
    const u64 from = (u64)block * p.strips + strip;
    for (int i = lane * 16; i < NUMBER_BYTES; i += 512)
        shared_store16(numbers + i, __ldg((const uint4*)(p.numbers + from * NUMBER_BYTES + i)));
    for (int i = lane * 16; i < STRIP_BYTES; i += 512)
        shared_store16(codes + i, __ldg((const uint4*)((const unsigned char*)p.words + from * STRIP_BYTES + i)));
    decode(numbers, table, lane);
    const u32 own_table = table + lane / 4 * 2 * ENTRY_BYTES, to = rows + lane / 4 * ROW_BYTES + lane % 4 * 4;
    Half half;
    half.load_words<0>(codes + lane * 16);
    half.load_scales<0>(own_table);
    write_wide(half, to);
    half.load_words<1>(codes + lane * 16);
    half.load_scales<1>(own_table);
    write_wide(half, to + HALF * 32);
    __syncwarp();
#pragma unroll
    for (int i = lane * 8; i < 16 * DEPTH; i += 256) {
        const int row = strip * 16 + i / DEPTH, column = block * DEPTH + i % DEPTH;
        if (row < p.columns && column < p.y_stride)
            *(uint4*)((bf16*)p.y + row * p.y_stride + column) = shared16(rows + i / DEPTH * ROW_BYTES + i % DEPTH * 2);
    }
}
