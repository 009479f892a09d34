// Attention of `persistent.cu`, which includes it.

struct Keys {  // 16 positions: a thread has 8 of every 32 dimensions of two of them
    uint4 k[2][DIM / 32], v[2][DIM / 32];
};

// One item: the query tokens of a tile, one KV head, one split of the shared positions; the last split also has the
// tokens of this step, and the branches' own ones.
struct Item {
    int head, split, sequence, first_token, row0, tokens, token0, most, begin, end;
    bool branches;
    __device__ __forceinline__ int limit(int token) const {  // shared positions of a query token are those below
        if (!branches) return s.positions[row0];
        return s.slots[token0 + token] < 0 ? 0 : s.positions[token0 + token] - p.depth;
    }
    __device__ __forceinline__ Item(int item) {
        const int tile = item / (KV_HEADS * s.splits);
        head = item / s.splits % KV_HEADS, split = item % s.splits;
        sequence = s.tiles[0][tile], first_token = s.tiles[1][tile];
        if (sequence < 0) return;
        branches = p.depth >= 0;
        row0 = s.query_start[sequence];
        tokens = min(s.query_start[sequence + 1] - row0 - first_token, TILE_TOKENS), token0 = row0 + first_token;
        most = 0;
#pragma unroll 1
        for (int i = 0; i < tokens; ++i) most = max(most, limit(i));
        begin = split * s.split_len, end = min(most, begin + s.split_len);
    }
    __device__ __forceinline__ u64 place(int position) const {
        const int* table = p.tables + (u64)s.table_rows[sequence] * p.table_stride;
        return (u64)table[position / BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE;
    }
};

__device__ __forceinline__ void attend(int layer_index, int item) {
    const Layer& layer = s.layers[layer_index];
    constexpr int PARTS = DIM / 32;
    const float minus_inf = -__int_as_float(0x7f800000);
    const int t = thread(), warp = t / 32, lane = t % 32, row = lane / 4, column = lane % 4;
    const Item it(item);
    const int sequence = it.sequence;
    if (sequence < 0) return;
    const int head = it.head, split = it.split, first_token = it.first_token, row0 = it.row0, tokens = it.tokens,
              token0 = it.token0;
    const bool branches = it.branches, known = item == blockIdx.x && s.split_len <= MAX_PLACES;
    Parity &own_buffers = parity_of(layer_index), &other = parity_of(layer_index + 1);
    const bf16(&qkv)[16][QKV] = own_buffers.qkv;
    int limit[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int token = (row + 8 * h) / GROUP;
        limit[h] = token < tokens ? it.limit(token) : 0;
    }
    const int begin = it.begin, end = it.end;
    const int shared_chunks = max(0, (end - begin + 15) / 16);
    const bool own = split == s.splits - 1;
    const int shift = branches ? max(3, 32 - __clz(p.depth)) : 0,
              mask = (1 << shift) - 1;  // 2^shift columns per branch
    const int columns = branches ? tokens << shift : first_token + tokens;
    const int chunks = shared_chunks + (own ? (columns + 15) / 16 : 0);
    const int head_at = head * DIM;

    Keys keys;
    const auto load_keys = [&](int chunk) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const bf16 *k = nullptr, *v = nullptr;
            if (chunk < shared_chunks) {
                const int position = begin + chunk * 16 + h * 8 + row;
                if (position < end) {
                    const u64 at =
                        (known ? s.places[position - begin] : it.place(position)) * (KV_HEADS * DIM) + head_at;
                    k = layer.k_cache + at, v = layer.v_cache + at;
                }
            } else {
                const int n = (chunk - shared_chunks) * 16 + h * 8 + row;
                const int token = n >> shift, place = n & mask;
                if (n < columns) {
                    const int slot = branches ? s.slots[token0 + token] : 0;
                    if (!branches || place == p.depth) {
                        k = s.k[token], v = s.v[token];
                    } else if (place < p.depth && slot >= 0) {
                        const u64 at = (u64)(slot - p.depth + place) * (KV_HEADS * DIM) + head_at;
                        k = layer.k_cache + at, v = layer.v_cache + at;
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < PARTS; ++i) {
                keys.k[h][i] = k ? *(const uint4*)(k + i * 32 + column * 8) : make_uint4(0, 0, 0, 0);
                keys.v[h][i] = v ? *(const uint4*)(v + i * 32 + column * 8) : make_uint4(0, 0, 0, 0);
            }
        }
    };
    int chunk = warp;
    const bool early = chunk < shared_chunks;  // does not depend on this step
    if (early) load_keys(chunk);

    // Queries and keys of this step are normed (if the model does that) and rotated, a head of a row by a warp. Turns
    // are for queries, then keys, then values.
    constexpr int HALF = DIM / 2, EACH = HALF / 32, QUERY_TURNS = 16 / WARPS, TURNS = 3 * QUERY_TURNS;
    bf16 raw[TURNS][2][EACH];
    const bf16* heads[TURNS];
    const auto load_heads = [&] {
#pragma unroll
        for (int i = 0; i < TURNS; ++i)
#pragma unroll
            for (int e = 0; e < EACH; ++e) {
                raw[i][0][e] = heads[i] ? load2(heads[i] + e * 32 + lane) : 0;
                raw[i][1][e] = heads[i] ? load2(heads[i] + HALF + e * 32 + lane) : 0;
            }
    };
    const int key_row0 = branches ? token0 : row0, key_rows = own ? token0 + tokens - key_row0 : 0;
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
        const int j = warp + i % QUERY_TURNS * WARPS;
        heads[i] = nullptr;
        if (i < QUERY_TURNS) {
            if (j / GROUP < tokens) heads[i] = qkv[token0 + j / GROUP] + (head * GROUP + j % GROUP) * DIM;
        } else if (j < key_rows) {
            heads[i] = qkv[key_row0 + j] + (HEADS + (i < 2 * QUERY_TURNS ? 0 : KV_HEADS) + head) * DIM;
        }
    }
    bf16 norms[2][2][EACH];  // q and k, halves
    if (QK_NORM) {
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            norms[0][0][e] = layer.q_norm[e * 32 + lane], norms[0][1][e] = layer.q_norm[HALF + e * 32 + lane];
            norms[1][0][e] = layer.k_norm[e * 32 + lane], norms[1][1][e] = layer.k_norm[HALF + e * 32 + lane];
        }
    }
    u32 polls = 0;
    for (bool all = false; !all; poll(polls)) {
        load_heads();
        all = true;
#pragma unroll
        for (int i = 0; i < TURNS; ++i)
#pragma unroll
            for (int e = 0; e < EACH; ++e) all = all && there(raw[i][0][e]) && there(raw[i][1][e]);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
        const int j = warp + i % QUERY_TURNS * WARPS;
        const bool query = i < QUERY_TURNS;
        if (!query && j >= key_rows) continue;
        if (i >= 2 * QUERY_TURNS) {
#pragma unroll
            for (int e = 0; e < EACH; ++e)
                s.v[j][e * 32 + lane] = finite(raw[i][0][e]), s.v[j][HALF + e * 32 + lane] = finite(raw[i][1][e]);
            continue;
        }
        float a[EACH], b[EACH];
#pragma unroll
        for (int e = 0; e < EACH; ++e) a[e] = wide(raw[i][0][e]), b[e] = wide(raw[i][1][e]);
        if (QK_NORM) {
            float squares = 0;
#pragma unroll
            for (int e = 0; e < EACH; ++e) squares += a[e] * a[e] + b[e] * b[e];
            for (int d = 1; d < 32; d *= 2) squares += __shfl_xor_sync(~0u, squares, d);
            const float f = rsqrtf(squares * (1.0f / DIM) + p.eps);
#pragma unroll
            for (int e = 0; e < EACH; ++e) a[e] *= f * wide(norms[!query][0][e]), b[e] *= f * wide(norms[!query][1][e]);
        }
        bf16* to = query ? s.q[j] : s.k[j];
        const int at = min(query ? token0 + j / GROUP : key_row0 + j, 15);
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const float cos = s.cos[at][e * 32 + lane], sin = s.sin[at][e * 32 + lane];
            to[e * 32 + lane] = round16(a[e] * cos - b[e] * sin);
            to[HALF + e * 32 + lane] = round16(b[e] * cos + a[e] * sin);
        }
    }
    consumers_meet();

    const u32 q = shared_address(&s.q[row][column * 8]);
    float m[2] = {minus_inf, minus_inf}, l[2] = {}, out[PARTS * 4][4] = {};
    for (; chunk < chunks; chunk += WARPS) {
        if (!early || chunk != warp) load_keys(chunk);
        float score[2][4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float d0[4] = {}, d1[4] = {};
#pragma unroll
            for (int i = 0; i < PARTS; ++i)
                mma32(d0, d1, shared16(q + i * 64), shared16(q + i * 64 + 8 * sizeof(s.q[0])), keys.k[h][i]);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int n = chunk * 16 + h * 8 + column * 2 + e % 2,
                          r = e / 2;  // a column, and which of the two rows
                const int token = (row + 8 * r) / GROUP;
                bool visible;
                if (chunk < shared_chunks) {
                    visible = begin + n < limit[r];
                } else {
                    const int c = n - shared_chunks * 16;
                    visible = branches ? c >> shift == token && (c & mask) <= p.depth : c <= first_token + token;
                    visible = visible && token < tokens && c < columns;
                }
                score[h][e] = visible ? (d0[e] + d1[e]) * p.scale : minus_inf;
            }
        }
        u32 probability[2][2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float top = fmaxf(fmaxf(score[0][2 * r], score[0][2 * r + 1]), fmaxf(score[1][2 * r], score[1][2 * r + 1]));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            top = fmaxf(top, m[r]);
            const float safe = top == minus_inf ? 0 : top, keep = exp2_(m[r] - safe);
            m[r] = top;
            float e[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) e[i] = exp2_(score[i / 2][2 * r + i % 2] - safe);
            l[r] = l[r] * keep + (e[0] + e[1]) + (e[2] + e[3]);
            probability[0][r] = pack(e[0], e[1]);
            probability[1][r] = pack(e[2], e[3]);
#pragma unroll
            for (int i = 0; i < PARTS * 4; ++i) out[i][2 * r] *= keep, out[i][2 * r + 1] *= keep;
        }
