// `ssd/kernels/cuda/csrc/ptx.cu` in plain C++: every CUDA thread is a fiber of one thread, and fibers take turns at
// random. So the kernel's logic runs on a CPU: tiles, ring, waiting, emptying, attention. Not emulated: the order in
// which a GPU's memory shows writes to other blocks, and the time that anything takes.

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <vector>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short bf16;

#define __device__
#define __host__
#define __global__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define step emulated_step  // the C library has a `step`, too

struct uint2 {
    u32 x, y;
};
struct uint4 {
    u32 x, y, z, w;
};
struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
static uint2 make_uint2(u32 a, u32 b) { return {a, b}; }
static uint4 make_uint4(u32 a, u32 b, u32 c, u32 d) { return {a, b, c, d}; }
static float2 make_float2(float a, float b) { return {a, b}; }
static float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }

struct Gathering {
    int arrived = 0;
    u32 times = 0;
};
struct Barrier {
    u32 count = 0, pending = 0, phase = 0;
    long bytes = 0;
    void check() {
        if (pending == 0 && bytes == 0) ++phase, pending = count;
    }
};
struct Warp {
    Gathering gathering;
    u32 values[2][32][6];
};
struct Warpgroup {
    Gathering gathering;
    u32 values[2][128][4];
};
struct Block {
    u32 number;
    std::vector<unsigned char> shared;
    std::map<u64*, Barrier> barriers;
    Gathering some[3], all;
    std::vector<Warp> warps;
    std::vector<Warpgroup> warpgroups;
    std::vector<std::function<void()>> copies;  // under way; they end in any order
};
struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    Block* block;
    u32 number;
    bool ended;
};
static Fiber* fiber;
static ucontext_t scheduler;
static struct {
    u32 x;
} gridDim, blockDim;
static struct {
    bool failed;
} emulator;

struct Number {
    u32 x;
};
#define threadIdx (Number{fiber->number})
#define blockIdx (Number{fiber->block->number})
#define memory (fiber->block->shared.data())

static void yield() { swapcontext(&fiber->context, &scheduler); }
static void gather(Gathering& g, int count) {
    const u32 times = g.times;
    if (++g.arrived == count)
        g.arrived = 0, ++g.times;
    else
        while (g.times == times) yield();
}
// Values of all lanes of the warp.
static u32 (*exchanged(const u32* values, int count))[6] {
    Warp& warp = fiber->block->warps[fiber->number / 32];
    auto& to = warp.values[warp.gathering.times & 1];
    memcpy(to[fiber->number % 32], values, count * sizeof(u32));
    gather(warp.gathering, 32);
    return to;
}
static void __syncwarp() { gather(fiber->block->warps[fiber->number / 32].gathering, 32); }
static void __syncthreads() { gather(fiber->block->all, blockDim.x); }
static void __threadfence() {}
template <int COUNT, int BARRIER = 1>
static void meet() {
    gather(fiber->block->some[BARRIER], COUNT);
}
static void meet(int count) { gather(fiber->block->some[1], count); }
template <typename T>
static T& in_memory(T& v) {
    return v;
}
static void wait_for_earlier_kernels() {}
static void let_later_kernels_begin() {}
static void pause() { yield(); }
static void give_up() {
    emulator.failed = true;
    for (;;) yield();
}
template <typename T>
static T __shfl_xor_sync(u32, T value, int distance) {
    u32 bits;
    memcpy(&bits, &value, 4);
    memcpy(&value, exchanged(&bits, 1)[(fiber->number % 32) ^ distance], 4);
    return value;
}

template <typename T>
static T __shfl_up_sync(u32, T value, int distance) {
    const int lane = fiber->number % 32;
    u32 bits;
    memcpy(&bits, &value, 4);
    memcpy(&value, exchanged(&bits, 1)[lane < distance ? lane : lane - distance], 4);
    return value;
}

template <typename T>
static T __shfl_sync(u32, T value, int lane) {
    u32 bits;
    memcpy(&bits, &value, 4);
    memcpy(&value, exchanged(&bits, 1)[lane], 4);
    return value;
}

static u32 __ballot_sync(u32, bool value) {
    const u32 own = value;
    const auto lanes = exchanged(&own, 1);
    u32 bits = 0;
    for (int i = 0; i < 32; ++i) bits |= lanes[i][0] << i;
    return bits;
}

