// The end of `latent_attention.cu`: the results of a tile's items, which several blocks have computed, are folded in their
// order. A block that has computed all of its items waits for the others of their tiles, and folds some of the columns.
// Results are [place, ROWS / 8, column, 8] and, by places and rows, m and l.

// Shared memory, in the place of the ring: factors of CHUNK places at a time, by rows, and of groups of them; sums of this
// block's columns, and of each group.
constexpr int GROUPS = CHUNK / FOLDED, QUADS = ROWS / 4;
constexpr int FACTORS_AT = BOXES_AT, GROUP_FACTORS_AT = FACTORS_AT + CHUNK * ROWS * 8;
constexpr int L_AT = GROUP_FACTORS_AT + GROUPS * ROWS * 8, ALL_AT = L_AT + ROWS * 16;
constexpr int GROUPS_AT = ALL_AT + VALUE / 2 * ROWS * 4;
constexpr int MOST = 520;  // columns times groups: there are up to 4 times as many places as blocks (`_plan_kernel`)
static_assert(GROUPS_AT + MOST * ROWS * 4 <= BOXES_AT + BOXES * BOX_BYTES, "sums are in the place of the ring");
constexpr int AT_ONCE = 3;  // of a thread: sums of four rows each

// Factors of `count` results of a row, in the place of their statistics, which are `ROWS` apart.
__device__ __forceinline__ void fold_stats(u32 at, int count, float& m, float& l, float scale) {
#pragma unroll 1
    for (int first = 0; first < count; first += FOLDED, at += FOLDED * ROWS * 8) {
        uint2 of[FOLDED];
#pragma unroll
        for (int k = 0; k < FOLDED; ++k)
            if (first + k < count) of[k] = shared8(at + k * ROWS * 8);
#pragma unroll
        for (int k = 0; k < FOLDED; ++k)
            if (first + k < count) {
                const float2 f = fold(m, l, __uint_as_float(of[k].x), __uint_as_float(of[k].y), scale);
                shared_store8(at + k * ROWS * 8, bits_of(f.x, f.y));
            }
    }
}
// Of four rows.
__device__ __forceinline__ float4 folded(float4 sum, uint4 more, u32 factors) {
    const uint4 a = shared16(factors), b = shared16(factors + 16);
    return make_float4(folded(sum.x, __uint_as_float(more.x), __uint_as_float(a.x), __uint_as_float(a.y)),
                       folded(sum.y, __uint_as_float(more.y), __uint_as_float(a.z), __uint_as_float(a.w)),
                       folded(sum.z, __uint_as_float(more.z), __uint_as_float(b.x), __uint_as_float(b.y)),
                       folded(sum.w, __uint_as_float(more.w), __uint_as_float(b.z), __uint_as_float(b.w)));
}
__device__ __forceinline__ float4 sums_at(u32 at, bool there) {
    const uint4 v = there ? shared16(at) : make_uint4(0, 0, 0, 0);
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}
__device__ __forceinline__ void store_sums(u32 at, float4 v) {
    shared_store16(at, make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w)));
}

// Folds `count` results of a tile from the place `first` on, up to CHUNK: this block's columns, four rows of a column at
// a time. Results of pieces are folded in groups first (`apart`).
struct Folding {
    const Params& p;
    const Item& item;
    u32 base;
    int tid, from, log, first, count;  // 4 << log columns
    float m, l;  // of row `tid`
    __device__ __forceinline__ bool apart() const { return item.unit == 1; }
    __device__ __forceinline__ int groups() const { return (count + FOLDED - 1) / FOLDED; }
    // A quad is four rows of a column: [ROWS / 8, column, 2].
    __device__ __forceinline__ int quads() const { return 4 * QUADS << log; }
    __device__ __forceinline__ int row_of(int quad) const { return (quad >> log) / 8 * 8 + quad % 2 * 4; }
    __device__ __forceinline__ int offset_of(int quad) const {
        return (quad >> log) / 8 * VALUE * 8 + (quad & (8 << log) - 1) * 4;
    }
    // A task is a quad of a group: the group.
    __device__ __forceinline__ int group_of(int task) const { return (task >> log) / (4 * QUADS); }

