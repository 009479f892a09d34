// Attention of few queries over paged KV in e4m3, heads of 128: bound by reading KV. Arithmetic and work items are
// those of `_decode_kernel` (attention.py), to the bit.
//
// A warp computes an item of one KV head on its own. It copies keys and values of 64 positions at a time to its ring in
// shared memory, reads them as the A operand of the tensor cores and widens them to float16 in registers: scores are
// k q^T [positions, rows], results v^T p^T [dimensions, rows]. Rows of a tile: query tokens times the GROUP heads of
// the KV head, in NT = 1 or 2 columns of 8.
//
// Macros: GROUP, WARPS (of a block of threads), UNITS (of 64 keys or values in a warp's ring), AT_ONCE (pieces whose
// partial results are read at the same time).

#include "pipeline.cu"
#include "softmax.cu"

constexpr int DIM = 128, STEP = 64, SPLIT = 512;  // STEP, SPLIT: BLOCK_N and SPLIT of attention.py
constexpr int UNIT_BYTES = STEP * DIM;
constexpr int TILE_ROWS = 16;  // rows of a tile in the workspace

struct Params {
    const bf16* q;
    bf16* out;
    float *partial, *stats;
    int* count;
    const int *items, *tables;
    long long table_stride;
    float scale, v_scale;
    int num_items, kv_heads, block_size;
};

struct KVRing {
    unsigned char* units;
    u64* barriers;
    int issued = 0, used = 0;

    __device__ __forceinline__ void copy(const TensorMap& map, int slot, int head) {
        const int unit = issued++ % UNITS;
        const bool leader = threadIdx.x % 32 == 0;
        mbarrier_expect_if(leader, &barriers[unit], UNIT_BYTES);
        copy_box_if(leader, units + unit * UNIT_BYTES, map, slot, head, &barriers[unit]);
    }
    // Address of the next unit, once it is there.
    __device__ __forceinline__ u32 arrived() {
        const int unit = used % UNITS;
        wait(&barriers[unit], used / UNITS & 1);
        ++used;
        __syncwarp();
        return shared_address(units + unit * UNIT_BYTES);
    }
};

// Softmax sums of a lane's columns (rows of the tile) 8 n + lane % 4 * 2 and the next.
template <int NT>
struct Sums {
    float m[NT][2], l[NT][2];
    float acc[8][NT][4];  // see `dimension`; elements 0 and 2 are of the first column
    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int c = 0; c < 2; ++c) m[n][c] = MINUS_INF, l[n][c] = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) acc[i][n][e] = 0.0f;
        }
    }
};
template <int NT>
__device__ __forceinline__ void fold(Sums<NT>& all, const Sums<NT>& piece, float scale) {
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const float2 factors = fold(all.m[n][c], all.l[n][c], piece.m[n][c], piece.l[n][c], scale);
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                float& sum = all.acc[i / 2][n][i % 2 * 2 + c];
                sum = folded(sum, piece.acc[i / 2][n][i % 2 * 2 + c], factors.x, factors.y);
            }
        }
}

template <int NT>
struct Queries {
    u32 of[8][NT][2];  // by sixteen dimensions: the B operand, in the order in which words of keys hold them
    int position[NT][2];
};

// Keys of a unit at `from`: scores [64 positions, rows].
template <int NT>
__device__ __forceinline__ void multiply_keys(u32 from, const Queries<NT>& q, float (&scores)[4][NT][4], int lane) {
    const u32 at = from + lane / 4 * 128 + (lane / 4 << 4) + lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) scores[i][n][e] = 0.0f;
