// x [rows, depth] times a packed weight (`packing.py`) transposed, for up to 8 TILES rows: bound by reading the weight.
//
// A block of threads has some strips of 16 outputs, one for each consumer warp. Its producer warp copies, for one block
// of the depth after the other, the strips' codes and the rows of x to a ring in shared memory. A consumer widens codes
// to bfloat16 in registers: they are the A operand of the tensor cores, 8 rows of x the B operand. Sums are those of
// `quantized_linear.py`, to the bit: over the depth in one order, sixteen at a time.
//
// Macros: FORMAT (0: fp8, 1: int8), WORDS (of a block of an output), TILES, MAX_SHARE (strips of a block of threads).

constexpr int PARTS = 4;              // weights of a word
constexpr int DEPTH = WORDS * PARTS;  // of a block
constexpr int RUNS = WORDS / 16;
constexpr int STEPS = DEPTH / 16;  // of the tensor cores
constexpr int STRIP_BYTES = 16 * WORDS * 4;
constexpr int ROW_BYTES = DEPTH * 2 + 16;                          // of x in a stage; the 16 avoid bank conflicts
constexpr int PIECES = DEPTH * 2 / 16 < 32 ? DEPTH * 2 / 16 : 32;  // of a row of x, 16 bytes each
constexpr int MAX_STAGES = 16;
constexpr u32 MAX_POLLS = 1u << 26;
static_assert(DEPTH <= 256 && STEPS % 2 == 0, "a warp copies whole rows of x; x is loaded for two steps at a time");

struct Params {
    const bf16* x;
    const u32* words;
    const float *scales, *row_scales;  // of outputs, of rows or null
    const bf16* bias;
    void* y;
    long long x_stride, y_stride;
    int rows, columns, strips, blocks, share, stages;
    int gated, float32;  // whether rows of the weight alternate gate and up; whether y is float32
};

struct Barriers {
    u64 full[MAX_STAGES], empty[MAX_STAGES];
};
constexpr int BARRIER_BYTES = 256;
static_assert(sizeof(Barriers) <= BARRIER_BYTES, "the ring is behind them");

struct Ring {
    int stage = 0;
    u32 parity = 0;
    __device__ __forceinline__ void next(int stages) {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
};

__device__ __forceinline__ int stage_bytes(const Params& p) { return p.share * STRIP_BYTES + TILES * 8 * ROW_BYTES; }

__device__ __forceinline__ void wait(u64* barrier, u32 parity) {
    u32 polls = 0;
    while (!mbarrier_passed(barrier, parity)) {
        if (++polls > MAX_POLLS) give_up();
        pause();
    }
    __syncwarp();
}

// Numbers `part` of two words of neighbouring weights, as a pair of bfloat16.
template <int part>
__device__ __forceinline__ u32 widened(uint2 w) {
    if (FORMAT == 0) {  // see `packing.pairs_of_fp8`: the exponent is not moved, which divides by 2^120
        const u32 v = part < 2 ? w.x : w.y;
        const u32 bits = part % 2 ? ((v << 4) & 0x80F080F0u) | ((v >> 4) & 0x07000700u) : v & 0x87F087F0u;
        return fma2(bits, 0x7B807B80u, 0x80008000u);
    }
    const u32 v = bytes<0x0400 + part * 0x1111>(w.x, w.y);  // 128 and seven bits, minus 128, or 256 for the sign
    return fma2((v & 0x007F007Fu) | 0x43004300u, 0x3F803F80u, (v & 0x00800080u) | 0xC300C300u);
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

// One step of the tensor cores for all rows; `b`: two steps of x.
template <int step>
__device__ __forceinline__ void multiply(float (&sums)[TILES][4], const Words& words, const u32 (&b)[TILES][4]) {
    constexpr int part = step / RUNS, run = step % RUNS;
    const u32 a0 = widened<part>(words.of[run][0][0]), a1 = widened<part>(words.of[run][0][1]);
    const u32 a2 = widened<part>(words.of[run][1][0]), a3 = widened<part>(words.of[run][1][1]);
#pragma unroll
    for (int i = 0; i < TILES; ++i) mma(sums[i], a0, a1, a2, a3, b[i][step % 2 * 2], b[i][step % 2 * 2 + 1]);
}
template <int step>
__device__ __forceinline__ void multiply_all(float (&sums)[TILES][4], const Words& words, u32 x) {
    if constexpr (step < STEPS) {
        u32 b[TILES][4];
#pragma unroll
        for (int i = 0; i < TILES; ++i) load_matrices(b[i], x + i * 8 * ROW_BYTES + step * 32);
        multiply<step>(sums, words, b);
        multiply<step + 1>(sums, words, b);
        multiply_all<step + 2>(sums, words, x);
    }
}

__device__ __forceinline__ void store(const Params& p, int row, int column, float value) {
    const u64 at = (u64)row * p.y_stride + column;
    if (p.float32)
        ((float*)p.y)[at] = value;
    else
        ((bf16*)p.y)[at] = (bf16)pack(value, 0.0f);
}
// Scales, bias and activation of outputs `first` and 8 more, of rows lane % 4 * 2 and the next, as
// `quantized_linear._finish` has them.
__device__ __forceinline__ void finish(const Params& p, const float (&sums)[TILES][4], int first, int lane) {
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int row = i * 8 + lane % 4 * 2 + e % 2, column = first + e / 2 * 8;
            const bool there = row < p.rows && column < p.columns;
            const float scale = __ldg(p.scales + column);
            float v = sums[i][e];
            if (p.row_scales) v = __fmul_rn(v, there ? p.row_scales[row] : 0.0f);
            if (p.bias)
                v = __fmaf_rn(v, scale, there ? __uint_as_float((u32)p.bias[column] << 16) : 0.0f);
            else
                v = __fmul_rn(v, scale);
            if (!p.gated) {
                if (there) store(p, row, column, v);
                continue;
            }
            const float up = __shfl_xor_sync(~0u, v, 4);  // of the next output
            if (there && column % 2 == 0) {
                const float below = __fadd_rn(1.0f, exp2_(__fmul_rn(-v, 1.4426950408889634f)));
                store(p, row, column / 2, __fmul_rn(divided(v, below), up));
            }
        }
}

__device__ __forceinline__ void consume(const Params& p, Barriers& barriers, const unsigned char* ring, int strip,
                                        int first) {
    const int lane = threadIdx.x % 32, size = stage_bytes(p);
    float sums[TILES][4] = {};
    Ring at;
    for (int block = 0; block < p.blocks; ++block, at.next(p.stages)) {
        wait(&barriers.full[at.stage], at.parity);
        const u32 base = shared_address(ring + at.stage * size);
        Words words;
        words.load(base + strip * STRIP_BYTES, lane);
        multiply_all<0>(sums, words, base + p.share * STRIP_BYTES + lane % 8 * ROW_BYTES + lane / 8 * 16);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&barriers.empty[at.stage]);
    }
    finish(p, sums, first * 16 + lane / 4, lane);
}

