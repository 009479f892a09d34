// Shared by the kernels in which a producer warp copies blocks of the operands to a ring buffer in shared memory, and
// consumer warps multiply them.

constexpr int MAX_STAGES = 20;
constexpr int RING_AT = 1024;  // bytes; swizzled boxes (tensor maps) need addresses that are multiples of 1024
constexpr u32 MAX_POLLS = 1u << 26;

struct Barriers {
    u64 full[MAX_STAGES], empty[MAX_STAGES];
};
static_assert(sizeof(Barriers) <= RING_AT, "the ring is behind them");

struct Ring {
    int stage = 0;
    u32 parity = 0;
    __device__ __forceinline__ void next(int stages) {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
};

__device__ __forceinline__ void wait(u64* barrier, u32 parity) {
    u32 polls = 0;
    while (!mbarrier_passed(barrier, parity)) {
        if (++polls > MAX_POLLS) give_up();
        pause();
    }
}
// Gives a slot of the ring back to the producer; all lanes of a warp call it.
__device__ __forceinline__ void release(bool wanted, u64* empty) {
    __syncwarp();
    mbarrier_arrive_if(wanted && threadIdx.x % 32 == 0, empty);
}
// The order in which a producer fills the ring: all blocks of the depth of its first tile of outputs, then those of its
// next tile, `grid` tiles later.
struct Fill {
    int tile, block = 0;
    __device__ __forceinline__ void next(int blocks, int grid) {
        if (++block == blocks) block = 0, tile += grid;
    }
};
// Initialises the barriers; called by all threads, before __syncthreads(). `consumers`: warps that release a slot,
// `arrivals`: arrivals (beside the bytes of copies) that make a slot full.
__device__ __forceinline__ void prepare(Barriers& barriers, int stages, int consumers, int arrivals = 1) {
    const int i = threadIdx.x;
    if (i >= stages) return;
    mbarrier_init(&barriers.full[i], arrivals);
    mbarrier_init(&barriers.empty[i], consumers);
    mbarriers_are_ready();
}

// Numbers `part` of two words of neighbouring codes, as a pair of bfloat16: of e4m3 (`packing.paired`), whose exponent is
// not moved, which divides by 2^120.
template <int part>
__device__ __forceinline__ u32 widened_fp8(uint2 w) {
    const u32 v = part < 2 ? w.x : w.y;
    const u32 bits = part % 2 ? masked(v << 4, 0x80F080F0u, (v >> 4) & 0x07000700u) : v & 0x87F087F0u;
    return fma2(bits, 0x7B807B80u, 0x80008000u);
}

__device__ __forceinline__ float wide(bf16 v) { return __uint_as_float((u32)v << 16); }
__device__ __forceinline__ bf16 narrow(float v) { return (bf16)pack(v, 0.0f); }
__device__ __forceinline__ void store(void* y, bool float32, u64 at, float value) {
    if (float32)
        ((float*)y)[at] = value;
    else
        ((bf16*)y)[at] = narrow(value);
}
// Stores two neighbouring numbers, of bfloat16 by one store where aligned; `both`: whether the second is in range.
__device__ __forceinline__ void store_pair(void* y, bool float32, u64 at, float low, float high, bool both) {
    if (!float32 && both && at % 2 == 0)
        ((u32*)y)[at / 2] = pack(low, high);
    else {
        store(y, float32, at, low);
        if (both) store(y, float32, at + 1, high);
    }
}
// Two neighbouring outputs of one row. Before, a lane holds rows 0 and 1 of one output, and lane ^ 4 the same rows of
// the output next to it. They exchange one number: the lane with the lower output then has both outputs of row 0
// (`low`, `high`), the other one those of row 1.
struct Pair {
    int row;
    float low, high;
    __device__ __forceinline__ Pair(const float (&rows)[2], int lane) : row(lane / 4 % 2) {
        const float other = __shfl_xor_sync(~0u, row ? rows[0] : rows[1], 4);
        low = row ? other : rows[0], high = row ? rows[1] : other;
    }
};
// The scales and biases of a thread's results. Its rows are lane % 4 * 2 and the next one of each of COUNT tiles of 8
// rows, its outputs are two that are 8 apart. A scale is 1, and a bias 0, where the pointer is null or the index out of
// range. They are loaded before the products: after them, the latency of the loads would add to the kernel's time.
template <int COUNT>
struct Scales {
    float rows[COUNT][2], outputs[2], biases[2];
    __device__ __forceinline__ Scales(const float* row_scales, int num_rows, int lane) {
#pragma unroll
        for (int i = 0; i < 2 * COUNT; ++i) {
            const int row = i / 2 * 8 + lane % 4 * 2 + i % 2;
            rows[i / 2][i % 2] = row_scales && row < num_rows ? row_scales[row] : 1.0f;
        }
    }
    __device__ __forceinline__ void load_outputs(const float* scales, const bf16* bias, int first, int end) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int output = first + i * 8;
            outputs[i] = scales && output < end ? __ldg(scales + output) : 1.0f;
            biases[i] = bias && output < end ? wide(bias[output]) : 0.0f;
        }
    }
};
// silu(gate) * up, with the roundings of `epilogue.py`: of `rounded_gate`, or of `wide_gate`.
template <bool rounded>
__device__ __forceinline__ float gated_by(float gate, float up) {
    if (rounded) gate = wide(narrow(gate)), up = wide(narrow(up));
    const float below = __fadd_rn(1.0f, exp2_(__fmul_rn(-gate, 1.4426950408889634f)));
    const float silu = divided(gate, below);
    return __fmul_rn(rounded ? wide(narrow(silu)) : silu, up);
}
// Writes the outputs of a pair to the row that begins at y[at]. If gated, the pair is gate and up of one output.
// `column`: the lane's own output before the exchange, `end`: number of outputs.
template <bool rounded = false>
__device__ __forceinline__ void write(const Pair& pair, void* y, bool float32, bool gated, u64 at, int column,
                                      int end) {
    const int even = column & ~1;
    if (even >= end) return;
    if (gated)
        store(y, float32, at + even / 2, gated_by<rounded>(pair.low, pair.high));
    else
        store_pair(y, float32, at + even, pair.low, pair.high, even + 1 < end);
}

// The producer warp: for each block of each tile, `copy_weight(fill, stage)` copies the weight, and a box of `parts`
// parts of x follows. Weights do not depend on earlier kernels, so the first `stages` blocks of them are copied before
// the wait for these kernels.
template <typename Copy>
__device__ __forceinline__ void produce(const TensorMap& x, Barriers& barriers, unsigned char* ring, int size,
                                        int stages, int tiles, int blocks, int parts, Copy copy_weight) {
    const bool leader = threadIdx.x % 32 == 0;
    Fill weight{(int)blockIdx.x}, fill = weight;
    int ahead = 0;
    for (; ahead < stages && weight.tile < tiles; ++ahead, weight.next(blocks, gridDim.x)) copy_weight(weight, ahead);
    if (leader) prefetch(x);
    wait_for_earlier_kernels();
    for (Ring at; fill.tile < tiles; fill.next(blocks, gridDim.x), at.next(stages)) {
        if (--ahead < 0) {
            wait(&barriers.empty[at.stage], at.parity ^ 1);
            copy_weight(fill, at.stage);
        }
        copy_box_if(leader, ring + at.stage * size, x, 0, fill.block * parts, &barriers.full[at.stage]);
    }
}