#pragma unroll
    for (int k = 0; k < 8; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 low = shared4((at ^ k << 4) + i * 2048), high = shared4((at ^ k << 4) + i * 2048 + 1024);
            const u32 a[4] = {halves<0>(low), halves<0>(high), halves<1>(low), halves<1>(high)};
#pragma unroll
            for (int n = 0; n < NT; ++n) mma16(scores[i][n], a, q.of[k][n]);
        }
}
// Values of a unit at `from`, times p, to the sums.
template <int NT>
__device__ __forceinline__ void multiply_values(u32 from, const u32 (&p)[4][NT][2], float (&acc)[8][NT][4], int lane) {
    const u32 even = from + lane % 4 * 256 + ((lane / 16 ^ lane % 4 * 2) << 4) + lane / 4 % 4 * 4;
    const u32 odd = (even ^ 16) + 128;
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int d = 0; d < 4; ++d) {
            const u32 x = k * 2048, swizzle = d * 32;
            const u32 a = shared4((even ^ swizzle) + x), b = shared4((odd ^ swizzle) + x);
            const u32 c = shared4((even ^ swizzle) + x + 1024), e = shared4((odd ^ swizzle) + x + 1024);
            const u32 first[2] = {bytes<0x5140>(a, b), bytes<0x7362>(a, b)};
            const u32 second[2] = {bytes<0x5140>(c, e), bytes<0x7362>(c, e)};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32 of[4] = {halves<0>(first[half]), halves<1>(first[half]), halves<0>(second[half]),
                                   halves<1>(second[half])};
#pragma unroll
                for (int n = 0; n < NT; ++n) mma16(acc[d * 2 + half][n], of, p[k][n]);
            }
        }
}
// The first of four neighbouring dimensions that acc[2 d] (elements c, c + 2) and acc[2 d + 1] hold.
__device__ __forceinline__ int dimension(int d, int lane) { return d * 32 + lane / 4 * 4; }

// `_step`; `from`: position of the first key, `copy`: starts the copy of a unit.
template <int NT, typename Copy>
__device__ __forceinline__ void step(KVRing& ring, const Queries<NT>& q, Sums<NT>& sums, bool masked, int from,
                                     float scale, int lane, Copy copy) {
    float scores[4][NT][4];
    multiply_keys(ring.arrived(), q, scores, lane);
    __syncwarp();
    copy();
    u32 p[4][NT][2];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        if (masked)
#pragma unroll
            for (int i = 0; i < 16; ++i)
                if (from + i / 4 * 16 + i % 4 / 2 * 8 + lane / 4 > q.position[n][i % 2])
                    scores[i / 4][n][i % 4] = MINUS_INF;
        float keep[2], shift[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            float top = scores[0][n][c];
#pragma unroll
            for (int i = 1; i < 8; ++i) top = fmaxf(top, scores[i / 2][n][i % 2 * 2 + c]);
#pragma unroll
            for (int distance = 4; distance < 32; distance *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
            top = fmaxf(sums.m[n][c], top);
            const float safe = safe_of(top);
            shift[c] = __fmul_rn(safe, -scale);
            keep[c] = exp2_(__fmul_rn(__fsub_rn(sums.m[n][c], safe), scale));
            sums.m[n][c] = top;
        }
        float l[4] = {__fmul_rn(sums.l[n][0], keep[0]), __fmul_rn(sums.l[n][1], keep[1]), 0.0f, 0.0f};
        const u32 ones[4] = {0x3C003C00u, 0x3C003C00u, 0x3C003C00u, 0x3C003C00u};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float* of = &scores[i][n][half * 2];
                p[i][n][half] = transposed(
                    pack16(exp2_(__fmaf_rn(of[0], scale, shift[0])), exp2_(__fmaf_rn(of[1], scale, shift[1]))));
            }
            mma16(l, ones, p[i][n]);
        }
        sums.l[n][0] = l[0], sums.l[n][1] = l[1];
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) sums.acc[i][n][e] = __fmul_rn(sums.acc[i][n][e], keep[e % 2]);
    }
    multiply_values(ring.arrived(), p, sums.acc, lane);
    __syncwarp();
    copy();
}

__device__ __forceinline__ u64 query_row(const Params& p, int first_row, int head, int r) {
    return ((u64)(first_row + r / GROUP) * p.kv_heads + head) * GROUP + r % GROUP;
}
// Two neighbouring dimensions of a row.
__device__ __forceinline__ u32 finished(const Params& p, float a, float b, float l) {
    return pack(__fmul_rn(divided(a, l), p.v_scale), __fmul_rn(divided(b, l), p.v_scale));
}

