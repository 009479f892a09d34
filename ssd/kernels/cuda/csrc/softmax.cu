// Shared by the attention kernels: items of work, and softmax statistics of a row, which are folded as `fold` of
// attention.py does. m: the largest score, l: the sum of weights.

constexpr int ITEM = 16;  // integers of an item (`_plan_kernel`)

#define MINUS_INF __uint_as_float(0xFF800000u)

__device__ __forceinline__ float safe_of(float m) { return m == MINUS_INF ? 0.0f : m; }
// Adds statistics to those of a row: the factors of its earlier results and of those that are added.
__device__ __forceinline__ float2 fold(float& m, float& l, float m_more, float l_more, float scale) {
    const float top = fmaxf(m, m_more), safe = safe_of(top);
    const float old = exp2_(__fmul_rn(__fsub_rn(m, safe), scale));
    const float more = exp2_(__fmul_rn(__fsub_rn(m_more, safe), scale));
    m = top, l = __fmaf_rn(l, old, __fmul_rn(l_more, more));
    return make_float2(old, more);
}
__device__ __forceinline__ float folded(float sum, float more, float old_factor, float factor) {
    return __fmaf_rn(sum, old_factor, __fmul_rn(more, factor));
}
