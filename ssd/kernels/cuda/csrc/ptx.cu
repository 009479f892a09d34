// What the kernels need of the PTX instruction set, sm_90 and later. Tests put plain C++ in its place.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short bf16;

extern __shared__ __align__(1024) unsigned char memory[];

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// threadIdx.x through an empty `asm volatile`: the compiler takes it for a new number at each call, so addresses that
// it derives from it do not stay in registers from one phase of the kernel to the next.
__device__ __forceinline__ int thread() {
    int t = threadIdx.x;
    asm volatile("" : "+r"(t));
    return t;
}

// A number through an empty `asm volatile`: the compiler keeps it in a register instead of computing it again.
__device__ __forceinline__ u32 kept(u32 v) {
    asm volatile("" : "+r"(v));
    return v;
}

__device__ __forceinline__ u32 pack(float a, float b) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(b), "f"(a));
    return d;
}
__device__ __forceinline__ u32 times2(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
// a b + c
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
// Two numbers as float16; those of a pair of bfloat16, up to the largest float16.
__device__ __forceinline__ u32 pack16(float a, float b) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(b), "f"(a));
    return d;
}
__device__ __forceinline__ u32 limited16(u32 pair) {
    const float a = __uint_as_float(pair << 16), b = __uint_as_float(pair & 0xFFFF0000u), most = 65504.0f;
    return pack16(fminf(fmaxf(a, -most), most), fminf(fmaxf(b, -most), most));
}
// Two of four e4m3 numbers, the lower (0) or the upper ones (1), as float16.
template <int half>
__device__ __forceinline__ u32 halves(u32 v) {
    u32 d;
    if (half)
        asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %1;\ncvt.rn.f16x2.e4m3x2 %0, b;\n}" : "=r"(d) : "r"(v));
    else
        asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %1;\ncvt.rn.f16x2.e4m3x2 %0, a;\n}" : "=r"(d) : "r"(v));
    return d;
}
// One of two float16 numbers.
template <int half>
__device__ __forceinline__ float of_half(u32 pair) {
    float d;
    if (half)
        asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %1;\ncvt.f32.f16 %0, b;\n}" : "=f"(d) : "r"(pair));
    else
        asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %1;\ncvt.f32.f16 %0, a;\n}" : "=f"(d) : "r"(pair));
    return d;
}
// Four of the eight bytes of a (0 to 3) and b (4 to 7), the first in the last digit of `which`.
template <u32 which>
__device__ __forceinline__ u32 bytes(u32 a, u32 b) {
    u32 d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "n"(which));
    return d;
}
// a & mask | bits, in one instruction: that needs one of them in a register.
__device__ __forceinline__ u32 masked(u32 a, u32 mask, u32 bits) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
    return d;
}
// The lower (0) or the upper (1) number of a pair as both. (`mov`: products read it so, without an instruction.)
template <int half>
__device__ __forceinline__ u32 twice(u32 pair) {
    u32 d;
    if (half)
        asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %1;\nmov.b32 %0, {b, b};\n}" : "=r"(d) : "r"(pair));
    else
        asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %1;\nmov.b32 %0, {a, a};\n}" : "=r"(d) : "r"(pair));
    return d;
}
// a where `mask` has ones, else b.
__device__ __forceinline__ u32 selected(u32 a, u32 b, u32 mask) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(d) : "r"(a), "r"(b), "r"(mask));
    return d;
}
// a / b, rounded as Triton does.
__device__ __forceinline__ float divided(float a, float b) {
    float d;
    asm("div.full.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}
__device__ __forceinline__ float exp2_(float a) {
    float d;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(a));
    return d;
}

// Other blocks write these meanwhile: they are read from the L2.
__device__ __forceinline__ uint4 load16(const void* p) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}
__device__ __forceinline__ uint2 load8(const void* p) {
    uint2 v;
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
__device__ __forceinline__ bf16 load2(const bf16* p) {
    bf16 v;
    asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}
__device__ __forceinline__ void store8(void* p, uint2 v) {
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1,%2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}
__device__ __forceinline__ u32 load4(const void* p) {
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
// Likewise; what was written before the number was (`add_in_order`) is seen from then on.
__device__ __forceinline__ int load4_in_order(const int* p) {
    int v;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void store4(void* p, u32 v) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void store16(void* p, uint4 v) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
// Adds to a number, and returns what it was. Others that find the sum see what this thread has written, or knows to be
// written, and it sees what they had written. (A fence before and one after would wait for the memory twice.)
__device__ __forceinline__ int add_in_order(int* p, int v) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(v) : "memory");
    return before;
}
// Reads 16 bytes if `wanted`; v is left as it is otherwise.
__device__ __forceinline__ void load16_if(bool wanted, const void* p, uint4& v) {
    asm volatile("{\n.reg .pred q;\nsetp.ne.u32 q, %5, 0;\n@q ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];\n}"
                 : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
                 : "l"(p), "r"((u32)wanted));
}
__device__ __forceinline__ u32 shared1(u32 at) {
    u32 v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}
__device__ __forceinline__ u32 shared2(u32 at) {
    unsigned short v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at));
    return v;
}
__device__ __forceinline__ u32 shared4(u32 at) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}
__device__ __forceinline__ uint2 shared8(u32 at) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
    return v;
}
__device__ __forceinline__ float shared_float(u32 at) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at));
    return v;
}
__device__ __forceinline__ uint4 shared16(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}