// A piece in the workspace: by pairs of rows, statistics (m, l of both) and 64 times four results, as acc has them.
__device__ __forceinline__ u64 place_of(const Params& p, int piece, int head) { return (u64)piece * p.kv_heads + head; }
__device__ __forceinline__ float* stats_at(const Params& p, u64 place, int pair) {
    return p.stats + (place * (TILE_ROWS / 2) + pair) * 4;
}
__device__ __forceinline__ float* results_at(const Params& p, u64 place, int pair, int i) {
    return p.partial + ((place * (TILE_ROWS / 2) + pair) * 64 + i) * 4;
}
__device__ __forceinline__ uint4 bits_of(float a, float b, float c, float d) {
    return make_uint4(__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d));
}
template <int NT>
__device__ __forceinline__ void store_piece(const Params& p, u64 place, const Sums<NT>& sums, int rows, int lane) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        const int pair = 4 * n + lane % 4;
        if (2 * pair >= rows) continue;
        if (lane / 4 == 0)
            store16(stats_at(p, place, pair), bits_of(sums.m[n][0], sums.l[n][0], sums.m[n][1], sums.l[n][1]));
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float* of = sums.acc[i][n];
            store16(results_at(p, place, pair, i * 8 + lane / 4), bits_of(of[0], of[1], of[2], of[3]));
        }
    }
}
// `_fold` of AT_ONCE pieces of one row, a piece in each lane, with the factors of folding one after the other: `before`
// is that of the results up to the lane's piece, `piece` that of the piece.
struct Factors {
    float before, piece, l;  // l: that of the piece times its factor
    // m: the largest product before these pieces, then with them.
    __device__ __forceinline__ void of(float& m, float m_piece, float l_piece, float scale, int lane) {
        float top = m_piece;
#pragma unroll
        for (int distance = 1; distance < AT_ONCE; distance *= 2) {
            const float other = __shfl_up_sync(~0u, top, distance);
            if (lane >= distance) top = fmaxf(top, other);
        }
        top = fmaxf(m, top);
        const float earlier = __shfl_up_sync(~0u, top, 1), safe = safe_of(top);
        before = exp2_(__fmul_rn(__fsub_rn(lane ? earlier : m, safe), scale));
        piece = exp2_(__fmul_rn(__fsub_rn(m_piece, safe), scale));
        l = __fmul_rn(l_piece, piece);
        m = __shfl_sync(~0u, top, AT_ONCE - 1);
    }
};
// Folds all pieces of a tile in order, two pairs of rows at a time, and writes the rows.
__device__ __forceinline__ void fold_pieces(const Params& p, int place, int pieces, int head, int first_row, int rows,
                                            int lane) {
    for (int pair = 0; 2 * pair < rows; pair += 2) {
        float m[4], l[4], sums[4][4];  // by rows; by pairs and halves of their dimensions
#pragma unroll
        for (int i = 0; i < 16; ++i) sums[i / 4][i % 4] = 0.0f, m[i % 4] = MINUS_INF, l[i % 4] = 0.0f;
        for (int piece = 0; piece < pieces; piece += AT_ONCE) {
            uint4 stats[2], results[AT_ONCE][4];
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int own = pair + i / 2;
                    results[k][i] = make_uint4(0, 0, 0, 0);
                    load16_if(piece + k < pieces && 2 * own < rows,
                              results_at(p, place_of(p, place + piece + k, head), own, i % 2 * 32 + lane),
                              results[k][i]);
                }
#pragma unroll
            for (int own = 0; own < 2; ++own) {
                stats[own] = make_uint4(0xFF800000u, 0, 0xFF800000u, 0);
                load16_if(lane < AT_ONCE && piece + lane < pieces && 2 * (pair + own) < rows,
                          stats_at(p, place_of(p, place + piece + lane, head), pair + own), stats[own]);
            }
            Factors factors[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint4 of = stats[i / 2];
                factors[i].of(m[i], __uint_as_float(i % 2 ? of.z : of.x), __uint_as_float(i % 2 ? of.w : of.y), p.scale,
                              lane);
            }
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k)
#pragma unroll
                for (int i = 0; i < 4; ++i) {  // rows
                    const int own = i / 2, c = i % 2;
                    const float both[2] = {__shfl_sync(~0u, factors[i].before, k),
                                           __shfl_sync(~0u, factors[i].piece, k)};
                    l[i] = __fmaf_rn(l[i], both[0], __shfl_sync(~0u, factors[i].l, k));
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const uint4 v = results[k][own * 2 + half];
                        float (&sum)[4] = sums[own * 2 + half];
                        sum[c] = folded(sum[c], __uint_as_float(c ? v.y : v.x), both[0], both[1]);
                        sum[c + 2] = folded(sum[c + 2], __uint_as_float(c ? v.w : v.z), both[0], both[1]);
                    }
                }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int own = i / 4, c = i / 2 % 2, half = i % 2, r = 2 * (pair + own) + c;
            const int tile = half * 4 + lane / 8,
                      dim = tile / 2 * 32 + lane % 8 * 4 + tile % 2 * 2;  // as in `dimension`
            const float* of = sums[own * 2 + half];
            if (r < rows)
                *(u32*)(p.out + query_row(p, first_row, head, r) * DIM + dim) =
                    finished(p, of[c], of[c + 2], l[own * 2 + c]);
        }
    }
}

