// A whole forward step of a small decoder, for up to 16 rows, as one kernel whose blocks stay on their multiprocessors.
//
// One producer warp per block streams the block's share of all weights, product after product, through a ring of
// shared memory. It never waits for activations, so the memory stays busy while the blocks wait for each other.
// The consumer warps multiply: x (16 rows) is the A operand of the tensor cores, 8 rows of a weight the B operand. Each
// warp has every W-th piece of 32 of the depth, so the sums of the warps are added up through shared memory.
// Phases: qkv | attention | output | gate and up | down, for every layer, then the head. There is no grid barrier: a
// value that was not written yet is EMPTY, and whoever needs it reads until it is not. Every buffer between two phases
// exists twice, for even and odd layers; who writes to one empties the same place of the other, which all blocks have
// read by then: each of them has a share of every gate and up product (and of the head), which comes after its own
// reads, and on which everything later depends.
//
// The shape is given by macros: HIDDEN, INTER, HEADS, KV_HEADS, DIM, LAYERS, VOCAB, QK_NORM, QKV_BIAS, BLOCK_SIZE, and
// HALVES (1: up to 8 rows, 2: up to 16). Affecting speed only: WARPS (consumers), CHUNK (depth of a ring stage),
// STAGES, IN_FLIGHT (stages being copied), SPLIT (positions of a split of the context). MAX_POLLS: of one wait, 40 ns
// to 1 us each.

constexpr int QKV = (HEADS + 2 * KV_HEADS) * DIM;
constexpr int QDIM = HEADS * DIM;
constexpr int GROUP = HEADS / KV_HEADS;
constexpr int TILE_TOKENS = 16 / GROUP;
constexpr int ROW_BYTES = CHUNK * 2 + 64;  // of a ring stage; the 64 avoid bank conflicts
constexpr int STAGE_BYTES = 8 * ROW_BYTES;
constexpr int CONSUMERS = WARPS * 32;
constexpr int TILES_TOGETHER = 4;  // whose sums are added up together
constexpr int MERGE_STRIDE = 36;
constexpr int REDUCE_FLOATS = 2 * TILES_TOGETHER * WARPS * 128;
constexpr int MERGE_FLOATS = WARPS * 16 * MERGE_STRIDE;
constexpr int SCRATCH_FLOATS = REDUCE_FLOATS > MERGE_FLOATS ? REDUCE_FLOATS : MERGE_FLOATS;
constexpr int LARGE_DEPTH = 3072;  // above, x does not fit the registers
constexpr int GROUP_TILES = 2;     // tiles computed together there
constexpr int MAX_SPLITS = 16;
constexpr int MAX_PLACES = 512;
constexpr u32 EMPTY = 0xffffffffu;  // two bf16 or one float that no conversion or arithmetic gives

struct Layer {
    const bf16 *qkv, *output, *gate_up, *down, *input_norm, *mlp_norm, *q_norm, *k_norm, *qkv_bias;
    bf16 *k_cache, *v_cache;
};

struct Params {
    const Layer* layers;
    const bf16 *embedding, *norm, *head;
    const float *cos, *sin;
    const int *token_ids, *positions, *slots, *query_start, *tables, *table_rows, *tiles;
    const long long* logit_rows;  // null: all rows
    float* logits;
    u32* buffers;  // see `Buffers`
    int rows, logit_count, num_tiles, sequences, table_stride;
    int depth;  // of branches; -1: the rows are no branches
    float eps, scale;
};

// What phases pass on, for 16 rows. The x after the last layer has a place of its own.
struct Parity {
    bf16 qkv[16][QKV], attention[16][QDIM], middle[16][HIDDEN], hidden[16][INTER], x[16][HIDDEN];
    float partial[MAX_SPLITS][16][QDIM], stats[MAX_SPLITS][16][HEADS][2];
};
struct Buffers {
    Parity parity[2];
    bf16 last[16][HIDDEN];
};

