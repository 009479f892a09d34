// x [rows, depth] times a packed weight (`packing.py`) transposed, for up to 8 TILES rows: bound by reading the weight.
//
// A block of threads takes `share` strips of 16 outputs at a time, one for each of its consumer warps. Its producer
// copies, for one block of the depth after the other, the strips' codes and the rows of x to a ring in shared memory.
// Consumers widen codes to bfloat16 in registers: those of four warps are the A operand of
// the tensor cores (`wgmma`), x in shared memory is the B operand. Sums are those of `codes_linear.py`, to the bit:
// over the depth in one order, sixteen at a time.
//
// Where a block of threads has few strips (AHEAD), the latency of `wgmma` with an operand in registers is the limit.
// Then other warps widen codes to shared memory, up to AHEAD blocks of the depth ahead, and both operands are read from
// there.
//
// Macros: FORMAT (0: fp8, 1: int8), WORDS (of a block of an output), TILES, AHEAD (0: consumers widen).

#include "pipeline.cu"

constexpr int DEPTH = WORDS * 4;  // of a block
constexpr int RUNS = WORDS / 16;
constexpr int STEPS = DEPTH / 16;  // of the tensor cores
constexpr int BATCH = 2;           // steps that are issued together
constexpr int SUMS = TILES * 4;                        // of a thread
constexpr int STRIP_BYTES = 16 * WORDS * 4;
constexpr int X_BYTES = TILES * 8 * DEPTH * 2;  // of a stage: 64 numbers of each row, the next 64, and so on
constexpr int MAX_SHARE = 8;                    // of strips
constexpr int AHEAD_SHARE = 3;                  // where blocks are widened ahead
constexpr int WIDE_BYTES = STEPS * 512;         // of a block of a strip, widened
static_assert(STEPS % (2 * BATCH) == 0, "batches take turns with two sets of registers");

struct Params {
    const u32* words;
    const float *scales, *row_scales;  // of outputs, of rows or null
    const bf16* bias;
    void* y;
    long long y_stride;
    int rows, columns, strips, blocks, share, stages;
    int gated, float32;  // whether rows of the weight alternate gate and up; whether y is float32
};

__device__ __forceinline__ int stage_bytes(const Params& p) { return X_BYTES + p.share * STRIP_BYTES; }

// Numbers `part` of two words of neighbouring weights, as a pair of bfloat16.
template <int part>
__device__ __forceinline__ u32 widened(uint2 w) {
    if (FORMAT == 0) return widened_fp8<part>(w);
    const u32 v = bytes<0x0400 + part % 4 * 0x1111>(w.x, w.y);  // 128 and seven bits, minus 128, or 256 for the sign
    return fma2(masked(v, 0x007F007Fu, 0x43004300u), 0x3F803F80u, masked(v, 0x00800080u, 0xC300C300u));
}

struct Words {
    uint2 of[RUNS][2][2];  // by run of 16 weights, halves of it, and outputs
    __device__ __forceinline__ void load(u32 strip, int lane) {
#pragma unroll
        for (int run = 0; run < RUNS; ++run)
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int row = 0; row < 2; ++row)
                    of[run][half][row] =
                        shared8(strip + ((run * 2 + half) * 16 + row * 8 + lane / 4) * 32 + lane % 4 * 8);
    }
};

struct Consumer {
    float sums[SUMS];
    u32 a[2][BATCH][4];
    Words words;

    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int i = 0; i < SUMS; ++i) sums[i] = 0.0f;
    }
    // The A operand of steps from the i-th one to the end of the batch.
    template <int i>
    __device__ __forceinline__ void widen() {
#pragma unroll
        for (int j = 0; j < 4; ++j)
            a[i / BATCH % 2][i % BATCH][j] = widened<i / RUNS>(words.of[i % RUNS][j / 2][j % 2]);
        if constexpr ((i + 1) % BATCH) widen<i + 1>();
    }
    // Likewise their products; `x`: descriptor of the block's rows.
    template <int i>
    __device__ __forceinline__ void issue(u64 x) {
        wgmma(sums, a[i / BATCH % 2][i % BATCH], x + i / 4 * (TILES * 64) + i % 4 * 2);
        if constexpr ((i + 1) % BATCH) issue<i + 1>(x);
    }
    // One batch is computed while the codes of the next are widened. `previous`: barrier of the block before, if it is a
    // `later` one (its last batch may be under way), `next`: loads the words of the block after this one.
    template <int i, typename Next>
    __device__ __forceinline__ void multiply(u64 x, bool later, u64* previous, Next next) {
        if constexpr (i < STEPS) {
            widen<i>();
            if (i + BATCH == STEPS) next();
            wgmma_fence();
            issue<i>(x);
            wgmma_commit();
            wgmma_wait<1>();
            if (i == 0) release(later, previous);
            multiply<i + BATCH>(x, later, previous, next);
        }
    }
};

