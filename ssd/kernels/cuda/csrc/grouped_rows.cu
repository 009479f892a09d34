// x [rows, depth] times a packed weight in groups (`packing.py`) transposed, for up to 8 TILES rows: bound by reading
// the weight, or by the instructions that widen it.
//
// A block of threads takes `share` strips of 16 outputs at a time, and `parallel` segments of the depth. Its producer
// copies, for one block of the depth of each segment after the other, the strips' codes, the scales of their groups and
// the rows of x to a ring in shared memory. Each consumer warp has one strip and one segment: it makes bfloat16 weights
// of the codes (scale * code + offset in float32, rounded), which are the A operand of the tensor cores (`mma`). Sums of
// a segment are those of `linear.py`, to the bit: over the depth in one order, sixteen at a time. Those of segments are
// added in their order.
//
// Macros: FORMAT (0: fp8, 1: int8, 2: int4, 3: uint4), DEPTH (of a block), GROUP (weights of a scale), NUMBERS (how
// scales are stored, see `GroupNumbers`), OFFSETS (whether groups have offsets), TILES, MAX_WARPS (consumers).

#include "pipeline.cu"

constexpr int BITS = FORMAT >= 2 ? 4 : 8;
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
constexpr int TABLE_BYTES = COUNT * ALL * 4;  // of the same as float32, see `decode`
constexpr int SUM_BYTES = SUMS * 128;         // of a warp

struct Params {
    const u32* words;
    const unsigned char* numbers;
    const bf16* bias;
    void* y;
    long long y_stride;
    int rows, columns, strips, blocks, share, parallel, stages;
    int segment;         // blocks of a segment
    int gated, float32;  // whether rows of the weight alternate gate and up; whether y is float32
};

__device__ __forceinline__ int block_bytes(const Params& p) {  // of one segment
    return X_BYTES + p.share * STRIP_BYTES + (p.share * NUMBER_BYTES + 1023) / 1024 * 1024;
}

// Four neighbouring numbers in shared memory: float32, float16, or integers of 8 bits.
struct Four {
    float of[4];
};
__device__ __forceinline__ Four floats(u32 at) {
    const uint4 v = shared16(at);
    return {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
}
__device__ __forceinline__ Four float16s(u32 at) {
    const uint2 v = shared8(at);
    return {of_half<0>(v.x), of_half<1>(v.x), of_half<0>(v.y), of_half<1>(v.y)};
}
// A byte without a sign, minus 128: its bits are set as the last ones of 2^23, which is subtracted again.
template <int i>
__device__ __forceinline__ float integer(u32 v) {
    return __fadd_rn(__uint_as_float(bytes<0x7440 + i>(v, 0x4B000000u)), -8388736.0f);
}
__device__ __forceinline__ Four integers(u32 at) {
    const u32 v = shared4(at) ^ 0x80808080u;
    return {integer<0>(v), integer<1>(v), integer<2>(v), integer<3>(v)};
}
__device__ __forceinline__ Four products(const Four& a, const Four& b, float sign = 1.0f) {
    Four made;
    for (int i = 0; i < 4; ++i) made.of[i] = __fmul_rn(__fmul_rn(sign, a.of[i]), b.of[i]);
    return made;
}
__device__ __forceinline__ void store(u32 at, float a, float b, float c, float d) {
    shared_store16(at, make_uint4(__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d)));
}
// Makes a warp's table of the scales and offsets of a block of a strip, float32 [GROUPS, 16, COUNT], from what is
// stored. All of it in shared memory.
__device__ __forceinline__ void decode(u32 stored, u32 table, int lane) {
    __syncwarp();  // all lanes have read what was there
#pragma unroll
    for (int i = lane * 4; i < ALL; i += 128) {
        const u32 unit = stored + COUNT * ALL + i % 16 * 2;  // of FACTORS
        const Four scale = NUMBERS == FLOAT32   ? floats(stored + i * 4)
                           : NUMBERS == FACTORS ? products(float16s(unit), integers(stored + i))
                                                : float16s(stored + i * 2);
        if (!OFFSETS) {
            store(table + i * 4, scale.of[0], scale.of[1], scale.of[2], scale.of[3]);
            continue;
        }
        const Four offset = NUMBERS == FLOAT32   ? floats(stored + (ALL + i) * 4)
                            : NUMBERS == FLOAT16 ? float16s(stored + (ALL + i) * 2)
                            : NUMBERS == FACTORS ? products(float16s(unit + 32), integers(stored + ALL + i))
                                                 : products(scale, integers(stored + ALL * 2 + i), -1.0f);
        store(table + i * 8, scale.of[0], offset.of[0], scale.of[1], offset.of[1]);
        store(table + i * 8 + 16, scale.of[2], offset.of[2], scale.of[3], offset.of[3]);
    }
    __syncwarp();
}