__device__ __forceinline__ void shared_store4(u32 at, u32 v) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}
__device__ __forceinline__ void shared_store8(u32 at, uint2 v) {
    asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(at), "r"(v.x), "r"(v.y) : "memory");
}
__device__ __forceinline__ void shared_store16(u32 at, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// Four matrices of 8 x 8 numbers of 16 bits: lane i has the address of row i % 8 of matrix i / 8, and gets numbers
// i % 4 * 2 and the next of row i / 4 of each.
__device__ __forceinline__ uint4 shared_matrices(u32 at) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at));
    return v;
}

// d += a b: a is 16 x 16 by rows, b 16 x 8 by columns.
__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Likewise of float16.
__device__ __forceinline__ void mma16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Transposes 8 x 8 numbers of 16 bits, two per thread.
__device__ __forceinline__ u32 transposed(u32 v) {
    u32 d;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(v));
    return d;
}

__device__ __forceinline__ void mbarrier_init(u64* b, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(count));
}
__device__ __forceinline__ bool mbarrier_passed(u64* b, u32 parity) {
    u32 done;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(shared_address(b)), "r"(parity)
                 : "memory");
    return done;
}
__device__ __forceinline__ void mbarrier_arrive(u64* b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
// (A branch would end the batches of `wgmma` that run.)
__device__ __forceinline__ void mbarrier_arrive_if(bool wanted, u64* b) {
    asm volatile("{\n.reg .pred q;\nsetp.ne.b32 q, %1, 0;\n@q mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(
                     shared_address(b)),
                 "r"((int)wanted)
                 : "memory");
}
__device__ __forceinline__ void mbarrier_expect(u64* b, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes)
                 : "memory");
}
// What follows with `_if` is called by whole warps, where `wanted` is true for one lane: behind a branch, addresses
// would have to be made uniform one by one, which takes hundreds of cycles.
__device__ __forceinline__ void mbarrier_expect_if(bool wanted, u64* b, u32 bytes) {
    asm volatile(
        "{\n.reg .pred q;\nsetp.ne.b32 q, %2, 0;\n@q mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n}" ::"r"(
            shared_address(b)),
        "r"(bytes), "r"((int)wanted)
        : "memory");
}
__device__ __forceinline__ void mbarriers_are_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// An L2 policy: these lines are evicted first, as weights are read once.
__device__ __forceinline__ u64 evict_first() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// Copies to shared memory; the bytes are counted by `barrier`.
__device__ __forceinline__ void copy_to_shared(void* to, const void* from, u32 bytes, u64* barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}