// The weight does not depend on earlier kernels: its first blocks are copied before they have ended.
__device__ __forceinline__ void produce(const Params& p, Barriers& barriers, unsigned char* ring, int first, int count) {
    constexpr int STEP = 32 / PIECES;  // rows of x that are copied at a time
    const int lane = threadIdx.x % 32, piece = lane % PIECES, row = lane / PIECES, size = stage_bytes(p);
    const u64 policy = evict_first();
    const u32* words = p.words + (u64)(first + lane) * p.blocks * (STRIP_BYTES / 4);
    const auto copy_weight = [&](int block, int stage) {
        u64* full = &barriers.full[stage];
        if (lane == 0) mbarrier_expect(full, count * STRIP_BYTES);
        __syncwarp();
        if (lane < count)
            copy_to_shared(ring + stage * size + lane * STRIP_BYTES, words + (u64)block * (STRIP_BYTES / 4), STRIP_BYTES,
                           full, policy);
    };
    const int ahead = min(p.stages, p.blocks);
    for (int block = 0; block < ahead; ++block) copy_weight(block, block);
    wait_for_earlier_kernels();
    const bf16* x = p.x + row * p.x_stride + piece * 8;
    Ring at;
    for (int block = 0; block < p.blocks; ++block, at.next(p.stages), x += DEPTH) {
        if (block >= ahead) {
            wait(&barriers.empty[at.stage], at.parity ^ 1);
            copy_weight(block, at.stage);
        }
        unsigned char* to = ring + at.stage * size + p.share * STRIP_BYTES + row * ROW_BYTES + piece * 16;
        const bf16* from = x;
#pragma unroll 4
        for (int r = row; r < p.rows; r += STEP, to += STEP * ROW_BYTES, from += STEP * p.x_stride) copy16(to, from);
        arrive_with_copies(&barriers.full[at.stage]);
    }
}

extern "C" __global__ void __launch_bounds__(32 * (MAX_SHARE + 1), 2) product(const __grid_constant__ Params p) {
    Barriers& barriers = *reinterpret_cast<Barriers*>(memory);
    unsigned char* ring = memory + BARRIER_BYTES;
    const int first = blockIdx.x * p.share, count = min(p.share, p.strips - first), warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < p.stages; ++i) {
            mbarrier_init(&barriers.full[i], 1 + 32);  // the weight's bytes, and the lanes' copies of x
            mbarrier_init(&barriers.empty[i], count);
        }
        mbarriers_are_ready();
    }
    __syncthreads();
    let_later_kernels_begin();
    if (warp == p.share) return produce(p, barriers, ring, first, count);
    wait_for_earlier_kernels();  // they may read what is written here
    if (warp < count) consume(p, barriers, ring, warp, first + warp);
}