// Code `part` of a word as float32: its bits are set as the last ones of a power of two, which is subtracted again.
template <int part>
__device__ __forceinline__ float number(u32 w) {
    if (BITS == 8) return integer<part % 4>(w);
    constexpr int at = part < 5 ? 4 * part : 4 * part - 12;  // of its bits, after a shift by 12 of the last three
    constexpr float unit = 1 << (23 - at);
    const u32 bits = masked(part < 5 ? w : w >> 12, 15u << at, (150u - at) << 23);
    return __fadd_rn(__uint_as_float(bits), -(unit + (FORMAT == 2 ? 8.0f : 0.0f)));
}
struct Scale {
    float scale, offset;
    __device__ __forceinline__ void load(u32 at) {
        if (OFFSETS) {
            const uint2 both = shared8(at);
            scale = __uint_as_float(both.x), offset = __uint_as_float(both.y);
        } else {
            scale = shared_float(at);
        }
    }
};
// Weights `part` and the next one of a word, as a pair of bfloat16.
template <int part>
__device__ __forceinline__ u32 weights(u32 w, const Scale& s) {
    float low, high;
    if (FORMAT == 0) {
        const u32 pair = halves<part % 4 / 2>(w);  // as float16
        low = of_half<0>(pair), high = of_half<1>(pair);
    } else {
        low = number<part>(w), high = number<part + 1>(w);
    }
    if (OFFSETS) return pack(__fmaf_rn(low, s.scale, s.offset), __fmaf_rn(high, s.scale, s.offset));
    return pack(__fmul_rn(low, s.scale), __fmul_rn(high, s.scale));
}

struct Consumer {
    float sums[SUMS];
    u32 words[LOADS][4];  // of a block; a step takes one or two
    Scale scales[2];      // of two outputs that are 8 apart, and the group that is multiplied

    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int i = 0; i < SUMS; ++i) sums[i] = 0.0f;
    }
    __device__ __forceinline__ void load(u32 codes, int lane) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const uint4 v = shared16(codes + i * 512 + lane * 16);
            words[i][0] = v.x, words[i][1] = v.y, words[i][2] = v.z, words[i][3] = v.w;
        }
    }
    // A step of 16 of the depth; `b`: the B operand of each tile. `table`: address of the lane's first scale.
    template <int step>
    __device__ __forceinline__ void multiply(const u32 (&b)[TILES][2], u32 table) {
        if constexpr (step * 16 % GROUP == 0)
#pragma unroll
            for (int i = 0; i < 2; ++i) scales[i].load(table + COUNT * (step * 16 / GROUP * 64 + i * 32));
        constexpr int first = step * BITS / 4, second = first + (BITS == 8);  // words
        constexpr int more = BITS == 8 ? 0 : 4;
        const u32 a0 = weights<0>(words[first / 4][first % 4], scales[0]);
        const u32 a1 = weights<2>(words[first / 4][first % 4], scales[1]);
        const u32 a2 = weights<more>(words[second / 4][second % 4], scales[0]);
        const u32 a3 = weights<more + 2>(words[second / 4][second % 4], scales[1]);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
            mma(*reinterpret_cast<float(*)[4]>(sums + tile * 4), a0, a1, a2, a3, b[tile][0], b[tile][1]);
    }
    // The steps of a block from the i-th one; `x`: address of its rows.
    template <int i>
    __device__ __forceinline__ void multiply_block(u32 x, u32 table, int lane) {
        if constexpr (i < STEPS) {
            u32 b[2][TILES][2];
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                const u32 row = x + i / 4 * (TILES * 1024) + tile * 1024 + lane % 8 * 128;
                const uint4 v = shared_matrices(row + ((i % 4 * 2 + lane / 8) ^ lane % 8) * 16);
                b[0][tile][0] = v.x, b[0][tile][1] = v.y, b[1][tile][0] = v.z, b[1][tile][1] = v.w;
            }
            multiply<i>(b[0], table);
            multiply<i + 1>(b[1], table);
            multiply_block<i + 2>(x, table, lane);
        }
    }
};

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