static float __uint_as_float(u32 v) {
    float f;
    memcpy(&f, &v, 4);
    return f;
}
static u32 __float_as_uint(float f) {
    u32 v;
    memcpy(&v, &f, 4);
    return v;
}
static float __int_as_float(int v) { return __uint_as_float(v); }
#define __expf expf
static float exp2_(float a) { return exp2f(a); }
static float rsqrtf(float a) { return 1 / sqrtf(a); }
static int __clz(int v) { return v ? __builtin_clz(v) : 32; }
static int max(int a, int b) { return a > b ? a : b; }
static u32 max(u32 a, u32 b) { return a > b ? a : b; }
static int min(int a, int b) { return a < b ? a : b; }
template <typename T>
static T __ldg(const T* p) {
    return *p;
}
static float half_of(u32 pair, int i) { return __uint_as_float(i ? pair & 0xffff0000u : pair << 16); }
static u32 rounded(float f) {
    const u32 v = __float_as_uint(f);
    return (v & 0x7fffffff) > 0x7f800000 ? 0x7fff : (v + 0x7fff + (v >> 16 & 1)) >> 16;
}
static u32 pack(float a, float b) { return rounded(a) | rounded(b) << 16; }
static u32 times2(u32 a, u32 b) { return pack(half_of(a, 0) * half_of(b, 0), half_of(a, 1) * half_of(b, 1)); }

static u32 fma2(u32 a, u32 b, u32 c) {
    return pack(fmaf(half_of(a, 0), half_of(b, 0), half_of(c, 0)), fmaf(half_of(a, 1), half_of(b, 1), half_of(c, 1)));
}
// Numbers of float16, not below the smallest normal one.
static float of16(u32 v) {
    const int exponent = v >> 10 & 31, fraction = v & 1023;
    const float size = exponent ? ldexpf(1024 + fraction, exponent - 25) : ldexpf(fraction, -24);
    return v & 0x8000 ? -size : size;
}
static u32 to16(float f) {
    const float size = fabsf(f), unit = size < 0x1p-14f ? 0x1p-24f : ldexpf(1, ilogbf(size) - 10);
    const float rounded = nearbyintf(size / unit) * unit;
    const u32 sign = __float_as_uint(f) >> 16 & 0x8000;
    if (rounded < 0x1p-14f) return sign | (u32)(rounded * 0x1p24f);
    const int exponent = ilogbf(rounded);
    return sign | (u32)((exponent + 15) << 10 | ((u32)ldexpf(rounded, 10 - exponent) & 1023));
}
static u32 pack16(float a, float b) { return to16(a) | to16(b) << 16; }
static u32 limited16(u32 pair) {
    const auto limited = [](float f) { return fminf(fmaxf(f, -65504), 65504); };
    return pack16(limited(half_of(pair, 0)), limited(half_of(pair, 1)));
}
static float e4m3(unsigned char v) { return __uint_as_float((v & 0x80) << 24 | (v & 0x7f) << 20) * 0x1p120f; }
template <int half>
static u32 halves(u32 v) {
    return pack16(e4m3(v >> 16 * half), e4m3(v >> (16 * half + 8)));
}
template <u32 which>
static u32 bytes(u32 a, u32 b) {
    const u64 all = (u64)b << 32 | a;
    u32 d = 0;
    for (int i = 0; i < 4; ++i) d |= (u32)(all >> ((which >> 4 * i & 7) * 8) & 255) << 8 * i;
    return d;
}
static u32 masked(u32 a, u32 mask, u32 bits) { return (a & mask) | bits; }
template <int half>
static u32 twice(u32 pair) {
    return half ? (pair & 0xffff0000u) | pair >> 16 : pair << 16 | (pair & 0xffff);
}
static u32 selected(u32 a, u32 b, u32 mask) { return (a & mask) | (b & ~mask); }
static float divided(float a, float b) { return a / b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }

static u32 kept(u32 v) { return v; }
template <int COUNT>
static void more_registers() {}
template <int COUNT>
static void fewer_registers() {}
static int thread() { return threadIdx.x; }
static u32 shared_address(const void* p) { return (const unsigned char*)p - memory; }
static u32 shared1(u32 at) { return memory[at]; }
static u32 shared2(u32 at) { return *(const unsigned short*)(memory + at); }
static u32 shared4(u32 at) { return *(const u32*)(memory + at); }
static uint2 shared8(u32 at) { return *(const uint2*)(memory + at); }
static float shared_float(u32 at) { return *(const float*)(memory + at); }
static uint4 shared16(u32 at) { return *(const uint4*)(memory + at); }
static void shared_store4(u32 at, u32 v) { memcpy(memory + at, &v, 4); }
static void shared_store8(u32 at, uint2 v) { *(uint2*)(memory + at) = v; }
static void shared_store16(u32 at, uint4 v) { *(uint4*)(memory + at) = v; }
static uint4 shared_matrices(u32 at) {
    const auto lanes = exchanged(&at, 1);
    const int lane = fiber->number % 32;
    u32 v[4];
    for (int i = 0; i < 4; ++i) memcpy(&v[i], memory + lanes[i * 8 + lane / 4][0] + lane % 4 * 4, 4);
    return {v[0], v[1], v[2], v[3]};
}
static uint4 load16(const void* p) { return *(const uint4*)p; }
static uint2 load8(const void* p) { return *(const uint2*)p; }
static u32 load4(const void* p) { return *(const u32*)p; }
static bf16 load2(const bf16* p) { return *p; }
static void load16_if(bool wanted, const void* p, uint4& v) {
    if (wanted) v = load16(p);
}
template <int half>
static float of_half(u32 pair) {
    return of16(pair >> 16 * half & 0xffff);
}
static void store8(void* p, uint2 v) { *(uint2*)p = v; }
static void store16(void* p, uint4 v) { *(uint4*)p = v; }
static int atomicAdd(int* p, int v) {
    const int before = *p;
    *p += v;
    return before;
}
static int load4_in_order(const int* p) { return *p; }
static int add_in_order(int* p, int v) { return atomicAdd(p, v); }
static void store4(void* p, u32 v) { *(u32*)p = v; }

template <typename Number>
static void mma_of(float (&d)[4], const u32 (&own)[6], Number number) {
    const auto lanes = exchanged(own, 6);
    const int lane = fiber->number % 32;
    for (int e = 0; e < 4; ++e) {
        const int row = lane / 4 + 8 * (e / 2), column = lane % 4 * 2 + e % 2;
        float sum = 0;
        for (int k = 0; k < 16; ++k) {
            const u32 a = lanes[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2],
                      b = lanes[column * 4 + k % 8 / 2][4 + k / 8];
            sum += number(a, k % 2) * number(b, k % 2);
        }
        d[e] += sum;
    }
}
static void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    mma_of(d, {a0, a1, a2, a3, b0, b1}, half_of);
}
static void mma16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    mma_of(d, {a[0], a[1], a[2], a[3], b[0], b[1]}, [](u32 pair, int i) { return of16(pair >> 16 * i & 0xffff); });
}
static u32 transposed(u32 v) {
    const auto lanes = exchanged(&v, 1);
    const int row = fiber->number % 32 / 4, column = fiber->number % 4 * 2;
    const auto at = [&](int i) { return lanes[(column + i) * 4 + row / 2][0] >> (row % 2 * 16) & 0xffff; };
    return at(0) | at(1) << 16;
}

static void mbarrier_init(u64* b, u32 count) { fiber->block->barriers[b] = {count, count}; }
static bool mbarrier_passed(u64* b, u32 parity) { return (fiber->block->barriers[b].phase & 1) != parity; }
static void mbarrier_arrive(u64* b) {
    Barrier& barrier = fiber->block->barriers[b];
    --barrier.pending;
    barrier.check();
}
static void mbarrier_arrive_if(bool wanted, u64* b) {
    if (wanted) mbarrier_arrive(b);
}
static void mbarrier_expect(u64* b, u32 bytes) {
    fiber->block->barriers[b].bytes += bytes;
    mbarrier_arrive(b);
}
static void mbarrier_expect_if(bool wanted, u64* b, u32 bytes) {
    if (wanted) mbarrier_expect(b, bytes);
}
static void mbarriers_are_ready() {}
static u64 evict_first() { return 0; }
static void copy_to_shared(void* to, const void* from, u32 bytes, u64* b, u64) {
    Barrier& barrier = fiber->block->barriers[b];
    fiber->block->copies.push_back([=, &barrier] {
        memcpy(to, from, bytes);
        barrier.bytes -= bytes;
        barrier.check();
    });
}

static void copy_to_shared_if(bool wanted, void* to, const void* from, u32 bytes, u64* b, u64 policy) {
    if (wanted) copy_to_shared(to, from, bytes, b, policy);
}
static void copy16_if(bool wanted, u32 to, const void* from) {
    if (wanted) memcpy(memory + to, from, 16);
}
static void arrive_when_copied(u64* b) { mbarrier_arrive(b); }