struct Shared {
    Params p;
    u64 full[STAGES], empty[STAGES];
    Layer layers[LAYERS];
    float squares[2][WARPS][16];  // of the phases with norms in turn
    float stats[WARPS][16][2];
    float lse[16];
    int first_tile[5];  // of this block, by product
    int splits, split_len;
    u32 covered;  // rows that belong to a sequence, one bit each
    // Of the batch: what attention needs in every layer.
    int positions[16], slots[16], query_start[17], table_rows[16], tiles[2][16];
    float cos[16][DIM / 2], sin[16][DIM / 2];  // by row
    int places[MAX_PLACES];                    // KV slots of the positions of this block's first item
    alignas(16) bf16 q[16][DIM + 8];
    alignas(16) bf16 k[16][DIM + 8];
    alignas(16) bf16 v[16][DIM + 8];
    alignas(16) float scratch[SCRATCH_FLOATS];
    alignas(128) unsigned char ring[STAGES * STAGE_BYTES];
};

__device__ __forceinline__ float low(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high(u32 v) { return __uint_as_float(v & 0xffff0000u); }
__device__ __forceinline__ bf16 round16(float a) { return (bf16)pack(a, 0.0f); }
__device__ __forceinline__ float wide(bf16 v) { return __uint_as_float((u32)v << 16); }
// Infinities and NaN as 0: attention multiplies values of positions that it does not see by 0.
__device__ __forceinline__ bf16 finite(bf16 v) { return (v & 0x7f80) == 0x7f80 ? 0 : v; }
__device__ __forceinline__ u32 highest(const uint4& v) { return max(max(v.x, v.y), max(v.z, v.w)); }  // EMPTY if any is
__device__ __forceinline__ bool there(bf16 v) { return v != 0xffff; }
__device__ __forceinline__ bool there(u32 v) { return v != EMPTY; }
__device__ __forceinline__ bool there(const uint2& v) { return max(v.x, v.y) != EMPTY; }
__device__ __forceinline__ bool there(const uint4& v) { return highest(v) != EMPTY; }
// 32 of the depth: the order of the depth within them is that of 16-byte loads, the same for both operands.
__device__ __forceinline__ void mma32(float (&d0)[4], float (&d1)[4], const uint4& top, const uint4& bottom,
                                      const uint4& b) {
    mma(d0, top.x, bottom.x, top.y, bottom.y, b.x, b.y);
    mma(d1, top.z, bottom.z, top.w, bottom.w, b.z, b.w);
}
// Ends the kernel with an error if a wait lasts too long: a wrong program must not occupy the GPU for ever.
__device__ __forceinline__ void poll(u32& polls) {
    if (++polls > MAX_POLLS) give_up();
    pause();
}
__device__ __forceinline__ void mbarrier_wait(u64* barrier, u32 parity) {
    u32 polls = 0;
    while (!mbarrier_passed(barrier, parity)) poll(polls);
    __syncwarp();
}
template <typename T, typename Load>
__device__ __forceinline__ T when_there(const Load& load) {
    T v = load();
    for (u32 polls = 0; !there(v); v = load()) poll(polls);
    return v;
}
__device__ __forceinline__ void consumers_meet() {
    __syncwarp();
    meet<CONSUMERS>();
}

#define s (*reinterpret_cast<Shared*>(memory))
#define p (s.p)

__device__ __forceinline__ Buffers& buffers() { return *reinterpret_cast<Buffers*>(p.buffers); }
__device__ __forceinline__ Parity& parity_of(int layer) { return buffers().parity[layer & 1]; }

// --- the products, as the producer and the consumers walk through them -----------------------------------------------

enum Kind { QKV_PRODUCT, OUTPUT_PRODUCT, GATED_PRODUCT, DOWN_PRODUCT, HEAD_PRODUCT };

__host__ __device__ constexpr int tiles_of(int kind) {
    return (kind == QKV_PRODUCT ? QKV : kind == GATED_PRODUCT ? 2 * INTER : kind == HEAD_PRODUCT ? VOCAB : HIDDEN) / 8;
}

// Tile t (8 rows of the weight) belongs to block (t + before) % blocks, `before` being the tiles of the layer's
// products before: so the blocks get about equally many bytes. It is the same in all layers, because of the emptying.
__device__ __forceinline__ int first_tile_of(int kind) {
    u32 before = 0;
    for (int k = 0; k < kind; ++k) before += tiles_of(k);
    before %= gridDim.x;
    return blockIdx.x >= before ? blockIdx.x - before : blockIdx.x + gridDim.x - before;
}

struct Ring {
    u32 stage = 0, parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// The block's stages in order: layer by layer, product by product, tile by tile, CHUNK by CHUNK of the depth. Where x
// does not fit the registers, GROUP_TILES tiles take turns.
struct Cursor {
    int layer = 0, kind = -1, tile = 0, k = 0, turn = 0;
    __device__ __forceinline__ Cursor() { next_product(); }
    __device__ __forceinline__ int depth() const {
        return kind == OUTPUT_PRODUCT ? QDIM : kind == DOWN_PRODUCT ? INTER : HIDDEN;
    }
    __device__ __forceinline__ bool ended() const { return kind > HEAD_PRODUCT; }
    __device__ __forceinline__ void next_product() {
        do {
            if (kind == DOWN_PRODUCT && layer + 1 < LAYERS)
                ++layer, kind = QKV_PRODUCT;
            else
                ++kind;
            if (ended()) return;
            tile = s.first_tile[kind];
        } while (tile >= tiles_of(kind));
    }
    __device__ __forceinline__ void next() {
        const int together = depth() > LARGE_DEPTH ? GROUP_TILES : 1, tiles = tiles_of(kind);
        if (turn + 1 < together && tile + (int)gridDim.x < tiles) {
            ++turn, tile += gridDim.x;
            return;
        }
        tile -= turn * gridDim.x, turn = 0, k += CHUNK;
        if (k < depth()) return;
        k = 0, tile += together * gridDim.x;
        if (tile >= tiles) next_product();
    }
    __device__ __forceinline__ u32 row_bytes() const { return min(depth() - k, CHUNK) * 2; }
    __device__ __forceinline__ const bf16* row(int i) const {  // of the stage's 8 rows
        const bf16* weight = kind == HEAD_PRODUCT ? p.head : (&s.layers[layer].qkv)[kind];
        return weight + (u64)(tile * 8 + i) * depth() + k;
    }
};

__device__ __forceinline__ void produce() {
    const int lane = threadIdx.x % 32;
    Cursor cursor;
    Ring ring, landed;
    const u64 policy = evict_first();
    for (int issued = 0; !cursor.ended(); ++issued, cursor.next(), ring.next()) {
        mbarrier_wait(&s.empty[ring.stage], ring.parity ^ 1);
        if (issued >= IN_FLIGHT) {  // more copies in flight would delay the loads of x, and not be faster
            mbarrier_wait(&s.full[landed.stage], landed.parity);
            landed.next();
        }
        u64* full = &s.full[ring.stage];
        const u32 bytes = cursor.row_bytes();
        if (lane == 0) mbarrier_expect(full, 8 * bytes);
        __syncwarp();
        if (lane < 8)
            copy_to_shared(s.ring + ring.stage * STAGE_BYTES + lane * ROW_BYTES, cursor.row(lane), bytes, full, policy);
    }
}

struct State {
    Ring ring;
    u32 turn = 0;  // of the two halves of the scratch memory
};

// --- products

static_assert(CONSUMERS == 64 * TILES_TOGETHER && CONSUMERS == 16 * 16, "a thread per pair of columns");

__device__ __forceinline__ void weigh(uint4& x, const uint4& w) {
    x.x = times2(x.x, w.x), x.y = times2(x.y, w.y), x.z = times2(x.z, w.z), x.w = times2(x.w, w.w);
}

// What is added to a thread's sums in `finish`: the residual, or a bias. It is read ahead.
struct Added {
    const bf16* from = nullptr;
    u32 value = 0;
    bool ready = false;
    template <int KIND>
    __device__ __forceinline__ void load(const Layer& layer, int layer_index, int first_tile) {
        if (KIND == GATED_PRODUCT || KIND == HEAD_PRODUCT || (KIND == QKV_PRODUCT && !QKV_BIAS)) return;
        const int t = thread(), tile = first_tile + t / 64 * gridDim.x, row = t % 64 / 4, n = tile * 8 + t % 4 * 2;
        if (tile >= tiles_of(KIND) || row >= p.rows) return;
        from = layer.qkv_bias;
        if (KIND == DOWN_PRODUCT) from = parity_of(layer_index).middle[row];
        if (KIND == OUTPUT_PRODUCT)
            from = layer_index == 0 ? p.embedding + (u64)p.token_ids[row] * HIDDEN : parity_of(layer_index + 1).x[row];
        from += n;
        ready = KIND == QKV_PRODUCT || (KIND == OUTPUT_PRODUCT && layer_index == 0);  // weights
        value = load4(from);
    }
    __device__ __forceinline__ u32 get() {
        if (!ready && !there(value)) value = when_there<u32>([&] { return load4(from); });
        return value;
    }
};

// Adds the warps' sums up and writes the outputs: a thread has 2 columns of a row of one of the tiles.
template <int KIND, bool NORM>
__device__ __forceinline__ void finish(int layer_index, int first_tile, int count, const float* sums, Added& addition) {
    const int t = thread(), tile = first_tile + t / 64 * gridDim.x, row = t % 64 / 4, n = tile * 8 + t % 4 * 2;
    const bool valid = t / 64 < count && row < (KIND == HEAD_PRODUCT ? p.logit_count : p.rows);
    if (KIND != GATED_PRODUCT && !valid) return;
    float2 v = make_float2(0, 0);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        const float2 part = *(const float2*)(sums + (t / 64 * WARPS + w) * 128 + t % 64 * 2);
        v.x += part.x, v.y += part.y;
    }
    if (NORM) {
        float squares = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) squares += s.squares[KIND == GATED_PRODUCT][w][row];
        const float f = rsqrtf(squares * (1.0f / HIDDEN) + p.eps);
        v.x *= f, v.y *= f;
    }
    Parity &own = parity_of(layer_index), &other = parity_of(layer_index + 1);
    if (KIND == QKV_PRODUCT) {
        const u32 added = addition.get();
        if (QKV_BIAS) v.x += low(added), v.y += high(added);
        store4(&own.qkv[row][n], pack(v.x, v.y));
        store4(&other.qkv[row][n], EMPTY);
    } else if (KIND == OUTPUT_PRODUCT || KIND == DOWN_PRODUCT) {
        const u32 added = addition.get(), made = pack(low(added) + v.x, high(added) + v.y);
        if (KIND == OUTPUT_PRODUCT) {
            store4(&own.middle[row][n], made);
            store4(&other.middle[row][n], EMPTY);
        } else {
            store4(layer_index == LAYERS - 1 ? &buffers().last[row][n] : &own.x[row][n], made);
            store4(&other.x[row][n], EMPTY);
        }
    } else if (KIND == GATED_PRODUCT) {
        const float gated = v.x / (1 + __expf(-v.x)) * v.y, neighbour = __shfl_xor_sync(~0u, gated, 1);
        if (valid && t % 2 == 0) {
            store4(&own.hidden[row][n / 2], pack(gated, neighbour));
            store4(&other.hidden[row][n / 2], EMPTY);
        }
    } else {
        *(float2*)(p.logits + (u64)row * VOCAB + n) = v;
    }
}