// Scales, bias and activation of this thread's results (outputs `first` and first + 8, rows as in `Scales`), with the
// roundings of `codes_linear._finish`; stores them.
__device__ __forceinline__ void finish(const Params& p, const float (&sums)[SUMS], const Scales<TILES>& scales,
                                       int first, int lane) {
#pragma unroll
    for (int i = 0; i < SUMS; i += 2) {
        const int tile = i / 4, output = i % 4 / 2;
        const float scale = scales.outputs[output], bias = scales.biases[output];
        float v[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            v[r] = __fmul_rn(sums[i + r], scales.rows[tile][r]);
            v[r] = p.bias ? __fmaf_rn(v[r], scale, bias) : __fmul_rn(v[r], scale);
        }
        const Pair pair(v, lane);
        const int row = tile * 8 + lane % 4 * 2 + pair.row;
        if (row < p.rows) write(pair, p.y, p.float32, p.gated, (u64)row * p.y_stride, first + output * 8, p.columns);
    }
}

__device__ __forceinline__ void consume(const Params& p, Barriers& barriers, u32 ring, int warp) {
    const int lane = threadIdx.x % 32, size = stage_bytes(p);
    Consumer consumer;
    Scales<TILES> of_outputs(p.row_scales, p.rows, lane);
    Ring at;
    for (int first = blockIdx.x * p.share; first < p.strips; first += gridDim.x * p.share) {
        const int strip = first + warp;
        const bool there = warp < p.share && strip < p.strips;  // others multiply zeros
        const u32 codes = X_BYTES + (there ? warp * STRIP_BYTES : 0);
        const auto load = [&](const Ring& from) {
            wait(&barriers.full[from.stage], from.parity);
            __syncwarp();
            if (there) consumer.words.load(ring + from.stage * size + codes, lane);
        };
        u64* previous = barriers.empty;
        of_outputs.load_outputs(p.scales, p.bias, strip * 16 + lane / 4, there ? p.columns : 0);
        consumer.begin();
        if (!there) consumer.words = {};
        load(at);
        for (int block = 0; block < p.blocks; ++block) {
            const u32 x = ring + at.stage * size;
            Ring next = at;
            next.next(p.stages);
            consumer.multiply<0>(rows_descriptor(x), block > 0, previous, [&] {
                if (block + 1 < p.blocks) load(next);
            });
            previous = &barriers.empty[at.stage];
            at = next;
        }
        wgmma_wait<0>(consumer.sums);
        release(true, previous);
        if (there) finish(p, consumer.sums, of_outputs, strip * 16 + lane / 4, lane);
    }
}

// Slots for widened blocks, behind the ring: as x, 64 numbers of all strips' outputs, the next 64, and so on.
struct Slots {
    u64 full[AHEAD ? AHEAD : 1], empty[AHEAD ? AHEAD : 1];
};
constexpr int SLOTS_AT = sizeof(Barriers);
static_assert(SLOTS_AT + sizeof(Slots) <= RING_AT, "the ring is behind them");

// Writes the steps of a block of a strip from the i-th one; `part`: bytes of 64 numbers of all outputs.
template <int i>
__device__ __forceinline__ void write_wide(const Words& words, u32 to, int part, int lane) {
    if constexpr (i < STEPS) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const u32 at = to + i / 4 * part + j % 2 * 1024 + lane / 4 * 128 + lane % 4 * 4;
            shared_store4(at + ((i % 4 * 2 + j / 2) ^ lane / 4) * 16,
                          widened<i / RUNS>(words.of[i % RUNS][j / 2][j % 2]));
        }
        write_wide<i + 1>(words, to, part, lane);
    }
}

// A widening warp: every AHEAD-th block of one strip, which it writes to its slot. `to`: address of the slots.
// A barrier's parity tells a phase from the next one only, and copies to different stages do not complete in order. So
// the wait for a stage may begin only when the stage's previous block has been multiplied. A free slot implies that for
// all blocks up to the one that was in the slot. With at least 2 * AHEAD stages the slot's wait of one turn before
// implies it already, so codes are loaded (`early`) while the slot is still in use.
__device__ __forceinline__ void widen(const Params& p, Barriers& barriers, Slots& slots, u32 ring, u32 to, int warp) {
    const int lane = threadIdx.x % 32, size = stage_bytes(p), strip = warp % p.share, own = warp / p.share;
    const bool early = p.stages >= 2 * AHEAD;
    Ring at, slot;
    Words words;
    for (int first = blockIdx.x * p.share; first < p.strips; first += gridDim.x * p.share)
        for (int block = 0; block < p.blocks; ++block, at.next(p.stages), slot.next(AHEAD)) {
            if (slot.stage != own) continue;
            if (!early) wait(&slots.empty[own], slot.parity ^ 1);
            wait(&barriers.full[at.stage], at.parity);
            __syncwarp();
            words.load(ring + at.stage * size + X_BYTES + strip * STRIP_BYTES, lane);
            if (early) wait(&slots.empty[own], slot.parity ^ 1);
            write_wide<0>(words, to + own * p.share * WIDE_BYTES + strip * 2048, p.share * 2048, lane);
            wgmma_sees();
            release(true, &slots.full[own]);
        }
}