__device__ __forceinline__ void copy_to_shared_if(bool wanted, void* to, const void* from, u32 bytes, u64* barrier,
                                                  u64 policy) {
    asm volatile(
        "{\n.reg .pred q;\nsetp.ne.b32 q, %5, 0;\n"
        "@q cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], "
        "%4;\n}" ::"r"(shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy), "r"((int)wanted)
        : "memory");
}
// Copies 16 bytes asynchronously if `wanted` (cp.async); `arrive_when_copied` arrives at a barrier when all such copies
// of the thread have completed.
__device__ __forceinline__ void copy16_if(bool wanted, u32 to, const void* from) {
    asm volatile("{\n.reg .pred q;\nsetp.ne.b32 q, %2, 0;\n@q cp.async.cg.shared.global [%0], [%1], 16;\n}" ::"r"(to),
                 "l"(from), "r"((int)wanted)
                 : "memory");
}
__device__ __forceinline__ void arrive_when_copied(u64* b) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(b)) : "memory");
}

// A CUtensorMap of three dimensions.
struct alignas(64) TensorMap {
    u64 of[16];
};
__device__ __forceinline__ void prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// Copies the box that begins with row `row` of part `part`; `barrier` counts its bytes.
__device__ __forceinline__ void copy_box_if(bool wanted, void* to, const TensorMap& map, int row, int part,
                                            u64* barrier) {
    asm volatile(
        "{\n.reg .pred q;\nsetp.ne.b32 q, %6, 0;\n"
        "@q cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
        "[%5];\n}" ::"r"(shared_address(to)),
        "l"(&map), "r"(0), "r"(row), "r"(part), "r"(shared_address(barrier)), "r"((int)wanted)
        : "memory");
}