template <int K, int KIND>
__device__ __forceinline__ State product(State state, int layer_index) {
    Ring& ring = state.ring;
    u32& turn = state.turn;
    constexpr bool NORM = KIND == QKV_PRODUCT || KIND == GATED_PRODUCT || KIND == HEAD_PRODUCT;
    constexpr bool LARGE = K > LARGE_DEPTH;
    constexpr int CHUNKS = (K + CHUNK - 1) / CHUNK;
    constexpr int PIECES = (CHUNK / 32 + WARPS - 1) / WARPS;  // of 32, per warp and chunk
    constexpr bool WHOLE = K % CHUNK == 0 && CHUNK % (32 * WARPS) == 0;
    constexpr int TILES = tiles_of(KIND);
    const Layer& layer = s.layers[KIND == HEAD_PRODUCT ? 0 : layer_index];
    const int t = thread(), warp = t / 32, lane = t % 32, row = lane / 4, column = lane % 4;
    const int first = s.first_tile[KIND];

    // Norm weights need not wait.
    uint4 w[NORM ? CHUNKS : 1][PIECES];
    if (NORM && first < TILES) {
        const bf16* norm = KIND == QKV_PRODUCT ? layer.input_norm : KIND == GATED_PRODUCT ? layer.mlp_norm : p.norm;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
            for (int i = 0; i < PIECES; ++i) {
                const int k = c * CHUNK + (warp + WARPS * i) * 32;
                if (WHOLE || (k < K && k < (c + 1) * CHUNK)) w[c][i] = __ldg((const uint4*)(norm + k + column * 8));
            }
    }
    if (first >= TILES) return state;

    // A thread's two rows of x; null: zeros.
    const bf16* from[HALVES];
    bool rows[HALVES];
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
        const int r = row + 8 * h;
        from[h] = nullptr;
        if (KIND == HEAD_PRODUCT) {
            if (r < p.logit_count) from[h] = buffers().last[p.logit_rows ? (int)p.logit_rows[r] : r];
        } else if (r < p.rows) {
            const Parity& own = parity_of(layer_index);
            if (KIND == QKV_PRODUCT)
                from[h] =
                    layer_index == 0 ? p.embedding + (u64)p.token_ids[r] * HIDDEN : parity_of(layer_index + 1).x[r];
            if (KIND == OUTPUT_PRODUCT && s.covered >> r & 1) from[h] = own.attention[r];
            if (KIND == GATED_PRODUCT) from[h] = own.middle[r];
            if (KIND == DOWN_PRODUCT) from[h] = own.hidden[r];
        }
        rows[h] = from[h] != nullptr;
        from[h] += warp * 32 + column * 8;
    }
    const auto has = [&](int chunk, int i) {  // whether the warp has an i-th piece of the chunk
        return WHOLE || (chunk * CHUNK + (warp + WARPS * i) * 32 < K && (warp + WARPS * i) * 32 < CHUNK);
    };
    const auto load_chunk = [&](int chunk, uint4(&x)[PIECES][HALVES]) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i)