    __device__ __forceinline__ void make_factors() {
        constexpr int LOADS = 12;
        const float* stats = p.stats + item.at(p, first) * ROWS * 2;
#pragma unroll 1
        for (int t = tid; t < count * ROWS; t += LOADS * ADDERS) {
            uint2 of[LOADS];
#pragma unroll
            for (int k = 0; k < LOADS; ++k) {
                const int i = t + k * ADDERS;
                if (i < count * ROWS) of[k] = load8(stats + ((u64)(i / ROWS) * p.parts * ROWS + i % ROWS) * 2);
            }
#pragma unroll
            for (int k = 0; k < LOADS; ++k)
                if (t + k * ADDERS < count * ROWS) shared_store8(base + FACTORS_AT + (t + k * ADDERS) * 8, of[k]);
        }
        meet<ADDERS>();
        if (apart()) {
            for (int t = tid; t < groups() * ROWS; t += ADDERS) {
                const int g = t / ROWS * FOLDED;
                float m_group = MINUS_INF, l_group = 0.0f;
                fold_stats(base + FACTORS_AT + (g * ROWS + t % ROWS) * 8, min(FOLDED, count - g), m_group, l_group,
                           p.scale);
                shared_store8(base + GROUP_FACTORS_AT + t * 8, bits_of(m_group, l_group));
            }
            meet<ADDERS>();
        }
        if (tid < ROWS)
            fold_stats(base + (apart() ? GROUP_FACTORS_AT : FACTORS_AT) + tid * 8, apart() ? groups() : count, m, l,
                       p.scale);
        if (!apart()) meet<ADDERS>();
    }
    __device__ __forceinline__ void fold_places() {
        const int tasks = apart() ? quads() * groups() : quads(), times = apart() ? 1 : groups();
        const float* results = p.partial + item.at(p, first) * VALUE * ROWS + from * 8;
        const u64 stride = (u64)p.parts * VALUE * ROWS;
        const u32 to = base + (apart() ? GROUPS_AT : ALL_AT);
#pragma unroll 1
        for (int begin = tid; begin - tid < tasks; begin += AT_ONCE * ADDERS) {
            float4 sums[AT_ONCE];
            int left[AT_ONCE];  // places from the task's first one on
            const float* at[AT_ONCE];
            u32 factors[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) {
                const int task = begin + j * ADDERS, group = apart() ? group_of(task) : 0;
                const int quad = task - group * quads(), place = group * FOLDED;
                left[j] = task < tasks ? count - place : 0;
                at[j] = results + place * stride + offset_of(quad);
                factors[j] = base + FACTORS_AT + (place * ROWS + row_of(quad)) * 8;
                sums[j] = sums_at(to + task * 16, !apart() && first > 0 && task < tasks);
            }
#pragma unroll 1
            for (int time = 0; time < times; ++time) {
                uint4 of[AT_ONCE][FOLDED];
#pragma unroll
                for (int j = 0; j < AT_ONCE; ++j)
#pragma unroll
                    for (int k = 0; k < FOLDED; ++k)
                        if (k < left[j]) of[j][k] = load16(at[j] + k * stride);
                if (begin == tid && time == 0) make_factors();  // while results come
#pragma unroll
                for (int j = 0; j < AT_ONCE; ++j) {
#pragma unroll
                    for (int k = 0; k < FOLDED; ++k)
                        if (k < left[j]) sums[j] = folded(sums[j], of[j][k], factors[j] + k * ROWS * 8);
                    at[j] += FOLDED * stride, factors[j] += FOLDED * ROWS * 8, left[j] -= FOLDED;
                }
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j)
                if (begin + j * ADDERS < tasks) store_sums(to + (begin + j * ADDERS) * 16, sums[j]);
        }
        meet<ADDERS>();
    }
    __device__ __forceinline__ void fold_groups() {
#pragma unroll 1
        for (int u = tid; u < quads(); u += ADDERS) {
            float4 sum = sums_at(base + ALL_AT + u * 16, first > 0);
#pragma unroll 4
            for (int g = 0; g < groups(); ++g)
                sum = folded(sum, shared16(base + GROUPS_AT + (g * quads() + u) * 16),
                             base + GROUP_FACTORS_AT + (g * ROWS + row_of(u)) * 8);
            store_sums(base + ALL_AT + u * 16, sum);
        }
        meet<ADDERS>();
    }
    __device__ __forceinline__ void write() {
        if (tid < ROWS) shared_store4(base + L_AT + tid * 4, __float_as_uint(l));
        meet<ADDERS>();
        bf16* out = output_of(p, item) + from;
        for (int t = tid; t < ROWS << log; t += ADDERS) {
            const int row = t % ROWS, column = t / ROWS * 4;
            const u32 at = base + ALL_AT + (((row / 8 * 4 << log) + column) * 8 + row % 8) * 4;
            const float sum = shared_float(base + L_AT + row * 4);
            float v[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) v[k] = divided(shared_float(at + k * 32), sum);
            if (row < item.tokens * GROUP)
                *(uint2*)(out + row * VALUE + column) = make_uint2(pack(v[0], v[1]), pack(v[2], v[3]));
        }
        meet<ADDERS>();
    }
};

// Waits until all items of a tile are computed.
__device__ __forceinline__ void wait_for_items(const Item& item, const int* counter) {
    if (threadIdx.x % ADDERS == 0)
        for (u32 polls = 0; load4_in_order(counter) < item.num_items; pause())
            if (++polls > MAX_POLLS) give_up();
    meet<ADDERS>();
}
// Folds the results of tiles with several items: of each of this block's items, a share of the columns.
__device__ __forceinline__ void fold_tiles(const Params& p) {
    for (int unit = blockIdx.x; unit < p.num_items * p.parts; unit += gridDim.x) {
        const Item item(p, unit);
        if (item.first_row < 0) break;
        if (!item.shared()) continue;
        int log = 0;
        while (item.num_items << log < VALUE / 4) ++log;
        const int tid = threadIdx.x % ADDERS, from = item.number() * 4 << log;
        const int places = (item.pieces + item.unit - 1) / item.unit;
        int* counter = p.count + item.at(p, 0);
        wait_for_items(item, counter);
        // The last one that has waited sets the counter to 0.
        if (tid == 0 && atomicAdd(counter, 1) == 2 * item.num_items - 1) *counter = 0;
        if (from >= VALUE) continue;
        Folding f{p, item, shared_address(memory), tid, from, log};
        f.m = MINUS_INF, f.l = 0.0f;
        for (f.first = 0; f.first < places; f.first += CHUNK) {
            f.count = min(CHUNK, places - f.first);
            f.fold_places();
            if (f.apart()) f.fold_groups();
        }
        f.write();
    }
}
