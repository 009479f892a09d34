// x [rows, depth] times a weight [columns, depth] transposed, both e4m3, for up to 8 TILES rows: bound by reading the
// weight.
//
// A block of threads takes `share` times 8 outputs at a time, up to 64 for each of its one or two groups of four
// consumer warps. Its producer copies, for one block of the depth after the other, the outputs' weights and the rows of
// x to a ring in shared memory, from where the tensor cores (`wgmma`) read both. Sums are over the depth in one chain,
// 32 at a time, as the library's are.
//
// Macro: TILES.

#include "pipeline.cu"

constexpr int PARTS = 2;                          // of 128 numbers, that a stage holds
constexpr int PART_STEPS = 4;                     // of the tensor cores, 32 numbers each
constexpr int SUMS = TILES * 4;                   // of a thread
constexpr int X_BYTES = PARTS * TILES * 8 * 128;  // of a stage
constexpr int UNIT_BYTES = 8 * 128;               // 8 outputs of a part
constexpr int GROUP_UNITS = 8, MAX_SHARE = 16;

struct Params {
    const float *scales, *row_scales;
    const bf16* bias;
    void* y;
    long long y_stride;
    int rows, columns, blocks, share, stages;
    int gated, float32;  // whether rows of the weight alternate gate and up; whether y is float32
};

__device__ __forceinline__ int stage_bytes(const Params& p) { return X_BYTES + PARTS * p.share * UNIT_BYTES; }

// The sums are rounded to bfloat16 before bias and activation, as the library's are.
__device__ __forceinline__ void finish(const Params& p, const float (&sums)[SUMS], const Scales<TILES>& scales,
                                       int first, int end, int lane) {
#pragma unroll
    for (int i = 0; i < SUMS; i += 2) {
        const int tile = i / 4, output = i % 4 / 2;
        float v[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            v[r] = __fmul_rn(__fmul_rn(sums[i + r], scales.outputs[output]), scales.rows[tile][r]);
            v[r] = wide(narrow(v[r]));
            if (p.bias) v[r] = wide(narrow(__fadd_rn(v[r], scales.biases[output])));
        }
        const Pair pair(v, lane);
        const int row = tile * 8 + lane % 4 * 2 + pair.row;
        if (row < p.rows) write(pair, p.y, p.float32, p.gated, (u64)row * p.y_stride, first + output * 8, end);
    }
}

__device__ __forceinline__ void consume(const Params& p, Barriers& barriers, u32 ring, int warp) {
    const int lane = threadIdx.x % 32, size = stage_bytes(p), outputs = p.share * 8;
    const u32 own = X_BYTES + warp / 4 * GROUP_UNITS * UNIT_BYTES;
    const int mine = warp * 16 + lane / 4;
    Scales<TILES> scales(p.row_scales, p.rows, lane);
    Ring at;
    for (int first = blockIdx.x * outputs; first < p.columns; first += gridDim.x * outputs) {
        const int end = min(p.columns, first + outputs);
        scales.load_outputs(p.scales, p.bias, first + mine, end);
        float sums[SUMS];
#pragma unroll
        for (int i = 0; i < SUMS; ++i) sums[i] = 0.0f;
        u64* previous = barriers.empty;
        for (int block = 0; block < p.blocks; ++block) {
            wait(&barriers.full[at.stage], at.parity);
            __syncwarp();
            const u32 stage = ring + at.stage * size;
            const u64 x = rows_descriptor(stage), w = rows_descriptor(stage + own);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < PARTS * PART_STEPS; ++i) {
                const int part = i / PART_STEPS, step = i % PART_STEPS * 2;  // units of 16 bytes
                wgmma8(sums, w + part * p.share * (UNIT_BYTES / 16) + step, x + part * (TILES * 64) + step);
            }
            wgmma_commit();
            wgmma_wait<1>();
            release(block > 0, previous);
            previous = &barriers.empty[at.stage];
            at.next(p.stages);
        }
        wgmma_wait<0>(sums);
        release(true, previous);
        // Rows of the tensor cores beyond the tile hold what is behind it in shared memory.
        finish(p, sums, scales, first + mine, end, lane);
    }
}

__device__ __forceinline__ void produce(const TensorMap& x, const TensorMap& w, const Params& p, Barriers& barriers,
                                        unsigned char* ring) {
    const bool leader = threadIdx.x % 32 == 0;
    const int size = stage_bytes(p), outputs = p.share * 8, tiles = (p.columns + outputs - 1) / outputs;
    produce(x, barriers, ring, size, p.stages, tiles, p.blocks, PARTS, [&](const Fill& fill, int stage) {
        u64* full = &barriers.full[stage];
        mbarrier_expect_if(leader, full, size);
        copy_box_if(leader, ring + stage * size + X_BYTES, w, fill.tile * outputs, fill.block * PARTS, full);
    });
}

extern "C" __global__ void __launch_bounds__(32 * (MAX_SHARE / 2 + 1), 1)
    product(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,
            const __grid_constant__ Params p) {
    Barriers& barriers = *reinterpret_cast<Barriers*>(memory);
    unsigned char* ring = memory + RING_AT;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), consumers = (p.share + GROUP_UNITS - 1) / GROUP_UNITS * 4;
    prepare(barriers, p.stages, consumers);
    __syncthreads();
    let_later_kernels_begin();
    if (warp == consumers) {
        produce(x, w, p, barriers, ring);
    } else {
        wait_for_earlier_kernels();  // they may read what is written here
        consume(p, barriers, shared_address(ring), warp);
    }
}