// `tables`: of the scales of each consumer's groups; `partials`: of their sums.
__device__ __forceinline__ void consume(const Params& p, Barriers& barriers, u32 ring, u32 tables, u32 partials,
                                        int warp) {
    const int lane = threadIdx.x % 32, own = block_bytes(p), size = p.parallel * own;
    const int strip = warp % p.share, segment = warp / p.share;
    const u32 table = tables + warp * TABLE_BYTES, at_x = segment * own, codes = at_x + X_BYTES + strip * STRIP_BYTES;
    const u32 numbers = at_x + X_BYTES + p.share * STRIP_BYTES + strip * NUMBER_BYTES;
    const int turn = p.parallel * p.segment;  // blocks
    Consumer consumer;
    float total[SUMS];
    Scales<1> of_outputs(nullptr, 0, lane);
    Ring at;
    for (int first = blockIdx.x * p.share; first < p.strips; first += gridDim.x * p.share) {
        const bool there = first + strip < p.strips;
        const int output = (first + strip) * 16 + lane / 4;
        of_outputs.load_outputs(nullptr, p.bias, output, there ? p.columns : 0);
        for (int start = 0; start < p.blocks; start += turn) {
            const int count = min(p.segment, p.blocks - start), begin = start + segment * p.segment;
            consumer.begin();
            for (int i = 0; i < count; ++i, at.next(p.stages)) {
                wait(&barriers.full[at.stage], at.parity);
                __syncwarp();
                if (there && begin + i < p.blocks) {
                    const u32 stage = ring + at.stage * size;
                    consumer.load(stage + codes, lane);
                    decode(stage + numbers, table, lane);
                    consumer.multiply_block<0>(stage + at_x, table + lane / 4 * 4 * COUNT, lane);
                }
                release(true, &barriers.empty[at.stage]);
            }
            if (segment > 0)
#pragma unroll
                for (int i = 0; i < SUMS; ++i)
                    shared_store4(partials + warp * SUM_BYTES + i * 128 + lane * 4, __float_as_uint(consumer.sums[i]));
            if (p.parallel > 1) meet(32 * p.share * p.parallel);
            if (segment == 0) {
#pragma unroll
                for (int i = 0; i < SUMS; ++i) total[i] = start ? __fadd_rn(total[i], consumer.sums[i]) : consumer.sums[i];
                for (int other = 1; other < p.parallel && begin + other * p.segment < p.blocks; ++other) {
                    const u32 from = partials + (warp + other * p.share) * SUM_BYTES + lane * 4;
#pragma unroll
                    for (int i = 0; i < SUMS; ++i) total[i] = __fadd_rn(total[i], shared_float(from + i * 128));
                }
            }
            if (p.parallel > 1) meet(32 * p.share * p.parallel);
        }
        if (there && segment == 0) finish(p, total, of_outputs.biases, output, lane);
    }
}

// One fill of the ring: a block of each segment. Weights do not depend on earlier kernels, so the first ones are copied
// before the wait for these kernels.
__device__ __forceinline__ void produce(const TensorMap& x, const Params& p, Barriers& barriers, unsigned char* ring) {
    const bool leader = threadIdx.x % 32 == 0;
    const int own = block_bytes(p), size = p.parallel * own, turn = p.parallel * p.segment;
    const u64 policy = evict_first();
    struct Place {
        int first, start = 0, i = 0;  // strip, first block of the turn, block of each segment
    };
    const auto next = [&](Place& at) {
        if (++at.i < min(p.segment, p.blocks - at.start)) return;
        at.i = 0;
        if ((at.start += turn) < p.blocks) return;
        at.start = 0, at.first += gridDim.x * p.share;
    };
    const auto copy_weight = [&](const Place& at, int stage) {
        const int count = min(p.share, p.strips - at.first);
        int valid = 0;
        while (valid < p.parallel && at.start + valid * p.segment + at.i < p.blocks) ++valid;
        u64* full = &barriers.full[stage];
        mbarrier_expect_if(leader, full, valid * (X_BYTES + count * (STRIP_BYTES + NUMBER_BYTES)));
        for (int segment = 0; segment < valid; ++segment) {
            const u64 from = (u64)(at.start + segment * p.segment + at.i) * p.strips + at.first;  // strips
            unsigned char* codes = ring + stage * size + segment * own + X_BYTES;
            copy_to_shared_if(leader, codes, p.words + from * (STRIP_BYTES / 4), count * STRIP_BYTES, full, policy);
            copy_to_shared_if(leader, codes + p.share * STRIP_BYTES, p.numbers + from * NUMBER_BYTES,
                              count * NUMBER_BYTES, full, policy);
        }
    };
    Place weight{(int)blockIdx.x * p.share}, fill = weight;
    int ahead = 0;
    for (; ahead < p.stages && weight.first < p.strips; ++ahead, next(weight)) copy_weight(weight, ahead);
    if (leader) prefetch(x);
    wait_for_earlier_kernels();
    for (Ring at; fill.first < p.strips; next(fill), at.next(p.stages)) {
        if (--ahead < 0) {
            wait(&barriers.empty[at.stage], at.parity ^ 1);
            copy_weight(fill, at.stage);
        }
        for (int segment = 0; segment < p.parallel; ++segment) {
            const int block = fill.start + segment * p.segment + fill.i;
            if (block >= p.blocks) break;
            copy_box_if(leader, ring + at.stage * size + segment * own, x, 0, block * (DEPTH / 64),
                        &barriers.full[at.stage]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(32 * (MAX_WARPS + 1), 1)
    product(const __grid_constant__ TensorMap x, const __grid_constant__ Params p) {
    Barriers& barriers = *reinterpret_cast<Barriers*>(memory);
    unsigned char* ring = memory + RING_AT;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), consumers = p.share * p.parallel;
    if (threadIdx.x == 0) prepare(barriers, p.stages, consumers);
    __syncthreads();
    let_later_kernels_begin();
    const u32 tables = shared_address(ring + p.stages * p.parallel * block_bytes(p));
    if (warp == consumers) {
        produce(x, p, barriers, ring);
    } else {
        wait_for_earlier_kernels();  // they may read what is written here
        consume(p, barriers, shared_address(ring), tables, tables + consumers * TABLE_BYTES, warp);
    }
}