#pragma unroll
            for (int h = 0; h < HALVES; ++h)
                load16_if(rows[h] && has(chunk, i), from[h] + chunk * CHUNK + i * WARPS * 32, x[i][h]);
    };
    const auto highest_of = [&](const uint4(&x)[PIECES][HALVES]) {
        u32 most = 0;
#pragma unroll
        for (int i = 0; i < PIECES; ++i) most = max(most, max(highest(x[i][0]), highest(x[i][HALVES - 1])));
        return most;
    };
    const bool from_table = KIND == QKV_PRODUCT && layer_index == 0;  // which is never empty
    Added added;
    added.load<KIND>(layer, layer_index, first);
    u32 polls = 0;
    // Many rows are not read again and again before their first piece is there.
    if (p.rows > 4 && has(0, 0)) {
        uint4 v[HALVES] = {};
        for (;; poll(polls)) {
#pragma unroll
            for (int h = 0; h < HALVES; ++h) load16_if(rows[h], from[h], v[h]);
            if (from_table || (there(v[0]) && there(v[HALVES - 1]))) break;
        }
    }
    __syncwarp();
    const auto bottom = [&](const uint4(&x)[HALVES]) { return HALVES > 1 ? x[HALVES - 1] : make_uint4(0, 0, 0, 0); };
    const u32 base = shared_address(s.ring) + row * ROW_BYTES + column * 16;
    const auto multiply = [&](int chunk, const uint4(&x)[PIECES][HALVES], float (&d0)[4], float (&d1)[4]) {
        mbarrier_wait(&s.full[ring.stage], ring.parity);
        const u32 at = base + ring.stage * STAGE_BYTES;
        uint4 b[PIECES];
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const int piece = warp + WARPS * i;
            if (has(chunk, i)) b[i] = shared16(at + piece * 64);
        }
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            if (has(chunk, i)) mma32(d0, d1, x[i][0], bottom(x[i]), b[i]);
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&s.empty[ring.stage]);
        ring.next();
    };
    // A warp's sums of tile g of those that are finished together.
    const auto keep = [&](int g, const float (&d0)[4], const float (&d1)[4]) {
        float* own = s.scratch + ((turn * TILES_TOGETHER + g) * WARPS + warp) * 128 + lane * 2;
        *(float2*)own = make_float2(d0[0] + d1[0], d0[1] + d1[1]);
        if (HALVES > 1) *(float2*)(own + 64) = make_float2(d0[2] + d1[2], d0[3] + d1[3]);
    };
    const auto add_up = [&](int first_tile, int count) {
        consumers_meet();
        finish<KIND, NORM>(layer_index, first_tile, count, s.scratch + turn * TILES_TOGETHER * WARPS * 128, added);
        turn ^= 1;
    };

    if constexpr (LARGE) {
        constexpr int AHEAD = 3;  // chunks whose x is on its way
        uint4 next[AHEAD][PIECES][HALVES] = {};
        for (int group = first; group < TILES; group += GROUP_TILES * gridDim.x) {
            if (group != first) added.load<KIND>(layer, layer_index, group);
            float d0[GROUP_TILES][4] = {}, d1[GROUP_TILES][4] = {};
#pragma unroll
            for (int c = 0; c < AHEAD - 1 && c < CHUNKS; ++c) load_chunk(c, next[c]);
#pragma unroll 1
            for (int outer = 0; outer < CHUNKS; outer += AHEAD)
#pragma unroll
                for (int i = 0; i < AHEAD; ++i) {
                    const int c = outer + i;
                    if (c >= CHUNKS) break;
                    if (c + AHEAD - 1 < CHUNKS) load_chunk(c + AHEAD - 1, next[(i + AHEAD - 1) % AHEAD]);
                    for (; highest_of(next[i]) == EMPTY; poll(polls)) load_chunk(c, next[i]);
                    __syncwarp();
#pragma unroll
                    for (int g = 0; g < GROUP_TILES; ++g)
                        if (group + g * (int)gridDim.x < TILES) multiply(c, next[i], d0[g], d1[g]);
                }
            int count = 0;
#pragma unroll
            for (int g = 0; g < GROUP_TILES; ++g)
                if (group + g * (int)gridDim.x < TILES) keep(count++, d0[g], d1[g]);
            add_up(group, count);
        }
    } else {
        uint4 a[CHUNKS][PIECES][HALVES] = {};
        for (;; poll(polls)) {
            u32 most = 0;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) load_chunk(c, a[c]);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) most = max(most, highest_of(a[c]));
            if (from_table || most != EMPTY) break;
        }
        __syncwarp();
        if (NORM) {
            // x is weighted here, and the sums are scaled at the end. The squares are the diagonal of x x^T.
            float d0[4] = {}, d1[4] = {};
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
                for (int i = 0; i < PIECES; ++i) {
                    if (!has(c, i)) continue;
                    const uint4 x0 = a[c][i][0], x1 = bottom(a[c][i]);
                    mma(d0, x0.x, x1.x, x0.y, x1.y, x0.x, x0.y);
                    mma(d0, x0.z, x1.z, x0.w, x1.w, x0.z, x0.w);
                    if (HALVES > 1) {
                        mma(d1, x0.x, x1.x, x0.y, x1.y, x1.x, x1.y);
                        mma(d1, x0.z, x1.z, x0.w, x1.w, x1.z, x1.w);
                    }
#pragma unroll
                    for (int h = 0; h < HALVES; ++h) weigh(a[c][i][h], w[c][i]);
                }
            if (column == row / 2) {
                float (&squares)[16] = s.squares[KIND == GATED_PRODUCT][warp];
                squares[row] = row % 2 ? d0[1] : d0[0], squares[row + 8] = row % 2 ? d1[3] : d1[2];
            }
        }