// What `nvrtc.tensor_map` says, with the sizes of a box.
struct TensorMap {
    const bf16* at;
    long long rows, stride, width, parts, box_rows;
};
static void prefetch(const TensorMap&) {}
static u32 swizzled(u32 at) { return at ^ (at >> 7 & 7) << 4; }
static void copy_box_if(bool wanted, void* to, const TensorMap& map, int first_row, int first, u64* b) {
    if (!wanted) return;
    const u32 at = shared_address(to);
    if (at % 1024) give_up();
    Barrier& barrier = fiber->block->barriers[b];
    fiber->block->copies.push_back([=, &barrier, shared = memory] {
        for (int part = 0; part < map.parts; ++part)
            for (int row = 0; row < map.box_rows; ++row)
                for (int i = 0; i < 64; ++i) {
                    const bool there = first_row + row < map.rows && first + part < map.width;
                    const bf16 v = there ? map.at[(first_row + row) * map.stride + (first + part) * 64 + i] : 0;
                    *(bf16*)(shared + swizzled(at + (part * map.box_rows + row) * 128 + i * 2)) = v;
                }
        barrier.bytes -= map.parts * map.box_rows * 128;
        barrier.check();
    });
}

// Products are computed when they are issued.
static void wgmma_fence() {}
static void wgmma_commit() {}
template <int pending>
static void wgmma_wait() {}
template <int pending, int n>
static void wgmma_wait(float (&)[n]) {}
static u64 rows_descriptor(u32 at) { return at >> 4; }
template <int n>
static void wgmma(float (&d)[n], const u32 (&a)[4], u64 b) {
    Warpgroup& group = fiber->block->warpgroups[fiber->number / 128];
    auto& lanes = group.values[group.gathering.times & 1];
    memcpy(lanes[fiber->number % 128], a, sizeof a);
    gather(group.gathering, 128);
    const int lane = fiber->number % 32, warp = fiber->number % 128 - lane;
    for (int e = 0; e < n; ++e) {
        const int row = lane / 4 + 8 * (e % 4 / 2), column = e / 4 * 8 + lane % 4 * 2 + e % 2;
        float sum = 0;
        for (int k = 0; k < 16; ++k) {
            const u32 from = lanes[warp + row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
            const u32 to = (u32) * (const bf16*)(memory + swizzled((u32)b * 16 + column * 128 + k * 2)) << 16;
            sum += half_of(from, k % 2) * __uint_as_float(to);
        }
        d[e] += sum;
    }
}
static void wgmma_sees() {}
template <int n>
static void wgmma(float (&d)[n], u64 a, u64 b) {
    const int lane = fiber->number % 32, warp = fiber->number % 128 / 32;
    const auto at = [](u64 rows, int row, int k) {
        return __uint_as_float((u32) * (const bf16*)(memory + swizzled((u32)rows * 16 + row * 128 + k * 2)) << 16);
    };
    for (int e = 0; e < n; ++e) {
        const int row = warp * 16 + lane / 4 + 8 * (e % 4 / 2), column = e / 4 * 8 + lane % 4 * 2 + e % 2;
        float sum = 0;
        for (int k = 0; k < 16; ++k) sum += at(a, row, k) * at(b, column, k);
        d[e] += sum;
    }
}
template <int n>
static void wgmma_turned(float (&d)[n], u64 a, u64 b) {
    const int lane = fiber->number % 32, warp = fiber->number % 128 / 32;
    const auto at = [](u64 rows, int row, int k) {
        return __uint_as_float((u32) * (const bf16*)(memory + swizzled((u32)rows * 16 + row * 128 + k * 2)) << 16);
    };
    for (int e = 0; e < n; ++e) {
        const int row = warp * 16 + lane / 4 + 8 * (e % 4 / 2), column = e / 4 * 8 + lane % 4 * 2 + e % 2;
        float sum = 0;
        for (int k = 0; k < 16; ++k) sum += at(a, k, row) * at(b, column, k);
        d[e] += sum;
    }
}
template <int n>
static void wgmma8(float (&d)[n], u64 a, u64 b) {
    const int lane = fiber->number % 32, warp = fiber->number % 128 / 32;
    const auto at = [](u64 rows, int row, int k) { return e4m3(memory[swizzled((u32)rows * 16 + row * 128 + k)]); };
    for (int e = 0; e < n; ++e) {
        const int row = warp * 16 + lane / 4 + 8 * (e % 4 / 2), column = e / 4 * 8 + lane % 4 * 2 + e % 2;
        float sum = 0;
        for (int k = 0; k < 32; ++k) sum += at(a, row, k) * at(b, column, k);
        d[e] += sum;
    }
}
static void prefetch_to_l2(const void* line) { (void)*(const volatile char*)line; }