// Consumers of widened blocks. `wgmma` always computes 64 outputs: those beyond `share` strips are of whatever is in
// shared memory there, and are not stored.
__device__ __forceinline__ void multiply(const Params& p, Barriers& barriers, Slots& slots, u32 ring, u32 from,
                                         int warp) {
    const int lane = threadIdx.x % 32, size = stage_bytes(p);
    float sums[SUMS];
    Scales<TILES> of_outputs(p.row_scales, p.rows, lane);
    Ring at, slot;
    for (int first = blockIdx.x * p.share; first < p.strips; first += gridDim.x * p.share) {
        const int strip = first + warp;
        const bool there = warp < p.share && strip < p.strips;
        of_outputs.load_outputs(p.scales, p.bias, strip * 16 + lane / 4, there ? p.columns : 0);
#pragma unroll
        for (int i = 0; i < SUMS; ++i) sums[i] = 0.0f;
        u64 *stage = barriers.empty, *wide = slots.empty;  // of the block before
        for (int block = 0; block < p.blocks; ++block) {
            wait(&slots.full[slot.stage], slot.parity);
            wait(&barriers.full[at.stage], at.parity);
            __syncwarp();
            const u64 x = rows_descriptor(ring + at.stage * size);
            const u64 w = rows_descriptor(from + slot.stage * p.share * WIDE_BYTES);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < STEPS; ++i)
                wgmma(sums, w + i / 4 * (p.share * 128) + i % 4 * 2, x + i / 4 * (TILES * 64) + i % 4 * 2);
            wgmma_commit();
            wgmma_wait<1>();
            release(block > 0, stage);
            release(block > 0, wide);
            stage = &barriers.empty[at.stage], wide = &slots.empty[slot.stage];
            at.next(p.stages), slot.next(AHEAD);
        }
        wgmma_wait<0>(sums);
        release(true, stage);
        release(true, wide);
        if (there) finish(p, sums, of_outputs, strip * 16 + lane / 4, lane);
    }
}

__device__ __forceinline__ void produce(const TensorMap& x, const Params& p, Barriers& barriers, unsigned char* ring) {
    const bool leader = threadIdx.x % 32 == 0;
    const int size = stage_bytes(p), tiles = (p.strips + p.share - 1) / p.share;
    const u64 policy = evict_first();
    produce(x, barriers, ring, size, p.stages, tiles, p.blocks, DEPTH / 64, [&](const Fill& fill, int stage) {
        const int first = fill.tile * p.share, count = min(p.share, p.strips - first);
        const u64 from = (u64)fill.block * p.strips + first;  // strips
        unsigned char* codes = ring + stage * size + X_BYTES;
        u64* full = &barriers.full[stage];
        mbarrier_expect_if(leader, full, X_BYTES + count * STRIP_BYTES);
        copy_to_shared_if(leader, codes, p.words + from * (STRIP_BYTES / 4), count * STRIP_BYTES, full, policy);
    });
}

extern "C" __global__ void __launch_bounds__(32 * (AHEAD ? 4 + AHEAD * AHEAD_SHARE + 1 : MAX_SHARE + 1), 1)
    product(const __grid_constant__ TensorMap x, const __grid_constant__ Params p) {
    Barriers& barriers = *reinterpret_cast<Barriers*>(memory);
    Slots& slots = *reinterpret_cast<Slots*>(memory + SLOTS_AT);
    unsigned char* ring = memory + RING_AT;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), consumers = (p.share + 3) / 4 * 4;
    if (const int i = threadIdx.x; i < AHEAD) mbarrier_init(&slots.full[i], p.share), mbarrier_init(&slots.empty[i], 4);
    prepare(barriers, p.stages, consumers);  // its fence is for slots, too: there are as many stages at least
    __syncthreads();
    let_later_kernels_begin();
    const u32 wide = shared_address(ring + p.stages * stage_bytes(p));
    if (warp == consumers + AHEAD * p.share) {
        produce(x, p, barriers, ring);
    } else if (AHEAD && warp >= consumers) {
        widen(p, barriers, slots, shared_address(ring), wide, warp - consumers);
    } else {
        wait_for_earlier_kernels();  // they may read what is written here
        if (AHEAD)
            multiply(p, barriers, slots, shared_address(ring), wide, warp);
        else
            consume(p, barriers, shared_address(ring), warp);
    }
}