#pragma unroll 1
        for (int tile = first; tile < TILES;) {
            const int first_tile = tile;
            if (tile != first) added.load<KIND>(layer, layer_index, tile);
            int count = 0;
#pragma unroll 1
            for (; count < TILES_TOGETHER && tile < TILES; ++count, tile += gridDim.x) {
                float d0[4] = {}, d1[4] = {};
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c) multiply(c, a[c], d0, d1);
                keep(count, d0, d1);
            }
            add_up(first_tile, count);
        }
    }
    return state;
}

#include "persistent_attention.cu"

// --- the step

__device__ __forceinline__ void empty_words(void* from, u64 bytes) {
    for (u64 i = (u64)blockIdx.x * CONSUMERS + threadIdx.x; i < bytes / 8; i += (u64)gridDim.x * CONSUMERS)
        store8((uint2*)from + i, make_uint2(EMPTY, EMPTY));
}

__device__ __forceinline__ void consume() {
    State state;
    empty_words(&buffers().last, sizeof(Buffers::last));  // read by the launch before
    __threadfence();
    const int t = threadIdx.x;
    for (int i = t; i < p.rows * (DIM / 2); i += CONSUMERS) {
        const u64 angle = (u64)s.positions[i / (DIM / 2)] * (DIM / 2) + i % (DIM / 2);
        s.cos[i / (DIM / 2)][i % (DIM / 2)] = p.cos[angle], s.sin[i / (DIM / 2)][i % (DIM / 2)] = p.sin[angle];
    }
    if (blockIdx.x < p.num_tiles * KV_HEADS * s.splits && s.split_len <= MAX_PLACES) {
        const Item item(blockIdx.x);
        for (int i = t; item.sequence >= 0 && i < item.end - item.begin; i += CONSUMERS)
            s.places[i] = (int)item.place(item.begin + i);
    }
    consumers_meet();
#pragma unroll 1
    for (int l = 0; l < LAYERS; ++l) {
        state = product<HIDDEN, QKV_PRODUCT>(state, l);
        const int items = p.num_tiles * KV_HEADS * s.splits;
#pragma unroll 1
        for (int item = blockIdx.x; item < items; item += gridDim.x) attend(l, item);
        state = product<QDIM, OUTPUT_PRODUCT>(state, l);
        state = product<HIDDEN, GATED_PRODUCT>(state, l);
        state = product<INTER, DOWN_PRODUCT>(state, l);
    }
    product<HIDDEN, HEAD_PRODUCT>(state, LAYERS);
    // For the next launch. All blocks have read these, since the x after the last layer depends on it.
    Parity& dirty = parity_of(LAYERS - 1);
    empty_words(&dirty, s.splits == 1 ? (u64)((char*)dirty.partial - (char*)&dirty) : sizeof(Parity));
}