#pragma unroll
        for (int i = 0; i < PARTS; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const u32 b0 = transposed(((const u32*)&keys.v[0][i])[j]),
                          b1 = transposed(((const u32*)&keys.v[1][i])[j]);
                mma(out[i * 4 + j], probability[0][0], probability[0][1], probability[1][0], probability[1][1], b0, b1);
            }
    }

    // The warps' results are merged.
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        l[r] += __shfl_xor_sync(~0u, l[r], 1);
        l[r] += __shfl_xor_sync(~0u, l[r], 2);
        if (column == 0) s.stats[warp][row + 8 * r][0] = m[r], s.stats[warp][row + 8 * r][1] = l[r];
    }
    consumers_meet();
    float share[2];  // of this warp
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float top = minus_inf, sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) top = fmaxf(top, s.stats[w][row + 8 * r][0]);
        const float safe = top == minus_inf ? 0 : top;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += exp2_(s.stats[w][row + 8 * r][0] - safe) * s.stats[w][row + 8 * r][1];
        const float f = sum > 0 ? exp2_(m[r] - safe) / sum : 0;
        share[r] = f;
        if (warp == 0 && column == 0) s.lse[row + 8 * r] = sum > 0 ? top + log2f(sum) : -1e30f;
    }
    // A thread has two of every 32 dimensions of one row.
    const int r = t / 16, d = t % 16 * 2, to = token0 + r / GROUP, query = head * GROUP + r % GROUP,
              at = query * DIM + d;
    const bool valid = r / GROUP < tokens;
    float2 sum[PARTS];
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
        float* mine = s.scratch + (warp * 16 + row) * MERGE_STRIDE + column * 8;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float* o = out[i * 4 + j];
            *(float2*)(mine + 2 * j) = make_float2(o[0] * share[0], o[1] * share[0]);
            *(float2*)(mine + 8 * MERGE_STRIDE + 2 * j) = make_float2(o[2] * share[1], o[3] * share[1]);
        }
        consumers_meet();
        sum[i] = make_float2(0, 0);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float2 part = *(const float2*)(s.scratch + (w * 16 + r) * MERGE_STRIDE + d);
            sum[i].x += part.x, sum[i].y += part.y;
        }
        consumers_meet();
    }
    if (valid && split > 0) {
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            store8(&own_buffers.partial[split][to][at + i * 32],
                   make_uint2(__float_as_uint(sum[i].x), __float_as_uint(sum[i].y)));
            store8(&other.partial[split][to][at + i * 32], make_uint2(EMPTY, EMPTY));
        }
        if (d == 0) {
            const u32 lse = __float_as_uint(s.lse[r]);
            store8(own_buffers.stats[split][to][query], make_uint2(lse, lse));
            store8(other.stats[split][to][query], make_uint2(EMPTY, EMPTY));
        }
    } else if (valid) {  // the first split folds the others into its own, some at a time
        constexpr int SOME = 3;
        float top = s.lse[r], weight = 1;
#pragma unroll 1
        for (int first = 1; first < s.splits; first += SOME) {
            uint2 v[SOME][PARTS], lse[SOME];
            for (u32 polls = 0, highest = EMPTY; highest == EMPTY; poll(polls)) {
                highest = 0;
#pragma unroll
                for (int k = 0; k < SOME; ++k) {
                    const int from = min(first + k, s.splits - 1);
                    lse[k] = load8(own_buffers.stats[from][to][query]);
#pragma unroll
                    for (int i = 0; i < PARTS; ++i) v[k][i] = load8(&own_buffers.partial[from][to][at + i * 32]);
                }
#pragma unroll
                for (int k = 0; k < SOME; ++k) {
                    highest = max(highest, lse[k].x);
#pragma unroll
                    for (int i = 0; i < PARTS; ++i) highest = max(highest, max(v[k][i].x, v[k][i].y));
                }
            }
#pragma unroll
            for (int k = 0; k < SOME; ++k) {
                if (first + k >= s.splits) break;
                const float l = __uint_as_float(lse[k].x), higher = fmaxf(top, l), keep = exp2_(top - higher),
                            w = exp2_(l - higher);
#pragma unroll
                for (int i = 0; i < PARTS; ++i) {
                    sum[i].x = sum[i].x * keep + w * __uint_as_float(v[k][i].x);
                    sum[i].y = sum[i].y * keep + w * __uint_as_float(v[k][i].y);
                }
                weight = weight * keep + w, top = higher;
            }
        }
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            store4(&own_buffers.attention[to][at + i * 32], pack(sum[i].x / weight, sum[i].y / weight));
            store4(&other.attention[to][at + i * 32], EMPTY);
        }
    }
    // Keys and values of this tile's own tokens are kept.
#pragma unroll 1
    for (int token = warp; own && token < tokens; token += WARPS) {
        const int slot = s.slots[token0 + token];
        if (slot < 0 || lane >= DIM / 8) continue;
        const u64 to = (u64)slot * (KV_HEADS * DIM) + head_at + lane * 8;
        *(uint4*)(layer.k_cache + to) = *(const uint4*)&s.k[token0 + token - key_row0][lane * 8];
        *(uint4*)(layer.v_cache + to) = *(const uint4*)&s.v[token0 + token - key_row0][lane * 8];
    }
    // The next layer's keys and values are brought to the L2.
    if (known && layer_index + 1 < LAYERS)
#pragma unroll 1
        for (int i = t; i < 2 * (end - begin); i += CONSUMERS) {
            const Layer& next = s.layers[layer_index + 1];
            const bf16* at = (i & 1 ? next.v_cache : next.k_cache) + (u64)s.places[i / 2] * (KV_HEADS * DIM) + head_at;
            prefetch_to_l2(at);
            if (DIM > 64) prefetch_to_l2(at + 64);
        }
    consumers_meet();
}