template <int NT>
__device__ __forceinline__ void compute(const TensorMap& k, const TensorMap& v, const Params& p, KVRing& ring,
                                        const int* item, int head) {
    const int lane = threadIdx.x % 32;
    const int first_row = item[0], rows = item[1] * GROUP, first_position = item[2];
    const int* table = p.tables + item[3] * p.table_stride;
    const int begin = item[4] * SPLIT, end = min(first_position + item[1], item[5] * SPLIT);
    const int pieces = item[6], num_items = item[7], place = item[8];
    const int steps = (end - begin + STEP - 1) / STEP;
    int copied = 0;  // units
    const auto copy = [&] {
        if (copied >= 2 * steps) return;
        const int at = begin + copied / 2 * STEP, slot = table[at / p.block_size] * p.block_size + at % p.block_size;
        ring.copy(copied % 2 ? v : k, slot, head);
        ++copied;
    };
    for (int i = 0; i < UNITS; ++i) copy();

    Queries<NT> q;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int r = 8 * n + lane % 4 * 2 + c;
            q.position[n][c] = r < rows ? first_position + r / GROUP : -1;
        }
        const int r = 8 * n + lane / 4;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            uint2 of = make_uint2(0, 0);
            if (r < rows) of = *(const uint2*)(p.q + query_row(p, first_row, head, r) * DIM + i * 16 + lane % 4 * 4);
            q.of[i][n][0] = limited16(of.x), q.of[i][n][1] = limited16(of.y);
        }
    }
    const int seen_by_all = (first_position + 1) / STEP * STEP;
    Sums<NT> sums, all;
    all.begin();
    sums.begin();
    for (int from = begin; from < end; from += STEP) {
        step(ring, q, sums, from >= seen_by_all, from, p.scale, lane, copy);
        if ((from + STEP) % SPLIT == 0 || from + STEP >= end) {  // the end of a piece
            if (num_items > 1) {
                store_piece(p, place_of(p, place + from / SPLIT, head), sums, rows, lane);
            } else {
                fold(all, sums, p.scale);
            }
            sums.begin();
        }
    }
    if (num_items > 1) {
        __threadfence();
        __syncwarp();
        int* counter = p.count + place_of(p, place, head);
        int before = 0;
        if (lane == 0) before = atomicAdd(counter, 1);
        if (__shfl_sync(~0u, before, 0) < num_items - 1) return;
        __threadfence();
        if (lane == 0) *counter = 0;
        fold_pieces(p, place, pieces, head, first_row, rows, lane);
        return;
    }
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int r = 8 * n + lane % 4 * 2 + c;
            if (r >= rows) continue;
            bf16* out = p.out + query_row(p, first_row, head, r) * DIM;
#pragma unroll
            for (int d = 0; d < 4; ++d) {
                const float *low = all.acc[2 * d][n], *high = all.acc[2 * d + 1][n], l = all.l[n][c];
                *(uint2*)(out + dimension(d, lane)) =
                    make_uint2(finished(p, low[c], low[c + 2], l), finished(p, high[c], high[c + 2], l));
            }
        }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
    attend(const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v, const __grid_constant__ Params p) {
    const int number = __shfl_sync(~0u, threadIdx.x / 32, 0);
    KVRing ring{memory + RING_AT + number * UNITS * UNIT_BYTES, (u64*)memory + number * UNITS};
    if (threadIdx.x % 32 == 0) {
        for (int i = 0; i < UNITS; ++i) mbarrier_init(&ring.barriers[i], 1);
        mbarriers_are_ready();
    }
    __syncwarp();
    wait_for_earlier_kernels();
    // Items of padding are behind all others.
    for (int unit = number * gridDim.x + blockIdx.x; unit < p.num_items * p.kv_heads; unit += gridDim.x * WARPS) {
        const int* item = p.items + unit / p.kv_heads * ITEM;
        if (item[0] < 0) break;
        if (item[1] * GROUP <= 8)
            compute<1>(k, v, p, ring, item, unit % p.kv_heads);
        else
            compute<2>(k, v, p, ring, item, unit % p.kv_heads);
    }
}