#undef p
static_assert(sizeof(Shared) <= 232448, "shared memory of a block");
extern "C" __constant__ const u32 shared_bytes = sizeof(Shared), buffer_bytes = sizeof(Buffers);
extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1) step(const __grid_constant__ Params p) {
    for (int i = threadIdx.x; i < (int)(LAYERS * sizeof(Layer) / 8); i += blockDim.x)
        ((u64*)s.layers)[i] = ((const u64*)p.layers)[i];
    if (threadIdx.x == 32) {
        s.p = p;
        for (int i = 0; i < STAGES; ++i) mbarrier_init(&s.full[i], 1), mbarrier_init(&s.empty[i], WARPS);
        mbarriers_are_ready();
        for (int kind = 0; kind < 5; ++kind) s.first_tile[kind] = first_tile_of(kind);
    }
    if (threadIdx.x < 32) {
        const int lane = threadIdx.x, slot = lane < p.rows ? p.slots[lane] : -1,
                  position = lane < p.rows ? p.positions[lane] : 0;
        const int sequence = lane < p.num_tiles ? p.tiles[lane] : -1,
                  first = lane < p.num_tiles ? p.tiles[p.num_tiles + lane] : 0;
        const int start = lane <= p.sequences ? p.query_start[lane] : 0,
                  table_row = lane < p.sequences ? p.table_rows[lane] : 0;
        if (lane < 16)
            s.slots[lane] = slot, s.positions[lane] = position, s.tiles[0][lane] = sequence, s.tiles[1][lane] = first;
        if (lane < 16) s.table_rows[lane] = table_row;
        if (lane < 17) s.query_start[lane] = start;
        __syncwarp();
        int longest = slot >= 0 ? position : 1;
        u32 covered = sequence < 0 ? 0 : (1u << s.query_start[sequence + 1]) - (1u << s.query_start[sequence]);
        for (int d = 1; d < 32; d *= 2) {
            longest = max(longest, __shfl_xor_sync(~0u, longest, d));
            covered |= __shfl_xor_sync(~0u, covered, d);
        }
        if (lane == 0) {
            // Splits of the context have equal lengths, and there are blocks for all of them.
            const int most = min((int)gridDim.x / (p.num_tiles * KV_HEADS), MAX_SPLITS);
            s.splits = max(min((longest + SPLIT - 1) / SPLIT, most), 1);
            s.split_len = ((longest + s.splits - 1) / s.splits + 15) / 16 * 16;
            s.covered = covered;
        }
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS)
        produce();
    else
        consume();
}