// `wgmma` by four warps: d += a b, or d = a b without `add`. Warp i holds rows 16 i to 16 i + 15 of a and d in
// registers, laid out as for `mma`; b is in shared memory, by columns. It is asynchronous: registers of a and d must
// not be touched between `wgmma_fence` and the wait for their batch (`wgmma_commit` ends a batch).
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits for all batches but the last `pending`; d: results of those that are waited for.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
template <int pending, int n>
__device__ __forceinline__ void wgmma_wait(float (&d)[n]) {
    wgmma_wait<pending>();
#pragma unroll
    for (int i = 0; i < n; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
// Of b: rows of 64 numbers of 16 bits, those of 8 rows in 1024 bytes, swizzled as by a tensor map (128B).
__device__ __forceinline__ u64 rows_descriptor(u32 at) {
    return (u64)(at >> 4 & 0x3FFF) | 1ull << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}
#define SUMS4(how, i) how(d[i]), how(d[i + 1]), how(d[i + 2]), how(d[i + 3])
#define SUMS8(how, i) SUMS4(how, i), SUMS4(how, i + 4)
#define SUMS12(how, i) SUMS8(how, i), SUMS4(how, i + 8)
#define SUMS16(how, i) SUMS8(how, i), SUMS8(how, i + 8)
#define SUMS32(how, i) SUMS16(how, i), SUMS16(how, i + 16)
#define WGMMA(count, columns, list, operands)                                                              \
    __device__ __forceinline__ void wgmma(float (&d)[count], const u32(&a)[4], u64 b) {                   \
        asm volatile("{\n.reg .pred q;\nsetp.ne.b32 q, 1, 0;\nwgmma.mma_async.sync.aligned.m64n" #columns \
                     "k16.f32.bf16.bf16 {" list "}, " operands ", q, 1, 1, 0;\n}"                         \
                     : SUMS##count("+f", 0)                                                               \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                               \
    }
// Likewise with a in shared memory by rows, as b is. What threads have written there is seen after `wgmma_sees`.
__device__ __forceinline__ void wgmma_sees() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#define WGMMA_SHARED(count, columns, list, operands)                                                      \
    __device__ __forceinline__ void wgmma(float (&d)[count], u64 a, u64 b) {                              \
        asm volatile("{\n.reg .pred q;\nsetp.ne.b32 q, 1, 0;\nwgmma.mma_async.sync.aligned.m64n" #columns \
                     "k16.f32.bf16.bf16 {" list "}, " operands ", q, 1, 1, 0, 0;\n}"                      \
                     : SUMS##count("+f", 0)                                                               \
                     : "l"(a), "l"(b));                                                                   \
    }
// Likewise with a transposed: rows of 64 of its columns, as a box of a tensor map has them.
#define WGMMA_TURNED(count, columns, list, operands)                                                      \
    __device__ __forceinline__ void wgmma_turned(float (&d)[count], u64 a, u64 b) {                       \
        asm volatile("{\n.reg .pred q;\nsetp.ne.b32 q, 1, 0;\nwgmma.mma_async.sync.aligned.m64n" #columns \
                     "k16.f32.bf16.bf16 {" list "}, " operands ", q, 1, 1, 1, 0;\n}"                      \
                     : SUMS##count("+f", 0)                                                               \
                     : "l"(a), "l"(b));                                                                   \
    }
// Likewise of e4m3 numbers, 32 at a time, with a in shared memory by rows.
#define WGMMA8(count, columns, list, operands)                                                            \
    __device__ __forceinline__ void wgmma8(float (&d)[count], u64 a, u64 b) {                             \
        asm volatile("{\n.reg .pred q;\nsetp.ne.b32 q, 1, 0;\nwgmma.mma_async.sync.aligned.m64n" #columns \
                     "k32.f32.e4m3.e4m3 {" list "}, " operands ", q, 1, 1;\n}"                            \
                     : SUMS##count("+f", 0)                                                               \
                     : "l"(a), "l"(b));                                                                   \
    }
#define LIST4 "%0,%1,%2,%3"
#define LIST8 LIST4 ",%4,%5,%6,%7"
#define LIST12 LIST8 ",%8,%9,%10,%11"
#define LIST16 LIST8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define LIST32 LIST16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
WGMMA(4, 8, LIST4, "{%4,%5,%6,%7}, %8")
WGMMA(8, 16, LIST8, "{%8,%9,%10,%11}, %12")
WGMMA(12, 24, LIST12, "{%12,%13,%14,%15}, %16")
WGMMA(16, 32, LIST16, "{%16,%17,%18,%19}, %20")
WGMMA(32, 64, LIST32, "{%32,%33,%34,%35}, %36")
WGMMA_SHARED(4, 8, LIST4, "%4, %5")
WGMMA_SHARED(8, 16, LIST8, "%8, %9")
WGMMA_SHARED(12, 24, LIST12, "%12, %13")
WGMMA_SHARED(16, 32, LIST16, "%16, %17")
WGMMA_SHARED(32, 64, LIST32, "%32, %33")
WGMMA_TURNED(4, 8, LIST4, "%4, %5")
WGMMA_TURNED(8, 16, LIST8, "%8, %9")
WGMMA_TURNED(12, 24, LIST12, "%12, %13")
WGMMA_TURNED(16, 32, LIST16, "%16, %17")
WGMMA8(4, 8, LIST4, "%4, %5")
WGMMA8(8, 16, LIST8, "%8, %9")
WGMMA8(16, 32, LIST16, "%16, %17")
WGMMA8(32, 64, LIST32, "%32, %33")
__device__ __forceinline__ void prefetch_to_l2(const void* line) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}

// Registers of a thread from here on; four warps call it that begin at a multiple of four.
template <int COUNT>
__device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// What is in memory, not in registers.
template <typename T>
__device__ __forceinline__ T& in_memory(T& v) {
    T* at = &v;
    asm volatile("" : "+l"(at)::"memory");
    return *at;
}

// COUNT threads of the block wait for each other.
template <int COUNT, int BARRIER = 1>
__device__ __forceinline__ void meet() {
    asm volatile("bar.sync %0, %1;" ::"n"(BARRIER), "n"(COUNT) : "memory");
}
__device__ __forceinline__ void meet(int count) { asm volatile("bar.sync 1, %0;" ::"r"(count) : "memory"); }
// Of a kernel that is launched early (`launch.py`).
__device__ __forceinline__ void wait_for_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_later_kernels_begin() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void pause() {}  // between two polls
__device__ __forceinline__ void give_up() { asm volatile("trap;"); }
